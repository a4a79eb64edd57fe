"""The levels at which a sampler makes the least error on Gaussian data, found with `nidiff.sampling.prediction`."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import interpolate
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_kinds
from nidiff.sampling.angle import angle_rows
from nidiff.sampling.prediction import LOSSES, Prediction, SmallModel, check_problem, check_start
from nidiff.sampling.spacing import SPACINGS, check_count
from nidiff.sampling.step import Sampler, Spacing
from nidiff.sampling.warm import start_row

PLANNED_KINDS = (96, 32)  # a plan needs fewer, a quick one fewer still
ROUNDING = 1e-9  # an error that nothing is gained from
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
    chosen, told = check_problem(process, gaussian, sampler, options)
    check_kinds(plan, {"between": between})
    count, first = check_count(process.schedule, num_steps), None
    start = check_start(process, chosen.start if start is None else start)
    if start == "gaussian":
        limit = chosen.bound if bound is None else bound
        first = max(start_row(process, gaussian, limit, kappa), count - 1)
    elif bound is not None or kappa is not None:
        raise InputError("bound and kappa say how low start='gaussian' begins: leave them out, or give that too.")
    rows = planned_rows(
        process, gaussian, chosen, told, count, start=start, first=first, objective=objective, between=between
    )
    return SmallModel(process, gaussian, chosen, told).prediction(rows, start)


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
        even = interpolate(goal.clamp(self.angle[0], self.angle[-1]), self.angle, self.places)
        return torch.cat([equal.expand(-1, self.count - 1), self._steps(even[None])])

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
        angles = interpolate(logsnr.clamp(self.places[0], self.places[-1]), self.places, self.angle)
        angles = angles.diff().clamp(min=1e-9).log()
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


def _as_rows(rows: Tensor) -> list[float]:
    """Whole rows as integers."""
    return [int(row) if row.is_integer() else row for row in rows.tolist()]
