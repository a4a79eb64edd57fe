"""Σ as an operator: a basis in which it is diagonal, its eigenvalues, and everything else derived from the two."""

import copy
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import TENSOR, InputError, expect, shown
from nidiff.files import as_path
from nidiff.memory import require_memory
from nidiff.randomness import FLOATS, Generators, check_place, white_noise
from nidiff.recipe import call_arguments, check_kinds, check_number, is_number, plain

if TYPE_CHECKING:
    from nidiff.covariance.distribution import GaussianField

MOST_AXES = 16  # of an event
WORKING = 64  # bytes per entry of an event while Σ is built: a handful of float64 tables


class Covariance(ABC):
    """A covariance matrix Σ over the trailing axes ``event_shape`` of a tensor; any axes may stand in front.

    A family needs three methods: ``to_basis`` and ``from_basis``, an orthonormal change of basis and its inverse, and a
    constructor that hands the eigenvalues to this one. Registered in ``FAMILIES`` of `nidiff.covariance.fields`, it can
    be saved and loaded, too. The rest of the first section has defaults, which only families with a layout of their own
    or a shortcut override. Σ is applied outside autocast, in float32 or better, and the result has the dtype of the
    argument. Everything is differentiable in x.
    """

    _built_with: Mapping[str, Any] = {}
    _changed = False

    def __new__(cls, *args: Any, **kwargs: Any) -> "Covariance":
        self = super().__new__(cls)
        if args or kwargs:  # not when copied or unpickled
            called = call_arguments(cls, args, kwargs)
            check_kinds(cls, called)
            if cls.arguments is Covariance.arguments:
                self._built_with = {
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in called.items()
                }
        return self

    def __init__(
        self,
        event_shape: Sequence[int],
        eigenvalues: Tensor,
        *,
        argument: str = "eigenvalues",
        normalize: bool = True,
        allow_singular: bool = False,
    ) -> None:
        self.event_shape = self.shape = check_shape(event_shape)
        values = self._checked(eigenvalues, argument)
        if not allow_singular and bool((values == 0).any()):
            raise InputError(
                f"{argument} gives Σ an eigenvalue of 0, so Σ has no inverse and no density: make it positive, "
                "or pass allow_singular=True if you only draw noise and multiply."
            )
        self._set_eigenvalues(values / values.mean() if normalize else values.clone())

    def _checked(self, eigenvalues: Tensor, argument: str) -> Tensor:
        values = as_numbers(eigenvalues, argument).detach()
        if values.numel() != self.size:
            raise InputError(
                f"{argument} has shape {tuple(values.shape)}, but the event has shape {self.event_shape}: "
                "give one eigenvalue per entry."
            )
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"{argument} has NaN or infinite entries: every eigenvalue of Σ must be a finite float64.")
        if bool((values < 0).any()) or not bool((values > 0).any()):
            raise InputError(
                f"{argument} gives Σ an eigenvalue of {values.min().item():.3g}: a covariance needs positive ones."
            )
        values = values.reshape(self.event_shape)
        self.check_modes(argument, values)
        return values

    def _set_eigenvalues(self, values: Tensor) -> None:
        positive = values[values > 0]
        if len(positive) == 0:
            raise InputError("Σ scaled like this is beyond float64: use a scale nearer to 1.")
        self._eigenvalues = values
        # Plain numbers, so that a compiled function need not look into a tensor.
        self.is_singular = len(positive) < values.numel()
        self.condition_number: float = (positive.max() / positive.min()).item()  # over the positive eigenvalues
        self._range = positive.min().item(), positive.max().item()
        self._tables: dict[Hashable, Tensor] = {}
        self.recipe: tuple[str, dict[str, Any]] | None = None  # the call of a named field that made this Σ
        self.multiple: tuple[Covariance, float] | None = None  # another Σ and c, if this one was made as c · that

    # What a family supplies --------------------------------------------------------------------------------------

    @abstractmethod
    def to_basis(self, x: Tensor) -> Tensor:
        """The coefficients of x [..., *event_shape] in the orthonormal eigenbasis of Σ."""

    @abstractmethod
    def from_basis(self, coefficients: Tensor) -> Tensor:
        """The inverse of `to_basis`."""

    @property
    def marginal_variance(self) -> Tensor:
        """The diagonal of Σ, float64, of shape event_shape."""
        return self.diagonal_of(self.eigenvalues)

    @property
    def basis(self) -> Hashable | None:
        """Equal for two covariances that are diagonal in the same basis; None if no other one is known to be."""
        return None

    @property
    def boundary(self) -> tuple[str, ...] | None:
        """The boundary of each axis where the modes are waves, cosines or sines; None for any other basis."""
        return None

    @property
    def spatial(self) -> "Covariance":
        """What is over the event alone: Σ itself, unless it is over channels too."""
        return self

    def in_real_basis(self) -> "Covariance":
        """The same Σ in a basis with real coefficients, as many as the event has entries; the same eigenvalues."""
        return self

    def diagonal_of(self, values: Tensor) -> Tensor:
        """The diagonal of the matrix with eigenvalues ``values`` [..., *event_shape] in Σ's basis, linear in them."""
        own = self.in_real_basis()
        unit = torch.eye(self.size, dtype=torch.float64, device="cpu").reshape(self.size, *self.event_shape)
        squares = own.from_basis(unit).square().flatten(1)
        return (values.flatten(values.ndim - len(self.event_shape)) @ squares).reshape(values.shape)

    def arguments(self) -> dict[str, Any]:
        """What rebuilds this Σ: the arguments of its constructor, and under "with_eigenvalues" the eigenvalues if they
        have changed since (`with_eigenvalues`). By default the arguments are those the constructor was called with."""
        changed = {"with_eigenvalues": self._eigenvalues} if self._changed else {}
        return {**self._built_with, **changed}

    def with_eigenvalues(self, eigenvalues: Tensor) -> "Covariance":
        """The Σ with these eigenvalues in the same basis."""
        other = copy.copy(self)
        other._set_eigenvalues(self._checked(eigenvalues, "eigenvalues"))
        other._changed = True
        return other

    def periodogram(self, x: Tensor) -> Tensor:
        """The squared coefficient of every mode, laid out as the eigenvalues: its mean over draws of N(0, Σ) is λ."""
        return self.evened(self.to_basis(x).square())

    def check_modes(self, argument: str, values: Tensor) -> None:  # noqa: B027  (bases of real vectors take any)
        """Refuse numbers per mode [..., *event_shape] that would not make a real matrix."""

    def mirrored(self, values: Tensor) -> Tensor:
        """Numbers per mode [..., *event_shape], those of k and −k exchanged, where modes are waves."""
        return values

    def evened(self, values: Tensor) -> Tensor:
        """Numbers per mode [..., *event_shape], averaged where `check_modes` asks for equal ones."""
        return (values + self.mirrored(values)) / 2

    def layout(self, eigenvalues: Tensor) -> Tensor:
        """Eigenvalues [..., *event_shape] laid out as the coefficients of `to_basis`."""
        return eigenvalues

    @property
    def white_shape(self) -> tuple[int, ...]:
        """How many real normal numbers make one draw of the coefficients, and in which layout."""
        return self.event_shape

    def white_scale(self, eigenvalues: Tensor) -> Tensor:
        """The standard deviation of each of those numbers when the coefficients are those of N(0, Σ)."""
        return eigenvalues.sqrt()

    def rotate_white(self, numbers: Tensor) -> Tensor:
        """White numbers turned by an orthogonal map, if a family needs one so that its draws do not depend on which
        eigenvectors of a repeated eigenvalue were found."""
        return numbers

    def as_coefficients(self, numbers: Tensor) -> Tensor:
        """Those numbers as coefficients for `from_basis`."""
        return numbers

    def table(self, name: Hashable, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """A float64 table in the dtype and on the device of ``like``, made once (a matrix of eigenvectors)."""
        key = (name, like.dtype, like.device)
        if key not in self._tables:
            self._check_resolution(like.dtype)
            with torch.inference_mode(False):  # else a table first used while sampling could never train
                self._tables[key] = make().to(dtype=like.dtype, device=like.device)
        return self._tables[key]

    # Σ as a matrix -----------------------------------------------------------------------------------------------

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues λ of Σ, float64, one per entry of the event (their mean, the mean marginal variance, is 1
        unless built with ``normalize=False``)."""
        return self._eigenvalues

    @property
    def size(self) -> int:
        """The number of variables of one event: Σ is size × size."""
        return math.prod(self.event_shape)

    def power(self, x: Tensor, exponent: float) -> Tensor:
        """Σ^p x, with the symmetric power (E14: one root, the symmetric one, everywhere)."""
        self._check_event(x)
        if not (isinstance(exponent, float) and math.isfinite(exponent)):
            exponent = check_number("exponent", exponent)
        if exponent < 0:
            self.require_invertible(f"Σ^{exponent:g}")
        return self._outside_autocast(
            x, lambda work: self.from_basis(self.to_basis(work) * self._eigenvalue_power(exponent, work))
        )

    def scaled(self, x: Tensor, factors: Tensor) -> Tensor:
        """x with every mode multiplied by its factor [..., *event_shape]: the matrix with these eigenvalues, in Σ's
        basis, times x. The factors may differ between images."""
        self._check_event(x)
        return self._outside_autocast(
            x, lambda work: self.from_basis(self.to_basis(work) * self.layout(factors).to(work.device, work.dtype))
        )

    def sqrt(self, x: Tensor) -> Tensor:
        """Σ^½ x: colours white noise."""
        return self.power(x, 0.5)

    def inv_sqrt(self, x: Tensor) -> Tensor:
        """Σ^-½ x: whitens."""
        return self.power(x, -0.5)

    def matmul(self, x: Tensor) -> Tensor:
        """Σ x."""
        return self.power(x, 1.0)

    def solve(self, x: Tensor) -> Tensor:
        """Σ⁻¹ x."""
        return self.power(x, -1.0)

    def logdet(self) -> float:
        """log det Σ of one event (one channel): Σ_k log λ_k over all eigenvalues (E8)."""
        self.require_invertible("log det Σ")
        return self._eigenvalues.log().sum().item()

    def log_prob(self, x: Tensor) -> Tensor:
        """log N(x; 0, Σ) per item of the first axis, summed over all axes between it and the event (channels).

        −D/2 log 2π − C/2 log det Σ − ½‖Σ^-½ x‖², D = C · size (E8). A single event without batch axis gives a scalar.
        """
        self._check_event(x)
        batch_axes = min(1, x.ndim - len(self.event_shape))
        white = self.inv_sqrt(x.to(torch.promote_types(x.dtype, torch.float32)))
        numbers = math.prod(x.shape[batch_axes:])
        constant = -0.5 * (numbers * math.log(2 * math.pi) + numbers // self.size * self.logdet())
        return constant - 0.5 * white.square().flatten(batch_axes).sum(-1)

    def sample(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """N(0, Σ) of ``shape`` [..., *event_shape]; ``generator`` is one for all or a list of one per image.

        The noise is drawn white in the eigenbasis and transformed back once: the law of ``sqrt(randn)``, other bits,
        half the transforms.
        """
        shape = check_sizes(shape)
        self.check_trailing(shape, "shape")
        check_place(dtype, device)
        require_memory(f"shape={shape}", 8 * math.prod(map(float, shape)), "draw fewer at a time")
        leading = shape[: len(shape) - len(self.event_shape)]
        if isinstance(generator, Sequence) and not leading:
            raise InputError(f"generator is a list, but shape={shape} is one event: put an axis of images in front.")
        work = torch.promote_types(dtype, torch.float32)
        numbers = white_noise((*leading, *self.white_shape), generator, dtype=work, device=device)
        return self._outside_autocast(numbers, self.colour).to(dtype)

    def colour(self, numbers: Tensor) -> Tensor:
        """White numbers [..., *white_shape] turned into a draw of N(0, Σ), in place where possible."""
        scale = self.table("white scale", numbers, lambda: self.white_scale(self._eigenvalues))
        return self.from_basis(self.as_coefficients(self.rotate_white(numbers).mul_(scale)))

    def dense(self) -> Tensor:
        """The size × size matrix, float64: for tests and small problems."""
        require_memory(f"the dense matrix of {self!r}", 32.0 * self.size**2, "use a smaller event")
        identity = torch.eye(self.size, dtype=torch.float64, device="cpu").reshape(self.size, *self.event_shape)
        return self.matmul(identity).reshape(self.size, self.size)

    def at(self, shape: Sequence[int]) -> "Covariance":
        """The same field on a grid of another ``shape`` over the same domain: its modes keep their law.

        An orthonormal mode of N' pixels in place of N has λ' = (N'/N) λ, so that at every mode which both grids have
        the noise is to the data what it was. A coarser grid leaves modes out. A finer one has new modes: those of the
        formula for `gaussian_free_field`, `power_law` and `matern` (with ``aliased``, whose modes hold those beyond
        Nyquist, it is the kernel at the new pixels), and for any other spectrum those of the power law of its upper
        octave. So the variance changes a little, and converges if λ falls fast enough (gamma > d/2 in d dimensions).
        White noise stays white of the same variance, and `offset` too. For Σ over channels ``shape`` may leave them
        out; a `Kronecker` product goes by its factors.
        """
        from nidiff.covariance.grids import on_grid

        return on_grid(self, shape)

    def distribution(self, channels: int | None = None) -> "GaussianField":
        """N(0, Σ) over [channels, *event_shape] as a `torch.distributions.Distribution`: a base for flows and VAEs."""
        from nidiff.covariance.distribution import GaussianField

        return GaussianField(self, channels)

    # Questions and checks ----------------------------------------------------------------------------------------

    @property
    def wavenumbers(self) -> Tensor | None:
        """|k| of every mode in units of the lowest frequency above 0, of shape event_shape; None without `boundary`."""
        from nidiff.covariance.spectral import wavenumber

        return None if self.boundary is None else wavenumber(self.event_shape, self.boundary)

    @property
    def is_constant(self) -> bool:
        """Whether Σ is a multiple of the identity."""
        return bool((self._eigenvalues == self._eigenvalues.flatten()[0]).all())

    def shares_basis(self, other: "Covariance") -> bool:
        """Whether both are known to be diagonal in the same basis, with their eigenvalues in the same order."""
        return self.event_shape == other.event_shape and self.basis is not None and self.basis == other.basis

    def check_trailing(self, shape: Sequence[int], argument: str) -> None:
        """Refuse a ``shape`` whose last axes are not the event."""
        shape = tuple(shape)
        if shape[max(0, len(shape) - len(self.event_shape)) :] != self.event_shape:
            raise InputError(
                f"{argument} has shape {shape}, but this Σ is over trailing axes {self.event_shape}: "
                "reshape it or build Σ for its shape."
            )

    def require_invertible(self, what: str) -> None:
        """Refuse a singular Σ, for ``what`` needs its inverse."""
        if self.is_singular:
            raise InputError(
                f"{what} does not exist: Σ is singular ({self!r} has an eigenvalue of 0); for a Gaussian free field "
                'use zero_mode="one", otherwise make every eigenvalue positive.'
            )

    # Sums and scalings -------------------------------------------------------------------------------------------

    def __add__(self, other: "Covariance") -> "Covariance":
        """Σ₁ + Σ₂ where both are diagonal in one basis (c·I is, in every basis). Not renormalised."""
        if not isinstance(other, Covariance):
            return NotImplemented
        if self.event_shape != other.event_shape:
            raise InputError(f"{self!r} + {other!r}: their shapes differ; build both for one shape.")
        total = self._eigenvalues + other._eigenvalues
        if other.is_constant or self.shares_basis(other):
            return self.with_eigenvalues(total)
        if self.is_constant:
            return other.with_eigenvalues(total)
        raise InputError(
            f"{self!r} + {other!r}: these do not share a basis; build the sum as Dense(a.dense() + b.dense(), shape)."
        )

    def __mul__(self, factor: float) -> "Covariance":
        """c·Σ, c > 0. Not renormalised."""
        factor = plain(factor)
        if not (is_number(factor) and factor > 0):
            raise InputError(f"a covariance times {shown(factor)} is not a covariance: scale by a positive number.")
        other, (field, before) = self.with_eigenvalues(self._eigenvalues * factor), self.multiple or (self, 1.0)
        other.multiple = field, before * factor
        return other

    __rmul__ = __mul__

    def normalized(self) -> "Covariance":
        """The same Σ scaled to mean marginal variance 1."""
        return self * (1.0 / self._eigenvalues.mean().item())

    # Configuration -----------------------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """What rebuilds Σ, as JSON. Arrays are named in it as ``{"tensor": name}`` and found in `tensors`."""
        from nidiff.covariance.config import describe

        return dict(describe(self))

    def tensors(self) -> dict[str, Tensor]:
        """The arrays `to_config` refers to, for safetensors. Empty for a field given by a formula."""
        from nidiff.covariance.config import describe

        return dict(describe(self).tensors)

    @staticmethod
    def from_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> "Covariance":
        """The inverse of `to_config` and `tensors`."""
        from nidiff.covariance.config import build

        return build(config, {} if tensors is None else tensors)

    def save(self, folder: str | Path) -> None:
        """Write ``covariance.json`` and, where Σ has arrays, ``covariance.safetensors`` into ``folder``."""
        from nidiff.covariance.config import save

        save(self, as_path("folder", folder))

    @staticmethod
    def load(folder: str | Path) -> "Covariance":
        """Read Σ from a folder: what `save` wrote, a model or its scheduler, or a run."""
        from nidiff.covariance.config import load

        return load(as_path("folder", folder))

    def __repr__(self) -> str:
        name, arguments = self.recipe or (type(self).__name__, {"shape": self.event_shape})
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items() if not torch.is_tensor(v))})"

    # Inside ------------------------------------------------------------------------------------------------------

    def _eigenvalue_power(self, exponent: float, like: Tensor) -> Tensor:
        return self.table(exponent, like, lambda: self._checked_power(exponent, like.dtype))

    def _checked_power(self, exponent: float, dtype: torch.dtype) -> Tensor:
        largest = exponent * math.log(self._range[int(exponent > 0)])  # the logarithm of Σ^p's largest eigenvalue
        if not math.log(torch.finfo(dtype).tiny) <= largest <= math.log(torch.finfo(dtype).max):
            kind = str(dtype).removeprefix("torch.")
            raise InputError(f"Σ^{exponent:g} is beyond {kind}: use an exponent nearer to 0 or a scale nearer to 1.")
        return self.layout(self._eigenvalues).pow(exponent)

    def _check_resolution(self, dtype: torch.dtype) -> None:
        """In Σ^½ x the smallest modes must stand above the rounding of the largest: λ_max/λ_min ≤ 1/eps²."""
        limit = torch.finfo(dtype).eps ** -2
        if self.condition_number > limit:
            raise InputError(
                f"{self!r} has condition number {self.condition_number:.2g}, and {str(dtype).removeprefix('torch.')} "
                f"loses a field above {limit:.2g}: use a smaller gamma (exponent, length scale), or float64."
            )

    def _outside_autocast(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return function(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)

    def _check_event(self, x: Tensor) -> None:
        expect("x", x, Tensor, TENSOR)
        if x.is_meta or x.layout != torch.strided:
            raise InputError(f"x is a {'meta' if x.is_meta else x.layout} tensor: give one that holds all its numbers.")
        if x.dtype not in FLOATS:
            raise InputError(f"x has dtype {x.dtype}: Σ applies to real floating-point tensors; convert it first.")
        self.check_trailing(tuple(x.shape), "x")


def check_shape(shape: Iterable[int] | int, argument: str = "shape") -> tuple[int, ...]:
    """``shape`` as a tuple of positive integers, at least one, of an event that fits in memory."""
    sizes = check_sizes(shape, argument)
    if not 1 <= len(sizes) <= MOST_AXES or min(sizes) < 1:
        raise InputError(f"{argument}={shown(shape)} must be one to {MOST_AXES} positive integers, such as (32, 32).")
    require_memory(f"{argument}={sizes}", WORKING * math.prod(map(float, sizes)), "use a smaller event")
    return sizes


def check_sizes(shape: Iterable[int] | int, argument: str = "shape") -> tuple[int, ...]:
    """``shape`` as a tuple of integers that are not negative."""
    try:
        entries = list(shape if isinstance(shape, Iterable) else (shape,))
        sizes = tuple(-1 if isinstance(entry, bool) else operator.index(entry) for entry in entries)
    except TypeError:
        sizes = (-1,)
    if any(not 0 <= size < 2**62 for size in sizes):
        raise InputError(f"{argument}={shown(shape)} must be one or more positive integers, such as (32, 32).")
    return sizes


def as_numbers(values: Any, argument: str) -> Tensor:
    """``values``, which may be a list or an array of numpy, as a float64 tensor on the CPU."""
    try:
        if values.is_complex() if isinstance(values, Tensor) else np.iscomplexobj(values):
            raise TypeError("complex numbers")
        return torch.as_tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{argument} must be a tensor of real numbers, or lists of equal length of them.") from error
