"""The run directory: its experiment, model, log and sample grids, and who may write to it.

A run begins in a folder of its own, `BEGUN`, which gets that name when it is complete. From then on the run before it
is given up, and `_settle` puts the new one in its place. A kill leaves one or the other, and `claim` settles it.
"""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nidiff.covariance.config import load
from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import FileError, InputError
from nidiff.files import (
    as_path,
    is_aside,
    read_object,
    recover_folder,
    replace_json,
    replace_text,
    replaced_folders,
    replacing_folder,
    sync,
    writing,
)
from nidiff.locks import LOCK, claimed, refuse_claimed
from nidiff.model.config import with_arrays
from nidiff.model.folder import CONFIG, check_replaceable, has_network, open_with, save_outline
from nidiff.model.manifest import EARLIER, MANIFEST, check_manifest, identities, renew_identity
from nidiff.training.experiment import BEGUN, EXPERIMENT, Experiment, experiment_file, read_experiment
from nidiff.training.identity import as_identity, changed_parts, process_digest, settings_digest

if TYPE_CHECKING:
    from nidiff.training.build import Trainer

FILES = (EXPERIMENT, "log.jsonl", "metrics.json", "report.html", "trackers.json")
FOLDERS = ("checkpoints", "model", "tensorboard", "wandb", "samples", "generated", "steps")
# What is written where it is: a link could lead to anybody's files.
IN_PLACE = ("log.jsonl", "samples", "tensorboard", "wandb")
RESTORE = "restore what it was, or begin a new run in another directory"


class RunDirectory:
    """The directory of a training run, which need not exist yet."""

    def __init__(self, folder: Path, argument: str = "out") -> None:
        self.folder = as_path(argument, folder)
        self.name = Path(os.path.realpath(self.folder)).name
        self.checkpoints, self.model = self.folder / "checkpoints", self.folder / "model"
        self.log_file, self.trackers_file = self.folder / "log.jsonl", self.folder / "trackers.json"
        events = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname():.60}.{os.getpid()}"
        self._events = self.folder / "tensorboard" / events

    @staticmethod
    def open(folder: Path) -> "RunDirectory":
        """The run in ``folder``, or an `InputError` if there is none that can be read, or another one is beginning."""
        run = RunDirectory(folder, "run")
        if not run.exists():
            raise FileError("run", str(folder), "is not a run directory", "give one that has an experiment.json")
        if (run.folder / BEGUN).exists():
            remedy = f"continue it with nidiff train --resume --out {folder}"
            raise FileError("run", str(folder), "was stopped while a new run began in it", remedy)
        identity = run.identity
        if identity is not None and identity["settings"] != settings_digest(run.experiment):
            problem = "has other settings than those the run began with"
            raise FileError("run", str(run.folder / EXPERIMENT), problem, RESTORE)
        return run

    # What it holds ---------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return experiment_file(self.folder).is_file()

    @property
    def experiment(self) -> Experiment:
        return read_experiment(experiment_file(self.folder))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What came of the settings: the number of images, of parameters, …"""
        facts = read_object(experiment_file(self.folder)).get("resolved")
        return facts if isinstance(facts, dict) else {}

    @property
    def identity(self) -> dict[str, str] | None:
        """What the run is, stored when it began; None of an experiment.json that is not of a run."""
        identity = read_object(experiment_file(self.folder)).get("identity")
        return None if identity is None else as_identity(identity)

    @property
    def identities(self) -> list[dict[str, str]]:
        """The identity, and those that checkpoints carry from before the run was ended early."""
        return [as_identity(identity) for identity in identities(read_object(experiment_file(self.folder)))]

    @property
    def covariance(self) -> Covariance:
        """The Σ of the run, stored when it began."""
        return load(self.folder)

    def stored(self) -> Denoiser | None:
        """The stored Σ, schedule and data's Gaussian, around no network; None if they are lost."""
        return open_with(self.model, torch.nn.Identity()) if (self.model / CONFIG).is_file() else None

    def process(self) -> str | None:
        """The digest of what `stored` returns; that of the run if its model is as saved, perhaps by a later version."""
        file, identity = self.model / CONFIG, self.identity or {}
        if not file.is_file():
            return None
        with contextlib.suppress(InputError):
            check_manifest(self.model, ("scheduler",))
            return identity.get("process")
        return process_digest(with_arrays(read_object(file, RESTORE), file))

    @property
    def has_model(self) -> bool:
        return has_network(self.model)

    # Who may write to it ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, experiment: Experiment, *, resume: bool, overwrite: bool) -> Iterator[None]:
        """Claim the directory for this process, if `check` allows it, and finish what a kill interrupted."""
        self.check(experiment, resume=resume, overwrite=overwrite)  # before anything is written
        with claimed(self.folder):
            with self.writing():
                self._settle()
                recover_folder(self.model)
                if not self.model.exists() and (left_by_0_2 := replaced_folders(self.model)):
                    os.rename(left_by_0_2[0], self.model)
            self.check(experiment, resume=resume, overwrite=overwrite)  # another process may have had it until now
            yield

    def check(self, experiment: Experiment, *, resume: bool, overwrite: bool) -> None:
        """Refuse what would lose or mix up anything; nothing is written."""
        if resume and overwrite:
            raise InputError("resume", None, "excludes `overwrite`", "give one of them")
        if (refusal := self._refusal(experiment, resume, overwrite)) is not None:
            raise FileError("out", str(self.folder), *refusal)

    def _refusal(self, experiment: Experiment, resume: bool, overwrite: bool) -> tuple[str, str] | None:
        """Why the directory cannot be written to, and the remedy."""
        if self.folder.exists() and not self.folder.is_dir():
            return "is a file", "choose another directory"
        for path in [self.folder / name for name in (BEGUN, *(IN_PLACE if resume else ()))]:
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                problem = f"has {path.name!r}, which is a link or a device and could lead to other files"
                return problem, "replace or delete it"
        names = os.listdir(self.folder) if self.folder.exists() else []
        if all(name == LOCK or is_aside(name) for name in names):  # what a kill leaves
            return ("has no run to resume", "leave `resume` out to begin one") if resume else None
        try:
            changed, identity = self.experiment.differences(experiment.resolved()), self.identity
        except InputError as error:
            return f"holds other files than those of a run ({error})", "choose an empty or new directory"
        if identity is None:
            return "holds other files than those of a run", "choose an empty or new directory"
        if overwrite:
            for folder in sorted((*self.folder.glob("generated/*/"), *self.folder.glob("steps/*/*/*/"))):
                refuse_claimed(folder)  # nidiff sample or restore is at work in it
            return None
        if not resume:
            return "already holds a run", "continue it with `resume`, or replace it with `overwrite`"
        if changed:
            return f"holds a run with other settings ({'; '.join(changed)})", "use those, or another directory"
        return None

    def check_same(self, trainer: "Trainer") -> None:
        """Refuse to resume a run whose settings, data, network, Σ or schedule have changed."""
        if parts := changed_parts(self.identity or {}, trainer.identity):
            raise FileError("out", str(self.folder), f"holds a run that began with others than now: {parts}", RESTORE)

    def check_steps(self, trainer: "Trainer") -> None:
        """Refuse to end a run before the step that it has reached, or before that of its model."""
        done = trainer.step or (self.experiment.steps if self.has_model else 0)  # its checkpoints may be deleted
        if (steps := trainer.experiment.steps) < done:
            raise InputError("steps", steps, f"is less than the {done} that the run has done", "give more")

    # What is written -------------------------------------------------------------------------------------------------

    def begin(self, trainer: "Trainer") -> None:
        """Begin a run here. Until it is complete on the disk, a run that was here before is untouched."""
        with self.writing(), replacing_folder(self.folder / BEGUN) as aside:
            replace_json(aside / EXPERIMENT, _described(trainer, {"gaussian": trainer.baseline}))
            save_outline(
                trainer.denoiser.with_net(trainer.bare_net()), aside / "model", trainer.data.grid, trainer.identity
            )
        with self.writing():
            self._settle()

    def _settle(self) -> None:
        """Put a run that has begun in its place. A kill on the way changes nothing: it is done again from the start."""
        begun = self.folder / BEGUN
        if (begun / EXPERIMENT).is_file():
            os.replace(begun / EXPERIMENT, self.folder / EXPERIMENT)
        if (begun / "model").is_dir():
            for name in (*FOLDERS, *FILES[1:]):
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            sync(self.folder)  # all of the run before is gone, even after a power cut, before the new model is here
            os.rename(begun / "model", self.model)
        if begun.exists():
            begun.rmdir()  # all of it is in its place
            sync(self.folder)

    def resume(self, trainer: "Trainer") -> None:
        """Write what the run is from now on, and drop the log lines of steps that will be done again."""
        with self.writing():
            is_outlined = self.has_model or (self.model / MANIFEST).is_file()  # an earlier version did not write it
            if not is_outlined or not (self.model / CONFIG).is_file():
                save_outline(
                    trainer.denoiser.with_net(trainer.bare_net()), self.model, trainer.data.grid, trainer.identity
                )
            before, facts = self.identity, dict(self.facts)
            if before != trainer.identity:  # it ends otherwise than it was planned
                plan = {name: getattr(self.experiment, name) for name in ("steps", "cooldown")}
                plans = facts[EARLIER] if isinstance(facts.get(EARLIER), list) else []
                facts[EARLIER] = [*plans, plan | {"settings": (before or {}).get("settings")}]
            replace_json(self.folder / EXPERIMENT, _described(trainer, facts))
            renew_identity(self.model, before, trainer.identity)
            if self.log_file.exists():
                lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
                done = [line for line in lines if 0 < _step_of(line) <= trainer.step]
                replace_text(self.log_file, "".join(f"{line}\n" for line in done))
        check_replaceable(self.model.resolve())  # now, not when the model is to be saved

    def describe(self, trainer: "Trainer", **facts: Any) -> None:
        """Write down more of what came of the settings."""
        with self.writing():
            replace_json(self.folder / EXPERIMENT, _described(trainer, {**self.facts, **facts}))

    def writing(self) -> AbstractContextManager[None]:
        """A disk that is full or gone ends the run with a sentence that says how to continue it."""
        return writing("out", self.folder, "continue the run with --resume")

    def log(self, step: int, **values: float) -> None:
        """Write one line to log.jsonl, and the same for TensorBoard if it is installed."""
        with self.writing():
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            _write_event(self._events, step, values)

    def samples_file(self, step: int) -> Path:
        return self.folder / "samples" / f"{step:06d}.png"


def _write_event(file: Path, step: int, values: Mapping[str, float]) -> None:
    """Write numbers for TensorBoard, if it is installed; its own writer loses errors in a thread."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    with file.open("ab") as log:
        if not log.tell():
            RecordWriter(log).write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
        RecordWriter(log).write(event.SerializeToString())


def _described(trainer: "Trainer", facts: Mapping[str, Any]) -> dict[str, Any]:
    facts = {**facts, **trainer.facts}
    return {**trainer.experiment.to_json(), "resolved": facts, "identity": trainer.identity}


def _step_of(line: str) -> int:
    """The step of a line of the log; 0 if it cannot be read, as the last line of a killed run."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return 0
    return step if isinstance(step, int) else 0
