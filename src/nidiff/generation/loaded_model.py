"""A model loaded for sampling, on its grid or on another, and the processes that sample it."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nidiff.data.coordinates import needs_times
from nidiff.data.dataset import Dataset
from nidiff.data.grid import Grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.gaussian import common_basis
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import FileError, InputError, first_line
from nidiff.model.checkpoint import checkpoint_step, is_checkpoint, run_of
from nidiff.model.config import model_folder
from nidiff.model.folder import image_shape, open_stored, read_grid
from nidiff.model.sampling import SAMPLING, read_choices
from nidiff.model.zoo import Card, entry_of, find_model, read_card

if TYPE_CHECKING:
    from accelerate import PartialState

    from nidiff.diffusion.climatology import Times

STEPS = "steps"  # in a run: what was drawn and measured of its checkpoints
PATIENCE = timedelta(days=7)  # how long a process waits for the others
LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # set by torchrun and by MPI
ASKED = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"}  # set by accelerate launch if it is asked for several processes


class Model(NamedTuple):
    """A model for sampling items [C, *event] = ``shape``; ``path`` is its run directory, or its folder, and ``step``
    that of the checkpoint, if it is one.

    Only `home` is written to.
    """

    path: Path
    denoiser: Denoiser
    shape: tuple[int, ...]
    sha256: str
    grid: Grid
    event: tuple[int, ...] = ()  # the event shape, if it is not the one the model was trained on
    card: Card | None = None  # of a shipped model
    step: int | None = None
    times: "Times | None" = None  # of the items that it is about, one after the other

    @property
    def name(self) -> str:
        return self.path.resolve().name + ("" if self.step is None else f"-{self.step:06d}")

    @property
    def home(self) -> Path:
        """Where its results belong: its run directory, there steps/STEP for a checkpoint, or out/NAME for a shipped
        model, which is never changed."""
        if self.step is not None:
            return self.path / STEPS / f"{self.step:06d}"
        return self.path if self.card is None else Path("out") / self.name

    @property
    def sampling_file(self) -> Path:
        """Where the samplers for few steps are stored: in the model's own folder if that may change, else in `home`."""
        return (model_folder(self.path) if self.home == self.path else self.home) / SAMPLING

    @property
    def has_report(self) -> bool:
        """Whether its run has a report about it: one that ships is never changed, and a checkpoint is not the end."""
        return self.card is None and self.step is None and (self.path / "experiment.json").is_file()

    @property
    def scaling(self) -> Scaling:
        """From the units of the model to those of the data, of the times that are known."""
        return (self.denoiser.scaling or Scaling(1.0)).at_times(self.times)

    def about(self, data: Dataset, name: str | Path) -> "Model":
        """The model for the items of a file, whose times a climatology needs, and a condition that is a time."""
        climatology, condition = self.scaling.climatology, self.grid.condition
        if climatology is None:
            is_given = condition is not None and needs_times(condition) and data.times is not None
            return self._replace(times=data.times) if is_given else self
        if data.times is None:
            problem = f"has no times for its items, and the model sees differences from the {climatology.name}"
            raise FileError("file", name, problem, "give a file with times along the axis of the items")
        climatology.check(data.times)
        return self._replace(times=data.times)

    @property
    def boundary(self) -> tuple[str, ...]:
        """Of each axis: that of the basis of Σ or, for white noise, of the data's Gaussian; reflecting where both are
        white."""
        basis = common_basis(self.denoiser.process.covariance, self.denoiser.gaussian)
        return basis.boundary or ("reflecting",) * (len(self.shape) - 1)

    def at(self, event: Sequence[int]) -> "Model":
        """The same model on another grid over the same domain; ``event`` is how many points each axis has there."""
        if tuple(event) == self.shape[1:]:
            return self
        if len(event) != len(self.shape) - 1:
            raise InputError("shape", tuple(event), f"is not for the {len(self.shape) - 1} axes of the model")
        denoiser = self.denoiser.at(tuple(event))
        grid = resized(self.grid, self.shape[1:], event, self.boundary)
        model = self._replace(denoiser=denoiser, shape=(self.shape[0], *event), grid=grid, event=tuple(event))
        x, level = torch.zeros(1, *model.shape, device=denoiser.device), denoiser.process.schedule.level(0)
        try:
            with torch.inference_mode():
                denoiser(x, level)
        except (RuntimeError, ValueError) as error:  # of torch, about sizes that do not match, or of the network
            problem = f"does not fit the network ({first_line(error)})"
            raise InputError("shape", model.event, problem, "give a multiple of the model's shape") from error
        return model


class SingleProcess:
    """The only process, with the interface of accelerate's PartialState."""

    is_main_process, process_index, num_processes = True, 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_for_everyone(self) -> None:
        """There is nobody else."""


def process_state() -> "PartialState | SingleProcess":
    """This process among those that torchrun or accelerate launch started, or the only one."""
    if not any(name in os.environ for name in LAUNCHED):  # accelerate, which is slow to import, is not needed
        if os.environ.keys() >= ASKED:
            problem = "accelerate launch started one process, as it does without as many GPUs as it is asked for"
            remedy = "if you asked for several, torchrun --nproc_per_node N -m nidiff … starts them"
            warnings.warn(f"{problem}: {remedy}", stacklevel=2)
        return SingleProcess(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def run_folder(path: Path) -> Path:
    """The run directory that a model folder lies in, to which its results belong; or ``path`` itself."""
    return path.parent if path.name == "model" and (path.parent / "experiment.json").is_file() else path


def open_model(path: Path, state: "PartialState | SingleProcess", checkpoint: str | None = None) -> Model:
    """The model in a run directory, a model folder or a checkpoint, or a shipped one by its name, on the device of this
    process. ``checkpoint`` is a step of a run directory, or "latest"."""
    path = run_folder(find_model(path, "model", checkpoint))
    denoiser, sha256 = open_stored(path)
    shape = image_shape(denoiser.net, denoiser.process.covariance)
    path, step = (run_of(path), checkpoint_step(path)) if is_checkpoint(path) else (path, None)
    grid, card = read_grid(path, shape, denoiser.scaling), None if entry_of(path) is None else read_card(path)
    model = Model(path, denoiser.to(state.device), shape, sha256, grid, card=card, step=step)
    choices = () if model.home == path else read_choices(model.sampling_file, sha256)
    if not choices:
        return model
    by_count = {choice.evaluations: choice for choice in (*model.denoiser.choices, *choices)}
    return model._replace(denoiser=model.denoiser.with_choices(tuple(by_count.values())))


def resized(grid: Grid, before: Sequence[int], after: Sequence[int], boundary: Sequence[str]) -> Grid:
    """The grid of other points over the same domain: coordinates are interpolated linearly, and continued at the ends.

    A periodic axis of n points has them at i / n of its length, any other at (i + ½) / n.
    """
    coordinates = {}
    for axis, old, new, name in zip(grid.axes, before, after, boundary, strict=True):
        if axis in grid.coordinates:
            first = 0.0 if name == "periodic" else 0.5
            places = (np.arange(new) + first) * old / new - first  # among the numbers 0, 1, … of the old points
            values = np.array(grid.coordinates[axis])
            low = np.floor(places).astype(int).clip(0, max(old - 2, 0))
            high = (low + 1).clip(max=old - 1)
            coordinates[axis] = tuple((values[low] + (places - low) * (values[high] - values[low])).tolist())
    rate = None if grid.rate is None else max(1, round(grid.rate * after[-1] / before[-1]))
    return replace(grid, coordinates=coordinates, rate=rate)
