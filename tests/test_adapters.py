"""Networks of others, built here with the exact answer for Gaussian data, sample as ours do.

A network that does not follow the convention it is said to follow is found, with the one it does follow.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import nidiff
from nidiff import adapters, schedules
from nidiff.errors import InputError
from nidiff.randomness import white_noise
from nidiff.sampling.sampler import SAMPLERS

SHAPE = (8, 8)
GAUSSIAN = nidiff.GaussianModel(torch.full((1, *SHAPE), 0.3), 0.5 * nidiff.matern(SHAPE, 2.0))
COLOURED = nidiff.gaussian_free_field(SHAPE, gamma=0.5)
VP, DDPM = schedules.vp(200), schedules.ddpm_linear(200)


def vp_of_azula(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """azula.noise.VPSchedule."""
    alpha = torch.exp(torch.log(torch.tensor(1e-3, dtype=torch.float64)) * t**2)
    return alpha, torch.sqrt(1 - alpha**2 + 1e-6)


CONVENTIONS = {
    "edm": adapters.edm(num_levels=200),
    "score, vp": adapters.sde(VP),
    "score, ve": adapters.sde(schedules.ve(200)),
    "score of 999 t": adapters.sde(VP, time_scale=999.0),
    "eps, rows": adapters.discrete(DDPM),
    "v, rows": adapters.discrete(DDPM, "v"),
    "rectified flow": adapters.flow(num_levels=200),
    "flow of diffusers": adapters.flow(data_at=0.0, time_scale=1000.0, num_levels=200),
    "azula": adapters.azula(vp_of_azula, num_levels=200),
}


def exact(convention: adapters.Convention, covariance: nidiff.Covariance | None = None):
    """The network of others that denoises Gaussian data, as a function of x and its own time alone."""
    covariance = nidiff.Identity(SHAPE) if covariance is None else covariance

    def net(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        level = convention.schedule.level_at(convention.logsnr_of(time))
        state = GAUSSIAN.at(level, covariance)
        mean = GAUSSIAN.mean.expand_as(x)
        x0 = mean + state.gain * (x - level.signal * mean)
        target = nidiff.diffusion.target.TARGETS[convention.predicts]
        return convention.sign * target.invert(x0, x, level, covariance).to(x)

    return net


def draws(count: int = 64) -> torch.Tensor:
    return GAUSSIAN.sample((count, 1, *SHAPE), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("covariance", [None, COLOURED], ids=["white", "coloured"])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_network_of_others_denoises_as_the_closed_form(name, covariance):
    convention = CONVENTIONS[name]
    ours = adapters.denoiser(exact(convention, covariance), convention, covariance or SHAPE)
    truth = GAUSSIAN.denoiser(ours.process)
    for row in (0, 60, 120.5, 198):
        level = ours.process.schedule.level(row)
        x = ours.process.perturb(draws(4), level, white_noise((4, 1, *SHAPE), 1))
        torch.testing.assert_close(ours(x, level), truth(x, level), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_every_sampler_takes_one(sampler):
    convention = CONVENTIONS["edm" if sampler in ("cas", "als") else "score, vp"]  # Langevin dynamics are of VE
    ours = adapters.denoiser(exact(convention), convention, SHAPE, gaussian=GAUSSIAN)
    truth = GAUSSIAN.denoiser(ours.process)
    drawing = {"sampler": sampler, "num_steps": 20, "generator": [0, 1]}
    x, expected = (nidiff.sample(each, (2, 1, *SHAPE), **drawing) for each in (ours, truth))
    torch.testing.assert_close(x, expected, atol=2e-2, rtol=2e-2)


def test_posterior_and_likelihood_take_one():
    convention = CONVENTIONS["rectified flow"]
    ours = adapters.denoiser(exact(convention), convention, SHAPE, gaussian=GAUSSIAN)
    truth = GAUSSIAN.denoiser(ours.process)
    x0 = draws(2)
    of_both = [nidiff.log_likelihood(each, x0, generator=[0, 1]) for each in (ours, truth)]
    torch.testing.assert_close(*of_both, atol=0.02, rtol=1e-3)
    observation = nidiff.Observation(x0, nidiff.operators.mask(torch.arange(64).reshape(SHAPE) % 3 == 0), noise=0.1)
    for method in ("gaussian", "jacobian"):
        level = ours.process.schedule.level(100)
        x = ours.process.perturb(x0, level, white_noise(x0.shape, 1))
        of_both = [nidiff.posterior(each, observation, method)(x, level) for each in (ours, truth)]
        torch.testing.assert_close(*of_both, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("covariance", [None, COLOURED], ids=["white", "coloured"])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_ours_as_theirs_is_the_closed_form(name, covariance):
    """Out and in again, and against the network that is exact in their convention."""
    noise, convention = covariance or nidiff.Identity(SHAPE), CONVENTIONS[name]
    ours = GAUSSIAN.denoiser(nidiff.Process(schedules.ddpm_linear(1000, 1e-6, 0.02), noise))
    theirs, truth = adapters.Network(ours, convention), exact(convention, covariance)
    schedule = ours.process.schedule
    inside = [
        row for row in range(5, 195, 10) if schedule.logsnr[-1] < convention.schedule.logsnr[row] < schedule.logsnr[0]
    ]
    assert len(inside) >= 5
    for row in inside:
        level = convention.schedule.level(row)
        x, time = level.signal * draws(2) + level.sigma * noise.sample((2, 1, *SHAPE), row), convention.times[row]
        expected = truth(x, time.expand(2))
        torch.testing.assert_close(theirs(x, time), expected, atol=1e-3 * expected.abs().max().item(), rtol=1e-3)


def test_edm_s_own_sampler_runs_on_ours():
    """Algorithm 2 of Karras et al. without churn, as its authors write it: net(x, σ), sigma_min, sigma_max."""
    noise = nidiff.Identity(SHAPE)
    net = adapters.Network(GAUSSIAN.denoiser(nidiff.Process(schedules.ve(500, 80.0, 0.002), noise)), adapters.edm())
    assert (net.sigma_min, net.sigma_max) == pytest.approx((0.002, 80.0), rel=0.05)
    steps = torch.arange(40, dtype=torch.float64) / 39
    ends = net.sigma_max ** (1 / 7), net.sigma_min ** (1 / 7)
    sigmas = torch.cat([(ends[0] + steps * (ends[1] - ends[0])) ** 7, torch.zeros(1)])
    x = 80 * torch.randn(2000, 1, *SHAPE, generator=torch.Generator().manual_seed(0))
    for sigma, after in pairwise(sigmas):
        slope = (x - net(x, sigma)) / sigma
        following = x + (after - sigma) * slope
        if after > 0:
            slope = (slope + (following - net(following, after)) / after) / 2
            following = x + (after - sigma) * slope
        x = following.float()
    assert x.mean().item() == pytest.approx(0.3, abs=0.05)
    assert x.var(0).mean().item() == pytest.approx(draws(2000).var(0).mean().item(), rel=0.05)


def claimed(name: str, **changes) -> adapters.Convention:
    return replace(CONVENTIONS[name], **changes)


EDM = CONVENTIONS["edm"]
WRONG = {
    "the other way, and its output had the other sign": ("rectified flow", adapters.flow(0.0, num_levels=200)),
    "the sign of its output were the other one": ("rectified flow", claimed("rectified flow", sign=1.0)),
    "it predicted 'eps'": ("eps, rows", claimed("eps, rows", predicts="x0")),
    "it predicted 'v'": ("v, rows", claimed("v, rows", predicts="eps")),
    "it predicted 'score'": ("score, vp", claimed("score, vp", predicts="eps")),
    "counted from 0 to 1000": ("score of 999 t", claimed("score of 999 t", times=VP.time, curve=None)),
    "counted from 0 to 1:": ("score, vp", CONVENTIONS["score of 999 t"]),
    "its time were σ": ("edm", claimed("edm", times=EDM.schedule.sigma.log() / 4, curve=None)),
    "its input were x0 + σ · noise": ("edm", claimed("edm", schedule=nidiff.Schedule(EDM.schedule.logsnr))),
}


@pytest.mark.parametrize("words", WRONG)
def test_the_probe_names_a_wrong_convention(words):
    true, claim = WRONG[words]
    net = forgiving(CONVENTIONS[true])
    adapters.probe(net, CONVENTIONS[true], draws(), generator=torch.Generator().manual_seed(1))
    with pytest.raises(InputError) as raised:
        adapters.probe(net, claim, draws(), generator=torch.Generator().manual_seed(1))
    assert raised.value.argument == "net"
    assert words in str(raised.value)


def forgiving(convention: adapters.Convention):
    """The exact network, with the nearest time of its own for every time, as a trained network answers to any."""
    net = exact(convention)
    low, high = sorted(convention.times[[0, -1]].tolist())
    return lambda x, time: net(x, time.clamp(low, high))


def test_the_probe_finds_a_network_that_was_not_trained():
    with pytest.raises(InputError, match="no other convention fits"):
        adapters.probe(lambda x, time: torch.full_like(x, 5.0), CONVENTIONS["edm"], draws())


def test_a_posterior_of_azula_is_read_by_its_mean():
    convention = CONVENTIONS["azula"]
    net = exact(convention)
    ours = adapters.denoiser(lambda x, time: SimpleNamespace(mean=net(x, time)), convention, SHAPE)
    level = ours.process.schedule.level(100)
    x = white_noise((2, 1, *SHAPE), 1)
    torch.testing.assert_close(ours(x, level), adapters.denoiser(net, convention, SHAPE)(x, level))


BEYOND = adapters.Network(GAUSSIAN.denoiser(nidiff.Process(DDPM, nidiff.Identity(SHAPE))), adapters.edm())
BAD = {
    "time": lambda: BEYOND(draws(1), torch.tensor(100.0)),
    "predicts": lambda: adapters.Convention(VP, VP.time, "drift"),
    "times": lambda: adapters.Convention(VP, VP.time[1:]),
    "data_at": lambda: adapters.flow(data_at=0.5),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_names_the_argument(argument):
    with pytest.raises(InputError) as raised:
        BAD[argument]()
    assert raised.value.argument == argument
