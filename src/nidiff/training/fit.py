"""Refuse a run that no machine could do, before the data are read and before anything large is asked for."""

import math
from typing import Any

import torch

from nidiff.covariance.matrix import Identity
from nidiff.covariance.operator import Covariance
from nidiff.covariance.spectral import check_boundary, white_in
from nidiff.data.dataset import Dataset
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.family import schedule_facts
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import PIXELS
from nidiff.diffusion.schedule import Schedule, as_schedule
from nidiff.errors import InputError
from nidiff.memory import require_memory
from nidiff.model.network import null_class
from nidiff.sampling.sampler import rehearse
from nidiff.training.experiment import Experiment
from nidiff.training.told import conditions_of

SMALL = (2, 2)
CLIP = 1.0  # of models whose data are whole numbers: they are in [-1, 1]
BYTES = 5 * 4  # of each weight in float32: itself, its gradient, two averages of Adam's, the moving average
PICTURE = 64**2  # pixels that a small image has in a grid of samples


def check_sampling(experiment: Experiment) -> None:
    """Draw a small image with the run's schedule, target and sampler: what cannot be sampled is not trained."""
    if experiment.gaussian == "none" and experiment.needs_gaussian:
        raise InputError(
            "gaussian='none' fits no Gaussian, and this target, sees, schedule or sampler needs one: leave it out."
        )
    boundary: Any = experiment.basis(Identity(SMALL))  # white noise has any basis
    shape = SMALL if isinstance(boundary, str) and "/" not in boundary else (2,) * len(check_boundary(boundary))
    white, gaussian = Identity(shape), None
    if experiment.gaussian != "none":  # any will do
        gaussian = GaussianModel(torch.zeros(1, *shape), white_in(boundary, shape))
    denoiser = make_denoiser(_nothing, experiment, white, gaussian)
    rehearse(denoiser, (1, *shape), **experiment.sampling(denoiser.process.schedule))


def make_denoiser(
    net: Any,
    experiment: Experiment,
    covariance: Covariance,
    gaussian: GaussianModel | None,
    schedule: Schedule | None = None,
    data: Dataset | None = None,
) -> Denoiser:
    """The denoiser of an experiment, in the units of the data. Its schedule is built here, where the facts are known
    that it may depend on, unless one that was stored is given. Clipped only where the range of the data is known.
    """
    if schedule is None:
        schedule = as_schedule(experiment.schedule, schedule_facts(covariance, gaussian))
    sees = None if experiment.sees == "auto" else experiment.sees
    scaling, range_is_known = (PIXELS, True) if data is None else (data.scaling, data.has_known_range)
    options: Any = {"clip": CLIP if range_is_known else None, "scaling": scaling, "gaussian": gaussian, "sees": sees}
    if data is not None and (told := conditions_of(data, experiment.condition_dropout)):
        if CLASSES in told:
            told[CLASSES] = told[CLASSES]._replace(null=null_class(net, told[CLASSES].classes or 0))
        options["conditions"] = told
    return Denoiser(net, Process(schedule, covariance), experiment.target, **options)


def check_size(experiment: Experiment, data: Dataset, per_pass: int) -> None:
    """Refuse a network, a batch or a grid of samples of the data that cannot fit in memory."""
    shape = data.shape
    parameters = _parameters(experiment, data)
    widths = f"widths={experiment.widths} with layers={experiment.layers}"
    require_memory(widths, BYTES * parameters, "use a smaller network")
    # The least that one image costs: itself, its noise, both together and the output, and the first activations.
    pixels = math.prod(shape[1:])
    image = 4 * pixels * (4 * shape[0] + 2 * experiment.widths[0])
    batch = f"batch_size={experiment.batch_size} of images {tuple(shape)}"
    require_memory(batch, experiment.batch_size / per_pass * image, "use fewer images, smaller ones, or accumulation")
    samples = f"num_samples={experiment.num_samples} of images {tuple(shape)}"
    require_memory(samples, experiment.num_samples * (image + max(PICTURE, pixels)), "draw fewer samples")


def _parameters(experiment: Experiment, data: Dataset) -> float:
    """The number of parameters of the network, which is built without memory for them."""
    try:
        with torch.device("meta"):
            net = experiment.build_network(data.shape, data.grid.dtype, conditions_of(data))
            return sum(parameter.numel() for parameter in net.parameters())
    except (RuntimeError, OverflowError, TypeError):  # more than 2⁶³
        return math.inf


def _nothing(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)
