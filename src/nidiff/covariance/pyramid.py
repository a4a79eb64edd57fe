"""Pyramid (multi-resolution) noise as what it is: white noise on coarser and coarser grids, upsampled and added."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nidiff.covariance.checks import check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Dense
from nidiff.covariance.waves import ROWS, Waves
from nidiff.errors import InputError, one_of
from nidiff.memory import require_memory
from nidiff.recipe import check_number, check_whole, remembered

LARGEST_DENSE = 5000  # entries of a field given by a matrix: the eigenvectors are 200 MB

Shape = tuple[int, ...]


@remembered
def pyramid(
    shape: Sequence[int],
    discount: float = 0.9,
    num_levels: int = 10,
    ratio: float | Sequence[float] = 2.0,
    normalize: bool = True,
    sizes: str = "powers",
    exact: bool | None = None,
) -> Covariance:
    """Pyramid (multi-resolution) noise: Σ = I + Σ_i discount^2i E[U_i U_iᵀ], i = 0 … num_levels − 1.

    U_i is linear upsampling from a coarser grid; the last level is the one where an axis has one pixel. ``sizes`` says
    how coarse level i is. "powers" divides the size of the event by ratio^i (32, 16, 8, 4, …), as kohya's sd-scripts
    do. "compounded" divides the size of the level before by ratio^i (32, 16, 4, 1), as Marigold, diffusion-e2e-ft and
    most copies of the original recipe do. They draw the ratio anew for each level, from 2 to 4: with ``ratio`` (2, 4) Σ
    is the covariance of that, the mean over all ratios.

    U_i does not commute with shifts, so Σ is given by a matrix, up to 5000 pixels. Above, or with ``exact`` False, it
    is diagonal in cosines: each of them has its variance, and the correlations between them are left out. For ratio 2
    that is a Kullback–Leibler divergence of 0.002 nats per pixel with discount 0.9, and of 2e-5 with discount 0.3.
    """
    shape = check_shape(shape)
    low, high = _ratios(ratio)
    one_of("sizes", sizes, ("powers", "compounded"))
    check_number("discount", discount, most=10.0, above=0.0)
    check_whole("num_levels", num_levels, 1, 100)
    size = math.prod(shape)
    if exact and size > LARGEST_DENSE:
        problem = f"has {size} entries, and a field given by a matrix at most {LARGEST_DENSE}"
        raise InputError("shape", None, problem, "leave out `exact`")
    levels = [*_levels(shape, num_levels, low, high, sizes == "compounded")]
    weights = [(discount ** (2 * level) * chance, coarse) for level, coarse, chance in levels]
    if size > LARGEST_DENSE or exact is False:
        return Covariance(_variances(shape, weights), Waves(shape, "reflecting"), normalize=normalize)
    matrix = torch.eye(size, dtype=torch.float64, device="cpu")
    for weight, coarse in weights:
        factor = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        for n, m in zip(shape, coarse, strict=True):
            down = _downsampled(torch.eye(n, dtype=torch.float64, device="cpu"), m)
            factor = torch.kron(factor, down.T @ down)
        matrix += weight * factor
    return Dense(matrix, shape, normalize=normalize)


def _ratios(ratio: float | Sequence[float]) -> tuple[float, float]:
    """The least and the largest ratio."""
    pair = [*ratio] if isinstance(ratio, Sequence) and not isinstance(ratio, str) else [ratio, ratio]
    if len(pair) != 2 or (low := check_number("ratio", pair[0], above=1.0)) > check_number("ratio", pair[1], above=1.0):
        raise InputError("ratio", ratio, "is not a number or a range", "give 2, or (2, 4) for one drawn anew")
    return low, float(pair[1])


def _levels(shape: Shape, count: int, low: float, high: float, compounded: bool) -> Iterator[tuple[int, Shape, float]]:
    """(level, its size, the probability of that): a recipe stops after a level with one pixel along an axis."""
    before = {shape: 1.0}
    for level in range(count):
        chances: dict[Shape, float] = {}
        for size, chance in before.items():
            for coarse, share in _sizes(size if compounded else shape, level, low, high):
                chances[coarse] = chances.get(coarse, 0.0) + chance * share
        yield from ((level, coarse, chance) for coarse, chance in chances.items())
        before = {coarse: chance for coarse, chance in chances.items() if min(coarse) > 1}


def _sizes(shape: Shape, level: int, low: float, high: float) -> Iterator[tuple[Shape, float]]:
    """The sizes max(1, ⌊n / ratio^level⌋) and their probabilities, for a ratio uniform from low to high."""
    cuts = {low, high}
    if level:
        for n in shape:
            pixels = range(max(1, int(n / high**level)), int(n / low**level) + 1)
            cuts |= {cut for m in pixels if low < (cut := (n / m) ** (1 / level)) < high}
    ends = sorted(cuts)
    for left, right in itertools.pairwise(ends) if low < high else [(low, low)]:
        share = (right - left) / (high - low) if low < high else 1.0
        yield tuple(max(1, int(n / ((left + right) / 2) ** level)) for n in shape), share


def _variances(shape: Shape, weights: Sequence[tuple[float, Shape]]) -> Tensor:
    """The variance of every cosine: white noise's 1, and those of the upsampled grids."""
    require_memory("shape", shape, 32.0 * max(shape) ** 2, "use a shorter axis")
    tables = []
    for axis, n in enumerate(shape):
        cosines, along = ROWS["reflecting"](n).T.contiguous(), [coarse[axis] for _, coarse in weights]
        energy = {m: _downsampled(cosines, m).square().sum(0) for m in set(along)}
        tables.append(torch.stack([energy[m] for m in along]))
    *others, last = tables
    product = torch.tensor([[weight] for weight, _ in weights], dtype=torch.float64, device="cpu")
    for table in others:
        product = (product.unsqueeze(-1) * table.unsqueeze(1)).flatten(1)
    return 1 + (product.T @ last).reshape(shape)


def _downsampled(x: Tensor, coarse: int) -> Tensor:
    """Uᵀ x of x [n, …], with the n × coarse matrix U of linear interpolation as torch does it (half-pixel centres,
    edges held): two numbers per pixel."""
    place = ((torch.arange(len(x), dtype=torch.float64, device="cpu") + 0.5) * coarse / len(x) - 0.5).clamp(min=0)
    left = place.long()
    share = (place - left).reshape(-1, *[1] * (x.ndim - 1))
    result = torch.zeros(coarse, *x.shape[1:], dtype=torch.float64, device="cpu")
    result.index_add_(0, left, (1 - share) * x)
    return result.index_add_(0, (left + 1).clamp(max=coarse - 1), share * x)
