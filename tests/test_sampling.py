"""Every sampler, with exact denoisers: right law, right order, and the isotropic algorithm in whitened coordinates."""

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from problems import SAMPLER_CASES, Mixture, refused
from torch import Tensor

import nidiff
from nidiff.commands.evaluate import Evaluate
from nidiff.commands.sample import Sample
from nidiff.diffusion.spacing import SPACINGS
from nidiff.sampling.ancestral import ddim, jump_variances, mix
from nidiff.sampling.sampler import DEFAULT, SAMPLERS
from nidiff.testing.problems import (
    Gaussian,
    Impulses,
    normal,
    output_covariance,
    random_matrix,
    slope,
    smooth_net,
    uniform_in_logsnr,
    whitened_paths,
)
from nidiff.training.experiment import Experiment

COV = nidiff.gaussian_free_field((2, 3), gamma=1.5)
every_sampler = pytest.mark.parametrize(("name", "options"), SAMPLER_CASES)
KEEPS = {"vp": "variance", "ve": "signal"}
every_kind = pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS.keys())


def test_the_list_of_cases_covers_every_sampler():
    elsewhere = {
        "als",
        "cas",
        "angle",
        "angle_2m",
        "repaint",
    }  # test_langevin, test_gaussian and test_per_mode, test_posterior
    assert {name for name, _ in SAMPLER_CASES} == {*SAMPLERS} - elsewhere


@every_kind
@every_sampler
def test_the_law_of_gaussian_data_is_reached(name, options, keeps):
    """Data covariance not commuting with Σ: the exact covariance of the output goes to signal² C + sigma² Σ."""
    problem = Gaussian(COV, mean_scale=0.0)

    def error(num_levels: int) -> float:
        schedule = uniform_in_logsnr(num_levels, keeps)
        _, target = problem.marginal(schedule.level(0))
        found = output_covariance(problem, schedule, name, options)
        return ((found - target).norm() / target.norm()).item()

    coarse, fine = error(60), error(240)
    assert fine < 0.06
    assert fine < 0.45 * coarse or fine < 1e-3


@every_kind
@every_sampler
def test_white_noise_in_a_coloured_process_fails(name, options, keeps):
    """Negative control: the prior and the steps draw white noise, the denoiser is that of Σ."""
    problem = Gaussian(COV, mean_scale=0.0)
    schedule = uniform_in_logsnr(240, keeps)
    _, target = problem.marginal(schedule.level(0))
    found = output_covariance(problem, schedule, name, options, root=torch.eye(6, dtype=torch.float64))
    assert (found - target).norm() / target.norm() > 0.15


@every_sampler
def test_the_mean_of_gaussian_data_is_reached(name, options):
    """Without noise the affine map carries 0 to the mean, up to the discretisation."""
    problem = Gaussian(COV)
    schedule = uniform_in_logsnr(400, "variance")
    process = Impulses(schedule, COV, torch.zeros(6, 0, dtype=torch.float64))
    x = nidiff.sample(
        problem.denoiser(process),
        (1, 2, 3),
        sampler=name,
        num_steps=len(process.schedule),
        dtype=torch.float64,
        **options,
    )
    assert (x.flatten() - problem.mean).norm() / problem.mean.norm() < 0.02


@every_kind
@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("ddim", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_order_of_convergence_on_gaussian_data(name, order, keeps):
    """Against the exact flow map of non-commuting Gaussian data; each method has its order and not a higher one."""
    problem = Gaussian(COV)
    steps, errors = [40, 80, 160, 320], []
    for count in steps:
        schedule = uniform_in_logsnr(count, keeps, -6.0, 6.0)
        start = schedule.level(count - 1)
        initial = start.sigma * normal(4, 2, 3)
        denoiser = problem.denoiser(nidiff.Process(schedule, COV))
        x = nidiff.sample(
            denoiser, (4, 2, 3), sampler=name, num_steps=count, start=initial, denoise=False, dtype=torch.float64
        )
        errors.append((x - problem.flow(initial, start, schedule.level(0))).abs().max().item())
    assert slope(steps, errors) == pytest.approx(order, abs=0.2)


MIXTURE, MIXED_START = Mixture(COV), normal(4, 2, 3)


@lru_cache
def exact_path_of_the_mixture(keeps):
    """The state at log-SNR 5 of an adaptive solver at 1e-10, and the first state, at −5."""
    from torchdiffeq import odeint

    process = nidiff.Process(uniform_in_logsnr(80, keeps, -5.0, 5.0), COV)

    def velocity(clock, x):
        level = process.schedule.level_at(clock.item())
        return process.flow(x, MIXTURE.denoise(x, level), level)

    initial, span = process.schedule.level(79).sigma * MIXED_START, torch.tensor([-5.0, 5.0], dtype=torch.float64)
    return initial, odeint(velocity, initial, span, rtol=1e-10, atol=1e-10)[-1]


@every_kind
@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_order_of_convergence_on_a_mixture(name, order, keeps):
    """The same with a nonlinear exact denoiser. (DDIM is the same map as Euler.)"""
    initial, exact = exact_path_of_the_mixture(keeps)
    steps, errors = [80, 160, 320], []
    for count in steps:
        process = nidiff.Process(uniform_in_logsnr(count, keeps, -5.0, 5.0), COV)
        x = nidiff.sample(
            MIXTURE.denoiser(process),
            (4, 2, 3),
            sampler=name,
            num_steps=count,
            start=initial,
            denoise=False,
            dtype=torch.float64,
        )
        errors.append((x - exact).abs().max().item())
    assert slope(steps, errors) == pytest.approx(order, abs=0.3)


@every_sampler
def test_a_mixture_is_reached(name, options):
    """Weights, mean and covariance of a two-mode mixture with its exact nonlinear denoiser."""
    problem = Mixture(COV)
    process = nidiff.Process(uniform_in_logsnr(150, "variance"), COV)
    torch.manual_seed(0)
    x = nidiff.sample(
        problem.denoiser(process),
        (6000, 2, 3),
        sampler=name,
        num_steps=len(process.schedule),
        dtype=torch.float64,
        **options,
    )
    mean, covariance = problem.moments()
    flat = x.reshape(6000, 6)
    assert (flat.mean(0) - mean).norm() / covariance.diagonal().sum().sqrt() < 0.05
    assert (torch.cov(flat.T) - covariance).norm() / covariance.norm() < 0.1
    near = torch.stack([(flat - part.mean).norm(dim=1) for part in problem.parts]).argmin(0)
    assert (near == 0).double().mean().item() == pytest.approx(0.3, abs=0.04)


def test_white_noise_misses_the_mixture():
    """Negative control for the mixture: a sampler that draws white noise instead of N(0, Σ)."""
    problem = Mixture(COV)

    class White(nidiff.Process):
        def noise(self, shape, generator=None, **place):
            return nidiff.Identity((2, 3)).sample(shape, generator, **place)

    process = White(uniform_in_logsnr(150, "variance"), COV)
    torch.manual_seed(0)
    x = nidiff.sample(problem.denoiser(process), (6000, 2, 3), sampler="ancestral", dtype=torch.float64).reshape(
        6000, 6
    )
    _, covariance = problem.moments()
    assert (torch.cov(x.T) - covariance).norm() / covariance.norm() > 0.1


# Whitening -------------------------------------------------------------------------------------------------------

WHITENED = {
    "periodic": lambda: nidiff.gaussian_free_field((4, 5), gamma=2.0),
    "reflecting": lambda: nidiff.matern((3, 4), 1.5, boundary="reflecting"),
    "dense": lambda: nidiff.Dense(random_matrix(6), (2, 3)),
    "diagonal": lambda: nidiff.Diagonal(random_matrix(6)[:2].abs() + 0.1),
    "channels": lambda: nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((3, 4))),
}


@pytest.mark.parametrize("make", WHITENED.values(), ids=WHITENED.keys())
@pytest.mark.parametrize(
    "schedule", [nidiff.schedules.ddpm_linear(40), nidiff.schedules.smld_geometric(40, 10.0, 0.05)], ids=["vp", "ve"]
)
@every_sampler
def test_in_whitened_coordinates_it_is_the_isotropic_algorithm(name, options, schedule, make):
    """y = Σ^-½ x path by path (R4)."""
    path = whitened_paths(make(), schedule, name, options)
    assert len(path) == 15
    for whitened, y in path:
        assert (whitened - y).abs().max() <= 1e-10 * max(1.0, y.abs().max().item())


def test_clipping_is_not_whitening_equivariant():
    """The one exception, so the equivalence above is not vacuous: clipping acts on pixels."""
    cov = WHITENED["periodic"]()
    twin = cov.with_eigenvalues(torch.ones_like(cov.eigenvalues))
    net, schedule = smooth_net(cov.event_shape), nidiff.schedules.ddpm_linear(40)
    x = nidiff.sample(
        nidiff.Denoiser(net, nidiff.Process(schedule, cov), clip=0.5), (1, 4, 5), generator=[0], dtype=torch.float64
    )
    white = nidiff.Denoiser(lambda y, label: net(cov.sqrt(y), label), nidiff.Process(schedule, twin), clip=0.5)
    y = nidiff.sample(white, (1, 4, 5), generator=[0], dtype=torch.float64)
    assert (cov.inv_sqrt(x) - y).abs().max() > 1e-2


# Identities between samplers -------------------------------------------------------------------------------------


def final(name: str, **options: object) -> Tensor:
    denoiser = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(50), COV))
    return nidiff.sample(
        denoiser, (2, 2, 3), sampler=name, num_steps=50, generator=[1, 2], dtype=torch.float64, **options
    )


def test_euler_is_ddim_and_ddim_with_eta_one_is_ancestral():
    assert torch.equal(final("euler"), final("ddim", eta=0.0))
    assert torch.allclose(final("ddim", eta=1.0), final("ancestral"), rtol=1e-12)
    assert not torch.allclose(final("ancestral", variance="beta"), final("ancestral"), rtol=1e-3)


@every_kind
def test_posterior_mean_and_variance_are_those_of_bayes(keeps):
    """q(x' | x, x0) by conditioning the joint Gaussian of (x', x) given x0; for VP also the paper's μ̃ and β̃."""
    schedule = uniform_in_logsnr(20, keeps, -4.0, 4.0)
    here, there = schedule.level(12), schedule.level(9)
    (signal, sigma), (signal_there, sigma_there) = ((float(o.signal), float(o.sigma)) for o in (here, there))
    ratio = signal / signal_there
    beta = sigma**2 - ratio**2 * sigma_there**2
    # Given x0: x' = s' x0 + σ' n', x = ratio x' + √β n.
    gain = ratio * sigma_there**2 / sigma**2
    variance = sigma_there**2 - gain * ratio * sigma_there**2
    assert tuple(map(float, jump_variances(here, there))) == pytest.approx((beta, variance), rel=1e-10)
    x, x0 = normal(2, 3), normal(2, 3, seed=1)
    mean = there.signal * x0 + gain * (x - here.signal * x0)
    assert torch.allclose(mix(x, x0, here, there, math.sqrt(variance)), mean, rtol=1e-10)
    if keeps == "variance":
        ab, ab_before = signal**2, signal_there**2
        paper = math.sqrt(ab_before) * beta / (1 - ab) * x0 + math.sqrt(1 - beta) * (1 - ab_before) / (1 - ab) * x
        assert torch.allclose(mean, paper, rtol=1e-10)
        assert variance == pytest.approx((1 - ab_before) / (1 - ab) * beta, rel=1e-10)


@every_sampler
def test_the_last_step_is_the_expected_denoised_sample_without_noise(name, options):
    """From the same state at the last level, two different seeds give the same image: x̂0 of that state."""
    denoiser = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(50), COV))
    state = normal(2, 2, 3)
    images = [
        nidiff.sample(
            denoiser, (2, 2, 3), sampler=name, spacing=[0], start=state, generator=s, dtype=torch.float64, **options
        )
        for s in ([0, 1], [2, 3])
    ]
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], denoiser(state, nidiff.schedules.ddpm_linear(50).level(0)))


# Σ = I is diffusers ----------------------------------------------------------------------------------------------


def diffusers_path(scheduler, net, steps: int) -> list[Tensor]:
    """Run a diffusers scheduler as its pipeline does, with the draws of seed 3, in float64."""
    if not hasattr(scheduler, "lambda_t"):  # DPM-Solver's tables are float32 for good
        scheduler.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((1, 1, 4, 4), generator=generator, dtype=torch.float64)
    scheduler.set_timesteps(steps)
    path = []
    for t in scheduler.timesteps:
        path.append(x)
        output = net(x, t.expand(1))
        x = scheduler.step(output, t, x, generator=generator).prev_sample
    return [*path, x]


PREDICTIONS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize(
    ("name", "options", "peer", "settings", "steps", "spacing"),
    [
        ("ancestral", {}, "DDPMScheduler", {"variance_type": "fixed_small"}, 1000, "uniform"),
        ("ancestral", {"variance": "beta"}, "DDPMScheduler", {"variance_type": "fixed_large"}, 1000, "uniform"),
        ("ancestral", {}, "DDPMScheduler", {"variance_type": "fixed_small"}, 50, "trailing"),
        ("ddim", {}, "DDIMScheduler", {}, 50, "trailing"),
        ("ancestral", {}, "DDPMScheduler", {"variance_type": "fixed_small"}, 30, "trailing"),
        ("dpmpp_2m", {}, "DPMSolverMultistepScheduler", {"final_sigmas_type": "zero"}, 20, "trailing"),
    ],
)
def test_with_white_noise_it_is_diffusers_step_by_step(name, options, peer, settings, steps, spacing, target):
    import diffusers

    scheduler = getattr(diffusers, peer)(
        num_train_timesteps=1000,
        prediction_type=PREDICTIONS[target],
        timestep_spacing="trailing" if spacing == "trailing" else "leading",
        **settings,
        **({"clip_sample": False} if peer in ("DDPMScheduler", "DDIMScheduler") else {}),
    )
    net = smooth_net((4, 4))
    theirs = diffusers_path(scheduler, net, steps)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(1000), nidiff.Identity((4, 4)))
    ours: list[Tensor] = []
    last = nidiff.sample(
        nidiff.Denoiser(net, process, target=target),
        (1, 1, 4, 4),
        sampler=name,
        num_steps=steps,
        spacing=spacing,
        generator=[3],
        dtype=torch.float64,
        callback=lambda progress: ours.append(progress.x),
        **options,
    )
    for a, b in zip([*ours, last], theirs, strict=True):
        tolerance = 1e-4 if name == "dpmpp_2m" else 1e-8
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


# Promises to the user --------------------------------------------------------------------------------------------


@every_sampler
def test_an_image_depends_on_its_seed_alone(name, options):
    denoiser = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(20), COV))
    draw = {"sampler": name, "dtype": torch.float64, **options}
    batch = nidiff.sample(denoiser, (8, 2, 3), generator=range(8), **draw)
    alone = nidiff.sample(denoiser, (1, 2, 3), generator=[7], **draw)
    other = nidiff.sample(denoiser, (2, 2, 3), generator=[9, 7], **draw)
    assert torch.allclose(batch[7], alone[0], rtol=0, atol=1e-12)
    assert torch.allclose(batch[7], other[1], rtol=0, atol=1e-12)
    assert (batch[7] - batch[6]).abs().max() > 1e-3


def test_without_seeds_torchs_generator_decides():
    denoiser = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(20), COV))
    torch.manual_seed(1)
    first = nidiff.sample(denoiser, (2, 2, 3), dtype=torch.float64)
    torch.manual_seed(1)
    assert torch.equal(first, nidiff.sample(denoiser, (2, 2, 3), dtype=torch.float64))
    assert not torch.equal(first, nidiff.sample(denoiser, (2, 2, 3), dtype=torch.float64))


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize(
    "schedule", [nidiff.schedules.ddpm_linear(100), nidiff.schedules.ddpm_cosine(100)], ids=["linear", "cosine"]
)
def test_a_spacing_visits_distinct_falling_rows_from_the_top(spacing, schedule):
    for count in (1, 2, 7, 50, 99, 100):
        rows = SPACINGS[spacing](schedule, count)
        assert len(rows) == count
        assert rows == sorted(set(rows), reverse=True)
        assert rows[0] == 99
        assert rows[-1] >= 0
        if count > 1 and spacing != "trailing":
            assert rows[-1] == 0


def test_progress_is_told_after_every_step():
    seen = []
    denoiser = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(20), COV))
    nidiff.sample(denoiser, (1, 2, 3), sampler="ancestral", num_steps=5, dtype=torch.float64, callback=seen.append)
    assert [(p.step, p.num_steps) for p in seen] == [(i, 5) for i in range(1, 6)]
    assert [p.level.label for p in seen] == [19, 14, 10, 5, 0]


def test_sampling_leaves_no_graph_and_follows_the_networks_device_and_dtype():
    layer = torch.nn.Linear(6, 6)
    net = torch.nn.Module()
    net.layer = layer
    net.forward = lambda x, label: layer(x.flatten(1)).reshape(x.shape)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(5), COV)
    x = nidiff.sample(nidiff.Denoiser(net, process), (2, 2, 3))
    assert not x.requires_grad
    assert x.dtype == torch.float32
    assert x.device == layer.weight.device


PROCESS = nidiff.Process(nidiff.schedules.ddpm_linear(10), COV)
DENOISER = nidiff.Denoiser(smooth_net((2, 3)), PROCESS)
BAD = {
    "unknown sampler": ({"sampler": "plms"}, "sampler"),
    "unknown option": ({"sampler": "ddim", "variance": "beta"}, "variance"),
    "option of none": ({"sampler": "euler", "eta": 0.1}, "eta"),
    "option of another type": ({"sampler": "ddim:eta=much"}, "eta"),
    "eta": ({"sampler": "ddim", "eta": 1.5}, "eta"),
    "variance": ({"sampler": "ancestral", "variance": "learned"}, "variance"),
    "no steps": ({"num_steps": 0}, "num_steps"),
    "too many steps": ({"num_steps": 11}, "num_steps"),
    "unknown spacing": ({"spacing": "cosine"}, "spacing"),
    "written spacing": ({"sampler": "ddim:spacing=cosine"}, "spacing"),
    "rising rows": ({"spacing": [0, 5]}, "spacing"),
    "rows beyond": ({"spacing": [10, 5]}, "spacing"),
    "rows and steps": ({"spacing": [5], "num_steps": 1}, "spacing"),
    "too few seeds": ({"generator": [1]}, "generator"),
    "duplicate seeds": ({"generator": [4, 4]}, "generator"),
    "negative seeds": ({"generator": [0, -1]}, "generator"),
    "start of another shape": ({"start": torch.zeros(3, 2, 3)}, "start"),
}


@pytest.mark.parametrize(("arguments", "blamed"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(arguments, blamed):
    with pytest.raises(nidiff.InputError, match=blamed):
        nidiff.sample(DENOISER, (2, 2, 3), dtype=torch.float64, **arguments)


def test_a_generator_is_a_seed_or_a_generator_for_all_or_for_each():
    def draw(generator):
        return nidiff.sample(DENOISER, (2, 2, 3), generator=generator, sampler="ancestral", dtype=torch.float64)

    def made(seed):
        return torch.Generator().manual_seed(seed)

    each = draw([3, 4])
    for same in (torch.tensor([3, 4]), range(3, 5), [made(3), made(4)]):
        assert torch.equal(draw(same), each)
    assert torch.equal(draw([5, 4])[1], each[1])
    assert torch.equal(draw(3), draw(made(3)))
    assert not torch.equal(draw(3), each)
    torch.manual_seed(3)
    assert torch.equal(draw(None), draw(3))
    assert not torch.equal(draw(None), draw(3))


def test_a_generator_means_the_same_everywhere():
    x0, gaussian = normal(2, 2, 3), nidiff.GaussianModel(torch.zeros(2, 3), COV)
    known = nidiff.Denoiser(DENOISER.net, PROCESS, gaussian=gaussian)
    draws = {
        "loss": lambda generator: nidiff.denoising_loss(DENOISER, x0, generator=generator),
        "covariance": lambda generator: COV.sample((2, 2, 3), generator),
        "kappa": lambda generator: nidiff.design.measure_kappa(known, x0, num_rows=2, generator=generator).kappa.values,
    }
    for draw in draws.values():
        assert torch.equal(draw([3, 4]), draw([torch.Generator().manual_seed(seed) for seed in (3, 4)]))
        assert torch.equal(draw(3), draw(torch.Generator().manual_seed(3)))
        assert not torch.equal(draw(3), draw(4))
        with pytest.raises(nidiff.InputError):
            draw([3])


def test_sample_is_levels_prior_and_walk():
    source = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    levels = PROCESS.schedule.levels(5, "trailing")
    x = PROCESS.prior((2, 2, 3), source, dtype=torch.float64)
    x = nidiff.walk(DENOISER, x, levels, "ddim:eta=1", generator=source)
    given = {"num_steps": 5, "spacing": "trailing", "generator": [3, 4], "dtype": torch.float64}
    assert torch.equal(x, nidiff.sample(DENOISER, (2, 2, 3), sampler="ddim", eta=1, **given))
    rows = [level.label for level in levels]
    assert [level.label for level in PROCESS.schedule.levels(rows)] == rows
    assert len(rows) == 5
    with pytest.raises(nidiff.InputError, match="rows"):
        PROCESS.schedule.levels([1, 2])


def test_a_network_is_not_a_denoiser():
    with refused("denoiser"):
        nidiff.sample(torch.nn.Identity(), (2, 2, 3))


def test_a_shape_that_is_not_the_covariances_is_named():
    with pytest.raises(nidiff.InputError, match="shape"):
        nidiff.sample(DENOISER, (2, 3, 2))


# By name, or the object itself -----------------------------------------------------------------------------------


def halfway(chain, x, x0, here, there, *, share: float = 0.5):
    """DDIM with a share of the noise drawn anew."""
    return mix(x, x0, here, there, share * there.sigma) + share * there.sigma * chain.noise()


def every_third(schedule, count):
    return [3 * (count - 1 - i) for i in range(count)]


def test_a_sampler_is_a_name_a_text_an_object_or_a_step(monkeypatch):
    def draw(sampler, **options):
        return nidiff.sample(DENOISER, (2, 2, 3), sampler=sampler, generator=[0, 1], dtype=torch.float64, **options)

    assert torch.equal(draw("ddim:eta=0.5,spacing=uniform", num_steps=4), draw(
        nidiff.sampling.Sampler(ddim, "uniform"), eta=0.5, num_steps=4))  # fmt: skip
    monkeypatch.setitem(SAMPLERS, "halfway", nidiff.sampling.Sampler(halfway))
    own = draw(halfway, share=0.3)
    assert torch.equal(own, draw("halfway:share=0.3"))
    assert torch.equal(own, draw(nidiff.sampling.Sampler(halfway), share=0.3))
    assert not torch.equal(own, draw(halfway, share=0.4))
    with refused("eta"):
        draw(halfway, eta=0.3)
    with refused("share"):
        draw("halfway:share=much")
    corrected = draw("pc:corrector_steps=0", predictor=halfway)
    assert torch.equal(corrected, draw("pc:corrector_steps=0,predictor=halfway"))
    assert torch.equal(corrected, draw("halfway"))


def test_a_steps_options_may_be_of_any_kind():
    """As a user writes them: a tensor, anything, without the star, or collected."""

    def draw(step, **options):
        return nidiff.sample(DENOISER, (1, 2, 3), sampler=step, generator=[0], dtype=torch.float64, **options)

    def masked(chain, x, x0, here, there, *, mask: Tensor | None = None):
        return mix(x, x0 if mask is None else mask * x0, here, there, 0.0)

    def anything(chain, x, x0, here, there, *, mask: Any = None):
        return masked(chain, x, x0, here, there, mask=mask)

    def plain(chain, x, x0, here, there, mask=None):
        return masked(chain, x, x0, here, there, mask=mask)

    def collected(chain, x, x0, here, there, **options):
        return masked(chain, x, x0, here, there, **options)

    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    expected = draw(masked, mask=mask)
    assert not torch.equal(expected, draw(masked))
    for step in (anything, plain, collected):
        assert torch.equal(expected, draw(step, mask=mask))
    with refused("mask"):
        draw(masked, mask="left")
    with refused("x0"):
        draw(plain, x0=mask)


def test_a_spacing_is_a_name_or_a_function_and_its_rows_are_checked(monkeypatch):
    def draw(spacing):
        return nidiff.sample(DENOISER, (1, 2, 3), num_steps=3, spacing=spacing, generator=[0], dtype=torch.float64)

    rows = nidiff.sample(DENOISER, (1, 2, 3), spacing=[6, 3, 0], generator=[0], dtype=torch.float64)
    assert torch.equal(draw(every_third), rows)
    monkeypatch.setitem(SPACINGS, "thirds", every_third)
    assert torch.equal(draw("thirds"), rows)
    with refused("spacing"):
        draw(lambda schedule, count: list(range(count)))


def test_one_default_whatever_the_door():
    """The sampler's entry says how many steps and which; nothing else does."""
    assert {Sample.sampler, Evaluate.sampler} == {None}  # which is the default or, of a model that ships, its own
    assert Experiment.sampler == DEFAULT  # written out, to start without torch
    assert {command.num_steps for command in (Sample, Evaluate, Experiment)} == {None}
    long = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(50), COV))

    def draw(**arguments):
        return nidiff.sample(long, (1, 2, 3), generator=[0], dtype=torch.float64, **arguments)

    assert torch.equal(draw(), draw(sampler="dpmpp_2m", num_steps=20, spacing="trailing"))
    assert torch.equal(draw(sampler="ancestral"), draw(sampler="ancestral", num_steps=50, spacing="uniform"))
    short = nidiff.sample(DENOISER, (1, 2, 3), generator=[0], dtype=torch.float64)  # only 10 levels
    assert torch.equal(short, nidiff.sample(DENOISER, (1, 2, 3), num_steps=10, generator=[0], dtype=torch.float64))


def test_a_network_error_that_will_explode_is_announced():
    """With eps, the cosine schedule's last level divides by a signal of 5e-5: samples with a deviation of thousands."""
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(1000), COV)

    def noisy(x, label):  # a little-trained network: the right size, the wrong values
        return x.flip(-1)

    with pytest.warns(UserWarning, match="clip=None with target 'eps' multiplies an error of the network"):
        wild = nidiff.sample(nidiff.Denoiser(noisy, process), (8, 2, 3), generator=range(8))
    assert wild.std() > 100
    with pytest.warns(UserWarning, match="by 20,291 in the first step"):  # x̂0 itself is what a single step returns
        wild = nidiff.sample(nidiff.Denoiser(noisy, process), (8, 2, 3), num_steps=1, generator=range(8))
    assert wild.std() > 100
    for calm in (nidiff.Denoiser(noisy, process, clip=1.0), nidiff.Denoiser(noisy, process, target="v")):
        assert (
            nidiff.sample(calm, (8, 2, 3), generator=range(8)).std() < 10
        )  # and no warning, which would be an error here
    nidiff.sample(
        nidiff.Denoiser(noisy, nidiff.Process(nidiff.schedules.ddpm_linear(1000), COV)), (8, 2, 3), num_steps=5
    )
