"""The models that ship with nidiff: where each is, by its name, and what its card says.

An entry is the directory of a finished run without its checkpoints, log and drawn samples:

experiment.json  the settings, which `nidiff train --config NAME` repeats; no path of the machine is in it
model/           the model, with the weights of its network, the factors of its mixture and κ in float16
metrics.json     what was measured, if anything was
samples.png      the picture of its card
zoo.json         the card: title, command, time, scores, how the picture was drawn, and checksums of the files above

Nothing is written into an entry. Nothing heavy is imported here, so that a name is found at once.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nidiff.errors import InputError, known_names
from nidiff.files import as_path, blaming, replaced_folders
from nidiff.model.checkpoint import find_checkpoint
from nidiff.sealed import check_files, read_sealed, seal

FORMAT = 1
CARD, EXPERIMENT, PICTURE, METRICS = "zoo.json", "experiment.json", "samples.png", "metrics.json"
SEALED = (EXPERIMENT, PICTURE, METRICS)  # with checksums in the card; those of model/ are in its manifest
MOST_BYTES, MOST_TOGETHER = 8_000_000, 40_000_000  # of an entry, of all of them
NAME = re.compile(r"\w[\w-]*")  # what could be meant as the name of a model
AGAIN = "install nidiff again, or restore the file from the repository"
PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]

# Where entries are looked for: in the package and, in a checkout, at the root of the repository.
PLACES: list[Path] = [PACKAGE / "zoo", *([ROOT / "models"] if (ROOT / "pyproject.toml").is_file() else [])]


@dataclass(frozen=True)
class Picture:
    """How samples.png was drawn: a sample for each seed, row by row."""

    seeds: tuple[int, ...]
    sampler: str
    num_steps: int
    limits: tuple[tuple[float, float], ...] = ()
    """Of fields: the values at the two ends of the colours, for each channel."""


@dataclass(frozen=True)
class Card:
    """What is known about an entry beside its settings and its model; ``files`` has checksums."""

    title: str
    command: str
    seconds: float | None
    """Of training, without checkpoints and pictures."""
    images: int
    """Items that the training saw, with repeats."""
    processor: str
    parameters: int
    trained_sha256: str
    """The checksum of the model before its weights were rounded to float16, which the scores are of."""
    picture: Picture
    scores: tuple[Mapping[str, Any], ...] = ()
    """A few results: sampler, num_steps, num_generated, metrics as {name: {value, error}}, and source, a sentence."""
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON with its own checksum."""
        return seal({"format": FORMAT, **asdict(self)})


def zoo_models() -> dict[str, Path]:
    """Each model that ships, by name, and its directory. Nothing is opened."""
    entries: dict[str, Path] = {}
    for place in PLACES:
        for file in place.glob(f"*/{CARD}"):
            entries.setdefault(file.parent.name, file.parent)
    return dict(sorted(entries.items()))


def find_model(name_or_path: str | Path, argument: str = "folder", checkpoint: str | int | None = None) -> Path:
    """The path itself if it exists, else the directory of the model that ships under that name; with ``checkpoint``, a
    step or "latest", the folder of that checkpoint of the run.

    An entry whose files have changed is refused. Another path is returned as it is, but a single word is refused by a
    sentence that lists the known names.
    """
    path = as_path(argument, name_or_path)
    # A kill while a model is replaced leaves it under another name.
    exists = path.exists() or bool(replaced_folders(path))
    name, known = str(path), {} if exists else zoo_models()
    if known and name not in known and NAME.fullmatch(name):
        problem = "does not exist, and no model that ships has that name"
        raise InputError(argument, name, problem, known_names(name, known))
    path = known.get(name, path)
    if (entry := entry_of(path)) is not None:
        check_entry(entry)
        if checkpoint is not None:
            raise InputError("checkpoint", checkpoint, "is of a run, and this is a model that ships", "leave it out")
    return path if checkpoint is None else find_checkpoint(path, checkpoint)


def entry_of(path: Path) -> Path | None:
    """The entry that ``path`` is, or whose model folder it is; None if it is of no entry."""
    places = (path, path.parent) if path.name == "model" else (path,)
    return next((place for place in places if os.path.isfile(place / CARD)), None)


def read_card(entry: Path) -> Card:
    """The card of an entry, if it is what was packed."""
    file = entry / CARD
    values = read_sealed(file, FORMAT, AGAIN)
    with blaming(file, AGAIN):
        picture = dict(values.pop("picture"))
        limits = tuple((float(low), float(high)) for low, high in picture.pop("limits"))
        seeds = tuple(map(int, picture.pop("seeds")))
        scores = tuple(values.pop("scores"))
        return Card(**values, picture=Picture(seeds=seeds, limits=limits, **picture), scores=scores)


def check_entry(entry: Path) -> Card:
    """The card of an entry whose files are as they were packed; those in model/ are checked when it is opened."""
    card = read_card(entry)
    check_files(entry, [name for name in SEALED if (entry / name).is_file()], card.files, AGAIN)
    return card


def entry_bytes(entry: Path) -> int:
    """The size of all files of an entry."""
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())


def time_words(seconds: float) -> str:
    """Seconds, minutes or hours."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
