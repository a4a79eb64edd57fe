"""The call that made an object, so that its configuration is that call."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Let what ``function`` returns remember the call in ``recipe``: its name and all its arguments."""

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> T:
        made: Any = function(*args, **kwargs)
        made.recipe = (function.__name__, arguments_of(function, *args, **kwargs))
        return made

    return build


def arguments_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    call = signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return {name: _plain(value) for name, value in call.arguments.items()}


def _plain(value: Any) -> Any:
    """Numbers and columns of numpy and torch as Python's."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, range) else value
