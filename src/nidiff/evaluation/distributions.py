"""Distributions of the values of fields [N, C, *event] and of their increments, and how much items differ."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nidiff.evaluation.arrays import Array, as_fields, as_pair
from nidiff.recipe import check_whole

TAILS = (0.001, 0.999)


def wasserstein(real: Array, generated: Array) -> Tensor:
    """The Wasserstein-1 distance between the values of two sets of fields [N, C, *event], of each channel: [C].

    It is ∫ |F_generated − F_real| dv over the distribution functions of all pixels of a channel, wherever they are, in
    standard deviations of the real ones: how far values must be moved, on average.
    """
    first, second = as_pair(real, generated)
    return distances(by_channel(first), by_channel(second))


def structure_function(
    fields: Array,
    order: int = 2,
    *,
    axis: int = 0,
    lags: tuple[int, ...] | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """S_p(r) = mean |v(s + r) − v(s)|^p of each item and channel, along an axis of the event: [N, C, number of lags].

    Nothing wraps around. The default lags are 1, 2, 4, … below half the axis. S_4 / S_2² of the means over items is
    the flatness of the increments, 3 for a Gaussian. ``weights`` [*event] are those of the points.
    """
    x = as_fields(fields, "fields")
    axis, order = check_whole("axis", axis, 0, x.ndim - 3), check_whole("order", order, 1, 8)
    size = x.shape[axis + 2]
    if lags is None:
        lags = tuple(2**power for power in range(size.bit_length()) if power == 0 or 2 ** (power + 1) < size)

    def moment(lag: int) -> Tensor:
        powers = (increments(part, axis, lag).abs().pow(order).flatten(2) for part in x.split(256))
        if weights is None:
            return torch.cat([each.mean(2) for each in powers]).cpu()
        pairs = pair_weights(weights, axis, lag).flatten().to(x.device)
        return torch.cat([each @ pairs / pairs.sum() for each in powers]).cpu()

    return torch.stack([moment(check_whole("lags", lag, 1, size - 1)) for lag in lags], -1)


def increments(x: Tensor, axis: int, lag: int) -> Tensor:
    """v(s + lag) − v(s) along an axis of the event."""
    size = x.shape[axis + 2]
    return x.narrow(axis + 2, lag, size - lag).double() - x.narrow(axis + 2, 0, size - lag).double()


def pair_weights(weights: Tensor, axis: int, lag: int) -> Tensor:
    """The weights of the increments of points with ``weights`` [*event]: the geometric mean of both."""
    size = weights.shape[axis]
    return (weights.narrow(axis, lag, size - lag) * weights.narrow(axis, 0, size - lag)).double().sqrt()


def by_channel(x: Tensor) -> Tensor:
    """All values of each channel, sorted, float64 [C, number]."""
    return x.detach().cpu().double().transpose(0, 1).flatten(1).sort(1).values


def distances(real: Tensor, generated: Tensor) -> Tensor:
    """`wasserstein` of sorted values [C, number]."""
    # The quantile functions are constant between the shares i/N and j/M, where a value gives way to the next.
    first, second, width = _quantile_pairs(real.shape[1], generated.shape[1])
    return in_units((real[:, first] - generated[:, second]).abs() @ width, real.std(1))


@lru_cache(maxsize=4)
def _quantile_pairs(count: int, other: int) -> tuple[Tensor, Tensor, Tensor]:
    """The indices of the values of two sorted sets that have the same share below them, and how large a share it is."""
    if count == other:
        index = torch.arange(count)
        return index, index, torch.full((count,), 1 / count, dtype=torch.float64)
    ends = torch.cat([torch.arange(1, count + 1) * other, torch.arange(1, other + 1) * count]).unique()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return starts // other, starts // count, (ends - starts).double() / (count * other)


def quantile_errors(real: Tensor, generated: Tensor) -> Tensor:
    """The 0.1 % and 99.9 % quantiles of sorted values [C, number], generated − real, in standard deviations of the real
    ones: [C, 2]."""
    ends = [torch.from_numpy(np.quantile(values.numpy(), TAILS, axis=1).T) for values in (real, generated)]
    return in_units(ends[1] - ends[0], real.std(1, keepdim=True))


def deviations(values: Tensor) -> Tensor:
    """How much items differ: the root over all pixels of the mean variance over items, [C], of values [N, C, number].

    A model that makes one item whatever the seed has 0. 2 spread² is the mean squared distance of two items, per pixel.
    """
    return values.double().var(0).mean(1).sqrt()


def in_units(difference: Tensor, unit: Tensor) -> Tensor:
    """difference / unit; 0 where there is none, also if the unit is 0."""
    return torch.where(difference == 0, 0.0, difference / unit)
