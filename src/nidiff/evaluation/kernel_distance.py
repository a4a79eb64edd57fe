"""The kernel distance between two sets of features (KID; Bińkowski et al. 2018)."""

from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.evaluation.points import Array, as_pair
from nidiff.randomness import permutation


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
    first, second = as_pair(a, b, "a", "b")
    if subset_size < 2:
        raise InputError(f"subset_size={subset_size} has no pairs: use 2 or more.")
    if num_subsets < 2:
        raise InputError(f"num_subsets={num_subsets} has no standard error: use 2 or more.")
    if subset_size > (fewest := min(len(first), len(second))):
        raise InputError(f"subset_size={subset_size} is more than the {fewest} points of a set: use {fewest} or fewer.")
    subsets = ([_subset(points, subset_size, generator) for points in (first, second)] for _ in range(num_subsets))
    values = torch.tensor([_discrepancy(x, y) for x, y in subsets], dtype=torch.float64)
    return KernelDistance(values.mean().item(), values.std().item() / num_subsets**0.5)


def _subset(features: Tensor, size: int, generator: torch.Generator | None) -> Tensor:
    return features[permutation(len(features), generator)[:size].to(features.device)].double()


def _discrepancy(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate, which leaves out the pairs of a point with itself."""
    pairs = len(x) * (len(x) - 1)  # as many of x as of y
    within = sum((kernel.sum() - kernel.trace()) / pairs for kernel in (_kernel(x, x), _kernel(y, y)))
    return float(within - 2 * _kernel(x, y).mean())


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3
