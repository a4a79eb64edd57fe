"""DDPM, DDIM and SMLD ancestral steps: one rule, q(x' | x, x̂0) with a chosen amount of fresh noise.

For two levels x = signal · x0 + sigma · n and x' = signal' · x0 + sigma' · n' of one process,

    x' = signal' · x̂0 + √(sigma'² − fresh²) · (x − signal · x̂0)/sigma + fresh · Σ^½ z

has the right marginal for every fresh ≤ sigma' (DDIM). fresh = √β̃ is the posterior of the Markov chain.
"""

from typing import Any

from torch import Tensor

from nidiff.covariance.modes import Coefficient, root
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of
from nidiff.sampling.step import Chain


def ancestral(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, variance: str = "posterior") -> Tensor:
    """DDPM's step (eq. 2–3, 17–18): the posterior mean, plus noise of variance β̃ ("posterior") or β ("beta", eq. 19).

    β̃ is exact for a single clean image, β for x0 ~ N(0, Σ) (E17). Between levels that are not neighbours β is that of
    the jump, sigma² − (signal/signal')² sigma'².
    """
    one_of("variance", variance, ("posterior", "beta"))
    beta, posterior = jump_variances(here, there)
    mean = mix(x, x0, here, there, fresh=root(posterior))
    return mean + root(posterior if variance == "posterior" else beta) * chain.noise()


def ddim(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, eta: float = 0.0) -> Tensor:
    """DDIM (eq. 20–21): fresh = eta · √β̃. eta = 0 is deterministic, eta = 1 is `ancestral` (R5)."""
    if not 0 <= eta <= 1:
        raise InputError(f"eta={eta} must be from 0 (deterministic) to 1 (ancestral).")
    fresh = eta * root(jump_variances(here, there)[1])
    mean = mix(x, x0, here, there, fresh)
    return mean + fresh * chain.noise() if eta else mean


def jump_variances(here: Level, there: Level) -> tuple[Any, Any]:
    """(β, β̃) of the jump from the less noisy level ``there`` to ``here`` (E16, E17)."""
    beta = here.sigma**2 - (here.signal / there.signal * there.sigma) ** 2
    return beta, beta * there.sigma**2 / here.sigma**2


def mix(x: Tensor, x0: Tensor, here: Level, there: Level, fresh: Coefficient) -> Tensor:
    """The mean of x' given x and x̂0 when noise of standard deviation ``fresh`` will be added."""
    kept = root(there.sigma**2 - fresh**2) / here.sigma
    return kept * x + (there.signal - kept * here.signal) * x0
