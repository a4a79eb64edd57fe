"""What a step of a sampler gets, what a sampler is, and the loop that takes its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.diffusion.spacing import Spacing


class Past(NamedTuple):
    """The step before this one: its level, its state and its x̂0."""

    level: Level
    x0: Tensor
    x: Tensor


@dataclass
class Chain:
    """One walk from noise to data: the denoiser, a source of coloured noise like x, and the step before this one."""

    denoiser: Denoiser
    noise: Callable[[], Tensor]
    previous: Past | None = None


class Visit(NamedTuple):
    """What a callback gets at each level, before the step that leaves it."""

    step: int  # from 1 to num_steps
    num_steps: int
    level: Level
    x: Tensor  # the state at ``level``
    x0: Tensor  # and the clean image expected from it


# (chain, x, x̂0 at x, here, there, **options) -> x at the level ``there``, which has less noise than ``here``.
Step = Callable[..., Tensor]


class Sampler(NamedTuple):
    """A step, and the levels to visit by default."""

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
    max_loss: float | None = None
    """How much that may lose, in nats per dimension; None: `nidiff.sampling.warm.MAX_LOSS`."""


def moved(denoiser: Denoiser, x: Tensor, pull: Tensor | None, last: bool) -> Tensor:
    """x after a step, and after what an observation adds to it (`Denoiser.pulled`); an image stays in its range."""
    if pull is None:
        return x
    return (x + pull).clamp(-denoiser.clip, denoiser.clip) if last and denoiser.clip is not None else x + pull


def run_chain(
    chain: Chain,
    x: Tensor,
    levels: Sequence[Level],
    sampler: Sampler,
    options: dict[str, Any],
    *,
    denoise: bool = True,
    callback: Callable[[Visit], None] | None = None,
) -> Tensor:
    """Take x from the first of ``levels`` to the last and, to ``denoise``, from there to the clean image."""
    levels = [*levels, levels[-1]] if sampler.settles else levels
    for index, here in enumerate(levels):
        last = index == len(levels) - 1
        if last and not denoise:
            break
        x0, pull = chain.denoiser.pulled(x, here)
        if callback is not None:
            callback(Visit(index + 1, len(levels), here, x, x0))
        there = CLEAN if last else levels[index + 1]
        past = Past(here, x0, x)
        x = x0 if last and not sampler.finishes else sampler.step(chain, x, x0, here, there, **options)
        x = moved(chain.denoiser, x, pull, last)
        chain.previous = past
    return x
