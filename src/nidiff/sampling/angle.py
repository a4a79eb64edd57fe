"""Solvers that are exact for Gaussian data in one step, whatever Σ and the schedule (`nidiff.diffusion.gaussian`).

In z = total^-½ (x − signal μ) the probability-flow ODE is dz = F dθ per mode, each turning by π/2 from noise to data at
its own time. F = 0 for Gaussian data; for a single clean image dF/dθ = −z, and DDIM is the rotation of (z, F) by the
step in θ. Between the two, dF/dθ ≈ −κ z, with κ = E F² the share of the residual that a network explains.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.modes import elementwise
from nidiff.diffusion.gaussian import GaussianModel, Wiener
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.sampling.step import Chain


def angle(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """z' = cos(√κ Δ) z + sin(√κ Δ)/√κ F, Δ the step in θ: the first-order rule; κ = 0 is Euler, κ = 1 is DDIM in z."""
    return _turned(chain, x, x0, here, there, second_order=False)


def angle_2m(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level) -> Tensor:
    """The same with what F did since the last step carried on: of second order.

    The change of F is extrapolated in one clock for all modes, the mean angle weighted by C, and integrated over each
    mode's own angle. (In its own angle, a fine mode that has hardly moved before would be extrapolated far.)
    """
    return _turned(chain, x, x0, here, there, second_order=True)


def _turned(chain: Chain, x: Tensor, x0: Tensor, here: Level, there: Level, second_order: bool) -> Tensor:
    gaussian, covariance, kappa = _gaussian(chain), chain.denoiser.process.covariance, _kappa(chain, here)
    now, then = gaussian.at(here, covariance), gaussian.at(there, covariance)
    turn, residual = _turn(then.angle - now.angle, kappa), now.residual(x, x0)
    z = turn.cos * now.to_z(x) + turn.sin * residual
    if second_order and chain.previous is not None:
        past = chain.previous
        before = gaussian.at(past.level, covariance)
        last = _turn(now.angle - before.angle, kappa)
        predicted = last.cos * before.residual(past.x, past.x0) - kappa * last.sin * before.to_z(past.x)
        stride = (_clock(gaussian, then) - _clock(gaussian, now)) / (_clock(gaussian, now) - _clock(gaussian, before))
        z = z + stride * turn.rise * (residual - predicted)
    return then.from_z(z)


class _Turn(NamedTuple):
    """Of a step Δ in θ with z'' = −κ z: what it does to z and F, and to a change of F that rises linearly to 1."""

    cos: Any  # cos(√κ Δ)
    sin: Any  # sin(√κ Δ)/√κ
    rise: Any  # (1 − cos(√κ Δ))/(κ Δ)


def _turn(step: Any, kappa: Any) -> _Turn:
    turn = elementwise(torch.sqrt, kappa) * step
    whole, half = (elementwise(lambda t, n=n: torch.sinc(t / (n * torch.pi)), turn) for n in (1, 2))  # sin(t)/t
    return _Turn(elementwise(torch.cos, turn), step * whole, step * half**2 / 2)


def _clock(gaussian: GaussianModel, wiener: Wiener) -> float:
    """One clock for all modes: the mean of their angles, weighted by C."""
    values = (gaussian.variance * wiener.angle).values
    return (values.sum() / gaussian.covariance.eigenvalues.sum()).item()


def _kappa(chain: Chain, level: Level) -> Any:
    kappa, gaussian = chain.denoiser.kappa, _gaussian(chain)
    return 0.0 if kappa is None else kappa.at(level, gaussian)


def _gaussian(chain: Chain) -> GaussianModel:
    if chain.denoiser.gaussian is None:
        raise InputError(
            "the angle samplers need the data's Gaussian: give the denoiser gaussian=nidiff.fit_gaussian(data), or use "
            "sampler 'dpmpp_2m'."
        )
    return chain.denoiser.gaussian
