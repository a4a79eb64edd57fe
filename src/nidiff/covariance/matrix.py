"""Covariances given entry by entry: Identity, Diagonal, Dense, and Channels, a C×C factor in front of a spatial Σ."""

import copy
import hashlib
import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.covariance.products import channel_product, padded, row_product
from nidiff.errors import InputError, shown


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

    def diagonal_of(self, values: Tensor) -> Tensor:
        return values

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

    def diagonal_of(self, values: Tensor) -> Tensor:
        return values

    def arguments(self) -> dict[str, Any]:
        return {"variances": self.eigenvalues, "normalize": False, "allow_singular": self.is_singular}


class Dense(Covariance):
    """Any symmetric positive-definite N×N ``matrix`` over an event of N entries (default shape: (N,)).

    Diagonalised once, in float64. Costs N² memory and per image N² operations: for N up to a few thousand. With a
    ``eigenvalues``, N of them, ``matrix`` holds the eigenvectors as its columns instead: so it is saved, since of
    equal eigenvalues the vectors are not unique, and what belongs to them shall stay with them.
    """

    def __init__(
        self,
        matrix: Tensor,
        shape: Sequence[int] | None = None,
        *,
        normalize: bool = True,
        allow_singular: bool = False,
        eigenvalues: Tensor | None = None,
    ) -> None:
        if eigenvalues is None:
            values, self._vectors = symmetric_eigen(matrix, "matrix", shape)
        else:
            values, self._vectors = _checked_eigen(matrix, eigenvalues)
        shape = (len(values),) if shape is None else shape
        super().__init__(shape, values, argument="matrix", normalize=normalize, allow_singular=allow_singular)

    def to_basis(self, x: Tensor) -> Tensor:
        return row_product(self._flat(x), self._rotation(x)).reshape(x.shape)

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return row_product(self._flat(coefficients), self._rotation(coefficients).T).reshape(coefficients.shape)

    def diagonal_of(self, values: Tensor) -> Tensor:
        return (self._flat(values) @ self._vectors.square().T).reshape(values.shape)

    def rotate_white(self, numbers: Tensor) -> Tensor:
        return self.to_basis(numbers)

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(x.ndim - len(self.event_shape))

    def _rotation(self, like: Tensor) -> Tensor:
        return self.table("eigenvectors", like, lambda: padded(self._vectors))

    @cached_property
    def basis(self) -> Hashable:
        return hashlib.sha256(self._vectors.contiguous().numpy().tobytes()).digest()

    def arguments(self) -> dict[str, Any]:
        return {
            "matrix": self._vectors,
            "shape": self.event_shape,
            "normalize": False,
            "allow_singular": self.is_singular,
            "eigenvalues": self.eigenvalues.flatten(),
        }


class Channels(Covariance):
    """matrix ⊗ Σ_spatial over [C, *spatial event]: a C×C covariance between channels, e.g. the colours of an image."""

    def __init__(self, matrix: Tensor, spatial: Covariance, *, normalize: bool = True) -> None:
        if not isinstance(spatial, Covariance):
            raise InputError(f"spatial={shown(spatial)} must be a covariance, such as gaussian_free_field((32, 32)).")
        values, self._vectors = symmetric_eigen(matrix, "matrix")
        if values[0] == 0:
            raise InputError("matrix is singular: add a small multiple of the identity to the covariance of channels.")
        self._spatial = spatial
        super().__init__(
            (len(values), *spatial.event_shape),
            values.reshape(-1, *[1] * len(spatial.event_shape)) * spatial.eigenvalues,
            argument="matrix",
            normalize=normalize,
            allow_singular=spatial.is_singular,
        )

    @property
    def spatial(self) -> Covariance:
        return self._spatial

    def in_real_basis(self) -> Covariance:
        other = copy.copy(self)
        other._spatial, other._tables = self.spatial.in_real_basis(), {}
        return other

    def to_basis(self, x: Tensor) -> Tensor:
        return self.spatial.to_basis(channel_product(self._rotation(x).T, x, len(self.spatial.event_shape)))

    def from_basis(self, coefficients: Tensor) -> Tensor:
        x = self.spatial.from_basis(coefficients)
        return channel_product(self._rotation(x), x, len(self.spatial.event_shape))

    def periodogram(self, x: Tensor) -> Tensor:
        return self.spatial.periodogram(channel_product(self._rotation(x).T, x, len(self.spatial.event_shape)))

    def diagonal_of(self, values: Tensor) -> Tensor:
        own = self.spatial.diagonal_of(values).flatten(values.ndim - len(self.spatial.event_shape))
        return (self._vectors.square() @ own).reshape(values.shape)

    def _rotation(self, like: Tensor) -> Tensor:
        return self.table("eigenvectors", like, lambda: self._vectors)

    @property
    def rotation(self) -> Tensor:
        """The eigenvectors of the covariance between channels, as columns."""
        return self._vectors

    @property
    def matrix(self) -> Tensor:
        """The covariance between channels that it was built from."""
        return as_numbers(self._built_with["matrix"], "matrix")

    @cached_property
    def basis(self) -> Hashable | None:
        own = hashlib.sha256(self._vectors.contiguous().numpy().tobytes()).digest()
        return None if self.spatial.basis is None else (own, self.spatial.basis)

    def check_modes(self, argument: str, values: Tensor) -> None:
        self.spatial.check_modes(argument, values)

    def evened(self, values: Tensor) -> Tensor:
        return self.spatial.evened(values)

    def layout(self, eigenvalues: Tensor) -> Tensor:
        return self.spatial.layout(eigenvalues)

    @property
    def white_shape(self) -> tuple[int, ...]:
        return (self.event_shape[0], *self.spatial.white_shape)

    def white_scale(self, eigenvalues: Tensor) -> Tensor:
        return self.spatial.white_scale(eigenvalues)

    def rotate_white(self, numbers: Tensor) -> Tensor:
        mixed = channel_product(self._rotation(numbers).T, numbers, len(self.spatial.white_shape))
        return self.spatial.rotate_white(mixed)

    def as_coefficients(self, numbers: Tensor) -> Tensor:
        return self.spatial.as_coefficients(numbers)


def symmetric_eigen(matrix: Any, argument: str, shape: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues and orthonormal eigenvectors of a symmetric positive semi-definite matrix, or an `InputError`.

    ``shape`` is that of the event it is over: symmetries under reflection along its axes save time.
    """
    matrix = as_numbers(matrix, argument)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"{argument} has shape {tuple(matrix.shape)}: it must be a square matrix.")
    size = len(matrix)
    event = check_shape((size,) if shape is None else shape)
    if math.prod(event) != size:
        raise InputError(f"{argument} is {size}×{size}, but shape={event} has another number of entries.")
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(f"{argument} has NaN or infinite entries.")
    scale = matrix.abs().max()
    if bool((matrix - matrix.T).abs().max() > 1e-8 * scale):
        raise InputError(f"{argument} is not symmetric: use (m + m.T) / 2 if the difference is rounding.")
    values, vectors = _eigen((matrix + matrix.T) / 2, event)
    rounding = size * torch.finfo(torch.float64).eps * values.abs().max()
    if bool(values[0] < -rounding):
        raise InputError(
            f"{argument} is not positive definite (smallest eigenvalue {values[0].item():.3g}): "
            f"add a multiple of the identity larger than {-values[0].item():.3g}."
        )
    return torch.where(values <= rounding, 0.0, values), vectors


def _checked_eigen(vectors: Any, eigenvalues: Any) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors that are known already."""
    vectors, values = as_numbers(vectors, "matrix"), as_numbers(eigenvalues, "eigenvalues")
    size = values.numel()
    if values.ndim != 1 or tuple(vectors.shape) != (size, size) or not size:
        raise InputError(
            f"matrix has shape {tuple(vectors.shape)}, and eigenvalues {tuple(values.shape)}: give N×N and N."
        )
    error = (vectors.T @ vectors - torch.eye(size, dtype=torch.float64, device="cpu")).abs().max()
    if not bool(error < 1e-8 * size):
        raise InputError("matrix does not have orthonormal columns, the eigenvectors of those eigenvalues: give these.")
    return values, vectors


def _eigen(matrix: Tensor, shape: Sequence[int], axis: int = 0) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh`, in parts where the matrix commutes with a reflection of the event along an axis.

    Even and odd vectors do not mix then: along d axes there are 2^d problems, each 2^d times smaller and 8^d times
    quicker.
    """
    if axis == len(shape):
        return torch.linalg.eigh(matrix)
    both = matrix.reshape(*shape, *shape)
    difference = (both - both.flip(axis, axis + len(shape))).abs().max()
    if shape[axis] == 1 or bool(difference > 64 * torch.finfo(matrix.dtype).eps * matrix.abs().max()):
        return _eigen(matrix, shape, axis + 1)
    parts = []
    for half in _even_and_odd(shape[axis]):
        small = (*shape[:axis], half.shape[1], *shape[axis + 1 :])
        count = math.prod(small)
        block = _along(_along(both, half, axis), half, axis + len(shape))
        values, vectors = _eigen(block.reshape(count, count), small, axis + 1)
        parts.append((values, _along(vectors.reshape(*small, count), half.T, axis).reshape(-1, count)))
    values, order = torch.cat([values for values, _ in parts]).sort()
    return values, torch.cat([vectors for _, vectors in parts], dim=1)[:, order]


def _even_and_odd(n: int) -> tuple[Tensor, Tensor]:
    """Orthonormal columns that span the even and the odd vectors of length n."""
    identity = torch.eye(n, dtype=torch.float64, device="cpu")
    first, last = identity[:, : n // 2], identity.flip(1)[:, : n // 2]
    middle = identity[:, n // 2 : (n + 1) // 2]
    return torch.cat([(first + last) / math.sqrt(2), middle], dim=1), (first - last) / math.sqrt(2)


def _along(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """x · matrix over one axis of x."""
    return (x.movedim(axis, -1) @ matrix).movedim(-1, axis)
