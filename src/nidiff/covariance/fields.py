"""Named fields: each a few lines that make one of the covariance families from a handful of numbers, or from data."""

import functools
import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch
from torch import Tensor

from nidiff.covariance.matrix import Channels, Dense, Diagonal, Identity
from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.covariance.spectral import BOUNDARIES, Cosine, Fourier, magnitude, radial_mean, wavenumber
from nidiff.errors import InputError, one_of, shown
from nidiff.recipe import call_arguments, check_kinds, fits, plain, remembered

P = ParamSpec("P")
MOST_LEVELS, MOST_DISCOUNT = 100, 10.0  # of a pyramid: 2 and 0.9 are usual, with 10 levels at most
LARGEST_FOLDED = 2**24  # numbers in a table of the folded spectrum
SMOOTHEST = 1e4  # a Matérn field, if its spectrum is folded: that of ν = 100 is a Gaussian already


def named(function: Callable[P, Covariance]) -> Callable[P, Covariance]:
    """Let the covariance remember the call that made it, so that its configuration is that call and not an array."""
    build = remembered(function)

    @functools.wraps(function)
    def build_for_shape(*args: P.args, **kwargs: P.kwargs) -> Covariance:
        arguments = call_arguments(function, args, kwargs)
        return build(**arguments | {"shape": check_shape(arguments["shape"])})  # type: ignore[call-arg]

    return build_for_shape


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
    aliased: bool = False,
) -> Covariance:
    """Matérn field: λ ∝ (2ν/ℓ² + |ω|²)^-(ν + d/2), ω in radians per pixel, ``length_scale`` ℓ in pixels, ν > 0.

    The kernel behind it is a function of √(2ν) r/ℓ, such as exp(−r/ℓ) for ``smoothness`` ν = ½. Its spectrum is cut off
    at the Nyquist frequency, so that a field of short length scale is smoother than the kernel: on images with ν = ½
    and ℓ = 2, neighbours have correlation 0.715. With ``aliased`` the frequencies above are folded back, and Σ is the
    kernel itself, sampled at the pixels and summed over its periodic (or reflected) images: 0.607 = exp(−½).
    """
    _check_positive("length_scale", length_scale)
    _check_positive("smoothness", smoothness)
    family = BOUNDARIES[one_of("boundary", boundary, BOUNDARIES)]
    if aliased and not 1 / SMOOTHEST <= smoothness <= SMOOTHEST:
        raise InputError(f"smoothness={smoothness} must be from {1 / SMOOTHEST:g} to {SMOOTHEST:g} with aliased.")
    omega = [2 * torch.pi * frequency for frequency in family.frequencies(shape)]
    if aliased:
        spectrum = _aliased_matern(omega, length_scale, smoothness)
    else:
        spectrum = (2 * smoothness + (length_scale * magnitude(omega)).square()).pow(-(smoothness + len(shape) / 2))
    _check_spectrum(spectrum, f"length_scale={length_scale}, smoothness={smoothness}")
    return family(shape, spectrum, normalize=normalize)


@named
def offset(shape: Sequence[int], strength: float = 0.1, normalize: bool = True) -> Covariance:
    """Offset noise as what it is: Σ = I + strength²·11ᵀ, the law of ``randn(C, H, W) + strength · randn(C, 1, 1)``."""
    spectrum = torch.ones(*shape, dtype=torch.float64, device="cpu")
    spectrum[(0,) * len(shape)] += float(strength) * strength * spectrum.numel()
    _check_spectrum(spectrum, f"strength={strength}")
    return Fourier(shape, spectrum, normalize=normalize)


@named
def pyramid(
    shape: Sequence[int],
    discount: float = 0.9,
    num_levels: int = 10,
    ratio: float = 2.0,
    normalize: bool = True,
    sizes: str = "powers",
) -> Covariance:
    """Pyramid (multi-resolution) noise, exactly: Σ = I + Σ_i discount^2i U_i U_iᵀ, i = 0 … num_levels − 1.

    U_i is linear upsampling from a coarser grid; the last level is the one where an axis has one pixel. ``sizes`` says
    how coarse level i is. "powers" divides the size of the event by ratio^i (32, 16, 8, 4, …), as kohya's sd-scripts
    do. "compounded" divides the size of the level before by ratio^i (32, 16, 4, 1), as Marigold, diffusion-e2e-ft and
    most copies of the original recipe do: they overwrite the width and height in the loop.

    These three draw the ratio anew for each level, between 2 and 4 (2 in Marigold's "power_of_two"), and divide by
    the standard deviation of the batch: a mixture of such Gaussians. Here the ratio is fixed, and Σ with it. U_i does
    not commute with shifts, so this is a `Dense` covariance: for up to 4096 pixels.
    """
    _check_positive("discount", discount)
    one_of("sizes", sizes, ("powers", "compounded"))
    if ratio <= 1:
        raise InputError(f"ratio={ratio} must be above 1: each level is that much coarser.")
    if num_levels < 1:
        raise InputError(f"num_levels={num_levels} must be at least 1.")
    if min(num_levels, math.log(min(shape)) / math.log(ratio)) > MOST_LEVELS:
        raise InputError(f"ratio={ratio} makes more than {MOST_LEVELS} levels: use a larger one, or lower num_levels.")
    if discount > MOST_DISCOUNT:
        raise InputError(f"discount={discount} must be at most {MOST_DISCOUNT}: the finest level has the weight 1.")
    size = math.prod(shape)
    if size > 4096:
        raise InputError(
            f"shape={tuple(shape)} has {size} pixels, and the exact covariance of pyramid noise is a dense matrix: "
            "use at most 4096 pixels, or power_law, whose spectrum is close."
        )
    matrix = torch.eye(size, dtype=torch.float64, device="cpu")
    coarse = shape
    for level in range(num_levels):
        coarse = [max(1, int(n / ratio**level)) for n in (shape if sizes == "powers" else coarse)]
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
    event_axes: int | None = None,
    average: str = "radial",
    shrinkage: float = 0.01,
    boundary: str = "periodic",
    normalize: bool = True,
    power: float = 1.0,
) -> Covariance:
    """The stationary Σ fitted to ``data`` [N, ..., *event]: its mean power per mode over the last ``event_axes`` axes.

    Data [N, L] have one such axis and images [N, C, H, W] two; for anything else, say how many. The mean over the N
    items is removed first. ``average`` is "radial" (modes with the same rounded |k| share one power) or "modes" (each
    mode its own). ``shrinkage`` ρ in [0, 1] pulls the spectrum towards white: (1 − ρ) λ + ρ mean λ. Of that Σ takes the
    ``power``: 1 is the data's own spectrum, 0 white, and between the noise is rougher than the data.
    """
    shrinkage, event_axes, power = plain(shrinkage), plain(event_axes), plain(power)
    check_kinds(from_data, {"shrinkage": shrinkage, "normalize": normalize, "power": power})
    one_of("average", average, ("radial", "modes"))
    if not 0 <= shrinkage <= 1:
        raise InputError(f"shrinkage={shrinkage} must be from 0 (the data's spectrum) to 1 (white).")
    if not isinstance(data, Tensor) or data.is_complex():
        data = as_numbers(data, "data")
    if data.numel() == 0:
        raise InputError(f"data has shape {tuple(data.shape)}, without a single number: give two items or more.")
    if event_axes is None and data.ndim not in (2, 4):
        raise InputError(
            f"data has shape {tuple(data.shape)}: say how many of its last axes are the event, by event_axes=1 for "
            "signals [N, C, L], 2 for images [N, H, W], 3 for volumes [N, C, D, H, W]."
        )
    event_axes = data.ndim // 2 if event_axes is None else event_axes
    if not fits(event_axes, int) or event_axes not in range(1, data.ndim):
        axes = f"event_axes={shown(event_axes)}"
        raise InputError(f"{axes} does not fit data of shape {tuple(data.shape)} [N, ..., *event].")
    if len(data) < 2:
        raise InputError(f"data has {len(data)} item: the spectrum needs at least two.")
    family = BOUNDARIES[one_of("boundary", boundary, BOUNDARIES)]
    shape = check_shape(data.shape[-event_axes:])
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
    spectrum = spectrum.pow(power)
    _check_spectrum(spectrum, f"power={power}")
    return family(shape, spectrum, normalize=normalize)


def _power_law(
    shape: Sequence[int], exponent: float, zero_mode: str, boundary: str, normalize: bool, argument: str
) -> Covariance:
    one_of("zero_mode", zero_mode, ("one", "zero"))
    family = BOUNDARIES[one_of("boundary", boundary, BOUNDARIES)]
    index = wavenumber(family, shape)
    zero = (0,) * index.ndim
    index[zero] = 1.0
    spectrum = index.pow(-float(exponent))
    _check_spectrum(spectrum, argument)
    if zero_mode == "zero":
        spectrum[zero] = 0.0
    return family(shape, spectrum, normalize=normalize, allow_singular=zero_mode == "zero")


def _aliased_matern(omega: list[Tensor], length_scale: float, smoothness: float) -> Tensor:
    """The sum of (2ν + ℓ²|ω + 2πm|²)^-p, p = ν + d/2, over all integer vectors m.

    (a + w²)^-p = ∫ t^(p−1) exp(−(a + w²) t) dt / Γ(p), and the sum of exp(−|ω + 2πm|² t) over m is a product over axes.
    The integrand is analytic and bell-shaped in log t, so a plain sum over a grid of log t is exact to rounding.
    """
    power, log_rate = smoothness + len(omega) / 2, math.log(2 * smoothness) - 2 * math.log(length_scale)
    step = 0.2 / math.sqrt(max(1.0, power))
    low, high = min(math.log(1e-3), math.log(1e-17) - log_rate), math.log(2 * power + 80) - log_rate
    log_t = low + step * torch.arange(math.ceil((high - low) / step) + 1, dtype=torch.float64, device="cpu")
    if len(log_t) * max(map(len, omega)) > LARGEST_FOLDED:
        raise InputError(f"shape has an axis of {max(map(len, omega))}, too long for aliased: leave aliased out.")
    log_weight = power * (log_t - 2 * math.log(length_scale)) - (log_t + log_rate).exp()
    log_weight += math.log(step) - math.lgamma(power)
    # Below the grid the integrand is t^ν: its values there are a geometric series that begins with the first.
    log_weight[0] -= math.log(-math.expm1(-smoothness * step))
    product = log_weight.exp().unsqueeze(-1)
    *others, last = [_gaussian_images(axis, log_t.exp()) for axis in omega]
    for factor in others:
        product = (product.unsqueeze(-1) * factor.unsqueeze(1)).flatten(1)
    return (product.T @ last).reshape([len(axis) for axis in omega])


def _gaussian_images(omega: Tensor, t: Tensor) -> Tensor:
    """The sum of exp(−(ω + 2πm)² t) over all integers m, for every t and |ω| ≤ π: [t, ω]."""
    t = t[:, None]
    images = sum(torch.exp(-(omega + 2 * math.pi * m).square() * t) for m in range(-4, 5))
    # For small t the Fourier series of the sum is the one that needs few terms.
    waves = sum(torch.exp(-(j**2) / (4 * t)) * torch.cos(j * omega) for j in range(-4, 5))
    return torch.where(t > 1 / (4 * math.pi), images, waves / (2 * (math.pi * t).sqrt()))


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


def _check_positive(argument: str, value: float) -> None:
    if value <= 0:
        raise InputError(f"{argument}={value} must be a positive number.")


def _check_spectrum(spectrum: Tensor, argument: str) -> None:
    """A condition number above 1/eps² loses the field even in float64 (float32: above 7e13, checked at use)."""
    condition = (spectrum.max() / spectrum.min()).item()  # NaN where the spectrum is
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
