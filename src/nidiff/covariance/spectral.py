"""Stationary covariances: diagonal in the Fourier basis (periodic) or the cosine basis (reflecting boundary)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance, as_numbers, check_shape
from nidiff.covariance.products import padded, row_product
from nidiff.errors import InputError


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
        _check_even("spectrum", spectrum, spectrum.ndim)
        spectrum = (spectrum + _mirrored(spectrum, spectrum.ndim)) / 2  # the rest is rounding
        super().__init__(shape, spectrum, argument="spectrum", normalize=normalize, allow_singular=allow_singular)

    @staticmethod
    def frequencies(shape: Sequence[int]) -> list[Tensor]:
        """The signed frequency of each mode along each axis, in cycles per pixel."""
        return [torch.fft.fftfreq(n, dtype=torch.float64, device="cpu") for n in shape]

    def to_basis(self, x: Tensor) -> Tensor:
        return self._in_batch(x, lambda batch: torch.fft.rfftn(batch, dim=self._axes, norm="ortho"))

    def from_basis(self, coefficients: Tensor) -> Tensor:
        return self._in_batch(
            coefficients, lambda batch: torch.fft.irfftn(batch, s=self.event_shape, dim=self._axes, norm="ortho")
        )

    def _in_batch(self, x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        """Some FFT libraries refuse a batch of none and round a batch of one differently from the same in a larger."""
        leading = x.shape[: x.ndim - len(self.event_shape)]
        if (count := math.prod(leading)) > 1:
            return transform(x)
        event = x.shape[len(leading) :]
        pair = x.reshape(1, *event).expand(2, *event).contiguous() if count else x.new_zeros(2, *event)
        result = transform(pair)[:count]
        return result.reshape(*leading, *result.shape[1:])

    def periodogram(self, x: Tensor) -> Tensor:
        return torch.fft.fftn(x, dim=self._axes, norm="ortho").abs().square()

    @property
    def marginal_variance(self) -> Tensor:
        return self.eigenvalues.mean().expand(self.event_shape)

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.event_shape), 0))

    def check_modes(self, argument: str, values: Tensor) -> None:
        _check_even(argument, values, len(self.event_shape))

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

    @staticmethod
    def frequencies(shape: Sequence[int]) -> list[Tensor]:
        """The frequency of each mode along each axis, in cycles per pixel: mode j makes j half turns."""
        return [torch.arange(n, dtype=torch.float64, device="cpu") / (2 * n) for n in shape]

    def to_basis(self, x: Tensor) -> Tensor:
        for axis, n in enumerate(self.event_shape, start=-len(self.event_shape)):
            x = row_product(x.movedim(axis, -1), self._cosines(n, x).T).movedim(-1, axis)
        return x

    def from_basis(self, coefficients: Tensor) -> Tensor:
        x = coefficients
        for axis, n in enumerate(self.event_shape, start=-len(self.event_shape)):
            x = row_product(x.movedim(axis, -1), self._cosines(n, x)).movedim(-1, axis)
        return x

    @property
    def marginal_variance(self) -> Tensor:
        variance = self.eigenvalues
        for axis, n in enumerate(self.event_shape):
            variance = (variance.movedim(axis, -1) @ _dct_matrix(n).square()).movedim(-1, axis)
        return variance

    def _cosines(self, n: int, like: Tensor) -> Tensor:
        # As a matrix: torch has no DCT, and a product of this size is as quick as one built of FFTs.
        return self.table(("cosines", n), like, lambda: padded(_dct_matrix(n)))

    def arguments(self) -> dict[str, Any]:
        return _spectral_arguments(self)


def _mirrored(values: Tensor, axes: int) -> Tensor:
    """The values at −k of the last axes."""
    last = tuple(range(-axes, 0))
    return values.flip(last).roll([1] * axes, last)


def _check_even(argument: str, values: Tensor, axes: int) -> None:
    if not torch.allclose(values, _mirrored(values, axes), rtol=1e-5, atol=0.0, equal_nan=True):
        raise InputError(
            f"{argument} is not even, λ(k) = λ(−k), and Σ not a real matrix: use the mean of {argument} and its mirror."
        )


def wavenumber(family: type[Fourier] | type[Cosine], shape: Sequence[int]) -> Tensor:
    """|k| of every mode, in units of the lowest non-zero frequency of the longest axis (for the DFT: its cycles)."""
    frequencies, longest = family.frequencies(shape), max(range(len(shape)), key=lambda axis: shape[axis])
    unit = frequencies[longest][1].abs() if shape[longest] > 1 else 1.0
    return magnitude([frequency / unit for frequency in frequencies])


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


BOUNDARIES: dict[str, type[Fourier] | type[Cosine]] = {"periodic": Fourier, "reflecting": Cosine}
