"""The real data that a model is compared with: what it was trained on, its held-out part, or other data."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nidiff.data.dataset import Dataset
from nidiff.data.formats import NAMED, suffix_of
from nidiff.data.grid import Grid
from nidiff.data.spec import FROM_DATA_SET, DataSpec
from nidiff.errors import InputError
from nidiff.files import as_path, read_object
from nidiff.training.experiment import Experiment, experiment_file, read_experiment
from nidiff.training.identity import as_identity, data_digest

HELD_OUT = "test"


class RealData(NamedTuple):
    """Real data, and how results name them."""

    data: Dataset
    name: str
    split: str
    """train (what the model was trained on), test or another split, or given (all of other data)."""


class RealSource(NamedTuple):
    """Where real data come from: an experiment that reads them."""

    experiment: Experiment
    of_run: bool  # whether the run was trained on them
    like: Grid | None = None  # of the model that they are compared with
    run: Path | None = None

    def load(self, split: str = "train", **options: Any) -> RealData:
        """A part of them; ``options`` are arguments of `DataSpec.load`."""
        spec, options = self.experiment.data, {"memory_limit": None, "annotations": (), "like": self.like, **options}
        if not self.of_run or spec.labels in (None, FROM_DATA_SET):
            data = spec.load(split, **options)
        else:  # the classes of the model are not those that the data may have
            try:
                data = spec.load(split, **{**options, "annotations": ("labels",)})
            except InputError:  # a file of labels is for one split
                data = replace(spec.load(split, **options), labels=None, class_names=(), num_classes=None)
        if self.run and self.of_run and spec.labels is not None and [*data.class_names] != sorted(data.class_names):
            self._check_classes(self.run)
        name = spec.source if split == "train" else f"{spec.source}, {split}"
        return RealData(data, name, split if self.of_run or split != "train" else "given")

    def _check_classes(self, run: Path) -> None:
        """Refuse classes such as 1, 2, 10 if the run numbered them in another order, as version 0.2 did (1, 10, 2)."""
        spec, identity = self.experiment.data, read_object(experiment_file(run)).get("identity")
        if data_digest(spec.load(progress=False)) != as_identity(identity)["data"]:
            problem = "has changed since the run, or version 0.2 numbered its classes by their letters (1, 10, 2)"
            raise InputError("data", spec.source, problem, "train again, or evaluate it with version 0.2")

    def held_out(self, train: RealData | None = None, **options: Any) -> RealData:
        """The held-out part, or all where none is held out."""
        try:
            part = self.load(HELD_OUT, **options)
        except InputError:
            part = None
        return part if part and len(part.data) else train or self.load(**options)


def real_source(
    run: Path,
    data: str | None = None,
    data_dir: Path | None = None,
    *,
    split: str | None = None,
    layout: str | None = None,
    like: Grid | None = None,
) -> RealSource:
    """The data of a run, or ``data`` read in the same way, as a whole unless a ``split`` is asked for; on the grid
    ``like`` of a model."""
    run = as_path("run", run)
    known = read_experiment(run) if (run / "experiment.json").is_file() else None
    if known is None and data is None:
        problem = f"is missing, and {str(run)!r} is not a run that says what it was trained on"
        raise InputError("data", None, problem, "name the real data")
    spec = DataSpec() if known is None else known.data
    if data is not None and known is not None and Path(data).suffix != Path(spec.source).suffix:  # another format
        spec = replace(spec, layout=None, variables=(), sample_axis=None)
    if data is not None or data_dir is not None:
        spec = replace(spec, source=data or spec.source, data_dir=data_dir)
    if data is not None and split is None:
        spec = replace(spec, held_out=None)
    if layout is not None:
        spec = replace(spec, layout=layout)
    if like is not None and like.channels and spec.layout is None and suffix_of(Path(spec.source)) not in NAMED:
        spec = replace(spec, variables=())  # which are those channels
    return RealSource(replace(known or Experiment(), data=spec), known is not None and data is None, like, run)
