"""The metrics of one set of generated images, with their errors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.distance import Progress
from nidiff.errors import InputError
from nidiff.evaluation.features import FeatureNetwork
from nidiff.evaluation.frechet import frechet_to
from nidiff.evaluation.kernel_distance import kernel_distance
from nidiff.evaluation.precision_recall import precision_recall
from nidiff.evaluation.spectrum import spectrum_to
from nidiff.randomness import random_index

SUBSET = 1000  # images in a subset of the kernel distance


class Sample(NamedTuple):
    """Images as uint8 [N, C, H, W], and their features [N, D]."""

    pixels: Tensor
    features: Tensor


class Measured(NamedTuple):
    value: float
    error: float | None


def measure(
    real: Sample,
    generated: Sample,
    network: FeatureNetwork,
    *,
    k: int = 3,
    bootstrap: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Measured]:
    """Every metric of ``generated`` against ``real``, by name.

    The errors say how much the numbers would vary with other generated images from the same model (for recall: with
    other real ones), the rest as it is. Of the Fréchet distance and the spectrum it is the standard deviation over
    ``bootstrap`` resamples (0: none). Precision and recall are shares, and with the manifolds as they are the bootstrap
    has the closed form √(p (1 − p) / N). Resampling the manifolds too, or the pairs of the kernel distance, would put
    points on top of each other: the latter has its own standard error, that of choosing subsets.
    """
    check_counts(len(real.features), len(generated.features), k)
    for name, features in (("real", real.features), ("generated", generated.features)):
        if bool((features == features[0]).all()):
            raise InputError(f"the features of the {name} images are constant: give images that differ.")
    generator = torch.Generator().manual_seed(seed)
    distance = frechet_to(real.features)
    subset = min(SUBSET, len(real.features), len(generated.features))
    kernel = kernel_distance(real.features, generated.features, subset_size=subset, generator=generator)
    spectrum = spectrum_to(real.pixels)
    precision, recall = precision_recall(real.features, generated.features, k, progress=progress)

    return {
        network.label: _resampled(distance, generated.features, bootstrap, generator),
        network.kernel_label: Measured(kernel.value, kernel.standard_error),
        "precision": _share(precision, len(generated.features)),
        "recall": _share(recall, len(real.features)),
        "spectrum error": _resampled(spectrum, generated.pixels, bootstrap, generator),
    }


def check_counts(num_real: int, num_generated: int, k: int) -> None:
    """Refuse before anything is drawn or computed what is too little for the k-th neighbour of each image."""
    if k < 1:
        raise InputError(f"k={k} is no neighbour: use 1 or more, such as 3.")
    for name, count in (("real", num_real), ("generated", num_generated)):
        if count < max(k + 1, 2):
            raise InputError(
                f"there are {count} {name} images, and k={k} needs k + 1 or more: give more, or a smaller k."
            )


def _resampled(function: Callable[[Tensor], float], items: Tensor, count: int, generator: torch.Generator) -> Measured:
    """The value, and its standard deviation over sets of as many items drawn with replacement."""
    total = len(items)
    again = [function(items[random_index(total, total, generator)]) for _ in range(count)]
    spread = torch.tensor(again, dtype=torch.float64).std().item() if count > 1 else None
    return Measured(function(items), spread)


def _share(share: float, count: int) -> Measured:
    return Measured(share, (share * (1 - share) / count) ** 0.5)
