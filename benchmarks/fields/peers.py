"""Solvers of others for any denoiser of nidiff with one noise level for all modes: those of diffusers, called as they
are, and a few lines each of iPNDM, GITS, DPM-Solver-v3 and the exponential Adams–Bashforth rule of azula.

All of them see y = Σ^-½ x / signal = y0 + sigma · eps, where the noise is white, and x̂0 of a `Network` in place of y0.
A solver is written `NAME:key=value,…`, as a sampler of nidiff is; `PEERS` has the names.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch
from torch import Tensor

import nidiff
from nidiff.notation import call, parse_call
from nidiff.randomness import generators_from_seeds, white_noise

STATISTICS_SEED = 10**9  # what GITS and DPM-Solver-v3 measure is measured on noise that nothing is reported on
SPACINGS: dict[str, dict[str, Any]] = {
    **{name: {"timestep_spacing": name} for name in ("linspace", "leading", "trailing")},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True},
    "beta": {"use_beta_sigmas": True},
    "lu": {"use_lu_lambdas": True},
}


class Network:
    """A denoiser as a function of (y, sigma), and what some solvers measure of it. ``data`` are clean images, of which
    DPM-Solver-v3 needs some."""

    def __init__(self, denoiser: nidiff.Denoiser, data: Tensor | None = None) -> None:
        self.denoiser, self.data, self.calls = denoiser, data, 0
        self.table = (-0.5 * denoiser.process.schedule.logsnr).exp()  # sigma of every row, rising
        self._measured: dict[tuple[Any, ...], Any] = {}

    def __call__(self, y: Tensor, sigma: float) -> Tensor:
        """x̂0 at y, clipped as the denoiser clips it, in the coordinates of y."""
        process, self.calls = self.denoiser.process, self.calls + 1
        level = process.schedule.level_at(-2 * math.log(min(max(sigma, self.table[0].item()), self.table[-1].item())))
        if abs(level.label - round(level.label)) < 1e-3:  # sigma comes in float32
            level.label = round(level.label)
        return process.covariance.inv_sqrt(self.denoiser(process.covariance.sqrt(level.signal * y), level))

    def sigmas(self, count: int, spacing: str = "karras", top: float | None = None) -> list[float]:
        """``count`` falling levels from the noisiest, or from the sigma ``top``, to the least noisy: at equal steps of
        sigma^(1/7), of log-SNR or of the rows."""
        low, high = self.table[0].item(), min(self.table[-1].item(), top or math.inf)
        if spacing == "karras":
            return np.linspace(high ** (1 / 7), low ** (1 / 7), count).__pow__(7).tolist()
        if spacing == "logsnr":
            return np.geomspace(high, low, count).tolist()
        row = np.interp(high, self.table.numpy(), np.arange(len(self.table)))
        return np.interp(np.linspace(row, 0, count), np.arange(len(self.table)), self.table.numpy()).tolist()

    def measured(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(self, *arguments)``, computed once."""
        key = (function.__name__, *arguments)
        if key not in self._measured:
            self._measured[key] = function(self, *arguments)
        return self._measured[key]


@torch.no_grad()
def draw(network: Network, solver: str, shape: Sequence[int], num_steps: int, seeds: Sequence[int]) -> Tensor:
    """Samples of a solver in ``num_steps`` evaluations, from the noise that `nidiff.sample` begins with."""
    name, options = parse_call("solver", solver)
    generators = generators_from_seeds(seeds)
    y = call("solver", name, options, PEERS, network, white_noise(shape, generators), num_steps, generators)
    return network.denoiser.process.covariance.sqrt(y)


# Of diffusers


def _scheduler(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], kind: str, spacing: str,
    top: float | None, **config: Any,
) -> Tensor:  # fmt: skip
    """Any multistep scheduler of diffusers, given x̂0; ``top`` leaves out the rows of more noise."""
    table = network.table if top is None else network.table[network.table <= top]
    kept = torch.cat([torch.ones(1, dtype=torch.float64), 1 / (1 + table**2)])  # signal² where the variance is kept
    betas = (1 - kept[1:] / kept[:-1]).numpy()
    settings: dict[str, Any] = {**SPACINGS[spacing], **config, "trained_betas": betas, "prediction_type": "sample"}
    scheduler = getattr(diffusers, kind)(num_train_timesteps=len(table), **settings)
    scheduler.set_timesteps(count)
    scheduler.set_begin_index(0)  # else two equal timesteps, after rounding, make it skip one
    if len(scheduler.timesteps) != count:
        raise ValueError(f"{kind} takes {len(scheduler.timesteps)} steps for {count}")
    x, noise = white, {} if kind.startswith(("UniPC", "DEIS")) else {"generator": generators}
    for time, sigma in zip(scheduler.timesteps, scheduler.sigmas.tolist(), strict=False):
        x = scheduler.step(network(x * math.hypot(1, sigma), sigma), time, x, **noise).prev_sample
    return x


def dpmpp(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "trailing",
    order: int = 2, solver: str = "midpoint", noise: bool = False, top: float | None = None,
) -> Tensor:  # fmt: skip
    """DPM-Solver++ of order 2 or 3, or its SDE."""
    algorithm = "sde-dpmsolver++" if noise else "dpmsolver++"
    config = {"solver_order": order, "solver_type": solver, "algorithm_type": algorithm}
    return _scheduler(network, white, count, generators, "DPMSolverMultistepScheduler", spacing, top, **config)


def unipc(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "trailing",
    order: int = 2, solver: str = "bh2", top: float | None = None,
) -> Tensor:  # fmt: skip
    config = {"solver_order": order, "solver_type": solver}
    return _scheduler(network, white, count, generators, "UniPCMultistepScheduler", spacing, top, **config)


def deis(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "trailing",
    order: int = 2, top: float | None = None,
) -> Tensor:  # fmt: skip
    return _scheduler(network, white, count, generators, "DEISMultistepScheduler", spacing, top, solver_order=order)


def sa(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "trailing",
    order: int = 2, tau: float | None = None, top: float | None = None,
) -> Tensor:  # fmt: skip
    """SA-Solver; ``tau`` is the strength of its noise at all levels, by default 1 in the middle and 0 at both ends."""
    config: dict[str, Any] = {"predictor_order": order, "corrector_order": order}
    config |= {} if tau is None else {"tau_func": lambda time: tau}
    return _scheduler(network, white, count, generators, "SASolverScheduler", spacing, top, **config)


# Adams–Bashforth rules

EQUAL_STEPS = {1: (1.0,), 2: (3 / 2, -1 / 2), 3: (23 / 12, -16 / 12, 5 / 12), 4: (55 / 24, -59 / 24, 37 / 24, -9 / 24)}


def _ipndm(network: Network, y: Tensor, sigmas: Sequence[float], order: int) -> Tensor:
    """dy/dsigma = eps by the weights of equal steps, whatever the steps."""
    slopes: list[Tensor] = []
    for here, there in pairwise(sigmas):
        slopes = [(y - network(y, here)) / here, *slopes][:order]
        weights = EQUAL_STEPS[len(slopes)]
        y = y + (there - here) * sum(weight * slope for weight, slope in zip(weights, slopes, strict=True))
    return y


def ipndm(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "karras",
    order: int = 4, top: float | None = 80.0,
) -> Tensor:  # fmt: skip
    """iPNDM on the levels of EDM (Zhang and Chen 2022; Karras et al. 2022)."""
    sigmas = network.sigmas(count + 1, spacing, top)
    return _ipndm(network, sigmas[0] * white, sigmas, order)


def gits(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "karras",
    order: int = 4, top: float | None = 80.0, cost: str = "dev", coefficient: float = 1.15,
) -> Tensor:  # fmt: skip
    """iPNDM on levels that dynamic programming chooses from 61, by where steps of Euler leave a fine trajectory
    (Chen et al. 2024)."""
    fine, costs = network.measured(_trajectory_costs, tuple(white.shape[1:]), spacing, top, cost)
    best = np.full((count + 1, len(fine)), np.inf)  # the least cost from a level to the last one, in so many steps
    choice = np.zeros((count + 1, len(fine)), dtype=int)
    best[1] = costs[:, -1]
    for steps in range(2, count + 1):
        total = costs + coefficient * best[steps - 1]
        best[steps], choice[steps] = total.min(1), total.argmin(1)
    path = [0]
    for steps in range(count, 1, -1):
        path.append(int(choice[steps, path[-1]]))
    sigmas = [fine[index] for index in (*path, len(fine) - 1)]
    return _ipndm(network, sigmas[0] * white, sigmas, order)


def _trajectory_costs(
    network: Network,
    shape: tuple[int, ...],
    spacing: str,
    top: float | None,
    cost: str,
    fine: int = 61,
    count: int = 64,
) -> tuple[list[float], np.ndarray]:
    """The fine levels, and [i, j] how much worse than the fine trajectory a step of Euler from i to j is: its distance
    from it, or its deviation ("dev") from the straight line between both ends less that of the trajectory."""
    sigmas = network.sigmas(fine, spacing, top)
    y = sigmas[0] * white_noise((count, *shape), torch.Generator().manual_seed(STATISTICS_SEED))
    states, slopes = [y], []
    for here, there in pairwise(sigmas):
        slopes.append((states[-1] - network(states[-1], here)) / here)
        recent = slopes[: -min(len(slopes), 4) - 1 : -1]
        weights = EQUAL_STEPS[len(recent)]
        states.append(states[-1] + (there - here) * sum(w * slope for w, slope in zip(weights, recent, strict=True)))
    line = (states[-1] - states[0]).flatten(1)
    line = line / line.norm(dim=1, keepdim=True)

    def deviation(state: Tensor) -> float:
        rest = (states[-1] - state).flatten(1)
        return (rest - (rest * line).sum(1, keepdim=True) * line).norm(dim=1).mean().item()

    costs = np.full((fine, fine), np.inf)
    of_fine = [deviation(state) for state in states]
    for i in range(fine - 1):
        for j in range(i + 1, fine):
            guess = states[i] + (sigmas[j] - sigmas[i]) * slopes[i]
            distance = (guess - states[j]).flatten(1).norm(dim=1).mean().item()
            costs[i, j] = deviation(guess) - of_fine[j] if cost == "dev" else distance
    return sigmas, costs


def reab(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "logsnr",
    order: int = 2, top: float | None = None,
) -> Tensor:  # fmt: skip
    """azula's REABSampler: dx = v dθ, θ = arctan(1/sigma), v interpolated in u = −log sigma: weights ∫ L_j(u) dθ."""
    sigmas = network.sigmas(count + 1, spacing, top)
    x, past = white, []
    for here, there in pairwise(sigmas):
        x0 = network(x * math.hypot(1, here), here)
        v = (x0 * math.hypot(1, here) - x) / here  # cos θ · x̂0 − sin θ · eps
        past = [(-math.log(here), v), *past][:order]
        fine = np.linspace(-math.log(here), -math.log(there), 201)
        angle = np.arctan(np.exp(fine))
        for j, (time, slope) in enumerate(past):
            others = [other for i, (other, _) in enumerate(past) if i != j]
            basis = np.prod([(fine - other) / (time - other) for other in others], axis=0) * np.ones_like(fine)
            x = x + float(np.trapezoid(basis, angle)) * slope
    return x * math.hypot(1, sigmas[-1])


# DPM-Solver-v3 (Zheng et al. 2023)


class Statistics(NamedTuple):
    """l, s and b on a grid of λ = −log sigma, rising, and their integrals; one number per pixel, or for all."""

    times: Tensor  # [n]
    linear: Tensor  # l [n, *item]
    S: Tensor  # ∫ s
    L: Tensor  # ∫ l
    B: Tensor  # ∫ e^−S b

    def index(self, sigma: float) -> int:
        """Of the nearest time."""
        return int((self.times + math.log(sigma)).abs().argmin())


def _integral(values: Tensor, times: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(values[:1]), torch.cumulative_trapezoid(values, times, dim=0)])


class _Measured(NamedTuple):
    """At levels uniform in λ = −log sigma, for noisy images: the diagonal of sigma ∂eps/∂y, y, sigma · eps = y − x̂0,
    and the rate of the latter in λ along the trajectory; [n, B, *item] each but the first."""

    times: Tensor
    diagonal: Tensor  # [n, *item]
    y: Tensor
    gap: Tensor
    rate: Tensor


def _measured(network: Network, grid: int = 25, count: int = 64, step: float = 0.02) -> _Measured:
    if network.data is None:
        raise ValueError("DPM-Solver-v3 needs data")
    data = network.denoiser.process.covariance.inv_sqrt(network.data[:count])
    source = torch.Generator().manual_seed(STATISTICS_SEED)
    times = -torch.tensor(network.sigmas(grid, "logsnr", 80.0), dtype=torch.float64).log()
    rows = []
    for time in times.tolist():
        sigma = math.exp(-time)
        y = data + sigma * white_noise(data.shape, source)
        sign = white_noise(data.shape, source).sign()
        with torch.enable_grad():
            inside = y.clone().requires_grad_()
            x0 = network(inside, sigma)
            (product,) = torch.autograd.grad((x0 * sign).sum(), inside)  # E of sign · Jᵀ sign is the diagonal of J
        gap, ends = y - x0.detach(), []
        for factor in (math.exp(-step), math.exp(step)):
            moved = y + gap * (factor - 1)
            ends.append(moved - network(moved, sigma * factor))
        rows.append(((1 - product * sign).mean(0), y, gap, (ends[0] - ends[1]) / (2 * step)))
    return _Measured(times, *map(torch.stack, zip(*rows, strict=True)))


def _statistics(network: Network, pooled: bool, plain: bool, fine: int = 961) -> Statistics:
    """l = E diag(sigma ∂eps/∂y); s and b by regression of df/dλ on f = sigma · eps − l y."""
    times, diagonal, y, gap, rate = network.measured(_measured)
    axes = [*range(1, y.ndim)] if pooled else [1]  # over which is averaged
    linear = diagonal.unsqueeze(1).double().mean(axes, keepdim=True)
    change = torch.gradient(linear, spacing=(times,), dim=0)[0]
    f, rate = gap - linear * y, rate - change * y + linear * gap  # dy/dλ = −gap
    mean, mean_rate = f.mean(axes, keepdim=True), rate.mean(axes, keepdim=True)
    variance = f.square().mean(axes, keepdim=True) - mean**2
    s = ((f * rate).mean(axes, keepdim=True) - mean * mean_rate) / variance.clamp(min=1e-12)
    b = mean_rate - s * mean
    dense = torch.linspace(times[0].item(), times[-1].item(), fine, dtype=torch.float64)
    place = torch.linspace(0, len(times) - 1, fine, dtype=torch.float64)
    low = place.floor().clamp(max=len(times) - 2).long()
    share = (place - low).reshape(-1, *[1] * (y.ndim - 2))
    tables = (linear[:, 0], (not plain) * s[:, 0], (not plain) * b[:, 0])
    linear, s, b = ((1 - share) * table[low] + share * table[low + 1] for table in tables)
    S = _integral(s, dense)
    return Statistics(dense, linear, S, _integral(linear, dense), _integral((-S).exp() * b, dense))


def v3(
    network: Network, white: Tensor, count: int, generators: list[torch.Generator], spacing: str = "logsnr",
    order: int = 2, corrector: bool = False, pooled: bool = False, plain: bool = False, top: float = 80.0,
) -> Tensor:  # fmt: skip
    """DPM-Solver-v3: with A = e^−∫l and g = e^−∫s f − ∫ e^−∫s b, y' = A (y − ∫ e^∫(l+s) (g + ∫ e^−∫s b) dλ), g a
    polynomial in λ through the last evaluations. ``corrector``: each step again when its end is known, at no cost.
    ``pooled``: one l, s and b for all pixels. ``plain``: s = b = 0."""
    table = network.measured(_statistics, pooled, plain)
    sigmas = network.sigmas(count + 1, spacing, top)
    indices = [table.index(sigma) for sigma in sigmas]
    sigmas = [math.exp(-table.times[index].item()) for index in indices]
    past: list[tuple[int, Tensor]] = []  # (index, f), the newest first

    def advance(y: Tensor, points: list[tuple[int, Tensor]], start: int, end: int) -> Tensor:
        S, L, B, times = table.S, table.L, table.B, table.times
        span = slice(start, end + 1)
        weight = (L[span] - L[start] + S[span] - S[start]).exp()
        known = (B[span] - B[start]) * S[start].exp()
        clock = times[span].reshape(-1, *[1] * (weight.ndim - 1))
        change = torch.trapezoid(weight * known, times[span], dim=0).to(y)
        for i, (index, f) in enumerate(points):
            g = (S[start] - S[index]).exp().to(y) * f - ((B[index] - B[start]) * S[start].exp()).to(y)
            others = [times[other] for k, (other, _) in enumerate(points) if k != i]
            basis = torch.ones_like(clock)
            for other in others:
                basis = basis * (clock - other) / (times[index] - other)
            change = change + torch.trapezoid(weight * basis, times[span], dim=0).to(y) * g
        return (L[start] - L[end]).exp().to(y) * (y - change)

    y, before = sigmas[0] * white, None
    for step, (here, there) in enumerate(pairwise(indices)):
        f = (y - network(y, sigmas[step])) - table.linear[here].to(y) * y
        if corrector and before is not None and order > 1:
            y = advance(before, [(here, f), *past][:order], indices[step - 1], here)
        past = [(here, f), *past][: order + 1]
        before = y
        last = min(order, count - step)  # a lower order at the end
        y = advance(y, past[:last], here, there)
    return y


PEERS: dict[str, Callable[..., Tensor]] = {
    "dpmpp": dpmpp,
    "unipc": unipc,
    "deis": deis,
    "sa": sa,
    "ipndm": ipndm,
    "gits": gits,
    "reab": reab,
    "v3": v3,
}
