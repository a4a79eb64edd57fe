"""Samples in the formats of other programs, with the names, units and coordinates that each format has room for.

A file is written aside and renamed, and the same samples give the same bytes.
"""

import sys
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.figures import samples_figure, save_drawn
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, eight_bits, save_png
from nidiff.errors import InputError, one_of
from nidiff.extras import require
from nidiff.files import replacing, replacing_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.data.dataset import Along
    from nidiff.diffusion.climatology import Times

ALL_SAMPLES = "all of them are in samples.npz"
LOUDEST, FEW = 2**15, 0.01  # of 16 bits; the share of a sound that may be cut
TEMPERATURES = ("k", "kelvin", "degk", "degc", "celsius", "degree_celsius", "degrees_celsius", "degf", "fahrenheit")
SMALLEST_FRAME, FRAME_TIME = 128, 100  # pixels, milliseconds


@dataclass(frozen=True, eq=False)
class Samples:
    """What is to be written: ``data`` [N, C, *event] in its own units, a seed for each, and what to say about them."""

    data: "NDArray[Any]"
    seeds: "NDArray[Any]"
    grid: Grid
    about: Mapping[str, str]
    names: Sequence[str] = ()
    """Of the files of single samples; default: the seeds."""
    items: "Along | None" = None
    """Of samples of items, as many of each, one after the other: the name and the coordinate of the items."""
    times: "Times | None" = None
    """The time that each sample was given."""
    anomalies: str = ""
    """What the numbers are differences from, in words."""

    def files(self, folder: Path, suffix: str) -> Iterator[tuple[Path, dict[str, str], "NDArray[Any]"]]:
        """The file of each sample, what to say about it, and its numbers."""
        names = self.names or [f"{seed:06d}" for seed in self.seeds]
        for name, seed, item in zip(names, self.seeds, self.data, strict=True):
            yield folder / f"{name}.{suffix}", {**self.about, "seed": str(seed)}, item


def check_format(kind: str, grid: Grid) -> None:
    """Refuse a format that cannot hold what ``grid`` describes, or whose packages are missing."""
    needed = {"wav": "signal", "gif": "video"}.get(one_of("format", kind, FORMATS), grid.kind)
    if grid.kind != needed or (kind == "wav" and grid.rate is None):
        rate = " with a known rate" if kind == "wav" else ""
        problem = f"is for items of the kind {needed}{rate}, and these are of the kind {grid.kind}"
        raise InputError("format", kind, problem, "use another `format`, or give the `rate` of a signal")
    drawn = ("matplotlib",) if grid.kind != "picture" else ()
    for module in {"netcdf": ("xarray", "h5netcdf"), "zarr": ("xarray", "zarr"), "png": drawn}.get(kind, ()):
        require(module)


def write_format(samples: Samples, folder: Path, kind: str) -> None:
    """Write samples to ``folder`` in one of `FORMATS`, besides the samples.npz that every folder has."""
    if kind in WHOLE_FILES:
        name, write = WHOLE_FILES[kind]
        write(samples, folder / name)
    elif kind in BY_SAMPLE:
        BY_SAMPLE[kind](samples, folder / kind)


def write_npy(samples: Samples, path: Path) -> None:
    """[N, *event, C], as in samples.npz; numpy.load(path, mmap_mode="r") reads only what is looked at."""
    with replacing(path) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(np.moveaxis(samples.data, 1, -1)), allow_pickle=False)


def write_netcdf(samples: Samples, path: Path) -> None:
    """A variable [sample, *axes] for each channel, where sample is the seed; of items [items, sample, *axes]."""
    dataset = as_xarray(samples)
    with replacing(path) as file:
        dataset.to_netcdf(file.name, engine="h5netcdf", encoding=_unfilled(dataset))


def write_zarr(samples: Samples, path: Path) -> None:
    """The same as `write_netcdf` as a folder of Zarr, format 2, which every version reads."""
    dataset = as_xarray(samples)
    with replacing_folder(path) as aside:
        dataset.to_zarr(aside, mode="w", zarr_format=2, consolidated=True, encoding=_unfilled(dataset))


def as_xarray(samples: Samples) -> Any:
    """The samples as an `xarray.Dataset`."""
    xarray, grid, data = require("xarray"), samples.grid, samples.data
    names = _variables(grid, data.shape[1])
    taken = [*grid.axes, *names]
    sample = _free("sample", taken)
    leading: tuple[str, ...] = (sample,)
    seeds: dict[str, Any] = {sample: (sample, samples.seeds, {"long_name": "seed"})}
    if samples.items is not None:
        name, along = _free(samples.items[0], [*taken, sample]), samples.items[1]
        leading, count = (name, sample), len(data) // len(along)
        data = data.reshape(len(along), count, *data.shape[1:])
        table = samples.seeds.reshape(len(along), count)
        seeds = {name: (name, along), sample: (sample, np.arange(count))}
        seeds |= {_free("seed", [*taken, *leading]): (leading, table)}
    elif samples.times is not None:
        seeds |= {_free("time", [*taken, sample]): (sample, samples.times)}
    about, units = dict(samples.about), grid.units or ("",) * len(names)
    if samples.anomalies:
        about["comment"] = samples.anomalies
    variables = {
        name: ((*leading, *grid.axes), data.take(channel, len(leading)), _about_unit(unit, bool(samples.anomalies)))
        for channel, (name, unit) in enumerate(zip(names, units, strict=True))
    }
    coordinates = {
        axis: (axis, np.array(values), {"units": grid.axis_units[axis]} if axis in grid.axis_units else {})
        for axis, values in grid.coordinates.items()
    }
    rate = {} if grid.rate is None else {"rate": grid.rate}
    return xarray.Dataset(variables, seeds | coordinates, {**about, **rate})


def _free(name: str, taken: Sequence[str]) -> str:
    """The name, with as many _ as make it another one than those that are taken."""
    while name in taken:
        name += "_"
    return name


def _about_unit(unit: str, is_difference: bool) -> dict[str, str]:
    """The attributes of a variable in a unit; of a difference of temperatures as CF 1.11 writes it."""
    if is_difference and unit.lower() in TEMPERATURES:
        return {"units": unit, "units_metadata": "temperature: difference"}
    return {"units": unit} if unit else {}


def _variables(grid: Grid, channels: int) -> list[str]:
    """A name for the variable of each channel: its own, or numbered where these are not all different."""
    names = [name.replace("/", "_") or "channel" for name in grid.channels]
    if names and len({*names, *grid.axes}) == len(names) + len(grid.axes):
        return names
    return [f"{name}_{index}" for index, name in enumerate(names or ["channel"] * channels)]


def _unfilled(dataset: Any) -> dict[str, dict[str, None]]:
    """Samples have no missing values, so none is given a number."""
    return {name: {"_FillValue": None} for name in dataset.variables}


def write_png(samples: Samples, folder: Path) -> None:
    """SEED.png: pictures exactly, and anything else as a figure. One that is whole and of these samples stays."""
    grid = samples.grid
    for path, about, item in samples.files(folder, "png"):
        if _is_png(path, about):
            continue
        x = torch.from_numpy(item)[None]
        if grid.kind != "picture":
            save_drawn(samples_figure(x, grid), path, about)
        else:
            pixels = as_stored(x, WHOLE[grid.dtype], grid.dtype) if x.is_floating_point() else x
            save_png(as_grey_or_rgb(pixels)[0].movedim(0, -1), path, about)


def _is_png(path: Path, about: Mapping[str, str]) -> bool:
    """Whether a PNG is there and whole, and says the same about itself."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            picture.verify()  # the checksums
            return about.items() <= picture.info.items()
    except Exception:  # Pillow raises nearly anything when a file is broken
        return False


def write_wav(samples: Samples, folder: Path) -> None:
    """SEED.wav, 16 bits: −1 … 1 is the whole range. The little that goes beyond it is cut, which is said."""
    data, dtype = samples.data, samples.grid.dtype
    if dtype in WHOLE and data.dtype != np.float32:
        data = WHOLE[dtype].to_model(torch.from_numpy(data).double()).numpy()
    beyond = np.abs(data) > 1
    if beyond.mean() > FEW:
        problem = f"holds -1 to 1, and the samples go from {data.min():.3g} to {data.max():.3g}"
        raise InputError("format", "wav", problem, f"use `format` npy; {ALL_SAMPLES}")
    if cut := int(beyond.any(axis=tuple(range(1, data.ndim))).sum()):
        print(
            f"{cut} of the sounds go beyond [-1, 1] and are cut there in wav/; {ALL_SAMPLES} as they are",
            file=sys.stderr,
        )
    pulses = (data * LOUDEST).round().clip(-LOUDEST, LOUDEST - 1).astype("<i2")
    for (path, _, _), sound in zip(samples.files(folder, "wav"), pulses, strict=True):
        with replacing(path) as file, wave.open(file, "wb") as out:
            out.setparams((len(sound), 2, samples.grid.rate, 0, "NONE", ""))  # type: ignore[arg-type]
            out.writeframes(np.ascontiguousarray(sound.T).tobytes())


def write_gif(samples: Samples, folder: Path) -> None:
    """SEED.gif, 10 frames per second. Of 8-bit video the values are those of the pixels. Other numbers are shown in
    grey, from the smallest to the largest of each channel; unless colours, channels stand side by side."""
    for path, about, video in samples.files(folder, "gif"):
        frames = as_grey_or_rgb(torch.from_numpy(_eight_bits(video, samples.grid.dtype)).movedim(1, 0))
        factor = max(1, SMALLEST_FRAME // min(video.shape[2:]))
        frames = frames.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
        pictures = [Image.fromarray(frame.movedim(0, -1).squeeze(-1).numpy()) for frame in frames]
        words = ", ".join(f"{key} {text}" for key, text in about.items())
        options: dict[str, Any] = {"duration": FRAME_TIME, "loop": 0, "comment": words.encode()}
        with replacing(path) as file:
            pictures[0].save(file, format="gif", save_all=True, append_images=pictures[1:], **options)


def _eight_bits(video: "NDArray[Any]", dtype: str) -> "NDArray[np.uint8]":
    """[C, *event] as uint8."""
    if dtype in WHOLE:
        return eight_bits(torch.from_numpy(video)).numpy()
    values = video.astype(np.float64)
    low, high = (end(values, axis=(1, 2, 3), keepdims=True) for end in (np.min, np.max))
    return (255 * (values - low) / np.maximum(high - low, 1e-300)).round().astype(np.uint8)


WHOLE_FILES: dict[str, tuple[str, Callable[[Samples, Path], None]]] = {
    "npy": ("samples.npy", write_npy),
    "netcdf": ("samples.nc", write_netcdf),
    "zarr": ("samples.zarr", write_zarr),
}
"""One file or folder with all samples, its name and who writes it."""
BY_SAMPLE: dict[str, Callable[[Samples, Path], None]] = {"png": write_png, "wav": write_wav, "gif": write_gif}
"""A folder of that name with a file for each sample, and who writes it."""
FORMATS = ("npz", *WHOLE_FILES, *BY_SAMPLE)
