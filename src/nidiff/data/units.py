"""The scaling between the units of the data and those of the model, fitted to each channel in one pass."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.data.sources import blocks
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError
from nidiff.notation import call, parse_call
from nidiff.recipe import check_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

STANDARD, RANGE, LOG = "standard", "range", "log"  # what is fitted


class RunningMoments:
    """Count, mean and spread of the finite numbers of each channel, and their smallest and largest, in float64.

    Blocks are joined by Chan's formula: M2 = M2a + M2b + (mean_b − mean_a)² n_a n_b / n, which never subtracts two
    large sums of squares.
    """

    def __init__(self, channels: int) -> None:
        self.count, self.mean, self.squares = np.zeros((3, channels))
        self.low, self.high = np.full(channels, np.inf), np.full(channels, -np.inf)

    def add(self, block: "NDArray[np.float64]") -> None:
        """Join a block [C, M]."""
        known = np.isfinite(block)
        low = high = block
        count = np.full(len(block), float(block.shape[1]))
        if not known.all():
            count = known.sum(1).astype(np.float64)
            low, high = np.where(known, block, np.inf), np.where(known, block, -np.inf)
            block = np.where(known, block, 0.0)
        mean = block.sum(1) / np.maximum(count, 1)
        off = (block - mean[:, None]) * known
        total, gap = np.maximum(self.count + count, 1), mean - self.mean
        self.squares += np.einsum("cm,cm->c", off, off) + gap**2 * self.count * count / total
        self.mean += gap * count / total
        self.count += count
        self.low, self.high = np.minimum(self.low, low.min(1)), np.maximum(self.high, high.max(1))

    @property
    def deviation(self) -> "NDArray[np.float64]":
        """The root of the mean square about the mean, as of `numpy.std`."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))


class Statistics(NamedTuple):
    """What one pass over the data measures: the values, and the logarithm of the channels that need it."""

    values: RunningMoments
    logs: RunningMoments


def measure(data: Dataset, rows: Tensor, rules: "Sequence[str | Scaling]", *, progress: bool = False) -> Statistics:
    """The moments of the finite values of some rows, a block at a time."""
    channels, logs = data.shape[0], [rule == LOG for rule in rules]
    statistics = Statistics(RunningMoments(channels), RunningMoments(channels))
    for part in blocks(rows, data.shape, "measuring", progress):
        block = np.moveaxis(data.stored(part).numpy().astype(np.float64), 1, 0).reshape(channels, -1)
        statistics.values.add(block)
        if any(logs):
            with np.errstate(invalid="ignore", divide="ignore"):
                statistics.logs.add(np.log(np.where(np.asarray(logs)[:, None], block, 1.0)))
    return statistics


def as_rules(texts: Sequence[str], data: Dataset) -> list[str | Scaling]:
    """The rule of each channel, from one text for all of them or one for each: standard, range or log, which are to be
    fitted, or a scaling. ``none`` is the usual one of the ``data``: floats stay as they are, and whole numbers go from
    the range of their type to [−1, 1]."""
    channels, dtype = data.shape[0], data.values.dtype
    if len(texts) not in (1, channels):
        problem = f"has {len(texts)} texts for {channels} channels"
        raise InputError("scaling", tuple(texts), problem, "give one, or one per channel")
    known: dict[str, Callable[..., str | Scaling]] = {
        "auto": lambda: STANDARD if dtype.is_floating_point else data.scaling,
        "none": lambda: data.scaling,
        "linear": _linear,
        STANDARD: lambda: STANDARD,
        RANGE: lambda: RANGE,
        LOG: lambda: LOG,
    }
    rules = [call("scaling", *parse_call("scaling", text), known) for text in texts]
    return rules if len(rules) == channels else rules * channels


def _linear(scale: float, shift: float = 0.0) -> Scaling:
    """data = scale · x + shift."""
    return Scaling(check_number("scale", scale), check_number("shift", shift))


def fit_scaling(rules: Sequence[str | Scaling], data: Dataset, statistics: Statistics | None) -> Scaling:
    """The scaling by ``rules``: ``standard`` has mean 0 and standard deviation 1 in the model, ``range`` the least
    value at −1 and the largest at 1, ``log`` is ``standard`` of the logarithm."""
    if all(rule == data.scaling for rule in rules):
        return data.scaling
    pairs: list[Any] = []
    for channel, rule in enumerate(rules):
        if isinstance(rule, Scaling):
            pairs.append((rule.scale, rule.shift))
        else:
            assert statistics is not None
            pairs.append(_fitted(rule, channel, data.grid.channel(channel), statistics))
    scales, shifts = zip(*pairs, strict=True)
    logs = tuple(rule == LOG for rule in rules)
    return Scaling(scales, shifts, logs if any(logs) else False)


def _fitted(kind: str, channel: int, name: str, statistics: Statistics) -> tuple[float, float]:
    """Scale and shift."""
    low, high = float(statistics.values.low[channel]), float(statistics.values.high[channel])
    if not low < high or (kind == LOG and low <= 0):
        problem = f"is impossible for {name}, whose finite values go from {low:g} to {high:g}"
        remedy = "leave the channel out, or choose another scaling, such as linear:scale=…,shift=…"
        raise InputError("scaling", kind, problem, remedy)
    if kind == RANGE:
        return (high - low) / 2, (high + low) / 2
    moments = statistics.logs if kind == LOG else statistics.values
    return float(moments.deviation[channel]), float(moments.mean[channel])
