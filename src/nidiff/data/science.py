"""NetCDF, HDF5 and Zarr by xarray: variables become channels, and units and coordinates are kept."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nidiff.data.arrays import Layout, as_layout, as_stored_numbers, stored_type
from nidiff.data.dataset import WHOLE, Along, Dataset, Source
from nidiff.data.grid import USUAL, Grid
from nidiff.data.sources import Limits, gather, load_or_stream, slices_of, watched
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError, one_of
from nidiff.extras import require
from nidiff.files import blaming, read_json
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = (".nc", ".nc4", ".h5", ".hdf5", ".zarr")
# Axes that belong to an item: the first axis of a variable is that of the items only if it is none of them.
INSIDE = ("lat", "latitude", "lon", "longitude", "level", "height", "width", "depth", "channel", "x", "y", "z")
NAMELESS = "phony_dim"  # how h5netcdf calls the axes of plain HDF5
CALENDARS = ("", "standard", "gregorian", "proleptic_gregorian")  # of the dates that everyone uses
METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zarray")  # of Zarr


def is_science(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def open_science(path: Path, spec: DataSpec, limits: Limits) -> Dataset:
    """The variables of a file as channels [N, C, *event].

    Without ``variables``, all that hold uint8, uint16 or floats, which must share their axes. The axis of the items is
    ``sample_axis``, by default the first one. A ``layout`` gives the axes of one variable by letters instead; its C
    makes channels of one axis.
    """
    table, file = _open_table(path), str(path)
    names = _variables(table, file, spec)
    dims, sample, channel = _axes(table[names[0]], file, spec)
    is_nameless = any(dim.startswith(NAMELESS) for dim in dims)
    for name in names:
        others = tuple(map(str, table[name].dims))
        # Nameless axes are known by their sizes alone, so that their order is what tells them apart.
        is_other = others != dims if is_nameless else {*others} != {*dims}
        if is_other or (channel is not None and len(names) > 1):
            problem = f"has {names[0]!r} over {table[names[0]].dims} and {name!r} over {table[name].dims}"
            remedy = "choose one of them with `variables`, or several that have the same axes and no axis of channels"
            raise FileError("data", file, problem, remedy)
    event = tuple(dim for dim in dims if dim not in (sample, channel))
    source = _source(path, table, names, sample, channel, event)
    with blaming(file, "repair it", "cannot be read", "data"):
        grid = _grid(table, names, event, channel, str(source.dtype).removeprefix("torch."))
        along = _along(table, sample)
    if is_nameless:
        axes = USUAL[len(event)] if spec.layout is None else Layout(spec.layout).axes
        grid = replace(grid, axes=axes, coordinates={}, axis_units={})
    values = load_or_stream(source, file, limits)
    if values is not source:
        table.close()
    return Dataset(values, grid=grid, along=along)


def read_variables(
    path: Path, argument: str, names: Sequence[str], sample: str, event: Sequence[str]
) -> "list[NDArray[Any]]":
    """Variables that belong to the items along the axis ``sample``, which comes first; then the axes in the order of
    ``event``, or as in the file if they are others."""
    arrays = []
    with _open_table(path) as table:
        for name in names:
            variable = table[one_of(argument, name, map(str, table.variables))]
            dims = [str(dim) for dim in variable.dims if dim != sample]
            if len(dims) == len(variable.dims):
                problem = f"is not over {sample!r}, the axis of the items"
                raise InputError(argument, name, problem, "choose a variable that is")
            if {*dims} == {*event}:
                dims = [*event]
            require_memory(argument, name, 2.0 * prod(variable.shape) * variable.dtype.itemsize, "give fewer items")
            with blaming(str(path), "repair it", f"has {name!r}, which cannot be read", argument):
                arrays.append(np.asarray(variable.transpose(sample, *dims).values))
    return arrays


def _source(
    path: Path, table: Any, names: Sequence[str], sample: str, channel: str | None, event: tuple[str, ...]
) -> Source:
    """The variables of an open file."""
    order = (sample, *event) if channel is None else (sample, channel, *event)
    types = {stored_type(f"{name} of {path}", table[name].dtype) for name in names}
    stored = types.pop() if len(types) == 1 else np.dtype(np.float32)

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        parts = slices_of(rows)
        part = {sample: parts[0] if len(parts) == 1 else rows}
        arrays = [table[name].isel(part).transpose(*order).values for name in names]
        return as_stored_numbers(np.stack(arrays, 1) if channel is None else arrays[0], stored)

    channels = len(names) if channel is None else table.sizes[channel]
    shape = (table.sizes[sample], channels, *(table.sizes[dim] for dim in event))
    file = next((path / name for name in METADATA if (path / name).exists()), path)
    return Source(shape, getattr(torch, stored.name), watched(file, partial(gather, read=read)))


def _open_table(path: Path) -> Any:
    """The table of variables, of which nothing is read yet but the coordinates."""
    xarray, is_zarr = require("xarray"), path.is_dir()
    options: dict[str, Any] = {"engine": "zarr"} if is_zarr else {"engine": "h5netcdf", "phony_dims": "sort"}
    require(options["engine"])
    remedy = "write it with xarray, or convert classic NetCDF by nccopy -k nc4"
    with blaming(str(path), remedy, f"cannot be read as {'Zarr' if is_zarr else 'NetCDF or HDF5'}", "data"):
        (_check_zarr if is_zarr else _check_hdf5)(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata that is in several places
            return xarray.open_dataset(path, decode_times=False, decode_coords="all", cache=False, **options)


def _check_hdf5(path: Path) -> None:
    """Refuse a file that would have us read other files."""
    h5py = require("h5py")

    def refers(name: str, link: Any) -> str | None:
        if isinstance(link, h5py.ExternalLink):
            return name
        entry = None if isinstance(link, h5py.SoftLink) else file[name]
        return name if isinstance(entry, h5py.Dataset) and (entry.is_virtual or entry.external) else None

    with h5py.File(path, "r") as file:
        elsewhere = file.visititems_links(refers)
    if elsewhere is not None:
        raise FileError("data", str(path), f"refers to another file for {elsewhere!r}", "copy the values into it")


def _check_zarr(path: Path) -> None:
    """Refuse a folder whose arrays are pickled, since to read them would run any program."""
    for file in path.rglob("*"):
        if file.name in METADATA and _has_pickle(read_json(file)):
            raise FileError("data", str(path), f"has pickled values, by {file.name}", "write it with zstd or blosc")


def _has_pickle(metadata: Any) -> bool:
    """Whether the metadata of Zarr name the codec pickle; they list codecs by ``id`` or ``name``, or as words."""
    if isinstance(metadata, Mapping):
        return any(map(_has_pickle, metadata.values()))
    if isinstance(metadata, list):
        return any(map(_has_pickle, metadata))
    return isinstance(metadata, str) and metadata.rpartition(".")[2] == "pickle"


def _variables(table: Any, file: str, spec: DataSpec) -> list[str]:
    if spec.variables:
        return [one_of("variables", name, map(str, table.data_vars)) for name in spec.variables]
    held = {str(name): variable for name, variable in table.data_vars.items() if name not in spec.annotation_variables}
    numbers = [name for name, variable in held.items() if variable.dtype.kind == "f" or variable.dtype.name in WHOLE]
    names = [name for name in numbers if held[name].ndim >= 2]
    if not names:
        kinds = ", ".join(f"{name} {variable.dtype} {variable.shape}" for name, variable in held.items())
        remedy = "give floats, uint8 or uint16 with two axes or more"
        raise FileError("data", file, f"has no variable to read among {kinds or 'none'}", remedy)
    return names


def _axes(variable: Any, file: str, spec: DataSpec) -> tuple[tuple[str, ...], str, str | None]:
    """The axes of a variable, that of the items, and that of the channels if it has one."""
    dims = tuple(map(str, variable.dims))
    if spec.layout is not None:
        spec.refuse("sample_axis")  # which is N
        letters = as_layout(spec.layout, f"{variable.name} of {file}", variable.shape).letters
        return dims, dims[letters.index("N")], dims[letters.index("C")] if "C" in letters else None
    if not 2 <= len(dims) <= 4 or (spec.sample_axis is None and dims[0].lower() in INSIDE):
        problem = f"has {variable.name!r} over {dims}, which do not seem to be an axis of items and one to three others"
        raise FileError("data", file, problem, "say with `sample_axis` which is the axis of the items, or give others")
    return dims, dims[0] if spec.sample_axis is None else one_of("sample_axis", spec.sample_axis, dims), None


def _grid(table: Any, names: Sequence[str], event: tuple[str, ...], channel: str | None, dtype: str) -> Grid:
    """What the file says of its channels and axes."""
    channels, units = tuple(names), tuple(_text(table[name], "units") for name in names)
    if channel is not None:
        values = _numbers_along(table, channel)
        channels, units = tuple(f"{names[0]}_{value:g}" for value in values), units * table.sizes[channel]
    coordinates = {dim: values for dim in event if (values := _numbers_along(table, dim))}
    axis_units = {dim: unit for dim in event if dim in table.coords and (unit := _axis_unit(table[dim]))}
    return Grid(event, channels, units if any(units) else (), coordinates, axis_units, dtype)


def _numbers_along(table: Any, dim: str) -> tuple[float, ...]:
    """The coordinate of an axis; nothing where it has none, or one that is not of finite numbers."""
    values = table[dim].values if dim in table.coords else np.array([])
    is_numbers = values.ndim == 1 and values.dtype.kind in "iuf" and np.isfinite(values).all()
    return tuple(map(float, values)) if is_numbers else ()


def _axis_unit(coordinate: Any) -> str:
    """The unit of a coordinate; nothing for times of a calendar with other days, since a grid does not name it and
    they would be read as false dates."""
    unit = _text(coordinate, "units")
    return "" if " since " in unit and _text(coordinate, "calendar").lower() not in CALENDARS else unit


def _text(variable: Any, name: str) -> str:
    value = variable.attrs.get(name, "")
    return value if isinstance(value, str) else ""


def _along(table: Any, sample: str) -> Along:
    """The coordinate of the items: times where it says since when they count, else its numbers or words."""
    if sample not in table.coords or table[sample].dims != (sample,):
        return sample, np.arange(table.sizes[sample])
    values, xarray = table[sample], require("xarray")
    if " since " in _text(values, "units"):
        with suppress(Exception):  # a calendar that is not ours: its numbers are left
            values = xarray.decode_cf(xarray.Dataset(coords={sample: values}))[sample]
    numbers = values.values
    return sample, numbers if numbers.dtype.kind in "iufMU" else np.arange(len(numbers))
