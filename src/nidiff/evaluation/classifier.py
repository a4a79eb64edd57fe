"""A small classifier of labelled images, to see whether samples can be recognised."""

import torch
from torch import Tensor

from nidiff.randomness import permutation


def train_classifier(images: Tensor, labels: Tensor, *, epochs: int = 60, seed: int = 0) -> torch.nn.Module:
    """A two-layer perceptron on the pixels [N, C, H, W], trained with AdamW and dropout; returns logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(images[0].numel(), 256),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(256, int(labels.max()) + 1),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for index in permutation(len(images), generator).split(64):
                loss = torch.nn.functional.cross_entropy(net(images[index]), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return net.eval()


@torch.no_grad()
def recognised(classifier: torch.nn.Module, images: Tensor, confidence: float = 0.9) -> float:
    """The share of images that the classifier names with a probability above ``confidence``."""
    return (classifier(images).softmax(1).amax(1) > confidence).double().mean().item()
