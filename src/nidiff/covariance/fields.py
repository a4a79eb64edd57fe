"""Named fields: each a few lines that make eigenvalues in a basis from a handful of numbers, or from data."""

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, Eigen
from nidiff.covariance.checks import as_numbers, check_between, check_finite, check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.eigen import symmetric_eigen
from nidiff.covariance.families import (
    Channels,
    Cosine,
    CrossSpectral,
    Dense,
    Diagonal,
    Fourier,
    Identity,
    Kronecker,
    Spectral,
    remembered,
    stationary,
)
from nidiff.covariance.waves import (
    Boundary,
    Waves,
    boundary_per_axis,
    frequencies,
    magnitude,
    radial_mean,
    wavenumber,
)
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_kinds, is_number, plain

MOST_LEVELS, MOST_DISCOUNT = 100, 10.0  # of a pyramid: 2 and 0.9 are usual, with 10 levels at most
LARGEST_FOLDED = 2**24  # numbers in a table of the folded spectrum
LARGEST_DENSE = 5000  # steps in time, or nodes of a graph: the eigenvectors are 200 MB
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

    ``gamma`` = 0 is white noise; larger is smoother. ``zero_mode`` says what happens to the mean of the field, where
    1/|k| has no value: "one" sets |k₀₀| := 1, the smallest non-zero |k| (the sound default); "zero" drops it, as the
    paper's constants do, and Σ is then singular (E4). |k| is in cycles per longest side, so that on a non-square shape
    the field has the same correlation in pixels along every axis.

    ``boundary`` is "periodic", "reflecting" or "fixed" (0 at the edge: the classical free field, which has no zero
    mode), or one of these per axis, such as ("reflecting", "periodic"). ``spacing`` is the distance between pixels,
    one per axis if they differ: then |k| is in cycles per distance.
    """
    return _power_law(shape, 2.0 * gamma, zero_mode, boundary, normalize, spacing, ("gamma", gamma))


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
    return _power_law(shape, exponent, zero_mode, boundary, normalize, spacing, ("exponent", exponent))


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

    ℓ may differ between axes: (4, 8) is twice as long along the second, λ ∝ (2ν + Σ_i ℓ_i² ω_i²)^-(ν + d/2).
    ``spacing`` is the distance between pixels, one per axis if they differ: then ℓ is a distance. ``boundary`` is that
    of `gaussian_free_field`.

    The kernel behind it is a function of √(2ν) r/ℓ, such as exp(−r/ℓ) for ``smoothness`` ν = ½. Its spectrum is cut off
    at the Nyquist frequency, so that a field of short length scale is smoother than the kernel: on images with ν = ½
    and ℓ = 2, neighbours have correlation 0.715. With ``aliased`` the frequencies above are folded back, and Σ is the
    kernel itself, sampled at the pixels and summed over its periodic (or reflected) images: 0.607 = exp(−½).
    """
    lengths = per_axis("length_scale", length_scale, len(shape))
    lengths = [length / step for length, step in zip(lengths, per_axis("spacing", spacing, len(shape)), strict=True)]
    _check_positive("smoothness", smoothness)
    boundary_per_axis(boundary, len(shape))
    if aliased:
        check_between("smoothness", smoothness, 1 / SMOOTHEST, SMOOTHEST)
    omega = [2 * torch.pi * frequency for frequency in frequencies(shape, boundary)]
    longest = max(lengths)
    shares = [length / longest for length in lengths]
    if aliased:
        spectrum = _aliased_matern(omega, longest, smoothness, shares)
    else:
        scaled = longest * magnitude([share * axis for share, axis in zip(shares, omega, strict=True)])
        spectrum = (2 * smoothness + scaled.square()).pow(-(smoothness + len(shape) / 2))
    _check_spectrum(spectrum, "length_scale", length_scale)
    return stationary(shape, spectrum, boundary, normalize=normalize)


@remembered
def offset(shape: Sequence[int], strength: float = 0.1, normalize: bool = True) -> Covariance:
    """Offset noise as what it is: Σ = I + strength²·11ᵀ, the law of ``randn(C, H, W) + strength · randn(C, 1, 1)``."""
    spectrum = torch.ones(*shape, dtype=torch.float64, device="cpu")
    spectrum[(0,) * len(shape)] += float(strength) * strength * spectrum.numel()
    _check_spectrum(spectrum, "strength", strength)
    return Fourier(shape, spectrum, normalize=normalize)


@remembered
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
        raise InputError("ratio", ratio, "must be above 1", "each level is that much coarser")
    if num_levels < 1 or min(num_levels, math.log(min(shape)) / math.log(ratio)) > MOST_LEVELS:
        raise InputError("num_levels", num_levels, f"must be 1 to {MOST_LEVELS}", "change it, or use a larger `ratio`")
    check_between("discount", discount, 0.0, MOST_DISCOUNT)
    size = math.prod(shape)
    if size > 4096:
        problem = f"has {size} pixels, and the exact covariance of pyramid noise is a dense matrix"
        raise InputError("shape", shape, problem, "use at most 4096 pixels, or power_law, whose spectrum is close")
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


@remembered
def ar1(shape: int | Sequence[int], rho: float) -> Covariance:
    """A stationary autoregression of order one over n steps: Σ_ij = rho^|i − j|, −1 < rho < 1, such as video frames.

    ``shape`` is n, or (n,). Larger rho is slower; a negative one alternates.
    """
    n = one_axis("ar1", shape)
    check_between("rho", rho, -1.0, 1.0)
    steps = _times(range(n))
    lag = (steps[:, None] - steps).abs()
    return _of_matrix(torch.tensor(float(rho), dtype=torch.float64, device="cpu") ** lag, "rho", rho)


@remembered
def ou(times: Sequence[float], scale: float) -> Covariance:
    """The stationary Ornstein–Uhlenbeck process at any ``times`` that rise: Σ_ij = exp(−|t_i − t_j| / scale).

    At regular times this is `ar1` with rho = exp(−step / scale).
    """
    _check_positive("scale", scale)
    at = _times(times)
    return _of_matrix(torch.exp(-(at[:, None] - at).abs() / scale), "scale", scale)


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
    return _of_matrix((early - start) * (end - late) / (end - start), "times", None, normalize)


def graph(laplacian: Any, gamma: float = 1.0, zero_mode: str = "one", normalize: bool = True) -> Covariance:
    """The Gaussian free field on a graph or mesh: Σ ∝ L^-gamma with its Laplacian L, for up to 5000 nodes.

    L is symmetric and positive semi-definite, such as D − A of the (weighted) adjacency A with degrees D; an array, or
    a sparse matrix of torch or scipy. Its eigenvalues stand for |k|², so Σ^½ multiplies by their power −gamma/2, as
    `gaussian_free_field` multiplies by |k|^-gamma: on a cycle of n nodes they are 4 sin²(πk/n) for (2πk/n)². Where L
    is 0 (constants, on every connected part) ``zero_mode`` "one" takes the smallest eigenvalue above 0 in its place and
    "zero" gives none of it, with a singular Σ.
    """
    gamma, zero_mode = plain(gamma), one_of("zero_mode", zero_mode, ("one", "zero"))
    check_kinds(graph, {"gamma": gamma, "normalize": normalize})
    values, vectors = symmetric_eigen(_as_full(laplacian), "laplacian")
    null = values == 0
    if bool(null.all()):
        raise InputError("laplacian", None, "is 0, so that no two nodes are connected", "use white noise")
    values = torch.where(null, values[~null].min(), values)
    spectrum = (values / values.min()).pow(-gamma)
    _check_spectrum(spectrum, "gamma", gamma)
    if zero_mode == "zero":
        spectrum = torch.where(null, 0.0, spectrum)
    return Covariance(spectrum, Eigen(vectors), normalize=normalize, allow_singular=zero_mode == "zero")


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
    shrinkage, event_axes, power = plain(shrinkage), plain(event_axes), plain(power)
    check_kinds(from_data, {"shrinkage": shrinkage, "normalize": normalize, "power": power})
    one_of("average", average, ("radial", "modes"))
    check_between("shrinkage", shrinkage, 0.0, 1.0)
    data = data if isinstance(data, Tensor) else as_numbers(data, "data")
    if event_axes is None and data.ndim not in (2, 4):
        remedy = "give `event_axes`: 1 for signals [N, C, L], 2 for images [N, H, W], 3 for volumes [N, C, D, H, W]"
        raise InputError("data", None, f"has shape {tuple(data.shape)}, of which the event is not known", remedy)
    event_axes = data.ndim // 2 if event_axes is None else event_axes
    if event_axes not in range(1, data.ndim):
        problem = f"does not fit data of shape {tuple(data.shape)} [N, ..., *event]"
        raise InputError("event_axes", event_axes, problem, "count the last axes that are the event")
    if len(data) < 2 or not data.numel():
        raise InputError("data", None, f"has shape {tuple(data.shape)}", "the spectrum needs at least two items")
    basis = Waves(data.shape[-event_axes:], boundary)
    spectrum = _mean_power(data, basis)
    check_finite("data", spectrum)
    if average == "radial":
        shell = wavenumber(basis.event_shape, boundary).round().long()
        spectrum = radial_mean(spectrum, shell)[shell]
    spectrum = (1 - shrinkage) * spectrum + shrinkage * spectrum.mean()
    if not bool((spectrum > 0).all()):
        raise InputError("data", None, "has modes without power (constant images?)", "raise `shrinkage`")
    spectrum = spectrum.pow(power)
    _check_spectrum(spectrum, "power", power)
    return Covariance(spectrum, basis, normalize=normalize)


def _power_law(
    shape: Sequence[int],
    exponent: float,
    zero_mode: str,
    boundary: Boundary,
    normalize: bool,
    spacing: float | Sequence[float],
    culprit: tuple[str, float],
) -> Covariance:
    one_of("zero_mode", zero_mode, ("one", "zero"))
    index = wavenumber(shape, boundary, per_axis("spacing", spacing, len(shape)))
    zero = index == 0
    index[zero] = 1.0
    spectrum = index.pow(-float(exponent))
    _check_spectrum(spectrum, *culprit)
    if zero_mode == "zero":
        spectrum[zero] = 0.0
    return stationary(shape, spectrum, boundary, normalize=normalize, allow_singular=zero_mode == "zero")


def _aliased_matern(omega: list[Tensor], length_scale: float, smoothness: float, shares: list[float]) -> Tensor:
    """The sum of (2ν + ℓ²|ω + 2πm|²)^-p, p = ν + d/2, over all integer vectors m; along an axis ℓ is its share of ℓ.

    (a + w²)^-p = ∫ t^(p−1) exp(−(a + w²) t) dt / Γ(p), and the sum of exp(−|ω + 2πm|² t) over m is a product over axes.
    The integrand is analytic and bell-shaped in log t, so a plain sum over a grid of log t is exact to rounding.
    """
    power, log_rate = smoothness + len(omega) / 2, math.log(2 * smoothness) - 2 * math.log(length_scale)
    step = 0.2 / math.sqrt(max(1.0, power))
    low, high = min(math.log(1e-3), math.log(1e-17) - log_rate), math.log(2 * power + 80) - log_rate
    log_t = low + step * torch.arange(math.ceil((high - low) / step) + 1, dtype=torch.float64, device="cpu")
    if len(log_t) * max(map(len, omega)) > LARGEST_FOLDED:
        raise InputError(
            "shape", None, f"has an axis of {max(map(len, omega))}, too long for `aliased`", "leave that out"
        )
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
    items = data.detach().reshape(len(data), -1, *basis.event_shape)
    mean = sum(block.double().sum(0) for block in items.split(1024)) / len(items)
    total = torch.zeros(basis.event_shape, dtype=torch.float64, device="cpu")
    for block in items.split(1024):
        total += basis.power((block.double() - mean).flatten(0, 1).cpu()).sum(0)
    return total / (len(items) * items.shape[1])


def _as_full(laplacian: Any) -> Tensor:
    """A matrix of numbers, sparse or not, that is not too large."""
    size = max(getattr(laplacian, "shape", None) or (len(laplacian),))
    if size > LARGEST_DENSE:
        raise InputError("laplacian", None, f"has {size} nodes, and the limit is {LARGEST_DENSE}", "use a coarser mesh")
    if isinstance(laplacian, Tensor):
        return laplacian if laplacian.layout == torch.strided else laplacian.to_dense()
    return as_numbers(laplacian.toarray() if hasattr(laplacian, "toarray") else laplacian, "laplacian")


def _of_matrix(matrix: Tensor, argument: str, value: Any, normalize: bool = False) -> Covariance:
    """Σ of a matrix over times that ``argument`` made."""
    values, vectors = symmetric_eigen(matrix, argument)
    if values[0] == 0:
        raise InputError(argument, value, "makes neighbours too much alike for float64", "use a coarser field")
    return Covariance(values, Eigen(vectors), normalize=normalize)


def _times(times: Sequence[float]) -> Tensor:
    if len(times) > LARGEST_DENSE:
        problem = f"are {len(times)}, and a field over time has at most {LARGEST_DENSE}"
        raise InputError("times", None, problem, "use matern for more steps")
    return torch.tensor(times, dtype=torch.float64, device="cpu")


def one_axis(field: str, shape: int | Sequence[int]) -> int:
    """The length of a shape of one axis, for a field over time."""
    (n, *others) = check_shape(shape)
    if others:
        remedy = f"write '{field} x gff' for the others, or use Kronecker"
        raise InputError("shape", shape, f"has {1 + len(others)} axes, and {field} is over one", remedy)
    return n


def per_axis(argument: str, value: Any, axes: int) -> list[float]:
    """Positive numbers, one per axis, of one for all or of as many."""
    value = value.tolist() if hasattr(value, "tolist") else value
    numbers = [value] * axes if is_number(value) else value
    fits = isinstance(numbers, list | tuple) and len(numbers) == axes
    if not fits or not all(is_number(number) and number > 0 for number in numbers):
        raise InputError(
            argument, value, "must be positive and finite", f"give a number, or one for each of {axes} axes"
        )
    return [float(number) for number in numbers]


def _linear_upsampling(coarse: int, fine: int) -> Tensor:
    """The fine × coarse matrix of linear interpolation as torch does it (half-pixel centres, edges held)."""
    unit = torch.eye(coarse, dtype=torch.float64, device="cpu").unsqueeze(0)
    return torch.nn.functional.interpolate(unit, size=fine, mode="linear", align_corners=False)[0].T


def _check_positive(argument: str, value: float) -> None:
    if value <= 0:
        raise InputError(argument, value, "is not positive", "give a positive number")


def _check_spectrum(spectrum: Tensor, argument: str, value: Any) -> None:
    """A condition number above 1/eps² loses the field even in float64 (float32: above 7e13, checked at use)."""
    condition = (spectrum.max() / spectrum.min()).item()  # NaN where the spectrum is
    limit = torch.finfo(torch.float64).eps ** -2
    if not condition <= limit:
        problem = f"gives Σ the condition number {condition:.2g}: even float64 loses a field above {limit:.2g}"
        raise InputError(argument, value, problem, "choose a smaller value")


FAMILIES: dict[str, Callable[..., Covariance]] = {
    "Covariance": Covariance,
    "Identity": Identity,
    "Diagonal": Diagonal,
    "Dense": Dense,
    "Fourier": Fourier,
    "Cosine": Cosine,
    "Spectral": Spectral,
    "Channels": Channels,
    "CrossSpectral": CrossSpectral,
    "Kronecker": Kronecker,
}
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
