"""How much signal and how much noise: x = signal · x0 + sigma · Σ^½ eps, as a table over noise levels.

Every schedule is a falling column of log-SNR = log(signal² / sigma²) and a rule that splits it into signal and sigma:
"variance" keeps signal² + sigma² = 1 (DDPM, VP), "signal" keeps signal = 1 (SMLD, VE), "sum" keeps signal + sigma = 1
(flow matching). The scalars are those of isotropic diffusion; Σ is not in this file. With one column per mode of Σ's
basis, blurring, designed and other schedules are tables of the same kind.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.covariance.matrix import Identity
from nidiff.covariance.modes import Coefficient, Modes
from nidiff.covariance.operator import MOST_AXES, Covariance
from nidiff.covariance.spectral import Boundary, boundary_per_axis, check_boundary, white_in
from nidiff.errors import InputError, one_of, shown
from nidiff.memory import require_memory
from nidiff.notation import call, parse_call
from nidiff.randomness import Generators, random_index
from nidiff.recipe import check_number, check_whole, fits, is_number, plain, remembered

MOST_LEVELS = 10_000_000
# What float64 can square and divide by: a level beyond is not one that anything can be computed at.
LEAST_SIGNAL, LEAST_SIGMA, MOST_SIGMA = 1e-300, 1e-150, 1e150
LARGEST_LOGSNR = 1400.0  # exp(700) is finite


def broadcast(coefficient: Coefficient, x: Tensor) -> Any:
    """A float64 coefficient per image [B] as something that multiplies x [B, ...] in x's dtype; a float stays one, and
    so do modes."""
    if isinstance(coefficient, Tensor):
        coefficient = coefficient.to(x.device, x.dtype)
        return coefficient.reshape(-1, *[1] * (x.ndim - 1)) if coefficient.ndim else coefficient
    return coefficient


class Level(NamedTuple):
    """One noise level (floats), or one per image (float64 tensors [B]); `Modes` where it differs between modes.

    ``label`` is what the network is told: the row of the table, counted from the least noise; fractional between two
    rows.
    """

    signal: Any  # Coefficient: any arithmetic of these is one of these again
    sigma: Any
    label: int | float | Tensor

    def like(self, x: Tensor) -> "Level":
        """The same with coefficients that multiply x [B, ...]."""
        return Level(broadcast(self.signal, x), broadcast(self.sigma, x), self.label)


CLEAN = Level(1.0, 0.0, -1)
"""Where the data are: no noise. It is not in a schedule, whose levels all have a log-SNR."""


class Rule(NamedTuple):
    """How a log-SNR becomes a signal, what its logarithm's slope in log-SNR is, and the scale of the prior."""

    log_signal: Callable[[Tensor], Tensor]
    slope: Callable[[Any], Any]  # of sigma
    prior_scale: Callable[[Any], Any]  # of the largest sigma


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

    ``logsnr`` falls strictly; ``keeps`` names a rule of this module. ``time`` in (0, 1] is the process' own clock, by
    default (row + 1) / L; ``logsnr_of_time`` is given where it is known in closed form (continuous processes), and else
    interpolates the table.

    With a table ``logsnr`` [L, *event] every mode has its own log-SNR, which must not rise, and of which one at least
    falls from row to row. The modes are those of the process' Σ, or, where Σ is white, those of ``boundary``
    ("periodic" or "reflecting"). ``signal``, a table too, or a column for all modes, stands in place of the rule.
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
        if logsnr_of_time is not None and not callable(logsnr_of_time):
            raise InputError(f"logsnr_of_time is a {type(logsnr_of_time).__name__}: give a function, or leave it out.")
        self.keeps = one_of("keeps", keeps, RULES)
        self.boundary = None if boundary is None else check_boundary(boundary)
        self.logsnr = self._unshifted = logsnr
        self._log_signal = None if signal is None else _log_table(signal, logsnr)
        self._check_range()
        rows = torch.arange(1, len(logsnr) + 1, dtype=torch.float64, device="cpu")
        self.time = rows / len(logsnr) if time is None else _column("time", time)
        if len(self.time) != len(logsnr) or bool((self.time.diff() <= 0).any()):
            raise InputError(f"time must rise from row to row and have {len(logsnr)} entries, as many as logsnr.")
        self._logsnr_of_time = logsnr_of_time
        self.modes: Covariance | None = None
        """Whose modes the numbers of a table belong to: set by `in_basis_of`."""
        self.shift = 0.0
        """What `shifted` added to every log-SNR."""
        self.recipe: tuple[str, dict[str, Any]] | None = None
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
        """The same for a process with this Σ; a table is bound to Σ's modes. One that does not fit is refused."""
        if not self.event_shape:
            return self
        if covariance.spatial is not covariance and self.event_shape == covariance.spatial.event_shape:
            return self.in_basis_of(covariance.spatial)  # the same for all channels
        if self.event_shape != covariance.event_shape:
            raise InputError(
                f"schedule={self!r} has modes {self.event_shape}, and Σ is over {covariance.event_shape}: build it "
                "for that shape."
            )
        other = copy.copy(self)
        boundary = None if self.boundary is None else boundary_per_axis(self.boundary, len(self.event_shape))
        if boundary is None and isinstance(covariance, Identity):
            raise InputError(
                f"schedule={self!r} does not say which modes it is for, and white noise has any: give "
                "boundary='periodic' or 'reflecting', or Diagonal(torch.ones(shape)) as Σ for levels per pixel."
            )
        if boundary is None or covariance.boundary == boundary:
            other.modes = covariance
        elif covariance.is_constant:
            other.modes = white_in(boundary, self.event_shape)
        else:
            raise InputError(
                f"schedule={self!r} is for the modes of boundary={self.boundary!r}, which are not those of "
                f"{covariance!r}: build Σ with that boundary, or use white noise."
            )
        other.modes.check_modes("logsnr", self.logsnr)
        other.modes.check_modes("signal", self.log_signal)
        return other

    def _check_range(self) -> None:
        for row in (0, -1):  # the ends: log-SNR falls
            signal, sigma = self._of_row(row)
            if not bool(((signal > LEAST_SIGNAL) & (sigma > LEAST_SIGMA) & (sigma < MOST_SIGMA)).all()):
                level = f"signal {signal.min().item():.3g} and sigma {sigma.max().item():.3g}"
                raise InputError(f"the schedule has a level of {level}, beyond float64: use a narrower range or shift.")

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
    def prior_scale(self) -> Any:
        """The prior is N(0, prior_scale² Σ): 1 for VP, the largest sigma for VE (E22); `Modes` if it differs."""
        sigma = self._number(self._of_row(-1)[1])
        return sigma if self.has_own_signal else self.rule.prior_scale(sigma)

    @property
    def forgets(self) -> bool:
        """Whether noise is all that is left at the last level, as a rule has it: with a signal of its own a table may
        keep modes of the data (`heat`)."""
        return not (self.has_own_signal and bool((self.logsnr[-1] > 0).any()))

    def level(self, label: int | float | Tensor) -> Level:
        """The level of a row; between two rows, log-SNR is interpolated. Floats for a number, tensors for a tensor."""
        position = _position("label", label)
        # A compiled function cannot look at the values; its labels come from `draw`.
        if not torch.compiler.is_compiling() and not bool(((position >= 0) & (position <= len(self) - 1)).all()):
            raise InputError(f"label={shown(label)} is outside the schedule: its rows are 0 … {len(self) - 1}.")
        own = None if self._log_signal is None else interpolate(position, self._rows, self._log_signal)
        return self._level(interpolate(position, self._rows, self.logsnr), label, own)

    def level_at(self, logsnr: float | Tensor) -> Level:
        """The level of a given log-SNR, with the fractional label that belongs to it."""
        if self.event_shape:
            raise InputError(f"schedule={self!r} has a log-SNR for every mode: use level(row).")
        value = _position("logsnr", logsnr)
        if not torch.compiler.is_compiling() and not bool((value.abs() < LARGEST_LOGSNR).all()):
            raise InputError(f"logsnr={shown(logsnr)} must be finite, and within ±{LARGEST_LOGSNR:g}.")
        label = interpolate(-value, -self.logsnr, self._rows)
        own = None if self._log_signal is None else interpolate(label, self._rows, self._log_signal)
        return self._level(value, label if isinstance(logsnr, Tensor) else label.item(), own)

    def level_with_noise(self, deviation: float) -> Level:
        """The level of y = x0 + deviation · Σ^½ eps, that is, of sigma / signal = deviation; x is signal · y there."""
        value = check_number("deviation", deviation)
        low, high = (math.exp(-0.5 * end) for end in self.clock.tolist()) if not self.event_shape else (0.0, 1.0)
        if not self.event_shape and not low <= value <= high:
            raise InputError(f"deviation={deviation} is not a level of the schedule, which has {low:.3g} … {high:.3g}.")
        return self.level_at(-2 * math.log(value))

    def nearest_row(self, mean_logsnr: Tensor) -> Tensor:
        """The fractional rows at which `mean_logsnr` has these values."""
        return interpolate(-mean_logsnr, -self.mean_logsnr, self._rows)

    # The clock of differential equations rises from noise to data: it is log-SNR, and −row where modes differ.

    @property
    def clock(self) -> Tensor:
        """The clock at the least and the most noise."""
        return (-self._rows if self.event_shape else self.logsnr)[[0, -1]]

    def level_on_clock(self, clock: float) -> Level:
        """The level at a value of the clock."""
        return self.level(-clock) if self.event_shape else self.level_at(clock)

    def rates(self, level: Level) -> tuple[Any, Any]:
        """The derivatives of log signal and of log-SNR by the clock."""
        if not (self.event_shape or self.has_own_signal):
            return self.rule.slope(level.sigma), 1.0
        below = torch.as_tensor(level.label, dtype=torch.float64, device="cpu").floor().long()
        below = below.clamp(0, max(len(self) - 2, 0))
        above = (below + 1).clamp(max=len(self) - 1)
        logsnr = self.logsnr[below] - self.logsnr[above]  # over one row
        if self.has_own_signal:
            signal = self._number(self.log_signal[below] - self.log_signal[above])
        else:
            signal = self.rule.slope(level.sigma) * self._number(logsnr)
        by_row = signal, self._number(logsnr)
        return by_row if self.event_shape else (by_row[0] / by_row[1], 1.0)

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

    def shifted(self, amount: float) -> "Schedule":
        """The same schedule with ``amount`` added to every log-SNR (positive: less noise at the same row).

        A coloured Σ puts the same sigma elsewhere in frequency, so the same β is not the same SNR per mode (R7).
        """
        other = copy.copy(self)
        other.shift = self.shift + check_number("amount", amount)
        other.logsnr = self._unshifted + other.shift
        if bool((other.mean_logsnr.diff() >= 0).any()):
            raise InputError(f"amount={amount} is so large that levels coincide: use a smaller shift.")
        other._check_range()
        return other

    def below(self, row: int) -> "Schedule":
        """The rows from 0 to ``row`` alone, those of least noise."""
        return self._made_of(lambda table: table[: row + 1], time=self.time[: row + 1])

    def of_modes(self, index: Tensor) -> "Schedule":
        """A table for these modes [n] alone, by their number in the flattened event; if all modes are alike, of copies.

        Of an event (n,): a small model of this schedule, of which no row is checked again.
        """

        def columns(table: Tensor) -> Tensor:
            return table.flatten(1)[:, index] if self.event_shape else table[:, None].expand(-1, len(index))

        return self._made_of(columns, boundary=None, modes=None)

    def _made_of(self, part: Callable[[Tensor], Tensor], **changes: Any) -> "Schedule":
        """The same with a part of its tables."""
        other = copy.copy(self)
        other.logsnr, other._unshifted = part(self.logsnr), part(self._unshifted)
        other._log_signal = None if self._log_signal is None else part(self._log_signal)
        other.recipe = other._logsnr_of_time = None
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def to_config(self) -> dict[str, Any]:
        """What rebuilds this schedule, as JSON: the call that made it, or the table itself."""
        if self.recipe is None and self._logsnr_of_time is not None:
            raise InputError(
                "logsnr_of_time is a function, which a configuration cannot hold: put the function that makes this "
                "schedule in SCHEDULES and mark it with @remembered."
            )
        name, arguments = self.recipe or ("table", self._as_table())
        plain = {key: _table(key, value).tolist() if _is_column(value) else value for key, value in arguments.items()}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
        return {"schedule": name, **plain, **({"shift": self.shift} if self.shift else {})}

    def _as_table(self) -> dict[str, Any]:
        signal = None if self._log_signal is None else self._log_signal.exp()
        given = {"logsnr": self._unshifted, "keeps": self.keeps, "time": self.time}
        return {**given, "signal": signal, "boundary": self.boundary}

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Schedule":
        """The inverse of `to_config`."""
        if not isinstance(config, Mapping):
            raise InputError(f"config={shown(config)} must be what Schedule.to_config() returned.")
        arguments = dict(config)
        try:
            name, shift = arguments.pop("schedule"), arguments.pop("shift", 0.0)
        except KeyError:
            raise InputError('schedule has no key "schedule": give what Schedule.to_config() returned.') from None
        if not is_number(shift):
            raise InputError(f"shift={shown(shift)} of the schedule must be a finite number.")
        if not all(isinstance(key, str) for key in arguments):
            raise InputError("schedule has a key that is not a name: give what Schedule.to_config() returned.")
        schedule: Schedule = call("schedule", name, arguments, SCHEDULES)
        return schedule.shifted(shift) if shift else schedule

    def __repr__(self) -> str:
        name, arguments = self.recipe or ("table", {"keeps": self.keeps, "num_levels": len(self)})
        shown = {key: f"<{_count(value)} numbers>" if _is_column(value) else repr(value) for key, value in
                 (arguments | ({"shift": self.shift} if self.shift else {})).items()}  # fmt: skip
        return f"{name}({', '.join(f'{key}={value}' for key, value in shown.items())})"

    @property
    def _rows(self) -> Tensor:
        return torch.arange(len(self), dtype=torch.float64, device="cpu")

    def _level(self, logsnr: Tensor, label: int | float | Tensor, log_signal: Tensor | None) -> Level:
        log_signal = self.rule.log_signal(logsnr) if log_signal is None else log_signal
        signal, sigma = log_signal.exp(), (log_signal - 0.5 * logsnr).exp()
        return Level(self._number(signal), self._number(sigma), label)

    def _number(self, values: Tensor) -> Any:
        """The values of a level as a float, a tensor of one per image, or modes."""
        if not self.event_shape:
            return values if values.ndim else values.item()
        if self.modes is None:
            raise InputError(f"schedule={self!r} differs from mode to mode: use it in a nidiff.Process, which has Σ.")
        return Modes(values, self.modes)


def as_schedule(
    schedule: "Schedule | str | Mapping[str, Any]", facts: Mapping[str, Callable[[], Any]] | None = None
) -> Schedule:
    """A schedule, what its ``to_config()`` returned, or text: "ddpm_linear:num_levels=100,shift=1".

    ``facts`` fills in arguments that a text leaves out and its schedule needs, by their names: the shape of Σ, say.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str):
        name, arguments = parse_call("schedule", schedule)
        parameters = signature(SCHEDULES[one_of("schedule", name, SCHEDULES)]).parameters
        for key, fact in (facts or {}).items():
            if key in parameters and key not in arguments:
                arguments[key] = fact()
        return Schedule.from_config({"schedule": name, **arguments})
    if isinstance(schedule, Mapping):
        return Schedule.from_config(schedule)
    raise InputError(
        f"schedule={shown(schedule)} must be a nidiff.Schedule, its configuration, or text such as "
        "'ddpm_linear:num_levels=1000'."
    )


@remembered
def ddpm_linear(num_levels: int = 1000, beta_min: float = 1e-4, beta_max: float = 0.02) -> Schedule:
    """β from ``beta_min`` to ``beta_max`` in equal steps, ᾱ_t = ∏(1 − β_s) (DDPM; the paper's schedule)."""
    return _from_betas(_ramp(num_levels, beta_min, beta_max))


@remembered
def scaled_linear(num_levels: int = 1000, beta_min: float = 0.00085, beta_max: float = 0.012) -> Schedule:
    """√β from √``beta_min`` to √``beta_max`` in equal steps: the schedule of Stable Diffusion."""
    return _from_betas(_ramp(num_levels, beta_min, beta_max, power=0.5))


@remembered
def ddpm_cosine(num_levels: int = 1000, offset: float = 0.008, beta_max: float = 0.999) -> Schedule:
    """ᾱ(t) ∝ cos²(π/2 · (t + offset)/(1 + offset)), each β at most ``beta_max`` (Nichol and Dhariwal 2021).

    The last level has hardly any signal (1/20,000 with the defaults), and a prediction of the noise is divided by it:
    clip x̂0, or predict v or x0.
    """
    _check_levels(num_levels)
    if not (0 <= offset < 1 and 0 < beta_max < 1):
        raise InputError(f"offset={offset}, beta_max={beta_max} must satisfy 0 <= offset < 1 and 0 < beta_max < 1.")
    time = torch.arange(num_levels + 1, dtype=torch.float64, device="cpu") / num_levels
    remaining = torch.cos((time + offset) / (1 + offset) * math.pi / 2).square()
    return _from_betas((1 - remaining[1:] / remaining[:-1]).clamp(max=beta_max))


@remembered
def from_betas(betas: Sequence[float]) -> Schedule:
    """ᾱ_t = ∏(1 − β_s) of any β between 0 and 1, from the least to the most noise."""
    column = _column("betas", betas)
    if not bool(((column > 0) & (column < 1)).all()):
        raise InputError("betas must lie between 0 and 1, both excluded: remove the levels without noise or signal.")
    return _from_betas(column)


@remembered
def from_alphas_cumprod(alphas_cumprod: Sequence[float]) -> Schedule:
    """signal² = ᾱ and sigma² = 1 − ᾱ of a falling column ᾱ. The β, where you have them, lose less to rounding."""
    column = _column("alphas_cumprod", alphas_cumprod)
    if not bool(((column > 0) & (column < 1)).all()):
        raise InputError("alphas_cumprod must lie between 0 and 1, both excluded: a level of pure noise has no SNR.")
    return Schedule(torch.logit(column), "variance")


def from_diffusers(config: Any) -> Schedule:
    """The schedule of a diffusers scheduler that has β (DDPM, DDIM, DPM-Solver++, …), or of its ``config``; of
    FlowMatchEulerDiscreteScheduler, `nidiff.flow` with its shift."""
    values = dict(config if isinstance(config, Mapping) else getattr(config, "config", {}))
    if is_flow(values):
        for option, remedy in FLOW_OPTIONS.items():
            if values.get(option):
                raise InputError(f"config has {option}={values[option]!r}, which is not one schedule: {remedy}.")
        return SCHEDULES["flow"](values.get("num_train_timesteps", 1000), values.get("shift", 1.0))
    if values.get("rescale_betas_zero_snr"):
        raise InputError("config has rescale_betas_zero_snr=True, a level of pure noise without SNR: turn it off.")
    if values.get("trained_betas") is not None:
        return from_betas(values["trained_betas"])
    kind, count = values.get("beta_schedule"), values.get("num_train_timesteps", 1000)
    ends = {ours: values[theirs] for ours, theirs in (("beta_min", "beta_start"), ("beta_max", "beta_end"))
            if theirs in values}  # fmt: skip
    if kind == "squaredcos_cap_v2":
        return ddpm_cosine(count)
    known = {"linear": ddpm_linear, "scaled_linear": scaled_linear}
    return known[one_of("beta_schedule", kind, [*known, "squaredcos_cap_v2"])](count, **ends)


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a diffusers scheduler of flow matching."""
    return "FlowMatch" in str(config.get("_class_name", "")) or ("shift" in config and "beta_schedule" not in config)


# What makes the levels of FlowMatchEulerDiscreteScheduler depend on more than its shift, and what to do about it.
FLOW_OPTIONS = {
    "use_dynamic_shifting": "set it to False, and shift to exp(mu)",
    "shift_terminal": "set it to None",
    "invert_sigmas": "set it to False",
    "use_karras_sigmas": "set it to False, and choose rows by spacing=",
    "use_exponential_sigmas": "set it to False, and choose rows by spacing=",
    "use_beta_sigmas": "set it to False, and choose rows by spacing=",
    "stochastic_sampling": "set it to False, and use sampler ancestral",
}


@remembered
def table(
    logsnr: Sequence[Any],
    keeps: str = "variance",
    time: Sequence[float] | None = None,
    signal: Sequence[Any] | None = None,
    boundary: Boundary | None = None,
) -> Schedule:
    """Any falling column of log-SNR, or a table of one column per mode: `Schedule` under a name."""
    return Schedule(logsnr, keeps, time=time, signal=signal, boundary=boundary)


@remembered
def smld_geometric(num_levels: int, sigma_max: float, sigma_min: float) -> Schedule:
    """Noise scales in geometric progression, signal 1 (SMLD, appendix D)."""
    _check_levels(num_levels)
    _check_sigmas(sigma_min, sigma_max)
    if num_levels < 2:
        raise InputError(f"num_levels={num_levels} cannot hold both sigma_min and sigma_max: give at least 2.")
    log_sigma = torch.linspace(math.log(sigma_min), math.log(sigma_max), num_levels, dtype=torch.float64, device="cpu")
    return Schedule(-2 * log_sigma, "signal")


@remembered
def vp(num_levels: int = 1000, beta_min: float = 0.1, beta_max: float = 20.0, time_min: float = 1e-3) -> Schedule:
    """The continuous VP process, β(t) = beta_min + t (beta_max − beta_min), tabulated from ``time_min`` to 1 (A.9)."""
    _check_levels(num_levels)
    if not 0 < beta_min <= beta_max <= 1000:
        raise InputError(f"beta_min={beta_min}, beta_max={beta_max} must satisfy 0 < beta_min <= beta_max <= 1000.")
    if not time_min > 0:
        raise InputError(f"time_min={time_min} must be above 0, where VP has no noise.")
    return _continuous(partial(_vp_logsnr, beta_min, beta_max), "variance", num_levels, time_min)


@remembered
def ve(num_levels: int = 1000, sigma_max: float = 50.0, sigma_min: float = 0.01, time_min: float = 0.0) -> Schedule:
    """The continuous VE process, sigma(t) = sigma_min (sigma_max / sigma_min)^t, tabulated from ``time_min`` to 1."""
    _check_levels(num_levels)
    _check_sigmas(sigma_min, sigma_max)
    return _continuous(partial(_ve_logsnr, sigma_min, sigma_max), "signal", num_levels, time_min)


def _vp_logsnr(beta_min: float, beta_max: float, time: Tensor) -> Tensor:
    integral = time * beta_min + 0.5 * time.square() * (beta_max - beta_min)
    return -torch.expm1(integral).log()  # ᾱ / (1 − ᾱ) = 1 / (e^∫β − 1)


def _ve_logsnr(sigma_min: float, sigma_max: float, time: Tensor) -> Tensor:
    return -2 * (math.log(sigma_min) + time * math.log(sigma_max / sigma_min))


def _continuous(logsnr: Callable[[Tensor], Tensor], keeps: str, num_levels: int, time_min: float) -> Schedule:
    if not 0 <= time_min < 1:
        raise InputError(f"time_min={time_min} must be at least 0 and below 1.")
    time = torch.linspace(time_min, 1.0, num_levels, dtype=torch.float64, device="cpu")
    return Schedule(logsnr(time), keeps, time=time, logsnr_of_time=logsnr)


def _ramp(num_levels: int, beta_min: float, beta_max: float, power: float = 1.0) -> Tensor:
    """β whose ``power`` rises in equal steps."""
    _check_levels(num_levels)
    if not 0 < beta_min <= beta_max < 1:
        raise InputError(f"beta_min={beta_min}, beta_max={beta_max} must satisfy 0 < beta_min <= beta_max < 1.")
    ends = beta_min**power, beta_max**power
    return torch.linspace(*ends, num_levels, dtype=torch.float64, device="cpu") ** (1 / power)


def _column(argument: str, values: Tensor | Sequence[float]) -> Tensor:
    column = _table(argument, values)
    if column.ndim != 1:
        raise InputError(f"{argument} must be a column of finite numbers, but has shape {tuple(column.shape)}.")
    return column


def _table(argument: str, values: Tensor | Sequence[Any]) -> Tensor:
    """Rows of finite numbers as float64: a column, or one number per mode in each."""
    if hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0 and len(values) > MOST_LEVELS:
        raise InputError(f"{argument} has {len(values):,} entries: give at most {MOST_LEVELS:,}.")
    try:
        if values.is_complex() if isinstance(values, Tensor) else np.iscomplexobj(values):
            raise TypeError("they are complex")
        table = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{argument} must be a column of numbers ({error}).") from error
    if table.ndim == 0 or table.numel() == 0 or not bool(torch.isfinite(table).all()):
        raise InputError(f"{argument} must be a column of finite numbers, but has shape {tuple(table.shape)}.")
    require_memory(argument, 32.0 * table.numel(), "use fewer levels")
    return table


def _log_table(signal: Tensor | Sequence[Any], logsnr: Tensor) -> Tensor:
    """The logarithm of a signal per level, or per level and mode, as a table like ``logsnr``."""
    values = _table("signal", signal)
    if values.shape == logsnr.shape[:1]:
        values = values.reshape(-1, *[1] * (logsnr.ndim - 1)).expand(logsnr.shape)
    if values.shape != logsnr.shape or not bool((values > 0).all()):
        raise InputError(f"signal must be positive, and have the shape {tuple(logsnr.shape)} of logsnr.")
    return values.log()


def _check_falling(logsnr: Tensor) -> None:
    steps = logsnr.diff(dim=0)
    if logsnr.ndim == 1:
        if bool((steps >= 0).any()):
            raise InputError("logsnr must fall from row to row: the table goes from the least to the most noise.")
        return
    if bool((steps > 0).any()):
        row, *mode = (steps > 0).nonzero()[0].tolist()
        raise InputError(f"logsnr of mode {tuple(mode)} rises after row {row}: no mode may gain signal with the rows.")
    if bool((steps.flatten(1).amin(1) >= 0).any()):
        raise InputError("logsnr has two rows that are equal in every mode: leave one out.")


def _is_column(value: Any) -> bool:
    """Whether it is an array of numbers; a few whole ones, such as a shape, or words are shown and saved as are."""
    if not hasattr(value, "__len__") or isinstance(value, str):
        return False
    few = isinstance(value, list | tuple) and len(value) <= MOST_AXES
    return not (few and all(fits(each, int | str) for each in value))


def _count(value: Any) -> int:
    return int(np.prod(np.shape(value)))


def _from_betas(betas: Tensor) -> Schedule:
    log_remaining = torch.log1p(-betas).cumsum(0)  # log ᾱ
    return Schedule(log_remaining - torch.log(-torch.expm1(log_remaining)), "variance")


def _position(argument: str, value: float | Tensor) -> Tensor:
    """A number, or a tensor of them, as float64 on the CPU."""
    value = value if isinstance(value, Tensor) else plain(value)
    if isinstance(value, Tensor) and not (value.is_complex() or value.dtype == torch.bool):
        return value.to(dtype=torch.float64, device="cpu")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{argument}={shown(value)} must be a number, or a tensor of numbers.")
    try:
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    except OverflowError:
        return torch.tensor(math.inf, dtype=torch.float64, device="cpu")


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear through (xs, ys [L, ...]), xs rising; beyond the ends the last segment goes on."""
    if len(xs) == 1:
        return ys[0].expand((*x.shape, *ys.shape[1:]))
    right = torch.searchsorted(xs, x.detach().contiguous()).clamp(1, len(xs) - 1)
    weight = (x - xs[right - 1]) / (xs[right] - xs[right - 1]).clamp(min=1e-300)  # two may be equal, by rounding
    return torch.lerp(ys[right - 1], ys[right], weight.reshape((*x.shape, *[1] * (ys.ndim - 1))))


def _check_levels(num_levels: int) -> None:
    check_whole("num_levels", num_levels, 1, MOST_LEVELS)


def _check_sigmas(sigma_min: float, sigma_max: float) -> None:
    if not (0 < sigma_min < sigma_max):
        raise InputError(f"sigma_min={sigma_min}, sigma_max={sigma_max} must satisfy 0 < sigma_min < sigma_max.")
    if not (sigma_min > LEAST_SIGMA and sigma_max < MOST_SIGMA):
        raise InputError(f"sigma_min={sigma_min}, sigma_max={sigma_max} are beyond float64: use a narrower range.")


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "ddpm_linear": ddpm_linear,
    "ddpm_cosine": ddpm_cosine,
    "scaled_linear": scaled_linear,
    "from_betas": from_betas,
    "from_alphas_cumprod": from_alphas_cumprod,
    "table": table,
    "smld_geometric": smld_geometric,
    "vp": vp,
    "ve": ve,
}
