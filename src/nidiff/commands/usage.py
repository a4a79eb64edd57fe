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
REGISTRY = ConstructorRegistry()
_cli: Any = tyro.cli  # its overloads cannot say what keywords in a dictionary are


def parse(command: type[C], words: Sequence[str], *, prog: str, **default: C) -> C:
    """The command that ``words`` ask for. ``--help`` prints and ends in `SystemExit`, as tyro does it."""
    for flag, values in split_flags(command, words, prog)[1:]:
        _check_values(flag, flags_of(command).get(flag), values)
    output, options = io.StringIO(), {"prog": prog, "args": words, "config": CONFIG, **default}
    try:
        with contextlib.redirect_stderr(output):
            made, unknown = _cli(command, registry=REGISTRY, return_unknown_args=True, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise InputError(None, None, _sentence(output.getvalue()), f"see {prog} --help") from None
    if unknown:
        raise _unknown(unknown[0], flags_of(command), prog)
    return made


def flags_of(command: type) -> dict[str, Any]:
    """Each flag of a command and the type of its value; with those of the commands whose flags it takes ``also``."""
    others = (flags_of(other) for other in getattr(command, "also", ()))
    return {flag: kind for flags in (*others, own_flags(command)) for flag, kind in flags.items()}


def own_flags(command: type) -> dict[str, Any]:
    """Each flag of a command and the type of its value, those of the dataclasses inside it too."""
    flags: dict[str, Any] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if is_dataclass(kind):
            flags |= own_flags(cast(type, kind))
        elif not {tyro.conf.Positional, tyro.conf.Fixed} & {*extras}:
            name = next((extra.name for extra in extras if getattr(extra, "name", None)), name)
            flags[f"--{name.replace('_', '-')}"] = kind
    return flags


def split_flags(command: type, words: Sequence[str], prog: str) -> list[tuple[str, list[str]]]:
    """Each flag that is given, with the words that follow it; first, for "", the words that follow none."""
    flags = flags_of(command)
    known = {"--help", *flags, *(f"--no-{flag[2:]}" for flag, kind in flags.items() if kind is bool)}
    end = words.index("--") if "--" in words else len(words)
    loose = current = [*words[end + 1 :]]
    given = [("", loose)]
    for word in words[:end]:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("--"):
            current.append(word)
        elif flag not in known:
            raise _unknown(word, flags, prog)
        elif equals and flags.get(flag) in (bool, None):
            raise InputError(flag, None, "takes no value", f"leave {shown('=' + value)} out; see {prog} --help")
        else:
            given.append((flag, [value] if equals else []))
            current = loose if equals else given[-1][1]
    return given


def _check_values(flag: str, kind: Any, words: Sequence[str]) -> None:
    """Refuse that a flag has no value, or one that is not of its kind."""
    single, several, optional = _parts(kind)
    if single not in NAMES:
        return
    words = words if several else words[:1]  # what follows is a positional argument
    if "" in words or not (words or several):
        raise InputError(flag, None, "has no value", "give one, or leave it out")
    for word in words:
        if single is Path:
            as_path(flag, word)
        elif single is not str and not _is_number(single, word) and not (optional and word == "None"):
            whole = "whole " if single is int else ""
            raise InputError(flag, word, f"is not a {whole}number, or it is too large", "give one")


def _is_number(kind: Any, word: str) -> bool:
    try:
        value = kind(word)
    except ValueError:
        return False
    if kind is int:
        return bool(abs(value) < 2**63)
    return not math.isnan(value) and (math.isfinite(value) or "inf" in word.lower())


def _parts(kind: Any) -> tuple[Any, bool, bool]:
    """The type of one value of a flag, whether it takes several, and whether it may be None."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    first = next((kind for kind in kinds if kind is not NoneType), None)
    several = get_origin(first) is tuple
    return get_args(first)[0] if several else first, several, NoneType in kinds


@REGISTRY.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How words become numbers, names or paths, and how ``--help`` shows them: INT, not {None}|INT."""
    single, several, optional = _parts(info.type)
    if single not in NAMES:
        return None

    def from_words(words: list[str]) -> Any:
        if optional and words == ["None"]:
            return None
        return tuple(map(single, words)) if several else single(words[0])

    def to_words(value: Any) -> list[str]:
        return ["none"] if value is None else [str(part) for part in (value if several else [value])]

    return PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=f"{NAMES[single]} ..." if several else NAMES[single],
        instance_from_str=from_words,
        is_instance=lambda value: True,
        str_from_instance=to_words,
    )


def _sentence(output: str) -> str:
    """What tyro prints in a box of many lines, in one sentence."""
    text = " ".join(re.sub("[│╭╮╰╯─|+]+|--{2,}", " ", output).split())
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
