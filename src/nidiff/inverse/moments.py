"""Moment matching: Kalman's update of x̂0, with several V for Cov[x0 | x].

With p(x0 | x) ≈ N(x̂0, V) and y = A x0 + n, n ~ N(0, R),

    E[x0 | x, y] = x̂0 + V Aᵀ (A V Aᵀ + R)⁻¹ (y − A x̂0)

exact for Gaussian data, a linear A and V = Cov[x0 | x] = (sigma²/signal) Σ Jᵀ, J = ∂x̂0/∂x. The methods differ in what
they take for the V in front, ``outer``, and for that in the inverse, ``inner``.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.denoiser import Denoiser, require_gaussian
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Function, derivative
from nidiff.inverse.systems import System

White = Callable[[tuple[int, ...]], Tensor]  # numbers of N(0, 1) of a shape
MOST_CURVED = 0.5  # of the misfit, beyond which an operator is not linear enough


class NotLinear(UserWarning):
    """An operator bends too much on the way from x̂0 to what was observed."""


@dataclass(frozen=True)
class GaussianMoments:
    """Moment matching with the Gaussian model of the data: V = spread² per mode, in closed form, times 1 − κ where the
    denoiser has a κ. No gradient goes through the network.

    The linear system is solved in float64: exactly where few entries are observed, otherwise up to ``tolerance`` or for
    so many ``iterations`` (`nidiff.inverse.systems`). A function that is not linear is linearised ``linearisations``
    times, first at x̂0 and then at the last result (Gauss and Newton).
    """

    kappa: bool = True
    tolerance: float = 1e-3
    iterations: int = 500
    linearisations: int = 1

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        require_gaussian(denoiser.gaussian, "method", "gaussian")

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        variance, x0 = denoiser.variance(level, self.kappa), denoiser(x, level)
        return kalman(observation, x0, level, variance, None, self.tolerance, self.iterations, self.linearisations)

    def vary(
        self, denoiser: Denoiser, observation: Observation, x: Tensor, x0: Tensor, level: Level, white: White
    ) -> Tensor:
        """A draw of N(0, Cov[x0 | x, y]), for x̂0 given y. Its size matters less than where the mean is, so that ten
        times the tolerance is enough."""
        variance: Modes = denoiser.variance(level, self.kappa)
        draw, system = variance.root() @ white(tuple(x.shape)).to(x), System(observation, x0)
        noise = observation.draw_noise(system.near.value, white)
        return system.fluctuation(draw, noise, variance, 10 * self.tolerance, self.iterations)


def gaussian_vary(
    denoiser: Denoiser, observation: Observation, x: Tensor, x0: Tensor, level: Level, white: White
) -> Tensor | None:
    """A draw of N(0, Cov[x0 | x, y]) by the data's Gaussian; None without one."""
    if denoiser.gaussian is None:
        return None
    return GaussianMoments().vary(denoiser, observation, x, x0, level, white)


@dataclass(frozen=True)
class MMPS:
    """Moment matching with V = (sigma²/signal) Σ Jᵀ of the network itself (moment matching posterior sampling, Rozet et
    al. 2024), for any denoiser: every iteration of the conjugate gradients is a pass back through the network.

    Few iterations are enough, and safer: the V of a trained network is not quite symmetric.
    """

    tolerance: float = 1e-3
    iterations: int = 5

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        x0, variance = with_jacobian(denoiser, x, level)
        return kalman(observation, x0, level, variance, None, self.tolerance, self.iterations)

    vary = staticmethod(gaussian_vary)


@dataclass(frozen=True)
class TMPD:
    """Tweedie moment projected diffusion (Boys et al. 2023): V = (sigma²/signal) Σ Jᵀ of the network; of A V Aᵀ in
    the inverse only the sums of the rows are taken, as a diagonal (0 where they are below). Two passes back through the
    network."""

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if not isinstance(observation.noise, float | Tensor):
            raise InputError("method", "tmpd", "is for noise without correlations", "use method='mmps'")

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        x0, variance = with_jacobian(denoiser, x, level)
        system = System(observation, x0)
        ones = torch.ones_like(system.near.value)
        rows = system.near.forward(variance(system.near.transpose(ones))).clamp(min=0.0) + system.noise(ones)
        weights = torch.where(rows > 0, system.misfit / rows.clamp(min=torch.finfo(rows.dtype).tiny), 0.0)
        return x0 + variance(system.near.transpose(weights)).to(x0)

    vary = staticmethod(gaussian_vary)


@dataclass(frozen=True)
class Gradient:
    """Gradient guidance by Tweedie's formula: ``scale`` times (sigma²/signal) Σ times the gradient, through the
    network, of −½ (y − A x̂0)² in the metric of r² A Aᵀ + R. One pass back through the network.

    ``r`` is a standard deviation that x0 is given x, in every pixel alike. By default it is that of ΠGDM, r² = c
    sigma²/(c signal² + sigma²), c the mean variance of the data (1 if it is not known). r = 0 is the gradient of
    p(y | x) ≈ N(A x̂0, R): it takes x̂0 for x0, so its pull is too strong by V/R, and the samples diverge where R is
    small. (`DPS` starts from the same p(y | x), and has steps of another size.) The Σ in front is what makes the step
    well scaled: without it a mode of little noise moves as far as one of much.
    """

    r: float | None = None
    scale: float = 1.0
    tolerance: float = 1e-6
    iterations: int = 500

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if self.r == 0 and observation.is_exact:
            remedy = "give a standard deviation above 0, or leave it out"
            raise InputError("r", self.r, "cannot be used with an exact observation", remedy)

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        x0, variance = with_jacobian(denoiser, x, level)
        squared = isotropic_variance(denoiser, level) if self.r is None else self.r**2
        return kalman(
            observation,
            x0,
            level,
            lambda v: squared * v,
            lambda v: self.scale * variance(v),
            self.tolerance,
            self.iterations,
        )

    vary = staticmethod(gaussian_vary)


def isotropic_variance(denoiser: Denoiser, level: Level) -> float:
    """The variance of x0 given x of white data under white noise, c sigma²/(c signal² + sigma²), with the mean variance
    c of the data, or 1 if that is not known."""
    data = 1.0 if denoiser.gaussian is None else denoiser.gaussian.covariance.eigenvalues.mean().item()
    signal, sigma = (each.values.square().mean().item() for each in (level.signal, level.sigma))
    return data * sigma / (data * signal + sigma)


def kalman(
    observation: Observation,
    x0: Tensor,
    level: Level,
    inner: Modes | Function,
    outer: Function | None,
    tolerance: float,
    iterations: int,
    linearisations: int = 1,
) -> Tensor:
    """x̂0 + V Aᵀ (A V' Aᵀ + R)⁻¹ (y − A x̂0), where V is ``outer``, by default V', and V' is ``inner``."""
    is_linear, at = observation.operator.is_linear, x0
    for _ in range(1 if is_linear else linearisations):
        system, moved = System(observation, at), at - x0
        right = system.misfit if at is x0 else system.misfit + system.near.forward(moved.to(system.near.value))
        solved = system.solve(right, inner, tolerance, iterations)
        update = solved.update if outer is None else outer(system.near.transpose(solved.weights))
        before, at = at, x0 + update.to(x0)
    if not is_linear:
        _check_linearisation(observation, system, before, at, level)
    return at


def _check_linearisation(observation: Observation, system: System, before: Tensor, after: Tensor, level: Level) -> None:
    """Warn where A(after) is far from what its derivative at ``before`` predicts, measured by y − A(before), of an x
    that has more of the data than of the noise: earlier, x̂0 itself is vague."""
    if bool(level.signal.values.square().mean() < level.sigma.values.square().mean()):
        return
    step = (after - before).to(system.near.value)
    predicted = system.near.value + system.near.forward(step)
    bent = (observation.operator(after).to(predicted) - predicted).flatten(1).norm(dim=1)
    missed = (observation.rows(predicted) - predicted).flatten(1).norm(dim=1)
    if bool((bent > MOST_CURVED * torch.maximum(system.misfit.flatten(1).norm(dim=1), missed)).any()):
        problem = (
            f"operator={observation.operator!r} is not linear enough between x̂0 and y: what it makes of the corrected "
            "image differs from what its derivative predicts by more than half of the misfit"
        )
        remedy = "use linearisations=3 of method 'gaussian', more steps, or a larger `noise`, and look at the misfit"
        warnings.warn(str(InputError(None, None, problem, remedy)), NotLinear, stacklevel=2)


def with_jacobian(denoiser: Denoiser, x: Tensor, level: Level) -> tuple[Tensor, Function]:
    """x̂0, and V = (sigma²/signal) Σ Jᵀ; J is that of x̂0 before it is clipped."""
    clip, covariance = denoiser.clip, denoiser.process.covariance
    x0, transpose = derivative(lambda x: denoiser.unclipped(x, level), x)
    factor = level.sigma**2 / level.signal

    def variance(v: Tensor) -> Tensor:
        back = transpose(v.to(x0)).to(v)
        return factor * covariance.matmul(back)

    return x0 if clip is None else x0.clamp(-clip, clip), variance
