"""A model that was opened to be sampled, and the jobs it can be given."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, get_type_hints

import torch
from accelerate import PartialState

from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import InputError, one_of
from nidiff.files import file_sha256
from nidiff.generation.job import Job
from nidiff.generation.tile import tile_size
from nidiff.model.config import model_folder
from nidiff.model.folder import image_shape, load_model
from nidiff.notation import fits, parse_call
from nidiff.sampling.sampler import SAMPLERS

PATIENCE = timedelta(days=7)  # how long a process waits for the others


class Model(NamedTuple):
    """A model that was opened."""

    path: Path
    """The run directory, or the model's own folder."""
    denoiser: Denoiser
    shape: tuple[int, ...]
    """[C, H, W]."""
    sha256: str

    @property
    def name(self) -> str:
        return self.path.resolve().name


def process_state() -> PartialState:
    """This process among those that torchrun or accelerate launch started, or alone."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def run_folder(path: Path) -> Path:
    """The run that a model folder lies in, for results belong to it; or ``path`` itself."""
    return path.parent if path.name == "model" and (path.parent / "experiment.json").is_file() else path


def open_model(path: Path, state: PartialState) -> Model:
    """The model of a run directory, or a model folder."""
    path = run_folder(path)
    denoiser = load_model(path)
    net = denoiser.net.to(state.device)  # type: ignore[attr-defined]
    shape = image_shape(net, denoiser.process.covariance)
    return Model(path, denoiser, shape, model_sha256(model_folder(path)))


def has_network(folder: Path) -> bool:
    """Whether a model folder is whole: a run that has not ended has Σ and the schedule only."""
    return any((folder / part).is_dir() for part in ("unet", "network"))


def model_sha256(folder: Path) -> str:
    """The checksum of the network and of its Σ, schedule and target: what the images of a model depend on."""
    digest = hashlib.sha256()
    for file in sorted(path for part in ("unet", "network", "scheduler") for path in (folder / part).glob("*")):
        digest.update(f"{file.relative_to(folder)} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def plan_job(
    model: Model,
    sampler: str = "dpmpp_2m",
    num_steps: int | None = None,
    *,
    clip: float | None = 1.0,
    tile: int | None = None,
    floats: bool = False,
) -> Job:
    """The job of ``model`` and a sampler as NAME:key=value,…; ``spacing`` is a key of every sampler."""
    name, options = parse_call("sampler", sampler)
    step, usual, *_ = SAMPLERS[one_of("sampler", name, SAMPLERS)]
    for key, kind in get_type_hints(step).items():
        if key in options and not fits(options[key], kind):
            raise InputError(f"sampler={sampler!r} has {key}={options[key]!r}, which is not of its type: correct it.")
    levels = len(model.denoiser.process.schedule)
    if num_steps is not None and not 1 <= num_steps <= levels:
        raise InputError(f"num_steps={num_steps} must be from 1 to {levels}, the levels of the model's schedule.")
    return Job(
        model=model.sha256,
        sampler=name,
        steps=min(20, levels) if num_steps is None else num_steps,
        spacing=str(options.pop("spacing", usual)),
        options=options,
        clip=clip,
        tile=tile_size(*model.shape[-2:]) if tile is None else tile,
        floats=floats,
    )


def cell_name(job: Job) -> str:
    """A name for the folder of a job: readable, and different for different jobs."""
    usual = job.spacing == SAMPLERS[job.sampler].spacing
    options = ({} if usual else {"spacing": job.spacing}) | job.options
    digest = hashlib.sha256(json.dumps(asdict(job), sort_keys=True).encode()).hexdigest()
    return "-".join([job.sampler, *(f"{key}={value}" for key, value in options.items()), str(job.steps), digest[:8]])


def seeds_text(seeds: Sequence[int]) -> str:
    """Rising seeds as text, as short as it can be: 0-3,8 for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][1] == seed - 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
