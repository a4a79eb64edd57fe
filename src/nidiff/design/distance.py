"""Distances between images in whitened coordinates, ‖Σ^-½ (x_i − x_j)‖: the initial noise scale (appendix E.8, E29)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError
from nidiff.precision import with_float64
from nidiff.progress import Progress
from nidiff.randomness import Generators, white_noise
from nidiff.recipe import check_number, check_whole

CHUNK = 1024  # images at a time
SUBSET = 2048  # images whose pairs stand for all pairs


class Farthest(NamedTuple):
    """The two images that are farthest apart."""

    distance: float
    pair: tuple[int, int]


def max_whitened_distance(images: Tensor, covariance: Covariance, *, progress: Progress | None = None) -> Farthest:
    """The largest ‖Σ^-½(x_i − x_j)‖ over all pairs, exactly, and the pair.

    The whitened images are sorted by their distance from the mean. Since ‖a − b‖ ≤ ‖a‖ + ‖b‖, the blocks that cannot
    hold the maximum are left out: often nearly all. The pair is found in float32, which tells apart all but the closest
    ties, and its distance is then computed in float64.
    """
    images = _checked_images(images, covariance)
    report, total = progress or (lambda done, total: None), len(images) * (len(images) - 1) // 2
    report(0, total)
    whiten = Whitener(images, covariance)
    white = whiten.all(images)
    lengths, order = white.norm(dim=1).sort(descending=True)
    norms, best, pair = lengths.tolist(), -1.0, (0, 1)
    for start in range(0, len(white), CHUNK):
        if 2 * norms[start] <= best:
            break
        left = white[order[start : start + CHUNK]]
        for other in range(start, len(white), CHUNK):
            if norms[start] + norms[other] <= best:
                break
            right = white[order[other : other + CHUNK]]
            apart = torch.cdist(left, right)
            if other == start:
                apart.fill_diagonal_(-1.0)
            if (largest := apart.max().item()) > best:
                i, j = divmod(int(apart.argmax()), len(right))
                best, pair = largest, (int(order[start + i]), int(order[other + j]))
        seen = min(start + CHUNK, len(white))
        report(seen * (2 * len(white) - seen - 1) // 2, total)
    report(total, total)
    first, second = sorted(pair)
    difference = as_pixels(images[first]).double() - as_pixels(images[second]).double()
    # Divided by its size: the squares of small numbers are 0, those of large ones infinite.
    distance = covariance.inv_sqrt(difference / whiten.spread).norm().item() * whiten.spread
    return Farthest(distance, (first, second))


def batch_whitened_distance(
    images: Tensor,
    covariance: Covariance,
    *,
    batch_size: int = 128,
    generator: Generators = None,
    progress: Progress | None = None,
) -> float:
    """The largest ‖Σ^-½(x_i − x_j)‖ within a mini-batch, over the batches of one shuffled epoch."""
    images = _checked_images(images, covariance)
    batch_size = check_whole("batch_size", batch_size, least=2)
    whiten = Whitener(images, covariance)
    epoch = random_subset(torch.arange(len(images)), len(images), generator)
    batches = [batch for batch in epoch.split(batch_size) if len(batch) > 1]
    total, done, best = sum(len(batch) * (len(batch) - 1) // 2 for batch in batches), 0, 0.0
    for batch in batches:
        distances = torch.pdist(whiten(images[batch]))
        done, best = done + len(distances), max(best, distances.max().item())
        if progress is not None:
            progress(done, total)
    return best * whiten.unit


def quantile_whitened_distance(
    images: Tensor, covariance: Covariance, *, quantile: float = 0.99, generator: Generators = None
) -> float:
    """The quantile of ‖Σ^-½(x_i − x_j)‖ over the pairs of at most 2048 random images."""
    check_number("quantile", quantile, most=1.0, above=0.0)
    distances = sampled_distances(images, covariance, generator=generator)
    return distances.kthvalue(math.ceil(quantile * len(distances))).values.item()


def sampled_distances(
    images: Tensor, covariance: Covariance, *, num_images: int = SUBSET, generator: Generators = None
) -> Tensor:
    """‖Σ^-½(x_i − x_j)‖ of all pairs of at most ``num_images`` random images, as one column."""
    images = _checked_images(images, covariance)
    subset = random_subset(images, check_whole("num_images", num_images, least=2), generator)
    whiten = Whitener(subset, covariance)
    return torch.pdist(whiten.all(subset)).double() * whiten.unit


def random_subset(images: Tensor, count: int, generator: Generators = None) -> Tensor:
    """At most ``count`` of the images, without replacement."""
    order = white_noise((len(images),), generator, dtype=torch.float64).argsort()
    return images[order[:count]]


def as_pixels(images: Tensor) -> Tensor:
    """Images as floats: uint8 becomes [-1, 1], floats stay."""
    return PIXELS.to_model(images) if images.dtype == torch.uint8 else images


def _checked_images(images: Tensor, covariance: Covariance) -> Tensor:
    """Two images or more, where float64 is."""
    covariance.require_invertible("the whitened distance of images")
    covariance.check_trailing(images.shape[1:], "images")
    if len(images) < 2 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        problem = f"has shape {tuple(images.shape)} and dtype {images.dtype}"
        raise InputError("images", None, problem, "give two images or more, as uint8 or floats")
    return with_float64(images)


class Whitener:
    """Σ^-½ x of images as float32 rows of ordinary size, less their mean: ``unit`` times their distances is in x.

    Without that, images of extreme scale leave the range of float32 when squared, and images that share a large offset
    differ by less than it resolves.
    """

    def __init__(self, images: Tensor, covariance: Covariance) -> None:
        self.covariance = covariance.normalized()
        pixels = [as_pixels(chunk.detach()) for chunk in images.split(CHUNK)]
        self.mean = torch.stack([(chunk.double() / len(images)).sum(0) for chunk in pixels]).sum(0)
        largest = max((chunk.double() - self.mean).abs().max().item() for chunk in pixels)
        if not math.isfinite(largest):
            raise InputError("images", None, "has NaN, infinite or overflowing pixels", "remove those images")
        self.spread = max(largest, torch.finfo(torch.float64).tiny)
        self.unit = self.spread / math.sqrt(covariance.eigenvalues.mean().item())

    def __call__(self, images: Tensor) -> Tensor:
        pixels = (as_pixels(images.detach()).double() - self.mean) / self.spread
        return self.covariance.inv_sqrt(pixels.float()).flatten(1)

    def all(self, images: Tensor) -> Tensor:
        """The same in chunks, less the mean of the rows: differences of small numbers lose less to rounding."""
        white = torch.cat([self(chunk) for chunk in images.split(CHUNK)])
        return white.sub_(white.mean(0))
