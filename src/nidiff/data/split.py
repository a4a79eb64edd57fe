"""Which items are held out: a fixed random part, or a range of the coordinate of the sample axis."""

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.errors import InputError, shown
from nidiff.randomness import permutation
from nidiff.recipe import is_number

ITEM = "item"  # the name of the sample axis where the file gives none
EXAMPLE = "give a fraction such as 0.1, or a range such as time=2010-01-01:2010-12-31"


def held_out_rows(data: Dataset, held_out: object) -> Tensor:
    """Which items are held out, as [N] of bools."""
    number = held_out
    if isinstance(held_out, str) and "=" not in held_out:
        try:
            number = float(held_out)
        except ValueError:
            raise InputError(f"held_out={shown(held_out)} cannot be read: {EXAMPLE}.") from None
    if isinstance(number, str):
        chosen = torch.from_numpy(_in_range(data, number))
    else:
        if not is_number(number) or not 0 < number < 1:  # type: ignore[operator]
            raise InputError(f"held_out={shown(held_out)} is not between 0 and 1: {EXAMPLE}.")
        chosen = torch.zeros(len(data), dtype=torch.bool)
        # One seed for all: runs that differ in theirs must hold out the same items.
        order = permutation(len(data), torch.Generator().manual_seed(0))
        chosen[order[: round(number * len(data))]] = True  # type: ignore[operator]
    count = int(chosen.sum())
    if not 0 < count < len(data):
        raise InputError(
            f"held_out={shown(held_out)} holds out {count} of {len(data)} items: leave some on both sides."
        )
    return chosen


def _in_range(data: Dataset, text: str) -> Any:
    """NAME=first:last, both included, where either may be left out."""
    name, _, ends = text.partition("=")
    own, values = (ITEM, np.arange(len(data))) if data.along is None else data.along
    if name != own:
        raise InputError(
            f"held_out={shown(text)} names {name!r}, but the items lie along {own!r}: give {own}=first:last."
        )
    is_time = values.dtype.kind == "M"
    for colon in re.finditer(":", ends):  # a time of day has colons too
        first, last = ends[: colon.start()], ends[colon.end() :]
        try:
            low, high = (_end(one, is_time) for one in (first, last))
        except ValueError:
            continue
        # An end that is a day stands for all of that day.
        after = np.ones(len(values), bool) if low is None else _like(values, low) >= low
        before = np.ones(len(values), bool) if high is None else _like(values, high) <= high
        return after & before
    kind = "times such as 2010-01-31" if is_time else "numbers"
    raise InputError(f"held_out={shown(text)} is not a range of {kind}: give {own}=first:last, either of them or both.")


def _end(text: str, is_time: bool) -> Any:
    if not text:
        return None
    if not is_time:
        return float(text)
    if not re.match(r"-?\d{4}", text):
        raise ValueError
    return np.datetime64(text)


def _like(values: Any, end: Any) -> Any:
    return values.astype(end.dtype) if isinstance(end, np.datetime64) else values
