"""Pictures that visitors send: their size is checked before they are decoded."""

from contextlib import suppress
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from nidiff.app.gate import LARGEST_FILE
from nidiff.data.encoded import FORMATS, MODES, fit
from nidiff.data.spec import DataSpec
from nidiff.errors import InputError

SUFFIXES = [".png", ".jpeg", ".jpg", ".webp", ".gif"]
WIDEST = 4096  # pixels along a side
LIMITS = f"give a PNG, JPEG, WEBP or GIF of 8 bits, at most {WIDEST} × {WIDEST} pixels and {LARGEST_FILE >> 20} MB"


def read_picture(argument: str, path: Path, size: tuple[int, int], channels: int | None = None) -> Tensor:
    """The middle of a picture, resized, as uint8 [C, *size]; of its own colours, unless ``channels`` says otherwise."""
    # Pillow raises nearly anything when a file is broken.
    with suppress(Exception), Image.open(path, formats=(*FORMATS, "GIF")) as image:
        if max(image.size) <= WIDEST:
            channels = channels or (1 if image.mode in ("1", "L", "LA") else 3)
            upright = ImageOps.exif_transpose(image)
            pixels = fit(upright.convert(MODES[upright.mode]), DataSpec(size=size, channels=channels))
            return torch.from_numpy(pixels.copy())
    raise InputError(argument, None, "cannot be read as a picture", LIMITS)
