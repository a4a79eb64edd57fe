"""What step k draws, as a function of (seed, k) alone: which images, cut where, and a generator for each.

A process that trains images 32 … 63 of the batch asks for those and gets what one process alone would have used.
"""

from functools import lru_cache

import torch
from torch import Tensor

from nidiff.data.crops import Crops
from nidiff.data.dataset import Dataset
from nidiff.randomness import mixed_seed, permutation


def image_indices(seed: int, total: int, start: int, count: int) -> Tensor:
    """Positions start … start + count − 1 of an endless sequence of permutations of ``total`` images."""
    epochs = range(start // total, (start + count - 1) // total + 1)
    endless = torch.cat([_order(seed, epoch, total) for epoch in epochs])
    first = start - epochs[0] * total
    return endless[first : first + count]


def spread(total: int, count: int) -> Tensor:
    """``count`` of ``total`` rows, or all if there are fewer, spread over them."""
    return torch.linspace(0, total - 1, min(total, count), dtype=torch.float64).long()


def image_generators(
    seed: int, step: int, start: int, count: int, device: torch.device | str = "cpu"
) -> list[torch.Generator]:
    """A generator for each of the images start … start + count − 1 of the batch of a step."""
    return [torch.Generator(device).manual_seed(mixed_seed(seed, step, image)) for image in range(start, start + count)]


def crop_places(data: Dataset, generators: list[torch.Generator]) -> Tensor | None:
    """Where the crop of each of some images begins [B, axes], each by its generator; None where nothing is cropped."""
    return data.values.random_places(len(generators), generators) if isinstance(data.values, Crops) else None


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, total: int) -> Tensor:
    return permutation(total, torch.Generator().manual_seed(mixed_seed(seed, epoch)))
