"""Named fields: each a few lines that make eigenvalues in a basis from a handful of numbers, or from data."""

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, Eigen
from nidiff.covariance.checks import as_numbers, check_finite, check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.eigen import symmetric_eigen
from nidiff.covariance.families import FAMILIES, Dense
from nidiff.covariance.pyramid import LARGEST_DENSE, pyramid
from nidiff.covariance.waves import Boundary, Waves, frequencies, magnitude, radial_mean, wavenumber
from nidiff.errors import InputError, one_of
from nidiff.precision import with_float64
from nidiff.recipe import check_number, check_whole, is_number, remembered

LARGEST_FOLDED = 2**24  # numbers in a table of the folded spectrum
SMOOTHEST = 1e4  # a Matérn field, if its spectrum is folded: that of ν = 100 is a Gaussian already


@remembered
def gaussian_free_field(
    shape: Sequence[int],
    gamma: float = 1.0,
    zero_mode: str = "one",
    boundary: Boundary = "periodic",
    normalize: bool = True,
    spacing: float | Sequence[float] = 1.0,
) -> Covariance:
    """The paper's Gaussian free field: Σ^½ multiplies mode k by |k|^-gamma (section 4, appendix C; E1–E9).

    ``gamma`` = 0 is white noise; larger is smoother. |k| is in cycles per longest side, so that the correlation in
    pixels is the same along every axis; with a ``spacing`` of the pixels, a number or one per axis, in cycles per
    distance. ``zero_mode`` is the mean of the field, where 1/|k| has no value: "one" sets |k₀₀| := 1, the smallest
    non-zero |k|; "zero" drops it, as the paper's constants do, and Σ is then singular (E4). ``boundary`` is "periodic",
    "reflecting" or "fixed" (0 at the edge: the classical free field, which has no zero mode), or one of these per axis.
    """
    return power_law(shape, 2.0 * gamma, zero_mode, boundary, normalize, spacing)


@remembered
def power_law(
    shape: Sequence[int],
    exponent: float,
    zero_mode: str = "one",
    boundary: Boundary = "periodic",
    normalize: bool = True,
    spacing: float | Sequence[float] = 1.0,
) -> Covariance:
    """Power spectrum ∝ |k|^-exponent: 0 white, 1 pink, 2 brown (red), −1 blue, −2 violet. See `gaussian_free_field`."""
    basis, drop = Waves(shape, boundary), one_of("zero_mode", zero_mode, ("one", "zero")) == "zero"
    index = wavenumber(basis.event_shape, basis.boundary, per_axis("spacing", spacing, basis))
    spectrum = torch.where(index == 0, 1.0, index).pow(-float(exponent))
    if drop:
        spectrum[index == 0] = 0.0
    return Covariance(spectrum, basis, normalize=normalize, allow_singular=drop, argument="exponent")


@remembered
def matern(
    shape: Sequence[int],
    length_scale: float | Sequence[float],
    smoothness: float = 1.5,
    boundary: Boundary = "periodic",
    normalize: bool = True,
    aliased: bool = False,
    spacing: float | Sequence[float] = 1.0,
) -> Covariance:
    """Matérn field: λ ∝ (2ν/ℓ² + |ω|²)^-(ν + d/2), ω in radians per pixel, ``length_scale`` ℓ in pixels, ν > 0.

    ℓ may differ between axes, λ ∝ (2ν + Σ_i ℓ_i² ω_i²)^-(ν + d/2); with a ``spacing`` of the pixels it is a distance.
    ``boundary`` is that of `gaussian_free_field`. The kernel behind it is a function of √(2ν) r/ℓ, such as exp(−r/ℓ)
    for ``smoothness`` ν = ½. Its spectrum is cut off at the Nyquist frequency, so that a field of short length scale is
    smoother than the kernel: on images with ν = ½ and ℓ = 2, neighbours have correlation 0.715. With ``aliased`` the
    frequencies above are folded back, and Σ is the kernel itself, sampled at the pixels and summed over its periodic
    (or reflected) images: 0.607 = exp(−½).
    """
    basis = Waves(shape, boundary)
    lengths, steps = per_axis("length_scale", length_scale, basis), per_axis("spacing", spacing, basis)
    lengths = [length / step for length, step in zip(lengths, steps, strict=True)]
    longest = max(lengths)
    shares = [length / longest for length in lengths]
    omega = [2 * torch.pi * frequency for frequency in frequencies(basis.event_shape, basis.boundary)]
    if aliased:
        check_number("smoothness", smoothness, 1 / SMOOTHEST, SMOOTHEST)
        spectrum = _aliased_matern(omega, longest, smoothness, shares)
    else:
        check_number("smoothness", smoothness, above=0.0)
        scaled = longest * magnitude([share * axis for share, axis in zip(shares, omega, strict=True)])
        spectrum = (2 * smoothness + scaled.square()).pow(-(smoothness + len(omega) / 2))
    return Covariance(spectrum, basis, normalize=normalize, argument="length_scale")


@remembered
def offset(shape: Sequence[int], strength: float = 0.1, normalize: bool = True) -> Covariance:
    """Offset noise as what it is: Σ = I + strength²·11ᵀ, the law of ``randn(C, H, W) + strength · randn(C, 1, 1)``."""
    basis = Waves(shape)
    spectrum = torch.ones(basis.event_shape, dtype=torch.float64, device="cpu")
    spectrum[(0,) * spectrum.ndim] += float(strength) * strength * basis.size
    return Covariance(spectrum, basis, normalize=normalize, argument="strength")


@remembered
def ar1(shape: int | Sequence[int], rho: float) -> Covariance:
    """A stationary autoregression of order one over n steps: Σ_ij = rho^|i − j|, −1 < rho < 1, such as video frames.

    ``shape`` is n, or (n,). Larger rho is slower; a negative one alternates.
    """
    check_number("rho", rho, -1.0, 1.0)
    steps = _times(range(one_axis("ar1", shape)))
    lag = (steps[:, None] - steps).abs()
    return Dense(torch.tensor(float(rho), dtype=torch.float64, device="cpu") ** lag, normalize=False)


@remembered
def ou(times: Sequence[float], scale: float) -> Covariance:
    """The stationary Ornstein–Uhlenbeck process at any ``times`` that rise: Σ_ij = exp(−|t_i − t_j| / scale).

    At regular times this is `ar1` with rho = exp(−step / scale).
    """
    check_number("scale", scale, above=0.0)
    at = _times(times)
    return Dense(torch.exp(-(at[:, None] - at).abs() / scale), normalize=False)


@remembered
def brownian_bridge(times: Sequence[float], normalize: bool = True) -> Covariance:
    """Brownian motion from 0 to 0 at ``times`` that rise: Σ_ij = (min(t_i, t_j) − a) (b − max(t_i, t_j)) / (b − a).

    The ends a and b, where it is 0, lie outside: half the first step before the first time and half the last step after
    the last one, so that no time has variance 0. At regular times they are the edges of the pixels, as with a "fixed"
    boundary.
    """
    at = _times(times)
    steps = at.diff() if len(at) > 1 else torch.ones(1, dtype=torch.float64, device="cpu")
    start, end = at[0] - steps[0] / 2, at[-1] + steps[-1] / 2
    early, late = torch.minimum(at[:, None], at), torch.maximum(at[:, None], at)
    return Dense((early - start) * (end - late) / (end - start), normalize=normalize)


def graph(laplacian: Any, gamma: float = 1.0, zero_mode: str = "one", normalize: bool = True) -> Covariance:
    """The Gaussian free field on a graph or mesh: Σ ∝ L^-gamma with its Laplacian L, for up to 5000 nodes.

    L is symmetric and positive semi-definite, such as D − A of the (weighted) adjacency A with degrees D; an array, or
    a sparse matrix of torch or scipy. Its eigenvalues stand for |k|²: on a cycle of n nodes they are 4 sin²(πk/n) for
    (2πk/n)². Where L is 0 (constants, on every connected part) ``zero_mode`` "one" takes the smallest eigenvalue above
    0 in its place and "zero" gives none of it, with a singular Σ.
    """
    gamma, drop = check_number("gamma", gamma), one_of("zero_mode", zero_mode, ("one", "zero")) == "zero"
    _check_dense("laplacian", max(getattr(laplacian, "shape", None) or [len(laplacian)]))
    for dense in ("to_dense", "toarray"):  # of torch and of scipy
        laplacian = getattr(laplacian, dense)() if hasattr(laplacian, dense) else laplacian
    values, vectors = symmetric_eigen(laplacian, "laplacian")
    null = values == 0
    if bool(null.all()):
        raise InputError("laplacian", None, "is 0, so that no two nodes are connected", "use white noise")
    values = torch.where(null, values[~null].min(), values)
    spectrum = (values / values.min()).pow(-gamma)
    if drop:
        spectrum[null] = 0.0
    return Covariance(spectrum, Eigen(vectors), normalize=normalize, allow_singular=drop, argument="gamma")


def from_data(
    data: Tensor,
    event_axes: int | None = None,
    average: str = "radial",
    shrinkage: float = 0.01,
    boundary: Boundary = "periodic",
    normalize: bool = True,
    power: float = 1.0,
) -> Covariance:
    """The stationary Σ fitted to ``data`` [N, ..., *event]: its mean power per mode over the last ``event_axes`` axes.

    Data [N, L] have one such axis and images [N, C, H, W] two; for anything else, say how many. The mean over the N
    items is removed first. ``average`` is "radial" (modes with the same rounded |k| share one power) or "modes" (each
    mode its own). ``shrinkage`` ρ in [0, 1] pulls the spectrum towards white: (1 − ρ) λ + ρ mean λ. Of that Σ takes the
    ``power``: 1 is the data's own spectrum, 0 white, and between the noise is rougher than the data.
    """
    one_of("average", average, ("radial", "modes"))
    shrinkage, power = check_number("shrinkage", shrinkage, 0.0, 1.0), check_number("power", power)
    data = data if isinstance(data, Tensor) else as_numbers(data, "data")
    if len(data) < 2 or not data.numel() or (event_axes is None and data.ndim not in (2, 4)):
        remedy = "give two items or more, and `event_axes`: 1 for signals [N, C, L], 2 for images [N, H, W], …"
        raise InputError("data", None, f"has shape {tuple(data.shape)}, which gives no spectrum", remedy)
    axes = data.ndim // 2 if event_axes is None else check_whole("event_axes", event_axes, 1, data.ndim - 1)
    basis = Waves(data.shape[-axes:], boundary)
    spectrum = _mean_power(data, basis)
    check_finite("data", spectrum)
    if average == "radial":
        shell = wavenumber(basis.event_shape, boundary).round().long()
        spectrum = radial_mean(spectrum, shell)[shell]
    spectrum = (1 - shrinkage) * spectrum + shrinkage * spectrum.mean()
    if not bool((spectrum > 0).all()):
        raise InputError("data", None, "has modes without power (constant images?)", "raise `shrinkage`")
    return Covariance(spectrum.pow(power), basis, normalize=normalize, argument="power")


def _aliased_matern(omega: list[Tensor], length_scale: float, smoothness: float, shares: list[float]) -> Tensor:
    """The sum of (2ν + ℓ²|ω + 2πm|²)^-p, p = ν + d/2, over all integer vectors m; along an axis ℓ is its share of ℓ.

    (a + w²)^-p = ∫ t^(p−1) exp(−(a + w²) t) dt / Γ(p), and the sum of exp(−|ω + 2πm|² t) over m is a product over axes.
    The integrand is analytic and bell-shaped in log t, so a plain sum over a grid of log t is exact to rounding.
    """
    power, log_rate = smoothness + len(omega) / 2, math.log(2 * smoothness) - 2 * math.log(length_scale)
    step = 0.2 / math.sqrt(max(1.0, power))
    low, high = min(math.log(1e-3), math.log(1e-17) - log_rate), math.log(2 * power + 80) - log_rate
    log_t = low + step * torch.arange(math.ceil((high - low) / step) + 1, dtype=torch.float64, device="cpu")
    longest = max(map(len, omega))
    if len(log_t) * longest > LARGEST_FOLDED:
        raise InputError("shape", None, f"has an axis of {longest}, too long for `aliased`", "leave that out")
    log_weight = power * (log_t - 2 * math.log(length_scale)) - (log_t + log_rate).exp()
    log_weight += math.log(step) - math.lgamma(power)
    # Below the grid the integrand is t^ν: its values there are a geometric series that begins with the first.
    log_weight[0] -= math.log(-math.expm1(-smoothness * step))
    product = log_weight.exp().unsqueeze(-1)
    *others, last = [_gaussian_images(axis, log_t.exp() * share**2) for axis, share in zip(omega, shares, strict=True)]
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


def _mean_power(data: Tensor, basis: Basis) -> Tensor:
    """Mean squared coefficient of each mode, in blocks so that memory stays small."""
    items = with_float64(data.detach()).reshape(len(data), -1, *basis.event_shape)
    mean = sum(block.double().sum(0) for block in items.split(1024)) / len(items)
    total = torch.zeros(basis.event_shape, dtype=torch.float64, device="cpu")
    for block in items.split(1024):
        total += basis.power((block.double() - mean).flatten(0, 1).cpu()).sum(0)
    return total / (len(items) * items.shape[1])


def _times(times: Sequence[float]) -> Tensor:
    """Finite numbers that rise."""
    values = as_numbers(times, "times")
    _check_dense("times", values.numel())
    if values.ndim != 1 or not values.numel() or not bool(torch.isfinite(values).all() & (values.diff() > 0).all()):
        raise InputError("times", times, "must be finite numbers that rise", "give times such as (0, 1, 2.5)")
    return values


def _check_dense(argument: str, size: int) -> None:
    if size > LARGEST_DENSE:
        problem = f"has {size} entries, and a field given by a matrix at most {LARGEST_DENSE}"
        raise InputError(argument, None, problem, "use fewer, or a field with a spectrum, such as matern")


def one_axis(field: str, shape: int | Sequence[int]) -> int:
    """The length of a shape of one axis, for a field over time."""
    (n, *others) = check_shape(shape)
    if others:
        remedy = f"write '{field} x gff' for the others, or use Kronecker"
        raise InputError("shape", shape, f"has {1 + len(others)} axes, and {field} is over one", remedy)
    return n


def per_axis(argument: str, value: Any, basis: Basis) -> list[float]:
    """Positive numbers, one per axis of the event, of one for all or of as many."""
    axes = len(basis.event_shape)
    value = value.tolist() if hasattr(value, "tolist") else value
    numbers = [value] * axes if is_number(value) else value
    if not isinstance(numbers, list | tuple) or len(numbers) != axes:
        raise InputError(argument, value, "does not fit the event", f"give a number, or one for each of {axes} axes")
    return [check_number(argument, number, above=0.0) for number in numbers]


FIELDS: dict[str, Callable[..., Covariance]] = {
    "gaussian_free_field": gaussian_free_field,
    "power_law": power_law,
    "matern": matern,
    "offset": offset,
    "pyramid": pyramid,
    "ar1": ar1,
    "ou": ou,
    "brownian_bridge": brownian_bridge,
}
COVARIANCES = ChainMap(FIELDS, FAMILIES)  # a view: what is added to either is seen here
ALIASES = {"gff": "gaussian_free_field", "white": "Identity"}
