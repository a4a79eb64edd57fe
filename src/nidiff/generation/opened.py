"""A model opened for sampling, and the jobs it can be given."""

import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nidiff.data.dataset import WHOLE
from nidiff.data.grid import Grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import InputError, first_line, shown
from nidiff.generation.job import Job
from nidiff.generation.told import planned
from nidiff.model.config import model_folder
from nidiff.model.folder import image_shape, load_model, read_grid
from nidiff.model.manifest import model_sha256
from nidiff.model.zoo import Card, entry_of, find_model, read_card
from nidiff.notation import parse_call
from nidiff.recipe import check_whole, fits
from nidiff.sampling.sampler import DEFAULT, SAMPLERS, as_sampler, default_steps
from nidiff.sampling.step import Sampler
from nidiff.sampling.tile import tile_size
from nidiff.sealed import digest

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState

PATIENCE = timedelta(days=7)  # how long a process waits for the others


class Model(NamedTuple):
    """A model opened for sampling items [C, *event] = ``shape``; ``path`` is its run directory, or its own folder.

    Only `home` is written to.
    """

    path: Path
    denoiser: Denoiser
    shape: tuple[int, ...]
    sha256: str
    grid: Grid
    event: tuple[int, ...] = ()  # the event shape, if it is not the one the model was trained on
    card: Card | None = None  # of a model that ships with nidiff

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def home(self) -> Path:
        """Where its results belong: its run directory, or out/NAME for a model that ships, which is never changed."""
        return self.path if self.card is None else Path("out") / self.name

    def at(self, event: Sequence[int]) -> "Model":
        """The same model on another grid over the same domain; ``event`` is how many points each axis has there."""
        if tuple(event) == self.shape[1:]:
            return self
        if len(event) != len(self.shape) - 1:
            axes = " × ".join(map(str, self.shape[1:]))
            raise InputError(f"shape={shown(tuple(event))} must have as many numbers as the model's own, {axes}.")
        denoiser = self.denoiser.at(tuple(event))
        grid = resized(self.grid, self.shape[1:], event, boundaries(self.denoiser, len(event)))
        model = self._replace(denoiser=denoiser, shape=(self.shape[0], *event), grid=grid, event=tuple(event))
        model.try_network()
        return model

    def try_network(self) -> None:
        """Call the network once, and refuse a shape that it cannot take."""
        import torch

        x, level = torch.zeros(1, *self.shape, device=self.denoiser.device), self.denoiser.process.schedule.level(0)
        try:
            with torch.inference_mode():
                self.denoiser(x, level)
        except InputError as error:
            raise InputError(f"shape={self.event} does not fit the network: {error}") from error
        except (RuntimeError, ValueError) as error:  # of torch, about sizes that do not match
            problem = f"the network cannot take it ({first_line(error)})"
            raise InputError(f"shape={self.event}: {problem}; give a multiple of the model's own.") from error


class Alone:
    """The only process, as accelerate's PartialState would describe it."""

    is_main_process, process_index, num_processes = True, 0, 1

    def __init__(self, device: "torch.device") -> None:
        self.device = device

    def wait_for_everyone(self) -> None:
        """There is nobody else."""


def process_state() -> "PartialState | Alone":
    """This process among those that torchrun or accelerate launch started, which needs accelerate, or alone."""
    import torch

    if find_spec("accelerate") is None and "WORLD_SIZE" not in os.environ:
        return Alone(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def run_folder(path: Path) -> Path:
    """The run directory that a model folder lies in, to which its results belong; or ``path`` itself."""
    return path.parent if path.name == "model" and (path.parent / "experiment.json").is_file() else path


def open_model(path: Path, state: "PartialState | Alone") -> Model:
    """The model in a run directory or a model folder, or one that ships, by its name, on the device of this process."""
    path = run_folder(find_model(path, "model"))
    denoiser = load_model(path).to(state.device)
    shape = image_shape(denoiser.net, denoiser.process.covariance)
    grid = read_grid(path, shape, denoiser.scaling)
    sha256, card = model_sha256(model_folder(path), checked=True), None if entry_of(path) is None else read_card(path)
    return Model(path, denoiser, shape, sha256, grid, card=card)


def plan_job(
    model: Model,
    sampler: str | None = None,
    num_steps: int | None = None,
    *,
    clip: float | None = None,
    tile: int | None = None,
    floats: bool = False,
    classes: Sequence[int] | None = None,
    guidance: float | None = None,
    guidance_interval: Sequence[float] | None = None,
    condition: Path | None = None,
) -> Job:
    """The job of ``model`` and a sampler as NAME:key=value,…; ``spacing`` is a key of every sampler.

    Without a sampler it is dpmpp_2m or, of a model that ships, that of its picture, with as many steps. ``clip`` is
    None for the model's own, or 0 for no clipping. ``classes`` are those of the seeds in turn: by default all of the
    model's, and empty for none. ``condition`` is an .npy or .npz file of conditions, a row per seed in turn.
    """
    if sampler is None:
        usual = (DEFAULT, None) if model.card is None else (model.card.picture.sampler, model.card.picture.num_steps)
        sampler, num_steps = usual[0], usual[1] if num_steps is None else num_steps
    if not isinstance(sampler, str):
        raise InputError(f"sampler={sampler!r} must be a name, which is kept with the images: add yours to SAMPLERS.")
    if clip is not None and not (fits(clip, float) and 0 <= clip < math.inf):
        raise InputError(f"clip={shown(clip)} must be a positive number, or 0 for no clipping.")
    num_steps = None if num_steps is None else check_whole("num_steps", num_steps)
    tile = None if tile is None else check_whole("tile", tile, 0)
    chosen, options = as_sampler(sampler)
    own = f"own-{getattr(chosen.spacing, '__name__', 'function')}"  # a function that has no name in SPACINGS
    return Job(
        model=model.sha256,
        sampler=parse_call("sampler", sampler)[0],
        num_steps=default_steps(chosen, model.denoiser.process.schedule) if num_steps is None else num_steps,
        spacing=chosen.spacing if isinstance(chosen.spacing, str) else own,
        options=options | _warm(chosen),
        clip=model.denoiser.clip if clip is None else clip or None,
        tile=tile_size(*model.shape[1:]) if tile is None else tile,
        floats=floats and model.grid.dtype in WHOLE,
        shape=model.event,
        **planned(model.denoiser, classes, guidance, guidance_interval, condition),
    )


def _warm(sampler: Sampler) -> dict[str, Any]:
    """A warm start as arguments of `nidiff.sample`; nothing for a start at the prior."""
    bound = {} if sampler.bound is None else {"bound": sampler.bound}
    return {} if sampler.start == "prior" else {"start": sampler.start, **bound}


def cell_name(job: Job) -> str:
    """A name for the folder of a job: readable, and different for different jobs."""
    usual = job.spacing == SAMPLERS[job.sampler].spacing
    options = ({} if usual else {"spacing": job.spacing}) | job.options | job.told
    words = [job.sampler, *(f"{key}={value}" for key, value in options.items()), str(job.num_steps)]
    readable = re.sub(r"[^\w.=+-]", "_", "-".join(words))[:100]  # a name that every file system takes
    return f"{readable}-{digest(job.to_json())[:8]}"


def checked_seeds(seeds: Any) -> list[int]:
    """Seeds, rising and without repeats."""
    try:
        values = sorted({operator.index(seed) for seed in seeds})
    except TypeError as error:
        raise InputError(f"seeds={shown(seeds)} must be whole numbers, such as range(1000).") from error
    if values and not 0 <= values[0] <= values[-1] < 2**63:
        raise InputError(f"seeds={shown(seeds)} must be from 0 to 2**63 - 1.")
    return values


def boundaries(denoiser: Denoiser, axes: int) -> tuple[str, ...]:
    """The boundary of each axis of the event: that of Σ, else, as white noise has none, that of the data's Gaussian;
    reflecting where neither says."""
    of_data = None if denoiser.gaussian is None else denoiser.gaussian.spatial.boundary
    return denoiser.process.covariance.spatial.boundary or of_data or ("reflecting",) * axes


def resized(grid: Grid, before: Sequence[int], after: Sequence[int], words: Sequence[str]) -> Grid:
    """The grid of other points over the same domain: coordinates are interpolated linearly between the points."""
    coordinates = {
        axis: tuple(_between(grid.coordinates[axis], _places(old, new, boundary)))
        for axis, old, new, boundary in zip(grid.axes, before, after, words, strict=True)
        if axis in grid.coordinates
    }
    rate = None if grid.rate is None else max(1, round(grid.rate * after[-1] / before[-1]))
    return replace(grid, coordinates=coordinates, rate=rate)


def _places(old: int, new: int, boundary: str) -> Iterator[float]:
    """Where the points of the new grid lie among the numbers 0, 1, … of the old ones: a periodic axis of n points has
    them at i / n of its length, any other at (i + ½) / n."""
    first = 0.0 if boundary == "periodic" else 0.5
    return ((index + first) * old / new - first for index in range(new))


def _between(values: Sequence[float], places: Iterable[float]) -> Iterator[float]:
    """The values at places between their numbers; at the ends the line is continued."""
    for place in places:
        low = min(max(math.floor(place), 0), max(len(values) - 2, 0))
        high = min(low + 1, len(values) - 1)
        yield values[low] + (place - low) * (values[high] - values[low])
