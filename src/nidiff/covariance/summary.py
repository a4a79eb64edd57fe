"""Σ in a few numbers."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance


class Summary(NamedTuple):
    """What `summary` computes."""

    marginal_variance: float
    """Mean of the diagonal of Σ."""
    marginal_variance_range: tuple[float, float]
    """Smallest and largest entry of the diagonal: equal where Σ is stationary."""
    condition_number: float
    """λ_max / λ_min over the positive eigenvalues."""
    logdet: float | None
    """log det Σ of one event; None where Σ is singular (it is −∞)."""
    effective_rank: float
    """exp(−Σ p log p), p = λ / Σλ: N for white noise, 1 where one mode has all the power."""
    correlation_length: float | None
    """See `correlation_length`."""


def summary(covariance: Covariance) -> Summary:
    """The numbers that say what noise N(0, Σ) is like."""
    variance, eigenvalues = covariance.marginal_variance, covariance.eigenvalues
    return Summary(
        marginal_variance=variance.mean().item(),
        marginal_variance_range=(variance.min().item(), variance.max().item()),
        condition_number=covariance.condition_number,
        logdet=None if covariance.is_singular else covariance.logdet(),
        effective_rank=torch.special.entr(eigenvalues / eigenvalues.sum()).sum().exp().item(),
        correlation_length=correlation_length(covariance),
    )


def correlation_length(covariance: Covariance) -> float | None:
    """The lag, in pixels, at which the correlation with the centre pixel first falls below 1/e.

    The correlation at lag h is the mean of Σ_ij / √(Σ_ii Σ_jj) over the pixels j that lie h from the centre i along one
    axis, in both directions, as far as the event reaches; between lags it is linear. White noise gives 1 − 1/e. None if
    it stays above 1/e. All axes of the event count alike, so for `Channels` the first of them is the channels.
    """
    before = 1.0
    for lag, here in enumerate(lag_correlation(covariance).tolist()[1:], start=1):
        if here < math.exp(-1):
            return lag - 1 + (before - math.exp(-1)) / (before - here)
        before = here
    return None


def lag_correlation(covariance: Covariance) -> Tensor:
    """The correlation at lags 0, 1, … as `correlation_length` defines it."""
    shape = covariance.event_shape
    centre = tuple(n // 2 for n in shape)
    impulse = torch.zeros(shape, dtype=torch.float64, device="cpu")
    impulse[centre] = 1.0
    std = covariance.marginal_variance.sqrt()
    # A pixel without noise has covariance 0 with every other: call that correlation 0.
    correlation = covariance.matmul(impulse) / (std[centre] * std).clamp(min=torch.finfo(torch.float64).tiny)
    total, count = torch.zeros(2, max(centre) + 1, dtype=torch.float64, device="cpu")
    for axis, middle in enumerate(centre):
        line = correlation.movedim(axis, -1)[centre[:axis] + centre[axis + 1 :]]
        for side in (line[middle:], line[: middle + 1].flip(0)):
            total[: len(side)] += side
            count[: len(side)] += 1
    return total / count
