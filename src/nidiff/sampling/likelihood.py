"""log p(x) through the probability-flow ODE, with the log |Σ| term (R6)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nidiff.covariance.checks import check_finite
from nidiff.diffusion.denoiser import Denoiser, check_denoiser
from nidiff.diffusion.gaussian import as_bits
from nidiff.diffusion.schedule import check_forgotten
from nidiff.errors import InputError, choose, one_of
from nidiff.extras import require
from nidiff.memory import require_memory
from nidiff.precision import widest
from nidiff.randomness import Generators, white_noise
from nidiff.recipe import check_number, check_whole

# (velocity, x, probes) -> div(velocity) per image, given velocity as a function of x on the autograd tape.
Trace = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_likelihood(
    denoiser: Denoiser,
    x: Tensor,
    *,
    trace: str | Trace = "hutchinson",
    num_probes: int = 1,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    method: str = "dopri5",
    generator: Generators = None,
) -> Tensor:
    """log p(x) in nats per image, x [B, ..., *event] taken as a state at the least noisy level of the schedule.

    log p(x) = log prior(x_T) + ∫ div(flow) dℓ along the ODE from x to x_T, ℓ the log-SNR. The prior's density carries
    −½ log |Σ| per channel; the divergence is that of x̂0, in which Σ already stands. ``trace`` is "exact" (one backward
    pass per dimension) or "hutchinson" (unbiased, ``num_probes`` random signs, fixed along the path). ``method``,
    ``rtol`` and ``atol`` are torchdiffeq's, of its adaptive solvers. Where every mode has levels of its own, the solver
    stops at every row of the schedule, since the table is linear between them: at least 7 evaluations each ("dopri5").
    """
    odeint = require("torchdiffeq").odeint

    check_denoiser(denoiser)
    if not all(getattr(correction, "is_differentiable", True) for correction in denoiser.corrections):
        remedy = "use the denoiser without the observation"
        raise InputError("denoiser", None, "has an observation, for which there is no likelihood", remedy)
    divergence_of = choose("trace", trace, TRACES)
    one_of("method", method, METHODS)
    check_whole("num_probes", num_probes)
    process, schedule = denoiser.process, denoiser.process.schedule
    check_forgotten(schedule)
    process.check_batch("x", x)
    check_finite("x", x)
    check_number("rtol", rtol, above=0.0)
    check_number("atol", atol, above=0.0)
    require_memory("num_probes", num_probes, 4 * float(num_probes) * x.numel(), "use fewer")
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # an integral in half precision is off by a tenth
    denoiser.check_levels(x.dtype, range(len(schedule)))
    probes = white_noise((len(x), num_probes, *x.shape[1:]), generator, dtype=x.dtype, device=x.device).sign()
    highest, lowest = process.clock.tolist()

    def dynamics(clock: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # In float32 the clock may round to just outside the schedule, where there are no labels.
        level = process.level_on_clock(min(max(clock.item(), lowest), highest))
        with torch.enable_grad():
            at = state[0].detach().requires_grad_()
            velocity = process.flow(at, denoiser(at, level), level)
            divergence = divergence_of(velocity, at, probes)
        return velocity.detach(), divergence.detach()

    span = process.clock.to(x.device, widest(x.device))
    start = (x.detach(), torch.zeros(len(x), dtype=x.dtype, device=x.device))
    with torch.no_grad():
        # Where the rates have jumps, steps end; and at the last level, or the solver would ask for labels beyond it.
        stops = {"jump_t": process.kinks.to(span)} if len(process.kinks) else {"step_t": span[-1:]}
        try:
            path, change = odeint(
                dynamics, start, span, rtol=rtol, atol=atol, method=method, options={**stops, "dtype": span.dtype}
            )
        except AssertionError as error:  # its step became 0
            remedy = "use a larger one and a larger `atol`, or a network without NaN"
            raise InputError("rtol", rtol, f"cannot be met ({error})", remedy) from error
        return process.prior_log_prob(path[-1]) + change[-1]


def bits_per_dim(denoiser: Denoiser, x: Tensor, *, bin_width: float = 2 / 255, **options: object) -> Tensor:
    """−log₂ p per dimension of data quantised with ``bin_width`` and dequantised uniformly (8-bit images in [−1, 1]:
    2/255). ``options`` are those of `log_likelihood`."""
    check_number("bin_width", bin_width, above=0.0)
    return as_bits(log_likelihood(denoiser, x, **options), math.prod(x.shape[1:]), bin_width)  # type: ignore[arg-type]


def _exact(velocity: Tensor, x: Tensor, probes: Tensor) -> Tensor:
    size = x[0].numel()
    unit = torch.eye(size, dtype=x.dtype, device=x.device).reshape(1, size, *x.shape[1:])
    return size * _hutchinson(velocity, x, unit.expand(len(x), *unit.shape[1:]))


def _hutchinson(velocity: Tensor, x: Tensor, probes: Tensor) -> Tensor:
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for probe in probes.unbind(1):
        (gradient,) = torch.autograd.grad(velocity, x, probe, retain_graph=True)
        total += (gradient * probe).flatten(1).sum(1)
    return total / probes.shape[1]


METHODS = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
TRACES: dict[str, Trace] = {"exact": _exact, "hutchinson": _hutchinson}
