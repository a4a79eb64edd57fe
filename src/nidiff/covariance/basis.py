"""Orthonormal changes of coordinates over the trailing axes of a tensor, in which covariances are diagonal."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import as_numbers, check_shape
from nidiff.covariance.products import channel_product, padded, row_product
from nidiff.errors import InputError


class Basis(ABC):
    """Real orthonormal modes over ``event_shape``, one per entry; coefficients are laid out like the event.

    A basis of your own needs a constructor that sets ``event_shape``, `analyse` and `synthesise`. To save covariances
    in it, give it `arguments` and add it to `nidiff.covariance.BASES`.
    """

    event_shape: tuple[int, ...]
    boundary: tuple[str, ...] | None = None
    """The boundary of each axis where the modes are waves, cosines or sines."""
    inner: "Basis | None" = None
    """The basis of the last axes alone, where the modes are products with it."""

    @abstractmethod
    def analyse(self, x: Tensor) -> Tensor:
        """The coefficients of x [..., *event_shape]."""

    @abstractmethod
    def synthesise(self, coefficients: Tensor) -> Tensor:
        """The inverse of `analyse`, which is its transpose."""

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of the constructor: numbers, words, tensors and bases. None for a basis that is never saved."""
        return None

    @cached_property
    def key(self) -> Hashable:
        """Equal for two bases with the same modes in the same order: the type and its `arguments`, if it has any."""
        arguments = self.arguments()
        if arguments is None:
            return id(self)
        return type(self), *((name, _hashable(value)) for name, value in arguments.items())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Basis) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def diagonal(self, values: Tensor) -> Tensor:
        """The diagonal of the matrix with eigenvalues ``values`` [..., *event_shape], in pixels; linear in them."""
        unit = torch.eye(self.size, dtype=torch.float64, device="cpu").reshape(self.size, *self.event_shape)
        squares = self.synthesise(unit).square().flatten(1)
        return (values.flatten(values.ndim - len(self.event_shape)) @ squares).reshape(values.shape)

    def evened(self, values: Tensor) -> Tensor:
        """Numbers per mode, averaged over those that a stationary field gives the same law: the waves k and −k."""
        return values

    def white(self, numbers: Tensor) -> Tensor:
        """White numbers as white coefficients. Where modes are arbitrary within an eigenspace they are turned first, so
        that a draw does not depend on which eigenvectors were computed."""
        return numbers

    def multiply(self, values: Tensor, x: Tensor) -> Tensor:
        """x with every mode multiplied by its entry of ``values`` [..., *event_shape]."""
        return self.synthesise(self.analyse(x) * values)

    def power(self, x: Tensor) -> Tensor:
        """The squared coefficient of every mode, `evened`: its mean over draws of N(0, Σ) is the eigenvalue."""
        return self.evened(self.analyse(x).square())

    @property
    def size(self) -> int:
        """The number of modes."""
        return torch.Size(self.event_shape).numel()

    @property
    def spatial(self) -> "Basis":
        """The part over the event alone: the basis itself, unless it is over channels too."""
        return self

    @property
    def wavenumbers(self) -> Tensor | None:
        """|k| of every mode in units of the lowest frequency above 0, of shape event_shape; None without `boundary`."""
        from nidiff.covariance.waves import wavenumber

        return None if self.boundary is None else wavenumber(self.event_shape, self.boundary)

    def extends(self, other: "Basis") -> bool:
        """Whether operators that are diagonal in ``other``, over the last axes, are diagonal in this basis too."""
        return self == other or (self.inner is not None and self.inner.extends(other))

    def with_inner(self, inner: "Basis") -> "Basis | None":
        """The basis for operators that do not vary over the modes of `inner`, with another basis in its place."""
        return None

    def check_even(self, argument: str, values: Tensor) -> None:
        """Refuse numbers per mode [..., *event_shape] that are not the same for the waves k and −k."""
        if not torch.allclose(values, self.evened(values), rtol=1e-5, atol=0.0, equal_nan=True):
            raise InputError(argument, None, "is not even, λ(k) = λ(−k)", "use its mean with its mirror image")

    def __repr__(self) -> str:
        arguments = self.arguments() or {"shape": self.event_shape}
        shown = [f"{key}={value!r}" for key, value in arguments.items() if not torch.is_tensor(value)]
        return f"{type(self).__name__}({', '.join(shown)})"


class Pixels(Basis):
    """The entries of the event themselves."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.event_shape = check_shape(shape)

    def analyse(self, x: Tensor) -> Tensor:
        return x

    def synthesise(self, coefficients: Tensor) -> Tensor:
        return coefficients

    def diagonal(self, values: Tensor) -> Tensor:
        return values

    def arguments(self) -> dict[str, Any]:
        return {"shape": self.event_shape}


class Cast:
    """A float64 table in every dtype and on every device it has been used with."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self._cast: dict[Hashable, Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        key = like.dtype, like.device
        if key not in self._cast:
            with torch.inference_mode(False):  # else a table first used while sampling could never train
                self._cast[key] = self.table.to(dtype=like.dtype, device=like.device)
        return self._cast[key]


class Eigen(Basis):
    """The columns of the orthonormal matrix ``vectors``, N×N, over an event of N entries (default shape: (N,))."""

    def __init__(self, vectors: Tensor, shape: Sequence[int] | None = None) -> None:
        self.vectors = as_numbers(vectors, "vectors")
        size = len(self.vectors)
        self.event_shape = check_shape((size,) if shape is None else shape)
        square = tuple(self.vectors.shape) == (self.size, self.size)
        identity = torch.eye(size, dtype=torch.float64, device="cpu")
        if not square or not bool((self.vectors.T @ self.vectors - identity).abs().max() < 1e-8 * size):
            problem = f"is not an orthonormal N×N matrix, N={self.size}"
            raise InputError("vectors", None, problem, "give the eigenvectors as its columns")
        self._columns = Cast(padded(self.vectors))

    def analyse(self, x: Tensor) -> Tensor:
        return row_product(self._flat(x), self._columns(x)).reshape(x.shape)

    def synthesise(self, coefficients: Tensor) -> Tensor:
        return row_product(self._flat(coefficients), self._columns(coefficients).T).reshape(coefficients.shape)

    def diagonal(self, values: Tensor) -> Tensor:
        return (self._flat(values) @ self.vectors.square().T).reshape(values.shape)

    def white(self, numbers: Tensor) -> Tensor:
        return self.analyse(numbers)

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(x.ndim - len(self.event_shape))

    def arguments(self) -> dict[str, Any]:
        return {"vectors": self.vectors, "shape": self.event_shape}


class Product(Basis):
    """Products of a mode of ``a``, over the first axes, and one of ``b``, over the rest."""

    inner: Basis

    def __init__(self, a: Basis, b: Basis) -> None:
        self.a, self.b = a, b
        self.inner = b
        self.event_shape = check_shape((*a.event_shape, *b.event_shape), "a ⊗ b")
        self.boundary = None if a.boundary is None or b.boundary is None else a.boundary + b.boundary

    @cached_property
    def key(self) -> Hashable:
        # Where both are periodic, a product of waves is not a wave, though waves with the same |k| along each axis are.
        if self.boundary is not None and not all("periodic" in (part.boundary or ()) for part in (self.a, self.b)):
            return "waves", self.event_shape, self.boundary
        return Product, self.a.key, self.b.key

    def analyse(self, x: Tensor) -> Tensor:
        return self.over_a(self.a.analyse, self.b.analyse(x))

    def synthesise(self, coefficients: Tensor) -> Tensor:
        return self.b.synthesise(self.over_a(self.a.synthesise, coefficients))

    def diagonal(self, values: Tensor) -> Tensor:
        return self.over_a(self.a.diagonal, self.b.diagonal(values))

    def evened(self, values: Tensor) -> Tensor:
        return self.over_a(self.a.evened, self.b.evened(values))

    def white(self, numbers: Tensor) -> Tensor:
        return self.over_a(self.a.white, self.b.white(numbers))

    def over_a(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of trailing axes applied to the axes of ``a``, which stand before those of ``b``."""
        first, last = len(self.a.event_shape), len(self.b.event_shape)
        behind, before = tuple(range(-last, 0)), tuple(range(-first - last, -first))
        return function(x.movedim(behind, before)).movedim(before, behind)

    def with_inner(self, inner: Basis) -> Basis:
        return Product(self.a, inner)

    def arguments(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b}


class PerMode(Basis):
    """Channels in front of ``spatial``: mode k of the event has the channel vectors ``vectors`` [C, C, *event].

    ``vectors[c, i, *k]`` is channel c of vector i; axes of length 1 share the vectors between modes. Where a channel
    lags behind another, between waves, they are complex: vectors + i · ``quadrature``, those of −k the conjugates.
    """

    inner: Basis

    def __init__(self, vectors: Tensor, spatial: Basis, quadrature: Tensor | None = None) -> None:
        self.vectors, self.inner = as_numbers(vectors, "vectors"), spatial
        axes = len(spatial.event_shape)
        if self.vectors.ndim == 2:
            self.vectors = self.vectors.reshape(*self.vectors.shape, *[1] * axes)
        self.quadrature = None if quadrature is None else as_numbers(quadrature, "quadrature")
        self.event_shape = check_shape((len(self.vectors), *spatial.event_shape))
        if self.vectors.ndim != 2 + axes or self.vectors.shape[0] != self.vectors.shape[1]:
            raise InputError("vectors", None, f"has shape {tuple(self.vectors.shape)}", "give [C, C, *event]")
        self._tables = [Cast(part) for part in (self.vectors, self.quadrature) if part is not None]

    @property
    def spatial(self) -> Basis:
        return self.inner

    def analyse(self, x: Tensor) -> Tensor:
        return self._turn(self.spatial.analyse(x))

    def synthesise(self, coefficients: Tensor) -> Tensor:
        return self.spatial.synthesise(self._turn(coefficients, back=True))

    def _turn(self, x: Tensor, back: bool = False) -> Tensor:
        """Coefficients of the channels as those of the vectors, or back.

        With V = P + iQ and F(k) the coefficient of a wave, V^H F has the real coefficients Pᵀ x(k) + Qᵀ x(−k).
        """
        rotation, *quadrature = (cast(x) if back else cast(x).transpose(0, 1) for cast in self._tables)
        axes = len(self.spatial.event_shape)
        total = channel_product(rotation, x, axes)
        if not quadrature:
            return total
        lag = channel_product(quadrature[0], self.spatial.mirrored(x), axes)  # type: ignore[attr-defined]
        return total - lag if back else total + lag

    def diagonal(self, values: Tensor) -> Tensor:
        share = self.vectors.square() + (0.0 if self.quadrature is None else self.quadrature.square())
        return self.spatial.diagonal(channel_product(share, values, len(self.spatial.event_shape)))

    def evened(self, values: Tensor) -> Tensor:
        return self.spatial.evened(values)

    def white(self, numbers: Tensor) -> Tensor:
        return self._turn(self.spatial.white(numbers))

    def with_inner(self, inner: Basis) -> Basis | None:
        shared = self.quadrature is None and self.vectors.numel() == self.vectors.shape[0] ** 2
        return PerMode(self.vectors.flatten(1).reshape(*self.vectors.shape[:2]), inner) if shared else None

    def arguments(self) -> dict[str, Any]:
        lag = {} if self.quadrature is None else {"quadrature": self.quadrature}
        return {"vectors": self.vectors, "spatial": self.spatial, **lag}


def _hashable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return hashlib.sha256(value.contiguous().numpy().tobytes()).digest()
    key: Hashable = value.key if isinstance(value, Basis) else value
    return key
