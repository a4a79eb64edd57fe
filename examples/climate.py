"""Maps of temperature and wind, made up with a seed, and a picture of what models make of them (docs/climate.md).

python examples/climate.py climate.nc               writes the data
python examples/climate.py climate.nc RUN RUN …     draws climate.png: maps of nidiff sample, spectra of nidiff evaluate
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import nidiff
from nidiff import style

EDGES = ("reflecting", "periodic")  # latitude ends at 60°, longitude goes round
SAMPLER = "angle_2m"
NAMES = {"t2m": "temperature\nat 2 m (K)", "u10": "eastward wind\nat 10 m (m/s)"}
KEYS = ("low", "high", "real", "real_error", "generated", "generated_error")  # of a band


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
    """Draw what `gather` finds, and keep it in a file beside the figure."""
    numbers = gather(path, runs, num_steps)
    np.savez_compressed(Path(out).with_suffix(".npz"), **numbers)
    picture(numbers, out)


def gather(path: str, runs: list[str], num_steps: int = 10) -> dict[str, np.ndarray]:
    """The last map of the data and one of each run's samples; spectra and coherence with their errors."""
    files = [path, *(next(Path(run).glob(f"generated/{SAMPLER}-{num_steps}-*/samples.nc")) for run in runs)]
    maps = [xarray.open_dataset(file).isel({"time" if file == path else "sample": -1}) for file in files]
    numbers = {name: np.stack([each_map[name] for each_map in maps]).astype(np.float32) for name in NAMES}
    numbers |= {name: maps[0][name].values for name in ("latitude", "longitude")}
    numbers["runs"] = np.array([Path(run).name for run in runs])
    numbers["steps"], numbers["bands"] = np.array(num_steps), np.stack([bands(run, num_steps) for run in runs])
    return numbers


def bands(run: str, num_steps: int) -> np.ndarray:
    """[2 spectra and the coherence, `KEYS`, bands], as nidiff evaluate stored them."""
    results = json.loads(Path(run, "metrics.json").read_text())
    results = [result for result in results if (result["sampler"], result["num_steps"]) == (SAMPLER, num_steps)]
    tables = results[-1]["details"]["bands"]
    return np.array([[[band[key] for band in table["bands"]] for key in KEYS] for table in tables[:3]])


@style.drawn
def picture(numbers: Mapping[str, np.ndarray], out: str) -> None:
    """Above, the maps; below, their spectra over those of the held-out data, and their coherence."""
    figure = Figure((style.WIDTH, 6.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    titles = ["data", *(f"{run}, {numbers['steps']} steps" for run in numbers["runs"])]
    rows = above.subplots(2, len(titles), sharex=True, sharey=True)
    for row, (name, label) in zip(rows, NAMES.items(), strict=True):
        low, high = np.quantile(numbers[name], (0.005, 0.995))
        if low < 0:
            low, high = -max(-low, high), max(-low, high)
        look = {"cmap": style.DIVERGING if low < 0 else style.SEQUENTIAL, "vmin": low, "vmax": high}
        for panel, values in zip(row, numbers[name], strict=True):
            mesh = panel.pcolormesh(numbers["longitude"], numbers["latitude"], values, **look)
        row[0].set_ylabel("latitude (°N)")
        above.colorbar(mesh, ax=row, label=label, extend="both")
    for panel, title in zip(rows[0], titles, strict=True):
        panel.set_title(title, fontsize=style.SMALL)
    above.supxlabel("longitude (°E)", fontsize=style.SMALL)
    titles = ("temperature", "wind", "temperature and wind")
    labels = (*2 * ("power per mode\nover the data's",), "coherence")
    for place, (panel, title, label) in enumerate(zip(below.subplots(1, 3), titles, labels, strict=True)):
        for run, table, colour, mark in zip(
            numbers["runs"], numbers["bands"], style.COLOURS, style.MARKERS, strict=False
        ):
            draw_bands(panel, table[place], place < 2, color=colour, marker=mark, label=run)
        panel.set_title(title, fontsize=style.SMALL)
        panel.set_ylabel(label)
    panel.fill_between([], [], color=style.look().faint, label="held-out data ± 2 s.e.")
    below.axes[1].set_xlabel("wavenumber |k| (1 = once round the globe)")
    below.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out)


def draw_bands(panel: Axes, table: np.ndarray, over_data: bool, **line: str) -> None:
    """A spectrum of the samples over that of the held-out data, or their coherence, with two standard errors."""
    low, high, real, error, made, spread = table
    k, unit = np.sqrt(low * high), real if over_data else 1.0
    area = (k, (real - 2 * error) / unit, (real + 2 * error) / unit)
    panel.fill_between(*area, color=style.look().faint, zorder=0)
    panel.errorbar(k, made / unit, 2 * spread / unit, **line)
    panel.grid()
    panel.set_xscale("log")
    panel.set(xticks=(1, 3, 10, 30), xticklabels=("1", "3", "10", "30"))


if __name__ == "__main__":
    make(sys.argv[1]) if len(sys.argv) == 2 else draw(sys.argv[1], sys.argv[2:])
