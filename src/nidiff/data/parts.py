"""Parts of a data set: the items of one file each, which are one data set if the files agree."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Along, Dataset, Source, Window, type_name
from nidiff.data.grid import Grid
from nidiff.data.match import SINCE, TOLERANCE
from nidiff.data.moments import RunningMoments
from nidiff.data.sources import Limits, gather, load_or_stream, spread_rows
from nidiff.errors import FileError, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

NUMBERS = "biuf"  # the kinds of dtype that are numbers
LOSS, SPREAD = 1e-4, 64  # of the standard deviation; items that are looked at


class Part(NamedTuple):
    """The items of one file, and what it says of them."""

    name: str
    shape: tuple[int, ...]
    """[N, C, *event]."""
    dtype: "np.dtype[Any]"
    read: "Callable[[NDArray[Any]], NDArray[Any]]"
    """From rising rows to their items."""
    grid: Grid
    along: "tuple[str, NDArray[Any] | None] | None" = None
    """The name of the axis of the items, and their coordinate if it has one."""
    is_by_item: bool = True
    """Whether items are read without the others."""
    read_part: "Callable[[int, Window], NDArray[Any]] | None" = None
    """From a row and a slice of each axis of the event to that part of the item, where it can be read by itself."""
    counts_from: str = ""
    """The unit of the coordinate of the items, where it is of times that are numbers."""


def joined(parts: Sequence[Part], name: str, limits: Limits) -> Dataset:
    """The items of all parts, in their order; parts that disagree are refused. Those of more bytes than the memory
    limit are read batch by batch, if that is possible."""
    first = parts[0]
    for part in parts[1:]:
        if (difference := _difference(first, part)) is not None:
            about, mine, other = difference
            remedy = "make all files alike, or give those that are"
            raise FileError("data", part.name, f"has {about} {mine}, but {shown(first.name)} has {other}", remedy)
    counts = np.array([part.shape[0] for part in parts])
    ends = counts.cumsum()

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        of = np.searchsorted(ends, rows, "right")
        return np.concatenate([parts[i].read(rows[of == i] - (ends[i] - counts[i])) for i in np.unique(of)])

    readers = [part.read_part for part in parts if part.read_part is not None]

    def read_part(row: int, window: Window) -> "NDArray[Any]":
        i = int(np.searchsorted(ends, row, "right"))
        return readers[i](row - int(ends[i] - counts[i]), window)

    shape, dtype = (int(ends[-1]), *first.shape[1:]), np.result_type(*{part.dtype for part in parts})
    source = numbers_source(shape, dtype, read, read_part if len(readers) == len(parts) else None)
    is_by_item = all(part.is_by_item for part in parts)
    values = load_or_stream(source, name, limits if is_by_item else limits._replace(memory_limit=None))
    return Dataset(values, grid=replace(first.grid, dtype=type_name(source)), along=_along(parts, name))


def numbers_source(
    shape: Sequence[int],
    dtype: "np.dtype[Any]",
    read: "Callable[[NDArray[Any]], NDArray[Any]]",
    read_part: "Callable[[int, Window], NDArray[Any]] | None" = None,
) -> Source:
    """What ``read`` gives for rising rows, as ``dtype``; as float32 if that is float64 and not needed. And what
    ``read_part`` gives for one row and a part of the event, if that can be read by itself."""

    def source(dtype: "np.dtype[Any]") -> Source:
        def stored(rows: "NDArray[Any]") -> "NDArray[Any]":
            return as_stored_numbers(read(rows), dtype)

        def stored_part(row: int, window: Window) -> Tensor:
            assert read_part is not None
            return torch.from_numpy(as_stored_numbers(read_part(row, window), dtype))

        part = None if read_part is None else stored_part
        return Source(tuple(shape), getattr(torch, dtype.name), partial(gather, read=stored), part)

    wide = source(dtype)
    return wide if dtype != np.float64 or needs_float64(wide) else source(np.dtype(np.float32))


def needs_float64(source: Source) -> bool:
    """Whether `float32_loses` digits of a channel at its largest magnitude, by a few items spread over all."""
    if 0 in source.shape:
        return False
    moments = RunningMoments(source.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        for row in spread_rows(len(source), SPREAD)[:, None]:
            moments.add(source.read(row)[0].flatten(1).numpy())
    largest = np.maximum(abs(moments.low), abs(moments.high))
    varies = moments.deviation > 0
    return float32_loses(largest[varies], moments.deviation[varies])


def float32_loses(size: "ArrayLike", deviation: "ArrayLike") -> bool:
    """Whether float32 rounds numbers of some ``size`` by more than a ten-thousandth of their standard ``deviation``."""
    return bool((np.abs(size) * 2.0**-24 > LOSS * np.abs(deviation)).any())


def stored_type(name: str, dtype: "DTypeLike") -> "np.dtype[Any]":
    """The type in which the numbers of a file or variable are held: uint8, uint16, or floats that have all of their
    digits, float32 or float64."""
    dtype = np.dtype(dtype)
    if dtype.kind == "u" and dtype.itemsize <= 2:
        return dtype.newbyteorder("=")
    if dtype.kind not in NUMBERS:
        remedy = "give its real and imaginary parts as channels" if dtype.kind == "c" else "give numbers"
        raise FileError("data", name, f"has dtype {dtype}", remedy)
    return np.dtype(np.float32 if dtype.itemsize <= (4 if dtype.kind == "f" else 2) else np.float64)


def as_stored_numbers(array: "NDArray[Any]", dtype: "np.dtype[Any]") -> "NDArray[Any]":
    """A copy as ``dtype``; what it cannot hold becomes infinite, which is refused or filled later."""
    with np.errstate(over="ignore"):
        return np.array(array, dtype=dtype, order="C")


def _difference(first: Part, part: Part) -> tuple[str, object, object] | None:
    """What two files disagree in, with the value of the second and of the first; None if they are of one data set."""
    mine, others = _facts(part), _facts(first)
    about = next((about for about in mine if mine[about] != others.get(about)), None)
    if about is not None:
        return about, mine[about], others.get(about, "none")
    for axis in first.grid.axes:
        given, wanted = (np.array(grid.coordinates.get(axis, ())) for grid in (part.grid, first.grid))
        if SINCE in first.grid.axis_units.get(axis, ""):  # times, which may begin at any time
            given, wanted = given - given[:1], wanted - wanted[:1]
        if not _are_near(given, wanted):
            return axis, _described(given), _described(wanted)
    return None


def _facts(part: Part) -> dict[str, Any]:
    """What all files of a data set have in common, but for coordinates."""
    grid = part.grid
    units = {axis: grid.axis_units.get(axis, "").partition(SINCE)[0] for axis in grid.axes}
    return {
        "the channels": list(grid.channels) or part.shape[1],
        "the units": list(grid.units),
        "the axes": list(grid.axes),
        "items of shape": part.shape[1:],
        "items along": part.along[0] if part.along else "",
        "the type": part.dtype.name if part.dtype.kind == "u" else "float",
        "times in": part.counts_from,
        **{f"{axis} in": unit for axis, unit in units.items()},
    }


def _are_near(given: "NDArray[Any]", wanted: "NDArray[Any]") -> bool:
    if len(given) != len(wanted):
        return False
    step = min((step for step in np.abs(np.diff(wanted)) if step), default=0.01)
    return bool((np.abs(given - wanted) <= TOLERANCE * step).all())


def _described(points: "NDArray[Any]") -> str:
    if not len(points):
        return "without coordinates"
    steps = np.diff(points)
    step = f" in steps of {steps.mean():.6g}" if len(steps) else ""
    return f"from {points[0]:.6g} to {points[-1]:.6g}{step}"


def _along(parts: Sequence[Part], name: str) -> "Along | None":
    """The axis of the items of all parts with its coordinate, or their numbers where a file has none."""
    known = [part.along for part in parts if part.along is not None]
    if len(known) < len(parts):
        return None
    axis, points = known[0][0], [points for _, points in known if points is not None]
    if len(points) < len(parts):
        return axis, np.arange(sum(part.shape[0] for part in parts))
    if len({each.dtype.kind for each in points}) > 1:
        kinds = " and ".join(sorted({each.dtype.name for each in points}))
        raise FileError("data", name, f"has files whose {axis} is of the types {kinds}", "give them one calendar")
    together = np.concatenate(points)
    different = len(np.unique(together))
    repeated = sum(len(np.unique(each)) for each in points) - different
    if repeated and different != len(np.unique(points[0])):  # the same in all files are members of an ensemble
        warnings.warn(f"{shown(name)} has {repeated} items of the same {axis} in several files.", stacklevel=2)
    return axis, together
