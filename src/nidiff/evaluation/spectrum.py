"""Spectra: the power of fields [N, C, *event] by wavenumber and in bands, and how channels go together.

Everything that shows or compares spectra uses `Shells`. The spectrum error of generated data, wherever it is printed,
is that of `spectrum_error`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.waves import Boundary, Waves, boundary_per_axis, frequencies, radial_mean, wavenumber
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError
from nidiff.evaluation.arrays import Array, as_fields, as_pair
from nidiff.evaluation.order import standard_error

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
    shells = Shells(tuple(x.shape[2:]), axes, boundary)
    return Spectrum(shells.wavenumber, shells.modes, shells.powers(x))


def spectrum_error(real: Array, generated: Array, *, axes: Axes = None, boundary: Boundary = "periodic") -> float:
    """The mean over bands and channels of |log10 S_generated − log10 S_real|: 0.1 is 26 % more or 21 % less power.

    S is the power spectrum of images or fields [N, C, *event] (`field_spectrum`, averaged over the items), in bands of
    half an octave of |k|, up to the corner of the spectrum. k = 0 is left out, so brightness plays no part. Images of
    uint8 are taken as [-1, 1]. The result is infinite where one of the sets has no power in a band.
    """
    pair = (PIXELS.to_model(x) if x.dtype == torch.uint8 else x for x in as_pair(real, generated))
    return compare_spectra(*pair, axes=axes, boundary=boundary).error


@dataclass(frozen=True)
class Bands:
    """Real and generated fields in bands low ≤ k ≤ high of half an octave: spectra S [C, B] of channels, or complex
    coherencies γ [P, B] of pairs of channels a < b."""

    low: Tensor  # [B]
    high: Tensor  # [B]
    real: Tensor
    real_error: Tensor  # the standard error over items; of γ that of |γ − its mean|
    generated: Tensor
    generated_error: Tensor

    @property
    def difference(self) -> Tensor:
        """log10 S_generated − log10 S_real, or γ_generated − γ_real."""
        return self.generated - self.real if self.real.is_complex() else log_ratio(self.generated, self.real)

    @property
    def error(self) -> float:
        """The mean magnitude of the difference: of S the spectrum error, of γ from 0 to 2."""
        return self.difference.abs().mean().item()

    @property
    def z(self) -> Tensor:
        """The difference, of γ its magnitude, over its standard error, of both sets together. Of spectra of one
        distribution it is about N(0, 1)."""
        errors = torch.stack([self.real_error, self.generated_error])
        if self.real.is_complex():
            difference = self.difference.abs()
        else:
            difference, errors = self.difference * math.log(10), errors / torch.stack([self.real, self.generated])
        z = difference / errors.square().sum(0).sqrt()
        return torch.where((difference == 0) | difference.isinf(), difference, z)

    @property
    def within(self) -> float:
        """The share where |z| ≤ 2: about 0.95 for spectra of one distribution."""
        return (self.z.abs() <= 2).double().mean().item()

    def rows(self, index: int = 0) -> list[dict[str, float]]:
        """The table of a channel or of a pair, a line per band; of γ, |γ| and its phase in radians."""
        columns = {"low": self.low, "high": self.high}
        for name in ("real", "generated"):
            values = getattr(self, name)[index]
            columns |= {name: values.abs(), f"{name}_error": getattr(self, f"{name}_error")[index]}
            columns |= {f"{name}_phase": values.angle()} if values.is_complex() else {}
        columns |= {} if self.real.is_complex() else {"ratio": 10 ** self.difference[index]}
        columns["z"] = self.z[index]
        numbers = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in numbers]


def compare_spectra(real: Array, generated: Array, *, axes: Axes = None, boundary: Boundary = "periodic") -> Bands:
    """The spectra of two sets of fields [N, C, *event] in bands; the other arguments are those of `field_spectrum`.

    ``.error`` is the mean over bands and channels of |log10 S_generated − log10 S_real|. k = 0 is left out.
    """
    pair = as_pair(real, generated)
    shells = Shells(tuple(pair[0].shape[2:]), axes, boundary)
    return spectrum_bands(shells, *(shells.in_bands(shells.powers(x)) for x in pair))


def compare_cross_spectra(
    real: Array, generated: Array, *, axes: Axes = None, boundary: Boundary = "periodic"
) -> Bands:
    """The coherency γ(k) = S_ab / √(S_a S_b) of every pair of channels of two sets of fields, in bands.

    S_ab is the mean of x̂_a x̂_b* over items and modes, of which one of k and −k counts, that with a positive frequency
    along the last periodic axis: so the phase of γ says by how much a channel leads another along that axis. |γ| is the
    coherence: 1 where one channel is the other times one complex number throughout the band, such as a symmetric
    filter, less where the phase turns within the band, and 0 where they have nothing in common.
    """
    pair = as_pair(real, generated)
    if pair[0].shape[1] < 2:
        raise InputError("real", None, "has one channel", "give two or more")
    shells = Shells(tuple(pair[0].shape[2:]), axes, boundary)
    return coherency_bands(shells, *((shells.in_bands(shells.powers(x)), shells.crosses(x)) for x in pair))


class Shells:
    """The modes along some axes of an event, in shells of equal rounded |k|."""

    def __init__(self, event: tuple[int, ...], axes: Axes = None, boundary: Boundary = "periodic") -> None:
        names, chosen = boundary_per_axis(boundary, len(event)), [*range(len(event))] if axes is None else sorted(axes)
        known = [axis for axis in chosen if 0 <= axis < len(event)]
        if len({*known}) < len(chosen) or all(event[axis] < 2 for axis in known):
            problem = f"are not axes of an event {tuple(event)}, or have one pixel each"
            raise InputError("axes", axes, problem, f"choose from {[*range(len(event))]}")
        self.axes, self.shape = tuple(chosen), tuple(event[axis] for axis in chosen)
        self.boundary = tuple(names[axis] for axis in chosen)
        self.basis = Waves(self.shape, self.boundary)
        self._shell = wavenumber(self.shape, self.boundary).round().long()
        counts = torch.bincount(self._shell.flatten())
        self.wavenumber = counts.nonzero().flatten()
        """Those that have modes, [K]."""
        self.modes = counts[self.wavenumber]
        """How many there are of each, [K]."""

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the modes of each shell, of [..., *shape]: [..., K]."""
        return radial_mean(values, self._shell)[..., self.wavenumber]

    def powers(self, x: Tensor) -> Tensor:
        """The spectrum of each item [N, C, K] of fields [N, C, *event], float64."""
        return self._each(x, lambda part: self.mean(self.basis.analyse(part).square()))

    def crosses(self, x: Tensor) -> Tensor:
        """x̂_a x̂_b* of each item and pair of channels a < b in bands, complex128 [N, P, B]."""
        first, second = torch.triu_indices(x.shape[1], x.shape[1], 1)

        def products(part: Tensor) -> Tensor:
            # With c(k) = Re x̂ − Im x̂ and c(−k) = Re x̂ + Im x̂: the parts of x̂_a x̂_b*, of which the imaginary one
            # changes its sign at −k.
            coefficients = self.basis.analyse(part)
            mirrored = self.basis.mirrored(coefficients)
            a, b = coefficients[:, first], coefficients[:, second]
            imaginary = self._sign * (mirrored[:, first] * b - a * mirrored[:, second]) / 2
            return torch.complex(self.mean(a * b), self.mean(imaginary))

        return self.in_bands(self._each(x, products))

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

    def in_bands(self, powers: Tensor) -> Tensor:
        """The mean over the modes of each band, of [..., K]: [..., B]."""
        means = []
        for low, high in self.bands:
            inside = (self.wavenumber >= low) & (self.wavenumber <= high)
            means.append((powers[..., inside] * (self.modes[inside] / self.modes[inside].sum())).sum(-1))
        return torch.stack(means, -1)

    def _each(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """What is computed of [n, C, …, *shape], some items at a time, averaged over the axes not transformed."""
        last, results = range(-len(self.axes), 0), []
        for part in x.split(max(1, CHUNK // x[0].numel())):
            result = compute(part.detach().cpu().double().movedim([axis + 2 for axis in self.axes], [*last]))
            results.append(result.flatten(2, -2).mean(2) if result.ndim > 3 else result)
        return torch.cat(results)

    @cached_property
    def _sign(self) -> Tensor:
        """The sign of the frequency along the last periodic axis that has one."""
        axis = next((axis for axis in reversed(self.basis.periodic) if self.shape[axis] > 1), None)
        if axis is None:
            return torch.zeros((), dtype=torch.float64)
        sign = frequencies(self.shape, self.boundary)[axis].sign()
        return sign.reshape([-1 if place - len(self.shape) == axis else 1 for place in range(len(self.shape))])


def spectrum_bands(shells: Shells, *sides: Tensor, ordered: Sequence[bool] = (False, False)) -> Bands:
    """From the powers of each real and each generated item in bands, [N, C, B]; which of both are ``ordered``."""
    numbers = []
    for powers, follows in zip(sides, ordered, strict=True):
        numbers += [powers.mean(0), standard_error(powers, ordered=follows)]
    return Bands(*torch.tensor(shells.bands).T, *numbers)


def coherency_bands(shells: Shells, *sides: tuple[Tensor, Tensor], ordered: Sequence[bool] = (False, False)) -> Bands:
    """From the powers [N, C, B] and their products between channels [N, P, B] of each real and each generated item.

    The errors are those of the jackknife: of the mean of (N − 1) γ₋ᵢ, where γ₋ᵢ is that of all items but one.
    """
    numbers = []
    for side, follows in zip(sides, ordered, strict=True):
        count = len(side[0])
        without = coherency(*((values.sum(0) - values) / (count - 1) for values in side))
        parts = torch.view_as_real(without * (count - 1))
        error = standard_error(parts, ordered=follows).square().sum(-1).sqrt()
        numbers += [coherency(*(values.mean(0) for values in side)), error]
    return Bands(*torch.tensor(shells.bands).T, *numbers)


def coherency(powers: Tensor, crosses: Tensor) -> Tensor:
    """γ = S_ab / √(S_a S_b) [..., P, B] from S_a [..., C, B] and S_ab; 0 where a channel has no power."""
    first, second = torch.triu_indices(powers.shape[-2], powers.shape[-2], 1)
    scale = (powers[..., first, :] * powers[..., second, :]).sqrt()
    return torch.where(scale > 0, crosses / scale.clamp(min=1e-300), 0.0)


def log_ratio(generated: Tensor, real: Tensor) -> Tensor:
    """log10 generated − log10 real, of powers [C, B]; 0 where neither has any but rounding, ±∞ where one has none."""
    rounding = EMPTY * torch.maximum(real, generated).amax(-1, keepdim=True)  # channels have units of their own
    real, generated = (torch.where(power > rounding, power, 0.0) for power in (real, generated))
    return torch.where((real == 0) & (generated == 0), 0.0, generated.log10() - real.log10())
