"""The named schedules: functions that return a `Schedule`, and the registry through which text and files name them.

A schedule is decided by the effective log-SNR of each mode, log(signal² C / (sigma² λ)), where C is the variance of the
mode in the data and λ its eigenvalue in Σ. The first group has the same levels for all modes; the second has levels per
mode, or computes one column for all modes from C and λ. The arguments ``shape``, ``boundary``, ``ratio`` and
``mean_variance`` follow from Σ and the data: `schedule_facts` supplies them to a schedule that is written as text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import WORKING, as_numbers, check_sizes
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.waves import Boundary, boundary_per_axis, frequencies, magnitude, wavenumber
from nidiff.diffusion.gaussian import GaussianModel, common_basis
from nidiff.diffusion.schedule import LARGEST_LOGSNR, MOST_LEVELS, Schedule, as_table
from nidiff.errors import InputError, one_of
from nidiff.memory import require_memory
from nidiff.notation import call, parse_call
from nidiff.recipe import check_number, check_whole, remembered

table = Schedule  # the name of one that no function made
# With no signal at all, log-SNR would be −∞: the last row stops this far before.
HAIR = 1e-6
# Beyond e^-60 of the noise's variance no signal can be seen, and beyond e^60 no noise: modes need not move there.
BEYOND = 60.0
WIDEST = 1e9  # pixels that a blur may be wide


@remembered
def ddpm_linear(num_levels: int = 1000, beta_min: float = 1e-4, beta_max: float = 0.02) -> Schedule:
    """β from ``beta_min`` to ``beta_max`` in equal steps, ᾱ_t = ∏(1 − β_s) (DDPM; the paper's schedule)."""
    return _from_betas(_betas(num_levels, beta_min, beta_max))


@remembered
def scaled_linear(num_levels: int = 1000, beta_min: float = 0.00085, beta_max: float = 0.012) -> Schedule:
    """√β from √``beta_min`` to √``beta_max`` in equal steps: the schedule of Stable Diffusion."""
    return _from_betas(_betas(num_levels, beta_min, beta_max, power=0.5))


@remembered
def ddpm_cosine(num_levels: int = 1000, offset: float = 0.008, beta_max: float = 0.999) -> Schedule:
    """ᾱ(t) ∝ cos²(π/2 · (t + offset)/(1 + offset)), each β at most ``beta_max`` (Nichol and Dhariwal 2021). The last
    level has 1/20,000 of the signal, by which a prediction of the noise is divided: clip x̂0, or predict v or x0."""
    _check_levels(num_levels)
    _require("offset", offset, 0 <= offset < 1, "0 <= `offset` < 1")
    _require("beta_max", beta_max, 0 < beta_max < 1, "0 < `beta_max` < 1")
    time = torch.arange(num_levels + 1, dtype=torch.float64, device="cpu") / num_levels
    remaining = torch.cos((time + offset) / (1 + offset) * math.pi / 2).square()
    return _from_betas((1 - remaining[1:] / remaining[:-1]).clamp(max=beta_max))


@remembered
def from_betas(betas: Sequence[float]) -> Schedule:
    """ᾱ_t = ∏(1 − β_s) of any β between 0 and 1, from the least to the most noise."""
    return _from_betas(_share("betas", betas))


@remembered
def from_alphas_cumprod(alphas_cumprod: Sequence[float]) -> Schedule:
    """signal² = ᾱ and sigma² = 1 − ᾱ of a falling column ᾱ. The β, where you have them, lose less to rounding."""
    return Schedule(torch.logit(_share("alphas_cumprod", alphas_cumprod)), "variance")


@remembered
def smld_geometric(num_levels: int, sigma_max: float, sigma_min: float) -> Schedule:
    """Noise scales in geometric progression, signal 1 (SMLD, appendix D)."""
    _check_levels(num_levels, least=2)
    _require("sigma_min", sigma_min, 0 < sigma_min < sigma_max, "0 < `sigma_min` < `sigma_max`")
    log_sigma = torch.linspace(math.log(sigma_min), math.log(sigma_max), num_levels, dtype=torch.float64, device="cpu")
    return Schedule(-2 * log_sigma, "signal")


@remembered
def vp(num_levels: int = 1000, beta_min: float = 0.1, beta_max: float = 20.0, time_min: float = 1e-3) -> Schedule:
    """The continuous VP process, β(t) = beta_min + t (beta_max − beta_min), tabulated from ``time_min`` to 1 (A.9)."""
    _require("beta_min", beta_min, 0 < beta_min <= beta_max <= 1000, "0 < `beta_min` <= `beta_max` <= 1000")
    _require("time_min", time_min, time_min > 0, "`time_min` > 0, since VP has no noise at 0")
    return _continuous(partial(_vp_logsnr, beta_min, beta_max), "variance", num_levels, time_min)


@remembered
def ve(num_levels: int = 1000, sigma_max: float = 50.0, sigma_min: float = 0.01, time_min: float = 0.0) -> Schedule:
    """The continuous VE process, sigma(t) = sigma_min (sigma_max / sigma_min)^t, tabulated from ``time_min`` to 1."""
    _require("sigma_min", sigma_min, 0 < sigma_min < sigma_max, "0 < `sigma_min` < `sigma_max`")
    return _continuous(partial(_ve_logsnr, sigma_min, sigma_max), "signal", num_levels, time_min)


def _vp_logsnr(beta_min: float, beta_max: float, time: Tensor) -> Tensor:
    integral = time * beta_min + 0.5 * time.square() * (beta_max - beta_min)
    return -torch.expm1(integral).log()  # ᾱ / (1 − ᾱ) = 1 / (e^∫β − 1)


def _ve_logsnr(sigma_min: float, sigma_max: float, time: Tensor) -> Tensor:
    return -2 * (math.log(sigma_min) + time * math.log(sigma_max / sigma_min))


def _continuous(logsnr: Callable[[Tensor], Tensor], keeps: str, num_levels: int, time_min: float) -> Schedule:
    _check_levels(num_levels)
    _require("time_min", time_min, 0 <= time_min < 1, "0 <= `time_min` < 1")
    time = torch.linspace(time_min, 1.0, num_levels, dtype=torch.float64, device="cpu")
    return Schedule(logsnr(time), keeps, time=time, logsnr_of_time=logsnr)


def _betas(num_levels: int, beta_min: float, beta_max: float, power: float = 1.0) -> Tensor:
    """β whose ``power`` rises in equal steps."""
    _check_levels(num_levels)
    _require("beta_min", beta_min, 0 < beta_min <= beta_max < 1, "0 < `beta_min` <= `beta_max` < 1")
    ends = beta_min**power, beta_max**power
    return torch.linspace(*ends, num_levels, dtype=torch.float64, device="cpu") ** (1 / power)


@remembered
def equal_snr(mean_variance: float = 1.0, num_levels: int = 1000, base: str = "ddpm_linear") -> Schedule:
    """EqualSNR (Falck et al. 2025), for Σ ∝ C: every mode has the same SNR, the mean one that white noise gives.

    ᾱ_eq = ᾱ m / (1 − ᾱ + ᾱ m) of the schedule named ``base``, m = ``mean_variance`` the mean eigenvalue of Σ: in
    log-SNR a shift by log m, which ``schedule.shifted(math.log(m))`` does to any schedule.
    """
    plain = _base(base, num_levels)
    shift = math.log(check_number("mean_variance", mean_variance, above=0.0))
    return Schedule(plain.logsnr + shift, plain.keeps, time=plain.time)


@remembered
def heat(
    shape: tuple[int, ...],
    num_levels: int = 201,
    blur_min: float = 0.5,
    blur_max: float | None = None,
    sigma: float = 0.01,
    boundary: str = "reflecting",
) -> Schedule:
    """Inverse heat dissipation (Rissanen et al. 2023): signal_k = exp(−ω_k σ_B²/2), and the same noise at all levels.

    ω_k = Σ (π i/n)² over the axes (cosines, reflecting edges). σ_B goes from ``blur_min`` to ``blur_max`` pixels (¾ of
    the longest side, the paper's 24 for CIFAR-10) in equal ratios, after a first row of 0. Coarse modes keep their
    signal to the end, so that N(0, sigma² Σ) is not where sampling may start.
    """
    _check_levels(num_levels, shape, 3)
    blur_max = 0.75 * max(shape) if blur_max is None else check_number("blur_max", blur_max)
    in_range = f"0 < `blur_min` < `blur_max` < {WIDEST:g}, in pixels"
    _require("blur_min", blur_min, 0 < blur_min < blur_max < WIDEST, in_range)
    check_number("sigma", sigma, above=0.0)
    ends = math.log(blur_min), math.log(blur_max)
    blur = torch.linspace(*ends, num_levels - 1, dtype=torch.float64, device="cpu").exp()
    decay = _dissipation(shape, boundary, _column(torch.cat([blur.new_zeros(1), blur]), shape))
    log_signal = (-decay).clamp(min=math.log(sigma) - BEYOND / 2)
    return _per_mode(log_signal, torch.full_like(log_signal, math.log(sigma)), boundary)


@remembered
def blurring(
    shape: tuple[int, ...],
    num_levels: int = 1000,
    blur_max: float = 20.0,
    least: float = 1e-3,
    logsnr_max: float = 10.0,
    logsnr_min: float = -10.0,
    boundary: str = "reflecting",
) -> Schedule:
    """Blurring diffusion (Hoogeboom and Salimans 2023): signal_k = a(t) d_k(t), and sigma(t) is the same for all modes.

    d_k = (1 − least) exp(−ω_k σ_B²/2) + least with σ_B = blur_max sin²(πt/2) pixels, ω_k as in `heat`; a and sigma are
    VP-cosine between the two log-SNR. t = (row + 1)/L.
    """
    _check_logsnr(logsnr_min, logsnr_max)
    _require("blur_max", blur_max, 0 <= blur_max < WIDEST, f"0 <= `blur_max` < {WIDEST:g}, in pixels")
    _require("least", least, 0 < least <= 1, "0 < `least` <= 1")
    time = _times(num_levels, shape)
    first, last = (math.atan(math.exp(-0.5 * logsnr)) for logsnr in (logsnr_max, logsnr_min))
    logsnr = -2 * torch.tan(first + time * (last - first)).log()
    decay = _dissipation(shape, boundary, blur_max * torch.sin(math.pi / 2 * time).square())
    passed = (1 - least) * (-decay).exp() + least
    log_signal, log_sigma = (0.5 * torch.nn.functional.logsigmoid(sign * logsnr) for sign in (1, -1))
    return _per_mode(log_signal + passed.log(), log_sigma, boundary)


@remembered
def soft_conditioning(
    shape: tuple[int, ...],
    softness: float = 1.0,
    num_levels: int = 1000,
    logsnr_max: float = 10.0,
    logsnr_min: float = -10.0,
    boundary: Boundary = "periodic",
) -> Schedule:
    """GUD's soft conditioning (Gerdes et al. 2024): log-SNR falls in equal steps, for fine modes first.

    With the order l_k = |k|/max |k| and W = (logsnr_max − logsnr_min)/``softness`` it goes from
    logsnr_max + (1 − l_k) W to logsnr_min − l_k W, within ±60, and signal² + sigma² = 1. A large softness is plain
    diffusion, all modes together; a small one makes modes one after the other: autoregression over scales.
    """
    check_number("softness", softness, above=0.0)
    _check_logsnr(logsnr_min, logsnr_max)
    order = wavenumber(shape, boundary)
    order = order / order.max().clamp(min=1e-300)
    width = (logsnr_max - logsnr_min) / softness
    time = _ramp(num_levels, shape)
    logsnr = logsnr_max + (1 - order) * width - time * (logsnr_max - logsnr_min + width)
    logsnr = logsnr.clamp(min(logsnr_min, -BEYOND), max(logsnr_max, BEYOND))
    moves = bool((logsnr.diff(dim=0).flatten(1).amin(1) < 0).all())
    _require("softness", softness, moves, "a larger softness, or more levels: at some rows no mode moves")
    return Schedule(logsnr, boundary=boundary)


@remembered
def blue(
    shape: tuple[int, ...],
    num_levels: int = 1000,
    exponent: float = 1.0,
    tau: float = 0.2,
    boundary: Boundary = "periodic",
) -> Schedule:
    """Blue-noise blends (BNDM, Huang et al. 2024): signal = 1 − t, sigma_k = t (γ_t + (1 − γ_t) l_k), for white Σ.

    l_k² ∝ |k|^exponent with mean 1 is a blue spectrum (theirs was measured on masks of blue noise). γ_t =
    tanh(1.5 t/τ)/tanh(1.5/τ) goes from 0, blue, to 1, white at the noisy end; ``tau`` = 0.2 is theirs. t = (row + 1)/L.
    """
    check_number("tau", tau, above=0.0)
    wave = wavenumber(shape, boundary)
    wave[wave == 0] = 1.0
    spectrum = wave**exponent
    root = (spectrum / spectrum.mean()).sqrt()
    time = _times(num_levels, shape).clamp(max=1 - HAIR)
    white = torch.tanh(1.5 * time / tau) / math.tanh(1.5 / tau)
    return _per_mode((1 - time).log(), (time * (white + (1 - white) * root)).log(), boundary)


@remembered
def offset_ramp(
    shape: tuple[int, ...],
    strength: float = 0.1,
    num_levels: int = 1000,
    base: str = "ddpm_linear",
    boundary: Boundary = "periodic",
) -> Schedule:
    """Offset noise that grows with time: the schedule named ``base``, and in the mean of the image √(1 + ψ² w² N) times
    its noise, ψ from 0 at the first row to 1 at the last.

    w is ``strength`` and N the number of pixels: at the last row it is ``nidiff.offset(shape, w, normalize=False)``.
    """
    shape = check_sizes(shape)
    has_mean = "fixed" not in boundary_per_axis(boundary, len(shape))
    _require("boundary", boundary, has_mean, "'periodic' or 'reflecting', whose modes include the mean")
    plain = _base(base, num_levels)
    mean = torch.zeros(shape, dtype=torch.float64, device="cpu")
    mean[(0,) * mean.ndim] = float(math.prod(shape)) * strength * strength
    offset = 0.5 * torch.log1p(_ramp(num_levels, shape).square() * mean)
    log_signal, log_sigma = (_column(column, shape) for column in (plain.log_signal, plain.sigma.log()))
    return _per_mode(log_signal, log_sigma + offset, boundary)


@remembered
def designed(
    ratio: float | Sequence[Any] | Tensor,
    per_mode: bool = False,
    num_levels: int = 1000,
    boundary: Boundary | None = None,
) -> Schedule:
    """The schedule under which Gaussian data change at an even pace (Chen et al. 2025): signal² = (L^t − 1)/(L − 1) and
    sigma² = (L − L^t)/(L − 1), with L = C/λ and t from noise to data.

    A mode then has variance λ L^t, and its probability-flow ODE is x' = ½ log L · x: constant in t, so few steps do.
    ``ratio`` is C/λ of every mode, a number or an array. One schedule for all takes L of the mode that the data fill
    least, the smallest ratio (the finest mode of white noise); ``per_mode`` gives each its own. t = 1 − (row + 1)/L.
    """
    values = as_numbers(ratio, "ratio")
    sound = values.numel() and bool((values.isfinite() & (values > 0)).all()) and (values.ndim or not per_mode)
    _require("ratio", None, bool(sound), "a positive C/λ, one per mode if `per_mode`")
    log_ratio = values.log() if per_mode else values.log().min()
    time = 1 - _times(num_levels, tuple(log_ratio.shape)).clamp(max=1 - HAIR)
    # log of (L^t − 1)/(L − L^t), from the side on which nothing overflows; t/(1 − t) for L = 1.
    size = log_ratio.abs().clamp(min=1e-9)
    logsnr = torch.expm1(-time * size).neg().log() - torch.expm1(-(1 - time) * size).neg().log()
    logsnr = logsnr + torch.where(log_ratio > 0, -(1 - time) * size, time * size)
    return Schedule(logsnr, boundary=boundary if per_mode else None)


@remembered
def flow(num_levels: int = 1000, time_shift: float = 1.0) -> Schedule:
    """Flow matching with a Gaussian base of any Σ: signal = 1 − t, sigma = t, t = (row + 1)/L, at the end a hair less.

    Its target is "velocity", noise − x0, and its loss ``denoising_loss(…, weighting="target")``. ``time_shift`` s is
    that of Stable Diffusion 3, t → s t/(1 + (s − 1) t): in log-SNR a shift by −2 log s.
    """
    check_number("time_shift", time_shift, above=0.0)
    time = _times(num_levels).clamp(max=1 - HAIR)
    return Schedule(2 * ((1 - time) / time).log() - 2 * math.log(time_shift), "sum")


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "ddpm_linear": ddpm_linear,
    "ddpm_cosine": ddpm_cosine,
    "scaled_linear": scaled_linear,
    "from_betas": from_betas,
    "from_alphas_cumprod": from_alphas_cumprod,
    "table": table,
    "smld_geometric": smld_geometric,
    "vp": vp,
    "ve": ve,
    "equal_snr": equal_snr,
    "heat": heat,
    "blurring": blurring,
    "soft_conditioning": soft_conditioning,
    "blue": blue,
    "offset_ramp": offset_ramp,
    "designed": designed,
    "flow": flow,
}


def as_schedule(schedule: Schedule | str | Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> Schedule:
    """A schedule, the ``to_config()`` of one, or text such as "ddpm_linear:num_levels=100,shift=1", as a schedule.

    ``facts`` supplies arguments that a text leaves out and its schedule takes, by name: the shape of Σ, for example.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str):
        name, arguments = parse_call("schedule", schedule)
        known = signature(SCHEDULES[one_of("schedule", name, SCHEDULES)]).parameters
        arguments = {key: value for key, value in (facts or {}).items() if key in known} | arguments
    elif isinstance(schedule, Mapping) and all(isinstance(key, str) for key in schedule):
        arguments = dict(schedule)
        name = arguments.pop("schedule", None)
    else:
        raise InputError("schedule", schedule, "is not one", "give a nidiff.Schedule, its to_config(), or a name")
    shift = check_number("shift", arguments.pop("shift", 0.0))
    built: Schedule = call("schedule", name, arguments, SCHEDULES)
    return built.shifted(shift) if shift else built


def schedule_facts(covariance: Covariance, gaussian: GaussianModel | None = None) -> dict[str, Any]:
    """What a schedule that is written as text may leave out, because Σ and the data's Gaussian say it."""
    event = covariance.spatial.event_shape
    facts: dict[str, Any] = {"shape": event, "mean_variance": covariance.eigenvalues.mean().item()}
    if boundary := common_basis(covariance, gaussian).boundary:
        facts["boundary"] = boundary[0] if len({*boundary}) == 1 else boundary
    if gaussian is not None:
        gaussian.check_basis(covariance)
        facts["ratio"] = gaussian.mean_spectrum / covariance.values.reshape(-1, *event).mean(0)
    return facts


def _base(base: str, num_levels: int) -> Schedule:
    """The schedule of a name, with so many levels and else its defaults: one column for all modes."""
    plain = as_schedule(f"{one_of('base', base, SCHEDULES)}:num_levels={num_levels}")
    _require("base", base, not plain.event_shape, "a schedule that is the same for all modes")
    return plain


def _per_mode(log_signal: Tensor, log_sigma: Tensor, boundary: Boundary) -> Schedule:
    log_signal, log_sigma = torch.broadcast_tensors(log_signal, log_sigma)
    return Schedule(2 * (log_signal - log_sigma), signal=log_signal.exp(), boundary=boundary)


def _times(num_levels: int, shape: tuple[int, ...] = ()) -> Tensor:
    """t = (row + 1)/L of every row, as many as there is memory for if each is a table over ``shape``."""
    rows = torch.arange(1, _check_levels(num_levels, shape) + 1, dtype=torch.float64, device="cpu")
    return _column(rows / num_levels, shape)


def _ramp(num_levels: int, shape: tuple[int, ...]) -> Tensor:
    """From 0 at the first row to 1 at the last."""
    return _column(torch.linspace(0, 1, _check_levels(num_levels, shape), dtype=torch.float64, device="cpu"), shape)


def _column(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One value per row of a table [rows, *shape]."""
    return values.reshape(-1, *[1] * len(shape))


def _check_levels(num_levels: int, shape: tuple[int, ...] = (), least: int = 1) -> int:
    check_whole("num_levels", num_levels, least, MOST_LEVELS)
    numbers = math.prod(map(float, check_sizes(shape) if shape else ()))
    require_memory("num_levels", num_levels, WORKING * num_levels * numbers, "use fewer levels")
    return num_levels


def _dissipation(shape: tuple[int, ...], boundary: Boundary, blur: Tensor) -> Tensor:
    """ω_k σ_B²/2 of every row and mode: what heat has removed, as an exponent."""
    omega = magnitude([2 * math.pi * each for each in frequencies(shape, boundary)])
    return blur.square() / 2 * omega.square()


def _check_logsnr(logsnr_min: float, logsnr_max: float) -> None:
    in_range = f"`logsnr_min` < `logsnr_max`, both within ±{LARGEST_LOGSNR:g}"
    _require("logsnr_min", logsnr_min, -LARGEST_LOGSNR < logsnr_min < logsnr_max < LARGEST_LOGSNR, in_range)


def _require(argument: str, value: object, holds: bool, in_range: str) -> None:
    """Refuse an argument for which a condition does not hold."""
    if not holds:
        raise InputError(argument, value, "is out of range", f"choose {in_range}")


def _from_betas(betas: Tensor) -> Schedule:
    log_remaining = torch.log1p(-betas).cumsum(0)  # log ᾱ
    return Schedule(log_remaining - torch.log(-torch.expm1(log_remaining)), "variance")


def _share(argument: str, values: Sequence[float]) -> Tensor:
    """A column of numbers between 0 and 1, both excluded: other levels have no SNR."""
    column = as_table(argument, values)
    sound = column.ndim == 1 and bool(((column > 0) & (column < 1)).all())
    _require(argument, None, sound, "a column of numbers between 0 and 1, both excluded")
    return column
