"""Images in files (PNG, JPEG, …) as uint8 or uint16 pixels: decoded at once, or batch by batch if memory is short."""

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

from nidiff.data.layout import Layout
from nidiff.errors import InputError, shown
from nidiff.memory import require_memory
from nidiff.recipe import check_number, fits

# What each kind of 8-bit image is read as. Pillow reads 16 bits only of grey ones; floats have no agreed range.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
# The decoders that Pillow may use: some of the others run programs (PostScript) or are rarely looked at.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
MOST_PIXELS = 2**27  # of one image: a file of a few kilobytes can claim any number
CAMERA, ORIENTATION = ("JPEG", "MPO"), 0x0112  # cameras store a photograph as taken, and a note on how they were held
CHUNK = 1024  # images given to the threads at once: a million would fill the memory
CHANNELS = {1: "L", 3: "RGB"}
MEMORY_LIMIT = 4 * 2**30

Size = int | tuple[int, int] | None
Shape = tuple[int, int, int]
Kind = tuple[Shape, torch.dtype]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reading:
    """How images are read. See `nidiff.load_dataset`."""

    size: Size = None
    channels: int | None = None
    skip_corrupt: bool = False
    memory_limit: int | None = MEMORY_LIMIT
    progress: bool = False
    layout: str | None = None
    variables: tuple[str, ...] = ()
    sample_axis: str | None = None
    beside: tuple[str, ...] = ()
    """Variables that are no channels, since they are labels or conditions."""

    def __post_init__(self) -> None:
        if self.layout is not None:
            Layout(self.layout)
        if not isinstance(self.variables, tuple) or not all(isinstance(name, str) for name in self.variables):
            raise InputError(f"variables={shown(self.variables)} must be names.")
        if not isinstance(self.sample_axis, str | None):
            raise InputError(f"sample_axis={shown(self.sample_axis)} must be a name.")
        pair = self.pair
        if pair is not None and not (len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)):
            raise InputError(f"size={shown(self.size)} is not a size: give one positive integer, or height and width.")
        if self.memory_limit is not None:
            check_number("memory_limit", self.memory_limit)
        if self.channels is not None and (not fits(self.channels, int) or self.channels not in CHANNELS):
            raise InputError(f"channels={shown(self.channels)} is not supported: give 1 (grey) or 3 (RGB).")

    @property
    def pair(self) -> tuple[int, int] | None:
        """(height, width), or None where images keep theirs."""
        return self.size if self.size is None or isinstance(self.size, tuple) else (self.size, self.size)

    def check_pixels(self) -> None:
        """Refuse images of a size that none may have; that of sounds is a length."""
        if self.pair is not None and prod(self.pair) > MOST_PIXELS:
            raise InputError(f"size={shown(self.size)} is more than {MOST_PIXELS:,} pixels: give a smaller one.")


class Encoded(NamedTuple):
    """One image, not yet decoded: its file, or what returns its file or the content of it."""

    name: str
    file: Path | Callable[[], Path | bytes]


class CorruptImage(InputError):
    """An image that cannot be decoded."""


class Stream:
    """A stand-in for the tensor of all pixels [N, C, H, W]: each image is decoded when it is asked for."""

    def __init__(self, images: Sequence[Encoded], kind: Kind, reading: Reading) -> None:
        self.shape, self.dtype = (len(images), *kind[0]), kind[1]
        self._images, self._reading = images, reading

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The images of ``index``, as `torch.Tensor.index_select` along ``dim`` = 0; threads decode them."""
        assert dim == 0
        pixels = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)
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
    reading.check_pixels()
    Image.init()  # two threads that do this at once can miss a format
    kinds = _each(partial(_kind, reading), reading, "looking at images", images)
    rows, good = list(compress(range(len(images)), kinds)), list(compress(images, kinds))
    kind = next(filter(None, kinds))
    for image, other in zip(good, filter(None, kinds), strict=True):
        _expect_alike(image.name, other, good[0].name, kind)
    decode, (shape, dtype) = partial(_decode, reading), kind
    size = len(good) * prod(shape) * dtype.itemsize
    if reading.memory_limit is not None and size > reading.memory_limit:
        kept = _each(decode, reading, "checking images", good) if reading.skip_corrupt else [True] * len(good)
        pixels: Tensor | Stream = Stream(list(compress(good, kept)), kind, reading)
    else:
        require_memory(f"{len(good)} images of shape {shape}", size, "give a smaller size")
        memory = torch.empty((len(good), *shape), dtype=dtype)
        kept = _each(decode, reading, "reading images", good, memory.numpy())
        pixels = memory if all(kept) else memory[torch.tensor(list(map(bool, kept)))]
    rows = list(compress(rows, kept))
    return pixels, rows, [images[row].name for row in sorted({*range(len(images))} - {*rows})]


def _expect_alike(name: str, kind: Kind, first_name: str, first: Kind) -> None:
    if kind[1] != first[1]:
        bits, others = (f"{8 * one[1].itemsize} bits" for one in (kind, first))
        raise InputError(f"{name!r} has {bits} per pixel, but {first_name!r} has {others}: make all images alike.")
    if kind[0] != first[0]:
        mine, its = ((*shape[1:], shape[0]) for shape in (kind[0], first[0]))
        remedy = f"make all images alike, or give {'channels' if kind[0][1:] == first[0][1:] else 'size'}="
        raise InputError(f"{name!r} has size (H, W, C) {mine}, but {first_name!r} has {its}: {remedy}.")


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
            if image.mode not in MODES and not _is_deep(image):
                raise InputError(f"{encoded.name!r} has mode {image.mode}: convert it to 8 bits, or 16 bits of grey.")
            yield image
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        remedy = "repair or remove it, or leave it out with skip_corrupt=True"
        raise CorruptImage(f"{encoded.name!r} cannot be read as an image ({reason}): {remedy}.") from error


def _is_deep(image: Image.Image) -> bool:
    """Whether it has 16 bits of grey; older versions of Pillow open such a PNG with 32."""
    return image.mode in DEEP or (image.mode == "I" and image.format == "PNG")


def _kind(reading: Reading, encoded: Encoded) -> Kind:
    """The shape and the type of what `_decode` gives, without decoding."""
    with _opened(encoded) as image:
        turned = image.format in CAMERA and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        height, width = reading.pair or (image.size if turned else image.size[::-1])
        if _is_deep(image):
            if reading.channels not in (None, 1):
                name = f"{encoded.name!r} has 16 bits of grey"
                raise InputError(f"channels={reading.channels}: {name}, which cannot become colours: leave it out.")
            return (1, height, width), torch.uint16
        return (reading.channels or Image.getmodebands(MODES[image.mode]), height, width), torch.uint8


def _decode(reading: Reading, encoded: Encoded, out: np.ndarray[Any, Any] | None = None) -> bool:
    """Decode an image, into ``out`` [C, H, W] if it is given."""
    with _opened(encoded) as image:
        upright = ImageOps.exif_transpose(image) if image.format in CAMERA else image
        if _is_deep(upright):
            pixels = _fit_deep(upright, reading)
        else:
            pixels = fit(upright.convert(MODES[upright.mode]), reading)
    if out is not None:
        if pixels.shape != out.shape or pixels.dtype != out.dtype:
            raise CorruptImage(f"{encoded.name!r} has changed since it was opened: leave it as it is until the end.")
        out[:] = pixels
    return True


def _fit_deep(image: Image.Image, reading: Reading) -> np.ndarray[Any, Any]:
    """`fit` of 16 bits of grey, as uint16 [1, H, W]; resized as floats, since Pillow cannot resize them."""
    pixels = np.asarray(image)
    if reading.pair not in (None, pixels.shape):
        floats = Image.fromarray(pixels.astype(np.float32))
        pixels = fit(floats, Reading(reading.pair))[0].round().clip(0, 65535)
    return pixels.astype(np.uint16)[None]


def fit(image: Image.Image, reading: Reading) -> np.ndarray[Any, Any]:
    """``image`` as [C, H, W].

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
