"""One rule of second order from the ODE to the SDE: in every mode x0 is taken as N(m, V) for the length of a step.

Such data go from a level to the next exactly. With T = signal² V + sigma² Σ, the variance of x, β the variance of the
jump (`jump_variances`) and q = 1 − β/T,

    m = x̂0 + signal V/(sigma² Σ) (signal · x̂0 − x)
    x' = A x + (signal' − A signal) m + √(T' (1 − q^η)) z          A = signal'/signal · q^((1 + η)/2)

η = 0 is the ODE, η = 1 the reverse SDE, and every η has the same marginals. V = 0 is DPM-Solver++: its η = 0 is DDIM
and its η = 1 `ancestral`, in the first step. Later, m is carried on by what it changed since the last step.
"""

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes, as_modes
from nidiff.diffusion.denoiser import require_gaussian
from nidiff.diffusion.schedule import Level
from nidiff.recipe import check_number
from nidiff.sampling.ancestral import jump_variances
from nidiff.sampling.angle import Weights, around_mean, carry, ends_denoised, explained
from nidiff.sampling.solver import half_logsnr
from nidiff.sampling.step import Chain, Past


def dpmpp_2m(
    chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, eta: float = 0.0, limit: float | None = None
) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022): exponential integrator in log-SNR, x̂0 extrapolated from the step before.

    ``eta`` is from 0, the ODE, to 1, the SDE ("DPM++ 2M SDE"). ``limit`` is the largest share of the change of x̂0 since
    the last step that is carried on, which a step as long as the last takes ½ of; none is what others have.
    """
    eta, past = check_number("eta", eta, 0, 1), chain.previous
    most = None if limit is None else check_number("limit", limit, 0)
    steps = [Past(here, x0, x)] if past is None else [Past(here, x0, x), past]

    def weights() -> Weights:
        carried = as_modes(0.0)
        if past is not None:
            step, last = half_logsnr(there) - half_logsnr(here), half_logsnr(here) - half_logsnr(past.level)
            carried = step.ratio(2 * last)
            carried = carried if most is None else carried.map(lambda values: values.clamp(max=most))
        return _rule(steps, there, eta, as_modes(0.0), carried)

    levels = [there, *(step.level for step in steps)]
    ((of_x, of_x0), *before), fresh = chain.once(("dpmpp_2m", eta, most), levels, weights)
    older = [(b, step.x0) for step, (_, b) in zip(steps[1:], before, strict=True)]
    return chain.combine((of_x, x), (of_x0, x0), *older, fresh=fresh)


def gaussian_2m(
    chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, *, eta: float = 0.0, finish: str = "step"
) -> Tensor:
    """The rule with the V of the data's Gaussian and κ: exact for Gaussian data for every ``eta``, from 0, the ODE, to
    1, the SDE, in steps of any length. ``finish`` is that of `angle`."""
    check_number("eta", eta, 0, 1)
    if ends_denoised(finish, there):
        return x0
    gaussian = require_gaussian(chain.denoiser.gaussian, "sampler", "gaussian_2m")
    step, past = Past(here, x0, x), chain.previous
    steps = [step] if past is None else [step, past]

    def weights() -> Weights:
        kappa, trust = explained(chain, step)
        carried, trusts = as_modes(0.0), [trust]
        if past is not None:
            carried = as_modes(0.5 * carry(chain, past.level, here, there))
            trusts.append(explained(chain, past, kappa)[1])
        variance = local_variance(gaussian.check_basis(chain.denoiser.process.covariance), here, kappa)
        pairs, fresh = _rule(steps, there, eta, variance, carried)
        trusted = []
        for visit, (a, b), share in zip(steps, pairs, trusts, strict=True):  # β x̂0 + (1 − β) E[x0 | x] in place of x̂0
            trusted.append((a + b * (1.0 - share) * chain.gaussian_at(visit.level).gain, b * share))
        return trusted, fresh

    return around_mean(chain, ("gaussian_2m", eta), there, steps, weights)


def local_variance(ratio: Modes, level: Level, kappa: Modes) -> Modes:
    """V/Σ of x0 around m, such that Var[x0 | x] is 1 − κ times that of the data's Gaussian, whose C/Σ is ``ratio``."""
    noise = level.sigma**2
    return (1.0 - kappa) * ratio * noise / (noise + kappa * level.signal**2 * ratio)


def _rule(steps: list[Past], there: Level, eta: float, variance: Modes, carried: Modes) -> Weights:
    """(a, b) of the present step and the one before, of which x' = Σ a x + b x̂0, and the deviation of the noise over
    Σ's, None if there is none; ``variance`` is V/Σ, and m + ``carried`` (m − m₋) takes the place of m."""
    here = steps[0].level
    total, ahead = (level.signal**2 * variance + level.sigma**2 for level in (here, there))
    far = here.signal**2 * ahead / (there.signal**2 * total)  # q as well, where it is small
    log_q = (jump_variances(here, there)[0] / total).map(_log_of_rest, far)
    of_m = -there.signal * ((1 + eta) / 2 * log_q).map(torch.expm1)
    of_x = there.signal / here.signal * ((1 + eta) / 2 * log_q).map(torch.exp)
    fresh = (-ahead * (eta * log_q).map(torch.expm1)).root() if eta else None
    pairs = []
    for step, weight in zip(steps, (of_m * (1.0 + carried), -of_m * carried), strict=False):
        pull = step.level.signal * variance / step.level.sigma**2  # m = (1 + pull · signal) x̂0 − pull · x
        pairs.append((-weight * pull, weight * (1.0 + pull * step.level.signal)))
    pairs[0] = (of_x + pairs[0][0], pairs[0][1])
    return pairs, fresh


def _log_of_rest(near: Tensor, far: Tensor) -> Tensor:
    """log q of q = 1 − near = far, by that which is not lost to rounding."""
    return torch.where(near < 0.5, (-near.clamp(max=0.5)).log1p(), far.log())
