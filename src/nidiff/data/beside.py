"""What is known of the items of a data set, beside them: a class of each (labels), numbers or fields (conditions)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.arrays import read_array
from nidiff.data.dataset import Dataset
from nidiff.data.science import is_science, read_variables
from nidiff.diffusion.scaling import SMALLEST, Scaling
from nidiff.errors import InputError, shown
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

OWN = "data"  # labels that the data set has itself
ARRAYS = (".npy", ".npz")
MOST_CLASSES = 100_000
KEPT_DIGITS = 7  # of a scaling: so that it is the same on every machine


def variables_beside(labels: object, condition: object) -> tuple[str, ...]:
    """The variables of a NetCDF, HDF5 or Zarr file that are labels or conditions, and so no channels of the data."""
    found = [labels] if isinstance(labels, str) and labels != OWN else []
    found += condition.split(",") if isinstance(condition, str) else []
    return tuple(name for name in found if not _is_array(name))


def with_labels(data: Dataset, labels: Any, name: str) -> Dataset:
    """The data set ``name`` with its ``labels``: its own, those of an array file, or a variable of its file."""
    if not isinstance(labels, str) or not labels:
        raise InputError(f"labels={shown(labels)} must be 'data', an .npy or .npz file, or the name of a variable.")
    if labels == OWN:
        if data.labels is None:
            raise InputError(
                f"labels='data': {name!r} has none of its own: put the images of each class in a subfolder, or give an "
                ".npy file, or the name of a variable of a NetCDF, HDF5 or Zarr file."
            )
        if len(data.labels) and int(data.labels.min()) < 0:
            raise InputError(f"labels='data': {name!r} has labels below 0, so that some items have no class: {OTHERS}.")
        return data
    values = _read("labels", [labels], data, name)[0]
    if values.shape != (len(data),):
        raise InputError(f"labels={labels!r} has shape {values.shape}: give one label for each of {len(data)} items.")
    numbers, names = _as_classes(labels, values)
    return replace(data, labels=numbers, class_names=names, num_classes=len(names) or None)


OTHERS = "give other labels, or leave those items out"


def _as_classes(labels: str, values: "NDArray[Any]") -> tuple[Tensor, tuple[str, ...]]:
    """Labels as whole numbers from 0, and the names of the classes if they are words, which are sorted."""
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind in "Ub" or (values.dtype.kind == "O" and all(isinstance(one, str) for one in values)):
        names, numbers = np.unique(values.astype(str), return_inverse=True)
        found, classes = torch.from_numpy(numbers.reshape(-1)).long(), tuple(map(str, names))
    elif values.dtype.kind in "iuf":
        whole = np.isfinite(values) & (values == np.floor(values))
        if not whole.all():
            first = values[~whole][0]
            raise InputError(f"labels={labels!r} has {first}, which is no whole number: give classes from 0, or words.")
        if values.min() < 0 or values.max() >= MOST_CLASSES:
            worst = values.min() if values.min() < 0 else values.max()
            raise InputError(
                f"labels={labels!r} has {worst:g}: number the classes from 0 to at most {MOST_CLASSES - 1}."
            )
        found, classes = torch.from_numpy(values.astype(np.int64)), ()
    else:
        raise InputError(f"labels={labels!r} has dtype {values.dtype}: give whole numbers or words.")
    if len(classes) > MOST_CLASSES:
        raise InputError(f"labels={labels!r} has {len(classes)} classes: give at most {MOST_CLASSES}.")
    return found, classes


def with_conditions(data: Dataset, condition: Any, name: str, train: Tensor) -> Dataset:
    """The data set ``name`` with the numbers or fields that ``condition`` names, of mean 0 and standard deviation 1 per
    channel over its rows ``train``."""
    names = condition.split(",") if isinstance(condition, str) else []
    if not names or not all(names):
        raise InputError(
            f"condition={shown(condition)} must be an .npy or .npz file, or names of variables such as u,v."
        )
    arrays = _read("condition", names, data, name)
    if len({array.shape for array in arrays}) > 1:
        found = ", ".join(f"{one!r} {array.shape}" for one, array in zip(names, arrays, strict=True))
        raise InputError(
            f"condition={condition!r} has variables of different shapes ({found}): give some that are alike."
        )
    shape, count = data.shape, math.prod(data.shape[1:])
    whole = arrays[0] if len(arrays) == 1 and _is_array(names[0]) else np.stack(arrays, 1)
    if whole.dtype.kind not in "biuf":
        raise InputError(f"condition={condition!r} has dtype {whole.dtype}: give numbers.")
    if len(whole) != len(data) or whole.size == 0:
        problem = f"condition={condition!r} has shape {whole.shape}, and the data have {len(data)} items"
        raise InputError(f"{problem}: give one row for each.")
    if whole.ndim == 1 or (2 < whole.ndim == len(shape)):
        whole = whole[:, None]  # one number, or one channel
    if whole.ndim > 2:
        channels = whole.shape[1]
        require_memory(f"condition={condition!r}", 8.0 * len(data) * channels * count, "give fewer items")
        whole = on_grid(condition, whole, shape[1:])
    with np.errstate(over="ignore"):
        values = torch.from_numpy(np.array(whole, dtype=np.float32))
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        row = int(bad.flatten(1).any(1).nonzero()[0])
        raise InputError(
            f"condition={condition!r} has NaN or an infinite value in item {row}: repair it or leave it out."
        )
    scaling = _standard(values[train])
    return replace(data, conditions=scaling.to_model(values), condition_scaling=scaling)


def _standard(values: Tensor) -> Scaling:
    """Mean 0 and standard deviation 1 per channel; one that does not vary is only shifted."""
    axes = [axis for axis in range(values.ndim) if axis != 1]
    mean, deviation = values.double().mean(axes), values.double().std(axes, correction=0)
    constant = deviation <= 1e-6 * mean.abs() + SMALLEST
    scale = torch.where(constant, 1.0, deviation)
    kept = [tuple(float(f"{one:.{KEPT_DIGITS}g}") for one in each.tolist()) for each in (scale, mean)]
    return Scaling(kept[0], kept[1])


def on_grid(condition: str, fields: "NDArray[Any]", event: Sequence[int]) -> "NDArray[Any]":
    """Fields [N, C', …] on the grid of the data, each value of a coarser one repeated over its cell."""
    own = fields.shape[2:]
    if len(own) != len(event) or any(n % m for n, m in zip(event, own, strict=True)):
        data = "×".join(map(str, event))
        raise InputError(
            f"condition={condition!r} has shape {fields.shape}, which is neither [N, P] nor fields [N, C, …] on the "
            f"grid {data} of the data, or one whose sizes divide those: give one of these."
        )
    for axis, (n, m) in enumerate(zip(event, own, strict=True)):
        fields = fields if n == m else np.repeat(fields, n // m, axis + 2)
    return fields


def _read(argument: str, names: Sequence[str], data: Dataset, name: str) -> "list[NDArray[Any]]":
    """The array of a file, or variables of the file that the data are from."""
    if len(names) == 1 and _is_array(names[0]):
        file = Path(names[0])
        if not file.is_file():
            raise InputError(f"{argument}={names[0]!r} does not exist: give an .npy or .npz file that does.")
        return [read_array(file, argument)]
    if not is_science(Path(name)):
        problem = f"{argument}={','.join(names)!r} is no array file, and {name!r} has no variables"
        own = "'data', or " if argument == "labels" else ""
        raise InputError(f"{problem}: give {own}an .npy or .npz file.")
    assert data.along is not None
    return read_variables(Path(name), argument, names, data.along[0], data.grid.axes)


def _is_array(name: str) -> bool:
    return Path(name).suffix.lower() in ARRAYS
