"""What a network may predict. Each target is an encode/decode pair, and decoding to x̂0 has one form for all:

x̂0 = a(level) · x + b(level) · Σ^power · output
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import Level, broadcast

Coefficient = float | Tensor


class Target(NamedTuple):
    """``encode`` gives what the network should output; ``coefficients`` and ``power`` turn an output into x̂0.

    The loss calls ``encode(x0, eps, level, covariance)`` with a level whose signal and sigma multiply x0 as they are.
    """

    encode: Callable[[Tensor, Tensor, Level, Covariance], Tensor]
    coefficients: Callable[[Coefficient, Coefficient], tuple[Coefficient, Coefficient]]
    power: float

    def decode(self, output: Tensor, x: Tensor, level: Level, covariance: Covariance) -> Tensor:
        """x̂0 from the network's output at x."""
        a, b = self.coefficients(level.signal, level.sigma)
        coloured = covariance.power(output, self.power) if self.power else output
        return broadcast(a, x) * x + broadcast(b, x) * coloured

    def invert(self, x0: Tensor, x: Tensor, level: Level, covariance: Covariance) -> Tensor:
        """The output that decodes to x0 at x: Σ^-power (x0 − a x) / b."""
        a, b = self.coefficients(level.signal, level.sigma)
        coloured = (x0 - broadcast(a, x) * x) / broadcast(b, x)
        return covariance.power(coloured, -self.power) if self.power else coloured

    def eps_error(self, level: Level) -> tuple[Coefficient, float]:
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
    return broadcast(level.signal, x0) * covariance.sqrt(eps) - broadcast(level.sigma, x0) * x0


def _score(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return -covariance.inv_sqrt(eps) / broadcast(level.sigma, eps)


def _from_noise(signal: Coefficient, sigma: Coefficient) -> tuple[Coefficient, Coefficient]:
    return 1 / signal, -sigma / signal


def _from_x0(signal: Coefficient, sigma: Coefficient) -> tuple[Coefficient, Coefficient]:
    return 0.0 * signal, 1.0 + 0.0 * signal


def _from_v(signal: Coefficient, sigma: Coefficient) -> tuple[Coefficient, Coefficient]:
    return signal / (signal**2 + sigma**2), -sigma / (signal**2 + sigma**2)


def _from_score(signal: Coefficient, sigma: Coefficient) -> tuple[Coefficient, Coefficient]:
    return 1 / signal, sigma**2 / signal


TARGETS: dict[str, Target] = {
    "eps": Target(_eps, _from_noise, 0.5),  # white: the paper's (eq. 15)
    "noise": Target(_noise, _from_noise, 0.0),  # coloured, Σ^½ eps: the ε⁽³⁾ of the paper's source
    "x0": Target(_x0, _from_x0, 0.0),
    "v": Target(_v, _from_v, 0.0),  # signal · Σ^½ eps − sigma · x0 (Salimans and Ho 2022, with coloured noise)
    "score": Target(_score, _from_score, 1.0),  # ∇ log q = −Σ^-½ eps / sigma (eq. 11)
}
