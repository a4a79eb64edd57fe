"""Solvers that are exact for Gaussian data in one step, whatever Σ and the schedule (`nidiff.diffusion.gaussian`).

In z = total^-½ (x − signal μ) the probability-flow ODE is dz = F dθ per mode, each turning by π/2 from noise to data at
its own time. F = 0 for Gaussian data; for a single clean image dF/dθ = −z, and DDIM is the rotation of (z, F) by the
step in θ. Between the two, dF/dθ ≈ −κ z, with κ = E F² the share of the residual that a network explains: measured by
`nidiff.design.measure_kappa`, or else taken from F itself, image by image.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes, as_modes
from nidiff.diffusion.denoiser import require_gaussian
from nidiff.diffusion.gaussian import GaussianModel, Wiener
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.errors import one_of
from nidiff.precision import with_float64
from nidiff.sampling.step import Chain, Past, remembered

FINISHES = ("step", "denoise")
Weights = tuple[list[tuple[Modes, Modes]], Modes | None]
"""(a, b) of every step, and the deviation of fresh noise over Σ's, if there is any."""


def angle(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, finish: str = "step") -> Tensor:
    """z' = cos(√κ Δ) z + sin(√κ Δ)/√κ F, Δ the step in θ: the first-order rule; κ = 0 is Euler, κ = 1 is DDIM in z.

    ``finish`` is how the data are reached: by a "step" like the others, which gives fine modes their full variance; or
    "denoise", with x̂0, which leaves out what the network does not know. The former has the right spectrum; features of
    photographs may like the latter.
    """
    return _turned(chain, x, x0, here, there, finish, second_order=False)


def angle_2m(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, finish: str = "step") -> Tensor:
    """The same with what F did since the last step carried on: of second order on rows that are graded smoothly.

    The change of F is extrapolated in one clock for all modes (`mean_angle`), and never further than it was seen to go;
    it is integrated over each mode's own angle. (In its own angle, a fine mode that has hardly moved before would be
    extrapolated far.)
    """
    return _turned(chain, x, x0, here, there, finish, second_order=True)


def angle_rows(process: Process, gaussian: GaussianModel, count: int, top: int | None = None) -> list[int]:
    """``count`` falling rows at equal steps of the `mean_angle` from the row ``top``, the noisiest; the last step ends
    at the data."""
    top = len(process.schedule) - 1 if top is None else top
    return [*remembered(process, gaussian, ("rows", count, top), lambda: _angle_rows(process, gaussian, count, top))]


def _angle_rows(process: Process, gaussian: GaussianModel, count: int, top: int) -> list[int]:
    ratio, schedule = gaussian.check_basis(process.covariance) ** 0.5, process.schedule
    weights = _clock_weights(gaussian, ratio)

    @cache
    def falling(row: int) -> float:
        tangent = schedule.as_modes((0.5 * schedule.logsnr[row]).exp()) * ratio
        return -(weights * tangent.values.atan()).sum().item()

    first = -falling(top)
    rows: list[int] = []
    for index in range(count):
        wanted = first + (torch.pi / 2 - first) * index / count
        row = min(bisect_left(range(top), -wanted, key=falling), top)
        rows.append(max(min(row, rows[-1] - 1 if rows else top), count - 1 - index))
    return rows


def mean_angle(gaussian: GaussianModel, wiener: Wiener) -> float:
    """One clock for all modes, from about 0 to π/2: half the mean of θ weighted by C, half the plain mean."""
    return (_clock_weights(gaussian, wiener.angle) * wiener.angle.values).sum().item()


def _clock_weights(gaussian: GaussianModel, like: Modes) -> Tensor:
    """Of every mode of ``like``, which C's modes are among."""
    weights = (0.0 * like + gaussian.covariance).values
    return 0.5 * (weights / weights.sum() + 1 / weights.numel())


def _turned(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, finish: str, second_order: bool) -> Tensor:
    if ends_denoised(finish, there):
        return x0
    require_gaussian(chain.denoiser.gaussian, "sampler", "angle")
    step, past = Past(here, x0, x), chain.previous if second_order else None

    def weights() -> Weights:
        now, then = chain.gaussian_at(here), chain.gaussian_at(there)
        kappa, trust = explained(chain, step)
        turn = _turn(then.angle - now.angle, kappa)
        if past is None:
            return [_linear(now, then, turn.cos, turn.sin * trust)], None
        before = chain.gaussian_at(past.level)
        last = _turn(now.angle - before.angle, kappa)
        carried = carry(chain, past.level, here, there) * turn.rise
        # less what the last step predicted of F: cos(√κ Δ₋) F₋ − √κ sin(√κ Δ₋) z₋
        expected = carried * last.cos * explained(chain, past, kappa)[1]
        of_past = _linear(before, then, carried * kappa * last.sin, -expected)
        return [_linear(now, then, turn.cos, (turn.sin + carried) * trust), of_past], None

    return around_mean(chain, "angle", there, [step] if past is None else [step, past], weights)


def carry(chain: Chain, *levels: Level) -> float:
    """The step between the last two of three levels over the one before, in the `mean_angle`: how far a change is
    carried on, and no further than it was seen."""

    def time(level: Level) -> float:
        gaussian = require_gaussian(chain.denoiser.gaussian, "sampler")
        return chain.once("clock", [level], lambda: mean_angle(gaussian, chain.gaussian_at(level)))

    times = [time(level) for level in levels]
    step, last = times[2] - times[1], times[1] - times[0]
    return min(1.0, step / last) if last else 0.0


def ends_denoised(finish: str, there: Level) -> bool:
    """Whether the step to ``there`` is the last and ends with x̂0; "turn" is what version 0.2 called a "step"."""
    return one_of("finish", "step" if finish == "turn" else finish, FINISHES) == "denoise" and there is CLEAN


def around_mean(
    chain: Chain, name: Hashable, there: Level, steps: Sequence[Past], weights: Callable[[], Weights]
) -> Tensor:
    """signal' μ + the sum of a (x − signal μ) + b (x̂0 − μ) over ``steps``, and noise, with the ``weights`` of a rule of
    this ``name``, which follow from the levels if κ is known; an image stays in its range."""

    def table() -> tuple[list[tuple[Modes, Modes]], Modes | None, Modes]:
        pairs, fresh = weights()
        rest = there.signal
        for step, (a, b) in zip(steps, pairs, strict=True):
            rest = rest - a * step.level.signal - b
        return pairs, fresh, rest

    levels = [there, *(step.level for step in steps)]
    pairs, fresh, rest = table() if chain.denoiser.kappa is None else chain.once(name, levels, table)
    terms: list[tuple[Modes, Tensor]] = [(rest, chain.mean_like(steps[0].x))]
    for step, (a, b) in zip(steps, pairs, strict=True):
        terms += [(a, step.x), (b, step.x0)]
    x, clip = chain.combine(*terms, fresh=fresh), chain.denoiser.clip
    return x.clamp(-clip, clip) if there is CLEAN and clip is not None else x


def _linear(wiener: Wiener, then: Wiener, z: Modes, residual: Modes) -> tuple[Modes, Modes]:
    """√total' (z-weight · z + F-weight · F) of the state of ``wiener`` as weights of x − signal μ and x̂0 − μ."""
    scale = then.total**0.5
    of_x0 = scale * residual / wiener.spread
    return scale * z / wiener.total**0.5 - of_x0 * wiener.gain, of_x0


def explained(chain: Chain, step: Past, kappa: Modes | None = None) -> tuple[Modes, Modes]:
    """(κ, β) at a step, as they were measured; else β = 1 and κ as given, or the mean of F² over the image."""
    known = chain.denoiser.kappa
    if known is not None:
        gaussian = require_gaussian(chain.denoiser.gaussian, "kappa")
        return chain.once("kappa", [step.level], lambda: known.at(step.level, gaussian))
    if kappa is None:
        wiener = chain.gaussian_at(step.level)
        of_x0 = wiener.spread**-1
        of_x = -of_x0 * wiener.gain
        of_mean = -of_x * wiener.signal - of_x0
        residual, _ = chain.in_modes((of_x, step.x), (of_x0, step.x0), (of_mean, chain.mean_like(step.x)))
        kappa = Modes(with_float64(residual).double().square().flatten(1).mean(1).clamp(max=1.0).cpu())
    return kappa, as_modes(1.0)


class _Turn(NamedTuple):
    """Of a step Δ in θ with z'' = −κ z: what it does to z and F, and to a change of F that rises linearly to 1."""

    cos: Modes  # cos(√κ Δ)
    sin: Modes  # sin(√κ Δ)/√κ
    rise: Modes  # (1 − cos(√κ Δ))/(κ Δ)


def _turn(step: Modes, kappa: Modes) -> _Turn:
    turn = kappa.map(torch.sqrt) * step
    whole, half = ((turn / (n * torch.pi)).map(torch.sinc) for n in (1, 2))  # sin(t)/t
    return _Turn(turn.map(torch.cos), step * whole, step * half**2 / 2)
