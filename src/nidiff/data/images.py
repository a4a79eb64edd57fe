"""A set of images that gives batches in [-1, 1], and how to open one at a path."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nidiff.data.array import read_array
from nidiff.data.encoded import Encoded, Stream, read_encoded
from nidiff.data.fit import Reading, fit_pixels
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError

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
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def all(self) -> Tensor:
        """All images as float32 [N, C, H, W] in [-1, 1]."""
        return self.batch(torch.arange(len(self)))

    def batch(self, index: Tensor, flip: Tensor | None = None) -> Tensor:
        """The images of ``index`` [B] as float32 [B, C, H, W] in [-1, 1]; where ``flip`` [B] is true, mirrored."""
        pixels = self.pixels.index_select(0, index.cpu())
        if flip is not None:
            if flip.dtype != torch.bool or flip.shape != index.shape:
                raise InputError(
                    f"flip is {flip.dtype} of shape {tuple(flip.shape)}: give a bool for each of {len(index)} images."
                )
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


def open_images(path: str | Path, reading: Reading) -> Images:
    """The images at ``path``.

    ``path`` is a folder, searched with its subfolders in the order of the names (names that begin with a dot are
    ignored), or an .npy or .npz file of N×H×W or N×H×W×C numbers: uint8, or floats already in [-1, 1]. An .npz holds
    one array, or its images are ``arr_0``.
    """
    path = Path(path)
    if path.is_file() and path.suffix.lower() in (".npy", ".npz"):
        return Images(fit_pixels(read_array(path), reading))
    if not path.is_dir():
        problem = "is not a folder or an array" if path.exists() else "does not exist"
        raise InputError(f"path={str(path)!r} {problem}: give a folder of images, or an .npy or .npz file.")
    pixels, _, skipped = read_encoded(_files(path), reading)
    return Images(pixels, skipped=skipped)


def quantise(images: Tensor) -> Tensor:
    """Images in [-1, 1] as the uint8 of a saved file: clamped, 127.5 x + 127.5, rounded. uint8 stays."""
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InputError(f"images has dtype {images.dtype}: give floats in [-1, 1] or uint8.")
    if not bool(torch.isfinite(images).all()):
        raise InputError("images has NaN or infinite pixels: remove those images.")
    return PIXELS.to_data(images.detach().float().clamp(-1, 1)).round().to(torch.uint8)


def _files(folder: Path) -> list[Encoded]:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    )
    if not files:
        raise InputError(f"path={str(folder)!r} has no images: put {', '.join(SUFFIXES)} files in it.")
    return [Encoded(str(file), file) for file in files]
