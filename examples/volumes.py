"""Volumes of a density, made up with a seed, and a picture of what nidiff made of them (docs/volumes.md).

python examples/volumes.py volumes.nc                    writes the data
python examples/volumes.py volumes.nc runs/a runs/b …    draws volumes.png of runs that nidiff evaluate saw
"""

import sys

import numpy as np
import torch
import xarray

import nidiff


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


if __name__ == "__main__":
    make(sys.argv[1])
