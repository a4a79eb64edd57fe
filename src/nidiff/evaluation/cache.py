"""Features of pictures, computed once and kept: an npz with the ``mu`` and ``sigma`` that other FID tools read."""

import hashlib
import re
import sys
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset, quantise
from nidiff.data.download import cache_folder
from nidiff.errors import FileError, InputError
from nidiff.evaluation.arrays import as_features
from nidiff.evaluation.features import FeatureNetwork, Pixels, compute_features
from nidiff.evaluation.frechet import statistics
from nidiff.files import as_path, read_npz, replace_npz, writing
from nidiff.progress import progress_bar
from nidiff.sealed import tensors_sha256

CHUNK = 256  # images at a time


class Reference(NamedTuple):
    """Features, float32 [N, D], and the file that keeps them with their mean and unbiased covariance in float64."""

    features: Tensor
    file: Path


def reference_features(images: Pixels, network: FeatureNetwork, *, name: str, cache: Path | None = None) -> Reference:
    """The features of uint8 ``images``, from the folder ``cache`` if they are there.

    The file is called after ``name``, the network, and a hash of the pixels, the network's weights and its
    preprocessing, so that what changes the features changes the file. The default folder is "features" in the cache
    folder. A damaged file is computed again. A `Stream` is decoded for the checksum and once more for the features.
    """
    identity = {
        "data_sha256": pixels_digest(images),
        "network": network.name,
        "network_sha256": network.sha256,
        "preprocessing": network.preprocessing,
    }
    key = hashlib.sha256("\n".join(identity.values()).encode()).hexdigest()
    words = [re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-")[:60] or "data" for word in (name, network.name)]
    folder = cache_folder() / "features" if cache is None else as_path("cache", cache)
    file = folder / f"{'-'.join(words)}-{key[:16]}.npz"
    if file.exists():
        try:
            return Reference(_read(file, identity, len(images)), file)
        except InputError:
            print(f"{file} is damaged: its features are computed again", file=sys.stderr)
    with writing("cache", folder, "give a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)  # now, for computing features may take an hour
    with progress_bar(f"{network.name} features of {name}", "images") as progress:
        features = compute_features(network, images, progress=progress)
    mu, sigma = statistics(features)
    arrays = {"mu": mu.numpy(), "sigma": sigma.numpy(), "features": features.numpy()}
    with writing("cache", folder, "make room or give another folder"):
        replace_npz(file, arrays | {key: np.array(text) for key, text in identity.items()})
    return Reference(features, file)


def pixels_digest(images: Pixels) -> str:
    """The checksum of the shape and of all pixels as uint8, whatever they are stored as."""
    pixels = images.values if isinstance(images, Dataset) else images
    chunks = (quantise(pixels.index_select(0, rows)) for rows in torch.arange(len(pixels)).split(CHUNK))
    return tensors_sha256(chain([str(tuple(pixels.shape))], chunks))


def _read(file: Path, identity: dict[str, str], count: int) -> Tensor:
    arrays = read_npz(file, ["features", "mu", "sigma", *identity], "remove it")
    features, mu, sigma = arrays["features"], arrays["mu"], arrays["sigma"]
    shapes = (features.shape, mu.shape, sigma.shape) == ((count, mu.size), (mu.size,), (mu.size, mu.size))
    types = [array.dtype.name for array in (features, mu, sigma)] == ["float32", "float64", "float64"]
    if not (shapes and types) or any(str(arrays[key]) != text for key, text in identity.items()):
        raise FileError("cache", str(file), "holds other features", "remove it")
    return as_features(torch.from_numpy(features), "features")
