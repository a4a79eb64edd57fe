"""The metrics: how far generated images are from real ones, each with its error."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.evaluation.frechet import Moments, moments, moments_distance
from nidiff.evaluation.kernel_distance import kernel_distance
from nidiff.evaluation.precision_recall import PrecisionRecall, precision_recall
from nidiff.evaluation.results import Measured
from nidiff.evaluation.spectrum import powers_error, radial_powers
from nidiff.progress import progress_bar
from nidiff.randomness import random_index
from nidiff.recipe import check_whole

MOST_RESAMPLES = 10_000
SUBSET, SUBSETS = 1000, 100  # images in a subset of the kernel distance, at most, and how many subsets
Answer: TypeAlias = "float | tuple[float, float | None]"


@dataclass(eq=False)
class ImageSet:
    """Images and their features; what several metrics need is computed when it is first asked for, and once."""

    pixels: Tensor  # uint8 [N, C, H, W]
    features: Tensor  # [N, D]
    k: int = 3  # for precision and recall: the neighbour whose distance decides what is near an image
    _near: "dict[ImageSet, PrecisionRecall]" = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.features)

    def resampled(self, rows: Tensor) -> "ImageSet":
        """The images of ``rows``."""
        drawn = ImageSet(self.pixels[rows], self.features[rows], self.k)
        drawn.powers = self.powers[rows]
        return drawn

    @cached_property
    def moments(self) -> Moments:
        """Mean and covariance of the features."""
        return moments(self.features)

    @cached_property
    def powers(self) -> Tensor:
        """The radial power spectrum of each image, float64 [N, K]."""
        return radial_powers(self.pixels)

    def near(self, real: "ImageSet") -> PrecisionRecall:
        """Precision and recall of these images against ``real`` ones: two metrics from one pass over the pairs."""
        if real not in self._near:
            with progress_bar("precision and recall", "pairs") as progress:
                self._near[real] = precision_recall(real.features, self.features, self.k, progress=progress)
        return self._near[real]


@dataclass(frozen=True)
class Metric:
    """One number about generated images; an entry of `METRICS`.

    ``function(real, generated)`` is given two `ImageSet` (in `FIELD_METRICS`, two `FieldSet`) and returns the number,
    or the number and its error where that has a formula. A number alone gets the bootstrap error: its standard
    deviation over resamples of what was generated. Return (number, None) where neither makes sense.
    """

    function: Callable[[Any, Any], Answer]
    higher_is_better: bool = False
    label: Callable[[str], str] | None = None  # its name, from that of the network; default: its key in `METRICS`
    applies: Callable[[Any], bool] = lambda real: True  # whether it says anything about such data


def by_label(features: str) -> dict[str, Metric]:
    """The metrics by what they are called with the feature network of that name."""
    return {metric.label(features) if metric.label else key: metric for key, metric in METRICS.items()}


def measure(real: ImageSet, generated: ImageSet, features: str, *, bootstrap: int = 20) -> dict[str, Measured]:
    """Every metric by its label with the network ``features``; 0 resamples (``bootstrap``) give no bootstrap errors."""
    return measure_each(by_label(features), real, generated, bootstrap=bootstrap)


def measure_each(metrics: dict[str, Metric], real: Any, generated: Any, *, bootstrap: int) -> dict[str, Measured]:
    """The ``metrics`` of two `ImageSet`, or of what these metrics are of."""
    measured = {}
    for label, metric in metrics.items():
        found: Any = metric.function(real, generated)
        has_error = isinstance(found, tuple) and len(found) == 2
        value, error = found if has_error else (found, None)
        try:
            value, error = float(value), None if error is None else float(error)
        except (TypeError, ValueError, RuntimeError) as wrong:
            raise InputError(f"metric {label!r} returned {found!r}: return a number or (number, error).") from wrong
        if bootstrap and not has_error:
            error = _bootstrap_error(metric, real, generated, bootstrap)
        measured[label] = Measured(value, error, metric.higher_is_better)
    return measured


def check_bootstrap(bootstrap: int) -> None:
    """Refuse a number of resamples that gives no error."""
    if check_whole("bootstrap", bootstrap, 0, MOST_RESAMPLES) == 1:
        raise InputError("bootstrap=1 gives no error: use 2 resamples or more, or 0 for none.")


def _bootstrap_error(metric: Metric, real: Any, generated: Any, count: int) -> float:
    """The standard deviation over sets of as many generated images, drawn with replacement."""
    generator, total, values = torch.Generator().manual_seed(0), len(generated), []
    with progress_bar("bootstrap", "resamples") as progress:
        for done in range(1, count + 1):
            values.append(metric.function(real, generated.resampled(random_index(total, total, generator))))
            progress(done, count)
    return torch.tensor(values, dtype=torch.float64).std().item()


def _kernel(real: ImageSet, generated: ImageSet) -> Answer:
    """With the error of the jackknife: subsets of m of n images vary as √((n − m) / m) times the whole.

    A resample has images twice, which ruins the pairs of the kernel, and distances to neighbours too.
    """
    fewest = min(len(real), len(generated))
    subset, generator = min(SUBSET, fewest // 2), torch.Generator().manual_seed(0)
    found = kernel_distance(real.features, generated.features, subset, SUBSETS, generator)
    return found.value, found.standard_error * (SUBSETS * subset / (fewest - subset)) ** 0.5


def _share(share: float, count: int) -> Answer:
    """With its binomial error, which takes the neighbourhoods as they are."""
    return share, (share * (1 - share) / count) ** 0.5


METRICS: dict[str, Metric] = {
    # Only the distances of Inception's features may be called FID and KID.
    "frechet": Metric(
        lambda real, generated: moments_distance(real.moments, generated.moments),
        label=lambda features: "FID" if features == "inception" else f"FD-{features}",
    ),
    "kernel": Metric(_kernel, label=lambda features: "KID" if features == "inception" else f"KID-{features}"),
    "precision": Metric(
        lambda real, generated: _share(generated.near(real).precision, len(generated)), higher_is_better=True
    ),
    "recall": Metric(lambda real, generated: _share(generated.near(real).recall, len(real)), higher_is_better=True),
    "spectrum error": Metric(lambda real, generated: powers_error(real.powers, generated.powers)),
}
