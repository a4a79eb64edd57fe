"""A file of a few items whose shape is known, because a model is to work on them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.data.arrays import open_array, stored_array
from nidiff.data.encoded import CHANNELS, Encoded, Reading, read_encoded
from nidiff.data.images import SUFFIXES as PICTURES
from nidiff.data.images import files_of, open_images
from nidiff.data.science import is_science, open_science
from nidiff.data.sounds import SUFFIXES as SOUNDS
from nidiff.data.sounds import open_sounds
from nidiff.errors import InputError
from nidiff.files import as_path

AS_STORED = {2: "NL", 3: "NHW", 4: "NCHW", 5: "NCDHW"}  # layouts that leave the axes of an array where they are


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
        raise InputError(f"{argument}={str(path)!r} does not exist: give a picture, an array or a folder of pictures.")
    reading = Reading(layout=layout, variables=tuple(variables), sample_axis=sample_axis, memory_limit=None)
    coloured = replace(reading, channels=shape[0]) if shape[0] in CHANNELS and len(shape) == 3 else reading
    values: Any
    if path.suffix.lower() in PICTURES and path.is_file():
        values = read_encoded([Encoded(str(path), path)], coloured)[0]
    elif path.suffix.lower() in (".npy", ".npz") and path.is_file():
        values = _of_array(path, shape, reading)
    elif is_science(path):
        values = open_science(path, reading).values
    elif path.is_dir() and (sounds := files_of(path, SOUNDS)):
        values = open_sounds(path, sounds, reading).values
    else:
        values = open_images(path, coloured).values
    items = values if isinstance(values, Tensor) else values.index_select(0, torch.arange(len(values)))
    if tuple(items.shape[1:]) != shape:
        raise InputError(f"{argument}={str(path)!r} has items {tuple(items.shape[1:])}, not {shape}: {_remedy(shape)}.")
    return items


def _of_array(path: Path, shape: tuple[int, ...], reading: Reading) -> Tensor:
    """The array [N, *shape] of a file that may have its axes in another order, or lack some."""
    axes = stored_array(path, "file", reading.variables).ndim
    letters = reading.layout or AS_STORED.get(axes)
    if letters is None:
        raise InputError(f"file={str(path)!r} has too few or too many axes for items {shape}: give [N, …] of them.")
    found = open_array(path, replace(reading, layout=letters)).values
    assert isinstance(found, Tensor)  # without a limit of memory
    if reading.layout:
        return found
    array = found if "C" in letters else found.squeeze(1)  # as it is stored
    arranged = _arranged(array, shape)
    if arranged is None:
        problem = f"file={str(path)!r} has shape {tuple(array.shape)}, and items must be {shape}"
        raise InputError(f"{problem}: {_remedy(shape)}, or say with layout= what its axes are.")
    return arranged


def _arranged(array: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """An array of any of the usual orders as [N, *shape]; None if it is none of them."""
    channels, *event = shape
    axes, found = len(event), tuple(array.shape)
    if channels == 1 and found == (*event,):
        return array[None, None]
    if channels == 1 and found[1:] == (*event,):
        return array[:, None]
    if found == (*event, channels):
        return array.movedim(-1, 0)[None]
    if found == shape:
        return array[None]
    if len(found) == axes + 2 and found[1:] == (*event, channels):
        return array.movedim(-1, 1)
    return array if found[1:] == shape else None


def _remedy(shape: tuple[int, ...]) -> str:
    size = " × ".join(map(str, shape[1:]))
    return f"give items of {size} points with {shape[0]} channel{'s' * (shape[0] > 1)}"
