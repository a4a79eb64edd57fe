"""The call that made an object, so that its configuration is that call; and of what kind its arguments must be."""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

from nidiff.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
KINDS = {float: "a finite number", int: "a whole number", bool: "true or false"}


class Origin(NamedTuple):
    """The call that made an object, which is ``scale`` times its result."""

    name: str
    arguments: Mapping[str, Any]
    scale: float = 1.0


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Let what ``function`` returns remember the call in ``origin``: its name and all its arguments.

    Arguments annotated as numbers, or as true or false, are checked to be that; sequences of numbers become tuples, and
    tensors are copied.
    """
    call = signature(function)

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = call.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {name: plain(value) for name, value in bound.arguments.items()}
        check_kinds(function, arguments)
        for name, value in arguments.items():
            if call.parameters[name].annotation in (Sequence[int], Sequence[float]) and isinstance(value, Iterable):
                arguments[name] = tuple(map(plain, value))
            elif hasattr(value, "detach"):
                arguments[name] = value.detach().clone()
        made: Any = function(**arguments)  # type: ignore[call-arg]
        made.origin = Origin(function.__name__, arguments)
        return made

    return build


def check_kinds(function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Refuse an argument that is not of the kind its annotation says: a number, a whole number, or true or false."""
    parameters = signature(function).parameters
    for name, value in arguments.items():
        kind = parameters[name].annotation if name in parameters else None
        if kind in KINDS and not (fits(value, kind) and (kind is bool or is_number(value))):
            raise InputError(name, value, "cannot be used", f"give {KINDS[kind]}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float64 can hold; true and false are not numbers."""
    return fits(value, float) and abs(value) <= sys.float_info.max


def check_number(
    argument: str, value: Any, least: float = -math.inf, most: float = math.inf, above: float = -math.inf
) -> float:
    """``value``, also of numpy or torch, as a finite float from ``least`` to ``most`` and above ``above``."""
    value = plain(value)
    if not is_number(value) or not least <= value <= most or value <= above:
        limits = {f"above {above:g}": above, f"at least {least:g}": least, f"at most {most:g}": most}
        wanted = " and ".join(words for words, limit in limits.items() if math.isfinite(limit))
        raise InputError(argument, value, "is out of range", f"give a finite number {wanted}".rstrip())
    return float(value)


def check_whole(argument: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """``value``, also of numpy or torch, as an integer from ``least`` to ``most``."""
    value = plain(value)
    if not fits(value, int) or value < least or (most is not None and value > most):
        limits = f", {least} or more" if most is None else f" from {least} to {most}"
        raise InputError(argument, value, "is out of range", f"give a whole number{limits}")
    return int(value)


def plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON or of text can be an argument of the annotated type."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(kind))
    if get_origin(kind) is Callable:
        return callable(value)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(fits(entry, get_args(kind)[0]) for entry in value)
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
    kind = str if kind is Path else kind
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)  # list[float], …: not looked into
