"""The same field on another grid of the same domain.

A field on N pixels is Σ_k x̂_k φ_k with orthonormal φ_k, which are 1/√N in size: on N' pixels the same function has the
coefficients √(N'/N) x̂_k. So λ'_k = (N'/N) λ_k for the modes that both grids have, a coarser grid leaves out the others,
and a finer one has new modes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, PerMode, Pixels, Product
from nidiff.covariance.checks import check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Channels, CrossSpectral, Identity, Kronecker, cross_spectrum
from nidiff.covariance.fields import FIELDS, per_axis
from nidiff.covariance.waves import ROWS, Waves, frequencies, magnitude
from nidiff.errors import InputError

FORMULAS = ("gaussian_free_field", "power_law", "matern")  # of |k|, with a spacing


def on_grid(covariance: Covariance, shape: Sequence[int]) -> Covariance:
    """`Covariance.at`."""
    shape, before = check_shape(shape), covariance.spatial.event_shape
    channels = covariance.event_shape[: len(covariance.event_shape) - len(before)]
    if channels and shape[: len(channels)] == channels and len(shape) == len(covariance.event_shape):
        shape = shape[len(channels) :]
    if len(shape) != len(before):
        raise InputError("shape", shape, f"has {len(shape)} axes, and Σ is over {before}", "give as many")
    if shape == before:
        return covariance
    origin = covariance.origin
    if origin is not None and not covariance.is_singular and not covariance.is_constant:
        given = origin.arguments
        if origin.name == "Kronecker":
            first = len(given["a"].event_shape)
            return _scaled(origin.scale, Kronecker(given["a"].at(shape[:first]), given["b"].at(shape[first:])))
        if origin.name == "Channels":  # whose factors keep their scale, normalised or not
            matrix, spatial = given["matrix"], given["spatial"]
            scale = covariance.eigenvalues.mean() / Channels(matrix, spatial, normalize=False).eigenvalues.mean()
            return _scaled(scale.item(), Channels(matrix, spatial.at(shape), normalize=False))
        if _has_formula(origin.name, before, shape):
            return _formula(covariance, origin.name, given, shape)
    if isinstance(covariance.basis, PerMode):
        return _over_channels(covariance, covariance.basis, shape)
    basis = _basis(covariance.basis, shape)
    if covariance.is_constant:  # white noise has no continuous field behind it: its variance per pixel stays
        return _scaled(float(covariance.eigenvalues.flatten()[0]), _white(basis))
    return Covariance(_table(covariance.basis, covariance.eigenvalues, shape), basis, allow_singular=True)


def _scaled(factor: float, covariance: Covariance) -> Covariance:
    scaled: Covariance = covariance if factor == 1 else factor * covariance
    return scaled


def _white(basis: Basis) -> Covariance:
    if isinstance(basis, Pixels):
        return Identity(basis.event_shape)
    return Covariance(torch.ones(basis.event_shape, dtype=torch.float64, device="cpu"), basis)


def _basis(basis: Basis, shape: tuple[int, ...]) -> Basis:
    """The modes of the same kind on another grid."""
    if shape == basis.event_shape:
        return basis
    if isinstance(basis, Pixels | Waves):
        return type(basis)(**{**basis.arguments(), "shape": shape})
    if isinstance(basis, Product):
        first = len(basis.a.event_shape)
        return Product(_basis(basis.a, shape[:first]), _basis(basis.b, shape[first:]))
    raise _refused(basis)


def _has_formula(name: str, before: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the field of that name has one that holds on the other grid, too: the unit of |k| in power laws is the
    lowest frequency, which an axis of one pixel does not have."""
    same_axes = all((n == 1) == (new == 1) for n, new in zip(before, shape, strict=True))
    return name in ("matern", "offset") or (name in FORMULAS and same_axes)


def _formula(covariance: Covariance, name: str, given: Mapping[str, Any], shape: tuple[int, ...]) -> Covariance:
    """The same formula with the pixels nearer to each other or further apart."""
    if name == "offset":
        scale = 1.0 if covariance.origin is None else covariance.origin.scale
        return _scaled(scale, FIELDS[name](**{**given, "shape": shape}))
    steps = per_axis("spacing", given["spacing"], len(shape))
    steps = [step * n / new for step, n, new in zip(steps, covariance.event_shape, shape, strict=True)]
    field = FIELDS[name](**{**given, "shape": shape, "spacing": steps, "normalize": False})
    if given.get("aliased"):  # the kernel at the pixels, wherever they are
        return _scaled((covariance.eigenvalues.mean() / field.eigenvalues.mean()).item(), field)
    lowest = (0,) * len(shape)
    ratio = math.prod(shape) / covariance.size
    return _scaled((ratio * covariance.eigenvalues[lowest] / field.eigenvalues[lowest]).item(), field)


def _over_channels(covariance: Covariance, basis: PerMode, shape: tuple[int, ...]) -> Covariance:
    """New modes have the mean correlation of the upper octave. White channels stay white, as each of them alone."""
    spatial, values = basis.spatial, covariance.eigenvalues
    new_basis = _basis(spatial, shape)
    if (same_vectors := basis.with_inner(new_basis)) is not None:
        first = values.flatten(1)[:, :1].reshape(-1, *[1] * len(shape))
        white = bool((values == first).all())
        values = first.expand(-1, *shape) if white else _table(spatial, values, shape)
        return Covariance(values, same_vectors, allow_singular=True)
    matrices = cross_spectrum(covariance)
    first = matrices.flatten(0, -3)[0]
    if bool((matrices == first).all()) and basis.quadrature is None:
        return CrossSpectral(first.real.expand(*shape, *first.shape), new_basis, normalize=False, allow_singular=True)
    matrices = matrices.movedim((-2, -1), (0, 1))
    powers = matrices.diagonal(dim1=0, dim2=1).movedim(-1, 0).real
    variances = _table(spatial, powers, shape)
    if not isinstance(spatial, Waves) or not isinstance(new_basis, Waves):
        raise _refused(spatial)
    index, shared = _shared_modes(spatial.event_shape, spatial.boundary, shape)
    roots = powers.sqrt()
    correlation = (matrices / (roots.unsqueeze(0) * roots.unsqueeze(1))).nan_to_num()
    upper = _upper_octave(spatial.event_shape, spatial.boundary)
    mean = correlation[..., upper].mean(-1).real.reshape(*matrices.shape[:2], *[1] * len(shape))
    correlation = torch.where(shared, correlation.flatten(2)[..., index], mean)
    new = correlation * variances.sqrt().unsqueeze(0) * variances.sqrt().unsqueeze(1)
    new = (new + new_basis.mirrored(new).conj()).movedim((0, 1), (-2, -1)) / 2
    quadrature = new.imag if bool((new.imag != 0).any()) else None
    return CrossSpectral(new.real, new_basis, quadrature=quadrature, normalize=False, allow_singular=True)


def _table(basis: Basis, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Eigenvalues [..., *event] of any kind in a basis, on another grid."""
    shape = tuple(shape)
    if shape == basis.event_shape:
        return values
    if isinstance(basis, Product):
        a, b, first = basis.a, basis.b, len(basis.a.event_shape)
        values = _table(b, values, shape[first:])
        return basis.over_a(lambda moved: _table(a, moved, shape[:first]), values)
    if basis.boundary is None:
        raise _refused(basis)
    continued = _continued(values, basis.event_shape, basis.boundary, shape)
    return Waves(shape, basis.boundary).evened(continued)


def _refused(basis: Basis) -> InputError:
    remedy = "build Σ for that shape, or use a field with a boundary, such as gaussian_free_field, matern or from_data"
    return InputError("shape", None, f"needs modes that another grid has too, and {basis!r} has none", remedy)


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


def resampled(x: Tensor, basis: Basis, shape: Sequence[int]) -> Tensor:
    """x [..., *event] at the points of another grid, as the sum of its modes that both grids have.

    A periodic axis of n points has them at i / n of its length, any other at (i + ½) / n. An axis without modes of that
    kind is taken as reflecting.
    """
    before = basis.event_shape
    for axis, (n, new, name) in enumerate(zip(before, shape, _boundaries(basis), strict=True), -len(before)):
        if n != new:
            x = (x.movedim(axis, -1) @ _resampling(n, new, name).T.to(x)).movedim(-1, axis)
    return x


def _boundaries(basis: Basis) -> tuple[str, ...]:
    if isinstance(basis, Product):
        return _boundaries(basis.a) + _boundaries(basis.b)
    return basis.boundary or ("reflecting",) * len(basis.event_shape)


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
        weight[-1] = 1.0 if new > n else 0.0  # the wave of two pixels: its own mirror on n, and not to be seen on new
    lag = places[:, None] - torch.arange(n, dtype=torch.float64, device="cpu")
    return torch.cos(2 * math.pi / n * lag.unsqueeze(-1) * modes) @ weight / n
