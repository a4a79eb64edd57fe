"""How good samples of restored items are, where the truth is known: errors, ranks and spectra, beside what is known
without a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nidiff import style
from nidiff.data.figures import save_drawn
from nidiff.report.spectrum import wavenumber_label

NETWORK = "network"


def save_scores(measured: Mapping[str, Any], shape: tuple[int, ...], boundary: tuple[str, ...], path: Path) -> None:
    """The scores of a restoration as a figure."""
    save_drawn(scores_figure(measured, shape, boundary), path)


@style.drawn
def scores_figure(measured: Mapping[str, Any], shape: tuple[int, ...], boundary: tuple[str, ...]) -> Figure:
    """Left: errors of the mean, and the CRPS of laws. Middle: the ranks of the truth among the samples. Right: power of
    the samples by wavenumber over that of the truth, in the first channel."""
    figure = Figure(figsize=(style.WIDTH, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_errors(left, measured)
    _draw_ranks(middle, measured)
    _draw_spectra(right, measured, shape, boundary)
    return figure


def _draw_errors(axes: Axes, measured: Mapping[str, Any]) -> None:
    rows = {NETWORK: measured, **measured.get("baselines", {})}
    order = sorted(rows, key=lambda name: -rows[name]["rmse_of_mean"])
    for place, name in enumerate(order):
        colour = style.BLUE if name == NETWORK else style.look().soft
        axes.barh(place, rows[name]["rmse_of_mean"], color=colour, height=0.6)
        if "crps" in rows[name]:
            axes.plot(rows[name]["crps"], place, marker="D", color=style.ORANGE, markersize=5, linestyle="none")
        if "rmse_of_limit" in rows[name]:
            axes.plot(
                rows[name]["rmse_of_limit"], place, marker="|", color=style.ink(), markersize=14, linestyle="none"
            )
            axes.plot([], [], marker="|", color=style.ink(), linestyle="none", label="∞ samples")
    axes.plot([], [], marker="D", color=style.ORANGE, linestyle="none", label="CRPS")
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel(f"units of the {measured['units']}")
    axes.set_title("RMS error of the mean")
    if any("crps" in row for row in rows.values()):
        axes.set_ylim(-0.6, len(order) + 0.8)  # room for the legend
        axes.legend(fontsize=style.SMALL, loc="upper right", ncols=2)


def _draw_ranks(axes: Axes, measured: Mapping[str, Any]) -> None:
    axes.set_title("rank of the truth among the samples")
    if "ranks" not in measured:
        axes.text(0.5, 0.5, "needs two samples", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    ranks = np.array(measured["ranks"])
    axes.bar(np.arange(len(ranks)), ranks / ranks.sum(), color=style.BLUE, width=0.9, label=NETWORK)
    if "ranks" in (gaussian := measured.get("baselines", {}).get("gaussian", {})):
        others = np.array(gaussian["ranks"])
        axes.step(
            np.arange(len(others)), others / others.sum(), where="mid", color=style.ORANGE, label="gaussian", zorder=3
        )
        axes.legend(fontsize=style.SMALL)
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
    axes.axhline(1 / len(ranks), color=style.ink(), linestyle="--", linewidth=1)
    axes.set_xlabel("samples below the truth")
    axes.set_ylabel("share of the points")


def _draw_spectra(axes: Axes, measured: Mapping[str, Any], shape: tuple[int, ...], boundary: tuple[str, ...]) -> None:
    axes.set_title("power over that of the truth")
    if "spectrum" not in measured:
        axes.set_axis_off()
        return
    bands, power = np.array(measured["spectrum"]["bands"]), measured["spectrum"]["power"]
    middle, truth = np.sqrt(bands[:, 0] * bands[:, 1]), np.array(power["truth"][0])
    looks = {"samples": (style.BLUE, "-"), "mean": (style.BLUE, "--"), "gaussian": (style.ORANGE, "-")}
    for name, values in power.items():
        if name == "truth":
            continue
        colour, dash = looks.get(name, (style.look().soft, style.DASHES[len(axes.lines) % len(style.DASHES)]))
        ratio = np.array(values[0]) / np.maximum(truth, 1e-300)
        axes.loglog(middle, np.maximum(ratio, 1e-300), color=colour, linestyle=dash, label=name)
    axes.axhline(1, color=style.ink(), linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 1e-3), min(high, 1e3))
    axes.set_xlabel(wavenumber_label(shape, boundary))
    axes.legend(fontsize=style.TINY)
