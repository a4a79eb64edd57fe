"""The scaling between the units of the data and those of the model, fitted to each channel in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from tqdm import tqdm

from nidiff.data.dataset import WHOLE, Dataset, Source
from nidiff.data.grid import Grid
from nidiff.data.sources import blocks
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, one_of, shown
from nidiff.notation import call, parse_call

if TYPE_CHECKING:
    from numpy.typing import NDArray

AUTO, STANDARD, RANGE, NONE, LOG, LINEAR = "auto", "standard", "range", "none", "log", "linear"
FITTED = (STANDARD, RANGE, LOG)


@dataclass
class Moments:
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
        """Of a block [C, M]."""
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


@dataclass(frozen=True)
class Measured:
    """What one pass over the data finds out: about its values, and about the logarithm of some channels."""

    values: Moments
    logs: Moments

    def means(self, grid: Grid) -> tuple[float, ...]:
        """The mean of each channel."""
        for channel in np.flatnonzero(self.values.count == 0):
            raise InputError(
                f"missing='mean' of {grid.channel(int(channel))} is unknown: it has no finite value at all."
            )
        return tuple(self.values.mean.tolist())


def measure(values: Tensor | Source, rows: Tensor, logs: Sequence[bool], *, progress: bool = False) -> Measured:
    """The moments of the finite values of some rows, a block at a time. ``logs`` says of which channels the logarithm
    is to be measured too; where it has none, the moments of the logarithm are infinite."""
    channels = values.shape[1]
    found = Measured(Moments(np.zeros(channels)), Moments(np.zeros(channels)))
    bar = tqdm(total=len(rows), desc="measuring", delay=1, leave=False, disable=None if progress else True)
    with bar:
        for part in blocks(rows, tuple(values.shape[1:])):
            block = values.index_select(0, part).numpy().astype(np.float64)
            block = np.moveaxis(block, 1, 0).reshape(channels, -1)
            found.values.add(block)
            if any(logs):
                with np.errstate(invalid="ignore", divide="ignore"):
                    found.logs.add(np.log(np.where(np.asarray(logs)[:, None], block, 1.0)))
            bar.update(len(part))
    return found


@dataclass(frozen=True)
class Rule:
    """How one channel is scaled."""

    kind: str
    scale: float = 1.0
    shift: float = 0.0


def as_rules(scaling: object, data: Dataset) -> list[Rule]:
    """The rule of each channel, from one text for all of them or one for each."""
    texts = [scaling] if isinstance(scaling, str) else scaling
    channels = data.shape[0]
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"scaling={shown(scaling)} must be a text such as standard, one per channel, or a Scaling.")
    if len(texts) not in (1, channels):
        raise InputError(f"scaling has {len(texts)} texts for {channels} channels: give one, or one per channel.")
    rules = [_rule(text, data) for text in texts]
    return rules if len(rules) == channels else rules * channels


def _rule(text: str, data: Dataset) -> Rule:
    name, arguments = parse_call("scaling", text)
    one_of("scaling", name, (AUTO, STANDARD, RANGE, NONE, LOG, LINEAR))
    if name == LINEAR:
        made: Scaling = call("scaling", name, arguments, {LINEAR: _linear})
        assert isinstance(made.scale, int | float)
        assert isinstance(made.shift, int | float)
        return Rule(LINEAR, float(made.scale), float(made.shift))
    if arguments:
        raise InputError(f"scaling={shown(text)} takes no numbers: give {name}, or linear:scale=…,shift=….")
    return Rule(STANDARD if data.values.dtype.is_floating_point else NONE) if name == AUTO else Rule(name)


def _linear(scale: float, shift: float = 0.0) -> Scaling:
    """data = scale · x + shift."""
    if isinstance(scale, tuple) or isinstance(shift, tuple):
        raise InputError("scaling=linear has one scale and one shift: give a text for each channel.")
    return Scaling(scale, shift)


def fit_scaling(rules: Sequence[Rule], data: Dataset, found: Measured | None) -> Scaling:
    """The scaling by ``rules`` of the data that were measured: ``standard`` has mean 0 and standard deviation 1 in the
    model, ``range`` the least value at −1 and the largest at 1, ``log`` is ``standard`` of the logarithm. ``none``
    leaves floats as they are, and takes whole numbers from the range of their type to [−1, 1]."""
    whole = WHOLE.get(str(data.values.dtype).removeprefix("torch."), Scaling(1.0))
    if all(rule.kind == NONE for rule in rules):
        return whole
    assert isinstance(whole.scale, float)
    assert isinstance(whole.shift, float)
    usual = (whole.scale, whole.shift)
    pairs = [
        usual
        if rule.kind == NONE
        else (rule.scale, rule.shift)
        if rule.kind == LINEAR
        else _fitted(rule, i, data.grid, found)
        for i, rule in enumerate(rules)
    ]
    scales, shifts = zip(*pairs, strict=True)
    logs = tuple(rule.kind == LOG for rule in rules)
    return Scaling(scales, shifts, logs if any(logs) else False)


def _fitted(rule: Rule, channel: int, grid: Grid, found: Measured | None) -> tuple[float, float]:
    """Scale and shift."""
    assert found is not None
    name, low, high = grid.channel(channel), float(found.values.low[channel]), float(found.values.high[channel])
    problem = f"scaling={rule.kind!r} of {name} is impossible"
    if found.values.count[channel] == 0:
        raise InputError(f"{problem}, which has no finite value: leave the channel out.")
    if low == high:
        raise InputError(
            f"{problem}, which is {low:g} everywhere: leave the channel out, or use linear:scale=…,shift=…."
        )
    if rule.kind == LOG and low <= 0:
        raise InputError(f"{problem}, which has values down to {low:g}: choose another scaling.")
    if rule.kind == RANGE:
        return (high - low) / 2, (high + low) / 2
    moments = found.logs if rule.kind == LOG else found.values
    return float(moments.deviation[channel]), float(moments.mean[channel])
