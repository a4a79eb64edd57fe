"""A file of a few items whose shape is known, because a model is to work on them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nidiff.data.arrays import as_stored_numbers, stored_array, stored_type
from nidiff.data.dataset import Source
from nidiff.data.encoded import Encoded, read_encoded
from nidiff.data.images import SUFFIXES as PICTURES
from nidiff.data.load import open_path
from nidiff.data.science import is_science
from nidiff.data.sources import Limits
from nidiff.data.spec import ARRAYS, CHANNELS, DataSpec
from nidiff.errors import FileError, InputError
from nidiff.files import as_path


def load_items(
    path: str | Path,
    shape: Sequence[int],
    *,
    layout: str | None = None,
    variables: Sequence[str] = (),
    sample_axis: str | None = None,
    argument: str = "file",
) -> Tensor:
    """Items [N, C, *event] = [N, *shape] in the units of the data and the type of the file; NaN stay NaN.

    ``path`` is a picture, or anything with a path that `nidiff.load_dataset` reads. An array needs no layout: it is one
    item or several, with the channels first, last or, if there is one, left out.
    """
    path, shape = as_path(argument, path), tuple(shape)
    if not path.exists():
        raise FileError(argument, str(path), "does not exist", "give a picture, an array or a folder of pictures")
    spec = DataSpec(str(path), layout=layout, variables=tuple(variables), sample_axis=sample_axis)
    limits, suffix = Limits(memory_limit=None), path.suffix.lower()
    if len(shape) == 3 and not is_science(path) and suffix not in ARRAYS:
        spec = replace(spec, channels=shape[0] if shape[0] in CHANNELS else None)
    try:
        if suffix in PICTURES and path.is_file():
            values: Tensor | Source = read_encoded([Encoded(str(path), path)], spec, limits)[0]
        elif suffix in ARRAYS and path.is_file() and layout is None:
            values = _of_array(path, shape, spec)
        else:
            values = open_path(path, spec, limits).values
    except InputError as error:
        if error.argument != "data":
            raise
        raise type(error)(argument, error.value, error.problem, error.remedy) from error
    items = values if isinstance(values, Tensor) else values.index_select(0, torch.arange(len(values)))
    if tuple(items.shape[1:]) != shape:
        raise FileError(argument, str(path), f"has items {tuple(items.shape[1:])}, not {shape}", _remedy(shape))
    return items


def _of_array(path: Path, shape: tuple[int, ...], spec: DataSpec) -> Tensor:
    """The array [N, *shape] of a file that may have its axes in another order, or lack some."""
    stored = stored_array(path, "data", spec.variables)
    array = torch.from_numpy(as_stored_numbers(stored, stored_type(str(path), stored.dtype)))
    arranged = _arranged(array, shape)
    if arranged is None or not len(arranged):
        problem = f"has shape {tuple(array.shape)}, and items must be {shape}"
        raise FileError("data", str(path), problem, f"{_remedy(shape)}, or say with `layout` what its axes are")
    return arranged


def _arranged(array: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """An array of any of the usual orders as [N, *shape]; None if it is none of them."""
    channels, *event = shape
    sizes = tuple(array.shape)
    if channels == 1 and sizes == (*event,):
        return array[None, None]
    if channels == 1 and sizes[1:] == (*event,):
        return array[:, None]
    if sizes == (*event, channels):
        return array.movedim(-1, 0)[None]
    if sizes == shape:
        return array[None]
    if len(sizes) == len(event) + 2 and sizes[1:] == (*event, channels):
        return array.movedim(-1, 1)
    return array if sizes[1:] == shape else None


def _remedy(shape: tuple[int, ...]) -> str:
    size = " × ".join(map(str, shape[1:]))
    return f"give items of {size} points with {shape[0]} channel{'s' * (shape[0] > 1)}"
