"""The picture of ``nidiff noise``: white beside coloured, a row of draws for each Σ, and the radial power spectra."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from torch import Tensor

from nidiff import style
from nidiff.covariance.basis import Product
from nidiff.covariance.covariance import Covariance
from nidiff.data.figures import drawable
from nidiff.errors import InputError
from nidiff.files import as_path, replacing, writing
from nidiff.memory import require_memory
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_whole
from nidiff.report.spectrum import POWER, common_shells, expected_spectrum, mean_spectrum, wavenumber_label

SUFFIXES = (".png", ".pdf", ".svg")
SYMBOLS = {"gamma": "γ", "length_scale": "ℓ", "rho": "ρ", "boundary=": ""}
LIMIT = 3.0  # grey runs from −3 to 3 standard deviations
MOST, LONGEST = 100, 100_000  # rows or columns, and numbers of a signal
MANY = 100  # wavenumbers
LARGE, CELL, SMALLEST = 2.4, 0.9, 0.4  # inches: each of the two above, the widest of a grid, the narrowest


@style.drawn
def noise_figure(covariances: Mapping[str, Covariance], *, num_images: int = 10, seed: int = 0) -> Figure:
    """Draws Σ^½ eps for each labelled Σ (all of one event shape, of one to three axes).

    Above: eps, the same coloured by the middle one of the Σ, and the radial power spectrum, as Σ has it (lines) and as
    measured on all draws of a row (marks). Below: a row per Σ, a column per eps, so that a column differs only in Σ. Of
    volumes it is the slice in the middle; if a Σ is a product of one axis and two, such as time and space, the columns
    are frames of the first eps.
    """
    shape = next(iter(covariances.values())).event_shape
    check_noise(shape, len(covariances), num_images, seed)
    eps = white_noise((num_images, *shape), generators_from_seeds(range(seed, seed + num_images)))
    draws = dict(zip(_labels(covariances), [cov.sqrt(eps) for cov in covariances.values()], strict=True))
    is_video = len(shape) == 3 and any(isinstance(cov.basis, Product) for cov in covariances.values())
    shown = {label: _frames(events[0], num_images) if is_video else planes(events) for label, events in draws.items()}

    ratio = 0.7 if len(shape) == 1 else min(4.0, max(0.25, shape[-2] / shape[-1]))  # height by width
    columns, lines = len(next(iter(shown.values()))), [line for label in draws for line in label.splitlines()]
    beside_grid = max(0.8, 0.08 * max(map(len, lines)))
    cell = min(CELL / math.sqrt(ratio), max(SMALLEST, (style.WIDTH - beside_grid) / columns))
    width, grid_height = max(style.WIDTH, cell * columns + beside_grid), cell * ratio * len(draws)
    above = LARGE * min(1.0, ratio) + 1.0
    if len(shape) == 1:
        grid_height = cell * len(draws) + 0.3  # with the label below
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure((width, above + grid_height + 0.5), layout=layout)
    about = "" if len(shape) < 3 else f": frames of seed {seed}" if is_video else ": central slice"
    figure.suptitle(f"N(0, Σ) on {' × '.join(map(str, shape))}{about}")
    (top,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[above, grid_height])
    inches = 2 * LARGE / max(1.0, ratio)
    ((left, right),) = top.subfigures(1, 2, squeeze=False, width_ratios=[inches, width - inches])

    middle, along = list(draws)[len(draws) // 2], f"position, 0 to {shape[0] - 1}" if len(shape) == 1 else ""
    pair = {"isotropic\nΣ = I": eps[:1], f"non-isotropic\n{middle}": draws[middle][:1]}
    for axes, (title, image) in zip(left.subplots(1, 2), pair.items(), strict=True):
        draw_grid(axes, {"": planes(image)})
        axes.set(title=title, xlabel=along)
    draw_spectra(right.subplots(), list(covariances.values()), draws)
    axes = bottom.subplots()
    draw_grid(axes, shown)
    axes.set_xlabel(along)
    most = max(label.count("\n") + 1 for label in draws)
    axes.tick_params(labelsize=min(style.SMALL, 72 * cell * ratio / (1.3 * most)))
    return figure


def planes(events: Tensor) -> Tensor:
    """Signals and images as they are, of volumes [N, D, H, W] the slice in the middle."""
    return events[:, events.shape[1] // 2] if events.ndim == 4 else events


def _frames(video: Tensor, most: int) -> Tensor:
    """At most so many frames of [T, H, W], from the first to the last."""
    return video[torch.linspace(0, len(video) - 1, min(most, len(video))).round().long()]


def check_noise(shape: Sequence[int], rows: int, num_images: int, seed: int) -> None:
    """Refuse what `noise_figure` cannot draw, before anything is computed."""
    if len(shape) > 3 or (len(shape) == 1 and shape[0] > LONGEST):
        problem = "does not fit into a picture"
        raise InputError("shape", tuple(shape), problem, f"use one to three axes, and at most {LONGEST:,} numbers")
    if not 1 <= num_images <= MOST or rows > MOST:
        problem = f"and {rows} covariances do not fit into a picture"
        raise InputError("num_images", num_images, problem, f"use from 1 to {MOST} of each")
    check_whole("seed", seed, 0, 2**63 - num_images - 1)
    pixels = math.prod(shape) * (8 * num_images * rows + 64 * (num_images + rows))  # of draws, of Σ and its modes
    require_memory("shape", tuple(shape), pixels, "use a smaller shape or fewer images")


@style.drawn
def save_figure(figure: Figure, out: Path) -> None:
    """Write ``figure`` to ``out``, with its folder. The old file stays until the new one is drawn."""
    check_out(out)
    with writing("out", out), replacing(out) as file:
        figure.savefig(file, format=out.suffix[1:].lower())


def check_out(out: Path) -> None:
    """Refuse a picture that could not be written, before it is drawn."""
    if out.suffix.lower() not in SUFFIXES:
        raise InputError("out", str(out), "is not a picture", f"end it in {', '.join(SUFFIXES)}")
    folder = next(parent for parent in as_path("out", out).parents if parent.exists())
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "is a folder" if out.is_dir() else f"cannot be written to {str(folder)!r}"
        raise InputError("out", str(out), problem, "choose another place")


def _labels(names: Iterable[str]) -> list[str]:
    """A label for each Σ that is short enough for a tick, and different from the others."""
    short = [_symbols(name) for name in names]
    return [f"{label}\n({row})" if short.count(label) > 1 else label for row, label in enumerate(short)]


def _symbols(label: str) -> str:
    """One line per part of NAME:key=value,…, or per factor of a product."""
    factors = label.split(" x ")
    if len(factors) > 1:
        return "\n× ".join(_symbols(factor).replace("\n", " ") for factor in factors[:5])
    for word, symbol in SYMBOLS.items():
        label = label.replace(word, symbol)
    return "\n".join(drawable(part, 24) for part in re.split("[:,]", label)[:5]).replace("=", " = ")


def draw_grid(axes: Axes, draws: Mapping[str, Tensor]) -> None:
    """A row of events for each entry, in one picture: that is much faster than axes for each event."""
    first = next(iter(draws.values()))
    rows, columns, shape = len(draws), len(first), first.shape[1:]
    if len(shape) == 1:
        place = torch.arange(shape[0] + 1) / (shape[0] * 1.1)
        # So that no row reaches the next.
        limit = 1.1 * max(LIMIT, *(events.abs().max().item() for events in draws.values()))
        for row, events in enumerate(draws.values()):
            # A NaN after each event lifts the pen before the next.
            height = torch.nn.functional.pad(events, (0, 1), value=float("nan")) / (-2 * limit)
            along = torch.arange(columns)[:, None] + place
            axes.axhline(row, color=style.look().faint, linewidth=0.6)
            axes.plot(along.flatten().numpy(), (row + height).flatten().numpy(), color=style.ink(), linewidth=0.7)
        axes.set_xlim(0, columns - 1 + 1 / 1.1)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_yticks(range(rows), draws)
    else:
        slices = torch.stack(list(draws.values()))
        gap = max(1, min(shape[-2:]) // 16) if rows * columns > 1 else 0
        tiles = torch.nn.functional.pad(slices, (0, gap, 0, gap), value=float("nan"))  # NaN is left blank
        tall, wide = tiles.shape[-2:]
        mosaic = tiles.transpose(1, 2).reshape(rows * tall, columns * wide)[: rows * tall - gap, : columns * wide - gap]
        axes.imshow(mosaic.numpy(), cmap=style.GREY, vmin=-LIMIT, vmax=LIMIT, interpolation="nearest")
        axes.set_yticks([(row + 0.5) * tall - 0.5 for row in range(rows)], draws)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=style.SMALL)
    axes.spines[:].set_visible(False)


def draw_spectra(axes: Axes, covariances: list[Covariance], draws: Mapping[str, Tensor]) -> None:
    """The radial power spectrum of each Σ (line), and of its draws (dots)."""
    shells, handles = common_shells(covariances), []
    looks = zip(style.shades(len(draws)), cycle(style.DASHES), cycle(style.MARKERS), strict=False)
    for covariance, (label, events), (colour, dash, mark) in zip(covariances, draws.items(), looks, strict=False):
        expected, measured = expected_spectrum(covariance, shells), mean_spectrum(events, shells)
        # A mode without power cannot be shown on a logarithmic axis, and what is measured there is rounding.
        visible = expected > 0
        radius = shells.wavenumber[visible]
        few, name = len(radius) < MANY, label.replace("\n×", " ×").replace("\n", ", ")
        # Lines lie above all marks, and show on those of their own colour.
        edge = None if few else [withStroke(linewidth=3, foreground=style.look().paper)]
        axes.plot(radius, expected[visible], dash, color=colour, zorder=3, path_effects=edge)
        look = {"markersize": 3} if few else {"markersize": 2, "markeredgewidth": 0, "alpha": 0.35}
        axes.plot(radius, measured[visible], mark, color=colour, **look)
        entry: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark, "label": name}
        handles.append(Line2D([], [], **entry))
    # Linear from 0 to 1, so that the mean of the image (k = 0) can be shown.
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.7)
    axes.set_yscale("log")
    if (last := int(shells.wavenumber[-1])) >= MANY:  # a label for every power of 2 would not fit
        axes.set_xticks([0, *(4**power for power in range(12) if 4**power <= last)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(wavenumber_label(shells.shape, shells.boundary))
    axes.set_ylabel(POWER)
    axes.set_title("radial power spectrum\nlines: Σ, marks: these draws")
    axes.grid()
    axes.legend(handles=handles, handlelength=3)
