"""What a sampler makes of Gaussian data, exactly; and from it the levels at which it makes the least error.

Every step is linear in x and in its noise if the data are N(μ, C), and in a basis that C and Σ share every mode goes
its own way. So the sampler itself is run on a small model, one number per kind of mode: from the standard deviation of
the prior, and for every draw of noise from one impulse. The squares of the results add up to the variance of the
samples: no Monte Carlo, and no formula per sampler.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nidiff.covariance.matrix import Diagonal
from nidiff.covariance.modes import Modes
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.family import check_forgotten
from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Level, Schedule
from nidiff.errors import InputError, expect, one_of, shown
from nidiff.recipe import check_kinds
from nidiff.sampling.angle import angle_rows
from nidiff.sampling.langevin import als, cas
from nidiff.sampling.spacing import SPACINGS, check_count, checked_rows
from nidiff.sampling.step import Chain, Sampler, Spacing, walk
from nidiff.sampling.warm import start_row

MOST_KINDS = 256  # modes of the small model
RANKS = 32  # bands where modes have no wavenumber
ROUNDING = 1e-9  # an error that nothing is gained from


class Prediction(NamedTuple):
    """What a sampler makes of data N(μ, C). A band holds the modes of one rounded |k|, or of about the same rank in C
    where they have no wavenumber."""

    rows: tuple[float, ...]
    variance: Tensor  # S of the samples, per mode of C
    ratio: Tensor  # S / C, per mode
    band: Tensor  # the band of every mode, from 0
    errors: Tensor  # the mean of S/C − 1 in each band

    @property
    def error(self) -> float:
        """The mean of |S/C − 1|, over the bands."""
        return _band_mean((self.ratio - 1).abs(), self.band).mean().item()

    @property
    def log_error(self) -> float:
        """The root mean square of log10 S/C, over the bands."""
        return _band_mean(self.ratio, self.band).log10().square().mean().sqrt().item()

    @property
    def kl(self) -> float:
        """KL(samples ‖ data) in nats per dimension, of the two Gaussians."""
        return LOSSES["kl"].of(self.ratio).mean().item()

    @property
    def w2(self) -> float:
        """The Wasserstein-2 distance of the two Gaussians over that of the data from their mean."""
        distance, size = (
            (self.variance.sqrt() - (self.variance / self.ratio).sqrt()).square(),
            self.variance / self.ratio,
        )
        return math.sqrt(distance.sum().item() / size.sum().item())


class Loss(NamedTuple):
    """What a mode costs whose variance is wrong by a ratio, and the power of its mean that is the size of an error."""

    of: Callable[[Tensor], Tensor]
    power: float = 1.0


LOSSES: dict[str, Loss] = {
    "spectrum": Loss(lambda ratio: (ratio - 1).abs()),
    "kl": Loss(lambda ratio: 0.5 * (ratio - 1 - ratio.log()), 0.5),
    "w2": Loss(lambda ratio: (ratio.sqrt() - 1).square(), 0.5),
}


class ExactDenoiser:
    """E[x0 | x] of Gaussian data whose modes are pixels: what `gaussian.denoiser(process)` is, without its detours.

    Steps know it as the denoiser of their chain.
    """

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
        gaussian.noise(process.covariance)  # which refuses another basis
        noise = process.covariance.eigenvalues.expand(self.shape).flatten()
        column = torch.arange(process.covariance.size, device="cpu").reshape(event).expand(self.shape)
        self.kinds = _kinds(process.schedule, data, noise, column.flatten(), most)
        picked = self.kinds.picked
        self.data = data[picked]
        self.noise_deviation = noise[picked].sqrt()
        schedule = process.schedule.of_modes(column.flatten()[picked])
        own_process = Process(schedule, Diagonal(noise[picked], normalize=False))
        own_gaussian = GaussianModel(
            torch.zeros(len(picked), dtype=torch.float64, device="cpu"), Diagonal(self.data, normalize=False)
        )
        self.denoiser = ExactDenoiser(own_process, own_gaussian)
        self.draws: int | None = None

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

        x = walk(Chain(cast(Denoiser, self.denoiser), impulse), x.flatten(0, 1), levels, self.sampler, self.options)
        return x.reshape(count, 1 + draws, kinds).square().sum(1) / self.data

    def errors(self, rows: Tensor, start: str = "prior") -> Tensor:
        """The mean of |S/C − 1| over the bands [B], for each set of rows [B, steps]."""
        return ((self.ratios(rows, start) - 1).abs() * self.weights()).sum(1)

    def weights(self, objective: str = "spectrum") -> Tensor:
        """Of every kind: each band counts the same for the spectrum, each mode for "kl", and as much as C for "w2"."""
        band, data = bands(self.gaussian).flatten(), self.gaussian.covariance.eigenvalues.flatten()
        each = torch.bincount(band)[band].double().reciprocal() if objective == "spectrum" else torch.ones_like(data)
        each = data if objective == "w2" else each
        return self.kinds.weights(each / each.sum())

    def _deviation(self, first: Level, start: str) -> Tensor:
        """The standard deviation at the first level."""
        process = self.denoiser.process
        if start == "gaussian":
            return self.denoiser.gaussian.at(first, process.covariance).total.values.sqrt()
        scale = process.schedule.prior_scale
        scale = scale.values if isinstance(scale, Modes) else scale
        return (scale * self.noise_deviation).expand_as(first.sigma.values)

    def _count_draws(self, rows: Tensor, start: str) -> int:
        """How often the sampler draws noise on its way."""
        if self.draws is None:
            levels = [self.denoiser.process.schedule.level(row) for row in rows[:1].T.contiguous()]
            x, drawn = self._deviation(levels[0], start), 0

            def count() -> Tensor:
                nonlocal drawn
                drawn += 1
                return torch.zeros_like(x)

            try:
                walk(Chain(cast(Denoiser, self.denoiser), count), x, levels, self.sampler, self.options)
            except (AttributeError, IndexError, RuntimeError, TypeError) as error:
                name = getattr(self.sampler.step, "__name__", self.sampler.step)
                raise InputError(
                    f"sampler={shown(name)} cannot be planned or predicted, since its step asks for more than x, x0 "
                    "and the levels: use another spacing."
                ) from error
            self.draws = drawn
        return self.draws


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
    chosen, told = _checked(process, gaussian, sampler, options)
    model = SmallModel(process, gaussian, chosen, told)
    visited = checked_rows(process.schedule, rows)
    return _prediction(model, gaussian, visited, _checked_start(process, start))


def plan(
    process: Process,
    gaussian: GaussianModel,
    sampler: str | Sampler = "dpmpp_2m",
    num_steps: int = 10,
    *,
    start: str | None = None,
    bound: float | None = None,
    kappa: Kappa | None = None,
    objective: str = "spectrum",
    between: bool = False,
    **options: Any,
) -> Prediction:
    """The rows that ``spacing="planned"`` visits, in ``.rows``, and the error of the spectrum to expect of them.

    ``objective`` is what is minimised: "spectrum", the mean of |S/C − 1| over the bands; or an error of the law, "kl"
    or "w2". ``start`` and ``bound`` are as in `nidiff.sample`; with ``kappa`` the bound is on the estimate that
    `gaussian_loss` makes of it. ``between`` allows rows between the rows of the schedule: for networks that take
    fractional labels.
    """
    chosen, told = _checked(process, gaussian, sampler, options)
    check_kinds(plan, {"between": between})
    count, first = check_count(process.schedule, num_steps), None
    start = _checked_start(process, chosen.start if start is None else start)
    if start == "gaussian":
        limit = chosen.bound if bound is None else bound
        first = max(start_row(process, gaussian, limit, kappa), count - 1)
    elif bound is not None or kappa is not None:
        raise InputError("bound and kappa say how low start='gaussian' begins: leave them out, or give that too.")
    rows = planned_rows(
        process, gaussian, chosen, told, count, start=start, first=first, objective=objective, between=between
    )
    return _prediction(SmallModel(process, gaussian, chosen, told), gaussian, rows, start)


def _checked(
    process: Process, gaussian: GaussianModel, sampler: str | Sampler, options: dict[str, Any]
) -> tuple[Sampler, dict[str, Any]]:
    from nidiff.sampling.sampler import as_sampler  # which plans

    expect("process", process, Process)
    expect("gaussian", gaussian, GaussianModel, "fit one by nidiff.fit_gaussian(data)")
    return as_sampler(sampler, options)


def _checked_start(process: Process, start: str) -> str:
    if one_of("start", start, ("prior", "gaussian")) == "prior":
        check_forgotten(process.schedule)
    return start


def _prediction(model: SmallModel, gaussian: GaussianModel, rows: Sequence[float], start: str) -> Prediction:
    visited = torch.tensor([[*rows]], dtype=torch.float64, device="cpu")
    ratio = model.kinds.of_all(model.ratios(visited, start)[0]).reshape(model.shape)
    band = bands(gaussian)
    errors = _band_mean(ratio - 1, band)
    return Prediction(tuple(rows), ratio * gaussian.covariance.eigenvalues, ratio, band, errors)


def bands(gaussian: GaussianModel) -> Tensor:
    """The band of every mode of C: its rounded |k|, or its rank in C, from the largest."""
    shape, index = gaussian.covariance.event_shape, gaussian.spatial.wavenumbers
    if index is not None:
        shell = index.round().long()
        return torch.unique(shell, return_inverse=True)[1].expand(shape)
    rank = gaussian.covariance.eigenvalues.flatten().argsort(descending=True, stable=True).argsort()
    return (rank * min(RANKS, len(rank)) // len(rank)).reshape(shape)


def _band_mean(values: Tensor, band: Tensor) -> Tensor:
    total = torch.zeros(int(band.max()) + 1, dtype=torch.float64, device="cpu")
    return total.index_add_(0, band.flatten(), values.flatten()) / torch.bincount(band.flatten())


def _check_sampler(sampler: Sampler) -> None:
    if sampler.step in (als, cas):
        raise InputError(
            f"sampler={sampler.step.__name__!r} is Langevin dynamics, which has no steps to plan: use another spacing."
        )


# Planning --------------------------------------------------------------------------------------------------------

PLANNED_KINDS = (96, 32)  # a plan needs fewer, a quick one fewer still
MOST_PLANNED = 64  # steps; of more than that, the best of the fixed spacings is near enough
ENDS = (0.5, 0.65, 0.8, 0.9)  # where a start in equal steps of log-SNR ends, as a share of its range
DAMPINGS = (1e-4, 1e-2, 1.0, 100.0)
MANY = 24  # steps for which the search is shortened; a quick one is shorter still
# All starts for a few rounds, and the best of them to the end: usually, with many steps, and both of a quick search.
ROUNDS, TRIAL, KEPT = (40, 12, 8, 3), (8, 3, 0, 0), (4, 1, 1, 1)
SHIFT = 1e-5  # of a step in log-SNR, relatively, for its slope
EVEN = 1e-4  # the weight of log(step / step before), of steps in mean angle
STRIDES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3)  # of the search position by position, in log-SNR
ENOUGH = 1e-4  # of error: nobody sees less, and the search ends
WORTH = 1e-3  # of error: by less than this, rows between the rows are not worth it
GROWTH = 3.0  # of a step in log-SNR over the one before, at most: extrapolation magnifies errors by half of it
_PLANS: "WeakKeyDictionary[GaussianModel, WeakKeyDictionary[Process, dict[Any, list[float]]]]" = WeakKeyDictionary()


def planned_rows(
    process: Process,
    gaussian: GaussianModel,
    sampler: Sampler,
    options: dict[str, Any],
    num_steps: int,
    *,
    start: str = "prior",
    first: int | None = None,
    objective: str = "spectrum",
    quick: bool = False,
    between: bool = False,
) -> list[float]:
    """The ``num_steps`` rows at which ``sampler`` makes the least error on data from ``gaussian``.

    They begin at the row ``first``, by default the noisiest. ``objective`` is "spectrum" (the mean of |S/C − 1| over
    the bands), or, of the law of a mode, "kl" or "w2". They are found by least squares on log S/C, in the logarithms of
    the steps in (mean) log-SNR, from several fixed spacings; then by moving one position at a time. No step is more
    than `GROWTH` times the one before: extrapolation over a longer one magnifies what a network says wrong. A sampler
    that makes no error keeps its own spacing. ``quick`` searches less; ``between`` allows rows between the rows of the
    schedule, where that gains more than `WORTH`.
    """
    first = len(process.schedule) - 1 if first is None else first
    one_of("objective", objective, LOSSES)
    key = (sampler, tuple(options.items()), num_steps, start, first, objective, quick, between)
    plans = _PLANS.setdefault(gaussian, WeakKeyDictionary()).setdefault(process, {})
    if key not in plans:
        model = SmallModel(process, gaussian, sampler, options, PLANNED_KINDS[quick])
        planner = _Planner(model, objective, num_steps, start, first, quick)
        plans[key] = planner.rows(_own_rows(process, gaussian, sampler.spacing, num_steps, first), between)
    return [*plans[key]]


def _own_rows(
    process: Process, gaussian: GaussianModel, spacing: str | Spacing, count: int, first: int
) -> Sequence[float]:
    """What the sampler visits if nothing is said."""
    if spacing == "angle":
        return angle_rows(process, gaussian, count, first)
    function = SPACINGS.get(spacing, SPACINGS["trailing"]) if isinstance(spacing, str) else spacing
    return function(process.schedule.below(first), count)


class _Planner:
    """The search: positions in log-SNR, of which the first is fixed, by what they cost."""

    def __init__(
        self,
        model: SmallModel,
        objective: str,
        count: int,
        start: str,
        first: int,
        quick: bool,
    ) -> None:
        self.model, self.weights, self.loss = model, model.weights(objective), LOSSES[objective]
        self.count, self.start, self.quick = count, start, quick
        self.effort = 2 * quick + (count > MANY)
        self.schedule, self.first = model.schedule, first
        self.part = model.schedule.below(first)
        self.logsnr = self.part.mean_logsnr
        self.low, self.high = self.logsnr[-1].item(), self.logsnr[0].item()
        # The mean angle of the modes, rising with log-SNR.
        denoiser, some = (
            model.denoiser,
            torch.linspace(first, 0, min(first + 1, 1001), dtype=torch.float64, device="cpu").round(),
        )
        level = denoiser.process.schedule.level(some)
        angle = denoiser.gaussian.at(level, denoiser.process.covariance).angle.values
        self.places, self.angle = self.logsnr[some.long()], (angle * self.weights).sum(1)

    def rows(self, usual_rows: Sequence[float], allow_between: bool = False) -> list[float]:
        """The best, or the usual ones where that makes no difference."""
        own = self._column(usual_rows)
        if not 1 < self.count < len(self.part) or self._costs(own[None], any_growth=True)[0] < ROUNDING:
            return _as_rows(own)
        fixed = torch.stack([own, *(self._column(spacing(self.part, self.count)) for spacing in SPACINGS.values())])
        steps = torch.cat([self._steps(self._logsnr(fixed)), self._more_starts()])
        if self.count > MOST_PLANNED:
            more = torch.stack([self._whole(rows, rounds=0) for rows in self._rows(self._positions(steps))])
            costs = torch.cat([self._costs(fixed, any_growth=True), self._costs(more)])
            return _as_rows(torch.cat([fixed, more])[costs.argmin()])
        logsnr = self._positions(self._least_squares(steps)[:1])[0]
        if not self.quick:
            logsnr = self._searched(logsnr)
        between = self._rows(logsnr[None])[0]
        whole = self._whole(between)
        least, cost = self._costs(torch.stack([between, whole])).tolist()
        if allow_between and least + WORTH < cost:
            whole, cost = between, least
        usual = self._costs(fixed, any_growth=True)
        if cost > 0.999 * usual.min():  # the search has found nothing better
            whole, cost = fixed[usual.argmin()], usual.min().item()
        return _as_rows(own if cost > 0.999 * usual[0] else whole)

    def _column(self, rows: Sequence[float]) -> Tensor:
        return torch.tensor([*rows], dtype=torch.float64, device="cpu")

    def _more_starts(self) -> Tensor:
        """Equal steps in log-SNR to several ends, and equal steps of the mean angle."""
        span = self.high - self.low
        equal = (torch.tensor(ENDS, dtype=torch.float64, device="cpu") * span / (self.count - 1)).log()[:, None]
        goal = torch.linspace(
            self.angle[0].item(), self.angle[-1].item(), self.count + 1, dtype=torch.float64, device="cpu"
        )[:-1]
        return torch.cat(
            [equal.expand(-1, self.count - 1), self._steps(_interpolated(goal, self.angle, self.places)[None])]
        )

    def _logsnr(self, rows: Tensor) -> Tensor:
        """Rows as positions in mean log-SNR."""
        below = rows.floor().long().clamp(0, len(self.logsnr) - 2)
        return torch.lerp(self.logsnr[below], self.logsnr[below + 1], rows - below)

    def _rows(self, logsnr: Tensor) -> Tensor:
        return self.part.nearest_row(logsnr).clamp(0, self.first)

    def _steps(self, logsnr: Tensor) -> Tensor:
        """Positions [B, n] as the logarithms of the steps [B, n − 1]."""
        return logsnr.diff().clamp(min=1e-3 * (self.high - self.low) / self.count).log()

    def _positions(self, steps: Tensor) -> Tensor:
        """The inverse, with no step more than `GROWTH` times the one before. Where they would go beyond the last row,
        all are made smaller."""
        most = math.log(GROWTH) * torch.arange(steps.shape[1], dtype=torch.float64, device="cpu")
        steps = ((steps.clamp(-12.0, 6.0) - most).cummin(1).values + most).exp()
        steps = steps * ((self.high - self.low) / steps.sum(1, keepdim=True)).clamp(max=1.0)
        return torch.nn.functional.pad(steps.cumsum(1), (1, 0)) + self.low

    def _costs(self, rows: Tensor, any_growth: bool = False) -> Tensor:
        """The objective of each of a batch of rows; rows that do not fall are out of the question, and so are steps
        that grow too fast, unless ``any_growth`` is allowed."""
        costs = (self.loss.of(self.model.ratios(rows, self.start)) * self.weights).sum(1) ** self.loss.power
        steps = self._logsnr(rows).diff()
        steady = (steps[:, 1:] <= (GROWTH + 1e-6) * steps[:, :-1]).all(1) | any_growth
        return torch.where((rows.diff() < 0).all(1) & steady, costs.nan_to_num(nan=math.inf), math.inf)

    def _residuals(self, steps: Tensor) -> Tensor:
        """log S/C, weighted; and a little of how uneven the steps are in mean angle: many plans are equally good."""
        logsnr = self._positions(steps)
        ratio = self.model.ratios(self._rows(logsnr), self.start).clamp(1e-30, 1e30)
        angles = _interpolated(logsnr, self.places, self.angle).diff().clamp(min=1e-9).log()
        return torch.cat([self.weights.sqrt() * ratio.log(), EVEN * angles.diff()], 1)

    def _least_squares(self, steps: Tensor) -> Tensor:
        """Levenberg–Marquardt from every start at once, with several dampings at a time; the best comes first."""
        residuals = self._residuals(steps)
        rounds, trial, kept = (each[self.effort] for each in (ROUNDS, TRIAL, KEPT))
        for number in range(rounds):
            if number == trial:
                best = residuals.square().sum(1).argsort(stable=True)[:kept]
                steps, residuals = steps[best], residuals[best]
            starts, unknowns = steps.shape
            one = torch.eye(unknowns, dtype=torch.float64, device="cpu")
            moved = self._residuals((steps[:, None] + SHIFT * one).flatten(0, 1)).reshape(starts, unknowns, -1)
            slopes = (moved - residuals[:, None]) / SHIFT
            normal, gradient = slopes @ slopes.mT, (slopes @ residuals[..., None]).unsqueeze(1)
            scale = normal.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)[:, None, None]
            damped = torch.stack([normal + damping * scale * one for damping in DAMPINGS], 1)
            move = torch.linalg.solve(damped, gradient.expand(-1, len(DAMPINGS), -1, -1))[..., 0]
            tried = steps[:, None] - move.clamp(-1.0, 1.0)
            found = self._residuals(tried.flatten(0, 1)).reshape(starts, len(DAMPINGS), -1)
            each, best = torch.arange(starts, device="cpu"), found.square().sum(2).argmin(1)
            better = found[each, best].square().sum(1) < 0.99 * residuals.square().sum(1)
            steps = torch.where(better[:, None], tried[each, best], steps)
            residuals = torch.where(better[:, None], found[each, best], residuals)
            if number > trial and not bool(better.any()):
                break
        return steps[residuals.square().sum(1).argsort(stable=True)]

    def _searched(self, logsnr: Tensor) -> Tensor:
        """Positions [n] moved alone, or with those after or before, by ever smaller strides, as long as it helps."""
        one = torch.eye(self.count, dtype=torch.float64, device="cpu")[1:]
        after, before = one.cumsum(1), one.flip(1).cumsum(1).flip(1)
        before[:, 0] = 0.0
        moves = torch.cat([one, after, before, one + 0.5 * one.roll(1, 1)])

        def near(position: Tensor, stride: float) -> Tensor:
            others = torch.cat([position + stride * moves, position - stride * moves])
            return torch.cat([position[:1].expand(len(others), 1), others[:, 1:]], 1).clamp(self.low, self.high)

        for stride in STRIDES:
            logsnr = self._descend(logsnr, partial(near, stride=stride), self._rows)
        return logsnr

    def _whole(self, rows: Tensor, rounds: int | None = None) -> Tensor:
        """Whole rows near these, moved one or two at a time as long as that helps."""
        rows = rows.round()
        for index in range(1, self.count):  # distinct ones, and no step that grows too fast
            if index > 1:
                last, before = self._logsnr(rows[[index - 1, index - 2]])
                nearest = self._rows((last + GROWTH * (last - before)).clamp(max=self.high)[None])[0].ceil()
                rows[index] = rows[index].clamp(min=nearest.item())
            rows[index] = rows[index].clamp(max=rows[index - 1].item() - 1)
        for index in range(self.count - 1, -1, -1):
            rows[index] = rows[index].clamp(min=self.count - 1 - index)
        one = torch.eye(self.count, dtype=torch.float64, device="cpu")[1:]
        moves = torch.cat([one, one[1:] + one[:-1], one[1:] - one[:-1], 2 * one, 3 * one, 5 * one])
        moves = torch.cat([moves, -moves])
        return self._descend(rows, lambda rows: (rows + moves).clamp(0, self.first), lambda rows: rows, rounds)

    def _descend(
        self,
        here: Tensor,
        near: Callable[[Tensor], Tensor],
        as_rows: Callable[[Tensor], Tensor],
        rounds: int | None = None,
    ) -> Tensor:
        """The best of the neighbours, again and again, until there is no better one."""
        cost = self._costs(as_rows(here[None]))[0]
        for _ in range(ROUNDS[self.effort] if rounds is None else rounds):
            if cost < ENOUGH:
                break
            others = near(here)
            costs = self._costs(as_rows(others))
            best = costs.argmin()
            if not costs[best] < 0.999 * cost:
                break
            here, cost = others[best], costs[best]
        return here


def _interpolated(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear through (xs, ys), xs rising, and constant beyond."""
    right = torch.searchsorted(xs, x.contiguous()).clamp(1, len(xs) - 1)
    weight = (x - xs[right - 1]) / (xs[right] - xs[right - 1]).clamp(min=1e-300)
    return torch.lerp(ys[right - 1], ys[right], weight.clamp(0, 1))


def _as_rows(rows: Tensor) -> list[float]:
    """Whole rows as integers."""
    return [int(row) if row.is_integer() else row for row in rows.tolist()]
