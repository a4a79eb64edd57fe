"""The run directory: its experiment, model, log and sample grids, and who may write to it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from nidiff.covariance.config import PLACES, load
from nidiff.covariance.operator import Covariance
from nidiff.data.pictures import save_grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import InputError
from nidiff.files import ASIDE, REPLACED, replace_text, writing
from nidiff.model.folder import CONFIG, has_network, save_process
from nidiff.sampling.sampler import sample
from nidiff.training.experiment import Experiment, read_experiment

VERSION_0_1 = ("covariance.json", "covariance.safetensors")  # where version 0.1 kept Σ
FILES = ("experiment.json", *VERSION_0_1, "log.jsonl", "metrics.json", "report.html")
FOLDERS = ("checkpoints", "model", f"{ASIDE}model", f"{REPLACED}model", "tensorboard", "samples", "generated")


class RunDirectory:
    """The directory of a training run, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.checkpoints, self.model, self.log_file = folder / "checkpoints", folder / "model", folder / "log.jsonl"

    @staticmethod
    def open(folder: Path) -> "RunDirectory":
        """The run in ``folder``, or an `InputError` if there is none that can be read."""
        run = RunDirectory(folder)
        if not run.exists():
            raise InputError(f"run={str(folder)!r} is not a run directory: it has no experiment.json.")
        read_experiment(folder)
        return run

    def exists(self) -> bool:
        return (self.folder / "experiment.json").is_file()

    @property
    def experiment(self) -> Experiment:
        return read_experiment(self.folder)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What came of the settings: the number of images, of parameters, …"""
        facts = json.loads((self.folder / "experiment.json").read_text()).get("resolved")
        return facts if isinstance(facts, dict) else {}

    @property
    def covariance(self) -> Covariance:
        """The Σ of the run, stored when it began."""
        # A kill while the model is replaced leaves it under another name.
        folders = [self.folder, *(self.folder / name for name in FOLDERS if name.endswith("-model"))]
        return load(next((f for f in folders if any((f / place).is_file() for place in PLACES)), self.folder))

    @property
    def has_model(self) -> bool:
        return has_network(self.model)

    def check(self, experiment: Experiment, *, resume: bool, overwrite: bool) -> None:
        """Refuse what would lose or mix up anything; nothing is written."""
        out = f"out={str(self.folder)!r}"
        if resume and overwrite:
            raise InputError("resume and overwrite exclude each other: give one.")
        if resume and not self.exists():
            raise InputError(f"{out} has no run to resume: leave --resume out to begin one.")
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{out} is a file: choose another directory.")
        if self.exists() and not resume and not overwrite:
            raise InputError(f"{out} already holds a run: continue it with --resume, or replace it with --overwrite.")
        found = self.folder.iterdir() if self.folder.is_dir() and not self.exists() else ()
        if any(path.name not in (*FILES, *FOLDERS) and not path.name.startswith(ASIDE) for path in found):
            raise InputError(f"{out} holds other files: choose an empty or new directory.")
        if resume and (changed := self.experiment.differences(experiment.resolved())):
            raise InputError(f"the run began with other settings ({'; '.join(changed)}): use those, or a new out.")

    def begin(self, experiment: Experiment, denoiser: Denoiser, facts: Mapping[str, Any]) -> None:
        """Clear the directory of an earlier run and write what this one is. The mark of a run is written last."""
        with writing("out", self.folder):
            for name in (*FOLDERS, *FILES[1:]):
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            save_process(denoiser, self.model)
            self._describe(experiment, facts)

    def resume(self, step: int, experiment: Experiment, denoiser: Denoiser, facts: Mapping[str, Any]) -> None:
        """Write what the run is from now on, and drop the log lines of steps that will be done again."""
        with self.writing():
            if not (self.model / CONFIG).is_file():
                save_process(denoiser, self.model)
            for name in VERSION_0_1:
                (self.folder / name).unlink(missing_ok=True)
            self._describe(experiment, facts)
            if self.log_file.exists():
                lines = self.log_file.read_text(errors="replace").splitlines()
                kept = [f"{line}\n" for line in lines if (_step_of(line) or step + 1) <= step]
                replace_text(self.log_file, "".join(kept))

    def _describe(self, experiment: Experiment, facts: Mapping[str, Any]) -> None:
        text = json.dumps({**experiment.to_json(), "resolved": facts}, indent=2) + "\n"
        replace_text(self.folder / "experiment.json", text)

    def check_data(self, facts: Mapping[str, Any]) -> None:
        """Refuse to resume a run whose data or network have changed."""
        before = self.facts
        changed = [f"{key}: {before[key]} → {value}" for key, value in facts.items() if before.get(key, value) != value]
        if changed:
            remedy = "restore them, or begin a new run"
            raise InputError(f"the data of the run have changed ({'; '.join(changed)}): {remedy}.")

    def writing(self) -> AbstractContextManager[None]:
        """A disk that is full or gone ends the run with a sentence that says how to continue it."""
        return writing("out", self.folder, "make room, then continue the run with --resume")

    def log(self, step: int, **values: float) -> None:
        """Write one line to log.jsonl, and the same to TensorBoard if it is installed."""
        with self.writing():
            with self.log_file.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if self._tensorboard is not None:
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, step)

    @cached_property
    def _tensorboard(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.folder / "tensorboard"))

    def write_samples(self, step: int, denoiser: Denoiser, experiment: Experiment, shape: Sequence[int]) -> None:
        """Write a grid of images of the seeds 0, 1, … to samples/STEP.png."""
        count, drawing = experiment.num_samples, experiment.sampling(denoiser.process.schedule)
        images = sample(denoiser, (count, *shape), seeds=range(count), **drawing)
        with self.writing():
            save_grid(images, self.folder / "samples" / f"{step:06d}.png")


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return None  # the last line of a killed run may be cut short
