"""Moment matching with a mixture: Kalman's update of every component, weighted by what y says of it.

Given x and the component k, x0 ~ N(m_k, V_k) (`nidiff.diffusion.mixture`), so that given y, too,

    weight_k ∝ p(k | x) N(y; A m_k, A V_k Aᵀ + R)
    E[x0 | x, y] = Σ_k weight_k (m_k + V_k Aᵀ (A V_k Aᵀ + R)⁻¹ (y − A m_k))

which is exact if the data have the law of the mixture. What a network knows beyond it, x̂0 − Σ_k p(k | x) m_k, is added
to every m_k.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.mixture import Marginal
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.inverse.moments import White
from nidiff.inverse.observation import Observation
from nidiff.inverse.systems import System, kept, seen

MOST_OBSERVED = 2048  # entries of a row of y


class _Given(NamedTuple):
    """The components given x and y."""

    marginal: Marginal
    factors: Tensor  # Cholesky factors of A V_k Aᵀ + R [K, m, m]
    seen: Tensor  # [m], of the entries of a row of y
    shares: Tensor  # weights of the components [B, K]
    means: Tensor  # of x0 [K, B, *item]


_LAST: WeakKeyDictionary[Observation, tuple[Tensor, int, Level, _Given]] = WeakKeyDictionary()
"""What was computed last, of which the noise of the same step is drawn, too."""


@dataclass(frozen=True)
class MixtureMoments:
    """Moment matching with the mixture model of the data: no gradient goes through the network. Every component takes a
    matrix between the entries that are observed, of which there may be 2048 at most."""

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if denoiser.mixture is None:
            remedy = "give the denoiser mixture=nidiff.fit_mixture(data), or use method='gaussian'"
            raise InputError("method", "mixture", "needs the data's mixture", remedy)
        observation.operator.require_linear(torch.zeros(len(observation.y), *denoiser.mixture.shape), "mixture")
        if observation.is_per_image:
            problem = "is for images that are all seen through the same operator"
            raise InputError("method", "mixture", problem, "sample them one by one, by denoiser.for_images")
        count = len(seen(observation))
        if count > MOST_OBSERVED:
            problem = f"is for at most {MOST_OBSERVED:,} observed entries, and there are {count:,}"
            raise InputError("method", "mixture", problem, "use method='gaussian'")

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        given = self._given(denoiser, observation, x, level)
        _LAST[observation] = (x, _version(x), level, given)
        return torch.einsum("bk,kb...->b...", given.shares, given.means).to(x)

    def vary(
        self, denoiser: Denoiser, observation: Observation, x: Tensor, x0: Tensor, level: Level, white: White
    ) -> Tensor:
        """x0 − E[x0 | x, y] of a draw of x0 given x and y."""
        last = _LAST.get(observation)
        if last is not None and last[0] is x and last[1] == _version(x) >= 0 and last[2] is level:
            given = last[3]
        else:
            given = self._given(denoiser, observation, x, level)
        chance = torch.special.ndtr(white((len(x), 1)).double()).to(given.shares)
        component = (chance > given.shares.cumsum(1)).sum(1).clamp(max=given.shares.shape[1] - 1)
        numbers = white(tuple(x.shape)), white((len(x), given.marginal.rank))
        near = System(observation, x0).near
        noise = observation.draw_noise(near.value, white)
        result = given.means[component, torch.arange(len(x), device=component.device)]
        for k in component.unique().tolist():
            draw = given.marginal.vary(k, *numbers).to(result)
            right = near.forward(draw) + noise
            update = given.marginal.covariance(k, near.transpose(_solve(given, k, right)))
            result = torch.where((component == k).reshape(-1, *[1] * (x.ndim - 1)), result + draw - update, result)
        return (result - torch.einsum("bk,kb...->b...", given.shares, given.means)).to(x)

    def _given(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> _Given:
        x0, mixture, covariance = denoiser(x, level), denoiser.mixture, denoiser.process.covariance
        assert mixture is not None
        row = level.label if isinstance(level.label, int | float) else None
        size = mixture.factors.numel() + mixture.variances.numel()
        key = (mixture, denoiser.process, row)
        marginal = (
            mixture.at(level, covariance)
            if row is None
            else kept(observation, ("marginal", *key), size, lambda: mixture.at(level, covariance))
        )
        index = seen(observation).to(x.device)
        count = len(index)

        def make() -> Tensor:
            some = System(observation, torch.zeros(count, *x.shape[1:], dtype=x0.dtype, device=x0.device))
            units = torch.zeros(count, some.near.value[0].numel(), device=x.device).to(some.near.value)
            units[torch.arange(count, device=x.device), index] = 1.0
            units = units.reshape(some.near.value.shape)
            matrices = []
            for k in range(len(mixture)):
                rows = some.matrix(partial(marginal.covariance, k), units).flatten(1)[:, index]
                matrices.append((rows + rows.T) / 2)
            factors, failed = torch.linalg.cholesky_ex(torch.stack(matrices))
            if bool(failed.any()):
                problem = "is too small for this operator: the matrix of what is observed has no inverse"
                raise InputError("noise", None, problem, "give a larger one, or observe nothing twice")
            return factors

        factors = (
            make()
            if row is None
            else kept(observation, ("factors", str(x.device), *key), len(mixture) * count**2, make)
        )
        logs, means = marginal.components(x, denoiser.condition_values.get(CLASSES))
        shift = x0.to(means) - torch.einsum("bk,kb...->b...", logs.exp(), means)
        means = means + shift
        system = System(observation, x0)
        given = _Given(marginal, factors, index, logs, means)
        values = observation.rows(system.near.value)
        found = []
        for k in range(len(mixture)):
            misfit = values - system.near.forward(means[k])
            weights = _solve(given, k, misfit)
            logdet = 2 * factors[k].diagonal().log().sum()
            logs[:, k] += -0.5 * ((misfit * weights).flatten(1).sum(1) + logdet).to(logs)
            found.append(means[k] + marginal.covariance(k, system.near.transpose(weights)))
        return given._replace(shares=logs.softmax(1), means=torch.stack(found))


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _solve(given: _Given, component: int, right: Tensor) -> Tensor:
    """(A V_k Aᵀ + R)⁻¹ of ``right``, like y."""
    weights = torch.zeros_like(right).flatten(1)
    flat = right.flatten(1)[:, given.seen]
    weights[:, given.seen] = torch.cholesky_solve(flat.T, given.factors[component].to(flat)).T
    return weights.reshape(right.shape)
