"""The only place where random numbers are drawn.

Every function takes a ``generator``: None (torch's global one), a seed or a `torch.Generator` for the whole batch, or a
list of seeds or generators with one per image. With a list, what image i gets depends on its generator alone, whatever
the size of the batch.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.recipe import check_whole, plain

Generators = torch.Generator | int | Sequence[torch.Generator | int] | None
LARGEST_SEED = 2**63 - 1  # that torch takes
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def as_generator(generator: Generators, batch: int | None = None) -> torch.Generator | list[torch.Generator] | None:
    """``generator`` with seeds turned into generators on the CPU. Whoever draws more than once does this first.

    A list must have ``batch`` entries, and its seeds must differ.
    """
    generator = plain(generator)
    if generator is None or isinstance(generator, torch.Generator):
        return generator
    if isinstance(generator, int):
        return torch.Generator("cpu").manual_seed(check_whole("generator", generator, 0, LARGEST_SEED))
    entries = [plain(entry) for entry in generator]
    if batch is not None and (len(entries) != batch or not entries):
        raise InputError("generator", None, f"is a list of {len(entries)} for {batch} images", "give one per image")
    if all(isinstance(entry, torch.Generator) for entry in entries):
        return entries
    return generators_from_seeds(entries)


def generators_from_seeds(seeds: Sequence[int], argument: str = "generator") -> list[torch.Generator]:
    """One generator per seed. Seeds must be distinct and in [0, 2⁶³)."""
    numbers = [check_whole(argument, seed, 0, LARGEST_SEED) for seed in seeds]
    repeated = next((number for number, count in Counter(numbers).items() if count > 1), None)
    if repeated is not None:
        raise InputError(argument, repeated, "occurs twice, which would give the same image twice", "use other seeds")
    return [torch.Generator("cpu").manual_seed(number) for number in numbers]


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers: different numbers give unrelated seeds."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_place(dtype: torch.dtype, device: torch.device | str | None) -> None:
    """Refuse a dtype that cannot hold noise, and a device that is not there."""
    if dtype not in FLOATS:
        raise InputError("dtype", dtype, "cannot hold noise", f"use {', '.join(map(str, FLOATS))}")
    reason: Exception | None = None
    try:
        usable = device is None or not torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        usable, reason = False, error
    if not usable:
        raise InputError(
            "device", device, "cannot be used", "give one that this machine has, such as 'cpu'"
        ) from reason


def white_noise(
    shape: Sequence[int],
    generator: Generators = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """N(0, I) of ``shape``. Drawn where the generator lives, then moved to ``device`` (default: left there)."""
    source = as_generator(generator, shape[0] if len(shape) else 0)
    if isinstance(source, list):
        noise = torch.empty(tuple(shape), dtype=dtype, device=source[0].device)
        for image, generator_of_image in zip(noise.unbind(), source, strict=True):
            image.normal_(generator=generator_of_image)
    else:
        noise = torch.randn(tuple(shape), generator=source, dtype=dtype, device=source.device if source else device)
    return noise if device is None else noise.to(device)


def random_index(
    high: int, batch: int, generator: Generators = None, *, device: torch.device | str | None = None
) -> Tensor:
    """``batch`` integers, uniform on 0 … high - 1."""
    return _draw(lambda count, **place: torch.randint(high, (count,), **place), batch, generator, device)


def uniform(batch: int, generator: Generators = None, *, device: torch.device | str | None = None) -> Tensor:
    """``batch`` numbers, uniform on [0, 1)."""
    return _draw(torch.rand, batch, generator, device)


def permutation(count: int, generator: torch.Generator | int | None = None) -> Tensor:
    """0 … count - 1 in random order, on the device of the generator."""
    source = as_generator(generator)
    assert not isinstance(source, list)
    return torch.randperm(count, generator=source, device=source.device if source else "cpu")


def _draw(
    function: Callable[..., Tensor], batch: int, generator: Generators, device: torch.device | str | None
) -> Tensor:
    source = as_generator(generator, batch)
    if isinstance(source, list):
        values = torch.cat([function(1, generator=each, device=each.device) for each in source])
    else:
        values = function(batch, generator=source, device=source.device if source else device)
    return values if device is None else values.to(device)
