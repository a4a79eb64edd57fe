"""What is seen of an image: operators y = A(x) on x [B, C, *event].

``a @ b`` is a after b: ``mask(m) @ pool(4)`` sees some of the blocks. An operator needs no transpose of its own:
autograd has it, and always the right one.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance, as_numbers
from nidiff.covariance.spectral import Boundary, check_boundary, frequencies, wavenumber, white_in
from nidiff.errors import InputError, shown
from nidiff.recipe import check_number, check_whole, is_number, plain

Function = Callable[[Tensor], Tensor]


class Part(NamedTuple):
    """One of the operators that a composed one consists of."""

    name: str
    apply: Function
    is_linear: bool = True
    transpose: Function | None = None
    observed: Tensor | None = None
    """Of a mask: which entries it sees; the others come out as 0."""
    own_dtype: bool = True
    """Whether it takes floats of every dtype; else it is called in that of the images."""


class Tangent(NamedTuple):
    """An operator near one x: its value, its derivative A (``push``) and the transpose of that (``pull``)."""

    value: Tensor
    push: Function
    pull: Function


class Operator:
    """y = A(x) for a batch x [B, C, *event]; made by the functions of this module."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts  # the last is applied first

    def __call__(self, x: Tensor) -> Tensor:
        for part in reversed(self.parts):
            x = part.apply(x)
        return x

    def __matmul__(self, other: object) -> "Operator":
        """``self`` after ``other``."""
        return Operator(*self.parts, *other.parts) if isinstance(other, Operator) else NotImplemented

    @property
    def is_linear(self) -> bool:
        return all(part.is_linear for part in self.parts)

    @property
    def observed(self) -> Tensor | None:
        """Which entries of y are seen, where it ends with a mask; None: all of them."""
        return self.parts[0].observed

    @property
    def is_mask(self) -> bool:
        """Whether it is a mask and nothing else."""
        return all(part.observed is not None for part in self.parts)

    @property
    def own_dtype(self) -> bool:
        """Whether it takes floats of every dtype, not only those of the images."""
        return all(part.own_dtype for part in self.parts)

    def at(self, x: Tensor) -> Tangent:
        """The operator and its derivative at x; of a linear one that is the operator itself."""
        pushes, pulls = [], []
        for part in reversed(self.parts):
            tangent = _tangent(part, x)
            x = tangent.value
            pushes.append(tangent.push)
            pulls.append(tangent.pull)
        return Tangent(x, _chained(pushes), _chained(pulls[::-1]))

    def transpose(self, y: Tensor, x: Tensor) -> Tensor:
        """Aᵀ y, for images like x; of one that is not linear, that of its derivative at x."""
        return self.at(x).pull(y)

    def check_transposes(self, x: Tensor) -> None:
        """Refuse a function that is not linear though it was said to be, and a transpose that is not that of A."""
        generator = torch.Generator("cpu").manual_seed(0)
        for part in reversed(self.parts):
            y = part.apply(x)
            if part.is_linear and not part.own_dtype:
                u, w = (torch.randn(x.shape, generator=generator).to(x) for _ in range(2))
                seen = part.apply(u)
                if not _near(part.apply(u + w), seen + part.apply(w)):
                    raise InputError("linear got a function that is not linear: use operators.function for it.")
                v = torch.randn(y.shape, generator=generator).to(y)
                if part.transpose is not None:
                    back = part.transpose(v)
                    if not isinstance(back, Tensor) or back.shape != x.shape:
                        raise InputError(
                            f"transpose makes {_shape(back)} of y's {_shape(v)}, and x has {_shape(x)}: correct it, or "
                            "leave it out, and autograd finds it."
                        )
                    one, other = (seen * v).sum(), (u * back).sum()
                    size = seen.norm() * v.norm() + u.norm() * back.norm()
                    if not bool((one - other).abs() <= 1e-4 * size):
                        raise InputError(
                            f"transpose is not that of the function, ⟨A u, v⟩ = {one.item():.4g} and ⟨u, Aᵀ v⟩ = "
                            f"{other.item():.4g}: correct it, or leave it out, and autograd finds it."
                        )
            x = y

    def __repr__(self) -> str:
        return " @ ".join(part.name for part in self.parts)


def mask(mask: Tensor | Sequence[Any]) -> Operator:
    """The entries where ``mask`` is true: [*event], [C, *event], or [B, C, *event] with one per image.

    y is of x's shape. What it has outside of the mask is not looked at, and may be NaN.
    """
    numbers = as_numbers(mask, "mask")
    if not bool(((numbers == 0) | (numbers == 1)).all()):
        raise InputError("mask must be true or 1 where the image is seen, and false or 0 elsewhere: give such.")
    seen = numbers.bool()
    if not seen.ndim or not bool(seen.any()):
        raise InputError("mask sees nothing: make it true where the image is seen.")

    def apply(x: Tensor) -> Tensor:
        try:
            fits = torch.broadcast_shapes(seen.shape, x.shape) == x.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(f"mask has shape {tuple(seen.shape)}, and it is to see {_shape(x)}: make one for that.")
        return torch.where(seen.to(x.device), x, 0.0)

    return Operator(Part(f"mask({', '.join(map(str, seen.shape))})", apply, observed=seen))


def subsample(step: int | Sequence[int]) -> Operator:
    """Every ``step``-th pixel along all axes of the event, from the first on; or one step per axis."""
    steps = _per_axis("step", step)

    def apply(x: Tensor) -> Tensor:
        for axis, each in enumerate(reversed(_over(x, steps, "step")), 1):
            x = x[(slice(None),) * (x.ndim - axis) + (slice(None, None, each),)]
        return x

    return Operator(Part(f"subsample({step})", apply))


def pool(factor: int | Sequence[int]) -> Operator:
    """Means over blocks of ``factor`` pixels along all axes of the event, or of one factor per axis."""
    factors = _per_axis("factor", factor)

    def apply(x: Tensor) -> Tensor:
        own = _over(x, factors, "factor")
        event = x.shape[x.ndim - len(own) :]
        if any(n % each for n, each in zip(event, own, strict=True)):
            raise InputError(f"factor={factor} does not divide the event {tuple(event)}: give one that does.")
        blocks = [size for n, each in zip(event, own, strict=True) for size in (n // each, each)]
        return x.reshape(*x.shape[: x.ndim - len(own)], *blocks).mean(tuple(range(-2 * len(own) + 1, 0, 2)))

    return Operator(Part(f"pool({factor})", apply))


def blur(width: float | Sequence[float], boundary: Boundary = "reflecting") -> Operator:
    """The mean with Gaussian weights of standard deviation ``width`` pixels (or one per axis), in the modes of
    ``boundary``: a wave of ω = 2π · frequency is multiplied by exp(−½ ω² width²)."""
    widths = [check_number("width", each) for each in (width if isinstance(width, list | tuple) else [width])]
    if not widths or min(widths) < 0:
        raise InputError(f"width={shown(width)} must be the pixels that a blur is wide, 0 or more.")
    check_boundary(boundary)

    def apply(x: Tensor) -> Tensor:
        own = _over(x, widths, "width")
        event = tuple(x.shape[x.ndim - len(own) :])
        return _basis(boundary, event).scaled(x, _gaussian_response(tuple(own), check_boundary(boundary), event))

    return Operator(Part(f"blur({width})", apply, transpose=apply))  # it is symmetric


def waves(keep: float | Tensor, boundary: Boundary = "periodic") -> Operator:
    """Some of the modes of ``boundary`` (waves, cosines, sines): y [B, C, K] are their real coefficients.

    ``keep`` is a number, for the modes |k| ≤ keep in units of the lowest frequency; or true for each mode [*event]
    that is seen, in the order of `nidiff.Spectral`.
    """
    check_boundary(boundary)
    chosen: Any = plain(keep)
    if not is_number(chosen):
        chosen = keep
        if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool or not chosen.ndim:
            raise InputError(f"keep={shown(keep)} must be the largest |k|, or a tensor of true and false per mode.")
    if not (bool(chosen.any()) if isinstance(chosen, Tensor) else chosen >= 0):
        raise InputError("keep leaves no mode: give a number of 0 or more, or true for some of the modes.")

    def apply(x: Tensor) -> Tensor:
        event = tuple(x.shape[-chosen.ndim :]) if isinstance(chosen, Tensor) else tuple(x.shape[2:])
        seen = chosen if isinstance(chosen, Tensor) else wavenumber(event, boundary) <= chosen
        if tuple(seen.shape) != event or not bool(seen.any()):
            raise InputError(f"keep is for modes {tuple(seen.shape)}, and the event is {event}: make one for that.")
        return _basis(boundary, event).in_real_basis().to_basis(x)[..., seen.to(x.device)]

    name = "…" if isinstance(chosen, Tensor) else chosen
    return Operator(Part(f"waves({name})", apply))


def channels(indices: int | Sequence[int]) -> Operator:
    """Some of the channels, by their numbers."""
    wanted = [check_whole("indices", each, 0) for each in (indices if isinstance(indices, list | tuple) else [indices])]

    def apply(x: Tensor) -> Tensor:
        if not wanted or max(wanted) >= x.shape[1]:
            raise InputError(f"indices={shown(indices)} must be channels from 0 to {x.shape[1] - 1}.")
        return x[:, wanted]

    return Operator(Part(f"channels({indices})", apply))


def linear(function: Function, transpose: Function | None = None) -> Operator:
    """Any linear function of x [B, C, *event], differentiable by torch or with its ``transpose``, a function of y."""
    _check_callable("function", function)
    if transpose is not None:
        _check_callable("transpose", transpose)
    return Operator(Part("linear", function, True, transpose, own_dtype=False))


def function(f: Function) -> Operator:
    """Any function of x [B, C, *event] that torch can differentiate. It is linearised at x̂0."""
    _check_callable("f", f)
    return Operator(Part("function", f, is_linear=False, own_dtype=False))


def _tangent(part: Part, x: Tensor) -> Tangent:
    push = part.apply if part.is_linear else lambda v: torch.func.jvp(part.apply, (x,), (v,))[1]
    if part.transpose is not None:
        return Tangent(part.apply(x), push, part.transpose)
    value, pull = derivative(part.apply, x)
    return Tangent(value, push, pull)


def derivative(function: Function, x: Tensor) -> tuple[Tensor, Function]:
    """function(x), and v -> Jᵀ v, its derivative's transpose, as often as you like; also where gradients are off."""
    with torch.inference_mode(False), torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        value = function(at)

    def pull(v: Tensor) -> Tensor:
        if not value.requires_grad:  # it does not depend on x
            return torch.zeros_like(at)
        found = torch.autograd.grad(value, at, v.to(value), retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(at) if found is None else found

    return value.detach(), pull


def _chained(functions: list[Function]) -> Function:
    def chained(v: Tensor) -> Tensor:
        for each in functions:
            v = each(v)
        return v

    return chained


def _per_axis(argument: str, value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise InputError(f"{argument}={shown(value)} must be a whole number, or one per axis.")
    return [check_whole(argument, each) for each in values]


def _over(x: Tensor, values: list[Any], argument: str) -> list[Any]:
    """One value for each axis of the event: those behind the channels, or as many as there are values."""
    axes = x.ndim - 2
    if len(values) == 1 and axes >= 1:
        return values * axes
    if len(values) > x.ndim - 1:
        raise InputError(f"{argument} is for {len(values)} axes, and x has shape {_shape(x)}: give one per axis.")
    return values


@lru_cache(maxsize=32)
def _white(boundary: str | tuple[str, ...], event: tuple[int, ...]) -> Covariance:
    return white_in(boundary, event)


def _basis(boundary: Boundary, event: tuple[int, ...]) -> Covariance:
    return _white(check_boundary(boundary), event)


@lru_cache(maxsize=32)
def _gaussian_response(widths: tuple[float, ...], boundary: str | tuple[str, ...], event: tuple[int, ...]) -> Tensor:
    each = [
        (-0.5 * (2 * math.pi * width * frequency).square()).exp()
        for width, frequency in zip(widths, frequencies(event, boundary), strict=True)
    ]
    return torch.stack(torch.meshgrid(*each, indexing="ij")).prod(0)


def _check_callable(argument: str, value: object) -> None:
    if not callable(value):
        raise InputError(f"{argument}={shown(value)} must be a function of a tensor.")


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= 1e-4 * (a.norm() + b.norm()))


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else f"a {type(x).__name__}"
