"""Volumes of a density, made up with a seed, and a picture of what models make of them (docs/volumes.md).

python examples/volumes.py volumes.nc               writes the data
python examples/volumes.py volumes.nc RUN RUN …     draws volumes.png: samples of nidiff sample, spectra of nidiff table
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xarray
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import nidiff
from nidiff import style

SAMPLER, AXES, EDGES = "dpmpp_2m", ("z", "y", "x"), np.geomspace(0.01, 100, 61)
KEYS = ("low", "high", "real", "real_error", "generated", "generated_error")  # of a band


def make(path: str, size: int = 32, count: int = 800) -> None:
    """Boxes of 100 Mpc with a density of mean 1: the logarithm is a Matérn field whose fine part is stronger in clumps
    than in the voids between them."""
    rng, shape = torch.Generator().manual_seed(0), (size,) * 3
    coarse, fine = (nidiff.matern(shape, length_scale=length, smoothness=1.0) for length in (size / 8, size / 20))
    clumps, detail = coarse.sample((count, *shape), rng), fine.sample((count, *shape), rng)
    density = torch.exp(0.9 * clumps + 0.3 * (1 + 0.6 * clumps.tanh()) * detail)
    density /= density.mean()
    where = {axis: (axis, (np.arange(size) + 0.5) * 100 / size, {"units": "Mpc"}) for axis in AXES}
    about = {"units": "1", "long_name": "density over its mean"}
    data = xarray.Dataset({"density": (("box", *AXES), density.numpy(), about)}, where)
    data.to_netcdf(path, engine="h5netcdf")


def draw(path: str, runs: list[str], num_steps: int = 20, out: str = "volumes.png") -> None:
    """Draw what `gather` finds, and keep it in a file beside the figure."""
    numbers = gather(path, runs, num_steps)
    np.savez_compressed(Path(out).with_suffix(".npz"), **numbers)
    picture(numbers, out)


def gather(path: str, runs: list[str], num_steps: int = 20) -> dict[str, np.ndarray]:
    """Slices through the middle of a box of the data and of each run, all values, and the spectra."""
    files = [path, *(next(Path(run).glob(f"generated/{SAMPLER}-{num_steps}-*/samples.nc")) for run in runs)]
    boxes = [xarray.open_dataset(file).density.transpose(..., *AXES).values for file in files]
    middle = boxes[0].shape[-1] // 2
    slices = [[box[-1].take(middle, axis) for axis in range(3)] for box in boxes]
    shares = [np.histogram(box[-128:], EDGES)[0] / box[-128:].size for box in boxes]
    limits = np.quantile(boxes[0][:8], (0.005, 0.999))
    names = np.array([Path(run).name for run in runs])
    bands = np.stack([spectrum(run, num_steps) for run in runs])
    return {"runs": names, "slices": np.array(slices), "limits": limits, "shares": np.array(shares), "bands": bands}


def spectrum(run: str, num_steps: int) -> np.ndarray:
    """[`KEYS`, bands], as nidiff table stored them."""
    results = json.loads(Path(run, "metrics.json").read_text())
    results = [result for result in results if (result["sampler"], result["num_steps"]) == (SAMPLER, num_steps)]
    return np.array([[band[key] for band in results[-1]["details"]["bands"][0]["bands"]] for key in KEYS])


@style.drawn
def picture(numbers: Mapping[str, np.ndarray], out: str) -> None:
    """Left, the slices; right, the share of the voxels by density, and the spectra over that of the data."""
    names = ["data", *numbers["runs"]]
    figure = Figure((style.WIDTH, 1.5 * len(names) + 0.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    rows = left.subplots(len(names), 3)
    for row, name, slices in zip(rows, names, numbers["slices"], strict=True):
        for panel, axis, values in zip(row, AXES, slices, strict=True):
            mesh = panel.imshow(values, norm=LogNorm(*numbers["limits"]), origin="lower", interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
            if name == "data":
                panel.set_title(f"{axis} = 50 Mpc", fontsize=style.SMALL)
        row[0].set_ylabel(name)
    left.colorbar(mesh, ax=rows, label="density over its mean", shrink=0.6, extend="both")
    values, spectra = right.subplots(2, 1)
    looks = list(zip((style.ink(), *style.COLOURS), (*style.DASHES, "-"), ("", *style.MARKERS), strict=False))
    for name, share, (colour, dash, _) in zip(names, numbers["shares"], looks, strict=False):
        values.step(EDGES[:-1], share, where="post", color=colour, linestyle=dash, label=name)
    values.set(xscale="log", yscale="log", xlabel="density over its mean", ylabel="share of the voxels")
    values.legend()
    for name, table, (colour, _, mark) in zip(names[1:], numbers["bands"], looks[1:], strict=False):
        draw_bands(spectra, table, color=colour, marker=mark, label=name)
    spectra.fill_between([], [], color=style.look().faint, label="held-out data ± 2 s.e.")
    spectra.legend()
    figure.savefig(out)


def draw_bands(panel: Axes, table: np.ndarray, **line: str) -> None:
    """The spectrum of the samples over that of the held-out data, with two standard errors."""
    low, high, real, error, made, spread = table
    k = np.sqrt(low * high)
    panel.fill_between(k, 1 - 2 * error / real, 1 + 2 * error / real, color=style.look().faint, zorder=0)
    panel.errorbar(k, made / real, 2 * spread / real, **line)
    panel.grid()
    panel.set(xscale="log", yscale="log", xticks=(1, 3, 10, 30), xticklabels=("1", "3", "10", "30"))
    panel.set(xlabel="wavenumber |k| (cycles per 100 Mpc)", ylabel="power per mode over the data's")


if __name__ == "__main__":
    make(sys.argv[1]) if len(sys.argv) == 2 else draw(sys.argv[1], sys.argv[2:])
