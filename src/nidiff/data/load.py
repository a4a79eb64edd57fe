"""From a `DataSpec` to a `Dataset`, by name, path or from the Hugging Face Hub; and from a file to a few items."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.annotations import with_conditions, with_labels
from nidiff.data.arrays import array_part, array_parts, as_array, as_layout, stored_array
from nidiff.data.crops import crop_size, in_crops
from nidiff.data.dataset import Dataset, Values
from nidiff.data.encoded import Encoded, read_encoded
from nidiff.data.formats import KINDS, NAMED, kind_of, suffix_of
from nidiff.data.grid import Grid
from nidiff.data.images import fit_pixels, open_images
from nidiff.data.match import check_type, converted, match
from nidiff.data.missing import DOMAIN, MEAN, as_fills, find_domain, without_missing
from nidiff.data.named import DATASETS
from nidiff.data.parts import as_stored_numbers, joined, stored_type
from nidiff.data.paths import find_files, is_path
from nidiff.data.science import is_table, open_science
from nidiff.data.sounds import open_sounds
from nidiff.data.sources import Limits
from nidiff.data.spec import CHANNELS, MEMORY_LIMIT, DataSpec, joined_paths
from nidiff.data.split import held_out_rows
from nidiff.data.units import AUTO, Fitted, as_removed, as_rules, fit_scaling, measure, times_of
from nidiff.data.videos import video_parts
from nidiff.data.volumes import dicom_parts, nifti_parts
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import FileError, InputError, known_names, one_of, renamed
from nidiff.extras import require
from nidiff.files import as_path, blaming
from nidiff.notation import parse_numbers

HUB = "hf:"
UNNAMED = "value"  # the variable that an array of xarray without a name is


class Given(NamedTuple):
    """What is handed over in Python instead of a file: arrays, or a Dataset of xarray."""

    data: Any = None
    labels: Any = None
    condition: Any = None


FROM_FILES = Given()


def load_dataset(
    source: Any,
    *,
    split: str = "train",
    scaling: str | Sequence[str] | Scaling = "auto",
    missing: str | float = "refuse",
    remove: str | None = None,
    held_out: str | float | None = None,
    memory_limit: int | None = MEMORY_LIMIT,
    progress: bool = True,
    **options: Any,
) -> Dataset:
    """The data set ``source``: one of `DATASETS`, hf:NAME, the path of a file or of a folder of files, several paths, a
    pattern such as "months/*.nc", or data themselves: an array of numpy, a tensor, or a Dataset or DataArray of xarray.

    Args:
        split: "train" or "test", or any split that hf:NAME has. A path has a "test" part if ``held_out`` says which.
        scaling: between the units of the data and those of the model, fitted to the training part: standard (mean 0,
            standard deviation 1), range (to [-1, 1]), log (standard of the logarithm), none, or
            linear:scale=…,shift=…; one for all channels, or one for each; or a `Scaling`. With standard:per=pixel, or
            log:per=pixel, every point has its own mean and standard deviation. auto: standard of floats;
            uint8 and uint16 go from the range of the type to [-1, 1], or from the range they use if that is less than a
            quarter of it.
        missing: what to do with NaN and infinite values: "refuse" them, fill in the "mean" of their channel, or a
            number in the units of the data; "domain": they are missing at the same points in all items, where there are
            no data.
        remove: "climatology" takes away the mean of the month at every point, "climatology:by=day" that of the day of
            the year, which needs the times of the items.
        held_out: the fraction of the items, or the range of their coordinate, such as time=2010-01-01:, that is the
            "test" part.
        memory_limit: more bytes than this are read batch by batch. None: no limit.
        progress: show bars on a terminal.
        options: the other fields of `DataSpec`: data_dir, size, crop, channels, skip_corrupt, layout, variables,
            sample_axis, labels and condition. ``size`` may be height and width. Labels become ``.labels``, by default
            the data set's own, and conditions ``.conditions``, with mean 0 and standard deviation 1 per channel over
            the training part. Both may be arrays.
    """
    known, texts = (scaling, ("none",)) if isinstance(scaling, Scaling) else (None, scaling)
    for name, kind in {"data_dir": Path, "variables": tuple}.items():
        if options.get(name) is not None:
            options[name] = kind(options[name])
    arrays = {}
    for name in ("labels", "condition"):
        if isinstance(options.get(name), PathLike):
            options[name] = str(options[name])
        elif options.get(name) is not None and not isinstance(options[name], str):
            arrays[name] = options.pop(name)
    data = None
    if isinstance(source, list | tuple) and source and all(isinstance(each, str | PathLike) for each in source):
        name = joined_paths([os.fsdecode(each) for each in source])
    elif isinstance(source, str | bytes | PathLike):
        name = str(as_path("data", source)) if os.path.lexists(source) else os.fsdecode(source)
    else:
        data, name = _as_given(source)
    spec = DataSpec(
        name,
        scaling=(texts,) if isinstance(texts, str) else tuple(texts),
        missing=str(missing),
        remove=remove,
        held_out=None if held_out is None else str(held_out),
        **options,
    )
    annotations, limits = ("labels", "condition"), Limits(memory_limit, progress)
    return load(spec, split, limits, annotations=annotations, scaling=known, given=Given(data, **arrays))


def load_items(
    path: str | Path,
    shape: Sequence[int],
    *,
    grid: Grid | None = None,
    scale: int = 1,
    layout: str | None = None,
    variables: Sequence[str] = (),
    sample_axis: str | None = None,
    argument: str = "file",
) -> Tensor:
    """The items [N, C, *event] of `open_items`, in memory."""
    options: dict[str, Any] = {"layout": layout, "variables": variables, "sample_axis": sample_axis}
    return open_items(path, shape, grid=grid, scale=scale, argument=argument, **options).values  # type: ignore[return-value]


def open_items(
    path: str | Path,
    shape: Sequence[int],
    *,
    grid: Grid | None = None,
    scale: int = 1,
    layout: str | None = None,
    variables: Sequence[str] = (),
    sample_axis: str | None = None,
    argument: str = "file",
) -> Dataset:
    """Items [N, C, *event] = [N, *shape] in the units of the data and the type of the file, and what they lie along;
    NaN stay NaN.

    ``path`` is a picture, or anything with a path that `nidiff.load_dataset` reads, or digits:0-3, the first items that
    are held out of a data set with a name, of which digits is the first. An array needs no layout: it is one
    item or several, with the channels first, last or, if there is one, left out. Items of a model are on its ``grid``,
    and of its type; with a ``scale``, they are means over blocks of so many points along each axis of ``shape``.
    """
    path, shape = as_path(argument, path), (shape[0], *(math.ceil(size / scale) for size in shape[1:]))
    grid = grid if grid is None or scale == 1 else grid.coarse(scale)
    named = None if path.exists() else _held_out_items(str(path), argument)
    if named is None and not path.exists():
        remedy = f"give a picture, an array, a folder of pictures, or one of {', '.join(DATASETS)}"
        raise FileError(argument, str(path), "does not exist", remedy)
    spec = DataSpec(str(path), layout=layout, variables=tuple(variables), sample_axis=sample_axis)
    suffix = path.suffix.lower()
    if len(shape) == 3 and (suffix in KINDS["images"] or path.is_dir()) and kind_of(path) != "tables":
        spec = replace(spec, channels=shape[0] if shape[0] in CHANNELS else None)
    values: Values
    along = None
    with renamed("data", argument):
        if named is not None:
            values = named
        elif suffix in KINDS["arrays"] and path.is_file() and layout is None:
            stored = stored_array(path, "data", spec.variables)
            values = _arranged(torch.from_numpy(as_stored_numbers(stored, stored_type(str(path), stored.dtype))), shape)
        else:
            data = _read_path(str(path), spec, Limits(memory_limit=None), grid)
            if grid is not None:
                data = match(data, grid, argument, str(path), are_named=bool(variables), are_means=scale > 1)
            values, along = data.values, data.along
    if len(values) == 0 or tuple(values.shape[1:]) != shape:
        size, channels = " × ".join(map(str, shape[1:])), f"{shape[0]} channel{'s' * (shape[0] > 1)}"
        remedy = f"give items of {size} points with {channels}, or say with `layout` what the axes of an array are"
        raise FileError(argument, str(path), f"has shape {tuple(values.shape)}, and items must be {shape}", remedy)
    items = values.index_select(0, torch.arange(len(values)))
    if grid is not None:
        check_type(items, grid, argument, str(path))
    return Dataset(items, along=along)


def load_variables(
    path: Path, names: Sequence[str], shape: Sequence[int], grid: Grid, argument: str, *, is_difference: bool = False
) -> Tensor:
    """Variables of NetCDF, HDF5 or Zarr that go with the items of a file, such as masks and errors, on the ``grid`` of
    a model: [N, 1 or C, *event], NaN where they are missing. Differences are converted to the units of its channels."""
    if len(names) not in (1, shape[0]):
        problem = f"names {len(names)} variables, and the model has {shape[0]} channels"
        raise InputError(argument, ",".join(names), problem, "give one for all channels, or one for each")
    like = replace(grid, channels=tuple(names), units=(), dtype="float32", condition=None)
    with renamed("data", argument):
        data = _read_path(str(path), DataSpec(str(path), variables=tuple(names)), Limits(memory_limit=None), like)
        data = match(data, replace(like, units=data.grid.units), argument, str(path), are_named=True)
    if data.shape[1:] != tuple(shape[1:]):
        problem = f"has {', '.join(names)} of shape {data.shape}, and the model's items are {tuple(shape)}"
        raise FileError(argument, str(path), problem, "give it on the grid of the model")
    values = data.values.index_select(0, torch.arange(len(data))).double()
    if is_difference and data.grid.units and grid.units:
        notes, columns = list[str](), []
        for channel, (name, given) in enumerate(zip(names, data.grid.units, strict=True)):
            units = (given, grid.units[channel])
            column = converted(values[:, channel].numpy(), name, units, (argument, str(path)), notes, True)
            columns.append(torch.from_numpy(column))
        values = torch.stack(columns, 1)
    return values


def _held_out_items(text: str, argument: str) -> Tensor | None:
    """The items of a data set with a name, such as digits or digits:0-3; None if there is none of that name."""
    name, colon, rows = text.partition(":")
    if name not in DATASETS:
        return None
    values, _ = DATASETS[name]("test", None, True)
    numbers = parse_numbers(rows if colon else "0", argument, f"{name}:0-3", len(values))
    if max(numbers) >= len(values):
        raise InputError(argument, text, f"goes beyond its {len(values)} items", "give smaller numbers")
    return values[numbers]


def _arranged(array: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An array of one item or several, with channels first, last or left out, as [N, *shape]; any other as it is."""
    channels, *event = shape
    if tuple(array.shape) in (shape, (*event, channels), (*event,)):
        array = array[None]
    if channels == 1 and array.shape[1:] == (*event,):
        return array[:, None]
    return array.movedim(-1, 1) if array.shape[1:] == (*event, channels) else array


def load(
    spec: DataSpec,
    split: str,
    limits: Limits,
    *,
    annotations: Sequence[str],
    scaling: Scaling | None,
    like: Grid | None = None,
    given: Given = FROM_FILES,
) -> Dataset:
    """The part ``split`` of the data: with the ``annotations`` that are asked for, without missing values, and with the
    ``scaling`` of the training part, which is fitted if it is not known. With ``like``, on that grid of a model.
    ``given`` are data, labels and conditions that are no files."""
    data, statistics = _open(spec, split, limits, like, given.data), None
    size = crop_size(spec.crop, data.shape[1:], spec.source) if spec.crop else ()
    labels = spec.labels if given.labels is None else given.labels
    condition = spec.condition if given.condition is None else given.condition
    tables = _tables(spec, given) if spec.annotation_variables else []
    if "labels" in annotations and labels is not None:
        data = with_labels(data, labels, spec.source, tables)
    is_test = torch.zeros(len(data), dtype=torch.bool)
    if spec.held_out is not None:
        is_test = held_out_rows(data, spec.held_out)
    train, test = (chosen.nonzero()[:, 0] for chosen in (~is_test, is_test))
    if "condition" in annotations and condition is not None:
        if spec.held_out is None and split != "train":
            raise InputError("condition", spec.condition, "is that of the training part", "leave out `split`")
        data = with_conditions(data, condition, spec.source, train, tables)
    rules = as_rules(spec.scaling, data, train) if scaling is None else []
    by = as_removed(spec.remove, data) if scaling is None else None
    if scaling is not None and scaling.climatology is None and spec.remove is not None:
        raise InputError("remove", spec.remove, "is fitted, and the scaling is given", "leave one of them out")
    is_fitted, is_mean = by is not None or any(isinstance(rule, Fitted) for rule in rules), spec.missing == MEAN
    domain = None if scaling is None else scaling.domain
    if spec.missing == DOMAIN and domain is None:
        domain = find_domain(data, spec.source, limits.progress)
    if is_fitted and spec.source in DATASETS and split != "train":
        scaling, is_fitted = load(spec, "train", limits, annotations=(), scaling=None).scaling, False
    if not is_mean:
        data = without_missing(data, spec.source, as_fills(spec.missing, data.shape[0]), domain)
    if is_mean or is_fitted:
        statistics = measure(data, train, rules, by, progress=limits.progress)
        if is_mean:
            data = without_missing(data, spec.source, statistics.values.mean.tolist())
    in_range = {*spec.scaling} == {AUTO} and not data.values.dtype.is_floating_point
    data = replace(data, scaling=scaling or fit_scaling(rules, data, statistics, by, domain), in_range=in_range)
    if data.scaling.climatology is not None:
        data.scaling.climatology.check(times_of(data))
    if spec.crop and data.scaling.is_per_pixel:
        problem = "takes parts of items, whose points have scalings, means or a domain of their own"
        raise InputError("crop", spec.crop, problem, "leave it out, or use one scaling for each channel")
    if spec.held_out is not None:
        data = data.take(train if split == "train" else test)
    return in_crops(data, size) if spec.crop else data


def _tables(spec: DataSpec, given: Given) -> list[Any]:
    """The tables whose variables may be labels or conditions."""
    if given.data is not None:
        return [given.data] if is_table(given.data) else []
    if spec.source in DATASETS or spec.source.startswith(HUB):
        return []
    found = find_files(spec.source, (spec.labels, spec.condition))
    return [*found.files] if found.kind == "tables" else []


def _open(spec: DataSpec, split: str, limits: Limits, like: Grid | None, given: Any = None) -> Dataset:
    """All of a data set, with its numbers as they are stored, but for what `match` changes to make them ``like``."""
    if given is None and spec.source in DATASETS:
        spec.refuse("layout", "variables", "sample_axis", "held_out")
        values, labels = DATASETS[spec.source](split, spec.data_dir, limits.progress)
        if values.dtype != torch.uint8:
            spec.refuse("size", "channels")
            return Dataset(values, labels)
        return Dataset(fit_pixels(values, spec, limits), labels)
    if spec.source.startswith(HUB):
        spec.refuse("layout", "variables", "sample_axis", "held_out", "data_dir")
        return _open_hub(spec, split, limits)
    if given is None and not is_path(spec.source):
        as_path("data", spec.source)
        known = f"{known_names(spec.source.lower(), DATASETS)}, or give a path or hf:NAME"
        raise InputError("data", spec.source, "is neither a known name nor an existing path", known)
    spec.refuse("data_dir")
    if spec.held_out is not None:
        one_of("split", split, ("train", "test"))
    elif split != "train":
        remedy = "say with `held_out` which part that is, or give the path of the data you want"
        raise InputError("split", split, f"is not a part of {spec.source!r}, which has no splits", remedy)
    if given is not None:
        return _read_object(given, spec, limits)
    data = _read_path(spec.source, spec, limits, like)
    return data if like is None else match(data, like, "data", spec.source, are_named=bool(spec.variables))


def _read_path(path: str, spec: DataSpec, limits: Limits, like: Grid | None) -> Dataset:
    """All of the data of a file, a folder or a pattern, with their numbers as they are stored."""
    found = find_files(path, (spec.labels, spec.condition))
    kind, files = found.kind, found.files
    if kind == "tables":
        spec.refuse("size", "channels")
        return open_science(files, path, spec, limits, like)
    is_named = kind == "arrays" and all(suffix_of(file) in NAMED for file in files)
    spec.refuse("sample_axis", *([] if is_named else ["variables"]))
    if kind in ("images", "sounds"):  # in the order that runs have always had
        return (open_images if kind == "images" else open_sounds)(found.root, sorted(files), spec, limits)
    spec.refuse("skip_corrupt", *(["size", "channels"] if kind in ("volumes", "slices") else []))
    parts = {
        "arrays": lambda: array_parts(files, spec.variables, spec.layout),
        "volumes": lambda: nifti_parts(files, spec),
        "slices": lambda: dicom_parts(files, spec),
        "videos": lambda: video_parts(files, spec),
    }[kind]()
    data = joined(parts, path, limits)
    if data.along is not None:  # as sounds are called
        names = np.array([os.path.relpath(name, found.root) for name in data.along[1].tolist()])
        data = replace(data, along=("file", names))
    return replace(data, values=fit_pixels(data.values, spec, limits)) if kind == "arrays" else data


def _read_object(given: Any, spec: DataSpec, limits: Limits) -> Dataset:
    """The data of an array, a tensor or a table of xarray, as those of a file would be read."""
    if is_table(given):
        spec.refuse("size", "channels", "skip_corrupt")
        return open_science([given], spec.source, spec, limits)
    spec.refuse("sample_axis", "variables", "skip_corrupt")
    layout = as_layout(spec.layout, spec.source, given.shape)
    data = joined([array_part(given, layout, spec.source)], spec.source, limits)
    return replace(data, values=fit_pixels(data.values, spec, limits))


def _as_given(value: Any) -> tuple[Any, str]:
    """What was handed over instead of a path, as an array or a Dataset of xarray, and what it is called."""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    if kind == "xarray.DataArray":
        return value.to_dataset(name=value.name or UNNAMED), kind
    if kind == "xarray.Dataset":
        return value, kind
    if isinstance(value, torch.Tensor | np.ndarray):
        return (as_array(value) if isinstance(value, torch.Tensor) else value), f"the {kind} {tuple(value.shape)}"
    remedy = "give a path, several of them, an array, a tensor, or a Dataset or DataArray of xarray"
    raise InputError("data", None, f"is a {kind}", remedy)


def _open_hub(spec: DataSpec, split: str, limits: Limits) -> Dataset:
    """The first column of images of a data set of the Hub, and its column ``label`` if there is one."""
    datasets, name = require("datasets"), spec.source
    with blaming(name, "correct the name or the `split`", "cannot be loaded", "data"):
        table = datasets.load_dataset(name.removeprefix(HUB), split=split)
    column = next((column for column, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise FileError("data", name, f"has no images among {table.column_names}", "give a data set of images")
    images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def file(row: int) -> Path | bytes:
        image = images[row][column]
        return Path(image["path"]) if image["bytes"] is None else image["bytes"]

    files = [Encoded(f"{name}[{row}]", partial(file, row)) for row in range(len(images))]
    pixels, rows, skipped = read_encoded(files, spec, limits)
    kind = table.features.get("label")
    if not isinstance(kind, datasets.ClassLabel):
        return Dataset(pixels, skipped=skipped)
    return Dataset(pixels, torch.tensor(table["label"])[rows], skipped=skipped, class_names=tuple(kind.names))
