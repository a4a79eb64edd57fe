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
from nidiff.covariance.summary import Summary
from nidiff.data.figures import drawable, mosaic
from nidiff.errors import InputError
from nidiff.files import as_path, replacing, writing
from nidiff.memory import require_memory
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_whole
from nidiff.report.spectrum import (
    MANY,
    POWER,
    common_shells,
    draw_wavenumbers,
    expected_spectrum,
    mean_spectrum,
    wavenumber_label,
)

SUFFIXES = (".png", ".pdf", ".svg")
SYMBOLS = {"gamma": "γ", "length_scale": "ℓ", "rho": "ρ", "boundary=": ""}
LIMIT = 3.0  # grey runs from −3 to 3 standard deviations
MOST, LONGEST = 100, 100_000  # rows or columns, and numbers of a signal
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
    check_whole("num_images", num_images, 1, MOST)
    check_whole("seed", seed, 0, 2**63 - num_images - 1)
    if len(shape) > 3 or (len(shape) == 1 and shape[0] > LONGEST) or rows > MOST:
        remedy = f"use one to three axes, at most {LONGEST:,} numbers, and at most {MOST} covariances"
        raise InputError("shape", tuple(shape), "does not fit into a picture", remedy)
    pixels = math.prod(shape) * (8 * num_images * rows + 64 * (num_images + rows))  # of draws, of Σ and its modes
    require_memory("shape", tuple(shape), pixels, "use a smaller shape or fewer images")


def summary_rows(numbers: Summary, size: int) -> dict[str, str]:
    """The numbers of a Σ over ``size`` points, as words."""
    (low, high), length = numbers.marginal_variance_range, numbers.correlation_length
    spread = f" (from {low:.3g} to {high:.3g})" if high - low > 1e-9 * high else ""
    return {
        "marginal variance": f"{numbers.marginal_variance:.4g}{spread}",
        "condition number": f"{numbers.condition_number:.4g}",
        "log det Σ": "−∞" if numbers.logdet is None else f"{numbers.logdet:.6g}",
        "effective rank": f"{numbers.effective_rank:.5g} of {size}",
        "correlation length": "longer than the event" if length is None else f"{length:.3g} pixels",
    }


@style.drawn
def save_figure(figure: Figure, out: Path) -> None:
    """Write ``figure`` to ``out``, with its folder. The old file stays until the new one is drawn."""
    check_out(out)
    with writing("out", out), replacing(out) as file:
        figure.savefig(file, format=out.suffix[1:].lower())


def check_out(out: Path) -> None:
    """Refuse a picture that could not be written, before it is drawn."""
    folder = next(parent for parent in as_path("out", out).parents if parent.exists())
    is_writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    if out.suffix.lower() not in SUFFIXES or out.is_dir() or not is_writable:
        remedy = f"choose another place, and end it in {', '.join(SUFFIXES)}"
        raise InputError("out", str(out), "cannot be written as a picture", remedy)


def _labels(names: Iterable[str]) -> list[str]:
    """A label for each Σ that is short enough for a tick, one line per part of it, and different from the others."""
    short = []
    for name in names:
        for word, symbol in SYMBOLS.items():
            name = name.replace(word, symbol)
        short.append("\n".join(drawable(part, 24) for part in re.split("[:,]| (?=x )", name)[:5]).replace("=", " = "))
    return [f"{label}\n({row})" if short.count(label) > 1 else label for row, label in enumerate(short)]


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
        tiles, (tall, _) = mosaic(torch.stack(list(draws.values())).numpy())  # NaN is left blank
        axes.imshow(tiles, cmap=style.GREY, vmin=-LIMIT, vmax=LIMIT, interpolation="nearest")
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
        few, name = len(radius) < MANY, label.replace("\n", ", ")
        # Lines lie above all marks, and show on those of their own colour.
        edge = None if few else [withStroke(linewidth=3, foreground=style.look().paper)]
        axes.plot(radius, expected[visible], dash, color=colour, zorder=3, path_effects=edge)
        look = {"markersize": 3} if few else {"markersize": 2, "markeredgewidth": 0, "alpha": 0.35}
        axes.plot(radius, measured[visible], mark, color=colour, **look)
        entry: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": mark, "label": name}
        handles.append(Line2D([], [], **entry))
    draw_wavenumbers(axes, float(shells.wavenumber[-1]), wavenumber_label(shells.shape, shells.boundary))
    axes.set_ylabel(POWER)
    axes.set_title("radial power spectrum\nlines: Σ, marks: these draws")
    axes.legend(handles=handles, handlelength=3)
