"""What a story has measured: a JSON file that is written after every measurement, so that a stopped run goes on."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nidiff
from nidiff.errors import InputError
from nidiff.files import replace_json

FOLDER = Path(__file__).parent.parent / "results"


class Results:
    """Measurements by name; those that are in the file are not made again."""

    def __init__(self, story: str, folder: Path = FOLDER) -> None:
        self.path = folder / f"{story}.json"
        self.values: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def measured(self, name: str, measure: Callable[[], Mapping[str, float]]) -> Mapping[str, Any]:
        """The measurement ``name``, made now if it is not in the file."""
        if name not in self.values:
            self.values[name] = dict(measure())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(self.path, self.values)
        return self.values[name]


def ended(run: Path) -> bool:
    """Whether this training is there and has come to its end."""
    with suppress(InputError):
        nidiff.load_model(run)
        return True
    return False


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean over trainings ± their standard deviation, as in a table."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])
