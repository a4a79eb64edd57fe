"""Every public path on a device that is not the CPU: it runs, its results stay there, and their bits are the CPU's."""

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from problems import COVARIANCES
from torch import Tensor

import nidiff
from nidiff import design, metrics, operators, schedules
from nidiff.commands.train import Train
from nidiff.covariance import Modes
from nidiff.data.dataset import Dataset
from nidiff.data.grid import Grid
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.spacing import SPACINGS
from nidiff.diffusion.target import TARGETS
from nidiff.evaluation.likelihood import measure_likelihood
from nidiff.generation.job import draw_seeds, plan_job
from nidiff.generation.loaded_model import Model, SingleProcess, open_model
from nidiff.generation.observations import observe
from nidiff.generation.restoration import denoise, restoration_job, restore
from nidiff.interop.flow import FlowNetwork, flow_scheduler, packed
from nidiff.interop.whitened import Whitened
from nidiff.inverse.posterior import METHODS
from nidiff.model.config import ALGORITHMS
from nidiff.model.unet import FieldUNet
from nidiff.sampling.sampler import SAMPLERS
from nidiff.sampling.step import Visit
from nidiff.testing import Device, DeviceError
from nidiff.testing.problems import normal
from nidiff.training import loop as training
from nidiff.training.build import build

CPU, SHAPE = torch.device("cpu"), (2, 1, 8, 8)
Path_ = Callable[[torch.device], Any]
PATHS: dict[str, Path_] = {}
SIGMA = nidiff.gaussian_free_field(SHAPE[2:])
DATA = SIGMA.sqrt(normal(32, 1, 8, 8)).float()
GAUSSIAN = nidiff.fit_gaussian(DATA, basis=SIGMA)
MIXTURE = nidiff.fit_mixture(DATA, components=2, basis=SIGMA)


def path(name: str) -> Callable[[Path_], Path_]:
    return lambda function: PATHS.setdefault(name, function)


def images(device: torch.device, seed: int = 0, *shape: int) -> Tensor:
    return normal(*(shape or SHAPE), seed=seed).float().to(device)


class Net(torch.nn.Module):
    """A small network of x, the row, a class, numbers and a field."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.classes = torch.nn.Conv2d(1, 1, 3, padding=1), torch.nn.Embedding(4, 1)

    def forward(self, x, label, class_labels=None, parameters=None, fields=None):
        x = self.conv(x).tanh() + 0.01 * label.to(x.dtype).reshape(-1, 1, 1, 1)
        if class_labels is not None:
            x = x + self.classes(class_labels)[..., None, None]
        if parameters is not None:
            x = x + parameters.reshape(len(x), -1).nan_to_num().mean(1).reshape(-1, 1, 1, 1)
        return x if fields is None else x + fields


def model(device: torch.device, schedule: Any = "ddpm_linear:num_levels=20", sigma=SIGMA, **options: Any):
    options = {"gaussian": GAUSSIAN, "mixture": MIXTURE, "clip": 3.0, **options}
    return nidiff.Denoiser(Net(), nidiff.Process(schedule, sigma), **options).to(device)


def blurring(device: torch.device) -> nidiff.Denoiser:
    """A model whose modes have levels of their own."""
    return model(device, schedules.as_schedule("blurring:num_levels=20", FACTS), nidiff.Identity((8, 8)), target="x0")


def draw(denoiser: nidiff.Denoiser, **options: Any) -> Tensor:
    with loop():
        return nidiff.sample(denoiser, SHAPE, **{"num_steps": 4, "generator": [1, 2], **options})


# Functions in which a loop may wait for the device, and why.
ALLOWED = {
    "check_finite": "the state that a user begins with is checked once",
    "_check_images": "the images are looked at once, at the end",
    "check_images": "an observation is checked once",
    "kept": "what the linear system of an observation needs is made once for every level",
    "_check_linearisation": "an operator that is not linear is looked at",
    "_given": "the components of the mixture are computed on the CPU",
    "_check_classes": "the classes of a user are checked once",
    "_log_densities": "the noise that a user begins with is looked at once",
    "shape_of": "whether that noise was drawn by the scheduler is looked at once",
    "_index": "a timestep of a user is on the device: diffusers' schedulers read it too",
    "_draw": "in training, the generators of the device also draw what the CPU needs: flips, dropout and levels",
    "clip_grad_norm_": "nothing is read: torch asks C++ for the device of a gradient, which knows of no other",
    "conjugate_gradients": "they end when every row has converged, which may be hundreds of iterations earlier",
    "explained": "κ was not measured, and coefficients, here one per image, are tables of the CPU in float64",
}
DEVICES: list[Device] = []  # the one in use


def loop() -> contextlib.AbstractContextManager[None]:
    """What is read here is read at every step."""
    return DEVICES[-1].no_reads(*ALLOWED) if DEVICES else contextlib.nullcontext()


# Covariances ----------------------------------------------------------------------------------------------------------


def uses(covariance: nidiff.Covariance, device: torch.device) -> list[Any]:
    x = normal(2, *covariance.event_shape).float().to(device)
    torch.manual_seed(0)
    results = [covariance.sample(tuple(x.shape), generator, device=device) for generator in (None, 3, [1, 2])]
    results += [covariance.sqrt(x), covariance @ x, covariance.power(x, 0.3), covariance * x]
    if not covariance.is_singular:
        law = covariance.distribution()
        results += [covariance.inv_sqrt(x), covariance.solve(x), covariance.log_prob(x), law.log_prob(x)]
        results += [covariance.logdet(), law.entropy().item()]
    return results


for name, make in COVARIANCES.items():
    PATHS[f"covariance: {name}"] = lambda device, make=make: uses(make(), device)


@path("covariance: gradient")
def _(device):
    x = images(device).requires_grad_()
    (SIGMA.sqrt(x) ** 2 + SIGMA.log_prob(x)[:, None, None, None]).sum().backward()
    return x.grad


@path("covariance: generators on the device")
def _(device):
    sources = [torch.Generator(device).manual_seed(seed) for seed in (1, 2)]
    return [SIGMA.sample(SHAPE, source, device=device) for source in (sources[0], sources)]


@path("covariance: half precision and autocast")
def _(device):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [SIGMA.sqrt(images(device).to(dtype)) for dtype in (torch.float16, torch.bfloat16)]


@path("covariance: another grid")
def _(device):
    return uses(SIGMA.at((12, 12)), device)


@path("covariance: given by tensors of the device")
def _(device):
    matrix, spectrum = torch.eye(4, device=device) + 0.1, torch.ones(8, 8, device=device)
    made = [nidiff.Dense(matrix), nidiff.Fourier((8, 8), spectrum), nidiff.Diagonal(spectrum)]
    made += [nidiff.graph(4 * torch.eye(4, device=device) - 1), nidiff.from_data(images(device, 0, 8, 1, 8, 8))]
    made += [nidiff.Channels(matrix, SIGMA), nidiff.CrossSpectral(matrix.expand(8, 8, 4, 4), SIGMA)]
    made += [nidiff.correlated([SIGMA, SIGMA], torch.eye(2, device=device))]
    return [uses(covariance, device) for covariance in made]


@path("modes: arithmetic")
def _(device):
    x, modes = images(device), Modes(SIGMA.values, SIGMA.basis)
    rows = Modes(torch.tensor([1.0, 2.0], dtype=torch.float64))
    by_mode, by_row = [modes * x, x * modes, x / modes, (modes + 1) ** 2 @ x], [rows * x, x / rows]
    return [*by_mode, *by_row, (rows * modes) * x, Modes(2.0) * x]


@path("modes: one per image, of the device")
def _(device):
    return Modes(torch.tensor([1.0, 2.0], device=device)) * images(device) * (1.0 + Modes(torch.ones(2, device=device)))


# Schedules, process, targets, loss ------------------------------------------------------------------------------------

FACTS = schedules.schedule_facts(SIGMA, GAUSSIAN)
TABLES = {
    "from_betas": {"betas": [0.1, 0.2, 0.3]},
    "from_alphas_cumprod": {"alphas_cumprod": [0.9, 0.5, 0.1]},
    "table": {"logsnr": [3.0, 0.0, -3.0]},
    "smld_geometric": {"num_levels": 20, "sigma_max": 10, "sigma_min": 0.1},
}
for name in schedules.SCHEDULES:

    @path(f"schedule: {name}")
    def _(device, name=name):
        given = {"schedule": name, **TABLES[name]} if name in TABLES else f"{name}:num_levels=20"
        schedule = schedules.as_schedule(given, FACTS)
        process, x0, eps = nidiff.Process(schedule, SIGMA), images(device), images(device, 1)
        level = process.schedule.level(torch.tensor([0, 2], device=device))
        x = process.perturb(x0, level, eps)
        functions = (process.conditional_score, process.flow, process.reverse_drift)
        return [x, *(function(x, x0, level) for function in functions)]


@path("schedule: tables and log-SNR of the device")
def _(device):
    table = torch.linspace(3, -3, 10, device=device)
    schedule = nidiff.Schedule(table)
    level = schedule.level_at(torch.zeros(2, device=device))
    return [level.signal * images(device), schedules.from_betas(table.sigmoid() / 2).level(1).sigma * images(device)]


@path("process: prior, its density, noise, coefficients")
def _(device):
    process = nidiff.Process("ve:num_levels=10", SIGMA)
    x = process.prior(SHAPE, [1, 2], device=device)
    return [x, process.prior_log_prob(x), process.noise(SHAPE, 1, device=device), process.coefficients(0.5)[1] * x]


for name in TARGETS:
    PATHS[f"target: {name}"] = lambda device, name=name: draw(model(device, target=name))
for name in WEIGHTINGS:

    @path(f"loss: {name}")
    def _(device, name=name):
        denoiser = model(device)
        loss = nidiff.denoising_loss(denoiser, images(device), generator=[1, 2], weighting=name)
        loss.mean().backward()
        return [loss.detach(), denoiser.net.conv.weight.grad]


@path("loss: one generator, of the device; levels per mode")
def _(device):
    denoiser = blurring(device)
    return nidiff.denoising_loss(denoiser, images(device), generator=torch.Generator(device).manual_seed(0)).detach()


for sees in ("z", "both"):

    @path(f"denoiser: sees {sees}")
    def _(device, sees=sees):
        net = Net()
        net.conv = torch.nn.Conv2d(2 if sees == "both" else 1, 1, 3, padding=1)
        torch.nn.init.constant_(net.conv.weight, 0.1)
        torch.nn.init.zeros_(net.conv.bias)
        process = nidiff.Process("flow:num_levels=20", SIGMA)
        return draw(nidiff.Denoiser(net, process, "residual", gaussian=GAUSSIAN, sees=sees).to(device))


@path("denoiser: eps, score, variance, another grid")
def _(device):
    denoiser, x = model(device), images(device)
    level = denoiser.process.schedule.level(3)
    finer = denoiser.at((16, 16))(images(device, 0, 2, 1, 16, 16), level)
    return [denoiser.eps(x, level), denoiser.score(x, level), denoiser.variance(level) * x, finer]


# Conditions and guidance ----------------------------------------------------------------------------------------------

CLASSES = nidiff.Condition(classes=3, null=3, dropout=0.1)
for name, (condition, value) in {
    "class_labels": (CLASSES, torch.tensor([0, 2])),
    "parameters": (nidiff.Condition(shape=(2,), dropout=0.1), torch.ones(2, 2)),
    "fields": (nidiff.Condition(shape=(1, 8, 8), null=0, dropout=0.1), torch.ones(2, 1, 8, 8)),
}.items():

    @path(f"condition: {name}")
    def _(device, name=name, condition=condition, value=value):
        denoiser = model(device, conditions={name: condition})
        bound = [denoiser.given(**{name: each}) for each in (value, value.to(device), value[:1].numpy())]
        guided = bound[1].guided(2.0, interval=(2, 15))
        loss = nidiff.denoising_loss(bound[0], images(device), generator=[1, 2]).detach()
        part = guided.for_images(torch.tensor([1], device=device))
        return [loss, *map(draw, [*bound, guided, denoiser]), part(images(device)[:1], part.process.schedule.level(3))]


# Samplers -------------------------------------------------------------------------------------------------------------

EXPLODING = dict.fromkeys(("als", "cas"), "smld_geometric:num_levels=20,sigma_max=10,sigma_min=0.1")
WITH_OPTIONS = ("ancestral:variance=gaussian", "churn:colour=gff,gamma=1", "ddim:eta=0.5", "angle:finish=denoise",
                "pc:predictor=heun")  # fmt: skip
for name in (*SAMPLERS, *WITH_OPTIONS):
    schedule = EXPLODING.get(name, "ddpm_linear:num_levels=20")
    PATHS[f"sampler: {name}"] = lambda device, name=name, schedule=schedule: draw(model(device, schedule), sampler=name)
for name in (*SPACINGS, "angle"):
    PATHS[f"spacing: {name}"] = lambda device, name=name: draw(model(device), spacing=name)
for name in ("prior", "gaussian"):
    PATHS[f"start: {name}"] = lambda device, name=name: draw(model(device), start=name)


@path("start: a tensor, and noisy data")
def _(device):
    options = {"num_steps": None, "spacing": [10, 5, 0]}
    return [draw(model(device), start=images(device), **options), draw(model(device), start=images(CPU), level=7)]


def measured(device: torch.device) -> nidiff.Denoiser:
    return design.measure_kappa(model(device), DATA[:8], num_rows=3)


for name in ("angle", "angle_2m", "ancestral:variance=gaussian"):
    PATHS[f"κ: {name}"] = lambda device, name=name: draw(measured(device), sampler=name)


@path("sample: generators of the device, tiles, callback, state")
def _(device):
    sources, seen = [torch.Generator(device).manual_seed(seed) for seed in (1, 2)], list[Visit]()
    torch.manual_seed(0)
    x = draw(model(device), generator=sources, sampler="ancestral", tile=3, callback=seen.append)
    return [x, seen[1].x0, draw(model(device), denoise=False), draw(model(device), generator=None, sampler="ddim")]


@path("walk")
def _(device):
    denoiser = model(device)
    levels = denoiser.process.schedule.levels(4)
    x = denoiser.process.prior(SHAPE, 0, device=device)
    return nidiff.walk(denoiser, x, levels, "ancestral", generator=1)


@path("sample: levels per mode, all samplers that take them")
def _(device):
    denoiser = blurring(device)
    return [draw(denoiser, sampler=name, num_steps=2) for name in SAMPLERS if name not in EXPLODING]


@path("sample: gaussian alone")
def _(device):
    denoiser = GAUSSIAN.denoiser(nidiff.Process("flow:num_levels=20", SIGMA))
    return draw(denoiser, device=device)


# Inverse problems -----------------------------------------------------------------------------------------------------

MASK = torch.arange(64).reshape(8, 8) % 3 == 0
OPERATORS: dict[str, Callable[[], operators.Operator]] = {
    "mask": lambda: operators.mask(MASK),
    "subsample": lambda: operators.subsample(2),
    "pool": lambda: operators.pool(2),
    "blur": lambda: operators.blur(1.0),
    "stations": lambda: operators.stations([[1.5, 2.25], [0.0, 7.0], [3.0, 3.5]], (8, 8)),
    "waves": lambda: operators.waves(2.0),
    "channels": lambda: operators.channels(0),
    "linear": lambda: operators.linear(lambda x: x.sum(-1), lambda y: y.unsqueeze(-1).expand(*y.shape, 8)),
    "function": lambda: operators.function(lambda x: x.exp()),
    "composed": lambda: operators.mask(MASK[:4, :4]) @ operators.pool(2),
}


def observed(operator: operators.Operator, device: torch.device, noise: Any = 1.0) -> nidiff.Observation:
    """With as much noise as the data, so that conjugate gradients end after a few iterations."""
    return nidiff.Observation(operator(images(CPU, 5)).to(device), operator, noise)


for name, make in OPERATORS.items():

    @path(f"posterior: {name}")
    def _(device, make=make):
        return draw(nidiff.posterior(model(device), observed(make(), device)), num_steps=2)


for name in METHODS:

    @path(f"posterior by {name}")
    def _(device, name=name):
        noise = 0.0 if name == "replacement" else 1.0
        return draw(nidiff.posterior(model(device), observed(operators.mask(MASK), device, noise), name))


@path("posterior: observations of the CPU, masks of the device, noise of all kinds, some images")
def _(device):
    mask = operators.mask(MASK.to(device))
    noises = [torch.ones(8, 8), torch.ones(8, 8, device=device), SIGMA]
    given = [observed(mask, place, noise) for place in (device, CPU) for noise in noises]
    given.append(nidiff.Observation.missing(images(device).masked_fill(~MASK.to(device), math.nan), 1.0))
    each = operators.mask(torch.stack([MASK, ~MASK])[:, None].to(device))
    single = nidiff.posterior(model(device), observed(each, device)).for_images(torch.tensor([1], device=device))
    part = nidiff.sample(single, (1, *SHAPE[1:]), num_steps=2, generator=1)
    return [part, *(draw(nidiff.posterior(model(device), observation), num_steps=2) for observation in given)]


@path("operators: transpose, modes of the device")
def _(device):
    keep = operators.waves(torch.ones(8, 8, dtype=torch.bool, device=device))
    pool, x = operators.pool(2), images(device)
    return [keep(x), pool.transpose(pool(x), x)]


# Likelihood -----------------------------------------------------------------------------------------------------------


@path("likelihood: exact and estimated")
def _(device):
    denoiser, x = model(device, clip=None).at((4, 4)), 0.5 * images(device, 0, 1, 1, 4, 4)
    options = {"rtol": 1.0, "atol": 1.0}
    exact = nidiff.log_likelihood(denoiser, x, trace="exact", **options)
    generator = torch.Generator(device).manual_seed(0)
    return [exact, nidiff.bits_per_dim(denoiser, x, num_probes=2, generator=generator, **options)]


@path("likelihood: of a data set")
def _(device):
    data = Dataset(DATA, grid=Grid.usual((1, 8, 8), "float32"), scaling=nidiff.Scaling(1.0))
    found = measure_likelihood(model(device, clip=None), data, num_images=2, rtol=1.0, atol=1.0)
    return found.log_prob.tolist()


# Design and metrics ---------------------------------------------------------------------------------------------------


@path("κ: data of the device, conditions, generators of the device")
def _(device):
    sources = [torch.Generator(device).manual_seed(seed) for seed in range(8)]
    classes = torch.arange(8, device=device) % 3
    denoiser = model(device, conditions={"class_labels": CLASSES}).given(class_labels=classes)
    found = design.measure_kappa(denoiser, DATA[:8].to(device), num_rows=3, generator=sources).kappa
    return [found.values.tolist(), found.trust.tolist()]


for channels in ("each", "shared", "joint", "cross"):

    @path(f"gaussian: fitted with channels {channels}")
    def _(device, channels=channels):
        data = SIGMA.sqrt(images(device, 0, 16, 2, 8, 8))
        gaussian = nidiff.fit_gaussian(data, basis=SIGMA, channels=channels)
        x, z = gaussian.sample((2, 2, 8, 8), [1, 2], device=device), images(device, 3, 2, 2, 8, 8)
        return [x, gaussian.log_prob(x), gaussian.bits_per_dim(x), gaussian.whiten(x), gaussian.colour(z)]


@path("gaussian: given by tensors of the device, fitted to batches, another grid")
def _(device):
    made = nidiff.GaussianModel(torch.zeros(1, 8, 8, device=device), SIGMA)
    fitted = nidiff.fit_gaussian((DATA[:8].to(device), DATA[8:].to(device)))
    state = made.at(nidiff.Process("flow:num_levels=9", SIGMA).schedule.level(3), SIGMA)
    drawn = made.sample(SHAPE, 1, state=state, device=device)
    coarse = fitted.on_grid((4, 4)).sample((1, 1, 4, 4), 1, device=device)
    return [drawn, state.to_z(drawn), fitted.whiten(drawn), coarse]


for distance in ("max", "batch", "quantile"):

    @path(f"calibrate: {distance}")
    def _(device, distance=distance):
        found = design.calibrate(DATA.to(device), SIGMA, distance=distance, batch_size=8, generator=1)
        return [found.sigma_max, found.epsilon]


@path("predictions: of a data set of the device")
def _(device):
    gaussian, process = nidiff.fit_gaussian(DATA.to(device), basis=SIGMA), nidiff.Process("flow:num_levels=20", SIGMA)
    predicted = design.predict(process, gaussian, "ancestral", [19, 9, 3])
    return [predicted.variance.tolist(), design.start_loss(gaussian.denoiser(process), "gaussian", 9)]


METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "frechet distance": lambda a, b: metrics.frechet_distance(a.flatten(1), b.flatten(1)),
    "frechet distance of few features": lambda a, b: metrics.frechet_distance(a.flatten(1)[:, :5], b.flatten(1)[:, :5]),
    "kernel distance": lambda a, b: metrics.kernel_distance(
        a.flatten(1), b.flatten(1), 8, 3, torch.Generator().manual_seed(0)
    ),
    "precision and recall": lambda a, b: metrics.precision_recall(a.flatten(1), b.flatten(1)),
    "wasserstein": lambda a, b: metrics.wasserstein(a, b).tolist(),
    "structure function": lambda a, b: metrics.structure_function(a).tolist(),
    "spectrum": lambda a, b: metrics.field_spectrum(a).power.tolist(),
    "spectrum error": metrics.spectrum_error,
    "cross spectra": lambda a, b: metrics.compare_cross_spectra(a.reshape(-1, 2, 8, 8), b.reshape(-1, 2, 8, 8)).rows(),
    "compare fields": lambda a, b: str(metrics.compare_fields(a, b, bootstrap=2)),
}
for name, metric in METRICS.items():
    PATHS[f"metric: {name}"] = lambda device, metric=metric: metric(DATA[:16].to(device), DATA[16:].to(device))


@path("scaling")
def _(device):
    scaling = nidiff.Scaling((2.0, 3.0), (1.0, 0.0), (False, True))
    data = images(device, 0, 2, 2, 8, 8).exp()
    x = scaling.to_model(data)
    return [x, scaling.to_data(x), nidiff.Scaling(2.0).to_model(data), scaling.log_volume(data).tolist()]


# diffusers ------------------------------------------------------------------------------------------------------------


def scheduler(**options: Any) -> nidiff.NonIsotropicScheduler:
    given = {"schedule": "ddpm_linear:num_levels=20", "gaussian": GAUSSIAN, "clip_sample_range": 3.0, **options}
    return nidiff.NonIsotropicScheduler(SIGMA, **given)


for algorithm in ALGORITHMS:

    @path(f"scheduler: {algorithm}")
    def _(device, algorithm=algorithm):
        steps, net = scheduler(algorithm=algorithm), Net().to(device)
        steps.set_timesteps(4, device)
        x = steps.init_noise(SHAPE, torch.Generator().manual_seed(0), device)
        with torch.no_grad(), loop():
            for t in steps.timesteps:
                output = net(steps.scale_model_input(x, t), t.expand(len(x)))
                x = steps.step(output, t, x, torch.Generator(device).manual_seed(1)).prev_sample
        return x


@path("scheduler: add_noise, get_velocity, timesteps of the device")
def _(device):
    rows, x0, noise = torch.tensor([3, 9], device=device), images(device), images(device, 1)
    steps = scheduler()
    steps.set_timesteps(4, device)
    others = [steps.previous_timestep(steps.timesteps[0]), steps.alphas_cumprod.tolist()]
    return [steps.add_noise(x0, noise, rows), steps.get_velocity(x0, noise, rows), *others]


@path("scheduler: flow matching, a start that init_noise did not draw, latents of another shape, packed")
def _(device):
    config = FlowMatchEulerDiscreteScheduler(20, shift=3.0, use_dynamic_shifting=True).config
    steps = nidiff.NonIsotropicScheduler.from_config(config, covariance=SIGMA)
    steps.set_timesteps(4, device, mu=0.5)
    x = SIGMA.sqrt(images(device))
    with loop():
        for t in steps.timesteps:
            x = steps.step(x.tanh(), t, x).prev_sample
    wide = torch.cat([x, x], -1)
    tokens = packed(steps.scale_noise(wide, steps.timesteps[[1, 2]], wide))
    return [x, steps.step(tokens.tanh(), steps.timesteps[1], tokens).prev_sample]


@path("scheduler: sees z, given noise, a denoiser")
def _(device):
    steps, x = scheduler(prediction_type="residual", algorithm="ddpm"), images(device)
    steps.set_timesteps(4, device)
    t = steps.timesteps[1]
    z = [steps.scale_model_input(x, t), steps.scale_model_input(x, torch.tensor([3, 9], device=device))]
    with torch.no_grad():
        step = steps.step_with(steps.denoiser(Net().to(device)), t, x, variance_noise=images(device, 1))
    return [*z, step.prev_sample, step.pred_original_sample]


def unet2d(**options: Any) -> Any:
    from diffusers import UNet2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
        return UNet2DModel(8, 1, 1, layers_per_block=1, norm_num_groups=4, **blocks, **options).eval()


@path("pipeline")
def _(device):
    results = []
    for options, kinds in (({}, ("latent", "np")), ({"num_class_embeds": 4}, ("pt",))):
        conditions = {"class_labels": CLASSES} if options else {}
        pipe = nidiff.NonIsotropicPipeline(unet2d(**options), scheduler(conditions=conditions)).to(device)
        pipe.set_progress_bar_config(disable=True)
        given = {"class_labels": torch.tensor([0, 1], device=device), "guidance_scale": 2.0} if options else {}
        for kind in kinds:
            with contextlib.nullcontext() if kind == "np" else loop():
                found = pipe(seeds=[1, 2], num_inference_steps=2, output_type=kind, **given).images
            results.append(found if isinstance(found, Tensor) else found.tolist())
    return results


for name, (make_scheduler, prediction) in {
    "DDIM": (lambda: DDIMScheduler(clip_sample=False), "epsilon"),
    "DPM-Solver++": (DPMSolverMultistepScheduler, "epsilon"),
    "flow matching": (FlowMatchEulerDiscreteScheduler, "velocity"),
}.items():

    @path(f"whitened: {name}")
    def _(device, make_scheduler=make_scheduler, prediction=prediction):
        steps = make_scheduler()
        net = Whitened(unet2d(), SIGMA, prediction_type=prediction, clip=1.0, scheduler=steps).to(device)
        steps.set_timesteps(3, device=device)
        y = images(device)
        with torch.no_grad():
            for t in steps.timesteps:
                y = steps.step(net(y, t).sample, t, y).prev_sample
        return [net.colour(y), net.whiten(y)]


@path("flow network")
def _(device):
    steps = flow_scheduler(schedules.flow(20))
    net = FlowNetwork(unet2d(), steps, SIGMA).to(device)
    return draw(nidiff.Denoiser(net, nidiff.Process(net.schedule, SIGMA), "velocity"))


# Networks, models, jobs, training -------------------------------------------------------------------------------------

for event, boundary in (((16,), "reflecting"), ((8, 8), "periodic/fixed"), ((4, 4, 4), "periodic")):

    @path(f"network: FieldUNet over {len(event)} axes")
    def _(device, event=event, boundary=boundary):
        torch.manual_seed(0)
        options = {"num_classes": 3, "num_parameters": 2, "condition_channels": 1, "widths": (8, 8), "layers": 1}
        net = FieldUNet(event, 1, 1, attention=(1,), boundary=boundary, **options).to(device)
        for weight in net.parameters():
            weight.data.add_(0.01)
        x = images(device, 0, 2, 1, *event)
        given = {"class_labels": torch.tensor([0, 2], device=device), "parameters": torch.ones(2, 2, device=device)}
        given["fields"] = images(device, 1, 2, 1, *event)
        outputs = [net(x, label, **given) for label in (3, torch.tensor([1.0, 2.5], device=device))]
        sum(output.square().mean() for output in outputs).backward()
        gradients = [weight.grad for weight in net.parameters() if weight.grad is not None]
        return [*(output.detach() for output in outputs), *gradients]


@path("model: saved from the device, opened on it")
def _(device):
    with tempfile.TemporaryDirectory() as folder:
        process = nidiff.Process("flow:num_levels=20", SIGMA)
        unet = nidiff.Denoiser(unet2d(), process, "velocity", clip=1.0, gaussian=GAUSSIAN)
        saved = design.measure_kappa(unet.to(device), DATA[:4].to(device), num_rows=2)
        nidiff.save_model(saved, f"{folder}/a")
        nidiff.save_model(model(device), f"{folder}/b")
        opened = open_model(Path(f"{folder}/a"), SingleProcess(device))
        job = plan_job(opened, "angle_2m", 3)
        seeds = draw_seeds(opened.denoiser, job, [5, 6], opened.shape, lambda visit: None)
        loaded = [nidiff.load_model(f"{folder}/a"), nidiff.load_model(f"{folder}/b", Net())]
        return [*(draw(each.to(device)) for each in loaded), seeds.tolist(), opened.sha256]


def loaded(device: torch.device) -> Model:
    scaling = nidiff.Scaling(2.0, 1.0)
    denoiser = model(device, scaling=scaling, target="x0")
    return Model(Path("none"), denoiser, (1, 8, 8), "0", Grid.usual((1, 8, 8)))


@path("restoration: restore, denoise, errors")
def _(device):
    known, items = loaded(device), DATA[:2]
    job = restoration_job(known, num_steps=2)
    observation = observe(known, items, operators.mask(MASK), 2.0, degrade=True)
    restored = restore(known, job, observation, samples=2, truth=items, watch=lambda visit: None)
    level = known.denoiser.process.schedule.level_with_noise(0.3)
    denoised = denoise(known, job, items, level, add_noise=True, samples=2, watch=lambda visit: None)
    return [restored.samples.tolist(), restored.errors(), denoised.mean.tolist()]


@path("training: steps, moving average, checkpoint")
def _(device):
    flags = (
        "--widths 8 --attention --layers 1 --batch-size 8 --precision fp32 --steps 2 --dropout 0.1 --flip --no-report"
    )
    state = PartialState(cpu=True)
    state.device = device  # where accelerate puts the network
    try:
        trainer = build(Train.parsed([*flags.split(), "--schedule", "ddpm_linear:num_levels=50"]).experiment)
        batches = training.step_batches(trainer)
        with loop():
            losses = [training.train_step(trainer, batches) for _ in range(2)]
        with training.averaged_weights(trainer):
            return [*losses, *(weight.detach().clone() for weight in trainer.net.parameters())]
    finally:
        state.device = CPU


# The tests ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_use(device: Device):
    DEVICES.append(device)
    try:
        yield
    finally:
        DEVICES.pop()


def flat(results: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(results)


@functools.cache
def on_cpu(name: str) -> list[Any]:
    return flat(PATHS[name](CPU))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["float64", "no float64"])
def test_a_path_gives_on_the_device_what_it_gives_on_the_cpu(name, double):
    """To the bit, where the device has float64. Its loops read nothing back, but in the functions `ALLOWED`."""
    with Device(double=double) as gpu, in_use(gpu):
        for found, expected in zip(flat(PATHS[name](gpu.device)), on_cpu(name), strict=True):
            if isinstance(expected, Tensor):
                assert found.device == gpu.device
                assert torch.equal(found.cpu(), expected) or not double
            if isinstance(expected, Tensor | float):
                near = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
                assert torch.allclose(torch.as_tensor(found).cpu(), torch.as_tensor(expected), **near)
            if double and not isinstance(expected, Tensor):
                assert found == expected or found != found


def test_with_a_measured_kappa_the_angle_samplers_read_nothing():
    with Device() as gpu:
        denoiser = measured(gpu.device)
        with gpu.no_reads("_check_images"):
            nidiff.sample(denoiser, SHAPE, sampler="angle_2m", num_steps=4, generator=[1, 2])


FAULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum": lambda x, cpu: x + cpu,
    "in place, on the device": lambda x, cpu: x.add_(cpu),
    "in place, on the CPU": lambda x, cpu: cpu.add_(x),
    "in place, a number of the CPU": lambda x, cpu: cpu.sum().add_(x.sum()),
    "out": lambda x, cpu: torch.add(x, x, out=cpu),
    "a product of matrices": lambda x, cpu: x @ cpu,
    "joined": lambda x, cpu: torch.cat([x, cpu]),
    "joined numbers": lambda x, cpu: torch.stack([x.sum(), cpu.sum()]),
    "a number of the device in the CPU": lambda x, cpu: cpu * x.sum(),
    "the device indexes the CPU": lambda x, cpu: cpu[x.long()],
    "a mask of the device on the CPU": lambda x, cpu: cpu[x > 0],
    "values of the CPU at an index": lambda x, cpu: x.__setitem__(torch.tensor([0, 1]), cpu[:2]),
    "numpy": lambda x, cpu: x.numpy(),
    "an array": lambda x, cpu: np.asarray(x),
    "a generator of the CPU": lambda x, cpu: torch.randn(3, device=x.device, generator=torch.Generator()),
    "a generator of the device": lambda x, cpu: cpu.normal_(generator=torch.Generator(x.device)),
    "a layer on the CPU": lambda x, cpu: torch.nn.Linear(3, 3)(x),
    "a loss": lambda x, cpu: torch.nn.functional.mse_loss(x, cpu),
    "a condition": lambda x, cpu: torch.where(cpu > 0, x, 0.0),
    "Σ with a mean of the CPU": lambda x, cpu: nidiff.Identity((3,)).sqrt(x) + cpu,
    "back from the CPU": lambda x, cpu: x.cpu() + x,
}
SOUND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "numbers of the CPU": lambda x, cpu: x * cpu.sum() + 1.0,
    "the CPU indexes the device": lambda x, cpu: x[torch.tensor([0, 2])] + x[cpu.bool()][:2],
    "copies": lambda x, cpu: x.copy_(cpu) + torch.as_tensor(cpu, device=x.device) + cpu.to(x),
    "shapes": lambda x, cpu: cpu.sum().expand_as(x).to(x.device) + x,
    "gradients": lambda x, cpu: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0] + x.detach(),
    "forward derivatives": lambda x, cpu: torch.func.jvp(lambda y: y * x, (x,), (x,))[1] + x,
    "a generator of its own": lambda x, cpu: torch.randn(3, device=x.device, generator=torch.Generator(x.device)) + x,
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "a mask": lambda x: x[x > 0],
    "values in a mask": lambda x: x.__setitem__(x >= 0, 2 * x),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "printed": lambda x: f"{x[0]:.2f}",
    "copied": lambda x: torch.zeros(3).copy_(x),
    "numbers of the CPU set": lambda x: torch.zeros(3).__setitem__(slice(None), x),
}


@pytest.mark.parametrize("name", FAULTS)
def test_where_two_devices_meet_is_refused(name):
    with Device() as gpu, pytest.raises(DeviceError):
        FAULTS[name](torch.arange(3.0, device=gpu.device), torch.ones(3))


@pytest.mark.parametrize("name", SOUND)
def test_what_a_device_does_is_not_refused(name):
    with Device() as gpu:
        assert SOUND[name](torch.arange(3.0, device=gpu.device), torch.ones(3)).device == gpu.device


@pytest.mark.parametrize("name", READS)
def test_a_read_is_noted_and_can_be_forbidden_but_where_it_is_allowed(name):
    with Device() as gpu:
        x = torch.arange(3.0, device=gpu.device)
        READS[name](x)
        assert Path(__file__).name in gpu.reads[-1]
        with gpu.no_reads(), pytest.raises(DeviceError, match="reads from cuda:0"):
            READS[name](x)
        with gpu.no_reads("<lambda>"):
            READS[name](x)
        with gpu.no_reads():
            x[x > 1] = 0.0  # a number is filled in without a look at the mask
            assert (x * 2).shape == (3,)


def test_a_device_without_float64_refuses_it_and_has_float32():
    with Device(double=False) as apple:
        assert torch.ones(3, device="mps").device == apple.device
        with pytest.raises(DeviceError):
            torch.ones(3, device="mps").double()
        with pytest.raises(DeviceError):
            torch.ones(3, dtype=torch.float64).to("mps")
