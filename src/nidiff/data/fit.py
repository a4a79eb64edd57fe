"""How images are read, and how one is brought to a size and a number of channels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.errors import InputError

MODES = {1: "L", 3: "RGB"}
MEMORY_LIMIT = 4 * 2**30
Size = int | tuple[int, int] | None


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
            raise InputError(f"size={self.size!r} is not a size: give one positive integer, or height and width.")
        if self.channels is not None and self.channels not in MODES:
            raise InputError(f"channels={self.channels!r} is not supported: give 1 (grey) or 3 (RGB).")

    @property
    def pair(self) -> tuple[int, int] | None:
        """(height, width), or None where images keep theirs."""
        return self.size if self.size is None or isinstance(self.size, tuple) else (self.size, self.size)


def fit(image: Image.Image, reading: Reading) -> np.ndarray[Any, Any]:
    """``image`` as uint8 [C, H, W].

    With a size, the largest centred rectangle of that aspect is resized to it (Lanczos over the whole area of a
    pixel). With a number of channels, grey is 0.299 R + 0.587 G + 0.114 B, and transparency is dropped.
    """
    if reading.channels is not None:
        image = image.convert(MODES[reading.channels])
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


def fit_pixels(pixels: Tensor, reading: Reading) -> Tensor:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    shape = (reading.channels or pixels.shape[1], *(reading.pair or pixels.shape[2:]))
    if shape == pixels.shape[1:]:
        return pixels
    if pixels.dtype != torch.uint8:
        raise InputError(
            f"size or channels ask for {shape} of images of floats {tuple(pixels.shape[1:])}: "
            "leave them out, or store the images as uint8."
        )
    fitted = torch.empty((len(pixels), *shape), dtype=torch.uint8)
    for old, new in zip(pixels.numpy(), fitted.numpy(), strict=True):
        image = Image.fromarray(old[0] if len(old) == 1 else np.ascontiguousarray(np.moveaxis(old, 0, -1)))
        new[:] = fit(image, reading)
    return fitted
