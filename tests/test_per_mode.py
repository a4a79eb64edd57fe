"""Coefficients per mode: a table that is the same for all modes is the scalar schedule; one that is not is right."""

import json
import math
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from problems import SAMPLER_CASES, Mixture, refused
from torch import Tensor
from torchdiffeq import odeint

import nidiff
from nidiff.covariance.modes import Modes
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import as_schedule, schedule_facts
from nidiff.diffusion.target import TARGETS
from nidiff.interop import NonIsotropicScheduler, Whitened
from nidiff.sampling.ancestral import jump_variances, mix
from nidiff.testing.problems import Gaussian, as_matrix, normal, output_covariance, slope, smooth_net, uniform_in_logsnr

COV = nidiff.gaussian_free_field((2, 3), gamma=1.5)
MODEL = nidiff.GaussianModel(0.3 * normal(2, 3, seed=7), nidiff.matern((2, 3), 1.0))  # of data, roughly
EVERY: list[tuple[str, dict[str, Any]]] = [*SAMPLER_CASES, ("angle", {}), ("angle_2m", {}), ("gaussian_2m", {})]
every_sampler = pytest.mark.parametrize(("name", "options"), EVERY)
SCALAR = {
    "vp": lambda: nidiff.schedules.ddpm_linear(40, 1e-3, 0.3),
    "ve": lambda: nidiff.schedules.smld_geometric(40, 10.0, 0.05),
    "flow": lambda: nidiff.schedules.flow(40),
}
ORDERS = {
    "euler": 1,
    "ddim": 1,
    "angle": 1,
    "heun": 2,
    "dpmpp_2m": 2,
    "angle_2m": 2,
    "gaussian_2m:eta=0": 2,
    "ipndm": 2,
}


def repeated(schedule: Schedule, shape: tuple[int, ...] = (2, 3)) -> Schedule:
    """The same column for every mode."""
    return Schedule(schedule.logsnr.reshape(-1, *[1] * len(shape)).expand(-1, *shape), schedule.keeps)


def spread(num_levels: int, own_signal: bool = False, lowest: float = -7.0) -> Schedule:
    """Straight lines in log-SNR, from another height to another depth for every mode: exact between rows."""
    steps = torch.linspace(0, 1, num_levels, dtype=torch.float64).reshape(-1, 1, 1)
    even = torch.fft.fftn(normal(2, 3, seed=4)).abs()  # λ(k) = λ(−k), as a real matrix needs
    high, low = 4 + even / even.max(), lowest + 2 * even.flip(0) / even.max()
    logsnr = high + steps * (low - high)
    signal = torch.exp(-(0.5 + even / even.max()) * steps) if own_signal else None
    return Schedule(logsnr, signal=signal)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()))


# A constant table is the scalar schedule -------------------------------------------------------------------------


def path(schedule: Schedule, name: str, options: dict[str, Any], target: str = "v", cov=COV) -> list[Tensor]:
    denoiser = nidiff.Denoiser(smooth_net(cov.event_shape), nidiff.Process(schedule, cov), target, gaussian=MODEL)
    states: list[Tensor] = []
    given = {"generator": [5, 6, 7], "num_steps": 12, "dtype": torch.float64, **options}
    last = nidiff.sample(
        denoiser, (3, *cov.event_shape), sampler=name, callback=lambda visit: states.append(visit.x), **given
    )
    return [*states, last]


@every_sampler
def test_a_constant_table_gives_the_same_path(name, options):
    for kind, make in SCALAR.items():
        schedule = make()
        scalar, modes = path(schedule, name, options), path(repeated(schedule), name, options)
        assert all(close(a, b, 1e-12) for a, b in zip(modes, scalar, strict=True))
        if kind == "vp":
            table = repeated(schedule).logsnr.clone()
            table[:, 0, 0] += 1e-6  # negative control
            assert not close(path(Schedule(table), name, options)[-1], scalar[-1], 1e-9)


def loss(schedule: Schedule, target: str, weighting: str | float) -> Tensor:
    denoiser = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(schedule, COV), target, gaussian=MODEL)
    generator = torch.Generator().manual_seed(3)
    return nidiff.denoising_loss(denoiser, normal(8, 2, 2, 3)[:, 0], generator=generator, weighting=weighting)


@pytest.mark.parametrize("target", TARGETS)
def test_a_constant_table_gives_the_same_path_and_loss_for_every_target(target):
    schedule = nidiff.schedules.ddpm_linear(40, 1e-3, 0.1)
    scalar, modes = path(schedule, "dpmpp_2m", {}, target), path(repeated(schedule), "dpmpp_2m", {}, target)
    assert all(close(a, b, 1e-12) for a, b in zip(modes, scalar, strict=True))
    schedule = SCALAR["vp"]()
    for weighting in (*WEIGHTINGS, 0.3):
        both = (loss(each, target, weighting) for each in (repeated(schedule), schedule))
        assert torch.allclose(*both, rtol=1e-11, atol=1e-12)


def test_a_constant_table_gives_the_same_likelihood():
    """The clock is the row in place of log-SNR, so that the solver takes other steps."""
    problem, x = Gaussian(COV), normal(2, 2, 3)
    for keeps in ("variance", "signal", "sum"):
        schedule = uniform_in_logsnr(9, keeps, -6.0, 5.0)
        scalar, modes = (
            nidiff.log_likelihood(problem.denoiser(nidiff.Process(each, COV)), x, trace="exact", rtol=1e-5, atol=1e-5)
            for each in (schedule, repeated(schedule))
        )
        assert torch.allclose(scalar, modes, atol=1e-3)


# Gauge -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [case for case in EVERY if case[0] != "euler_maruyama" and "variance" not in case[1]]
)
def test_only_log_snr_matters_up_to_the_scaling(name, options):
    """Equal ℓ_k(t), other signals: x/signal is the same on the way, and the images are the same, noise included."""
    kept, own = spread(20).in_basis_of(COV), spread(20, own_signal=True).in_basis_of(COV)
    assert not torch.allclose(kept.signal, own.signal, rtol=0.1)
    problem, start = Mixture(COV), normal(3, 2, 3)
    ends = []
    for schedule in (kept, own):
        denoiser = problem.denoiser(nidiff.Process(schedule, COV), gaussian=MODEL)
        given = {"num_steps": 20, "generator": [1, 2, 3], "dtype": torch.float64, "sampler": name, **options}
        initial = schedule.level(19).signal * start
        state = nidiff.sample(denoiser, (3, 2, 3), start=initial, denoise=False, **given)
        image = nidiff.sample(denoiser, (3, 2, 3), start=initial, **given)
        ends.append((state / schedule.level(0).signal, image, state))
    assert close(ends[0][0], ends[1][0], 1e-9)
    assert close(ends[0][1], ends[1][1], 1e-9)
    denoiser = problem.denoiser(nidiff.Process(own, COV), gaussian=MODEL)
    unscaled = nidiff.sample(denoiser, (3, 2, 3), start=kept.level(19).signal * start, **given)
    assert not close(unscaled, ends[1][1], 1e-6)  # negative control: the start has to be scaled, too


# Laws and orders -------------------------------------------------------------------------------------------------


@every_sampler
def test_the_law_of_gaussian_data_is_reached_mode_by_mode(name, options):
    """Data covariance not commuting with Σ: the exact covariance of the output goes to A C Aᵀ + B Σ Bᵀ, where A and B
    are the signal and the sigma per mode as matrices."""
    problem = Gaussian(COV, mean_scale=0.0)
    model = nidiff.GaussianModel(torch.zeros(2, 3), MODEL.covariance)
    problem.denoiser = partial(problem.denoiser, gaussian=model)

    def error(num_levels: int, white: bool = False) -> float:
        schedule = spread(num_levels, lowest=-12.0)
        _, target = problem.marginal(schedule.in_basis_of(COV).level(0))
        return ((output_covariance(problem, schedule, name, options, white) - target).norm() / target.norm()).item()

    coarse, fine = error(20), error(60)
    assert fine < 0.13
    assert fine < 0.5 * coarse or fine < 1e-3
    assert error(20, white=True) > 0.15  # negative control: white noise


@pytest.mark.parametrize("fresh", ["ancestral", 0.0, 0.5, 1.0, "own"])
def test_one_step_keeps_the_marginal_of_a_single_image_exactly(fresh):
    """From N(A x0, B Σ Bᵀ) to that of the next level: the posterior, DDIM(η), and any amount of churn per mode."""
    schedule = spread(20, own_signal=True).in_basis_of(COV)
    here, there, size = schedule.level(12), schedule.level(7), COV.size
    posterior = jump_variances(here, there)[1].root()
    own = Modes(torch.linspace(0, 0.9, 6, dtype=torch.float64).reshape(2, 3), COV.basis) * there.sigma
    own = Modes((own.values + own.values.flip(1).roll(1, 1)) / 2 * 0.9, COV.basis)
    added = own if fresh == "own" else posterior * (1.0 if fresh == "ancestral" else fresh)
    x0, state = normal(1, 2, 3), normal(6, 2, 3)

    def step(x: Tensor) -> Tensor:
        return mix(x, x0.expand_as(x), here, there, added)

    offset = step(torch.zeros_like(state[:1])).reshape(size)
    unit = torch.eye(size, dtype=torch.float64).reshape(size, 2, 3)
    linear = (step(unit).reshape(size, size) - offset).T
    mean = linear @ as_matrix(here.signal, size) @ x0.reshape(size) + offset
    noise, sigma = as_matrix(added, size), as_matrix(here.sigma, size)
    found = linear @ sigma @ COV.dense() @ sigma.T @ linear.T + noise @ COV.dense() @ noise.T
    right = as_matrix(there.sigma, size) @ COV.dense() @ as_matrix(there.sigma, size).T
    assert torch.allclose(mean, as_matrix(there.signal, size) @ x0.reshape(size), atol=1e-12)
    assert torch.allclose(found, right, atol=1e-12)
    if fresh != 0.0:
        assert not torch.allclose(found + noise @ COV.dense() @ noise.T, right, atol=1e-4)  # noise added on top


def test_ancestral_steps_with_beta_are_exact_where_the_data_are_like_the_noise():
    """x0 ~ N(0, Σ) and signal² + sigma² = 1: x has covariance Σ at every level, exactly, in steps of any size (E17)."""
    problem, schedule = Gaussian(COV, mean_scale=0.0), spread(12)
    problem.matrix = problem.noise_matrix
    exact, other = (
        output_covariance(problem, schedule, "ancestral", {"variance": each}) for each in ("beta", "posterior")
    )
    assert torch.allclose(exact, problem.noise_matrix, atol=1e-12)
    assert not torch.allclose(other, problem.noise_matrix, atol=1e-3)  # β̃ is that of a single image


START = spread(2).in_basis_of(COV).level(1).sigma * normal(4, 2, 3)


@lru_cache
def exact_path() -> Tensor:
    """The probability-flow ODE of straight lines in log-SNR, by an adaptive solver: two rows hold all of it."""
    process, problem = nidiff.Process(spread(2), COV), Mixture(COV)

    def velocity(clock: Tensor, x: Tensor) -> Tensor:
        level = process.level_on_clock(min(max(clock.item(), -1.0), 0.0))
        return process.flow(x, problem.denoise(x, level), level)

    return odeint(velocity, START, torch.tensor([-1.0, 0.0], dtype=torch.float64), rtol=1e-9, atol=1e-9)[-1]


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_order_of_convergence_per_mode(name, order):
    """On a mixture of data that do not commute with Σ; each method has its order and not a higher one."""
    problem = Mixture(COV)
    steps, errors, exact = [50, 100], [], exact_path()
    for count in steps:
        denoiser = problem.denoiser(nidiff.Process(spread(count), COV), gaussian=MODEL)
        x = nidiff.sample(
            denoiser, (4, 2, 3), sampler=name, num_steps=count, start=START, denoise=False, dtype=torch.float64
        )
        errors.append(COV.basis.analyse(x - exact).abs().amax(0).flatten())
    for mode in range(errors[0].numel()):
        assert slope(steps, [error[mode].item() for error in errors]) == pytest.approx(order, abs=0.3)


def test_the_density_of_a_gaussian_per_mode_is_exact():
    """Non-commuting data; far enough up that the prior is exact to below the tolerance."""
    schedule = spread(2, own_signal=True)
    deep = torch.cat([schedule.logsnr, schedule.logsnr[-1:] - 30])
    signal = torch.cat([schedule.signal, schedule.signal[-1:] * math.exp(-5)])
    schedule = Schedule(deep, signal=signal).in_basis_of(COV)
    problem = Gaussian(COV)
    x = (problem.mean + normal(3, 6)).reshape(3, 2, 3)
    denoiser = problem.denoiser(nidiff.Process(schedule, COV))
    found = nidiff.log_likelihood(denoiser, x, trace="exact", rtol=1e-6, atol=1e-6)
    assert (found - problem.log_prob(x, schedule.level(0))).abs().max() < 3e-3
    scalar = Schedule(deep.flatten(1).mean(1)).level(0)
    assert (found - problem.log_prob(x, scalar)).abs().max() > 1e-2  # negative control: the mean over the modes


# The family ------------------------------------------------------------------------------------------------------


def test_heat_is_the_published_formula():
    """Rissanen et al.: exp(−((πi/H)² + (πj/W)²) σ_B²/2) times DCT coefficient (i, j), noise 0.01, σ_B 0, 0.5 … 24."""
    schedule = nidiff.schedules.heat((32, 16))
    assert len(schedule) == 201
    blur = [0.0, *np.exp(np.linspace(np.log(0.5), np.log(24.0), 200))]
    for row, i, j in ((0, 3, 5), (1, 31, 15), (60, 2, 3), (120, 1, 0), (200, 0, 0), (200, 1, 1), (100, 0, 7)):
        expected = math.exp(-((math.pi * i / 32) ** 2 + (math.pi * j / 16) ** 2) * blur[row] ** 2 / 2)
        assert schedule.signal[row, i, j].item() == pytest.approx(expected, rel=1e-9, abs=1e-14)
        assert schedule.sigma[row, i, j].item() == pytest.approx(0.01, rel=1e-9)
    assert schedule.signal[200, 31, 15] < 1e-14  # e^-5000, which no number can hold
    process = nidiff.Process("heat:num_levels=50", nidiff.Identity((8, 8)))
    assert set(process.schedule.basis.boundary) == {"reflecting"}  # white noise, the paper's cosines
    periodic = nidiff.Process("heat:num_levels=50", nidiff.gaussian_free_field((8, 8))).schedule
    assert periodic.logsnr[30, 0, 1] == periodic.logsnr[30, 0, -1] != process.schedule.logsnr[30, 0, 1]


def test_blurring_is_the_published_formula():
    """Hoogeboom and Salimans, appendix: a(t) d_k(t) and σ(t)."""
    schedule = nidiff.schedules.blurring((8, 12), num_levels=200)
    low, high = math.atan(math.exp(-5.0)), math.atan(math.exp(5.0))
    for row, i, j in ((0, 7, 11), (40, 0, 0), (40, 2, 3), (120, 1, 0), (199, 7, 11), (199, 0, 0)):
        t = (row + 1) / 200
        logsnr = -2 * math.log(math.tan(low + t * (high - low)))
        dissipated = (20 * math.sin(t * math.pi / 2) ** 2) ** 2 / 2
        labda = (math.pi * i / 8) ** 2 + (math.pi * j / 12) ** 2
        scale = math.exp(-labda * dissipated) * (1 - 1e-3) + 1e-3
        assert schedule.signal[row, i, j].item() == pytest.approx(scale / math.sqrt(1 + math.exp(-logsnr)), rel=1e-9)
        assert schedule.sigma[row, i, j].item() == pytest.approx(1 / math.sqrt(1 + math.exp(logsnr)), rel=1e-9)


def test_equal_snr_gives_every_mode_the_same_snr_and_white_noise_its_mean():
    """Σ = C with the fair ᾱ, and Σ = C scaled to mean 1 with the ᾱ of the base: the same, and fair."""
    spectrum = nidiff.matern((6, 7), 2.0) * 0.3
    plain = nidiff.schedules.ddpm_linear(50)
    white = plain.logsnr.exp() * spectrum.eigenvalues.mean()  # the mean over modes of signal² C_k / sigma²
    for cov in (spectrum, spectrum.normalized()):
        schedule = nidiff.Process("equal_snr:num_levels=50", cov).schedule
        snr = schedule.logsnr.exp()[:, None] * (spectrum.eigenvalues / cov.eigenvalues).flatten()
        assert torch.allclose(snr, white[:, None].expand_as(snr), rtol=1e-9)
    signal2, mean = plain.signal.square(), spectrum.eigenvalues.mean()
    fair = signal2 * mean / (1 - signal2 + signal2 * mean)
    found = nidiff.schedules.equal_snr(mean.item(), 50)
    assert torch.allclose(found.signal.square(), fair, rtol=1e-9)
    assert torch.allclose(found.logsnr, plain.shifted(math.log(mean)).logsnr, rtol=1e-12)
    unfair = plain.logsnr.exp() * (spectrum.eigenvalues / spectrum.eigenvalues).mean()
    assert not torch.allclose(unfair, white, rtol=0.5)  # negative control: Σ = C with the ᾱ of the base


@pytest.mark.parametrize("white", [True, False])
def test_designed_per_mode_makes_the_ode_of_gaussian_data_even(white):
    """Var x_k = λ_k (C_k/λ_k)^t, so x_k' = ½ log(C_k/λ_k) x_k, t from noise to data."""
    cov = nidiff.Identity((6, 4)) if white else nidiff.matern((6, 4), 0.5)
    model = nidiff.GaussianModel(torch.zeros(6, 4), nidiff.power_law((6, 4), 4.0) * 0.2)
    process = nidiff.Process(as_schedule("designed:per_mode=true,num_levels=20", schedule_facts(cov, model)), cov)
    schedule, noise = process.schedule, cov.eigenvalues
    for row in (0, 7, 13):
        t = 1 - (row + 1) / 20
        variance = schedule.signal[row] ** 2 * model.covariance.eigenvalues + schedule.sigma[row] ** 2 * noise
        assert torch.allclose(variance, noise * (model.covariance.eigenvalues / noise) ** t, rtol=1e-9)
    wiener = model.at(level := schedule.level(10), cov)
    slope, speed = process.rates(schedule.level(10.0))
    rate = (slope - 0.5 * speed) + 0.5 * speed * level.signal * wiener.gain  # x' = rate · x by −row, between rows
    even = 0.5 * (model.covariance.eigenvalues / noise).log() / 20
    assert torch.allclose(rate.values, even, atol=2e-2)
    linear = nidiff.schedules.ddpm_linear(20).in_basis_of(cov)
    other = linear.signal[10] ** 2 * model.covariance.eigenvalues + linear.sigma[10] ** 2 * noise
    assert not torch.allclose(other, noise * (model.covariance.eigenvalues / noise) ** 0.45, rtol=0.1)


def test_one_designed_schedule_is_that_of_the_finest_mode():
    ratio = nidiff.power_law((8, 8), 3.0).eigenvalues
    one, each = nidiff.schedules.designed(ratio, num_levels=30), nidiff.schedules.designed(ratio, True, 30)
    finest = ratio.argmin()
    assert torch.equal(one.logsnr, each.logsnr.flatten(1)[:, finest])
    small, t = ratio.min().item(), 0.5
    assert one.signal[14].item() ** 2 == pytest.approx((small**t - 1) / (small - 1), rel=1e-9)
    equal = nidiff.schedules.designed(1.0, num_levels=30)  # L = 1: signal² = t
    assert torch.allclose(equal.signal.square()[:-1], 1 - torch.arange(1, 30).double() / 30, rtol=1e-6)


def test_soft_conditioning_goes_from_diffusion_to_autoregression():
    together = nidiff.schedules.soft_conditioning((32,), softness=1e6, num_levels=50, boundary="reflecting").logsnr
    assert torch.allclose(together, torch.linspace(10, -10, 50, dtype=torch.float64)[:, None].expand(50, 32), atol=1e-3)
    softer = nidiff.schedules.soft_conditioning((32,), softness=1.0, num_levels=50, boundary="reflecting").logsnr
    assert (softer.diff(dim=1) < 0).all()  # fine modes lose their signal first
    apart = nidiff.schedules.soft_conditioning((32,), softness=0.03, num_levels=4000, boundary="reflecting").logsnr
    moving = (apart.abs() < 10).sum(1)
    assert moving.max() == 1  # one at a time: while it is made, coarser ones are known, finer ones are noise
    for row in (moving == 1).nonzero().flatten()[::50].tolist():
        (mode,) = (apart[row].abs() < 10).nonzero()[0].tolist()
        assert (apart[row, :mode] >= 10).all()
        assert (apart[row, mode + 1 :] <= -10).all()
    assert (softer.abs() < 10).sum(1).max() > 20  # negative control


def noise_at(process: nidiff.Process, row: int) -> Tensor:
    """The covariance of x at a level, given x0 = 0."""
    size = process.covariance.size
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *process.covariance.event_shape)
    response = process.perturb(torch.zeros_like(unit), process.schedule.level(row), unit).reshape(size, size)
    return response.T @ response


def test_blue_noise_is_blue_near_the_data_and_white_at_the_end():
    process = nidiff.Process("blue:num_levels=400", nidiff.Identity((4, 6)))
    blue, white = nidiff.power_law((4, 6), -1.0), torch.eye(24, dtype=torch.float64)
    gamma, t = math.tanh(1.5 * 0.1 / 0.2) / math.tanh(7.5), 0.1
    blend = gamma * white + (1 - gamma) * blue.sqrt(white.reshape(24, 4, 6)).reshape(24, 24)
    assert torch.allclose(noise_at(process, 39), t**2 * blend @ blend, atol=1e-10)
    assert torch.allclose(process.schedule.signal[39], torch.full((4, 6), 0.9, dtype=torch.float64))
    assert torch.allclose(noise_at(process, 399), white, atol=1e-5)
    first = noise_at(process, 0) * 400**2
    assert (first - blue.dense()).abs().max() < 0.02
    assert (first - white).abs().max() > 0.1


def test_offset_noise_grows_with_time():
    """Σ_t = (1 − ᾱ) (I + ψ² w² 11ᵀ): none at the first row, `nidiff.offset` at the last."""
    process = nidiff.Process("offset_ramp:num_levels=30,strength=0.5", nidiff.Identity((3, 4)))
    plain = nidiff.schedules.ddpm_linear(30)
    for row in (0, 10, 29):
        expected = torch.eye(12, dtype=torch.float64) + (row / 29 * 0.5) ** 2 * torch.ones(12, 12, dtype=torch.float64)
        assert torch.allclose(noise_at(process, row), plain.sigma[row] ** 2 * expected, atol=1e-12)
    full = nidiff.offset((3, 4), 0.5, normalize=False).dense()
    assert torch.allclose(noise_at(process, 29), plain.sigma[29] ** 2 * full, atol=1e-12)
    assert not torch.allclose(noise_at(process, 10), plain.sigma[10] ** 2 * full, atol=1e-3)


def test_from_data_with_a_power():
    """Σ ∝ C^p after shrinkage: the power family."""
    data = nidiff.matern((8, 8), 2.0).sample((200, 1, 8, 8), 0)
    whole = nidiff.from_data(data).eigenvalues
    for power in (0.0, 0.5, 1.0):
        expected = whole**power
        assert torch.allclose(nidiff.from_data(data, power=power).eigenvalues, expected / expected.mean(), rtol=1e-9)
    model = nidiff.fit_gaussian(data, average="radial", shrinkage=0.0)
    fitted = nidiff.from_data(data, power=0.5, shrinkage=0.0).eigenvalues
    assert torch.allclose(model.power(0.5).eigenvalues, fitted, rtol=1e-6)
    with refused("power"):
        nidiff.from_data(data, power="half")


def test_edm_preconditioning_is_the_case_of_multiples_of_the_identity():
    """Karras et al. 2022, table 1: c_skip, c_out, c_in of σ_data and σ."""
    deviation, schedule = 0.5, nidiff.schedules.smld_geometric(20, 80.0, 0.002)
    model = nidiff.GaussianModel(torch.zeros(2, 3), deviation**2 * nidiff.Identity((2, 3)))
    seen = {}

    def net(x: Tensor, label: Tensor) -> Tensor:
        seen["x"] = x
        return torch.sin(3 * x)

    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, nidiff.Identity((2, 3))), "residual", gaussian=model)
    x = normal(4, 2, 3)
    for row in (0, 10, 19):
        sigma = schedule.sigma[row].item()
        total = sigma**2 + deviation**2
        c_skip, c_out, c_in = deviation**2 / total, sigma * deviation / total**0.5, total**-0.5
        edm = c_skip * x + c_out * torch.sin(3 * c_in * x)
        assert torch.allclose(denoiser(x, schedule.level(row)), edm, rtol=1e-10, atol=1e-12)
        assert torch.allclose(seen["x"], c_in * x, rtol=1e-10)
    coloured = nidiff.Denoiser(net, nidiff.Process(schedule, COV), "residual", gaussian=model)
    assert not torch.allclose(coloured(x, schedule.level(10)), denoiser(x, schedule.level(10)), rtol=1e-2)


def test_a_schedule_per_mode_is_rebuilt_from_its_configuration():
    model = nidiff.GaussianModel(torch.zeros(4, 6), nidiff.matern((4, 6), 1.0))
    facts = schedule_facts(nidiff.Identity((4, 6)), model)
    for name in ("heat:", "blurring:", "soft_conditioning:", "blue:", "offset_ramp:", "designed:per_mode=true,"):
        schedule = as_schedule(f"{name}num_levels=20", facts)
        again = as_schedule(json.loads(json.dumps(schedule.to_config())))
        assert torch.equal(again.logsnr, schedule.logsnr)
        assert torch.equal(again.sigma, schedule.sigma)
        assert (again.boundary, len(again)) == ("periodic", 20)
        table = Schedule(schedule.logsnr, signal=schedule.signal, boundary="periodic")
        rebuilt = as_schedule(json.loads(json.dumps(table.to_config())))
        assert torch.allclose(rebuilt.sigma, schedule.sigma, rtol=1e-12)


# Everywhere ------------------------------------------------------------------------------------------------------


def test_a_level_per_image_is_that_of_each_image_alone():
    process = nidiff.Process(nidiff.schedules.blurring((4, 6), 50), nidiff.Identity((4, 6)))
    x0, eps, rows = normal(3, 2, 4, 6), normal(3, 2, 4, 6, seed=1), torch.tensor([2, 20, 45])
    denoiser = nidiff.Denoiser(smooth_net((2, 4, 6)), process, "v")
    together = nidiff.denoising_loss(denoiser, x0, level=process.schedule.level(rows), eps=eps)
    for image, row in enumerate(rows.tolist()):
        one, alone = slice(image, image + 1), process.schedule.level(torch.tensor([row]))
        assert torch.allclose(nidiff.denoising_loss(denoiser, x0[one], level=alone, eps=eps[one]), together[one])


def test_float32_and_autocast_agree_with_float64():
    process = nidiff.Process("blurring:num_levels=50", nidiff.matern((4, 6), 1.0))
    net = smooth_net((3, 4, 6))
    double = nidiff.Denoiser(net, process, "v")
    single = nidiff.Denoiser(lambda x, label: net(x.double(), label).to(x.dtype), process, "v")
    start = normal(2, 3, 4, 6)
    kept = {"num_steps": 10, "start": start, "sampler": "dpmpp_2m"}
    wide = nidiff.sample(double, (2, 3, 4, 6), dtype=torch.float64, **kept)
    narrow = nidiff.sample(single, (2, 3, 4, 6), **kept)
    assert narrow.dtype == torch.float32
    assert close(narrow.double(), wide, 1e-4)
    generator = partial(torch.Generator().manual_seed, 3)
    plain = nidiff.denoising_loss(single, start.float(), generator=generator())
    with torch.autocast("cpu", torch.bfloat16):
        cast = nidiff.denoising_loss(single, start.float(), generator=generator())
    assert torch.allclose(cast, plain, rtol=1e-5)


def test_a_schedule_per_mode_serves_a_sigma_over_channels():
    """Channels that are correlated: the modes are those of the image, the same for all channels."""
    spatial = nidiff.matern((4, 6), 1.0)
    mixed = nidiff.Channels(torch.eye(2, dtype=torch.float64), spatial)
    net = smooth_net((2, 4, 6))
    given = {"sampler": "heun", "num_steps": 20, "start": normal(2, 2, 4, 6), "dtype": torch.float64}
    processes = (nidiff.Process("offset_ramp:num_levels=20", cov) for cov in (spatial, mixed))
    images = [nidiff.sample(nidiff.Denoiser(net, each, "v"), (2, 2, 4, 6), **given) for each in processes]
    assert close(*images, 1e-10)


def test_a_model_with_a_schedule_per_mode_is_saved_and_the_diffusers_scheduler_takes_its_steps(tmp_path):
    from nidiff.model.network import unet2d

    torch.manual_seed(0)
    network = unet2d((1, 8, 8), widths=(8,), attention=())
    process = nidiff.Process("blurring:num_levels=40", nidiff.Identity((8, 8)))
    denoiser = nidiff.Denoiser(network, process, "v")
    nidiff.save_model(denoiser, tmp_path)
    loaded = nidiff.load_model(tmp_path)
    assert torch.equal(loaded.process.schedule.sigma, process.schedule.sigma)
    scheduler = NonIsotropicScheduler.from_pretrained(tmp_path, subfolder="scheduler")
    scheduler.set_timesteps(10)
    x = scheduler.init_noise((2, 1, 8, 8), [torch.Generator().manual_seed(seed) for seed in (0, 1)])
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(network(x, t.expand(2)).sample, t, x).prev_sample
    ours = nidiff.sample(loaded, (2, 1, 8, 8), sampler="dpmpp_2m", num_steps=10, generator=[0, 1])
    assert close(x, ours, 1e-5)


# Refused ---------------------------------------------------------------------------------------------------------


def test_what_a_schedule_per_mode_cannot_do_is_refused():
    falling = torch.linspace(3, -3, 4, dtype=torch.float64).reshape(4, 1, 1).expand(4, 2, 3)
    rising = falling.clone()
    rising[2, 1, 1] = 9.0
    cosines = Schedule(falling * torch.tensor([1.0, 2.0, 2.0]), boundary="reflecting")
    exploding = nidiff.Denoiser(lambda x, label: x, nidiff.Process(repeated(nidiff.schedules.ve(5)), COV))
    heated = nidiff.Denoiser(lambda x, label: x, nidiff.Process("heat", nidiff.Identity((8, 8))), "x0")
    variances = nidiff.Diagonal(normal(2, 3).abs() + 0.1)
    constant = repeated(nidiff.schedules.ddpm_linear(5))
    family = nidiff.schedules
    for argument, call in (
        ("sampler", lambda: nidiff.sample(exploding, (1, 2, 3), sampler="als")),
        ("scheduler", lambda: Whitened(torch.nn.Identity(), COV, clip=1.0, scheduler=constant)),
        ("logsnr", lambda: Schedule(rising)),
        ("logsnr", lambda: Schedule(falling[[0, 1, 1, 2]])),
        ("signal", lambda: Schedule(falling, signal=[1.0, 0.5, 0.2, 0.0])),
        ("schedule", lambda: nidiff.Process(Schedule(falling), nidiff.Identity((3, 2)))),
        ("schedule", lambda: nidiff.Process(cosines, COV)),
        ("schedule", lambda: nidiff.Process("blurring", variances)),
        ("schedule", lambda: Schedule(falling).level(1)),
        ("logsnr", lambda: Schedule(falling).level_at(0.0)),
        ("schedule", lambda: nidiff.sample(heated, (1, 8, 8))),
        ("schedule", lambda: nidiff.log_likelihood(heated, normal(1, 8, 8))),
        ("schedule", lambda: nidiff.Process("designed", COV)),
        ("boundary", lambda: family.heat((4, 4), boundary="open")),
        ("ratio", lambda: family.designed(0.1, per_mode=True)),
        ("blur_min", lambda: family.heat((4, 4), blur_max=0.1)),
        ("softness", lambda: family.soft_conditioning((4, 4), softness=1e-4)),
        ("base", lambda: family.offset_ramp((4, 4), base="nothing")),
        ("mean_variance", lambda: family.equal_snr(0.0)),
        ("tau", lambda: family.blue((4, 4), tau=-1.0)),
        ("least", lambda: family.blurring((4, 4), least=0.0)),
        ("num_levels", lambda: family.flow(0)),
        ("time_shift", lambda: family.flow(10, time_shift=0.0)),
    ):
        with refused(argument):
            call()


def test_a_schedule_that_does_not_commute_with_channels_of_their_own_spectra_is_refused():
    """Σ = diag over channels of different periodic spectra: its spatial part alone looks white, but Σ is not. Channels
    that are white, of any variances, commute with every schedule, and then the score is the exact one."""
    shape = (6, 6)
    data = torch.cat([nidiff.power_law(shape, p).sample((50, 1, *shape), 0) for p in (1.0, 3.0)], dim=1)
    schedule = nidiff.schedules.soft_conditioning(shape, num_levels=20, boundary="reflecting")
    sigma = nidiff.fit_gaussian(data, channels="each").covariance
    with refused("schedule"):
        nidiff.Process(schedule, sigma)
    white = nidiff.Channels(torch.diag(torch.tensor([1.0, 3.0])), nidiff.Identity(shape))
    process = nidiff.Process(schedule, white)
    level, x, x0 = process.schedule.level(9), normal(1, 2, *shape), normal(1, 2, *shape, seed=1)
    deviation = (x - level.signal * x0).reshape(1, -1)
    root = torch.block_diag(*[as_matrix(level.sigma, 36)] * 2)
    exact = -deviation @ torch.linalg.inv(root @ white.dense() @ root.T)
    assert torch.allclose(process.conditional_score(x, x0, level).reshape(1, -1), exact, atol=1e-9)


def test_heat_starts_where_it_is_told():
    """With an initial state at the last level it samples: one step of angle is exact on Gaussian data."""
    process = nidiff.Process("heat:num_levels=30", nidiff.Identity((8, 8)))
    model = nidiff.GaussianModel(torch.zeros(8, 8), nidiff.matern((8, 8), 2.0, boundary="reflecting"))
    z, last = normal(2, 8, 8), process.schedule.level(29)
    start = model.at(last, process.covariance).from_z(z)
    image = nidiff.sample(
        model.denoiser(process), (2, 8, 8), sampler="angle", spacing=[29], start=start, dtype=torch.float64
    )
    assert close(image, model.colour(z), 1e-9)
