"""A coefficient that differs from mode to mode: one number per mode of an orthonormal basis, used like a number.

Samplers and targets are written for numbers. With `Modes` in their place the same lines hold mode by mode:
``kept * x`` multiplies every mode of x by its own number, through the basis and back.
"""

from collections.abc import Callable
from typing import Any, Union

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.errors import InputError

Coefficient = Union[float, Tensor, "Modes"]
"""A number, one per image (a tensor [B]), or one per mode."""


class Modes:
    """One number per mode of the eigenbasis of ``basis``: ``values`` is float64 [*event], or [B, *event] per image.

    Arithmetic with numbers, tensors [B] and other modes is mode by mode. Of two bases, one over [*event] and one over
    [channels, *event], the larger is that of the result: the first has to be its spatial part. ``modes * x`` applies
    the modes to a tensor x [B, ..., *event].
    """

    __array_ufunc__ = None  # a number of numpy leaves the arithmetic to us

    def __init__(self, values: Tensor, basis: Covariance) -> None:
        self.values, self.basis = values, basis

    @property
    def per_image(self) -> bool:
        """Whether there is one row of values per image."""
        return self.values.ndim > len(self.basis.event_shape)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Modes":
        """A function of every number."""
        return Modes(function(self.values), self.basis)

    def __call__(self, x: Tensor) -> Tensor:
        """Every mode of x [B, ..., *event] times its number."""
        values = self.values
        if self.per_image:
            between = x.ndim - 1 - len(self.basis.event_shape)
            values = values.reshape(len(values), *[1] * between, *self.basis.event_shape)
        return self.basis.scaled(x, values)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Tensor) and other.ndim > 1:
            return self(other)
        return self._with(other, torch.mul)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> "Modes":
        return self._with(other, torch.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Modes":
        return self._with(other, torch.sub)

    def __rsub__(self, other: Any) -> "Modes":
        return -self + other

    def __truediv__(self, other: Any) -> "Modes":
        return self._with(other, torch.div)

    def __rtruediv__(self, other: Any) -> Any:
        return self**-1 * other

    def __pow__(self, exponent: float) -> "Modes":
        return self.map(lambda values: values**exponent)

    def __neg__(self) -> "Modes":
        return self.map(torch.neg)

    def _with(self, other: Any, operation: Callable[[Tensor, Any], Tensor]) -> "Modes":
        if isinstance(other, Modes):
            larger = self._common(other)
            return Modes(operation(self._over(larger), other._over(larger)), larger)
        if isinstance(other, Tensor) and other.ndim:
            other = other.reshape(-1, *[1] * len(self.basis.event_shape))
        return Modes(operation(self.values, other), self.basis)

    def _common(self, other: "Modes") -> Covariance:
        """The larger of the two bases; two that do not fit are refused."""
        if self.basis is other.basis:
            return self.basis
        smaller, larger = sorted((self.basis, other.basis), key=lambda basis: len(basis.event_shape))
        if not any(smaller is own or smaller.shares_basis(own) for own in (larger, larger.spatial)):
            raise InputError(
                f"{smaller!r} and {larger!r} have different modes: use one basis for Σ, schedule and data."
            )
        return larger

    def _over(self, basis: Covariance) -> Tensor:
        """The values for a basis with axes in front, such as channels, that are the same for all of them."""
        missing = len(basis.event_shape) - len(self.basis.event_shape)
        if not (missing and self.per_image):
            return self.values
        return self.values.reshape(len(self.values), *[1] * missing, *self.basis.event_shape)

    def __repr__(self) -> str:
        return f"Modes({self.values.min().item():.4g} … {self.values.max().item():.4g} in the basis of {self.basis!r})"


def elementwise(function: Callable[..., Tensor], *coefficients: Coefficient) -> Any:
    """A function of torch, of one or more coefficients; a number for numbers."""
    modes = [each for each in coefficients if isinstance(each, Modes)]
    if not modes:
        if any(isinstance(each, Tensor) for each in coefficients):
            return function(*[torch.as_tensor(each, dtype=torch.float64) for each in coefficients])
        return function(*[torch.tensor(each, dtype=torch.float64, device="cpu") for each in coefficients]).item()
    like = modes[0]
    for each in modes[1:]:
        like = like + 0.0 * each
    zero = 0.0 * like
    return Modes(function(*[(zero + each).values for each in coefficients]), zero.basis)


def root(value: Coefficient) -> Any:
    """The square root; 0 of what rounding left below 0."""
    if isinstance(value, Modes | Tensor):
        return elementwise(lambda values: values.clamp(min=0.0).sqrt(), value)
    return max(value, 0.0) ** 0.5


def ratio(a: Coefficient, b: Coefficient) -> Any:
    """a / b, and 0 for a mode of which b is 0."""
    if isinstance(a, Modes | Tensor) or isinstance(b, Modes | Tensor):
        return elementwise(lambda x, y: torch.where(y == 0, 0.0, x / torch.where(y == 0, 1.0, y)), a, b)
    return a / b if b else 0.0


def largest(value: Coefficient) -> Tensor:
    """The largest |number| over the modes, one per image where there are such: what a check looks at."""
    if isinstance(value, Modes):
        axes = tuple(range(-len(value.basis.event_shape), 0))
        return value.values.abs().amax(axes)
    return torch.as_tensor(value, dtype=torch.float64).abs()
