"""What a network may predict. Each target is an encode/decode pair, and decoding to x̂0 has one form for all:

x̂0 = a(level) · x + b(level) · Σ^power · output
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.process import broadcast
from nidiff.diffusion.schedule import Level

Coefficient = float | Tensor


class Target(NamedTuple):
    """``encode`` gives what the network should output; ``coefficients`` and ``power`` turn an output into x̂0."""

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


def _v(x0: Tensor, eps: Tensor, level: Level, covariance: Covariance) -> Tensor:
    return broadcast(level.signal, x0) * covariance.sqrt(eps) - broadcast(level.sigma, x0) * x0


TARGETS: dict[str, Target] = {
    # White eps: the paper's (eq. 15).
    "eps": Target(lambda x0, eps, level, cov: eps, lambda s, sigma: (1 / s, -sigma / s), 0.5),
    # Coloured noise Σ^½ eps: the ε⁽³⁾ of the paper's source.
    "noise": Target(lambda x0, eps, level, cov: cov.sqrt(eps), lambda s, sigma: (1 / s, -sigma / s), 0.0),
    "x0": Target(lambda x0, eps, level, cov: x0, lambda s, sigma: (0.0 * s, 1.0 + 0.0 * s), 0.0),
    # v = signal · Σ^½ eps − sigma · x0 (Salimans and Ho 2022, with coloured noise).
    "v": Target(_v, lambda s, sigma: (s / (s**2 + sigma**2), -sigma / (s**2 + sigma**2)), 0.0),
    # ∇ log q = −Σ^-½ eps / sigma (eq. 11).
    "score": Target(
        lambda x0, eps, level, cov: -cov.inv_sqrt(eps) / broadcast(level.sigma, eps),
        lambda s, sigma: (1 / s, sigma**2 / s),
        1.0,
    ),
}
