"""The rule from the ODE to the SDE: exact for Gaussian data, of second order in law, and its special cases."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from problems import refused
from torch import Tensor

import nidiff
from nidiff.covariance.modes import Modes
from nidiff.covariance.waves import Waves
from nidiff.diffusion.gaussian import Kappa
from nidiff.sampling import Chain, Sampler, Step
from nidiff.sampling.ancestral import ancestral, ddim
from nidiff.sampling.local import dpmpp_2m, gaussian_2m
from nidiff.sampling.sampler import SAMPLERS
from nidiff.sampling.step import run_chain
from nidiff.testing.problems import normal, slope, smooth_net

SHAPE = (3, 2, 3)
STEEP = nidiff.power_law((2, 3), 2.67, normalize=False)
MATRICES = nidiff.correlated([nidiff.power_law((2, 3), p) for p in (1.0, 2.0, 3.0)], torch.eye(3) * 0.4 + 0.6)
MODELS = {
    "shared": nidiff.GaussianModel(0.4 * normal(*SHAPE, seed=3), STEEP),
    "a matrix per mode": nidiff.GaussianModel(0.4 * normal(*SHAPE, seed=3), MATRICES),
}
SCHEDULES = {
    "linear": nidiff.schedules.ddpm_linear(50),
    "smld": nidiff.schedules.smld_geometric(50, 20.0, 0.05),
    "flow": nidiff.schedules.flow(50),
}
every_eta = pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])


def constant(model: nidiff.GaussianModel, rows: int, share: float, trust: float = 1.0) -> Kappa:
    ones = torch.ones(2, *model.covariance.event_shape, dtype=torch.float64)
    return Kappa(torch.tensor([0.0, rows - 1.0]), share * ones, trust * ones)


# Exact for Gaussian data -----------------------------------------------------------------------------------------


def law(denoiser: nidiff.Denoiser, rows: list[int], sampler: str, colour: nidiff.Covariance, **options) -> tuple:
    """Mean and covariance of x0, of a start with the law of the data at the first row: every step is affine in x and
    in its noise, so that they follow from the responses to a unit of each."""
    process, gaussian = denoiser.process, denoiser.gaussian
    levels, size = process.schedule.levels(rows), math.prod(gaussian.shape)
    units = torch.eye(size, dtype=torch.float64).reshape(size, *gaussian.shape)
    start = gaussian.at(levels[0], process.covariance)
    draws = len(rows) + 1

    def ends(number: int | None) -> Tensor:
        """Where an impulse in the start (number 0) or in a draw ends; None: without any."""
        count = iter(range(1, draws))
        noise = Chain(denoiser, lambda: colour.sqrt(units) if next(count) == number else 0 * units)
        x = start.from_z(units if number == 0 else 0 * units)
        return run_chain(noise, x, levels, SAMPLERS[sampler], options).flatten(1)

    mean = ends(None)
    responses = [ends(number) - mean for number in range(draws)]
    return mean[0], sum(each.T @ each for each in responses)


@every_eta
@pytest.mark.parametrize("name", MODELS)
def test_it_is_exact_for_gaussian_data_in_every_number_of_steps(name, eta):
    """x0 ~ N(μ, C) comes out, mean and covariance, under white and other noise and three kinds of schedules."""
    model = MODELS[name]
    exact = torch.block_diag(*[model.covariance.dense()] * (math.prod(SHAPE) // model.covariance.size))
    for schedule in SCHEDULES.values():
        for cov in (nidiff.Identity((2, 3)), model.power(0.5)):
            denoiser = model.denoiser(nidiff.Process(schedule, cov))
            for rows in ([49], [49, 30, 2]):
                mean, covariance = law(denoiser, rows, "gaussian_2m", cov, eta=eta)
                assert torch.allclose(mean, model.mean.flatten(), atol=1e-10)
                assert torch.allclose(covariance, exact, atol=1e-9)
        _, other = law(denoiser, rows, "dpmpp_2m", cov, eta=eta)
        assert (other - exact).abs().max() > 1e-2  # V = 0 is exact for a single image alone
        _, white = law(denoiser, rows, "gaussian_2m", nidiff.Identity((2, 3)), eta=eta)
        assert torch.allclose(white, exact, atol=1e-3) == (eta == 0)  # the noise has to have the colour of Σ


def test_levels_per_mode_are_as_exact():
    model, base = MODELS["shared"], SCHEDULES["linear"]
    late = torch.tensor([[0.0, 1.0, 1.0], [2.0, 3.0, 3.0]], dtype=torch.float64)
    schedule = nidiff.Schedule(base.logsnr.reshape(-1, 1, 1) - late * base.time.reshape(-1, 1, 1))
    cov = model.power(0.5)
    _, covariance = law(model.denoiser(nidiff.Process(schedule, cov)), [49, 20], "gaussian_2m", cov, eta=0.5)
    assert torch.allclose(covariance, torch.block_diag(*[model.covariance.dense()] * 3), atol=1e-9)


# Special cases ---------------------------------------------------------------------------------------------------


def step(sampler, denoiser: nidiff.Denoiser, rows: tuple[int, ...], **options) -> Tensor:
    """x after the steps between these rows, with the same noise whatever the sampler."""
    noises = (normal(2, *SHAPE, seed=seed) for seed in range(10, 20))
    chain = Chain(denoiser, lambda: denoiser.process.covariance.sqrt(next(noises)))
    levels = denoiser.process.schedule.levels(list(rows))
    return run_chain(chain, normal(2, *SHAPE), levels, Sampler(sampler), options, denoise=False)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_its_first_step_without_v_is_ddim_and_ancestral(schedule):
    """κ = 1 is V = 0; η = 0 is then DDIM and η = 1 DDPM; and with κ in between η = 1 is ancestral:variance=gaussian."""
    model = MODELS["a matrix per mode"]
    process = nidiff.Process(schedule, model.power(0.5))
    denoiser = nidiff.Denoiser(smooth_net(SHAPE), process, "x0", gaussian=model)
    known, half = (denoiser.with_kappa(constant(model, 50, share)) for share in (1.0, 0.5))
    for same in (step(gaussian_2m, known, (40, 20), eta=0.0), step(dpmpp_2m, known, (40, 20))):
        assert torch.allclose(same, step(ddim, known, (40, 20)), atol=1e-10)
    for same in (step(gaussian_2m, known, (40, 20), eta=1.0), step(dpmpp_2m, known, (40, 20), eta=1.0)):
        assert torch.allclose(same, step(ancestral, known, (40, 20)), atol=1e-10)
    with_variance = step(ancestral, half, (40, 20), variance="gaussian")
    assert torch.allclose(step(gaussian_2m, half, (40, 20), eta=1.0), with_variance, atol=1e-10)
    assert not torch.allclose(step(gaussian_2m, half, (40, 20), eta=0.9), with_variance, atol=1e-3)


def test_beta_is_a_network_whose_residual_is_as_much_smaller():
    model, schedule = MODELS["a matrix per mode"], SCHEDULES["linear"]
    process = nidiff.Process(schedule, model.power(0.5))
    exact, plain = model.denoiser(process), nidiff.Denoiser(smooth_net(SHAPE), process, "x0", gaussian=model)

    def net(x, label):
        level = schedule.level(int(label[0]))
        return exact(x, level).lerp(plain(x, level), 0.25)

    quarter = nidiff.Denoiser(net, process, "x0", gaussian=model).with_kappa(constant(model, 50, 0.5))
    trusted = plain.with_kappa(constant(model, 50, 0.5, trust=0.25))
    results = [step(gaussian_2m, each, (45, 30, 10), eta=0.5) for each in (quarter, trusted)]
    assert torch.allclose(*results, atol=1e-10)
    assert not torch.allclose(step(gaussian_2m, plain, (45, 30, 10), eta=0.5), results[0], atol=1e-3)


def test_the_limit_holds_back_what_longer_steps_would_carry_on():
    """Steps that grow in log-SNR carry more than half of the change on, steps that shrink less."""
    process = nidiff.Process(SCHEDULES["linear"], nidiff.Identity((2, 3)))
    denoiser = nidiff.Denoiser(smooth_net(SHAPE), process, "x0")
    for rows, grows in (((40, 35, 5), True), ((40, 10, 8), False)):
        free, limited, first = (step(dpmpp_2m, denoiser, rows, limit=limit) for limit in (None, 0.5, 0.0))
        assert torch.equal(free, limited) != grows
        assert torch.allclose(first, step(ddim, denoiser, rows))


def test_with_white_noise_and_eta_one_it_is_diffusers_sde():
    """DPMSolverMultistepScheduler, given the same noise; its tables are float32."""
    from diffusers import DPMSolverMultistepScheduler

    settings = {"algorithm_type": "sde-dpmsolver++", "solver_type": "midpoint", "final_sigmas_type": "zero"}
    theirs = DPMSolverMultistepScheduler(200, timestep_spacing="trailing", prediction_type="sample", **settings)
    theirs.set_timesteps(20)
    net, process = smooth_net(SHAPE), nidiff.Process(nidiff.schedules.ddpm_linear(200), nidiff.Identity(SHAPE))
    levels = process.schedule.levels(theirs.timesteps.tolist())
    x = start = normal(2, *SHAPE)
    for number, row in enumerate(theirs.timesteps):
        noise = normal(2, *SHAPE, seed=number)
        x = theirs.step(net(x, row.expand(2)), row, x, variance_noise=noise).prev_sample
    for eta, same in ((1.0, True), (0.9, False)):
        noises = (normal(2, *SHAPE, seed=number) for number in range(20))
        chain = Chain(nidiff.Denoiser(net, process, "x0"), noises.__next__)
        ours = run_chain(chain, start, levels, Sampler(dpmpp_2m), {"eta": eta})
        assert torch.allclose(ours, x, atol=1e-4) == same


# Order -----------------------------------------------------------------------------------------------------------

FINE, COUNTS, PATHS = 128, [8, 16, 32], 8_000
WEIGHTS, MEANS, SPREAD = torch.tensor([0.3, 0.7], dtype=torch.float64), (-1.0, 0.8), 0.4
SCHEDULE = nidiff.Schedule(torch.linspace(4.0, -4.0, FINE + 1, dtype=torch.float64))
ONE = nidiff.GaussianModel(torch.tensor([0.26]), 0.8404 * nidiff.Identity((1,)))  # the moments of the two peaks


def two_peaks() -> nidiff.Denoiser:
    """The exact denoiser of two Gaussians on a line."""

    def net(x, label):
        level = SCHEDULE.level(int(label[0]))
        signal, total = float(level.signal), float(level.signal**2 * SPREAD**2 + level.sigma**2)
        means = torch.tensor(MEANS, dtype=torch.float64).reshape(2, 1, 1)
        centred = x - signal * means
        share = (WEIGHTS.log().reshape(2, 1, 1) - centred**2 / (2 * total)).softmax(0)
        return (share * (means + signal * SPREAD**2 / total * centred)).sum(0)

    process = nidiff.Process(SCHEDULE, nidiff.Identity((1,)))
    return nidiff.Denoiser(net, process, "x0", gaussian=ONE).with_kappa(constant(ONE, FINE + 1, 0.4))


def noise_of_steps(rows: list[int], eta: float, white: Tensor) -> Iterator[Tensor]:
    """The noise of steps between ``rows``, each made of the ``white`` noise of the finest steps within it."""
    signal, sigma = SCHEDULE.signal.tolist(), SCHEDULE.sigma.tolist()
    for here, there in pairwise(rows):
        total, variance = torch.zeros_like(white[0]), 0.0
        for a, b in pairwise(range(here, there - 1, -1)):
            q = (sigma[b] / signal[b] / sigma[a] * signal[a]) ** 2
            kept, fresh = signal[b] / signal[a] * q ** ((1 + eta) / 2), sigma[b] * math.sqrt(1 - q**eta)
            total, variance = kept * total + fresh * white[FINE - a], kept**2 * variance + fresh**2
        yield total / math.sqrt(variance)


def orders(sampler: Step, eta: float) -> tuple[float, float]:
    """The weak order, by the largest error of three moments, and the strong one, by the root mean square, against the
    finest steps on the same Brownian paths; a moment must stand above three of its standard errors."""
    white, top = normal(FINE, PATHS, 1, seed=1), SCHEDULE.level(FINE)
    x0 = torch.where(normal(PATHS, 1, seed=2) < -0.5244, *MEANS) + SPREAD * normal(PATHS, 1, seed=3)
    start = top.signal * x0 + top.sigma * normal(PATHS, 1, seed=4)

    def end(count: int) -> Tensor:
        rows = [*range(FINE, -1, -(FINE // count))]
        noises = noise_of_steps(rows, eta, white)
        chain, levels = Chain(two_peaks(), lambda: next(noises)), SCHEDULE.levels(rows)
        x = run_chain(chain, start, levels, Sampler(sampler), {"eta": eta}, denoise=False)
        return torch.stack([x, x**2, x.tanh()])[..., 0]

    fine, weak, strong = end(FINE), [], []
    for count in COUNTS:
        difference = end(count) - fine
        moment = int(difference.mean(1).abs().argmax())
        error, bar = difference[moment].mean().abs().item(), difference[moment].std().item() / math.sqrt(PATHS)
        assert error > 3 * bar
        weak.append(error)
        strong.append(difference[0].square().mean().sqrt().item())
    return slope(COUNTS, weak), slope(COUNTS, strong)


def of_first_order(chain: Chain, *arguments: Any, **options: Any) -> Tensor:
    chain.history.clear()
    return dpmpp_2m(chain, *arguments, **options)


@every_eta
def test_its_law_is_of_second_order_and_its_paths_with_noise_of_first(eta):
    """Of two peaks: the weak order is 2 for every η; the strong one is 2 without noise and 1 with. (What x̂0 changed in
    the last step is in part noise.)"""
    weak, strong = orders(dpmpp_2m, eta)
    assert weak == pytest.approx(2.0, abs=0.35)
    assert strong == pytest.approx(1.0 if eta else 2.0, abs=0.25)
    assert orders(of_first_order, eta)[0] == pytest.approx(1.0, abs=0.2)  # negative control: it looks at no past


def test_with_v_it_is_of_second_order_too():
    weak, strong = orders(gaussian_2m, 0.0)
    assert weak > 1.65
    assert strong == pytest.approx(2.0, abs=0.35)


# iPNDM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "exact"), [(3, True), (4, False)])
def test_ipndm_integrates_a_cubic_exactly_where_steps_are_equal(degree, exact):
    """From the fourth step on, with noise n̂ that is a polynomial in sigma/signal: Adams–Bashforth of order 4."""
    schedule = nidiff.Schedule(-2 * torch.arange(1.0, 11.0, dtype=torch.float64).log(), "signal")  # sigma = row + 1
    process = nidiff.Process(schedule, nidiff.gaussian_free_field((2, 3)))
    direction, visits = normal(1, 2, 3), []

    def net(x, label):
        sigma = float(label[0]) + 1
        return x - sigma * sigma**degree * direction

    start = 10 * normal(1, 2, 3, seed=1)
    denoiser = nidiff.Denoiser(net, process, "x0")
    nidiff.sample(
        denoiser, (1, 2, 3), sampler="ipndm", spacing=[*range(9, -1, -1)], start=start, callback=visits.append,
        dtype=torch.float64,
    )  # fmt: skip
    for here, there in pairwise(visits[3:]):
        a, b = float(here.level.sigma), float(there.level.sigma)
        change = (b ** (degree + 1) - a ** (degree + 1)) / (degree + 1) * direction
        assert torch.allclose(there.x - here.x, change, rtol=1e-9, atol=1e-9) == exact


# The coefficients that are remembered ----------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["not", "in place", "a copy"])
def test_coefficients_are_remembered_until_x_changes(changed):
    """Of what a step returned, until a callback or an observation changes it; the second analysis is of x̂0."""
    counted: list[Tensor] = []

    class Counted(Waves):
        def analyse(self, x):
            counted.append(x)
            return super().analyse(x)

    basis = Counted((2, 3))
    chain = Chain(two_peaks(), lambda: normal(2, 2, 3))
    weight = Modes(torch.tensor([[1.0, 2.0, 2.0], [3.0, 4.0, 4.0]]), basis)
    x = chain.combine((weight, normal(2, 2, 3)), (2 * weight, normal(2, 2, 3, seed=1)))
    if changed == "in place":
        x.add_(1.0)
    x = x + 1.0 if changed == "a copy" else x
    exact = weight * x
    counted.clear()
    assert torch.allclose(chain.combine((weight, x)), exact)
    assert len(counted) == (0 if changed == "not" else 1)


def test_tables_that_are_remembered_belong_to_their_gaussian_kappa_levels_and_rule():
    """Of one process, whose walks share them: each walk has the bits of a process that has seen no other. Twice as many
    rows have levels of the same numbers and other neighbours."""
    first, second = (nidiff.GaussianModel(torch.zeros(SHAPE), scale * STEEP) for scale in (1.0, 2.0))
    knowledge = [(model, constant(model, 50, share)) for model in (first, second) for share in (0.2, 0.7)]
    model, kappa = knowledge[-1]
    knowledge.append((model, kappa._replace(trust=0.5 * kappa.trust)))
    walks = [("angle", 4), ("angle_2m", 4), ("gaussian_2m", 4), ("gaussian_2m:eta=0.5", 4), ("angle_2m", 8)]

    def draw(process: nidiff.Process, model: nidiff.GaussianModel, kappa: Kappa, sampler: str, count: int) -> Tensor:
        denoiser = nidiff.Denoiser(lambda x, label: 0.3 * x, process, "x0", gaussian=model, kappa=kappa)
        rows = torch.linspace(49, 3, count).round().int().tolist()
        return nidiff.sample(denoiser, (2, *SHAPE), sampler=sampler, spacing=rows, generator=0)

    def fresh() -> nidiff.Process:
        return nidiff.Process(SCHEDULES["linear"], STEEP)

    shared, cases = fresh(), [(*known, *walk) for known in knowledge for walk in walks for _ in range(2)]
    found, alone = ([draw(process(), *case) for case in cases] for process in (lambda: shared, fresh))
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    assert len({tuple(x.flatten().tolist()) for x in found}) == len(knowledge) * len(walks)  # none is another's


def test_bad_input_is_named():
    denoiser = two_peaks()
    for argument, call in [
        ("eta", lambda: nidiff.sample(denoiser, (1, 1), sampler="gaussian_2m:eta=2")),
        ("eta", lambda: nidiff.sample(denoiser, (1, 1), sampler="dpmpp_2m:eta=-1")),
        ("limit", lambda: nidiff.sample(denoiser, (1, 1), sampler="dpmpp_2m:limit=-1")),
        ("finish", lambda: nidiff.sample(denoiser, (1, 1), sampler="gaussian_2m:finish=soon")),
        ("order", lambda: nidiff.sample(denoiser, (1, 1), sampler="ipndm:order=5")),
        ("sampler", lambda: nidiff.sample(denoiser.with_gaussian(None), (1, 1), sampler="gaussian_2m", spacing=[3])),
    ]:
        with refused(argument):
            call()
