"""Named fields: each a few lines that make one of the covariance families from a handful of numbers, or from data."""

import functools
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import ParamSpec

import torch
from torch import Tensor

from nidiff.covariance.matrix import Channels, Dense, Diagonal, Identity
from nidiff.covariance.operator import Covariance, call_arguments, check_shape
from nidiff.covariance.spectral import BOUNDARIES, Cosine, Fourier, magnitude, radial_mean, wavenumber
from nidiff.errors import InputError, one_of

P = ParamSpec("P")


def named(function: Callable[P, Covariance]) -> Callable[P, Covariance]:
    """Let the covariance remember the call that made it, so that its configuration is that call and not an array.

    Arguments annotated as numbers or as true or false are checked to be that.
    """

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> Covariance:
        arguments = call_arguments(function, args, kwargs)
        arguments["shape"] = check_shape(arguments["shape"])
        _check_kinds(function, arguments)
        covariance = function(**arguments)  # type: ignore[call-arg]
        covariance.recipe = (function.__name__, arguments)
        return covariance

    return build


@named
def gaussian_free_field(
    shape: Sequence[int],
    gamma: float = 1.0,
    zero_mode: str = "one",
    boundary: str = "periodic",
    normalize: bool = True,
) -> Covariance:
    """The paper's Gaussian free field: Σ^½ multiplies mode k by |k|^-gamma (section 4, appendix C; E1–E9).

    ``gamma`` = 0 is white noise; larger is smoother. ``zero_mode`` says what happens to the mean of the field, where
    1/|k| has no value: "one" sets |k₀₀| := 1, the smallest non-zero |k| (the sound default); "zero" drops it, as the
    paper's constants do, and Σ is then singular (E4). |k| is in cycles per longest side, so that on a non-square shape
    the field has the same correlation in pixels along every axis.
    """
    return _power_law(shape, 2.0 * gamma, zero_mode, boundary, normalize, f"gamma={gamma}")


@named
def power_law(
    shape: Sequence[int],
    exponent: float,
    zero_mode: str = "one",
    boundary: str = "periodic",
    normalize: bool = True,
) -> Covariance:
    """Power spectrum ∝ |k|^-exponent: 0 white, 1 pink, 2 brown (red), −1 blue, −2 violet. See `gaussian_free_field`."""
    return _power_law(shape, exponent, zero_mode, boundary, normalize, f"exponent={exponent}")


@named
def matern(
    shape: Sequence[int],
    length_scale: float,
    smoothness: float = 1.5,
    boundary: str = "periodic",
    normalize: bool = True,
) -> Covariance:
    """Matérn field: λ ∝ (2ν/ℓ² + |ω|²)^-(ν + d/2), ω in radians per pixel, ``length_scale`` ℓ in pixels, ν > 0.

    The spectral density of the Matérn kernel at the modes of the grid: its periodic (or reflected) version.
    """
    _check_positive("length_scale", length_scale)
    _check_positive("smoothness", smoothness)
    family = BOUNDARIES[one_of("boundary", boundary, BOUNDARIES)]
    omega = 2 * torch.pi * magnitude(family.frequencies(shape))
    spectrum = (2 * smoothness + (length_scale * omega).square()).pow(-(smoothness + len(shape) / 2))
    _check_spectrum(spectrum, f"length_scale={length_scale}, smoothness={smoothness}")
    return family(shape, spectrum, normalize=normalize)


@named
def offset(shape: Sequence[int], strength: float = 0.1, normalize: bool = True) -> Covariance:
    """Offset noise as what it is: Σ = I + strength²·11ᵀ, the law of ``randn(C, H, W) + strength · randn(C, 1, 1)``."""
    spectrum = torch.ones(*shape, dtype=torch.float64, device="cpu")
    spectrum[(0,) * len(shape)] += strength * strength * spectrum.numel()
    _check_spectrum(spectrum, f"strength={strength}")
    return Fourier(shape, spectrum, normalize=normalize)


@named
def pyramid(
    shape: Sequence[int],
    discount: float = 0.9,
    num_levels: int = 10,
    ratio: float = 2.0,
    normalize: bool = True,
) -> Covariance:
    """Pyramid (multi-resolution) noise, exactly: Σ = I + Σ_i discount^2i U_i U_iᵀ, i = 0 … num_levels − 1.

    U_i is bilinear upsampling from max(1, ⌊n / ratio^i⌋) along each axis, as the common recipe draws it (it stops at
    the level where an axis has one pixel). That recipe also draws ``ratio`` anew for each batch, between 2 and 4, and
    divides by the batch's standard deviation: a mixture of such Gaussians. Here the ratio is fixed, and Σ with it.
    U_i does not commute with shifts, so this is a `Dense` covariance: for up to 4096 pixels.
    """
    _check_positive("discount", discount)
    if ratio <= 1:
        raise InputError(f"ratio={ratio} must be above 1: each level is that much coarser.")
    if num_levels < 1:
        raise InputError(f"num_levels={num_levels} must be at least 1.")
    size = torch.Size(shape).numel()
    if size > 4096:
        raise InputError(
            f"shape={tuple(shape)} has {size} pixels, and the exact covariance of pyramid noise is a dense matrix: "
            "use at most 4096 pixels, or power_law, whose spectrum is close."
        )
    matrix = torch.eye(size, dtype=torch.float64, device="cpu")
    for level in range(num_levels):
        coarse = [max(1, int(n / ratio**level)) for n in shape]
        factor = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        for n, m in zip(shape, coarse, strict=True):
            up = _linear_upsampling(m, n)
            factor = torch.kron(factor, up @ up.T)
        matrix += discount ** (2 * level) * factor
        if min(coarse) == 1:
            break
    return Dense(matrix, shape, normalize=normalize)


def from_data(
    data: Tensor,
    event_axes: int = 2,
    average: str = "radial",
    shrinkage: float = 0.01,
    boundary: str = "periodic",
    normalize: bool = True,
) -> Covariance:
    """The stationary Σ fitted to ``data`` [N, ..., *event]: its mean power per mode over the last ``event_axes`` axes.

    The mean over the N items is removed first. ``average`` is "radial" (modes with the same rounded |k| share one
    power) or "modes" (each mode its own). ``shrinkage`` ρ in [0, 1] pulls the spectrum to white: (1 − ρ) λ + ρ mean λ.
    """
    one_of("average", average, ("radial", "modes"))
    if not 0 <= shrinkage <= 1:
        raise InputError(f"shrinkage={shrinkage} must be from 0 (the data's spectrum) to 1 (white).")
    if not 1 <= event_axes < data.ndim:
        raise InputError(f"data has shape {tuple(data.shape)}: give [N, ..., *event] with event_axes={event_axes}.")
    if len(data) < 2:
        raise InputError(f"data has {len(data)} item: the spectrum needs at least two.")
    family = BOUNDARIES[one_of("boundary", boundary, BOUNDARIES)]
    shape = tuple(data.shape[-event_axes:])
    white = family(shape, torch.ones(shape, dtype=torch.float64, device="cpu"))
    spectrum = _mean_power(data, white)
    if not bool(torch.isfinite(spectrum).all()):
        raise InputError("data has NaN or infinite values: remove them first.")
    if average == "radial":
        shell = wavenumber(family, shape).round().long()
        spectrum = radial_mean(spectrum, shell)[shell]
    spectrum = (1 - shrinkage) * spectrum + shrinkage * spectrum.mean()
    if not bool((spectrum > 0).all()):
        raise InputError("data has modes without power (constant images?): raise shrinkage so that Σ has an inverse.")
    return family(shape, spectrum, normalize=normalize)


def _power_law(
    shape: Sequence[int], exponent: float, zero_mode: str, boundary: str, normalize: bool, argument: str
) -> Covariance:
    one_of("zero_mode", zero_mode, ("one", "zero"))
    family = BOUNDARIES[one_of("boundary", boundary, BOUNDARIES)]
    index = wavenumber(family, shape)
    zero = (0,) * index.ndim
    index[zero] = 1.0
    spectrum = index.pow(-exponent)
    _check_spectrum(spectrum, argument)
    if zero_mode == "zero":
        spectrum[zero] = 0.0
    return family(shape, spectrum, normalize=normalize, allow_singular=zero_mode == "zero")


def _mean_power(data: Tensor, white: Fourier | Cosine) -> Tensor:
    """Mean squared coefficient of each mode, laid out as the eigenvalues, in blocks so that memory stays small."""
    axes = len(white.event_shape)
    items = data.detach().reshape(len(data), -1, *data.shape[-axes:])
    mean = sum(block.double().sum(0) for block in items.split(1024)) / len(items)
    total = torch.zeros(white.event_shape, dtype=torch.float64, device="cpu")
    for block in items.split(1024):
        deviation = (block.double() - mean).flatten(0, 1).cpu()
        total += white.periodogram(deviation).sum(0)
    return total / (len(items) * items.shape[1])


def _linear_upsampling(coarse: int, fine: int) -> Tensor:
    """The fine × coarse matrix of linear interpolation as torch does it (half-pixel centres, edges held)."""
    unit = torch.eye(coarse, dtype=torch.float64, device="cpu").unsqueeze(0)
    return torch.nn.functional.interpolate(unit, size=fine, mode="linear", align_corners=False)[0].T


def _check_kinds(function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Refuse an argument that is not of the kind its annotation says: a number, a whole number, or true or false."""
    for name, parameter in signature(function).parameters.items():
        value, kind = arguments[name], parameter.annotation
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if kind is float and not number:
            raise InputError(f"{name}={value!r} must be a finite number.")
        if kind is int and not (number and isinstance(value, int)):
            raise InputError(f"{name}={value!r} must be a whole number.")
        if kind is bool and not isinstance(value, bool):
            raise InputError(f"{name}={value!r} must be true or false.")


def _check_positive(argument: str, value: float) -> None:
    if value <= 0:
        raise InputError(f"{argument}={value} must be a positive number.")


def _check_spectrum(spectrum: Tensor, argument: str) -> None:
    """A condition number above 1/eps² loses the field even in float64 (float32: above 7e13, checked at use)."""
    condition = (spectrum.max() / spectrum.min()).item()
    limit = torch.finfo(torch.float64).eps ** -2
    if not condition <= limit:
        raise InputError(
            f"{argument} gives Σ the condition number {condition:.2g}: even float64 loses a field above {limit:.2g}; "
            "choose a smaller value."
        )


FAMILIES: dict[str, Callable[..., Covariance]] = {
    "Identity": Identity,
    "Diagonal": Diagonal,
    "Dense": Dense,
    "Fourier": Fourier,
    "Cosine": Cosine,
    "Channels": Channels,
}
FIELDS: dict[str, Callable[..., Covariance]] = {
    "gaussian_free_field": gaussian_free_field,
    "power_law": power_law,
    "matern": matern,
    "offset": offset,
    "pyramid": pyramid,
}
COVARIANCES = ChainMap(FIELDS, FAMILIES)  # a view: what is added to either is seen here
ALIASES = {"gff": "gaussian_free_field", "white": "Identity"}
