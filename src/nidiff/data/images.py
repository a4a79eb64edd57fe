"""A set of images that gives batches in [-1, 1], and how to open one at a path."""

import math
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.data.encoded import Encoded, Reading, Stream, fit, read_encoded
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import TENSOR, InputError, expect, first_line
from nidiff.files import as_path, check_member
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


@dataclass(frozen=True, eq=False)
class Images:
    """N images, kept as they are stored and turned into float32 in [-1, 1] a batch at a time."""

    pixels: Tensor | Stream
    """[N, C, H, W]: uint8, or float32 already in [-1, 1]."""
    labels: Tensor | None = None
    """[N] of int64, where the data has them."""
    skipped: list[str] = field(default_factory=list)
    """The names of the corrupt images that were left out."""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)."""
        return tuple(self.pixels.shape[1:])

    def all(self) -> Tensor:
        """All images as float32 [N, C, H, W] in [-1, 1]."""
        return self.batch(torch.arange(len(self)))

    def batch(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """The images of ``index`` [B] as float32 [B, C, H, W] in [-1, 1]; where ``flip`` [B] is true, mirrored."""
        pixels = self.pixels.index_select(0, index.cpu())
        if flip is not None:
            if flip.dtype != torch.bool or flip.shape != index.shape:
                raise InputError(f"flip is {flip.dtype} {tuple(flip.shape)}: give {len(index)} bools, one per image.")
            flip = flip.cpu()
            pixels[flip] = pixels[flip].flip(-1)
        return PIXELS.to_model(pixels) if pixels.dtype == torch.uint8 else pixels

    def prefetch(self, draws: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[Tensor]:
        """``batch(index, flip)`` of each of ``draws``; a thread makes the next one while the last one is in use."""
        with ThreadPoolExecutor(1) as pool:
            ahead = None
            for draw in draws:
                behind, ahead = ahead, pool.submit(self.batch, *draw)
                if behind is not None:
                    yield behind.result()
            if ahead is not None:
                yield ahead.result()


def quantise(images: Tensor) -> Tensor:
    """Images in [-1, 1] as the uint8 of a saved file: clamped, 127.5 x + 127.5, rounded. uint8 stays."""
    expect("images", images, Tensor, TENSOR)
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InputError(f"images has dtype {images.dtype}: give floats in [-1, 1] or uint8.")
    if not bool(torch.isfinite(images).all()):
        raise InputError("images has NaN or infinite pixels: remove those images.")
    return PIXELS.to_data(images.detach().float().clamp(-1, 1)).round().to(torch.uint8)


def open_images(path: str | Path, reading: Reading) -> Images:
    """The images at ``path``: of a folder and its subfolders in the order of their names, or of an array.

    Names that begin with a dot are ignored. An array is an .npy or .npz file of N×H×W or N×H×W×C numbers: uint8, or
    floats already in [-1, 1]. An .npz holds one array, or its images are ``arr_0``.
    """
    path = as_path("path", path)
    if path.is_file() and path.suffix.lower() in (".npy", ".npz"):
        return Images(fit_pixels(_read_array(path), reading))
    if not path.is_dir():
        problem = "is not a folder or an array" if path.exists() else "does not exist"
        raise InputError(f"path={str(path)!r} {problem}: give a folder of images, or an .npy or .npz file.")
    try:
        found = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
    except OSError as error:
        raise InputError(f"path={str(path)!r} cannot be read ({error.strerror}): give another folder.") from error
    files = sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(path).parts))
    if not files:
        raise InputError(f"path={str(path)!r} has no images: put {', '.join(SUFFIXES)} files in it.")
    pixels, _, skipped = read_encoded([Encoded(str(file), file) for file in files], reading)
    return Images(pixels, skipped=skipped)


def _read_array(file: Path) -> Tensor:
    """The N×H×W or N×H×W×C numbers of a file as [N, C, H, W], uint8 or float32."""
    path = f"path={str(file)!r}"
    try:
        array = _images_of_npz(file) if file.suffix.lower() == ".npz" else _mapped(file)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # numpy and zipfile raise nearly anything when a file is broken
        raise InputError(f"{path} cannot be read as arrays ({first_line(error)}): write it with numpy.save.") from error
    array = array if array.ndim != 3 else array[..., None]
    if array.ndim != 4 or array.size == 0 or array.shape[-1] > 4:
        raise InputError(f"{path} has shape {array.shape}: give N×H×W or N×H×W×C, with 1 to 4 channels, last.")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{path} has dtype {array.dtype}: give uint8, or floats in [-1, 1].")
    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    require_memory(f"{path} of shape {array.shape}", 2.0 * array.size * np.dtype(dtype).itemsize, "give fewer images")
    pixels = torch.from_numpy(np.array(np.moveaxis(array, -1, 1), dtype=dtype, order="C"))
    if pixels.dtype == torch.uint8:
        return pixels
    low, high = (end.item() for end in pixels.aminmax())
    if not np.isfinite([low, high]).all():
        raise InputError(f"{path} has NaN or infinite values: remove those images.")
    found = f"{path} has floats from {low:g} to {high:g}"
    if low < -1 or high > 1:
        remedy = "divide by 127.5 and subtract 1" if low >= 0 and high <= 255 else "scale them to it"
        raise InputError(f"{found}, outside [-1, 1]: {remedy}.")
    if low >= 0 and high > 0:
        hint = "if they are in [0, 1], multiply by 2 and subtract 1"
        warnings.warn(f"{found}, taken to be in [-1, 1]: {hint}.", stacklevel=2)
    return pixels


def _mapped(file: Path) -> "NDArray[Any]":
    """The array of an .npy file, on the disk: numpy compares its shape with the size of the file."""
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _images_of_npz(file: Path) -> "NDArray[Any]":
    """The only array of an .npz file, or ``arr_0``."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        name = next(iter(members)) if len(members) == 1 else "arr_0"
        if name not in members:
            raise InputError(
                f"path={str(file)!r} has the arrays {sorted(members)}: keep one, or name the images arr_0."
            )
        require_memory(f"path={str(file)!r}", 2.0 * members[name].file_size, "give fewer images")
        check_member(archive, members[name], file.stat().st_size)
        with archive.open(members[name]) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)


def fit_pixels(pixels: Tensor, reading: Reading) -> Tensor:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    shape = (reading.channels or pixels.shape[1], *(reading.pair or pixels.shape[2:]))
    if shape == pixels.shape[1:]:
        return pixels
    if pixels.dtype != torch.uint8:
        remedy = "leave them out, or store the images as uint8"
        raise InputError(f"size or channels ask for {shape} of floats {tuple(pixels.shape[1:])}: {remedy}.")
    require_memory(
        f"size={reading.size!r} of {len(pixels)} images", len(pixels) * math.prod(shape), "give a smaller one"
    )
    fitted = torch.empty((len(pixels), *shape), dtype=torch.uint8)
    for old, new in zip(pixels.numpy(), fitted.numpy(), strict=True):
        image = Image.fromarray(old[0] if len(old) == 1 else np.ascontiguousarray(np.moveaxis(old, 0, -1)))
        new[:] = fit(image, reading)
    return fitted
