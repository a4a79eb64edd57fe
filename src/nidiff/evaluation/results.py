"""Results: the quality of a run's samples with one sampler and number of steps, and the file that keeps them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nidiff.errors import shown
from nidiff.files import blaming, locked, read_json, replace_json, writing
from nidiff.model.config import model_folder
from nidiff.model.folder import has_network
from nidiff.model.manifest import model_sha256
from nidiff.recipe import fits
from nidiff.sampling.sampler import SAMPLERS
from nidiff.sealed import seal, unseal

# A newer version is no reason to compute a result again, and the baseline is none of the model's.
VERSIONS = ("nidiff", "commit", "torch", "gaussian_bits_per_dim", "gaussian_nats_per_dim")
REMEDY = "delete it to measure again"
# What must be the same if two numbers are to be compared, and how a note says it.
COMPARED = {
    "features": "Features {}",
    "features_sha256": " (sha256 {:.8})",
    "preprocessing": ", preprocessing {}",
    "num_real": "; {} real images",
    "num_items": "; {} real items",
    "real": " of {}",
    "real_sha256": " (sha256 {:.8})",
    "num_generated": "; {} generated",
    "seeds": " (seeds {})",
    "quantisation": ", rounded to {}",
    "drawn_in": ", drawn in {}",
    "boundary": "; boundary {}",
    "k": "; k = {}",
}


class Trainings(NamedTuple):
    """What the value is a mean over, if it is that of a group of trainings: their standard deviation and number."""

    deviation: float | None
    n: int


class Measured(NamedTuple):
    """A metric of one result. The error is that of the samples; it does not know of other trainings."""

    value: float | None
    error: float | None
    higher_is_better: bool = False
    over: Trainings | None = None

    @property
    def finite(self) -> float | None:
        """The value, if it is a number that can be shown."""
        return finite(self.value)

    def to_json(self) -> dict[str, float | None]:
        return {"value": self.finite, "error": finite(self.error)}


def finite(number: float | None) -> float | None:
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _finite(values: Any) -> Any:
    """The same with None for every number, at any depth, that is not finite."""
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    return [_finite(value) for value in values] if isinstance(values, list) else finite(values)


def _measured(name: str, values: Any) -> Measured:
    """A metric from JSON."""
    metric = Measured(values["value"], values["error"], values["higher_is_better"])
    if not fits(metric.value, float | None) or not fits(metric.error, float | None):
        raise TypeError(f"the metric {shown(name)} is not a number")
    return metric


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
    details: Mapping[str, Any] = field(default_factory=dict)
    """"floor", the metrics of real data against real data, and "floor_of", which. Of fields: "items", the numbers of
    real and generated ones and of independent ones that they are worth, and "bands", the tables of the spectra.
    Of pictures with classes: "by_class", the metrics of each, and "classifier", the share of real images it names
    correctly."""

    def to_json(self) -> dict[str, Any]:
        """As JSON with its own checksum; a number that is not finite is null."""
        metrics = {name: m.to_json() | {"higher_is_better": m.higher_is_better} for name, m in self.metrics.items()}
        values = asdict(self) | {"metrics": metrics, "details": _finite(self.details)}
        if not self.details:
            del values["details"]
        return seal(values)

    @classmethod
    def from_json(cls, values: Any, what: str = "a result") -> "Result":
        """The inverse of `to_json`; an exception that names ``what`` if it has changed, or is no result."""
        values = unseal(values, what, REMEDY)
        if wrong := [key for key in {**values, **KINDS} if not isinstance(values.get(key), KINDS.get(key, ()))]:
            raise TypeError(f"{shown(wrong[:1])} are not as in a result")
        metrics = {name: _measured(name, metric) for name, metric in values["metrics"].items()}
        return cls(**values | {"metrics": metrics, "details": values.get("details") or {}})

    @property
    def question(self) -> dict[str, Any]:
        """All that decides the numbers, without the name of the run and the versions: it is answered only once."""
        provenance = {key: value for key, value in self.provenance.items() if key not in VERSIONS}
        return asdict(self) | {"provenance": provenance, "metrics": None, "run": None, "details": None}

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
        clip = [] if self.clip == (None if "num_items" in self.provenance else 1.0) else [f"clip={self.clip}"]
        return one_line(", ".join([self.sampler, *spacing, *(f"{k}={v}" for k, v in self.options.items()), *clip]))


# The types of the fields of a result in JSON.
KINDS: dict[str, Any] = {
    "run": str,
    "sampler": str,
    "num_steps": int,
    "spacing": str | None,
    "options": dict,
    "seeds": str | None,
    "clip": int | float | None,
    "metrics": dict,
    "provenance": dict,
    "details": dict | None,
}


def one_line(words: str) -> str:
    return " ".join(words.split())


def read_results(path: Path) -> list[Result]:
    """The results in a JSON file such as RUN/metrics.json, or those of single runs in a table.json with groups."""
    values = read_json(path, REMEDY)
    if isinstance(values, dict) and {"groups", "paired"} <= values.keys():
        values = values.get("results")
    with blaming(path, REMEDY):
        if not isinstance(values, list):
            raise TypeError("it is not a list of results")
        return [Result.from_json(value, repr(str(path))) for value in values]


def known_results(run: Path, sha256: str | None = None) -> list[Result]:
    """The results in RUN/metrics.json of the model that is there now: the run may have been trained further since.

    ``sha256`` is the checksum of the model, if it is known already.
    """
    file, folder = run / "metrics.json", model_folder(run)
    results = read_results(file) if file.exists() else []
    if not results or (sha256 is None and not has_network(folder)):
        return results
    now = sha256 or model_sha256(folder)
    return [result for result in results if result.provenance.get("model_sha256", now) == now]


def remember(run: Path, result: Result) -> None:
    """Add a result to RUN/metrics.json, in place of an older answer to the same question."""
    file = run / "metrics.json"
    with writing("metrics", file, "run the command again"), locked(run):
        before = read_results(file) if file.exists() else []
        results = [*(known for known in before if known.question != result.question), result]
        replace_json(file, [known.to_json() for known in results])
