"""The exceptions of nidiff: input it cannot use, and a request to stop."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """Bad input, in four parts: the ``argument``, its ``value``, the ``problem`` and the ``remedy``.

    ``str(error)`` is one sentence, "argument=value problem: remedy."; what is None is left out. Other arguments that
    ``problem`` or ``remedy`` name are written in backticks, so that the command line can print their flags. It exits
    with 2 and prints no traceback. Any other exception is a bug of ours.
    """

    def __init__(self, argument: str | None, value: object, problem: str, remedy: str | None = None) -> None:
        self.argument, self.value, self.problem, self.remedy = argument, value, problem, remedy
        super().__init__(self.rendered())

    def rendered(self, spelling: Callable[[str], str] = lambda name: name) -> str:
        """The sentence, with every name of an argument spelled by ``spelling``, such as "--num-steps"."""
        subject = "" if self.argument is None else spelling(self.argument)
        if subject and self.value is not None:
            subject += f"={shown(self.value)}"
        sentence = " ".join(part for part in (subject, self.problem) if part)
        sentence += f": {self.remedy}." if self.remedy else "."
        return printable(re.sub(r"`(\w+)`", lambda name: spelling(name[1]), sentence))

    def __reduce__(self) -> tuple[type["InputError"], tuple[object, ...]]:
        return type(self), (self.argument, self.value, self.problem, self.remedy)


class FileError(InputError, OSError):
    """A file is missing or damaged: bad input, and the OSError that diffusers' users know."""


class Interrupted(Exception):
    """A long command was asked to stop and has saved its work; the message says how to continue."""


def shown(value: object) -> str:
    """``value`` as a message shows it: on one line, and cut if it is long and no path."""
    if isinstance(value, PurePath):
        return repr(str(value))
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:100]}…{text[-100:]}"  # of a path, the end says most


def printable(text: str) -> str:
    """``text`` without what could drive a terminal or turn its letters round: names and units come from files."""
    spaced = (" " if letter.isspace() else letter for letter in text)  # some units have spaces of another width
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in spaced)


TENSOR = "give a tensor, such as torch.from_numpy(array)"  # the remedy where something else was given


def expect(argument: str, value: object, kind: type, remedy: str | None = None) -> None:
    """Refuse a value that is not of ``kind``."""
    if not isinstance(value, kind):
        raise InputError(argument, None, f"is a {type(value).__name__}", remedy or f"give a nidiff.{kind.__name__}")


@contextmanager
def renamed(before: str, argument: str) -> Iterator[None]:
    """Let bad input of the argument ``before`` be that of ``argument``, by which the user has given it."""
    try:
        yield
    except InputError as error:
        if error.argument != before:
            raise
        raise type(error)(argument, error.value, error.problem, error.remedy) from error


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def one_of(argument: str, value: object, known: Iterable[str]) -> str:
    """``value`` if it is one of the ``known`` names, else an `InputError` that lists them, the nearest first."""
    names = {*known}
    if not isinstance(value, str) or value not in names:
        raise InputError(argument, value if value is not None else "None", "is unknown", known_names(value, names))
    return str(value)


def known_names(value: object, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest of the ``known`` ones, if any is near, and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"{f'did you mean {near[0]!r}? Choose' if near else 'choose'} from {', '.join(map(repr, names))}"


def choose(argument: str, value: "str | T", registry: "Mapping[str, T]") -> T:
    """The entry of ``registry`` called ``value``; anything that is not a name is the entry itself."""
    return registry[one_of(argument, value, registry)] if isinstance(value, str) else value
