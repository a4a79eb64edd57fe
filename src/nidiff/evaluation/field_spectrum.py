"""Power by scale: spectra of fields [N, C, *event] and between their channels, in bands of wavenumbers, with errors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.spectral import ROWS, Boundary, boundary_per_axis, frequencies
from nidiff.errors import InputError, shown
from nidiff.evaluation.points import Array, as_tensor
from nidiff.recipe import fits

CHUNK = 2**22  # numbers at a time
EMPTY = 1e-24  # what rounding leaves of the largest power
Axes = Sequence[int] | None


class Spectrum(NamedTuple):
    """The power of each item at each wavenumber that has modes."""

    wavenumber: Tensor  # [K], whole numbers from 0
    modes: Tensor  # [K], how many there are of each
    power: Tensor  # [N, C, K]


def field_spectrum(fields: Array, *, axes: Axes = None, boundary: Boundary = "periodic") -> Spectrum:
    """S(k) of each item and channel of ``fields`` [N, C, *event]: the mean of |x̂|² over the modes of each rounded |k|.

    x̂ is the orthonormal transform along ``axes`` of the event (0, 1, 2; default: all of them), so white noise of
    variance 1 has S = 1; along the other axes S is averaged. k = 0, 1, … is in units of the lowest frequency above 0:
    cycles per longest side where the boundary is periodic, half cycles where it is not. No mean is removed.

    Args:
        boundary: the waves that fit an axis: "periodic" (Fourier), "reflecting" (cosines: nothing wraps around) or
            "fixed" (sines: the field is 0 at the edge); one for all axes of the event, or one for each, such as
            ("reflecting", "periodic") or "reflecting/periodic".
    """
    x = as_fields(fields, "fields")
    waves = Waves(tuple(x.shape[2:]), axes, boundary)
    return Spectrum(waves.wavenumber, waves.modes, waves.powers(x))


@dataclass(frozen=True)
class SpectrumBands:
    """Spectra of real and generated fields in bands low ≤ k ≤ high of half an octave. S and its errors are [C, B]."""

    low: Tensor  # [B]
    high: Tensor  # [B]
    real: Tensor
    real_error: Tensor  # the standard error of the mean over items
    generated: Tensor
    generated_error: Tensor

    @property
    def difference(self) -> Tensor:
        """log10 S_generated − log10 S_real."""
        return log_ratio(self.generated, self.real)

    @property
    def error(self) -> float:
        """Its mean magnitude, over bands and channels: 0.1 is a quarter more or a fifth less power."""
        return self.difference.abs().mean().item()

    @property
    def z(self) -> Tensor:
        """The difference over its standard error, of both sets together; about N(0, 1) if they are of one kind."""
        relative = (self.real_error / self.real).square() + (self.generated_error / self.generated).square()
        return _over(self.difference * math.log(10), relative.sqrt())

    @property
    def within(self) -> float:
        """The share of bands and channels where |z| ≤ 2, which is about 0.95 if the sets are of one kind."""
        return (self.z.abs() <= 2).double().mean().item()

    def rows(self, channel: int = 0) -> list[dict[str, float]]:
        """The table of a channel, a line per band."""
        columns = {
            "low": self.low,
            "high": self.high,
            "real": self.real[channel],
            "real_error": self.real_error[channel],
            "generated": self.generated[channel],
            "generated_error": self.generated_error[channel],
            "ratio": 10 ** self.difference[channel],
            "z": self.z[channel],
        }
        return _rows(columns)


def compare_spectra(
    real: Array, generated: Array, *, axes: Axes = None, boundary: Boundary = "periodic"
) -> SpectrumBands:
    """The spectra of two sets of fields [N, C, *event] in bands; the other arguments are those of `field_spectrum`.

    ``.error`` is the mean over bands and channels of |log10 S_generated − log10 S_real|. k = 0 is left out.
    """
    first, second = as_pair_of_fields(real, generated)
    waves = Waves(tuple(first.shape[2:]), axes, boundary)
    return spectrum_bands(waves, waves.banded(waves.powers(first)), waves.banded(waves.powers(second)))


@dataclass(frozen=True)
class CrossBands:
    """How channels go together in bands low ≤ k ≤ high. γ = S_ab / √(S_a S_b) and its errors are [P, B], complex."""

    pairs: list[tuple[int, int]]  # P of them, a < b
    low: Tensor  # [B]
    high: Tensor  # [B]
    real: Tensor
    real_error: Tensor  # jackknife over items, of |γ − its mean|
    generated: Tensor
    generated_error: Tensor

    @property
    def error(self) -> float:
        """The mean of |γ_generated − γ_real| over bands and pairs: from 0 to 2."""
        return (self.generated - self.real).abs().mean().item()

    @property
    def z(self) -> Tensor:
        """|γ_generated − γ_real| over its standard error, of both sets together."""
        total = (self.real_error.square() + self.generated_error.square()).sqrt()
        return _over((self.generated - self.real).abs(), total)

    @property
    def within(self) -> float:
        """The share of bands and pairs where z ≤ 2."""
        return (self.z <= 2).double().mean().item()

    def rows(self, pair: int = 0) -> list[dict[str, float]]:
        """The table of a pair, a line per band: coherence |γ| and phase arg γ in radians."""
        columns = {
            "low": self.low,
            "high": self.high,
            "real": self.real[pair].abs(),
            "real_phase": self.real[pair].angle(),
            "real_error": self.real_error[pair],
            "generated": self.generated[pair].abs(),
            "generated_phase": self.generated[pair].angle(),
            "generated_error": self.generated_error[pair],
            "z": self.z[pair],
        }
        return _rows(columns)


def compare_cross_spectra(
    real: Array, generated: Array, *, axes: Axes = None, boundary: Boundary = "periodic"
) -> CrossBands:
    """The coherency γ(k) = S_ab / √(S_a S_b) of every pair of channels of two sets of fields, in bands.

    S_ab is the mean of x̂_a x̂_b* over items and modes, of which one of k and −k counts, that with a positive frequency
    along the last periodic axis: so the phase of γ says by how much a channel leads another along that axis. |γ| is the
    coherence: 1 where one channel is the other times one complex number throughout the band, such as a symmetric
    filter, less where the phase turns within the band, and 0 where they have nothing in common.
    """
    first, second = as_pair_of_fields(real, generated)
    if first.shape[1] < 2:
        raise InputError("real has one channel, which goes together with no other: give two or more.")
    waves = Waves(tuple(first.shape[2:]), axes, boundary)
    sets = [(waves.banded(waves.powers(x)), waves.crosses(x)) for x in (first, second)]
    return cross_bands(waves, *sets)


class Waves:
    """The modes along some axes of an event: their wavenumbers, and the transform."""

    def __init__(self, event: tuple[int, ...], axes: Axes, boundary: Boundary) -> None:
        self.event, names = event, boundary_per_axis(boundary, len(event))
        given = [*axes] if isinstance(axes, list | tuple | range) else [*range(len(event))] if axes is None else []
        known = sorted(given) if all(fits(axis, int) for axis in given) else []
        if not known or not {*known} <= {*range(len(event))} or len({*known}) < len(known):
            raise InputError(f"axes={shown(axes)} must be some of {[*range(len(event))]}, the axes of the event.")
        self.axes = known
        self.names = {axis: names[axis] for axis in known}
        # The last one counts one of k and −k, which an axis of one pixel cannot tell.
        self.periodic = sorted((axis for axis in known if names[axis] == "periodic"), key=lambda a: (event[a] > 1, a))
        self._half = self.periodic[-1] if self.periodic else None
        if max(event[axis] for axis in known) < 2:
            raise InputError(f"axes={shown(axes)} have one pixel each: choose longer ones.")
        along = {axis: self._kept(axis, one) for axis, one in enumerate(frequencies(event, names)) if axis in known}
        unit = min(one[one != 0].abs().min() for one in along.values() if bool(one.any()))
        squares = torch.zeros([1] * len(event), dtype=torch.float64)
        for axis, one in along.items():
            squares = squares + self._along(axis, one / unit).square()
        shell = squares.sqrt().round().long()
        weight = self._weight().expand(shell.shape)
        counts = torch.zeros(int(shell.max()) + 1, dtype=torch.float64).index_add_(0, shell.flatten(), weight.flatten())
        self.wavenumber = counts.nonzero().flatten()
        self.modes = counts[self.wavenumber]
        self._place = (counts > 0).cumsum(0).sub(1)[shell].flatten()
        self._share = (weight / counts[shell]).flatten()

    @cached_property
    def bands(self) -> list[tuple[int, int]]:
        """The first and last wavenumber of each band: 1, 2, 3, 4, 5–6, 7–8, 9–11, …, half an octave each.

        The last one goes up to the corner of the spectrum, and a band without modes is left out.
        """
        last, edges = int(self.wavenumber[-1]), [0]
        while edges[-1] < last:
            half_octaves = round(2 * math.log2(edges[-1])) + 1 if edges[-1] else 0
            edges.append(max(round(2 ** (half_octaves / 2)), edges[-1] + 1))
        if len(edges) > 2 and last - edges[-2] < (edges[-1] - edges[-2]) / 2:
            del edges[-2]  # a corner of few modes
        edges[-1] = last
        known = set(self.wavenumber.tolist())
        return [(low + 1, high) for low, high in pairwise(edges) if known & set(range(low + 1, high + 1))]

    def powers(self, x: Tensor) -> Tensor:
        """The spectrum of each item [N, C, K], float64."""
        return torch.cat([self._means(self._transform(part).abs().square()) for part in self._parts(x)])

    def crosses(self, x: Tensor) -> Tensor:
        """x̂_a x̂_b* of each item and pair of channels a < b, complex128 [N, P, B]."""
        first, second = torch.triu_indices(x.shape[1], x.shape[1], 1)
        found = []
        for part in self._parts(x):
            waves = self._transform(part)
            product = waves[:, first] * waves[:, second].conj()
            parts = (product.real, product.imag) if product.is_complex() else (product, torch.zeros_like(product))
            found.append(torch.complex(*(self.banded(self._means(one)) for one in parts)))
        return torch.cat(found)

    def banded(self, powers: Tensor) -> Tensor:
        """The mean over the modes of each band, of [..., K]."""
        each = []
        for low, high in self.bands:
            inside = (self.wavenumber >= low) & (self.wavenumber <= high)
            share = self.modes[inside] / self.modes[inside].sum()
            each.append((powers[..., inside] * share).sum(-1))
        return torch.stack(each, -1)

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(max(1, CHUNK // x[0].numel())):
            yield part.detach().cpu().double()

    def _transform(self, x: Tensor) -> Tensor:
        for axis, name in self.names.items():
            if name != "periodic":
                x = (x.movedim(axis + 2, -1) @ ROWS[name](self.event[axis]).T).movedim(-1, axis + 2)
        if self.periodic:
            x = torch.fft.rfftn(x, dim=[axis + 2 for axis in self.periodic], norm="ortho")
        return x

    def _means(self, modes: Tensor) -> Tensor:
        """The mean over the modes of each wavenumber, and over the axes that are not transformed."""
        others = [axis + 2 for axis in range(len(self.event)) if axis not in self.axes]
        flat = (modes.mean(others) if others else modes).flatten(2)
        total = torch.zeros(*flat.shape[:2], len(self.wavenumber), dtype=torch.float64)
        return total.index_add_(-1, self._place, flat * self._share)

    def _kept(self, axis: int, modes: Tensor) -> Tensor:
        """Those of the half spectrum along its last periodic axis, of which −k is left out; all along the others."""
        return modes[: self.event[axis] // 2 + 1] if axis == self._half else modes

    def _weight(self) -> Tensor:
        """How many modes of the whole spectrum each of the half spectrum stands for: itself, and −k."""
        if self._half is None:
            return torch.ones([1] * len(self.event), dtype=torch.float64)
        n = self.event[self._half]
        weight = torch.full((n // 2 + 1,), 2.0, dtype=torch.float64)
        weight[0] = 1.0
        if n % 2 == 0:
            weight[-1] = 1.0
        return self._along(self._half, weight)

    def _along(self, axis: int, values: Tensor) -> Tensor:
        return values.reshape(*[-1 if one == axis else 1 for one in range(len(self.event))])


def as_fields(fields: Array, name: str, least: int = 1) -> Tensor:
    """Fields [N, C, *event] of one to three axes, finite, ``least`` items or more."""
    x = as_tensor(fields, name)
    if not 3 <= x.ndim <= 5 or x.numel() == 0:
        raise InputError(f"{name} has shape {tuple(x.shape)}: give fields [N, C, *event] with one to three axes.")
    if x.dtype == torch.bool:
        raise InputError(f"{name} has dtype {x.dtype}: give numbers.")
    if len(x) < least:
        raise InputError(f"{name} has too few items, {len(x)}: give {least} or more.")
    return x


def as_pair_of_fields(real: Array, generated: Array) -> tuple[Tensor, Tensor]:
    """Two sets of the same [C, *event], two items or more each."""
    first, second = as_fields(real, "real", 2), as_fields(generated, "generated", 2)
    if (mine := tuple(first.shape[1:])) != (other := tuple(second.shape[1:])):
        raise InputError(f"generated has items {other} and real {mine}: give fields of one shape.")
    return first, second


def spectrum_bands(waves: Waves, real: Tensor, generated: Tensor) -> SpectrumBands:
    """From the powers of each item in bands, [N, C, B]."""
    low, high = torch.tensor(waves.bands).T
    return SpectrumBands(low, high, real.mean(0), _mean_error(real), generated.mean(0), _mean_error(generated))


def cross_bands(waves: Waves, real: tuple[Tensor, Tensor], generated: tuple[Tensor, Tensor]) -> CrossBands:
    """From the powers [N, C, B] and their products between channels [N, P, B] of each item."""
    channels = real[0].shape[1]
    pairs = [(a, b) for a in range(channels) for b in range(a + 1, channels)]
    low, high = torch.tensor(waves.bands).T
    return CrossBands(
        pairs, low, high, coherency(*real), _jackknife(*real), coherency(*generated), _jackknife(*generated)
    )


def coherency(powers: Tensor, crosses: Tensor) -> Tensor:
    """γ = S_ab / √(S_a S_b) [P, B] of the means over items; 0 where a channel has no power."""
    return _coherency(powers.mean(0), crosses.mean(0))


def _coherency(powers: Tensor, crosses: Tensor) -> Tensor:
    channels = powers.shape[-2]
    first, second = torch.triu_indices(channels, channels, 1)
    scale = (powers[..., first, :] * powers[..., second, :]).sqrt()
    return torch.where(scale > 0, crosses / scale.clamp(min=1e-300), 0.0)


def _jackknife(powers: Tensor, crosses: Tensor) -> Tensor:
    """The standard error of γ: √((N − 1)/N Σ |γ₋ᵢ − mean|²) over the sets that each lack one item."""
    count = len(powers)
    others = [(one.sum(0) - one) / (count - 1) for one in (powers, crosses)]
    without = _coherency(others[0], others[1])
    return ((without - without.mean(0)).abs().square().sum(0) * (count - 1) / count).sqrt()


def _mean_error(values: Tensor) -> Tensor:
    """The standard error of the mean over items."""
    return values.std(0) / len(values) ** 0.5


def log_ratio(generated: Tensor, real: Tensor) -> Tensor:
    """log10 generated − log10 real, of powers [C, B]; 0 where neither has any but rounding, ±∞ where one has none."""
    nothing = EMPTY * torch.maximum(real, generated).amax(-1, keepdim=True)  # channels have units of their own
    real, generated = (torch.where(one > nothing, one, 0.0) for one in (real, generated))
    return torch.where((real == 0) & (generated == 0), 0.0, generated.log10() - real.log10())


def _over(difference: Tensor, error: Tensor) -> Tensor:
    """difference / error; 0 where there is no difference, and ∞ where it is that large."""
    return torch.where((difference == 0) | difference.isinf(), difference, difference / error)


def _rows(columns: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [
        dict(zip(columns, row, strict=True)) for row in zip(*(one.tolist() for one in columns.values()), strict=True)
    ]
