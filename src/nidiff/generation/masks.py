"""The points of an item that are observed, by a word or from a file."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nidiff.covariance.checks import as_numbers
from nidiff.data.arrays import read_array
from nidiff.data.dataset import LARGEST
from nidiff.data.images import SUFFIXES
from nidiff.data.items import load_items
from nidiff.errors import InputError, known_names
from nidiff.files import as_path
from nidiff.randomness import permutation

NOT, RANDOM = "not-", "random:"
TRUE = "make it true, 1 or white where items are observed, and false, 0 or black elsewhere"


def _part(axis: int, low: Callable[[int], int], high: Callable[[int], int]) -> Callable[[tuple[int, ...]], Tensor]:
    """The points from ``low`` to ``high`` along an axis, as functions of its size."""

    def part(event: tuple[int, ...]) -> Tensor:
        if len(event) < -axis:
            raise InputError("mask", None, "needs items of two axes or more", "use left, right or a file")
        along = torch.arange(size := event[axis])
        inside = (along >= low(size)) & (along < high(size))
        return inside.reshape(-1, *[1] * (-axis - 1)).expand(event)

    return part


def _centre(event: tuple[int, ...]) -> Tensor:
    """The middle half of the last two axes, or of an only one."""
    axes = range(-min(2, len(event)), 0)
    middle = [_part(axis, lambda n: n // 4, lambda n: n - n // 4)(event) for axis in axes]
    return torch.stack(middle).all(0)


WORDS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "left": _part(-1, lambda n: 0, lambda n: (n + 1) // 2),
    "right": _part(-1, lambda n: (n + 1) // 2, lambda n: n),
    "top": _part(-2, lambda n: 0, lambda n: (n + 1) // 2),
    "bottom": _part(-2, lambda n: (n + 1) // 2, lambda n: n),
    "center": _centre,
}


def as_mask(text: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Where items [C, *event] = ``shape`` are observed, as [*event] or ``shape``: the left, right, top or bottom half,
    the center, random:0.03 for that share of the points, or where a file has ones or is white. With not- before it,
    everywhere else."""
    event, word = shape[1:], text.removeprefix(NOT)
    if word in WORDS:
        observed = WORDS[word](event)
    elif word.startswith(RANDOM):
        count = max(1, round(_share(text, word.removeprefix(RANDOM)) * math.prod(event)))
        observed = (permutation(math.prod(event), generator) < count).reshape(event)
    else:
        observed = _from_file(word, shape)
    observed = observed if word == text else ~observed
    if not bool(observed.any()):
        raise InputError("mask", text, "observes nothing", TRUE)
    return observed.contiguous()


def _share(text: str, number: str) -> float:
    try:
        share = float(number)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise InputError("mask", text, "has no share of the points", "give one above 0 and up to 1, as random:0.03")
    return share


def _from_file(text: str, shape: tuple[int, ...]) -> Tensor:
    file, event = as_path("mask", text), shape[1:]
    if not file.is_file():
        raise InputError("mask", text, "is neither a file nor a known word", known_names(text, [*WORDS, "random:0.03"]))
    if file.suffix.lower() in SUFFIXES:
        picture = load_items(file, (1, *event), argument="mask")[0, 0]
        return picture.long() > LARGEST[str(picture.dtype).removeprefix("torch.")] // 2
    values = as_numbers(read_array(file, "mask"), "mask")
    if tuple(values.shape) not in (event, (1, *event), shape) or not bool(((values == 0) | (values == 1)).all()):
        problem = f"has shape {tuple(values.shape)}, or numbers other than 0 and 1"
        raise InputError("mask", file, problem, f"give zeros and ones of shape {event}")
    return values.bool().reshape(shape if tuple(values.shape) == shape else event)
