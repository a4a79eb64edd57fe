"""Noise scales from data (paper, appendix E): the largest σ, the ratio of two σ, their number, and the Langevin ε."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.design.distance import batch_whitened_distance, max_whitened_distance, quantile_whitened_distance
from nidiff.diffusion.schedule import LEAST_SIGMA, MOST_SIGMA, Schedule
from nidiff.diffusion.schedules import smld_geometric
from nidiff.errors import InputError, one_of
from nidiff.progress import Progress
from nidiff.randomness import Generators
from nidiff.recipe import check_whole
from nidiff.sampling.annealing import (
    MOST_STEPS,
    cas_interval,
    check_langevin,
    langevin_epsilon,
    pixel_mean,
    variance_ratio,
)

CLASSIC_RATIO = 1.0375591319992028
"""5000^(1/231): the ratio of NCSNv2's 232 levels from 50 to 0.01 on CIFAR-10, which the paper keeps (E30)."""
DISTANCES = ("max", "batch", "quantile")


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found; the text beside each number says how, in the ASCII that ``nidiff calibrate`` prints."""

    sigma_max: Annotated[float, "the largest noise scale: |Sigma^-1/2 (x_i - x_j)|, of the pairs that distance says"]
    sigma_min: Annotated[float, "the smallest noise scale, as given"]
    ratio: Annotated[float, "sigma of a level over that of the next: (sigma_max / sigma_min)^(1 / (num_levels - 1))"]
    num_levels: Annotated[int, "1 + log(sigma_max / sigma_min) / log(target_ratio), rounded up"]
    epsilon: Annotated[float, "of a Langevin step epsilon sigma^2 / sigma_min^2: least variance_ratio, unless given"]
    eta: Annotated[float, "epsilon / sigma_min^2"]
    steps_per_level: Annotated[int, "Langevin steps, as given"]
    preconditioned: Annotated[bool, "h = eta, with Sigma before the score; if not, as printed, h = eta / lambda"]
    variance_ratio: Annotated[float, "mean of lambda v; from v = ratio^2, each step: v <- (1 - h)^2 v + 2 eta"]
    cas_interval: Annotated[tuple[float, float], "the eta for which CAS exists: 1 - 1/ratio to 1 + 1/ratio"]
    cas_feasible: Annotated[bool, "whether eta is in it, that is, beta^2 = 1 - ratio^2 (1 - eta)^2 >= 0"]
    target_ratio: Annotated[float, "r with Phi(sqrt(2D)(r-1) + 3r) - Phi(sqrt(2D)(r-1) - 3r) = 1/2, unless given"]
    distance: Annotated[str, "max: the largest of all pairs; batch: within mini-batches; quantile: of random pairs"]
    pair: Annotated[tuple[int, int] | None, "the images i and j of sigma_max, where it is that of all pairs"]
    num_images: Annotated[int, "in the data"]
    dimension: Annotated[int, "D, the numbers in an image, channels included"]

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
    generator: Generators = None,
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
    steps_per_level = check_whole("steps_per_level", steps_per_level, 1, MOST_STEPS)
    dimension = math.prod(images.shape[1:])
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
    if not LEAST_SIGMA < sigma_max < MOST_SIGMA:
        raise InputError("images", None, f"are {sigma_max:.3g} apart", "give images that differ, of a size near 1")
    levels = num_levels(sigma_max, sigma_min, target_ratio)
    actual = (sigma_max / sigma_min) ** (1 / (levels - 1))
    if epsilon is None:
        epsilon = langevin_epsilon(covariance, actual, sigma_min, steps_per_level, preconditioned)
    variances = variance_ratio(covariance, actual, epsilon, sigma_min, steps_per_level, preconditioned)
    variance = pixel_mean(variances, covariance)
    if not math.isfinite(variance):
        limit = f"give less than 2 sigma_min² = {2 * sigma_min**2:.4g}"
        raise InputError("epsilon", epsilon, "makes Langevin unstable", limit)
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
        variance_ratio=variance,
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
    shift, phi = math.sqrt(2 * dimension) * (ratio - 1), NormalDist().cdf
    return phi(shift + 3 * ratio) - phi(shift - 3 * ratio)


def overlap_ratio(dimension: int) -> float:
    """The ratio > 1 of two noise scales whose `overlap` is ½, by bisection.

    It is close to √(2D) / (√(2D) − 3), where the second Φ is ½. In 4 dimensions or fewer no ratio has it.
    """
    if dimension < 5:
        problem = f"has no solution in {dimension} dimensions, where the overlap is above 1/2 for any ratio"
        raise InputError("ratio", "overlap", problem, "give a number above 1")
    root = math.sqrt(2 * dimension)
    low, high = 1.0, root / (root - 3)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if overlap(middle, dimension) > 0.5 else (low, middle)
    return middle


def num_levels(sigma_max: float, sigma_min: float, ratio: float) -> int:
    """1 + log(σ_max / σ_min) / log ratio, rounded up, so that the ratio of the levels is at most ``ratio``."""
    if sigma_min >= sigma_max:
        raise InputError("sigma_min", sigma_min, f"is not below sigma_max={sigma_max:.4g}", "lower it")
    # Rounding must not add a level where the ratio fits exactly.
    return 1 + math.ceil(math.log(sigma_max / sigma_min) / math.log(ratio) * (1 - 1e-12))


def _target_ratio(ratio: str | float, dimension: int) -> float:
    if ratio == "overlap":
        return overlap_ratio(dimension)
    try:
        return CLASSIC_RATIO if ratio == "classic" else float(ratio)
    except ValueError as error:
        raise InputError("ratio", ratio, "is unknown", "use 'overlap', 'classic' or a number above 1") from error
