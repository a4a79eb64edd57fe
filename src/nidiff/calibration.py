"""Noise scales from data (paper, appendix E): the largest σ, the ratio of two σ, their number, and the Langevin ε.

The paper writes γ both for the power of the index and for the ratio of two noise scales. Here the second is ``ratio``;
it is above 1, and η = ε / σ_min² is the step in units of σ², so that a level σ moves by η σ².
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import Schedule, smld_geometric
from nidiff.distance import (
    Progress,
    batch_whitened_distance,
    check_images,
    max_whitened_distance,
    quantile_whitened_distance,
)
from nidiff.errors import InputError, one_of

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
    _check_langevin(target_ratio, sigma_min, steps_per_level, epsilon)  # before the long part
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
        variance_ratio=_pixel_mean(variance, covariance),
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
    _check_ratio(ratio)
    # Rounding must not add a level where the ratio fits exactly.
    return 1 + math.ceil(math.log(sigma_max / sigma_min) / math.log(ratio) * (1 - 1e-12))


# Langevin dynamics -----------------------------------------------------------------------------------------------


def variance_ratio(
    covariance: Covariance,
    ratio: float,
    epsilon: float,
    sigma_min: float = 0.01,
    steps: int = 5,
    preconditioned: bool = True,
) -> Tensor:
    """Var[x_T] / (σ² λ) of every mode after T = ``steps`` Langevin steps at level σ, from a draw of level ratio · σ.

    A step multiplies a mode by 1 − η, or, in the update as printed, which lacks Σ before the score, by 1 − η/λ; and it
    adds noise of variance 2ησ²λ (E23, E31). A mode without variance counts as one that the score does not move.
    """
    _check_langevin(ratio, sigma_min, steps, epsilon)
    eta = epsilon / sigma_min**2
    values = covariance.eigenvalues
    if preconditioned:
        keep = torch.full_like(values, (1 - eta) ** 2)
    else:
        keep = torch.where(values > 0, 1 - eta / values, 1.0).square()
    variance = torch.full_like(values, ratio**2)
    for _ in range(steps):
        variance = keep * variance + 2 * eta
    return variance


def langevin_epsilon(
    covariance: Covariance,
    ratio: float,
    sigma_min: float = 0.01,
    steps: int = 5,
    preconditioned: bool = True,
) -> float:
    """The ε with the least mean variance of a pixel, mean_k λ_k · `variance_ratio`_k: no ε brings it to 1 (E31).

    Preconditioned it is the isotropic value, and for one step σ_min² (1 − ratio⁻²).
    """
    _check_langevin(ratio, sigma_min, steps)
    values = covariance.eigenvalues
    slowest = 1.0 if preconditioned else values[values > 0].min().item()

    def cost(log_eta: float) -> float:
        epsilon = math.exp(log_eta) * sigma_min**2
        mean = _pixel_mean(variance_ratio(covariance, ratio, epsilon, sigma_min, steps, preconditioned), covariance)
        return mean if math.isfinite(mean) else math.inf

    # The minimum of a grid of half octaves, and golden section between its neighbours.
    lowest, step = math.log(1e-3 * slowest * (1 - ratio**-2) / steps), math.log(2) / 2
    grid = [lowest + step * i for i in range(math.ceil((math.log(2.0) - lowest) / step) + 1)]
    costs = [cost(point) for point in grid]
    least = costs.index(min(costs))
    if least == 0:
        raise InputError(
            "covariance has no ε at which the update without preconditioning lowers the variance: use "
            "preconditioned=True, or a covariance with mean eigenvalue 1."
        )
    return math.exp(_golden_section(cost, grid[least] - step, grid[least] + step)) * sigma_min**2


def cas_interval(ratio: float) -> tuple[float, float]:
    """[1 − 1/ratio, 1 + 1/ratio]: the η for which β² = 1 − ratio² (1 − η)² of consistent annealed sampling is ≥ 0."""
    _check_ratio(ratio)
    return 1 - 1 / ratio, 1 + 1 / ratio


# Inside ----------------------------------------------------------------------------------------------------------


def _pixel_mean(variance: Tensor, covariance: Covariance) -> float:
    return (variance * covariance.eigenvalues).mean().item()


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between low and high has it."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-9:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _target_ratio(ratio: str | float, dimension: int) -> float:
    if ratio == "overlap":
        return overlap_ratio(dimension)
    if ratio == "classic":
        return CLASSIC_RATIO
    if isinstance(ratio, str):
        raise InputError(f"ratio={ratio!r} is unknown: use 'overlap', 'classic' or a number above 1.")
    _check_ratio(ratio)
    return float(ratio)


def _check_ratio(ratio: float) -> None:
    if not (math.isfinite(ratio) and ratio > 1):
        raise InputError(f"ratio={ratio} must be above 1: it is the larger σ over the smaller.")


def _check_langevin(ratio: float, sigma_min: float, steps: int, epsilon: float | None = None) -> None:
    _check_ratio(ratio)
    for argument, value in {"sigma_min": sigma_min, "epsilon": epsilon}.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{argument}={value} must be a positive number.")
    if steps < 1:
        raise InputError(f"steps={steps} per level must be 1 or more.")
