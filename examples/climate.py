"""Maps of temperature and wind, made up with a seed, and a picture of what nidiff made of them (docs/climate.md).

python examples/climate.py climate.nc                    writes the data
python examples/climate.py climate.nc runs/a runs/b …    draws climate.png of runs that nidiff sample and evaluate saw
"""

import sys
from pathlib import Path

import numpy as np
import torch
import xarray

import nidiff

EDGES = ("reflecting", "periodic")  # latitude ends at 60°, longitude goes round


def make(path: str, shape: tuple[int, int] = (48, 96), years: int = 24) -> None:
    """73 maps a year of temperature, which is skewed, and of wind, which gusts in a jet, both of spectrum |k|^-3."""
    rng, count = torch.Generator().manual_seed(0), 73 * years
    field = nidiff.gaussian_free_field(shape, gamma=1.5, boundary=EDGES)
    warm, own = field.sample((2, count, *shape), rng)
    blur = nidiff.matern(shape, length_scale=shape[0] / 24, boundary=EDGES)
    wind = own + 0.3 * warm + blur.matmul(warm) / blur.eigenvalues.max()  # less alike the finer the scale
    latitude = torch.linspace(-60, 60, shape[0] + 1)[1:] - 60 / shape[0]  # of the middle of each row
    jet = (-(((latitude.abs() - 40) / 12) ** 2)).exp()[:, None]
    kelvin = 300 - 0.009 * latitude[:, None] ** 2 + 4 * torch.expm1(0.2 * warm) / 0.2
    speed = 12 * jet + (1.5 + 2 * jet) * torch.sinh(0.3 * wind) / 0.3
    axes = ("time", "latitude", "longitude")
    about = {"latitude": latitude.numpy(), "longitude": np.arange(shape[1]) * 360 / shape[1]}
    maps = {
        "t2m": (axes, kelvin.numpy(), {"units": "K", "long_name": "temperature at 2 m"}),
        "u10": (axes, speed.numpy(), {"units": "m/s", "long_name": "eastward wind at 10 m"}),
    }
    time = np.concatenate([np.datetime64(f"{1976 + year}-01-01") + 5 * np.arange(73) for year in range(years)])
    data = xarray.Dataset(maps, {"time": time.astype("datetime64[ns]"), **about})
    data.latitude.attrs["units"], data.longitude.attrs["units"] = "degrees_north", "degrees_east"
    data.to_netcdf(path, engine="h5netcdf")


if __name__ == "__main__":
    make(sys.argv[1])
