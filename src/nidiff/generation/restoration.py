"""Samples of what observed items were: items, an operator and noise make an observation, and its posterior is sampled.

Items and noise come in the units of the data, and an `Observation` is in those of the model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.grid import Grid
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of
from nidiff.generation.job import Job, draw_finite, plan_job
from nidiff.generation.loaded_model import Model, boundaries
from nidiff.inverse import operators
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator
from nidiff.inverse.posterior import posterior
from nidiff.progress import progress_bar
from nidiff.randomness import mixed_seed, white_noise
from nidiff.recipe import check_number, check_whole
from nidiff.sampling.step import Visit
from nidiff.sampling.tile import tile_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_STEPS, MOST_TILE = 50, 8  # the defaults: an item has few samples
INTERVAL = 0.9  # whose coverage is measured, or the nearest that so few samples have
UNITS = ("data", "model")
ROUNDING = 12**-0.5  # the standard deviation of the error of rounding to whole numbers
MASK, NOISE = 2, 3  # tell the randomness of one purpose from that of another
Blocks = Callable[[list[int]], Mapping[str, Any]]
"""The other arguments of `nidiff.sample` for a block of seeds."""


@dataclass(frozen=True, eq=False)
class Restoration:
    """Samples ``x`` [N, S, C, *event] in the units of the model, by seed [N, S], and what was ``observed`` [N, C, …] in
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
    """The name of ``observed`` in a figure."""

    @classmethod
    def of(
        cls, model: Model, observation: Observation, x: Tensor, seeds: "NDArray[np.int64]", truth: Tensor | None = None
    ) -> "Restoration":
        """The restoration by samples ``x`` of the posterior."""
        mask = observation.operator.observed if observation.operator.is_mask else None
        hidden = None if mask is None else ~mask.expand(observation.y.shape)
        observed = observed_data(model, observation)
        return cls(x, seeds, observed, model.grid, model.denoiser.scaling, truth, hidden)

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
        """Root mean square errors of the mean and of a sample, where nothing was observed, and the share of the true
        values that lie in an interval of the samples. Channels with units of their own are measured in those of the
        model.

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

        of_samples = torch.stack([values[where] - truth[where] for values in samples.unbind(1)])
        measured: dict[str, Any] = {"units": units, "rmse_of_mean": rms((samples.mean(1) - truth)[where])}
        measured["rmse_of_sample"] = rms(of_samples)
        if count > 1:
            k = max(1, round((1 - INTERVAL) * (count + 1) / 2))
            rising, margin = samples.sort(1).values, 0.5 if self.grid.dtype in WHOLE else 0.0
            inside = (truth >= rising[:, k - 1] - margin) & (truth <= rising[:, -k] + margin)
            measured |= {"coverage": inside[where].double().mean().item(), "interval": 1 - 2 * k / (count + 1)}
        return measured


# Observations -------------------------------------------------------------------------------------------------------


def pooling(model: Model, factor: int) -> Operator:
    """Means over blocks of ``factor`` points along each axis."""
    coarse_event(model, factor)
    return operators.pool(factor)


def blurring(model: Model, width: float) -> Operator:
    """The blur by a Gaussian of the standard deviation ``width``, in pixels."""
    _require_linear("blur", model)
    if not 0 < check_number("blur", width) <= max(model.shape[1:]):
        raise InputError("blur", width, "is not a width", "give pixels, above 0 and up to the size of an item")
    return operators.blur(width, boundaries(model.denoiser, len(model.shape) - 1))


def coarse_event(model: Model, factor: int) -> tuple[int, ...]:
    """The event shape of means over blocks."""
    _require_linear("scale", model)
    factor, event = check_whole("scale", factor, 2), model.shape[1:]
    if any(size % factor for size in event):
        raise InputError("scale", factor, f"does not divide the model's {tuple(event)}", "give a number that does")
    return tuple(size // factor for size in event)


def _require_linear(argument: str, model: Model) -> None:
    if model.denoiser.scaling is not None and not model.denoiser.scaling.is_linear:
        raise InputError(argument, None, "has no meaning for a model of the logarithm of the data", "use `mask`")


def observe(
    model: Model,
    items: Tensor,
    operator: Operator,
    noise: float,
    *,
    units: str = "data",
    degrade: bool = False,
    seed: int = 0,
) -> Observation:
    """The observation of ``items`` [N, C, …] through ``operator``, with white noise of this standard deviation.

    ``items`` are y itself; means and blurred values in whole numbers have the noise of rounding besides. To
    ``degrade``, ``items`` are clean, and y = A(items) + noise of ``seed``.
    """
    scaling, mask = model.denoiser.scaling or Scaling(1.0), operator.observed
    if mask is not None and items.is_floating_point():  # entries that are not observed may be NaN: the model sees 0
        items = torch.where(mask, items, scaling.to_data(torch.zeros_like(items)))
    y, deviations = to_model(items, model), in_model_units(noise, model, units)
    if not (operator.is_mask or degrade or items.is_floating_point()):
        rounding = in_model_units(ROUNDING, model, "data")
        deviations = tuple(math.hypot(*both) for both in zip(deviations, rounding, strict=True))
    deviation: Any = deviations[0]
    if len({*deviations}) > 1:
        deviation = torch.tensor(deviations, device=y.device).reshape(-1, *[1] * (len(model.shape) - 1))
    if degrade:
        clean = operator(y)
        sources = [seeded(seed, item, NOISE) for item in range(len(y))]
        y = clean + deviation * white_noise(clean.shape, sources, device=y.device)
    return Observation(y, operator, deviation)


def observed_data(model: Model, observation: Observation) -> Tensor:
    """y in the units of the data, NaN where nothing was observed."""
    y = (model.denoiser.scaling or Scaling(1.0)).to_data(observation.y.cpu())
    mask = observation.operator.observed
    return y if mask is None else torch.where(mask.cpu(), y, torch.nan)


# Samples ------------------------------------------------------------------------------------------------------------


def restoration_job(
    model: Model,
    sampler: str | None = None,
    num_steps: int | None = None,
    *,
    clip: float | None = None,
    tile: int | None = None,
    classes: Sequence[int] = (),
    guidance: float | None = None,
) -> Job:
    """The job that samples items given an observation or their noisy version, by default with 50 ancestral steps.
    ``classes`` has the class of all items, or none."""
    if sampler is None:
        sampler = f"ancestral:variance={'beta' if model.denoiser.gaussian is None else 'gaussian'}"
    tile = min(tile_size(*model.shape[1:]), MOST_TILE) if tile is None else tile
    steps = min(NUM_STEPS, len(model.denoiser.process.schedule)) if num_steps is None else num_steps
    conditions = model.denoiser.conditions.items()
    if others := [name for name, condition in conditions if name != CLASSES and not condition.dropout]:
        problem = f"was trained with {others[0]} in every item, which this command cannot give it"
        raise InputError("model", None, problem, "use nidiff.posterior, or train with condition_dropout")
    job = plan_job(model, sampler, steps, clip=clip, tile=tile, classes=classes, guidance=guidance)
    if "start" in job.options:
        raise InputError("sampler", sampler, "says where sampling starts, and so does the data", "leave `start` out")
    return job


def restore(
    model: Model,
    job: Job,
    observation: Observation,
    *,
    samples: int,
    seed: int = 0,
    batch: int = 64,
    method: str | None = None,
    truth: Tensor | None = None,
    watch: Callable[[Visit], None] | None = None,
) -> Restoration:
    """Samples of each item given its observation; ``method`` is that of `nidiff.posterior`, and ``truth`` has the items
    themselves, where they are known."""
    denoiser = job.denoiser(model.denoiser, [0])

    def prepare(item: int) -> tuple[Denoiser, Blocks]:
        return posterior(denoiser, observation.for_images(torch.tensor([item])), method), lambda seeds: {}

    drawing: dict[str, Any] = {"samples": samples, "seed": seed, "batch": batch, "watch": watch}
    x, seeds = draw(model, job, len(observation.y), prepare, title="restoring", **drawing)
    return Restoration.of(model, observation, x, seeds, truth)


def item_seeds(item: int, samples: int, seed: int) -> list[int]:
    """The seeds of the samples of an item: all seeds of all items are different."""
    return [*range(seed + item * samples, seed + (item + 1) * samples)]


def draw(
    model: Model,
    job: Job,
    items: int,
    prepare: Callable[[int], tuple[Denoiser, Blocks]],
    *,
    samples: int,
    seed: int,
    batch: int,
    title: str,
    watch: Callable[[Visit], None] | None = None,
) -> tuple[Tensor, "NDArray[np.int64]"]:
    """Samples [items, S, C, *event] in the units of the model, and their seeds [items, S].

    ``prepare`` has the denoiser of an item, and the arguments of a block of seeds. ``watch`` is called at each level,
    and then shows the progress instead of a bar.
    """
    x = torch.empty(items, samples, *model.shape)
    seeds = [item_seeds(item, samples, seed) for item in range(items)]
    with progress_bar(title, "samples", shown=watch is None) as progress:
        for item in range(items):
            denoiser, block_arguments = prepare(item)
            for first in range(0, samples, batch):
                block = seeds[item][first : first + batch]

                def advance(visit: Visit, before: int = item * samples + first, size: int = len(block)) -> None:
                    progress(before + size * visit.step / visit.num_steps, items * samples)
                    if watch is not None:
                        watch(visit)

                arguments = {**job.arguments, **block_arguments(block), "callback": advance}
                x[item, first : first + len(block)] = draw_finite(denoiser, block, model.shape, **arguments)
    return x, np.array(seeds, dtype=np.int64)


def seeded(*numbers: int) -> torch.Generator:
    """A generator that is unrelated to those of other numbers, and to those of the samples."""
    return torch.Generator().manual_seed(mixed_seed(*numbers))


# Units --------------------------------------------------------------------------------------------------------------


def in_model_units(noise: float, model: Model, units: str, argument: str = "noise") -> tuple[float, ...]:
    """A standard deviation in the units of the model, for each channel: that of the data divided by the scale."""
    value = check_number(argument, noise)
    if value < 0:
        raise InputError(argument, noise, "is negative", "give a standard deviation of 0 or more")
    scaling, channels = model.denoiser.scaling, model.shape[0]
    if one_of("units", units, UNITS) == "model" or scaling is None:
        return (value,) * channels
    if not scaling.is_linear:
        problem = "in the units of the data has no meaning for a model of their logarithm"
        raise InputError(argument, noise, problem, "give that of the scaled logarithm, with `units` model")
    scales = scaling.scale if isinstance(scaling.scale, tuple) else (scaling.scale,) * channels
    return tuple(value / abs(scale) for scale in scales)


def noise_level(noise: float, model: Model, units: str, argument: str = "noise") -> Level:
    """The level of the process at which data with so much noise are a state of it."""
    deviations, schedule = in_model_units(noise, model, units, argument), model.denoiser.process.schedule
    if max(deviations) > 1.001 * min(deviations):
        problem = "is another level for each channel, which have scales of their own"
        raise InputError(argument, noise, problem, "give noise / scale, the same for all, with `units` model")
    if schedule.event_shape:
        problem = "is no level of this model, which has other levels for every mode"
        raise InputError(argument, noise, problem, "use another model")
    low, high = (float(schedule.level(row).sigma / schedule.level(row).signal) for row in (0, len(schedule) - 1))
    if not low <= deviations[0] <= high:
        scale = 1 / in_model_units(1.0, model, units)[0]
        span = f"from {low * scale:.3g} to {high * scale:.3g} in the units of the {units}"
        raise InputError(argument, noise, "is not a level of the model", f"give an amount {span}")
    return schedule.level_with_noise(deviations[0])


def to_model(values: Tensor, model: Model) -> Tensor:
    """Items in the units of the data as the model sees them, on its device."""
    scaling = model.denoiser.scaling
    x = values.double() if scaling is None else scaling.to_model(values.double())
    return x.float().to(model.denoiser.device)
