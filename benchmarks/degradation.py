"""Does the Fréchet distance grow as images get worse? CIFAR-10 with blur, noise and JPEG of rising strength.

Prints the distance of a random subset of the training images to the 10 000 test images, then that of the same subset
damaged, and its ratio to the first. In each family it must rise with the strength: if it does not, the exit code is 1.
Features are cached set by set, so an interrupted run goes on where it was.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from timing import log
from torch import Tensor

from nidiff.data.dataset import quantise
from nidiff.data.load import load_dataset
from nidiff.design.distance import as_pixels
from nidiff.evaluation.features import FeatureNetwork, load_features, reference_features
from nidiff.evaluation.frechet import frechet_distance
from nidiff.randomness import permutation, white_noise

SEED = 0


class Row(NamedTuple):
    """The distances of one set of images, by the name of the features."""

    family: str
    strength: float
    distances: dict[str, float]


def blur(pixels: Tensor, sigma: float) -> Tensor:
    """A Gaussian of standard deviation ``sigma`` pixels, cut off at 4 σ, edges reflected."""
    radius = int(4 * sigma + 0.5)
    kernel = torch.exp(-torch.arange(-radius, radius + 1).float().square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(pixels.shape[1], 1, 1, -1)
    padded = torch.nn.functional.pad(as_pixels(pixels), (radius,) * 4, mode="reflect")
    rows = torch.nn.functional.conv2d(padded, kernel, groups=pixels.shape[1])
    return quantise(torch.nn.functional.conv2d(rows, kernel.mT, groups=pixels.shape[1]))


def noise(pixels: Tensor, std: float) -> Tensor:
    """White noise of standard deviation ``std``, of 255, the same draw for every strength."""
    draw = white_noise(pixels.shape, torch.Generator().manual_seed(SEED))
    return quantise(as_pixels(pixels) + draw * (std / 127.5))


def jpeg(pixels: Tensor, loss: float) -> Tensor:
    """Written as JPEG of quality 100 − ``loss`` (Pillow, colours at half the resolution) and read again."""
    damaged = torch.empty_like(pixels)
    for image, new in zip(pixels.permute(0, 2, 3, 1).numpy(), damaged, strict=True):
        file = BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=100 - int(loss), subsampling="4:2:0")
        new.copy_(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1))
    return damaged


FAMILIES: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, float, float]]] = {
    "blur, sigma in pixels": (blur, (0.5, 1, 2)),
    "white noise, std of 255": (noise, (8, 16, 32)),
    "JPEG, 100 - quality": (jpeg, (20, 50, 80)),
}


def measure(networks: list[FeatureNetwork], data_dir: Path | None, count: int, cache: Path | None) -> Iterator[Row]:
    """A row for the subset as it is, and one for each damage."""
    train, test = (load_dataset("cifar10", split=split, data_dir=data_dir).values for split in ("train", "test"))
    assert isinstance(train, Tensor)
    assert isinstance(test, Tensor)
    subset = train[permutation(len(train), torch.Generator().manual_seed(SEED))[:count]]

    def features(network: FeatureNetwork, pixels: Tensor, name: str) -> Tensor:
        return reference_features(pixels, network, name=name, cache=cache).features

    def row(family: str, strength: float, pixels: Tensor) -> Row:
        name = f"cifar10 {count} {family.split(',')[0]} {strength:g}"
        found = {net.name: frechet_distance(features(net, pixels, name), real[net.name]) for net in networks}
        log(f"{family} {strength:g}: " + ", ".join(f"{label} {value:.4f}" for label, value in found.items()))
        return Row(family, strength, found)

    log("test images")
    real = {network.name: features(network, test, "cifar10 test") for network in networks}
    yield row("as it is", 0, subset)
    for family, (damage, strengths) in FAMILIES.items():
        for strength in strengths:
            yield row(family, strength, damage(subset, strength))


def monotone(rows: list[Row], label: str) -> dict[str, bool]:
    """For each family, whether the distance rises from the images as they are to the strongest damage."""
    found = {}
    for family in FAMILIES:
        values = [row.distances[label] for row in rows if row.family in ("as it is", family)]
        found[family] = all(a < b for a, b in pairwise(values))
    return found


def report(rows: list[Row], options: argparse.Namespace, labels: list[str]) -> None:
    if options.json:
        settings = {"torch": torch.__version__, "count": options.count, "seed": SEED}
        verdict = {label: monotone(rows, label) for label in labels}
        print(json.dumps(settings | {"rows": [row._asdict() for row in rows], "monotone": verdict}, indent=2))
        return
    print(f"torch {torch.__version__}; {options.count} training images (seed {SEED}) against the 10000 test images")
    print(f"  {'':<24} {'':>5}" + "".join(f" {label:>24} {'ratio':>8}" for label in labels))
    for row in rows:
        cells = (f" {row.distances[a]:>24.4f} {row.distances[a] / rows[0].distances[a]:>8.2f}" for a in labels)
        print(f"  {row.family:<24} {row.strength:>5g}" + "".join(cells))
    for label in labels:
        print(f"{label} rises in " + ", ".join(f"{key}: {value}" for key, value in monotone(rows, label).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, default=None, help="where the binary files of CIFAR-10 are")
    parser.add_argument("--count", type=int, default=5000, help="number of training images")
    parser.add_argument("--features", nargs="+", default=["efficientnet-lite0"], help="one column each")
    parser.add_argument("--cache", type=Path, default=None, help="folder of the features; default: nidiff's cache")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    networks = [load_features(name) for name in options.features]
    rows = list(measure(networks, options.data_dir, options.count, options.cache))
    labels = [network.name for network in networks]
    report(rows, options, labels)
    sys.exit(0 if all(all(monotone(rows, label).values()) for label in labels) else 1)


if __name__ == "__main__":
    main()
