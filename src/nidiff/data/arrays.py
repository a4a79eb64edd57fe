"""Arrays of numpy, .npy and .npz, as values [N, C, *event]."""

import zipfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.data.grid import Grid
from nidiff.data.layout import Layout, as_layout
from nidiff.data.sources import Limits, WatchedFile, gather, load_or_stream, slices_of
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError, first_line, one_of
from nidiff.files import check_member
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def open_array(file: Path, spec: DataSpec, limits: Limits) -> Dataset:
    """The numbers of an .npy or .npz file. An .npy of more bytes than the memory limit is read batch by batch."""
    name, array = str(file), stored_array(file, "data", spec.variables)
    if array.size == 0:
        raise FileError("data", name, f"has shape {array.shape}", "give at least one item")
    dtype, layout = stored_type(name, array.dtype), as_layout(spec.layout, name, array.shape)
    layout.order(name, array.shape)  # which refuses another number of axes
    values: Any
    if isinstance(array, np.memmap) and array.flags.c_contiguous and layout.letters[0] == "N":
        values = load_or_stream(Npy(file, array, layout), name, limits)
    else:
        require_memory("data", name, 2.0 * array.size * dtype.itemsize, "give fewer items")
        values = torch.from_numpy(as_stored_numbers(layout.arrange(name, array), dtype))
    return Dataset(values, grid=Grid(layout.axes, dtype=dtype.name))


def read_array(file: Path, argument: str) -> "NDArray[Any]":
    """The array of an .npy or .npz file that ``argument`` names, in memory."""
    array = stored_array(file, argument)
    require_memory(argument, str(file), 2.0 * array.nbytes, "give fewer items")
    return np.array(array)


def stored_array(file: Path, argument: str, variables: tuple[str, ...] = ()) -> "NDArray[Any]":
    """The array of a file as it is stored: an .npy is mapped; of an .npz, the one that ``variables`` names."""
    try:
        if file.suffix.lower() == ".npz":
            return _member_of_npz(file, argument, variables)
        return np.lib.format.open_memmap(file, mode="r")  # numpy compares its shape with the size of the file
    except (InputError, MemoryError):
        raise
    except Exception as error:  # numpy and zipfile raise nearly anything when a file is broken
        problem = f"cannot be read as an array ({first_line(error)})"
        raise FileError(argument, str(file), problem, "write it with numpy.save, without objects") from error


class Npy:
    """An .npy file whose items come first, one after the other. It is read, not mapped: a mapped file that is cut
    short ends the process."""

    def __init__(self, file: Path, array: "np.memmap[Any, Any]", layout: Layout) -> None:
        stored = stored_type(str(file), array.dtype)
        self.dtype: torch.dtype = getattr(torch, stored.name)
        self.shape = layout.arrange(str(file), array).shape
        self._watched, self._layout, self._stored = WatchedFile.now(file), layout, stored
        self._offset, self._item, self._as_is = array.offset, array.shape[1:], array.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        with self._watched.reading():
            return gather(index, len(self), self._read)

    def _read(self, rows: "NDArray[Any]") -> "NDArray[Any]":
        size = prod(self._item)
        parts = []
        with self._watched.path.open("rb") as file:
            for part in slices_of(rows):
                file.seek(self._offset + part.start * size * self._as_is.itemsize)
                parts.append(np.fromfile(file, self._as_is, (part.stop - part.start) * size))
        items = np.concatenate(parts).reshape(len(rows), *self._item)
        return as_stored_numbers(self._layout.arrange("", items), self._stored)


def stored_type(name: str, dtype: "DTypeLike") -> "np.dtype[Any]":
    """The type in which the numbers of a file or variable are held: uint8, uint16 or float32."""
    dtype = np.dtype(dtype)
    if dtype.kind == "u" and dtype.itemsize <= 2:
        return dtype.newbyteorder("=")
    if not np.issubdtype(dtype, np.floating):
        raise FileError("data", name, f"has dtype {dtype}", "give uint8, uint16 or floats")
    return np.dtype(np.float32)


def as_stored_numbers(array: "NDArray[Any]", dtype: "np.dtype[Any]") -> "NDArray[Any]":
    """A copy as ``dtype``; what float32 cannot hold becomes infinite, which is refused or filled later."""
    with np.errstate(over="ignore"):
        return np.array(array, dtype=dtype, order="C")


def _member_of_npz(file: Path, argument: str, names: tuple[str, ...]) -> "NDArray[Any]":
    """The array of an .npz file that is named, the only one, or ``arr_0``."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        only = next(iter(members)) if len(members) == 1 else "arr_0"
        if len(names) > 1 or (not names and only not in members):
            problem = f"has the arrays {sorted(members)}"
            raise FileError(argument, str(file), problem, "call one arr_0, or name one with `variables`")
        name = one_of("variables", names[0], members) if names else only
        require_memory(argument, str(file), 2.0 * members[name].file_size, "give fewer items")
        check_member(archive, members[name], file.stat().st_size)
        with archive.open(members[name]) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
