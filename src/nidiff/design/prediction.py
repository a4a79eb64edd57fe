"""What a sampler makes of Gaussian data, exactly.

Every step is linear in x and in its noise if the data are N(μ, C), and in a basis that C and Σ share every mode goes
its own way. So the sampler itself is run on a small model, one number per kind of mode: from the standard deviation of
the prior, and for every draw of noise from one impulse. The squares of the results add up to the variance of the
samples: no Monte Carlo, and no formula per sampler.
"""

import math
from collections.abc import Sequence
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
from nidiff.sampling.langevin import als, cas
from nidiff.sampling.sampler import STARTS, as_sampler
from nidiff.sampling.step import Chain, Sampler, run_chain

MOST_KINDS = 256  # modes of the small model
RANKS = 32  # bands where modes have no wavenumber


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

    @property
    def log_error(self) -> float:
        """The mean of |log10 S/C| over the bands: the spectrum error of `nidiff.metrics`, here at every |k|."""
        return radial_mean(self.ratio, self.band).log10().abs().mean().item()

    @property
    def kl(self) -> float:
        """KL(samples ‖ data) in nats per dimension, of the two Gaussians."""
        return 0.5 * (self.ratio - 1 - self.ratio.log()).mean().item()

    @property
    def w2(self) -> float:
        """The Wasserstein-2 distance of the two Gaussians over that of the data from their mean."""
        data = self.variance / self.ratio
        return math.sqrt((self.variance.sqrt() - data.sqrt()).square().sum().item() / data.sum().item())


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


class SmallModel:
    """A process, a Gaussian model of the data and a sampler, for one mode of every kind."""

    def __init__(
        self,
        process: Process,
        gaussian: GaussianModel,
        sampler: Sampler,
        options: dict[str, Any],
        most: int = MOST_KINDS,
    ) -> None:
        _check_sampler(sampler)
        self.schedule, self.sampler, self.options = process.schedule, sampler, options
        self.gaussian, self.shape = gaussian, gaussian.covariance.event_shape
        data = gaussian.covariance.eigenvalues.flatten()
        event = process.covariance.event_shape
        gaussian.check_basis(process.covariance)
        noise = process.covariance.eigenvalues.expand(self.shape).flatten()
        column = torch.arange(process.covariance.size, device="cpu").reshape(event).expand(self.shape)
        self.kinds = _kinds(process.schedule, data, noise, column.flatten(), most)
        picked = self.kinds.picked
        self.data = data[picked]
        self.noise_deviation = noise[picked].sqrt()
        schedule = process.schedule.of_modes(column.flatten()[picked])
        small_process = Process(schedule, Diagonal(noise[picked], normalize=False))
        mean = torch.zeros(len(picked), dtype=torch.float64, device="cpu")
        small_gaussian = GaussianModel(mean, Diagonal(self.data, normalize=False))
        self.denoiser = ExactDenoiser(small_process, small_gaussian)
        self._draws: dict[int, int] = {}  # how often the sampler draws noise, by its number of steps

    def ratios(self, rows: Tensor, start: str = "prior") -> Tensor:
        """S / C [B, kinds] of samples that visit ``rows`` [B, steps], one set of rows per item."""
        draws = self._count_draws(rows, start)
        count, kinds = len(rows), len(self.data)
        repeated = rows.repeat_interleave(1 + draws, 0)
        levels = [self.denoiser.process.schedule.level(row) for row in repeated.T.contiguous()]
        x = torch.zeros(count, 1 + draws, kinds, dtype=torch.float64, device="cpu")
        x[:, 0] = self._deviation(levels[0], start)[:: 1 + draws]
        drawn = 0

        def impulse() -> Tensor:
            nonlocal drawn
            drawn += 1
            noise = torch.zeros_like(x)
            noise[:, drawn] = self.noise_deviation
            return noise.flatten(0, 1)

        x = run_chain(
            Chain(cast(Denoiser, self.denoiser), impulse), x.flatten(0, 1), levels, self.sampler, self.options
        )
        return x.reshape(count, 1 + draws, kinds).square().sum(1) / self.data

    def prediction(self, rows: Sequence[float], start: str = "prior") -> Prediction:
        """Of samples that visit ``rows``, for all modes."""
        visited = torch.tensor([[*rows]], dtype=torch.float64, device="cpu")
        ratio = self.kinds.of_all(self.ratios(visited, start)[0]).reshape(self.shape)
        band = bands(self.gaussian)
        variance = ratio * self.gaussian.covariance.eigenvalues
        return Prediction(tuple(rows), variance, ratio, band, radial_mean(ratio - 1, band))

    def errors(self, rows: Tensor, start: str = "prior") -> Tensor:
        """The mean of |S/C − 1| over the bands [B], for each set of rows [B, steps]."""
        band = bands(self.gaussian).flatten()
        share = torch.bincount(band)[band].double().reciprocal()  # every band counts the same
        return ((self.ratios(rows, start) - 1).abs() * self.kinds.weights(share / share.sum())).sum(1)

    def _deviation(self, first: Level, start: str) -> Tensor:
        """The standard deviation at the first level."""
        process = self.denoiser.process
        if start == "gaussian":
            return self.denoiser.gaussian.at(first, process.covariance).total.values.sqrt()
        return (process.schedule.prior_scale.values * self.noise_deviation).expand_as(first.sigma.values)

    def _count_draws(self, rows: Tensor, start: str) -> int:
        """How often the sampler draws noise on its way."""
        steps = rows.shape[1]
        if steps not in self._draws:
            levels = [self.denoiser.process.schedule.level(row) for row in rows[:1].T.contiguous()]
            x, drawn = self._deviation(levels[0], start), 0

            def count() -> Tensor:
                nonlocal drawn
                drawn += 1
                return torch.zeros_like(x)

            try:
                run_chain(Chain(cast(Denoiser, self.denoiser), count), x, levels, self.sampler, self.options)
            except (AttributeError, IndexError, RuntimeError, TypeError) as error:
                name = getattr(self.sampler.step, "__name__", self.sampler.step)
                raise InputError(
                    "sampler", name, "has a step that uses more than x, x0 and the levels", "choose another sampler"
                ) from error
            self._draws[steps] = drawn
        return self._draws[steps]


class _Kinds(NamedTuple):
    """Which modes stand for all: exactly if there are few kinds of them, and else by interpolation between two."""

    picked: Tensor  # numbers of modes
    left: Tensor  # of every mode, between which two of the picked it lies,
    right: Tensor
    weight: Tensor  # and how near it is to the right one

    def of_all(self, values: Tensor) -> Tensor:
        """A function [..., kinds] of the kind, for every mode."""
        return torch.lerp(values[..., self.left], values[..., self.right], self.weight)

    def weights(self, weights: Tensor) -> Tensor:
        """Of every kind, so that Σ weights · function is the same over the kinds as over all modes."""
        total = torch.zeros(len(self.picked), dtype=torch.float64, device="cpu")
        total.index_add_(0, self.left, weights * (1 - self.weight))
        return total.index_add_(0, self.right, weights * self.weight)


def _kinds(schedule: Schedule, data: Tensor, noise: Tensor, column: Tensor, most: int) -> _Kinds:
    """S/C of a mode depends on C/λ alone, and on its log-SNR where every mode has its own."""
    ratio = (data / noise).log()
    features = ratio[:, None]
    if schedule.event_shape:
        table = schedule.logsnr.flatten(1)
        some = torch.linspace(0, len(table) - 1, 5, dtype=torch.float64, device="cpu").long()
        features = torch.cat([features, table[some][:, column].T], 1)
    _, kind = torch.unique((features * 1e9).round(), dim=0, return_inverse=True)
    count = int(kind.max()) + 1
    numbers = torch.arange(len(data), device="cpu")
    first = torch.full((count,), len(data), device="cpu").scatter_reduce_(0, kind, numbers, "amin")
    if count <= most:
        return _Kinds(first, kind, kind, torch.zeros_like(ratio))
    place = features.mean(1)  # one number per mode: the log of its SNR
    first = first[place[first].argsort()]
    sorted_places = place[first].contiguous()
    by_rank = torch.linspace(0, count - 1, most // 2, dtype=torch.float64, device="cpu").round().long()
    by_value = torch.linspace(
        sorted_places[0].item(), sorted_places[-1].item(), most // 2, dtype=torch.float64, device="cpu"
    )
    chosen = torch.cat([by_rank, torch.searchsorted(sorted_places, by_value).clamp(max=count - 1)]).unique()
    picked, places = first[chosen], sorted_places[chosen].contiguous()
    right = torch.searchsorted(places, place.contiguous()).clamp(1, len(places) - 1)
    weight = (place - places[right - 1]) / (places[right] - places[right - 1]).clamp(min=1e-300)
    return _Kinds(picked, right - 1, right, weight.clamp(0, 1))


def predict(
    process: Process,
    gaussian: GaussianModel,
    sampler: str | Sampler = "dpmpp_2m",
    rows: Sequence[float] = (),
    *,
    start: str = "prior",
    **options: Any,
) -> Prediction:
    """What ``sampler`` makes of data from ``gaussian`` if it visits these rows of the schedule: exact, and nothing is
    drawn.

    ``start`` is where it begins: at the "prior", or with the "gaussian" itself at the first row. ``options`` are the
    sampler's. (The variance is about the samples' own mean, which lacks what the prior lacks of signal · μ.)
    """
    if one_of("start", start, STARTS) == "prior":
        check_forgotten(process.schedule)
    model = SmallModel(process, gaussian, *as_sampler(sampler, options))
    return model.prediction(check_rows("rows", rows, len(process.schedule)), start)


def bands(gaussian: GaussianModel) -> Tensor:
    """The band of every mode of C: its rounded |k|, or its rank in C, from the largest."""
    shape, index = gaussian.covariance.event_shape, gaussian.spatial.wavenumbers
    if index is not None:
        shell = index.round().long()
        return torch.unique(shell, return_inverse=True)[1].expand(shape)
    rank = gaussian.covariance.eigenvalues.flatten().argsort(descending=True, stable=True).argsort()
    return (rank * min(RANKS, len(rank)) // len(rank)).reshape(shape)


def _check_sampler(sampler: Sampler) -> None:
    if sampler.step in (als, cas):
        raise InputError("sampler", sampler.step.__name__, "is Langevin dynamics", "choose another sampler")
