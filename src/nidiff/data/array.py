"""Images from an .npy or .npz file."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError


def read_array(file: Path) -> Tensor:
    """The images of ``file``, N×H×W or N×H×W×C, as [N, C, H, W]: uint8, or float32 in [-1, 1]."""
    array, path = _read(file), f"path={str(file)!r}"
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.size == 0 or array.shape[-1] > 4:
        raise InputError(f"{path} has shape {array.shape}: give N×H×W or N×H×W×C, with 1 to 4 channels, last.")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{path} has dtype {array.dtype}: give uint8, or floats in [-1, 1].")
    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    pixels = torch.from_numpy(np.array(np.moveaxis(array, -1, 1), dtype=dtype, order="C"))
    if pixels.dtype == torch.uint8:
        return pixels
    low, high = (end.item() for end in pixels.aminmax())
    if not np.isfinite([low, high]).all():
        raise InputError(f"{path} has NaN or infinite values: remove those images.")
    found = f"{path} has floats from {low:g} to {high:g}"
    if low < -1 or high > 1:
        remedy = "divide by 127.5 and subtract 1" if low >= 0 and high <= 255 else "scale them to it"
        raise InputError(f"{found}, outside [-1, 1]: {remedy}.")
    if low >= 0 and high > 0:
        hint = "if they are in [0, 1], multiply by 2 and subtract 1"
        warnings.warn(f"{found}, taken to be in [-1, 1]: {hint}.", stacklevel=2)
    return pixels


def _read(file: Path) -> np.ndarray[Any, Any]:
    try:
        if file.suffix.lower() == ".npy":
            return np.load(file, mmap_mode="r", allow_pickle=False)
        with np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"path={str(file)!r} cannot be read as arrays ({error}): write it with numpy.save.") from error
    name = next(iter(arrays)) if len(arrays) == 1 else "arr_0"
    if name not in arrays:
        raise InputError(f"path={str(file)!r} has the arrays {sorted(arrays)}: keep one, or name the images arr_0.")
    return arrays[name]
