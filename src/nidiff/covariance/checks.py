"""Shapes and arrays as the caller gives them, checked."""

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.memory import require_memory

MOST_AXES = 16  # of an event
WORKING = 64  # bytes per entry of an event while a covariance is built: a handful of float64 tables


def check_shape(shape: Iterable[int] | int, argument: str = "shape") -> tuple[int, ...]:
    """``shape`` as a tuple of positive integers, at least one, of an event that fits in memory."""
    sizes = check_sizes(shape, argument)
    if not 1 <= len(sizes) <= MOST_AXES or min(sizes) < 1:
        raise InputError(argument, shape, f"must be one to {MOST_AXES} positive integers", "give one such as (32, 32)")
    require_memory(argument, sizes, WORKING * math.prod(map(float, sizes)), "use a smaller event")
    return sizes


def check_sizes(shape: Iterable[int] | int, argument: str = "shape") -> tuple[int, ...]:
    """``shape`` as a tuple of integers that are not negative."""
    try:
        sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        sizes = (-1,)
    if any(not 0 <= size < 2**62 for size in sizes):
        raise InputError(argument, shape, "must be one or more positive integers", "give a shape such as (32, 32)")
    return sizes


def as_numbers(values: Any, argument: str) -> Tensor:
    """``values``, a tensor, an array or a nested list of real numbers, as a float64 tensor on the CPU."""
    try:
        if values.is_complex() if isinstance(values, Tensor) else np.iscomplexobj(values):
            raise TypeError("complex numbers")
        return torch.as_tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            argument, None, "is not an array of real numbers", "give a tensor, or lists of them"
        ) from error


def check_finite(argument: str, values: Tensor) -> None:
    """Refuse NaN and infinite entries."""
    if not bool(torch.isfinite(values).all()):
        raise InputError(argument, None, "has NaN or infinite values", "give finite numbers")


def check_between(argument: str, value: float, low: float, high: float) -> None:
    """Refuse a number that is not from ``low`` to ``high``."""
    if not low <= value <= high:
        raise InputError(argument, value, f"is not from {low:g} to {high:g}", "give a number in that range")


def check_times(times: Any) -> tuple[float, ...]:
    """Finite numbers that rise."""
    values = as_numbers(times, "times")
    if values.ndim != 1 or not values.numel() or not bool(torch.isfinite(values).all() & (values.diff() > 0).all()):
        raise InputError("times", times, "must be finite numbers that rise", "give times such as (0, 1, 2.5)")
    return tuple(values.tolist())
