"""Annealed Langevin sampling (ALS), consistent annealed sampling (CAS) and predictor–corrector steps (appendices D, E).

All are preconditioned by Σ: x + α Σ s + √(2α) Σ^½ z, α = η sigma² (E23, E24). Since sigma² Σ s = signal · x̂0 − x, no
power of Σ is applied at all, and in whitened coordinates each is the isotropic algorithm. ``preconditioned=False`` is
the update as the paper prints it, x + α s + √(2α) Σ^½ z: its stationary covariance is sigma² Σ², not sigma² Σ, and it
needs η < 2 λ_min to be stable. It is here to be compared with.
"""

import math
from functools import lru_cache

from torch import Tensor

from nidiff.covariance.families import Identity
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, choose
from nidiff.recipe import check_whole
from nidiff.sampling.annealing import MOST_STEPS, langevin_epsilon
from nidiff.sampling.step import Chain, Step


def als(
    chain: Chain,
    x: Tensor,
    x0: Tensor,
    here: Level,
    there: Level,
    *,
    epsilon: float | None = None,
    steps_per_level: int = 5,
    preconditioned: bool = True,
) -> Tensor:
    """``steps_per_level`` Langevin updates with η = epsilon / sigma_min² at the level ``here`` (Song and Ermon 2019;
    eq. 89, 101).

    Without ``epsilon``, η is the one that brings the variance nearest to that of the level (`best_eta`).
    """
    _check_exploding(chain, "als")
    check_whole("steps_per_level", steps_per_level, 1, MOST_STEPS)
    above, below = (here, there) if chain.previous is None else (chain.previous.level, here)
    ratio = float(above.sigma) / float(below.sigma)
    if epsilon is None and (ratio == 1 or not preconditioned):
        problem = "has no default at a single level, or without `preconditioned`"
        raise InputError("epsilon", None, problem, "give one, as calibrate computes it")
    eta = best_eta(ratio, steps_per_level) if epsilon is None else _eta(chain, epsilon)
    _check_stable("epsilon", epsilon, eta)
    for step in range(steps_per_level):
        x0 = chain.denoiser(x, here) if step else x0
        x = langevin(chain, x, x0, here, eta, preconditioned)
    return x


def cas(
    chain: Chain,
    x: Tensor,
    x0: Tensor,
    here: Level,
    there: Level,
    *,
    epsilon: float | None = None,
    preconditioned: bool = True,
) -> Tensor:
    """x + η sigma² Σ s + β sigma' Σ^½ z, β² = 1 − ratio² (1 − η)², η = epsilon / sigma_min² (eq. 90, 102).

    Every mode then has the variance of the level ``there`` exactly, which needs 1 − 1/ratio ≤ η ≤ 1 + 1/ratio (E24).
    Without ``epsilon``, η = 1 − 1/ratio²: the best Langevin step for one step per level, and the posterior's (E31).
    """
    _check_exploding(chain, "cas")
    ratio = float(here.sigma) / float(there.sigma)
    eta = 1 - ratio**-2 if epsilon is None else _eta(chain, epsilon)
    beta_squared = 1 - (ratio * (1 - eta)) ** 2
    if not beta_squared >= -1e-9:  # the ends of the interval are feasible, up to rounding
        low, high = ((1 - sign / ratio) / _eta(chain, 1.0) for sign in (1, -1))
        problem = f"is not feasible for cas with levels a factor {ratio:.6g} apart"
        raise InputError("epsilon", epsilon, problem, f"give one from {low:.4g} to {high:.4g}, or use more levels")
    fresh = math.sqrt(max(beta_squared, 0.0)) * float(there.sigma)
    return _drift(chain, x, x0, here, eta, preconditioned) + fresh * chain.noise()


def predictor_corrector(
    chain: Chain,
    x: Tensor,
    x0: Tensor,
    here: Level,
    there: Level,
    *,
    predictor: str | Step = "ancestral",
    corrector_steps: int = 1,
    eta: float = 0.05,
) -> Tensor:
    """A step of ``predictor``, then Langevin updates with α = eta · sigma² at the level it leads to (Song et al. 2021).

    eta = 0.05 is their signal-to-noise ratio of 0.16: α = 2 · 0.16² sigma².
    """
    check_whole("corrector_steps", corrector_steps, 0, MOST_STEPS)
    _check_stable("eta", eta, eta)
    from nidiff.sampling.sampler import SAMPLERS  # which has this step, too

    steps = {
        name: sampler.step
        for name, sampler in SAMPLERS.items()
        if not sampler.settles and sampler.step is not predictor_corrector
    }
    chosen = choose("predictor", predictor, steps)
    x = chosen(chain, x, x0, here, there)
    for _ in range(corrector_steps):
        x = langevin(chain, x, chain.denoiser(x, there), there, eta)
    return x


def langevin(chain: Chain, x: Tensor, x0: Tensor, level: Level, eta: float, preconditioned: bool = True) -> Tensor:
    """One Langevin update at a level, α = eta · sigma²: x + α Σ s + √(2α) Σ^½ z (E23)."""
    return _drift(chain, x, x0, level, eta, preconditioned) + math.sqrt(2 * eta) * level.sigma * chain.noise()


def _drift(chain: Chain, x: Tensor, x0: Tensor, level: Level, eta: float, preconditioned: bool) -> Tensor:
    towards = level.signal * x0 - x  # sigma² Σ s
    return x + eta * (towards if preconditioned else chain.denoiser.process.covariance.solve(towards))


@lru_cache
def best_eta(ratio: float, steps: int) -> float:
    """The η that brings the variance nearest to the level's in ``steps`` updates from the level above (E31)."""
    return langevin_epsilon(Identity((1,)), ratio, sigma_min=1.0, steps=steps)


def _eta(chain: Chain, epsilon: float) -> float:
    return epsilon / float(chain.denoiser.process.schedule.sigma[0]) ** 2


def _check_stable(argument: str, value: float | None, eta: float) -> None:
    if not 0 < eta < 2:
        remedy = f"its η, a step in units of σ², is {eta:.4g}; choose one between 0 and 2"
        raise InputError(argument, value, "makes Langevin unstable", remedy)


def _check_exploding(chain: Chain, name: str) -> None:
    schedule = chain.denoiser.process.schedule
    if schedule.keeps != "signal" or schedule.has_own_signal or schedule.event_shape:
        problem = "needs signal 1 and the same levels for all modes (smld_geometric, ve)"
        raise InputError("sampler", name, problem, f"use another one for {schedule!r}")
