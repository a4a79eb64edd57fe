"""The only place where random numbers are drawn.

Every function takes a ``generator``: None (torch's global one), one `torch.Generator` for the whole batch, or a list
with one per image. With a list, what image i gets depends on its generator alone, whatever the size of the batch.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.errors import InputError, shown
from nidiff.recipe import check_whole

Generators = torch.Generator | Sequence[torch.Generator] | None
MOST_IMAGES, LARGEST_SEED = 10**9, 2**63 - 1  # in one batch; that torch takes
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def generators_from_seeds(seeds: Sequence[int], device: torch.device | str = "cpu") -> list[torch.Generator]:
    """One generator per seed. Seeds must be distinct and in [0, 2⁶³)."""
    try:
        given = [*seeds]
    except TypeError as error:
        raise InputError(f"seeds={shown(seeds)} must be a list of integers, one per image.") from error
    numbers = [check_whole("seeds", seed, 0, LARGEST_SEED) for seed in given]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number, count in Counter(numbers).items() if count > 1)
        raise InputError(f"seeds contains {twice} twice, which would give the same image twice: make them distinct.")
    return [torch.Generator(device).manual_seed(number) for number in numbers]


def check_place(dtype: Any, device: Any) -> None:
    """Refuse a dtype that cannot hold noise, and a device that is not there."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise InputError(f"dtype={shown(dtype)} cannot hold noise: use {', '.join(map(str, FLOATS))}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"device={shown(device)} cannot be used: give one that this machine has, such as 'cpu'."
        ) from error


def white_noise(
    shape: Sequence[int],
    generator: Generators = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """N(0, I) of ``shape``. Drawn where the generator lives, then moved to ``device`` (default: left there)."""
    _check_generators(generator, shape)
    if isinstance(generator, Sequence):
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
    _check_generators(generator, (check_whole("batch", batch, 0, MOST_IMAGES),))
    if isinstance(generator, Sequence):
        index = torch.cat([torch.randint(high, (1,), generator=g, device=g.device) for g in generator])
    else:
        source = device if generator is None else generator.device
        index = torch.randint(high, (batch,), generator=generator, device=source)
    return index if device is None else index.to(device)


def uniform(batch: int, generator: Generators = None, *, device: torch.device | str | None = None) -> Tensor:
    """``batch`` numbers, uniform on [0, 1)."""
    _check_generators(generator, (check_whole("batch", batch, 0, MOST_IMAGES),))
    if isinstance(generator, Sequence):
        numbers = torch.cat([torch.rand(1, generator=g, device=g.device) for g in generator])
    else:
        source = device if generator is None else generator.device
        numbers = torch.rand(batch, generator=generator, device=source)
    return numbers if device is None else numbers.to(device)


def _check_generators(generator: Generators, shape: Sequence[int]) -> None:
    if generator is None or isinstance(generator, torch.Generator):
        return
    if not isinstance(generator, Sequence) or not all(isinstance(one, torch.Generator) for one in generator):
        raise InputError(f"generator={shown(generator)} must be None, a torch.Generator, or a list of one per image.")
    if len(shape) == 0 or len(generator) != shape[0] or len(generator) == 0:
        images = shape[0] if len(shape) else 1
        raise InputError(f"generator is a list of {len(generator)} for {images} images: give one per image.")


def permutation(count: int, generator: torch.Generator | None = None) -> Tensor:
    """0 … count - 1 in random order, on the device of the generator."""
    return torch.randperm(count, generator=generator, device="cpu" if generator is None else generator.device)
