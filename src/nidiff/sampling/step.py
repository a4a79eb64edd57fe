"""What a sampler step is given, and what a sampler is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level, Schedule


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
