"""The run directory: who may write to it, its log and its sample grids."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nidiff.covariance.operator import Covariance
from nidiff.data.pictures import save_grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import InputError
from nidiff.files import replace_text
from nidiff.sampling.sampler import sample
from nidiff.training.checkpoint import list_checkpoints
from nidiff.training.experiment import Experiment, read_experiment

OURS = (
    "experiment.json",
    "covariance.json",
    "covariance.safetensors",
    "checkpoints",
    "model",
    "log.jsonl",
    "tensorboard",
    "samples",
    "generated",
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
        if (
            not self.exists()
            and self.folder.is_dir()
            and any(not _is_ours(path.name) for path in self.folder.iterdir())
        ):
            raise InputError(f"out={str(self.folder)!r} holds other files: choose an empty or new directory.")
        if resume:
            changed = read_experiment(self.folder).differences(experiment.resolved())
            if changed:
                raise InputError(
                    f"the run was begun with other settings ({'; '.join(changed)}): use those, or a new out."
                )

    def begin(self, experiment: Experiment, covariance: Covariance, facts: Mapping[str, Any]) -> None:
        """Clear the directory of an earlier run and write what this one is. The mark of a run is written last."""
        try:
            for name in OURS[1:]:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            covariance.save(self.folder)
            self.describe(experiment, covariance, facts)
        except OSError as error:
            raise InputError(
                f"out={str(self.folder)!r} cannot be written ({error.strerror or error}): choose another."
            ) from error

    def describe(self, experiment: Experiment, covariance: Covariance, facts: Mapping[str, Any]) -> None:
        """Write experiment.json: every setting, and what came of it."""
        resolved = {"covariance": covariance.to_config(), **facts}
        text = json.dumps({**experiment.to_json(), "resolved": resolved}, indent=2) + "\n"
        replace_text(self.folder / "experiment.json", text)

    def check_data(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on with a run whose data or network are not what they were."""
        before = json.loads((self.folder / "experiment.json").read_text()).get("resolved", {})
        changed = [f"{key}: {before[key]} → {value}" for key, value in facts.items() if before.get(key, value) != value]
        if changed:
            raise InputError(f"the data of the run have changed ({'; '.join(changed)}): restore them, or begin anew.")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A disk that is full or gone ends the run with a sentence that says where to go on."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"out={str(self.folder)!r} cannot be written ({error.strerror or error}); {self.last_checkpoint()}: "
                "make room and --resume."
            ) from error

    def resume_at(self, step: int) -> None:
        """Forget log lines of steps that will be done again."""
        log = self.folder / "log.jsonl"
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()
            replace_text(log, "".join(f"{line}\n" for line in lines if (_step_of(line) or step + 1) <= step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line of log.jsonl, and the same to TensorBoard where it is installed."""
        with self.writing():
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
        with self.writing():
            save_grid(images, self.folder / "samples" / f"{step:06d}.png")

    def last_checkpoint(self) -> str:
        checkpoints = list_checkpoints(self.folder / "checkpoints")
        return f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"


def _is_ours(name: str) -> bool:
    return name in OURS or name.startswith((".tmp-", ".old-"))


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
