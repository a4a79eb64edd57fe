"""N(0, Σ) as a `torch.distributions.Distribution`."""

import copy
import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from nidiff.covariance.operator import Covariance, check_shape
from nidiff.errors import InputError


class GaussianField(Distribution):
    """N(0, Σ) over [channels, *event_shape], independent between channels: the base of a flow or the prior of a VAE.

    Without ``channels`` the event is Σ's own. Draws use torch's global generator, as every torch distribution does.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    has_rsample = True

    def __init__(self, covariance: Covariance, channels: int | None = None) -> None:
        covariance.require_invertible("the density of N(0, Σ)")
        self.covariance = covariance
        self._channels = 1 if channels is None else check_shape((channels,), "channels")[0]
        front = () if channels is None else (self._channels,)
        super().__init__(event_shape=torch.Size((*front, *covariance.event_shape)), validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        return torch.zeros(self.event_shape)

    @property
    def variance(self) -> Tensor:
        """The marginal variances: the diagonal of Σ."""
        return self.covariance.marginal_variance.to(torch.get_default_dtype()).expand(self.event_shape)

    def expand(self, batch_shape: torch.Size | list[int] | tuple[int, ...], _instance: Any = None) -> "GaussianField":
        """The same distribution, ``batch_shape`` times independently."""
        other = copy.copy(self)
        other._batch_shape = torch.Size(batch_shape)
        return other

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        shape = (*sample_shape, *self.batch_shape, *self.event_shape)
        return self.covariance.sample(shape, dtype=torch.get_default_dtype())

    def log_prob(self, value: Tensor) -> Tensor:
        if value.shape[max(0, value.ndim - len(self.event_shape)) :] != self.event_shape:
            raise InputError(f"value has shape {tuple(value.shape)}: its last axes must be {tuple(self.event_shape)}.")
        batch = value.shape[: value.ndim - len(self.event_shape)]
        return self.covariance.log_prob(value.reshape(-1, *self.event_shape)).reshape(batch)

    def entropy(self) -> Tensor:
        """C/2 (N (1 + log 2π) + log det Σ)."""
        size, logdet = self.covariance.size, self.covariance.logdet()
        return torch.tensor(0.5 * self._channels * (size * (1 + math.log(2 * math.pi)) + logdet))
