"""Images of classes: how far those of each class are from real ones, and whether a classifier gives the class asked
for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.evaluation.classifier import train_classifier
from nidiff.evaluation.metrics import METRICS, ImageSet, by_label, measure_each
from nidiff.evaluation.results import Measured

RIGHT = "right class"  # the share of images that the classifier gives the class asked for
SEEN, EPOCHS = 400_000, 60  # images in training the classifier, and how often it sees one, at most
FEWEST = 2  # images of a class, for a covariance


class Classifier(NamedTuple):
    """A small perceptron on the pixels, and the share of real images it was not trained on that it names correctly."""

    net: torch.nn.Module
    accuracy: float

    @torch.no_grad()
    def right(self, pixels: Tensor, classes: Tensor) -> Tensor:
        """For each of the uint8 images, whether it is given its class."""
        parts = [self.net(part / 127.5 - 1).argmax(1) for part in pixels.split(1024)]
        return torch.cat(parts) == classes


def fit_classifier(pixels: Tensor, classes: Tensor) -> Classifier:
    """Trained on four of five of the uint8 images; the fifth says how good it is."""
    is_test = torch.arange(len(pixels)) % 5 == 4
    epochs = max(1, min(EPOCHS, SEEN // len(pixels)))
    net = train_classifier(pixels[~is_test] / 127.5 - 1, classes[~is_test], epochs=epochs)
    fitted = Classifier(net, 1.0)
    return fitted._replace(accuracy=fitted.right(pixels[is_test], classes[is_test]).double().mean().item())


def check_classes(name: str, real: Tensor, asked: Sequence[int]) -> None:
    """Refuse classes of which there are hardly any real items."""
    for one in dict.fromkeys(asked):
        if (count := int((real == one).sum())) < FEWEST:
            text = f"classes has {one}, and {name} has {count} items of it"
            raise InputError(f"{text}: give data with more, or leave the class out.")


def class_metrics(
    real: ImageSet, real_classes: Tensor, made: ImageSet, classes: Tensor, right: Tensor, features: str, bootstrap: int
) -> dict[str, dict[str, Any]]:
    """The Fréchet distance of each class and the share of right ones, as ``details`` of a result hold them."""
    metrics = {name: one for name, one in by_label(features).items() if one is METRICS["frechet"]}
    found = {}
    for one in sorted({*classes.tolist()}):
        mine = (classes == one).nonzero()[:, 0]
        measured = {name: Measured(None, None) for name in metrics}
        if len(mine) >= FEWEST:
            theirs = real.resampled((real_classes == one).nonzero()[:, 0])
            measured = measure_each(metrics, theirs, made.resampled(mine), bootstrap=bootstrap)
        measured[RIGHT] = share(right[mine])
        found[str(one)] = {name: {"value": each.finite, "error": each.error} for name, each in measured.items()}
    return found


def share(right: Tensor) -> Measured:
    """The share of true ones with its binomial error."""
    value = right.double().mean().item()
    return Measured(value, (value * (1 - value) / len(right)) ** 0.5, higher_is_better=True)
