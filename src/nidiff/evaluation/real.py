"""The real data that a model is compared with: what it was trained on, its held-out part, or data of one's own."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nidiff.data.dataset import Dataset
from nidiff.errors import InputError
from nidiff.files import as_path
from nidiff.training.experiment import Experiment, read_experiment

HELD_OUT = "test"


class Real(NamedTuple):
    """A part of a data set, and how results name it."""

    data: Dataset
    name: str
    split: str

    @property
    def is_held_out(self) -> bool:
        return self.split != "train"


def data_source(run: Path, data: str | None = None, data_dir: Path | None = None) -> Experiment:
    """The experiment whose data they are: that of the run, or the same with ``data`` in place of its own."""
    run = as_path("run", run)
    if data is not None:
        as_path("data", data)  # the name of a data set is a possible path too
    source = read_experiment(run) if (run / "experiment.json").is_file() else None
    if source is None and data is None:
        raise InputError(f"data is missing: {str(run)!r} is not a run that says what it was trained on.")
    source = source or Experiment()
    if data is not None or data_dir is not None:
        source = replace(source, data=data or source.data, data_dir=data_dir)
    return source


def load_real(source: Experiment, split: str) -> Real:
    """A part of the data."""
    images = source.load_data(split=split, memory_limit=None)
    return Real(images, source.data if split == "train" else f"{source.data}, {split}", split)


def load_held_out(source: Experiment, train: Real | None = None) -> Real:
    """The held-out part, or the training data where none is held out."""
    try:
        found = load_real(source, HELD_OUT)
    except InputError:
        return train or load_real(source, "train")
    return found if len(found.data) else train or load_real(source, "train")
