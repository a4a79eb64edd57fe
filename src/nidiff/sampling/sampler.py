"""The sampling loop, once, and the names of the steps it can take."""

import copy
import math
import operator
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level, Schedule
from nidiff.errors import InputError, one_of
from nidiff.randomness import Generators, generators_from_seeds
from nidiff.sampling.langevin import PREDICTORS, als, cas, predictor_corrector
from nidiff.sampling.step import Run, Step


class Sampler(NamedTuple):
    """How to get from one level to the next, and which levels to visit if nothing is said; one that ``settles`` also
    takes its step at the last level, to stay."""

    step: Step
    spacing: str = "uniform"
    settles: bool = False


class Progress(NamedTuple):
    """What ``callback`` is given at each level, before the step that leaves it."""

    step: int  # from 1 to num_steps
    num_steps: int
    level: Level
    x: Tensor  # the state at ``level``
    x0: Tensor  # and the clean image expected from it


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    shape: Sequence[int],
    *,
    sampler: str = "ancestral",
    num_steps: int | None = None,
    seeds: Sequence[int] | None = None,
    spacing: str | None = None,
    rows: Sequence[int] | None = None,
    initial: Tensor | None = None,
    denoise: bool = True,
    callback: Callable[[Progress], None] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **options: object,
) -> Tensor:
    """Draw images of ``shape`` [B, ..., *event] from the prior down to the data.

    Args:
        sampler: a name in `SAMPLERS`; its own options (``variance``, ``eta``, …) go in ``options``.
        num_steps: how many levels are visited (default: all).
        spacing: which, a name in `SPACINGS`. Default: the sampler's own.
        rows: the levels themselves instead, as falling rows of the schedule.
        seeds: one per image: an image is then the same in a batch of any size. Default: torch's global generator.
        initial: the state at the first level instead of a draw from the prior.
        denoise: end with the expected denoised sample x̂0 of the last level (no noise is added there);
            False returns the state at the last level, noise included.
        callback: called with a `Progress` at each level.
    """
    (step, usual, settles), shape = _sampler(sampler, options), tuple(shape)
    schedule = denoiser.process.schedule
    levels = [schedule.level(row) for row in _rows(schedule, num_steps, spacing or usual, rows)]
    levels += levels[-1:] if settles else []
    source: Generators = None
    if seeds is not None:
        if not shape or len(seeds) != shape[0]:
            raise InputError(f"seeds has {len(seeds)} entries for shape={shape}: give one per image.")
        source = generators_from_seeds(seeds)
    place = {"dtype": dtype, "device": _device(denoiser) if device is None else device}

    def noise() -> Tensor:
        return denoiser.process.noise(shape, source, **place)  # type: ignore[arg-type]

    if initial is None:
        x = denoiser.process.prior(shape, source, **place)  # type: ignore[arg-type]
    elif tuple(initial.shape) != shape:
        raise InputError(f"initial has shape {tuple(initial.shape)}, but shape={shape}: they must be equal.")
    else:
        x = initial.to(**place)  # type: ignore[call-overload]
    run = Run(denoiser, noise)
    for index, here in enumerate(levels):
        last = index == len(levels) - 1
        if last and not denoise:
            break
        x0 = denoiser(x, here)
        if callback is not None:
            callback(Progress(index + 1, len(levels), here, x, x0))
        x = x0 if last else step(run, x, x0, here, levels[index + 1], **options)
        run.previous = (here, x0)
    return x


def rehearse(denoiser: Denoiser, shape: Sequence[int], **arguments: object) -> None:
    """Draw one image of ``shape`` [...] with a network that says 0: what `sample` would refuse is refused, quickly."""
    silent = copy.copy(denoiser)
    silent.net = lambda x, label: torch.zeros_like(x)
    sample(silent, (1, *shape), seeds=[0], device="cpu", **arguments)  # type: ignore[arg-type]


def _sampler(name: str, options: dict[str, object]) -> Sampler:
    chosen = SAMPLERS[one_of("sampler", name, SAMPLERS)]
    known = [p.name for p in signature(chosen.step).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise InputError(f"{option} is not an option of sampler={name!r}: it takes {', '.join(known) or 'none'}.")
    return chosen


def _rows(schedule: Schedule, num_steps: int | None, spacing: str, rows: Sequence[int] | None) -> list[int]:
    top = len(schedule)
    if rows is not None:
        chosen = [operator.index(row) for row in rows]
        falling = all(a > b for a, b in pairwise(chosen))
        if num_steps is not None or not chosen or not falling or chosen[0] >= top or chosen[-1] < 0:
            raise InputError(f"rows must be falling rows of the schedule (0 … {top - 1}), given without num_steps.")
        return chosen
    count = top if num_steps is None else num_steps
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= top:
        raise InputError(f"num_steps={count!r} must be an integer from 1 to {top}, the levels of the schedule.")
    return SPACINGS[one_of("spacing", spacing, SPACINGS)](schedule, count)


def _device(denoiser: Denoiser) -> torch.device | str:
    net = denoiser.net
    parameter = next(net.parameters(), None) if isinstance(net, torch.nn.Module) else None
    return "cpu" if parameter is None else parameter.device


def _uniform(schedule: Schedule, count: int) -> list[int]:
    """Equal strides from the noisiest row to the least noisy, both included."""
    return [
        round(row) for row in torch.linspace(len(schedule) - 1, 0, count, dtype=torch.float64, device="cpu").tolist()
    ]


def _trailing(schedule: Schedule, count: int) -> list[int]:
    """Equal strides from the noisiest row, the last one a stride above the clean image."""
    stride = len(schedule) / count
    return [round(len(schedule) - i * stride) - 1 for i in range(count)]


def _uniform_logsnr(schedule: Schedule, count: int) -> list[int]:
    """Rows nearest to equal strides in log-SNR."""
    first, last = schedule.logsnr[-1].item(), schedule.logsnr[0].item()
    return _nearest(schedule, torch.linspace(first, last, count, dtype=torch.float64, device="cpu"))


def _karras(schedule: Schedule, count: int, rho: float = 7.0) -> list[int]:
    """Rows nearest to equal strides in (sigma/signal)^(1/rho) (Karras et al. 2022, eq. 5): dense where noise is low."""
    # sigma/signal = exp(−log-SNR / 2)
    first, last = (math.exp(-schedule.logsnr[row].item() / (2 * rho)) for row in (-1, 0))
    roots = torch.linspace(first, last, count, dtype=torch.float64, device="cpu")
    return _nearest(schedule, -2 * rho * roots.log())


def _nearest(schedule: Schedule, logsnr: Tensor) -> list[int]:
    """Falling rows nearest to the rising ``logsnr``; where rows are too coarse for that, the next free ones."""
    rows: list[int] = []
    for index, row in enumerate(schedule.level_at(logsnr).label.round().tolist()):  # type: ignore[union-attr]
        below = rows[-1] - 1 if rows else len(schedule) - 1
        rows.append(max(min(int(row), below), len(logsnr) - 1 - index))
    return rows


SPACINGS: dict[str, Callable[[Schedule, int], list[int]]] = {
    "uniform": _uniform,
    "trailing": _trailing,
    "logsnr": _uniform_logsnr,
    "karras": _karras,
}
# A solver of the ODE gains nothing from a last level so near the clean image that x̂0 there is x.
SAMPLERS: dict[str, Sampler] = {
    name: Sampler(step, "trailing" if name in ("ddim", "euler", "heun", "dpmpp_2m") else "uniform")
    for name, step in PREDICTORS.items()
} | {
    "als": Sampler(als, settles=True),
    "cas": Sampler(cas),
    "pc": Sampler(predictor_corrector),
}
