"""How Σ, schedules and samplers are written in one line of text, ``NAME:key=value,…``, and seeds, ``0-3,8``."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

from nidiff.errors import InputError, one_of

MOST_SEEDS = 10_000_000


def parse_call(argument: str, text: str) -> tuple[str, dict[str, Any]]:
    """``NAME:key=value,…`` as the name and its keyword arguments: numbers, true, false, words, or a tuple ``a/b``."""
    name, _, rest = text.partition(":")
    arguments: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or key in arguments:
            raise InputError(argument, text, "cannot be read", "write it as NAME:key=value,key=value, each key once")
        arguments[key] = _value(value)
    return name.strip(), arguments


def _value(text: str) -> Any:
    parts = text.split("/")
    if len(parts) > 1 and all(parts):
        return tuple(map(_value, parts))
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def call(
    argument: str, name: str, arguments: Mapping[str, Any], known: Mapping[str, Callable[..., Any]], *first: Any
) -> Any:
    """``known[name](*first, **arguments)``, or an `InputError` that says what it takes."""
    function = known[one_of(argument, name, known)]
    try:
        signature(function).bind_partial(*first, **arguments)
        return function(*first, **arguments)
    except TypeError as error:
        accepted = ", ".join([*signature(function).parameters][len(first) :]) or "nothing"
        raise InputError(argument, name, f"cannot be built ({error})", f"it takes {accepted}") from error


def seeds_text(seeds: Sequence[int]) -> str:
    """Rising seeds as the shortest text: 0-3,8 for 0, 1, 2, 3, 8."""
    known = set(seeds)
    first, last = ([seed for seed in seeds if seed + side not in known] for side in (-1, 1))
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def parse_seeds(words: str, argument: str = "seeds", most: int = MOST_SEEDS) -> list[int]:
    """0-3,8 as [0, 1, 2, 3, 8]: rising, without repeats."""
    return sorted({*parse_numbers(words, argument, "0-49999 or 0,3,10-20", most)})


def parse_numbers(words: str, argument: str, such_as: str, most: int) -> list[int]:
    """Numbers and ranges, in the order given."""
    numbers: list[int] = []
    for part in words.split(","):
        ends = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if last < first:
            raise InputError(argument, words, "cannot be read", f"give numbers and ranges such as {such_as}")
        if len(numbers) + last - first >= most:
            raise InputError(argument, words, f"has more than {most:,} numbers", "give fewer at a time")
        numbers += range(first, last + 1)
    return numbers
