"""Reference features, computed once and kept: an npz with the ``mu`` and ``sigma`` that other FID tools read."""

import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.download import cache_folder
from nidiff.data.encoded import Stream
from nidiff.data.images import Images, quantise
from nidiff.errors import InputError
from nidiff.evaluation.features import FeatureNetwork, compute_features
from nidiff.evaluation.frechet import statistics
from nidiff.evaluation.points import as_features
from nidiff.files import read_npz, replace_npz, writing
from nidiff.progress import progress_bar

CHUNK = 256  # images at a time


class Reference(NamedTuple):
    """The features of a set of images, and where they come from."""

    features: Tensor
    """float32 [N, D]."""
    mu: Tensor
    """float64 [D]."""
    sigma: Tensor
    """float64 [D, D], unbiased."""
    data_sha256: str
    file: Path
    """Where they are kept."""


def reference_features(
    images: Images | Stream | Tensor,
    network: FeatureNetwork,
    *,
    name: str,
    cache: Path | None = None,
    batch: int | None = None,
) -> Reference:
    """The features of uint8 ``images`` and their mean and covariance, from the folder ``cache`` if they are there.

    The file is called after ``name``, the network, and a hash of the pixels, the network's weights and its
    preprocessing, so that what changes the features changes the file. The default folder is "features" in the cache
    folder. A damaged file is computed again. A `Stream` is decoded for the checksum and once more for the features.
    """
    data = pixels_sha256(images)
    identity = {
        "data_sha256": data,
        "network": network.name,
        "network_sha256": network.sha256,
        "preprocessing": network.preprocessing,
    }
    key = hashlib.sha256("\n".join(identity.values()).encode()).hexdigest()
    folder = cache_folder() / "features" if cache is None else Path(cache)
    file = folder / f"{_readable(name)}-{_readable(network.name)}-{key[:16]}.npz"
    if file.exists():
        try:
            return _read(file, identity)
        except InputError:
            print(f"{file} is damaged: its features are computed again", file=sys.stderr)
    with writing("cache", folder, "give a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)  # now, for computing features may take an hour
    with progress_bar(f"{network.name} features of {name}", "images") as progress:
        features = compute_features(network, images, batch=batch, progress=progress)
    mu, sigma = statistics(features)
    arrays = {"mu": mu.numpy(), "sigma": sigma.numpy(), "features": features.numpy()}
    with writing("cache", folder, "make room or give another folder"):
        replace_npz(file, arrays | {key: np.array(text) for key, text in identity.items()})
    return Reference(features, mu, sigma, data, file)


def load_statistics(path: Path) -> tuple[Tensor, Tensor]:
    """``mu`` [D] and ``sigma`` [D, D] in float64 of an npz that any FID tool wrote."""
    found = read_npz(Path(path), ["mu", "sigma"], "give a whole npz with both")
    mu, sigma = found["mu"], found["sigma"]
    if mu.ndim != 1 or mu.size == 0 or sigma.shape != (mu.size, mu.size):
        raise InputError(f"{str(path)!r} has mu of shape {mu.shape} and sigma of {sigma.shape}: give [D] and [D, D].")
    if not all(np.issubdtype(array.dtype, np.floating) and np.isfinite(array).all() for array in (mu, sigma)):
        raise InputError(f"{str(path)!r} has a mu or sigma that is not of finite floats: compute it again.")
    return torch.from_numpy(mu.astype(np.float64)), torch.from_numpy(sigma.astype(np.float64))


def pixels_sha256(images: Images | Stream | Tensor) -> str:
    """The checksum of the shape and of all pixels as uint8, whatever they are stored as."""
    pixels = images.pixels if isinstance(images, Images) else images
    digest = hashlib.sha256(repr(tuple(pixels.shape)).encode())
    for start in range(0, len(pixels), CHUNK):
        part = pixels.index_select(0, torch.arange(start, min(start + CHUNK, len(pixels))))
        digest.update(quantise(part).cpu().numpy().tobytes())
    return digest.hexdigest()


def _read(file: Path, identity: dict[str, str]) -> Reference:
    found = read_npz(file, ["features", "mu", "sigma", *identity], "remove it")
    if any(found[key].shape != () or str(found[key]) != text for key, text in identity.items()):
        raise InputError(f"{str(file)!r} holds other features: remove it.")
    features, mu, sigma = (torch.from_numpy(found[key]) for key in ("features", "mu", "sigma"))
    return Reference(as_features(features, "features"), mu, sigma, identity["data_sha256"], file)


def _readable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "data"
