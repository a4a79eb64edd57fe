"""Products of covariances: one over the leading axes of the event, one over the rest."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance, check_shape
from nidiff.covariance.spectral import white_in
from nidiff.errors import InputError, expect


class Kronecker(Covariance):
    """a ⊗ b over the axes of ``a`` followed by those of ``b``: Cov(x_st, x_uv) = a_su b_tv, such as frames and pixels.

    The modes are products of one of ``a`` and one of ``b``, and their eigenvalues too, until `with_eigenvalues` gives
    every product its own. Either may be such a product itself.
    """

    def __init__(self, a: Covariance, b: Covariance) -> None:
        for name, factor in (("a", a), ("b", b)):
            expect(name, factor, Covariance)
            if factor.in_real_basis().white_shape != factor.event_shape:
                raise InputError(f"{name} has coefficients in a layout of its own: give it a method in_real_basis().")
        check_shape((*a.event_shape, *b.event_shape), "a ⊗ b")
        self.a, self.b = a, b
        self._a, self._b = a.in_real_basis(), b.in_real_basis()
        super().__init__(
            (*a.event_shape, *b.event_shape),
            torch.tensordot(a.eigenvalues, b.eigenvalues, 0),
            argument="a ⊗ b",
            normalize=False,
            allow_singular=a.is_singular or b.is_singular,
        )

    @property
    def is_product(self) -> bool:
        """Whether the eigenvalues are still the products of those of ``a`` and ``b``."""
        return not self._changed

    def to_basis(self, x: Tensor) -> Tensor:
        return self._over_a(self._a.to_basis, self._b.to_basis(x))

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return self._b.from_basis(self._over_a(self._a.from_basis, coefficients))

    def _over_a(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of the trailing axes applied to the axes of ``a``, which stand before those of ``b``."""
        first, last = len(self.a.event_shape), len(self.b.event_shape)
        behind, before = tuple(range(-last, 0)), tuple(range(-first - last, -first))
        return function(x.movedim(behind, before)).movedim(before, behind)

    def diagonal_of(self, values: Tensor) -> Tensor:
        return self._over_a(self._a.diagonal_of, self._b.diagonal_of(values))

    def rotate_white(self, numbers: Tensor) -> Tensor:
        return self._over_a(self._a.rotate_white, self._b.rotate_white(numbers))

    def check_modes(self, argument: str, values: Tensor) -> None:
        def check(moved: Tensor) -> Tensor:
            self._a.check_modes(argument, moved)
            return moved

        self._b.check_modes(argument, values)
        self._over_a(check, values)

    def evened(self, values: Tensor) -> Tensor:
        return self._over_a(self._a.evened, self._b.evened(values))

    @property
    def boundary(self) -> tuple[str, ...] | None:
        first, second = self.a.boundary, self.b.boundary
        return None if first is None or second is None else first + second

    @cached_property
    def basis(self) -> Any:
        # Where both are periodic, a product of waves is not a wave, though waves with the same |k| along each axis are.
        if self.boundary is not None and not (
            "periodic" in (self.a.boundary or ()) and "periodic" in (self.b.boundary or ())
        ):
            return white_in(self.boundary, self.event_shape).basis
        known = self.a.basis is not None and self.b.basis is not None
        return (len(self.a.event_shape), self.a.basis, self.b.basis) if known else None
