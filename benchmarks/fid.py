"""Is our FID the FID of others? CIFAR-10 through our Inception and the TorchScript one, and what FID says of images.

agreement  FID of training against test images by both networks, and how far their features are apart
floor      FID of the training images against the test images, all of them: what a perfect model would have
damage     FID of training images against themselves blurred, and shifted; it must rise with the strength

Features are stored as they are computed, so a run that was stopped goes on where it was. The exit code is 1 if the
networks disagree or damage goes unseen.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from degradation import blur
from timing import log
from torch import Tensor

from nidiff.data.load import load_dataset
from nidiff.evaluation import inception
from nidiff.evaluation.features import FeatureNetwork, load_features, reference_features
from nidiff.evaluation.frechet import frechet_distance
from nidiff.extras import package_file

COUNTS = {"agreement": 2000, "floor": 50_000, "damage": 2000}  # training images; test images are as many, up to 10,000
CLOSE = 1e-3  # FIDs that differ by no more than this share agree


def shift(pixels: Tensor, strength: float) -> Tensor:
    """Moved to the right by so many pixels; the left edge is repeated."""
    return pixels[..., (torch.arange(pixels.shape[-1]) - int(strength)).clamp(min=0)]


DAMAGES: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "blur, sigma in pixels": (blur, (0.5, 1, 2)),
    "shift, pixels": (shift, (1, 2, 4)),
}


class Bench:
    """The images, the recipe, and where features are stored."""

    def __init__(self, options: argparse.Namespace) -> None:
        splits = (load_dataset("cifar10", split=split, data_dir=options.data_dir).values for split in ("train", "test"))
        self.train, self.test = map(torch.as_tensor, splits)
        self.cache, self.network = options.cache, load_features(options.features, file=options.features_file)
        self.file = options.features_file or package_file(inception.PACKAGE, inception.FILE)

    def features(self, pixels: Tensor, name: str, network: FeatureNetwork | None = None) -> Tensor:
        start = time.perf_counter()
        found = reference_features(pixels, network or self.network, name=f"cifar10 {name}", cache=self.cache).features
        log(f"{(network or self.network).name}, {name}: {len(found)} images in {time.perf_counter() - start:.1f} s")
        return found

    def torchscript(self) -> FeatureNetwork:
        """The program in the file of weights, which only this benchmark and a test run: its checksum was compared."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(self.file, map_location=self.network.device).eval()
        recipe = inception.RECIPES[self.network.name]
        about = (f"torchscript {self.network.name}", self.network.sha256, recipe.text, self.network.device)
        return FeatureNetwork(*about, lambda pixels: module(recipe.prepare(pixels)))

    def agreement(self, count: int) -> dict[str, Any]:
        both = {"ours": self.network, "torchscript": self.torchscript()}
        sets = {"train": self.train[:count], "test": self.test[:count]}
        found = {who: [self.features(sets[name], name, net) for name in sets] for who, net in both.items()}
        values = {who: frechet_distance(*pair) for who, pair in found.items()}
        apart = max((a - b).abs().max().item() for a, b in zip(found["ours"], found["torchscript"], strict=True))
        largest = max(features.abs().max().item() for features in found["torchscript"])
        ratio = abs(values["ours"] / values["torchscript"] - 1)
        about = {"FID": values, "features_apart": apart, "largest_feature": largest}
        return about | {"relative_difference": ratio, "passed": ratio < CLOSE}

    def floor(self, count: int) -> dict[str, Any]:
        sets = {"train": self.train[:count], "test": self.test[:count]}
        value = frechet_distance(*(self.features(pixels, name) for name, pixels in sets.items()))
        return {"FID": value, "images": {name: len(pixels) for name, pixels in sets.items()}, "passed": True}

    def damage(self, count: int) -> dict[str, Any]:
        subset = self.train[:count]
        real, found = self.features(subset, "train"), {}
        for family, (function, strengths) in DAMAGES.items():
            names = {strength: f"train {family.split(',')[0]} {strength:g}" for strength in strengths}
            damaged = {s: self.features(function(subset, s), name) for s, name in names.items()}
            found[family] = {strength: frechet_distance(real, features) for strength, features in damaged.items()}
        rises = all(a < b for values in found.values() for a, b in pairwise([0.0, *values.values()]))
        return {"FID": found, "passed": rises}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(COUNTS)}; default: all")
    parser.add_argument("--data-dir", type=Path, default=None, help="where the binary files of CIFAR-10 are")
    parser.add_argument("--count", type=int, default=None, help=f"training images; default: {COUNTS}")
    parser.add_argument("--features", choices=[*inception.RECIPES], default="inception")
    parser.add_argument("--features-file", type=Path, default=None, help=f"{inception.ORIGIN}; default: the package's")
    parser.add_argument("--cache", type=Path, default=None, help="folder of the features; default: nidiff's cache")
    options = parser.parse_args()
    parts = options.parts or [*COUNTS]
    if unknown := {*parts} - {*COUNTS}:
        parser.error(f"unknown part {', '.join(unknown)}")
    bench, passed = Bench(options), True
    settings = {"torch": torch.__version__, "threads": torch.get_num_threads(), "recipe": bench.network.preprocessing}
    for part in parts:
        count = options.count or COUNTS[part]
        found = getattr(bench, part)(count)
        print(json.dumps({"part": part, "count": count} | found | settings, ensure_ascii=False), flush=True)
        passed &= found["passed"]
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
