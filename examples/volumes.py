"""Volumes of a density, made up with a seed, and a picture of what models make of them (docs/volumes.md).

python examples/volumes.py volumes.nc               writes the data
python examples/volumes.py volumes.nc RUN RUN …     draws volumes.png: samples of nidiff sample, spectra of nidiff table
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import xarray
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import nidiff

SAMPLER, COLOURS = "angle_2m", ("#0072b2", "#d55e00", "#009e73")


def make(path: str, size: int = 32, count: int = 800) -> None:
    """Boxes of 100 Mpc with a density of mean 1: the logarithm is a Matérn field whose fine part is stronger in clumps
    than in the voids between them."""
    rng, shape, axes = torch.Generator().manual_seed(0), (size,) * 3, ("z", "y", "x")
    coarse, fine = (nidiff.matern(shape, length_scale=length, smoothness=1.0) for length in (size / 8, size / 20))
    clumps, detail = coarse.sample((count, *shape), rng), fine.sample((count, *shape), rng)
    density = torch.exp(0.9 * clumps + 0.3 * (1 + 0.6 * clumps.tanh()) * detail)
    density /= density.mean()
    where = {axis: (axis, (np.arange(size) + 0.5) * 100 / size, {"units": "Mpc"}) for axis in axes}
    about = {"units": "1", "long_name": "density over its mean"}
    data = xarray.Dataset({"density": (("box", *axes), density.numpy(), about)}, where)
    data.to_netcdf(path, engine="h5netcdf")


def draw(path: str, runs: list[str], num_steps: int = 10, out: str = "volumes.png") -> None:
    """Left, slices through the middle of a box of the data and of each run; right, all values, and the spectra."""
    figure = Figure((11, 2.1 * (1 + len(runs))), dpi=120, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    files = [path, *(next(Path(run).glob(f"generated/{SAMPLER}-{num_steps}-*/samples.nc")) for run in runs)]
    boxes = {
        Path(run).name: xarray.open_dataset(file).density for run, file in zip(["data", *runs], files, strict=True)
    }
    look = {"cmap": "inferno", "norm": LogNorm(*np.quantile(boxes["data"][:8], (0.005, 0.999)))}
    rows = left.subplots(len(boxes), 3)
    for row, (name, box) in zip(rows, boxes.items(), strict=True):
        for panel, axis in zip(row, ("z", "y", "x"), strict=True):
            middle = box[-1].isel({axis: box.sizes[axis] // 2})
            mesh = panel.pcolormesh(*(middle[one] for one in middle.dims[::-1]), middle, **look)
            panel.set(aspect="equal", xticks=[], yticks=[], xlabel=middle.dims[1], ylabel=middle.dims[0])
        row[0].set_ylabel(name)
    left.colorbar(mesh, ax=rows, label="density over its mean", shrink=0.6, extend="both")
    values, spectra = right.subplots(2, 1)
    edges = np.geomspace(0.01, 100, 61)
    for (name, box), colour in zip(boxes.items(), ("black", *COLOURS), strict=False):
        counts, _ = np.histogram(box[-128:], edges, density=False)
        values.step(edges[:-1], counts / box[-128:].size, where="post", color=colour, label=name)
    values.set(xscale="log", yscale="log", title="share of the voxels by density over its mean")
    values.legend(fontsize=8, frameon=False)
    for run, colour in zip(runs, COLOURS, strict=False):
        draw_bands(spectra, run, num_steps, colour)
    figure.savefig(out)


def draw_bands(panel: Axes, run: str, num_steps: int, colour: str) -> None:
    """The spectrum of the samples over that of the held-out data, with two standard errors."""
    results = json.loads(Path(run, "metrics.json").read_text())
    results = [one for one in results if (one["sampler"], one["num_steps"]) == (SAMPLER, num_steps)]
    bands = results[-1]["details"]["bands"][0]["bands"]
    keys = ("low", "high", "real", "real_error", "generated", "generated_error")
    low, high, real, error, made, spread = (np.array([band[key] for band in bands]) for key in keys)
    k = np.sqrt(low * high)
    panel.fill_between(k, 1 - 2 * error / real, 1 + 2 * error / real, color="0.88", zorder=0)
    panel.errorbar(k, made / real, 2 * spread / real, color=colour, marker="o", ms=4, capsize=2)
    panel.grid(color="0.93")
    panel.set_xscale("log")
    panel.set(
        xticks=(1, 3, 10, 30),
        xticklabels=("1", "3", "10", "30"),
        xlabel="wavenumber k",
        title="S(k) of the density over the data's",
    )


if __name__ == "__main__":
    make(sys.argv[1]) if len(sys.argv) == 2 else draw(sys.argv[1], sys.argv[2:])
