"""How much signal and how much noise: x = signal · x0 + sigma · Σ^½ eps, as a table over noise levels.

Every schedule is a falling column of log-SNR = log(signal² / sigma²) and a rule that splits it into signal and sigma:
"variance" keeps signal² + sigma² = 1 (DDPM, VP), "signal" keeps signal = 1 (SMLD, VE), "sum" keeps signal + sigma = 1
(flow matching). The scalars are those of isotropic diffusion; Σ is not in this file. With one column per mode of Σ's
basis, blurring, designed and other schedules are tables of the same kind.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nidiff.covariance.basis import Basis
from nidiff.covariance.checks import MOST_AXES, as_numbers
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


class Level:
    """One noise level, or one per image: the coefficients of x = signal · x0 + sigma · Σ^½ eps.

    ``signal`` and ``sigma`` are given as numbers, as tensors [B] of one number per image, or as `Modes`, which they
    then are. ``label`` is what the network is given: the row of the table, counted from the least noise; fractional
    between two rows, and a tensor [B] of one per image.
    """

    def __init__(self, signal: Coefficient | Tensor, sigma: Coefficient | Tensor, label: int | float | Tensor) -> None:
        self.signal, self.sigma, self.label = as_modes(signal), as_modes(sigma), label


CLEAN = Level(1.0, 0.0, -1)
"""Where the data are: no noise. It is not in a schedule, whose levels all have a log-SNR."""


class Rule(NamedTuple):
    """How a log-SNR becomes a signal, what its logarithm's slope in log-SNR is, and the scale of the prior."""

    log_signal: Callable[[Tensor], Tensor]
    slope: Callable[[Modes], Modes]  # of sigma
    prior_scale: Callable[[Modes], Coefficient]  # of the largest sigma


RULES: dict[str, Rule] = {
    "variance": Rule(lambda logsnr: 0.5 * logsigmoid(logsnr), lambda sigma: 0.5 * sigma**2, lambda sigma: 1.0),
    "signal": Rule(torch.zeros_like, lambda sigma: 0.0 * sigma, lambda sigma: sigma),
    "sum": Rule(lambda logsnr: logsigmoid(0.5 * logsnr), lambda sigma: 0.5 * sigma, lambda sigma: 1.0),
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
        self.keeps = one_of("keeps", keeps, RULES)
        self.boundary = None if boundary is None else check_boundary(boundary)
        self.logsnr = self._unshifted = as_table("logsnr", logsnr)
        steps = self.logsnr.diff(dim=0).unsqueeze(1).flatten(1)
        if bool(((steps.amax(1) > 0) | (steps.amin(1) >= 0)).any()):
            problem = "rises from a row to the next in some mode, or stays the same in all"
            raise InputError("logsnr", None, problem, "order the rows from the least to the most noise")
        self._log_signal = None if signal is None else _log_table(signal, self.logsnr)
        self._check_range()
        self.time = (self._rows + 1) / len(self) if time is None else as_table("time", time)
        if self.time.shape != self._rows.shape or bool((self.time.diff() <= 0).any()):
            raise InputError("time", None, "does not rise with the rows", f"give {len(self)} rising numbers")
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
            remedy = "give a boundary, or Diagonal(torch.ones(shape)) as Σ for levels per pixel"
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
        ends = torch.tensor([0, len(self) - 1])  # log-SNR falls
        signal, sigma = self._split(self.logsnr[ends], ends)
        if not bool(((signal > LEAST_SIGNAL) & (sigma > LEAST_SIGMA) & (sigma < MOST_SIGMA)).all()):
            level = f"signal {signal.min().item():.3g} and sigma {sigma.max().item():.3g}"
            raise InputError("logsnr", None, f"has a level of {level}, beyond float64", "use a narrower range")

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
        sigma = self.level(len(self) - 1).sigma
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
        value = torch.as_tensor(logsnr, dtype=torch.float64, device="cpu")
        if self.event_shape or (not torch.compiler.is_compiling() and bool((value.abs() >= LARGEST_LOGSNR).any())):
            remedy = f"choose one within ±{LARGEST_LOGSNR:g}, or level(row) where modes differ"
            raise InputError("logsnr", logsnr, "is not that of a level", remedy)
        label = self.nearest_row(value)
        return self._level(value, label if isinstance(logsnr, Tensor) else label.item(), label)

    def level_with_noise(self, deviation: float) -> Level:
        """The level of y = x0 + deviation · Σ^½ eps, that is, of sigma / signal = deviation; x is signal · y there."""
        low, high = (math.exp(-0.5 * end) for end in self.mean_logsnr[[0, -1]].tolist())
        if not low <= deviation <= high:
            problem = "is not a level of the schedule"
            raise InputError("deviation", deviation, problem, f"choose {low:.3g} to {high:.3g}")
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
        tables = {name: getattr(self, name) for name in ("logsnr", "_unshifted", "_log_signal")}
        parts = {name: None if table is None else part(table) for name, table in tables.items()}
        for name, value in {**parts, "origin": None, "_logsnr_of_time": None, **changes}.items():
            setattr(other, name, value)
        return other

    def to_config(self) -> dict[str, Any]:
        """What rebuilds this schedule, as JSON: the call that made it, or the table itself."""
        if self.origin is None:
            signal = None if self._log_signal is None else self._log_signal.exp()
            table = {"logsnr": self._unshifted, "keeps": self.keeps, "time": self.time, "signal": signal}
            name, arguments = "table", {**table, "boundary": self.boundary}
        else:
            name, arguments = self.origin.name, dict(self.origin.arguments)
        for key, value in arguments.items():
            if _is_array(value):
                arguments[key] = as_numbers(value, key).tolist()
            elif isinstance(value, tuple):
                arguments[key] = list(value)
        return {"schedule": name, **arguments, **({"shift": self.shift} if self.shift else {})}

    def __repr__(self) -> str:
        name, arguments, _ = self.origin or Origin("table", {"keeps": self.keeps, "num_levels": len(self)})
        arguments = {**arguments, **({"shift": self.shift} if self.shift else {})}
        shown = [
            f"{key}=<{math.prod(np.shape(value))} numbers>" if _is_array(value) else f"{key}={value!r}"
            for key, value in arguments.items()
        ]
        return f"{name}({', '.join(shown)})"

    @property
    def _rows(self) -> Tensor:
        return torch.arange(len(self), dtype=torch.float64, device="cpu")

    def _level(self, logsnr: Tensor, label: int | float | Tensor, position: Tensor) -> Level:
        signal, sigma = self._split(logsnr, position)
        return Level(self.as_modes(signal), self.as_modes(sigma), label)

    def _split(self, logsnr: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """signal and sigma of the log-SNR at a position between the rows."""
        if self._log_signal is None:
            log_signal = self.rule.log_signal(logsnr)
        else:
            log_signal = interpolate(position, self._rows, self._log_signal)
        return log_signal.exp(), (log_signal - 0.5 * logsnr).exp()

    def as_modes(self, values: Tensor) -> Modes:
        """Numbers of a level, or of one per image: per mode of the basis, or the same for all modes."""
        if self.event_shape and self.basis is None:
            problem, remedy = "differs from mode to mode", "use it in a nidiff.Process, which has Σ"
            raise InputError("schedule", self, problem, remedy)
        return Modes(values, self.basis)


def as_table(argument: str, values: Tensor | Sequence[Any]) -> Tensor:
    """Rows of finite numbers as float64: a column, or one number per mode in each row."""
    table = as_numbers(values, argument)
    if table.ndim == 0 or not table.numel() or len(table) > MOST_LEVELS or not bool(torch.isfinite(table).all()):
        remedy = f"give finite numbers, for 1 to {MOST_LEVELS:,} levels"
        raise InputError(argument, None, f"of shape {tuple(table.shape)} is not a column of finite numbers", remedy)
    require_memory(argument, None, 32.0 * table.numel(), "use fewer levels")
    return table


def _log_table(signal: Tensor | Sequence[Any], logsnr: Tensor) -> Tensor:
    """The logarithm of a signal per level, or per level and mode, as a table like ``logsnr``."""
    values = as_table("signal", signal)
    if values.shape == logsnr.shape[:1]:
        values = values.reshape(-1, *[1] * (logsnr.ndim - 1)).expand(logsnr.shape)
    if values.shape != logsnr.shape or not bool((values > 0).all()):
        problem = f"is not positive, or not of the shape {tuple(logsnr.shape)} of `logsnr`"
        raise InputError("signal", None, problem, "give one per level, or one per level and mode")
    return values.log()


def _is_array(value: Any) -> bool:
    """Whether it is an array of numbers; words, and a few whole numbers such as a shape, are shown and saved as is."""
    if not hasattr(value, "__len__") or isinstance(value, str):
        return False
    few = isinstance(value, list | tuple) and len(value) <= MOST_AXES
    return not (few and all(fits(each, int | str) for each in value))


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear through (xs, ys [L, ...]), xs rising; beyond the ends the last segment goes on."""
    if len(xs) == 1:
        return ys[0].expand((*x.shape, *ys.shape[1:]))
    right = torch.searchsorted(xs, x.detach().contiguous()).clamp(1, len(xs) - 1)
    weight = (x - xs[right - 1]) / (xs[right] - xs[right - 1]).clamp(min=1e-300)  # two may be equal, by rounding
    low, high = (ys[row].to(weight.dtype) for row in (right - 1, right))
    return torch.lerp(low, high, weight.reshape((*x.shape, *[1] * (ys.ndim - 1))))


def check_forgotten(schedule: Schedule) -> None:
    """Refuse to start from noise where the last level still has the data's coarse modes, as `heat` has."""
    if not schedule.forgets:
        remedy = "use a denoiser that knows the data's Gaussian and `start`='gaussian', or give the state as `start`"
        raise InputError("schedule", schedule, "keeps signal in some modes at its last level", remedy)
