"""Arrays of numpy, MATLAB and PyTorch, as values [N, C, *event], and the layout of their axes, such as NCHW."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nidiff.data.dataset import Window
from nidiff.data.grid import AXES, Grid
from nidiff.data.hdf5 import check_hdf5
from nidiff.data.parts import NUMBERS, Part, stored_type
from nidiff.data.sources import slices_of, watched
from nidiff.errors import FileError, InputError
from nidiff.extras import require
from nidiff.files import blaming
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

Read: TypeAlias = "Callable[[NDArray[Any]], NDArray[Any]]"
Choice: TypeAlias = Callable[[Sequence[str]], str]
Reader: TypeAlias = "Callable[[Path, Choice, Any], NDArray[Any]]"
MOST_COLOURS = 4  # an array N×H×W×C without a layout has so many channels, or fewer
EXAMPLES = {2: "NL", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


@dataclass(frozen=True)
class Layout:
    """Letters in the order of the file: N for the items, unless it is one item, C for the channels if there are any,
    and those of `AXES`."""

    letters: str

    def __post_init__(self) -> None:
        letters = self.letters
        is_known = {*letters} <= {"N", "C", *AXES}
        if not is_known or not 1 <= len(self.event) <= 3 or len({*letters}) < len(letters):
            remedy = (
                f"give N for the items, if there are several, C for channels, and one to three of {', '.join(AXES)}"
            )
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
        if "N" not in self.letters:
            return Layout(f"N{self.letters}").arrange(array[None])
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


def array_parts(files: Sequence[Path], variables: Sequence[str], text: str | None) -> list[Part]:
    """The arrays of files, which need a layout where there are several. Of those, one that cannot be read by the item
    is read again whenever it is asked for. Several ``variables`` of a file are channels."""
    parts, is_only = [], len(files) == 1
    for file in files:
        name, array = str(file), stored_array(file, "data", variables)
        shape = array.shape[:-1] if len(variables) > 1 else array.shape
        if text is None and not is_only:
            example = EXAMPLES.get(len(shape), "NCHW"), EXAMPLES.get(len(shape) + 1, "NCHW")[1:]
            problem = f"is needed to say whether each of {len(files)} arrays {shape} is one item"
            remedy = f"give a layout with N if each has several items, such as {example[0]}, else without, {example[1]}"
            raise InputError("layout", text, problem, remedy)
        layout = as_layout(text, name, shape)
        if len(variables) > 1:
            layout = Layout(f"{layout.letters}C")
        part = array_part(array, layout, name)
        read, is_by_item = part.read, layout.letters[0] == "N" or "N" not in layout.letters
        read_part = None
        if isinstance(array, np.memmap) and array.flags.c_contiguous and is_by_item:
            read, read_part = _by_item(file, array, layout), watched(file, _by_window(file, array, layout))
        elif not is_only:
            read = _again(file, variables, layout)
        else:
            is_by_item = False
        along = None if is_only else ("file", np.full(part.shape[0], name))
        grid = replace(part.grid, channels=tuple(variables) if len(variables) > 1 else ())
        is_by_item = is_by_item or not is_only
        part = part._replace(read=watched(file, read), grid=grid, along=along, is_by_item=is_by_item)
        parts.append(part._replace(read_part=read_part))
    return parts


def array_part(array: "NDArray[Any]", layout: Layout, name: str) -> Part:
    """An array in memory as a part."""
    arranged = layout.arrange(array)
    return Part(name, arranged.shape, stored_type(name, array.dtype), lambda rows: arranged[rows], Grid(layout.axes))


def _by_item(file: Path, array: Any, layout: Layout) -> Read:
    """Rising rows of an .npy file, which is read: a mapped file that is cut short ends the process."""
    start, dtype, item = array.offset, array.dtype, array.shape["N" in layout.letters :]
    size = prod(item)

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        parts = [
            np.fromfile(file, dtype, (part.stop - part.start) * size, offset=start + part.start * size * dtype.itemsize)
            for part in slices_of(rows)
        ]
        return Layout(f"N{layout.letters.replace('N', '')}").arrange(np.concatenate(parts).reshape(-1, *item))

    return read


def _by_window(file: Path, array: Any, layout: Layout) -> "Callable[[int, Window], NDArray[Any]]":
    """A part of one item of an .npy file: runs of whole lines along the last axis are read, and the lines are cut."""
    letters, shape = layout.letters.replace("N", ""), (1, *array.shape["N" in layout.letters :])
    *outer, inner, width = shape  # with an axis before it, for an item that has only one

    def read_part(row: int, window: Window) -> "NDArray[Any]":
        along = dict(zip(layout.event, window, strict=True))
        *slices, lines, last = slice(None), *(along.get(letter, slice(None)) for letter in letters)
        start, stop, _ = lines.indices(inner)
        places = [range(*each.indices(n)) for each, n in zip(slices, outer, strict=True)]
        runs = []
        with file.open("rb") as stream:
            for place in product(*places):
                first = 0
                for number, n in zip((row, *place), (1, *outer), strict=True):
                    first = first * n + number
                stream.seek(array.offset + (first * inner + start) * width * array.dtype.itemsize)
                runs.append(np.fromfile(stream, array.dtype, (stop - start) * width))
        part = np.concatenate(runs).reshape(*map(len, places), stop - start, width)[..., last]
        return Layout(f"N{letters}").arrange(part.reshape(1, *part.shape[-len(letters) :]))[0]

    return read_part


def _again(file: Path, variables: Sequence[str], layout: Layout) -> Read:
    return lambda rows: layout.arrange(stored_array(file, "data", variables))[rows]


def read_array(file: Path, argument: str) -> "NDArray[Any]":
    """The array of an .npy or .npz file that ``argument`` names, in memory."""
    return np.array(stored_array(file, argument))


def stored_array(file: Path, argument: str, variables: Sequence[str] = ()) -> "NDArray[Any]":
    """The array of a file: an .npy is mapped; of a file of several, the one of ``variables``, the only one, or
    ``arr_0``; several of one shape are its last axis. Nothing is unpickled but what `torch.load` calls weights."""
    suffix = file.suffix.lower()
    if len(variables) > 1:
        arrays = [stored_array(file, argument, [name]) for name in variables]
        shapes = {name: array.shape for name, array in zip(variables, arrays, strict=True)}
        if len({*shapes.values()}) > 1:
            problem = f"has arrays of several shapes, {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"
            raise FileError(argument, str(file), problem, "name those of one shape with `variables`, or one")
        return np.stack(arrays, -1)

    def choose(names: Sequence[str]) -> str:
        wanted = [*variables] or ([*names] if len(names) == 1 else ["arr_0"])
        if len(wanted) == 1 and wanted[0] in names:
            return wanted[0]
        problem = f"has the arrays {sorted(names)}, and not {wanted}"
        raise FileError(argument, str(file), problem, "name one of them with `variables`")

    read, package, remedy = READERS.get(suffix, READERS[".npy"])
    if read is _matlab and _is_hdf5(file):
        read, package = _matlab_hdf5, "h5py"
    library = require(package)
    with blaming(str(file), remedy, "cannot be read as an array", argument):
        return read(file, choose, library)


def _npy(file: Path, choose: Choice, library: Any) -> "NDArray[Any]":
    array: NDArray[Any] = np.lib.format.open_memmap(
        file, mode="r"
    )  # numpy compares its shape with the size of the file
    return array


def _npz(file: Path, choose: Choice, library: Any) -> "NDArray[Any]":
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:  # numpy leaves a bad zip open
        return np.asarray(content[choose(content.files)])


def _matlab(file: Path, choose: Choice, scipy_io: Any) -> "NDArray[Any]":
    """A matrix of MATLAB before 7.3, with its axes as MATLAB has them."""
    shapes = {name: shape for name, shape, kind in scipy_io.whosmat(file) if kind in MATLAB_NUMBERS}
    name = choose([*shapes])
    require_memory("data", str(file), 8.0 * prod(shapes[name]), "give fewer items")
    return np.asarray(scipy_io.loadmat(file, variable_names=[name])[name])


def _matlab_hdf5(file: Path, choose: Choice, h5py: Any) -> "NDArray[Any]":
    """A matrix of MATLAB 7.3, which is HDF5 with its axes in the other order."""
    check_hdf5(file)
    with h5py.File(file, "r") as content:
        matrices = {
            name: entry
            for name, entry in content.items()
            if isinstance(entry, h5py.Dataset)
            and entry.dtype.kind in NUMBERS
            and entry.attrs.get("MATLAB_class", b"double") not in (b"char", b"cell")
        }
        matrix = matrices[choose([*matrices])]
        require_memory("data", str(file), matrix.dtype.itemsize * float(prod(matrix.shape)), "give fewer items")
        return np.asarray(matrix[()]).T


def _torch(file: Path, choose: Choice, torch: Any) -> "NDArray[Any]":
    """A tensor, or one of a dict of them."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)  # which runs no program of the file
    except UnpicklingError as error:
        raise ValueError("it has other things than tensors") from error
    if isinstance(content, Mapping):
        content = content[choose([str(name) for name, value in content.items() if isinstance(value, torch.Tensor)])]
    if not isinstance(content, torch.Tensor):
        raise ValueError(f"it has a {type(content).__name__}")
    return as_array(content)


def _safetensors(file: Path, choose: Choice, library: Any) -> "NDArray[Any]":
    with library.safe_open(file, framework="pt") as content:
        return as_array(content.get_tensor(choose([*content.keys()])))


def as_array(tensor: Any) -> "NDArray[Any]":
    """A tensor of PyTorch as an array; bfloat16, which numpy has not, as float32."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())


def _is_hdf5(file: Path) -> bool:
    """MATLAB writes 512 bytes of its own first."""
    with blaming(str(file), argument="data"), file.open("rb") as stream:
        head = stream.read(520)
    return b"\x89HDF\r\n\x1a\n" in (head[:8], head[512:])


MATLAB_NUMBERS = (
    "double",
    "single",
    "logical",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
NUMPY_REMEDY, TORCH_REMEDY = "write it with numpy.save, without objects", "write it with torch.save(tensor, path)"
READERS: dict[str, tuple[Reader, str, str]] = {  # the package that each needs, and what helps where it fails
    ".npy": (_npy, "numpy", NUMPY_REMEDY),
    ".npz": (_npz, "numpy", NUMPY_REMEDY),
    ".mat": (_matlab, "scipy.io", "in MATLAB: save('a.mat', 'name', '-v7.3')"),
    ".pt": (_torch, "torch", TORCH_REMEDY),
    ".pth": (_torch, "torch", TORCH_REMEDY),
    ".safetensors": (_safetensors, "safetensors", "write it with safetensors.torch.save_file"),
}
