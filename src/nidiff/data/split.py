"""Which items are held out: a fixed random part, or a range of the coordinate of the sample axis."""

import contextlib
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.errors import InputError
from nidiff.randomness import permutation

ITEM = "item"  # the name of the sample axis where the file gives none
EXAMPLE = "give a fraction such as 0.1, or a range such as time=2010-01-01:2010-12-31"


def held_out_rows(data: Dataset, held_out: str) -> Tensor:
    """Which items are held out, as [N] of bools."""
    if "=" in held_out:
        chosen = torch.from_numpy(_in_range(data, held_out))
    else:
        chosen = torch.zeros(len(data), dtype=torch.bool)
        # One seed for all: runs that differ in theirs must hold out the same items.
        order = permutation(len(data), torch.Generator().manual_seed(0))
        chosen[order[: round(_fraction(held_out) * len(data))]] = True
    count = int(chosen.sum())
    if not 0 < count < len(data):
        problem = f"holds out {count} of {len(data)} items"
        raise InputError("held_out", held_out, problem, "leave some on both sides")
    return chosen


def _fraction(held_out: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(held_out) < 1:
            return float(held_out)
    raise InputError("held_out", held_out, "is not a part of the data", EXAMPLE)


def _in_range(data: Dataset, text: str) -> Any:
    """NAME=first:last, both included, where either may be left out; NAME is that of the sample axis, or item."""
    name, _, ends = text.partition("=")
    axis, values = (ITEM, np.arange(len(data))) if data.along is None or name == ITEM else data.along
    for colon in re.finditer(":", ends if name == axis else ""):  # a time of day has colons too
        try:
            low, high = (_end(end, values.dtype.kind) for end in (ends[: colon.start()], ends[colon.end() :]))
        except ValueError:
            continue
        # An end that is a day stands for all of that day.
        after = np.ones(len(values), bool) if low is None else _like(values, low) >= low
        before = np.ones(len(values), bool) if high is None else _like(values, high) <= high
        return after & before
    kind = {"M": "times such as 2010-01-31", "U": "words"}.get(values.dtype.kind, "numbers")
    problem = f"is not a range of {axis!r}, along which the items lie"
    raise InputError("held_out", text, problem, f"give {axis}=first:last, either of them or both, in {kind}")


def _end(text: str, kind: str) -> Any:
    if not text or kind == "U":
        return text or None
    if kind != "M":
        return float(text)
    if not re.match(r"-?\d{4}", text):
        raise ValueError
    return np.datetime64(text)


def _like(values: Any, end: Any) -> Any:
    return values.astype(end.dtype) if isinstance(end, np.datetime64) else values
