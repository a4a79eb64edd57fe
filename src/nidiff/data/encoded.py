"""Images in files (PNG, JPEG, …) as uint8, uint16 or float32: decoded at once, or batch by batch if memory is short."""

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

# What each kind of 8-bit image is read as. Pillow reads 16 bits, and floats, only of grey ones.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}
SEEN_THROUGH = {"L": "LA", "RGB": "RGBA"}  # the same with transparency, as a palette may have it
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
FLOATS = "F"  # of TIFF
# The decoders that Pillow may use: some of the others run programs (PostScript) or are rarely looked at.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
# Cameras store a photograph as taken, with a note on how they were held; and MPO is a photograph with previews.
CAMERA, PREVIEWS, ORIENTATION = ("JPEG", "MPO", "WEBP"), "MPO", 0x0112
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
    images: Sequence[Encoded], spec: DataSpec, limits: Limits, frames: int | None = None
) -> tuple[Tensor | Source, list[int], list[str]]:
    """Images as uint8 or uint16 [N, C, H, W], which of ``images`` they are, and the names of the corrupt ones. With
    ``frames``, each has so many, and values are [N, C, frames, H, W].

    Unless ``spec`` gives a size and channels, all must be alike. A corrupt image is an error that names it: at once,
    or, of more than the memory limit, when it is met. With ``skip_corrupt`` it is left out instead; all images are then
    decoded once beforehand, because their number must be known at the start.
    """
    Image.init()  # two threads that do this at once can miss a format
    kinds = _kinds(images, spec, limits.progress, frames)
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
            decoded = list(pool.map(partial(_decode, spec, first, frames), [good[row] for row in index.tolist()]))
        return torch.from_numpy(np.stack(decoded))

    channels, *size = first[:3]
    shape = (len(good), channels, *([] if frames is None else [frames]), *size)
    source = Source(shape, getattr(torch, first.dtype), read)
    skipped = [image.name for image, kind in zip(images, kinds, strict=True) if kind is None]
    return load_or_stream(source, spec.source, limits), [*known], skipped


def _kinds(images: Sequence[Encoded], spec: DataSpec, progress: bool, frames: int | None) -> list[Kind | None]:
    """What each image is decoded to; None of a corrupt one, if those are skipped."""

    def kind_of(image: Encoded) -> Kind | None:
        try:
            kind = _kind(spec, frames, image)
            if spec.skip_corrupt:
                _decode(spec, kind, frames, image)
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
    remedy = "repair it, convert it to 8 bits, 16 bits of grey or .npy, or leave it out with `skip_corrupt`"
    with blaming(encoded.name, remedy, "cannot be read as an image", "data"):
        file = encoded.file if isinstance(encoded.file, Path) else encoded.file()
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS or not (image.mode in MODES or _is_deep(image)):
                raise ValueError(f"it has {image.width} × {image.height} pixels of mode {image.mode}")
            if image.mode in MODES and image.format in ("PNG", "TIFF") and any(";16" in str(t[3]) for t in image.tile):
                raise ValueError(f"it has 16 bits of colour ({image.mode}), of which 8 would be lost")
            yield image


def count_frames(encoded: Encoded) -> int:
    """How many frames the file of an image has."""
    with _opened(encoded) as image:
        return _frames(image)


def _frames(image: Image.Image) -> int:
    return 1 if image.format == PREVIEWS else getattr(image, "n_frames", 1)


@contextmanager
def _checked(encoded: Encoded, frames: int | None) -> Iterator[Image.Image]:
    """An image that has so many frames, by default one."""
    with _opened(encoded) as image:
        if (count := _frames(image)) != (frames or 1):
            remedy = "give the `layout` NTHWC if each file is a video, or NDHWC if each is a volume"
            remedy = remedy if frames is None else f"give all files {frames} frames"
            raise FileError("data", encoded.name, f"has {count} frames", remedy)
        yield image


def _is_deep(image: Image.Image) -> bool:
    """Whether it has 16 bits of grey, or floats; older versions of Pillow open such a PNG with 32."""
    return image.mode in (*DEEP, FLOATS) or (image.mode == "I" and image.format == "PNG")


def _mode(image: Image.Image) -> str:
    """What an 8-bit image is read as."""
    mode = MODES[image.mode]
    return SEEN_THROUGH.get(mode, mode) if "transparency" in image.info else mode


def _has_note(image: Image.Image) -> bool:
    """Whether an image may say how the camera was held; of a PNG that is known without decoding only if it does so at
    its beginning."""
    return image.format in CAMERA or "exif" in image.info


def _kind(spec: DataSpec, frames: int | None, encoded: Encoded) -> Kind:
    """What `_decode` gives of a frame, without decoding."""
    with _checked(encoded, frames) as image:
        turned = _has_note(image) and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        height, width = spec.image_size or (image.size if turned else image.size[::-1])
        if _is_deep(image):
            return Kind(spec.channels or 1, height, width, _deep_type(image))
        return Kind(spec.channels or Image.getmodebands(_mode(image)), height, width, "uint8")


def _decode(spec: DataSpec, kind: Kind, frames: int | None, encoded: Encoded) -> np.ndarray[Any, Any]:
    """The pixels [C, H, W], or [C, frames, H, W], of an image of a known kind."""
    planes = []
    with _checked(encoded, frames) as image:
        for frame in range(frames or 1):
            if frame:
                image.seek(frame)
            upright = ImageOps.exif_transpose(image) if _has_note(image) else image
            planes.append(_fit_deep(upright, spec) if _is_deep(upright) else fit(upright.convert(_mode(upright)), spec))
            if (*planes[-1].shape, planes[-1].dtype.name) != kind:
                raise ValueError("it has changed since it was opened" if not frame else "its frames differ")
    return planes[0] if frames is None else np.stack(planes, 1)


def _fit_deep(image: Image.Image, spec: DataSpec) -> np.ndarray[Any, Any]:
    """`fit` of 16 bits of grey, or of floats; resized as floats, since Pillow cannot resize 16 bits."""
    pixels, dtype = np.asarray(image), _deep_type(image)
    if spec.image_size not in (None, pixels.shape):
        floats = Image.fromarray(pixels.astype(np.float32))
        pixels = fit(floats, DataSpec(size=spec.image_size))[0]
        pixels = pixels if dtype == "float32" else pixels.round().clip(0, 65535)
    return np.repeat(pixels.astype(dtype)[None], spec.channels or 1, 0)


def _deep_type(image: Image.Image) -> str:
    return "float32" if image.mode == FLOATS else "uint16"


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
