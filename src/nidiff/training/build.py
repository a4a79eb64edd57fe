"""From an experiment to a `Trainer`: data, Σ, the data's Gaussian, network, denoiser and optimiser, checked before the
first step."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity
from nidiff.covariance.waves import Waves, check_boundary
from nidiff.data.annotations import conditions_of
from nidiff.data.dataset import Dataset
from nidiff.data.spec import MEMORY_LIMIT
from nidiff.diffusion.condition import CLASSES, FIELDS, PARAMETERS, Condition
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.gaussian import GaussianModel, fit_gaussian
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.process import Process
from nidiff.diffusion.roughness import roughness
from nidiff.diffusion.scaling import PIXELS
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import SCHEDULES, as_schedule, schedule_facts
from nidiff.diffusion.spacing import ANGLE
from nidiff.errors import InputError, one_of
from nidiff.memory import require_memory
from nidiff.model import network
from nidiff.model.config import scheduler_config
from nidiff.notation import call, parse_call
from nidiff.randomness import mixed_seed
from nidiff.sampling.sampler import as_sampler, rehearse
from nidiff.training.baseline import gaussian_baseline
from nidiff.training.experiment import PRECISIONS, Experiment
from nidiff.training.identity import data_digest, network_digest, process_digest, settings_digest

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel

CLIP = 1.0  # of models whose data are whole numbers: they are in [-1, 1]
BYTES = 5 * 4  # of each weight in float32: itself, its gradient, two averages of Adam's, the moving average
PICTURE = 64**2  # pixels that a small image has in a grid of samples
MOST_FITTED, FITTED_AT_ONCE = 10_000, 256  # images that Σ and the Gaussian are fitted to


@dataclass
class Trainer:
    """What one process holds while it trains."""

    experiment: Experiment
    accelerator: "Accelerator"
    data: Dataset
    denoiser: Denoiser
    net: torch.nn.Module  # the bare network; denoiser.net is the same as accelerate wraps it
    optimizer: Any
    ema: "EMAModel"
    step: int = 0
    process: str | None = None
    """The digest of the Σ, schedule and Gaussian that a run began with, if it is resumed with them."""
    notes: Sequence[str] = ()
    """What whoever trains should know."""

    @cached_property
    def baseline(self) -> dict[str, Any]:
        """What the data's Gaussian achieves."""
        return gaussian_baseline(self.experiment, self.data, self.denoiser.gaussian)

    @cached_property
    def identity(self) -> dict[str, str]:
        """What must be the same when the run is resumed."""
        return {
            "settings": settings_digest(self.experiment),
            "process": self.process or process_digest(scheduler_config(self.denoiser)),
            "data": data_digest(self.data),
            "network": network_digest(self.net),
        }


def build(
    experiment: Experiment,
    *,
    stored: Denoiser | None = None,
    process: str | None = None,
    memory_limit: int | None = MEMORY_LIMIT,
) -> Trainer:
    """The trainer of an experiment, before the first step. A run that is resumed has ``stored`` its Σ, schedule and
    Gaussian, which are not built again; ``process`` is their digest, which another version may compute otherwise."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from diffusers.training_utils import EMAModel

    experiment = experiment.resolved()
    one_of("weighting", experiment.weighting, WEIGHTINGS)
    check_sampling(experiment)
    # All accelerators of a process share one state, which refuses a second precision. The processes stay as they are.
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=PRECISIONS[experiment.precision], cpu=not torch.cuda.is_available())
    per_pass = accelerator.num_processes * experiment.accumulation
    if experiment.batch_size % per_pass:
        problem = f"is not a multiple of processes × accumulation = {per_pass}"
        raise InputError("batch_size", experiment.batch_size, problem, "give one that is")
    scaling = None if stored is None else stored.scaling  # which need not be fitted again
    data = experiment.data.load(scaling=scaling, memory_limit=memory_limit, progress=accelerator.is_main_process)
    if experiment.data.labels is None:  # the network is not conditional, even if the data have labels
        data = dataclasses.replace(data, labels=None, class_names=(), num_classes=None)
    check_size(experiment, data, per_pass)
    torch.manual_seed(mixed_seed(experiment.seed))
    notes: list[str] = []
    if stored is None:
        covariance = build_covariance(experiment, data)
        gaussian, schedule = _gaussian_or_note(experiment, data, covariance, notes), None
    else:
        covariance, gaussian, schedule = stored.process.covariance, stored.gaussian, stored.process.schedule
    net = build_network(experiment, data.shape, data.grid.dtype, conditions_of(data)).train()
    ema = EMAModel(net.parameters(), decay=experiment.ema_decay, foreach=True)
    ema.to(accelerator.device)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=experiment.weight_decay, fused=True)
    denoiser = build_denoiser(net, experiment, covariance, gaussian, schedule, data)
    # What sampling or the process would refuse is refused before training.
    notes += rehearse(denoiser, data.shape, **experiment.sampling(denoiser.process.schedule))
    model, optimizer = accelerator.prepare(torch.compile(net) if experiment.compile else net, optimizer)
    return Trainer(
        experiment, accelerator, data, denoiser.with_net(model), net, optimizer, ema, process=process, notes=notes
    )


# The parts ------------------------------------------------------------------------------------------------------------


def build_covariance(experiment: Experiment, data: Dataset) -> Covariance:
    """Σ over the axes of an item; ``from_data`` is fitted to (at most 10,000 of) the items."""
    shape, boundary = tuple(data.shape[1:]), experiment.boundary
    return as_covariance(experiment.covariance, shape, lambda: data.batch(_spread(data)), boundary=boundary)


def build_gaussian(experiment: Experiment, data: Dataset, covariance: Covariance) -> GaussianModel | None:
    """The data's Gaussian in the basis of Σ, fitted to (at most 10,000 of) the items, a few at a time."""
    name, arguments = parse_call("gaussian", experiment.gaussian)
    if name == "none":
        return None
    known = {average: partial(fit_gaussian, average=average) for average in ("modes", "radial")}
    one_of("gaussian", name, [*known, "none"])
    arguments = {"basis": _basis(experiment, covariance), **arguments}
    gaussian: GaussianModel = call("gaussian", name, arguments, known, _fitted_batches(experiment, data))
    gaussian.check_basis(covariance)
    return gaussian


def needs_gaussian(experiment: Experiment) -> bool:
    """Whether the run cannot do without the data's Gaussian."""
    if experiment.target == "residual" or experiment.sees in ("z", "both"):
        return True
    sampler, _ = as_sampler(experiment.sampler)
    by_sampler = sampler.finishes or sampler.start == "gaussian" or sampler.spacing == ANGLE
    return by_sampler or parse_call("schedule", experiment.schedule)[0] == "designed"


def build_network(
    experiment: Experiment,
    shape: Sequence[int],
    dtype: str = "uint8",
    conditions: Mapping[str, Condition] | None = None,
) -> torch.nn.Module:
    """The network for items of ``shape`` [C, *event] whose numbers are of that type in files."""
    conditions = conditions or {}
    is_picture = len(shape) == 3 and dtype != "float32" and {*conditions} <= {CLASSES}
    sizes = {name: getattr(experiment, name) for name in ("widths", "layers", "attention", "dropout")}
    if CLASSES in conditions:
        sizes["num_classes"] = conditions[CLASSES].classes
    for name, key in {PARAMETERS: "num_parameters", FIELDS: "condition_channels"}.items():
        if name in conditions:
            sizes[key] = conditions[name].shape[0]
    boundary = None if experiment.boundary is None else experiment.boundary.split("/")
    auto, both = "unet2d" if is_picture else "unet", experiment.sees == "both"
    return network.build_network(experiment.network, shape, auto=auto, boundary=boundary, both=both, **sizes)


def build_denoiser(
    net: Any,
    experiment: Experiment,
    covariance: Covariance,
    gaussian: GaussianModel | None,
    schedule: Schedule | None = None,
    data: Dataset | None = None,
) -> Denoiser:
    """The denoiser of an experiment, in the units of the data. Its schedule is built from what Σ and the Gaussian say,
    unless one is given. It clips only where the range of the data is known."""
    if schedule is None:
        schedule = as_schedule(experiment.schedule, schedule_facts(covariance, gaussian))
    sees = None if experiment.sees == "auto" else experiment.sees
    scaling, range_is_known = (PIXELS, True) if data is None else (data.scaling, data.has_known_range)
    options: Any = {"clip": CLIP if range_is_known else None, "scaling": scaling, "gaussian": gaussian, "sees": sees}
    if data is not None:
        options["conditions"] = conditions_of(data, experiment.condition_dropout, net)
    return Denoiser(net, Process(schedule, covariance), experiment.target, **options)


def _gaussian_or_note(
    experiment: Experiment, data: Dataset, covariance: Covariance, notes: list[str]
) -> GaussianModel | None:
    """The data's Gaussian. Where there is none, as of a single image, training can do without, and a note says so."""
    try:
        gaussian = build_gaussian(experiment, data, covariance)
    except InputError as error:
        if needs_gaussian(experiment) or experiment.gaussian != Experiment.gaussian:
            raise
        notes.append(f"the model knows no Gaussian of the data: {error}")
        return None
    if gaussian is not None and (warning := roughness(gaussian, covariance).warning):
        notes.append(warning)
    return gaussian


def _basis(experiment: Experiment, covariance: Covariance) -> Covariance | str | tuple[str, ...]:
    """The basis in which C is diagonal: that of Σ. White noise has any; then it is that of the schedule."""
    if not covariance.is_constant:
        return getattr(covariance, "spatial", covariance)  # of one that is over channels too
    name, written = parse_call("schedule", experiment.schedule)
    parameter = signature(SCHEDULES[one_of("schedule", name, SCHEDULES)]).parameters.get("boundary")
    boundary = written.get("boundary", experiment.boundary or (parameter and parameter.default))
    return boundary if isinstance(boundary, str | tuple) else "periodic"


def _fitted_batches(experiment: Experiment, data: Dataset) -> Iterator[Tensor]:
    """Batches of the items that the Gaussian is fitted to; mirrored too, where training mirrors them."""
    for index in _spread(data).split(FITTED_AT_ONCE):
        batch = data.batch(index)
        yield batch
        if experiment.flip:
            yield batch.flip(-1)


def _spread(data: Dataset) -> Tensor:
    """The rows of some items, spread over the data: the first ones are often of one class."""
    count = min(len(data), MOST_FITTED, max(2, 2**28 // math.prod(data.shape)))
    return torch.linspace(0, len(data) - 1, count, dtype=torch.float64).long()


# Refusals before anything is large ------------------------------------------------------------------------------------


def check_sampling(experiment: Experiment) -> None:
    """Draw a small image with the run's schedule, target and sampler: what cannot be sampled is not trained."""
    if experiment.gaussian == "none" and needs_gaussian(experiment):
        problem = "fits no Gaussian, and this target, sees, schedule or sampler needs one"
        raise InputError("gaussian", "none", problem, "leave it out")
    boundary: Any = _basis(experiment, Identity((2, 2)))  # white noise has any basis
    axes = 2 if isinstance(boundary, str) and "/" not in boundary else len(check_boundary(boundary))
    shape, gaussian = (2,) * axes, None
    if experiment.gaussian != "none":  # any will do
        gaussian = GaussianModel(torch.zeros(1, *shape), Covariance(torch.ones(shape), Waves(shape, boundary)))
    denoiser = build_denoiser(lambda x, label: torch.zeros_like(x), experiment, Identity(shape), gaussian)
    rehearse(denoiser, (1, *shape), **experiment.sampling(denoiser.process.schedule))


def check_size(experiment: Experiment, data: Dataset, per_pass: int) -> None:
    """Refuse a network, a batch or a grid of samples of the data that cannot fit in memory."""
    try:
        with torch.device("meta"):  # built without memory for its parameters
            net = build_network(experiment, data.shape, data.grid.dtype, conditions_of(data))
        parameters: float = sum(parameter.numel() for parameter in net.parameters())
    except (RuntimeError, OverflowError, TypeError):  # more than 2⁶³
        parameters = math.inf
    require_memory("widths", experiment.widths, BYTES * parameters, "use a smaller network")
    # The least that one image costs: itself, its noise, both together and the output, and the first activations.
    pixels = math.prod(data.shape[1:])
    image = 4 * pixels * (4 * data.shape[0] + 2 * experiment.widths[0])
    smaller = f"use fewer images, smaller ones than {tuple(data.shape)}, or `accumulation`"
    require_memory("batch_size", experiment.batch_size, experiment.batch_size / per_pass * image, smaller)
    needed = experiment.num_samples * (image + max(PICTURE, pixels))
    require_memory("num_samples", experiment.num_samples, needed, "draw fewer samples")
