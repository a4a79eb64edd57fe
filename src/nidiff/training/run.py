"""The run directory: its experiment, model, log and sample grids, and who may write to it.

A run begins in a folder of its own, `BEGUN`, which gets that name when it is complete. From then on the run before it
is given up, and `_settle` puts the new one in its place. A kill leaves one or the other, and `claim` settles it.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from nidiff.covariance.config import PLACES, load
from nidiff.covariance.covariance import Covariance
from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.figures import save_samples_figure
from nidiff.data.grid import Grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import FileError, InputError
from nidiff.files import (
    ASIDE,
    REPLACED,
    as_path,
    read_object,
    recover_folder,
    replace_json,
    replace_text,
    replacing_folder,
    sync,
    writing,
)
from nidiff.locks import LOCK, claimed, refuse_claimed
from nidiff.model.config import with_arrays
from nidiff.model.folder import CONFIG, check_replaceable, has_network, open_with, save_model, save_process
from nidiff.model.manifest import check_manifest, read_manifest
from nidiff.sampling.sampler import sample
from nidiff.training.checkpoint import has_checkpoint
from nidiff.training.events import Events
from nidiff.training.experiment import BEGUN, EXPERIMENT, Experiment, experiment_file, read_experiment
from nidiff.training.identity import (
    PARTS,
    Identity,
    as_identity,
    changed_parts,
    process_digest,
    settings_digest,
)

FILES = (EXPERIMENT, "log.jsonl", "metrics.json", "report.html")
FOLDERS = ("checkpoints", "model", f"{ASIDE}model", f"{REPLACED}model", "tensorboard", "samples", "generated")
IN_PLACE = ("log.jsonl", "samples", "tensorboard")  # written where they are: a link could lead to anybody's files
RESTORE = "restore what it was, or begin a new run in another directory"
DEEPEST = "model/unet/diffusion_pytorch_model.safetensors"


class RunDirectory:
    """The directory of a training run, which need not exist yet."""

    def __init__(self, folder: Path, argument: str = "out") -> None:
        self.folder = as_path(argument, folder)
        as_path(argument, self.folder / DEEPEST)  # our own files must have room in it, and be open to us
        self.name = Path(os.path.realpath(self.folder)).name
        self.checkpoints, self.model = self.folder / "checkpoints", self.folder / "model"
        self.log_file, self._events = self.folder / "log.jsonl", Events(self.folder / "tensorboard")

    @staticmethod
    def open(folder: Path) -> "RunDirectory":
        """The run in ``folder``, or an `InputError` if there is none that can be read, or another one is beginning."""
        run = RunDirectory(folder, "run")
        if not run.exists():
            raise FileError("run", str(folder), "is not a run directory", "give one that has an experiment.json")
        if (run.folder / BEGUN).exists():
            remedy = f"continue it with nidiff train --resume --out {folder}"
            raise FileError("run", str(folder), "was stopped while a new run began in it", remedy)
        run.check_settings()
        return run

    # What it holds ---------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self._experiment_file.is_file()

    @property
    def _experiment_file(self) -> Path:
        return experiment_file(self.folder)

    @property
    def experiment(self) -> Experiment:
        return read_experiment(self._experiment_file)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What came of the settings: the number of images, of parameters, …"""
        facts = self._read().get("resolved")
        return facts if isinstance(facts, dict) else {}

    @property
    def identity(self) -> dict[str, str] | None:
        """What the run is, stored when it began; None of an experiment.json that is not of a run."""
        identity = self._read().get("identity")
        return None if identity is None else as_identity(identity)

    def _read(self) -> dict[str, Any]:
        return read_object(self._experiment_file)

    @property
    def covariance(self) -> Covariance:
        """The Σ of the run, stored when it began."""
        # A kill while the model is replaced leaves it under another name.
        folders = [self.folder, *(self.folder / name for name in FOLDERS if name.endswith("-model"))]
        return load(next((f for f in folders if any((f / place).is_file() for place in PLACES)), self.folder))

    def stored(self) -> Denoiser | None:
        """The stored Σ, schedule and data's Gaussian, around no network; None if they are lost."""
        return open_with(self.model, torch.nn.Identity()) if (self.model / CONFIG).is_file() else None

    @property
    def has_model(self) -> bool:
        return has_network(self.model)

    @property
    def is_ours(self) -> bool:
        """Whether this is provably a run of nidiff; if its experiment.json is lost, by a checkpoint, or by its model if
        nothing else is there."""
        with contextlib.suppress(InputError):
            read_experiment(self._experiment_file)
            if {"format", "covariance", "schedule"} <= self._read().keys():  # other tools have a file of that name
                return True
        others = set(self._names()) - {*FILES, *FOLDERS, BEGUN}
        return has_checkpoint(self.checkpoints) or (not others and _is_model(self.model))

    def _names(self) -> list[str]:
        """What the directory holds, except what a kill may leave."""
        names = os.listdir(self.folder) if self.folder.exists() else []
        return [name for name in names if name != LOCK and not name.startswith(ASIDE)]

    # Who may write to it ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, experiment: Experiment, *, resume: bool, overwrite: bool) -> Iterator[None]:
        """Claim the directory for this process, if `check` allows it, and finish what a kill interrupted."""
        self.check(experiment, resume=resume, overwrite=overwrite)  # before anything is written
        with claimed(self.folder):
            with self.writing():
                self._settle()
                recover_folder(self.model)
            self.check(experiment, resume=resume, overwrite=overwrite)  # another process may have had it until now
            yield

    def check(self, experiment: Experiment, *, resume: bool, overwrite: bool) -> None:
        """Refuse what would lose or mix up anything; nothing is written."""
        if resume and overwrite:
            raise InputError("resume", None, "excludes `overwrite`", "give one of them")
        if (refusal := self._refusal(experiment, resume, overwrite)) is not None:
            raise FileError("out", str(self.folder), *refusal)
        if resume:
            self.check_settings()

    def _refusal(self, experiment: Experiment, resume: bool, overwrite: bool) -> tuple[str, str] | None:
        """Why the directory cannot be written to, and the remedy."""
        if self.folder.exists() and not self.folder.is_dir():
            return "is a file", "choose another directory"
        for path in [self.folder / name for name in (BEGUN, *(IN_PLACE if resume else ()))]:
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                problem = f"has {path.name!r}, which is a link or a device and could lead to other files"
                return problem, "replace or delete it"
        if not self._names():
            return ("has no run to resume", "leave `resume` out to begin one") if resume else None
        if not self.is_ours:
            return "holds other files", "choose an empty or new directory"
        if overwrite:
            for folder in sorted((self.folder / "generated").glob("*/")):
                refuse_claimed(folder)  # nidiff sample is at work in it
            return None
        if not resume:
            return "already holds a run", "continue it with `resume`, or replace it with `overwrite`"
        try:
            changed, identity = self.experiment.differences(experiment.resolved()), self.identity
        except InputError as error:
            return f"cannot be resumed ({error})", "restore it from a copy, or give it up with `overwrite`"
        if identity is None:
            return "does not say what its run is", "resume it with nidiff 0.2, if that began it"
        if changed:
            return f"holds a run with other settings ({'; '.join(changed)})", "use those, or another directory"
        file = self.model / CONFIG
        if file.is_file() and identity["process"] != process_digest(with_arrays(read_object(file, RESTORE), file)):
            try:
                check_manifest(self.model)  # a later version saved the model of this run, in other words
            except InputError:
                return f"has changed: {PARTS['process']} in {file.parent}", RESTORE
        return None

    def check_settings(self) -> None:
        """Refuse an experiment.json that is not what the run began with."""
        experiment, identity = self.experiment, self.identity
        if identity is not None and identity["settings"] != settings_digest(experiment):
            problem = "has other settings than those the run began with"
            raise FileError("out", str(self._experiment_file), problem, RESTORE)

    def check_same(self, identity: Identity) -> None:
        """Refuse to resume a run whose data, network, Σ or schedule have changed."""
        if parts := changed_parts(self.identity or {}, identity):
            raise FileError("out", str(self.folder), f"holds a run that began with others than now: {parts}", RESTORE)

    def check_steps(self, step: int, experiment: Experiment) -> None:
        """Refuse to end a run before ``step``, which it has reached, or before the step of its model."""
        done = step or (self.experiment.steps if self.has_model else 0)  # its checkpoints may have been deleted
        if experiment.steps < done:
            raise InputError("steps", experiment.steps, f"is less than the {done} that the run has done", "give more")

    # What is written -------------------------------------------------------------------------------------------------

    def begin(
        self, experiment: Experiment, denoiser: Denoiser, grid: Grid, facts: Mapping[str, Any], identity: Identity
    ) -> None:
        """Begin a run here. Until it is complete on the disk, a run that was here before is untouched."""
        unharmed = self.writing("make room or choose another directory; nothing was lost")
        with unharmed, replacing_folder(self.folder / BEGUN) as aside:
            replace_json(aside / EXPERIMENT, _described(experiment, facts, identity))
            save_process(denoiser, aside / "model", grid)
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
            shutil.rmtree(begun)
            sync(self.folder)

    def resume(
        self, step: int, experiment: Experiment, denoiser: Denoiser, facts: Mapping[str, Any], identity: Identity
    ) -> None:
        """Write what the run is from now on, and drop the log lines of steps that will be done again."""
        with self.writing():
            if not (self.model / CONFIG).is_file():
                save_process(denoiser, self.model)
            replace_json(self.folder / EXPERIMENT, _described(experiment, facts, identity))
            if self.log_file.exists():
                lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
                replace_text(self.log_file, "".join(f"{line}\n" for line in lines if 0 < _step_of(line) <= step))
        check_replaceable(self.model.resolve())  # now, not when the model is to be saved

    def writing(
        self, remedy: str = "make room or make it writable, then continue the run with --resume"
    ) -> AbstractContextManager[None]:
        """A disk that is full or gone ends the run with a sentence that says how to continue it."""
        return writing("out", self.folder, remedy)

    def log(self, step: int, **values: float) -> None:
        """Write one line to log.jsonl, and the same for TensorBoard if it is installed."""
        with self.writing():
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            self._events.write(step, values)

    def save_model(self, denoiser: Denoiser, about: Mapping[str, str], grid: Grid, identity: Identity) -> None:
        """Save the model, which ends the run."""
        try:
            save_model(denoiser, self.model, about, grid=grid, run=identity)
        except InputError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            with self.writing():  # which says how to continue
                raise error.__cause__ from error

    def samples_file(self, step: int) -> Path:
        return self.folder / "samples" / f"{step:06d}.png"

    def write_samples(
        self, step: int, denoiser: Denoiser, experiment: Experiment, shape: Sequence[int], grid: Grid
    ) -> None:
        """Draw samples [C, *event] = ``shape`` of the seeds 0, 1, … to samples/STEP.png, in the units of the data."""
        count, drawing = experiment.num_samples, experiment.sampling(denoiser.process.schedule)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what `sample` warns of was said when the run began
            x = sample(denoiser, (count, *shape), generator=range(count), **drawing).cpu()
        if grid.dtype in WHOLE:  # which cannot show what went wrong: NaN is black
            x = x.nan_to_num(nan=-1, posinf=1, neginf=-1)
        with self.writing():
            save_samples_figure(as_stored(x, denoiser.scaling, grid.dtype), grid, self.samples_file(step))


def _described(experiment: Experiment, facts: Mapping[str, Any], identity: Identity) -> dict[str, Any]:
    return {**experiment.to_json(), "resolved": facts, "identity": identity}


def _is_model(folder: Path) -> bool:
    """Whether a folder holds a model of ours, or the Σ and schedule of one."""
    with contextlib.suppress(InputError):
        read_manifest(folder)
        return True
    with contextlib.suppress(InputError):
        return bool(read_object(folder / CONFIG).get("_class_name") == "NonIsotropicScheduler")
    return False


def _step_of(line: str) -> int:
    """The step of a line of the log; 0 if it cannot be read, as the last line of a killed run."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if isinstance(step, int) else 0
