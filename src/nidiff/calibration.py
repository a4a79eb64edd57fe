"""Noise scales from data (paper, appendix E): the largest σ, the ratio of two σ, their number, and the Langevin ε.

The paper writes γ both for the power of the index and for the ratio of two noise scales. Here the second is ``ratio``;
it is above 1, and η = ε / σ_min² is the step in units of σ², so that a level σ moves by η σ².
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import Schedule, smld_geometric
from nidiff.errors import InputError, one_of
from nidiff.randomness import white_noise

CLASSIC_RATIO = 1.0375591319992028
"""5000^(1/231): the ratio of NCSNv2's 232 levels from 50 to 0.01 on CIFAR-10, which the paper keeps (E30)."""
DISTANCES = ("max", "batch", "quantile")
CHUNK = 1024  # images at a time
SUBSET = 2048  # images whose pairs stand for all pairs

Progress = Callable[[int, int], object]
"""Called now and then with the number of pairs done and in all."""


class Farthest(NamedTuple):
    """The two images that are farthest apart."""

    distance: float
    pair: tuple[int, int]


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
    _check_images(images, covariance)
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


# The largest σ ---------------------------------------------------------------------------------------------------


def max_whitened_distance(images: Tensor, covariance: Covariance, *, progress: Progress | None = None) -> Farthest:
    """The largest ‖Σ^-½(x_i − x_j)‖ over all pairs, exactly, and the pair.

    ‖a − b‖² = ‖a‖² + ‖b‖² − 2ab in blocks of the whitened images, sorted by their distance from the mean. Since
    ‖a − b‖ ≤ ‖a‖ + ‖b‖, the blocks that cannot hold the maximum are left out: often nearly all. The pair is found in
    float32, which tells apart all but the closest ties, and its distance is then computed in float64.
    """
    _check_images(images, covariance)
    total = len(images) * (len(images) - 1) // 2
    _report(progress, 0, total)
    white = _whiten_all(images, covariance)
    lengths, order = white.norm(dim=1).sort(descending=True)
    squares, norms = lengths.square(), lengths.tolist()
    best, pair = -1.0, (0, 1)
    for start in range(0, len(white), CHUNK):
        if 2 * norms[start] <= best:
            break
        left = white[order[start : start + CHUNK]]
        for other in range(start, len(white), CHUNK):
            if norms[start] + norms[other] <= best:
                break
            right = white[order[other : other + CHUNK]]
            gram = left @ right.T
            gram.mul_(-2).add_(squares[start : start + CHUNK, None]).add_(squares[other : other + CHUNK])
            if other == start:
                gram.fill_diagonal_(-1.0)
            found, place = gram.max().item(), int(gram.argmax())
            if found > best**2 or best < 0:
                i, j = divmod(place, len(right))
                best, pair = math.sqrt(max(found, 0.0)), (int(order[start + i]), int(order[other + j]))
        seen = min(start + CHUNK, len(white))
        _report(progress, seen * (2 * len(white) - seen - 1) // 2, total)
    _report(progress, total, total)
    first, second = sorted(pair)
    difference = as_pixels(images[first]).double() - as_pixels(images[second]).double()
    return Farthest(_check_distance(covariance.inv_sqrt(difference).norm().item()), (first, second))


def batch_whitened_distance(
    images: Tensor,
    covariance: Covariance,
    *,
    batch_size: int = 128,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> float:
    """The largest ‖Σ^-½(x_i − x_j)‖ within a mini-batch, over the batches of one shuffled epoch."""
    _check_images(images, covariance)
    if batch_size < 2:
        raise InputError(f"batch_size={batch_size} has no pairs: use 2 or more.")
    batches = [batch for batch in _shuffled(len(images), generator).split(batch_size) if len(batch) > 1]
    total, done, best = sum(len(batch) * (len(batch) - 1) // 2 for batch in batches), 0, 0.0
    for batch in batches:
        best = max(best, _pairs(_whiten(images[batch], covariance)).max().item())
        done += len(batch) * (len(batch) - 1) // 2
        _report(progress, done, total)
    return _check_distance(best)


def quantile_whitened_distance(
    images: Tensor, covariance: Covariance, *, quantile: float = 0.99, generator: torch.Generator | None = None
) -> float:
    """The quantile of ‖Σ^-½(x_i − x_j)‖ over the pairs of at most 2048 random images."""
    if not 0 < quantile <= 1:
        raise InputError(f"quantile={quantile} must be above 0 and at most 1, such as 0.99.")
    distances = sampled_distances(images, covariance, generator=generator)
    return _check_distance(distances.kthvalue(math.ceil(quantile * len(distances))).values.item())


def sampled_distances(
    images: Tensor, covariance: Covariance, *, num_images: int = SUBSET, generator: torch.Generator | None = None
) -> Tensor:
    """‖Σ^-½(x_i − x_j)‖ of all pairs of at most ``num_images`` random images, as one column."""
    _check_images(images, covariance)
    return _pairs(_whiten_all(random_subset(images, num_images, generator), covariance))


def random_subset(images: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """At most ``count`` of the images, without replacement."""
    return images[_shuffled(len(images), generator)[:count]]


def as_pixels(images: Tensor) -> Tensor:
    """Images as floats: uint8 becomes [-1, 1], floats stay."""
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images


# The other σ -----------------------------------------------------------------------------------------------------


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


def _whiten(images: Tensor, covariance: Covariance) -> Tensor:
    """Σ^-½ x of each image as a row, float32."""
    pixels = as_pixels(images.detach())
    if not bool(torch.isfinite(pixels).all()):
        raise InputError("images has NaN or infinite pixels: remove those images.")
    return covariance.inv_sqrt(pixels).flatten(1).float()


def _whiten_all(images: Tensor, covariance: Covariance) -> Tensor:
    """The same in chunks, less the mean over the images: differences of small numbers lose less to rounding."""
    white = torch.empty(len(images), images[0].numel(), device=images.device)
    for chunk, target in zip(images.split(CHUNK), white.split(CHUNK), strict=True):
        target.copy_(_whiten(chunk, covariance))
    return white.sub_(white.mean(0))


def _pairs(white: Tensor) -> Tensor:
    return torch.nn.functional.pdist(white)


def _shuffled(count: int, generator: torch.Generator | None) -> Tensor:
    return white_noise((count,), generator, dtype=torch.float64).argsort()


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


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _target_ratio(ratio: str | float, dimension: int) -> float:
    if ratio == "overlap":
        return overlap_ratio(dimension)
    if ratio == "classic":
        return CLASSIC_RATIO
    if isinstance(ratio, str):
        raise InputError(f"ratio={ratio!r} is unknown: use 'overlap', 'classic' or a number above 1.")
    _check_ratio(ratio)
    return float(ratio)


def _check_images(images: Tensor, covariance: Covariance) -> None:
    axes = len(covariance.event_shape)
    shape = tuple(images.shape)
    if images.ndim <= axes or shape[-axes:] != covariance.event_shape:
        raise InputError(
            f"images has shape {shape}, but covariance is over {covariance.event_shape}: "
            "give [N, ..., *event] or build the covariance for that shape."
        )
    if len(images) < 2:
        raise InputError(f"images has {len(images)} image: a distance needs two or more.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"images has dtype {images.dtype}: give uint8 or floats.")
    if covariance.size > 1 and all(_is_flat(chunk) for chunk in images.split(CHUNK)):
        raise InputError("images are constant, each one value everywhere: give images that show something.")


def _is_flat(images: Tensor) -> bool:
    pixels = images.flatten(1)
    return bool((pixels == pixels[:, :1]).all())


def _check_distance(distance: float) -> float:
    if distance == 0:
        raise InputError("images are all the same, so they have no distance: give images that differ.")
    return distance


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
