"""Which items are held out: a fixed random part, or a range of the coordinate of the sample axis."""

import contextlib
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.errors import InputError, shown
from nidiff.randomness import permutation
from nidiff.recipe import is_number, plain

ITEM = "item"  # the name of the sample axis where the file gives none
EXAMPLE = "give a fraction such as 0.1, or a range such as time=2010-01-01:2010-12-31"


def held_out_rows(data: Dataset, held_out: Any) -> Tensor:
    """Which items are held out, as [N] of bools."""
    if isinstance(held_out, str) and "=" in held_out:
        chosen = torch.from_numpy(_in_range(data, held_out))
    else:
        chosen = torch.zeros(len(data), dtype=torch.bool)
        # One seed for all: runs that differ in theirs must hold out the same items.
        order = permutation(len(data), torch.Generator().manual_seed(0))
        chosen[order[: round(_fraction(held_out) * len(data))]] = True
    count = int(chosen.sum())
    if not 0 < count < len(data):
        raise InputError(
            f"held_out={shown(held_out)} holds out {count} of {len(data)} items: leave some on both sides."
        )
    return chosen


def _fraction(held_out: Any) -> float:
    number = plain(held_out)
    if isinstance(number, str):
        with contextlib.suppress(ValueError):
            number = float(number)
    if not is_number(number) or not 0 < number < 1:
        raise InputError(f"held_out={shown(held_out)} is not a part of the data: {EXAMPLE}.")
    return float(number)


def _in_range(data: Dataset, text: str) -> Any:
    """NAME=first:last, both included, where either may be left out; NAME is that of the sample axis, or item."""
    name, _, ends = text.partition("=")
    own, values = (ITEM, np.arange(len(data))) if data.along is None or name == ITEM else data.along
    if name != own:
        problem = f"held_out={shown(text)} names {name!r}, but the items lie along {own!r}"
        raise InputError(f"{problem}: give {own}=first:last.")
    for colon in re.finditer(":", ends):  # a time of day has colons too
        try:
            low, high = (_end(one, values.dtype.kind) for one in (ends[: colon.start()], ends[colon.end() :]))
        except ValueError:
            continue
        # An end that is a day stands for all of that day.
        after = np.ones(len(values), bool) if low is None else _like(values, low) >= low
        before = np.ones(len(values), bool) if high is None else _like(values, high) <= high
        return after & before
    kind = {"M": "times such as 2010-01-31", "U": "words"}.get(values.dtype.kind, "numbers")
    raise InputError(f"held_out={shown(text)} is not a range of {kind}: give {own}=first:last, either of them or both.")


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
