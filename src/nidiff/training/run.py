"""The run directory: who may write to it, its log and its sample grids."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import InputError
from nidiff.experiment import Experiment, read_experiment
from nidiff.report.grid import save_grid
from nidiff.sampling.sampler import sample
from nidiff.training.checkpoint import list_checkpoints

OURS = (
    "experiment.json",
    "covariance.json",
    "covariance.safetensors",
    "checkpoints",
    "model",
    "log.jsonl",
    "tensorboard",
    "samples",
    "metrics.json",
    "report.html",
)


class Run:
    """A run directory that holds ``experiment``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def exists(self) -> bool:
        return (self.folder / "experiment.json").is_file()

    def check(self, experiment: Experiment, *, resume: bool, overwrite: bool) -> None:
        """Refuse what would lose or mix up anything; nothing is written."""
        if resume and overwrite:
            raise InputError("resume and overwrite exclude each other: give one.")
        if resume and not self.exists():
            raise InputError(f"out={str(self.folder)!r} has no run to resume: leave --resume out to begin one.")
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"out={str(self.folder)!r} is a file: choose another directory.")
        if self.exists() and not resume and not overwrite:
            raise InputError(
                f"out={str(self.folder)!r} holds a run already: --resume goes on with it, --overwrite begins anew."
            )
        if not self.exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise InputError(f"out={str(self.folder)!r} holds other files: choose an empty or new directory.")
        if resume:
            changed = read_experiment(self.folder).differences(experiment.resolved())
            if changed:
                raise InputError(
                    f"the run was begun with other settings ({'; '.join(changed)}): use those, or a new out."
                )

    def begin(self, experiment: Experiment, covariance: Covariance, facts: Mapping[str, Any]) -> None:
        """Clear the directory of an earlier run and write what this one is."""
        try:
            for name in OURS:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            covariance.save(self.folder)
            resolved = {"covariance": covariance.to_config(), **facts}
            text = json.dumps({**experiment.to_json(), "resolved": resolved}, indent=2) + "\n"
            (self.folder / "experiment.json").write_text(text)
        except OSError as error:
            raise InputError(
                f"out={str(self.folder)!r} cannot be written ({error.strerror}): choose another."
            ) from error

    def resume_at(self, step: int) -> None:
        """Forget log lines of steps that will be done again."""
        log = self.folder / "log.jsonl"
        if log.exists():
            lines = [line for line in log.read_text().splitlines() if _step_of(line) is not None]
            log.write_text("".join(f"{line}\n" for line in lines if (_step_of(line) or 0) <= step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line of log.jsonl, and the same to TensorBoard where it is installed."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._writer is None:
            self._writer = _tensorboard(self.folder / "tensorboard")
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def write_samples(self, step: int, denoiser: Denoiser, experiment: Experiment, shape: Sequence[int]) -> None:
        """A grid of images of the seeds 0, 1, … as samples/STEP.png."""
        count = experiment.num_samples
        images = sample(
            denoiser.clipped(1.0),
            (count, *shape),
            sampler=experiment.sampler,
            num_steps=min(experiment.sample_steps, len(denoiser.process.schedule)),
            seeds=range(count),
        )
        save_grid(images, self.folder / "samples" / f"{step:06d}.png")

    def last_checkpoint(self) -> str:
        checkpoints = list_checkpoints(self.folder / "checkpoints")
        return f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return None  # the last line of a killed run may be cut short


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(str(folder))
