"""What the metrics accept: features [N, D] and fields [N, C, *event], as tensors or numpy arrays of finite numbers."""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError

CHUNK = 1024  # points at a time
LARGEST = 1e50  # its sixth power is still a number
Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def as_tensor(values: Array, name: str) -> Tensor:
    """A tensor as it is, anything else as numpy and torch convert it; finite, and small enough for its powers."""
    if not isinstance(values, Tensor):
        try:
            values = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise InputError(name, None, "is not an array of numbers", "give a tensor or a numpy array") from error
    for chunk in torch.atleast_1d(values.detach()).split(CHUNK):
        if chunk.is_complex() or not bool((chunk.abs() <= LARGEST).all()):
            problem = f"has numbers that are NaN, infinite, complex or above {LARGEST:g}"
            raise InputError(name, None, problem, "leave them out, or scale them")
    return values


def as_features(features: Array, name: str, least: int = 2) -> Tensor:
    """Features [N, D]: finite floats, ``least`` points or more."""
    x = as_tensor(features, name)
    if x.ndim != 2 or x.shape[1] == 0 or len(x) < least or not x.is_floating_point():
        problem = f"has shape {tuple(x.shape)} and type {x.dtype}"
        raise InputError(name, None, problem, f"give floats [N, D], {least} points or more")
    return x


def as_pair(first: Array, second: Array, name: str, other_name: str, least: int = 2) -> tuple[Tensor, Tensor]:
    """Two sets of features of the same dimension, on the device of the first."""
    a, b = as_features(first, name, least), as_features(second, other_name, least)
    if a.shape[1] != b.shape[1]:
        problem = f"has {b.shape[1]} dimensions and `{name}` has {a.shape[1]}"
        raise InputError(other_name, None, problem, "use the same features for both")
    return a, b.to(a.device)


def as_fields(fields: Array, name: str, least: int = 1) -> Tensor:
    """Fields [N, C, *event] of one to three axes, finite, ``least`` items or more."""
    x = as_tensor(fields, name)
    if not 3 <= x.ndim <= 5 or x.numel() == 0 or x.dtype == torch.bool or len(x) < least:
        problem = f"has shape {tuple(x.shape)} and type {x.dtype}"
        raise InputError(
            name, None, problem, f"give numbers [N, C, *event] of one to three axes, {least} items or more"
        )
    return x


def as_pair_of_fields(real: Array, generated: Array) -> tuple[Tensor, Tensor]:
    """Two sets of the same [C, *event], two items or more each."""
    first, second = as_fields(real, "real", 2), as_fields(generated, "generated", 2)
    if first.shape[1:] != second.shape[1:]:
        problem = f"has items {tuple(second.shape[1:])} and `real` {tuple(first.shape[1:])}"
        raise InputError("generated", None, problem, "give items of one shape")
    return first, second


def mean(points: Tensor) -> Tensor:
    """The mean [D] of points [N, D] in float64, in chunks: torch would make a float64 copy of all the points."""
    return torch.stack([chunk.double().sum(0) for chunk in points.split(CHUNK)]).sum(0) / len(points)
