"""Arrays of numpy, .npy and .npz, as values [N, C, *event]."""

import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError, first_line
from nidiff.files import check_member
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_array(file: Path) -> Tensor:
    """The N×H×W or N×H×W×C numbers of a file as [N, C, H, W], uint8 or float32."""
    path = f"path={str(file)!r}"
    try:
        array = _images_of_npz(file) if file.suffix.lower() == ".npz" else _mapped(file)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # numpy and zipfile raise nearly anything when a file is broken
        raise InputError(f"{path} cannot be read as arrays ({first_line(error)}): write it with numpy.save.") from error
    array = array if array.ndim != 3 else array[..., None]
    if array.ndim != 4 or array.size == 0 or array.shape[-1] > 4:
        raise InputError(f"{path} has shape {array.shape}: give N×H×W or N×H×W×C, with 1 to 4 channels, last.")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{path} has dtype {array.dtype}: give uint8, or floats in [-1, 1].")
    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    require_memory(f"{path} of shape {array.shape}", 2.0 * array.size * np.dtype(dtype).itemsize, "give fewer images")
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


def _mapped(file: Path) -> "NDArray[Any]":
    """The array of an .npy file, on the disk: numpy compares its shape with the size of the file."""
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _images_of_npz(file: Path) -> "NDArray[Any]":
    """The only array of an .npz file, or ``arr_0``."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        name = next(iter(members)) if len(members) == 1 else "arr_0"
        if name not in members:
            raise InputError(
                f"path={str(file)!r} has the arrays {sorted(members)}: keep one, or name the images arr_0."
            )
        require_memory(f"path={str(file)!r}", 2.0 * members[name].file_size, "give fewer images")
        check_member(archive, members[name], file.stat().st_size)
        with archive.open(members[name]) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
