"""Covariances given by arrays: variances, matrices, spectra, and products. Each returns eigenvalues in a basis."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, Eigen, PerMode, Pixels, Product
from nidiff.covariance.checks import as_numbers, check_finite, check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.eigen import eigen_per_mode, symmetric_eigen
from nidiff.covariance.waves import Boundary, Waves
from nidiff.errors import InputError, expect
from nidiff.recipe import remembered


@remembered
def Identity(shape: Sequence[int]) -> Covariance:
    """Σ = I: white noise, the isotropic case."""
    basis = Pixels(shape)
    return Covariance(torch.ones(basis.event_shape, dtype=torch.float64, device="cpu"), basis)


def Diagonal(variances: Tensor, *, normalize: bool = True, allow_singular: bool = False) -> Covariance:
    """Independent entries with their own variances, e.g. a mask of where noise goes. The event has their shape."""
    variances = as_numbers(variances, "variances")
    basis = Pixels(variances.shape)
    return Covariance(variances, basis, normalize=normalize, allow_singular=allow_singular, argument="variances")


def Dense(
    matrix: Tensor,
    shape: Sequence[int] | None = None,
    *,
    normalize: bool = True,
    allow_singular: bool = False,
    eigenvalues: Tensor | None = None,
) -> Covariance:
    """Any symmetric positive-definite N×N ``matrix`` over an event of N entries (default shape: (N,)).

    Diagonalised once, in float64. Costs N² memory and per image N² operations: for N up to a few thousand. If
    ``eigenvalues`` is given, ``matrix`` holds the eigenvectors as its columns.
    """
    values, vectors = (eigenvalues, matrix) if eigenvalues is not None else symmetric_eigen(matrix, "matrix", shape)
    basis = Eigen(vectors, shape)
    return Covariance(values, basis, normalize=normalize, allow_singular=allow_singular, argument="matrix")


def Spectral(
    shape: Sequence[int], spectrum: Tensor, boundary: Boundary, *, normalize: bool = True, allow_singular: bool = False
) -> Covariance:
    """A stationary field: one eigenvalue per mode of `Waves`, with a ``boundary`` per axis.

    ``spectrum`` is in the order of `frequencies`: that of `torch.fft.fftn` along periodic axes, where it must be even,
    λ(k) = λ(−k), and a rising one along the others.
    """
    basis = Waves(shape, boundary)
    return Covariance(spectrum, basis, normalize=normalize, allow_singular=allow_singular, argument="spectrum")


def Fourier(
    shape: Sequence[int], spectrum: Tensor, *, normalize: bool = True, allow_singular: bool = False
) -> Covariance:
    """`Spectral` with a periodic boundary along all axes: Σ = W⁻¹ diag(spectrum) W with the DFT W (section 4, E6)."""
    return Spectral(shape, spectrum, "periodic", normalize=normalize, allow_singular=allow_singular)


def Cosine(
    shape: Sequence[int], spectrum: Tensor, *, normalize: bool = True, allow_singular: bool = False
) -> Covariance:
    """`Spectral` with a reflecting boundary along all axes: the orthonormal DCT-II.

    Nothing wraps around the edges, so the marginal variance is not the same at every pixel: its mean is 1.
    """
    return Spectral(shape, spectrum, "reflecting", normalize=normalize, allow_singular=allow_singular)


@remembered
def Channels(matrix: Tensor, spatial: Covariance, *, normalize: bool = True) -> Covariance:
    """matrix ⊗ Σ_spatial over [C, *spatial event]: a C×C covariance between channels, e.g. the colours of an image."""
    expect("spatial", spatial, Covariance)
    values, vectors = symmetric_eigen(matrix, "matrix")
    values = values.reshape(-1, *[1] * len(spatial.event_shape)) * spatial.eigenvalues
    basis = PerMode(vectors, spatial.basis)
    return Covariance(values, basis, normalize=normalize, allow_singular=spatial.is_singular, argument="matrix")


@remembered
def Kronecker(a: Covariance, b: Covariance) -> Covariance:
    """a ⊗ b over the axes of ``a`` followed by those of ``b``: Cov(x_st, x_uv) = a_su b_tv, such as frames and pixels.

    The modes are products of one of ``a`` and one of ``b``, and their eigenvalues too. Either may be such a product.
    """
    for argument, factor in (("a", a), ("b", b)):
        expect(argument, factor, Covariance)
    values = torch.tensordot(a.eigenvalues, b.eigenvalues, 0)
    return Covariance(values, Product(a.basis, b.basis), allow_singular=True, argument="a ⊗ b")


def CrossSpectral(
    matrices: Tensor,
    spatial: Covariance | Basis,
    *,
    quadrature: Tensor | None = None,
    normalize: bool = True,
    allow_singular: bool = False,
) -> Covariance:
    """Σ over [C, *event]: mode k of the event has the covariance M(k) = ``matrices`` [*event, C, C] between channels.

    ``spatial`` gives the basis of the event. `Channels` is the case matrix · λ_k. Between waves, along periodic axes, a
    channel may lag behind another: then M(k) = matrices + i · ``quadrature`` is Hermitian, M(−k) its conjugate, and
    quadrature is antisymmetric and odd in k.
    """
    basis = spatial.basis if isinstance(spatial, Covariance) else spatial
    real = _check_matrices("matrices", matrices, basis)
    imaginary = None
    if quadrature is not None:
        if not isinstance(basis, Waves):
            raise InputError("quadrature", None, "is between waves", "use a `spatial` with a boundary, or leave it out")
        imaginary = _check_matrices("quadrature", quadrature, basis, real)
    values, vectors = eigen_per_mode(real, imaginary, basis)
    lags = imaginary is not None and bool((vectors.imag != 0).any())
    modes = PerMode(vectors.real, basis, vectors.imag if lags else None)
    return Covariance(values, modes, normalize=normalize, allow_singular=allow_singular, argument="matrices")


def cross_spectrum(covariance: Covariance) -> Tensor:
    """M(k) of a covariance over channels, complex [*event, C, C]: the inverse of `CrossSpectral`."""
    basis = covariance.basis
    assert isinstance(basis, PerMode)
    quadrature = torch.zeros_like(basis.vectors) if basis.quadrature is None else basis.quadrature
    vectors = torch.complex(basis.vectors, quadrature).movedim((0, 1), (-2, -1))
    return (vectors * covariance.eigenvalues.movedim(0, -1).unsqueeze(-2)) @ vectors.mH


def correlated(covariances: Sequence[Covariance], correlation: Tensor, *, normalize: bool = True) -> Covariance:
    """Channels with a Σ each and the same ``correlation`` R between them in every mode: M(k) = D(k)^½ R D(k)^½.

    D(k) has the eigenvalues of the ``covariances`` at mode k on its diagonal; they must share a basis.
    """
    total = functools.reduce(lambda a, b: a + b, covariances)  # which refuses two bases
    matrix, count = as_numbers(correlation, "correlation"), len(covariances)
    if tuple(matrix.shape) != (count, count) or bool((matrix.diagonal() - 1).abs().max() > 1e-6):
        raise InputError("correlation", None, f"must be {count}×{count} with ones on its diagonal", "correct it")
    roots = torch.stack([covariance.eigenvalues for covariance in covariances], dim=-1).sqrt()
    singular = any(covariance.is_singular for covariance in covariances)
    matrices = roots.unsqueeze(-1) * matrix * roots.unsqueeze(-2)
    return CrossSpectral(matrices, total.basis, normalize=normalize, allow_singular=singular)


def _check_matrices(argument: str, matrices: Tensor, spatial: Basis, real: Tensor | None = None) -> Tensor:
    """Symmetric and even in k, or, given the ``real`` part, antisymmetric and odd; what rounding adds is removed."""
    matrices, event = as_numbers(matrices, argument), spatial.event_shape
    shape = (*event, *matrices.shape[-1:] * 2) if real is None else real.shape
    if matrices.shape != shape or not matrices.numel():
        remedy = f"give a C×C matrix for every mode of `spatial`, which is over {event}"
        raise InputError(argument, None, f"has shape {tuple(matrices.shape)}", remedy)
    check_shape((matrices.shape[-1], *event), argument)
    check_finite(argument, matrices)
    sign, kinds = (1, "symmetric and even") if real is None else (-1, "antisymmetric and odd")
    pairs = ((matrices + sign * matrices.mT) / 2).movedim((-2, -1), (0, 1))
    even = spatial.evened(pairs) if sign > 0 else pairs - spatial.evened(pairs)
    scale = (matrices if real is None else real).abs()
    crooked = (matrices - sign * matrices.mT).abs() > 1e-8 * scale.amax((-2, -1), keepdim=True)
    if bool(crooked.any()) or not torch.allclose(pairs, even, rtol=1e-5, atol=1e-9 * scale.max().item()):
        raise InputError(argument, None, f"is not {kinds} in k, so Σ is not a real matrix", "average over ±k")
    return even.movedim((0, 1), (-2, -1)).contiguous()


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
