"""Stationary covariances: diagonal in waves (periodic boundary), cosines (reflecting) or sines (fixed), by axis."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.covariance.products import padded, row_product
from nidiff.errors import InputError, one_of, shown

BOUNDARIES = ("periodic", "reflecting", "fixed")
Boundary = str | Sequence[str]
"""A word for all axes, or one per axis: a tuple, or a text such as ``reflecting/periodic``."""


class Fourier(Covariance):
    """Σ = W⁻¹ diag(spectrum) W with the DFT over all axes of ``shape`` (periodic boundary; paper section 4, E6).

    ``spectrum`` has the layout of `torch.fft.fftn` and must be even (λ(k) = λ(−k)), or Σ would not be real. The
    coefficients are the half spectrum of the real FFT.
    """

    basis = "Fourier"

    def __init__(
        self,
        shape: Sequence[int],
        spectrum: Tensor,
        *,
        normalize: bool = True,
        allow_singular: bool = False,
    ) -> None:
        spectrum = _check_spectrum(shape, spectrum)
        axes = tuple(range(spectrum.ndim))
        _check_even("spectrum", spectrum, axes)
        spectrum = _evened(spectrum, axes)  # the rest is rounding
        super().__init__(shape, spectrum, argument="spectrum", normalize=normalize, allow_singular=allow_singular)

    @property
    def boundary(self) -> tuple[str, ...]:
        return ("periodic",) * len(self.event_shape)

    @staticmethod
    def frequencies(shape: Sequence[int]) -> list[Tensor]:
        """The signed frequency of each mode along each axis, in cycles per pixel."""
        return frequencies(shape, "periodic")

    def to_basis(self, x: Tensor) -> Tensor:
        axes = self._axes
        return _in_batch(x, len(axes), lambda batch: torch.fft.rfftn(batch, dim=axes, norm="ortho"))

    def from_basis(self, coefficients: Tensor) -> Tensor:
        axes, shape = self._axes, self.event_shape
        return _in_batch(
            coefficients, len(axes), lambda batch: torch.fft.irfftn(batch, s=shape, dim=axes, norm="ortho")
        )

    def in_real_basis(self) -> Covariance:
        return Spectral(self.event_shape, self.eigenvalues, self.boundary, normalize=False, allow_singular=True)

    def periodogram(self, x: Tensor) -> Tensor:
        return torch.fft.fftn(x, dim=self._axes, norm="ortho").abs().square()

    def diagonal_of(self, values: Tensor) -> Tensor:
        return values.mean(self._axes, keepdim=True).expand_as(values)

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.event_shape), 0))

    def check_modes(self, argument: str, values: Tensor) -> None:
        _check_even(argument, values, self._axes)

    def mirrored(self, values: Tensor) -> Tensor:
        return _mirrored(values, self._axes)

    def layout(self, eigenvalues: Tensor) -> Tensor:
        return eigenvalues[..., : self.event_shape[-1] // 2 + 1]

    @property
    def white_shape(self) -> tuple[int, ...]:
        return (*self.event_shape[:-1], self.event_shape[-1] // 2 + 1, 2)

    def white_scale(self, eigenvalues: Tensor) -> Tensor:
        # A coefficient with a conjugate partner outside the half spectrum is complex normal: ½λ in each part. In the
        # first column (and the last, n even) the partner is inside or the coefficient itself, and the inverse real
        # transform keeps only the Hermitian part of what stands there. That of a complex normal with λ in each part
        # is right in both cases: complex normal with ½λ in each part, or real with variance λ.
        half = self.layout(eigenvalues)
        share = torch.full((half.shape[-1],), 0.5, dtype=half.dtype, device=half.device)
        share[0] = 1.0
        if self.event_shape[-1] % 2 == 0:
            share[-1] = 1.0
        return (half * share).sqrt().unsqueeze(-1).expand(*half.shape, 2)

    def as_coefficients(self, numbers: Tensor) -> Tensor:
        return torch.view_as_complex(numbers)

    def arguments(self) -> dict[str, Any]:
        return _spectral_arguments(self)


class Cosine(Covariance):
    """Σ = Cᵀ diag(spectrum) C with the orthonormal DCT-II over all axes of ``shape`` (reflecting boundary).

    Nothing wraps around the edges, so the marginal variance is not the same at every pixel: its mean is 1.
    """

    basis = "Cosine"

    def __init__(
        self,
        shape: Sequence[int],
        spectrum: Tensor,
        *,
        normalize: bool = True,
        allow_singular: bool = False,
    ) -> None:
        spectrum = _check_spectrum(shape, spectrum)
        super().__init__(shape, spectrum, argument="spectrum", normalize=normalize, allow_singular=allow_singular)

    @property
    def boundary(self) -> tuple[str, ...]:
        return ("reflecting",) * len(self.event_shape)

    @staticmethod
    def frequencies(shape: Sequence[int]) -> list[Tensor]:
        """The frequency of each mode along each axis, in cycles per pixel: mode j makes j half turns."""
        return frequencies(shape, "reflecting")

    def to_basis(self, x: Tensor) -> Tensor:
        for axis, n in enumerate(self.event_shape, start=-len(self.event_shape)):
            x = row_product(x.movedim(axis, -1), self._cosines(n, x).T).movedim(-1, axis)
        return x

    def from_basis(self, coefficients: Tensor) -> Tensor:
        x = coefficients
        for axis, n in enumerate(self.event_shape, start=-len(self.event_shape)):
            x = row_product(x.movedim(axis, -1), self._cosines(n, x)).movedim(-1, axis)
        return x

    def diagonal_of(self, values: Tensor) -> Tensor:
        for axis, n in enumerate(self.event_shape, start=-len(self.event_shape)):
            values = (values.movedim(axis, -1) @ _dct_matrix(n).square()).movedim(-1, axis)
        return values

    def _cosines(self, n: int, like: Tensor) -> Tensor:
        # As a matrix: torch has no DCT, and a product of this size is as quick as one built of FFTs.
        return self.table(("cosines", n), like, lambda: padded(_dct_matrix(n)))

    def arguments(self) -> dict[str, Any]:
        return _spectral_arguments(self)


class Spectral(Covariance):
    """Σ = Uᵀ diag(spectrum) U with a ``boundary`` per axis: longitude may wrap around where latitude does not.

    U is, along an axis, the orthonormal DCT-II if it is "reflecting", the DST-II if it is "fixed", and over all
    "periodic" axes together the Hartley transform, the real part minus the imaginary part of the DFT: the waves of
    `Fourier` with real coefficients. ``spectrum`` has one eigenvalue per mode in the order of `frequencies`: that of
    `torch.fft.fftn` along a periodic axis, where it must be even, λ(k) = λ(−k), and a rising one along the others.

    With a fixed boundary the field is 0 at the edges of the event, half a pixel outside the first and the last pixel,
    and a constant is not a mode. All axes periodic is the Σ of `Fourier`, all reflecting that of `Cosine`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        spectrum: Tensor,
        boundary: Boundary,
        *,
        normalize: bool = True,
        allow_singular: bool = False,
    ) -> None:
        spectrum = _check_spectrum(shape, spectrum)
        self._boundary = boundary_per_axis(boundary, spectrum.ndim)
        self._waves = tuple(i - spectrum.ndim for i, name in enumerate(self._boundary) if name == "periodic")
        _check_even("spectrum", spectrum, self._waves)
        spectrum = _evened(spectrum, self._waves)
        super().__init__(shape, spectrum, argument="spectrum", normalize=normalize, allow_singular=allow_singular)

    @property
    def boundary(self) -> tuple[str, ...]:
        return self._boundary

    @property
    def basis(self) -> Any:
        if len({*self._boundary}) == 1:  # whose eigenvalues are in the same order
            return {"periodic": Fourier.basis, "reflecting": Cosine.basis}.get(self._boundary[0], self._boundary)
        return self._boundary

    def to_basis(self, x: Tensor) -> Tensor:
        for axis, rows in self._rows(x):
            x = row_product(x.movedim(axis, -1), rows.T).movedim(-1, axis)
        return self._hartley(x)

    def from_basis(self, coefficients: Tensor) -> Tensor:
        x = self._hartley(coefficients)
        for axis, rows in self._rows(x):
            x = row_product(x.movedim(axis, -1), rows).movedim(-1, axis)
        return x

    def _rows(self, like: Tensor) -> list[tuple[int, Tensor]]:
        """The axes that are not periodic, each with its cosines or sines as rows."""
        named = zip(range(-len(self.event_shape), 0), self._boundary, self.event_shape, strict=True)
        return [
            (axis, self.table((name, n), like, lambda name=name, n=n: padded(ROWS[name](n))))  # type: ignore[misc]
            for axis, name, n in named
            if name in ROWS
        ]

    def _hartley(self, x: Tensor) -> Tensor:
        """Its own inverse."""
        count = len(self._waves)
        if not count:
            return x
        last = tuple(range(-count, 0))
        waves = _in_batch(
            x.movedim(self._waves, last).contiguous(),
            count,
            lambda batch: torch.fft.fftn(batch, dim=last, norm="ortho"),
        )
        return (waves.real - waves.imag).movedim(last, self._waves)

    def diagonal_of(self, values: Tensor) -> Tensor:
        if self._waves:
            values = values.mean(self._waves, keepdim=True).expand_as(values)
        for axis, (name, n) in enumerate(zip(self._boundary, self.event_shape, strict=True), -len(self.event_shape)):
            if name in ROWS:
                values = (values.movedim(axis, -1) @ ROWS[name](n).square()).movedim(-1, axis)
        return values

    def check_modes(self, argument: str, values: Tensor) -> None:
        _check_even(argument, values, self._waves)

    def mirrored(self, values: Tensor) -> Tensor:
        return _mirrored(values, self._waves)

    def arguments(self) -> dict[str, Any]:
        return {**_spectral_arguments(self), "boundary": self._boundary}


def stationary(
    shape: Sequence[int],
    spectrum: Tensor,
    boundary: Boundary,
    *,
    normalize: bool = True,
    allow_singular: bool = False,
    argument: str = "boundary",
) -> Covariance:
    """The Σ with this spectrum and boundary: `Fourier`, `Cosine`, or `Spectral` for anything but one of these."""
    named = boundary_per_axis(boundary, len(shape), argument)
    if {*named} == {"periodic"}:
        return Fourier(shape, spectrum, normalize=normalize, allow_singular=allow_singular)
    if {*named} == {"reflecting"}:
        return Cosine(shape, spectrum, normalize=normalize, allow_singular=allow_singular)
    return Spectral(shape, spectrum, named, normalize=normalize, allow_singular=allow_singular)


def white_in(boundary: Boundary, shape: Sequence[int], argument: str = "boundary") -> Covariance:
    """White noise in the basis of a boundary, for whoever needs the basis alone."""
    return stationary(shape, torch.ones(*shape, dtype=torch.float64, device="cpu"), boundary, argument=argument)


def check_boundary(boundary: Any, argument: str = "boundary") -> str | tuple[str, ...]:
    """A word, or a tuple of one per axis."""
    if isinstance(boundary, str) and "/" not in boundary:
        return one_of(argument, boundary, BOUNDARIES)
    names = boundary.split("/") if isinstance(boundary, str) else boundary
    if not isinstance(names, list | tuple) or not names:
        return one_of(argument, boundary, BOUNDARIES)
    return tuple(one_of(argument, name.strip() if isinstance(name, str) else name, BOUNDARIES) for name in names)


def boundary_per_axis(boundary: Any, axes: int, argument: str = "boundary") -> tuple[str, ...]:
    """The boundary of each axis."""
    names = check_boundary(boundary, argument)
    if isinstance(names, tuple) and len(names) != axes:
        raise InputError(
            f"{argument}={shown(boundary)} is for {len(names)} axes, and the event has {axes}: give one word, or one "
            "per axis."
        )
    return names if isinstance(names, tuple) else (names,) * axes


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
    each = frequencies(shape, boundary)
    if spacing is not None:
        each = [frequency / step for frequency, step in zip(each, spacing, strict=True)]
    positive = torch.cat([frequency[frequency != 0].abs() for frequency in each])
    unit = positive.min() if len(positive) else 1.0
    return magnitude([frequency / unit for frequency in each])


def _in_batch(x: Tensor, axes: int, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Some FFT libraries refuse a batch of none and round a batch of one differently from the same in a larger."""
    leading = x.shape[: x.ndim - axes]
    if (count := math.prod(leading)) > 1:
        return transform(x)
    event = x.shape[len(leading) :]
    pair = x.reshape(1, *event).expand(2, *event).contiguous() if count else x.new_zeros(2, *event)
    result = transform(pair)[:count]
    return result.reshape(*leading, *result.shape[1:])


def _mirrored(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The values at −k of these axes."""
    return values.flip(axes).roll([1] * len(axes), axes) if axes else values


def _evened(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (values + _mirrored(values, axes)) / 2


def _check_even(argument: str, values: Tensor, axes: tuple[int, ...]) -> None:
    if not torch.allclose(values, _mirrored(values, axes), rtol=1e-5, atol=0.0, equal_nan=True):
        raise InputError(
            f"{argument} is not even, λ(k) = λ(−k), and Σ not a real matrix: use the mean of {argument} and its mirror."
        )


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


def _dct_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II matrix: row k is the k-th cosine."""
    modes = torch.arange(n, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi / n * modes[:, None] * (modes[None, :] + 0.5)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def _dst_matrix(n: int) -> Tensor:
    """The orthonormal DST-II matrix: row k is the sine of k + 1 half turns, which is 0 at both edges."""
    pixels = torch.arange(n, dtype=torch.float64, device="cpu")
    matrix = torch.sin(math.pi / n * (pixels[:, None] + 1) * (pixels[None, :] + 0.5)) * math.sqrt(2 / n)
    matrix[-1] /= math.sqrt(2)
    return matrix


ROWS = {"reflecting": _dct_matrix, "fixed": _dst_matrix}


def _check_spectrum(shape: Sequence[int], spectrum: Tensor) -> Tensor:
    shape, spectrum = check_shape(shape), as_numbers(spectrum, "spectrum")
    if tuple(spectrum.shape) != shape:
        raise InputError(
            f"spectrum has shape {tuple(spectrum.shape)}, but shape={shape}: give one eigenvalue per mode."
        )
    return spectrum


def _spectral_arguments(cov: Covariance) -> dict[str, Any]:
    return {
        "shape": cov.event_shape,
        "spectrum": cov.eigenvalues,
        "normalize": False,
        "allow_singular": cov.is_singular,
    }
