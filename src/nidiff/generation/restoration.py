"""What observed items may have been: several samples of each, their mean and their spread, and the folder they fill.

restoration.json  what decides the numbers, and what was measured
samples.npz       arr_0 [N, samples, *event, C] in the units of the data, and seeds [N, samples]
mean.npy          [N, *event, C], the mean of the samples before rounding
spread.npy        their standard deviation
observed.npy      [N, …, C], what was observed; NaN where nothing was
png/              8-bit pictures: ITEM-SEED.png, and ITEM-mean.png
samples.nc, …     all samples, one after the other, if asked for (`nidiff.generation.export`)
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, save_png
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of
from nidiff.files import ASIDE, as_path, read_object, replace_json, replace_npz, replacing, replacing_folder, writing
from nidiff.generation.export import WHOLE_FILES, Samples, check_export
from nidiff.generation.job import Job, kept
from nidiff.generation.opened import Model, plan_job
from nidiff.generation.told import tell
from nidiff.progress import progress_bar
from nidiff.recipe import check_number, check_whole
from nidiff.sampling.sampler import Visit, sample
from nidiff.sampling.tile import tile_size
from nidiff.sealed import digest
from nidiff.training.draws import mixed_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

FACTS = "restoration.json"
NUM_STEPS, MOST_TILE = 50, 8  # unless asked otherwise; an item has few samples
INTERVAL = 0.9  # whose coverage is measured, or the nearest that so few samples have
FORMATS = ("npz", "netcdf", "zarr")
UNITS = ("data", "model")
Prepare = Callable[[int, list[int]], tuple[Denoiser, dict[str, Any]]]
"""(item, seeds) -> the denoiser of this item, and other arguments of `nidiff.sample`."""


@dataclass(frozen=True, eq=False)
class Restoration:
    """Samples ``x`` [N, S, C, *event] in the units of the model, by seed [N, S], of what was ``observed`` [N, C, …] in
    the units of the data, NaN where nothing was."""

    x: Tensor
    seeds: "NDArray[np.int64]"
    observed: Tensor
    grid: Grid
    scaling: Scaling | None
    truth: Tensor | None = None
    """[N, C, *event] in the units of the data, where it is known."""
    hidden: Tensor | None = None
    """Where errors are measured, of the shape of the truth; None, or nowhere: everywhere."""
    label: str = "observed"
    """What the figure calls that."""

    @property
    def samples(self) -> Tensor:
        """[N, S, C, *event] in the units of the data, not rounded."""
        return as_stored(self.x.flatten(0, 1), self.scaling, "float32").reshape(self.x.shape)

    @property
    def mean(self) -> Tensor:
        return self.samples.double().mean(1).float()

    @property
    def spread(self) -> Tensor:
        """The standard deviation of the samples; 0 of a single one."""
        return self.samples.double().std(1, correction=min(1, self.x.shape[1] - 1)).float()

    @property
    def same(self) -> bool:
        """Whether every item has the same sample again and again."""
        return self.x.shape[1] > 1 and bool((self.x == self.x[:, :1]).all())

    def errors(self) -> dict[str, Any]:
        """Root mean square errors of the mean and of a sample, where nothing was observed, and how often the truth lies
        in an interval of the samples. Channels with units of their own are measured in those of the model.

        The truth lies between the k-th of S samples from below and the k-th from above with probability
        1 − 2k / (S + 1) if it and they are draws of one law, whatever that is. k is that of the interval nearest to
        90 %. Whole numbers may be half a step beyond its ends.
        """
        if self.truth is None:
            return {}
        truth, count = self.truth.double(), self.x.shape[1]
        everywhere = torch.ones_like(truth, dtype=torch.bool)
        where = self.hidden if self.hidden is not None and bool(self.hidden.any()) else everywhere
        samples, units = self.samples.double(), "data"
        if self.scaling is not None and isinstance(self.scaling.scale, tuple) and len(self.scaling.scale) > 1:
            samples, truth, units = self.x.double(), self.scaling.to_model(truth), "model"

        def rms(error: Tensor) -> float:
            return error.square().mean().sqrt().item()

        each = torch.stack([one[where] - truth[where] for one in samples.unbind(1)])
        found: dict[str, Any] = {"units": units}
        found |= {"rmse_of_mean": rms((samples.mean(1) - truth)[where]), "rmse_of_sample": rms(each)}
        if count > 1:
            k = max(1, round((1 - INTERVAL) * (count + 1) / 2))
            rising, margin = samples.sort(1).values, 0.5 if self.grid.dtype in WHOLE else 0.0
            inside = (truth >= rising[:, k - 1] - margin) & (truth <= rising[:, -k] + margin)
            found |= {"coverage": inside[where].double().mean().item(), "interval": 1 - 2 * k / (count + 1)}
        return found

    def write(self, folder: Path, kind: str, about: Mapping[str, str]) -> None:
        """All files but `FACTS`."""
        stored = kept(self.x.flatten(0, 1), self.scaling, self.grid.dtype)
        flat = Samples(stored.numpy(), self.seeds.flatten(), self.grid, about)
        samples = _channels_last(stored.reshape(self.x.shape), 2)
        replace_npz(folder / "samples.npz", {"arr_0": samples, "seeds": self.seeds})
        for name, values in (("mean", self.mean), ("spread", self.spread), ("observed", self.observed.float())):
            with replacing(folder / f"{name}.npy") as file:
                np.lib.format.write_array(file, _channels_last(values, 1), allow_pickle=False)
        if kind in WHOLE_FILES:
            name, write = WHOLE_FILES[kind]
            write(flat, folder / name)
        if self.grid.kind == "picture":
            mean = as_stored(self.x.double().mean(1), self.scaling, self.grid.dtype)
            for item, pictures in enumerate(as_grey_or_rgb(stored).reshape(len(self.x), -1, *_like(stored))):
                for seed, picture in zip(self.seeds[item], pictures, strict=True):
                    save_png(picture.movedim(0, -1), folder / "png" / f"{item:04d}-{seed:06d}.png")
            for item, picture in enumerate(as_grey_or_rgb(mean)):
                save_png(picture.movedim(0, -1), folder / "png" / f"{item:04d}-mean.png")


def errors_text(measured: Mapping[str, Any]) -> str:
    """What `Restoration.errors` found, in words."""
    mean, one = measured["rmse_of_mean"], measured["rmse_of_sample"]
    errors = f"RMS error {mean:.4g} of the mean, {one:.4g} of a single sample, in units of the {measured['units']}"
    if "coverage" not in measured:
        return errors
    return f"{errors}; the {measured['interval']:.0%} interval contains {measured['coverage']:.1%} of the true values"


def _channels_last(values: Tensor, axis: int) -> "NDArray[Any]":
    return np.ascontiguousarray(values.movedim(axis, -1).numpy())


def _like(images: Tensor) -> tuple[int, ...]:
    return tuple(as_grey_or_rgb(images[:1]).shape[1:])


@dataclass(frozen=True)
class Plan:
    """Which samples are drawn, and how."""

    job: Job
    samples: int
    seed: int
    batch: int

    def seeds(self, item: int) -> list[int]:
        """Of the samples of an item: all seeds of all items are different."""
        first = self.seed + item * self.samples
        return [*range(first, first + self.samples)]

    def denoiser(self, model: Model) -> Denoiser:
        """That of the model, clipped and told as planned: the same for all items."""
        return tell(model.denoiser.clipped(self.job.clip), self.job, [0])

    def to_json(self) -> dict[str, Any]:
        """What decides the numbers; the batch does not."""
        return {**self.job.to_json(), "samples": self.samples, "seed": self.seed}


def plan_restoration(
    model: Model,
    sampler: str | None,
    num_steps: int | None,
    *,
    samples: int,
    seed: int,
    batch: int,
    clip: float | None = None,
    tile: int | None = None,
    classes: Sequence[int] = (),
    guidance: float | None = None,
) -> Plan:
    """``samples`` per item, with 50 ancestral steps if nothing is said; a start of the sampler's own is refused.
    ``classes`` has the class of all items, if they are told one."""
    if sampler is None:
        sampler = f"ancestral:variance={'beta' if model.denoiser.gaussian is None else 'gaussian'}"
    tile = min(tile_size(*model.shape[1:]), MOST_TILE) if tile is None else tile
    steps = min(NUM_STEPS, len(model.denoiser.process.schedule)) if num_steps is None else num_steps
    known = model.denoiser.conditions
    if others := [name for name, one in known.items() if name != CLASSES and not one.dropout]:
        problem = f"the model was trained with {others[0]} in every item, which this command cannot tell it"
        raise InputError(f"{problem}: use nidiff.posterior, or train with condition_dropout.")
    job = plan_job(model, sampler, steps, clip=clip, tile=tile, classes=classes, guidance=guidance)
    if "start" in job.options:
        raise InputError(f"sampler={sampler!r} says where sampling starts, and so does the observation: leave it out.")
    samples, batch = check_whole("samples", samples), check_whole("batch", batch)
    return Plan(job, samples, check_whole("seed", seed, 0, 2**62), batch)


def draw(
    model: Model,
    plan: Plan,
    items: int,
    prepare: Prepare,
    title: str,
    watch: Callable[[Visit], None] | None = None,
) -> tuple[Tensor, "NDArray[np.int64]"]:
    """Samples [items, S, C, *event] in the units of the model, and their seeds [items, S].

    ``watch`` is called at each level, and then shows the progress instead of a bar.
    """
    found = torch.empty(items, plan.samples, *model.shape)
    with progress_bar(title, "samples", shown=watch is None) as progress:
        for item in range(items):
            seeds = plan.seeds(item)
            for first in range(0, plan.samples, plan.batch):
                block = seeds[first : first + plan.batch]

                def advance(at: Visit, before: int = item * plan.samples + first, size: int = len(block)) -> None:
                    progress(before + size * at.step / at.num_steps, items * plan.samples)
                    if watch is not None:
                        watch(at)

                denoiser, options = prepare(item, block)
                arguments = {**plan.job.arguments, **options}
                x = sample(denoiser, (len(block), *model.shape), seeds=block, callback=advance, **arguments)
                data = as_stored(x, denoiser.scaling, "float32")
                if not bool((x.isfinite() & data.isfinite()).all()):
                    problem = f"a sample of item {item} has NaN or infinite values"
                    raise InputError(f"{problem}: use more steps, or another method.")
                found[item, first : first + len(block)] = x.cpu()
    return found, np.array([plan.seeds(item) for item in range(items)], dtype=np.int64)


def seeded(*numbers: int) -> torch.Generator:
    """A generator that is unrelated to those of other numbers, and to those of the samples."""
    return torch.Generator().manual_seed(mixed_seed(*numbers))


# Units --------------------------------------------------------------------------------------------------------------


def in_model_units(noise: float, model: Model, units: str, argument: str = "noise") -> tuple[float, ...]:
    """A standard deviation in the units of the model, for each channel: that of the data divided by the scale."""
    value = check_number(argument, noise)
    if value < 0:
        raise InputError(f"{argument}={noise} must be 0 or more.")
    scaling, channels = model.denoiser.scaling, model.shape[0]
    if one_of("units", units, UNITS) == "model" or scaling is None:
        return (value,) * channels
    if not scaling.is_linear:
        problem = f"{argument} in the units of the data has no meaning where the model sees their logarithm"
        raise InputError(f"{problem}: give that of the logarithm as the model scales it, with units='model'.")
    scales = scaling.scale if isinstance(scaling.scale, tuple) else (scaling.scale,) * channels
    return tuple(value / abs(scale) for scale in scales)


def noise_level(noise: float, model: Model, units: str, argument: str = "noise") -> Level:
    """The level of the process at which data with so much noise are a state of it."""
    each, schedule = in_model_units(noise, model, units, argument), model.denoiser.process.schedule
    if max(each) > 1.001 * min(each):
        problem = f"{argument}={noise} is another level for each channel, which have scales of their own"
        raise InputError(f"{problem}: give noise / scale, which must be the same for all, with units='model'.")
    if schedule.event_shape:
        raise InputError(
            f"{argument}: the model has noise levels of its own for every mode, so that no state of it is data with "
            "noise of one amount: use another model."
        )
    low, high = (schedule.level(row).sigma / schedule.level(row).signal for row in (0, len(schedule) - 1))
    if not low <= each[0] <= high:
        factor = noise / each[0] if each[0] else float("nan")
        scale = factor if each[0] else 1 / in_model_units(1.0, model, units)[0]
        span = f"{low * scale:.3g} to {high * scale:.3g} in the units of the {units}"
        raise InputError(f"{argument}={noise} is not a level of the model, which has {span}: give another amount.")
    return schedule.level_with_noise(each[0])


def to_model(values: Tensor, model: Model) -> Tensor:
    """Items in the units of the data as the model sees them, on its device."""
    scaling = model.denoiser.scaling
    x = values.double() if scaling is None else scaling.to_model(values.double())
    return x.float().to(model.denoiser.device)


# The folder ---------------------------------------------------------------------------------------------------------


def values_sha256(*tensors: Tensor) -> str:
    """The checksum of numbers."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def check_format(kind: str, grid: Grid) -> str:
    check_export(one_of("format", kind, FORMATS), grid)
    return kind


def known_facts(out: Path, task: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the folder ``out`` says of the same task, if that was done already; None if ``out`` is new or empty.
    Anything else in it is refused."""
    out = as_path("out", out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    again = "choose a new directory"
    if not (out / FACTS).is_file():
        raise InputError(f"out={str(out)!r} holds other files: {again}.")
    found = read_object(out / FACTS, again)
    if found.get("task") != dict(task):
        known = found.get("task")
        differs = sorted(key for key in task if not isinstance(known, dict) or known.get(key) != task[key])
        raise InputError(f"out={str(out)!r} holds another restoration ({', '.join(differs)} differ): {again}.")
    return found


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is drawn."""
    with writing("out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=ASIDE):
            pass


@contextmanager
def new_folder(out: Path, facts: Mapping[str, Any]) -> Iterator[Path]:
    """The folder to fill, which appears as ``out`` when all of it is written."""
    with writing("out", out), replacing_folder(out) as folder:
        replace_json(folder / FACTS, dict(facts))
        yield folder


def default_folder(model: Model, task: Mapping[str, Any]) -> Path:
    """restored/… or denoised/… in the run, or in out/NAME for a model that ships."""
    words = [Path(str(task["file"])).stem, str(task["sampler"]), str(task["num_steps"]), digest(dict(task))[:8]]
    return model.home / f"{task['command']}d" / "-".join(words)


def about(task: Mapping[str, Any]) -> dict[str, str]:
    """What a file of another format says about itself."""
    return {"source": f"nidiff {__version__}", "task": digest(dict(task))}
