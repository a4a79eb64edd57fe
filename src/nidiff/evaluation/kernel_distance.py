"""The kernel distance between two sets of features (KID; Bińkowski et al. 2018)."""

from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.evaluation.arrays import Array, as_features, as_pair
from nidiff.randomness import permutation
from nidiff.recipe import check_whole


class KernelDistance(NamedTuple):
    """The mean over the subsets, and its standard error."""

    value: float
    standard_error: float


@torch.no_grad()
def kernel_distance(
    a: Array, b: Array, subset_size: int = 1000, num_subsets: int = 100, generator: torch.Generator | None = None
) -> KernelDistance:
    """The squared maximum mean discrepancy of features [N, D] with the kernel (xᵀy / D + 1)³, in float64.

    The mean of the unbiased estimate over random subsets, drawn without replacement from each set. It is zero on
    average for two draws from one distribution, so it can be negative. The standard error, the standard deviation over
    the subsets / √number, is that of choosing subsets: they share points, so it does not cover how the sets themselves
    were drawn, and it is zero where a subset is the whole set.
    """
    first, second = as_pair(a, b, ("a", "b"), as_features)
    subset_size = check_whole("subset_size", subset_size, 2, min(len(first), len(second)))
    num_subsets = check_whole("num_subsets", num_subsets, 2)
    estimates = []
    for _ in range(num_subsets):
        x, y = (p[permutation(len(p), generator)[:subset_size].to(p.device)].double() for p in (first, second))
        estimates.append(_discrepancy(x, y))
    values = torch.tensor(estimates, dtype=torch.float64)
    return KernelDistance(values.mean().item(), values.std().item() / num_subsets**0.5)


def _discrepancy(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate, which leaves out the pairs of a point with itself."""
    xx, yy, xy = ((left @ right.T / x.shape[1] + 1) ** 3 for left, right in ((x, x), (y, y), (x, y)))
    within = xx.sum() - xx.trace() + yy.sum() - yy.trace()
    return float(within / (len(x) * (len(x) - 1)) - 2 * xy.mean())
