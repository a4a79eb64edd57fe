"""What a sampler makes of Gaussian data, exactly.

Every step is linear in x and in its noise if the data are N(μ, C), and in a basis that C and Σ share every mode goes
its own way. So the sampler itself is run on a small model, one number per kind of mode: from the standard deviation of
the prior, and for every draw of noise from one impulse. The squares of the results add up to the variance of the
samples: no Monte Carlo, and no formula per sampler.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nidiff.covariance.families import Diagonal
from nidiff.covariance.waves import radial_mean
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Level, Schedule, check_forgotten
from nidiff.diffusion.spacing import check_rows
from nidiff.errors import InputError, one_of
from nidiff.sampling.sampler import as_sampler
from nidiff.sampling.step import Chain, Sampler, run_chain

RANKS = 32  # bands where modes have no wavenumber
CHUNK = 4096  # kinds of modes at a time


class Prediction(NamedTuple):
    """What a sampler makes of data N(μ, C).

    A band holds the modes of the same rounded |k|, or of about the same rank in C where modes have no wavenumber.
    """

    rows: tuple[float, ...]
    variance: Tensor  # S of the samples, per mode of C
    ratio: Tensor  # S / C, per mode
    band: Tensor  # the band of every mode, from 0
    errors: Tensor  # the mean of S/C − 1 in each band

    @property
    def error(self) -> float:
        """The mean of |S/C − 1|, over the bands."""
        return radial_mean((self.ratio - 1).abs(), self.band).mean().item()


class ExactDenoiser:
    """E[x0 | x] of Gaussian data whose modes are pixels: a fast `gaussian.denoiser(process)`."""

    kappa = clip = None

    def __init__(self, process: Process, gaussian: GaussianModel) -> None:
        self.process, self.gaussian = process, gaussian
        self._data, self._noise = gaussian.covariance.eigenvalues, process.covariance.eigenvalues

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        signal, sigma = level.signal.values, level.sigma.values
        data = signal * self._data
        return x * (data / (signal * data + sigma**2 * self._noise))

    def pulled(self, x: Tensor, level: Level) -> tuple[Tensor, None]:
        return self(x, level), None


class SmallModel:
    """A process, a Gaussian model of the data and a sampler, for all kinds of modes; with ``most``, for so many of them
    and what lies between by interpolation."""

    def __init__(
        self,
        process: Process,
        gaussian: GaussianModel,
        sampler: Sampler,
        options: dict[str, Any],
        most: int | None = None,
    ) -> None:
        gaussian.check_basis(process.covariance)
        self.gaussian, self.sampler, self.options = gaussian, sampler, options
        self.shape = shape = gaussian.covariance.event_shape
        data = gaussian.covariance.eigenvalues.flatten()
        noise = process.covariance.eigenvalues.expand(shape).flatten()
        column = torch.arange(process.covariance.size, device="cpu")
        column = column.reshape(process.covariance.event_shape).expand(shape).flatten()
        self.kinds = _kinds(process.schedule, data / noise, column, most)
        self.denoisers = [
            ExactDenoiser(
                Process(process.schedule.of_modes(column[part]), Diagonal(noise[part], normalize=False)),
                GaussianModel(torch.zeros(len(part), device="cpu"), Diagonal(data[part], normalize=False)),
            )
            for part in self.kinds.picked.split(CHUNK)
        ]

    def ratio(self, rows: Sequence[float], start: str = "prior") -> Tensor:
        """S / C of every mode, of samples that visit ``rows``."""
        ratios = [self._ratio(denoiser, rows, start) for denoiser in self.denoisers]
        return self.kinds.of_all(torch.cat(ratios)).reshape(self.shape)

    def _ratio(self, denoiser: ExactDenoiser, rows: Sequence[float], start: str) -> Tensor:
        """S / C of the modes of a ``denoiser``."""
        process, gaussian = denoiser.process, denoiser.gaussian
        levels = [process.schedule.level(row) for row in rows]
        deviation = process.covariance.eigenvalues.sqrt()
        x = process.schedule.prior_scale.values * deviation
        if start == "gaussian":
            x = gaussian.at(levels[0], process.covariance).total.values.sqrt()
        still = torch.zeros_like(deviation).unsqueeze(0)
        try:
            x, draws = self._run(denoiser, x + still, levels, lambda _: still)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            name, problem = getattr(self.sampler.step, "__name__", None), "has a step of more than x, x0 and the levels"
            raise InputError("sampler", name, problem, "choose another sampler") from error

        def impulse(number: int) -> Tensor:
            noise = still.repeat(draws, 1)
            noise[number] = deviation
            return noise

        variance = x.square()
        if draws:
            variance = variance + self._run(denoiser, still.repeat(draws, 1), levels, impulse)[0].square().sum(0)
        return variance[0] / gaussian.covariance.eigenvalues

    def _run(
        self, denoiser: ExactDenoiser, x: Tensor, levels: Sequence[Level], noise: Callable[[int], Tensor]
    ) -> tuple[Tensor, int]:
        """Where x ends, and how often the sampler draws noise on its way: first noise(0), then noise(1), …"""
        numbers = itertools.count()
        chain = Chain(cast(Denoiser, denoiser), lambda: noise(next(numbers)))
        return run_chain(chain, x, levels, self.sampler, self.options), next(numbers)

    def error(self, rows: Sequence[float]) -> float:
        """The mean of |S/C − 1| over the bands."""
        return radial_mean((self.ratio(rows) - 1).abs(), bands(self.gaussian)).mean().item()


class _Kinds(NamedTuple):
    """Which modes stand for all, and between which two of them every mode lies."""

    picked: Tensor
    left: Tensor
    right: Tensor
    weight: Tensor  # how near it is to the right one

    def of_all(self, values: Tensor) -> Tensor:
        """A function [kinds] of the kind, for every mode."""
        return torch.lerp(values[self.left], values[self.right], self.weight)


def _kinds(schedule: Schedule, ratio: Tensor, column: Tensor, most: int | None) -> _Kinds:
    """S/C of a mode depends on C/λ alone, and on its levels where every mode has its own; then each mode is a kind.
    If there are to be no more than ``most``, modes are sorted by the mean of these, and some stand for all."""
    place = ratio.log()
    if most is None and schedule.event_shape:
        every = torch.arange(len(place), device="cpu")
        return _Kinds(every, every, every, torch.ones_like(place))
    if schedule.event_shape:
        table = schedule.logsnr.flatten(1)
        some = torch.linspace(0, len(table) - 1, 5, dtype=torch.float64, device="cpu").long()
        place = torch.cat([place[None], table[some][:, column]]).mean(0)
    places, kind = torch.unique((place * 1e12).round() / 1e12, return_inverse=True)
    count = len(places)
    chosen = torch.arange(count, device="cpu")
    if most is not None and count > most:
        by_rank, by_value = (
            torch.linspace(low, high, most // 2, dtype=torch.float64, device="cpu")
            for low, high in ((0, count - 1), (places[0].item(), places[-1].item()))
        )
        near = torch.searchsorted(places, by_value).clamp(max=count - 1)
        chosen = torch.cat([by_rank.round().long(), near]).unique()
    numbers = torch.arange(len(place), device="cpu")
    first = torch.full((count,), len(place), device="cpu").scatter_reduce_(0, kind, numbers, "amin")
    right = torch.searchsorted(chosen, kind)
    left = (right - 1).clamp(min=0)
    span = places[chosen[right]] - places[chosen[left]]
    weight = torch.where(span > 0, (places[kind] - places[chosen[left]]) / span, 1.0)
    return _Kinds(first[chosen], left, right, weight)


def predict(
    process: Process,
    gaussian: GaussianModel,
    sampler: str | Sampler = "dpmpp_2m",
    rows: Sequence[float] = (),
    *,
    start: str = "prior",
    **options: Any,
) -> Prediction:
    """What ``sampler`` makes of data from ``gaussian`` if it visits these rows of the schedule: exact in every mode, up
    to rounding, and nothing is drawn.

    ``start`` is where it begins: at the "prior", or with the "gaussian" itself at the first row. ``options`` are the
    sampler's. (The variance is about the samples' own mean, which lacks what the prior lacks of signal · μ.)
    """
    if one_of("start", start, ("prior", "gaussian")) == "prior":
        check_forgotten(process.schedule)
    visited = check_rows("rows", rows, len(process.schedule))
    if as_sampler(sampler, options)[1].get("colour") is not None:  # whose modes are not those of the small model
        raise InputError("sampler", sampler, "has noise of another `colour`", "leave it out")
    ratio, band = SmallModel(process, gaussian, *as_sampler(sampler, options)).ratio(visited, start), bands(gaussian)
    variance = ratio * gaussian.covariance.eigenvalues
    return Prediction(tuple(visited), variance, ratio, band, radial_mean(ratio - 1, band))


def bands(gaussian: GaussianModel) -> Tensor:
    """The band of every mode of C: its rounded |k|, or its rank in C, from the largest."""
    shape, index = gaussian.covariance.event_shape, gaussian.spatial.wavenumbers
    if index is not None:
        return torch.unique(index.round().long(), return_inverse=True)[1].expand(shape)
    rank = gaussian.covariance.eigenvalues.flatten().argsort(descending=True, stable=True).argsort()
    return (rank * min(RANKS, len(rank)) // len(rank)).reshape(shape)
