"""Images in files (PNG, JPEG, …) as uint8 or uint16 pixels: decoded at once, or batch by batch if memory is short."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from nidiff.data.dataset import Source
from nidiff.data.sources import Limits, load_or_stream
from nidiff.data.spec import CHANNELS, DataSpec
from nidiff.errors import FileError
from nidiff.files import blaming

# What each kind of 8-bit image is read as. Pillow reads 16 bits only of grey ones; floats have no agreed range.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
# The decoders that Pillow may use: some of the others run programs (PostScript) or are rarely looked at.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
CAMERA, ORIENTATION = ("JPEG", "MPO"), 0x0112  # cameras store a photograph as taken, and a note on how they were held
MOST_PIXELS = 2**27  # of one image: a file of a few kilobytes can claim any number
CHUNK = 1024  # images given to the threads at once: a million would fill the memory


class Encoded(NamedTuple):
    """One image, not yet decoded: its file, or what returns its file or the content of it."""

    name: str
    file: Path | Callable[[], Path | bytes]


class Kind(NamedTuple):
    """What an image is decoded to."""

    channels: int
    height: int
    width: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.height} × {self.width} with {self.channels} channels of {self.dtype}"


def read_encoded(
    images: Sequence[Encoded], spec: DataSpec, limits: Limits
) -> tuple[Tensor | Source, list[int], list[str]]:
    """Images as uint8 or uint16 [N, C, H, W], which of ``images`` they are, and the names of the corrupt ones.

    Unless ``spec`` gives a size and channels, all must be alike. A corrupt image is an error that names it: at once,
    or, of more than the memory limit, when it is met. With ``skip_corrupt`` it is left out instead; all images are then
    decoded once beforehand, because their number must be known at the start.
    """
    Image.init()  # two threads that do this at once can miss a format
    kinds = _kinds(images, spec, limits.progress)
    known = {row: kind for row, kind in enumerate(kinds) if kind is not None}
    if not known:
        raise FileError("data", images[0].name, "and all the other images are corrupt", "give images that can be read")
    good, first = [images[row] for row in known], next(iter(known.values()))
    for image, kind in zip(good, known.values(), strict=True):
        if kind != first:
            remedy = f"make all images alike, or give `{'channels' if kind[1:] == first[1:] else 'size'}`"
            raise FileError("data", image.name, f"is {kind}, but {good[0].name!r} is {first}", remedy)

    def read(index: Tensor) -> Tensor:
        with ThreadPoolExecutor() as pool:  # Pillow lets go of the interpreter's lock while it decodes
            decoded = list(pool.map(partial(_decode, spec, first), [good[row] for row in index.tolist()]))
        return torch.from_numpy(np.stack(decoded))

    source = Source((len(good), *first[:3]), getattr(torch, first.dtype), read)
    skipped = [image.name for image, kind in zip(images, kinds, strict=True) if kind is None]
    return load_or_stream(source, spec.source, limits), [*known], skipped


def _kinds(images: Sequence[Encoded], spec: DataSpec, progress: bool) -> list[Kind | None]:
    """What each image is decoded to; None of a corrupt one, if those are skipped."""

    def kind_of(image: Encoded) -> Kind | None:
        try:
            kind = _kind(spec, image)
            if spec.skip_corrupt:
                _decode(spec, kind, image)
            return kind
        except FileError:
            if not spec.skip_corrupt:
                raise
            return None

    kinds: list[Kind | None] = []
    starts = range(0, len(images), CHUNK)
    with ThreadPoolExecutor() as pool:
        for start in tqdm(starts, "looking at images", delay=1, leave=False, disable=None if progress else True):
            kinds += pool.map(kind_of, images[start : start + CHUNK])
    return kinds


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Image.Image]:
    remedy = "repair it, convert it to 8 bits or 16 bits of grey, or leave it out with `skip_corrupt`"
    with blaming(encoded.name, remedy, "cannot be read as an image", "data"):
        file = encoded.file if isinstance(encoded.file, Path) else encoded.file()
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS or not (image.mode in MODES or _is_deep(image)):
                raise ValueError(f"it has {image.width} × {image.height} pixels of mode {image.mode}")
            yield image


def _is_deep(image: Image.Image) -> bool:
    """Whether it has 16 bits of grey; older versions of Pillow open such a PNG with 32."""
    return image.mode in DEEP or (image.mode == "I" and image.format == "PNG")


def _kind(spec: DataSpec, encoded: Encoded) -> Kind:
    """What `_decode` gives, without decoding."""
    with _opened(encoded) as image:
        turned = image.format in CAMERA and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        height, width = spec.image_size or (image.size if turned else image.size[::-1])
        if _is_deep(image):
            return Kind(spec.channels or 1, height, width, "uint16")
        return Kind(spec.channels or Image.getmodebands(MODES[image.mode]), height, width, "uint8")


def _decode(spec: DataSpec, kind: Kind, encoded: Encoded) -> np.ndarray[Any, Any]:
    """The pixels [C, H, W] of an image of a known kind."""
    with _opened(encoded) as image:
        upright = ImageOps.exif_transpose(image) if image.format in CAMERA else image
        pixels = _fit_deep(upright, spec) if _is_deep(upright) else fit(upright.convert(MODES[upright.mode]), spec)
        if (*pixels.shape, pixels.dtype.name) != kind:
            raise ValueError("it has changed since it was opened")
    return pixels


def _fit_deep(image: Image.Image, spec: DataSpec) -> np.ndarray[Any, Any]:
    """`fit` of 16 bits of grey, as uint16; resized as floats, since Pillow cannot resize them."""
    pixels = np.asarray(image)
    if spec.image_size not in (None, pixels.shape):
        floats = Image.fromarray(pixels.astype(np.float32))
        pixels = fit(floats, DataSpec(size=spec.image_size))[0].round().clip(0, 65535)
    return np.repeat(pixels.astype(np.uint16)[None], spec.channels or 1, 0)


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
