"""An observation y = A(x0) + n, n ~ N(0, R)."""

from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import check_has_numbers
from nidiff.covariance.covariance import Covariance
from nidiff.errors import TENSOR, InputError, expect, shown
from nidiff.inverse.operators import Function, Operator, Part, mask
from nidiff.recipe import plain


class Observation:
    """y = A(x0) + n of images x0, in the model's units.

    Args:
        y: one row per image [B, …], or one for all [1, …].
        operator: A, of `nidiff.operators`.
        noise: the standard deviation of n, a number of 0 or more; or one per entry of a row of y; or a `Covariance`
            over the last axes of y: then it is R itself.
    """

    def __init__(self, y: Tensor, operator: Operator, noise: float | Tensor | Covariance = 0.0) -> None:
        expect("y", y, Tensor, TENSOR)
        check_has_numbers("y", y)
        y = y.detach()
        if operator.observed is not None:  # entries that are not observed become 0
            y = operator.parts[0].apply(y)
        if y.is_complex() or not bool(y.isfinite().all()):
            problem = "is complex, or has NaN or infinite entries that no mask covers"
            raise InputError("y", None, problem, "use a mask that is false there, or Observation.missing(y)")
        self.y, self.operator, self.noise = y if y.is_floating_point() else y.float(), operator, _as_noise(noise, y)

    @classmethod
    def missing(cls, y: Tensor, noise: float | Tensor | Covariance = 0.0) -> "Observation":
        """Images with NaN where nothing was observed."""
        return cls(y, mask(~y.isnan()), noise)

    @property
    def is_exact(self) -> bool:
        """Whether some entry was observed without noise."""
        if isinstance(self.noise, Covariance):
            return self.noise.is_singular
        return bool((torch.as_tensor(self.noise) == 0).any())

    def for_images(self, index: Tensor) -> "Observation":
        """The observation of some of the images, where there is one row for each."""
        if len(self.y) == 1:
            return self
        parts: list[Part] = []
        for part in self.operator.parts:
            observed = part.observed
            if observed is not None and observed.ndim == self.y.ndim and len(observed) > 1:  # one per image
                parts += mask(observed[index.cpu()]).parts
            else:
                parts.append(part)
        noise = self.noise
        if isinstance(noise, Tensor) and noise.ndim == self.y.ndim and len(noise) > 1:  # one per image
            noise = noise[index.to(noise.device)].squeeze(0)
        return Observation(self.y[index.to(self.y.device)], Operator(*parts), noise)

    def check_images(self, x: Tensor) -> None:
        """Refuse images of another shape, and an operator that is not what it was declared to be."""
        y = self.operator(x)
        self.rows(y)
        self.variance(y)
        self.operator.check_transposes(x)

    def rows(self, like: Tensor) -> Tensor:
        """y, one row per image, for A(x) = ``like``."""
        y = self.y
        if y.shape[1:] != like.shape[1:] or not like.ndim or len(y) not in (1, len(like)):
            problem = f"has shape {tuple(y.shape)}, and operator={self.operator!r} makes {tuple(like.shape)}"
            raise InputError("y", None, problem, "give one row per image, or one for all, y[None]")
        return y.to(like).expand(like.shape)

    def variance(self, like: Tensor) -> Function:
        """v -> R v, for A(x) = ``like``; only between entries that are observed."""
        noise, observed = self.noise, self.operator.observed
        if isinstance(noise, Covariance):
            noise.check_trailing(tuple(like.shape[1:]), "noise")
            return lambda v: _where(observed, noise.matmul(_where(observed, v)))
        if isinstance(noise, float):
            return lambda v: noise**2 * v
        squared = noise.to(like).square()
        return lambda v: squared * v

    def __repr__(self) -> str:
        return f"Observation(y {tuple(self.y.shape)}, {self.operator!r}, noise={shown(self.noise)})"


def _where(observed: Tensor | None, v: Tensor) -> Tensor:
    return v if observed is None else torch.where(observed.to(v.device), v, 0.0)


def _as_noise(noise: Any, y: Tensor) -> float | Tensor | Covariance:
    if isinstance(noise, Covariance):
        return noise
    deviations = torch.as_tensor(noise).detach()
    try:
        sound = bool((deviations.isfinite() & (deviations >= 0)).expand(y.shape).all())
    except RuntimeError:
        sound = False
    if not sound:
        remedy = "give a standard deviation of 0 or more, one per entry of a row of y, or a Covariance"
        raise InputError("noise", noise, f"does not fit y {tuple(y.shape)}, is negative or not finite", remedy)
    return deviations if deviations.ndim else float(plain(noise))
