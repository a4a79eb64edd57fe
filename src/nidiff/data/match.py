"""The data of a file on the grid of a model.

What differs in its units or in the order of its channels, axes or points is converted and reordered, and warned of in
one sentence. Anything else is refused with both values. A format that says nothing, such as .npy, is taken as it is.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import LARGEST, Dataset, Source, Values
from nidiff.data.grid import USUAL, Grid
from nidiff.errors import FileError, shown
from nidiff.extras import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

File: TypeAlias = tuple[str, str]
"""The argument that named a file, and its name."""
Numbers: TypeAlias = "NDArray[np.float64]"

TOLERANCE = 0.01  # of the step between two points: coordinates that are so near are the same
ROUNDING = 1e-6  # of the largest coordinate, as float32 rounds
SINCE = " since "  # in the unit of times
ELSEWHERE = "give it at these points, such as by sel or interp of xarray"


def match(
    data: Dataset, grid: Grid, argument: str, name: str, *, are_named: bool = False, are_means: bool = False
) -> Dataset:
    """The data of the file ``name`` on the ``grid`` of a model.

    Variables that the user has named (``are_named``) are the channels in this order, whatever they are called. Of means
    over blocks of points (``are_means``) the file must have just those of the grid: others may be the points
    themselves. Data with another number of axes stay as they are, and have another shape than the model's.
    """
    mine, file, notes = data.grid, (argument, name), list[str]()
    if len(mine.axes) != len(grid.axes):
        return data
    if mine.rate is not None and grid.rate not in (None, mine.rate):
        problem = f"has {mine.rate} samples per second, and {grid.rate} are needed"
        raise FileError(*file, problem, f"resample it to {grid.rate}, such as by scipy.signal.resample_poly")
    rows = _channels(mine, grid, file, are_named, notes)
    converters = _converters(mine, rows or range(data.shape[0]), grid, file, notes)
    order = _order(mine, grid, notes)
    places = [_places(mine, mine.axes[of], grid, axis, file, notes) for of, axis in zip(order, grid.axes, strict=True)]
    if are_means and any(
        len(place) < data.shape[1 + of] for of, place in zip(order, places, strict=True) if place is not None
    ):
        return data
    if notes:
        warnings.warn(f"{shown(name)}: {'; '.join(notes)}.", stacklevel=2)

    def arranged(values: Tensor) -> Tensor:
        values = values if rows is None else values[:, rows]
        values = values.permute(0, 1, *(2 + axis for axis in order))
        for axis, place in enumerate(places):
            values = values if place is None else values.index_select(2 + axis, torch.from_numpy(place))
        if converters:
            values = values.clone() if values.is_floating_point() else values.double()
        for channel, convert in converters.items():
            values[:, channel] = torch.from_numpy(convert(values[:, channel].double().numpy())).to(values.dtype)
        return values.contiguous()

    values: Values = data.values
    if isinstance(values, Tensor):
        values = arranged(values)
    else:
        read, example = values.index_select, arranged(torch.zeros(1, *data.shape, dtype=values.dtype))
        values = Source((len(data), *example.shape[1:]), example.dtype, lambda index: arranged(read(0, index)))
    return replace(data, values=values, grid=replace(grid, dtype=mine.dtype, condition=None))


def check_type(values: Tensor, grid: Grid, argument: str, name: str) -> None:
    """Refuse whole numbers of another type than the model's, and floats up to 1 for a model of whole numbers."""
    stored = str(values.dtype).removeprefix("torch.")
    if not values.is_floating_point():
        if stored != grid.dtype:
            problem = f"holds {stored}, and the model's data are {grid.dtype}"
            raise FileError(argument, name, problem, "convert it to their type")
        return
    known = values[values.isfinite()] if grid.dtype in LARGEST else values[:0]
    low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
    if 0 < max(-low, high) <= 1:
        largest = LARGEST[grid.dtype]
        problem = f"holds numbers from {low:.3g} to {high:.3g}, and the model's data are {grid.dtype}, 0 to {largest}"
        raise FileError(argument, name, problem, "give it in the units of those data")


# Channels ------------------------------------------------------------------------------------------------------------


def _channels(mine: Grid, grid: Grid, file: File, are_named: bool, notes: list[str]) -> list[int] | None:
    """Which channel of the file each of the model's is; None: the same, in the same order."""
    if not mine.channels or not grid.channels or mine.channels == grid.channels:
        return None
    if {*grid.channels} <= {*mine.channels}:
        return [mine.channels.index(name) for name in grid.channels]
    if are_named and len(mine.channels) == len(grid.channels):
        pairs = zip(mine.channels, grid.channels, strict=True)
        notes.extend(f"{given} is taken as {name}" for given, name in pairs if given != name)
        return None
    raise other_variables(mine.channels, grid, *file)


def other_variables(names: Iterable[str], grid: Grid, argument: str, name: str) -> FileError:
    """The error of a file without the variables that are the channels of a model."""
    names = [*names]
    problem = f"has the variables {', '.join(names)}, and the channels are {', '.join(grid.channels)}"
    remedy = "rename them, or name them in this order with `variables`"
    if len(names) < len(grid.channels):  # no name can make more of them
        remedy = f"add {', '.join(channel for channel in grid.channels if channel not in names)}"
    return FileError(argument, name, problem, remedy)


def _converters(
    mine: Grid, rows: Sequence[int], grid: Grid, file: File, notes: list[str]
) -> dict[int, Callable[[Numbers], Numbers]]:
    """For the channels whose unit is not the model's, from the one to the other."""
    converters, names = {}, grid.channels or mine.channels or [f"channel {row}" for row in rows]
    if not (mine.channels or mine.units) or len({len(rows), len(names), len(grid.units or rows)}) > 1:
        return {}  # an array, which has no units, or another number of channels, which is refused by its shape
    for channel, row in enumerate(rows):
        given, wanted = mine.units[row] if mine.units else "", grid.units[channel] if grid.units else ""
        label = names[channel]
        if given.split() == wanted.split():
            continue
        if not given:
            notes.append(f"it has no unit for {label}, which is taken to be in {wanted}")
        elif not wanted:
            notes.append(f"{label} is in {given}, and its unit is not known to the model")
        else:
            converters[channel] = _converter(label, given, wanted, file, notes)
    return {channel: convert for channel, convert in converters.items() if convert is not None}


# Axes ----------------------------------------------------------------------------------------------------------------


def _order(mine: Grid, grid: Grid, notes: list[str]) -> list[int]:
    """Which axis of the file each axis of the model is."""
    usual = [*range(len(grid.axes))]
    if {*mine.axes} == {*grid.axes}:
        keys, wanted = mine.axes, grid.axes
    elif mine.axes == USUAL.get(len(usual)):  # names that nobody has given
        return usual
    else:
        keys, wanted = _kinds(mine), _kinds(grid)
    order = [keys.index(key) if key in keys else None for key in wanted]
    rest = [axis for axis in usual if axis not in order]
    names, others = ", ".join(mine.axes), ", ".join(grid.axes)
    if len(rest) > 1:
        notes.append(f"its axes ({names}) are taken as ({others})")
    remaining = iter(rest)
    axes = [next(remaining) if axis is None else axis for axis in order]
    if axes != usual:
        notes.append(f"transposed ({names}) to ({others})")
    return axes


def axes_within(names: Sequence[str], units: Sequence[str], grid: Grid) -> list[str]:
    """Which of the axes ``names`` of a file are those of a grid."""
    if {*grid.axes} <= {*names}:
        return [name for name in names if name in grid.axes]
    kinds, known = [_kind(name, unit) for name, unit in zip(names, units, strict=True)], {*_kinds(grid)}
    return [name for name, kind in zip(names, kinds, strict=True) if name in grid.axes or kind in known]


def _kinds(grid: Grid) -> tuple[str, ...]:
    """What each axis is; its name where two would be the same."""
    kinds = [_kind(axis, grid.axis_units.get(axis, "")) for axis in grid.axes]
    return tuple(axis if kinds.count(kind) > 1 else kind for axis, kind in zip(grid.axes, kinds, strict=True))


def _kind(axis: str, unit: str) -> str:
    """X, Y, Z or T, by the names of the CF conventions, or the name of the axis."""
    role = _role(axis, unit)
    return {"longitude": "X", "latitude": "Y", "time": "T"}.get(role, role)


def _role(axis: str, unit: str) -> str:
    """latitude, longitude, time, X, Y or Z, as the CF conventions know it by its unit or name, or the name itself."""
    names = require("cf_xarray.criteria").regex.items()
    by_name = next((role for role, pattern in names if pattern.fullmatch(axis.lower())), axis)
    return role_by_attributes({"units": unit}) or by_name


def columns_of_axes(names: Sequence[str], units: Mapping[str, str], grid: Grid) -> list[str | None]:
    """Which of the columns ``names`` of a table is the coordinate of each axis of a grid; None where none is."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(_kind(name, units.get(name, "")), name)
    return [axis if axis in names else kinds.get(kind) for axis, kind in zip(grid.axes, _kinds(grid), strict=True)]


def is_time(name: str, grid: Grid) -> bool:
    """Whether a column of a table says when its rows were, and is no axis of the grid."""
    return (_kind(name, "") == "T" or name.lower() in ("date", "datetime")) and "T" not in _kinds(grid)


def turn_of(grid: Grid, axis: int) -> float | None:
    """The circle of an axis of longitudes, in its unit; None for any other."""
    name = grid.axes[axis]
    return _period(name, grid.axis_units.get(name, ""))


def converted(
    values: Numbers, label: str, units: tuple[str, str], file: File, notes: list[str], is_difference: bool = False
) -> Numbers:
    """Numbers in the first of two ``units`` in the second one; those of a ``difference``, such as an error, without
    the offset between two scales of temperature. What was done is added to ``notes``."""
    given, wanted = units
    if given.split() == wanted.split():
        return values
    if not given or not wanted:
        known = f"it has no unit for {label}, which is taken to be in {wanted}"
        notes.append(known if wanted else f"{label} is in {given}, and its unit is not known to the model")
        return values
    convert = _converter(label, given, wanted, file, notes)
    if convert is None:
        return values
    return convert(values) - convert(np.zeros(1)) if is_difference else convert(values)


def axis_of(grid: Grid, role: str) -> int | None:
    """Which axis of a grid is that of the latitude, the longitude or the time; None if none is, or several are."""
    axes = [place for place, axis in enumerate(grid.axes) if _role(axis, grid.axis_units.get(axis, "")) == role]
    return axes[0] if len(axes) == 1 else None


def role_by_attributes(about: Mapping[str, str]) -> str | None:
    """latitude, longitude, T, X, Y, Z or vertical, by the attributes of a coordinate that the CF conventions know."""
    if SINCE in about.get("units", ""):
        return "T"
    criteria = require("cf_xarray.criteria").coordinate_criteria.items()
    return next((role for role, known in criteria if any(about.get(key) in known[key] for key in known)), None)


def _places(mine: Grid, axis: str, grid: Grid, name: str, file: File, notes: list[str]) -> "NDArray[np.int64] | None":
    """Where along an axis of the file the points of the model's axis ``name`` are; None: they are the same."""
    wanted, given = np.array(grid.coordinates.get(name, ())), np.array(mine.coordinates.get(axis, ()))
    if not len(wanted):
        return None
    if not len(given):
        if mine.channels:  # of a format that has coordinates
            notes.append(
                f"it has no coordinates along {axis}, which is taken to go from {wanted[0]:g} to {wanted[-1]:g}"
            )
        return None
    units = mine.axis_units.get(axis, ""), grid.axis_units.get(name, "")
    is_time = any(SINCE in unit for unit in units) or _role(name, units[1]) == "time"
    if is_time:  # which may begin at any time
        units = units[0].partition(SINCE)[0], units[1].partition(SINCE)[0]
        given, wanted = given - given[0], wanted - wanted[0]
    there = given
    if all(units) and units[0].split() != units[1].split():
        convert = _converter(axis, *units, file, notes)
        there = given if convert is None else convert(given)
    step = min((step for step in np.abs(np.diff(wanted)) if step), default=max(1.0, abs(wanted[0])) / 100)
    near = min(max(TOLERANCE * step, ROUNDING * np.abs(wanted).max()), step / 4)
    if len(there) == len(wanted) and np.abs(there - wanted).max() <= near:
        return None
    if is_time:
        here, needed = (f"{len(times)} in steps of {times[-1] / max(1, len(times) - 1):g}" for times in (there, wanted))
        problem = f"has times along {axis}, {here}, and {needed} {units[1]} are needed"
        raise FileError(*file, problem, ELSEWHERE)
    places, far = _nearest(there, wanted, _period(name, units[1]))
    if far.max() > near:
        here, needed = (
            f"{len(values)} points from {values[0]:g} to {values[-1]:g} {unit}".rstrip()
            for values, unit in zip((given, wanted), units, strict=True)
        )
        problem = f"has {here} along {axis}, and {needed} are needed, of which some are {far.max():.3g} away"
        raise FileError(*file, problem, ELSEWHERE)
    notes.append(_described(places, len(given), axis))
    return places


def _nearest(there: Numbers, wanted: Numbers, period: float | None) -> "tuple[NDArray[np.int64], Numbers]":
    """The place in ``there`` that is nearest to each of the ``wanted`` numbers, and how far it is."""
    if period is not None:
        there, wanted = there % period, wanted % period
    ranks = np.argsort(there)
    if period is not None:  # the first is a neighbour of the last
        ranks = ranks[[-1, *range(len(ranks)), 0]]
    rising = there[ranks]
    if period is not None:
        rising[0], rising[-1] = rising[0] - period, rising[-1] + period
    right = np.searchsorted(rising, wanted).clip(min(1, len(rising) - 1), len(rising) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(wanted - rising[left] <= rising[right] - wanted, left, right)
    return ranks[nearest], np.abs(rising[nearest] - wanted)


def _period(axis: str, unit: str) -> float | None:
    """The circle in the unit of a longitude; None for any other axis."""
    if _role(axis, unit) != "longitude":
        return None
    turn = _conversion("degree", unit or "degree")
    return None if turn is None else float(turn(np.array([360.0]))[0])


def _described(places: "NDArray[np.int64]", size: int, axis: str) -> str:
    """What was done along an axis of so many points."""
    count = len(places)
    if size > count:
        return f"took {count} of its {size} points along {axis}"
    shifts = {*((places - np.arange(count)) % count).tolist()}
    if shifts == {0}:
        return f"took {axis} modulo a turn"
    if (np.diff(places) == -1).all():
        return f"reversed {axis}"
    return f"rolled {axis} by {shifts.pop()} points" if len(shifts) == 1 else f"reordered {axis}"


# Units ---------------------------------------------------------------------------------------------------------------

# How files spell what the units library calls otherwise, or takes for a degree of an angle times something.
DEGREES = re.compile(r"(?:(?:deg(?:ree)?s?|[°º])[ _.]?(c|k|f)(?:elsius|entigrade|elvin|ahrenheit)?|"
                     r"(c)elsius|(c)entigrade|(k)elvin|(f)ahrenheit)\b", re.IGNORECASE)  # fmt: skip
NORTH = re.compile(r"(?:deg(?:ree)?s?|[°º])[ _]?(?:n|e|north|east)", re.IGNORECASE)
SPELLINGS = {"mb": "millibar", "℃": "degC", "(0 - 1)": "1", "unitless": "1", "fraction": "1"}
LONGEST = 60  # letters of a unit
TERM = r"(?:1|[A-Za-zµμ%_]+(?:(?:\*\*|\^)?[-+]?\d{1,2})?)"
PRODUCT = re.compile(rf"{TERM}(?:\s*[*/.\s]\s*{TERM})*")  # nothing else is given to the library, which computes powers


def _converter(
    label: str, given: str, wanted: str, file: File, notes: list[str]
) -> Callable[[Numbers], Numbers] | None:
    """From the unit of the file to that of the model, None if they are spellings of one unit; refused if it is not
    certain."""
    convert = _conversion(given, wanted)
    if convert is None:
        problem = f"has {label} in {shown(given)}, and {shown(wanted)} is needed"
        raise FileError(*file, problem, f"convert it to {shown(wanted)}, or correct the attribute units")
    if convert(np.arange(2.0)).tolist() == [0, 1]:
        return None
    notes.append(f"converted {label} from {given} to {wanted}")
    return convert


@cache
def _conversion(given: str, wanted: str) -> Callable[[Numbers], Numbers] | None:
    """Between two units of one quantity by a factor, and an offset for temperatures; None if they are not."""
    registry, (a, b) = require("cf_xarray.units").units, (_unit(given), _unit(wanted))
    # The same base units, which are more than the same dimension: a degree is not a fraction, nor salinity.
    if a is None or b is None or registry.get_root_units(a)[1] != registry.get_root_units(b)[1]:
        return None

    def convert(values: Numbers) -> Numbers:
        converted: Numbers = registry.convert(values, a, b)
        return converted

    zero, first, second = convert(np.arange(3.0))
    is_linear = abs(second - 2 * first + zero) <= 1e-9 * max(abs(zero), abs(second))  # a logarithm is not
    return convert if is_linear else None


def _unit(text: str) -> Any:
    """The unit that a text names; None if it is not certain."""
    names, registry = {"c": "degC", "k": "kelvin", "f": "degF"}, require("cf_xarray.units").units
    text = DEGREES.sub(lambda match: names[next(filter(None, match.groups())).lower()], text).strip()
    text = "degree" if NORTH.fullmatch(text) else SPELLINGS.get(text, text)
    if len(text) > LONGEST or not PRODUCT.fullmatch(text):
        return None
    try:
        return registry.parse_units(text)
    except Exception:  # the library raises nearly anything for a unit it does not know
        return None
