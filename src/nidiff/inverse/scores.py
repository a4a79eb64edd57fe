"""Scores of an ensemble: samples [S, …] that claim to be draws of one law, of which the truth [...] is another."""

import torch
from torch import Tensor


def crps(samples: Tensor, truth: Tensor) -> Tensor:
    """The continuous ranked probability score of every entry, in the units of the data: E|x − truth| − ½ E|x − x′|.

    It is least in expectation for the law that the truth comes from, and the absolute error of a single sample. This
    estimate from S samples is unbiased (Ferro 2014), so ensembles of different sizes compare.
    """
    count = len(samples)
    error = (samples - truth).abs().mean(0)
    if count == 1:
        return error
    rising = samples.sort(0).values
    ranks = torch.arange(1 - count, count, 2, dtype=samples.dtype, device=samples.device)
    # Σ_ij |x_i − x_j| = 2 Σ_i (2i − S − 1) x_(i)
    return error - torch.einsum("s,s...->...", ranks, rising) / (count * (count - 1))


def interval(count: int, share: float = 0.9) -> tuple[int, float]:
    """k, and the probability 1 − 2k / (S + 1) that the truth lies between the k-th of S samples from below and the k-th
    from above if it and they are draws of one law, whatever that is; k is that nearest to ``share``."""
    k = max(1, round((1 - share) * (count + 1) / 2))
    return k, 1 - 2 * k / (count + 1)


def covered(samples: Tensor, truth: Tensor, share: float = 0.9, margin: float = 0.0) -> Tensor:
    """Whether the truth is inside of that `interval`, for every entry; ``margin`` widens it on both sides."""
    k, _ = interval(len(samples), share)
    rising = samples.sort(0).values
    return (truth >= rising[k - 1] - margin) & (truth <= rising[-k] + margin)
