"""Images as PNG files."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from nidiff.data.dataset import LARGEST, is_small_part, quantise
from nidiff.files import replacing


def save_grid(images: Tensor, path: Path, columns: int | None = None) -> None:
    """Write [N, C, H, W], whole numbers or in [-1, 1], as one picture, nearest-neighbour enlarged if it is small."""
    shown = as_grey_or_rgb(images)
    factor = max(1, 64 // shown.shape[-1])
    save_png(grid_pixels(shown, columns).repeat_interleave(factor, 0).repeat_interleave(factor, 1), path)


def save_png(pixels: Tensor, path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write uint8 [H, W, 1 or 3] or uint16 [H, W, 1]; ``about`` is text that the file carries."""
    info = PngInfo()
    for key, text in (about or {}).items():
        info.add_text(key, text)
    with replacing(path) as file:
        Image.fromarray(pixels.squeeze(-1).numpy()).save(file, format="png", pnginfo=info)


def grid_pixels(images: Tensor, columns: int | None = None) -> Tensor:
    """[N, C, H, W] as one uint8 picture [rows · (H + 1), columns · (W + 1), 1 or 3], white lines between."""
    # A picture of images that went wrong should show it, not fail: NaN is black.
    seen = images.nan_to_num(nan=-1, posinf=1, neginf=-1) if images.is_floating_point() else images
    shown = as_grey_or_rgb(eight_bits(seen).cpu())
    count, channels, height, width = shown.shape
    columns = math.ceil(math.sqrt(count)) if columns is None else columns
    rows = math.ceil(count / columns)
    tiles = torch.full((rows * columns, channels, height + 1, width + 1), 255, dtype=torch.uint8)
    tiles[:count, :, :height, :width] = shown
    picture = tiles.reshape(rows, columns, channels, height + 1, width + 1).permute(0, 3, 1, 4, 2)
    return picture.reshape(rows * (height + 1), columns * (width + 1), channels)[:-1, :-1]


def grid_image(images: Tensor, columns: int | None = None) -> Image.Image:
    """`grid_pixels` as a picture of Pillow."""
    return Image.fromarray(grid_pixels(images, columns).squeeze(-1).numpy())


def eight_bits(images: Tensor) -> Tensor:
    """Whole numbers, or floats in [-1, 1], as uint8."""
    if images.dtype != torch.uint16:
        return quantise(images)
    low, high = map(int, shown_range(images.int(), "uint16"))
    return ((images.int() - low) * 255 // (high - low)).byte()


def shown_range(values: Tensor, dtype: str) -> tuple[float, float]:
    """What is black, and what is white: 16 bits that use a small part of their range show that part."""
    low, high = (float(end) for end in values.aminmax())
    is_part = dtype == "uint16" and is_small_part(low, high, dtype)
    return (low, high) if is_part else (0.0, float(LARGEST[dtype]))


def as_grey_or_rgb(images: Tensor) -> Tensor:
    """[N, C, H, W] as grey or RGB: unless C is 1 or 3, its channels become grey images side by side, [N, 1, H, C · W].

    A PNG of two or four channels would show the last one as transparency. Pillow writes 16 bits in grey only.
    """
    is_shown = images.shape[1] == 1 or (images.shape[1] == 3 and images.dtype != torch.uint16)
    return images if is_shown else images.transpose(1, 2).flatten(2).unsqueeze(1)
