"""A sampling job: from a loaded model and a sampler to the images of seeds."""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nidiff.data.coordinates import needs_times
from nidiff.data.dataset import WHOLE, as_stored
from nidiff.diffusion.climatology import parse_times
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.spacing import ANGLE, SPACINGS
from nidiff.errors import InputError, one_of, renamed
from nidiff.generation.conditioning import Conditioning, plan_conditions
from nidiff.generation.loaded_model import Model
from nidiff.notation import parse_call
from nidiff.precision import InBf16, has_bf16
from nidiff.recipe import check_whole
from nidiff.sampling.sampler import DEFAULT, SAMPLERS, as_sampler, default_steps, sample
from nidiff.sampling.step import Visit
from nidiff.sampling.tile import tile_size
from nidiff.sealed import digest
from nidiff.training.experiment import experiment_file, read_experiment

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.diffusion.climatology import Times

PRECISIONS = ("fp32", "bf16")
Drawing: TypeAlias = tuple[Denoiser, Sequence[int], Mapping[str, Any]]
"""A denoiser, the seeds that it draws at a time, and the other arguments of `nidiff.sample`."""


@dataclass(frozen=True, eq=False)
class Job:
    """All that decides the pixels of a seed."""

    model: str  # its checksum
    sampler: str
    num_steps: int
    spacing: str
    options: dict[str, Any] = field(default_factory=dict)  # of the sampler, such as eta
    clip: float | None = 1.0  # x̂0 is clipped to [−clip, clip]; None: it is not
    tile: int = 0  # images in one call of the network, whatever the batch; 0: the batch
    precision: str = "fp32"  # of the network
    floats: bool = False  # write float32 in [−1, 1] instead of whole numbers
    shape: tuple[int, ...] = ()  # of the event, if it is not that of the model
    conditioning: Conditioning = field(default_factory=Conditioning)
    times: tuple[str, ...] = ()  # of the seeds in turn, whose climatology is put back or that are a condition

    def to_json(self) -> dict[str, Any]:
        """The job as it is stored, and as its digest is made from; what came later than it only where it is set."""
        values = {
            key: value
            for key, value in vars(self).items()
            if key not in ("shape", "precision", "conditioning", "times")
        }
        values |= {"precision": self.precision} if self.precision != "fp32" else {}
        values |= {"times": list(self.times)} if self.times else {}
        return values | ({"shape": list(self.shape)} if self.shape else {}) | self.conditioning.to_json()

    def times_of(self, seeds: Sequence[int]) -> "Times | None":
        """The time of each seed; None without `times`."""
        if not self.times:
            return None
        return np.array([self.times[seed % len(self.times)] for seed in seeds], dtype="datetime64[s]")

    @property
    def name(self) -> str:
        """A name for the folder of the job: readable, and different for different jobs."""
        usual = self.spacing == SAMPLERS[self.sampler].spacing
        options = ({} if usual else {"spacing": self.spacing}) | self.options | self.conditioning.labels
        options |= {"times": f"{self.times[0][:10]}_{self.times[-1][:10]}"} if self.times else {}
        words = [self.sampler, *(f"{key}={value}" for key, value in options.items()), str(self.num_steps)]
        readable = re.sub(r"[^\w.=+-]", "_", "-".join(words))[:100]  # a name that every file system takes
        return f"{readable}-{digest(self.to_json())[:8]}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `nidiff.sample`."""
        named = self.spacing in (*SPACINGS, ANGLE)  # else it is the function of the sampler
        drawing = {"sampler": self.sampler, "num_steps": self.num_steps, "tile": self.tile or None}
        return {**drawing, **({"spacing": self.spacing} if named else {}), **self.options}

    def prepared(self, denoiser: Denoiser) -> Denoiser:
        """The model's denoiser, clipped and in the precision of the job."""
        clipped = denoiser.clipped(self.clip)
        return clipped.with_net(InBf16(denoiser.net)) if self.precision == "bf16" else clipped

    def denoiser(self, denoiser: Denoiser, seeds: Sequence[int]) -> Denoiser:
        """The same with the conditions of ``seeds``."""
        return self.conditioning.bind(self.prepared(denoiser), seeds)


def plan_job(
    model: Model,
    sampler: str | None = None,
    num_steps: int | None = None,
    *,
    clip: float | None = None,
    tile: int | None = None,
    precision: str = "fp32",
    floats: bool = False,
    times: str | None = None,
    **conditions: Any,
) -> Job:
    """The job of ``model`` and a sampler as NAME:key=value,…; ``spacing`` is a key of every sampler.

    The default sampler is the one that was tuned for ``num_steps`` evaluations, where one was (`choice_for`); else that
    of `default_sampler`. ``clip`` is None for that of the model, or 0 for no clipping. ``times``, as 2020-01:2020-12,
    are those of the seeds in turn; their climatology is put back. ``conditions`` are those of `plan_conditions`.
    """
    is_usual = sampler is None and conditions.get("guidance") in (None, 1)
    choice = model.denoiser.choice_for(num_steps) if is_usual else None
    if choice is not None:
        near = "" if choice.evaluations == num_steps else f", the nearest to {num_steps}"
        print(f"using {choice.sampler}, tuned for {choice.evaluations} evaluations{near}", file=sys.stderr)
        sampler, num_steps = choice.sampler, choice.num_steps
    elif sampler is None:
        sampler, usual = default_sampler(model)
        num_steps = usual if num_steps is None else num_steps
        if model.card is None and sampler != DEFAULT:
            print(f"using {sampler}, the sampler of the run", file=sys.stderr)
    if clip is not None and not 0 <= clip < math.inf:
        raise InputError("clip", clip, "is not a range", "give a positive number, or 0 for no clipping")
    chosen, options = as_sampler(sampler)
    function = f"own-{getattr(chosen.spacing, '__name__', 'function')}"  # a spacing that has no name in SPACINGS
    if chosen.start != "prior":
        where = {"max_loss": chosen.max_loss, "level": chosen.level}
        options |= {"start": chosen.start} | {key: value for key, value in where.items() if value is not None}
    if chosen.rescale:
        options |= {"rescale": True}
    when = None if times is None else _known_times(model, times)
    known = model.times if when is None else when
    steps = default_steps(chosen, model.denoiser.process.schedule) if num_steps is None else num_steps
    return Job(
        model=model.sha256,
        sampler=parse_call("sampler", sampler)[0],
        num_steps=check_whole("num_steps", steps),
        spacing=chosen.spacing if isinstance(chosen.spacing, str) else function,
        options=options,
        clip=model.denoiser.clip if clip is None else clip or None,
        tile=tile_size(*model.shape[1:]) if tile is None else check_whole("tile", tile, 0),
        precision=check_precision(precision, model.denoiser.device.type),
        floats=floats and model.grid.dtype in WHOLE,
        shape=model.event,
        conditioning=plan_conditions(model.denoiser, grid=model.grid, times=known, **conditions),
        times=() if when is None else tuple(when.astype(str).tolist()),
    )


def _known_times(model: Model, text: str) -> "Times":
    """Times for which the model has a climatology, or which are a condition."""
    times, climatology = parse_times(text), model.scaling.climatology
    if climatology is not None:
        with renamed("remove", "times"):
            climatology.check(times)
    elif model.grid.condition is None or not needs_times(model.grid.condition):
        problem = "has no meaning for a model without a climatology or a condition that is a time"
        raise InputError("times", text, problem, "leave it out")
    return times


def check_precision(precision: str, device: str) -> str:
    """Refuse bf16 where it would be emulated: the samples would not be faster, only worse."""
    if one_of("precision", precision, PRECISIONS) == "bf16" and not has_bf16(device):
        problem = "is not computed by this machine, only emulated, many times slower than fp32"
        raise InputError("precision", precision, problem, "leave it out")
    return precision


def default_sampler(model: Model) -> tuple[str, int | None]:
    """The sampler of a model where none is asked for, and its number of steps, if that is not the sampler's own: those
    of the pictures of its training, of a shipped model those of its picture."""
    if model.card is not None:
        return model.card.picture.sampler, model.card.picture.num_steps
    if not experiment_file(model.path).is_file():
        return DEFAULT, None
    drawing = read_experiment(model.path).sampling(model.denoiser.process.schedule)
    return drawing["sampler"], drawing["num_steps"]


def draw_seeds(
    denoiser: Denoiser, job: Job, seeds: Sequence[int], shape: Sequence[int], callback: Callable[[Visit], None]
) -> "Tensor":
    """The images [N, C, *event] of ``seeds`` in the units of the model."""
    drawing = (job.denoiser(denoiser, seeds), seeds, job.arguments)
    return next(draw_blocks([drawing], shape, lambda done: None, callback))


def draw_blocks(
    drawings: Iterable[Drawing],
    shape: Sequence[int],
    show: Callable[[float], None],
    watch: Callable[[Visit], None] | None = None,
) -> Iterator["Tensor"]:
    """The images [N, C, *event] of each block of seeds, if all of them are finite.

    ``show`` is called with how many images are done, ``watch`` at each level.
    """
    before = 0
    for denoiser, seeds, arguments in drawings:

        def advance(visit: Visit, before: int = before, size: int = len(seeds)) -> None:
            show(before + size * visit.step / visit.num_steps)
            if watch is not None:
                watch(visit)

        images = sample(denoiser, (len(seeds), *shape), generator=seeds, callback=advance, **arguments).cpu()
        finite = as_stored(images, denoiser.scaling, "float32").isfinite()  # `sample` has looked at the images
        if denoiser.scaling is not None and denoiser.scaling.domain is not None:
            finite |= ~denoiser.scaling.domain
        if not bool(finite.all()):
            seed = seeds[int((~finite).flatten(1).any(1).nonzero()[0])]
            problem = f"the image of seed {seed} has NaN or infinite pixels"
            raise InputError(None, None, problem, "use more steps, or train the model again")
        yield images
        before += len(seeds)


def as_saved(x: "Tensor", scaling: Scaling | None, dtype: str, floats: bool) -> "Tensor":
    """Images in the units of the data and the type of its files. With ``floats``, whole numbers are not rounded, and
    their range is [−1, 1]."""
    if not (floats and dtype in WHOLE):
        return as_stored(x, scaling, dtype)
    if scaling in (None, WHOLE[dtype]):
        return x.clamp(-1, 1)
    return WHOLE[dtype].to_model(as_stored(x, scaling, "float32")).clamp(-1, 1)
