"""log p through the ODE against the closed form, for VP and VE, with Σ that does not commute with the data's."""

import math

import pytest
import torch
from problems import refused

import nidiff
from nidiff.diffusion.schedule import Schedule
from nidiff.testing.problems import Gaussian, normal

COV = nidiff.gaussian_free_field((2, 3), gamma=1.5)
# Far enough up that the prior is exact to below the tolerance.
SCHEDULES = {
    "vp": lambda: Schedule(torch.linspace(9.0, -30.0, 300, dtype=torch.float64), "variance"),
    "ve": lambda: nidiff.schedules.ve(300, sigma_max=1e6, sigma_min=0.01),
    "ddpm": lambda: nidiff.schedules.ddpm_linear(4000),
}
every_schedule = pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
TIGHT = {"rtol": 1e-8, "atol": 1e-8}


class Dropped(nidiff.Process):
    """The negative control: a white prior density in place of N(0, Σ), i.e. the log |Σ| term left out."""

    def prior_log_prob(self, x):
        return super().prior_log_prob(x) + 0.5 * self.covariance.logdet()


@every_schedule
def test_the_density_of_a_gaussian_is_exact(make):
    problem, schedule = Gaussian(COV), make()
    x = (problem.mean + normal(5, 6)).reshape(5, 2, 3)
    exact = problem.log_prob(x, schedule.level(0))
    found = nidiff.log_likelihood(problem.denoiser(nidiff.Process(schedule, COV)), x, trace="exact", **TIGHT)
    assert (found - exact).abs().max() < 1e-4


PER_MODE = {
    "blurring": lambda: nidiff.schedules.blurring((2, 3), num_levels=4, logsnr_min=-30, boundary="reflecting"),
    "soft": lambda: nidiff.schedules.soft_conditioning((2, 3), num_levels=6, logsnr_min=-30, boundary="reflecting"),
    "any": lambda: Schedule(
        torch.cat([4 - 3 * normal(5, 2, 3).square().cumsum(0), torch.full((1, 2, 3), -40.0)]), boundary="reflecting"
    ),
    "own signal": lambda: Schedule(torch.linspace(5, -30, 6), signal=torch.tensor([1, 0.9, 0.3, 0.2, 0.15, 0.1])),
}


@pytest.mark.parametrize("make", PER_MODE.values(), ids=PER_MODE.keys())
def test_the_density_is_exact_where_the_table_has_kinks(make, monkeypatch):
    """A table is linear between its rows: the integrator has to stop there."""
    covariance = nidiff.gaussian_free_field((2, 3), gamma=1.5, boundary="reflecting")
    problem, process = Gaussian(covariance), nidiff.Process(make(), covariance)
    x = (problem.mean + normal(1, 6)).reshape(1, 2, 3)
    exact, denoiser = problem.log_prob(x, process.schedule.level(0)), problem.denoiser(process)

    def error(**tolerances: float) -> float:
        return (nidiff.log_likelihood(denoiser, x, trace="exact", **tolerances) - exact).abs().max().item()

    assert error(rtol=1e-6, atol=1e-6) < 1e-3
    if make is PER_MODE["blurring"]:  # the negative control
        monkeypatch.setattr(nidiff.Process, "kinks", torch.zeros(0))
        assert error() > 1e-2


def test_without_log_det_sigma_it_is_wrong():
    problem, schedule = Gaussian(COV), SCHEDULES["vp"]()
    x = (problem.mean + normal(5, 6)).reshape(5, 2, 3)
    exact = problem.log_prob(x, schedule.level(0))
    found = nidiff.log_likelihood(problem.denoiser(Dropped(schedule, COV)), x, trace="exact", **TIGHT)
    assert torch.allclose(found - exact, torch.full((5,), 0.5 * COV.logdet(), dtype=torch.float64), atol=1e-4)
    assert abs(0.5 * COV.logdet()) > 0.5


def test_hutchinson_is_unbiased():
    problem, schedule = Gaussian(COV), SCHEDULES["vp"]()
    denoiser = problem.denoiser(nidiff.Process(schedule, COV))
    x = (problem.mean + normal(1, 6)).reshape(1, 2, 3)
    exact = problem.log_prob(x, schedule.level(0))
    repeated = x.expand(300, 2, 3)
    found = nidiff.log_likelihood(denoiser, repeated, generator=torch.Generator().manual_seed(0), **TIGHT)
    error = found.std() / math.sqrt(300)
    assert found.std() > 1e-3  # it is an estimate
    assert (found.mean() - exact).abs() < 4 * error
    more = nidiff.log_likelihood(denoiser, repeated, num_probes=8, generator=torch.Generator().manual_seed(0), **TIGHT)
    assert more.std() < 0.6 * found.std()


def test_one_probe_of_random_signs_is_exact_where_pixels_do_not_mix():
    """vᵀ J v = tr J for a diagonal J and every v of signs; Gaussian v would only be right in the mean."""
    schedule, x = SCHEDULES["vp"](), normal(3, 2, 3)
    process = nidiff.Process(schedule, nidiff.Diagonal(normal(2, 3, seed=1).square() + 0.1))
    denoiser = nidiff.Denoiser(lambda x, label: torch.tanh(x), process, "x0")
    probed, exact = (nidiff.log_likelihood(denoiser, x, trace=t, generator=0) for t in ("hutchinson", "exact"))
    assert torch.allclose(probed, exact, atol=1e-6)


def test_channels_each_count_log_det_sigma():
    """Two independent channels: the density of the pair is the sum."""
    problem, schedule = Gaussian(COV), SCHEDULES["vp"]()
    process = nidiff.Process(schedule, COV)

    def net(x, label):
        level = schedule.level(label[0].item())
        return torch.stack([problem.denoise(x[:, c], level) for c in range(2)], 1)

    x = (problem.mean + normal(3, 2, 6)).reshape(3, 2, 2, 3)
    exact = sum(problem.log_prob(x[:, c], schedule.level(0)) for c in range(2))
    found = nidiff.log_likelihood(nidiff.Denoiser(net, process, target="x0"), x, trace="exact", **TIGHT)
    assert (found - exact).abs().max() < 2e-4


def test_whitening_moves_the_density_by_half_log_det():
    """log p_x(x) = log p_y(Σ^-½ x) − ½ log |Σ| (R6)."""
    schedule = SCHEDULES["vp"]()
    problem = Gaussian(COV)
    white = nidiff.Identity((2, 3))

    def net_y(y, label):
        return COV.inv_sqrt(problem.denoise(COV.sqrt(y), schedule.level(label[0].item())))

    x = normal(3, 2, 3)
    log_x = nidiff.log_likelihood(problem.denoiser(nidiff.Process(schedule, COV)), x, trace="exact", **TIGHT)
    denoiser_y = nidiff.Denoiser(net_y, nidiff.Process(schedule, white), target="x0")
    log_y = nidiff.log_likelihood(denoiser_y, COV.inv_sqrt(x), trace="exact", **TIGHT)
    assert torch.allclose(log_x, log_y - 0.5 * COV.logdet(), atol=1e-5)


def test_bits_per_dim_of_known_densities():
    """−log₂ of (density × bin) per dimension, for the closed-form density."""
    problem, schedule = Gaussian(COV), SCHEDULES["vp"]()
    denoiser = problem.denoiser(nidiff.Process(schedule, COV))
    x = (problem.mean + normal(4, 6)).reshape(4, 2, 3)
    expected = -problem.log_prob(x, schedule.level(0)) / (6 * math.log(2)) + math.log2(127.5)
    assert torch.allclose(nidiff.bits_per_dim(denoiser, x, trace="exact", **TIGHT), expected, atol=1e-4)


def test_bad_input_is_named():
    denoiser, x = Gaussian(COV).denoiser(nidiff.Process(nidiff.schedules.ddpm_linear(10), COV)), normal(1, 2, 3)
    for argument, options in (
        ("trace", {"trace": "skilling"}),
        ("method", {"method": "rk4"}),
        ("num_probes", {"num_probes": 0}),
        ("rtol", {"rtol": -1}),
        ("bin_width", {"bin_width": 0}),
        ("x", {"x": torch.full((1, 2, 3), float("nan"))}),
        ("x", {"x": normal(2, 3)}),
    ):
        with refused(argument):
            nidiff.bits_per_dim(**{"denoiser": denoiser, "x": x, **options})


def test_in_float32_every_label_is_one_of_the_schedule():
    """The clock of the ODE rounds to just outside the schedule, where there are no levels."""
    cov = nidiff.gaussian_free_field((2, 3))
    schedule = nidiff.schedules.smld_geometric(10, 5.0, 0.03)
    labels = []

    def net(x, label):
        labels.append(label[0].item())
        return 0.1 * x

    nidiff.log_likelihood(nidiff.Denoiser(net, nidiff.Process(schedule, cov)), torch.randn(2, 2, 3))
    assert 0 <= min(labels) < 0.1
    assert 8.9 < max(labels) <= 9


def test_bfloat16_images_have_the_likelihood_of_their_values():
    problem = Gaussian(COV)
    denoiser = problem.denoiser(nidiff.Process(nidiff.schedules.ddpm_linear(100), COV))
    x = (problem.mean + normal(4, 6)).reshape(4, 2, 3).bfloat16()

    def net(x, label):
        return denoiser.net(x.double(), label).to(x)

    half = nidiff.log_likelihood(denoiser.with_net(net), x, trace="exact")
    assert half.dtype == torch.float32
    exact = nidiff.log_likelihood(denoiser, x.double(), trace="exact")
    assert torch.allclose(half.double(), exact, atol=1e-2)
