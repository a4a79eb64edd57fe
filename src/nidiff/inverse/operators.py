"""Operators y = A(x) on images x [B, C, *event]: what is observed of them.

``a @ b`` is a after b: ``mask(m) @ pool(4)`` observes some of the blocks. An operator needs no transpose of its own:
autograd computes it.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.covariance.checks import as_numbers
from nidiff.covariance.modes import Modes
from nidiff.covariance.waves import Boundary, Waves, check_boundary, frequencies, magnitude, wavenumber
from nidiff.errors import InputError
from nidiff.inverse.interpolation import interpolation as interpolate
from nidiff.precision import widest
from nidiff.randomness import white_noise
from nidiff.recipe import check_number, check_whole

Function = Callable[[Tensor], Tensor]


class Part(NamedTuple):
    """One of the operators that a composed one consists of."""

    name: str
    apply: Function
    is_linear: bool = True
    transpose: Function | None = None
    observed: Tensor | None = None
    """Of a mask: the entries that are observed; the others come out as 0."""
    takes_float64: bool = True
    """Whether it takes floats of every dtype; else it is called in that of the images."""
    stacked: tuple["Operator", ...] = ()
    """Of a stack: the operators that it consists of."""


class Linearisation(NamedTuple):
    """An operator near one x, in float64 where possible: its value, its derivative A and the transpose Aᵀ."""

    value: Tensor
    forward: Function
    transpose: Function


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
    def observed(self) -> Tensor | None:
        """The entries of y that are observed, if the operator ends with a mask; None: all of them."""
        return self.parts[0].observed if self.parts else None

    @property
    def is_mask(self) -> bool:
        """Whether it is a mask and nothing else."""
        return all(part.observed is not None for part in self.parts)

    @property
    def is_linear(self) -> bool:
        """Whether it was declared to be linear in all its parts."""
        return all(part.is_linear for part in self.parts)

    def linearise(self, x: Tensor, dtype: torch.dtype | None = None) -> Linearisation:
        """The operator and its derivative at x, in ``dtype`` (by default the widest); that of a linear operator is the
        operator itself."""
        wide = widest(x.device) if dtype is None else dtype
        if all(part.takes_float64 for part in self.parts):
            x = x.to(wide)
        forwards: list[Function] = []
        transposes: list[Function] = []
        value = x
        for part in reversed(self.parts):
            value, forward, transpose = _linearised(part, value)
            forwards.append(forward)
            transposes.insert(0, transpose)
        return Linearisation(value.to(wide), _chained(forwards, x.dtype, wide), _chained(transposes, value.dtype, wide))

    def transpose(self, y: Tensor, x: Tensor) -> Tensor:
        """Aᵀ y, for images like x; of an operator that is not linear, that of its derivative at x."""
        return self.linearise(x).transpose(y).to(x)

    def check_transposes(self, x: Tensor) -> None:
        """Refuse a function of `linear` that is not linear, and a transpose that is not that of A."""
        for part in reversed(self.parts):
            y = part.apply(x)
            if part.is_linear and not (part.takes_float64 or part.stacked):
                check_linear(part, x)
            for operator in part.stacked:
                operator.check_transposes(x)
            x = y

    def require_linear(self, x: Tensor, method: str) -> None:
        """Refuse an operator that is not linear, as random images like x show, for a method that needs it to be."""
        if not (self.is_linear or _adds_up(self, x)):
            problem = f"needs a linear operator, and random images show that {self!r} is not"
            raise InputError("method", method, problem, "use method='gaussian' or 'mmps', which linearise it at x̂0")

    def __repr__(self) -> str:
        return " @ ".join(part.name for part in self.parts)


def mask(mask: Tensor | Sequence[Any]) -> Operator:
    """The entries where ``mask`` is true: [*event], [C, *event], or [B, C, *event] with one per image.

    y has the shape of x. Its entries outside of the mask are ignored, and may be NaN.
    """
    observed = _as_mask("mask", mask)

    def apply(x: Tensor) -> Tensor:
        try:
            return torch.where(observed.to(x.device).expand_as(x), x, 0.0)
        except RuntimeError as error:
            problem = f"has shape {tuple(observed.shape)}"
            raise InputError("mask", None, problem, f"make one for {tuple(x.shape)}") from error

    return Operator(Part(f"mask({', '.join(map(str, observed.shape))})", apply, transpose=apply, observed=observed))


def subsample(step: int | Sequence[int]) -> Operator:
    """Every ``step``-th pixel along all axes of the event, from the first on; or one step per axis."""
    steps = [check_whole("step", number) for number in _as_list(step)]

    def apply(x: Tensor) -> Tensor:
        index: list[Any] = [..., *(slice(None, None, stride) for stride in _per_axis(x, steps, "step"))]
        return x[tuple(index)]

    return Operator(Part(f"subsample({step})", apply))


def pool(factor: int | Sequence[int]) -> Operator:
    """Means over blocks of ``factor`` pixels along all axes of the event, or of one factor per axis. The last block of
    an axis that it does not divide has the pixels that are left."""
    factors = [check_whole("factor", number) for number in _as_list(factor)]

    def apply(x: Tensor) -> Tensor:
        sizes = _per_axis(x, factors, "factor")
        axes = len(sizes)
        event = x.shape[-axes:]
        if any(size > n for n, size in zip(event, sizes, strict=True)):
            raise InputError("factor", factor, f"is larger than the event {tuple(event)}", "give a smaller one")
        blocks = [count for n, size in zip(event, sizes, strict=True) for count in (math.ceil(n / size), size)]
        ends = [count for n, size in zip(event, sizes, strict=True) for count in (-n % size, 0)]

        def sums(v: Tensor) -> Tensor:
            v = torch.nn.functional.pad(v, ends[::-1])
            return v.reshape(*v.shape[:-axes], *blocks).sum(tuple(range(-2 * axes + 1, 0, 2)))

        return sums(x) / sums(x.new_ones(event))

    return Operator(Part(f"pool({factor})", apply))


def blur(width: float | Sequence[float], boundary: Boundary = "reflecting") -> Operator:
    """The mean with Gaussian weights of standard deviation ``width`` pixels (or one per axis), in the modes of
    ``boundary``: a wave of ω = 2π · frequency is multiplied by exp(−½ ω² width²)."""
    widths = [check_number("width", number) for number in _as_list(width)]
    check_number("width", min(widths), 0)
    edges = check_boundary(boundary)

    def apply(x: Tensor) -> Tensor:
        sizes = _per_axis(x, widths, "width")
        event = tuple(x.shape[-len(sizes) :])
        return _gaussian_blur(tuple(sizes), edges, event) @ x

    return Operator(Part(f"blur({width})", apply, transpose=apply))  # it is symmetric


def waves(keep: float | Tensor | Sequence[Any], boundary: Boundary = "periodic") -> Operator:
    """Some of the modes of ``boundary`` (waves, cosines, sines): y [B, C, K] are their real coefficients.

    ``keep`` is a number, for the modes |k| ≤ keep in units of the lowest frequency; or true for each mode [*event]
    that is observed, in the order of `nidiff.Spectral`.
    """
    edges = check_boundary(boundary)
    modes = None if isinstance(keep, int | float) or not np.ndim(keep) else _as_mask("keep", keep)
    largest = check_number("keep", keep, 0) if modes is None else 0.0

    def apply(x: Tensor) -> Tensor:
        event = tuple(x.shape[2:] if modes is None else x.shape[-modes.ndim :])
        lowest = wavenumber(event, edges).min().item()
        if modes is None and largest < lowest:
            raise InputError("keep", largest, "leaves no mode", f"give at least {lowest:.3g}, the lowest |k|")
        observed = wavenumber(event, edges) <= largest if modes is None else modes
        if tuple(observed.shape) != event:
            problem = f"is for modes {tuple(observed.shape)}"
            raise InputError("keep", None, problem, f"make one for the event {event}")
        # A mask of the CPU: a device need not be asked how many are true.
        return _basis(edges, event).analyse(x)[..., observed]

    return Operator(Part(f"waves({'…' if modes is not None else largest})", apply))


def weighted(weights: Tensor) -> Operator:
    """Every entry times its own number: [*event], [C, *event], or one per channel as [C, 1, 1]."""
    factors = as_numbers(weights, "weights")

    def apply(x: Tensor) -> Tensor:
        return x * factors.to(x)

    return Operator(Part("weighted", apply, transpose=apply))


def channels(indices: int | Sequence[int]) -> Operator:
    """Some of the channels, by their numbers."""
    numbers = [check_whole("indices", number, 0) for number in _as_list(indices)]

    def apply(x: Tensor) -> Tensor:
        check_whole("indices", max(numbers), 0, x.shape[1] - 1)
        return x[:, numbers]

    return Operator(Part(f"channels({indices})", apply))


def total(weights: Tensor | Sequence[Any] | None = None) -> Operator:
    """The sum over the event, y [B, C], each pixel times its weight [*event] if there are any: mass, or with weights of
    area / total area the mean. With a noise of 0 it is a constraint that every sample meets."""
    factors = None if weights is None else as_numbers(weights, "weights")

    def apply(x: Tensor) -> Tensor:
        return (x if factors is None else x * factors.to(x)).flatten(2).sum(2)

    return Operator(Part("total", apply))


def divergence(spacing: float | Sequence[float] = 1.0) -> Operator:
    """Σ ∂u_i/∂x_i by centred differences on a periodic grid with this ``spacing``, of images whose channels are the
    components of a vector along the axes of the event, in their order: y [B, 1, *event]."""
    steps = [check_number("spacing", step, above=0.0) for step in _as_list(spacing)]

    def apply(x: Tensor) -> Tensor:
        sizes = _per_axis(x, steps, "spacing")
        if not x.shape[1] == x.ndim - 2 == len(sizes):
            problem = f"needs one channel per axis of the event, and x has shape {tuple(x.shape)}"
            raise InputError("operator", "divergence", problem, "choose the components by operators.channels")
        slopes = [
            (x[:, axis].roll(-1, axis + 1) - x[:, axis].roll(1, axis + 1)) / (2 * step)
            for axis, step in enumerate(sizes)
        ]
        return torch.stack(slopes).sum(0)[:, None]

    return Operator(Part("divergence", apply))


def stack(operators: Sequence[Operator]) -> Operator:
    """What several operators see of the same images, one after the other: y [B, M]."""
    parts = tuple(operators)
    if not parts or not all(isinstance(each, Operator) for each in parts):
        raise InputError("operators", None, "is not a list of operators", "give such as [op.pool(4), op.mask(seen)]")

    def apply(x: Tensor) -> Tensor:
        return torch.cat([operator(x).flatten(1) for operator in parts], 1)

    every = [part for operator in parts for part in operator.parts]
    return Operator(
        Part(
            f"stack({', '.join(map(repr, parts))})",
            apply,
            is_linear=all(part.is_linear for part in every),
            takes_float64=all(part.takes_float64 for part in every),
            stacked=parts,
        )
    )


def stations(
    points: Any,
    coordinates: Sequence[Any],
    *,
    periods: Sequence[float | None] = (),
    interpolation: str = "bilinear",
    domain: Tensor | None = None,
) -> Operator:
    """Values at any ``points`` [P, axes], by bilinear interpolation between those of the image: y [B, C, P].

    Args:
        coordinates: of the points of the image along each axis; or how many there are, for 0, 1, 2, …
        periods: the circle of each axis, such as (None, 360.0): longitudes 350 and −10 are one place, between 347.5 and
            0. None: the axis has ends, half a step beyond its first and last point.
        interpolation: "bilinear" (linear along each axis, however many there are), or "nearest".
        domain: [*event], where the image has values; elsewhere its points have no weight.
    """
    made = interpolate(points, coordinates, periods=periods, kind=interpolation, domain=domain)
    return Operator(Part(f"stations({len(made.index)})", made.apply, transpose=made.transpose))


def linear(function: Function, transpose: Function | None = None) -> Operator:
    """Any linear function of x [B, C, *event], differentiable by torch or with its ``transpose``, a function of y."""
    return Operator(Part("linear", _with_rows(function), True, transpose, takes_float64=False))


def function(f: Function) -> Operator:
    """Any function of x [B, C, *event] that torch can differentiate. It is linearised at x̂0."""
    return Operator(Part("function", _with_rows(f), is_linear=False, takes_float64=False))


def _with_rows(function: Function) -> Function:
    """The same function, if it returns real numbers for each image."""
    if not callable(function):
        raise InputError("function", function, "is not a function", "give one of x [B, C, *event]")

    def checked(x: Tensor) -> Tensor:
        y: Any = function(x)
        sound = isinstance(y, Tensor) and y.is_floating_point() and y.ndim > 0 and len(y) == len(x) and y.numel() > 0
        if not sound:
            returned = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            problem = f"returned {returned} for x of shape {tuple(x.shape)}"
            raise InputError("function", None, problem, "return a tensor of floats, with one row per image")
        return y

    return checked


def _as_mask(argument: str, values: Tensor | Sequence[Any]) -> Tensor:
    """True where ``values`` are 1, and false where they are 0."""
    numbers = as_numbers(values, argument)
    observed = numbers.bool()
    if not bool(((numbers == 0) | (numbers == 1)).all()) or not observed.ndim or not bool(observed.any()):
        remedy = "give true or 1 for what is observed, and false or 0 elsewhere"
        raise InputError(argument, None, "observes nothing, or has numbers that are not 0 or 1", remedy)
    return observed


def _linearised(part: Part, x: Tensor) -> Linearisation:
    forward = part.apply if part.is_linear else lambda v: torch.func.jvp(part.apply, (x,), (v,))[1]
    value, transpose = derivative(part.apply, x) if part.transpose is None else (part.apply(x), part.transpose)
    return Linearisation(value, forward, transpose)


def derivative(function: Function, x: Tensor) -> tuple[Tensor, Function]:
    """function(x), and v -> Jᵀ v with its derivative J, as often as you like; also where gradients are off."""
    with torch.inference_mode(False), torch.enable_grad():
        start = x.detach().clone().requires_grad_()
        value = function(start)

    def transpose(v: Tensor) -> Tensor:
        if not value.requires_grad:  # it does not depend on x
            return torch.zeros_like(start)
        gradient = torch.autograd.grad(value, start, v.to(value), retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(start) if gradient is None else gradient

    return value.detach(), transpose


def _chained(functions: list[Function], dtype: torch.dtype, wide: torch.dtype) -> Function:
    """The functions one after the other, called in ``dtype``, as a function of numbers in ``wide``."""

    def chained(v: Tensor) -> Tensor:
        v = v.to(dtype)
        for function in functions:
            v = function(v)
        return v.to(wide)

    return chained


def check_linear(part: Part, x: Tensor) -> None:
    """Refuse A(u + w) ≠ A u + A w, and ⟨A u, v⟩ ≠ ⟨u, Aᵀ v⟩, of random images like x and y = A x."""
    sound = _adds_up(part.apply, x)
    if part.transpose is not None:
        u = white_noise(x.shape, 0, device="cpu").to(x)
        image = part.apply(u)
        v = white_noise(image.shape, 2, device="cpu").to(image)
        back: Any = part.transpose(v)
        if not isinstance(back, Tensor) or back.shape != u.shape:
            returned = f"shape {tuple(back.shape)}" if isinstance(back, Tensor) else f"a {type(back).__name__}"
            problem = f"returns {returned} for y of shape {tuple(image.shape)}"
            raise InputError("transpose", None, problem, f"return a tensor of the shape of x, {tuple(u.shape)}")
        limit = 1e-4 * (image.norm() * v.norm() + u.norm() * back.norm())
        sound = sound and bool(((image * v).sum() - (u * back).sum()).abs() <= limit)
    if not sound:
        problem = f"{part.name} is not linear, as random images show, or its `transpose` is that of another one"
        raise InputError("function", None, problem, "use operators.function, or leave out the transpose")


def _adds_up(function: Function, x: Tensor) -> bool:
    """Whether A(u + w) = A u + A w for random images like x."""
    u, w = (white_noise(x.shape, seed, device="cpu").to(x) for seed in range(2))
    image, both = function(u), function(u + w)
    return bool((both - image - function(w)).norm() <= 1e-4 * (both.norm() + image.norm()))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) and value else [value]


def _per_axis(x: Tensor, values: list[Any], argument: str) -> list[Any]:
    """One value for each axis of the event: those behind the channels, or as many as there are values."""
    axes = x.ndim - 2
    if len(values) == 1 and axes >= 1:
        return values * axes
    if len(values) > x.ndim - 1:
        raise InputError(argument, None, f"is for {len(values)} axes, and x has shape {tuple(x.shape)}")
    return values


@lru_cache(maxsize=32)
def _basis(boundary: str | tuple[str, ...], event: tuple[int, ...]) -> Waves:
    return Waves(event, boundary)


@lru_cache(maxsize=32)
def _gaussian_blur(widths: tuple[float, ...], boundary: str | tuple[str, ...], event: tuple[int, ...]) -> Modes:
    each = zip(widths, frequencies(event, boundary), strict=True)
    omega = magnitude([2 * math.pi * width * frequency for width, frequency in each])
    return Modes((-0.5 * omega.square()).exp(), Waves(event, boundary))
