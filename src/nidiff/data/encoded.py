"""Images in files (PNG, JPEG, …) as uint8 or uint16 pixels: decoded at once, or batch by batch if memory is short."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

from nidiff.data.sources import Limits
from nidiff.data.spec import CHANNELS, MOST_PIXELS, DataSpec
from nidiff.errors import FileError, InputError
from nidiff.memory import require_memory

# What each kind of 8-bit image is read as. Pillow reads 16 bits only of grey ones; floats have no agreed range.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
# The decoders that Pillow may use: some of the others run programs (PostScript) or are rarely looked at.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
CAMERA, ORIENTATION = ("JPEG", "MPO"), 0x0112  # cameras store a photograph as taken, and a note on how they were held
CHUNK = 1024  # images given to the threads at once: a million would fill the memory

Shape = tuple[int, int, int]
Kind = tuple[Shape, torch.dtype]
Result = TypeVar("Result")


class Encoded(NamedTuple):
    """One image, not yet decoded: its file, or what returns its file or the content of it."""

    name: str
    file: Path | Callable[[], Path | bytes]


class CorruptImage(FileError):
    """An image that cannot be decoded."""


class Stream:
    """A source of pixels [N, C, H, W] that decodes each image when it is needed."""

    def __init__(self, images: Sequence[Encoded], kind: Kind, spec: DataSpec) -> None:
        self.shape, self.dtype = (len(images), *kind[0]), kind[1]
        self._images, self._spec = images, spec

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        pixels = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)
        images = [self._images[row] for row in index.tolist()]
        with ThreadPoolExecutor() as pool:  # Pillow lets go of the interpreter's lock while it decodes
            list(pool.map(partial(_decode, self._spec), images, pixels.numpy()))
        return pixels


def read_encoded(
    images: Sequence[Encoded], spec: DataSpec, limits: Limits
) -> tuple[Tensor | Stream, list[int], list[str]]:
    """Images as uint8 or uint16 [N, C, H, W], which of ``images`` they are, and the names of the corrupt ones.

    Unless ``spec`` gives a size and channels, all must be alike. More than the memory limit in bytes of pixels become
    a `Stream`, which decodes the same values. A corrupt image is an error that names it: at once, or in a stream when
    it is met. With ``skip_corrupt`` it is left out instead; a stream is then decoded once beforehand, because the
    number of images must be known at the start.
    """
    spec.check_pixels()
    Image.init()  # two threads that do this at once can miss a format
    attempt = partial(_map_images, images=images, skip=spec.skip_corrupt, progress=limits.progress)
    kinds = attempt(partial(_kind, spec), "looking at images")
    rows, good = list(compress(range(len(images)), kinds)), list(compress(images, kinds))
    kind = next(filter(None, kinds))
    for image, other in zip(good, filter(None, kinds), strict=True):
        _expect_alike(image.name, other, good[0].name, kind)
    attempt, decode, (shape, dtype) = partial(attempt, images=good), partial(_decode, spec), kind
    size = len(good) * prod(shape) * dtype.itemsize
    if limits.memory_limit is not None and size > limits.memory_limit:
        is_whole = attempt(decode, "checking images") if spec.skip_corrupt else [True] * len(good)
        pixels: Tensor | Stream = Stream(list(compress(good, is_whole)), kind, spec)
    else:
        require_memory("size", shape[1:], size, f"give a smaller one, or fewer than {len(good)} images")
        memory = torch.empty((len(good), *shape), dtype=dtype)
        is_whole = attempt(decode, "reading images", others=memory.numpy())
        pixels = memory if all(is_whole) else memory[torch.tensor(list(map(bool, is_whole)))]
    rows = list(compress(rows, is_whole))
    return pixels, rows, [images[row].name for row in sorted({*range(len(images))} - {*rows})]


def _expect_alike(name: str, kind: Kind, first_name: str, first: Kind) -> None:
    if kind == first:
        return
    mine, its = (
        f"size (H, W, C) {(*shape[1:], shape[0])} and {8 * dtype.itemsize} bits" for shape, dtype in (kind, first)
    )
    remedy = "make all images alike"
    if kind[1] == first[1]:
        remedy += f", or give `{'channels' if kind[0][1:] == first[0][1:] else 'size'}`"
    raise FileError("data", name, f"has {mine}, but {first_name!r} has {its}", remedy)


def _map_images(
    function: Callable[..., Result],
    title: str,
    images: Sequence[Encoded],
    skip: bool,
    progress: bool,
    others: Any = None,
) -> list[Result | None]:
    """``function`` of each image by threads, with its entry of ``others``; None of a corrupt image if ``skip``."""

    def attempt(*arguments: Any) -> Result | None:
        try:
            return function(*arguments)
        except CorruptImage:
            if skip:
                return None
            raise

    results: list[Result | None] = []
    bar = tqdm(total=len(images), desc=title, delay=1, leave=False, disable=None if progress else True)
    with ThreadPoolExecutor() as pool, bar:
        for start in range(0, len(images), CHUNK):
            part = slice(start, start + CHUNK)
            results += pool.map(attempt, images[part], *([] if others is None else [others[part]]))
            bar.update(len(images[part]))
    if not any(results):
        raise FileError("data", images[0].name, "and all the other images are corrupt", "give images that can be read")
    return results


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Image.Image]:
    try:
        file = encoded.file if isinstance(encoded.file, Path) else encoded.file()
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
            if (count := image.width * image.height) > MOST_PIXELS:
                raise CorruptImage("data", encoded.name, f"has {count:,} pixels", f"give at most {MOST_PIXELS:,}")
            if image.mode not in MODES and not _is_deep(image):
                problem = f"has mode {image.mode}"
                raise FileError("data", encoded.name, problem, "convert it to 8 bits, or 16 bits of grey")
            yield image
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        remedy = "repair or remove it, or leave it out with `skip_corrupt`"
        raise CorruptImage("data", encoded.name, f"cannot be read as an image ({reason})", remedy) from error


def _is_deep(image: Image.Image) -> bool:
    """Whether it has 16 bits of grey; older versions of Pillow open such a PNG with 32."""
    return image.mode in DEEP or (image.mode == "I" and image.format == "PNG")


def _kind(spec: DataSpec, encoded: Encoded) -> Kind:
    """The shape and the type of what `_decode` gives, without decoding."""
    with _opened(encoded) as image:
        turned = image.format in CAMERA and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        height, width = spec.image_size or (image.size if turned else image.size[::-1])
        if _is_deep(image):
            if spec.channels not in (None, 1):
                problem = f"cannot be made from {encoded.name!r}, which has 16 bits of grey"
                raise InputError("channels", spec.channels, problem, "leave it out")
            return (1, height, width), torch.uint16
        return (spec.channels or Image.getmodebands(MODES[image.mode]), height, width), torch.uint8


def _decode(spec: DataSpec, encoded: Encoded, out: np.ndarray[Any, Any] | None = None) -> bool:
    """Decode an image, into ``out`` [C, H, W] if it is given."""
    with _opened(encoded) as image:
        upright = ImageOps.exif_transpose(image) if image.format in CAMERA else image
        pixels = _fit_deep(upright, spec) if _is_deep(upright) else fit(upright.convert(MODES[upright.mode]), spec)
    if out is not None:
        if pixels.shape != out.shape or pixels.dtype != out.dtype:
            raise CorruptImage("data", encoded.name, "has changed since it was opened", "leave it as it is")
        out[:] = pixels
    return True


def _fit_deep(image: Image.Image, spec: DataSpec) -> np.ndarray[Any, Any]:
    """`fit` of 16 bits of grey, as uint16 [1, H, W]; resized as floats, since Pillow cannot resize them."""
    pixels = np.asarray(image)
    if spec.image_size not in (None, pixels.shape):
        floats = Image.fromarray(pixels.astype(np.float32))
        pixels = fit(floats, DataSpec(size=spec.image_size))[0].round().clip(0, 65535)
    return pixels.astype(np.uint16)[None]


def fit(image: Image.Image, spec: DataSpec) -> np.ndarray[Any, Any]:
    """``image`` as [C, H, W].

    With a size, the largest centred rectangle of that aspect is resized to it (Lanczos over the whole area of a
    pixel). With a number of channels, grey is 0.299 R + 0.587 G + 0.114 B, and transparency is dropped.
    """
    if spec.channels is not None:
        image = image.convert(CHANNELS[spec.channels])
    if spec.image_size is not None:
        height, width = spec.image_size
        scale = min(image.width / width, image.height / height)
        # Whole pixels: an image that is only cropped keeps its values.
        across, down = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (image.width - across) // 2, (image.height - down) // 2
        box = (left, top, left + across, top + down)
        image = image.resize((width, height), Image.Resampling.LANCZOS, box=box)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
