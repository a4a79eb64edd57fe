"""Each check returns a `Findings`: print it, and assert ``report.passed``."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nidiff.aligned import aligned
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity
from nidiff.covariance.fields import gaussian_free_field
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import as_schedule
from nidiff.diffusion.target import Target, target_on_its_own
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_number
from nidiff.sampling.sampler import sample
from nidiff.testing.problems import AnySampler, Gaussian, normal, output_law, slope, uniform_in_logsnr, whitened_paths

LARGEST = 4096  # entries of an event: its dense matrix is 128 MiB
KEEPS = {"variance": "VP", "signal": "VE"}
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "variance": lambda signal, sigma: signal.square() + sigma.square(),
    "signal": lambda signal, sigma: signal,
    "sum": lambda signal, sigma: signal + sigma,
}
SIGMA = gaussian_free_field((2, 3), gamma=1.5)  # what samplers are tried with


class Check(NamedTuple):
    """One statement: how far it is from true, and how far it may be."""

    statement: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


class Findings(NamedTuple):
    """What was checked of ``subject``."""

    subject: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        rows = [("ok" if c.passed else "FAILED", c.statement, f"{c.error:.2g}", f"{c.limit:.2g}") for c in self.checks]
        return f"{self.subject}\n{aligned([('', 'statement', 'error', 'limit'), *rows])}"


def check_covariance(covariance: Covariance, tolerance: float = 1e-9) -> Findings:
    """Whether everything the covariance computes is what its dense matrix says, in float64."""
    check_number("tolerance", tolerance)
    if covariance.size > LARGEST:
        raise InputError("covariance", None, f"has {covariance.size} entries", f"check one of at most {LARGEST}")
    matrix, size = covariance.dense(), covariance.size
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values = values.clamp(min=0)
    x = normal(3, 2, *covariance.event_shape)
    flat, probe = x.reshape(6, size), x[0, 0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((covariance.sqrt(probe) * x[1, 0]).sum(), probe)
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *covariance.event_shape)
    response, basis = covariance.colour(unit.clone()).reshape(size, size), covariance.basis
    analysed = basis.analyse(unit).reshape(size, size)
    pairs = {
        "the basis is inverted: synthesise(analyse(x)) = x": (basis.synthesise(basis.analyse(x)), x),
        "the basis is orthonormal": (analysed @ analysed.T, torch.eye(size, dtype=torch.float64)),
        "Σ is symmetric": (matrix, matrix.T),
        "Σ has the eigenvalues": (values, covariance.eigenvalues.flatten().sort().values),
        "its diagonal is marginal_variance": (matrix.diagonal(), covariance.marginal_variance.flatten()),
        "the gradient of sqrt is sqrt": (gradient, covariance.sqrt(x[1, 0])),
        "samples have covariance Σ, exactly": (response.T @ response, matrix),
    }
    for power in (0.5, 2.0) if covariance.is_singular else (0.5, 2.0, -0.5, -1.0):
        expected = flat @ (vectors * values**power) @ vectors.T
        pairs[f"power(x, {power}) is that of the matrix"] = (covariance.power(x, power).reshape(6, size), expected)
    if not covariance.is_singular:
        density = -0.5 * ((flat @ vectors).square() / values + (2 * math.pi * values).log()).sum(1)
        pairs["log_prob is that of the matrix"] = (covariance.log_prob(x), density.reshape(3, 2).sum(1))
    checks = [Check(statement, _difference(*pair), tolerance) for statement, pair in pairs.items()]
    single = covariance.sqrt(x.float())
    agrees = _difference(single.double(), covariance.sqrt(x)) if single.dtype == torch.float32 else math.inf
    checks.append(Check("float32 is kept and agrees", agrees, 1e-4))
    checks.append(
        _rebuilt(lambda: Covariance.from_config(covariance.to_config(), covariance.tensors()).dense(), matrix)
    )
    return Findings(repr(covariance), checks)


def check_schedule(schedule: Schedule, tolerance: float = 1e-9) -> Findings:
    """Whether the table goes from little to much noise, keeps what it says, and can be asked in each of its ways."""
    check_number("tolerance", tolerance)
    rows, logsnr = torch.linspace(0, len(schedule) - 1, 7, dtype=torch.float64), schedule.logsnr
    pairs = {
        "log-SNR is log(signal² / sigma²)": (2 * (schedule.signal / schedule.sigma).log(), logsnr),
        "logsnr_at is the table at its times": (schedule.logsnr_at(schedule.time), logsnr),
    }
    if not schedule.has_own_signal:
        kept = KEPT[schedule.keeps](schedule.signal, schedule.sigma)
        pairs[f"{schedule.keeps} is kept at 1"] = (kept, torch.ones_like(kept))
    if schedule.event_shape:
        between: Any = schedule.in_basis_of(Identity(schedule.event_shape)).level(rows)
        found = 2 * (between.signal.values / between.sigma.values).log()
        below = rows.long().clamp(max=max(len(schedule) - 2, 0))
        above, weight = (below + 1).clamp(max=len(schedule) - 1), (rows - below).reshape(-1, *[1] * (logsnr.ndim - 1))
        pairs["between rows every mode has the log-SNR between"] = (
            found, logsnr[below] + weight * (logsnr[above] - logsnr[below])
        )  # fmt: skip
        pairs["no mode gains signal with the rows"] = (logsnr.diff(dim=0).clamp(min=0), torch.zeros_like(logsnr[1:]))
    else:
        between = schedule.level(rows)
        found = torch.as_tensor(schedule.level_at(2 * (between.signal / between.sigma).values.log()).label)
        pairs["level_at finds the rows between rows"] = (found, rows)
        noise = schedule.sigma / schedule.signal if schedule.has_own_signal else schedule.sigma
        pairs["noise rises from row to row"] = (noise.diff().sign(), torch.ones_like(logsnr[1:]))
    checks = [Check(statement, _difference(*pair), tolerance) for statement, pair in pairs.items()]
    checks += [_rebuilt(partial(_table_of, schedule, name), getattr(schedule, name)) for name in ("logsnr", "signal")]
    return Findings(repr(schedule), checks)


def check_target(target: str | Target, tolerance: float = 1e-8) -> Findings:
    """Whether an output that is right becomes the clean image again, at another level for each image."""
    chosen: Target = target_on_its_own(target) if isinstance(target, str) else target
    checks = []
    check_number("tolerance", tolerance)
    x0, eps = normal(3, 2, *SIGMA.event_shape), normal(3, 2, *SIGMA.event_shape, seed=1)
    for keeps, name in KEEPS.items():
        process = Process(uniform_in_logsnr(40, keeps, -6.0, 6.0), SIGMA)
        level = process.schedule.level(torch.tensor([1, 20, 38]))
        x, output = process.perturb(x0, level, eps), chosen.encode(x0, eps, level, SIGMA)
        decoded = chosen.decode(output, x, level, SIGMA)
        checks.append(Check(f"{name}: decode inverts encode", _difference(decoded, x0), tolerance))
    return Findings(f"target {target if isinstance(target, str) else chosen}", checks)


def check_sampler(
    sampler: AnySampler,
    *,
    order: float | None = None,
    keeps: str | tuple[str, ...] = ("variance", "signal"),
    **options: Any,
) -> Findings:
    """Whether a sampler is right under a coloured Σ, on data whose exact denoiser is known.

    In whitened coordinates it must be the isotropic algorithm, path by path; on Gaussian data whose covariance does not
    commute with Σ, the exact mean and covariance of its output must go to those of the data; and it must converge with
    ``order`` (only for samplers that draw no noise). ``keeps`` names the kinds of process it is for: "variance" (VP),
    "signal" (VE). ``options`` are the sampler's own.
    """
    checks = []
    for kind in (keeps,) if isinstance(keeps, str) else keeps:
        name = KEEPS[one_of("keeps", kind, KEEPS)]
        with torch.random.fork_rng(devices=[]):
            paths = whitened_paths(SIGMA, uniform_in_logsnr(40, kind, -6.0, 6.0), sampler, options)
        (coarse, _), (fine, mean) = (_law_errors(sampler, options, kind, levels) for levels in (40, 160))
        checks += [
            Check(f"{name}: in whitened coordinates it is the isotropic algorithm",
                  max(_difference(white, y) for white, y in paths), 1e-9),
            Check(f"{name}: the covariance of Gaussian data is reached with 160 steps", fine, 0.09),
            Check(f"{name}: and comes nearer from 40 to 160", fine if fine > 1e-3 else 0.0, 0.45 * coarse),
            Check(f"{name}: the mean of Gaussian data is reached", mean, 0.05),
        ]  # fmt: skip
        if order is not None:
            found = _order(sampler, options, kind)
            words = f"{name}: the order of convergence is {order:g} (measured: {found:.2f})"
            checks.append(Check(words, abs(found - order), 0.3))
    return Findings(f"sampler {getattr(sampler, '__name__', sampler)}", checks)


def _law_errors(sampler: AnySampler, options: dict[str, Any], keeps: str, num_levels: int) -> tuple[float, float]:
    """The relative errors of the covariance and of the mean, at the least noisy level."""
    problem, process = Gaussian(SIGMA), Process(uniform_in_logsnr(num_levels, keeps), SIGMA)
    mean, covariance = problem.marginal(process.schedule.level(0))
    found_mean, found = output_law(problem.denoiser(process), sampler, options, denoise=False)
    return ((found - covariance).norm() / covariance.norm()).item(), ((found_mean - mean).norm() / mean.norm()).item()


def _order(sampler: AnySampler, options: dict[str, Any], keeps: str) -> float:
    """The order at which the sampler approaches the exact flow of Gaussian data."""
    problem, counts, errors = Gaussian(SIGMA), [40, 80, 160, 320], []
    for count in counts:
        schedule = uniform_in_logsnr(count, keeps, -6.0, 6.0)
        start = schedule.level(count - 1)
        initial = start.sigma * normal(4, *SIGMA.event_shape)
        given: dict[str, Any] = {"num_steps": count, "start": initial, "dtype": torch.float64, **options}
        x = sample(problem.denoiser(Process(schedule, SIGMA)), initial.shape, sampler=sampler, denoise=False, **given)
        errors.append((x - problem.flow(initial, start, schedule.level(0))).abs().max().item())
    return slope(counts, errors)


def _table_of(schedule: Schedule, name: str) -> Tensor:
    """The table ``name`` of the schedule that is rebuilt from its configuration."""
    table: Tensor = getattr(as_schedule(schedule.to_config()), name)
    return table


def _rebuilt(rebuild: Any, expected: Tensor) -> Check:
    try:
        return Check("it is rebuilt from its configuration", _difference(rebuild(), expected), 1e-9)
    except InputError as error:
        return Check(f"it is rebuilt from its configuration: {error}", math.inf, 1e-9)


def _difference(found: Any, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry where that is above 1."""
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    if expected.numel() == 0:
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
