"""What a sampler step is given."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level


@dataclass
class Run:
    """One run of the sampling loop: the denoiser, a source of coloured noise like x, and the step before this one."""

    denoiser: Denoiser
    noise: Callable[[], Tensor]
    previous: tuple[Level, Tensor] | None = None  # the level of the last step and its x̂0


# (run, x, x̂0 at x, here, there, **options) -> x at the level ``there``, which has less noise than ``here``.
Step = Callable[..., Tensor]


def as_float(here: Level, there: Level) -> tuple[float, float, float, float]:
    """(signal, sigma, signal', sigma'): in sampling all images share a level."""
    return float(here.signal), float(here.sigma), float(there.signal), float(there.sigma)
