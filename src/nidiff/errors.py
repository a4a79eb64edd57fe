"""The exceptions of nidiff: input it cannot use, and a request to stop."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")
LONGEST = 80  # letters of a value in a message
TENSOR = "give a tensor, such as torch.from_numpy(array)"  # the remedy where something else was given


class InputError(ValueError):
    """Bad input: the message is one sentence that names the argument and the remedy.

    The command line prints it without a traceback and exits with 2. Any other exception is a bug of ours.
    """


class FileError(InputError, OSError):
    """A file is missing or damaged: bad input, and the OSError that diffusers' users know."""


class Interrupted(Exception):
    """A long command was asked to stop and has saved its work; the message says how to continue."""


def shown(value: object) -> str:
    """``value`` as a message shows it: on one line, and cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…{text[-1] if isinstance(value, str) else ''}"


def expect(argument: str, value: object, kind: type, remedy: str | None = None) -> None:
    """Refuse a value that is not of ``kind``."""
    if not isinstance(value, kind):
        raise InputError(f"{argument} is a {type(value).__name__}: {remedy or f'give a nidiff.{kind.__name__}'}.")


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def one_of(name: str, value: object, known: Iterable[str]) -> str:
    """``value`` if it is one of the ``known`` names, else an `InputError` that lists them, the nearest first."""
    names = {*known}
    if not isinstance(value, str) or value not in names:
        raise InputError(f"{name}={shown(value)} is unknown: {known_names(value, names)}.")
    return str(value)


def known_names(value: object, known: Iterable[str]) -> str:
    """The end of a sentence that refuses a name: the nearest of the ``known`` ones, if any is near, and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}? Known are" if near else "use one of"
    return f"{hint} {', '.join(map(repr, names))}"


def choose(name: str, value: "str | T", registry: "Mapping[str, T]") -> T:
    """The entry of ``registry`` called ``value``; anything that is not a name is the entry itself."""
    return registry[one_of(name, value, registry)] if isinstance(value, str) else value
