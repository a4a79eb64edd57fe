"""Results: the quality of a run's samples with one sampler and number of steps, and the file that keeps them."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from nidiff.errors import InputError
from nidiff.files import replace_text, writing
from nidiff.locks import locked
from nidiff.model.config import model_folder
from nidiff.model.folder import has_network
from nidiff.model.manifest import model_sha256
from nidiff.sampling.sampler import SAMPLERS

VERSIONS = ("nidiff", "commit", "torch")  # a newer one is no reason to compute a result again
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


class Measured(NamedTuple):
    """A metric of one result."""

    value: float | None
    error: float | None
    higher_is_better: bool = False

    @property
    def finite(self) -> float | None:
        """The value, if it is a number that can be shown."""
        return self.value if self.value is not None and math.isfinite(self.value) else None


NOT_MEASURED = Measured(None, None)


@dataclass(frozen=True)
class Result:
    """What was measured, how the images were drawn, and everything else that the numbers depend on."""

    run: str
    sampler: str
    """"-" for images that were not drawn here."""
    num_steps: int
    spacing: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: str | None = None
    clip: float | None = 1.0
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"metrics": {name: one._asdict() for name, one in self.metrics.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Result":
        """The inverse of `to_json`; KeyError, TypeError or AttributeError for what is not a result."""
        metrics = {
            # Version 0.1 wrote no direction, and called the number of steps "steps".
            name: Measured(pair["value"], pair["error"], pair.get("higher_is_better", name in ("precision", "recall")))
            for name, pair in values["metrics"].items()
        }
        given = {"num_steps": values.get("steps"), **values, "metrics": metrics}
        given["provenance"], given["options"] = dict(values["provenance"]), dict(values.get("options") or {})
        result = cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})
        if not (isinstance(result.run, str) and isinstance(result.sampler, str) and isinstance(result.num_steps, int)):
            raise TypeError("a name or number of steps is of another type")
        numbers = [number for one in metrics.values() for number in one[:2]]
        if not all(number is None or isinstance(number, int | float) for number in numbers):
            raise TypeError("a metric is not a number")
        return result

    @property
    def question(self) -> dict[str, Any]:
        """All that decides the numbers, without the name of the run and the versions: it is answered only once."""
        provenance = {key: value for key, value in self.provenance.items() if key not in VERSIONS}
        return asdict(self) | {"provenance": provenance, "metrics": None, "run": None}

    @property
    def source(self) -> str:
        """The sentence that says where the numbers come from: results are compared where it is the same."""
        known = {**self.provenance, "seeds": self.seeds}
        parts = [words.format(str(known[key])) for key, words in COMPARED.items() if known.get(key) is not None]
        return one_line("".join(parts).lstrip(",; ") or "Of unknown source") + "."

    @property
    def sampler_text(self) -> str:
        """The sampler and those of its settings that are not the usual ones."""
        usual = SAMPLERS[self.sampler].spacing if self.sampler in SAMPLERS else "uniform"
        spacing = [] if self.spacing in (None, usual) else [str(self.spacing)]
        clip = [] if self.clip == 1.0 else [f"clip={self.clip}"]
        return one_line(", ".join([self.sampler, *spacing, *(f"{k}={v}" for k, v in self.options.items()), *clip]))


def one_line(words: str) -> str:
    return " ".join(words.split())


def read_results(path: Path) -> list[Result]:
    """The results in a JSON file such as RUN/metrics.json."""
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, list):
            raise TypeError("it is not a list")
        return [Result.from_json(value) for value in values]
    except FileNotFoundError as error:
        raise InputError(f"there is no {path.name}: measure the run with nidiff evaluate.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{str(path)!r} is not a list of results ({reason}): delete it to measure again.") from error


def known_results(run: Path) -> list[Result]:
    """The results in RUN/metrics.json of the model that is there now: the run may have been trained further since."""
    file, folder = run / "metrics.json", model_folder(run)
    results = read_results(file) if file.exists() else []
    if not results or not has_network(folder):
        return results
    now = model_sha256(folder)
    return [result for result in results if result.provenance.get("model_sha256", now) == now]


def remember(run: Path, result: Result) -> None:
    """Add a result to RUN/metrics.json, in place of an older answer to the same question."""
    file = run / "metrics.json"
    with writing("metrics", file, "make room and run the command again"), locked(run):
        before = read_results(file) if file.exists() else []
        kept = [*(one for one in before if one.question != result.question), result]
        replace_text(file, json.dumps([one.to_json() for one in kept], indent=2) + "\n")
