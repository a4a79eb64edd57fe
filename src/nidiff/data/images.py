"""Folders of images, of videos and volumes as frames, and arrays, as a data set."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.data.arrays import Layout
from nidiff.data.dataset import Dataset, Source, Values, natural_order, numbered_classes, type_name
from nidiff.data.encoded import Encoded, count_frames, fit, read_encoded
from nidiff.data.grid import AXES, Grid
from nidiff.data.sources import Limits, load_or_stream
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError


def open_images(path: Path, files: list[Path], spec: DataSpec, limits: Limits) -> Dataset:
    """The images ``files`` in the folder ``path``.

    A layout with T (or D) makes a video (or volume) of each file that has several frames, or of each subfolder, whose
    images are its frames.
    """
    event = {*Layout(spec.layout).event} if spec.layout is not None else {"H", "W"}
    if event in ({"T", "H", "W"}, {"D", "H", "W"}):
        values = _open_clips(path, files, spec, limits)
        return Dataset(values, grid=Grid((AXES[min(event - {"H", "W"})], "height", "width"), dtype=type_name(values)))
    if event != {"H", "W"}:
        spec.refuse("layout")
    pixels, rows, skipped = read_encoded([Encoded(str(file), file) for file in files], spec, limits)
    folders = [files[row].relative_to(path).parts[:-1] for row in rows]
    if not all(folders):
        return Dataset(pixels, skipped=skipped)
    names, labels = numbered_classes([folder[0] for folder in folders])
    return Dataset(pixels, labels, skipped=skipped, class_names=names)


def _open_clips(path: Path, files: list[Path], spec: DataSpec, limits: Limits) -> Tensor | Source:
    """[N, C, frames, H, W] of files that have several frames each, or of folders that hold them."""
    spec.refuse("skip_corrupt")  # videos need all of their frames
    images = [Encoded(str(file), file) for file in files]
    if max(map(count_frames, images)) > 1:
        return read_encoded(images, spec, limits, count_frames(images[0]))[0]
    clips: dict[Path, list[Path]] = {}
    for file in sorted(files, key=lambda file: natural_order(file.name)):
        clips.setdefault(file.parent, []).append(file)
    clips = dict(sorted(clips.items()))
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
    return load_or_stream(source, str(path), limits)


def fit_pixels(pixels: Values, spec: DataSpec, limits: Limits) -> Values:
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
