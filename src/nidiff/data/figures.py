"""Figures that fit what the numbers are: lines for signals, a colour map and its bar for each channel of fields, slices
of volumes and frames of video side by side. Values are in the units of the data."""

import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageColor
from torch import Tensor

from nidiff import style
from nidiff.data.dataset import WHOLE
from nidiff.data.grid import Grid
from nidiff.data.pictures import eight_bits, save_grid
from nidiff.errors import InputError
from nidiff.extras import require
from nidiff.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_CHANNELS, MOST_LINES, MOST_FIELDS, MOST_FILMS, MOST_FRAMES = 4, 5, 9, 5, 8
MOST_POINTS = 512  # along an axis of a panel; of more, every second, third, … is drawn
OUTSIDE = 0.002  # of the values may lie beyond either end of a colour bar
WIDE = 100.0  # from this ratio of the largest to the smallest value on, colours go by the logarithm


def save_samples_figure(data: Tensor, grid: Grid, path: Path, columns: int | None = None) -> None:
    """Write samples [N, C, *event], or the first of them, as one PNG: pictures as they are, in so many
    ``columns``, anything else as a figure, if it can be drawn."""
    if grid.kind == "picture":
        save_grid(data, path, columns)
    elif can_draw(path):
        save_drawn(samples_figure(data, grid), path)


def can_draw(path: Path) -> bool:
    """Whether there is matplotlib; if not, a line on stderr says that the figure is not drawn."""
    try:
        require("matplotlib")
    except InputError as error:
        print(f"{path.name} is not drawn: {error}", file=sys.stderr)
        return False
    return True


@style.drawn
def save_drawn(figure: "Figure", path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write a figure as a PNG; ``about`` is text that the file carries."""
    with replacing(path) as file:
        figure.savefig(file, format="png", metadata=dict(about or {}))


@style.drawn
def samples_figure(data: Tensor, grid: Grid) -> "Figure":
    """The first of the samples [N, C, *event] as ``grid`` describes them, and the first of many channels."""
    kinds = {"signal": _draw_signals, "volume": _draw_frames, "video": _draw_frames}
    figure: Figure = require("matplotlib.figure").Figure(layout="constrained")
    channels = data.shape[1]
    kinds.get(grid.kind, _draw_fields)(figure, data, grid)
    size = figure.get_size_inches()
    figure.set_size_inches(size * min(1.0, style.WIDTH / size[0]))  # so that letters stay legible
    if channels > MOST_CHANNELS and not _is_colour(data, grid):
        figure.suptitle(f"the first {MOST_CHANNELS} of {channels} channels", fontsize=style.USUAL)
    return figure


def thumbnail(x: Tensor, like: Tensor, grid: Grid) -> Image.Image:
    """One item [C, *event] in a small picture without axes, on the scale of the item ``like``: a signal as lines, of a
    volume the middle slice, of video the middle frame, channels side by side."""
    values, scale = _numbers(x[:MOST_CHANNELS]), _numbers(like[:MOST_CHANNELS])
    if grid.kind == "signal":
        return _thumbnail_of_lines(values, scale)
    if values.ndim == 4:
        values = values[:, values.shape[1] // 2]
    known = _coordinates(grid, len(grid.axes) - 2, values.shape[-2])
    if len(known) > 1 and known[1] > known[0]:
        values = values[:, ::-1]
    colour_maps, tiles = require("matplotlib").colormaps, []
    for plane, reference in zip(values, scale, strict=True):
        look = _colours(reference)
        colours = colour_maps[look["cmap"]].with_extremes(bad=style.MISSING)
        tiles.append(colours(look["norm"](np.ma.masked_invalid(plane)), bytes=True)[..., :3])
    film, _ = mosaic(np.stack(tiles)[None] / 255.0)
    return Image.fromarray((255 * film).round().astype(np.uint8))


@style.drawn
def _thumbnail_of_lines(values: "NDArray[Any]", scale: "NDArray[Any]") -> Image.Image:
    figure = require("matplotlib.figure").Figure((2.0, 1.2), dpi=96)
    panels = figure.subplots(len(values), 1, squeeze=False).flat
    figure.subplots_adjust(0, 0.02, 1, 0.98)
    for panel, line, reference in zip(panels, values, scale, strict=True):
        low, high = _ends(reference)
        panel.plot(line, color=style.BLUE, linewidth=0.7)
        panel.set(xlim=(0, max(1, len(line) - 1)), ylim=(low - 0.3 * (high - low), high + 0.3 * (high - low)))
        panel.set_axis_off()
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return Image.open(content)


def drawable(label: str, longest: int) -> str:
    """A name that matplotlib can write: not too long, in letters that UTF-8 has; a dollar would begin a formula."""
    return label[:longest].encode(errors="replace").decode().replace("$", r"\$")


# Each kind ----------------------------------------------------------------------------------------------------------


def _draw_signals(figure: "Figure", data: Tensor, grid: Grid) -> None:
    """A row for each signal, a column for each channel, with one scale per column."""
    values = _numbers(data[:MOST_LINES, :MOST_CHANNELS])
    rows, columns, _ = values.shape
    figure.set_size_inches(style.WIDTH, 1.1 * rows + 0.9)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="col")
    along, label = _along(grid, 0, values.shape[-1])
    for row, panel in enumerate(panels.flat):
        place, channel = divmod(row, columns)
        panel.plot(along, values[place, channel], color=style.BLUE, linewidth=0.8)
        panel.margins(x=0.0)
        panel.grid()
    for channel, panel in enumerate(panels[0]):
        panel.set_title(_channel(grid, channel), fontsize=style.SMALL)
    figure.supxlabel(label, fontsize=style.SMALL)


def _draw_fields(figure: "Figure", data: Tensor, grid: Grid) -> None:
    """A block of fields for each channel, two abreast, with its own colour bar."""
    channels = min(data.shape[1], MOST_CHANNELS)
    count = min(len(data), MOST_FIELDS if channels == 1 else MOST_FIELDS // 2)
    ratio = _ratio(grid, 0, 1, data.shape[-2:])
    columns = min(count, max(1, round(math.sqrt(count * ratio))))
    rows = count // columns
    values = _numbers(data[: rows * columns, :channels])
    width = (4.2 if count == 1 else 1.9) / math.sqrt(ratio)
    abreast, down = min(channels, 2), math.ceil(channels / 2)
    figure.set_size_inches((width * columns + 1.9) * abreast, (width * ratio * rows + 0.9) * down)
    for channel, block in enumerate([*figure.subfigures(down, abreast, squeeze=False).flat][:channels]):
        panels = block.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        look = _colours(values[:, channel])
        for panel, field in zip(panels.flat, values[:, channel], strict=True):
            mesh = _draw_plane(panel, field, grid, look)
        block.supylabel(_along(grid, 0, values.shape[-2])[1], fontsize=style.SMALL)
        block.supxlabel(_along(grid, 1, values.shape[-1])[1], fontsize=style.SMALL)
        _draw_bar(block, mesh, panels, _channel(grid, channel), values[:, channel])


def _draw_frames(figure: "Figure", data: Tensor, grid: Grid) -> None:
    """A row for each video or volume: its planes along the first axis, from the first to the last. Numbers have a block
    and a colour bar per channel."""
    frames, *size = data.shape[2:]
    shown = np.unique(np.linspace(0, frames - 1, min(frames, MOST_FRAMES)).round().astype(int))
    films = _pixels(data[:MOST_FILMS]) if _is_colour(data, grid) else _numbers(data[:MOST_FILMS, :MOST_CHANNELS])
    count, channels = films.shape[:2]
    ratio = _ratio(grid, 1, 2, size)
    width = 1.25 / math.sqrt(ratio)
    figure.set_size_inches(width * len(shown) + 1.4, (width * ratio * count + 0.7) * channels)
    (times, label), rising = _along(grid, 0, frames), np.diff(_coordinates(grid, 1, size[0]))
    for channel, block in enumerate(figure.subfigures(channels, 1, squeeze=False).flat):
        panel, film = block.subplots(), films[:, channel, shown]
        if rising.size and rising[0] > 0:
            film = film[:, :, ::-1]  # so that coordinates rise upwards
        look = {"cmap": style.GREY, "vmin": 0, "vmax": 1} if _is_colour(data, grid) else _colours(film)
        picture, (tall, wide) = mosaic(film)
        mesh = panel.imshow(picture, interpolation="nearest", aspect=ratio * size[1] / size[0], **look)
        panel.set_xticks((np.arange(len(shown)) + 0.5) * wide - 1, [f"{times[frame]:.4g}" for frame in shown])
        panel.set_yticks((np.arange(count) + 0.5) * tall - 1, range(count) if count > 1 else [""])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        panel.set_xlabel(label)
        panel.set_ylabel("sample" if count > 1 else "")
        if not _is_colour(data, grid):
            _draw_bar(block, mesh, panel, _channel(grid, channel), film)


def mosaic(film: "NDArray[Any]") -> tuple["NDArray[Any]", tuple[int, int]]:
    """[rows, columns, H, W, …] as one picture with blank lines between, and the size of a tile with its line."""
    gap = max(1, min(film.shape[2:4]) // 16)
    tiles = np.pad(film, [(0, 0), (0, 0), (0, gap), (0, gap), *[(0, 0)] * (film.ndim - 4)], constant_values=np.nan)
    if film.ndim > 4:  # of colours, which NaN is none of
        tiles = np.where(np.isnan(tiles), np.array(ImageColor.getrgb(style.look().paper)) / 255, tiles)
    rows, columns, tall, wide, *rest = tiles.shape
    return tiles.swapaxes(1, 2).reshape(rows * tall, columns * wide, *rest)[:-gap, :-gap], (tall, wide)


def _pixels(data: Tensor) -> "NDArray[Any]":
    """Video of pixels as grey or colours from 0 to 1, [N, 1, T, H, W] or [N, 1, T, H, W, 3]."""
    values = eight_bits(data).double().numpy() / 255
    return values if data.shape[1] == 1 else np.moveaxis(values, 1, -1)[:, None]


# Their parts --------------------------------------------------------------------------------------------------------


def _draw_plane(panel: "Axes", values: "NDArray[Any]", grid: Grid, look: Mapping[str, Any]) -> Any:
    """A field [rows, columns]. With coordinates they rise upwards and to the right; without any, rows go down, as in a
    picture."""
    shape = values.shape
    panel.set_box_aspect(_ratio(grid, 0, 1, shape))
    panel.locator_params(nbins=4)
    panel.set_facecolor(style.MISSING)
    steps = [math.ceil(size / MOST_POINTS) for size in shape]
    (up, _), (across, _) = (_along(grid, axis, size) for axis, size in enumerate(shape))
    thin = values[:: steps[0], :: steps[1]]
    mesh = panel.pcolormesh(across[:: steps[1]], up[:: steps[0]], thin, shading="nearest", rasterized=True, **look)
    if not any(_coordinates(grid, axis, size) for axis, size in enumerate(shape)):
        panel.set_ylim(shape[0] - 0.5, -0.5)
    return mesh


def _colours(values: "NDArray[Any]") -> dict[str, Any]:
    """A colour map and its ends: blue to red about 0 for values on both sides of it, else viridis, by the logarithm if
    positive values differ by more than `WIDE`."""
    colours = require("matplotlib.colors")
    low, high = _ends(values)
    if low < 0 < high and min(-low, high) > 0.1 * max(-low, high):
        limit = max(-low, high)
        return {"cmap": style.DIVERGING, "norm": colours.Normalize(-limit, limit)}
    scale = colours.LogNorm if low > 0 and high > WIDE * low else colours.Normalize
    return {"cmap": style.SEQUENTIAL, "norm": scale(low, high)}


def _ends(values: "NDArray[Any]") -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = np.quantile(finite, (OUTSIDE, 1 - OUTSIDE))
    return (float(low), float(high)) if low < high else (float(low) - 0.5, float(high) + 0.5)


def _draw_bar(block: Any, mesh: Any, panels: Any, label: str, values: "NDArray[Any]") -> None:
    """The colour bar of a block, with points where values lie beyond its ends."""
    low, high = mesh.get_clim()
    ends = {0: "neither", 1: "min", 2: "max", 3: "both"}[bool((values < low).any()) + 2 * bool((values > high).any())]
    block.colorbar(mesh, ax=panels, shrink=0.8, extend=ends, pad=0.02, label=label)


def _channel(grid: Grid, index: int) -> str:
    """The name and unit of a channel; nothing of an only one that has none."""
    return drawable(grid.channel(index), 40) if grid.channels or grid.units or index else ""


def _along(grid: Grid, axis: int, size: int) -> tuple["NDArray[Any]", str]:
    """Numbers along an axis and their label: its coordinates, the seconds of a sound, or 0, 1, …"""
    name = grid.axes[axis]
    if known := _coordinates(grid, axis, size):
        unit = grid.axis_units.get(name, "")
        return np.array(known), drawable(f"{name} ({unit})" if unit else name, 40)
    if grid.rate is not None and grid.kind == "signal":
        return np.arange(size) / grid.rate, "time (s)"
    return np.arange(size), drawable(name, 40)


def _coordinates(grid: Grid, axis: int, size: int) -> tuple[float, ...]:
    """The coordinates of an axis, if something can be drawn over them."""
    known = grid.coordinates.get(grid.axes[axis], ())
    rising = np.diff(known)
    return known if len(known) == size and bool((rising > 0).all() or (rising < 0).all()) else ()


def _ratio(grid: Grid, up: int, across: int, shape: Sequence[int]) -> float:
    """Height by width of a panel: true where both axes have one unit, else that of the number of points."""
    units = [grid.axis_units.get(grid.axes[axis]) for axis in (up, across)]
    known = [_coordinates(grid, axis, size) for axis, size in zip((up, across), shape, strict=True)]
    ratio = shape[0] / shape[1]
    if all(map(len, known)) and units[0] is not None and units[0] == units[1] and min(shape) > 1:
        spans = [abs(values[-1] - values[0]) * size / (size - 1) for values, size in zip(known, shape, strict=True)]
        ratio = spans[0] / spans[1]
    return min(4.0, max(0.25, ratio))


def _is_colour(data: Tensor, grid: Grid) -> bool:
    """Whether video is of pixels: whole numbers of one channel or three."""
    return grid.kind == "video" and grid.dtype in WHOLE and data.shape[1] in (1, 3)


def _numbers(data: Tensor) -> "NDArray[Any]":
    return data.detach().cpu().double().numpy()
