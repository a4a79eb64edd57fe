"""Solvers of the probability-flow ODE and the reverse SDE, written in x̂0: the coefficients are the isotropic ones."""

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_whole
from nidiff.sampling.ancestral import weights
from nidiff.sampling.step import Chain, Past

# Of the slopes at the present step, the one before, …: for each order.
ADAMS_BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def euler(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """Euler on d(x/signal) / d(sigma/signal) = n̂. The same map as DDIM with eta = 0: that identity is a test."""
    share, rest = weights(here, there)
    return chain.combine((share, x), (rest, x0))


def heun(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, average: str = "x0") -> Tensor:
    """Heun's second-order step on d(x/sigma) / d(signal/sigma) = x̂0; two evaluations of the network per step.

    It is the same ODE. In its usual clock, sigma/signal, an error of x̂0 at the end of a step is multiplied by the ratio
    of the two noise levels, which few steps from nearly pure noise make large; here x' is a mean of x and the x̂0.

    ``average`` "velocity" is Heun in t for flow matching, signal + sigma = 1: the mean of the two velocities
    (x − x̂0)/sigma. "x0" is the step above, for every schedule.
    """
    share, rest = weights(here, there)
    guess = chain.combine((share, x), (rest, x0))
    if one_of("average", average, ("x0", "velocity")) == "velocity":
        schedule = chain.denoiser.process.schedule
        if schedule.keeps != "sum" or schedule.has_own_signal:
            raise InputError("average", average, f"is for flow matching, not for {schedule!r}", "leave it out")
        ahead = (guess - chain.denoiser(guess, there)) / there.sigma
        return x + (there.sigma - here.sigma) / 2 * ((x - x0) / here.sigma + ahead)
    return chain.combine((share, x), (rest, (x0 + chain.denoiser(guess, there)) / 2))


def ipndm(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, order: int = 4) -> Tensor:
    """Adams–Bashforth on d(x/signal) / d(sigma/signal) = n̂ with the weights of equal steps, of first order in the first
    step and of one more in each of the next: iPNDM (Zhang and Chen 2023), the solver of EDM's networks."""
    check_whole("order", order, 1, len(ADAMS_BASHFORTH))
    steps = [Past(here, x0, x), *chain.history[::-1]][:order]
    stride = there.sigma / there.signal - here.sigma / here.signal
    terms: list[tuple[Modes, Tensor]] = []
    for weight, step in zip(ADAMS_BASHFORTH[len(steps) - 1], steps, strict=True):
        slope = (weight * there.signal) * stride / step.level.sigma  # n̂ = (x − signal · x̂0)/sigma
        terms += [(slope, step.x), (-slope * step.level.signal, step.x0)]
    return chain.combine((there.signal / here.signal + terms[0][0], x), *terms[1:])


def euler_maruyama(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """Euler–Maruyama on the reverse SDE with log-SNR as clock: dx = (slope x + sigma² Σ s) dℓ + sigma Σ^½ dw̄ (R6)."""
    step = 2 * (half_logsnr(there) - half_logsnr(here))
    drift = chain.denoiser.process.reverse_drift(x, x0, here)
    return x + step * drift + (here.sigma * step.root()) * chain.noise()


def half_logsnr(level: Level) -> Modes:
    """½ log(signal² / sigma²)."""
    return (level.signal / level.sigma).map(torch.log)
