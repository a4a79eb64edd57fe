"""The picture of a model's card: a sample for each stated seed, which anyone can draw again and compare.

Pictures are the pixels themselves, as grid.png of `nidiff sample` has them. Of fields, the values between two limits
are 255 levels, and the PNG carries the colour of each as its palette: its pixels can be read as numbers again.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.data.dataset import as_stored
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, eight_bits, grid_pixels, save_grid
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import FileError, InputError
from nidiff.files import replacing
from nidiff.model.folder import image_shape, load_model, read_grid
from nidiff.model.zoo import PICTURE, Picture, check_entry
from nidiff.sampling.sampler import sample
from nidiff.sampling.tile import tile_size

LINE = 255  # the level of the lines between fields; their values have the levels 0 to 254
BEYOND = 0.001  # of the values may lie beyond either limit
SMALLEST, SMALLEST_FIELD = 64, 128  # pixels
DIVERGING = ("#053061", "#4393c3", "#f7f7f7", "#d6604d", "#67001f")  # for limits around 0
RISING = ("#0d0887", "#9c179e", "#ed7953", "#f0f921")


def draw_samples(
    denoiser: Denoiser, grid: Grid, picture: Picture, seeds: Sequence[int] | None = None, tile: int | None = None
) -> Tensor:
    """The samples [N, C, *event] of a picture, or those of other ``seeds``, in the units of the data. Classes take
    turns by seed, and ``tile`` is the usual one, as in `nidiff sample`."""
    seeds = list(picture.seeds if seeds is None else seeds)
    classes = getattr(denoiser.conditions.get(CLASSES), "classes", None)
    if classes:
        denoiser = denoiser.given(**{CLASSES: torch.tensor([seed % classes for seed in seeds])})
    shape = image_shape(denoiser.net, denoiser.process.covariance)
    drawing = {"sampler": picture.sampler, "num_steps": picture.num_steps, "tile": tile or tile_size(*shape[1:])}
    x = sample(denoiser, (len(seeds), *shape), generator=seeds, **drawing)  # type: ignore[arg-type]
    return as_stored(x.cpu(), denoiser.scaling, grid.dtype)


def limits_of(data: Tensor, grid: Grid) -> tuple[tuple[float, float], ...]:
    """Limits of the colours that suit the samples [N, C, H, W]; none for pictures."""
    if grid.kind not in ("picture", "field"):
        raise InputError("run", None, f"makes {grid.kind}s", "only models of pictures and of fields over two axes ship")
    if grid.kind == "picture":
        return ()
    found = []
    for values in data.movedim(1, 0).double():
        low, high = (float(f"{values.quantile(q).item():.4g}") for q in (BEYOND, 1 - BEYOND))
        high = max(high, low + 1e-30)
        found.append((-max(-low, high), max(-low, high)) if low < 0 < high else (low, high))
    return tuple(found)


def as_levels(data: Tensor, grid: Grid, limits: Sequence[tuple[float, float]]) -> Tensor:
    """Samples [N, C, H, W] as uint8 [N, 1 or 3, H, W′]: the pixels of pictures, the levels of fields."""
    if grid.kind == "picture":
        return eight_bits(as_grey_or_rgb(data))
    low, high = torch.tensor(limits, dtype=torch.float64).reshape(-1, 2, 1, 1).unbind(1)
    levels = ((data.double() - low) / (high - low)).clamp(0, 1).mul(LINE - 1).round().byte()
    return levels.transpose(1, 2).flatten(2).unsqueeze(1)  # channels side by side


def save_picture(data: Tensor, grid: Grid, limits: Sequence[tuple[float, float]], path: Path) -> None:
    """Write samples [N, C, H, W] as one PNG."""
    if grid.kind == "picture":
        save_grid(data, path)
        return
    levels = as_levels(data, grid, limits)
    factor = _factor(levels, grid)
    pixels = grid_pixels(levels).repeat_interleave(factor, 0).repeat_interleave(factor, 1).squeeze(-1)
    image = Image.fromarray(pixels.numpy()).convert("P")
    low, high = limits[0]
    image.putpalette(_palette(DIVERGING if low == -high else RISING))
    with replacing(path) as file:
        image.save(file, format="png", optimize=True)


def read_levels(path: Path, like: Tensor, grid: Grid, count: int) -> Tensor:
    """The levels [count, …] of a picture that has ``count`` samples, each with the shape of those in ``like``."""
    with Image.open(path, formats=["PNG"]) as image:
        pixels = torch.from_numpy(np.array(image))
    pixels = pixels.reshape(*pixels.shape[:2], -1)[:: _factor(like, grid), :: _factor(like, grid)].movedim(-1, 0)
    _, channels, height, width = like.shape
    columns = math.ceil(math.sqrt(count))
    expected = (channels, math.ceil(count / columns) * (height + 1) - 1, columns * (width + 1) - 1)
    if tuple(pixels.shape) != expected:
        raise FileError("file", path, f"has pixels {tuple(pixels.shape)}, not {expected}", "pack the model again")
    places = [divmod(index, columns) for index in range(count)]
    tops = [(row * (height + 1), column * (width + 1)) for row, column in places]
    return torch.stack([pixels[:, top : top + height, left : left + width] for top, left in tops])


def difference(entry: Path, seeds: Sequence[int] | None = None, tile: int | None = None) -> int:
    """How far an entry's model is from its picture: the largest difference, in grey levels, over samples of the
    picture's seeds, or some of them, that are drawn again. A ``tile`` of as many as ``seeds`` is quickest."""
    picture = check_entry(entry).picture
    denoiser, chosen = load_model(entry), list(picture.seeds if seeds is None else seeds)
    grid = read_grid(entry, image_shape(denoiser.net, denoiser.process.covariance), denoiser.scaling)
    drawn = as_levels(draw_samples(denoiser, grid, picture, chosen, tile), grid, picture.limits)
    shown = read_levels(entry / PICTURE, drawn, grid, len(picture.seeds))
    return int((shown[[picture.seeds.index(seed) for seed in chosen]].int() - drawn.int()).abs().max())


def _factor(levels: Tensor, grid: Grid) -> int:
    """How often each pixel is repeated; that of `save_grid` for pictures."""
    return max(1, (SMALLEST if grid.kind == "picture" else SMALLEST_FIELD) // levels.shape[-1])


def _palette(colours: Sequence[str]) -> list[int]:
    """256 colours, red, green and blue after each other: between ``colours`` for the levels, white for the lines."""
    ends = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours], dtype=float)
    places = np.linspace(0, len(colours) - 1, LINE)
    table = np.stack([np.interp(places, np.arange(len(colours)), channel) for channel in ends.T], axis=1)
    return [*table.round().astype(int).ravel().tolist(), 255, 255, 255]
