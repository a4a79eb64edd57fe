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

MOST_AXES = 16
WORKING = 64  # bytes per entry of an event while a covariance is built: a handful of float64 tables


def check_shape(shape: Iterable[int] | int, argument: str = "shape") -> tuple[int, ...]:
    """``shape`` as a tuple of positive integers, at least one, of an event that fits in memory."""
    sizes = check_sizes(shape, argument, least=1)
    require_memory(argument, sizes, WORKING * math.prod(map(float, sizes)), "use a smaller event")
    return sizes


def check_sizes(shape: Iterable[int] | int, argument: str = "shape", least: int = 0) -> tuple[int, ...]:
    """``shape`` as a tuple of integers, ``least`` or more."""
    try:
        sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= MOST_AXES or not all(least <= size < 2**62 for size in sizes):
        problem = f"must be one to {MOST_AXES} whole numbers, each {least} or more"
        raise InputError(argument, shape, problem, "give a shape such as (32, 32)")
    return sizes


def as_numbers(values: Any, argument: str) -> Tensor:
    """``values``, a tensor, an array or a nested list of real numbers, as a float64 tensor on the CPU."""
    if isinstance(values, Tensor) and not values.is_complex():
        check_has_numbers(argument, values)
        return values.detach().to("cpu", torch.float64)
    try:
        return torch.from_numpy(np.asarray(values).astype(np.float64, casting="same_kind"))
    except (TypeError, ValueError, RuntimeError) as error:
        problem = "is not an array of real numbers"
        raise InputError(argument, None, problem, "give a tensor, or lists of them") from error


def check_has_numbers(argument: str, values: Tensor) -> None:
    """Refuse a tensor on torch's meta device, which has a shape alone."""
    if values.is_meta:
        raise InputError(argument, None, "is on the meta device, which has no numbers", "move it to another device")


def check_finite(argument: str, values: Tensor) -> None:
    """Refuse NaN and infinite entries."""
    check_has_numbers(argument, values)
    if not bool(torch.isfinite(values).all()):
        raise InputError(argument, None, "has NaN or infinite values", "give finite numbers")
