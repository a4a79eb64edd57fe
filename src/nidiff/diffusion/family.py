"""Schedules of the literature that are one family: x_k = signal_k(t) · x0_k + sigma_k(t) · √λ_k · eps_k per mode of Σ.

What decides is the effective log-SNR of a mode, log(signal² C / (sigma² λ)) with C its variance in the data. A constant
Σ shifts it by one constant per mode; the schedules here move modes at times of their own, or choose one clock for all
from C and λ. Arguments that follow from Σ and the data (``shape``, ``boundary``, ``ratio``, ``mean_variance``) are
numbers with fixed names: `schedule_facts` gives them to a schedule that is written as text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.operator import WORKING, Covariance, as_numbers, check_shape
from nidiff.covariance.spectral import Boundary, boundary_per_axis, frequencies, magnitude, wavenumber
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.schedule import LARGEST_LOGSNR, MOST_LEVELS, SCHEDULES, Schedule, as_schedule
from nidiff.errors import InputError, one_of
from nidiff.memory import require_memory
from nidiff.recipe import check_number, check_whole, remembered

# Where there would be no signal at all, log-SNR would be −∞: the last row stands a hair before.
HAIR = 1e-6
# Beyond e^-60 of the noise's variance no signal can be seen, and beyond e^60 no noise: modes need not move there.
BEYOND = 60.0
WIDEST = 1e9  # pixels that a blur may be wide


@remembered
def equal_snr(mean_variance: float = 1.0, num_levels: int = 1000, base: str = "ddpm_linear") -> Schedule:
    """EqualSNR (Falck et al. 2025), for Σ ∝ C: every mode has the same SNR, the mean one that white noise gives.

    ᾱ_eq = ᾱ m / (1 − ᾱ + ᾱ m) of the schedule named ``base``, with m = ``mean_variance`` the mean eigenvalue of Σ: the
    mean variance C̄ of the data if Σ = C, and 1 if Σ is C scaled to mean 1, where nothing has to change. In log-SNR it
    is a shift by log m, so ``schedule.shifted(math.log(m))`` does the same to any schedule.
    """
    _check_positive(mean_variance=mean_variance)
    plain = _base(base, num_levels)
    return Schedule(plain.logsnr + math.log(mean_variance), plain.keeps, time=plain.time)


@remembered
def heat(
    shape: Sequence[int],
    num_levels: int = 201,
    blur_min: float = 0.5,
    blur_max: float | None = None,
    sigma: float = 0.01,
    boundary: str = "reflecting",
) -> Schedule:
    """Inverse heat dissipation (Rissanen et al. 2023): signal_k = exp(−ω_k σ_B²/2), and the same little noise at all
    levels.

    ω_k = Σ (π i/n)² over the axes (cosines, reflecting edges). σ_B goes from ``blur_min`` to ``blur_max`` pixels in
    equal ratios, after a first row of 0. Without ``blur_max`` it is ¾ of the longest side, the paper's 24
    for CIFAR-10. Coarse modes keep their signal to the end, so that N(0, sigma² Σ) is not where sampling may start.
    """
    shape = check_shape(shape)
    _checked_levels(num_levels, shape, 3)
    blur_max = 0.75 * max(shape) if blur_max is None else check_number("blur_max", blur_max)
    if not 0 < blur_min < blur_max < WIDEST:
        raise InputError(f"blur_min={blur_min}, blur_max={blur_max} must satisfy 0 < blur_min < blur_max < {WIDEST:g}.")
    _check_positive(sigma=sigma)
    ends = math.log(blur_min), math.log(blur_max)
    blur = torch.linspace(*ends, num_levels - 1, dtype=torch.float64, device="cpu").exp()
    decay = _dissipation(shape, boundary, torch.cat([blur.new_zeros(1), blur]))
    log_signal = (-decay).clamp(min=math.log(sigma) - BEYOND / 2)
    return _table(log_signal, torch.full_like(log_signal, math.log(sigma)), boundary)


@remembered
def blurring(
    shape: Sequence[int],
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
    shape = check_shape(shape)
    _check_logsnr(logsnr_min, logsnr_max)
    if not (0 <= blur_max < WIDEST and 0 < least <= 1):
        raise InputError(
            f"blur_max={blur_max}, least={least} must satisfy 0 <= blur_max < {WIDEST:g} and 0 < least <= 1."
        )
    time = _times(num_levels, shape)
    first, last = (math.atan(math.exp(-0.5 * logsnr)) for logsnr in (logsnr_max, logsnr_min))
    logsnr = -2 * torch.tan(first + time * (last - first)).log()
    decay = _dissipation(shape, boundary, blur_max * torch.sin(math.pi / 2 * time).square())
    kept = (1 - least) * (-decay).exp() + least
    log_signal, log_sigma = (0.5 * torch.nn.functional.logsigmoid(sign * logsnr) for sign in (1, -1))
    return _table(_column(log_signal, kept) + kept.log(), _column(log_sigma, kept), boundary)


@remembered
def soft_conditioning(
    shape: Sequence[int],
    softness: float = 1.0,
    num_levels: int = 1000,
    logsnr_max: float = 10.0,
    logsnr_min: float = -10.0,
    boundary: Boundary = "periodic",
) -> Schedule:
    """GUD's soft conditioning (Gerdes et al. 2024): log-SNR falls in equal steps, for fine modes first.

    ℓ_k(t) = ℓ_k(0) − t Δ, offset by the order l_k = |k|/max |k|: with W = (logsnr_max − logsnr_min)/``softness`` it is
    logsnr_max + (1 − l_k) W at t = 0 and logsnr_min − l_k W at t = 1, and signal² + sigma² = 1. A large softness is
    plain diffusion, all modes together; a small one makes modes one after the other: autoregression over scales.
    Log-SNR ends at ±60, beyond which nothing can be seen.
    """
    shape = check_shape(shape)
    _check_positive(softness=softness)
    _check_logsnr(logsnr_min, logsnr_max)
    order = wavenumber(shape, boundary)
    order = order / order.max().clamp(min=1e-300)
    width = (logsnr_max - logsnr_min) / softness
    time = _column(_ramp(num_levels, shape), order.unsqueeze(0))
    logsnr = logsnr_max + (1 - order) * width - time * (logsnr_max - logsnr_min + width)
    logsnr = logsnr.clamp(min(logsnr_min, -BEYOND), max(logsnr_max, BEYOND))
    if bool((logsnr.diff(dim=0).flatten(1).amin(1) >= 0).any()):
        raise InputError(f"softness={softness} is so small that between two modes nothing happens: use a larger one.")
    return Schedule(logsnr, boundary=boundary)


@remembered
def blue(
    shape: Sequence[int],
    num_levels: int = 1000,
    exponent: float = 1.0,
    tau: float = 0.2,
    boundary: Boundary = "periodic",
) -> Schedule:
    """Blue-noise blends (BNDM, Huang et al. 2024): signal = 1 − t, sigma_k = t (γ_t + (1 − γ_t) l_k), for white Σ.

    l_k² ∝ |k|^exponent with mean 1 is a blue spectrum (theirs was measured on masks of blue noise). γ_t =
    tanh(1.5 t/τ)/tanh(1.5/τ) goes from 0, blue, to 1, white at the noisy end; ``tau`` = 0.2 is theirs. t = (row + 1)/L.
    """
    shape = check_shape(shape)
    _check_positive(tau=tau)
    wave = wavenumber(shape, boundary)
    wave[wave == 0] = 1.0
    spectrum = wave**exponent
    root = (spectrum / spectrum.mean()).sqrt().unsqueeze(0)
    time = _column(_times(num_levels, shape).clamp(max=1 - HAIR), root)
    white = torch.tanh(1.5 * time / tau) / math.tanh(1.5 / tau)
    return _table((1 - time).log().expand(-1, *shape), (time * (white + (1 - white) * root)).log(), boundary)


@remembered
def offset_ramp(
    shape: Sequence[int],
    strength: float = 0.1,
    num_levels: int = 1000,
    base: str = "ddpm_linear",
    boundary: Boundary = "periodic",
) -> Schedule:
    """Offset noise that grows with time: the schedule named ``base``, and in the mean of the image √(1 + ψ² w² N) times
    its noise, ψ from 0 at the first row to 1 at the last.

    w is ``strength`` and N the number of pixels: at the last row it is ``nidiff.offset(shape, w, normalize=False)``.
    """
    shape = check_shape(shape)
    if "fixed" in boundary_per_axis(boundary, len(shape)):
        raise InputError(f"boundary={boundary!r} has no mean to be offset: use 'periodic' or 'reflecting'.")
    plain = _base(base, num_levels)
    mean = torch.zeros(1, *shape, dtype=torch.float64, device="cpu")
    mean[(0,) * mean.ndim] = float(math.prod(shape)) * strength * strength
    ramp = _column(_ramp(num_levels, shape), mean)
    log_sigma = _column(plain.sigma.log(), mean) + 0.5 * torch.log1p(ramp.square() * mean)
    return _table(_column(plain.log_signal, mean).expand_as(log_sigma), log_sigma, boundary)


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
    if values.numel() == 0 or not bool(torch.isfinite(values).all() & (values > 0).all()):
        raise InputError(
            "ratio must be C/λ of every mode, positive and finite: give the data's C over Σ's eigenvalues."
        )
    if per_mode and values.ndim == 0:
        raise InputError("ratio must have one entry per mode of Σ for per_mode=True: give an array of Σ's shape.")
    log_ratio = values.log() if per_mode else values.log().min()
    time = _column(1 - _times(num_levels, tuple(log_ratio.shape)).clamp(max=1 - HAIR), log_ratio.unsqueeze(0))
    # log of (L^t − 1)/(L − L^t), from the side on which nothing overflows; t/(1 − t) for L = 1.
    size = log_ratio.abs().clamp(min=1e-9)
    logsnr = torch.expm1(-time * size).neg().log() - torch.expm1(-(1 - time) * size).neg().log()
    logsnr = logsnr + torch.where(log_ratio > 0, -(1 - time) * size, time * size)
    return Schedule(logsnr, boundary=boundary if per_mode else None)


@remembered
def flow(num_levels: int = 1000, time_shift: float = 1.0) -> Schedule:
    """Flow matching with a Gaussian base of any Σ: signal = 1 − t, sigma = t, t = (row + 1)/L and a hair below 1 at the
    end.

    Its target is "velocity", noise − x0, and its loss ``denoising_loss(…, weighting="target")``. ``time_shift`` s is
    that of Stable Diffusion 3, t → s t/(1 + (s − 1) t): in log-SNR a shift by −2 log s.
    """
    _check_positive(time_shift=time_shift)
    time = _times(num_levels).clamp(max=1 - HAIR)
    return Schedule(2 * ((1 - time) / time).log() - 2 * math.log(time_shift), "sum")


def schedule_facts(covariance: Covariance, gaussian: GaussianModel | None = None) -> dict[str, Callable[[], Any]]:
    """What a schedule that is written as text may leave out, because Σ and the data's Gaussian say it."""
    spatial = covariance.spatial

    def ratio() -> Tensor:
        if gaussian is None:
            raise InputError(
                "schedule needs ratio, C/λ of every mode, and there is no Gaussian model of the data here: build it in "
                "Python as nidiff.designed(gaussian.spectrum(covariance) / covariance.eigenvalues)."
            )
        return gaussian.spectrum(spatial) / spatial.eigenvalues

    facts: dict[str, Callable[[], Any]] = {
        "shape": lambda: spatial.event_shape,
        "ratio": ratio,
        "mean_variance": lambda: covariance.eigenvalues.mean().item(),
    }
    # White noise is diagonal in every basis: then it is the data's that counts.
    basis = gaussian.spatial if gaussian is not None and spatial.is_constant else spatial
    boundary = _in_short(basis.boundary)
    return {**facts, "boundary": lambda: boundary} if boundary else facts


def _in_short(boundary: tuple[str, ...] | None) -> Boundary | None:
    """One word for all axes, if it is the same."""
    return boundary[0] if boundary and len({*boundary}) == 1 else boundary


def check_forgotten(schedule: Schedule) -> None:
    """Refuse to start from noise where the last level still has the data's coarse modes, as `heat` has."""
    if not schedule.forgets:
        raise InputError(
            f"schedule={schedule!r} keeps signal in some modes at its last level, which N(0, sigma² Σ) does not have: "
            'give a denoiser that knows the data\'s Gaussian and start="gaussian", or initial=.'
        )


def _base(base: str, num_levels: int) -> Schedule:
    """The schedule of a name, with so many levels and else its defaults: one column for all modes."""
    plain = as_schedule(f"{one_of('base', base, SCHEDULES)}:num_levels={num_levels}")
    if plain.event_shape:
        raise InputError(f"base={base!r} differs from mode to mode: name a schedule that is the same for all.")
    return plain


def _table(log_signal: Tensor, log_sigma: Tensor, boundary: Boundary) -> Schedule:
    return Schedule(2 * (log_signal - log_sigma), signal=log_signal.exp(), boundary=boundary)


def _times(num_levels: int, shape: tuple[int, ...] = ()) -> Tensor:
    """t = (row + 1)/L of every row, as many as there is memory for if each is a table over ``shape``."""
    rows = torch.arange(1, _checked_levels(num_levels, shape) + 1, dtype=torch.float64, device="cpu")
    return rows / num_levels


def _ramp(num_levels: int, shape: tuple[int, ...]) -> Tensor:
    """From 0 at the first row to 1 at the last."""
    return torch.linspace(0, 1, _checked_levels(num_levels, shape), dtype=torch.float64, device="cpu")


def _checked_levels(num_levels: int, shape: tuple[int, ...] = (), least: int = 1) -> int:
    check_whole("num_levels", num_levels, least, MOST_LEVELS)
    require_memory(f"num_levels={num_levels}", WORKING * num_levels * math.prod(map(float, shape)), "use fewer levels")
    return num_levels


def _column(values: Tensor, like: Tensor) -> Tensor:
    """One value per row for a table [rows, *modes]."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _dissipation(shape: tuple[int, ...], boundary: Boundary, blur: Tensor) -> Tensor:
    """ω_k σ_B²/2 of every row and mode: what heat has removed, as an exponent."""
    omega = magnitude([2 * math.pi * each for each in frequencies(shape, boundary)])
    return _column(blur.square() / 2, omega.unsqueeze(0)) * omega.square()


def _check_logsnr(logsnr_min: float, logsnr_max: float) -> None:
    if not -LARGEST_LOGSNR < logsnr_min < logsnr_max < LARGEST_LOGSNR:
        raise InputError(
            f"logsnr_min={logsnr_min}, logsnr_max={logsnr_max} must satisfy logsnr_min < logsnr_max, and lie within "
            f"±{LARGEST_LOGSNR:g}."
        )


def _check_positive(**given: float) -> None:
    for argument, value in given.items():
        if not value > 0:
            raise InputError(f"{argument}={value} must be a positive number.")


SCHEDULES.update(
    equal_snr=equal_snr,
    heat=heat,
    blurring=blurring,
    soft_conditioning=soft_conditioning,
    blue=blue,
    offset_ramp=offset_ramp,
    designed=designed,
    flow=flow,
)
