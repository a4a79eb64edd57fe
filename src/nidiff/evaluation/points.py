"""What the metrics accept: tensors or numpy arrays of finite numbers."""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError

CHUNK = 1024  # points at a time
LARGEST = 1e50  # its sixth power is still a number
Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def as_tensor(values: Array, name: str) -> Tensor:
    """A tensor as it is, a numpy array as a tensor; either must be finite, and so must its powers."""
    if isinstance(values, np.ndarray):
        try:
            values = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} has dtype {values.dtype}, which torch does not know: use float32.") from error
    if not isinstance(values, Tensor):
        raise InputError(f"{name} is a {type(values).__name__}: give a tensor or a numpy array.")
    if values.layout != torch.strided or values.is_meta or values.is_complex() or values.is_quantized:
        raise InputError(f"{name} must be a dense array of real numbers.")
    for chunk in torch.atleast_1d(values.detach()).split(CHUNK):
        if not bool(torch.isfinite(chunk).all()):
            raise InputError(f"{name} has NaN or infinite numbers: leave them out.")
        if chunk.is_floating_point() and chunk.numel() and float(chunk.abs().max()) > LARGEST:
            raise InputError(f"{name} has numbers above {LARGEST:g}: scale them down.")
    return values


def as_features(features: Array, name: str, least: int = 2) -> Tensor:
    """Features [N, D]: finite floats, ``least`` points or more."""
    features = as_tensor(features, name)
    if features.ndim != 2 or features.shape[1] == 0:
        raise InputError(f"{name} has shape {tuple(features.shape)}: give features of shape [N, D].")
    if not features.is_floating_point():
        raise InputError(f"{name} has dtype {features.dtype}: give float32 or float64.")
    if len(features) < least:
        raise InputError(f"{name} has too few points, {len(features)}: give {least} or more.")
    return features


def as_pair(first: Array, second: Array, one: str, other: str, least: int = 2) -> tuple[Tensor, Tensor]:
    """Two sets of features of the same dimension, on the device of the first."""
    a, b = as_features(first, one, least), as_features(second, other, least)
    if a.shape[1] != b.shape[1]:
        raise InputError(f"{other} has {b.shape[1]} dimensions and {one} has {a.shape[1]}: use the same features.")
    return a, b.to(a.device)


def mean(points: Tensor) -> Tensor:
    """The mean [D] of points [N, D] in float64, in chunks: torch would make a float64 copy of all the points."""
    return torch.stack([chunk.double().sum(0) for chunk in points.split(CHUNK)]).sum(0) / len(points)
