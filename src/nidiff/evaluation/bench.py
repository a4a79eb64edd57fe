"""What generated images are compared with, and how: one place for the numbers and for where they come from."""

import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nidiff
from nidiff.data.images import Images, quantise
from nidiff.errors import InputError
from nidiff.evaluation.cache import pixels_sha256, reference_features
from nidiff.evaluation.features import FeatureNetwork, load_features
from nidiff.evaluation.metrics import ImageSet, measure
from nidiff.evaluation.results import Measured
from nidiff.training.experiment import Experiment, read_experiment


@dataclass(frozen=True)
class Bench:
    """Real images (uint8 [N, C, H, W]) called ``name``, and the settings of the metrics."""

    pixels: Tensor
    name: str
    network: FeatureNetwork
    k: int = 3
    bootstrap: int = 20

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        """Refuse images that cannot be compared, before they are drawn."""
        mine, other = (" × ".join(map(str, one)) for one in (self.pixels.shape[1:], shape))
        if mine != other:
            raise InputError(f"the images to compare are {other} and those of {self.name} {mine}: give data like them.")
        if self.bootstrap < 0 or self.bootstrap == 1:
            raise InputError(f"bootstrap={self.bootstrap} gives no error: use 2 resamples or more, or 0 for none.")
        if self.k < 1:
            raise InputError(f"k={self.k} is not a neighbour: use 1 or more, such as 3.")
        for which, count in (("real", len(self.pixels)), ("generated", num_generated)):
            if count <= self.k:
                raise InputError(f"there are {count} {which} images, and k={self.k} needs k + 1: add some, or lower k.")

    @cached_property
    def real(self) -> ImageSet:
        return self._images(self.pixels, self.name)

    @cached_property
    def _data_sha256(self) -> str:
        return pixels_sha256(self.pixels)

    def provenance(self, num_generated: int) -> dict[str, Any]:
        return {
            "features": self.network.name,
            "features_sha256": self.network.sha256,
            "preprocessing": self.network.preprocessing,
            "real": self.name,
            "real_sha256": self._data_sha256,
            "num_real": len(self.pixels),
            "num_generated": num_generated,
            "k": self.k,
            "bootstrap": self.bootstrap,
            "quantisation": "uint8",
            "nidiff": nidiff.__version__,
            "commit": _commit(),
            "torch": torch.__version__,
        }

    def measure(self, generated: Tensor, features: Path | None = None) -> dict[str, Measured]:
        """The metrics of uint8 images; their features are kept in the folder ``features``."""
        images = self._images(generated, "generated", features)
        return measure(self.real, images, self.network.name, bootstrap=self.bootstrap)

    def _images(self, pixels: Tensor, name: str, cache: Path | None = None) -> ImageSet:
        features = reference_features(pixels, self.network, name=name, cache=cache).features
        if bool((features == features[0]).all()):
            raise InputError(f"the features of the {name} images are constant: give images that differ.")
        return ImageSet(pixels, features, self.k)


def open_bench(
    run: Path,
    data: str | Images | Tensor | None = None,
    *,
    data_dir: Path | None = None,
    split: str = "train",
    num_real: int | None = None,
    features: str | Path = "efficientnet-lite0",
    features_file: Path | None = None,
    k: int = 3,
    bootstrap: int = 20,
) -> Bench:
    """What to compare the images of ``run`` with: the arguments are the flags of ``nidiff evaluate``.

    ``data`` may also be images themselves, uint8 or floats in [-1, 1]; what it names is fitted as the data of the run.
    """
    network = load_features(features, file=features_file)
    images, name = (data, "images") if isinstance(data, Tensor | Images) else _load(run, data, data_dir, split)
    pixels = all_pixels(images)
    if num_real is not None:
        if not 1 <= num_real <= len(pixels):
            raise InputError(f"num_real={num_real} must be from 1 to {len(pixels)}, the images of {name}.")
        pixels = pixels[torch.linspace(0, len(pixels) - 1, num_real, dtype=torch.float64).long()]
    return Bench(pixels, name, network, k, bootstrap)


def all_pixels(images: Images | Tensor) -> Tensor:
    """Images as uint8 [N, C, H, W], as if they were saved."""
    pixels = images.pixels if isinstance(images, Images) else images
    return quantise(pixels if isinstance(pixels, Tensor) else pixels.index_select(0, torch.arange(len(pixels))))


def _load(run: Path, data: str | None, data_dir: Path | None, split: str) -> tuple[Images, str]:
    has_experiment = (run / "experiment.json").is_file()
    if data is None and not has_experiment:
        raise InputError(f"data is missing: {str(run)!r} is not a run that says what it was trained on.")
    source = read_experiment(run) if has_experiment else Experiment()
    if data is not None or data_dir is not None:
        source = replace(source, data=source.data if data is None else data, data_dir=data_dir)
    images = source.load_data(split=split, memory_limit=None)
    return images, source.data if split == "train" else f"{source.data}, {split}"


def _commit() -> str | None:
    """The commit of the checkout that nidiff runs from, marked where it was changed; None where it was installed."""
    root = Path(nidiff.__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
