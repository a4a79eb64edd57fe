"""NetCDF, HDF5 and Zarr by xarray: variables become channels, and units and coordinates are kept."""

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nidiff.data.arrays import NUMBERS, Layout, as_layout, numbers_source, stored_type
from nidiff.data.dataset import WHOLE, Along, Dataset, Source, type_name
from nidiff.data.grid import USUAL, Grid
from nidiff.data.match import axes_within, other_variables, role_by_attributes
from nidiff.data.sources import Limits, load_or_stream, slices_of
from nidiff.data.spec import DataSpec
from nidiff.data.split import ITEM
from nidiff.errors import FileError, InputError, one_of, printable, shown
from nidiff.extras import require
from nidiff.files import blaming, read_json
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.diffusion.climatology import Times

SUFFIXES = (".nc", ".nc4", ".h5", ".hdf5", ".zarr")
# Names of axes that belong to an item, and of axes of items, in lower case and without digits.
INSIDE = re.compile(
    r"((nav|grid|[nr])_?)?(lat|lon)(itude)?s?([_-]\w*)?|[xyzij]([_-]\w*)?|n[xyzijk]|[xyz][ctuvw]|(eta|xi|s)_\w+"
    r"|p?lev(el)?s?([_-]\w*)?|pressure|isobaric\w*|height|width|depth|altitude|easting|northing"
    r"|(south_north|west_east|bottom_top)\w*|channels?|bands?|rows?|cols?|columns?"
)
OUTSIDE = re.compile(
    r"n|t|\w*time|dates?|items?|samples?|members?|ensembles?|realizations?|number|records?|obs|stations?|cases?|events?"
)
NAMELESS = "phony_dim"  # how h5netcdf calls the axes of plain HDF5
CALENDARS = ("", "standard", "gregorian", "proleptic_gregorian")  # of the dates that everyone uses
VALID = ("valid_range", "valid_min", "valid_max")
# Codecs of Zarr that only decode, by their names in numcodecs and Zarr.
# fmt: off
CODECS = {
    "adler32", "astype", "base64", "bitround", "blosc", "bytes", "bz2", "cast_value", "categorize", "crc32",
    "crc32c", "delta", "endian", "fixedscaleoffset", "fletcher32", "gzip", "jenkins_lookup3", "json2", "lz4",
    "lzma", "msgpack2", "packbits", "pcodec", "quantize", "scale_offset", "sharding_indexed", "shuffle",
    "snappy", "transpose", "vlen-array", "vlen-bytes", "vlen-utf8", "zfpy", "zlib", "zstd",
}
# fmt: on
LISTS_OF_CODECS = ("compressor", "filters", "codecs", "index_codecs")
METADATA = ("zarr.json", ".zmetadata", ".zgroup", ".zarray")  # of Zarr


def is_science(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def open_science(path: Path, spec: DataSpec, limits: Limits, like: Grid | None = None) -> Dataset:
    """The variables of a file as channels [N, C, *event].

    Without ``variables``, all that hold numbers, which must share their axes. The axis of the items is ``sample_axis``,
    by default the first one, or the only one that is no place. A ``layout`` gives the axes of one variable by letters
    instead; its C makes channels of one axis. Of a model's grid, ``like``, come the variables, and which axes are those
    of an item.
    """
    table, file = _open_table(path), str(path)
    if like is not None and like.channels and not spec.variables and spec.layout is None:
        if not {*like.channels} <= {*table.data_vars}:
            raise other_variables(map(str, table.data_vars), like, "data", file)
        spec = replace(spec, variables=like.channels)
    names = _variables(table, file, spec)
    if like is not None and spec.sample_axis is None and spec.layout is None:
        table, sample = _with_sample_axis(table, names, like)
        if sample not in (None, table[names[0]].dims[0]):
            warnings.warn(f"{shown(file)}: the items lie along {sample}.", stacklevel=2)
        spec = replace(spec, sample_axis=sample)
    dims, sample, channel = _axes(table, names[0], file, spec)
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
        grid = _grid(table, names, event, channel, type_name(source))
        along = _along(table, sample)
    if is_nameless:
        axes = USUAL[len(event)] if spec.layout is None else Layout(spec.layout).axes
        grid = replace(grid, axes=axes, coordinates={}, axis_units={})
    values = load_or_stream(source, file, limits)
    if values is not source:
        table.close()
    return Dataset(values, grid=grid, along=along)


def read_variables(
    path: Path, argument: str, names: Sequence[str], sample: str | None, like: Grid
) -> "tuple[list[NDArray[Any]], Grid, Along]":
    """Variables that belong to the items along the axis ``sample``, by default the one that ``like`` has not, which
    comes first; then the axes in the order of those of ``like``, or as in the file if they are others. One over the
    axes of ``like`` alone is the same for all items, of which it has one. And their grid, with the axes of the first
    variable that has most of them, and what the items lie along."""
    arrays, event = [], like.axes
    with _open_table(path) as table:
        if sample is None and not {*names} <= {*table.variables}:  # those of a model's condition
            raise other_variables(map(str, table.data_vars), like, argument, str(path))
        for name in names:
            one_of(argument, name, map(str, table.variables))
        names_of = {name: tuple(map(str, table[name].dims)) for name in names}
        order = sorted(names, key=lambda name: len(names_of[name]) <= len(event))  # those of each item first
        if sample is None:
            table, sample = _with_sample_axis(table, order, like)
        if sample is None:
            problem = f"has {order[0]!r} over {names_of[order[0]]}, and the model's is over {event} for each item"
            raise FileError(argument, str(path), problem, "give one axis besides, that of the items")
        for name in names:
            variable = table[name]
            dims = [str(dim) for dim in variable.dims if dim != sample]
            if is_static := len(dims) == len(variable.dims) and {*dims} == {*event}:
                variable = variable.expand_dims(sample)
            if not is_static and len(dims) == len(variable.dims):
                problem = f"is not over {sample!r}, the axis of the items"
                raise InputError(argument, name, problem, "choose a variable that is")
            if {*dims} == {*event}:
                dims = [*event]
            require_memory(argument, name, 2.0 * prod(variable.shape) * variable.dtype.itemsize, "give fewer items")
            with blaming(str(path), "repair it", f"has {name!r}, which cannot be read", argument):
                arrays.append(_valid(variable.transpose(sample, *dims), _limits(variable)))
        most = max(([dim for dim in names_of[name] if dim != sample] for name in names), key=len)
        axes = event if {*most} == {*event} else tuple(most)
        return arrays, _grid(table, names, axes, None, "float32"), _along(table, sample)


def has_variable(path: Path, name: str) -> bool:
    """Whether a file has a variable of that name that is no coordinate."""
    with _open_table(path) as table:
        return name in table.data_vars


def times_in(path: Path) -> "Times | None":
    """The only coordinate of a file that is an axis of times; None where there are none, or several."""
    with _open_table(path) as table:
        axes = [str(name) for name in table.coords if table[name].dims == (name,)]
        times = [values for name in axes if (values := _along(table, name)[1]).dtype.kind == "M"]
    return times[0] if len(times) == 1 else None


def _with_sample_axis(table: Any, names: Sequence[str], like: Grid) -> tuple[Any, str | None]:
    """The only axis of the variables that the grid ``like`` has not, and the variables: a file without one has a single
    item. None where that is not certain."""
    dims = tuple(map(str, table[names[0]].dims))
    if any(dim.startswith(NAMELESS) for dim in dims):
        return table, None
    inside = axes_within(dims, [_text(table[dim], "units") if dim in table.coords else "" for dim in dims], like)
    others = [dim for dim in dims if dim not in inside]
    if len(inside) != len(like.axes) or len(others) > 1:
        return table, None
    if others:
        return table, others[0]
    single = table[[*names]]
    times = [str(name) for name in single.coords if not single[name].dims and " since " in _text(single[name], "units")]
    sample = times[0] if len(times) == 1 else ITEM  # as isel(time=0) leaves it
    return single.expand_dims(sample), sample


def _source(
    path: Path, table: Any, names: Sequence[str], sample: str, channel: str | None, event: tuple[str, ...]
) -> Source:
    """The variables of an open file."""
    order = (sample, *event) if channel is None else (sample, channel, *event)
    with blaming(str(path), f"correct {', '.join(VALID)}", "has a range of valid values that cannot be read", "data"):
        limits = {name: _limits(table[name]) for name in names}
    types = {_type(f"{name} of {path}", table[name].dtype, limits[name] is not None) for name in names}
    stored = types.pop() if len(types) == 1 else np.result_type(np.float32, *types)

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        parts = slices_of(rows)
        part = {sample: parts[0] if len(parts) == 1 else rows}
        arrays = [_valid(table[name].isel(part).transpose(*order), limits[name]) for name in names]
        return np.stack(arrays, 1) if channel is None else arrays[0]

    channels = len(names) if channel is None else table.sizes[channel]
    shape = (table.sizes[sample], channels, *(table.sizes[dim] for dim in event))
    file = next((path / name for name in METADATA if (path / name).exists()), path)
    return numbers_source(shape, stored, file, read)


def _type(name: str, dtype: "np.dtype[Any]", has_missing: bool) -> "np.dtype[Any]":
    """The type in which a variable is held; only floats can be missing."""
    return np.result_type(stored_type(name, dtype), *([np.float32] if has_missing else []))


def _limits(variable: Any) -> tuple[float, float] | None:
    """The least and the largest valid value by CF's valid_range, valid_min and valid_max, in the units of the unpacked
    variable; None where all values are valid. The attributes are about the packed numbers, unless these are whole
    numbers and the attributes are not."""
    about = {key: np.asarray(value) for key, value in variable.attrs.items() if key in VALID}
    if not about or variable.dtype.kind not in NUMBERS:
        return None
    low, high = about.get("valid_range", np.array([-np.inf, np.inf]))
    low, high = about.get("valid_min", low), about.get("valid_max", high)
    packed, ends = np.dtype(variable.encoding.get("dtype", variable.dtype)), []
    for end in (low, high):
        number, margin = float(end.item()), 0.0
        if np.isfinite(number) and (packed.kind not in "iu" or end.dtype.kind in "iu"):
            if str(variable.encoding.get("_Unsigned", "")).lower() == "true" and number < 0:
                number += 2.0 ** (8 * packed.itemsize)
            scale = float(variable.encoding.get("scale_factor", 1.0))
            number = number * scale + float(variable.encoding.get("add_offset", 0.0))
            margin = abs(scale) / 2 if packed.kind in "iu" else 0.0
        ends.append((number, margin))
    (low, below), (high, above) = sorted(ends)
    low, high = low - below, high + above
    if variable.dtype.kind in "iu" and low <= np.iinfo(variable.dtype).min and high >= np.iinfo(variable.dtype).max:
        return None
    return low, high


def _valid(variable: Any, limits: tuple[float, float] | None) -> "NDArray[Any]":
    """The values of a variable, NaN where they are not valid."""
    values = np.asarray(variable.values)
    if limits is None:
        return values
    floats = values.astype(np.result_type(values.dtype, np.float32), copy=False)
    return np.where((floats < limits[0]) | (floats > limits[1]), np.nan, floats)


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
            table = xarray.open_dataset(path, decode_times=False, decode_coords="all", cache=False, **options)
        names = {name: printable(str(name)) for name in {*table.variables, *table.dims}}
        renamed = table.rename({old: new for old, new in names.items() if old != new})
        renamed.set_close(table.close)
        return renamed


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
    """Refuse a folder that would have us read other files, or that names a codec which is not known to only decode:
    pickle would run any program."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            file = Path(folder, name)
            if file.is_symlink() or not (file.is_dir() or file.is_file()):
                problem = f"has {str(file.relative_to(path))!r}, a link or no file"
                raise FileError("data", str(path), problem, "copy what it leads to into the folder")
            if name in METADATA and (unknown := {*_codecs(read_json(file))} - CODECS):
                problem = f"has the codec {min(unknown)!r}, by {str(file.relative_to(path))!r}"
                raise FileError("data", str(path), problem, "write it with zstd or blosc")


def _codecs(metadata: Any, is_codec: bool = False) -> Iterator[str]:
    """The names of the codecs in the metadata of Zarr: ``id`` of format 2 and ``name`` of format 3, or words."""
    if isinstance(metadata, list):
        for entry in metadata:
            yield from _codecs(entry, is_codec)
    elif isinstance(metadata, Mapping):
        if is_codec:
            yield str(metadata.get("id", metadata.get("name"))).removeprefix("numcodecs.")
        for key, value in metadata.items():
            if key != "attributes" and not key.endswith(".zattrs"):  # where users may write anything
                yield from _codecs(value, key in LISTS_OF_CODECS)
    elif is_codec and metadata is not None:
        yield str(metadata).removeprefix("numcodecs.")


def _variables(table: Any, file: str, spec: DataSpec) -> list[str]:
    """The variables that become channels: floats, and whole numbers if they are over the same axes and no flags;
    a warning names all that are not read."""
    if spec.variables:
        return [one_of("variables", name, map(str, table.data_vars)) for name in spec.variables]
    held = {str(name): variable for name, variable in table.data_vars.items() if name not in spec.annotation_variables}
    numbers = [name for name, variable in held.items() if variable.dtype.kind in NUMBERS and variable.ndim >= 2]
    floats = [name for name in numbers if held[name].dtype.kind == "f" or held[name].dtype.name in WHOLE]
    axes = [{*held[name].dims} for name in floats or numbers]
    fields = [name for name in numbers if {*held[name].dims} in axes and "flag_meanings" not in held[name].attrs]
    names = [name for name in numbers if name in floats or name in fields]
    kinds = {name: f"{name} {held[name].dtype} {held[name].shape}" for name in held if name not in names}
    if not names:
        remedy = "give numbers with two axes or more, or name some with `variables`"
        raise FileError("data", file, f"has no variable to read among {', '.join(kinds.values()) or 'none'}", remedy)
    if unread := [text for name, text in kinds.items() if held[name].ndim]:  # a scalar describes the others
        warnings.warn(f"{shown(file)} has variables that are not read: {', '.join(unread)}.", stacklevel=2)
    return names


def _axes(table: Any, name: str, file: str, spec: DataSpec) -> tuple[tuple[str, ...], str, str | None]:
    """The axes of a variable, that of the items, and that of the channels if it has one."""
    variable = table[name]
    dims = tuple(map(str, variable.dims))
    if spec.layout is not None:
        spec.refuse("sample_axis")  # which is N
        letters = as_layout(spec.layout, f"{variable.name} of {file}", variable.shape).letters
        return dims, dims[letters.index("N")], dims[letters.index("C")] if "C" in letters else None
    sample = None
    if 2 <= len(dims) <= 4:
        named = spec.sample_axis
        sample = _sample_axis(table, dims) if named is None else one_of("sample_axis", named, dims)
    if sample is None:
        problem = f"has {variable.name!r} over {dims}, which do not seem to be an axis of items and one to three others"
        raise FileError("data", file, problem, "say with `sample_axis` which is the axis of the items, or give others")
    return dims, sample, None


def _sample_axis(table: Any, dims: Sequence[str]) -> str | None:
    """The axis of the items: the first one, unless it is a place or another one is a time; then the only one that is no
    place. None where that is not certain."""
    roles = {name: role_by_attributes(_texts(table[name])) for name in table.coords}
    inside = {str(dim) for name, role in roles.items() if role not in (None, "T") for dim in table[name].dims}
    times = {str(name) for name, role in roles.items() if role == "T" and table[name].dims == (name,)}
    is_inside = {dim: dim not in times and (dim in inside or _is_named(INSIDE, dim)) for dim in dims}
    outside = [dim for dim in dims if not is_inside[dim] and (dim in times or _is_named(OUTSIDE, dim))]
    if not is_inside[dims[0]] and (not outside or dims[0] in outside):
        return dims[0]
    others = [dim for dim in dims if not is_inside[dim]]
    return others[0] if others == outside and len(others) == 1 else None


def _is_named(names: "re.Pattern[str]", dim: str) -> bool:
    return names.fullmatch(re.sub(r"\d", "", dim.lower())) is not None


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


def _texts(variable: Any) -> dict[str, str]:
    """The attributes of a variable that are texts."""
    return {name: value for name, value in variable.attrs.items() if isinstance(value, str)}


def _text(variable: Any, name: str) -> str:
    return _texts(variable).get(name, "")


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
