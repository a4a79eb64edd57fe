"""How far generated data are from real ones: spectra, distributions of values, distances of features."""

from scipy.stats import wasserstein_distance
from torch import Tensor

import nidiff
from nidiff.data.dataset import quantise
from nidiff.evaluation.classifier import recognised, train_classifier
from nidiff.evaluation.features import compute_features, load_features, reference_features

Metrics = dict[str, float]


def spectrum(data: Tensor, axes: int, boundary: str) -> Tensor:
    """Mean power per rounded wavenumber of data [N, ..., *event], from 1 to what every direction has.

    On a square grid the corners are left out.
    """
    shape = tuple(data.shape[-axes:])
    found = nidiff.metrics.field_spectrum(data.reshape(-1, 1, *shape), boundary=boundary)
    last = shape[-1] // 2 if boundary == "periodic" else shape[-1] - 1
    return found.power.mean((0, 1))[(found.wavenumber >= 1) & (found.wavenumber <= last)]


def log_error(real: Tensor, generated: Tensor) -> float:
    """Root mean square over the wavenumbers of log10 of the ratio of two spectra."""
    return (generated / real).log10().square().mean().sqrt().item()


def kurtosis(values: Tensor) -> float:
    """Fourth moment over the squared second, of values about their mean: 3 for a Gaussian."""
    centred = values.double() - values.double().mean()
    return ((centred**4).mean() / (centred**2).mean() ** 2).item()


def distance(real: Tensor, generated: Tensor) -> float:
    """Wasserstein distance of two sets of numbers."""
    return float(wasserstein_distance(real.numpy(), generated.numpy()))


class Paths:
    """Metrics of signals [N, 1, L]. The upper modes are the upper three quarters; increments are of neighbours.

    The law is even, so the values are compared without their signs: else chance, which puts a few paths more in one
    well than in the other, hides everything.
    """

    def __init__(self, real: Tensor) -> None:
        self.real, self.spectrum = real, spectrum(real, 1, "reflecting")

    def __call__(self, generated: Tensor) -> Metrics:
        found = spectrum(generated, 1, "reflecting")
        upper = len(found) // 4
        steps = [data.diff(dim=-1).flatten() for data in (self.real, generated)]
        return {
            "spectrum": log_error(self.spectrum, found),
            "upper modes": (found / self.spectrum - 1)[upper:].abs().mean().item(),
            "W values": distance(self.real[:4000].flatten().abs(), generated.flatten().abs()),
            "W increments": distance(steps[0][:500_000], steps[1]) / steps[0].std().item(),
            "std": generated.std().item(),
        }


class Turbulence:
    """Metrics of fields [N, 1, H, W]; increments are of neighbours in a row."""

    def __init__(self, real: Tensor) -> None:
        self.real, self.spectrum = real, spectrum(real, 2, "periodic")

    def __call__(self, generated: Tensor) -> Metrics:
        increments = generated - generated.roll(1, -1)
        return {
            "spectrum": log_error(self.spectrum, spectrum(generated, 2, "periodic")),
            "W values": distance(self.real[:1000].flatten(), generated.flatten()),
            "kurtosis": kurtosis(increments),
            "std": generated.std().item(),
        }


class Digits:
    """Metrics of images in [−1, 1]: Fréchet distance, precision and recall of the pixels, and what is recognised."""

    def __init__(self, real: Tensor, labels: Tensor) -> None:
        self.real = real.flatten(1)
        self.spectrum = spectrum(real, 2, "reflecting")
        self.classifier = train_classifier(real, labels)

    def __call__(self, generated: Tensor) -> Metrics:
        shown = quantise(generated).float() / 127.5 - 1
        near = nidiff.metrics.precision_recall(self.real, shown.flatten(1))
        return {
            "FD": nidiff.metrics.frechet_distance(self.real, shown.flatten(1)),
            "precision": near.precision,
            "recall": near.recall,
            "recognised": recognised(self.classifier, shown),
            "spectrum": log_error(self.spectrum, spectrum(generated, 2, "reflecting")),
            "std": generated.std().item(),
        }


class Photographs:
    """Metrics of colour images in [−1, 1]: Fréchet distance of EfficientNet-lite0's features, against 1,000 images."""

    def __init__(self, real: Tensor) -> None:
        self.network = load_features("efficientnet-lite0")
        self.real = reference_features(quantise(real[:1000]), self.network, name="cifar10 at 16x16").features
        self.spectrum = spectrum(real[:10_000], 2, "reflecting")

    def __call__(self, generated: Tensor) -> Metrics:
        return {
            "FD": nidiff.metrics.frechet_distance(self.real, compute_features(self.network, quantise(generated))),
            "spectrum": log_error(self.spectrum, spectrum(generated, 2, "reflecting")),
            "std": generated.std().item(),
        }
