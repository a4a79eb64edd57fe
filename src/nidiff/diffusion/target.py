"""What a network may predict. Each target is an encode/decode pair, and decoding to x̂0 has one form for all:

x̂0 = mean + a(level) · (x − signal · mean) + b(level) · Σ^power · output,

with a mean of 0 except for a target that is made for a Gaussian model of the data.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Modes
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of


class Target(NamedTuple):
    """``encode`` gives what the network should output; ``coefficients`` and ``power`` turn an output into x̂0.

    The loss calls ``encode(x0, eps, level, covariance)``.
    """

    encode: Callable[[Tensor, Tensor, Level, Covariance], Tensor]
    coefficients: Callable[[Modes, Modes], tuple[Modes, Modes]]
    power: float
    mean: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A target that has a name is pickled by it: its functions have none."""
        name = next((name for name, target in TARGETS.items() if target is self), None)
        return (Target, tuple(self)) if name is None else (target_on_its_own, (name,))

    def decode(self, output: Tensor, x: Tensor, level: Level, covariance: Covariance) -> Tensor:
        """x̂0 from the network's output at x."""
        a, b = self.coefficients(level.signal, level.sigma)
        coloured = covariance.power(output, self.power) if self.power else output
        if self.mean is None:
            return a * x + b * coloured
        mean = self.mean.to(x)
        return mean + a * (x - level.signal * mean.expand_as(x)) + b * coloured

    def invert(self, x0: Tensor, x: Tensor, level: Level, covariance: Covariance) -> Tensor:
        """The output that decodes to x0 at x: Σ^-power (x0 − a x) / b, without the mean."""
        a, b = self.coefficients(level.signal, level.sigma)
        if self.mean is not None:
            mean = self.mean.to(x).expand_as(x)
            x0, x = x0 - mean, x - level.signal * mean
        coloured = (x0 - a * x) / b
        return covariance.power(coloured, -self.power) if self.power else coloured

    def eps_error(self, level: Level) -> tuple[Modes, float]:
        """(c, p): an error δ of the output is an error c · Σ^p δ of eps = Σ^-½ (x − signal · x̂0) / sigma."""
        _, b = self.coefficients(level.signal, level.sigma)
        return -b * level.signal / level.sigma, self.power - 0.5


def _from_residual(gaussian: GaussianModel, covariance: Covariance, signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    wiener = gaussian.at(Level(signal, sigma, -1), covariance)
    return wiener.gain, wiener.spread


def _residual(gaussian: GaussianModel, x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    angle = gaussian.at(level, covariance).angle
    return angle.map(torch.cos) * gaussian.whiten(x0) - angle.map(torch.sin) * eps


def residual(gaussian: GaussianModel, covariance: Covariance) -> Target:
    """What the Gaussian model of the data does not know of x0: F in x̂0 = E[x0 | x] + spread · F, the expectation taken
    under the Gaussian model. Its variance is 1 in every mode at every level, if C is right."""
    encode, coefficients = partial(_residual, gaussian), partial(_from_residual, gaussian, covariance)
    return Target(encode, coefficients, 0.0, gaussian.mean)


# White: the paper's (eq. 15).
EPS = Target(lambda x0, eps, level, cov: eps, lambda signal, sigma: (1 / signal, -sigma / signal), 0.5)
# Salimans and Ho 2022, with coloured noise.
V = Target(
    lambda x0, eps, level, cov: level.signal * cov.sqrt(eps) - level.sigma * x0,
    lambda signal, sigma: (signal / (signal**2 + sigma**2), -sigma / (signal**2 + sigma**2)),
    0.0,
)
# A target, or a function of the data's Gaussian and Σ that makes one.
TARGETS: dict[str, Target | Callable[[GaussianModel, Covariance], Target]] = {
    "eps": EPS,
    # coloured, Σ^½ eps: the ε⁽³⁾ of the paper's source
    "noise": EPS._replace(encode=lambda x0, eps, level, cov: cov.sqrt(eps), power=0.0),
    "x0": Target(lambda x0, eps, level, cov: x0, lambda signal, sigma: (0.0 * signal, 1.0 + 0.0 * signal), 0.0),
    "v": V,
    # flow matching
    "velocity": Target(
        lambda x0, eps, level, cov: cov.sqrt(eps) - x0,
        lambda signal, sigma: (1 / (signal + sigma), -sigma / (signal + sigma)),
        0.0,
    ),
    # ∇ log q = −Σ^-½ eps / sigma (eq. 11)
    "score": Target(
        lambda x0, eps, level, cov: -cov.inv_sqrt(eps) / level.sigma,
        lambda signal, sigma: (1 / signal, sigma**2 / signal),
        1.0,
    ),
    "residual": residual,
}


def target_on_its_own(name: str) -> Target:
    """The target of a name that needs no Gaussian model of the data; another is refused."""
    target = TARGETS[one_of("target", name, TARGETS)]
    if not isinstance(target, Target):
        raise InputError("target", name, "needs the data's Gaussian, and there is none here", "use another target")
    return target
