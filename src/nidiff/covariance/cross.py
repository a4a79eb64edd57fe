"""Several channels with a spectrum each and correlation between them: one C×C matrix per mode."""

import hashlib
from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from nidiff.covariance.matrix import symmetric_eigen
from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.covariance.spectral import Spectral
from nidiff.errors import InputError, expect, shown


class CrossSpectral(Covariance):
    """Σ over [C, *event]: mode k of the event has the covariance M(k) = ``matrices`` [*event, C, C] between channels.

    ``spatial`` gives the modes, by its basis alone. `Channels` is the case matrix · λ_k. Between waves, along periodic
    axes, a channel may lag behind another: then M(k) = matrices + i · ``quadrature`` is Hermitian, M(−k) its conjugate,
    and quadrature is antisymmetric and odd in k.
    """

    def __init__(
        self,
        matrices: Tensor,
        spatial: Covariance,
        *,
        quadrature: Tensor | None = None,
        normalize: bool = True,
        allow_singular: bool = False,
    ) -> None:
        expect("spatial", spatial, Covariance)
        real = _check_matrices("matrices", matrices, spatial)
        self._spatial, self._real = spatial, spatial.in_real_basis()
        imaginary = torch.zeros_like(real)
        if quadrature is not None:
            if not isinstance(self._real, Spectral):
                raise InputError("quadrature is between waves: use a spatial with a boundary, or leave it out.")
            imaginary = _check_matrices("quadrature", quadrature, spatial, real)
        values, vectors = _eigen(real, imaginary, self._real)
        rounding = real.shape[-1] * torch.finfo(torch.float64).eps * values[..., -1:].abs()
        if bool((values < -rounding).any()):
            mode = tuple((values < -rounding).any(-1).nonzero()[0].tolist())
            raise InputError(f"matrices is not positive definite at mode {mode}: add a small multiple of the identity.")
        # [channel, its number, *event]
        self._vectors, self._lagging = (
            part.movedim((-2, -1), (0, 1)).contiguous() for part in (vectors.real, vectors.imag)
        )
        self._lags = bool((self._lagging != 0).any())
        super().__init__(
            (real.shape[-1], *spatial.event_shape),
            torch.where(values <= rounding, 0.0, values).movedim(-1, 0),
            argument="matrices",
            normalize=normalize,
            allow_singular=allow_singular,
        )

    @property
    def spatial(self) -> Covariance:
        return self._spatial

    @property
    def matrices(self) -> Tensor:
        """The covariance between channels of every mode, the part in phase: float64 [*event, C, C]."""
        return self._spectrum.real

    @property
    def quadrature(self) -> Tensor:
        """The part a quarter of a turn out of phase, the same."""
        return self._spectrum.imag

    @property
    def _spectrum(self) -> Tensor:
        vectors = torch.complex(self._vectors, self._lagging).movedim((0, 1), (-2, -1))
        return (vectors * self.eigenvalues.movedim(0, -1).unsqueeze(-2)) @ vectors.mH

    def to_basis(self, x: Tensor) -> Tensor:
        return self._turned(self._real.to_basis(x), 1)

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return self._real.from_basis(self._turned(coefficients, -1))

    def _turned(self, x: Tensor, sign: int) -> Tensor:
        """The numbers of the eigenvectors out of those of the channels, or (−1) back.

        With V = P + iQ, and F(k) the coefficient of a wave, V^H F has the real coefficients Pᵀ x(k) + Qᵀ x(−k).
        """
        rotation = self.table("eigenvectors", x, lambda: self._vectors)
        total = self._mixed(x, rotation if sign > 0 else rotation.transpose(0, 1))
        if not self._lags:
            return total
        lagging = self.table("lagging", x, lambda: self._lagging)
        lag = self._mixed(self._real.mirrored(x), lagging if sign > 0 else lagging.transpose(0, 1))
        return total + lag if sign > 0 else total - lag

    def _mixed(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Σ_c vectors[c] x_c, term by term: numbers that stand alone round alike."""
        axis = -len(self.event_shape)
        first, *others = (v * part.unsqueeze(axis) for v, part in zip(vectors.unbind(), x.unbind(axis), strict=True))
        return sum(others, first)

    def diagonal_of(self, values: Tensor) -> Tensor:
        share = self._vectors.square() + self._lagging.square()
        return self.spatial.diagonal_of(self._mixed(values, share.transpose(0, 1)))

    def rotate_white(self, numbers: Tensor) -> Tensor:
        return self._turned(self._real.rotate_white(numbers), 1)

    def check_modes(self, argument: str, values: Tensor) -> None:
        self.spatial.check_modes(argument, values)

    def evened(self, values: Tensor) -> Tensor:
        return self.spatial.evened(values)

    @cached_property
    def basis(self) -> Hashable | None:
        own = hashlib.sha256(self._vectors.numpy().tobytes() + self._lagging.numpy().tobytes()).digest()
        return None if self.spatial.basis is None else (own, self.spatial.basis)


def correlated(covariances: Sequence[Covariance], correlation: Tensor, *, normalize: bool = True) -> CrossSpectral:
    """Channels with a Σ each and the same ``correlation`` R between them in every mode: M(k) = D(k)^½ R D(k)^½.

    D(k) has the eigenvalues of the ``covariances`` at mode k on its diagonal; they must share a basis.
    """
    if not isinstance(covariances, Sequence) or not covariances:
        raise InputError(f"covariances={shown(covariances)} must be a list of covariances, one per channel.")
    for each in covariances:
        expect("covariances", each, Covariance, "give a list of covariances, one per channel")
    constant = [each.is_constant for each in covariances]
    first = covariances[constant.index(False)] if False in constant else covariances[0]
    if not all(each.event_shape == first.event_shape for each in covariances) or not all(
        each.is_constant or each.shares_basis(first) for each in covariances
    ):
        raise InputError("covariances do not share a basis: build all of them for one shape and one boundary.")
    values, _ = symmetric_eigen(correlation, "correlation")
    matrix = as_numbers(correlation, "correlation")
    if len(matrix) != len(covariances) or bool((matrix.diagonal() - 1).abs().max() > 1e-6):
        raise InputError(
            f"correlation must be a {len(covariances)}×{len(covariances)} matrix with ones on its diagonal: give one "
            "row per channel."
        )
    if values[0] == 0:
        raise InputError("correlation is singular, so that channels are copies of each other: bring it nearer to I.")
    roots = torch.stack([each.eigenvalues for each in covariances], dim=-1).sqrt()
    matrices = roots.unsqueeze(-1) * ((matrix + matrix.T) / 2) * roots.unsqueeze(-2)
    return CrossSpectral(
        matrices, first, normalize=normalize, allow_singular=any(each.is_singular for each in covariances)
    )


def _check_matrices(argument: str, matrices: Tensor, spatial: Covariance, real: Tensor | None = None) -> Tensor:
    """Symmetric and even in k, or beside the ``real`` part antisymmetric and odd; what rounding adds is removed."""
    matrices, event = as_numbers(matrices, argument).detach(), spatial.event_shape
    sign = 1 if real is None else -1
    if real is not None and matrices.shape != real.shape:
        raise InputError(
            f"{argument} has shape {tuple(matrices.shape)}, and matrices {tuple(real.shape)}: make it equal."
        )
    if tuple(matrices.shape[:-2]) != event or matrices.shape[-1] != matrices.shape[-2] or not matrices.numel():
        raise InputError(
            f"{argument} has shape {tuple(matrices.shape)}: give a C×C matrix for every mode of spatial, which is over "
            f"{event}."
        )
    check_shape((matrices.shape[-1], *event), argument)
    if not bool(torch.isfinite(matrices).all()):
        raise InputError(f"{argument} has NaN or infinite entries.")
    scale = (matrices if real is None else real).abs()
    limit = 1e-8 * scale.amax((-2, -1), keepdim=True)
    if bool(((matrices - sign * matrices.mT).abs() > limit).any()):
        kind = "symmetric" if sign > 0 else "antisymmetric"
        raise InputError(f"{argument} has a matrix that is not {kind}: remove the rest if it is rounding.")
    pairs = ((matrices + sign * matrices.mT) / 2).movedim((-2, -1), (0, 1))
    even = spatial.evened(pairs) if sign > 0 else (pairs - spatial.mirrored(pairs)) / 2
    if not torch.allclose(pairs, even, rtol=1e-5, atol=1e-9 * scale.max().item()):
        kind = "even, M(k) = M(−k)" if sign > 0 else "odd, Q(k) = −Q(−k)"
        raise InputError(f"{argument} is not {kind}, and Σ not a real matrix: average both.")
    return even.movedim((0, 1), (-2, -1)).contiguous()


def _eigen(real: Tensor, imaginary: Tensor, spatial: Covariance) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of real + i · imaginary [*event, C, C], those of −k the conjugates of those of k."""
    values, vectors = torch.linalg.eigh(real)
    vectors = vectors.to(torch.complex128)
    if not bool((imaginary != 0).any()):
        return values, vectors
    own = torch.arange(spatial.size, dtype=torch.float64, device="cpu").reshape(spatial.event_shape)
    mirror = spatial.mirrored(own)
    own_values, own_vectors = torch.linalg.eigh(torch.complex(real, imaginary))
    its_values, its_vectors = (
        part.flatten(0, own.ndim - 1)[mirror.long()] for part in (own_values, own_vectors.conj())
    )
    first, second = (mask.unsqueeze(-1) for mask in (own < mirror, own > mirror))  # the rest are their own mirrors
    values = torch.where(first, own_values, torch.where(second, its_values, values))
    first, second = first.unsqueeze(-1), second.unsqueeze(-1)
    return values, torch.where(first, own_vectors, torch.where(second, its_vectors, vectors))
