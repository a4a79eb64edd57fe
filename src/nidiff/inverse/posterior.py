"""The posterior of a model given an observation is again a denoiser: x̂0 corrected by Σ ∇ log p(y | x).

For x = signal · x0 + sigma · Σ^½ eps and y = A x0 + n, n ~ N(0, R), Tweedie's formula holds given y, too:

    E[x0 | x, y] = x̂0 + (sigma²/signal) Σ ∇_x log p(y | x)

With p(y | x) ≈ N(A x̂0, A V Aᵀ + R), V = Cov[x0 | x] = (sigma²/signal) Σ Jᵀ and J = ∂x̂0/∂x, this is Kalman's update

    E[x0 | x, y] = x̂0 + V Aᵀ (A V Aᵀ + R)⁻¹ (y − A x̂0),

exact for Gaussian data and a linear A. The methods differ in what they take for each of the two V.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.denoiser import Denoiser, Estimate, check_denoiser
from nidiff.diffusion.schedule import Level, broadcast
from nidiff.errors import InputError, choose, expect, shown
from nidiff.inverse.observation import Observation, Seen, seen_at
from nidiff.inverse.operators import Function, derivative
from nidiff.inverse.solve import conjugate_gradients
from nidiff.recipe import check_kinds, check_whole, is_number, plain


class Told(NamedTuple):
    """A denoiser and what was seen; ``free`` is the denoiser without its clipping."""

    denoiser: Denoiser
    free: Denoiser
    observation: Observation


class Method(Protocol):
    """E[x0 | x, y], or what stands for it."""

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        """Refuse what this method cannot do."""

    def __call__(self, told: Told, x: Tensor, level: Level) -> Tensor: ...


@dataclass(frozen=True)
class Moments:
    """Moment matching with the Gaussian model of the data: V = spread² per mode, in closed form, times 1 − κ where the
    denoiser has a κ. No gradient goes through the network.

    The linear system is solved by conjugate gradients in the space of y, in float64, up to ``tolerance`` times the
    misfit or for so many ``iterations``.
    """

    kappa: bool = True
    tolerance: float = 1e-6
    iterations: int = 500

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if denoiser.gaussian is None:
            raise InputError(
                "method='gaussian' needs the data's Gaussian: give the denoiser one, "
                "denoiser.with_gaussian(nidiff.fit_gaussian(data)), or use method='jacobian'."
            )

    def __call__(self, told: Told, x: Tensor, level: Level) -> Tensor:
        x0 = told.denoiser(x, level)
        variance = told.denoiser.variance(level, self.kappa)
        seen = seen_at(told.observation, x0)
        weights = _solved(seen, lambda v: broadcast(variance, v) * v, self.tolerance, self.iterations)
        back = seen.pull(weights)
        return x0 + (broadcast(variance, back) * back).to(x0)


@dataclass(frozen=True)
class Jacobian:
    """Moment matching with V = (sigma²/signal) Σ Jᵀ of the network itself (MMPS, Rozet et al. 2024), for any denoiser:
    every iteration of the conjugate gradients is a pass back through the network.

    Few iterations are enough, and safer: the V of a trained network is not quite symmetric.
    """

    tolerance: float = 1e-3
    iterations: int = 5

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        pass

    def __call__(self, told: Told, x: Tensor, level: Level) -> Tensor:
        x0, variance = _with_jacobian(told, x, level)
        seen = seen_at(told.observation, x0)
        return x0 + variance(seen.pull(_solved(seen, variance, self.tolerance, self.iterations))).to(x0)


@dataclass(frozen=True)
class Gradient:
    """Gradient guidance: ``scale`` times (sigma²/signal) Σ times the gradient, through the network, of −½ (y − A x̂0)²
    in the metric of r² A Aᵀ + R. One pass back through the network.

    ``r`` is a standard deviation that x0 is given x, in every pixel alike. By default r² = c sigma²/(c signal² +
    sigma²), c the mean variance of the data (1 if it is not known), as in ΠGDM (Song et al. 2023). r = 0 is DPS (Chung
    et al. 2023), as it follows from p(y | x) ≈ N(A x̂0, R): it takes x̂0 for x0, so its pull is too strong by V/R, and
    many steps are needed where R is small. The Σ in front is what makes the step well scaled: without it a mode of
    little noise moves as far as one of much.
    """

    r: float | None = None
    scale: float = 1.0
    tolerance: float = 1e-6
    iterations: int = 500

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if self.r is not None and not (is_number(self.r) and self.r >= 0):
            raise InputError(f"r={shown(self.r)} must be a standard deviation of 0 or more.")
        if self.r == 0 and observation.is_exact:
            raise InputError("r=0 needs observation noise: give Observation a noise above 0, or leave r out.")

    def __call__(self, told: Told, x: Tensor, level: Level) -> Tensor:
        x0, variance = _with_jacobian(told, x, level)
        seen = seen_at(told.observation, x0)
        squared = self._squared(told.denoiser, level) if self.r is None else self.r**2
        weights = _solved(seen, lambda v: squared * v, self.tolerance, self.iterations)
        return x0 + self.scale * variance(seen.pull(weights)).to(x0)

    def _squared(self, denoiser: Denoiser, level: Level) -> float:
        data = 1.0 if denoiser.gaussian is None else denoiser.gaussian.covariance.eigenvalues.mean().item()
        signal, sigma = (_mean_square(each) for each in (level.signal, level.sigma))
        return data * sigma / (data * signal + sigma)


@dataclass(frozen=True)
class Replacement:
    """x̂0 with what a mask sees replaced by y (the samplers then add coloured noise to it). What was not seen hears of y
    only through the next x: cheap, and not the posterior. The sampler "repaint" brings both together.
    """

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if not observation.operator.is_mask:
            raise InputError(
                f"method='replacement' is for a mask, not operator={observation.operator!r}: use method='gaussian' or "
                "'jacobian'."
            )
        if isinstance(observation.noise, float) and observation.noise == 0:
            return
        raise InputError(
            "method='replacement' takes y for exact: leave noise out, or use method='gaussian' or 'jacobian'."
        )

    def __call__(self, told: Told, x: Tensor, level: Level) -> Tensor:
        x0 = told.denoiser(x, level)
        seen = told.observation.operator(torch.ones_like(x0)) > 0
        return torch.where(seen, told.observation.rows(x0), x0)


METHODS: dict[str, Callable[..., Method]] = {
    "gaussian": Moments,
    "jacobian": Jacobian,
    "gradient": Gradient,
    "replacement": Replacement,
}


class Posterior:
    """What an observation says, as a correction of a denoiser's x̂0."""

    is_differentiable = False  # systems are solved on the way

    def __init__(self, observation: Observation, method: Method) -> None:
        self.observation, self.method = observation, method
        self._fitted: set[tuple[int, ...]] = set()  # shapes of batches that were looked at

    def bind(self, denoiser: Denoiser) -> Estimate:
        return partial(self._estimate, Told(denoiser, denoiser.clipped(None), self.observation))

    def _estimate(self, told: Told, x: Tensor, level: Level) -> Tensor:
        if tuple(x.shape) not in self._fitted:
            self.observation.fit(torch.zeros_like(x))
            self._fitted.add(tuple(x.shape))
        return self.method(told, x, level)

    def for_images(self, index: Tensor) -> "Posterior":
        return Posterior(self.observation.for_images(index), self.method)


def posterior(
    denoiser: Denoiser, observation: Observation, method: str | Method | None = None, **options: Any
) -> Denoiser:
    """E[x0 | x, y] in place of E[x0 | x]: every sampler then draws images given the ``observation``.

    Args:
        method: a name in `METHODS`: "gaussian" (the default where the denoiser knows the data's Gaussian) and
            "jacobian" (the default elsewhere) match moments, exactly for Gaussian data and a linear operator;
            "gradient" is guidance by a gradient (ΠGDM, DPS), "replacement" is for masks. Or one of your own.
        options: of the method, such as ``iterations``.
    """
    check_denoiser(denoiser)
    expect("observation", observation, Observation, "give nidiff.Observation(y, operator, noise)")
    if any(isinstance(one, Posterior) for one in denoiser.corrections):
        raise InputError("denoiser is given an observation already: see both by one operator, operators.linear.")
    if method is None:
        method = "jacobian" if denoiser.gaussian is None else "gaussian"
    chosen: Any = choose("method", method, METHODS)
    if isinstance(method, str):
        chosen = _with_options(method, chosen, options)
    elif options or not callable(chosen):
        raise InputError(f"method={shown(method)} must be a name in METHODS, or a method without options.")
    chosen.check(denoiser, observation)
    found = denoiser.corrected(Posterior(observation, chosen))
    if denoiser.gaussian is not None:  # whose items are known
        observation.fit(torch.zeros(len(observation.y), *denoiser.gaussian.shape, device=denoiser.device))
    return found


def _with_options(name: str, method: Callable[..., Method], options: dict[str, Any]) -> Method:
    known = [*signature(method).parameters]
    options = {key: plain(value) for key, value in options.items()}
    for key in options:
        if key not in known:
            raise InputError(f"{key} is not an option of method={name!r}: it takes {', '.join(known) or 'none'}.")
    check_kinds(method, options)
    if not options.get("tolerance", 0.0) >= 0:
        raise InputError(f"tolerance={shown(options['tolerance'])} must be 0 or more, as a share of the misfit.")
    if "iterations" in options:
        check_whole("iterations", options["iterations"])
    return method(**options)


def _solved(seen: Seen, variance: Function, tolerance: float, iterations: int) -> Tensor:
    """(A V Aᵀ + R)⁻¹ (y − A x̂0)."""
    return conjugate_gradients(
        lambda v: seen.push(variance(seen.pull(v))) + seen.variance(v), seen.misfit, tolerance, iterations
    )


def _with_jacobian(told: Told, x: Tensor, level: Level) -> tuple[Tensor, Function]:
    """x̂0, and V = (sigma²/signal) Σ Jᵀ; J is that of x̂0 before it is clipped."""
    clip, covariance = told.denoiser.clip, told.denoiser.process.covariance
    x0, pull = derivative(lambda at: told.free(at, level), x)
    factor = level.sigma**2 / level.signal

    def variance(v: Tensor) -> Tensor:
        back = pull(v.to(x0)).to(v)
        return broadcast(factor, back) * covariance.matmul(back)

    return x0 if clip is None else x0.clamp(-clip, clip), variance


def _mean_square(value: Any) -> float:
    return float(torch.as_tensor(value.values if isinstance(value, Modes) else value).double().square().mean())
