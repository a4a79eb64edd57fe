"""A grid of settings: the flags of ``nidiff train`` with lists of values, and the words of each run."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import UnionType
from typing import NamedTuple, get_args, get_origin

from nidiff.commands.train import Train, run_name
from nidiff.commands.usage import flags_of
from nidiff.errors import InputError
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


def expand(grid: Mapping[str, Sequence[str]]) -> list[GridRun]:
    """A run for each combination of the values, the last flag fastest, and the seed faster than all."""
    flags = sorted(grid, key=lambda flag: flag == "--seed")
    values = {flag: values_of(flag, grid[flag]) for flag in flags}
    if (count := math.prod(map(len, values.values()))) > MOST_RUNS:
        problem = f"the grid has {count:,} runs, and the limit is {MOST_RUNS:,}"
        raise InputError(None, None, problem, "give fewer values")
    varied = [flag for flag in flags if len(values[flag]) > 1 and flag != "--seed"]
    runs = []
    for chosen in product(*values.values()):
        picked = dict(zip(flags, chosen, strict=True))
        first = {flag: value[0] for flag, value in picked.items() if value}
        parts = [f"{flag[2:]}={'_'.join(picked[flag])}" for flag in varied]
        parts = parts or [run_name(first.get("--preset", "digits"), first.get("--config"))]
        parts += [f"seed={first['--seed']}"] if "--seed" in first else []
        name = re.sub(r"[^\w.=+,-]", "-", ",".join(parts))
        runs.append(GridRun(name, tuple(word for flag, value in picked.items() for word in (flag, *value))))
    names = Counter(run.name.lower() for run in runs)  # some file systems do not tell a from A
    names[TABLE] += 1
    return [run if names[run.name.lower()] == 1 and _fits(run.name) else _renamed(run) for run in runs]


def values_of(flag: str, words: Sequence[str]) -> list[Value]:
    """The values of a flag of ``nidiff train``, each as the words that follow the flag there."""
    kind = flags_of(Train).get(flag, bool)  # --no-flip
    several = get_origin(kind) is tuple
    if kind is bool or not words:
        return [tuple(words)]
    if several and len(words) > 1 and not any("/" in word for word in words):
        problem = f"{' '.join(words)} could be one value or {len(words)}"
        raise InputError(flag, None, problem, f"write {'/'.join(words)} or {','.join(words)}")
    if flag == "--seed":
        return [(str(seed),) for word in words for seed in parse_seeds(word, "seed", MOST_RUNS)]
    if flag in WHOLE or Path in (get_args(kind) if isinstance(kind, UnionType) else (kind,)):
        return [(word,) for word in words]
    factors = [[_listed(factor) for factor in word.split(TIMES)] for word in words]
    texts = [TIMES.join(chosen) for lists in factors for chosen in product(*lists)]
    return [tuple(filter(None, text.split("/"))) if several else (text,) for text in texts]


def _listed(text: str) -> list[str]:
    """``white,gff:gamma=0,1`` as white, gff:gamma=0 and gff:gamma=1: a comma before a bare value continues the list of
    its key."""
    head, colon, rest = text.partition(":")
    *others, name = head.split(",")
    if not colon:
        return [*others, name]
    keys = [part.partition("=") for part in re.split(r",(?=\w+=)", rest)]
    lists = [[f"{key}={value}" for value in values.split(",")] for key, _, values in keys]
    return [*others, *(f"{name}:{','.join(chosen)}" for chosen in product(*lists))]


def _fits(name: str) -> bool:
    return len(os.fsencode(name)) <= LONGEST


def _renamed(run: GridRun) -> GridRun:
    """The run with a name of its own, where its name is too long, or that of another run or of the table."""
    start = os.fsencode(run.name)[: LONGEST - 9].decode(errors="ignore")
    return run._replace(name=f"{start}-{digest(list(run.words))[:8]}")
