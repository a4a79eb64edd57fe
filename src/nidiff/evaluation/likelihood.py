"""The likelihood of data under a model and under the data's Gaussian, in the units of the data."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nidiff.data.dataset import LARGEST, Dataset
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import InputError
from nidiff.evaluation.order import effective_number, is_ordered, standard_error
from nidiff.evaluation.results import Measured
from nidiff.progress import Progress
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_whole
from nidiff.sampling.likelihood import log_likelihood

MOST_SEEDS = 2**31


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of n items: float64 [n]."""

    log_prob: Tensor
    """log p(x) in nats, x in the units of the model."""
    log_volume: Tensor
    """log |dx / d data|: what is added for a density in the units of the data."""
    gaussian: Tensor | None
    """log N(x; μ, C) of the same items; None for a model without a Gaussian."""
    dimensions: int
    """Numbers in an item."""
    is_whole: bool
    """Whether the data are whole numbers, to which noise from −½ to ½ was added."""
    of_class: bool = False
    """Whether the model was given the class of each item: log p(x | class). The Gaussian never is."""
    ordered: bool = False
    """Whether the items follow each other, so that neighbours may be alike."""
    mixture: Tensor | None = None
    """log p of the same items under the data's mixture, without classes; None for a model that has none."""

    @property
    def num_independent(self) -> float:
        """How many independent items these are worth, as log p of the model says."""
        return effective_number(self.log_prob).item() if self.ordered else len(self.log_prob)

    def summary(self) -> dict[str, dict[str, Measured]]:
        """−log p per dimension, with its `standard_error` over items: of the model, of the mixture, of the Gaussian,
        and of the model minus the Gaussian, item by item."""
        sides: dict[str, tuple[Tensor, Tensor | float]] = {"model": (self.log_prob, self.log_volume)}
        if self.mixture is not None:
            sides["mixture"] = (self.mixture, self.log_volume)
        if self.gaussian is not None:
            # The volume is the same for both, so the difference has none, and is the same in all units.
            difference = self.log_prob - self.gaussian
            sides |= {"gaussian": (self.gaussian, self.log_volume), "difference": (difference, 0.0)}
        return {
            name: {
                "nats_per_dim": self._cost(log_prob + volume),
                "bits_per_dim": self._cost((log_prob + volume) / math.log(2)),
                "nats_per_dim_of_model": self._cost(log_prob),
            }
            for name, (log_prob, volume) in sides.items()
        }

    def _cost(self, log_prob: Tensor) -> Measured:
        costs = -log_prob / self.dimensions
        error = standard_error(costs, ordered=self.ordered).item() if len(costs) > 1 else None
        return Measured(costs.mean().item(), error)


def measure_likelihood(
    denoiser: Denoiser,
    data: Dataset,
    *,
    num_images: int = 64,
    batch: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Likelihood:
    """log p of (at most ``num_images`` of) the data, spread over them, under the probability-flow ODE of a model.

    x̂0 is not clipped, or the flow would have kinks. To whole numbers v, noise uniform on [−½, ½] is added, so that
    −log₂ p bounds the bits that v costs. ``seed`` decides that noise and the probes; ``options`` are those of
    `nidiff.log_likelihood`. A model that was trained with classes, and has none bound, is conditioned on the labels of
    the data where they have them: then it is log p(x | class).
    """
    num_images, batch = check_whole("num_images", num_images), check_whole("batch", batch)
    seed = check_whole("seed", seed, 0, MOST_SEEDS)
    scaling = data.scaling if denoiser.scaling is None else denoiser.scaling
    if scaling.domain is not None:
        problem = "has a domain, outside of which x is 0 for certain, so that items have no density"
        raise InputError("model", None, problem, "compare fields, with nidiff evaluate")
    smooth, baselines = denoiser.clipped(None), (denoiser.gaussian, denoiser.mixture)
    rows = torch.linspace(0, len(data) - 1, min(num_images, len(data)), dtype=torch.float64).long()
    is_whole = data.grid.dtype in LARGEST
    labels = data.labels if CLASSES in denoiser.conditions.keys() - denoiser.condition_values.keys() else None
    dtype = next((weight.dtype for weight in denoiser.parameters()), torch.float64)  # of the network, if it has one
    parts = []  # log p, log volume, and log p of the baselines
    for part in rows.split(min(batch, len(rows))):
        values = data.stored(part).double()
        generators = generators_from_seeds([seed * MOST_SEEDS + row for row in part.tolist()])
        if is_whole:
            values = values + torch.special.ndtr(white_noise(values.shape, generators, dtype=torch.float64)) - 0.5
        x = scaling.at_times(None if data.times is None else data.times[part.numpy()]).to_model(values)
        known = [x.new_zeros(len(x)) if law is None else law.log_prob(x) for law in baselines]
        conditioned = smooth if labels is None else smooth.given(**{CLASSES: labels[part]})
        like = x.to(denoiser.device, torch.promote_types(dtype, torch.float32))
        log_prob = log_likelihood(conditioned, like, generator=generators, **options).detach().cpu().double()
        parts.append((log_prob, scaling.log_volume(values), *known))
        if progress is not None:
            progress(min(len(parts) * batch, len(rows)), len(rows))
    model, volume, *known = (torch.cat(column) for column in zip(*parts, strict=True))
    normal, mixed = (None if law is None else each for law, each in zip(baselines, known, strict=True))
    size, of_class = math.prod(data.shape), labels is not None
    return Likelihood(model, volume, normal, size, is_whole, of_class, is_ordered(data), mixed)
