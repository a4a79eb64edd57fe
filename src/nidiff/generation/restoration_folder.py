"""The folder of a restoration:

restoration.json  what decides the numbers, and what was measured
samples.npz       arr_0 [N, samples, *event, C] in the units of the data, and seeds [N, samples]
mean.npy          [N, *event, C], the mean of the samples before rounding
spread.npy        their standard deviation
observed.npy      [N, …, C], what was observed; NaN where nothing was
png/              8-bit pictures: ITEM-SEED.png, and ITEM-mean.png
samples.nc, …     all samples, one after the other, if asked for (`nidiff.generation.export`)
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nidiff import __version__
from nidiff.data.dataset import as_stored
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, save_png
from nidiff.errors import InputError, one_of
from nidiff.files import ASIDE, as_path, read_object, replace_json, replace_npz, replacing, writing
from nidiff.generation.export import WHOLE_FILES, Samples, check_export
from nidiff.generation.loaded_model import Model
from nidiff.generation.restoration import Restoration
from nidiff.sealed import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

FACTS = "restoration.json"
FORMATS = ("npz", "netcdf", "zarr")


def check_format(kind: str, grid: Grid) -> None:
    check_export(one_of("format", kind, FORMATS), grid)


def known_facts(out: Path, task: Mapping[str, Any]) -> dict[str, Any] | None:
    """The facts in the folder ``out``, if it holds the same task; None if it is new or empty. Anything else in it is
    refused."""
    out = as_path("out", out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    again = "choose a new directory"
    if not (out / FACTS).is_file():
        raise InputError("out", out, "holds other files", again)
    facts = read_object(out / FACTS, again)
    stored = facts.get("task")
    if stored != dict(task):
        known = stored if isinstance(stored, dict) else {}
        differs = ", ".join(f"`{key}`" for key in sorted(task) if known.get(key) != task[key])
        raise InputError("out", out, f"holds another restoration ({differs} differ)", again)
    return facts


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is drawn."""
    with writing("out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=ASIDE):
            pass


def write_restoration(folder: Path, restoration: Restoration, facts: Mapping[str, Any], kind: str) -> None:
    """Write all files to ``folder``; ``kind`` is one of `FORMATS`."""
    replace_json(folder / FACTS, dict(facts))
    x, seeds, scaling, grid = restoration.x, restoration.seeds, restoration.scaling, restoration.grid
    stored = as_stored(x.flatten(0, 1), scaling, grid.dtype)
    replace_npz(folder / "samples.npz", {"arr_0": _channels_last(stored.reshape(x.shape), 2), "seeds": seeds})
    arrays = {"mean": restoration.mean, "spread": restoration.spread, "observed": restoration.observed.float()}
    for name, values in arrays.items():
        with replacing(folder / f"{name}.npy") as file:
            np.lib.format.write_array(file, _channels_last(values, 1), allow_pickle=False)
    if kind in WHOLE_FILES:
        name, write = WHOLE_FILES[kind]
        about = {"source": f"nidiff {__version__}", "task": digest(facts["task"])}
        write(Samples(stored.numpy(), seeds.flatten(), grid, about), folder / name)
    if grid.kind == "picture":
        mean = as_grey_or_rgb(as_stored(x.double().mean(1), scaling, grid.dtype))
        pictures = as_grey_or_rgb(stored)
        for item, row in enumerate(pictures.reshape(len(x), -1, *pictures.shape[1:])):
            save_png(mean[item].movedim(0, -1), folder / "png" / f"{item:04d}-mean.png")
            for seed, picture in zip(seeds[item], row, strict=True):
                save_png(picture.movedim(0, -1), folder / "png" / f"{item:04d}-{seed:06d}.png")


def _channels_last(values: Tensor, axis: int) -> "NDArray[Any]":
    return np.ascontiguousarray(values.movedim(axis, -1).numpy())


def errors_text(measured: Mapping[str, Any]) -> str:
    """The errors of a restoration in words."""
    mean, single = measured["rmse_of_mean"], measured["rmse_of_sample"]
    errors = f"RMS error {mean:.4g} of the mean, {single:.4g} of a single sample, in units of the {measured['units']}"
    if "coverage" not in measured:
        return errors
    return f"{errors}; the {measured['interval']:.0%} interval contains {measured['coverage']:.1%} of the true values"


def default_folder(model: Model, task: Mapping[str, Any]) -> Path:
    """restored/… or denoised/… in the run, or in out/NAME for a shipped model."""
    words = [Path(str(task["file"])).stem, str(task["sampler"]), str(task["num_steps"]), digest(dict(task))[:8]]
    return model.home / f"{task['command']}d" / "-".join(words)
