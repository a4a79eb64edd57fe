"""Distances between images in whitened coordinates, ‖Σ^-½ (x_i − x_j)‖: the initial noise scale (appendix E.8, E29)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError
from nidiff.progress import Progress
from nidiff.randomness import Generators, white_noise
from nidiff.recipe import check_whole

CHUNK = 1024  # images at a time
SUBSET = 2048  # images whose pairs stand for all pairs


class Farthest(NamedTuple):
    """The two images that are farthest apart."""

    distance: float
    pair: tuple[int, int]


def max_whitened_distance(images: Tensor, covariance: Covariance, *, progress: Progress | None = None) -> Farthest:
    """The largest ‖Σ^-½(x_i − x_j)‖ over all pairs, exactly, and the pair.

    ‖a − b‖² = ‖a‖² + ‖b‖² − 2ab in blocks of the whitened images, sorted by their distance from the mean. Since
    ‖a − b‖ ≤ ‖a‖ + ‖b‖, the blocks that cannot hold the maximum are left out: often nearly all. The pair is found in
    float32, which tells apart all but the closest ties, and its distance is then computed in float64.
    """
    _check_images(images, covariance)
    report, total = progress or (lambda done, total: None), len(images) * (len(images) - 1) // 2
    report(0, total)
    whiten = Whitener(images, covariance)
    white = whiten.all(images)
    lengths, order = white.norm(dim=1).sort(descending=True)
    squares, norms = lengths.square(), lengths.tolist()
    best, pair = -1.0, (0, 1)
    for start in range(0, len(white), CHUNK):
        if 2 * norms[start] <= best:
            break
        left = white[order[start : start + CHUNK]]
        for other in range(start, len(white), CHUNK):
            if norms[start] + norms[other] <= best:
                break
            right = white[order[other : other + CHUNK]]
            gram = left @ right.T
            gram.mul_(-2).add_(squares[start : start + CHUNK, None]).add_(squares[other : other + CHUNK])
            if other == start:
                gram.fill_diagonal_(-1.0)
            largest, place = gram.max().item(), int(gram.argmax())
            if largest > best**2 or best < 0:
                i, j = divmod(place, len(right))
                best, pair = math.sqrt(max(largest, 0.0)), (int(order[start + i]), int(order[other + j]))
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
    _check_images(images, covariance)
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
    if not 0 < quantile <= 1:
        raise InputError("quantile", quantile, "is out of range", "choose one above 0 and at most 1, such as 0.99")
    distances = sampled_distances(images, covariance, generator=generator)
    return distances.kthvalue(math.ceil(quantile * len(distances))).values.item()


def sampled_distances(
    images: Tensor, covariance: Covariance, *, num_images: int = SUBSET, generator: Generators = None
) -> Tensor:
    """‖Σ^-½(x_i − x_j)‖ of all pairs of at most ``num_images`` random images, as one column."""
    _check_images(images, covariance)
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


def _check_images(images: Tensor, covariance: Covariance) -> None:
    covariance.require_invertible("the whitened distance of images")
    axes, shape = len(covariance.event_shape), tuple(images.shape)
    if images.ndim <= axes or shape[-axes:] != covariance.event_shape:
        remedy = "give [N, ..., *event] or build the covariance for that shape"
        raise InputError(
            "images", None, f"has shape {shape}, but `covariance` is over {covariance.event_shape}", remedy
        )
    if len(images) < 2 or images.numel() == 0:
        raise InputError("images", None, f"has shape {shape}", "give two images or more, with pixels")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError("images", None, f"has dtype {images.dtype}", "give uint8 or floats")
    rows = (chunk.flatten(1) for chunk in images.split(CHUNK))
    if covariance.size > 1 and all(bool((pixels == pixels[:, :1]).all()) for pixels in rows):
        raise InputError("images", None, "are constant, one value everywhere", "give images that show something")


class Whitener:
    """Σ^-½ x of images as float32 rows of ordinary size, less their mean: ``unit`` times their distances is in x.

    Without that, images of extreme scale leave the range of float32 when squared, and images that share a large offset
    differ by less than it resolves.
    """

    def __init__(self, images: Tensor, covariance: Covariance) -> None:
        self.covariance = covariance.normalized()
        self.mean: Tensor | float = 0.0
        self.spread = 1.0
        if images.is_floating_point():
            chunks = images.detach().split(CHUNK)
            self.mean = torch.stack([(chunk.double() / len(images)).sum(0) for chunk in chunks]).sum(0)
            largest = max((chunk.double() - self.mean).abs().max().item() for chunk in chunks)
            if not math.isfinite(largest):
                raise InputError("images", None, "has NaN, infinite or overflowing pixels", "remove those images")
            self.spread = max(largest, torch.finfo(torch.float64).tiny)
        self.unit = self.spread / math.sqrt(covariance.eigenvalues.mean().item())

    def __call__(self, images: Tensor) -> Tensor:
        pixels = as_pixels(images.detach())
        if images.is_floating_point():
            pixels = ((pixels.double() - self.mean) / self.spread).float()
        return self.covariance.inv_sqrt(pixels).flatten(1)

    def all(self, images: Tensor) -> Tensor:
        """The same in chunks, less the mean of the rows: differences of small numbers lose less to rounding."""
        white = torch.empty(len(images), images[0].numel(), device=images.device)
        for chunk, target in zip(images.split(CHUNK), white.split(CHUNK), strict=True):
            target.copy_(self(chunk))
        return white.sub_(white.mean(0))
