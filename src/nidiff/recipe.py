"""The call that made an object, so that its configuration is that call."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from nidiff.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Let what ``function`` returns remember the call in ``recipe``: its name and all its arguments.

    Arguments annotated as numbers, or as true or false, are checked to be that.
    """

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = call_arguments(function, args, kwargs)
        check_kinds(function, arguments)
        made: Any = function(**arguments)  # type: ignore[call-arg]
        made.recipe = (function.__name__, arguments)
        return made

    return build


def call_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included; numbers of numpy and torch as Python's own."""
    known = signature(function).parameters
    try:
        call = signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{function.__name__}: {error}; it takes {', '.join(known)}.") from error
    call.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if known[name].kind is Parameter.VAR_KEYWORD:
            arguments |= value
        elif getattr(value, "ndim", None) == 0:
            arguments[name] = value.item()
        else:
            arguments[name] = value
    return arguments


def check_kinds(function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Refuse an argument that is not of the kind its annotation says: a number, a whole number, or true or false."""
    parameters = signature(function).parameters
    for name, value in arguments.items():
        kind = parameters[name].annotation if name in parameters else None
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if kind is float and not number:
            raise InputError(f"{name}={value!r} must be a finite number.")
        if kind is int and not (number and isinstance(value, int)):
            raise InputError(f"{name}={value!r} must be a whole number.")
        if kind is bool and not isinstance(value, bool):
            raise InputError(f"{name}={value!r} must be true or false.")
