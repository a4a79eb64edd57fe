"""Covariances given entry by entry: Identity, Diagonal, Dense, and Channels, a C×C factor in front of a spatial Σ."""

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.errors import InputError


class Identity(Covariance):
    """Σ = I: white noise, the isotropic case."""

    basis = "pixels"

    def __init__(self, shape: Sequence[int]) -> None:
        shape = check_shape(shape)
        super().__init__(shape, torch.ones(shape, dtype=torch.float64, device="cpu"), argument="shape")

    def to_basis(self, x: Tensor) -> Tensor:
        return x

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return coefficients

    @property
    def marginal_variance(self) -> Tensor:
        return self.eigenvalues

    def with_eigenvalues(self, eigenvalues: Tensor) -> Covariance:
        return Diagonal(eigenvalues, normalize=False, allow_singular=True)

    def arguments(self) -> dict[str, Any]:
        return {"shape": self.event_shape}


class Diagonal(Covariance):
    """Independent entries with their own variances, e.g. a mask of where noise goes. The event has their shape."""

    basis = "pixels"

    def __init__(self, variances: Tensor, *, normalize: bool = True, allow_singular: bool = False) -> None:
        variances = as_numbers(variances, "variances")
        super().__init__(
            variances.shape, variances, argument="variances", normalize=normalize, allow_singular=allow_singular
        )

    def to_basis(self, x: Tensor) -> Tensor:
        return x

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return coefficients

    @property
    def marginal_variance(self) -> Tensor:
        return self.eigenvalues

    def arguments(self) -> dict[str, Any]:
        return {"variances": self.eigenvalues, "normalize": False, "allow_singular": self.is_singular}


class Dense(Covariance):
    """Any symmetric positive-definite N×N ``matrix`` over an event of N entries (default shape: (N,)).

    Diagonalised once, in float64. Costs N² memory and per image N² operations: for N up to a few thousand.
    """

    def __init__(
        self,
        matrix: Tensor,
        shape: Sequence[int] | None = None,
        *,
        normalize: bool = True,
        allow_singular: bool = False,
    ) -> None:
        values, self._vectors = symmetric_eigen(matrix, "matrix")
        shape = check_shape((len(values),) if shape is None else shape)
        if torch.Size(shape).numel() != len(values):
            raise InputError(f"matrix is {len(values)}×{len(values)}, but shape={shape} has another number of entries.")
        super().__init__(shape, values, argument="matrix", normalize=normalize, allow_singular=allow_singular)

    def to_basis(self, x: Tensor) -> Tensor:
        return (self._flat(x) @ self._rotation(x)).reshape(x.shape)

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return (self._flat(coefficients) @ self._rotation(coefficients).T).reshape(coefficients.shape)

    @property
    def marginal_variance(self) -> Tensor:
        return (self._vectors.square() @ self.eigenvalues.flatten()).reshape(self.event_shape)

    def rotate_white(self, numbers: Tensor) -> Tensor:
        return self.to_basis(numbers)

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(x.ndim - len(self.event_shape))

    def _rotation(self, like: Tensor) -> Tensor:
        return self.table("eigenvectors", like, lambda: self._vectors)

    @property
    def basis(self) -> Hashable:
        return hashlib.sha256(self._vectors.contiguous().numpy().tobytes()).digest()

    def arguments(self) -> dict[str, Any]:
        return {
            "matrix": self.dense(),
            "shape": self.event_shape,
            "normalize": False,
            "allow_singular": self.is_singular,
        }


class Channels(Covariance):
    """matrix ⊗ Σ_spatial over [C, *spatial event]: a C×C covariance between channels, e.g. the colours of an image."""

    def __init__(self, matrix: Tensor, spatial: Covariance, *, normalize: bool = True) -> None:
        if not isinstance(spatial, Covariance):
            raise InputError(f"spatial={spatial!r} must be a covariance, such as gaussian_free_field((32, 32)).")
        values, self._vectors = symmetric_eigen(matrix, "matrix")
        if values[0] == 0:
            raise InputError("matrix is singular: add a small multiple of the identity to the covariance of channels.")
        self.spatial = spatial
        super().__init__(
            (len(values), *spatial.event_shape),
            values.reshape(-1, *[1] * len(spatial.event_shape)) * spatial.eigenvalues,
            argument="matrix",
            normalize=normalize,
            allow_singular=spatial.is_singular,
        )

    def to_basis(self, x: Tensor) -> Tensor:
        return self.spatial.to_basis(self._mix(x, self._rotation(x).T))

    def from_basis(self, coefficients: Tensor) -> Tensor:
        x = self.spatial.from_basis(coefficients)
        return self._mix(x, self._rotation(x))

    @property
    def marginal_variance(self) -> Tensor:
        own = torch.stack([self.spatial.with_eigenvalues(values).marginal_variance for values in self.eigenvalues])
        return torch.tensordot(self._vectors.square(), own, 1)

    def _mix(self, x: Tensor, matrix: Tensor) -> Tensor:
        axis = x.ndim - len(self.event_shape)
        return (matrix @ x.flatten(axis + 1)).reshape(x.shape)

    def _rotation(self, like: Tensor) -> Tensor:
        return self.table("eigenvectors", like, lambda: self._vectors)

    def layout(self, eigenvalues: Tensor) -> Tensor:
        return self.spatial.layout(eigenvalues)

    @property
    def white_shape(self) -> tuple[int, ...]:
        return (self.event_shape[0], *self.spatial.white_shape)

    def white_scale(self, eigenvalues: Tensor) -> Tensor:
        return self.spatial.white_scale(eigenvalues)

    def rotate_white(self, numbers: Tensor) -> Tensor:
        leading = numbers.ndim - len(self.white_shape)
        mixed = (self._rotation(numbers).T @ numbers.flatten(leading + 1)).reshape(numbers.shape)
        return self.spatial.rotate_white(mixed)

    def as_coefficients(self, numbers: Tensor) -> Tensor:
        return self.spatial.as_coefficients(numbers)


def symmetric_eigen(matrix: Any, argument: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues and orthonormal eigenvectors of a symmetric positive semi-definite matrix, or an `InputError`."""
    matrix = as_numbers(matrix, argument)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"{argument} has shape {tuple(matrix.shape)}: a covariance matrix is square.")
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(f"{argument} has NaN or infinite entries.")
    scale = matrix.abs().max()
    if bool((matrix - matrix.T).abs().max() > 1e-8 * scale):
        raise InputError(f"{argument} is not symmetric: use (m + m.T) / 2 if the difference is rounding.")
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    rounding = len(values) * torch.finfo(torch.float64).eps * values.abs().max()
    if bool(values[0] < -rounding):
        raise InputError(
            f"{argument} is not positive definite (smallest eigenvalue {values[0].item():.3g}): "
            f"add a multiple of the identity larger than {-values[0].item():.3g}."
        )
    return torch.where(values <= rounding, 0.0, values), vectors
