"""Samples of the posterior by particles that are weighted and resampled: exact as their number grows.

The chain of `ancestral` with variance="gaussian", x' ~ N(share x + rest x̂0, β̃ Σ + rest² V), is a model of the data
whatever the network. Given y, particles follow it by proposals that know y (twisted diffusion sampling, Wu et al.
2023): with ψ(x) = N(y; A x̂0, A V Aᵀ + R), the likelihood of y as moment matching has it,

    q(x' | x, y) = p(x' | x) g(y | x, x') / ψ(x)        weight: ψ(x') / g(y | x, x')

where g(y | x, x') = N(y; A m', A V'' Aᵀ + R) with the mean and the variance of x0 ~ N(x̂0, V) given x', too. At the
clean image g is p(y | x0) itself, so that the weighted particles have the law p(x0) p(y | x0) / p(y) of the chain. For
Gaussian data x0 given x and x' is x0 given x': all weights are equal. The determinants are the same for all particles.
"""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser, check_denoiser, require_gaussian
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.diffusion.spacing import Spacing
from nidiff.errors import InputError, expect
from nidiff.inverse.observation import Observation
from nidiff.inverse.systems import System
from nidiff.precision import widest
from nidiff.randomness import as_generator, uniform, white_noise
from nidiff.recipe import check_number, check_whole
from nidiff.sampling.ancestral import jump_variances, weights
from nidiff.sampling.tile import Tiled

FEWEST = 2.0  # effective particles, below which we warn


class FewParticles(UserWarning):
    """Nearly all the weight was on a single particle."""


class Particles(NamedTuple):
    """Weighted samples given each y."""

    x: Tensor  # [B, P, *item], one row of particles per row of y
    weights: Tensor  # [B, P], of sum 1
    effective: Tensor  # [B, num_steps]: the effective sample size 1/Σ weight² at every level, before resampling

    def resampled(self, generator: torch.Generator | int | None = None) -> Tensor:
        """As many samples [B, P, *item] of equal weight."""
        chosen = _systematic(self.weights, as_generator(generator))
        return torch.stack([x[index] for x, index in zip(self.x, chosen, strict=True)])


@torch.no_grad()
def sample_particles(
    denoiser: Denoiser,
    observation: Observation,
    particles: int = 64,
    *,
    num_steps: int | None = None,
    spacing: str | Spacing = "uniform",
    threshold: float = 0.5,
    kappa: bool = True,
    generator: torch.Generator | int | None = None,
    tile: int | None = None,
    tolerance: float = 1e-6,
    iterations: int = 500,
    dtype: torch.dtype = torch.float32,
) -> Particles:
    """Weighted samples given an ``observation``, by the network and the data's Gaussian.

    Args:
        denoiser: without an observation of its own.
        observation: with a linear operator.
        particles: for each row of y; every step calls the network once for each.
        num_steps: levels that are visited; None: all.
        threshold: particles are resampled when fewer than this share of them count; 0: never.
        kappa: as of the method "gaussian"; it makes better proposals, and the result is the same as particles grow.
        tile: particles in one call of the network.
    """
    check_denoiser(denoiser)
    expect("observation", observation, Observation, "give nidiff.Observation(y, operator, noise)")
    gaussian = require_gaussian(denoiser.gaussian, "denoiser")
    count, rows = check_whole("particles", particles, 2), len(observation.y)
    check_number("threshold", threshold, 0.0, 1.0)
    schedule = denoiser.process.schedule
    example = torch.zeros(rows, *gaussian.shape, dtype=dtype, device=denoiser.device)
    observation.operator.require_linear(example, "particles")
    observation.check_images(example)
    observation = observation.for_images(torch.arange(rows, device="cpu").repeat_interleave(count))
    if tile is not None:
        denoiser = denoiser.with_net(Tiled(denoiser.net, tile))
    levels = schedule.levels(len(schedule) if num_steps is None else num_steps, spacing)
    denoiser.check_levels(dtype, [float(level.label) for level in levels])
    source = as_generator(generator)
    shape = (rows * count, *gaussian.shape)
    place: dict[str, Any] = {"dtype": dtype, "device": denoiser.device}
    wide = widest(denoiser.device)

    def white(shape: tuple[int, ...]) -> Tensor:
        return white_noise(shape, source, dtype=wide, device=denoiser.device)

    def log_likelihood(x0: Tensor, variance: object) -> Tensor:
        """log N(y; A x0, A V Aᵀ + R) up to a constant, of each particle [rows, count]."""
        system = System(observation, x0)
        misfit = system.misfit
        solved = system.solve(misfit, variance, tolerance, iterations)  # type: ignore[arg-type]
        logs = -0.5 * (misfit * solved.weights).flatten(1).sum(1).reshape(rows, count)
        return torch.where(logs.isfinite(), logs, -math.inf)

    x = denoiser.process.prior(shape, source, **place)
    x0 = denoiser(x, levels[0])
    logs = log_likelihood(x0, denoiser.variance(levels[0], kappa))
    effective = []
    for here, there in zip(levels, [*levels[1:], CLEAN], strict=True):
        shares = _normalised(logs, count, here)
        effective.append(1 / shares.square().sum(1))
        if bool((effective[-1] < threshold * count).any()):
            index = (_systematic(shares, source) + count * torch.arange(rows)[:, None]).flatten().to(x.device)
            x, x0, logs = x[index], x0[index], torch.zeros_like(logs)
            shares = torch.full_like(shares, 1 / count)
        variance = denoiser.variance(here, kappa)
        _, kept = jump_variances(here, there)
        share, rest = weights(here, there, kept.root())
        system = System(observation, x0)
        draw = variance.root() @ white(shape)
        noise = observation.draw_noise(system.near.value, white)
        right = system.misfit - system.near.forward(draw) - noise
        drawn = x0 + (draw + system.solve(right, variance, tolerance, iterations).update).to(x0)
        if there is CLEAN:
            x = drawn
            break
        ahead = share * x + rest * drawn + kept.root() * denoiser.process.noise(shape, source, **place)
        jump = kept * denoiser.process.covariance
        total = rest**2 * variance + jump
        between = x0 + (rest * variance / total) * (ahead - share * x - rest * x0)
        logs = logs - log_likelihood(between, variance * jump / total)
        x, x0 = ahead, denoiser(ahead, there)
        logs = logs + log_likelihood(x0, denoiser.variance(there, kappa))
    found = Particles(x.reshape(rows, count, *gaussian.shape), shares.to(x), torch.stack(effective, 1))
    if (least := found.effective.min().item()) < FEWEST:
        problem = f"the effective sample size of {count} particles fell to {least:.1f}"
        remedy = "use more particles or steps, or a larger `noise`; the weight is that of single ones"
        warnings.warn(str(InputError(None, None, problem, remedy)), FewParticles, stacklevel=3)
    return found


def _normalised(logs: Tensor, count: int, level: Level) -> Tensor:
    """The weights of particles, of sum 1 for each row; particles that have all died are refused."""
    logs = torch.where(logs.isnan(), -math.inf, logs)
    if bool((logs == -math.inf).all(1).any()):
        problem = f"have all died at row {float(level.label):g} of the schedule: not one has a finite weight"
        raise InputError("particles", count, problem, "use more steps, a larger `noise`, or another denoiser")
    return logs.softmax(1)


def _systematic(shares: Tensor, source: torch.Generator | list[torch.Generator] | None) -> Tensor:
    """Indices [B, P] of particles, each as often as its weight times P, rounded up or down."""
    count = shares.shape[1]
    start = uniform(len(shares), source, device="cpu").double()[:, None]
    places = (start + torch.arange(count, dtype=torch.float64)) / count
    ends = shares.double().cpu().cumsum(1)
    return torch.searchsorted(ends / ends[:, -1:], places).clamp(max=count - 1)
