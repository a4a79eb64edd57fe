"""Solvers of the probability-flow ODE and the reverse SDE, written in x̂0: the coefficients are the isotropic ones."""

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of
from nidiff.sampling.ancestral import mix
from nidiff.sampling.step import Chain


def euler(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """Euler on d(x/signal) / d(sigma/signal) = n̂. The same map as DDIM with eta = 0: that identity is a test."""
    return mix(x, x0, here, there, fresh=0.0)


def heun(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, average: str = "x0") -> Tensor:
    """Heun's second-order step on d(x/sigma) / d(signal/sigma) = x̂0; two evaluations of the network per step.

    It is the same ODE. In its usual clock, sigma/signal, an error of x̂0 at the end of a step is multiplied by the ratio
    of the two noise levels, which few steps from nearly pure noise make large; here x' is a mean of x and the x̂0.

    ``average`` "velocity" is Heun in t for flow matching, signal + sigma = 1: the mean of the two velocities
    (x − x̂0)/sigma. "x0" is the step above, for every schedule.
    """
    guess = mix(x, x0, here, there, fresh=0.0)
    if one_of("average", average, ("x0", "velocity")) == "velocity":
        schedule = chain.denoiser.process.schedule
        if schedule.keeps != "sum" or schedule.has_own_signal:
            raise InputError("average", average, f"is for flow matching, not for {schedule!r}", "leave it out")
        ahead = (guess - chain.denoiser(guess, there)) / there.sigma
        return x + (there.sigma - here.sigma) / 2 * ((x - x0) / here.sigma + ahead)
    return mix(x, (x0 + chain.denoiser(guess, there)) / 2, here, there, fresh=0.0)


def dpmpp_2m(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022): exponential integrator in log-SNR, x̂0 extrapolated from the step before."""
    step = half_logsnr(there) - half_logsnr(here)
    if chain.previous is not None:
        before = chain.previous
        last = half_logsnr(here) - half_logsnr(before.level)
        x0 = x0 + step.ratio(2 * last) * (x0 - before.x0)
    return (there.sigma / here.sigma) * x - (there.signal * (-step).map(torch.expm1)) * x0


def euler_maruyama(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """Euler–Maruyama on the reverse SDE with log-SNR as clock: dx = (slope x + sigma² Σ s) dℓ + sigma Σ^½ dw̄ (R6)."""
    step = 2 * (half_logsnr(there) - half_logsnr(here))
    drift = chain.denoiser.process.reverse_drift(x, x0, here)
    return x + step * drift + (here.sigma * step.root()) * chain.noise()


def half_logsnr(level: Level) -> Modes:
    """½ log(signal² / sigma²)."""
    return (level.signal / level.sigma).map(torch.log)
