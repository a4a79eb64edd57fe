"""The scaling between the units of the data and those of the model, fitted in one pass: to each channel, or to each of
its points, and to the months or days of the year."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import LARGEST, WHOLE, Dataset, is_small_part
from nidiff.data.moments import PointMoments, RunningMoments
from nidiff.data.parts import SPREAD
from nidiff.data.sources import blocks, spread_rows
from nidiff.diffusion.climatology import NAME, PHASES, Climatology, phases
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, one_of
from nidiff.memory import require_memory
from nidiff.notation import call, parse_call
from nidiff.recipe import check_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

AUTO = "auto"
STANDARD, RANGE, LOG = "standard", "range", "log"  # what is fitted
CHANNEL, PIXEL = "channel", "pixel"  # over what
LEAST_SHARE = 0.01  # of the deviation of its channel that a point is taken to have
WINDOW = 15  # days before and after, over which the mean of a day is smoothed
FAR = 10.0  # times too small or too large
MOST_NAMED = 5  # channels that are listed


class Fitted(NamedTuple):
    """What is fitted to a channel: `STANDARD`, `RANGE` or `LOG`, over all its points or at each of them."""

    kind: str
    is_per_pixel: bool = False


class Statistics(NamedTuple):
    """What one pass over the data measures: the values, and the logarithm of the channels that need it; and of each
    point, where that is asked for, by the month or day of the year."""

    values: RunningMoments
    logs: RunningMoments
    points: PointMoments | None = None


def measure(
    data: Dataset, rows: Tensor, rules: "Sequence[Fitted | Scaling]", by: str | None = None, *, progress: bool = False
) -> Statistics:
    """The moments of the finite values of some rows, a block at a time."""
    channels, logs = data.shape[0], [isinstance(rule, Fitted) and rule.kind == LOG for rule in rules]
    needs_points = by is not None or any(isinstance(rule, Fitted) and rule.is_per_pixel for rule in rules)
    size = math.prod(data.shape)
    if by is not None:
        require_memory(
            "remove", f"{NAME}:by={by}", 40.0 * PHASES[by] * size, "remove it by month, or take smaller items"
        )
    points = PointMoments(1 if by is None else PHASES[by], size) if needs_points else None
    statistics = Statistics(RunningMoments(channels), RunningMoments(channels), points)
    for part in blocks(rows, data.shape, "measuring", progress):
        values = data.stored(part).numpy().astype(np.float64)
        block = np.moveaxis(values, 1, 0).reshape(channels, -1)
        statistics.values.add(block)
        if any(logs):
            with np.errstate(invalid="ignore", divide="ignore"):
                block = np.log(np.where(np.asarray(logs)[:, None], block, 1.0))
            statistics.logs.add(block)
        if points is not None:
            if any(logs):
                values[:, logs] = np.moveaxis(block.reshape(channels, len(part), *data.shape[1:]), 0, 1)[:, logs]
            place = np.zeros(len(part), np.int64) if by is None else phases(times_of(data)[part.numpy()], by)
            points.add(values.reshape(len(part), -1), place)
    return statistics


def as_removed(text: str | None, data: Dataset) -> str | None:
    """Over what the climatology that is taken away is a mean, month or day; None if none is. The times of all items
    must be known."""
    if text is None:
        return None

    def climatology(by: str = "month") -> str:
        return one_of("remove", by, PHASES)

    by: str = call("remove", *parse_call("remove", text), {NAME: climatology})
    times_of(data)
    if not data.values.dtype.is_floating_point:
        raise InputError("remove", text, f"is for floats, and these are {data.grid.dtype}", "store them as floats")
    return by


def times_of(data: Dataset) -> Any:
    """When the items were, for a climatology."""
    if data.times is None or bool(np.isnat(data.times).any()):
        axis = "they have no coordinate" if data.along is None else f"their axis {data.along[0]!r} has none"
        problem = f"needs the times of the items in the calendar of everyday life, and {axis}"
        remedy = "give NetCDF or Zarr with times, from another calendar by convert_calendar of xarray"
        raise InputError("remove", NAME, problem, remedy)
    return data.times


def as_rules(texts: Sequence[str], data: Dataset, rows: Tensor) -> list[Fitted | Scaling]:
    """The rule of each channel, from one text for all of them or one for each: standard, range or log, which are to be
    fitted, or a scaling. ``none`` is the usual one of the ``data``: floats stay as they are, and whole numbers go from
    the range of their type to [−1, 1]. ``auto`` of whole numbers is that too, unless the ``rows`` use a small part of
    that range: then it is their own range."""
    channels, dtype = data.shape[0], data.values.dtype
    if len(texts) not in (1, channels):
        problem = f"has {len(texts)} texts for {channels} channels"
        raise InputError("scaling", tuple(texts), problem, "give one, or one per channel")

    def moments(kind: str) -> Callable[..., Fitted]:
        def fitted(per: str = CHANNEL) -> Fitted:
            return Fitted(kind, one_of("scaling", per, (CHANNEL, PIXEL)) == PIXEL)

        return fitted

    known: dict[str, Callable[..., Fitted | Scaling]] = {
        AUTO: lambda: Fitted(STANDARD) if dtype.is_floating_point else part_of_range(data, rows) or data.scaling,
        "none": lambda: data.scaling,
        "linear": _linear,
        STANDARD: moments(STANDARD),
        RANGE: lambda: Fitted(RANGE),
        LOG: moments(LOG),
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


def fit_scaling(
    rules: Sequence[Fitted | Scaling],
    data: Dataset,
    statistics: Statistics | None,
    by: str | None = None,
    domain: Tensor | None = None,
) -> Scaling:
    """The scaling by ``rules``: ``standard`` has mean 0 and standard deviation 1 in the model, ``range`` the least
    value at −1 and the largest at 1, ``log`` is ``standard`` of the logarithm. A climatology ``by`` month or day is
    taken away first; outside of the ``domain`` there are no data."""
    if statistics is not None and statistics.points is not None:
        return _fit_points(rules, data, statistics, by, domain)
    if isinstance(rules[0], Scaling) and all(rule == rules[0] for rule in rules):
        return replace(rules[0], domain=domain)
    pairs: list[Any] = []
    for channel, rule in enumerate(rules):
        if isinstance(rule, Scaling):
            pairs.append((rule.scale, rule.shift))
        else:
            assert statistics is not None
            pairs.append(_fitted(rule.kind, channel, data.grid.channel(channel), statistics))
    scales, shifts = zip(*pairs, strict=True)
    return Scaling(scales, shifts, _logs(rules), domain=domain)


def _logs(rules: Sequence[Fitted | Scaling]) -> bool | tuple[bool, ...]:
    logs = tuple(isinstance(rule, Fitted) and rule.kind == LOG for rule in rules)
    return logs if any(logs) else False


def _fit_points(
    rules: Sequence[Fitted | Scaling],
    data: Dataset,
    statistics: Statistics,
    by: str | None,
    domain: Tensor | None,
) -> Scaling:
    """The scaling of numbers for each point, or of differences from a climatology. A point that varies less than a
    hundredth of its channel, as one that never varies, is taken to vary by that."""
    points: Any = statistics.points
    means = points.known() if by != "day" else smoothed(points)
    variances = points.about(means).reshape(data.shape[0], -1)
    known = points.count.sum(0).reshape(data.shape[0], -1)
    columns: list[Any] = []
    for channel, rule in enumerate(rules):
        if isinstance(rule, Scaling):
            columns.append((np.full(known.shape[1], rule.scale), np.full(known.shape[1], rule.shift)))
            continue
        if by is not None and rule.kind != STANDARD:
            problem = f"leaves differences of both signs, and {rule.kind} is not for them"
            raise InputError("remove", NAME, problem, "use the scaling standard or linear")
        scale, shift = _fitted(rule.kind, channel, data.grid.channel(channel), statistics)  # which refuses a constant
        if rule.kind == RANGE:
            columns.append((np.full(known.shape[1], scale), np.full(known.shape[1], shift)))
            continue
        inside, variance, count = known[channel] > 0, variances[channel], known[channel]
        whole = math.sqrt((variance[inside] * count[inside]).sum() / count[inside].sum())  # without the climate
        if not whole > 0:
            problem = f"is impossible for {data.grid.channel(channel)}, which never differs from its mean there"
            raise InputError("scaling", rule.kind, problem, "leave the channel out, or give more items")
        each = np.sqrt(np.where(inside, variance, whole**2)).clip(LEAST_SHARE * whole)
        each = each if rule.is_per_pixel else np.full_like(each, whole if by is not None else scale)
        middle = points.mean.reshape(1, *known.shape)[0, channel] if by is None and rule.is_per_pixel else None
        columns.append((each, np.full_like(each, 0.0 if by is not None else shift) if middle is None else middle))
    fields = (torch.from_numpy(np.stack(each)).reshape(data.shape) for each in zip(*columns, strict=True))
    scales, shifts = cast("tuple[Any, Any]", tuple(fields))
    climatology = None
    if by is not None:
        climatology = Climatology(by, torch.from_numpy(means).reshape(-1, *data.shape))
    if not any(isinstance(rule, Fitted) and rule.is_per_pixel for rule in rules):  # numbers, one for each channel
        scales, shifts = (tuple(each.flatten(1)[:, 0].tolist()) for each in (scales, shifts))
    return Scaling(scales, shifts, _logs(rules), climatology, domain)


def smoothed(points: PointMoments) -> "NDArray[np.float64]":
    """The means by day of the year, each over the days around it with weights that fall to 0 after `WINDOW` days: a day
    has few items of its own. NaN where none of these days has items."""
    days = len(points.count)
    away = np.abs(np.arange(days)[:, None] - np.arange(days))
    weights = np.maximum(0.0, 1 - np.minimum(away, days - away) / (WINDOW + 1))
    totals, counts = weights @ (points.count * points.mean), weights @ points.count
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(totals / counts)


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
