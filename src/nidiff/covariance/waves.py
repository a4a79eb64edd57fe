"""Waves (periodic boundary), cosines (reflecting) and sines (fixed): the modes of stationary fields on a grid."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, Cast
from nidiff.covariance.checks import check_shape
from nidiff.covariance.products import padded, row_product
from nidiff.errors import InputError, one_of

BOUNDARIES = ("periodic", "reflecting", "fixed")
Boundary = str | Sequence[str]
"""A word for all axes, or one per axis: a tuple, or a text such as ``reflecting/periodic``."""


class Waves(Basis):
    """The modes of a ``boundary`` per axis: longitude may wrap around where latitude does not.

    Along an axis they are the orthonormal DCT-II if it is "reflecting" and the DST-II if it is "fixed". Over all
    "periodic" axes together they are the Hartley transform Re F − Im F of the orthonormal DFT F: the waves of Fourier
    with real coefficients, in the order of `torch.fft.fftn`. With a fixed boundary the field is 0 half a pixel outside
    the first and the last pixel, and a constant is not a mode.
    """

    boundary: tuple[str, ...]

    def __init__(self, shape: Sequence[int], boundary: Boundary = "periodic", argument: str = "boundary") -> None:
        self.event_shape = check_shape(shape)
        axes = len(self.event_shape)
        self.boundary = boundary_per_axis(boundary, axes, argument)
        self.periodic = tuple(axis - axes for axis, name in enumerate(self.boundary) if name == "periodic")
        rows = ((axis - axes, ROWS.get(name)) for axis, name in enumerate(self.boundary))
        self._rows = [(axis, Cast(padded(matrix(self.event_shape[axis])))) for axis, matrix in rows if matrix]

    @cached_property
    def key(self) -> Hashable:
        return "waves", self.event_shape, self.boundary

    def analyse(self, x: Tensor) -> Tensor:
        for axis, rows in self._rows:
            x = row_product(x.movedim(axis, -1), rows(x).T).movedim(-1, axis)
        return self._hartley(x)

    def synthesise(self, coefficients: Tensor) -> Tensor:
        x = self._hartley(coefficients)
        for axis, rows in self._rows:
            x = row_product(x.movedim(axis, -1), rows(x)).movedim(-1, axis)
        return x

    def _hartley(self, x: Tensor) -> Tensor:
        """The Hartley transform over the periodic axes, which is its own inverse."""
        if not self.periodic:
            return x
        last = tuple(range(-len(self.periodic), 0))
        moved = x if self.periodic == last else x.movedim(self.periodic, last).contiguous()
        moved = _in_batch(moved, len(last), lambda batch: hartley(batch, last))
        return moved if self.periodic == last else moved.movedim(last, self.periodic)

    def diagonal(self, values: Tensor) -> Tensor:
        if self.periodic:
            values = values.mean(self.periodic, keepdim=True).expand_as(values)
        for axis, rows in self._rows:
            n = self.event_shape[axis]
            values = (values.movedim(axis, -1) @ rows.table[:n, :n].square()).movedim(-1, axis)
        return values

    def mirrored(self, values: Tensor) -> Tensor:
        """Numbers per mode [..., *event_shape], those of the waves k and −k exchanged."""
        axes = self.periodic
        return values.flip(axes).roll([1] * len(axes), axes) if axes else values

    def evened(self, values: Tensor) -> Tensor:
        return (values + self.mirrored(values)) / 2 if self.periodic else values

    def arguments(self) -> dict[str, Any]:
        return {"shape": self.event_shape, "boundary": self.boundary}


def hartley(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Re F − Im F of the orthonormal DFT F over the last ``axes``, by one real FFT: at k and −k it is Re F − Im F of k
    and Re F + Im F of k."""
    half = torch.fft.rfftn(x, dim=axes, norm="ortho")
    count = x.shape[-1] - half.shape[-1]  # of columns whose waves have their mirror image in the half
    mirror = (half.real + half.imag)[..., 1 : 1 + count].flip(axes)
    if len(axes) > 1:
        mirror = mirror.roll([1] * (len(axes) - 1), axes[:-1])
    return torch.cat([half.real - half.imag, mirror], dim=-1)


def check_boundary(boundary: Any, argument: str = "boundary") -> str | tuple[str, ...]:
    """A word, or a tuple of one per axis."""
    names = [name.strip() for name in boundary.split("/")] if isinstance(boundary, str) else boundary
    if not isinstance(names, list | tuple) or not names:
        return one_of(argument, boundary, BOUNDARIES)
    checked = tuple(one_of(argument, name, BOUNDARIES) for name in names)
    return checked[0] if isinstance(boundary, str) and len(names) == 1 else checked


def boundary_per_axis(boundary: Any, axes: int, argument: str = "boundary") -> tuple[str, ...]:
    """The boundary of each axis."""
    names = check_boundary(boundary, argument)
    names = names if isinstance(names, tuple) else (names,) * axes
    if len(names) != axes:
        problem = f"is for {len(names)} axes, and the event has {axes}"
        raise InputError(argument, boundary, problem, "give one word, or one per axis")
    return names


def frequencies(shape: Sequence[int], boundary: Boundary) -> list[Tensor]:
    """The frequency of each mode along each axis, in cycles per pixel; signed along a periodic axis."""
    return [
        torch.fft.fftfreq(n, dtype=torch.float64, device="cpu")
        if name == "periodic"
        else torch.arange(n, dtype=torch.float64, device="cpu").add_(1.0 if name == "fixed" else 0.0) / (2 * n)
        for n, name in zip(shape, boundary_per_axis(boundary, len(shape)), strict=True)
    ]


def wavenumber(shape: Sequence[int], boundary: Boundary = "periodic", spacing: Sequence[float] | None = None) -> Tensor:
    """|k| of every mode, in units of the lowest frequency above 0 of any axis (for the DFT: cycles per longest axis).

    ``spacing`` is the distance between pixels along each axis, if it differs.
    """
    per_axis = frequencies(shape, boundary)
    if spacing is not None:
        per_axis = [frequency / step for frequency, step in zip(per_axis, spacing, strict=True)]
    positive = torch.cat([frequency[frequency != 0].abs() for frequency in per_axis])
    unit = positive.min() if len(positive) else 1.0
    return magnitude([frequency / unit for frequency in per_axis])


def magnitude(components: list[Tensor]) -> Tensor:
    """The Euclidean norm over the grid of one component per axis."""
    grid = torch.meshgrid(*components, indexing="ij")
    return torch.stack([axis.square() for axis in grid]).sum(0).sqrt()


def radial_mean(power: Tensor, shell: Tensor) -> Tensor:
    """Mean of ``power`` [..., *modes] over the modes of each shell 0, 1, …; NaN for a shell without modes."""
    leading = power.shape[: power.ndim - shell.ndim]
    total = torch.zeros(*leading, int(shell.max()) + 1, dtype=torch.float64, device="cpu")
    flat = power.double().reshape(*leading, -1)
    return total.index_add_(-1, shell.flatten(), flat) / torch.bincount(shell.flatten())


def _in_batch(x: Tensor, axes: int, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Some FFT libraries refuse a batch of none and round a batch of one differently from the same in a larger."""
    leading = x.shape[: x.ndim - axes]
    if (count := math.prod(leading)) > 1:
        return transform(x)
    event = x.shape[len(leading) :]
    pair = x.reshape(1, *event).expand(2, *event).contiguous() if count else x.new_zeros(2, *event)
    result = transform(pair)[:count]
    return result.reshape(*leading, *result.shape[1:])


def _rows(function: Callable[[Tensor], Tensor], first: int, n: int) -> Tensor:
    """The orthonormal matrix of cosines (DCT-II) or sines (DST-II): row k has k + ``first`` half turns."""
    numbers = torch.arange(n, dtype=torch.float64, device="cpu")
    matrix = function(math.pi / n * (numbers[:, None] + first) * (numbers[None, :] + 0.5)) * math.sqrt(2 / n)
    matrix[-first] /= math.sqrt(2)  # the constant, or the wave that changes sign at every pixel
    return matrix


# As matrices: torch has no DCT, and a product of this size is as quick as one built of FFTs.
ROWS = {"reflecting": partial(_rows, torch.cos, 0), "fixed": partial(_rows, torch.sin, 1)}
