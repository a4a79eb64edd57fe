"""Images in files (PNG, JPEG, …) as uint8 pixels: decoded at once, or batch by batch if memory is short."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import compress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from nidiff.errors import InputError, shown
from nidiff.memory import require_memory
from nidiff.recipe import check_number, fits

# What each kind of 8-bit image is read as; others (16 bits, floats) have no agreed range.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}
# The decoders that Pillow may use: some of the others run programs (PostScript) or are rarely looked at.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
MOST_PIXELS = 2**27  # of one image: a file of a few kilobytes can claim any number
CAMERA, ORIENTATION = ("JPEG", "MPO"), 0x0112  # cameras store a photograph as taken, and a note on how they were held
CHUNK = 1024  # images given to the threads at once: a million would fill the memory
CHANNELS = {1: "L", 3: "RGB"}
MEMORY_LIMIT = 4 * 2**30

Size = int | tuple[int, int] | None
Shape = tuple[int, int, int]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reading:
    """How images are read. See `nidiff.load_dataset`."""

    size: Size = None
    channels: int | None = None
    skip_corrupt: bool = False
    memory_limit: int | None = MEMORY_LIMIT
    progress: bool = False

    def __post_init__(self) -> None:
        pair = self.pair
        if pair is not None and not (len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)):
            raise InputError(f"size={shown(self.size)} is not a size: give one positive integer, or height and width.")
        if pair is not None and prod(pair) > MOST_PIXELS:
            raise InputError(f"size={shown(self.size)} is more than {MOST_PIXELS:,} pixels: give a smaller one.")
        if self.memory_limit is not None:
            check_number("memory_limit", self.memory_limit)
        if self.channels is not None and (not fits(self.channels, int) or self.channels not in CHANNELS):
            raise InputError(f"channels={shown(self.channels)} is not supported: give 1 (grey) or 3 (RGB).")

    @property
    def pair(self) -> tuple[int, int] | None:
        """(height, width), or None where images keep theirs."""
        return self.size if self.size is None or isinstance(self.size, tuple) else (self.size, self.size)


class Encoded(NamedTuple):
    """One image, not yet decoded: its file, or what returns its file or the content of it."""

    name: str
    file: Path | Callable[[], Path | bytes]


class CorruptImage(InputError):
    """An image that cannot be decoded."""


class Stream:
    """A stand-in for the tensor of all pixels [N, C, H, W]: each image is decoded when it is asked for."""

    dtype = torch.uint8

    def __init__(self, images: Sequence[Encoded], shape: Shape, reading: Reading) -> None:
        self.shape = (len(images), *shape)
        self._images, self._reading = images, reading

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The images of ``index``, as `torch.Tensor.index_select` along ``dim`` = 0; threads decode them."""
        assert dim == 0
        pixels = torch.empty((len(index), *self.shape[1:]), dtype=torch.uint8)
        images = [self._images[row] for row in index.tolist()]
        with ThreadPoolExecutor() as pool:  # Pillow lets go of the interpreter's lock while it decodes
            list(pool.map(partial(_decode, self._reading), images, pixels.numpy()))
        return pixels


def read_encoded(images: Sequence[Encoded], reading: Reading) -> tuple[Tensor | Stream, list[int], list[str]]:
    """Images as uint8 [N, C, H, W], which of ``images`` they are, and the names of the corrupt ones left out.

    Unless ``reading`` gives a size and channels, all must be alike. More than its memory limit in bytes of pixels
    (None: no limit) become a `Stream`, which decodes the same values. A corrupt image is an error that names it: at
    once, or in a stream when it is met. With ``skip_corrupt`` it is left out instead; a stream is then decoded once
    beforehand, because the number of images must be known at the start.
    """
    Image.init()  # two threads that do this at once can miss a format
    shapes = _each(partial(_shape, reading), reading, "looking at images", images)
    rows, good = list(compress(range(len(images)), shapes)), list(compress(images, shapes))
    shape = next(filter(None, shapes))
    for image, other in zip(good, filter(None, shapes), strict=True):
        if other != shape:
            mine, first = ((*each[1:], each[0]) for each in (other, shape))
            remedy = f"make all images alike, or give {'channels' if other[1:] == shape[1:] else 'size'}="
            raise InputError(f"{image.name!r} has size (H, W, C) {mine}, but {good[0].name!r} has {first}: {remedy}.")
    decode = partial(_decode, reading)
    if reading.memory_limit is not None and len(good) * prod(shape) > reading.memory_limit:
        kept = _each(decode, reading, "checking images", good) if reading.skip_corrupt else [True] * len(good)
        pixels: Tensor | Stream = Stream(list(compress(good, kept)), shape, reading)
    else:
        require_memory(f"{len(good)} images of shape {shape}", len(good) * prod(shape), "give a smaller size")
        memory = torch.empty((len(good), *shape), dtype=torch.uint8)
        kept = _each(decode, reading, "reading images", good, memory.numpy())
        pixels = memory if all(kept) else memory[torch.tensor(list(map(bool, kept)))]
    rows = list(compress(rows, kept))
    return pixels, rows, [images[row].name for row in sorted({*range(len(images))} - {*rows})]


def _each(
    function: Callable[..., Result], reading: Reading, title: str, images: Sequence[Encoded], *others: Any
) -> list[Result | None]:
    """``function`` of each image by threads; None of a corrupt one, if ``reading`` skips them."""

    def attempt(*arguments: Any) -> Result | None:
        try:
            return function(*arguments)
        except CorruptImage:
            if reading.skip_corrupt:
                return None
            raise

    found: list[Result | None] = []
    bar = tqdm(total=len(images), desc=title, delay=1, leave=False, disable=None if reading.progress else True)
    with ThreadPoolExecutor() as pool, bar:
        for start in range(0, len(images), CHUNK):
            part = slice(start, start + CHUNK)
            found += pool.map(attempt, images[part], *(other[part] for other in others))
            bar.update(len(images[part]))
    if not any(found):
        raise InputError(f"{images[0].name!r} and all the other images are corrupt: give images that can be read.")
    return found


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Image.Image]:
    try:
        file = encoded.file if isinstance(encoded.file, Path) else encoded.file()
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
            if (count := image.width * image.height) > MOST_PIXELS:
                raise CorruptImage(
                    f"{encoded.name!r} has {count:,} pixels, more than {MOST_PIXELS:,}: make it smaller."
                )
            if image.mode not in MODES:
                raise InputError(f"{encoded.name!r} has mode {image.mode}: convert it to 8 bits per channel.")
            yield image
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        remedy = "repair or remove it, or leave it out with skip_corrupt=True"
        raise CorruptImage(f"{encoded.name!r} cannot be read as an image ({reason}): {remedy}.") from error


def _shape(reading: Reading, encoded: Encoded) -> Shape:
    """The shape of what `_decode` gives, without decoding."""
    with _opened(encoded) as image:
        turned = image.format in CAMERA and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        height, width = reading.pair or (image.size if turned else image.size[::-1])
        return reading.channels or Image.getmodebands(MODES[image.mode]), height, width


def _decode(reading: Reading, encoded: Encoded, out: np.ndarray[Any, Any] | None = None) -> bool:
    """Decode an image, into ``out`` [C, H, W] if it is given."""
    with _opened(encoded) as image:
        upright = ImageOps.exif_transpose(image) if image.format in CAMERA else image
        pixels = fit(upright.convert(MODES[upright.mode]), reading)
    if out is not None:
        out[:] = pixels
    return True


def fit(image: Image.Image, reading: Reading) -> np.ndarray[Any, Any]:
    """``image`` as uint8 [C, H, W].

    With a size, the largest centred rectangle of that aspect is resized to it (Lanczos over the whole area of a
    pixel). With a number of channels, grey is 0.299 R + 0.587 G + 0.114 B, and transparency is dropped.
    """
    if reading.channels is not None:
        image = image.convert(CHANNELS[reading.channels])
    if reading.pair is not None:
        height, width = reading.pair
        scale = min(image.width / width, image.height / height)
        # Whole pixels: an image that is only cropped keeps its values.
        across, down = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (image.width - across) // 2, (image.height - down) // 2
        box = (left, top, left + across, top + down)
        image = image.resize((width, height), Image.Resampling.LANCZOS, box=box)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
