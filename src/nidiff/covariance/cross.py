"""Several channels with a spectrum each and correlation between them: one C×C matrix per mode."""

import hashlib
from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from nidiff.covariance.matrix import symmetric_eigen
from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.errors import InputError, expect, shown


class CrossSpectral(Covariance):
    """Σ over [C, *event]: mode k of the event has the covariance ``matrices`` [*event, C, C] between channels.

    ``spatial`` gives the modes, by its basis alone. `Channels` is the case matrix · λ_k. The matrices are real: of the
    cross spectrum between two channels they hold the part in phase. A lag of one channel behind the other along a
    periodic axis, the imaginary part, is not in this family.
    """

    def __init__(
        self, matrices: Tensor, spatial: Covariance, *, normalize: bool = True, allow_singular: bool = False
    ) -> None:
        expect("spatial", spatial, Covariance)
        matrices = _check_matrices(matrices, spatial)
        self._spatial, self._real = spatial, spatial.in_real_basis()
        values, vectors = torch.linalg.eigh(matrices)
        rounding = matrices.shape[-1] * torch.finfo(torch.float64).eps * values[..., -1:].abs()
        if bool((values < -rounding).any()):
            mode = tuple((values < -rounding).any(-1).nonzero()[0].tolist())
            raise InputError(f"matrices is not positive definite at mode {mode}: add a small multiple of the identity.")
        self._vectors = vectors.movedim((-2, -1), (0, 1)).contiguous()  # [channel, its number, *event]
        super().__init__(
            (matrices.shape[-1], *spatial.event_shape),
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
        """The covariance between channels of every mode, float64 [*event, C, C]."""
        vectors = self._vectors.movedim((0, 1), (-2, -1))
        return (vectors * self.eigenvalues.movedim(0, -1).unsqueeze(-2)) @ vectors.mT

    def to_basis(self, x: Tensor) -> Tensor:
        return self._turned(self._real.to_basis(x), self._rotation(x))

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return self._real.from_basis(self._turned(coefficients, self._rotation(coefficients).transpose(0, 1)))

    def _turned(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Σ_c vectors[c] x_c, term by term: numbers that stand alone round alike."""
        axis = -len(self.event_shape)
        first, *others = (v * part.unsqueeze(axis) for v, part in zip(vectors.unbind(), x.unbind(axis), strict=True))
        return sum(others, first)

    def _rotation(self, like: Tensor) -> Tensor:
        return self.table("eigenvectors", like, lambda: self._vectors)

    def periodogram(self, x: Tensor) -> Tensor:
        return self.evened(self.to_basis(x).square())

    @property
    def marginal_variance(self) -> Tensor:
        return self.diagonal_of(self.eigenvalues)

    def diagonal_of(self, values: Tensor) -> Tensor:
        return self.spatial.diagonal_of(self._turned(values, self._vectors.square().transpose(0, 1)))

    def rotate_white(self, numbers: Tensor) -> Tensor:
        return self._turned(self._real.rotate_white(numbers), self._rotation(numbers))

    def check_modes(self, argument: str, values: Tensor) -> None:
        self.spatial.check_modes(argument, values)

    def evened(self, values: Tensor) -> Tensor:
        return self.spatial.evened(values)

    @cached_property
    def basis(self) -> Hashable | None:
        own = hashlib.sha256(self._vectors.numpy().tobytes()).digest()
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


def _check_matrices(matrices: Tensor, spatial: Covariance) -> Tensor:
    matrices, event = as_numbers(matrices, "matrices").detach(), spatial.event_shape
    if tuple(matrices.shape[:-2]) != event or matrices.shape[-1] != matrices.shape[-2] or not matrices.numel():
        raise InputError(
            f"matrices has shape {tuple(matrices.shape)}: give a C×C matrix for every mode of spatial, which is over "
            f"{event}."
        )
    check_shape((matrices.shape[-1], *event), "matrices")
    if not bool(torch.isfinite(matrices).all()):
        raise InputError("matrices has NaN or infinite entries.")
    if bool(((matrices - matrices.mT).abs() > 1e-8 * matrices.abs().amax((-2, -1), keepdim=True)).any()):
        raise InputError(
            "matrices has a matrix that is not symmetric: use (m + m.mT) / 2 if the difference is rounding."
        )
    pairs = ((matrices + matrices.mT) / 2).movedim((-2, -1), (0, 1))
    if not torch.allclose(pairs, spatial.evened(pairs), rtol=1e-5, atol=1e-9 * pairs.abs().max().item()):
        raise InputError("matrices is not even, M(k) = M(−k), and Σ not a real matrix: use the mean of both.")
    return spatial.evened(pairs).movedim((0, 1), (-2, -1)).contiguous()
