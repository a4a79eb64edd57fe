"""A grid of settings: the flags of ``nidiff train`` with lists of values, and the words of each run."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

from nidiff.commands.train import Train
from nidiff.commands.usage import flags_of
from nidiff.errors import InputError, shown
from nidiff.notation import parse_seeds
from nidiff.sealed import digest

MOST_RUNS = 1000
LONGEST = 120  # bytes of the name of a run
TABLE = "table"  # where the table goes, beside the runs
WHOLE = ("--data", "--held-out", "--missing", "--layout", "--sample-axis")  # text in which a comma is no list
TIMES = " x "  # between the factors of a covariance
Value = tuple[str, ...]  # the words that follow a flag


class GridRun(NamedTuple):
    """One run: a name that says what varies, and the words of its ``nidiff train``, without --out."""

    name: str
    words: tuple[str, ...]


def split_flags(words: Sequence[str], known: Mapping[str, Any], prog: str) -> dict[str, list[str]]:
    """The words that follow each flag; --no-flip is kept as that. A flag that is given twice is refused."""
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    seen: set[str] = set()
    for word in words:
        if not word.startswith("--"):
            if current is None:
                raise InputError(None, None, f"{shown(word)} is one argument too many", f"see {prog} --help")
            current.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        bare = without_no(flag, known)
        if bare not in known:
            raise InputError(None, None, f"{shown(flag)} is not a flag of {prog}", f"see {prog} --help")
        if bare in seen:
            raise InputError(bare, None, "is given twice", "give it once, with all of its values after it")
        seen.add(bare)
        current = flags[flag] = [value] if equals else []
    for flag, values in flags.items():
        if known[without_no(flag, known)] is bool and values:
            raise InputError(flag, None, "takes no value", f"leave {shown(values[0])} out")
    return flags


def without_no(flag: str, known: Mapping[str, Any]) -> str:
    """--flip for --no-flip, which is the same flag."""
    return f"--{flag[5:]}" if flag not in known and flag.startswith("--no-") else flag


def expand(grid: Mapping[str, Sequence[str]]) -> list[GridRun]:
    """A run for each combination of the values, the last flag fastest, and the seed faster than all."""
    flags = sorted(grid, key=lambda flag: flag == "--seed")
    values = {flag: values_of(flag, grid[flag]) for flag in flags}
    _limit(values.values())
    for flag, listed in values.items():
        if twice := [value for value, count in Counter(listed).items() if count > 1]:
            raise InputError(flag, None, f"lists {'/'.join(twice[0])} twice", "leave one out")
    preset = next((grid[flag][0] for flag in ("--config", "--preset") if grid.get(flag)), "digits")
    base = Path(os.path.abspath(preset))  # a dot has no name
    origin = base.parent.name if base.name == "experiment.json" else base.stem
    runs = []
    for chosen in product(*values.values()):
        picked = dict(zip(flags, chosen, strict=True))
        varied = [flag for flag in flags if len(values[flag]) > 1 and flag != "--seed"]
        parts = [f"{flag[2:]}={'_'.join(picked[flag])}" for flag in varied] or [origin]
        parts += [f"seed={picked['--seed'][0]}"] if "--seed" in picked else []
        words = [word for flag, value in picked.items() for word in (flag, *value)]
        default = [] if {"--preset", "--config"} & picked.keys() else ["--preset", "digits"]
        runs.append(GridRun(",".join(map(_file_name, parts)), (*default, *words)))
    names = Counter(run.name.lower() for run in runs)  # some file systems do not tell a from A
    return [
        run if names[run.name.lower()] == 1 and _is_usable(run.name) else run._replace(name=_short(run)) for run in runs
    ]


def values_of(flag: str, words: Sequence[str]) -> list[Value]:
    """The values of a flag of ``nidiff train``, each as the words that follow the flag there."""
    known = flags_of(Train)
    kind = known[without_no(flag, known)]
    if kind is bool:
        return [()]
    several = get_origin(kind) is tuple
    if several and not words:
        return [()]
    if not words or "" in words:
        raise InputError(flag, None, "has an empty value" if words else "has no value", "give one, or leave it out")
    if several and len(words) > 1 and not any("/" in word for word in words):
        problem = f"{' '.join(words)} could be one value or {len(words)}"
        raise InputError(flag, None, problem, f"write {'/'.join(words)} or {','.join(words)}")
    if flag == "--seed":
        return [(str(seed),) for word in words for part in word.split(",") for seed in parse_seeds(part, "seed")]
    if flag in WHOLE or Path in (get_args(kind) if isinstance(kind, UnionType) else (kind,)):
        return [(word,) for word in words]
    texts = [text for word in words for text in _texts(flag, word)]
    return [tuple(filter(None, text.split("/"))) if several else (text,) for text in texts]


def _texts(flag: str, word: str) -> list[str]:
    """The values that one word lists: of a product of covariances, those of each factor."""
    factors = [_calls(flag, word, factor) for factor in word.split(TIMES)]
    _limit(factors)
    return [TIMES.join(chosen) for chosen in product(*factors)]


def _calls(flag: str, word: str, text: str) -> list[str]:
    """``gff:gamma=0,1`` as gff:gamma=0 and gff:gamma=1; a comma before a bare value continues the list of its key."""
    head, colon, rest = text.partition(":")
    *others, name = head.split(",")
    if not colon:
        calls = [*others, name]
    else:
        keys: list[tuple[str, list[str]]] = []
        for part in rest.split(","):
            key, equals, value = part.partition("=")
            if equals:
                keys.append((key, [value]))
            elif keys:
                keys[-1][1].append(part)
            else:
                problem = f"{word} is not NAME:key=value, or NAME:key=value,value for a list"
                raise InputError(flag, None, problem, "write it so")
        lists = [[f"{key}={value}" for value in values] for key, values in keys]
        _limit(lists)
        calls = [*others, *(f"{name}:{','.join(chosen)}" for chosen in product(*lists))]
    if not all(call.strip() and not call.endswith("=") and "=," not in call for call in calls):
        raise InputError(flag, None, f"{word} has an empty value", "leave a comma out, or give what is missing")
    return calls


def _limit(lists: Iterable[Sequence[Any]]) -> None:
    """Refuse a product of lists that is too large, before it is made."""
    if (count := math.prod(map(len, lists))) > MOST_RUNS:
        raise InputError(
            None, None, f"the grid has {count:,} runs, and the limit is {MOST_RUNS:,}", "give fewer values"
        )


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]", "-", text)


def _is_usable(name: str) -> bool:
    """Whether a name fits, and is not that of the folder beside the runs."""
    return len(os.fsencode(name)) <= LONGEST and name.lower() != TABLE


def _short(run: GridRun) -> str:
    """A name of its own for a run whose name is too long, or that of another run."""
    start = os.fsencode(run.name)[: LONGEST - 9].decode(errors="ignore")
    return f"{start}-{digest(list(run.words))[:8]}"
