"""Folders of images, and arrays of them, as a data set."""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.data.arrays import read_array
from nidiff.data.dataset import Dataset
from nidiff.data.encoded import Encoded, Reading, fit, read_encoded
from nidiff.errors import InputError
from nidiff.files import as_path
from nidiff.memory import require_memory

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def open_images(path: str | Path, reading: Reading) -> Dataset:
    """The images at ``path``: of a folder and its subfolders in the order of their names, or of an array.

    Names that begin with a dot are ignored. An array is an .npy or .npz file of N×H×W or N×H×W×C numbers: uint8, or
    floats already in [-1, 1]. An .npz holds one array, or its images are ``arr_0``.
    """
    path = as_path("path", path)
    if path.is_file() and path.suffix.lower() in (".npy", ".npz"):
        return Dataset(fit_pixels(read_array(path), reading))
    if not path.is_dir():
        problem = "is not a folder or an array" if path.exists() else "does not exist"
        raise InputError(f"path={str(path)!r} {problem}: give a folder of images, or an .npy or .npz file.")
    try:
        found = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
    except OSError as error:
        raise InputError(f"path={str(path)!r} cannot be read ({error.strerror}): give another folder.") from error
    files = sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(path).parts))
    if not files:
        raise InputError(f"path={str(path)!r} has no images: put {', '.join(SUFFIXES)} files in it.")
    pixels, _, skipped = read_encoded([Encoded(str(file), file) for file in files], reading)
    return Dataset(pixels, skipped=skipped)


def fit_pixels(pixels: Tensor, reading: Reading) -> Tensor:
    """`fit` of each image of ``pixels`` [N, C, H, W]."""
    shape = (reading.channels or pixels.shape[1], *(reading.pair or pixels.shape[2:]))
    if shape == pixels.shape[1:]:
        return pixels
    if pixels.dtype != torch.uint8:
        remedy = "leave them out, or store the images as uint8"
        raise InputError(f"size or channels ask for {shape} of floats {tuple(pixels.shape[1:])}: {remedy}.")
    require_memory(
        f"size={reading.size!r} of {len(pixels)} images", len(pixels) * math.prod(shape), "give a smaller one"
    )
    fitted = torch.empty((len(pixels), *shape), dtype=torch.uint8)
    for old, new in zip(pixels.numpy(), fitted.numpy(), strict=True):
        image = Image.fromarray(old[0] if len(old) == 1 else np.ascontiguousarray(np.moveaxis(old, 0, -1)))
        new[:] = fit(image, reading)
    return fitted
