"""Improved precision and recall of generated samples (Kynkäänniemi et al. 2019), from features."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.evaluation.arrays import CHUNK, Array, as_features, as_pair, mean
from nidiff.progress import Progress
from nidiff.recipe import check_whole

ROUNDING = 1e-13  # of a squared distance, over the squared norms of its points


class PrecisionRecall(NamedTuple):
    """How much of what is generated looks real, and how much of what is real can be generated."""

    precision: float
    recall: float


@torch.no_grad()
def precision_recall(real: Array, generated: Array, k: int = 3, *, progress: Progress | None = None) -> PrecisionRecall:
    """The share of generated points in the real manifold, and of real points in the generated one; features [N, D].

    The manifold of a set is the union of one closed ball per point, whose radius is the distance to the k-th nearest of
    the other points of the set. Distances are ‖a‖² + ‖b‖² − 2ab in float64, in blocks: the memory beyond the features
    is some blocks of 1024 × D and 1024 × 1024 numbers and k per point. A tie counts as inside, within rounding.
    ``progress`` is told the number of pairs done, and of all.
    """
    k = check_whole("k", k)
    real, generated = as_pair(real, generated, check=as_features, least=k + 1)
    n, m = len(real), len(generated)
    done, total = 0, n * (n - 1) // 2 + m * (m - 1) // 2 + n * m

    def advance(pairs: int) -> None:
        nonlocal done
        done += pairs
        if progress is not None:
            progress(done, total)

    advance(0)
    centre = mean(real)  # no distance depends on it; small norms round less
    reach_real, reach_generated = (_square_radii(points, k, centre, advance) for points in (real, generated))
    precise, recalled = (torch.zeros(count, dtype=torch.bool, device=real.device) for count in (m, n))
    for rows, columns, squares in _square_distances(real, generated, centre):
        precise[columns] |= (squares <= reach_real[rows, None]).any(0)
        recalled[rows] |= (squares <= reach_generated[columns]).any(1)
        advance(squares.numel())
    return PrecisionRecall(precise.double().mean().item(), recalled.double().mean().item())


def _square_radii(points: Tensor, k: int, centre: Tensor, advance: Callable[[int], None]) -> Tensor:
    """The squared distance from each point to the k-th nearest other one, and its rounding error above that."""
    nearest = torch.full((len(points), k), torch.inf, dtype=torch.float64, device=points.device)
    for rows, columns, squares in _square_distances(points, points, centre, upper=True):
        if rows == columns:
            squares.fill_diagonal_(torch.inf)
            advance(len(squares) * (len(squares) - 1) // 2)
        else:  # the blocks below the diagonal are those above it, transposed
            _keep_smallest(nearest[columns], squares.T)
            advance(squares.numel())
        _keep_smallest(nearest[rows], squares)
    radii = nearest.amax(1)
    norms = torch.cat([(chunk.double() - centre).square().sum(1) for chunk in points.split(CHUNK)])
    return radii + ROUNDING * (radii + norms)


def _keep_smallest(smallest: Tensor, candidates: Tensor) -> None:
    both = torch.cat([smallest, candidates], dim=1)
    smallest.copy_(both.topk(smallest.shape[1], dim=1, largest=False, sorted=False).values)


def _square_distances(
    left: Tensor, right: Tensor, centre: Tensor, upper: bool = False
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, columns and the squared distances between them, in blocks: all, or those on and above the diagonal."""
    for i in range(0, len(left), CHUNK):
        a, rows = left[i : i + CHUNK].double() - centre, slice(i, i + CHUNK)
        for j in range(i if upper else 0, len(right), CHUNK):
            b, columns = right[j : j + CHUNK].double() - centre, slice(j, j + CHUNK)
            squares = torch.addmm(b.square().sum(1), a, b.T, alpha=-2)
            yield rows, columns, squares.add_(a.square().sum(1, keepdim=True)).clamp_(min=0)
