"""NetCDF, HDF5 and Zarr by xarray: variables become channels, and units and coordinates are kept."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.arrays import as_stored_numbers, stored_type
from nidiff.data.dataset import Along, Dataset
from nidiff.data.grid import MOST_COORDINATES, USUAL, Grid
from nidiff.data.layout import Layout
from nidiff.data.sources import Limits, WatchedFile, gather, load_or_stream, slices_of
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError, first_line, one_of
from nidiff.extras import require
from nidiff.files import read_json
from nidiff.memory import require_memory
from nidiff.recipe import fits

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = (".nc", ".nc4", ".h5", ".hdf5", ".zarr")
# Axes that belong to an item: the first axis of a variable is that of the items only if it is none of them.
INSIDE = ("lat", "latitude", "lon", "longitude", "level", "height", "width", "depth", "channel", "x", "y", "z")
NAMELESS = "phony_dim"  # how h5netcdf calls the axes of plain HDF5
CALENDARS = ("standard", "gregorian", "proleptic_gregorian")  # of the dates that everyone uses
METADATA = ("zarr.json", ".zarray", ".zmetadata")
# Of Zarr. Others are left alone: one of them, pickle, would run programs.
CODECS = (
    *("blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd", "crc32", "crc32c", "adler32", "shuffle", "bitround"),
    *("delta", "fixedscaleoffset", "quantize", "packbits", "astype", "cast_value", "scale_offset"),
    *("bytes", "transpose", "sharding_indexed", "vlen-utf8", "vlen-bytes"),
)
EMPTY_CLAIM, RATIO = 2**26, 10_000  # numbers that a file may claim without holding any; how well they compress


class Claim(NamedTuple):
    """How large an array says that it is."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]


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
    for name in names:
        others = tuple(map(str, table[name].dims))
        # Nameless axes are known by their sizes alone, so that their order is what tells them apart.
        is_other = others != dims if _is_nameless(dims) else {*others} != {*dims}
        if is_other or (channel is not None and len(names) > 1):
            problem = f"has {names[0]!r} over {table[names[0]].dims} and {name!r} over {table[name].dims}"
            remedy = "choose one of them with `variables`, or several that have the same axes and no axis of channels"
            raise FileError("data", file, problem, remedy)
    event = tuple(dim for dim in dims if dim not in (sample, channel))
    if empty := [dim for dim in dims if table.sizes[dim] == 0]:
        raise FileError("data", file, f"has no values along {empty[0]!r}", "give at least one item")
    source = Fields(path, table, names, sample, channel, event)
    with source.watched.reading():
        grid = _grid(table, names, event, channel, str(source.dtype).removeprefix("torch."))
        if _is_nameless(event):
            axes = USUAL[len(event)] if spec.layout is None else Layout(spec.layout).axes
            grid = replace(grid, axes=axes, coordinates={}, axis_units={})
        along = _along(table, sample)
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
            with WatchedFile.now(_watched_file(path)).reading():
                arrays.append(np.asarray(variable.transpose(sample, *dims).values))
    return arrays


class Fields:
    """A source of variables of an open file."""

    def __init__(
        self, path: Path, table: Any, names: Sequence[str], sample: str, channel: str | None, event: tuple[str, ...]
    ) -> None:
        self._table, self._names, self._sample = table, names, sample
        self._order = (sample, *([] if channel is None else [channel]), *event)
        self._has_channels = channel is not None
        self.watched = WatchedFile.now(_watched_file(path))
        types = {stored_type(f"{name} of {path}", table[name].dtype) for name in names}
        self._stored = types.pop() if len(types) == 1 else np.dtype(np.float32)
        self.dtype: torch.dtype = getattr(torch, self._stored.name)
        channels = len(names) if channel is None else table.sizes[channel]
        self.shape = (table.sizes[sample], channels, *(table.sizes[dim] for dim in event))

    def __len__(self) -> int:
        return int(self.shape[0])

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        with self.watched.reading():
            return gather(index, len(self), self._read)

    def _read(self, rows: "NDArray[Any]") -> "NDArray[Any]":
        parts = slices_of(rows)
        part = {self._sample: parts[0] if len(parts) == 1 else rows}
        arrays = [self._table[name].isel(part).transpose(*self._order).values for name in self._names]
        return as_stored_numbers(arrays[0] if self._has_channels else np.stack(arrays, 1), self._stored)


def _open_table(path: Path) -> Any:
    """The table of variables, of which nothing is read yet."""
    xarray, is_zarr = require("xarray"), path.is_dir()
    options: dict[str, Any] = {"engine": "zarr"} if is_zarr else {"engine": "h5netcdf", "phony_dims": "sort"}
    require(options["engine"])
    try:
        _check_claims(path, *(_look_at_zarr if is_zarr else _look_at_hdf5)(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata that is in several places
            return xarray.open_dataset(path, decode_times=False, decode_coords="all", cache=False, **options)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # each library has many of its own
        problem = f"cannot be read as {'Zarr' if is_zarr else 'NetCDF or HDF5'} ({first_line(error)})"
        raise FileError(
            "data", str(path), problem, "write it with xarray, or convert classic NetCDF by nccopy -k nc4"
        ) from error


def _check_claims(path: Path, stored: int, arrays: Sequence[Claim]) -> None:
    """Refuse what claims far more than the ``stored`` bytes can hold; xarray reads coordinates when it opens a file."""
    claimed = sum(float(prod(array.shape)) for array in arrays)
    if claimed > max(EMPTY_CLAIM, RATIO * stored):
        problem = f"claims {claimed:.3g} numbers and holds {stored:,} bytes"
        raise FileError("data", str(path), problem, "give one that is complete")
    for array in arrays:
        require_memory("data", str(path), 16.0 * prod(array.chunks), "write it with smaller chunks")


def _look_at_hdf5(path: Path) -> tuple[int, list[Claim]]:
    """The bytes of a file and its arrays; refuse one that would have us read other files."""
    h5py, arrays = require("h5py"), []
    with h5py.File(path, "r") as file:

        def refers(name: str, link: Any) -> str | None:
            if isinstance(link, h5py.ExternalLink):
                return name
            entry = None if isinstance(link, h5py.SoftLink) else file[name]
            if not isinstance(entry, h5py.Dataset):
                return None
            arrays.append(Claim(entry.shape or (), entry.chunks or ()))
            return name if entry.is_virtual or entry.external else None

        elsewhere = file.visititems_links(refers)
    if elsewhere is not None:
        raise FileError("data", str(path), f"refers to another file for {elsewhere!r}", "copy the values into it")
    return path.stat().st_size, arrays


def _look_at_zarr(path: Path) -> tuple[int, list[Claim]]:
    """The bytes of a folder and its arrays; refuse codecs that we do not know."""
    size, arrays = 0, []
    for file in path.rglob("*"):
        size += file.stat().st_size if file.is_file() else 0
        if file.name in METADATA and file.is_file():
            metadata = read_json(file)
            arrays += _claims(metadata)
            for codec in _codecs(metadata):
                if codec.removeprefix("numcodecs.") not in CODECS:
                    raise FileError("data", str(path), f"has the codec {codec!r}", "write it with zstd, gzip or blosc")
    return size, arrays


def _claims(values: Any) -> list[Claim]:
    """The arrays in the metadata of Zarr; sizes that are none are left to zarr itself."""
    if not isinstance(values, Mapping):
        return []
    shape = values.get("shape")
    grid = values.get("chunk_grid", {})
    chunks = grid.get("configuration", {}).get("chunk_shape") if isinstance(grid, Mapping) else None
    claims = [
        tuple(sizes) if isinstance(sizes, list) and all(fits(size, int) for size in sizes) else ()
        for sizes in (shape, chunks or values.get("chunks"))
    ]
    return [Claim(*claims), *(claim for value in values.values() for claim in _claims(value))]


def _codecs(values: Any, *, inside: bool = False) -> list[str]:
    """The names of the codecs in the metadata of Zarr."""
    if isinstance(values, list):
        return [name for value in values for name in _codecs(value, inside=inside)]
    if isinstance(values, str):
        return [values] if inside else []
    if not isinstance(values, Mapping):
        return []
    names = [str(values[key]) for key in ("id", "name") if inside and key in values]
    for key, value in values.items():
        is_codec = key in ("compressor", "filters", "codecs", "index_codecs")
        names += _codecs(value, inside=is_codec) if is_codec or isinstance(value, Mapping) else []
    return names


def _watched_file(path: Path) -> Path:
    return next((path / name for name in ("zarr.json", ".zmetadata", ".zgroup") if (path / name).exists()), path)


def _is_numbers(dtype: Any) -> bool:
    return dtype.kind == "f" or (dtype.kind == "u" and dtype.itemsize <= 2)


def _variables(table: Any, file: str, spec: DataSpec) -> list[str]:
    if spec.variables:
        return [one_of("variables", name, map(str, table.data_vars)) for name in spec.variables]
    held = {str(name): variable for name, variable in table.data_vars.items()}
    names = [name for name, variable in held.items() if _is_numbers(variable.dtype) and variable.ndim >= 2]
    if not (names := [name for name in names if name not in spec.annotation_variables]):
        kinds = ", ".join(f"{name} {variable.dtype} {variable.shape}" for name, variable in held.items())
        remedy = "give floats, uint8 or uint16 with two axes or more"
        raise FileError("data", file, f"has no variable to read among {kinds or 'none'}", remedy)
    return names


def _axes(variable: Any, file: str, spec: DataSpec) -> tuple[tuple[str, ...], str, str | None]:
    """The axes of a variable, that of the items, and that of the channels if it has one."""
    dims = tuple(map(str, variable.dims))
    if spec.layout is not None:
        letters = Layout(spec.layout).letters
        Layout(letters).order(f"{variable.name} of {file}", variable.shape)
        sample = dims[letters.index("N")]
        if spec.sample_axis not in (None, sample):
            raise InputError("sample_axis", spec.sample_axis, f"is not N of {letters}", "leave out it or `layout`")
        return dims, sample, dims[letters.index("C")] if "C" in letters else None
    problem = f"has {variable.name!r} over {dims}"
    if not 2 <= len(dims) <= 4:
        raise FileError("data", file, problem, "give variables with one axis of items and one to three others")
    if spec.sample_axis is not None:
        return dims, one_of("sample_axis", spec.sample_axis, dims), None
    if dims[0].lower() in INSIDE:
        problem += ", which seem to be axes of one item"
        raise FileError("data", file, problem, "say with `sample_axis` which is the axis of the items")
    return dims, dims[0], None


def _grid(table: Any, names: Sequence[str], event: tuple[str, ...], channel: str | None, dtype: str) -> Grid:
    """What the file says of its channels and axes."""
    channels, units = tuple(names), tuple(_text(table[name], "units") for name in names)
    if channel is not None:
        values = _numbers_along(table, channel)
        channels, units = tuple(f"{names[0]}_{value:g}" for value in values), units * table.sizes[channel]
    coordinates = {dim: values for dim in event if (values := _numbers_along(table, dim))}
    axis_units = {dim: unit for dim in event if dim in table.coords and (unit := _axis_unit(table[dim]))}
    return Grid(event, channels, units if any(units) else (), coordinates, axis_units, dtype)


def _is_nameless(dims: Sequence[str]) -> bool:
    return any(dim.startswith(NAMELESS) for dim in dims)


def _numbers_along(table: Any, dim: str) -> tuple[float, ...]:
    """The coordinate of an axis; nothing where it has none, or one that is not of finite numbers."""
    values = table[dim].values if dim in table.coords and table.sizes[dim] <= MOST_COORDINATES else None
    if values is None or values.ndim != 1 or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return ()
    return tuple(map(float, values))


def _axis_unit(coordinate: Any) -> str:
    """The unit of a coordinate; nothing for times of a calendar with other days, since a grid does not name it and
    they would be read as false dates."""
    unit, calendar = _text(coordinate, "units"), _text(coordinate, "calendar").lower() or CALENDARS[0]
    return "" if " since " in unit and calendar not in CALENDARS else unit


def _text(variable: Any, name: str) -> str:
    value = variable.attrs.get(name, "")
    return value if isinstance(value, str) else ""


def _along(table: Any, sample: str) -> Along:
    """The coordinate of the items: times where it says since when they count, else its numbers or words."""
    if sample not in table.coords or table[sample].dims != (sample,):
        return sample, np.arange(table.sizes[sample])
    values, xarray = table[sample], require("xarray")
    if " since " in _text(values, "units"):
        try:
            values = xarray.decode_cf(xarray.Dataset(coords={sample: values}))[sample]
        except Exception:  # a calendar that is not ours: its numbers are left
            values = table[sample]
    numbers = values.values
    return sample, numbers if numbers.dtype.kind in "iufMU" else np.arange(len(numbers))
