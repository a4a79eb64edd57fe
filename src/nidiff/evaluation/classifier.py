"""A small classifier of labelled images, to see whether samples can be recognised."""

from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.randomness import permutation

SEEN, EPOCHS = 400_000, 60  # images in training the classifier, and how often it sees one, at most


class Classifier(NamedTuple):
    """A small perceptron on the pixels, and the share of real images it was not trained on that it names correctly."""

    net: torch.nn.Module
    accuracy: float

    @torch.no_grad()
    def is_right(self, pixels: Tensor, classes: Tensor) -> Tensor:
        """For each of the uint8 images, whether it is given its class."""
        parts = [self.net(part / 127.5 - 1).argmax(1) for part in pixels.split(1024)]
        return torch.cat(parts) == classes


def fit_classifier(pixels: Tensor, classes: Tensor) -> Classifier:
    """Trained on four of five of the uint8 images; the fifth says how good it is."""
    is_test = torch.arange(len(pixels)) % 5 == 4
    epochs = max(1, min(EPOCHS, SEEN // len(pixels)))
    net = train_classifier(pixels[~is_test] / 127.5 - 1, classes[~is_test], epochs=epochs)
    fitted = Classifier(net, 1.0)
    return fitted._replace(accuracy=fitted.is_right(pixels[is_test], classes[is_test]).double().mean().item())


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
