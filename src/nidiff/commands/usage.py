"""Parse a command line. A mistake is refused in one sentence, before anything is done."""

import contextlib
import difflib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from nidiff.errors import InputError, shown
from nidiff.files import as_path

C = TypeVar("C")
NAMES = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
CONFIG = (tyro.conf.FlagCreatePairsOff,)
_cli: Any = tyro.cli  # its overloads cannot say what keywords in a dictionary are


def parse(command: type[C], words: Sequence[str], *, prog: str, **default: C) -> C:
    """The command that ``words`` ask for. ``--help`` prints and ends in `SystemExit`, as tyro does it."""
    check_words(command, words, prog=prog)
    complaints: list[str] = []
    output, options = io.StringIO(), {"prog": prog, "args": words, "config": CONFIG, **default}
    try:
        with contextlib.redirect_stderr(output):
            made, unknown = _cli(command, registry=reading(complaints), return_unknown_args=True, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise InputError(None, None, _sentence(output.getvalue(), complaints), f"see {prog} --help") from None
    if unknown:
        raise _unknown(unknown[0], flags_of(command), prog)
    return made


def flags_of(command: type) -> dict[str, Any]:
    """Each flag of a command and the type of its value; with those of the commands whose flags it takes ``also``."""
    others = (flags_of(other) for other in getattr(command, "also", ()))
    return {flag: kind for flags in (*others, own_flags(command)) for flag, kind in flags.items()}


def own_flags(command: type) -> dict[str, Any]:
    """Each flag of a command and the type of its value, those of the dataclasses inside it too."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if is_dataclass(kind):
            found |= own_flags(cast(type, kind))
        elif not {tyro.conf.Positional, tyro.conf.Fixed} & {*extras}:
            name = next((extra.name for extra in extras if getattr(extra, "name", None)), name)
            found[f"--{name.replace('_', '-')}"] = kind
    return found


def check_words(command: type, words: Sequence[str], *, prog: str) -> None:
    """Refuse a flag that the command does not have, and ``--flag=value`` where it takes no value or there is none."""
    flags = flags_of(command)
    known = {"--help", *flags, *(f"--no-{flag[2:]}" for flag, kind in flags.items() if kind is bool)}
    for word in words[: words.index("--") if "--" in words else None]:
        flag, equals, value = word.partition("=")
        kind = flags.get(flag.replace("_", "-"))
        if equals and kind is bool:
            raise InputError(flag, None, "takes no value", f"leave {shown('=' + value)} out; see {prog} --help")
        if equals and kind is not None and not value:
            raise InputError(flag, None, "has no value", f"give one, or leave it out; see {prog} --help")
        if flag.startswith("--") and flag.replace("_", "-") not in known:
            raise _unknown(flag, flags, prog)


def reading(complaints: list[str]) -> ConstructorRegistry:
    """How a word becomes a number, a name or a path. What is wrong with it goes to ``complaints``, in plain words."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kinds = get_args(info.type) if isinstance(info.type, UnionType) else (info.type,)
        whole = next((kind for kind in kinds if kind is not NoneType), None)
        several, optional = get_origin(whole) is tuple, NoneType in kinds
        kind = get_args(whole)[0] if several else whole
        if kind not in NAMES:
            return None

        def from_words(words: list[str]) -> Any:
            if optional and words == ["None"]:
                return None
            try:
                values = tuple(_value(kind, word) for word in words)
            except ValueError as error:
                complaints.append(str(error))
                raise
            return values if several else values[0]

        def to_words(value: Any) -> list[str]:
            return ["none"] if value is None else [str(part) for part in (value if several else [value])]

        return PrimitiveConstructorSpec(
            nargs="*" if several else 1,
            metavar=f"{NAMES[kind]} ..." if several else NAMES[kind],
            instance_from_str=from_words,
            is_instance=lambda value: True,
            str_from_instance=to_words,
        )

    return registry


def _value(kind: Any, word: str) -> Any:
    """A word as ``kind``; the error continues the sentence that begins with the name of the flag."""
    if not word:
        raise ValueError(" has no value, so give one or leave it out")
    if kind is Path:
        return as_path("", word)
    if kind is str:
        return word
    try:
        value = kind(word)
        if (
            math.isnan(value)
            or (kind is int and abs(value) >= 2**63)
            or (math.isinf(value) and "inf" not in word.lower())
        ):
            raise ValueError
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(f"={shown(word)} is not a {whole}number, or it is too large") from None
    return value


def _sentence(output: str, complaints: list[str]) -> str:
    """What tyro prints in a box of many lines, in one sentence."""
    text = " ".join(re.sub("[│╭╮╰╯─|+]+|--{2,}", " ", output).split())
    if complaints and (flag := re.search(r"Error parsing (.+?):", text)):
        return f"{flag[1].strip('[]')}{complaints[-1].rstrip('.')}"
    if missing := re.search(r"Missing value for argument [^\w-]*([\w-]+)", text):
        return f"{missing[1]} has no value"
    if missing := re.search(r"Missing from [\w ]+: (\S+)", text):
        return f"{missing[1]} is missing"
    return text.partition(" For full helptext")[0]


def _unknown(word: str, flags: dict[str, Any], prog: str) -> InputError:
    flag, see = word.partition("=")[0], f"see {prog} --help"
    if not flag.startswith("-"):
        return InputError(None, None, f"{shown(word)} is one argument too many", see)
    near = difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)
    remedy = f"did you mean {near[0]}? S{see[1:]}" if near else see
    return InputError(None, None, f"{shown(flag)} is not a flag of {prog}", remedy)
