"""The only place where random numbers are drawn.

Every function takes a ``generator``: None (torch's global one), one `torch.Generator` for the whole batch, or a list
with one per image. With a list, what image i gets depends on its generator alone, whatever the size of the batch.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from nidiff.errors import InputError

Generators = torch.Generator | Sequence[torch.Generator] | None


def generators_from_seeds(seeds: Sequence[int], device: torch.device | str = "cpu") -> list[torch.Generator]:
    """One generator per seed. Seeds must be distinct and in [0, 2⁶³)."""
    for seed in seeds:
        if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= operator.index(seed) < 2**63:
            raise InputError(f"seeds must be integers from 0 to 2**63 - 1, but one is {seed!r}: leave it out.")
    seeds = [operator.index(seed) for seed in seeds]
    if len(set(seeds)) != len(seeds):
        twice = next(s for i, s in enumerate(seeds) if s in seeds[:i])
        raise InputError(f"seeds contains {twice} twice, which would give the same image twice: make them distinct.")
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


def white_noise(
    shape: Sequence[int],
    generator: Generators = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """N(0, I) of ``shape``. Drawn where the generator lives, then moved to ``device`` (default: left there)."""
    if isinstance(generator, Sequence):
        _check_one_per_image(generator, shape)
        noise = torch.empty(tuple(shape), dtype=dtype, device=generator[0].device)
        for image, own in zip(noise.unbind(), generator, strict=True):
            image.normal_(generator=own)
    else:
        source = device if generator is None else generator.device
        noise = torch.randn(tuple(shape), generator=generator, dtype=dtype, device=source)
    return noise if device is None else noise.to(device)


def random_index(
    high: int, batch: int, generator: Generators = None, *, device: torch.device | str | None = None
) -> Tensor:
    """``batch`` integers, uniform on 0 … high - 1."""
    if isinstance(generator, Sequence):
        _check_one_per_image(generator, (batch,))
        index = torch.cat([torch.randint(high, (1,), generator=g, device=g.device) for g in generator])
    else:
        source = device if generator is None else generator.device
        index = torch.randint(high, (batch,), generator=generator, device=source)
    return index if device is None else index.to(device)


def _check_one_per_image(generator: Sequence[torch.Generator], shape: Sequence[int]) -> None:
    if len(shape) == 0 or len(generator) != shape[0] or len(generator) == 0:
        images = shape[0] if len(shape) else 1
        raise InputError(f"generator is a list of {len(generator)} for {images} images: give one per image.")


def permutation(count: int, generator: torch.Generator | None = None) -> Tensor:
    """0 … count - 1 in random order, on the device of the generator."""
    return torch.randperm(count, generator=generator, device="cpu" if generator is None else generator.device)
