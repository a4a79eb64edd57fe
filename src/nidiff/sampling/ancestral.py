"""DDPM, DDIM, SMLD ancestral, churned and repeated steps: one rule, q(x' | x, x̂0) with a chosen amount of fresh noise.

For two levels x = signal · x0 + sigma · n and x' = signal' · x0 + sigma' · n' of one process,

    x' = signal' · x̂0 + √(sigma'² − fresh²) · (x − signal · x̂0)/sigma + fresh · Σ^½ z

has the right marginal for every fresh ≤ sigma' (DDIM). fresh = √β̃ is the posterior of the Markov chain.
"""

from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Coefficient, Modes, as_modes
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_number, check_whole
from nidiff.sampling.step import Chain


def ancestral(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, variance: str = "posterior") -> Tensor:
    """DDPM's step (eq. 2–3, 17–18): the posterior mean, plus noise of variance β̃ ("posterior"), β ("beta", eq. 19) or
    "gaussian".

    β̃ is exact for a single clean image, β for x0 ~ N(0, Σ) where signal² + sigma² = 1 (E17). Between levels that are
    not neighbours β is that of the jump, sigma² − (signal/signal')² sigma'². "gaussian" is β̃ plus what x0 itself varies
    by given x, in every mode, as the data's Gaussian and κ know it: exact for x0 ~ N(μ, C), in steps of any length.
    Given an observation x0 varies less, and that is not the same in every mode: x0 is drawn given x and y.
    """
    one_of("variance", variance, ("posterior", "beta", "gaussian"))
    beta, posterior = jump_variances(here, there)
    share, rest = weights(here, there, posterior.root())
    added = beta if variance == "beta" else posterior
    if variance == "gaussian":
        deviation = None if chain.white is None else chain.denoiser.deviation(x, x0, here, chain.white)
        if deviation is not None:
            return chain.combine((share, x), (rest, x0 + deviation), fresh=posterior.root())
        added = posterior + rest**2 * chain.denoiser.variance(here, over_noise=True)
    return chain.combine((share, x), (rest, x0), fresh=added.root())


def ddim(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, eta: float = 0.0) -> Tensor:
    """DDIM (eq. 20–21): fresh = eta · √β̃. eta = 0 is deterministic, eta = 1 is `ancestral` (R5)."""
    check_number("eta", eta, 0, 1)
    fresh = eta * jump_variances(here, there)[1].root()
    share, rest = weights(here, there, fresh)
    return chain.combine((share, x), (rest, x0), fresh=fresh if eta else None)


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
    check_number("amount", amount, 0)
    if keys and not isinstance(colour, str):
        raise InputError(next(iter(keys)), None, "is not an option of `sampler` churn", "it takes amount and colour")
    rate = amount * _relative_colour(chain.denoiser.process.covariance, colour, keys)
    passed = 2 * ((there.signal / there.sigma).map(torch.log) - (here.signal / here.sigma).map(torch.log))
    fresh = there.sigma * (-(-rate * passed).map(torch.expm1)).root()
    share, rest = weights(here, there, fresh)
    return chain.combine((share, x), (rest, x0), fresh=fresh if amount else None)


def repaint(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, repeats: int = 5) -> Tensor:
    """RePaint's resampling (Lugmayr et al. 2022) with coloured noise: `ancestral`, and then, ``repeats`` − 1 times,
    back up as the process goes and down again with a new x̂0:

        x = (signal/signal') x' + √β Σ^½ z

    It leaves every marginal as it is. Where x̂0 is replaced by what a mask sees (`nidiff.posterior`,
    method="replacement"), it is what makes the rest agree with it. Every repeat calls the network once.
    """
    check_whole("repeats", repeats, 1, 1000)
    beta = jump_variances(here, there)[0].root()
    x = ancestral(chain, x, x0, here, there)
    for _ in range(repeats - 1):
        above = here.signal / there.signal * x + beta * chain.noise()
        x = ancestral(chain, above, chain.denoiser(above, here), here, there)
    return x


def diffpir(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, zeta: float = 0.3) -> Tensor:
    """The step of DiffPIR (Zhu et al. 2023): fresh = √ζ · sigma', whatever the length of the step. It is for x̂0 by the
    method "diffpir" of `nidiff.posterior`."""
    check_number("zeta", zeta, 0, 1)
    fresh = zeta**0.5 * there.sigma
    share, rest = weights(here, there, fresh)
    return chain.combine((share, x), (rest, x0), fresh=fresh if zeta else None)


def _relative_colour(covariance: Covariance, colour: Any, keys: dict[str, Any]) -> Modes:
    """Σ_c / Σ of every mode, with mean 1."""
    if colour is None:
        return as_modes(1.0)
    if isinstance(colour, str):
        boundary = covariance.spatial.boundary
        text = ",".join(f"{key}={value}" for key, value in keys.items())
        colour = as_covariance(f"{colour}:{text}" if text else colour, covariance.event_shape, boundary=boundary)
    relative: Modes = colour / covariance
    return relative / relative.values.mean().item()


def jump_variances(here: Level, there: Level) -> tuple[Modes, Modes]:
    """(β, β̃) of the jump from the less noisy level ``there`` to ``here`` (E16, E17)."""
    beta = here.sigma**2 - (here.signal / there.signal * there.sigma) ** 2
    return beta, beta * there.sigma**2 / here.sigma**2


def mix(x: Tensor, x0: Tensor, here: Level, there: Level, fresh: Coefficient) -> Tensor:
    """The mean of x' given x and x̂0 when noise of standard deviation ``fresh`` will be added."""
    share, rest = weights(here, there, fresh)
    return share * x + rest * x0


def weights(here: Level, there: Level, fresh: Coefficient = 0.0) -> tuple[Modes, Modes]:
    """Of x and of x̂0 in that mean."""
    share = (there.sigma**2 - fresh**2).root() / here.sigma
    return share, there.signal - share * here.signal
