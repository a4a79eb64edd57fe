"""The same field on another grid of the same domain.

A field on N pixels is Σ_k x̂_k φ_k with orthonormal φ_k, which are 1/√N in size: on N' pixels the same function has the
coefficients √(N'/N) x̂_k. So λ'_k = (N'/N) λ_k for the modes that both grids have, a coarser grid leaves out the others,
and a finer one has new modes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nidiff.covariance.cross import CrossSpectral
from nidiff.covariance.fields import FIELDS, per_axis
from nidiff.covariance.kronecker import Kronecker
from nidiff.covariance.matrix import Channels, Diagonal, Identity
from nidiff.covariance.operator import Covariance, check_shape
from nidiff.covariance.spectral import ROWS, frequencies, magnitude, stationary, white_in
from nidiff.errors import InputError

FORMULAS = ("gaussian_free_field", "power_law", "matern")  # of |k|, with a spacing


def on_grid(covariance: Covariance, shape: Sequence[int]) -> Covariance:
    """`Covariance.at`."""
    shape, own = check_shape(shape), covariance.spatial.event_shape
    channels = covariance.event_shape[: len(covariance.event_shape) - len(own)]
    if channels and shape[: len(channels)] == channels and len(shape) == len(covariance.event_shape):
        shape = shape[len(channels) :]
    if len(shape) != len(own):
        raise InputError(f"shape={shape} has {len(shape)} axes, and Σ is over {own}: give as many.")
    if shape == own:
        return covariance
    if covariance.multiple is not None:
        field, factor = covariance.multiple
        return factor * field.at(shape)
    if isinstance(covariance, Channels):
        return _channels(covariance, shape)
    if isinstance(covariance, CrossSpectral):
        return _cross_spectral(covariance, shape)
    if covariance.is_constant:
        return _white(covariance, shape)
    if isinstance(covariance, Kronecker):
        first = len(covariance.a.event_shape)
        product = Kronecker(covariance.a.at(shape[:first]), covariance.b.at(shape[first:]))
        if covariance.is_product:
            return product
        return product.with_eigenvalues(_table(covariance, covariance.eigenvalues, shape))
    if covariance.recipe is not None and not covariance.is_singular and _has_formula(covariance.recipe[0], own, shape):
        return _formula(covariance, *covariance.recipe, shape)
    values = _table(covariance, covariance.eigenvalues, shape)
    return stationary(shape, values, covariance.boundary or (), normalize=False, allow_singular=covariance.is_singular)


def _has_formula(name: str, own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the field of that name has one that holds on the other grid, too: the unit of |k| in power laws is the
    lowest frequency, which an axis of one pixel does not have."""
    same_axes = all((n == 1) == (new == 1) for n, new in zip(own, shape, strict=True))
    return name in ("matern", "offset") or (name in FORMULAS and same_axes)


def _white(covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
    """White noise has no continuous field behind it: its variance per pixel stays."""
    variance = covariance.eigenvalues.flatten()[0].item()
    if covariance.boundary is not None:
        return variance * white_in(covariance.boundary, shape)
    if isinstance(covariance, Identity):
        return Identity(shape)
    return Diagonal(torch.full(shape, variance, dtype=torch.float64, device="cpu"), normalize=False)


def _formula(covariance: Covariance, name: str, given: dict[str, object], shape: tuple[int, ...]) -> Covariance:
    """The same formula with the pixels nearer to each other or further apart."""
    if name == "offset":
        return FIELDS[name](**given | {"shape": shape})
    steps = per_axis("spacing", given["spacing"], len(shape))
    steps = [step * n / new for step, n, new in zip(steps, covariance.event_shape, shape, strict=True)]
    field = FIELDS[name](**given | {"shape": shape, "spacing": steps, "normalize": False})
    if given.get("aliased"):  # the kernel at the pixels, wherever they are
        return (covariance.eigenvalues.mean() / field.eigenvalues.mean()).item() * field
    lowest = (0,) * len(shape)
    ratio = math.prod(shape) / covariance.size
    return (ratio * covariance.eigenvalues[lowest] / field.eigenvalues[lowest]).item() * field


def _channels(covariance: Channels, shape: tuple[int, ...]) -> Covariance:
    spatial = covariance.spatial.at(shape)
    own = covariance.eigenvalues / covariance.spatial.eigenvalues
    if torch.allclose(own, own.flatten(1)[:, :1].reshape(-1, *[1] * len(shape)), rtol=1e-12):
        values = own.flatten(1)[:, 0].reshape(-1, *[1] * len(shape)) * spatial.eigenvalues
    else:
        values = _table(covariance.spatial, covariance.eigenvalues, shape)
    return Channels(covariance.matrix, spatial, normalize=False).with_eigenvalues(values)


def _cross_spectral(covariance: CrossSpectral, shape: tuple[int, ...]) -> Covariance:
    """New modes have the mean correlation of the upper octave. White channels stay white, as they are alone."""
    spatial, first = covariance.spatial, covariance.matrices.flatten(0, -3)[0]
    if bool((covariance.matrices == first).all()) and not bool(covariance.quadrature.any()):
        white = _white(spatial.with_eigenvalues(torch.ones_like(spatial.eigenvalues)), shape)
        matrices = first.expand(*shape, *first.shape)
        return CrossSpectral(matrices, white, normalize=False, allow_singular=covariance.is_singular)
    matrices = torch.complex(covariance.matrices, covariance.quadrature).movedim((-2, -1), (0, 1))
    own = matrices.diagonal(dim1=0, dim2=1).movedim(-1, 0).real
    variances = _table(spatial, own, shape)
    if spatial.boundary is None:
        raise _refused(spatial)
    index, shared = _shared_modes(spatial.event_shape, spatial.boundary, shape)
    roots = own.sqrt()
    correlation = (matrices / (roots.unsqueeze(0) * roots.unsqueeze(1))).nan_to_num()
    upper = _upper_octave(spatial.event_shape, spatial.boundary)
    mean = correlation[..., upper].mean(-1).real.reshape(*matrices.shape[:2], *[1] * len(shape))
    correlation = torch.where(shared, correlation.flatten(2)[..., index], mean)
    new = correlation * variances.sqrt().unsqueeze(0) * variances.sqrt().unsqueeze(1)
    new = (new + white_in(spatial.boundary, shape).mirrored(new).conj()).movedim((0, 1), (-2, -1)) / 2
    return CrossSpectral(
        new.real,
        spatial.at(shape),
        quadrature=new.imag if bool((new.imag != 0).any()) else None,
        normalize=False,
        allow_singular=covariance.is_singular,
    )


def _table(basis: Covariance, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Eigenvalues [..., *event] of any kind in the basis of a covariance, on another grid."""
    shape = tuple(shape)
    if shape == basis.event_shape:
        return values
    if isinstance(basis, Kronecker):
        first, last = len(basis.a.event_shape), len(basis.b.event_shape)
        values = _table(basis.b, values, shape[first:])
        behind, before = tuple(range(-last, 0)), tuple(range(-first - last, -first))
        return _table(basis.a, values.movedim(behind, before), shape[:first]).movedim(before, behind)
    if basis.boundary is None:
        raise _refused(basis)
    return white_in(basis.boundary, shape).evened(_continued(values, basis.event_shape, basis.boundary, shape))


def _refused(covariance: Covariance) -> InputError:
    return InputError(
        f"{covariance!r} has no modes that another grid has too: build it for that shape, or use a field with a "
        "boundary, such as gaussian_free_field, matern or from_data."
    )


def _continued(values: Tensor, own: tuple[int, ...], boundary: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """(N'/N) λ of the modes that both have; the others by the power law of the upper octave, λ ∝ |k|^slope."""
    index, shared = _shared_modes(own, boundary, shape)
    ratio = math.prod(shape) / math.prod(own)
    taken = values.flatten(values.ndim - len(own))[..., index]
    if bool(shared.all()):
        return ratio * taken
    finer = [n / step * each for n, step, each in zip(shape, own, frequencies(shape, boundary), strict=True)]
    upper = _upper_octave(own, boundary)
    log_k = magnitude(frequencies(own, boundary))[upper].log()
    log_values = values[..., upper].clamp(min=torch.finfo(torch.float64).tiny).log()
    centre, level = log_k.mean(), log_values.mean(-1, keepdim=True)
    slope = ((log_k - centre) * (log_values - level)).sum(-1, keepdim=True)
    slope = slope / (log_k - centre).square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    log_new = magnitude(finer).clamp(min=torch.finfo(torch.float64).tiny).log().flatten() - centre
    new = (level + slope * log_new).exp().reshape(*values.shape[: values.ndim - len(own)], *shape)
    return ratio * torch.where(shared, taken, new)


def _upper_octave(shape: tuple[int, ...], boundary: Sequence[str]) -> Tensor:
    """Which modes have at least half the largest |k|."""
    k = magnitude(frequencies(shape, boundary))
    return k >= k.max() / 2


def _shared_modes(own: tuple[int, ...], boundary: Sequence[str], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For every mode of the new grid: where it stands among the old ones, and whether it does."""
    position = torch.zeros((), dtype=torch.int64, device="cpu")
    shared = torch.ones((), dtype=torch.bool, device="cpu")
    for n, name, new in zip(own, boundary, shape, strict=True):
        mode = torch.arange(new, device="cpu")
        if name == "periodic":
            mode = torch.where(mode < (new + 1) // 2, mode, mode - new)
            here = 2 * mode.abs() <= n
        else:
            here = mode < n
        position = position.unsqueeze(-1) * n + torch.where(here, mode % n, 0)
        shared = shared.unsqueeze(-1) & here
    return position, shared


# Values ----------------------------------------------------------------------------------------------------------


def resampled(x: Tensor, covariance: Covariance, shape: Sequence[int]) -> Tensor:
    """x [..., *event] at the points of another grid, as the sum of its modes that both grids have.

    A periodic axis of n points has them at i / n of its length, any other at (i + ½) / n. An axis without modes of that
    kind is taken as reflecting.
    """
    own = covariance.event_shape
    for axis, (n, new, name) in enumerate(zip(own, shape, _boundaries(covariance), strict=True), -len(own)):
        if n != new:
            x = (x.movedim(axis, -1) @ _resampling(n, new, name).T.to(x)).movedim(-1, axis)
    return x


def _boundaries(covariance: Covariance) -> tuple[str, ...]:
    if isinstance(covariance, Kronecker):
        return _boundaries(covariance.a) + _boundaries(covariance.b)
    return covariance.boundary or ("reflecting",) * len(covariance.event_shape)


def _resampling(n: int, new: int, boundary: str) -> Tensor:
    """The new × n matrix that evaluates the modes at the new pixels."""
    if boundary in ROWS:
        both = min(n, new)
        return math.sqrt(new / n) * ROWS[boundary](new)[:both].T @ ROWS[boundary](n)[:both]
    places = torch.arange(new, dtype=torch.float64, device="cpu") * n / new
    modes = torch.arange(min(n, new) // 2 + 1, dtype=torch.float64, device="cpu")
    weight = torch.full_like(modes, 2.0)
    weight[0] = 1.0
    if len(modes) > 1 and min(n, new) % 2 == 0:
        weight[-1] = 1.0 if new > n else 0.0  # the wave of two pixels: its own mirror on n, and not to be told on new
    lag = places[:, None] - torch.arange(n, dtype=torch.float64, device="cpu")
    return torch.cos(2 * math.pi / n * lag.unsqueeze(-1) * modes) @ weight / n
