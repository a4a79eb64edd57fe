"""What was observed of items, samples of what they may have been, their mean and spread, and the truth, in one PNG."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageColor
from torch import Tensor

from nidiff import style
from nidiff.data.figures import can_draw, thumbnail
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, eight_bits, shown_range
from nidiff.generation.restoration import Restoration
from nidiff.report.contact import save_sheet

MOST_ITEMS, MOST_SAMPLES, SIDE = 6, 4, 128
FEW = 0.02  # the share of points that are drawn larger than they are


def save_restored(restoration: Restoration, path: Path) -> None:
    """A row for each of the first items: what was observed, some samples, their mean and spread, and the truth.

    The spread has a scale of its own, whose end stands above it; everything else has that of the item. Without
    matplotlib only pictures are drawn, which is said.
    """
    if restoration.grid.kind != "picture" and not can_draw(path):
        return
    rows = [restored_row(restoration, item, MOST_SAMPLES) for item in range(min(MOST_ITEMS, len(restoration.x)))]
    save_sheet([picture for row in rows for picture in row], path, len(rows[0]), side=SIDE)


def restored_row(restoration: Restoration, item: int, most: int) -> list[tuple[str, Image.Image]]:
    """The pictures of an item by their names, with at most so many samples."""
    samples, mean, spread = restoration.samples[item], restoration.mean[item], restoration.spread[item]
    several = len(samples) > 1
    like = mean if restoration.truth is None else restoration.truth[item].double()
    row = [(restoration.label, _visible(restoration.observed[item].double()))]
    row += [
        (f"sample {seed}", item_sample)
        for seed, item_sample in zip(restoration.seeds[item, :most], samples[:most], strict=True)
    ]
    row += [("mean", mean)] if several else []
    pictures = [(name, item_picture(values, like, restoration.grid)) for name, values in row]
    if several:
        largest = max(float(spread.nan_to_num().max()), 1e-30)  # NaN outside of a domain
        pictures.append((f"spread (0 to {largest:.3g})", _spread(spread, largest, restoration)))
    if restoration.truth is not None:
        pictures.append(("truth", item_picture(like, like, restoration.grid)))
    return pictures


def _visible(values: Tensor) -> Tensor:
    """Values [C, *event] with single points of a field, where they are few, made so large that they can be seen."""
    if values.ndim != 3 or not 0 < float(values.isfinite().double().mean()) < FEW:
        return values
    for axis in (-2, -1):
        for _ in range(max(1, max(values.shape[1:]) // SIDE)):
            for step in (1, -1):
                moved = values.roll(step, axis)
                moved.narrow(axis, 0 if step == 1 else values.shape[axis] - 1, 1).fill_(
                    torch.nan
                )  # not around the edge
                values = torch.where(values.isnan(), moved, values)
    return values


def item_picture(values: Tensor, like: Tensor, grid: Grid) -> Image.Image:
    """An item [C, *event] in the units of the data, on the scale of the item ``like``."""
    if grid.kind != "picture":
        return thumbnail(values, like, grid)
    unseen = as_grey_or_rgb(values.isnan().float()[None]).amax((0, 1)).bool()
    low, high = shown_range(like.nan_to_num(), grid.dtype)
    return _coloured((values.nan_to_num() - low) * 255 / (high - low), unseen)


def _spread(values: Tensor, most: float, restoration: Restoration) -> Image.Image:
    if restoration.grid.kind != "picture":
        ends = torch.stack([torch.zeros_like(values), torch.full_like(values, most)], 1)
        return thumbnail(values, ends if restoration.grid.kind == "signal" else ends.flatten(1, 2), restoration.grid)
    return _coloured(values * 255 / most)


def _coloured(values: Tensor, unseen: Tensor | None = None) -> Image.Image:
    """Numbers 0 … 255 as a picture, in which some pixels have the colour of those not observed."""
    pixels: Any = as_grey_or_rgb(values.round().clamp(0, 255).byte()[None])[0]
    pixels = eight_bits(pixels).expand(3, *pixels.shape[1:]).clone()
    if unseen is not None:
        pixels[:, unseen] = torch.tensor(ImageColor.getrgb(style.UNSEEN), dtype=torch.uint8)[:, None]
    return Image.fromarray(pixels.movedim(0, -1).contiguous().numpy())
