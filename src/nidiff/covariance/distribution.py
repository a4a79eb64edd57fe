"""N(0, Σ) as a `torch.distributions.Distribution`."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity, Kronecker
from nidiff.errors import InputError
from nidiff.recipe import check_whole


class GaussianField(Distribution):
    """N(0, Σ) over [channels, *event_shape], independent between channels: the base of a flow or the prior of a VAE.

    Without ``channels`` the event is Σ's own. Draws use torch's global generator, as every torch distribution does.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    has_rsample = True

    def __init__(self, covariance: Covariance, channels: int | None = None, validate_args: bool | None = None) -> None:
        covariance.require_invertible("the density of N(0, Σ)")
        if channels is not None:
            covariance = Kronecker(Identity((check_whole("channels", channels),)), covariance)
        self.covariance = covariance
        super().__init__(event_shape=torch.Size(covariance.event_shape), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        return torch.zeros(self._extended_shape())

    mode = mean

    @property
    def variance(self) -> Tensor:
        """The marginal variances: the diagonal of Σ."""
        return self.covariance.marginal_variance.to(torch.get_default_dtype()).expand(self._extended_shape())

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "GaussianField":
        """The same distribution, ``batch_shape`` times independently."""
        batch = torch.empty(self.batch_shape, device="meta").expand(torch.Size(batch_shape)).shape
        other: GaussianField = self._get_checked_instance(GaussianField, _instance)
        other.covariance = self.covariance
        super(GaussianField, other).__init__(batch, self.event_shape, validate_args=False)
        other._validate_args = self._validate_args
        return other

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.covariance.sample(shape, dtype=torch.get_default_dtype())

    def log_prob(self, value: Tensor) -> Tensor:
        self.covariance.check_trailing(value.shape, "value")
        if self._validate_args and value.numel():
            self._validate_sample(value)
        batch = value.shape[: value.ndim - len(self.event_shape)]
        log_prob = self.covariance.log_prob(value.reshape(batch.numel(), *self.event_shape)).reshape(batch)
        return log_prob.expand(torch.broadcast_shapes(batch, self.batch_shape))

    def entropy(self) -> Tensor:
        """½ (N (1 + log 2π) + log det Σ)."""
        entropy = 0.5 * (self.covariance.size * (1 + math.log(2 * math.pi)) + self.covariance.logdet())
        return torch.tensor(entropy).expand(self.batch_shape)


@register_kl(GaussianField, GaussianField)  # type: ignore[untyped-decorator]
def kl_divergence(p: GaussianField, q: GaussianField) -> Tensor:
    """KL(p ‖ q) = ½ (tr Σ_q⁻¹ Σ_p − D + log det Σ_q − log det Σ_p), per mode where both are diagonal in one basis."""
    if p.event_shape != q.event_shape:
        problem = f"is over events {tuple(p.event_shape)} and q over {tuple(q.event_shape)}"
        raise InputError("p", None, problem, "use one shape")
    a, b = p.covariance, q.covariance
    divergence = 0.5 * (_trace_of_ratio(a, b) - a.size + b.logdet() - a.logdet())
    return torch.tensor(divergence).expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


def _trace_of_ratio(a: Covariance, b: Covariance) -> float:
    """tr(B⁻¹ A) = Σ_j ‖B^-½ A^½ e_j‖² over the entries j."""
    if a.basis == b.basis or a.is_constant or b.is_constant:
        return (a.eigenvalues / b.eigenvalues).sum().item()
    if a.size > 16384:
        problem = f"and q do not share a basis, and an event of {a.size} variables costs as many transforms"
        raise InputError("p", None, problem, "use an event of at most 16384")
    total = 0.0
    for entries in torch.arange(a.size, device="cpu").split(256):
        impulses = torch.nn.functional.one_hot(entries, a.size).double().reshape(-1, *a.event_shape)
        total += b.inv_sqrt(a.sqrt(impulses)).square().sum().item()
    return total
