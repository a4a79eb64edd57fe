"""The forward process x = signal · x0 + sigma · Σ^½ eps: a schedule and a covariance."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import as_covariance
from nidiff.covariance.modes import Modes, elementwise, ratio
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.family import check_forgotten, schedule_facts
from nidiff.diffusion.schedule import Level, Schedule, as_schedule, broadcast
from nidiff.errors import TENSOR, InputError, expect
from nidiff.randomness import Generators
from nidiff.recipe import check_number


class Process:
    """What the noise does to data: q(x | x0) = N(signal · x0, sigma² Σ) at every level of the schedule (eq. 10).

    Σ s, the score preconditioned by Σ, is all that the reverse SDE and the ODE need (R6), and it is
    (signal · x̂0 − x) / sigma²: no inverse of Σ. Their natural clock here is the log-SNR ℓ, in which forward is
    dx = slope(ℓ) x dℓ + sigma Σ^½ dw whatever the schedule; `coefficients` gives f and g² in the schedule's own time.
    """

    def __init__(self, schedule: Schedule | str | Mapping[str, Any], covariance: Covariance | str | Path) -> None:
        # A text may need facts about Σ; anything else is looked at first, so that swapped arguments are named in order.
        schedule = schedule if isinstance(schedule, str) else as_schedule(schedule)
        self.covariance = as_covariance(covariance)
        self.covariance.require_invertible("a diffusion with this Σ")
        self.schedule = as_schedule(schedule, schedule_facts(self.covariance)).in_basis_of(self.covariance)

    def perturb(self, x0: Tensor, level: Level, eps: Tensor) -> Tensor:
        """x = signal · x0 + sigma · Σ^½ eps, with white eps (eq. 10)."""
        self.check_batch("x0", x0)
        if not (isinstance(level, Level) and isinstance(eps, Tensor)):
            raise InputError("perturb takes x0, a level of the schedule and a tensor eps: give them in this order.")
        if eps.shape != x0.shape:
            raise InputError(f"eps has shape {tuple(eps.shape)}, but x0 has {tuple(x0.shape)}: make them equal.")
        numbers = level.sigma.values if isinstance(level.sigma, Modes) and level.sigma.per_image else level.sigma
        if isinstance(numbers, Tensor) and numbers.ndim and len(numbers) != len(x0):
            raise InputError(f"level is for {len(numbers)} images, but x0 has {len(x0)}: give one per image.")
        return broadcast(level.signal, x0) * x0 + broadcast(level.sigma, x0) * self.covariance.sqrt(eps)

    def check_batch(self, argument: str, x: Tensor) -> None:
        """Refuse what is not a batch [B, ..., *event] of floating-point images."""
        expect(argument, x, Tensor, TENSOR)
        if x.ndim <= len(self.covariance.event_shape):
            raise InputError(f"{argument} has shape {tuple(x.shape)}: give a batch [B, ..., *event].")
        if not x.is_floating_point():
            raise InputError(f"{argument} has dtype {x.dtype}: convert the images to floats, such as 2·v/255 − 1.")
        self.covariance.check_trailing(x.shape, argument)

    def noise(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Coloured noise, N(0, Σ)."""
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
        logarithm = elementwise(torch.log, scale)
        each = logarithm.values.mean().item() if isinstance(logarithm, Modes) else logarithm
        return self.covariance.log_prob(x / scale) - math.prod(x.shape[1:]) * each

    def conditional_score(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """∇ log q(x | x0) = −Σ⁻¹ (x − signal · x0) / sigma² (eq. 11)."""
        return self.covariance.solve(self.preconditioned_score(x, x0, level))

    def preconditioned_score(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """Σ ∇ log q = (signal · x0 − x) / sigma²; with x0 = E[x0 | x] it is Σ ∇ log p (Tweedie, E10)."""
        return (broadcast(level.signal, x) * x0 - x) / broadcast(level.sigma**2, x)

    def flow(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """Probability-flow ODE by the clock of the schedule, ℓ = log-SNR: dx/dℓ = slope · x + ½ sigma² Σ s (R6)."""
        slope, speed = self.schedule.rates(level)
        return broadcast(slope - 0.5 * speed, x) * x + broadcast(0.5 * speed * level.signal, x) * x0

    def reverse_drift(self, x: Tensor, x0: Tensor, level: Level) -> Tensor:
        """Reverse SDE with rising ℓ: dx = (slope · x + sigma² Σ s) dℓ + sigma Σ^½ dw̄; this is the bracket (R6)."""
        slope = ratio(*self.schedule.rates(level))
        return broadcast(slope - 1.0, x) * x + broadcast(level.signal, x) * x0

    def coefficients(self, time: float) -> tuple[Any, Any]:
        """(f, g²) of dx = f x dt + g Σ^½ dw at ``time``: −½β, β for VP (eq. 24); 0, dσ²/dt for VE (eq. 92).

        Then reverse is dx = (f x − g² Σ s) dt + g Σ^½ dw̄ and the ODE dx/dt = f x − ½ g² Σ s (R6).
        """
        if not 0 < check_number("time", time) <= 1:
            raise InputError(f"time={time} must be above 0 and at most 1.")
        schedule = self.schedule
        with torch.enable_grad():
            clock = torch.tensor(float(time), dtype=torch.float64, device="cpu", requires_grad=True)
            now = -schedule.row_at(clock) if schedule.event_shape else schedule.logsnr_at(clock)
            (rate,) = torch.autograd.grad(now, clock)
        level = schedule.level_on_clock(now.item())
        slope, speed = (each * rate.item() for each in schedule.rates(level))
        return slope, -(level.sigma**2) * speed
