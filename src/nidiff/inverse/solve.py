"""Conjugate gradients, for a batch of systems at once."""

from collections.abc import Callable

import torch
from torch import Tensor


def size_of(rows: Tensor) -> Tensor:
    """‖row‖²."""
    return rows.square().sum(1)


def conjugate_gradients(matrix: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, iterations: int) -> Tensor:
    """w with S w = ``right`` [B, …], S symmetric and not negative; it may be singular, where ``right`` is in its range.

    A row ends when its residual has fallen to ``tolerance`` times ‖right‖, and where S gives it nothing more than
    rounding.
    """
    shape, right = right.shape, right.flatten(1)
    found, residual = torch.zeros_like(right), right
    direction, size = residual, size_of(residual)
    goal, largest = tolerance**2 * size, torch.zeros_like(size)
    for _ in range(iterations):
        active = size > goal
        if not bool(active.any()):
            break
        image = matrix(direction.reshape(shape)).flatten(1)
        curvature = (direction * image).sum(1)
        largest = torch.maximum(largest, curvature / torch.where(active, size_of(direction), 1.0))
        active &= curvature > torch.finfo(right.dtype).eps * largest * size_of(direction)
        step = torch.where(active, size / torch.where(active, curvature, 1.0), 0.0).unsqueeze(1)
        found = found + step * direction
        residual = residual - step * image
        new = size_of(residual)
        direction = residual + torch.where(active, new / torch.where(active, size, 1.0), 0.0).unsqueeze(1) * direction
        size = torch.where(active, new, 0.0)
    return found.reshape(shape)
