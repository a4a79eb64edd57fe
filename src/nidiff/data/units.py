"""The scaling between the units of the data and those of the model, fitted to each channel in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from tqdm import tqdm

from nidiff.data.dataset import WHOLE, Dataset, Source
from nidiff.data.grid import Grid
from nidiff.data.sources import blocks
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, one_of
from nidiff.notation import call, parse_call

if TYPE_CHECKING:
    from numpy.typing import NDArray

AUTO, STANDARD, RANGE, NONE, LOG, LINEAR = "auto", "standard", "range", "none", "log", "linear"
FITTED = (STANDARD, RANGE, LOG)


@dataclass
class RunningMoments:
    """Count, mean and spread of the finite numbers of each channel, and their smallest and largest, in float64.

    Blocks are joined by Chan's formula: M2 = M2a + M2b + (mean_b − mean_a)² n_a n_b / n, which never subtracts two
    large sums of squares.
    """

    count: "NDArray[np.float64]"
    mean: "NDArray[np.float64]" = field(init=False)
    squares: "NDArray[np.float64]" = field(init=False)
    low: "NDArray[np.float64]" = field(init=False)
    high: "NDArray[np.float64]" = field(init=False)

    def __post_init__(self) -> None:
        self.mean, self.squares = np.zeros_like(self.count), np.zeros_like(self.count)
        self.low, self.high = np.full_like(self.count, np.inf), np.full_like(self.count, -np.inf)

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
    """What one pass over the data measures: their values, and the logarithm of some channels."""

    values: RunningMoments
    logs: RunningMoments

    def means(self, grid: Grid) -> tuple[float, ...]:
        """The mean of each channel."""
        for channel in np.flatnonzero(self.values.count == 0):
            problem = f"is unknown for {grid.channel(int(channel))}, which has no finite value"
            raise InputError("missing", "mean", problem, "leave the channel out, or give a number")
        return tuple(self.values.mean.tolist())


def measure(values: Tensor | Source, rows: Tensor, logs: Sequence[bool], *, progress: bool = False) -> Statistics:
    """The moments of the finite values of some rows, a block at a time. ``logs`` says of which channels the logarithm
    is to be measured too; where it has none, the moments of the logarithm are infinite."""
    channels = values.shape[1]
    statistics = Statistics(RunningMoments(np.zeros(channels)), RunningMoments(np.zeros(channels)))
    bar = tqdm(total=len(rows), desc="measuring", delay=1, leave=False, disable=None if progress else True)
    with bar:
        for part in blocks(rows, tuple(values.shape[1:])):
            block = values.index_select(0, part).numpy().astype(np.float64)
            block = np.moveaxis(block, 1, 0).reshape(channels, -1)
            statistics.values.add(block)
            if any(logs):
                with np.errstate(invalid="ignore", divide="ignore"):
                    statistics.logs.add(np.log(np.where(np.asarray(logs)[:, None], block, 1.0)))
            bar.update(len(part))
    return statistics


class ScalingRule(NamedTuple):
    """How one channel is scaled."""

    kind: str
    scale: float = 1.0
    shift: float = 0.0


def as_rules(texts: Sequence[str], data: Dataset) -> list[ScalingRule]:
    """The rule of each channel, from one text for all of them or one for each."""
    channels = data.shape[0]
    if len(texts) not in (1, channels):
        problem = f"has {len(texts)} texts for {channels} channels"
        raise InputError("scaling", tuple(texts), problem, "give one, or one per channel")
    rules = [_rule(text, data) for text in texts]
    return rules if len(rules) == channels else rules * channels


def _rule(text: str, data: Dataset) -> ScalingRule:
    name, arguments = parse_call("scaling", text)
    if one_of("scaling", name, (AUTO, NONE, LINEAR, *FITTED)) == LINEAR:
        rule: ScalingRule = call("scaling", name, arguments, {LINEAR: _linear})
        return rule
    if arguments:
        raise InputError("scaling", text, "takes no numbers", f"give {name}, or linear:scale=…,shift=…")
    return ScalingRule(STANDARD if data.values.dtype.is_floating_point else NONE) if name == AUTO else ScalingRule(name)


def _linear(scale: float, shift: float = 0.0) -> ScalingRule:
    """data = scale · x + shift."""
    Scaling(scale, shift)  # which refuses what is not a number, and 0
    return ScalingRule(LINEAR, float(scale), float(shift))


def fit_scaling(rules: Sequence[ScalingRule], data: Dataset, statistics: Statistics | None) -> Scaling:
    """The scaling by ``rules``: ``standard`` has mean 0 and standard deviation 1 in the model, ``range`` the least
    value at −1 and the largest at 1, ``log`` is ``standard`` of the logarithm. ``none`` leaves floats as they are, and
    takes whole numbers from the range of their type to [−1, 1]."""
    whole = WHOLE.get(str(data.values.dtype).removeprefix("torch."), Scaling(1.0))
    if all(rule.kind == NONE for rule in rules):
        return whole
    pairs: list[Any] = []
    for channel, rule in enumerate(rules):
        if rule.kind in FITTED:
            assert statistics is not None
            pairs.append(_fitted(rule.kind, channel, data.grid, statistics))
        else:
            pairs.append((whole.scale, whole.shift) if rule.kind == NONE else (rule.scale, rule.shift))
    scales, shifts = zip(*pairs, strict=True)
    logs = tuple(rule.kind == LOG for rule in rules)
    return Scaling(scales, shifts, logs if any(logs) else False)


def _fitted(kind: str, channel: int, grid: Grid, statistics: Statistics) -> tuple[float, float]:
    """Scale and shift."""
    values, name = statistics.values, grid.channel(channel)
    low, high = float(values.low[channel]), float(values.high[channel])
    if not low < high or (kind == LOG and low <= 0):
        kinds = (
            "has no finite value"
            if low > high
            else f"is {low:g} everywhere"
            if low == high
            else f"goes down to {low:g}"
        )
        remedy = "leave the channel out, or choose another scaling, such as linear:scale=…,shift=…"
        raise InputError("scaling", kind, f"is impossible for {name}, which {kinds}", remedy)
    if kind == RANGE:
        return (high - low) / 2, (high + low) / 2
    moments = statistics.logs if kind == LOG else values
    return float(moments.deviation[channel]), float(moments.mean[channel])
