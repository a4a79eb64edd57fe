"""The scaling between the units of the data and those of the model, fitted to each channel in one pass."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import LARGEST, WHOLE, Dataset, is_small_part
from nidiff.data.moments import RunningMoments
from nidiff.data.parts import SPREAD
from nidiff.data.sources import blocks, spread_rows
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError
from nidiff.notation import call, parse_call
from nidiff.recipe import check_number

AUTO = "auto"
STANDARD, RANGE, LOG = "standard", "range", "log"  # what is fitted
FAR = 10.0  # times too small or too large
MOST_NAMED = 5  # channels that are listed


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


def as_rules(texts: Sequence[str], data: Dataset, rows: Tensor) -> list[str | Scaling]:
    """The rule of each channel, from one text for all of them or one for each: standard, range or log, which are to be
    fitted, or a scaling. ``none`` is the usual one of the ``data``: floats stay as they are, and whole numbers go from
    the range of their type to [−1, 1]. ``auto`` of whole numbers is that too, unless the ``rows`` use a small part of
    that range: then it is their own range."""
    channels, dtype = data.shape[0], data.values.dtype
    if len(texts) not in (1, channels):
        problem = f"has {len(texts)} texts for {channels} channels"
        raise InputError("scaling", tuple(texts), problem, "give one, or one per channel")
    known: dict[str, Callable[..., str | Scaling]] = {
        AUTO: lambda: STANDARD if dtype.is_floating_point else part_of_range(data, rows) or data.scaling,
        "none": lambda: data.scaling,
        "linear": _linear,
        STANDARD: lambda: STANDARD,
        RANGE: lambda: RANGE,
        LOG: lambda: LOG,
    }
    rules = [call("scaling", *parse_call("scaling", text), known) for text in texts]
    return rules if len(rules) == channels else rules * channels


def part_of_range(data: Dataset, rows: Tensor) -> Scaling | None:
    """The scaling of whole numbers that use a small part of the range of their type, from that part to [−1, 1]; None if
    they use more, which is known as soon as it is seen, or are all the same."""
    low, high, dtype = np.inf, -np.inf, data.grid.dtype
    for part in blocks(rows, data.shape, "measuring", progress=False):
        block = data.stored(part).numpy()
        low, high = min(low, float(block.min())), max(high, float(block.max()))
        if low < high and not is_small_part(low, high, dtype):
            return None
    if low == high:
        return None
    return Scaling((high - low) / 2, (high + low) / 2)


def scaling_remarks(data: Dataset) -> list[str]:
    """What a user should know of what the model will see: the part of a type's range that whole numbers use, if that
    was chosen; and channels that, in a few items spread over the ``data``, are far from 0 ± 1, for which schedules and
    networks are made."""
    remarks, dtype = [], data.grid.dtype
    if data.in_range and data.scaling != WHOLE[dtype]:
        low, high = (data.scaling.to_data(torch.tensor(end, dtype=torch.float64)).item() for end in (-1, 1))
        part = f"the {dtype} values use {low:g} to {high:g}, a small part of 0 to {LARGEST[dtype]}"
        remarks.append(f"{part}: that part becomes -1 to 1 (--scaling none takes all of it)")
    moments = RunningMoments(data.shape[0])
    for rows in blocks(spread_rows(len(data), SPREAD), data.shape, "measuring", progress=False):
        moments.add(data.batch(rows).double().movedim(1, 0).flatten(1).numpy())
    far = [
        f"{data.grid.channel(channel)} {mean:.3g} ± {deviation:.3g}"
        for channel, (mean, deviation) in enumerate(zip(moments.mean, moments.deviation, strict=True))
        if 0 < deviation < 1 / FAR or math.hypot(mean, deviation) > FAR
    ]
    if far:
        named = ", ".join(far[:MOST_NAMED]) + (f" and {len(far) - MOST_NAMED} more" if len(far) > MOST_NAMED else "")
        remarks.append(
            f"the model sees data far from 0 ± 1 (mean ± standard deviation: {named}): try --scaling standard"
        )
    return remarks


def _linear(scale: float, shift: float = 0.0) -> Scaling:
    """data = scale · x + shift."""
    return Scaling(check_number("scale", scale), check_number("shift", shift))


def fit_scaling(rules: Sequence[str | Scaling], data: Dataset, statistics: Statistics | None) -> Scaling:
    """The scaling by ``rules``: ``standard`` has mean 0 and standard deviation 1 in the model, ``range`` the least
    value at −1 and the largest at 1, ``log`` is ``standard`` of the logarithm."""
    if isinstance(rules[0], Scaling) and all(rule == rules[0] for rule in rules):
        return rules[0]
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
