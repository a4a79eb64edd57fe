"""Eigenvalues and eigenvectors of symmetric matrices, checked, and one small Hermitian matrix per wave."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis
from nidiff.covariance.checks import as_numbers, check_finite, check_shape
from nidiff.errors import InputError


def symmetric_eigen(matrix: Any, argument: str, shape: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues and orthonormal eigenvectors of a symmetric positive semi-definite matrix, or an `InputError`.

    ``shape`` is that of the event it is over: symmetries under reflection along its axes save time.
    """
    matrix = as_numbers(matrix, argument)
    size = len(matrix) if matrix.ndim else 0
    event = check_shape((size,) if shape is None else shape)
    check_finite(argument, matrix)
    square = tuple(matrix.shape) == (size, size) and math.prod(event) == size
    if not square or bool((matrix - matrix.T).abs().max() > 1e-8 * matrix.abs().max()):
        problem = f"is not a symmetric N×N matrix, N the size of {event}"
        raise InputError(argument, None, problem, "use (m + m.T) / 2 if the difference is rounding")
    values, vectors = _eigen((matrix + matrix.T) / 2, event)
    return _without_rounding(values, argument), vectors


def _without_rounding(values: Tensor, argument: str) -> Tensor:
    """Eigenvalues [..., N], rising, with 0 for those that rounding explains."""
    rounding = values.shape[-1] * torch.finfo(torch.float64).eps * values[..., -1:].abs()
    if bool((values < -rounding).any()):
        problem = f"is not positive definite (smallest eigenvalue {values.min().item():.3g})"
        raise InputError(argument, None, problem, "add a small multiple of the identity")
    return torch.where(values <= rounding, 0.0, values)


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


def eigen_per_mode(real: Tensor, imaginary: Tensor | None, spatial: Basis) -> tuple[Tensor, Tensor]:
    """Eigenvalues [C, *event] and complex vectors [C, C, *event] of the matrices real + i · imaginary [*event, C, C].

    The vectors of the wave −k are the conjugates of those of k; without an imaginary part they are real.
    """
    values, vectors = torch.linalg.eigh(real)
    vectors = vectors.to(torch.complex128)
    if imaginary is not None and bool((imaginary != 0).any()):
        index = torch.arange(spatial.size, dtype=torch.float64, device="cpu").reshape(spatial.event_shape)
        mirror = spatial.mirrored(index)  # type: ignore[attr-defined]
        at_k = torch.linalg.eigh(torch.complex(real, imaginary))
        at_mirror = [part.flatten(0, index.ndim - 1)[mirror.long()] for part in (at_k[0], at_k[1].conj())]
        first, second = (mask.unsqueeze(-1) for mask in (index < mirror, index > mirror))  # the rest mirror themselves
        values = torch.where(first, at_k[0], torch.where(second, at_mirror[0], values))
        first, second = first.unsqueeze(-1), second.unsqueeze(-1)
        vectors = torch.where(first, at_k[1], torch.where(second, at_mirror[1], vectors))
    values = _without_rounding(values, "matrices").movedim(-1, 0)
    return values, vectors.movedim((-2, -1), (0, 1)).contiguous()
