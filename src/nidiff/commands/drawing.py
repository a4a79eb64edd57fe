"""What the commands that draw images from a model share: flags, seeds, samplers by name, and the model itself."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_type_hints

from tyro.conf import arg

from nidiff.errors import InputError
from nidiff.notation import fits, parse_call

if TYPE_CHECKING:
    from accelerate import PartialState

    from nidiff.diffusion.denoiser import Denoiser
    from nidiff.generation.job import Job

MOST_SEEDS = 10_000_000
PATIENCE = timedelta(days=7)  # how long a process waits for the others


class Model(NamedTuple):
    """A model that was opened."""

    path: Path
    """The run directory, or the model's own folder."""
    denoiser: "Denoiser"
    shape: tuple[int, ...]
    """[C, H, W]."""
    sha256: str

    @property
    def name(self) -> str:
        return self.path.resolve().name


@dataclass(frozen=True)
class Drawing:
    """Flags of every command that draws images."""

    seeds: str = "0-999"
    """One image per seed, such as 0-49999 or 0,3,10-20."""
    batch: int = 128
    """Images at a time on each process. It changes the speed and the memory, not the images."""
    clip: float | None = 1.0
    """x̂0 is clipped to [-clip, clip] at every step; None: not at all."""
    tile: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 1 to 64 by the size)")] = None
    """Images in a call of the network, so that an image has the same bits in any batch; 0: the batch, fast on a GPU."""

    def job(self, model: Model, sampler: str, steps: int | None, floats: bool = False) -> "Job":
        """The job of ``model`` and a sampler as NAME:key=value,…; ``spacing`` is a key of every sampler."""
        from nidiff.errors import one_of
        from nidiff.generation.job import Job
        from nidiff.generation.tile import tile_size
        from nidiff.sampling.sampler import SAMPLERS

        name, options = parse_call("sampler", sampler)
        step, usual, *_ = SAMPLERS[one_of("sampler", name, SAMPLERS)]
        for key, kind in get_type_hints(step).items():
            if key in options and not fits(options[key], kind):
                raise InputError(
                    f"sampler={sampler!r} has {key}={options[key]!r}, which is not of its type: correct it."
                )
        levels = len(model.denoiser.process.schedule)
        if steps is not None and not 1 <= steps <= levels:
            raise InputError(f"steps={steps} must be from 1 to {levels}, the levels of the model's schedule.")
        return Job(
            model=model.sha256,
            sampler=name,
            steps=min(20, levels) if steps is None else steps,
            spacing=str(options.pop("spacing", usual)),
            options=options,
            clip=self.clip,
            tile=tile_size(*model.shape[-2:]) if self.tile is None else self.tile,
            floats=floats,
        )


def process_state() -> "PartialState":
    """This process among those that torchrun or accelerate launch started, or alone."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def open_model(path: Path, state: "PartialState") -> Model:
    """The model of a run directory, or a model folder."""
    from nidiff.evaluation.provenance import model_sha256
    from nidiff.model.config import model_folder
    from nidiff.model.folder import image_shape, load_model

    if path.name == "model" and (path.parent / "experiment.json").is_file():
        path = path.parent  # results belong to the run
    denoiser = load_model(path)
    net = denoiser.net.to(state.device)  # type: ignore[attr-defined]
    shape = image_shape(net, denoiser.process.covariance)
    return Model(path, denoiser, shape, model_sha256(model_folder(path)))


def parse_seeds(words: str) -> list[int]:
    """0-3,8 as [0, 1, 2, 3, 8]: rising, without repeats."""
    seeds: set[int] = set()
    for part in words.split(","):
        ends = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if last < first:
            raise InputError(f"seeds={words!r} cannot be read: give numbers and ranges such as 0-49999 or 0,3,10-20.")
        if len(seeds) + last - first >= MOST_SEEDS:
            raise InputError(f"seeds={words!r} are more than {MOST_SEEDS:,}: give fewer at a time.")
        seeds.update(range(first, last + 1))
    return sorted(seeds)


def seeds_text(seeds: list[int]) -> str:
    """What `parse_seeds` reads, as short as it can be."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][1] == seed - 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def cell_name(job: "Job") -> str:
    """A name for the folder of a job: readable, and different for different jobs."""
    from nidiff.sampling.sampler import SAMPLERS

    usual = job.spacing == SAMPLERS[job.sampler].spacing
    options = ({} if usual else {"spacing": job.spacing}) | job.options
    digest = hashlib.sha256(json.dumps(asdict(job), sort_keys=True).encode()).hexdigest()
    return "-".join([job.sampler, *(f"{key}={value}" for key, value in options.items()), str(job.steps), digest[:8]])
