"""How much signal and how much noise: x = signal · x0 + sigma · Σ^½ eps, as a table over noise levels.

Every schedule is a falling column of log-SNR = log(signal² / sigma²) and a rule that splits it into signal and sigma:
"variance" keeps signal² + sigma² = 1 (DDPM, VP), "signal" keeps signal = 1 (SMLD, VE), "sum" keeps signal + sigma = 1
(flow matching). The scalars are those of isotropic diffusion; Σ is not in this file. With one column per mode of Σ's
basis, blurring, designed and other schedules are tables of the same kind.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.covariance.basis import Basis
from nidiff.covariance.checks import MOST_AXES
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Coefficient, Modes, as_modes
from nidiff.covariance.waves import Boundary, Waves, check_boundary
from nidiff.diffusion.spacing import Spacing, check_rows, spaced_rows
from nidiff.errors import InputError, one_of
from nidiff.memory import require_memory
from nidiff.randomness import Generators, random_index
from nidiff.recipe import Origin, check_number, fits

MOST_LEVELS = 10_000_000
# What float64 can square and divide by: a level beyond is not one that anything can be computed at.
LEAST_SIGNAL, LEAST_SIGMA, MOST_SIGMA = 1e-300, 1e-150, 1e150
LARGEST_LOGSNR = 1400.0  # exp(700) is finite


@dataclass(frozen=True, init=False)
class Level:
    """One noise level, or one per image: the coefficients of x = signal · x0 + sigma · Σ^½ eps.

    ``signal`` and ``sigma`` may be given as numbers, or as tensors [B] of one number per image.

    ``label`` is what the network is given: the row of the table, counted from the least noise; fractional between two
    rows, and a tensor [B] of one per image.
    """

    signal: Modes
    sigma: Modes
    label: int | float | Tensor

    def __init__(self, signal: Coefficient | Tensor, sigma: Coefficient | Tensor, label: int | float | Tensor) -> None:
        for name, value in (("signal", as_modes(signal)), ("sigma", as_modes(sigma)), ("label", label)):
            object.__setattr__(self, name, value)


CLEAN = Level(1.0, 0.0, -1)
"""Where the data are: no noise. It is not in a schedule, whose levels all have a log-SNR."""


class Rule(NamedTuple):
    """How a log-SNR becomes a signal, what its logarithm's slope in log-SNR is, and the scale of the prior."""

    log_signal: Callable[[Tensor], Tensor]
    slope: Callable[[Modes], Modes]  # of sigma
    prior_scale: Callable[[Modes], Coefficient]  # of the largest sigma


RULES: dict[str, Rule] = {
    "variance": Rule(
        log_signal=lambda logsnr: 0.5 * torch.nn.functional.logsigmoid(logsnr),
        slope=lambda sigma: 0.5 * sigma**2,
        prior_scale=lambda sigma: 1.0,
    ),
    "signal": Rule(
        log_signal=torch.zeros_like,
        slope=lambda sigma: 0.0 * sigma,
        prior_scale=lambda sigma: sigma,
    ),
    "sum": Rule(
        log_signal=lambda logsnr: torch.nn.functional.logsigmoid(0.5 * logsnr),
        slope=lambda sigma: 0.5 * sigma,
        prior_scale=lambda sigma: 1.0,
    ),
}


class Schedule:
    """A table of noise levels from least to most noise, in float64.

    ``logsnr`` falls strictly; ``keeps`` names a rule of this module. ``time`` in (0, 1] is the time of every level, by
    default (row + 1) / L; ``logsnr_of_time`` is the log-SNR at any time, by default interpolated from the table.

    A table ``logsnr`` [L, *event] has a log-SNR for every mode: none may rise, and at least one falls from row to row.
    The modes are those of the process' Σ, or, where Σ is white, those of ``boundary`` ("periodic" or "reflecting").
    ``signal``, a table too, or a column for all modes, takes the place of the rule.
    """

    def __init__(
        self,
        logsnr: Tensor | Sequence[Any],
        keeps: str = "variance",
        *,
        time: Tensor | Sequence[float] | None = None,
        logsnr_of_time: Callable[[Tensor], Tensor] | None = None,
        signal: Tensor | Sequence[Any] | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        logsnr = _table("logsnr", logsnr)
        _check_falling(logsnr)
        self.keeps = one_of("keeps", keeps, RULES)
        self.boundary = None if boundary is None else check_boundary(boundary)
        self.logsnr = self._unshifted = logsnr
        self._log_signal = None if signal is None else _log_table(signal, logsnr)
        self._check_range()
        rows = torch.arange(1, len(logsnr) + 1, dtype=torch.float64, device="cpu")
        self.time = rows / len(logsnr) if time is None else as_column("time", time)
        if len(self.time) != len(logsnr) or bool((self.time.diff() <= 0).any()):
            raise InputError("time", None, "does not rise with the rows", f"give {len(logsnr)} rising numbers")
        self._logsnr_of_time = logsnr_of_time
        self.basis: Basis | None = None
        """The basis whose modes the numbers of a table belong to: set by `in_basis_of`."""
        self.shift = 0.0
        """What `shifted` added to every log-SNR."""
        self.origin: Origin | None = None
        """The name and the arguments of the call that made this schedule, before it was shifted."""

    def __len__(self) -> int:
        return len(self.logsnr)

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of the modes, if every mode has levels of its own; else ()."""
        return tuple(self.logsnr.shape[1:])

    @property
    def mean_logsnr(self) -> Tensor:
        """log-SNR [L], its mean over the modes where they differ."""
        return self.logsnr.flatten(1).mean(1) if self.event_shape else self.logsnr

    def in_basis_of(self, covariance: Covariance) -> "Schedule":
        """The same for a process with this Σ; a table is bound to a basis. One that does not commute with Σ is
        refused."""
        if not self.event_shape:
            return self
        of_noise = covariance.basis if self.event_shape == covariance.event_shape else covariance.spatial
        if self.event_shape != of_noise.event_shape:
            problem = f"has modes {self.event_shape}, and Σ is over {covariance.event_shape}"
            raise InputError("schedule", self, problem, "build it for that shape")
        if self.boundary is None and covariance.origin is not None and covariance.origin.name == "Identity":
            problem = "does not say which modes it is for, and white noise has any"
            remedy = (
                "give boundary='periodic' or 'reflecting', or Diagonal(torch.ones(shape)) as Σ for levels per pixel"
            )
            raise InputError("schedule", self, problem, remedy)
        other = copy.copy(self)
        other.basis = of_noise if self.boundary is None else Waves(self.event_shape, self.boundary)
        for name, table in (("logsnr", self.logsnr), ("signal", self.log_signal)):
            other.basis.check_even(name, table)
        try:
            (other.as_modes(self.logsnr) + other.as_modes(self.log_signal)) * covariance
        except InputError as error:
            problem = f"is for the modes of {other.basis!r}, which are not those of Σ = {covariance!r}"
            remedy = "build Σ with that boundary, or use white noise"
            raise InputError("schedule", self, problem, remedy) from error
        return other

    def _check_range(self) -> None:
        for row in (0, -1):  # the ends: log-SNR falls
            signal, sigma = self._of_row(row)
            if not bool(((signal > LEAST_SIGNAL) & (sigma > LEAST_SIGMA) & (sigma < MOST_SIGMA)).all()):
                level = f"signal {signal.min().item():.3g} and sigma {sigma.max().item():.3g}"
                raise InputError("logsnr", None, f"has a level of {level}, beyond float64", "use a narrower range")

    def _of_row(self, row: int) -> tuple[Tensor, Tensor]:
        """signal and sigma of one row."""
        logsnr = self.logsnr[row]
        log_signal = self.rule.log_signal(logsnr) if self._log_signal is None else self._log_signal[row]
        return log_signal.exp(), (log_signal - 0.5 * logsnr).exp()

    @property
    def rule(self) -> Rule:
        return RULES[self.keeps]

    @property
    def has_own_signal(self) -> bool:
        """Whether the signal is a table, and not given by the rule ``keeps``."""
        return self._log_signal is not None

    @property
    def log_signal(self) -> Tensor:
        return self.rule.log_signal(self.logsnr) if self._log_signal is None else self._log_signal

    @property
    def signal(self) -> Tensor:
        """√ᾱ of the paper; 1 in SMLD."""
        return self.log_signal.exp()

    @property
    def sigma(self) -> Tensor:
        """√(1 − ᾱ) of the paper; σ in SMLD."""
        return (self.log_signal - 0.5 * self.logsnr).exp()

    @property
    def prior_scale(self) -> Modes:
        """The prior is N(0, prior_scale² Σ): 1 for VP, the largest sigma for VE (E22)."""
        sigma = self.as_modes(self._of_row(-1)[1])
        return sigma if self.has_own_signal else as_modes(self.rule.prior_scale(sigma))

    @property
    def forgets(self) -> bool:
        """Whether noise is all that is left at the last level. A table with its own signal may keep modes of the data
        (`heat`)."""
        return not (self.has_own_signal and bool((self.logsnr[-1] > 0).any()))

    def level(self, label: int | float | Tensor) -> Level:
        """The level of a row; between two rows, log-SNR is interpolated. One per image for a tensor."""
        position = torch.as_tensor(label, dtype=torch.float64, device="cpu")
        # A compiled function cannot look at the values; its labels come from `draw`.
        if not torch.compiler.is_compiling() and not bool(((position >= 0) & (position <= len(self) - 1)).all()):
            raise InputError("label", label, "is outside the schedule", f"its rows are 0 … {len(self) - 1}")
        return self._level(interpolate(position, self._rows, self.logsnr), label, position)

    def level_at(self, logsnr: float | Tensor) -> Level:
        """The level of a given log-SNR, with the fractional label that belongs to it."""
        if self.event_shape:
            raise InputError("schedule", self, "has a log-SNR for every mode", "use level(row)")
        value = torch.as_tensor(logsnr, dtype=torch.float64, device="cpu")
        if not torch.compiler.is_compiling() and not bool((value.abs() < LARGEST_LOGSNR).all()):
            raise InputError("logsnr", logsnr, "is out of range", f"choose one within ±{LARGEST_LOGSNR:g}")
        label = interpolate(-value, -self.logsnr, self._rows)
        return self._level(value, label if isinstance(logsnr, Tensor) else label.item(), label)

    def level_with_noise(self, deviation: float) -> Level:
        """The level of y = x0 + deviation · Σ^½ eps, that is, of sigma / signal = deviation; x is signal · y there."""
        low, high = (math.exp(-0.5 * end) for end in self.mean_logsnr[[0, -1]].tolist())
        if not low <= deviation <= high:
            raise InputError(
                "deviation", deviation, "is not a level of the schedule", f"choose {low:.3g} to {high:.3g}"
            )
        return self.level_at(-2 * math.log(deviation))

    def nearest_row(self, mean_logsnr: Tensor) -> Tensor:
        """The fractional rows at which `mean_logsnr` has these values."""
        return interpolate(-mean_logsnr, -self.mean_logsnr, self._rows)

    def logsnr_at(self, time: Tensor) -> Tensor:
        """log-SNR as a function of time in (0, 1]; differentiable."""
        if self._logsnr_of_time is not None:
            return self._logsnr_of_time(time) + self.shift
        return interpolate(time, self.time, self.logsnr)

    def row_at(self, time: Tensor) -> Tensor:
        """The fractional row as a function of time; differentiable."""
        return interpolate(time, self.time, self._rows)

    def draw(self, batch: int, generator: Generators = None) -> Level:
        """One level per image, uniform over the rows."""
        return self.level(random_index(len(self), batch, generator, device="cpu"))

    def levels(self, rows: int | Sequence[float], spacing: str | Spacing = "trailing") -> list[Level]:
        """The levels that a sampler visits: so many rows by a ``spacing``, a name in `SPACINGS` or a function
        (schedule, count) -> rows; or these falling rows themselves."""
        if isinstance(rows, int):
            rows = spaced_rows(self, rows, spacing)
        return [self.level(row) for row in check_rows("rows", rows, len(self))]

    def shifted(self, amount: float) -> "Schedule":
        """The same schedule with ``amount`` added to every log-SNR (positive: less noise at the same row).

        A coloured Σ puts the same sigma elsewhere in frequency, so the same β is not the same SNR per mode (R7).
        """
        other = copy.copy(self)
        other.shift = self.shift + check_number("amount", amount)
        other.logsnr = self._unshifted + other.shift
        if bool((other.mean_logsnr.diff() >= 0).any()):
            raise InputError("amount", amount, "is so large that levels coincide", "use a smaller shift")
        other._check_range()
        return other

    def below(self, row: int) -> "Schedule":
        """The rows from 0 to ``row`` alone, those of least noise."""
        return self._made_of(lambda table: table[: row + 1], time=self.time[: row + 1])

    def of_modes(self, index: Tensor) -> "Schedule":
        """A table over an event (n,) for these modes [n] alone, by their number in the flattened event; copies of the
        column if all modes are alike."""

        def columns(table: Tensor) -> Tensor:
            return table.flatten(1)[:, index] if self.event_shape else table[:, None].expand(-1, len(index))

        return self._made_of(columns, boundary=None, basis=None)

    def _made_of(self, part: Callable[[Tensor], Tensor], **changes: Any) -> "Schedule":
        """The same with a part of its tables."""
        other = copy.copy(self)
        other.logsnr, other._unshifted = part(self.logsnr), part(self._unshifted)
        other._log_signal = None if self._log_signal is None else part(self._log_signal)
        other.origin = other._logsnr_of_time = None
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def to_config(self) -> dict[str, Any]:
        """What rebuilds this schedule, as JSON: the call that made it, or the table itself."""
        if self.origin is None and self._logsnr_of_time is not None:
            remedy = "put the function that makes this schedule in SCHEDULES and mark it with @remembered"
            raise InputError("logsnr_of_time", None, "is a function, which a configuration cannot hold", remedy)
        name, arguments, _ = self.origin or Origin("table", self._as_table())
        plain = {key: _table(key, value).tolist() if _is_column(value) else value for key, value in arguments.items()}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
        return {"schedule": name, **plain, **({"shift": self.shift} if self.shift else {})}

    def _as_table(self) -> dict[str, Any]:
        signal = None if self._log_signal is None else self._log_signal.exp()
        column = {"logsnr": self._unshifted, "keeps": self.keeps, "time": self.time}
        return {**column, "signal": signal, "boundary": self.boundary}

    def __repr__(self) -> str:
        name, arguments, _ = self.origin or Origin("table", {"keeps": self.keeps, "num_levels": len(self)})
        shown = {key: f"<{_count(value)} numbers>" if _is_column(value) else repr(value) for key, value in
                 {**arguments, **({"shift": self.shift} if self.shift else {})}.items()}  # fmt: skip
        return f"{name}({', '.join(f'{key}={value}' for key, value in shown.items())})"

    @property
    def _rows(self) -> Tensor:
        return torch.arange(len(self), dtype=torch.float64, device="cpu")

    def _level(self, logsnr: Tensor, label: int | float | Tensor, position: Tensor) -> Level:
        if self._log_signal is None:
            log_signal = self.rule.log_signal(logsnr)
        else:
            log_signal = interpolate(position, self._rows, self._log_signal)
        return Level(self.as_modes(log_signal.exp()), self.as_modes((log_signal - 0.5 * logsnr).exp()), label)

    def as_modes(self, values: Tensor) -> Modes:
        """Numbers of a level, or of one per image: per mode of the basis, or the same for all modes."""
        if self.event_shape and self.basis is None:
            problem, remedy = "differs from mode to mode", "use it in a nidiff.Process, which has Σ"
            raise InputError("schedule", self, problem, remedy)
        return Modes(values, self.basis)


def as_column(argument: str, values: Tensor | Sequence[float]) -> Tensor:
    """A column of finite numbers as float64."""
    column = _table(argument, values)
    if column.ndim != 1:
        raise InputError(argument, None, f"has shape {tuple(column.shape)}", "give a column, one number per level")
    return column


def _table(argument: str, values: Tensor | Sequence[Any]) -> Tensor:
    """Rows of finite numbers as float64: a column, or one number per mode in each row."""
    try:
        table = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:  # of a file
        raise InputError(argument, None, f"is not a column of numbers ({error})", "give one per level") from error
    if table.ndim == 0 or not table.numel() or len(table) > MOST_LEVELS or not bool(torch.isfinite(table).all()):
        remedy = f"give finite numbers, for 1 to {MOST_LEVELS:,} levels"
        raise InputError(argument, None, f"of shape {tuple(table.shape)} is not a column of finite numbers", remedy)
    require_memory(argument, None, 32.0 * table.numel(), "use fewer levels")
    return table


def _log_table(signal: Tensor | Sequence[Any], logsnr: Tensor) -> Tensor:
    """The logarithm of a signal per level, or per level and mode, as a table like ``logsnr``."""
    values = _table("signal", signal)
    if values.shape == logsnr.shape[:1]:
        values = values.reshape(-1, *[1] * (logsnr.ndim - 1)).expand(logsnr.shape)
    if values.shape != logsnr.shape or not bool((values > 0).all()):
        problem = f"is not positive, or not of the shape {tuple(logsnr.shape)} of `logsnr`"
        raise InputError("signal", None, problem, "give one per level, or one per level and mode")
    return values.log()


def _check_falling(logsnr: Tensor) -> None:
    steps = logsnr.diff(dim=0)
    if bool((steps > 0).any()):
        row, *mode = (steps > 0).nonzero()[0].tolist()
        problem = f"rises after row {row}" + (f" in mode {tuple(mode)}" if mode else "")
        raise InputError("logsnr", None, problem, "order the rows from the least to the most noise")
    if bool((steps.unsqueeze(1).flatten(1).amin(1) >= 0).any()):
        raise InputError("logsnr", None, "has two equal rows", "leave one out")


def _is_column(value: Any) -> bool:
    """Whether it is an array of numbers; words, and a few whole numbers such as a shape, are shown and saved as is."""
    if not hasattr(value, "__len__") or isinstance(value, str):
        return False
    few = isinstance(value, list | tuple) and len(value) <= MOST_AXES
    return not (few and all(fits(each, int | str) for each in value))


def _count(value: Any) -> int:
    return int(np.prod(np.shape(value)))


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear through (xs, ys [L, ...]), xs rising; beyond the ends the last segment goes on."""
    if len(xs) == 1:
        return ys[0].expand((*x.shape, *ys.shape[1:]))
    right = torch.searchsorted(xs, x.detach().contiguous()).clamp(1, len(xs) - 1)
    weight = (x - xs[right - 1]) / (xs[right] - xs[right - 1]).clamp(min=1e-300)  # two may be equal, by rounding
    return torch.lerp(ys[right - 1], ys[right], weight.reshape((*x.shape, *[1] * (ys.ndim - 1))))


def check_forgotten(schedule: Schedule) -> None:
    """Refuse to start from noise where the last level still has the data's coarse modes, as `heat` has."""
    if not schedule.forgets:
        remedy = "use a denoiser that knows the data's Gaussian and `start`='gaussian', or give the state as `start`"
        raise InputError("schedule", schedule, "keeps signal in some modes at its last level", remedy)
