"""Arrays of numpy, .npy and .npz, as values [N, C, *event], and the layout of their axes, such as NCHW."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset, Source, Window, type_name
from nidiff.data.grid import AXES, Grid
from nidiff.data.moments import RunningMoments
from nidiff.data.sources import Limits, gather, load_or_stream, slices_of, spread_rows, watched
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError
from nidiff.files import blaming

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

MOST_COLOURS = 4  # an array N×H×W×C without a layout has so many channels, or fewer
NUMBERS = "biuf"  # the kinds of dtype that are numbers
LOSS, SPREAD = 1e-4, 64  # of the standard deviation; items that are looked at
EXAMPLES = {2: "NL", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


@dataclass(frozen=True)
class Layout:
    """Letters in the order of the file: N for the items, C for the channels if there are any, and those of `AXES`."""

    letters: str

    def __post_init__(self) -> None:
        letters = self.letters
        is_known = {"N"} <= {*letters} <= {"N", "C", *AXES}
        if not is_known or not 1 <= len(self.event) <= 3 or len({*letters}) < len(letters):
            remedy = f"give N for the items, C for the channels if there are any, and one to three of {', '.join(AXES)}"
            raise InputError("layout", letters, "is not a layout", f"{remedy}, such as NCHW")

    @property
    def event(self) -> str:
        """The letters of an item without its channels."""
        return self.letters.replace("N", "").replace("C", "")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(AXES[letter] for letter in self.event)

    def arrange(self, array: "NDArray[Any]") -> "NDArray[Any]":
        """The array as [N, C, *event], without copying it."""
        wanted = "N" + "C" * ("C" in self.letters) + self.event
        array = array.transpose([self.letters.index(letter) for letter in wanted])
        return array if "C" in self.letters else array[:, None]


def as_layout(text: str | None, name: str, shape: Sequence[int]) -> Layout:
    """The layout ``text`` of the array ``name``; by default NL, NHW, or NHWC with at most 4 channels."""
    has_colours = len(shape) >= 4 and shape[-1] <= MOST_COLOURS
    usual = {2: "NL", 3: "NHW", 4: "NHWC" if has_colours else None}
    letters = usual.get(len(shape)) if text is None else Layout(text).letters
    if letters is None or len(letters) != len(shape):
        example = "NTHWC" if has_colours and len(shape) == 5 else EXAMPLES.get(len(shape), "NCHW")
        problem = f"does not say what the axes of {name!r} are, whose shape is {tuple(shape)}"
        raise InputError("layout", text, problem, f"give one letter per axis, such as {example}")
    return Layout(letters)


def open_array(file: Path, spec: DataSpec, limits: Limits) -> Dataset:
    """The numbers of an .npy or .npz file. An .npy of more bytes than the memory limit is read batch by batch."""
    name, array = str(file), stored_array(file, "data", spec.variables)
    dtype, layout = stored_type(name, array.dtype), as_layout(spec.layout, name, array.shape)
    arranged = layout.arrange(array)
    is_by_item = isinstance(array, np.memmap) and array.flags.c_contiguous and layout.letters[0] == "N"

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        return layout.arrange(_items(file, array, rows)) if is_by_item else arranged[rows]

    def read_part(row: int, window: Window) -> "NDArray[Any]":
        along = dict(zip(layout.event, window, strict=True))
        part = _part(file, array, row, tuple(along.get(letter, slice(None)) for letter in layout.letters[1:]))
        return layout.arrange(part[None])[0]

    source = numbers_source(arranged.shape, dtype, file, read, read_part if is_by_item else None)
    values = load_or_stream(source, name, limits if is_by_item else limits._replace(memory_limit=None))
    return Dataset(values, grid=Grid(layout.axes, dtype=type_name(source)))


def numbers_source(
    shape: Sequence[int],
    dtype: "np.dtype[Any]",
    file: Path,
    read: "Callable[[NDArray[Any]], NDArray[Any]]",
    read_part: "Callable[[int, Window], NDArray[Any]] | None" = None,
) -> Source:
    """What ``read`` gives for rising rows of ``file``, as ``dtype``; as float32 if that is float64 and not needed. And
    what ``read_part`` gives for one row and a part of the event, if that can be read by itself."""

    def source(dtype: "np.dtype[Any]") -> Source:
        def stored(rows: "NDArray[Any]") -> "NDArray[Any]":
            return as_stored_numbers(read(rows), dtype)

        def stored_part(row: int, window: Window) -> Tensor:
            assert read_part is not None
            return torch.from_numpy(as_stored_numbers(read_part(row, window), dtype))

        part = None if read_part is None else watched(file, stored_part)
        return Source(tuple(shape), getattr(torch, dtype.name), watched(file, partial(gather, read=stored)), part)

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


def _items(file: Path, array: "NDArray[Any]", rows: "NDArray[Any]") -> "NDArray[Any]":
    """Rising rows of an .npy file, which is read: a mapped file that is cut short ends the process."""
    size, parts, start = prod(array.shape[1:]), [], array.offset  # type: ignore[attr-defined]  # of a memmap
    for part in slices_of(rows):
        offset = start + part.start * size * array.dtype.itemsize
        parts.append(np.fromfile(file, array.dtype, (part.stop - part.start) * size, offset=offset))
    return np.concatenate(parts).reshape(-1, *array.shape[1:])


def _part(file: Path, array: "NDArray[Any]", row: int, window: Window) -> "NDArray[Any]":
    """A part of one item of an .npy file: runs of whole lines along the last axis are read, and the lines are cut."""
    *outer, inner, width = (1, *array.shape[1:])  # also of an item that has only one
    *slices, lines, last = (slice(None), *window)
    start, stop, _ = lines.indices(inner)
    places = [range(*each.indices(n)) for each, n in zip(slices, outer, strict=True)]
    size, runs = array.dtype.itemsize, []
    with file.open("rb") as stream:
        for place in product(*places):
            first = 0
            for number, n in zip((row, *place), (1, *outer), strict=True):
                first = first * n + number
            stream.seek(array.offset + (first * inner + start) * width * size)  # type: ignore[attr-defined]
            runs.append(np.fromfile(stream, array.dtype, (stop - start) * width))
    return np.concatenate(runs).reshape(*map(len, places), stop - start, width)[0, ..., last]


def read_array(file: Path, argument: str) -> "NDArray[Any]":
    """The array of an .npy or .npz file that ``argument`` names, in memory."""
    return np.array(stored_array(file, argument))


def stored_array(file: Path, argument: str, variables: Sequence[str] = ()) -> "NDArray[Any]":
    """The array of a file: an .npy is mapped; of an .npz, the one of ``variables``, the only one, or ``arr_0``."""
    with blaming(str(file), "write it with numpy.save, without objects", "cannot be read as an array", argument):
        if file.suffix.lower() != ".npz":
            return np.lib.format.open_memmap(file, mode="r")  # numpy compares its shape with the size of the file
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:  # numpy leaves a bad zip open
            names = [*variables] or (content.files if len(content.files) == 1 else ["arr_0"])
            if len(names) == 1 and names[0] in content.files:
                return np.asarray(content[names[0]])
            problem = f"has the arrays {sorted(content.files)}, and not {names}"
            raise FileError(argument, str(file), problem, "name one of them with `variables`")


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
