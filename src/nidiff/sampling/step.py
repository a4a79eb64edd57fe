"""What a sampler step is given, and what a sampler is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import CLEAN, Level, Schedule


class Past(NamedTuple):
    """What the step before this one saw."""

    level: Level
    x0: Tensor  # its x̂0
    x: Tensor  # and the state it was at


@dataclass
class Chain:
    """One walk from noise to data: the denoiser, a source of coloured noise like x, and the step before this one."""

    denoiser: Denoiser
    noise: Callable[[], Tensor]
    previous: Past | None = None


# (chain, x, x̂0 at x, here, there, **options) -> x at the level ``there``, which has less noise than ``here``.
Step = Callable[..., Tensor]
# (schedule, count) -> the rows of the levels to visit, falling.
Spacing = Callable[[Schedule, int], list[int]]


class Sampler(NamedTuple):
    """How to get from one level to the next, and which levels to visit if nothing is said."""

    step: Step
    spacing: str | Spacing = "uniform"
    num_steps: int | None = None
    """How many levels, or all the schedule has if those are fewer; None: all of them."""
    settles: bool = False
    """Whether it also takes its step at the last level, to stay there."""

    finishes: bool = False
    """Whether it takes the step to the clean image itself; others end with x̂0 of the last level."""

    start: str = "prior"
    """Where it begins: "prior", or "gaussian", lower, from the Gaussian model of the data."""
    bound: float | None = None
    """How much that may lose, in nats per dimension; None: `nidiff.sampling.warm.BOUND`."""


def walk(
    chain: Chain,
    x: Tensor,
    levels: Sequence[Level],
    sampler: Sampler,
    options: dict[str, Any],
    *,
    denoise: bool = True,
    visit: Callable[[int, Level, Tensor, Tensor], None] | None = None,
) -> Tensor:
    """x at the first of ``levels`` taken to the last, and, to ``denoise``, from there to the clean image."""
    for index, here in enumerate(levels):
        last = index == len(levels) - 1
        if last and not denoise:
            break
        x0 = chain.denoiser(x, here)
        if visit is not None:
            visit(index, here, x, x0)
        there = CLEAN if last else levels[index + 1]
        seen = Past(here, x0, x)
        x = x0 if last and not sampler.finishes else sampler.step(chain, x, x0, here, there, **options)
        chain.previous = seen
    return x
