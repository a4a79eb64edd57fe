"""Images as PNG files."""

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from nidiff.data.images import quantise


def save_grid(images: Tensor, path: Path, columns: int | None = None, enlarge: int | None = None) -> None:
    """Write [N, C, H, W] in [-1, 1] as one picture, nearest-neighbour enlarged so that small images can be seen."""
    pixels = grid_pixels(images, columns)
    factor = max(1, 64 // images.shape[-1]) if enlarge is None else enlarge
    pixels = pixels.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.squeeze(-1).numpy() if pixels.shape[-1] == 1 else pixels.numpy()).save(path)


def grid_pixels(images: Tensor, columns: int | None = None) -> Tensor:
    """[N, C, H, W] in [-1, 1] as one uint8 picture [rows · (H + 1), columns · (W + 1), C] with white lines between."""
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count)) if columns is None else columns
    rows = math.ceil(count / columns)
    # A picture of images that went wrong should show it, not fail: NaN is black.
    scaled = quantise(images.detach().float().nan_to_num(nan=-1, posinf=1, neginf=-1)).cpu()
    tiles = torch.full((rows * columns, channels, height + 1, width + 1), 255, dtype=torch.uint8)
    tiles[:count, :, :height, :width] = scaled
    picture = tiles.reshape(rows, columns, channels, height + 1, width + 1).permute(0, 3, 1, 4, 2)
    return picture.reshape(rows * (height + 1), columns * (width + 1), channels)[:-1, :-1]
