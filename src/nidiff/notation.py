"""How Σ, schedules and samplers are written in one line of text: ``NAME:key=value,…``."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_origin

from nidiff.errors import InputError, one_of


def fits(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON can be a field of the annotated type."""
    if get_origin(kind) is Callable:
        return callable(value)
    if kind == tuple[int, ...]:
        return isinstance(value, list) and all(fits(entry, int) for entry in value)
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
    if kind in (str, bool):
        return isinstance(value, kind)
    return value is None or any(
        fits(value, str if part is Path else part) for part in get_args(kind) if part is not type(None)
    )


def parse_call(argument: str, text: str) -> tuple[str, dict[str, Any]]:
    """``NAME:key=value,…`` as the name and its keyword arguments; values are numbers, true, false or words."""
    name, _, rest = text.partition(":")
    arguments: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise InputError(f"{argument}={text!r}: write it as NAME:key=value,key=value.")
        if key in arguments:
            raise InputError(f"{argument}={text!r} gives {key!r} twice: leave one out.")
        arguments[key] = _literal(value)
    return name.strip(), arguments


def _literal(text: str) -> int | float | bool | str:
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def call(
    argument: str, name: str, arguments: Mapping[str, Any], known: Mapping[str, Callable[..., Any]], *first: Any
) -> Any:
    """``known[name](*first, **arguments)``, or an `InputError` that says what it takes."""
    function = known[one_of(argument, name, known)]
    parameters = [*signature(function).parameters.values()][len(first) :]
    accepted = [parameter.name for parameter in parameters]
    for key in arguments:
        if key not in accepted and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise InputError(f"{argument}={name}:… has no {key!r}: it takes {', '.join(accepted) or 'nothing'}.")
    try:
        return function(*first, **arguments)
    except TypeError as error:
        raise InputError(f"{argument}={name!r} cannot be built ({error}): it takes {', '.join(accepted)}.") from error
