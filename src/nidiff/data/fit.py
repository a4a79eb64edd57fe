"""Bring an image to a size and a number of channels."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.errors import InputError

MODES = {1: "L", 3: "RGB"}
Size = int | tuple[int, int] | None


def check_fit(size: Size, channels: int | None) -> tuple[int, int] | None:
    """``size`` as (height, width), or None where images keep theirs. ``channels`` is 1, 3 or None."""
    pair = size if size is None or isinstance(size, tuple) else (size, size)
    if pair is not None and not (len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)):
        raise InputError(f"size={size!r} is not a size: give one positive integer, or height and width.")
    if channels is not None and channels not in MODES:
        raise InputError(f"channels={channels!r} cannot be made: give 1 (grey) or 3 (RGB).")
    return None if pair is None else (pair[0], pair[1])


def fit(image: Image.Image, size: tuple[int, int] | None, channels: int | None) -> np.ndarray[Any, Any]:
    """``image`` as uint8 [C, H, W].

    With ``size``, the largest centred rectangle of that aspect is resized to it (Lanczos over the whole area of a
    pixel). With ``channels``, grey is 0.299 R + 0.587 G + 0.114 B, and transparency is dropped.
    """
    if channels is not None:
        image = image.convert(MODES[channels])
    if size is not None:
        height, width = size
        scale = min(image.width / width, image.height / height)
        # Whole pixels: an image that is only cropped keeps its values.
        across, down = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (image.width - across) // 2, (image.height - down) // 2
        box = (left, top, left + across, top + down)
        image = image.resize((width, height), Image.Resampling.LANCZOS, box=box)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def fit_pixels(pixels: Tensor, size: tuple[int, int] | None, channels: int | None) -> Tensor:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    shape = (channels or pixels.shape[1], *(size or pixels.shape[2:]))
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
        new[:] = fit(image, size, channels)
    return fitted
