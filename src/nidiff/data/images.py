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
from nidiff.data.encoded import Encoded, fit, read_encoded
from nidiff.data.grid import Grid
from nidiff.data.layout import Layout
from nidiff.data.sources import Limits, load_or_stream
from nidiff.data.spec import ARRAYS, DataSpec
from nidiff.errors import FileError, InputError
from nidiff.memory import require_memory

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def open_images(path: Path, spec: DataSpec, limits: Limits) -> Dataset:
    """The images at ``path``: of a folder and its subfolders in the order of their names, or of an array.

    Names that begin with a dot are ignored. A layout with T makes a video of each subfolder, whose images are its
    frames. An array is an .npy or .npz file; an .npz holds one array, or the one to read is ``arr_0``.
    """
    if path.is_file() and path.suffix.lower() in ARRAYS:
        is_fitted = spec.size is not None or spec.channels is not None  # which needs all of them in memory
        data = open_array(path, spec, limits._replace(memory_limit=None) if is_fitted else limits)
        return replace(data, values=fit_pixels(data.values, spec))
    files = files_of(path, SUFFIXES)
    if not files:
        problem = "has no images" if path.is_dir() else "is not a folder or an array"
        raise FileError("data", str(path), problem, f"give a folder of {', '.join(SUFFIXES)}, or .npy or .npz")
    layout = Layout("NHWC" if spec.layout is None else spec.layout)
    if {*layout.event} == {"T", "H", "W"}:
        return _open_clips(path, files, spec, limits)
    if {*layout.event} != {"H", "W"}:
        remedy = "leave it out, or give NTHWC if each subfolder has the frames of a video"
        raise InputError("layout", layout.letters, f"does not fit the images of {str(path)!r}", remedy)
    pixels, rows, skipped = read_encoded([Encoded(str(file), file) for file in files], spec, limits)
    labels, names = _subfolders(path, [files[row] for row in rows])
    return Dataset(pixels, labels, skipped=skipped, class_names=names)


def files_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder and its subfolders with one of the suffixes, in the order of their names."""
    files = [file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _subfolders(path: Path, files: Sequence[Path]) -> tuple[Tensor | None, tuple[str, ...]]:
    """The subfolder of each file as its class, in the order of their names; none if some file is in no subfolder."""
    inside = [file.relative_to(path).parts for file in files]
    if any(len(parts) == 1 for parts in inside):
        return None, ()
    names = sorted({parts[0] for parts in inside})
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers[parts[0]] for parts in inside]), tuple(names)


class Clips:
    """A source of videos [N, C, T, H, W] made of frames [N · T, C, H, W]."""

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


def _open_clips(path: Path, files: list[Path], spec: DataSpec, limits: Limits) -> Dataset:
    """Each folder that holds frames is one video."""
    spec.refuse("skip_corrupt")  # videos need all of their frames
    clips: dict[Path, list[Path]] = {}
    for file in files:
        clips.setdefault(file.parent, []).append(file)
    count = len(next(iter(clips.values())))
    for folder, frames in clips.items():
        if folder == path or len(frames) != count:
            problem = "is in no subfolder" if folder == path else f"is one of {len(frames)} frames, not {count}"
            remedy = "give all videos as many frames, each in a folder of its own"
            raise FileError("data", str(frames[0]), problem, remedy)
    ordered = [Encoded(str(file), file) for frames in clips.values() for file in frames]
    pixels, _, _ = read_encoded(ordered, spec, limits)
    if isinstance(pixels, Tensor):
        limits = limits._replace(memory_limit=None)
    values = load_or_stream(Clips(pixels, count), str(path), limits)
    dtype = str(pixels.dtype).removeprefix("torch.")
    return Dataset(values, grid=Grid(("time", "height", "width"), dtype=dtype))


def fit_pixels(pixels: Tensor | Source, spec: DataSpec) -> Tensor | Source:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    spec.check_pixels()
    shape = (spec.channels or pixels.shape[1], *(spec.image_size or pixels.shape[2:]))
    if shape == tuple(pixels.shape[1:]):
        return pixels
    is_image = pixels.dtype == torch.uint8 and len(pixels.shape) == 4 and pixels.shape[1] <= 4
    if not (isinstance(pixels, Tensor) and is_image):
        kind = f"{str(pixels.dtype).removeprefix('torch.')} {tuple(pixels.shape[1:])}"
        remedy = "leave it out, or store the images as uint8 with 1 to 4 channels"
        argument = "channels" if spec.size is None else "size"
        raise InputError(argument, getattr(spec, argument), f"cannot be made from {kind}", remedy)
    require_memory("size", spec.size, len(pixels) * math.prod(shape), "give a smaller one")
    fitted = torch.empty((len(pixels), *shape), dtype=torch.uint8)
    for old, new in zip(pixels.numpy(), fitted.numpy(), strict=True):
        image = Image.fromarray(old[0] if len(old) == 1 else np.ascontiguousarray(np.moveaxis(old, 0, -1)))
        new[:] = fit(image, spec)
    return fitted
