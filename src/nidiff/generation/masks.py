"""Which points of an item are observed, in words or from a file."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nidiff.covariance.operator import as_numbers
from nidiff.data.arrays import read_array
from nidiff.data.dataset import LARGEST
from nidiff.data.images import SUFFIXES
from nidiff.data.items import load_items
from nidiff.errors import InputError, known_names, shown
from nidiff.files import as_path
from nidiff.recipe import is_number

NOT, RANDOM = "not-", "random:"


def _half(axis: int, *, first: bool) -> Callable[[tuple[int, ...]], Tensor]:
    def half(event: tuple[int, ...]) -> Tensor:
        if len(event) < -axis:
            raise InputError("mask: top and bottom need items of two axes or more: use left, right or a file.")
        size = event[axis]
        seen = torch.arange(size) < (size + 1) // 2
        return (seen if first else ~seen).reshape(-1, *[1] * (-axis - 1)).expand(event)

    return half


def _centre(event: tuple[int, ...]) -> Tensor:
    """The middle half of the last two axes, or of an only one."""
    seen = torch.ones(event, dtype=torch.bool)
    for axis in range(-min(2, len(event)), 0):
        size = event[axis]
        along = torch.arange(size)
        inside = (along >= size // 4) & (along < size - size // 4)
        seen = seen & inside.reshape(-1, *[1] * (-axis - 1))
    return seen


WORDS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "left": _half(-1, first=True),
    "right": _half(-1, first=False),
    "top": _half(-2, first=True),
    "bottom": _half(-2, first=False),
    "center": _centre,
}


def as_mask(text: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Where items [C, *event] = ``shape`` are observed, as [*event] or ``shape``: true at the left, right, top or
    bottom half or at the center, of random:0.03 at so many of the points, or where a file has ones or is white. With
    not- before it, everywhere else."""
    event = shape[1:]
    word = text.removeprefix(NOT)
    if word in WORDS:
        seen = WORDS[word](event)
    elif word.startswith(RANDOM):
        seen = _random(text, word.removeprefix(RANDOM), event, generator)
    else:
        seen = _from_file(word, shape)
    seen = seen if word == text else ~seen
    if not bool(seen.any()):
        raise InputError(f"mask={shown(text)} sees nothing: make it true, or white, where items are observed.")
    return seen.contiguous()


def _random(text: str, share: str, event: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """That share of the points, rounded, and one at least."""
    try:
        value = float(share)
    except ValueError:
        value = float("nan")
    if not (is_number(value) and 0 < value <= 1):
        raise InputError(f"mask={shown(text)} must say which share is observed, such as random:0.03.")
    size = int(np.prod(event))
    order = torch.randperm(size, generator=generator)
    return (order < max(1, round(value * size))).reshape(event)


def _from_file(text: str, shape: tuple[int, ...]) -> Tensor:
    file, event = as_path("mask", text), shape[1:]
    if not file.is_file():
        words = known_names(text, [*WORDS, f"{RANDOM}0.03"])
        raise InputError(f"mask={shown(text)} is neither a file nor a known word: {words}.")
    if file.suffix.lower() in SUFFIXES:
        picture = load_items(file, (1, *event), argument="mask")[0, 0]
        return picture.long() > LARGEST[str(picture.dtype).removeprefix("torch.")] // 2
    seen = as_numbers(read_array(file, "mask"), "mask")
    if tuple(seen.shape) not in (event, (1, *event), shape):
        wanted = " or ".join(str(one) for one in dict.fromkeys((event, shape)))
        raise InputError(f"mask={shown(text)} has shape {tuple(seen.shape)}, not {wanted}: make one for these items.")
    if not bool(((seen == 0) | (seen == 1)).all()):
        raise InputError(f"mask={shown(text)} must be true or 1 where items are observed, and false or 0 elsewhere.")
    return seen.bool().reshape(shape if tuple(seen.shape) == shape else event)
