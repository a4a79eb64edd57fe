"""Fresh noise of another colour than Σ's: with the drift that belongs to it every marginal stays right."""

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.covariance.modes import Modes
from nidiff.model.network import unet2d
from nidiff.sampling.ancestral import mix
from nidiff.testing.problems import Gaussian, output_covariance, uniform_in_logsnr

SHAPE = (2, 3)
PROCESSES = {"coloured": nidiff.gaussian_free_field(SHAPE, gamma=1.5), "white": nidiff.Identity(SHAPE)}
COLOURS = {
    "red": nidiff.power_law(SHAPE, 2.0),
    "blue": nidiff.power_law(SHAPE, -2.0),
    "as white": nidiff.Identity(SHAPE),
}


def problem_of(kind):
    """Data whose covariance does not commute with the colour, nor with Σ."""
    return Gaussian(PROCESSES["coloured"], mean_scale=0.0) if kind == "coloured" else WhiteNoise()


class WhiteNoise(Gaussian):
    """The same data under white noise."""

    def __init__(self):
        super().__init__(PROCESSES["coloured"], mean_scale=0.0)
        self.covariance, self.noise_matrix = PROCESSES["white"], torch.eye(6, dtype=torch.float64)


def without_drift(colour):
    """What is done elsewhere: the ODE's step, and coloured noise on top of it."""

    def step(chain, x, x0, here, there):
        relative = colour.eigenvalues / chain.denoiser.process.covariance.eigenvalues
        rate = Modes(relative / relative.mean(), colour.basis)
        passed = float(there.signal / there.sigma / (here.signal / here.sigma)) ** 2
        fresh = (1 - (rate * -1.0).map(lambda h: passed**h)) ** 0.5 * there.sigma
        return mix(x, x0, here, there, fresh=0.0) + fresh * chain.noise()

    return step


def error_of(problem, sampler, options, num_levels):
    schedule = uniform_in_logsnr(num_levels, "variance")
    _, target = problem.marginal(schedule.level(0))
    found = output_covariance(problem, schedule, sampler, options)
    return ((found - target).norm() / target.norm()).item()


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("kind", PROCESSES)
def test_every_marginal_stays_right(kind, colour):
    problem, options = problem_of(kind), {"colour": COLOURS[colour]}
    coarse, fine = (error_of(problem, "churn", options, count) for count in (40, 160))
    assert fine < 0.09
    assert fine < 0.45 * coarse


@pytest.mark.parametrize("kind", PROCESSES)
def test_without_the_drift_they_do_not(kind):
    """Negative control: more steps do not help."""
    problem = problem_of(kind)
    assert error_of(problem, without_drift(COLOURS["blue"]), {}, 160) > 0.5


def test_the_noise_of_a_clean_image_is_exact_after_any_step():
    """One clean image, x̂0 = x0: x at the next level is signal' x0 + sigma' Σ^½ eps in every mode, in one step."""
    cov, process = PROCESSES["coloured"], nidiff.Process(uniform_in_logsnr(5, "variance"), PROCESSES["coloured"])
    here, there = process.schedule.level(4), process.schedule.level(1)
    start = here.sigma * cov.sample((20_000, *SHAPE), torch.Generator().manual_seed(0), dtype=torch.float64)
    denoiser = nidiff.Denoiser(lambda x, label: torch.zeros_like(x), process, "x0")
    for colour in COLOURS.values():
        given = {"sampler": "churn", "spacing": [4, 1], "start": start, "denoise": False, "generator": 1}
        found = nidiff.sample(denoiser, start.shape, colour=colour, dtype=torch.float64, **given)
        variance = cov.basis.power(found).mean(0) / (there.sigma**2 * cov.eigenvalues)
        torch.testing.assert_close(variance, torch.ones(SHAPE, dtype=torch.float64), rtol=0, atol=0.05)


def test_its_ends_are_ddim_and_ancestral():
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(50), nidiff.gaussian_free_field((4, 4)))
    denoiser = nidiff.Denoiser(lambda x, label: 0.3 * x, process, "v")
    for amount, name in ((0.0, "ddim"), (1.0, "ancestral")):
        churned, other = (
            nidiff.sample(
                denoiser, (3, 1, 4, 4), sampler=sampler, num_steps=12, spacing="uniform", generator=[0, 1, 2], **options
            )
            for sampler, options in (("churn", {"amount": amount}), (name, {}))
        )
        torch.testing.assert_close(churned, other)


def test_a_white_model_with_coloured_noise_from_the_command_line(tmp_path):
    from nidiff.cli import main

    net = unet2d((1, 8, 8), widths=(8,), attention=())
    process = nidiff.Process(nidiff.schedules.ddpm_linear(9), nidiff.Identity((8, 8)))
    nidiff.save_model(nidiff.Denoiser(net, process, "v"), tmp_path / "model")
    sampler = "churn:colour=gff,gamma=1,amount=0.5"
    words = ["sample", str(tmp_path / "model"), "--seeds", "0-1", "--out", str(tmp_path / "out"), "--sampler", sampler]
    assert main(words) == 0
    written = torch.from_numpy(np.load(tmp_path / "out" / "samples.npz")["arr_0"])
    drawn = nidiff.sample(
        nidiff.load_model(tmp_path / "model"), (2, 1, 8, 8), sampler=sampler, generator=[0, 1], tile=64
    )
    assert torch.equal(written, drawn.movedim(1, -1))


def test_bad_input_is_named():
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(10), nidiff.gaussian_free_field((4, 4)))
    denoiser = nidiff.Denoiser(lambda x, label: x, process, "v")
    for argument, options in (
        ("amount", {"amount": -1.0}),
        ("basis", {"colour": nidiff.gaussian_free_field((4, 4), boundary="reflecting")}),
        ("basis", {"colour": nidiff.gaussian_free_field((4, 5))}),
        ("gamma", {"gamma": 1.0}),
        ("covariance", {"colour": "grey"}),
    ):
        with refused(argument):
            nidiff.sample(denoiser, (1, 1, 4, 4), sampler="churn", **options)
