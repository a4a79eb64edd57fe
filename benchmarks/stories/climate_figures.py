"""The figures of docs/climate_real.md, from the numbers that benchmarks/stories/climate.py stores in docs/figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nidiff import style

MOST = 8  # degrees

Numbers = Mapping[str, NDArray[Any]]


def panel(axes: Axes, numbers: Numbers, values: NDArray[Any], title: str, **look: Any) -> Any:
    """A map, with the Pacific in the middle."""
    mesh = axes.pcolormesh(numbers["longitude"], numbers["latitude"], values.astype(float), rasterized=True, **look)
    axes.set(xticks=[], yticks=[], ylim=(-90, 90), aspect="equal")
    axes.set_title(title, fontsize=style.SMALL)
    return mesh


@style.drawn
def stations(numbers: Numbers, out: Path) -> None:
    """One month: what it was and where it was seen, three means, a sample and the spread."""
    figure = Figure((style.WIDTH, 3.1), layout="constrained")
    grid, look = figure.subplots(2, 3), {"cmap": style.DIVERGING, "vmin": -MOST, "vmax": MOST}
    names = {
        "truth": "January 2016 and 105 stations",
        "kriging": "kriging, mean",
        "whole": "optimal interpolation, mean",
        "mean": "network, mean of 19 samples",
        "sample": "network, one sample",
    }
    for axes, (name, title) in zip(grid.flat, names.items(), strict=False):
        mesh = panel(axes, numbers, numbers[name], title, **look)
    rows, columns = numbers["seen"].T
    grid[0, 0].plot(numbers["longitude"][columns], numbers["latitude"][rows], ".", color=style.ink(), markersize=2.5)
    figure.colorbar(mesh, ax=grid[:, 0], label="anomaly (°C)", location="left", shrink=0.7, extend="both")
    spread = panel(grid[1, 2], numbers, numbers["spread"], "network, spread", cmap=style.SEQUENTIAL, vmin=0, vmax=5)
    figure.colorbar(spread, ax=grid[:, 2], label="standard deviation (°C)", shrink=0.7, extend="max")
    figure.savefig(out)


@style.drawn
def teleconnections(numbers: Numbers, out: Path) -> None:
    """Correlations of every point with two places, in the record and in samples."""
    names = ("held-out years", "training years", "stationary Gaussian", "network", "network from the mixture")
    figure = Figure((style.WIDTH, 1.9), layout="constrained")
    grid = figure.subplots(2, len(names))
    for row, place in zip(grid, numbers["places"], strict=True):
        for axes, name in zip(row, names, strict=True):
            title = name if place == numbers["places"][0] else ""
            mesh = panel(axes, numbers, numbers[f"{place}/{name}"], title, cmap=style.DIVERGING, vmin=-1, vmax=1)
        row[0].set_ylabel(place, fontsize=style.SMALL)
    figure.colorbar(mesh, ax=grid, label="correlation", shrink=0.8)
    figure.savefig(out)
