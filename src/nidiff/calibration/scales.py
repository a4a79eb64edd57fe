"""Noise scales from data (paper, appendix E): the largest σ, the ratio of two σ, their number, and the Langevin ε.

The paper writes γ both for the power of the index and for the ratio of two noise scales. Here the second is ``ratio``;
it is above 1, and η = ε / σ_min² is the step in units of σ², so that a level σ moves by η σ².
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.calibration.distance import (
    batch_whitened_distance,
    check_images,
    max_whitened_distance,
    quantile_whitened_distance,
)
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import Schedule, smld_geometric
from nidiff.errors import InputError, one_of
from nidiff.progress import Progress
from nidiff.sampling.annealing import (
    cas_interval,
    check_langevin,
    check_ratio,
    langevin_epsilon,
    pixel_mean,
    variance_ratio,
)

CLASSIC_RATIO = 1.0375591319992028
"""5000^(1/231): the ratio of NCSNv2's 232 levels from 50 to 0.01 on CIFAR-10, which the paper keeps (E30)."""
DISTANCES = ("max", "batch", "quantile")


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found."""

    sigma_max: float
    """The whitened distance."""
    sigma_min: float
    ratio: float
    """σ of a level over σ of the next: (sigma_max / sigma_min)^(1 / (num_levels − 1)), at most ``target_ratio``."""
    num_levels: int
    epsilon: float
    """The Langevin ε: a step at level σ is ε σ² / sigma_min²."""
    eta: float
    """ε / sigma_min²."""
    steps_per_level: int
    preconditioned: bool
    variance_ratio: float
    """Mean variance of a pixel after the steps of one level, over its target."""
    cas_interval: tuple[float, float]
    """The η for which consistent annealed sampling exists."""
    cas_feasible: bool
    target_ratio: float
    """The ratio before the number of levels was rounded up."""
    distance: str
    """How sigma_max was measured: "max", "batch" or "quantile"."""
    pair: tuple[int, int] | None
    """The two images of the largest distance, where it is exact."""
    num_images: int
    dimension: int
    """The number of variables of one image, channels included."""

    def schedule(self) -> Schedule:
        return smld_geometric(self.num_levels, self.sigma_max, self.sigma_min)


def calibrate(
    images: Tensor,
    covariance: Covariance,
    *,
    sigma_min: float = 0.01,
    distance: str = "max",
    batch_size: int = 128,
    quantile: float = 0.99,
    ratio: str | float = "overlap",
    steps_per_level: int = 5,
    epsilon: float | None = None,
    preconditioned: bool = True,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Noise scales for ``images`` [N, ..., *event_shape] under the noise N(0, σ² Σ).

    Floats are taken as they are; uint8 becomes [-1, 1], the range in which nidiff trains. σ_max is the largest
    ``distance`` ‖Σ^-½(x_i − x_j)‖: over all pairs ("max"), over the pairs within the mini-batches of ``batch_size`` of
    one shuffled epoch ("batch", what the paper did: E29), or its ``quantile`` over the pairs of at most 2048 random
    images. ``ratio`` is "overlap" (`overlap_ratio`), "classic" (1.03756) or a number. ε minimises the variance after
    ``steps_per_level`` Langevin steps (`langevin_epsilon`), unless it is given.
    """
    one_of("distance", distance, DISTANCES)
    check_images(images, covariance)
    dimension = images[0].numel()
    target_ratio = _target_ratio(ratio, dimension)
    check_langevin(target_ratio, sigma_min, steps_per_level, epsilon)  # before the long part
    pair = None
    if distance == "max":
        sigma_max, pair = max_whitened_distance(images, covariance, progress=progress)
    elif distance == "batch":
        sigma_max = batch_whitened_distance(
            images, covariance, batch_size=batch_size, generator=generator, progress=progress
        )
    else:
        sigma_max = quantile_whitened_distance(images, covariance, quantile=quantile, generator=generator)
    if sigma_min >= sigma_max:
        raise InputError(
            f"sigma_min={sigma_min} is not below sigma_max={sigma_max:.4g}, the distance of the images: lower it."
        )
    levels = num_levels(sigma_max, sigma_min, target_ratio)
    actual = (sigma_max / sigma_min) ** (1 / (levels - 1))
    if epsilon is None:
        epsilon = langevin_epsilon(covariance, actual, sigma_min, steps_per_level, preconditioned)
    variance = variance_ratio(covariance, actual, epsilon, sigma_min, steps_per_level, preconditioned)
    eta = epsilon / sigma_min**2
    low, high = cas_interval(actual)
    return Calibration(
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        ratio=actual,
        num_levels=levels,
        epsilon=epsilon,
        eta=eta,
        steps_per_level=steps_per_level,
        preconditioned=preconditioned,
        variance_ratio=pixel_mean(variance, covariance),
        cas_interval=(low, high),
        cas_feasible=low <= eta <= high,
        target_ratio=target_ratio,
        distance=distance,
        pair=pair,
        num_images=len(images),
        dimension=dimension,
    )


def overlap(ratio: float, dimension: int) -> float:
    """p_σ_i(r ∈ I_{i−1}), the share of level i that lies within 3 standard deviations of the next noisier one.

    Φ(√(2D)(ratio − 1) + 3 ratio) − Φ(√(2D)(ratio − 1) − 3 ratio), where r is the whitened radius (E30).
    """
    shift = math.sqrt(2 * dimension) * (ratio - 1)
    edges = torch.tensor([shift + 3 * ratio, shift - 3 * ratio], dtype=torch.float64)
    upper, lower = torch.special.ndtr(edges).tolist()
    return upper - lower


def overlap_ratio(dimension: int) -> float:
    """The ratio > 1 of two noise scales whose `overlap` is ½, by bisection.

    It is close to √(2D) / (√(2D) − 3), where the second Φ is ½. In 4 dimensions or fewer no ratio has it.
    """
    if dimension < 5:
        raise InputError(f"dimension={dimension}: the overlap is above 1/2 for any ratio; give the ratio as a number.")
    root = math.sqrt(2 * dimension)
    low, high = 1.0, root / (root - 3)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if overlap(middle, dimension) > 0.5 else (low, middle)
    return middle


def num_levels(sigma_max: float, sigma_min: float, ratio: float) -> int:
    """1 + log(σ_max / σ_min) / log ratio, rounded up, so that the ratio of the levels is at most ``ratio``."""
    if not 0 < sigma_min < sigma_max < math.inf:
        raise InputError(f"sigma_min={sigma_min}, sigma_max={sigma_max} must satisfy 0 < sigma_min < sigma_max.")
    check_ratio(ratio)
    # Rounding must not add a level where the ratio fits exactly.
    return 1 + math.ceil(math.log(sigma_max / sigma_min) / math.log(ratio) * (1 - 1e-12))


def _target_ratio(ratio: str | float, dimension: int) -> float:
    if ratio == "overlap":
        return overlap_ratio(dimension)
    if ratio == "classic":
        return CLASSIC_RATIO
    if isinstance(ratio, str):
        raise InputError(f"ratio={ratio!r} is unknown: use 'overlap', 'classic' or a number above 1.")
    check_ratio(ratio)
    return float(ratio)
