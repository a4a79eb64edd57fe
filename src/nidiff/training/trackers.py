"""Trackers that follow a run while it trains: Weights & Biases and MLflow, through accelerate, and TensorBoard."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from nidiff.errors import one_of
from nidiff.extras import require
from nidiff.files import read_object, replace_json
from nidiff.training.experiment import Experiment
from nidiff.training.run import RunDirectory

PROJECT = "nidiff"  # what W&B calls the project and MLflow the experiment
TRACKERS = ("mlflow", "tensorboard", "wandb")


class Tracker(Protocol):
    """A tracker of accelerate."""

    def log(self, values: dict[str, float], step: int | None = None) -> None: ...
    def finish(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is unknown or not installed."""
    for name in names:
        require(one_of("tracker", name, TRACKERS))


@contextlib.contextmanager
def started_trackers(names: Sequence[str], run: RunDirectory, experiment: Experiment) -> Iterator[list[Tracker]]:
    """The trackers of these names, which follow the run until the block ends, whatever ends it.

    A run that is resumed goes on as the same run of the tracker: their names for it are stored in the run directory.
    The run directory writes for TensorBoard itself.
    """
    known = read_object(run.trackers_file) if run.trackers_file.is_file() else {}
    settings = {name: _plain(value) for name, value in experiment.settings().items()}
    trackers: list[Any] = []
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(names):
            if name == "tensorboard":
                continue
            tracker = _start(name, run, known.get(name))
            stack.callback(tracker.finish)
            if name not in known:  # of a run that is resumed, MLflow refuses a setting that has changed
                tracker.store_init_configuration(settings)
                known[name] = tracker.tracker.id if name == "wandb" else tracker.tracker.info.run_id
                with run.writing():
                    replace_json(run.trackers_file, known)
            trackers.append(tracker)
        yield trackers


def _start(name: str, run: RunDirectory, known: str | None) -> Any:
    from accelerate.tracking import MLflowTracker, WandBTracker

    tracker: Any
    if name == "wandb":
        more: Mapping[str, Any] = {} if known is None else {"id": known, "resume": "allow"}
        tracker = WandBTracker(PROJECT, name=run.name, dir=str(run.folder), **more)
    else:
        tracker = MLflowTracker(PROJECT, run_id=known, run_name=run.name)
    tracker.start()
    return tracker


def _plain(value: Any) -> Any:
    """A setting as a tracker takes it."""
    return value if isinstance(value, str | int | float | None) else str(value)
