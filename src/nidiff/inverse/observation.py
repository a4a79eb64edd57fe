"""What was seen: y = A(x0) + n, n ~ N(0, R)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.errors import TENSOR, InputError, expect, shown
from nidiff.inverse.operators import Function, Operator, mask
from nidiff.recipe import is_number, plain


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
        if y.is_complex() or not y.ndim:
            raise InputError(
                f"y has dtype {y.dtype} and shape {tuple(y.shape)}: give real numbers, one row per image; of complex "
                "ones give both parts, torch.view_as_real(y)."
            )
        expect("operator", operator, Operator, "build it by a function of nidiff.operators, such as pool(4)")
        self.operator, self.noise = operator, _checked_noise(noise)
        self.y = _checked_values(y if y.is_floating_point() else y.float(), operator)

    @classmethod
    def missing(cls, y: Tensor, noise: float | Tensor | Covariance = 0.0) -> "Observation":
        """Images with NaN where nothing was seen."""
        expect("y", y, Tensor, TENSOR)
        return cls(y, mask(~y.isnan()), noise)

    @property
    def is_exact(self) -> bool:
        """Whether some entry was seen without noise."""
        if isinstance(self.noise, Covariance):
            return self.noise.is_singular
        return bool((torch.as_tensor(self.noise) == 0).any())

    def for_images(self, index: Tensor) -> "Observation":
        """The same of some of the images, where there is one row for each."""
        if len(self.y) == 1:
            return self
        rows, (last, *before) = index.to(self.y.device), self.operator.parts
        if any(self._is_per_image(part.observed) for part in before):
            raise InputError("operator has a mask per image before another operator: give the images in one batch.")
        if last.observed is not None and self._is_per_image(last.observed):
            last = mask(last.observed[index.to(last.observed.device)]).parts[0]
        return Observation(self.y[rows], Operator(last, *before), self.noise)

    def _is_per_image(self, seen: Tensor | None) -> bool:
        return seen is not None and seen.ndim == self.y.ndim and len(seen) > 1

    def fit(self, x: Tensor) -> None:
        """Refuse to have been seen of other images than these."""
        seen = self.operator(x)
        if not isinstance(seen, Tensor) or not seen.ndim or seen.is_complex() or len(seen) != len(x):
            what = f"{seen.dtype} {tuple(seen.shape)}" if isinstance(seen, Tensor) else f"a {type(seen).__name__}"
            raise InputError(f"operator makes {what} of x {tuple(x.shape)}: let it return real rows, one per image.")
        self.rows(seen)
        self.variance(seen)
        self.operator.check_transposes(x)

    def rows(self, like: Tensor) -> Tensor:
        """y, one row per image, for A(x) = ``like``."""
        item, y = tuple(like.shape[1:]), self.y
        if tuple(y.shape[1:]) != item:
            remedy = "put an axis of images in front, y[None]"
            remedy = remedy if tuple(y.shape) == item else "give y of that shape, or another operator"
            raise InputError(
                f"y has rows {tuple(y.shape[1:])}, and operator={self.operator!r} makes {item} of an image: {remedy}."
            )
        if len(y) not in (1, len(like)):
            raise InputError(f"y has {len(y)} rows for {len(like)} images: give one per image, or one for all.")
        return y.to(like).expand(like.shape)

    def variance(self, like: Tensor) -> Function:
        """v -> R v, for A(x) = ``like``; only between entries that a mask sees."""
        noise, seen = self.noise, self.operator.observed
        if isinstance(noise, Covariance):
            noise.check_trailing(tuple(like.shape[1:]), "noise")
            return lambda v: _where(seen, noise.matmul(_where(seen, v)))
        if isinstance(noise, float):
            return lambda v: noise**2 * v
        try:
            squared = noise.to(like).square().expand(like.shape)
        except RuntimeError as error:
            raise InputError(
                f"noise has shape {tuple(noise.shape)}, and y has rows {tuple(like.shape[1:])}: give one standard "
                "deviation per entry of a row."
            ) from error
        return lambda v: squared * v

    def __repr__(self) -> str:
        return f"Observation(y {tuple(self.y.shape)}, {self.operator!r}, noise={shown(self.noise)})"


class Seen(NamedTuple):
    """What an observation says at one x̂0: the misfit y − A(x̂0), A, Aᵀ and R as functions of rows."""

    misfit: Tensor
    push: Function
    pull: Function
    variance: Function


def seen_at(observation: Observation, x0: Tensor) -> Seen:
    """In float64, where the operator takes it."""
    exact = x0.device.type != "mps" and observation.operator.own_dtype
    work = x0.double() if exact else x0
    value, push, pull = observation.operator.at(work)
    wide = value if x0.device.type == "mps" else value.double()

    def forward(v: Tensor) -> Tensor:
        return push(v.to(work)).to(wide)

    def backward(v: Tensor) -> Tensor:
        return pull(v.to(value)).to(wide.dtype)

    return Seen(observation.rows(wide) - wide, forward, backward, observation.variance(wide))


def _where(seen: Tensor | None, v: Tensor) -> Tensor:
    return v if seen is None else torch.where(seen.to(v.device), v, 0.0)


def _checked_values(y: Tensor, operator: Operator) -> Tensor:
    """y with 0 where nothing was seen; NaN elsewhere is refused."""
    seen = operator.observed
    if seen is not None:
        try:
            y = torch.where(seen.to(y.device), y, 0.0)
        except RuntimeError as error:
            raise InputError(f"mask has shape {tuple(seen.shape)}, and y {tuple(y.shape)}: make them fit.") from error
    if not bool(y.isfinite().all()):
        place = tuple((~y.isfinite()).nonzero()[0].tolist())
        raise InputError(
            f"y has NaN or infinite values, the first at {place}, where no mask covers them: use a mask that is false "
            "there, or Observation.missing(y)."
        )
    return y.detach()


def _checked_noise(noise: Any) -> float | Tensor | Covariance:
    if isinstance(noise, Covariance):
        return noise
    noise = plain(noise)
    if is_number(noise) and noise >= 0:
        return float(noise)
    if not isinstance(noise, Tensor) or noise.is_complex() or not bool((noise.isfinite() & (noise >= 0)).all()):
        raise InputError(
            f"noise={shown(noise)} must be a standard deviation of 0 or more, a tensor of such, or a Covariance."
        )
    return noise.detach()
