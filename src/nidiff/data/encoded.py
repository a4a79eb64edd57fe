"""Images in files (PNG, JPEG, …) as uint8 pixels: decoded at once, or batch by batch if memory is short."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from nidiff.data.fit import Reading, fit
from nidiff.errors import InputError

# What each kind of 8-bit image is read as; others (16 bits, floats) have no agreed range.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}
CHUNK = 64

Shape = tuple[int, int, int]
Result = TypeVar("Result")


class Encoded(NamedTuple):
    """One image, not yet decoded."""

    name: str
    file: Path | bytes
    """Where it is, or its content."""


class Source(Protocol):
    """A sequence of images."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Encoded: ...


class CorruptImage(InputError):
    """An image that cannot be decoded."""


class Stream:
    """A stand-in for the tensor of all pixels [N, C, H, W]: each image is decoded when it is asked for."""

    dtype = torch.uint8

    def __init__(
        self,
        images: Source,
        rows: list[int],
        shape: Shape,
        decode: Callable[[Encoded], np.ndarray[Any, Any]],
    ) -> None:
        self.shape = (len(rows), *shape)
        self._images, self._rows, self._decode = images, torch.tensor(rows), decode

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The images of ``index``, as `torch.Tensor.index_select` along ``dim`` = 0; threads decode them."""
        assert dim == 0
        rows = self._rows.index_select(0, index).tolist()
        pixels = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8)
        # Pillow lets go of the interpreter's lock while it decodes.
        with ThreadPoolExecutor() as pool:
            decoded = pool.map(lambda row: self._decode(self._images[row]), rows)
            for image, new in zip(decoded, pixels.numpy(), strict=True):
                new[:] = image
        return pixels


def read_encoded(images: Source, reading: Reading) -> tuple[Tensor | Stream, list[int], list[str]]:
    """Images as uint8 [N, C, H, W], which of ``images`` they are, and the names of the corrupt ones left out.

    Unless ``reading`` gives a size and channels, all must be alike.

    More than its memory limit in bytes of pixels (None: no limit) become a `Stream`, which decodes the same values. A
    corrupt image is an error that names it: at once, or in a stream when it is met. With ``skip_corrupt`` it is left
    out instead; a stream is then decoded once beforehand, because the number of images must be known at the start.
    """
    Image.init()  # two threads that do this at once can miss a format
    header, decode = partial(_header, reading=reading), partial(_decode, reading=reading)
    skipped: list[str] | None = [] if reading.skip_corrupt else None
    progress, memory_limit = reading.progress, reading.memory_limit

    shapes = dict(_each(header, images, range(len(images)), skipped, "looking at images", progress))
    rows = list(shapes)
    shape = _common_shape(images, shapes)
    if memory_limit is not None and len(rows) * prod(shape) > memory_limit:
        if reading.skip_corrupt:
            rows = [row for row, _ in _each(decode, images, rows, skipped, "checking images", progress)]
        pixels: Tensor | Stream = Stream(images, rows, shape, decode)
    else:
        memory = torch.empty((len(rows), *shape), dtype=torch.uint8)
        decoded, rows = _each(decode, images, rows, skipped, "reading images", progress), []
        for (row, image), new in zip(decoded, memory.numpy(), strict=False):
            new[:] = image
            rows.append(row)
        pixels = memory[: len(rows)]
    if not rows:
        raise _none_left(images)
    return pixels, rows, skipped or []


def _each(
    function: Callable[[Encoded], Result],
    images: Source,
    rows: Sequence[int],
    skipped: list[str] | None,
    title: str,
    progress: bool,
) -> Iterator[tuple[int, Result]]:
    """(row, ``function`` of that image) in order, by threads. A corrupt one goes to ``skipped``, if that is a list."""
    from tqdm import tqdm

    def attempt(row: int) -> Result | CorruptImage:
        try:
            return function(images[row])
        except CorruptImage as error:
            return error

    bar = tqdm(total=len(rows), desc=title, delay=1, leave=False, disable=None if progress else True)
    with ThreadPoolExecutor() as pool, bar:
        for start in range(0, len(rows), CHUNK):  # in parts, so that few results wait for their turn
            part = rows[start : start + CHUNK]
            for row, result in zip(part, pool.map(attempt, part), strict=True):
                if not isinstance(result, CorruptImage):
                    yield row, result
                elif skipped is None:
                    raise result
                else:
                    skipped.append(images[row].name)
            bar.update(len(part))


def _common_shape(images: Source, shapes: dict[int, Shape]) -> Shape:
    if not shapes:
        raise _none_left(images)
    first, shape = next(iter(shapes.items()))
    for row, other in shapes.items():
        if other != shape:
            argument = "channels" if other[1:] == shape[1:] else "size"
            raise InputError(
                f"{images[row].name!r} has height, width, channels {(*other[1:], other[0])}, but "
                f"{images[first].name!r} has {(*shape[1:], shape[0])}: give {argument} to make all images alike."
            )
    return shape


def _none_left(images: Source) -> InputError:
    first = images[0].name
    return InputError(f"{first!r} and all the other images are corrupt: give images that can be read.")


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Image.Image]:
    try:
        with Image.open(BytesIO(encoded.file) if isinstance(encoded.file, bytes) else encoded.file) as image:
            if image.mode not in MODES:
                raise InputError(f"{encoded.name!r} has mode {image.mode}: convert it to 8 bits per channel.")
            yield image
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        raise CorruptImage(
            f"{encoded.name!r} cannot be read as an image ({reason}): repair or remove it, or leave it out with "
            "skip_corrupt."
        ) from error


def _header(encoded: Encoded, reading: Reading) -> Shape:
    """The shape of what `_decode` gives, without decoding."""
    with _opened(encoded) as image:
        turned = image.format in CAMERA and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        height, width = reading.pair or (image.size if turned else image.size[::-1])
        return reading.channels or Image.getmodebands(MODES[image.mode]), height, width


def _decode(encoded: Encoded, reading: Reading) -> np.ndarray[Any, Any]:
    with _opened(encoded) as image:
        upright = ImageOps.exif_transpose(image) if image.format in CAMERA else image
        return fit(upright.convert(MODES[upright.mode]), reading)


# Cameras store a photograph as it was taken, and a note on how it was held.
CAMERA = ("JPEG", "MPO")
ORIENTATION = 0x0112
