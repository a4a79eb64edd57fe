"""DDPM, DDIM, SMLD ancestral and churned steps: one rule, q(x' | x, x̂0) with a chosen amount of fresh noise.

For two levels x = signal · x0 + sigma · n and x' = signal' · x0 + sigma' · n' of one process,

    x' = signal' · x̂0 + √(sigma'² − fresh²) · (x − signal · x̂0)/sigma + fresh · Σ^½ z

has the right marginal for every fresh ≤ sigma' (DDIM). fresh = √β̃ is the posterior of the Markov chain.
"""

from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import as_covariance
from nidiff.covariance.modes import Coefficient, Modes, elementwise, root
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, expect, one_of
from nidiff.recipe import is_number
from nidiff.sampling.step import Chain


def ancestral(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, variance: str = "posterior") -> Tensor:
    """DDPM's step (eq. 2–3, 17–18): the posterior mean, plus noise of variance β̃ ("posterior"), β ("beta", eq. 19) or
    "gaussian".

    β̃ is exact for a single clean image, β for x0 ~ N(0, Σ) (E17). Between levels that are not neighbours β is that of
    the jump, sigma² − (signal/signal')² sigma'². "gaussian" is β̃ plus what x0 itself varies by given x, in every mode,
    as the data's Gaussian and κ know it: exact for x0 ~ N(μ, C), in steps of any length (but for an observation, given
    which x0 varies less).
    """
    one_of("variance", variance, ("posterior", "beta", "gaussian"))
    beta, posterior = jump_variances(here, there)
    mean = mix(x, x0, here, there, fresh=root(posterior))
    if variance == "gaussian":
        kept = root(there.sigma**2 - posterior) / here.sigma
        unknown = chain.denoiser.variance(here, over_noise=True)
        return mean + root(posterior + (there.signal - kept * here.signal) ** 2 * unknown) * chain.noise()
    return mean + root(posterior if variance == "posterior" else beta) * chain.noise()


def ddim(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, eta: float = 0.0) -> Tensor:
    """DDIM (eq. 20–21): fresh = eta · √β̃. eta = 0 is deterministic, eta = 1 is `ancestral` (R5)."""
    if not 0 <= eta <= 1:
        raise InputError(f"eta={eta} must be from 0 (deterministic) to 1 (ancestral).")
    fresh = eta * root(jump_variances(here, there)[1])
    mean = mix(x, x0, here, there, fresh)
    return mean + fresh * chain.noise() if eta else mean


def churn(
    chain: Chain,
    x: Tensor,
    x0: Tensor,
    here: Level,
    there: Level,
    *,
    amount: float = 1.0,
    colour: "str | Covariance | None" = None,
    **keys: Any,
) -> Tensor:
    """Noise of another colour than Σ's, with the drift that keeps every marginal right.

    The probability-flow ODE may have noise of any covariance H added, if ½ H · score is added to its drift. By the
    clock of log-SNR ℓ, and with H = amount · sigma² Σ_c, a mode in which Σ_c/Σ = h forgets its noise at the rate
    amount · h: fresh² = sigma'² (1 − exp(−amount · h · Δℓ)), for x̂0 as it is here. Amount 1 in Σ's own colour is
    `ancestral`, 0 is DDIM with eta = 0.

    ``colour`` is Σ_c, a covariance in Σ's basis (any, where Σ is white), or its name with its ``keys``
    ("churn:colour=gff,gamma=1"); it is scaled so that h has mean 1. Default: Σ's own.
    """
    if not (is_number(amount) and amount >= 0):
        raise InputError(f"amount={amount} must be 0 (no fresh noise) or more.")
    if keys and not isinstance(colour, str):
        raise InputError(f"{next(iter(keys))} is not an option of sampler='churn': it takes amount, colour.")
    rate = amount * _relative_colour(chain.denoiser.process.covariance, colour, keys)
    passed = 2 * (elementwise(torch.log, there.signal / there.sigma) - elementwise(torch.log, here.signal / here.sigma))
    fresh = there.sigma * root(-elementwise(torch.expm1, -(rate * passed)))
    mean = mix(x, x0, here, there, fresh)
    return mean + fresh * chain.noise() if amount else mean


def _relative_colour(covariance: Covariance, colour: Any, keys: dict[str, Any]) -> Any:
    """Σ_c / Σ of every mode, with mean 1."""
    if colour is None:
        return 1.0
    if isinstance(colour, str):
        boundary = covariance.spatial.boundary
        text = ",".join(f"{key}={value}" for key, value in keys.items())
        colour = as_covariance(f"{colour}:{text}" if text else colour, covariance.event_shape, boundary=boundary)
    expect("colour", colour, Covariance)
    if colour.event_shape != covariance.event_shape or not (
        covariance.is_constant or colour.is_constant or colour.shares_basis(covariance)
    ):
        raise InputError(
            f"colour={colour!r} is not diagonal in the basis of Σ = {covariance!r}: build it over the same shape and "
            "with the same boundary."
        )
    relative = colour.eigenvalues / covariance.eigenvalues
    return Modes(relative / relative.mean(), covariance if colour.is_constant else colour)


def jump_variances(here: Level, there: Level) -> tuple[Any, Any]:
    """(β, β̃) of the jump from the less noisy level ``there`` to ``here`` (E16, E17)."""
    beta = here.sigma**2 - (here.signal / there.signal * there.sigma) ** 2
    return beta, beta * there.sigma**2 / here.sigma**2


def mix(x: Tensor, x0: Tensor, here: Level, there: Level, fresh: Coefficient) -> Tensor:
    """The mean of x' given x and x̂0 when noise of standard deviation ``fresh`` will be added."""
    kept = root(there.sigma**2 - fresh**2) / here.sigma
    return kept * x + (there.signal - kept * here.signal) * x0
