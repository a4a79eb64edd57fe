"""The forward process, its score, and the coefficients of its SDE and ODE, against closed forms."""

import math

import pytest
import torch
from problems import refused

import nidiff
from nidiff.testing.problems import Gaussian, normal

COV = nidiff.gaussian_free_field((3, 4))
CONTINUOUS = {"vp": nidiff.schedules.vp(200), "ve": nidiff.schedules.ve(200, sigma_max=20.0, sigma_min=0.01)}
every_process = pytest.mark.parametrize("schedule", CONTINUOUS.values(), ids=CONTINUOUS.keys())


@every_process
def test_perturb_has_the_marginal_of_the_forward_process(schedule):
    """q(x | x0) = N(signal · x0, sigma² Σ), one level per image; the covariance by pushing unit eps through."""
    process = nidiff.Process(schedule, COV)
    level = schedule.level(torch.tensor([10, 150]))
    x0 = normal(2, 3, 4)
    mean = process.perturb(x0, level, torch.zeros(2, 3, 4, dtype=torch.float64))
    for i, row in enumerate((10, 150)):
        assert torch.allclose(mean[i], schedule.signal[row] * x0[i], rtol=1e-12)
        unit = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
        response = process.perturb(torch.zeros_like(unit), schedule.level(row), unit).reshape(12, 12)
        assert torch.allclose(response.T @ response, schedule.sigma[row] ** 2 * COV.dense(), atol=1e-10)


@every_process
def test_prior_is_the_top_of_the_process(schedule):
    process = nidiff.Process(schedule, COV)
    scale = 1.0 if schedule.keeps == "variance" else schedule.sigma[-1].item()
    x = process.prior((5, 3, 4), torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = process.noise((5, 3, 4), torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(x, scale * noise, rtol=1e-12)
    peer = torch.distributions.MultivariateNormal(torch.zeros(12, dtype=torch.float64), scale**2 * COV.dense())
    assert torch.allclose(process.prior_log_prob(x), peer.log_prob(x.reshape(5, 12)), rtol=1e-10)
    pair = torch.stack([x, 2 * x], dim=1)  # of channels, which are independent
    assert torch.allclose(process.prior_log_prob(pair), peer.log_prob(pair.reshape(5, 2, 12)).sum(1), rtol=1e-10)

    # Images in [−1, 1] at the last row are a draw of it, up to what is left of them; halfway they are not.
    images, eps = normal(5, 3, 4, seed=1).clamp(-1, 1), normal(5, 3, 4, seed=2)

    def distance(row: int) -> float:
        return (process.perturb(images, schedule.level(row), eps) / scale - COV.sqrt(eps)).abs().max().item()

    assert distance(len(schedule) - 1) < 0.06
    assert distance(len(schedule) // 2) > 0.2


@every_process
def test_conditional_score_is_the_gradient_of_the_log_density(schedule):
    process = nidiff.Process(schedule, COV)
    level = schedule.level(60)
    x0, x = normal(2, 3, 4), normal(2, 3, 4, seed=1).requires_grad_()
    density = COV.log_prob((x - level.signal * x0) / level.sigma).sum()
    (gradient,) = torch.autograd.grad(density, x)
    assert torch.allclose(process.conditional_score(x.detach(), x0, level), gradient, rtol=1e-9)
    assert torch.allclose(
        process.preconditioned_score(x.detach(), x0, level), COV.matmul(gradient), rtol=1e-9, atol=1e-9
    )


@every_process
@pytest.mark.parametrize("time", [0.1, 0.5, 0.9])
def test_coefficients_are_those_of_the_sde(schedule, time):
    """VP: f = −½β(t), g² = β(t). VE: f = 0, g² = dσ²/dt. And d Cov/dt = 2f Cov + g² Σ has Cov = sigma² Σ (E20)."""
    f, g2 = map(float, nidiff.Process(schedule, COV).coefficients(time))
    if schedule.keeps == "variance":
        beta = 0.1 + time * 19.9
        assert (f, g2) == pytest.approx((-beta / 2, beta), rel=1e-9)
    else:
        sigma = 0.01 * 2000.0**time
        assert (f, g2) == pytest.approx((0.0, 2 * sigma**2 * math.log(2000.0)), rel=1e-9)

    def sigma2(t: float) -> float:
        logsnr = schedule.logsnr_at(torch.tensor(t, dtype=torch.float64)).item()
        return float(schedule.level_at(logsnr).sigma) ** 2

    h = 1e-5
    slope = (sigma2(time + h) - sigma2(time - h)) / (2 * h)
    assert slope == pytest.approx(2 * f * sigma2(time) + g2, rel=1e-6)
    if f:  # printed after eq. 64: E[f xᵀ] in place of E[f (x − μ)ᵀ], which adds the square of the mean, here 1
        assert slope != pytest.approx(2 * f * (sigma2(time) + 1 - sigma2(time)) + g2, rel=1e-2)


def test_coefficients_of_a_table_are_its_betas():
    """DDPM as an SDE: with t = row / L, f ≈ −½ L β_t and g² ≈ L β_t."""
    schedule = nidiff.schedules.ddpm_linear(1000)
    process = nidiff.Process(schedule, COV)
    for row in (50, 500, 900):
        f, g2 = map(float, process.coefficients((row + 0.5) / 1000))
        beta = 1e-4 + (0.02 - 1e-4) * row / 999
        assert (f, g2) == pytest.approx((-500 * beta, 1000 * beta), rel=0.02)


@every_process
def test_flow_and_reverse_drift_are_r6_with_the_exact_score(schedule):
    """dx/dt = f x − ½ g² Σ s and f x − g² Σ s, s = ∇ log p of non-commuting Gaussian data; without Σ they are wrong."""
    problem = Gaussian(COV)
    process = nidiff.Process(schedule, COV)
    time = 0.4
    f, g2 = map(float, process.coefficients(time))
    clock = torch.tensor(time, dtype=torch.float64, requires_grad=True)
    logsnr = schedule.logsnr_at(clock)
    (rate,) = torch.autograd.grad(logsnr, clock)
    level = schedule.level_at(logsnr.item())
    mean, covariance = problem.marginal(level)
    x = normal(3, 3, 4)
    score = -torch.linalg.solve(covariance, (x.reshape(3, 12) - mean).T).T.reshape(x.shape)
    x0 = problem.denoise(x, level)
    ode = f * x - 0.5 * g2 * COV.matmul(score)
    sde = f * x - g2 * COV.matmul(score)
    assert torch.allclose(process.flow(x, x0, level) * rate, ode, rtol=1e-9, atol=1e-9)
    assert torch.allclose(process.reverse_drift(x, x0, level) * rate, sde, rtol=1e-9, atol=1e-9)
    unpreconditioned = f * x - 0.5 * g2 * score
    assert (process.flow(x, x0, level) * rate - unpreconditioned).abs().max() > 0.1 * ode.abs().max()


@every_process
def test_the_flow_transports_the_marginals(schedule):
    """Along dx/dℓ = flow the density follows the forward process: (d/dℓ) of the exact flow map is the velocity."""
    problem = Gaussian(COV)
    process = nidiff.Process(schedule, COV)
    here, h = schedule.level_at(0.3), 1e-5
    x = normal(2, 3, 4)
    ahead, behind = (problem.flow(x, here, schedule.level_at(0.3 + d)) for d in (h, -h))
    velocity = process.flow(x, problem.denoise(x, here), here)
    assert torch.allclose((ahead - behind) / (2 * h), velocity, rtol=1e-6, atol=1e-8)


def test_a_process_takes_names_and_refuses_what_is_neither():
    cov, schedule = nidiff.gaussian_free_field((2, 3)), nidiff.schedules.ddpm_linear(10)
    named = nidiff.Process("ddpm_linear:num_levels=10", cov)
    assert torch.equal(named.schedule.logsnr, schedule.logsnr)
    for swapped in ((cov, schedule), (schedule, "gff:gamma=1")):  # the text needs a shape
        with refused("covariance"):
            nidiff.Process(*swapped)


def test_noise_of_one_image_is_not_repeated_over_a_batch():
    process = nidiff.Process("ddpm_linear", COV)
    with refused("eps"):
        process.perturb(normal(5, 3, 4), process.schedule.level(500), normal(1, 3, 4))
