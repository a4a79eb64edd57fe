"""Maps of temperature and wind, made up with a seed, and a picture of what models make of them (docs/climate.md).

python examples/climate.py climate.nc               writes the data
python examples/climate.py climate.nc RUN RUN …     draws climate.png: maps of nidiff sample, spectra of nidiff evaluate
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import nidiff

EDGES = ("reflecting", "periodic")  # latitude ends at 60°, longitude goes round
SAMPLER, COLOURS = "angle_2m", ("#0072b2", "#d55e00", "#009e73")


def make(path: str, shape: tuple[int, int] = (48, 96), years: int = 24) -> None:
    """73 maps a year of temperature, which is skewed, and of wind, which gusts in a jet, both of spectrum |k|^-3."""
    rng, count = torch.Generator().manual_seed(0), 73 * years
    warm, own = nidiff.gaussian_free_field(shape, gamma=1.5, boundary=EDGES).sample((2, count, *shape), rng)
    blur = nidiff.matern(shape, length_scale=shape[0] / 24, boundary=EDGES)
    wind = own + 0.3 * warm + blur.matmul(warm) / blur.eigenvalues.max()  # less like warm the finer the scale
    latitude = torch.linspace(-60, 60, shape[0] + 1)[1:] - 60 / shape[0]  # of the middle of each row
    jet = (-(((latitude.abs() - 40) / 12) ** 2)).exp()[:, None]
    kelvin = 300 - 0.009 * latitude[:, None] ** 2 + 4 * torch.expm1(0.2 * warm) / 0.2
    speed = 12 * jet + (1.5 + 2 * jet) * torch.sinh(0.3 * wind) / 0.3
    axes, longitude = ("time", "latitude", "longitude"), np.arange(shape[1]) * 360 / shape[1]
    days = [np.datetime64(f"{1976 + year}-01-01") + 5 * np.arange(73) for year in range(years)]
    maps = {
        "t2m": (axes, kelvin.numpy(), {"units": "K", "long_name": "temperature at 2 m"}),
        "u10": (axes, speed.numpy(), {"units": "m/s", "long_name": "eastward wind at 10 m"}),
    }
    where = {
        "time": np.concatenate(days).astype("datetime64[ns]"),
        "latitude": ("latitude", latitude.numpy(), {"units": "degrees_north"}),
        "longitude": ("longitude", longitude, {"units": "degrees_east"}),
    }
    xarray.Dataset(maps, where).to_netcdf(path, engine="h5netcdf")


def draw(path: str, runs: list[str], num_steps: int = 10, out: str = "climate.png") -> None:
    """Above, the last map of the data and one of each run's samples; below, their spectra and coherence."""
    figure = Figure((11, 7.5), dpi=120, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    files = [path, *(next(Path(run).glob(f"generated/{SAMPLER}-{num_steps}-*/samples.nc")) for run in runs)]
    maps = [xarray.open_dataset(file).isel({"time" if file == path else "sample": -1}) for file in files]
    rows = above.subplots(2, len(files), sharex=True, sharey=True)
    for row, (name, colours) in zip(rows, {"t2m": "RdYlBu_r", "u10": "PuOr_r"}.items(), strict=True):
        low, high = np.quantile([one[name] for one in maps], (0.005, 0.995))
        for panel, one in zip(row, maps, strict=True):
            mesh = panel.pcolormesh(one.longitude, one.latitude, one[name], cmap=colours, vmin=low, vmax=high)
        row[0].set_ylabel("latitude")
        above.colorbar(mesh, ax=row, label=f"{name} ({maps[0][name].units})", extend="both")
    for panel, title in zip(rows[0], ["data", *(f"{Path(run).name}, {num_steps} steps" for run in runs)], strict=True):
        panel.set_title(title, fontsize=10)
    for place, panel in enumerate(below.subplots(1, 3)):
        for run, colour in zip(runs, COLOURS, strict=False):
            draw_bands(panel, run, num_steps, place, colour)
    panel.legend(fontsize=8, frameon=False)
    figure.savefig(out)


def draw_bands(panel: Axes, run: str, num_steps: int, place: int, colour: str) -> None:
    """A spectrum of the samples over that of the held-out data, or their coherence, with two standard errors."""
    results = json.loads(Path(run, "metrics.json").read_text())
    results = [one for one in results if (one["sampler"], one["num_steps"]) == (SAMPLER, num_steps)]
    table = results[-1]["details"]["bands"][place]
    keys = ("low", "high", "real", "real_error", "generated", "generated_error")
    low, high, real, error, made, spread = (np.array([band[key] for band in table["bands"]]) for key in keys)
    k, unit = np.sqrt(low * high), real if "spectrum" in table else 1.0
    panel.fill_between(k, (real - 2 * error) / unit, (real + 2 * error) / unit, color="0.88", zorder=0)
    panel.errorbar(k, made / unit, 2 * spread / unit, color=colour, marker="o", ms=4, capsize=2, label=Path(run).name)
    title = f"S(k) of {table['channel']} over the data's" if "spectrum" in table else "coherence of t2m and u10"
    panel.grid(color="0.93")
    panel.set_xscale("log")
    panel.set(xticks=(1, 3, 10, 30), xticklabels=("1", "3", "10", "30"), xlabel="wavenumber k", title=title)


if __name__ == "__main__":
    make(sys.argv[1]) if len(sys.argv) == 2 else draw(sys.argv[1], sys.argv[2:])
