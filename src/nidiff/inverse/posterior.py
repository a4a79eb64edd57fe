"""The posterior of a model given an observation is again a denoiser: x̂0 corrected by Σ ∇ log p(y | x).

For x = signal · x0 + sigma · Σ^½ eps and y = A x0 + n, n ~ N(0, R), Tweedie's formula holds given y, too:

    E[x0 | x, y] = x̂0 + (sigma²/signal) Σ ∇_x log p(y | x)

With p(y | x) ≈ N(A x̂0, A V Aᵀ + R), V = Cov[x0 | x] = (sigma²/signal) Σ Jᵀ and J = ∂x̂0/∂x, this is Kalman's update

    E[x0 | x, y] = x̂0 + V Aᵀ (A V Aᵀ + R)⁻¹ (y − A x̂0),

exact for Gaussian data and a linear A. The methods differ in what they take for each of the two V; "dps" alone leaves
x̂0 as it is, and moves x after each step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser, Estimate, check_denoiser, require_gaussian
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, expect
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Function, derivative
from nidiff.notation import call, parse_call
from nidiff.recipe import check_kinds, check_number, plain

# E[x0 | x, y], or what stands for it. One that has a ``check(denoiser, observation)`` can refuse what it cannot do; one
# that has a ``pull`` with the same arguments returns x̂0 and what is added to x after the step.
Method = Callable[[Denoiser, Observation, Tensor, Level], Tensor]


@dataclass(frozen=True)
class GaussianMoments:
    """Moment matching with the Gaussian model of the data: V = spread² per mode, in closed form, times 1 − κ where the
    denoiser has a κ. No gradient goes through the network.

    The linear system is solved by conjugate gradients in the space of y, in float64, up to ``tolerance`` times the
    misfit or for so many ``iterations``.
    """

    kappa: bool = True
    tolerance: float = 1e-6
    iterations: int = 500

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        require_gaussian(denoiser.gaussian, "method", "gaussian")

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        variance = denoiser.variance(level, self.kappa)
        return _update(denoiser(x, level), observation, variance.apply, variance.apply, self.tolerance, self.iterations)


@dataclass(frozen=True)
class JacobianMoments:
    """Moment matching with V = (sigma²/signal) Σ Jᵀ of the network itself (MMPS, Rozet et al. 2024), for any denoiser:
    every iteration of the conjugate gradients is a pass back through the network.

    Few iterations are enough, and safer: the V of a trained network is not quite symmetric.
    """

    tolerance: float = 1e-3
    iterations: int = 5

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        x0, variance = _with_jacobian(denoiser, x, level)
        return _update(x0, observation, variance, variance, self.tolerance, self.iterations)


@dataclass(frozen=True)
class Gradient:
    """Gradient guidance: ``scale`` times (sigma²/signal) Σ times the gradient, through the network, of −½ (y − A x̂0)²
    in the metric of r² A Aᵀ + R. One pass back through the network.

    ``r`` is a standard deviation that x0 is given x, in every pixel alike. By default r² = c sigma²/(c signal² +
    sigma²), c the mean variance of the data (1 if it is not known), as in ΠGDM (Song et al. 2023). r = 0 is the
    gradient of p(y | x) ≈ N(A x̂0, R): it takes x̂0 for x0, so its pull is too strong by V/R, and the samples diverge
    where R is small. (`DPS` starts from the same p(y | x), and has steps of another size.) The Σ in front is what makes
    the step well scaled: without it a mode of little noise moves as far as one of much.
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
        x0, variance = _with_jacobian(denoiser, x, level)
        squared = self._squared(denoiser, level) if self.r is None else self.r**2
        return _update(
            x0, observation, lambda v: squared * v, lambda v: self.scale * variance(v), self.tolerance, self.iterations
        )

    def _squared(self, denoiser: Denoiser, level: Level) -> float:
        data = 1.0 if denoiser.gaussian is None else denoiser.gaussian.covariance.eigenvalues.mean().item()
        signal, sigma = (each.values.square().mean().item() for each in (level.signal, level.sigma))
        return data * sigma / (data * signal + sigma)


@dataclass(frozen=True)
class DPS:
    """Diffusion posterior sampling as published (Chung et al. 2023, algorithm 1 with ζ_i = ζ/‖y − A x̂0‖): a step of the
    sampler with the model's own x̂0, and then

        x ← x' − ζ/‖y − A x̂0‖ · Σ ∇_x ‖y − A x̂0‖²

    with ζ the ``scale`` and the norms of each image. The paper has white noise; in whitened coordinates u = Σ^-½ x this
    is its step, − ζ/‖…‖ ∇_u ‖…‖², and with Σ = I its algorithm. (The authors' program differentiates the norm and not
    its square: its scale is 2 ζ.) The size of the noise of y does not enter: how far the samples are pulled depends on
    ζ and on the number of steps. One pass back through the network.
    """

    scale: float = 1.0

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if not isinstance(observation.noise, float):
            remedy = "use method='gaussian', 'jacobian' or 'gradient'"
            raise InputError("method", "dps", "is for an observation with noise of one size", remedy)

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        return denoiser(x, level)

    def pull(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        x0, transpose = derivative(lambda x: denoiser(x, level), x)
        near = observation.operator.linearise(x0)
        misfit = (observation.rows(near.value) - near.value).flatten(1)
        size = misfit.norm(dim=1, keepdim=True).clamp(min=torch.finfo(misfit.dtype).tiny)
        unit = (misfit / size).reshape(near.value.shape)
        return x0, 2 * self.scale * denoiser.process.covariance.matmul(transpose(near.transpose(unit).to(x0)))


@dataclass(frozen=True)
class Replacement:
    """x̂0 with the observed entries of a mask replaced by y (the samplers then add coloured noise to it). The other
    entries depend on y only through the next x: cheap, and not the posterior. The sampler "repaint" mixes the two.
    """

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if not observation.operator.is_mask or not isinstance(observation.noise, float) or observation.noise:
            remedy = "use method='gaussian' or 'jacobian'"
            raise InputError("method", "replacement", "is for a mask without noise", remedy)

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        x0 = denoiser(x, level)
        observed = observation.operator(torch.ones_like(x0)) > 0
        return torch.where(observed, observation.rows(x0), x0)


METHODS: dict[str, Callable[..., Method]] = {
    "gaussian": GaussianMoments,
    "jacobian": JacobianMoments,
    "gradient": Gradient,
    "dps": DPS,
    "replacement": Replacement,
}


LEAST = {"scale": 0.0, "r": 0.0, "tolerance": 0.0, "iterations": 1.0}  # the least value of an option


class Posterior:
    """The correction of a denoiser's x̂0 by an observation."""

    is_differentiable = False  # linear systems are solved on the way

    def __init__(self, observation: Observation, method: Method) -> None:
        self.observation, self.method = observation, method
        self._checked: set[tuple[int, ...]] = set()  # shapes of batches

    def bind(self, denoiser: Denoiser) -> Estimate:
        return _Bound(self, denoiser)

    def check_images(self, x: Tensor) -> None:
        """Refuse images that the observation is not of; those of one shape are looked at once."""
        if tuple(x.shape) not in self._checked:
            self.observation.check_images(torch.zeros_like(x))
            self._checked.add(tuple(x.shape))

    @property
    def blame(self) -> tuple[str, str | None, str]:
        """The argument that is to blame for images that are not finite, its value, and what to try."""
        name = next((name for name, made in METHODS.items() if made is type(self.method)), None)
        others = " or ".join(f"'{each}'" for each in ("gaussian", "jacobian") if each != name)
        smaller = "a smaller scale of it, " if hasattr(self.method, "scale") else ""
        return "method", name, f"use method={others}, {smaller}more steps, a larger `noise`, or a `clip`"

    def for_images(self, index: Tensor) -> "Posterior":
        return Posterior(self.observation.for_images(index), self.method)


class _Bound:
    """x̂0 of a denoiser, corrected by an observation."""

    def __init__(self, posterior: Posterior, denoiser: Denoiser) -> None:
        self.posterior, self.denoiser = posterior, denoiser
        has_pull = hasattr(posterior.method, "pull")
        self.pull = partial(self._checked, posterior.method.pull) if has_pull else None  # type: ignore[attr-defined]

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        return cast(Tensor, self._checked(self.posterior.method, x, level))

    def _checked(self, function: Callable[..., Any], x: Tensor, level: Level) -> Any:
        self.posterior.check_images(x)
        return function(self.denoiser, self.posterior.observation, x, level)


def posterior(
    denoiser: Denoiser, observation: Observation, method: str | Method | None = None, **options: Any
) -> Denoiser:
    """E[x0 | x, y] in place of E[x0 | x]: every sampler then draws images given the ``observation``.

    Args:
        method: a name in `METHODS`: "gaussian" (the default where the denoiser knows the data's Gaussian) and
            "jacobian" (the default elsewhere) match moments, exactly for Gaussian data and a linear operator;
            "gradient" is guidance by a gradient (ΠGDM), "dps" is that as published by Chung et al. (2023), and
            "replacement" is for masks. With options if you like ("dps:scale=0.3"). Or a function of your own,
            (denoiser, observation, x, level) -> x̂0.
        options: of the method, such as ``iterations``.
    """
    check_denoiser(denoiser)
    expect("observation", observation, Observation, "give nidiff.Observation(y, operator, noise)")
    if any(isinstance(correction, Posterior) for correction in denoiser.corrections):
        remedy = "combine both into one operator, operators.linear"
        raise InputError("denoiser", None, "has an observation already", remedy)
    if method is None:
        method = "jacobian" if denoiser.gaussian is None else "gaussian"
    chosen = _as_method(method, options) if isinstance(method, str) else method
    if hasattr(chosen, "check"):
        chosen.check(denoiser, observation)
    corrected = denoiser.corrected(Posterior(observation, chosen))
    if denoiser.gaussian is not None:  # whose items are known
        observation.check_images(torch.zeros(len(observation.y), *denoiser.gaussian.shape, device=denoiser.device))
    return corrected


def _as_method(method: str, options: dict[str, Any]) -> Method:
    """The method of a text NAME:key=value,…, with more ``options``; both are checked."""
    name, written = parse_call("method", method)
    options = {key: plain(value) for key, value in (written | options).items()}
    chosen: Method = call("method", name, options, METHODS)
    check_kinds(METHODS[name], options)
    for key in options.keys() & LEAST.keys():
        if options[key] is not None:
            check_number(key, options[key], LEAST[key])
    return chosen


def _update(
    x0: Tensor, observation: Observation, inner: Function, outer: Function, tolerance: float, iterations: int
) -> Tensor:
    """x̂0 + V Aᵀ (A V' Aᵀ + R)⁻¹ (y − A x̂0), where V is ``outer`` and V' is ``inner``."""
    near = observation.operator.linearise(x0)
    noise, misfit = observation.variance(near.value), observation.rows(near.value) - near.value

    def covariance(v: Tensor) -> Tensor:
        return near.forward(inner(near.transpose(v))) + noise(v)

    weights = conjugate_gradients(covariance, misfit, tolerance, iterations)
    return x0 + outer(near.transpose(weights)).to(x0)


def _with_jacobian(denoiser: Denoiser, x: Tensor, level: Level) -> tuple[Tensor, Function]:
    """x̂0, and V = (sigma²/signal) Σ Jᵀ; J is that of x̂0 before it is clipped."""
    clip, covariance = denoiser.clip, denoiser.process.covariance
    x0, transpose = derivative(lambda x: denoiser.unclipped(x, level), x)
    factor = level.sigma**2 / level.signal

    def variance(v: Tensor) -> Tensor:
        back = transpose(v.to(x0)).to(v)
        return factor * covariance.matmul(back)

    return x0 if clip is None else x0.clamp(-clip, clip), variance


def _squared_norm(rows: Tensor) -> Tensor:
    """‖row‖² of each row."""
    return rows.square().sum(1)


def conjugate_gradients(matrix: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, iterations: int) -> Tensor:
    """w with S w = ``right`` [B, …] for a symmetric S ≥ 0, which may be singular if ``right`` is in its range.

    The rows are systems of their own. A row ends when its residual has fallen to ``tolerance`` times ‖right‖, or when
    S returns only rounding errors.
    """
    shape, right = right.shape, right.flatten(1)
    found, residual = torch.zeros_like(right), right
    direction, size = residual, _squared_norm(residual)
    goal, largest = tolerance**2 * size, torch.zeros_like(size)
    for _ in range(iterations):
        active = size > goal
        if not bool(active.any()):
            break
        image = matrix(direction.reshape(shape)).flatten(1)
        curvature = (direction * image).sum(1)
        largest = torch.maximum(largest, curvature / torch.where(active, _squared_norm(direction), 1.0))
        active &= curvature > torch.finfo(right.dtype).eps * largest * _squared_norm(direction)
        step = torch.where(active, size / torch.where(active, curvature, 1.0), 0.0).unsqueeze(1)
        found = found + step * direction
        residual = residual - step * image
        new = _squared_norm(residual)
        direction = residual + torch.where(active, new / torch.where(active, size, 1.0), 0.0).unsqueeze(1) * direction
        size = torch.where(active, new, 0.0)
    return found.reshape(shape)
