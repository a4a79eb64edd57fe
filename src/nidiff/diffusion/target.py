"""What a network may predict. Each target is an encode/decode pair, and decoding to x̂0 has one form for all:

x̂0 = mean + a(level) · (x − signal · mean) + b(level) · Σ^power · output,

with a mean of 0 except for a target that is made for a Gaussian model of the data.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Modes
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, one_of

Modess = Callable[[Modes, Modes], tuple[Modes, Modes]]


class Target(NamedTuple):
    """``encode`` gives what the network should output; ``coefficients`` and ``power`` turn an output into x̂0.

    The loss calls ``encode(x0, eps, level, covariance)``.
    """

    encode: Callable[[Tensor, Tensor, Level, Covariance], Tensor]
    coefficients: Modess
    power: float
    mean: Tensor | None = None

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


# Functions with a name, so that a denoiser can be pickled.
def _eps(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return eps


def _noise(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return covariance.sqrt(eps)


def _x0(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return x0


def _v(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return level.signal * covariance.sqrt(eps) - level.sigma * x0


def _velocity(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return covariance.sqrt(eps) - x0


def _score(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return -covariance.inv_sqrt(eps) / level.sigma


def _from_noise(signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    return 1 / signal, -sigma / signal


def _from_x0(signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    return 0.0 * signal, 1.0 + 0.0 * signal


def _from_v(signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    return signal / (signal**2 + sigma**2), -sigma / (signal**2 + sigma**2)


def _from_velocity(signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    return 1 / (signal + sigma), -sigma / (signal + sigma)


def _from_score(signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    return 1 / signal, sigma**2 / signal


def _from_residual(gaussian: GaussianModel, covariance: Covariance, signal: Modes, sigma: Modes) -> tuple[Modes, Modes]:
    wiener = gaussian.at(Level(signal, sigma, -1), covariance)
    return wiener.gain, wiener.spread


def _residual(gaussian: GaussianModel, x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    wiener = gaussian.at(level, covariance)
    return wiener.cos * gaussian.whiten(x0) - wiener.sin * eps


def residual(gaussian: GaussianModel, covariance: Covariance) -> Target:
    """What the Gaussian model of the data does not know of x0: F in x̂0 = E[x0 | x] + spread · F, the expectation taken
    under the Gaussian model. Its variance is 1 in every mode at every level, if C is right."""
    encode, coefficients = partial(_residual, gaussian), partial(_from_residual, gaussian, covariance)
    return Target(encode, coefficients, 0.0, gaussian.mean)


EPS = Target(_eps, _from_noise, 0.5)  # white: the paper's (eq. 15)
V = Target(_v, _from_v, 0.0)  # signal · Σ^½ eps − sigma · x0 (Salimans and Ho 2022, with coloured noise)
# A target, or a function of the data's Gaussian and Σ that makes one.
TARGETS: dict[str, Target | Callable[[GaussianModel, Covariance], Target]] = {
    "eps": EPS,
    "noise": Target(_noise, _from_noise, 0.0),  # coloured, Σ^½ eps: the ε⁽³⁾ of the paper's source
    "x0": Target(_x0, _from_x0, 0.0),
    "v": V,
    "velocity": Target(_velocity, _from_velocity, 0.0),  # Σ^½ eps − x0: flow matching
    "score": Target(_score, _from_score, 1.0),  # ∇ log q = −Σ^-½ eps / sigma (eq. 11)
    "residual": residual,
}


def target_on_its_own(name: str) -> Target:
    """The target of a name that needs no Gaussian model of the data; another is refused."""
    target = TARGETS[one_of("target", name, TARGETS)]
    if not isinstance(target, Target):
        raise InputError("target", name, "needs the data's Gaussian, and there is none here", "use another target")
    return target
