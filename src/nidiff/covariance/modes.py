"""Diagonal operators, used like numbers: samplers, targets and posteriors are formulas of such coefficients."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Union

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis
from nidiff.covariance.checks import check_has_numbers
from nidiff.errors import InputError
from nidiff.precision import with_float64

Coefficient = Union[float, "Modes"]


class Modes:
    """The operator with eigenvalues ``values`` in ``basis``; without a basis the same number in every mode of any.

    ``values`` is float64 of shape [*event], or [B, *event] with one row per image; without a basis it is a number or
    [B], and costs no transform. Arithmetic with numbers and other modes is mode by mode. Two operands need one basis,
    or one whose last axes are the other's (`Basis.extends`): an operand over [*event] is the same for every channel of
    one over [C, *event]. ``modes * x``, or ``modes @ x``, applies the operator to a tensor x [B, ..., *event], in x's
    dtype.
    """

    __array_ufunc__ = None  # numpy numbers leave the arithmetic to us

    def __init__(self, values: Tensor | float, basis: Basis | None = None) -> None:
        if not isinstance(values, Tensor):
            values = torch.tensor(values, dtype=torch.float64, device="cpu")
        self.values = values if values.dtype is torch.float64 else with_float64(values).double()
        self.basis = basis

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of the modes; () without a basis."""
        return () if self.basis is None else self.basis.event_shape

    @property
    def per_image(self) -> bool:
        """Whether there is one row of values per image."""
        return self.values.ndim > len(self.event_shape)

    @property
    def is_constant(self) -> bool:
        """Whether every mode has the same number (per image, where there are rows): a multiple of the identity."""
        flat = self.values.flatten(self.values.ndim - len(self.event_shape))
        return self.basis is None or bool((flat == flat[..., :1]).all())

    @property
    def largest(self) -> Tensor:
        """The largest |number| over the modes: a scalar, or one per image."""
        return self.values.abs().amax(tuple(range(-len(self.event_shape), 0))) if self.basis else self.values.abs()

    def map(self, function: Callable[..., Tensor], *others: Coefficient) -> "Modes":
        """A function of torch, number by number, of this and other coefficients."""
        operands, basis = [self, *map(as_modes, others)], self.basis
        for modes in operands:
            if modes.basis is not basis:
                operands, basis = _in_one_basis(operands)
                return Modes(function(*(_over(operand, basis) for operand in operands)), basis)
        return Modes(function(*[operand.values for operand in operands]), basis)

    def _arithmetic(self, function: Callable[..., Tensor], other: Any) -> "Modes":
        if isinstance(other, float | int):  # which needs no tensor
            return Modes(function(self.values, other), self.basis)
        return self.map(function, other)

    def apply(self, x: Tensor) -> Tensor:
        """Every mode of x [B, ..., *event] times its number."""
        if self.basis is None:
            values = self.values.to(x.device, x.dtype) if self.values.ndim else self.values
            return values.reshape(-1, *[1] * (x.ndim - 1)) * x if values.ndim else values * x
        self.check_trailing(x.shape, "x")
        values, basis, event = self.values, self.basis, self.event_shape
        if self.per_image:
            values = values.reshape(len(values), *[1] * (x.ndim - 1 - len(event)), *event)
        return outside_autocast(x, lambda work: basis.multiply(values.to(work.device, work.dtype), work))

    def check_trailing(self, shape: Sequence[int], argument: str) -> None:
        """Refuse a ``shape`` whose last axes are not the event."""
        shape = tuple(shape)
        if shape[max(0, len(shape) - len(self.event_shape)) :] != self.event_shape:
            problem = f"has shape {shape}, but {type(self).__name__} is over trailing axes {self.event_shape}"
            raise InputError(argument, None, problem, "reshape it, or use one for its shape")

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.apply(x)

    def __mul__(self, other: Any) -> Any:
        return self.apply(other) if isinstance(other, Tensor) and other.ndim else self._arithmetic(torch.mul, other)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """``x * modes`` and ``x / modes``, which torch asks about first; in a compiled function ``modes * x`` too."""
        left, right = args
        if function.__name__ in ("mul", "__mul__", "__rmul__", "matmul"):
            return left.__mul__(right) if isinstance(left, Modes) else right.__mul__(left)
        if function.__name__ in ("div", "true_divide", "truediv", "__truediv__"):
            return left.__truediv__(right) if isinstance(left, Modes) else right.__rtruediv__(left)
        return NotImplemented

    def __add__(self, other: Any) -> "Modes":
        return self._arithmetic(torch.add, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Modes":
        return self._arithmetic(torch.sub, other)

    def __rsub__(self, other: Any) -> "Modes":
        return -self + other

    def __truediv__(self, other: Any) -> "Modes":
        return self._arithmetic(torch.div, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self**-1 * other

    def __pow__(self, exponent: float) -> "Modes":
        return self.map(lambda values: values.pow(exponent))

    def __neg__(self) -> "Modes":
        return self.map(torch.neg)

    def __float__(self) -> float:
        """The number, where there is one for all modes and images."""
        return float(self.values)

    def root(self) -> "Modes":
        """The square root; 0 of what rounding left below 0."""
        return self.map(lambda values: values.clamp(min=0.0).sqrt())

    def ratio(self, other: Coefficient) -> "Modes":
        """self / other, and 0 for a mode of which ``other`` is 0."""
        return self.map(lambda a, b: torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b)), other)

    def __repr__(self) -> str:
        return f"Modes({self.values.min().item():.4g} … {self.values.max().item():.4g}, {self.basis!r})"


def as_modes(value: Any) -> Modes:
    """A coefficient as modes: a number, or a tensor [B] of one per image."""
    return value if isinstance(value, Modes) else Modes(value)


def outside_autocast(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of x in float32 or better, and its result in x's dtype."""
    check_has_numbers("x", x)
    with torch.autocast(x.device.type, enabled=False):
        return function(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def combine(
    terms: Sequence[tuple[Modes, Tensor]], analyse: Callable[[Basis, Tensor], Tensor]
) -> tuple[Tensor, Basis | None]:
    """The sum of ``terms``, tensors [B, ..., *event] whose modes are multiplied by their coefficients: in the one basis
    of all these, which ``analyse`` leads to; where none has a basis, the sum itself."""
    modes, basis = _in_one_basis([coefficient for coefficient, _ in terms])
    if basis is None:
        return reduce(torch.add, (coefficient * x for coefficient, x in terms)), basis
    total: Tensor | None = None
    for coefficient, (_, x) in zip(modes, terms, strict=True):
        coefficients, values = analyse(basis, x), coefficient.values
        if coefficient.per_image:
            event = coefficient.event_shape
            values = values.reshape(len(values), *[1] * (x.ndim - 1 - len(event)), *event)
        values = values.to(coefficients.device, coefficients.dtype)
        total = values * coefficients if total is None else torch.addcmul(total, values, coefficients)
    assert total is not None
    return total, basis


def _in_one_basis(operands: list[Modes], freed: bool = False) -> tuple[list[Modes], Basis | None]:
    """The operands, and a basis in which all of them are diagonal."""
    bases = [modes.basis for modes in operands if modes.basis is not None]
    widest = max(bases, key=lambda basis: len(basis.event_shape), default=None)
    if widest is None or all(widest.extends(basis) for basis in bases):
        return operands, widest
    if not freed:
        return _in_one_basis([_freed(modes, operands) for modes in operands], freed=True)
    names = " and ".join(map(repr, bases))
    raise InputError("basis", None, f"of two operators differs: {names}", "use one for Σ, schedule and data")


def _freed(modes: Modes, operands: list[Modes]) -> Modes:
    """The operator in a basis of another operand where it does not vary: a multiple of the identity is diagonal in
    every basis, and what does not vary over the last axes is so in every basis of these."""
    basis = modes.basis
    if basis is None or modes.is_constant:
        axes = len(modes.event_shape)
        return Modes(modes.values.flatten(-axes)[..., 0]) if axes else modes
    for inner in (other.basis for other in operands):
        if basis.inner is not None and inner is not None and inner.event_shape == basis.inner.event_shape:
            flat = modes.values.flatten(-len(inner.event_shape))
            wider = basis.with_inner(inner) if bool((flat == flat[..., :1]).all()) else None
            if wider is not None:
                return Modes(modes.values, wider)
    return modes


def _over(modes: Modes, basis: Basis | None) -> Tensor:
    """The values with axes of length 1 for those of ``basis`` that they do not have, behind the axis of images."""
    missing = len(() if basis is None else basis.event_shape) - len(modes.event_shape)
    if not (missing and modes.per_image):
        return modes.values
    return modes.values.reshape(len(modes.values), *[1] * missing, *modes.event_shape)
