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


def rank_histogram(samples: Tensor, truth: Tensor, margin: float = 0.0) -> Tensor:
    """How often the truth is above 0, 1, …, S of the S samples, [S + 1]: about equally often if it and they are draws
    of one law. U-shaped: the samples are too narrow; a hump: too wide; a slope: they are biased.

    Where samples equal it, or differ by at most ``margin``, each of the possible ranks counts in part.
    """
    count = len(samples)
    equal = ((samples - truth).abs() <= margin).sum(0).flatten()
    below = (samples < truth - margin).sum(0).flatten()
    share = 1 / (equal + 1).double()
    edges = torch.zeros(count + 2, dtype=torch.float64, device=truth.device)
    edges.index_add_(0, below, share).index_add_(0, below + equal + 1, -share)
    return edges.cumsum(0)[:-1]
