"""Folders of images, of videos as frames, and arrays, as a data set."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.data.arrays import Layout
from nidiff.data.dataset import Dataset, Source
from nidiff.data.encoded import Encoded, fit, read_encoded
from nidiff.data.grid import Grid
from nidiff.data.sources import Limits, load_or_stream
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def open_images(path: Path, spec: DataSpec, limits: Limits) -> Dataset:
    """One image, or those of a folder and its subfolders in the order of their names, but for hidden ones.

    A layout with T makes a video of each subfolder, whose images are its frames.
    """
    files = [path] if path.is_file() and path.suffix.lower() in SUFFIXES else files_of(path, SUFFIXES)
    if not files:
        raise FileError("data", str(path), "has no images", f"give {', '.join(SUFFIXES)}, .npy or .npz, or a folder")
    event = {*Layout(spec.layout).event} if spec.layout is not None else {"H", "W"}
    if event == {"T", "H", "W"}:
        return _open_clips(path, files, spec, limits)
    if event != {"H", "W"}:
        spec.refuse("layout")
    pixels, rows, skipped = read_encoded([Encoded(str(file), file) for file in files], spec, limits)
    folders = [files[row].relative_to(path).parts[:-1] for row in rows]
    if not all(folders):
        return Dataset(pixels, skipped=skipped)
    names, labels = np.unique([folder[0] for folder in folders], return_inverse=True)  # the subfolders are classes
    return Dataset(pixels, torch.from_numpy(labels), skipped=skipped, class_names=tuple(map(str, names)))


def files_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder and its subfolders with one of the suffixes, in the order of their names."""
    files = [file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _open_clips(path: Path, files: list[Path], spec: DataSpec, limits: Limits) -> Dataset:
    """Each folder that holds frames is one video, [C, T, H, W]."""
    spec.refuse("skip_corrupt")  # videos need all of their frames
    clips: dict[Path, list[Path]] = {}
    for file in files:
        clips.setdefault(file.parent, []).append(file)
    count = len(next(iter(clips.values())))
    for folder, members in clips.items():
        if folder == path or len(members) != count:
            problem = "is in no subfolder" if folder == path else f"is one of {len(members)} frames, not {count}"
            remedy = "give all videos as many frames, each in a folder of its own"
            raise FileError("data", str(members[0]), problem, remedy)
    ordered = [Encoded(str(file), file) for members in clips.values() for file in members]
    frames, _, _ = read_encoded(ordered, spec, limits)

    channels, height, width = frames.shape[1:]

    def read(rows: Tensor) -> Tensor:
        part = frames.index_select(0, (rows[:, None] * count + torch.arange(count)).flatten())
        return part.unflatten(0, (-1, count)).transpose(1, 2)

    source = Source((len(clips), channels, count, height, width), frames.dtype, read)
    if isinstance(frames, Tensor):
        limits = limits._replace(memory_limit=None)
    grid = Grid(("time", "height", "width"), dtype=str(frames.dtype).removeprefix("torch."))
    return Dataset(load_or_stream(source, str(path), limits), grid=grid)


def fit_pixels(pixels: Tensor | Source, spec: DataSpec, limits: Limits) -> Tensor | Source:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    shape = (spec.channels or pixels.shape[1], *(spec.image_size or pixels.shape[2:]))
    if shape == tuple(pixels.shape[1:]):
        return pixels
    if pixels.dtype != torch.uint8 or len(pixels.shape) != 4 or pixels.shape[1] > 4:
        kind = f"{str(pixels.dtype).removeprefix('torch.')} {tuple(pixels.shape[1:])}"
        remedy = "leave it out, or store the images as uint8 with 1 to 4 channels"
        argument = "channels" if spec.size is None else "size"
        raise InputError(argument, getattr(spec, argument), f"cannot be made from {kind}", remedy)

    def read(rows: Tensor) -> Tensor:
        arrays = pixels.index_select(0, rows).movedim(1, -1).contiguous().numpy()
        images = [Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array) for array in arrays]
        return torch.from_numpy(np.stack([fit(image, spec) for image in images]))

    return load_or_stream(Source((len(pixels), *shape), torch.uint8, read), spec.source, limits)
