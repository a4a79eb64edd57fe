"""Every sampler, with exact denoisers: right law, right order, and the isotropic algorithm in whitened coordinates."""

import math
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
from nidiff.sampling.solver import euler_maruyama
from nidiff.sampling.step import Chain
from nidiff.testing import check_sampler
from nidiff.testing.problems import (
    Gaussian,
    normal,
    output_covariance,
    random_matrix,
    smooth_net,
    uniform_in_logsnr,
    whitened_paths,
)
from nidiff.training.experiment import Experiment

COV = nidiff.gaussian_free_field((2, 3), gamma=1.5)
every_sampler = pytest.mark.parametrize(("name", "options"), SAMPLER_CASES)
every_kind = pytest.mark.parametrize("keeps", ["variance", "signal"])


def draw(denoiser: nidiff.Denoiser, shape: tuple[int, ...], **options: Any) -> Tensor:
    return nidiff.sample(denoiser, shape, **{"dtype": torch.float64, **options})


def test_the_list_of_cases_covers_every_sampler():
    elsewhere = {"als", "cas", "angle", "angle_2m", "gaussian_2m", "repaint", "diffpir"}  # test_langevin, …
    assert {name for name, _ in SAMPLER_CASES} == {*SAMPLERS} - elsewhere


@every_sampler
def test_the_law_of_gaussian_data_is_reached(name, options):
    """With data whose covariance does not commute with Σ, exactly: mean and covariance, and the order, for VP and VE;
    and path by path it is the isotropic algorithm in whitened coordinates (R4)."""
    order = {"euler": 1, "heun": 2, "dpmpp_2m": 2, "ipndm": 2}.get(name) if "eta" not in options else None
    report = check_sampler(name, order=order, **options)
    assert report.passed, report


def test_white_noise_in_a_coloured_process_fails():
    """Negative control: the prior and the steps draw white noise, the denoiser is that of Σ."""
    problem = Gaussian(COV, mean_scale=0.0)
    for keeps in ("variance", "signal"):
        schedule = uniform_in_logsnr(160, keeps)
        _, target = problem.marginal(schedule.level(0))
        for name in ("ancestral", "heun"):
            found = output_covariance(problem, schedule, name, {}, white=True)
            assert (found - target).norm() / target.norm() > 0.15


MIXTURE = Mixture(COV)


def of_mixture(process: nidiff.Process, name: str, options: dict[str, Any]) -> tuple[Tensor, float]:
    """Samples of the mixture, and how far their covariance is off."""
    torch.manual_seed(0)
    x = draw(MIXTURE.denoiser(process), (3000, 2, 3), sampler=name, num_steps=len(process.schedule), **options)
    _, covariance = MIXTURE.moments()
    return x.flatten(1), ((torch.cov(x.flatten(1).T) - covariance).norm() / covariance.norm()).item()


@every_sampler
def test_a_mixture_is_reached(name, options):
    """Weights, mean and covariance of a two-mode mixture with its exact nonlinear denoiser."""
    mean, covariance = MIXTURE.moments()
    x, off = of_mixture(nidiff.Process(uniform_in_logsnr(120, "variance"), COV), name, options)
    assert off < 0.12
    assert (x.mean(0) - mean).norm() / covariance.diagonal().sum().sqrt() < 0.05
    assert MIXTURE.share_of_the_first(x) == pytest.approx(0.3, abs=0.04)


def test_white_noise_misses_the_mixture():
    class White(nidiff.Process):
        def noise(self, shape, generator=None, **place):
            return nidiff.Identity((2, 3)).sample(shape, generator, **place)

    assert of_mixture(White(uniform_in_logsnr(120, "variance"), COV), "ancestral", {})[1] > 0.14


# Whitening -------------------------------------------------------------------------------------------------------

WHITENED = {
    "periodic": lambda: nidiff.gaussian_free_field((4, 5), gamma=2.0),
    "reflecting": lambda: nidiff.matern((3, 4), 1.5, boundary="reflecting"),
    "dense": lambda: nidiff.Dense(random_matrix(6), (2, 3)),
    "diagonal": lambda: nidiff.Diagonal(random_matrix(6)[:2].abs() + 0.1),
    "channels": lambda: nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((3, 4))),
}


@pytest.mark.parametrize("make", WHITENED.values(), ids=WHITENED.keys())
def test_in_whitened_coordinates_it_is_the_isotropic_algorithm(make):
    """y = Σ^-½ x path by path, with every family of noise (R4)."""
    for schedule in (nidiff.schedules.ddpm_linear(40), nidiff.schedules.smld_geometric(40, 10.0, 0.05)):
        path = whitened_paths(make(), schedule, "pc", {})
        assert len(path) == 15
        for whitened, y in path:
            assert (whitened - y).abs().max() <= 1e-10 * max(1.0, y.abs().max().item())


def test_clipping_is_not_whitening_equivariant():
    """The one exception, so the equivalence above is not vacuous: clipping acts on pixels."""
    cov = WHITENED["periodic"]()
    twin = cov.with_eigenvalues(torch.ones_like(cov.eigenvalues))
    net, schedule = smooth_net(cov.event_shape), nidiff.schedules.ddpm_linear(40)
    x = draw(nidiff.Denoiser(net, nidiff.Process(schedule, cov), clip=0.5), (1, 4, 5), generator=[0])
    white = nidiff.Denoiser(lambda y, label: net(cov.sqrt(y), label), nidiff.Process(schedule, twin), clip=0.5)
    y = draw(white, (1, 4, 5), generator=[0])
    assert (cov.inv_sqrt(x) - y).abs().max() > 1e-2


# Identities between samplers -------------------------------------------------------------------------------------


LONG = nidiff.Denoiser(smooth_net((2, 3)), nidiff.Process(nidiff.schedules.ddpm_linear(50), COV))


def test_euler_is_ddim_and_ddim_with_eta_one_is_ancestral():
    def final(name: str, **options: object) -> Tensor:
        return draw(LONG, (2, 2, 3), sampler=name, num_steps=50, generator=[1, 2], **options)

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
    state = normal(2, 2, 3)
    for seeds in ([0, 1], [2, 3]):
        image = draw(LONG, (2, 2, 3), sampler=name, spacing=[0], start=state, generator=seeds, **options)
        assert torch.equal(image, LONG(state, LONG.process.schedule.level(0)))


# Σ = I is diffusers ----------------------------------------------------------------------------------------------


LEVELS = 200


def diffusers_path(scheduler, net, steps: int) -> list[Tensor]:
    """Run a diffusers scheduler as its pipeline does, with the draws of seed 3, in float64."""
    if not hasattr(scheduler, "lambda_t"):  # DPM-Solver's tables are float32 for good
        scheduler.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, LEVELS, dtype=torch.float64), 0)
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
PEERS = [
    ("ancestral", "DDPMScheduler", {"variance_type": "fixed_small"}, LEVELS, "uniform"),
    ("ancestral:variance=beta", "DDPMScheduler", {"variance_type": "fixed_large"}, LEVELS, "uniform"),
    ("ancestral", "DDPMScheduler", {"variance_type": "fixed_small"}, 30, "trailing"),
    ("ddim", "DDIMScheduler", {}, 50, "trailing"),
    ("dpmpp_2m", "DPMSolverMultistepScheduler", {"final_sigmas_type": "zero"}, 20, "trailing"),
]


@pytest.mark.parametrize("target", PREDICTIONS)
@pytest.mark.parametrize(("name", "peer", "settings", "steps", "spacing"), PEERS)
def test_with_white_noise_it_is_diffusers_step_by_step(name, peer, settings, steps, spacing, target):
    import diffusers

    scheduler = getattr(diffusers, peer)(
        num_train_timesteps=LEVELS,
        prediction_type=PREDICTIONS[target],
        timestep_spacing="trailing" if spacing == "trailing" else "leading",
        **settings,
        **({} if name == "dpmpp_2m" else {"clip_sample": False}),
    )
    net = smooth_net((4, 4))
    theirs = diffusers_path(scheduler, net, steps)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(LEVELS), nidiff.Identity((4, 4)))
    denoiser, ours = nidiff.Denoiser(net, process, target=target), []
    given = {"sampler": name, "num_steps": steps, "spacing": spacing, "generator": [3]}
    last = draw(denoiser, (1, 1, 4, 4), **given, callback=lambda visit: ours.append(visit.x))
    for a, b in zip([*ours, last], theirs, strict=True):
        tolerance = 1e-4 if name == "dpmpp_2m" else 1e-8
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


# Promises to the user --------------------------------------------------------------------------------------------


@every_sampler
def test_an_image_depends_on_its_seed_alone(name, options):
    given = {"sampler": name, "num_steps": 20, **options}
    batch = draw(LONG, (8, 2, 3), generator=range(8), **given)
    alone = draw(LONG, (1, 2, 3), generator=[7], **given)
    other = draw(LONG, (2, 2, 3), generator=[9, 7], **given)
    assert torch.allclose(batch[7], alone[0], rtol=0, atol=1e-12)
    assert torch.allclose(batch[7], other[1], rtol=0, atol=1e-12)
    assert (batch[7] - batch[6]).abs().max() > 1e-3


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_spacing_visits_distinct_falling_rows_from_the_top(spacing):
    for schedule in (nidiff.schedules.ddpm_linear(100), nidiff.schedules.ddpm_cosine(100)):
        for count in (1, 2, 7, 50, 99, 100):
            rows = SPACINGS[spacing](schedule, count)
            assert len(rows) == count
            assert rows == sorted(set(rows), reverse=True)
            assert rows[0] == 99
            assert rows[-1] >= 0
            if count > 1 and spacing != "trailing":
                assert rows[-1] == 0


def test_a_callback_gets_every_visit():
    visits = []
    draw(LONG, (1, 2, 3), sampler="ancestral", num_steps=5, callback=visits.append)
    assert [(visit.step, visit.num_steps) for visit in visits] == [(i, 5) for i in range(1, 6)]
    assert [visit.level.label for visit in visits] == [49, 37, 24, 12, 0]


PROCESS = nidiff.Process(nidiff.schedules.ddpm_linear(10), COV)
DENOISER = nidiff.Denoiser(smooth_net((2, 3)), PROCESS)
BAD = [
    ({"sampler": "plms"}, "sampler"),
    ({"sampler": "ddim", "variance": "beta"}, "variance"),
    ({"sampler": "ddim", "eta": 1.5}, "eta"),
    ({"num_steps": 0}, "num_steps"),
    ({"sampler": "ddim:spacing=cosine"}, "spacing"),
    ({"spacing": [0, 5]}, "spacing"),
    ({"spacing": [5], "num_steps": 1}, "num_steps"),
    ({"generator": [1]}, "generator"),
    ({"generator": [4, 4]}, "generator"),
    ({"start": torch.zeros(3, 2, 3)}, "start"),
    ({"shape": (2, 3, 2)}, "shape"),
    ({"denoiser": torch.nn.Identity()}, "denoiser"),
]


def test_bad_input_is_named():
    for arguments, blamed in BAD:
        with refused(blamed):
            nidiff.sample(**{"denoiser": DENOISER, "shape": (2, 2, 3), "dtype": torch.float64, **arguments})
    with refused("rows"):
        PROCESS.schedule.levels([1, 2])


def test_a_generator_is_a_seed_or_a_generator_for_all_or_for_each_everywhere():
    x0, gaussian = normal(2, 2, 3), nidiff.GaussianModel(torch.zeros(2, 3), COV)
    known = nidiff.Denoiser(DENOISER.net, PROCESS, gaussian=gaussian)

    def made(seed):
        return torch.Generator().manual_seed(seed)

    for seeded in (
        lambda generator: draw(DENOISER, (2, 2, 3), generator=generator, sampler="ancestral"),
        lambda generator: nidiff.denoising_loss(DENOISER, x0, generator=generator),
        lambda generator: COV.sample((2, 2, 3), generator),
        lambda generator: nidiff.design.measure_kappa(known, x0, num_rows=2, generator=generator).kappa.values,
    ):
        for same in (torch.tensor([3, 4]), range(3, 5), [made(3), made(4)]):
            assert torch.equal(seeded(same), seeded([3, 4]))
        assert torch.equal(seeded(3), seeded(made(3)))
        assert not torch.equal(seeded(3), seeded(4))
        torch.manual_seed(3)
        assert torch.equal(seeded(None), seeded(3))
        with pytest.raises(nidiff.InputError):
            seeded([3])


def test_sample_is_levels_prior_and_walk():
    source = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    levels = PROCESS.schedule.levels(5, "trailing")
    x = PROCESS.prior((2, 2, 3), source, dtype=torch.float64)
    x = nidiff.walk(DENOISER, x, levels, "ddim:eta=1", generator=source)
    given = {"num_steps": 5, "spacing": "trailing", "generator": [3, 4], "dtype": torch.float64}
    assert torch.equal(x, nidiff.sample(DENOISER, (2, 2, 3), sampler="ddim", eta=1, **given))


# By name, or the object itself -----------------------------------------------------------------------------------


def halfway(chain, x, x0, here, there, *, share: float = 0.5):
    """DDIM with a share of the noise drawn anew."""
    return mix(x, x0, here, there, share * there.sigma) + share * there.sigma * chain.noise()


def every_third(schedule, count):
    return [3 * (count - 1 - i) for i in range(count)]


def test_a_sampler_is_a_name_a_text_an_object_or_a_step(monkeypatch):
    def final(sampler, **options):
        return draw(DENOISER, (2, 2, 3), sampler=sampler, generator=[0, 1], **options)

    text, entry = "ddim:eta=0.5,spacing=uniform", nidiff.sampling.Sampler(ddim, "uniform")
    assert torch.equal(final(text, num_steps=4), final(entry, eta=0.5, num_steps=4))
    monkeypatch.setitem(SAMPLERS, "halfway", nidiff.sampling.Sampler(halfway))
    own = final(halfway, share=0.3)
    assert torch.equal(own, final("halfway:share=0.3"))
    assert torch.equal(own, final(nidiff.sampling.Sampler(halfway), share=0.3))
    assert not torch.equal(own, final(halfway, share=0.4))
    with refused("eta"):
        final(halfway, eta=0.3)
    with refused("share"):
        final("halfway:share=much")
    corrected = final("pc:corrector_steps=0", predictor=halfway)
    assert torch.equal(corrected, final("pc:corrector_steps=0,predictor=halfway"))
    assert torch.equal(corrected, final("halfway"))


def test_a_steps_options_may_be_of_any_kind():
    """As a user writes them: a tensor, without the star, or collected."""

    def final(step, **options):
        return draw(DENOISER, (1, 2, 3), sampler=step, generator=[0], **options)

    def masked(chain, x, x0, here, there, *, mask: Tensor | None = None):
        return mix(x, x0 if mask is None else mask * x0, here, there, 0.0)

    def plain(chain, x, x0, here, there, mask=None):
        return masked(chain, x, x0, here, there, mask=mask)

    def collected(chain, x, x0, here, there, **options):
        return masked(chain, x, x0, here, there, **options)

    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    expected = final(masked, mask=mask)
    assert not torch.equal(expected, final(masked))
    for step in (plain, collected):
        assert torch.equal(expected, final(step, mask=mask))
    with refused("mask"):
        final(masked, mask="left")
    with refused("x0"):
        final(plain, x0=mask)


def test_a_spacing_is_a_name_or_a_function_and_its_rows_are_checked(monkeypatch):
    def final(spacing, num_steps=3):
        return draw(DENOISER, (1, 2, 3), num_steps=num_steps, spacing=spacing, generator=[0])

    rows = final([6, 3, 0], None)
    assert torch.equal(final(every_third), rows)
    monkeypatch.setitem(SPACINGS, "thirds", every_third)
    assert torch.equal(final("thirds"), rows)
    with refused("spacing"):
        final(lambda schedule, count: list(range(count)))


def test_one_default_whatever_the_door():
    """The sampler's entry says how many steps and which; nothing else does."""
    assert {Sample.sampler, Evaluate.sampler} == {None}  # which is the default or, of a model that ships, its own
    assert Experiment.sampler == DEFAULT  # written out, to start without torch
    assert {command.num_steps for command in (Sample, Evaluate, Experiment)} == {None}

    def final(denoiser=LONG, **arguments):
        return draw(denoiser, (1, 2, 3), generator=[0], **arguments)

    assert torch.equal(final(), final(sampler="dpmpp_2m", num_steps=20, spacing="trailing"))
    assert torch.equal(final(sampler="ancestral"), final(sampler="ancestral", num_steps=50, spacing="uniform"))
    assert torch.equal(final(DENOISER), final(DENOISER, num_steps=10))  # which has only 10 levels


def test_a_network_error_that_will_explode_is_announced():
    """With eps, the cosine schedule's last level divides by a signal of 5e-5: samples with a deviation of thousands."""
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(1000), COV)

    def noisy(x, label):  # a little-trained network: the right size, the wrong values
        return x.flip(-1)

    for num_steps in (None, 1):  # x̂0 itself is what a single step returns
        with pytest.warns(UserWarning, match="clip=None"):
            wild = nidiff.sample(nidiff.Denoiser(noisy, process), (8, 2, 3), num_steps=num_steps, generator=range(8))
        assert wild.std() > 100
    for calm in (nidiff.Denoiser(noisy, process, clip=1.0), nidiff.Denoiser(noisy, process, target="v")):
        assert nidiff.sample(calm, (8, 2, 3), generator=range(8)).std() < 10  # no warning, which would be an error here
    linear = nidiff.Process(nidiff.schedules.ddpm_linear(1000), COV)
    nidiff.sample(nidiff.Denoiser(noisy, linear), (8, 2, 3), num_steps=5)


def test_a_step_of_euler_maruyama_has_the_drift_and_the_noise_of_where_it_begins():
    """x + drift Δℓ + sigma √Δℓ Σ^½ z, all at the level it leaves, Δℓ the step in log-SNR."""
    here, there = PROCESS.schedule.level(9), PROCESS.schedule.level(6)
    x, x0, noise = normal(2, 2, 3), normal(2, 2, 3, seed=1), normal(2, 2, 3, seed=2)
    passed = (PROCESS.schedule.logsnr[6] - PROCESS.schedule.logsnr[9]).item()
    found = euler_maruyama(Chain(DENOISER, lambda: noise), x, x0, here, there)
    drift = PROCESS.reverse_drift(x, x0, here)
    torch.testing.assert_close(found, x + passed * drift + float(here.sigma) * passed**0.5 * noise)
