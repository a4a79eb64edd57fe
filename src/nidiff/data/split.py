"""Which items are held out: a fixed random part, or a range of the coordinate of the sample axis."""

import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.errors import InputError
from nidiff.randomness import permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

ITEM = "item"  # the name of the sample axis where the file gives none


def held_out_rows(data: Dataset, held_out: str) -> Tensor:
    """Which items are held out, as [N] of bools: a fraction of them, or NAME=first:last, both included, where either
    may be left out; NAME is that of the sample axis, or item."""
    name, is_range, ends = held_out.partition("=")
    axis, values = (ITEM, np.arange(len(data))) if data.along is None or name == ITEM else data.along
    chosen = np.zeros(len(data), bool)
    if is_range and name == axis:
        chosen = _in_range(values, ends)
    elif not is_range:
        with suppress(ValueError, OverflowError):
            count = max(0, round(float(held_out) * len(data)))
            # One seed for all: runs that differ in theirs must hold out the same items.
            chosen[permutation(len(data), torch.Generator().manual_seed(0))[:count]] = True
    if not 0 < chosen.sum() < len(data):
        problem = f"holds out {chosen.sum()} of {len(data)} items"
        remedy = f"give a fraction such as 0.1, or a range such as {axis}={values[len(values) // 2]}:"
        raise InputError("held_out", held_out, problem, remedy)
    return torch.from_numpy(chosen)


def _in_range(values: "NDArray[Any]", ends: str) -> "NDArray[Any]":
    """Which values are in first:last; none where that cannot be read."""
    is_time = values.dtype.kind == "M"  # a time of day has colons too
    for colon in re.finditer(r":(?=$|-?\d{4})" if is_time else ":", ends):
        with suppress(ValueError):
            first, last = ends[: colon.start()], ends[colon.end() :]
            return _compared(operator.ge, values, first) & _compared(operator.le, values, last)
    return np.zeros(len(values), bool)


def _compared(compare: Callable[[Any, Any], Any], values: "NDArray[Any]", end: str) -> Any:
    if not end:
        return np.ones(len(values), bool)
    if values.dtype.kind == "M":
        time = np.datetime64(end)
        return compare(values.astype(time.dtype), time)  # an end that is a day stands for all of that day
    return compare(values, end if values.dtype.kind == "U" else float(end))
