"""The same field on another grid of the same domain.

A field on N pixels is Σ_k x̂_k φ_k with orthonormal φ_k, which are 1/√N in size: on N' pixels the same function has the
coefficients √(N'/N) x̂_k. So λ'_k = (N'/N) λ_k for the modes that both grids have, a coarser grid leaves out the others,
and a finer one has new modes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, PerMode, Pixels, Product
from nidiff.covariance.checks import check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Channels, CrossSpectral, Identity, Kronecker, cross_spectrum
from nidiff.covariance.fields import FIELDS, per_axis
from nidiff.covariance.waves import Waves, frequencies, magnitude
from nidiff.errors import InputError
from nidiff.recipe import Origin


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
    if covariance.origin is not None and not covariance.is_singular and not covariance.is_constant:
        made = _by_call(covariance, covariance.origin, shape)
        if made is not None:
            return made
    if isinstance(covariance.basis, PerMode):
        return _over_channels(covariance, covariance.basis, shape)
    basis, values = _basis(covariance.basis, shape), covariance.eigenvalues
    if covariance.is_constant:  # white noise has no continuous field behind it: its variance per pixel stays
        white = Identity(shape) if isinstance(basis, Pixels) else Covariance(values.new_ones(shape), basis)
        return _scaled(float(values.flatten()[0]), white)
    return Covariance(_table(covariance.basis, values, shape), basis, allow_singular=True)


def _by_call(covariance: Covariance, origin: Origin, shape: tuple[int, ...]) -> Covariance | None:
    """The call that made Σ for the other grid: of a product its factors, and of a formula the pixels nearer to each
    other or further apart. None where there is no such call."""
    name, given, scale = origin
    if name == "Kronecker":
        first = len(given["a"].event_shape)
        return _scaled(scale, Kronecker(given["a"].at(shape[:first]), given["b"].at(shape[first:])))
    if name == "Channels":  # whose factors keep their scale, normalised or not
        matrix, spatial = given["matrix"], given["spatial"]
        before, after = (Channels(matrix, each, normalize=False) for each in (spatial, spatial.at(shape)))
        return _scaled((covariance.eigenvalues.mean() / before.eigenvalues.mean()).item(), after)
    if name in ("offset", "pyramid"):  # the recipe, whatever the shape
        return _scaled(scale, FIELDS[name](**{**given, "shape": shape}))
    # The unit of |k| in power laws is the lowest frequency, which an axis of one pixel does not have.
    same_axes = all((n == 1) == (new == 1) for n, new in zip(covariance.event_shape, shape, strict=True))
    if name != "matern" and not (name in ("gaussian_free_field", "power_law") and same_axes):
        return None
    steps = per_axis("spacing", given["spacing"], covariance.basis)
    steps = [step * n / new for step, n, new in zip(steps, covariance.event_shape, shape, strict=True)]
    field = FIELDS[name](**{**given, "shape": shape, "spacing": steps, "normalize": False})
    if given.get("aliased"):  # the kernel at the pixels, wherever they are
        return _scaled((covariance.eigenvalues.mean() / field.eigenvalues.mean()).item(), field)
    lowest = (0,) * len(shape)
    ratio = math.prod(shape) / covariance.size
    return _scaled((ratio * covariance.eigenvalues[lowest] / field.eigenvalues[lowest]).item(), field)


def _scaled(factor: float, covariance: Covariance) -> Covariance:
    scaled: Covariance = factor * covariance
    return scaled


def _basis(basis: Basis, shape: tuple[int, ...]) -> Basis:
    """The modes of the same kind on another grid."""
    if shape == basis.event_shape:
        return basis
    if isinstance(basis, Pixels):
        return Pixels(shape)
    if isinstance(basis, Waves):
        return Waves(shape, basis.boundary)
    if isinstance(basis, Product):
        first = len(basis.a.event_shape)
        return Product(_basis(basis.a, shape[:first]), _basis(basis.b, shape[first:]))
    raise _refused(basis)


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
    before, boundary, shape = basis.event_shape, _boundaries(basis), tuple(shape)
    index, shared = _shared_modes(before, boundary, shape)
    weight = math.sqrt(math.prod(shape) / math.prod(before)) * shared.double()
    for axis, (n, new, name) in enumerate(zip(before, shape, boundary, strict=True)):
        if name == "periodic" and n != new:  # the wave of two pixels is its own mirror, and not seen on a coarser grid
            shortest = 2 * (torch.fft.fftfreq(new, device="cpu") * new).round().abs() == min(n, new)
            kept = torch.where(shortest, 0.5 if new > n else 0.0, 1.0)
            weight *= kept.reshape(-1, *[1] * (len(shape) - 1 - axis))
    coefficients = Waves(before, boundary).analyse(x).flatten(x.ndim - len(before))[..., index]
    return Waves(shape, boundary).synthesise(coefficients * weight.to(x))


def _boundaries(basis: Basis) -> tuple[str, ...]:
    if isinstance(basis, Product):
        return _boundaries(basis.a) + _boundaries(basis.b)
    return basis.boundary or ("reflecting",) * len(basis.event_shape)
