"""The metrics of one set of generated images, with their errors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.evaluation.features import FeatureNetwork
from nidiff.evaluation.frechet import frechet_to
from nidiff.evaluation.kernel_distance import kernel_distance
from nidiff.evaluation.precision_recall import precision_recall
from nidiff.evaluation.spectrum import radial_powers, spectrum_to
from nidiff.progress import progress_bar
from nidiff.randomness import random_index

SUBSET, SUBSETS = 1000, 100  # images in a subset of the kernel distance, at most, and how many subsets


class Sample(NamedTuple):
    """Images as uint8 [N, C, H, W], and their features [N, D]."""

    pixels: Tensor
    features: Tensor


class Measured(NamedTuple):
    value: float
    error: float | None


def measure(
    real: Sample, generated: Sample, network: FeatureNetwork, *, k: int = 3, bootstrap: int = 20, seed: int = 0
) -> dict[str, Measured]:
    """Every metric of ``generated`` against ``real``, by name, with its error.

    Of the Fréchet distance and the spectrum it is the standard deviation over ``bootstrap`` resamples of the generated
    images (0: none). A resample has images twice, which ruins distances to neighbours and the pairs of the kernel
    distance. So precision and recall, being shares, have √(p (1 − p) / N), which takes the manifolds as they are.
    The kernel distance has that of the jackknife: subsets of m of n images vary as √((n − m) / m) times the whole.
    """
    check_counts(len(real.features), len(generated.features), k)
    check_varied(real.features, "real")
    check_varied(generated.features, "generated")
    generator = torch.Generator().manual_seed(seed)
    fewest = min(len(real.features), len(generated.features))
    subset = min(SUBSET, fewest // 2)
    kernel = kernel_distance(real.features, generated.features, subset, SUBSETS, generator)
    spread = kernel.standard_error * SUBSETS**0.5
    with progress_bar("precision and recall", "pairs") as progress:
        precision, recall = precision_recall(real.features, generated.features, k, progress=progress)
    distance, spectrum = frechet_to(real.features), spectrum_to(real.pixels)
    return {
        network.label: _resampled(distance, generated.features, bootstrap, generator),
        network.kernel_label: Measured(kernel.value, spread * (subset / (fewest - subset)) ** 0.5),
        "precision": _share(precision, len(generated.features)),
        "recall": _share(recall, len(real.features)),
        "spectrum error": _resampled(spectrum, radial_powers(generated.pixels), bootstrap, generator),
    }


def check_varied(features: Tensor, name: str) -> None:
    if bool((features == features[0]).all()):
        raise InputError(f"the features of the {name} images are constant: give images that differ.")


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
    total, again = len(items), []
    with progress_bar("bootstrap", "resamples") as progress:
        for done in range(count):
            again.append(function(items[random_index(total, total, generator)]))
            progress(done + 1, count)
    spread = torch.tensor(again, dtype=torch.float64).std().item() if count > 1 else None
    return Measured(function(items), spread)


def _share(share: float, count: int) -> Measured:
    return Measured(share, (share * (1 - share) / count) ** 0.5)
