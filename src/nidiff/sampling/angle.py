"""Solvers that are exact for Gaussian data in one step, whatever Σ and the schedule (`nidiff.diffusion.gaussian`).

In z = total^-½ (x − signal μ) the probability-flow ODE is dz = F dθ per mode, each turning by π/2 from noise to data at
its own time. F = 0 for Gaussian data; for a single clean image dF/dθ = −z, and DDIM is the rotation of (z, F) by the
step in θ. Between the two, dF/dθ ≈ −κ z, with κ = E F² the share of the residual that a network explains: measured by
`nidiff.design.measure_kappa`, or else taken from F itself, image by image.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.denoiser import require_gaussian
from nidiff.diffusion.gaussian import GaussianModel, Wiener
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.errors import one_of
from nidiff.precision import with_float64
from nidiff.sampling.step import Chain


def angle(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, finish: str = "turn") -> Tensor:
    """z' = cos(√κ Δ) z + sin(√κ Δ)/√κ F, Δ the step in θ: the first-order rule; κ = 0 is Euler, κ = 1 is DDIM in z.

    ``finish`` is how the last step reaches the data: by the same "turn", which gives fine modes their full variance; or
    "denoise", with x̂0, which leaves out what the network does not know. The former has the right spectrum; features of
    photographs may like the latter.
    """
    return _turned(chain, x, x0, here, there, finish, second_order=False)


def angle_2m(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, finish: str = "turn") -> Tensor:
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

    def falling(row: int) -> float:
        return -mean_angle(gaussian, gaussian.at(process.schedule.level(row), process.covariance))

    first = -falling(top)
    rows: list[int] = []
    for index in range(count):
        wanted = first + (torch.pi / 2 - first) * index / count
        row = min(bisect_left(range(top), -wanted, key=falling), top)
        rows.append(max(min(row, rows[-1] - 1 if rows else top), count - 1 - index))
    return rows


def mean_angle(gaussian: GaussianModel, wiener: Wiener) -> float:
    """One clock for all modes, from about 0 to π/2: half the mean of θ weighted by C, half the plain mean."""
    weights = (0.0 * wiener.angle + gaussian.covariance).values
    angle = wiener.angle.values
    return 0.5 * ((weights * angle).sum() / weights.sum() + angle.mean()).item()


def _turned(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, finish: str, second_order: bool) -> Tensor:
    gaussian = require_gaussian(chain.denoiser.gaussian, "sampler", "angle")
    covariance = chain.denoiser.process.covariance
    last_step, clip = there is CLEAN, chain.denoiser.clip
    if one_of("finish", finish, ("turn", "denoise")) == "denoise" and last_step:
        return x0
    now, then = gaussian.at(here, covariance), gaussian.at(there, covariance)
    residual, kappa = _residual(chain, gaussian, now, x, x0, here)
    turn = _turn(then.angle - now.angle, kappa)
    z = turn.cos * now.to_z(x) + turn.sin * residual
    if second_order and chain.previous is not None:
        past = chain.previous
        before = gaussian.at(past.level, covariance)
        last = _turn(now.angle - before.angle, kappa)
        predicted = last.cos * _residual(chain, gaussian, before, past.x, past.x0, past.level)[0]
        predicted = predicted - (kappa * last.sin) * before.to_z(past.x)
        clock = [mean_angle(gaussian, wiener) for wiener in (before, now, then)]
        stride = min(1.0, (clock[2] - clock[1]) / (clock[1] - clock[0])) if clock[1] != clock[0] else 0.0
        z = z + (stride * turn.rise) * (residual - predicted)
    x = then.from_z(z)
    return x.clamp(-clip, clip) if last_step and clip is not None else x


def _residual(
    chain: Chain, gaussian: GaussianModel, wiener: Wiener, x: Tensor, x0: Tensor, level: Level
) -> tuple[Tensor, Modes]:
    """(F, κ) at x: F as far as it can be trusted, and κ as it was measured; else the mean of F² over the image."""
    residual, known = wiener.residual(x, x0), chain.denoiser.kappa
    if known is None:
        return residual, Modes(with_float64(residual).double().square().flatten(1).mean(1).clamp(max=1.0).cpu())
    kappa, trust = known.at(level, gaussian)
    return trust * residual, kappa


class _Turn(NamedTuple):
    """Of a step Δ in θ with z'' = −κ z: what it does to z and F, and to a change of F that rises linearly to 1."""

    cos: Modes  # cos(√κ Δ)
    sin: Modes  # sin(√κ Δ)/√κ
    rise: Modes  # (1 − cos(√κ Δ))/(κ Δ)


def _turn(step: Modes, kappa: Modes) -> _Turn:
    turn = kappa.map(torch.sqrt) * step
    whole, half = ((turn / (n * torch.pi)).map(torch.sinc) for n in (1, 2))  # sin(t)/t
    return _Turn(turn.map(torch.cos), step * whole, step * half**2 / 2)
