"""Results: the quality of a run's samples with one sampler and number of steps, as JSON, and which can be compared.

A result has run, sampler, steps, its other settings, metrics (each a value and its error) and provenance.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from nidiff.errors import InputError
from nidiff.evaluation.provenance import model_sha256
from nidiff.files import locked, replace_text
from nidiff.model.config import model_folder

Result = Mapping[str, Any]
HIGHER = ("precision", "recall")  # is better; all other metrics are distances or errors
# What must be the same if two numbers are to be compared, and how a note says it.
COMPARED = {
    "features": "Features {}",
    "features_sha256": " (sha256 {:.8})",
    "preprocessing": ", preprocessing {}",
    "num_real": "; {} real images",
    "real": " of {}",
    "real_sha256": " (sha256 {:.8})",
    "num_generated": "; {} generated",
    "seeds": " (seeds {})",
    "quantisation": ", rounded to {}",
    "k": "; k = {}",
}


class Line(NamedTuple):
    """The results of one run and sampler that can be compared, from many steps to few."""

    run: str
    sampler: str
    mark: str
    """Which of the `notes` says where they come from; empty if there is one."""
    results: list[Result]


def read_results(path: Path) -> list[Result]:
    """The results in a JSON file such as RUN/metrics.json."""
    try:
        results = json.loads(path.read_text())
        if not isinstance(results, list):
            raise TypeError("it is not a list")
        for result in results:
            pairs = [pair[key] for pair in result["metrics"].values() for key in ("value", "error")]
            strings = [result["run"], result["sampler"], *result["metrics"]]
            if not all(isinstance(entry, str) for entry in strings) or not isinstance(result["steps"], int):
                raise TypeError("a name or number of steps is of another type")
            if not all(entry is None or isinstance(entry, int | float) for entry in pairs):
                raise TypeError("a metric is not a number")
            dict(result["provenance"]), dict(result.get("options") or {})
    except FileNotFoundError as error:
        raise InputError(f"there is no {path.name}: measure the run with nidiff evaluate.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{str(path)!r} is not a list of results ({reason}): delete it to measure anew.") from error
    return results


def known_results(run: Path) -> list[Result]:
    """What is in RUN/metrics.json of the model that is there now; the run may have been trained further since."""
    file = run / "metrics.json"
    results = read_results(file) if file.exists() else []
    folder = model_folder(run)
    if not results or not (folder / "unet").is_dir():
        return results
    today = model_sha256(folder)
    return [result for result in results if result["provenance"].get("model_sha256", today) == today]


def remember(run: Path, result: Result) -> None:
    """Add a result to RUN/metrics.json."""
    file = run / "metrics.json"
    try:
        with locked(run):
            before = read_results(file) if file.exists() else []
            replace_text(file, json.dumps([*before, result], indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{str(file)!r} cannot be written ({error.strerror}): make room and give it again.") from error


def metric_names(results: Sequence[Result]) -> list[str]:
    """The metrics of all results, in the order in which they first occur."""
    return union(result["metrics"] for result in results)


def group_lines(results: Sequence[Result]) -> list[Line]:
    """Results by run, sampler and source, runs and samplers in the order in which they first occur."""
    sources = find_sources(results)
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        mark = f" [{sources.index(_source(result)) + 1}]" if len(sources) > 1 else ""
        key = (_one_line(result["run"]), _sampler(result), mark)
        groups.setdefault(key, []).append(result)
    runs = list(dict.fromkeys(key[0] for key in groups))
    latest = {key: {result["steps"]: result for result in found}.values() for key, found in groups.items()}
    return [
        Line(*key, sorted(latest[key], key=lambda result: -result["steps"]))
        for key in sorted(groups, key=lambda key: runs.index(key[0]))
    ]


def _sampler(result: Result) -> str:
    """The sampler and those of its settings that are not the usual ones."""
    from nidiff.sampling.sampler import SAMPLERS

    known = SAMPLERS.get(result["sampler"])
    usual = known.spacing if known else "uniform"
    spacing, clip = result.get("spacing", usual), result.get("clip", 1.0)
    parts = [result["sampler"], *([] if spacing == usual else [spacing])]
    parts += [f"{key}={value}" for key, value in (result.get("options") or {}).items()]
    parts += [] if clip == 1.0 else [f"clip={clip}"]
    return _one_line(", ".join(map(str, parts)))


def best_values(lines: Sequence[Line], metrics: Sequence[str]) -> dict[tuple[str, int, str], float]:
    """The best value of each source, number of steps and metric for which there are two or more."""
    values: dict[tuple[str, int, str], list[float]] = {}
    for line in lines:
        for result in line.results:
            for name in metrics:
                value = (result["metrics"].get(name) or {}).get("value")
                if value is not None and math.isfinite(value):
                    values.setdefault((line.mark, result["steps"], name), []).append(value)
    return {key: (max if key[2] in HIGHER else min)(found) for key, found in values.items() if len(found) > 1}


def _source(result: Result) -> dict[str, Any]:
    found = {**result["provenance"], "seeds": result.get("seeds")}
    return {key: found[key] for key in COMPARED if found.get(key) is not None}


def find_sources(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The different sources of the results, in the order in which they first occur."""
    sources: list[dict[str, Any]] = []
    for result in results:
        source = _source(result)
        sources += [] if source in sources else [source]
    return sources


def source_text(source: Mapping[str, Any]) -> str:
    """The sentence that says where numbers come from."""
    parts = [words.format(str(source[key])) for key, words in COMPARED.items() if key in source]
    return _one_line("".join(parts).lstrip(",; ") or "Of unknown source") + "."


def union(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(mappings)))


def _one_line(words: str) -> str:
    return " ".join(words.split())
