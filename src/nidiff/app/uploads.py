"""Pictures that visitors send: their size is checked before they are decoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image

from nidiff.app.gate import LARGEST_FILE
from nidiff.data.encoded import FORMATS
from nidiff.errors import InputError

WIDEST = 4096  # pixels along a side
LIMITS = f"give a PNG, JPEG, WEBP or GIF of 8 bits, at most {WIDEST} × {WIDEST} pixels and {LARGEST_FILE >> 20} MB"


@contextmanager
def open_picture(argument: str, source: Path | bytes, widest: int = WIDEST) -> Iterator[Image.Image]:
    """The picture in a file or in bytes. Whatever goes wrong until the end of the block is an `InputError`."""
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=(*FORMATS, "GIF")) as image:
            if max(image.size) > widest:
                raise InputError(argument, None, f"has {image.width} × {image.height} pixels", LIMITS)
            yield image
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        known = isinstance(error, InputError)
        raise error if known else InputError(argument, None, "cannot be read as a picture", LIMITS) from error
