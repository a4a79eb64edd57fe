"""The forward process x = signal · x0 + sigma · Σ^½ eps: a schedule and a covariance."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import check_has_numbers
from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Modes, as_modes
from nidiff.diffusion.schedule import Level, Schedule, check_forgotten
from nidiff.diffusion.schedules import as_schedule, schedule_facts
from nidiff.errors import InputError
from nidiff.randomness import Generators
from nidiff.recipe import check_number


class Process:
    """What the noise does to data: q(x | x0) = N(signal · x0, sigma² Σ) at every level of the schedule (eq. 10).

    Σ s, the score preconditioned by Σ, is all that the reverse SDE and the ODE need (R6), and it is
    (signal · x̂0 − x) / sigma²: no inverse of Σ. Their natural clock here is the log-SNR ℓ, in which forward is
    dx = slope(ℓ) x dℓ + sigma Σ^½ dw whatever the schedule; `coefficients` gives f and g² in the schedule's own time.
    """

    def __init__(self, schedule: Schedule | str | Mapping[str, Any], covariance: Covariance | str | Path) -> None:
        self.covariance = as_covariance(covariance)
        self.covariance.require_invertible("a diffusion with this Σ")
        self.schedule = as_schedule(schedule, schedule_facts(self.covariance)).in_basis_of(self.covariance)

    def perturb(self, x0: Tensor, level: Level, eps: Tensor) -> Tensor:
        """x = signal · x0 + sigma · Σ^½ eps, with white eps (eq. 10)."""
        self.check_batch("x0", x0)
        if eps.shape != x0.shape:  # which torch would repeat over the batch
            problem = f"has shape {tuple(eps.shape)}, and `x0` has {tuple(x0.shape)}"
            raise InputError("eps", None, problem, "draw one for every image")
        return level.signal * x0 + level.sigma * self.covariance.sqrt(eps)

    def check_batch(self, argument: str, x: Tensor) -> None:
        """Refuse what is not a batch [B, ..., *event] of floating-point images."""
        if x.ndim <= len(self.covariance.event_shape) or not x.is_floating_point():
            problem = f"has shape {tuple(x.shape)} and dtype {x.dtype}"
            raise InputError(argument, None, problem, "give a batch [B, ..., *event] of floats")
        self.covariance.check_trailing(x.shape, argument)
        check_has_numbers(argument, x)

    def noise(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Coloured noise, N(0, Σ): all that samplers draw."""
        return self.covariance.sample(shape, generator, dtype=dtype, device=device)

    def prior(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Where sampling starts: N(0, Σ) for VP, N(0, sigma_max² Σ) for VE (E22)."""
        check_forgotten(self.schedule)
        return self.schedule.prior_scale * self.noise(shape, generator, dtype=dtype, device=device)

    def prior_log_prob(self, x: Tensor) -> Tensor:
        """log density of the prior per image: log N(x / c; 0, Σ) − D log c (R6)."""
        scale = self.schedule.prior_scale
        self.check_batch("x", x)
        mean_log = scale.values.log().mean().item()
        return self.covariance.log_prob(x / scale) - math.prod(x.shape[1:]) * mean_log

    def conditional_score(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """∇ log q(x | x0) = −Σ⁻¹ (x − signal · x0) / sigma² (eq. 11)."""
        return self.covariance.solve(self.preconditioned_score(x, x0, level))

    def preconditioned_score(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """Σ ∇ log q = (signal · x0 − x) / sigma²; with x0 = E[x0 | x] it is Σ ∇ log p (Tweedie, E10)."""
        return (level.signal * x0 - x) / level.sigma**2

    # The clock of the differential equations rises from noise to data: it is log-SNR, or −row where modes differ.

    @property
    def clock(self) -> Tensor:
        """The clock at the least and the most noise."""
        schedule = self.schedule
        rows = torch.tensor([0.0, 1.0 - len(schedule)], dtype=torch.float64, device="cpu")
        return rows if schedule.event_shape else schedule.logsnr[[0, -1]]

    @property
    def kinks(self) -> Tensor:
        """The clock at the rows above the first, if `rates` jump there, since a table is linear between its rows."""
        schedule = self.schedule
        if schedule.event_shape:
            return -torch.arange(1, len(schedule), dtype=torch.float64, device="cpu")
        return schedule.logsnr[1:] if schedule.has_own_signal else schedule.logsnr[:0]

    def level_on_clock(self, clock: float) -> Level:
        """The level at a value of the clock."""
        return self.schedule.level(-clock) if self.schedule.event_shape else self.schedule.level_at(clock)

    def rates(self, level: Level) -> tuple[Modes, Modes]:
        """The derivatives of log signal and of log-SNR by the clock."""
        schedule = self.schedule
        if not (schedule.event_shape or schedule.has_own_signal):
            return schedule.rule.slope(level.sigma), as_modes(1.0)
        below = torch.as_tensor(level.label, dtype=torch.float64, device="cpu").floor().long()
        below = below.clamp(0, max(len(schedule) - 2, 0))
        above = (below + 1).clamp(max=len(schedule) - 1)
        logsnr, signal = (schedule.as_modes(t[below] - t[above]) for t in (schedule.logsnr, schedule.log_signal))
        if not schedule.has_own_signal:
            signal = schedule.rule.slope(level.sigma) * logsnr
        return (signal, logsnr) if schedule.event_shape else (signal / logsnr, as_modes(1.0))

    def flow(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """Probability-flow ODE by the clock of the schedule, ℓ = log-SNR: dx/dℓ = slope · x + ½ sigma² Σ s (R6)."""
        slope, speed = self.rates(level)
        return (slope - 0.5 * speed) * x + (0.5 * speed * level.signal) * x0

    def reverse_drift(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """Reverse SDE with rising ℓ: dx = (slope · x + sigma² Σ s) dℓ + sigma Σ^½ dw̄; this is the bracket (R6)."""
        slope, speed = self.rates(level)
        return (slope.ratio(speed) - 1.0) * x + level.signal * x0

    def coefficients(self, time: float) -> tuple[Modes, Modes]:
        """(f, g²) of dx = f x dt + g Σ^½ dw at ``time``: −½β, β for VP (eq. 24); 0, dσ²/dt for VE (eq. 92).

        Then reverse is dx = (f x − g² Σ s) dt + g Σ^½ dw̄ and the ODE dx/dt = f x − ½ g² Σ s (R6).
        """
        schedule = self.schedule
        check_number("time", time, schedule.time[0].item(), 1.0)
        with torch.enable_grad():
            clock = torch.tensor(float(time), dtype=torch.float64, device="cpu", requires_grad=True)
            now = -schedule.row_at(clock) if schedule.event_shape else schedule.logsnr_at(clock)
            (rate,) = torch.autograd.grad(now, clock)
        level = self.level_on_clock(now.item())
        slope, speed = self.rates(level)
        return slope * rate.item(), -(level.sigma**2) * speed * rate.item()
