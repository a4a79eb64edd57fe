"""From an experiment to a `Trainer`: data, Σ, Gaussian, network, denoiser and optimiser, all checked."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis
from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.waves import Boundary, boundary_per_axis
from nidiff.data.annotations import conditions_of
from nidiff.data.crops import Crops
from nidiff.data.dataset import Dataset
from nidiff.data.spec import MEMORY_LIMIT
from nidiff.data.units import scaling_remarks
from nidiff.data.weights import WEIGHTS, point_weights
from nidiff.diffusion.condition import CLASSES, FIELDS, PARAMETERS
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.gaussian import GaussianModel, fit_gaussian
from nidiff.diffusion.mixture import MixtureModel, fit_mixture
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.process import Process
from nidiff.diffusion.roughness import roughness
from nidiff.diffusion.schedules import SCHEDULES, as_schedule, schedule_facts
from nidiff.diffusion.spacing import ANGLE
from nidiff.errors import InputError, one_of, renamed
from nidiff.memory import require_memory
from nidiff.model import network
from nidiff.model.config import scheduler_config
from nidiff.model.folder import open_stored
from nidiff.model.unet import FieldUNet
from nidiff.model.zoo import find_model
from nidiff.notation import call, parse_call
from nidiff.precision import has_bf16
from nidiff.randomness import mixed_seed
from nidiff.sampling.sampler import as_sampler, rehearse
from nidiff.training.baseline import baseline, held_out_items
from nidiff.training.checkpoint import list_checkpoints
from nidiff.training.draws import spread
from nidiff.training.experiment import PRECISIONS, Experiment
from nidiff.training.identity import data_digest, network_digest, process_digest, settings_digest
from nidiff.training.sharding import check_sharding, is_sharded, prepared, shard_on_cpus

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel

    from nidiff.training.run import RunDirectory

BYTES = 5 * 4  # of each weight in float32: itself, its gradient, two averages of Adam's, the moving average
MOST_FITTED = 10_000  # items that Σ and the Gaussian are fitted to
MOST_MIXED = 60_000  # items that the mixture is fitted to
MOST_STORED = 2**21  # numbers of the mixture by default: 8 MB
MOST_CLUSTERS, ITEMS_PER_CLUSTER, LEAST_RANK = 20, 200, 50  # in every class, by default
HAS_NOISE = ("eps", "noise", "v", "velocity", "score")  # the targets of which noise is a part
MIXTURES = ("auto", "classes", "clusters", "none")


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
    classes: Tensor | None = None
    """The class of every item, if the data have any, also where the network is not given it."""

    @cached_property
    def held_out(self) -> Dataset | None:
        """The held-out items, if there are any."""
        data = held_out_items(self.experiment, self.data)
        return data if data is None or self.data.labels is not None else without_labels(data)

    @cached_property
    def weights(self) -> Tensor | None:
        """How much each point counts in the loss."""
        grid, scaling = self.data.grid, self.data.scaling
        return point_weights(self.experiment.weights, grid, self.data.shape, scaling.domain)

    @cached_property
    def baseline(self) -> dict[str, Any]:
        """What the data's Gaussian achieves."""
        return baseline(self.denoiser.gaussian, self.data, self.held_out)

    @property
    def facts(self) -> dict[str, Any]:
        """What came of the settings, for people to read."""
        conditions = {name: known.classes or list(known.shape) for name, known in self.denoiser.conditions.items()}
        facts = {"images": len(self.data), "image_shape": list(self.data.shape)}
        facts |= {"conditions": conditions} if conditions else {}
        if PRECISIONS[self.experiment.precision] != self.accelerator.mixed_precision:
            facts |= {"precision": "fp32"}  # bf16 was asked for, and would be emulated
        return facts | {"parameters": sum(parameter.numel() for parameter in self.net.parameters())}

    def bare_net(self) -> torch.nn.Module:
        """The bare network; where it is sharded, one that is built alike and whole, with weights of its own."""
        return build_network(self.experiment, self.data) if is_sharded(self.net) else self.net

    @cached_property
    def identity(self) -> dict[str, str]:
        """What must be the same when the run is resumed."""
        return {
            "settings": settings_digest(self.experiment),
            "process": self.process or process_digest(scheduler_config(self.denoiser)),
            "data": data_digest(self.data),
            "network": network_digest(self.bare_net()),
        }


def build(
    experiment: Experiment, *, resumed: "RunDirectory | None" = None, memory_limit: int | None = MEMORY_LIMIT
) -> Trainer:
    """The trainer before the first step; a run that is ``resumed`` keeps its Σ, schedule and Gaussian."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from diffusers.training_utils import EMAModel

    experiment = experiment.resolved()
    notes: list[str] = []
    precision = experiment.precision
    if precision == "bf16" and not has_bf16():  # of a configuration that was made elsewhere
        precision = "fp32"
        notes.append("it trains in fp32 instead of bf16, which this machine could only emulate, many times slower")
    one_of("weighting", experiment.weighting, WEIGHTINGS)
    one_of("weights", experiment.weights, WEIGHTS)
    stored, process = (None, None) if resumed is None else (resumed.stored(), resumed.process())
    # All accelerators of a process share one state, which refuses a second precision. The processes stay as they are.
    AcceleratorState._reset_state()
    check_sharding()
    accelerator = Accelerator(mixed_precision=PRECISIONS[precision], cpu=not torch.cuda.is_available())
    shard_on_cpus(accelerator)
    per_pass = accelerator.num_processes * experiment.accumulation
    if experiment.batch_size % per_pass:
        problem = f"is not a multiple of processes × accumulation = {per_pass}"
        raise InputError("batch_size", experiment.batch_size, problem, "give one that is")
    scaling = None if stored is None else stored.scaling  # which need not be fitted again
    data = experiment.data.load(scaling=scaling, memory_limit=memory_limit, progress=accelerator.is_main_process)
    if experiment.flip and data.scaling.is_per_pixel:
        problem = "mirrors items, whose points have scalings, means or a domain of their own"
        raise InputError("flip", True, problem, "leave it out, or use one scaling for each channel")
    classes = data.labels
    if experiment.data.labels is None:  # the network is not conditional, even if the data have labels
        data = without_labels(data)
    _check_size(experiment, data, per_pass)
    torch.manual_seed(mixed_seed(experiment.seed))
    parse_mixture(experiment)
    if stored is None:
        notes += scaling_remarks(data)
        covariance = build_covariance(experiment, data)
        notes += _edge_notes(experiment, data, covariance)
        gaussian = _gaussian_or_note(experiment, data, covariance, notes)
        schedule = as_schedule(experiment.schedule, schedule_facts(covariance, gaussian))
    else:
        covariance, gaussian, schedule = stored.process.covariance, stored.gaussian, stored.process.schedule
    net = build_network(experiment, data).train()
    notes += _patch_notes(experiment, net, covariance)
    if experiment.initial is not None and (resumed is None or not list_checkpoints(resumed.checkpoints)):
        notes += set_weights(net, experiment, experiment.initial)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=experiment.weight_decay, fused=True)
    denoiser = Denoiser(
        net,
        Process(schedule, covariance),
        experiment.target,
        clip=1.0 if data.has_known_range else None,
        scaling=data.scaling,
        gaussian=gaussian,
        sees=None if experiment.sees == "auto" else experiment.sees,
        conditions=conditions_of(data, experiment.condition_dropout, net),
    )
    # What sampling or the process would refuse is refused before training.
    notes += rehearse(denoiser, data.shape, **experiment.sampling(denoiser.process.schedule))
    model, optimizer = prepared(accelerator, torch.compile(net) if experiment.compile else net, optimizer)
    ema = EMAModel(net.parameters(), decay=experiment.ema_decay, foreach=True)  # of parts, where it is sharded
    ema.to(accelerator.device)
    trained = denoiser.with_net(model), net, optimizer, ema
    trainer = Trainer(experiment, accelerator, data, *trained, process=process, notes=notes, classes=classes)
    _ = trainer.weights  # which may be refused
    return trainer


def without_labels(data: Dataset) -> Dataset:
    """The same data for a network that is not given their classes."""
    return dataclasses.replace(data, labels=None, class_names=(), num_classes=None)


# The parts ------------------------------------------------------------------------------------------------------------


def build_covariance(experiment: Experiment, data: Dataset) -> Covariance:
    """Σ over the axes of an item; ``from_data`` is fitted to (at most 10,000 of) the items."""
    shape, boundary = tuple(data.shape[1:]), experiment.edges
    return as_covariance(experiment.covariance, shape, lambda: data.batch(_rows(data)), boundary=boundary)


def build_gaussian(experiment: Experiment, data: Dataset, covariance: Covariance) -> GaussianModel | None:
    """The data's Gaussian in the basis of Σ, fitted to (at most 10,000 of) the items, a few at a time.

    White noise is diagonal in any basis: then it is that of the schedule's boundary.
    """
    name, arguments = parse_call("gaussian", experiment.gaussian)
    known = {average: partial(fit_gaussian, average=average) for average in ("modes", "radial")}
    if one_of("gaussian", name, [*known, "none"]) == "none":
        if needs_gaussian(experiment):
            problem = "fits no Gaussian, and this target, sees, schedule or sampler needs one"
            raise InputError("gaussian", "none", problem, "leave it out")
        return None
    basis: Basis | Boundary = covariance.spatial
    if covariance.is_constant:
        schedule, written = parse_call("schedule", experiment.schedule)
        parameter = signature(SCHEDULES[one_of("schedule", schedule, SCHEDULES)]).parameters.get("boundary")
        usual = parameter.default if parameter and isinstance(parameter.default, str) else "periodic"
        basis = written.get("boundary", experiment.edges or usual)
    batches = _Fitted(experiment, data, _rows(data))
    gaussian: GaussianModel = call("gaussian", name, {"basis": basis, **arguments}, known, batches)
    gaussian.check_basis(covariance)
    return gaussian


def parse_mixture(experiment: Experiment) -> tuple[str, dict[str, Any]]:
    """The kind of mixture in `MIXTURES`, and the arguments of `fit_mixture`."""
    name, arguments = parse_call("mixture", experiment.mixture)
    one_of("mixture", name, MIXTURES)
    for key in arguments:
        one_of("mixture", key, ("components", "rank", "shrinkage", "floor", "seed") if name != "none" else ())
    return name, arguments


def build_mixture(trainer: Trainer, measured: Tensor | None = None) -> MixtureModel | None:
    """The data's mixture in the basis of their Gaussian, fitted to (at most 60,000 of) the items, but not to those that
    are ``measured``, by their rows."""
    (name, arguments), data, classes = parse_mixture(trainer.experiment), trainer.data, trainer.classes
    if name == "none" or trainer.denoiser.gaussian is None:
        return None
    if name == "classes" and classes is None:
        raise InputError("mixture", name, "needs classes, and the data have none", "use clusters")
    rows = _rows(data, MOST_MIXED)
    rows = rows if measured is None else rows[~torch.isin(rows, measured)]
    each = math.prod(data.shape)  # numbers of a mean
    counts = torch.zeros(0) if classes is None or name == "clusters" else classes[rows].unique(return_counts=True)[1]
    if name == "auto":  # classes of one item, or whose means alone would not fit, do not count
        sound = len(counts) and int(counts.min()) > 1 and int(classes.min()) >= 0  # type: ignore[union-attr]
        counts = counts if sound and 2 * len(counts) * each <= MOST_STORED else counts[:0]
        if 2 * each > MOST_STORED:
            return None
        most = min(MOST_CLUSTERS, MOST_STORED // (LEAST_RANK * each * max(len(counts), 1)))
        clusters = int(counts.min()) // ITEMS_PER_CLUSTER if len(counts) else 1
        arguments = {"components": max(1, min(clusters, most)), **arguments}
    each *= arguments.get("components", 1)
    rank = MOST_STORED // (max(len(counts), 1) * each)
    batches = _Fitted(trainer.experiment, data, rows, classes if len(counts) else None)
    return fit_mixture(batches, **{"basis": trainer.denoiser.gaussian.spatial, "rank": rank, **arguments})


def needs_gaussian(experiment: Experiment) -> bool:
    """Whether the run cannot do without the data's Gaussian."""
    if experiment.target == "residual" or experiment.sees in ("z", "both"):
        return True
    sampler, _ = as_sampler(experiment.sampler)
    by_sampler = sampler.finishes or sampler.start == "gaussian" or sampler.spacing == ANGLE
    return by_sampler or parse_call("schedule", experiment.schedule)[0] == "designed"


def build_network(experiment: Experiment, data: Dataset) -> torch.nn.Module:
    """The network for the items and conditions of the data."""
    conditions = conditions_of(data)
    is_halved = not any(n % 2 ** (len(experiment.widths) - 1) for n in data.shape[1:])
    is_picture = data.grid.kind == "picture" and {*conditions} <= {CLASSES} and is_halved
    sizes = {name: getattr(experiment, name) for name in ("widths", "layers", "attention", "dropout")}
    if CLASSES in conditions:
        sizes["num_classes"] = conditions[CLASSES].classes
    for name, key in {PARAMETERS: "num_parameters", FIELDS: "condition_channels"}.items():
        if name in conditions:
            sizes[key] = conditions[name].shape[0]
    boundary = None if experiment.edges is None else experiment.edges.split("/")
    auto, both = "unet2d" if is_picture else "unet", experiment.sees == "both"
    return network.build_network(experiment.network, data.shape, auto=auto, boundary=boundary, both=both, **sizes)


def set_weights(net: torch.nn.Module, experiment: Experiment, initial: str) -> list[str]:
    """Give the network the weights of the model ``initial``; a note says if they predict something else."""
    with renamed("folder", "initial"):
        model, _ = open_stored(find_model(initial, "initial"))
    stored: dict[str, Tensor] = cast(torch.nn.Module, model.net).state_dict()
    if {name: value.shape for name, value in net.state_dict().items()} != {n: v.shape for n, v in stored.items()}:
        remedy = "give the widths, layers, attention, network and conditions of that model"
        raise InputError("initial", initial, "has another network than this run", remedy)
    net.load_state_dict(stored)
    if (was := model.target_name) == experiment.target:
        return []
    return [f"the weights of {initial} were trained to predict {was}, and this run predicts {experiment.target}"]


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


def _edge_notes(experiment: Experiment, data: Dataset, covariance: Covariance) -> list[str]:
    """That the noise is periodic along an axis that is cut, if it is: a part of a periodic field is not."""
    if not isinstance(data.values, Crops):
        return []
    edges = covariance.spatial.boundary or boundary_per_axis(experiment.edges or "reflecting", len(data.shape) - 1)
    axes = [data.grid.axes[axis] for axis in data.values.cut_axes if edges[axis] == "periodic"]
    if not axes:
        return []
    return [f"the noise is periodic along {', '.join(axes)}, and crops are not: give `boundary` reflecting there"]


def _patch_notes(experiment: Experiment, net: torch.nn.Module, covariance: Covariance) -> list[str]:
    """That the network cannot repeat white noise, which is part of what it is to predict: the output of each patch is
    a linear function of as many numbers as the first width."""
    if not isinstance(net, FieldUNet):
        return []
    values, width = covariance.values, net.norm.num_channels
    numbers = math.prod(net.patch) * net.config["out_channels"]
    if width >= numbers or experiment.target not in HAS_NOISE or bool((values != values.flatten()[0]).any()):
        return []
    problem = f"white noise has {numbers} numbers in each patch, and the network {width} channels for them"
    return [f"{problem}: give a smaller patch, a first of `widths` that is larger, or `target` x0"]


@dataclass
class _Fitted:
    """Batches of the rows that a model of the data is fitted to, with their labels if there are any; mirrored too,
    where training mirrors them."""

    experiment: Experiment
    data: Dataset
    rows: Tensor
    labels: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        for index in self.rows.split(256):
            batch = self.data.batch(index)
            for x in (batch, batch.flip(-1)) if self.experiment.flip else (batch,):
                yield x if self.labels is None else (x, self.labels[index])


def _rows(data: Dataset, most: int = MOST_FITTED) -> Tensor:
    """The rows of the items that are fitted to: the first ones are often of one class."""
    return spread(len(data), min(most, max(2, 2**28 // math.prod(data.shape))))


def _check_size(experiment: Experiment, data: Dataset, per_pass: int) -> None:
    """Refuse a network, a batch or a grid of samples of the data that cannot fit in memory."""
    try:
        with torch.device("meta"):  # built without memory for its parameters
            net = build_network(experiment, data)
        parameters: float = sum(parameter.numel() for parameter in net.parameters())
    except (RuntimeError, OverflowError, TypeError):  # more than 2⁶³
        parameters = math.inf
    require_memory("widths", experiment.widths, BYTES * parameters, "use a smaller network")
    # The least that one image costs: itself, its noise, both together and the output, and the first activations.
    image = 4 * math.prod(data.shape[1:]) * (4 * data.shape[0] + 2 * experiment.widths[0])
    counts = {"batch_size": experiment.batch_size / per_pass, "num_samples": experiment.num_samples}
    for name, count in counts.items():
        remedy = f"use fewer images, or smaller ones than {tuple(data.shape)}"
        require_memory(name, getattr(experiment, name), count * image, remedy)
