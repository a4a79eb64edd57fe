"""Folders of images, of videos as frames, and arrays, as a data set."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.data.arrays import open_array
from nidiff.data.dataset import Dataset, Source
from nidiff.data.encoded import Encoded, Reading, fit, read_encoded
from nidiff.data.grid import Grid
from nidiff.data.layout import Layout
from nidiff.data.sources import settled
from nidiff.errors import InputError
from nidiff.files import as_path
from nidiff.memory import require_memory

COLOURS = (1, 2, 3, 4)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def open_images(path: str | Path, reading: Reading) -> Dataset:
    """The images at ``path``: of a folder and its subfolders in the order of their names, or of an array.

    Names that begin with a dot are ignored. A layout with T makes a video of each subfolder, whose images are its
    frames. An array is an .npy or .npz file; an .npz holds one array, or the one to read is ``arr_0``.
    """
    path = as_path("path", path)
    if path.is_file() and path.suffix.lower() in (".npy", ".npz"):
        is_fitted = reading.size is not None or reading.channels is not None  # which needs all of them in memory
        data = open_array(path, replace(reading, memory_limit=None) if is_fitted else reading)
        return replace(data, values=fit_pixels(data.values, reading))
    if not path.is_dir():
        problem = "is not a folder or an array" if path.exists() else "does not exist"
        raise InputError(f"path={str(path)!r} {problem}: give a folder of images, or an .npy or .npz file.")
    files = files_of(path, SUFFIXES)
    if not files:
        raise InputError(f"path={str(path)!r} has no images: put {', '.join(SUFFIXES)} files in it.")
    layout = Layout("NHWC" if reading.layout is None else reading.layout)
    if {*layout.event} == {"T", "H", "W"}:
        return _open_clips(path, files, reading)
    if {*layout.event} != {"H", "W"}:
        problem = f"layout={layout.letters!r} does not fit the images of path={str(path)!r}"
        raise InputError(f"{problem}: leave it out, or give NTHWC if each subfolder has the frames of a video.")
    pixels, rows, skipped = read_encoded([Encoded(str(file), file) for file in files], reading)
    labels, names = _subfolders(path, [files[row] for row in rows])
    return Dataset(pixels, labels, skipped=skipped, class_names=names)


def files_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder and its subfolders with one of the suffixes, in the order of their names."""
    try:
        found = [file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
    except OSError as error:
        raise InputError(f"path={str(folder)!r} cannot be read ({error.strerror}): give another folder.") from error
    return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _subfolders(path: Path, files: Sequence[Path]) -> tuple[Tensor | None, tuple[str, ...]]:
    """The subfolder of each file as its class, in the order of their names; none if some file is in no subfolder."""
    inside = [file.relative_to(path).parts for file in files]
    if any(len(parts) == 1 for parts in inside):
        return None, ()
    names = sorted({parts[0] for parts in inside})
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers[parts[0]] for parts in inside]), tuple(names)


class Clips:
    """Videos [N, C, T, H, W] of frames [N · T, C, H, W] that are decoded when they are asked for."""

    def __init__(self, frames: Source, count: int) -> None:
        total, channels, *pixels = frames.shape
        self.shape, self.dtype = (total // count, channels, count, *pixels), frames.dtype
        self._frames, self._count = frames, count

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        rows = index[:, None] * self._count + torch.arange(self._count)
        frames = self._frames.index_select(dim, rows.flatten())
        return frames.unflatten(0, (-1, self._count)).transpose(1, 2).contiguous()


def _open_clips(path: Path, files: list[Path], reading: Reading) -> Dataset:
    """Each folder that holds frames is one video."""
    if reading.skip_corrupt:
        raise InputError("skip_corrupt=True has no meaning with videos, which need all of their frames: leave it out.")
    clips: dict[Path, list[Path]] = {}
    for file in files:
        clips.setdefault(file.parent, []).append(file)
    if path in clips:
        raise InputError(
            f"{str(clips[path][0])!r} is in no subfolder: put the frames of each video in a folder of its own."
        )
    first, count = next((folder, len(frames)) for folder, frames in clips.items())
    for folder, frames in clips.items():
        if len(frames) != count:
            problem = f"{str(folder)!r} has {len(frames)} frames, but {str(first)!r} has {count}"
            raise InputError(f"{problem}: give all videos the same number.")
    ordered = [Encoded(str(file), file) for frames in clips.values() for file in frames]
    pixels, _, _ = read_encoded(ordered, reading)
    whole = isinstance(pixels, Tensor)
    values = settled(Clips(pixels, count), f"path={str(path)!r}", None if whole else reading.memory_limit)
    dtype = str(pixels.dtype).removeprefix("torch.")
    return Dataset(values, grid=Grid(("time", "height", "width"), dtype=dtype))


def fit_pixels(pixels: Tensor | Source, reading: Reading) -> Tensor | Source:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    reading.check_pixels()
    shape = (reading.channels or pixels.shape[1], *(reading.pair or pixels.shape[2:]))
    if shape == tuple(pixels.shape[1:]):
        return pixels
    if (
        not isinstance(pixels, Tensor)
        or pixels.dtype != torch.uint8
        or pixels.ndim != 4
        or pixels.shape[1] not in COLOURS
    ):
        kind = f"{str(pixels.dtype).removeprefix('torch.')} {tuple(pixels.shape[1:])}"
        remedy = "leave them out, or store the images as uint8 with 1 to 4 channels"
        raise InputError(f"size or channels ask for {shape} of {kind}: {remedy}.")
    require_memory(
        f"size={reading.size!r} of {len(pixels)} images", len(pixels) * math.prod(shape), "give a smaller one"
    )
    fitted = torch.empty((len(pixels), *shape), dtype=torch.uint8)
    for old, new in zip(pixels.numpy(), fitted.numpy(), strict=True):
        image = Image.fromarray(old[0] if len(old) == 1 else np.ascontiguousarray(np.moveaxis(old, 0, -1)))
        new[:] = fit(image, reading)
    return fitted
