"""The real data that a model is compared with: what it was trained on, its held-out part, or data of one's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nidiff.data.beside import OWN
from nidiff.data.dataset import Dataset
from nidiff.errors import InputError
from nidiff.files import as_path
from nidiff.training.experiment import Experiment, read_experiment

HELD_OUT = "test"


class Real(NamedTuple):
    """Some of the data, and how results name them."""

    data: Dataset
    name: str
    split: str
    """train (what the model was trained on), test or another split, or given (all of other data)."""


class RealData(NamedTuple):
    """Where real data come from, as an experiment reads them."""

    experiment: Experiment
    is_own: bool  # whether the run was trained on them

    def load(self, split: str = "train", **options: Any) -> Real:
        """A part of them; ``options`` are other arguments of `nidiff.load_dataset`."""
        reading = {"split": split, "memory_limit": None, **options}
        labels = self.experiment.labels if self.is_own else None
        if labels in (None, OWN):
            data = self.experiment.load_data(**reading)
        else:  # the classes of the model are not those that the data may have
            try:
                data = self.experiment.load_data(**reading, labels=labels)
            except InputError:  # a file of labels is for one split
                data = replace(self.experiment.load_data(**reading), labels=None, class_names=(), num_classes=None)
        name = self.experiment.data if split == "train" else f"{self.experiment.data}, {split}"
        return Real(data, name, split if self.is_own or split != "train" else "given")

    def held_out(self, train: Real | None = None, **options: Any) -> Real:
        """The held-out part, or all where none is held out."""
        try:
            found = self.load(HELD_OUT, **options)
        except InputError:
            return train or self.load(**options)
        return found if len(found.data) else train or self.load(**options)


def real_data(
    run: Path,
    data: str | None = None,
    data_dir: Path | None = None,
    *,
    split: str | None = None,
    layout: str | None = None,
) -> RealData:
    """The data of a run, or ``data`` read in the same way, as a whole unless a ``split`` is asked for."""
    run = as_path("run", run)
    if data is not None:
        as_path("data", data)  # the name of a data set is a possible path too
    own = read_experiment(run) if (run / "experiment.json").is_file() else None
    if own is None and data is None:
        raise InputError(f"data is missing: {str(run)!r} is not a run that says what it was trained on.")
    source = own or Experiment()
    if data is not None or data_dir is not None:
        source = replace(source, data=data or source.data, data_dir=data_dir)
    if data is not None and own is not None and Path(data).suffix != Path(own.data).suffix:  # another kind of file
        source = replace(source, layout=None, variables=(), sample_axis=None)
    if data is not None and split is None:
        source = replace(source, held_out=None)
    if layout is not None:
        source = replace(source, layout=layout)
    return RealData(source, is_own=own is not None and data is None)
