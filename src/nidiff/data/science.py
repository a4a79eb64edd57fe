"""NetCDF, HDF5, Zarr and GRIB by xarray: variables become channels, and units and coordinates are kept."""

import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import numpy as np

from nidiff.data.arrays import Layout, as_layout
from nidiff.data.dataset import WHOLE, Along, Dataset, Source, Window
from nidiff.data.formats import kind_of
from nidiff.data.grid import USUAL, Grid
from nidiff.data.hdf5 import check_hdf5
from nidiff.data.match import axes_within, other_variables, role_by_attributes
from nidiff.data.parts import NUMBERS, Part, joined, stored_type
from nidiff.data.sources import Limits, slices_of, watched, with_bar
from nidiff.data.spec import DataSpec
from nidiff.data.split import ITEM
from nidiff.errors import FileError, InputError, one_of, printable, shown
from nidiff.extras import require
from nidiff.files import blaming, read_json
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.diffusion.climatology import Times

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


def open_science(
    sources: Sequence[Any], name: str, spec: DataSpec, limits: Limits, like: Grid | None = None
) -> Dataset:
    """The variables of files or of a table as channels [N, C, *event].

    Without ``variables``, all that hold numbers, which must share their axes. The axis of the items is ``sample_axis``,
    by default the first one, the only one that is no place, or a time that is one number for the whole file. A
    ``layout`` gives the axes of one variable by letters instead; its C makes channels of one axis, and without an N the
    file is one item. Of a model's grid, ``like``, come the variables, and which axes are those of an item.
    """
    parts, unread = list[Part](), set[tuple[str, ...]]()
    with ExitStack() as tables:
        for source in with_bar(sources, "opening files", limits.progress):
            table = open_table(source)
            tables.callback(table.close)
            part, left_out = _part(source, table, spec, like, parts[0] if parts else None)
            if left_out and (*left_out,) not in unread:  # once for all files
                kinds = ", ".join(left_out.values())
                warnings.warn(f"{shown(part.name)} has variables that are not read: {kinds}.", stacklevel=2)
            unread.add((*left_out,))
            parts.append(part)
        data = joined(parts, name, limits)
        if isinstance(data.values, Source):
            tables.pop_all()  # they are read later
    return data


def is_table(value: object) -> bool:
    """Whether it is a Dataset of xarray, or the path of a file that xarray opens."""
    if isinstance(value, Path):
        return kind_of(value) == "tables"
    return "xarray" in sys.modules and isinstance(value, sys.modules["xarray"].Dataset)


def _part(
    source: Any, table: Any, spec: DataSpec, like: Grid | None, first: Part | None
) -> tuple[Part, dict[str, str]]:
    """The variables of a file, in the order of those of the ``first`` one, and those that are not read, in words."""
    file = str(source) if isinstance(source, Path) else spec.source
    if like is not None and like.channels and not spec.variables and spec.layout is None:
        if not {*like.channels} <= {*table.data_vars}:
            raise other_variables(map(str, table.data_vars), like, "data", file)
        spec = replace(spec, variables=like.channels)
    names, left_out = _variables(table, file, spec)
    if first is not None:
        known = first.grid.channels
        names.sort(key=lambda name: known.index(name) if name in known else len(known))
    if like is not None and spec.sample_axis is None and spec.layout is None:
        table, sample = _with_sample_axis(table, names, like)
        if sample not in (None, table[names[0]].dims[0]):
            warnings.warn(f"{shown(file)}: the items lie along {sample}.", stacklevel=2)
        spec = replace(spec, sample_axis=sample)
    table, spec = _with_items(table, names, spec)
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
    if first is not None and {*event} == {*first.grid.axes}:
        event = first.grid.axes
    shape, dtype, read, read_part = _reader(source, file, table, names, sample, channel, event)
    with blaming(file, "repair it", "cannot be read", "data"):
        grid = _grid(table, names, event, channel, "float32")
        along, counts_from = _along(table, sample)
    if is_nameless:
        axes = USUAL[len(event)] if spec.layout is None else Layout(spec.layout).axes
        grid = replace(grid, axes=axes, coordinates={}, axis_units={})
        along = (first.along[0] if first is not None and first.along else sample), None
    return Part(file, shape, dtype, read, grid, along, read_part=read_part, counts_from=counts_from), left_out


def _with_items(table: Any, names: Sequence[str], spec: DataSpec) -> tuple[Any, DataSpec]:
    """A file that is one item, by its layout or since its time is one number, with an axis of items; any other as it
    is."""
    sample: str | None
    dims, scalars = [*map(str, table[names[0]].dims)], [str(name) for name in table.coords if not table[name].dims]
    if spec.layout is not None and "N" not in spec.layout:
        as_layout(spec.layout, f"{names[0]} of {spec.source}", table[names[0]].shape)
        sample, spec = _scalar_time(table) or ITEM, replace(spec, layout=f"N{spec.layout}")
    elif spec.layout is None and spec.sample_axis in scalars:
        sample = spec.sample_axis
    elif spec.layout is None and spec.sample_axis is None and all(_is_named(INSIDE, dim) for dim in dims):
        sample = _scalar_time(table)
    else:
        sample = None
    return (table if sample is None else table[[*names]].expand_dims(sample)), spec


def _scalar_time(table: Any) -> str | None:
    """The time that all of a file has."""
    times = [
        str(name) for name in table.coords if not table[name].dims and role_by_attributes(_texts(table[name])) == "T"
    ]
    return "time" if "time" in times else times[0] if len(times) == 1 else None


def read_variables(
    sources: Sequence[Any], argument: str, names: Sequence[str], sample: str | None, like: Grid
) -> "tuple[list[NDArray[Any]], Grid, Along | None]":
    """Variables that belong to the items along the axis ``sample``, by default the one that ``like`` has not, which
    comes first; then the axes in the order of those of ``like``, or as in the files if they are others. One over the
    axes of ``like`` alone is the same for all items, of which it has one. And their grid, with the axes of the first
    variable that has most of them, and what the items lie along."""
    found = [_read_variables(source, argument, names, sample, like) for source in sources]
    _, grid, (axis, _), static = found[0]
    columns = zip(names, zip(*(arrays for arrays, *_ in found), strict=True), strict=True)
    arrays = [each[0] if name in static else np.concatenate(each) for name, each in columns]
    alongs = [values for _, _, (_, values), _ in found if values is not None]
    return arrays, grid, (axis, np.concatenate(alongs)) if len(alongs) == len(found) else None


def _read_variables(
    source: Any, argument: str, names: Sequence[str], sample: str | None, like: Grid
) -> "tuple[list[NDArray[Any]], Grid, tuple[str, NDArray[Any] | None], set[str]]":
    arrays, event, file = [], like.axes, str(source) if isinstance(source, Path) else "the table"
    static = set[str]()
    table = open_table(source)
    try:
        if sample is None and not {*names} <= {*table.variables}:  # those of a model's condition
            raise other_variables(map(str, table.data_vars), like, argument, file)
        for name in names:
            one_of(argument, name, map(str, table.variables))
        names_of = {name: tuple(map(str, table[name].dims)) for name in names}
        order = sorted(names, key=lambda name: len(names_of[name]) <= len(event))  # those of each item first
        if sample is None:
            table, sample = _with_sample_axis(table, order, like)
        elif sample not in table.dims and (sample == ITEM or sample in table.coords):  # the file is one item
            table = table.reset_coords([name for name in names if name in table.coords])[[*names]].expand_dims(sample)
        if sample is None:
            problem = f"has {order[0]!r} over {names_of[order[0]]}, and the model's is over {event} for each item"
            raise FileError(argument, file, problem, "give one axis besides, that of the items")
        for name in names:
            variable = table[name]
            dims = [str(dim) for dim in variable.dims if dim != sample]
            if is_static := len(dims) == len(variable.dims) and {*dims} == {*event}:
                variable = variable.expand_dims(sample)
                static.add(name)
            if not is_static and len(dims) == len(variable.dims):
                problem = f"is not over {sample!r}, the axis of the items"
                raise InputError(argument, name, problem, "choose a variable that is")
            if {*dims} == {*event}:
                dims = [*event]
            require_memory(argument, name, 2.0 * prod(variable.shape) * variable.dtype.itemsize, "give fewer items")
            with blaming(file, "repair it", f"has {name!r}, which cannot be read", argument):
                arrays.append(_valid(variable.transpose(sample, *dims), _limits(variable)))
        most = max(([dim for dim in names_of[name] if dim != sample] for name in names), key=len)
        axes = event if {*most} == {*event} else tuple(most)
        return arrays, _grid(table, names, axes, None, "float32"), _along(table, sample)[0], static
    finally:
        table.close()


def read_columns(source: Any, argument: str) -> "dict[str, tuple[NDArray[Any], str]]":
    """The variables of a file or a table as columns of one length, a row for each place along all their axes, each with
    its unit; times are datetime64. Variables without axes, and words, are left out."""
    table, file, xarray = (
        open_table(source),
        str(source) if isinstance(source, Path) else "the table",
        require("xarray"),
    )
    try:
        names = [name for name in table.variables if table[name].ndim and table[name].dtype.kind in NUMBERS]
        whole = {str(dim): table.sizes[dim] for name in names for dim in table[name].dims}
        require_memory(argument, file, 8.0 * len(names) * prod(whole.values()), "give fewer stations")
        columns: dict[str, tuple[NDArray[Any], str]] = {}
        for name in names:
            unit = _text(table[name], "units")
            with blaming(file, "repair it", f"has {name!r}, which cannot be read", argument):
                variable, values = table[name].variable, _valid(table[name], _limits(table[name]))
                if " since " in unit:
                    with suppress(Exception):  # a calendar that is not ours
                        decoded = xarray.decode_cf(xarray.Dataset({name: variable})).variables[name].values
                        values = decoded if decoded.dtype.kind == "M" else values
            spread = xarray.Variable(variable.dims, values).set_dims(whole).transpose(*whole)
            columns[str(name)] = np.asarray(spread.values).reshape(-1), unit
        return columns
    finally:
        table.close()


def has_variable(source: Any, name: str) -> bool:
    """Whether a file or a table has a variable of that name that is no coordinate."""
    table = open_table(source)
    try:
        return name in table.data_vars
    finally:
        table.close()


def times_in(source: Any) -> "Times | None":
    """The only coordinate of a file that is an axis of times; None where there are none, or several."""
    table = open_table(source)
    try:
        axes = [str(name) for name in table.coords if table[name].dims == (name,)]
        values = [_along(table, name)[0][1] for name in axes]
        times = [each for each in values if each is not None and each.dtype.kind == "M"]
        return times[0] if len(times) == 1 else None
    finally:
        table.close()


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
    sample = _scalar_time(table[[*names]]) or ITEM  # as isel(time=0) leaves it
    return table[[*names]].expand_dims(sample), sample


def _reader(
    source: Any, name: str, table: Any, names: Sequence[str], sample: str, channel: str | None, event: tuple[str, ...]
) -> tuple[tuple[int, ...], "np.dtype[Any]", Callable[..., Any], Callable[..., Any]]:
    """The shape and type of the variables of an open file, and the readers of a `Part`."""
    order = (sample, *event) if channel is None else (sample, channel, *event)
    with blaming(name, f"correct {', '.join(VALID)}", "has a range of valid values that cannot be read", "data"):
        limits = {name: _limits(table[name]) for name in names}
    types = {_type(f"{each} of {name}", table[each].dtype, limits[each] is not None) for each in names}
    stored = types.pop() if len(types) == 1 else np.result_type(np.float32, *types)

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        parts = slices_of(rows)
        part = {sample: parts[0] if len(parts) == 1 else rows}
        arrays = [_valid(table[name].isel(part).transpose(*order), limits[name]) for name in names]
        return np.stack(arrays, 1) if channel is None else arrays[0]

    channels = len(names) if channel is None else table.sizes[channel]
    shape = (table.sizes[sample], channels, *(table.sizes[dim] for dim in event))

    def read_part(row: int, window: Window) -> "NDArray[Any]":
        part = {sample: row, **dict(zip(event, window, strict=True))}
        arrays = [_valid(table[name].isel(part).transpose(*order[1:]), limits[name]) for name in names]
        return np.stack(arrays) if channel is None else arrays[0]

    if not isinstance(source, Path):
        return shape, stored, read, read_part
    file = next((source / name for name in METADATA if (source / name).exists()), source)
    return shape, stored, watched(file, read), watched(file, read_part)


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


def open_table(source: Any) -> Any:
    """The table of variables of a file, of which nothing is read yet but the coordinates; or that of ``source``, a
    table itself."""
    xarray = require("xarray")
    if not isinstance(source, Path):
        table = source
        coordinates = {name: _encoded(table[name]) for name in table.coords if table[name].dtype.kind in "mMO"}
        return _with_printable_names(table.assign_coords(coordinates))
    engine, check, options, remedy = _engine(source)
    with blaming(str(source), remedy, f"cannot be read by {engine}", "data"):
        if check is not None:
            check(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata that is in several places
            try:
                table = xarray.open_dataset(
                    source, engine=engine, decode_times=False, decode_coords="all", cache=False, **options
                )
            except Exception as error:  # what it has opened is closed here, where its warnings are not shown
                clear_frames(error.__traceback__)
                gc.collect()
                raise
        renamed = _with_printable_names(table)
        renamed.set_close(table.close)
        return renamed


def _with_printable_names(table: Any) -> Any:
    names = {name: printable(str(name)) for name in {*table.variables, *table.dims}}
    return table.rename({old: new for old, new in names.items() if old != new})


def _encoded(times: Any) -> Any:
    """Times as the numbers that a file would have; other objects as they are."""
    try:
        return require("xarray").conventions.encode_cf_variable(times.variable)
    except Exception:  # words
        return times.variable


def _engine(file: Path) -> "tuple[str, Callable[[Path], None] | None, dict[str, Any], str]":
    """The engine of xarray for a file by its first bytes, what is checked before, its options, and what helps where it
    fails."""
    remedy = "repair it, or write it again with xarray"
    if file.is_dir():
        require("zarr")
        return "zarr", _check_zarr, {}, remedy
    with blaming(str(file), argument="data"), file.open("rb") as stream:
        head = stream.read(4)
    if head[:3] == b"CDF":
        remedy = "repair it, or convert it by nccopy -k nc4 a.nc b.nc"
        if head[3] == 5:  # with 64 bits, which scipy does not read
            require("netCDF4")
            return "netcdf4", None, {}, remedy
        require("scipy")
        return "scipy", None, {}, remedy
    if head == b"GRIB" or file.suffix.lower().startswith(".gr"):
        require("cfgrib")
        remedy = "give one kind of level and step per file, as by cdo -f nc4 copy a.grib a.nc or grib_copy -w"
        return "cfgrib", None, {"backend_kwargs": {"indexpath": "", "errors": "raise"}}, remedy
    require("h5netcdf")
    return "h5netcdf", check_hdf5, {"phony_dims": "sort"}, remedy


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


def _variables(table: Any, file: str, spec: DataSpec) -> tuple[list[str], dict[str, str]]:
    """The variables that become channels: floats, and whole numbers if they are over the same axes and no flags; and
    those that are not read, in words."""
    if spec.variables:
        return [one_of("variables", name, map(str, table.data_vars)) for name in spec.variables], {}
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
    return names, {name: text for name, text in kinds.items() if held[name].ndim}  # a scalar describes the others


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


def _along(table: Any, sample: str) -> "tuple[tuple[str, NDArray[Any] | None], str]":
    """The axis of the items with its coordinate, if it has one: times where it says since when they count, else its
    numbers or words. And the unit of times of a calendar that is not ours, which stay numbers."""
    if sample not in table.coords or table[sample].dims != (sample,):
        return (sample, None), ""
    values, unit, xarray = table[sample], _text(table[sample], "units"), require("xarray")
    if " since " in unit:
        with suppress(Exception):  # a calendar that is not ours: its numbers are left
            values = xarray.decode_cf(xarray.Dataset(coords={sample: values}))[sample]
    numbers = values.values
    is_known = numbers.dtype.kind in "iufMU"
    counts_from = (
        f"{unit} ({_text(table[sample], 'calendar')})" if " since " in unit and numbers.dtype.kind != "M" else ""
    )
    return (sample, numbers if is_known else None), counts_from
