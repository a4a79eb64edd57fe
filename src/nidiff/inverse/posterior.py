"""The posterior of a model given an observation is again a denoiser: x̂0 corrected by Σ ∇ log p(y | x).

For x = signal · x0 + sigma · Σ^½ eps and y = A x0 + n, n ~ N(0, R), Tweedie's formula holds given y, too:

    E[x0 | x, y] = x̂0 + (sigma²/signal) Σ ∇_x log p(y | x)

The methods differ in what they take for p(y | x): see `moments`, `mixture`, `proximal`, and `pulls`, which leave x̂0 as
it is and move x after each step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser, Estimate, check_denoiser
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, expect
from nidiff.inverse.mixture import MixtureMoments
from nidiff.inverse.moments import MMPS, TMPD, GaussianMoments, Gradient
from nidiff.inverse.observation import Observation, joint
from nidiff.inverse.proximal import DiffPIR, Replacement
from nidiff.inverse.pulls import DPS, PiGDM
from nidiff.notation import call, parse_call
from nidiff.recipe import check_kinds, check_number, plain

# E[x0 | x, y], or what stands for it. One that has a ``check(denoiser, observation)`` can refuse what it cannot do; one
# that has a ``pull`` with the same arguments returns x̂0 and what is added to x after the step; and one that has a
# ``vary`` draws what x0 varies by given x and y.
Method = Callable[[Denoiser, Observation, Tensor, Level], Tensor]

METHODS: dict[str, Callable[..., Method]] = {
    "gaussian": GaussianMoments,
    "mixture": MixtureMoments,
    "mmps": MMPS,
    "tmpd": TMPD,
    "gradient": Gradient,
    "pigdm": PiGDM,
    "dps": DPS,
    "diffpir": DiffPIR,
    "replacement": Replacement,
}
BEFORE = {"jacobian": "mmps"}  # what methods were called in version 0.2
LEAST = {"scale": 0.0, "r": 0.0, "tolerance": 0.0, "iterations": 1.0, "linearisations": 1.0, "weight": 0.0}
"""The least value of an option."""


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
        others = " or ".join(f"'{each}'" for each in ("gaussian", "mmps") if each != name)
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
        vary = getattr(posterior.method, "vary", None)
        self.vary = None if vary is None else partial(vary, denoiser, posterior.observation)

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        return cast(Tensor, self._checked(self.posterior.method, x, level))

    def _checked(self, function: Callable[..., Any], x: Tensor, level: Level) -> Any:
        self.posterior.check_images(x)
        return function(self.denoiser, self.posterior.observation, x, level)


def posterior(
    denoiser: Denoiser,
    observation: Observation | Sequence[Observation],
    method: str | Method | None = None,
    **options: Any,
) -> Denoiser:
    """E[x0 | x, y] in place of E[x0 | x]: every sampler then draws images given the ``observation``.

    Args:
        observation: one, or several of the same images, which then count together.
        method: a name in `METHODS`: "gaussian" (the default where the denoiser knows the data's Gaussian) and "mmps"
            (the default elsewhere) match moments, exactly for Gaussian data and a linear operator; "mixture" does so
            with the data's mixture; "tmpd", "pigdm", "dps" and "diffpir" are those of the literature; "gradient" is
            guidance by a gradient, and "replacement" is for masks. With options if you like ("dps:scale=0.3"). Or a
            function of your own, (denoiser, observation, x, level) -> x̂0.
        options: of the method, such as ``iterations``.
    """
    check_denoiser(denoiser)
    if isinstance(observation, Sequence):
        observation = joint(observation)
    expect("observation", observation, Observation, "give nidiff.Observation(y, operator, noise)")
    if any(isinstance(correction, Posterior) for correction in denoiser.corrections):
        remedy = "give both in a list: posterior(denoiser, [first, second])"
        raise InputError("denoiser", None, "has an observation already", remedy)
    if method is None:
        method = "mmps" if denoiser.gaussian is None else "gaussian"
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
    name = BEFORE.get(name, name)
    options = {key: plain(value) for key, value in (written | options).items()}
    chosen: Method = call("method", name, options, METHODS)
    check_kinds(METHODS[name], options)
    for key in options.keys() & LEAST.keys():
        if options[key] is not None:
            check_number(key, options[key], LEAST[key])
    return chosen
