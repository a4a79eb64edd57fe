"""What the metrics accept: features [N, D] and fields [N, C, *event], as tensors or numpy arrays of finite numbers."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.precision import with_float64

CHUNK = 1024  # points at a time
Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def as_features(features: Array, name: str, least: int = 2) -> Tensor:
    """Features [N, D], ``least`` points or more."""
    return _checked(features, name, "[N, D]", range(2, 3), least)


def as_fields(fields: Array, name: str, least: int = 1) -> Tensor:
    """Fields [N, C, *event] of one to three axes, ``least`` items or more."""
    return _checked(fields, name, "[N, C, *event] of one to three axes", range(3, 6), least)


def as_pair(
    first: Array,
    second: Array,
    names: tuple[str, str] = ("real", "generated"),
    check: Callable[[Array, str, int], Tensor] = as_fields,
    least: int = 2,
) -> tuple[Tensor, Tensor]:
    """Two sets of features or of fields of the same shape, on the device of the first."""
    a, b = check(first, names[0], least), check(second, names[1], least)
    if a.shape[1:] != b.shape[1:]:
        problem = f"has items {tuple(b.shape[1:])} and `{names[0]}` {tuple(a.shape[1:])}"
        raise InputError(names[1], None, problem, "give items of one shape")
    return a, b.to(a.device)


def _checked(values: Array, name: str, kind: str, axes: range, least: int) -> Tensor:
    """A tensor, where float64 is; anything else as numpy and torch convert it."""
    x = values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=["C", "W"]))
    is_usable = x.ndim in axes and len(x) >= least and x.numel() > 0
    if not is_usable or not bool(x.isfinite().all()):
        problem = f"has NaN or infinite numbers, or cannot be used: its shape is {tuple(x.shape)}"
        raise InputError(name, None, problem, f"give finite numbers {kind}, {least} items or more")
    return with_float64(x)


def mean(points: Tensor) -> Tensor:
    """The mean [D] of points [N, D] in float64, in chunks: torch would make a float64 copy of all the points."""
    return torch.stack([chunk.double().sum(0) for chunk in points.split(CHUNK)]).sum(0) / len(points)
