"""The call that made an object, so that its configuration is that call; and of what kind its arguments must be."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
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


def remembered(function: Callable[P, T], canonical: Mapping[str, Callable[[Any], Any]] | None = None) -> Callable[P, T]:
    """Let what ``function`` returns remember the call in ``origin``: its name and all its arguments.

    Arguments annotated as numbers, or as true or false, are checked to be that. Those named in ``canonical`` pass
    through its functions, and tensors are copied.
    """

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = call_arguments(function, args, kwargs)
        check_kinds(function, arguments)
        for name, value in arguments.items():
            if canonical and name in canonical:
                arguments[name] = canonical[name](value)
            elif hasattr(value, "detach"):
                arguments[name] = value.detach().clone()
        made: Any = function(**arguments)  # type: ignore[call-arg]
        made.origin = Origin(function.__name__, arguments)
        return made

    return build


def call_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included; numbers of numpy and torch as Python's own."""
    known = signature(function).parameters
    try:
        call = signature(function).bind(*args, **kwargs)
    except TypeError as error:
        problem = f"{function.__name__} cannot be called so ({error})"
        raise InputError(None, None, problem, f"it takes {', '.join(known)}") from error
    call.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        arguments |= value if known[name].kind is Parameter.VAR_KEYWORD else {name: value}
    return {name: plain(value) for name, value in arguments.items()}


def check_kinds(function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Refuse an argument that is not of the kind its annotation says: a number, a whole number, or true or false."""
    parameters = signature(function).parameters
    for name, value in arguments.items():
        kind = parameters[name].annotation if name in parameters else None
        if kind in KINDS and not (fits(value, kind) and (kind is bool or is_number(value))):
            raise InputError(name, value, "cannot be used", f"give {KINDS[kind]}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float64 can hold; true and false are not numbers."""
    try:
        return fits(value, float) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def check_number(argument: str, value: Any) -> float:
    """``value``, also of numpy or torch, as a finite float."""
    value = plain(value)
    if not is_number(value):
        raise InputError(argument, value, "is not a finite number", "give one")
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
