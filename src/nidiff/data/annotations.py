"""Annotations of a data set: the class of each item (labels), or numbers or fields that belong to it (conditions)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.arrays import as_array, read_array
from nidiff.data.coordinates import CHANNELS, COORDINATES, PLACES, coordinate, joined, needs_times
from nidiff.data.dataset import Dataset, cut, numbered_classes
from nidiff.data.grid import Grid
from nidiff.data.match import match
from nidiff.data.parts import NUMBERS, float32_loses
from nidiff.data.science import has_variable, read_variables, times_in
from nidiff.data.spec import ARRAYS, FROM_DATA_SET
from nidiff.diffusion.condition import CLASSES, FIELDS, PARAMETERS, Condition, null_class
from nidiff.diffusion.scaling import SMALLEST, Scaling
from nidiff.errors import InputError, renamed, shown
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.data.crops import Crops
    from nidiff.diffusion.climatology import Times

MOST_CLASSES = 100_000
DIGITS = 7  # of a scaling, so that it is the same on every machine


def with_labels(data: Dataset, labels: Any, name: str, tables: Sequence[Any] = ()) -> Dataset:
    """The data set ``name`` with ``labels``: its own ("data"), those of an array file, a variable of the ``tables``
    that it is from, or an array."""
    if isinstance(labels, str) and labels == FROM_DATA_SET:
        if data.labels is None or (len(data.labels) and int(data.labels.min()) < 0):
            remedy = "sort the files into a subfolder per class, or give an array file or the name of a variable"
            raise InputError("labels", labels, f"has no class for the items of {name!r}, or for some of them", remedy)
        return data
    values = _read("labels", labels, data, name, tables)[0][0]
    labels = labels if isinstance(labels, str) else None  # an array says little in a message
    names: tuple[str, ...] = ()
    shape = values.shape
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind in "UbO":
        names, numbers = numbered_classes(values.astype(str).flatten().tolist())
        values = numbers.numpy().reshape(shape)
    is_class = values.dtype.kind in "iuf" and (values == np.floor(values)) & (values >= 0) & (values < MOST_CLASSES)
    if shape != (len(data),) or not np.all(is_class):
        remedy = f"give a word, or a whole number from 0 to at most {MOST_CLASSES - 1}, for each of {len(data)} items"
        raise InputError("labels", labels, f"has {values.dtype} {shape} that are no classes", remedy)
    numbers = torch.from_numpy(values.astype(np.int64))
    return replace(data, labels=numbers, class_names=names, num_classes=len(names) or None)


def with_conditions(data: Dataset, condition: Any, name: str, train: Tensor, tables: Sequence[Any] = ()) -> Dataset:
    """The data set ``name`` with the numbers or fields of ``condition``, standardised over the rows ``train``: those of
    an array file, variables of the ``tables`` that it is from, its coordinates, or an array."""
    grid: Grid | None = None
    if isinstance(condition, str) and not condition.lower().endswith(ARRAYS):
        values, grid = _of_names(condition, data, name, tables)
    else:
        values = _read("condition", condition, data, name, tables)[0][0]
        condition = condition if isinstance(condition, str) else None
        if len(values) != len(data):
            problem = f"has shape {values.shape}, and the data have {len(data)} items"
            raise InputError("condition", condition, problem, "give one row for each, of one shape")
        if values.ndim == 1 or (2 < values.ndim == len(data.shape)):
            values = values[:, None]  # one number, or one channel
    if values.ndim > 2:
        size = 8.0 * len(data) * values.shape[1] * math.prod(data.shape[1:])
        require_memory("condition", condition, size, "give fewer items")
        cells = tuple(n // m for n, m in zip(data.shape[1:], values.shape[2:], strict=False) if m)
        values = on_grid(condition, values, data.shape[1:])
        data = replace(data, condition_cells=cells)
    scaling = _standard(as_finite(condition, values)[train])
    if float32_loses(scaling.shift, scaling.scale):
        scaling = _standard(torch.from_numpy(values.astype(np.float64))[train])
    numbers, grids = as_finite(condition, values, scaling), replace(data.grid, condition=grid)
    return replace(data, conditions=numbers, condition_scaling=scaling, grid=grids)


def _of_names(condition: str, data: Dataset, name: str, tables: Sequence[Any]) -> "tuple[NDArray[Any], Grid]":
    """The conditions [N, C, …] that are coordinates of the data or variables of their file, and their grid."""
    names, event, count = condition.split(","), data.shape[1:], len(data)
    known = {each for each in names if each in COORDINATES and not (tables and has_variable(tables[0], each))}
    variables, grid = [each for each in names if each not in known], Grid(())
    arrays: dict[str, NDArray[Any]] = {}
    if variables:
        read, mine = _read("condition", ",".join(variables), data, name, tables)
        grid = mine or grid
        arrays = {each: array[:, None] for each, array in zip(variables, read, strict=True)}
    shapes = {array.shape[1:] for array in arrays.values() if array.ndim > 2}
    if len(shapes) > 1 or any(len(array) not in (1, count) for array in arrays.values()):
        problem = f"has shape {' and '.join(map(str, shapes))}, and the data have {count} items"
        raise InputError("condition", condition, problem, "give one row for each, of one shape")
    parts = [arrays[each] if each in arrays else coordinate(each, data.grid, event, data.times) for each in names]
    fields = shapes.pop()[1:] if shapes else event
    if len(fields) != len(event) or (fields != event and any(each in PLACES for each in known)):
        problem = f"has fields over {fields}, and the data are over {event}"
        raise InputError("condition", condition, problem, "give them on one grid")
    values = joined(parts, count, fields)
    channels = tuple(channel for each in names for channel in (COORDINATES[each] if each in known else (each,)))
    units = dict(zip(grid.channels if variables else (), grid.units, strict=False))
    named = tuple(units.get(channel, "") for channel in channels)
    if values.ndim > 2 and not grid.axes:
        grid = data.grid
    return values, replace(
        grid, channels=channels, units=named if any(named) else (), dtype="float32", rate=None, condition=None
    )


def read_conditions(
    path: Path, grid: Grid, model: Grid, event: tuple[int, ...], times: "Times | None" = None
) -> "NDArray[Any]":
    """The conditions [N, C, …] of a NetCDF, HDF5 or Zarr file, on the ``grid`` of a model's conditions; those that are
    coordinates are those of the grid of the ``model``, and of the ``times``, by default those in the file."""
    variables = [channel for channel in grid.channels if channel not in CHANNELS]
    if not variables:
        problem = f"is not needed: the model was trained with {', '.join(grid.channels)}"
        raise InputError("condition", path, problem, "give `times` instead")
    units = dict(zip(grid.channels, grid.units, strict=False))
    some = replace(grid, channels=tuple(variables), units=tuple(units[each] for each in variables) if units else ())
    with renamed("data", "condition"):
        arrays, mine, along = read_variables([path], "condition", variables, None, some)
        if len({array.shape[1:] for array in arrays if array.ndim > 1}) > 1:
            shapes = " and ".join(str(array.shape) for array in arrays)
            raise InputError("condition", path, f"has variables of shape {shapes}", "give them the same axes")
        count = max(map(len, arrays))
        values = joined([array[:, None] for array in arrays], count, arrays_event(arrays))
        if values.dtype.kind not in NUMBERS:
            return values
        data = Dataset(torch.from_numpy(values * 1.0), grid=mine, along=along)
        known = np.asarray(match(data, some, "condition", str(path)).values)
    rows = {each: known[:, place, None] for place, each in enumerate(variables)}
    if times is not None and count not in (1, len(times)):
        raise InputError("times", None, f"are {len(times)}, and {str(path)!r} has {count} items", "give one for each")
    if times is None and needs_times(grid):
        times = times_in(path) if data.times is None and count == 1 else data.times
    return with_coordinates(rows, grid, model, event, times, count if times is None else len(times))


def arrays_event(arrays: "Sequence[NDArray[Any]]") -> tuple[int, ...]:
    """The axes of the fields among arrays [N, …]; none if all are numbers."""
    return next((array.shape[1:] for array in arrays if array.ndim > 1), ())


def with_coordinates(
    rows: "dict[str, NDArray[Any]]", grid: Grid, model: Grid, event: tuple[int, ...], times: "Times | None", count: int
) -> "NDArray[Any]":
    """The channels of conditions on ``grid`` that are known, [N, 1, …], and those of the coordinates, in its order."""
    rows = dict(rows)
    for name, channels in COORDINATES.items():
        if {*channels} <= {*grid.channels}:
            values = coordinate(name, model, event, times)
            rows |= {channel: values[:, place, None] for place, channel in enumerate(channels)}
    return joined([rows[channel] for channel in grid.channels], count, event)


def coordinate_rows(grid: Grid, model: Grid, event: tuple[int, ...], times: "Times") -> "NDArray[Any] | None":
    """The conditions of items of these times where all of them are coordinates; else None."""
    is_known = {*grid.channels} <= CHANNELS
    return with_coordinates({}, grid, model, event, times, len(times)) if is_known else None


def as_finite(condition: str | None, values: "NDArray[Any]", scaling: Scaling | None = None) -> Tensor:
    """The numbers of a file [N, …] in the units of the model, by ``scaling``, in float32; refused if they are not
    finite, or not numbers. Only where their offset needs it, they are scaled in float64."""
    is_number = values.dtype.kind in NUMBERS and values.size
    dtype = np.float64 if scaling is not None and float32_loses(scaling.shift, scaling.scale) else np.float32
    with np.errstate(over="ignore"):
        numbers = torch.from_numpy(values.astype(dtype)) if is_number else torch.full((1, 1), torch.nan)
    bad = ~numbers.isfinite().reshape(len(numbers), -1).all(1)
    if bool(bad.any()):
        problem = f"holds {values.dtype} {values.shape}, in row {int(bad.nonzero()[0])} not finite numbers"
        raise InputError("condition", condition, problem, "fill them in, or leave that row out")
    return numbers if scaling is None else scaling.to_model(numbers).float()


def on_grid(condition: str | None, fields: "NDArray[Any]", event: Sequence[int]) -> "NDArray[Any]":
    """Fields [N, C, …] on the grid of the data; each value of a coarser grid is repeated over its cell."""
    sizes = fields.shape[2:]
    if len(sizes) != len(event) or any(n % m for n, m in zip(event, sizes, strict=True)):
        grid = "×".join(map(str, event))
        remedy = f"give numbers [N, P], or fields [N, C, …] on the grid {grid} of the data or one that divides it"
        raise InputError("condition", condition, f"has shape {fields.shape}", remedy)
    for axis, (n, m) in enumerate(zip(event, sizes, strict=True)):
        fields = fields if n == m else np.repeat(fields, n // m, axis + 2)
    return fields


def _standard(values: Tensor) -> Scaling:
    """The scaling to mean 0 and standard deviation 1 per channel; a constant channel is only shifted.

    The digits of a shift count from the first one of the scale if that is far behind.
    """
    axes = [axis for axis in range(values.ndim) if axis != 1]
    mean, deviation = values.double().mean(axes), values.double().std(axes, correction=0)
    constant = deviation <= (1e-12 if values.dtype == torch.float64 else 1e-6) * mean.abs() + SMALLEST
    scale = torch.where(constant, 1.0, deviation)
    extra = ((mean.abs() / scale).clamp(min=1).log10() - 4).ceil().clamp(min=0).int()
    digits = (DIGITS + extra).tolist()
    shifts = tuple(float(f"{number:.{count}g}") for number, count in zip(mean.tolist(), digits, strict=True))
    return Scaling(tuple(float(f"{number:.{DIGITS}g}") for number in scale.tolist()), shifts)


def _read(
    argument: str, value: Any, data: Dataset, name: str, tables: Sequence[Any]
) -> "tuple[list[NDArray[Any]], Grid | None]":
    """An array, that of a file, or variables of the tables that the data are from, and their grid."""
    if not isinstance(value, str):
        return [as_array(value) if isinstance(value, Tensor) else np.asarray(value)], None
    if value.lower().endswith(ARRAYS):
        return [read_array(Path(value), argument)], None
    if not tables or data.along is None:
        problem = f"is not an array file, and {shown(name)} has no variables"
        other = "'data', or " if argument == "labels" else ""
        raise InputError(argument, value, problem, f"give {other}an .npy or .npz file")
    names = [value] if argument == "labels" else value.split(",")
    arrays, grid, _ = read_variables(tables, argument, names, data.along[0], data.grid)
    return arrays, grid


# The conditions of a network ----------------------------------------------------------------------------------------


def conditions_of(data: Dataset, dropout: float = 0.0, net: Any = None) -> dict[str, Condition]:
    """The conditions that the data have, by the names of the network's arguments. The null class depends on ``net``."""
    conditions = {}
    if data.labels is not None:
        classes = data.num_classes
        conditions[CLASSES] = Condition(classes, null=null_class(net, classes or 0), dropout=dropout)
    if data.conditions is not None:
        shape = tuple(data.conditions.shape[1:])
        conditions[_name(data.conditions)] = Condition(None, shape, None, dropout, data.condition_scaling)
    return conditions


def rows_of(
    data: Dataset,
    index: Tensor,
    flip: Tensor | None = None,
    dropped: Tensor | None = None,
    conditions: Mapping[str, Condition] | None = None,
    places: Tensor | None = None,
) -> dict[str, Tensor]:
    """The values of the conditions of the items ``index`` [B]. Fields are mirrored with their items where ``flip`` [B]
    is true, and cut like them at ``places``; all values are null, as ``conditions`` define it, where ``dropped`` [B]
    is."""
    rows = {}
    if data.labels is not None:
        rows[CLASSES] = data.labels[index]
    if data.conditions is not None:
        values, name = data.conditions.index_select(0, index), _name(data.conditions)
        if places is not None and name == FIELDS:
            values = cut(data.conditions, index, places)
        if flip is not None and name == FIELDS:
            values[flip] = values[flip].flip(-1)
        rows[name] = values
    if dropped is not None and conditions is not None:
        for name, values in rows.items():
            values[dropped] = conditions[name].absent
    return rows


def examples_of(data: Dataset, count: int) -> dict[str, Tensor]:
    """Conditions for ``count`` samples: the classes 0, 1, 2, … in turn, or those of the first items."""
    rows = rows_of(data, torch.arange(count) % len(data))
    if data.num_classes is not None and CLASSES in rows:
        rows[CLASSES] = torch.arange(count) % data.num_classes
    return rows


def _name(conditions: "Tensor | Crops") -> str:
    return PARAMETERS if len(conditions.shape) == 2 else FIELDS
