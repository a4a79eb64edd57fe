"""Images from a folder or an array file."""

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
# What each kind of 8-bit image is read as; others (16 bits, floats) have no agreed range.
MODES = {"1": "L", "L": "L", "LA": "LA", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "RGB": "RGB", "RGBA": "RGBA"}


def load_images(path: str | Path) -> Tensor:
    """All images at ``path`` as float32 [N, C, H, W] in [-1, 1]; 0 … 255 goes to 2 · value / 255 − 1.

    ``path`` is a folder, searched with its subfolders in the order of the names, or an .npy or .npz file of N×H×W or
    N×H×W×C numbers: uint8, or floats already in [-1, 1]. An .npz holds one array, or its images are ``arr_0``.
    """
    path = Path(path)
    if path.is_dir():
        array = _read_folder(path)
    elif path.is_file() and path.suffix.lower() in (".npy", ".npz"):
        array = _read_array(path)
    else:
        problem = "is not a folder or an array" if path.exists() else "does not exist"
        raise InputError(f"path={str(path)!r} {problem}: give a folder of images, or an .npy or .npz file.")
    images = torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, -1, 1)))
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    images = images.float()
    if not bool(torch.isfinite(images).all()):
        raise InputError(f"path={str(path)!r} has NaN or infinite values: remove those images.")
    if bool((images.abs() > 1).any()):
        raise InputError(f"path={str(path)!r} has floats outside [-1, 1]: scale them to it, or store uint8.")
    return images


def _read_folder(folder: Path) -> np.ndarray[Any, Any]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise InputError(f"path={str(folder)!r} has no images: put {', '.join(SUFFIXES)} files in it.")
    images: list[np.ndarray[Any, Any]] = []
    for file in files:
        image = _read_image(file)
        if images and image.shape != images[0].shape:
            raise InputError(
                f"{str(file)!r} has height, width, channels {image.shape}, but {str(files[0])!r} has "
                f"{images[0].shape}: make all images of a folder alike."
            )
        images.append(image)
    return np.stack(images)


def _read_image(file: Path) -> np.ndarray[Any, Any]:
    try:
        with Image.open(file) as image:
            mode = image.mode
            pixels = np.asarray(image.convert(MODES.get(mode, mode)))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise InputError(f"{str(file)!r} cannot be read as an image ({error}): repair or remove it.") from error
    if mode not in MODES:
        raise InputError(f"{str(file)!r} has mode {mode}: convert it to 8 bits per channel.")
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _read_array(file: Path) -> np.ndarray[Any, Any]:
    try:
        if file.suffix.lower() == ".npy":
            arrays = {"arr_0": np.load(file, allow_pickle=False)}
        else:
            with np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"path={str(file)!r} cannot be read as arrays ({error}): write it with numpy.save.") from error
    if len(arrays) != 1 and "arr_0" not in arrays:
        raise InputError(f"path={str(file)!r} has the arrays {sorted(arrays)}: keep one, or name the images arr_0.")
    array: np.ndarray[Any, Any] = arrays["arr_0"] if "arr_0" in arrays else next(iter(arrays.values()))
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.size == 0 or array.shape[-1] > 4:
        raise InputError(
            f"path={str(file)!r} has shape {array.shape}: give N×H×W or N×H×W×C, with 1 to 4 channels, last."
        )
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"path={str(file)!r} has dtype {array.dtype}: give uint8 or floats in [-1, 1].")
    return array
