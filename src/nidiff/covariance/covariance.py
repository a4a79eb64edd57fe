"""Σ: eigenvalues in a basis, which can draw, has a density, and remembers the call that made it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, Cast
from nidiff.covariance.checks import as_numbers, check_finite, check_sizes
from nidiff.covariance.modes import Modes, outside_autocast
from nidiff.errors import InputError
from nidiff.files import as_path, locked, replace_json, writing
from nidiff.memory import require_memory
from nidiff.randomness import FLOATS, Generators, check_place, white_noise
from nidiff.recipe import Origin, check_number, plain

if TYPE_CHECKING:
    from nidiff.covariance.distribution import GaussianField


class Covariance(Modes):
    """A covariance matrix over the trailing axes of a tensor: ``eigenvalues`` ≥ 0, one per mode of ``basis``.

    Σ is applied outside autocast, in float32 or better, and the result has the dtype of x. All is differentiable in x.

    Args:
        eigenvalues: one per mode, of the shape of the event; finite, not negative, not all 0.
        normalize: scale them to mean 1, so that the mean variance of a pixel is 1.
        allow_singular: accept eigenvalues of 0; such a Σ draws and multiplies, and has no inverse and no density.
    """

    basis: Basis

    def __init__(
        self,
        eigenvalues: Tensor,
        basis: Basis,
        *,
        normalize: bool = False,
        allow_singular: bool = False,
        argument: str = "eigenvalues",
    ) -> None:
        values = as_numbers(eigenvalues, argument)
        if tuple(values.shape) not in ((basis.size,), basis.event_shape):
            problem = f"has shape {tuple(values.shape)}, but the event has shape {basis.event_shape}"
            raise InputError(argument, None, problem, "give one eigenvalue per mode")
        check_finite(argument, values)
        least = values.min().item()
        if least < 0 or not bool(values.any()) or (least == 0 and not allow_singular):
            remedy = "make them positive; some may be 0 with allow_singular=True, if you only draw noise and multiply"
            raise InputError(argument, None, f"gives Σ an eigenvalue of {least:.3g}", remedy)
        values = values.reshape(basis.event_shape)
        basis.check_even(argument, values)
        values = basis.evened(values)  # what is left is rounding
        super().__init__(values / values.mean() if normalize else values, basis)
        positive = self.values[self.values > 0]
        # Plain numbers, so that a compiled function need not look into a tensor.
        self.is_singular = len(positive) < values.numel()
        self._range = positive.min().item(), positive.max().item()
        self.condition_number: float = self._range[1] / self._range[0]  # over the positive eigenvalues
        self._powers: dict[tuple[float, torch.dtype], Cast] = {}
        self.origin: Origin | None = None
        """The call of a named constructor that made this Σ: how it is printed, saved and put on another grid."""

    def with_eigenvalues(self, eigenvalues: Tensor) -> "Covariance":
        """The Σ with these eigenvalues in the same basis."""
        return Covariance(eigenvalues, self.basis, allow_singular=True)

    # Σ as a matrix -----------------------------------------------------------------------------------------------

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues λ of Σ, float64, of shape event_shape."""
        return self.values

    @property
    def size(self) -> int:
        """The number of entries of one event: Σ is size × size."""
        return self.basis.size

    @property
    def spatial(self) -> Basis:
        """The basis over the event alone, without channels."""
        return self.basis.spatial

    @property
    def marginal_variance(self) -> Tensor:
        """The diagonal of Σ, float64, of shape event_shape."""
        return self.basis.diagonal(self.values)

    def power(self, x: Tensor, exponent: float) -> Tensor:
        """Σ^p x, with the symmetric power (E14: one root, the symmetric one, everywhere)."""
        self._check_event(x)
        if exponent < 0:
            self.require_invertible(f"Σ^{exponent:g}")
        return outside_autocast(x, lambda work: self.basis.multiply(self._power(float(exponent), work), work))

    def sqrt(self, x: Tensor) -> Tensor:
        """Σ^½ x: colours white noise."""
        return self.power(x, 0.5)

    def inv_sqrt(self, x: Tensor) -> Tensor:
        """Σ^-½ x: whitens."""
        return self.power(x, -0.5)

    def matmul(self, x: Tensor) -> Tensor:
        """Σ x, which is ``Σ @ x``."""
        return self.power(x, 1.0)

    apply = matmul

    def solve(self, x: Tensor) -> Tensor:
        """Σ⁻¹ x."""
        return self.power(x, -1.0)

    def logdet(self) -> float:
        """log det Σ of one event (one channel): Σ_k log λ_k over all eigenvalues (E8)."""
        self.require_invertible("log det Σ")
        return self.values.log().sum().item()

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

        White numbers in the basis, times √λ, synthesised once: the law of ``sqrt(randn)``, other bits, half the
        transforms.
        """
        shape = check_sizes(shape)
        self.check_trailing(shape, "shape")
        check_place(dtype, device)
        require_memory("shape", shape, 8 * math.prod(map(float, shape)), "draw fewer at a time")
        numbers = white_noise(shape, generator, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return outside_autocast(numbers, self.colour).to(dtype)

    def colour(self, numbers: Tensor) -> Tensor:
        """White numbers [..., *event_shape] turned into a draw of N(0, Σ), in place where possible."""
        return self.basis.synthesise(self.basis.white(numbers).mul_(self._power(0.5, numbers)))

    def dense(self) -> Tensor:
        """The size × size matrix, float64: for tests and small problems."""
        require_memory(None, None, 32.0 * self.size**2, "use a smaller event")
        identity = torch.eye(self.size, dtype=torch.float64, device="cpu").reshape(self.size, *self.event_shape)
        return self.matmul(identity).reshape(self.size, self.size)

    def at(self, shape: Sequence[int]) -> "Covariance":
        """The same field on a grid of another ``shape`` over the same domain: its modes keep their law.

        An orthonormal mode of N' pixels in place of N has λ' = (N'/N) λ, so that at every mode which both grids have
        the noise is to the data what it was. A coarser grid leaves modes out. The new modes of a finer one follow the
        formula of `gaussian_free_field`, `power_law` and `matern`, and for any other spectrum the power law of its
        upper octave. White noise stays white of the same variance, and `offset` and `pyramid` are the same recipe on
        the other grid. For Σ over channels ``shape`` may leave them out; a `Kronecker` product goes by its factors.
        """
        from nidiff.covariance.grids import on_grid

        return on_grid(self, shape)

    def distribution(self, channels: int | None = None) -> "GaussianField":
        """N(0, Σ) over [channels, *event_shape] as a `torch.distributions.Distribution`: a base for flows and VAEs."""
        from nidiff.covariance.distribution import GaussianField

        return GaussianField(self, channels)

    def require_invertible(self, what: str) -> None:
        """Refuse a singular Σ, for ``what`` needs its inverse."""
        if self.is_singular:
            remedy = 'for a Gaussian free field use zero_mode="one", otherwise make every eigenvalue positive'
            raise InputError("covariance", None, f"{self!r} is singular, so {what} does not exist", remedy)

    # Sums and scalings -------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        """Σ₁ + Σ₂ where both are diagonal in one basis (c·I is, in every basis), not renormalised; else as `Modes`."""
        if not isinstance(other, Covariance):
            return super().__add__(other)
        total = self.map(torch.add, other)
        basis = total.basis or self.basis
        return Covariance(total.values.expand(basis.event_shape), basis, allow_singular=True)

    def __mul__(self, other: Any) -> Any:
        """c·Σ for a number c > 0, not renormalised; else as `Modes`."""
        if not isinstance(plain(other), int | float):
            return super().__mul__(other)
        factor = check_number("factor", other, above=0.0)
        product = self.with_eigenvalues(self.values * factor)
        if self.origin is not None:
            product.origin = self.origin._replace(scale=self.origin.scale * factor)
        return product

    __rmul__ = __mul__

    def normalized(self) -> "Covariance":
        """The same Σ scaled to mean marginal variance 1."""
        scaled: Covariance = self * (1.0 / self.values.mean().item())
        return scaled

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
        from nidiff.covariance.config import PLACES, describe, save_arrays

        config, place = describe(self), as_path("folder", folder)
        with writing("folder", place), locked(place):  # two that save here at once take turns
            save_arrays(config.tensors, place)
            replace_json(place / PLACES[0], config)

    @staticmethod
    def load(folder: str | Path) -> "Covariance":
        """Read Σ from a folder: what `save` wrote, a model or its scheduler, or a run."""
        from nidiff.covariance.config import load

        return load(as_path("folder", folder))

    def __repr__(self) -> str:
        if self.origin is None:
            return f"Covariance(basis={self.basis!r})"
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.origin.arguments.items() if not torch.is_tensor(v))
        scale = "" if self.origin.scale == 1 else f"{self.origin.scale:.6g} * "
        return f"{scale}{self.origin.name}({arguments})"

    # Inside ------------------------------------------------------------------------------------------------------

    def _power(self, exponent: float, like: Tensor) -> Tensor:
        """λ^p in the dtype and on the device of ``like``."""
        key = exponent, like.dtype
        if key not in self._powers:
            self._check_precision(exponent, like.dtype)
            with torch.inference_mode(False):  # else a table first used while sampling could never train
                self._powers[key] = Cast(self.values.pow(exponent))
        return self._powers[key](like)

    def _check_precision(self, exponent: float, dtype: torch.dtype) -> None:
        """In Σ^½ x the smallest modes must stand above the rounding of the largest, λ_max/λ_min ≤ 1/eps², and the
        largest eigenvalue of Σ^p must be a number of the dtype."""
        kind = torch.finfo(dtype)
        largest = exponent * math.log(self._range[int(exponent > 0)])
        held = math.log(kind.tiny) <= largest <= math.log(kind.max)
        if not held or self.condition_number > kind.eps**-2:
            low, high = self._range
            values = f"eigenvalues from {low:.2g} to {high:.2g}, condition number {self.condition_number:.2g}"
            problem = f"{self!r} is lost in {kind.dtype} ({values})"
            remedy = "use a smaller gamma (exponent, length scale), a scale nearer to 1, or float64"
            raise InputError("covariance", None, problem, remedy)

    def _check_event(self, x: Tensor) -> None:
        if x.dtype not in FLOATS:
            raise InputError("x", None, f"has dtype {x.dtype}", "convert it to real floating-point numbers")
        self.check_trailing(tuple(x.shape), "x")
