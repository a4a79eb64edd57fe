"""The methods of `posterior` against closed forms: mixtures, fresh noise, particles, preconditioners, constraints, and
several observations at once."""

import gc
import math
import warnings
import weakref

import pytest
import torch
from problems import refused
from torch import Tensor

import nidiff
from nidiff import operators as op
from nidiff.diffusion.mixture import MixtureModel
from nidiff.inverse.mixture import MixtureMoments
from nidiff.inverse.moments import GaussianMoments, NotLinear, with_jacobian
from nidiff.inverse.systems import System, conjugate_gradients, kept
from nidiff.sampling.particles import FewParticles, Particles, sample_particles
from nidiff.testing.problems import normal, smooth_net, uniform_in_logsnr

EVENT = (6, 4)
SIZE = math.prod(EVENT)
DATA = nidiff.GaussianModel(0.5 * normal(1, *EVENT, seed=7), nidiff.matern(EVENT, 1.5))
SEEN = torch.rand(EVENT, generator=torch.Generator("cpu").manual_seed(3), device="cpu") < 0.4
SIGMAS = {
    "white": nidiff.Identity(EVENT),
    "free field": nidiff.gaussian_free_field(EVENT),
    "rough": nidiff.matern(EVENT, 0.5),
    "steep": DATA.covariance,
    "designed": DATA.power(0.5),
}
SCHEDULE = uniform_in_logsnr(20, "variance")
TIGHT = {"tolerance": 1e-13}


def as_matrix(function, shape: tuple[int, ...]) -> Tensor:
    """What a linear function of images [B, *shape] does to each entry."""
    size = math.prod(shape)
    return function(torch.eye(size, dtype=torch.float64, device="cpu").reshape(size, *shape)).flatten(1).T


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.flatten() - wanted.flatten()).norm() / wanted.norm()).item()


def given_x(level: nidiff.Level, data: Tensor, noise: Tensor) -> Tensor:
    """Cov[x0 | x]."""
    ratio = float(level.signal) ** 2 / float(level.sigma) ** 2
    return torch.linalg.inv(torch.linalg.inv(data) + ratio * torch.linalg.inv(noise))


# The data's Gaussian ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGMAS)
def test_mean_and_covariance_given_x_and_y_are_exact_under_every_noise(name):
    """E[x0 | x, y] and the law of the draws of x0 given x and y, as dense matrices have them."""
    cov, level, x = SIGMAS[name], SCHEDULE.level(9), normal(1, 1, *EVENT)
    denoiser = DATA.denoiser(nidiff.Process(SCHEDULE, cov))
    prior = given_x(level, DATA.covariance.dense(), cov.dense())
    for operator in (op.mask(SEEN), op.pool(2), op.blur(0.7), op.total(), op.waves(1.5, "reflecting")):
        matrix = as_matrix(operator, (1, *EVENT))
        seen = matrix.abs().sum(1) > 0
        seen_matrix = matrix[seen]
        y = operator(normal(1, 1, *EVENT, seed=2))
        inverse = torch.linalg.inv(seen_matrix @ prior @ seen_matrix.T + 0.01 * torch.eye(int(seen.sum())))
        gain = prior @ seen_matrix.T @ inverse
        observation, method = nidiff.Observation(y, operator, 0.1), GaussianMoments(**TIGHT)
        x0 = denoiser(x, level)
        exact = x0.flatten() + gain @ (y - operator(x0)).flatten()[seen]
        found = nidiff.posterior(denoiser, observation, method)(x, level)
        assert relative(found, exact) < 1e-6
        # The draws are linear in white numbers, of which one at a time is 1.
        numbers = torch.eye(SIZE + y.numel(), dtype=torch.float64, device="cpu")
        sources = iter((numbers[:, :SIZE].reshape(-1, 1, *EVENT), numbers[:, SIZE:].reshape(-1, *y.shape[1:])))
        images = x.expand(len(numbers), *x.shape[1:])
        response = method.vary(denoiser, observation, images, images, level, lambda shape, s=sources: next(s))
        wanted = prior - gain @ seen_matrix @ prior
        assert relative(response.flatten(1).T @ response.flatten(1), wanted) < 1e-6
        assert relative(prior, wanted) > 0.05  # negative control: what x0 varies by without y


def test_the_variance_is_right_where_every_pixel_is_seen():
    """In few steps; negative control: fresh noise that does not know of y has too much of it."""
    cov, noise, count = SIGMAS["designed"], 0.5, 4000
    denoiser = DATA.denoiser(nidiff.Process(uniform_in_logsnr(8, "variance"), cov))
    everything = op.mask(torch.ones(EVENT))
    observation = nidiff.Observation(normal(1, 1, *EVENT, seed=2), everything, noise)
    data = DATA.covariance.dense()
    exact = torch.linalg.inv(torch.linalg.inv(data) + torch.eye(SIZE) / noise**2)

    def variance(method) -> float:
        given = nidiff.posterior(denoiser, observation, method)
        x = nidiff.sample(given, (count, 1, *EVENT), sampler="ancestral:variance=gaussian", num_steps=8, generator=0)
        return x.var(0).sum().item() / exact.trace().item()

    assert variance("gaussian") == pytest.approx(1.0, abs=0.02)
    assert variance(lambda *arguments: GaussianMoments()(*arguments)) > 1.04  # which cannot draw given y


# Preconditioners ----------------------------------------------------------------------------------------------------


def test_a_blur_takes_tens_of_iterations():
    """At the noisiest level, with little noise of y, for edges of two kinds; without the preconditioner hundreds."""
    event, calls = (64, 64), []
    model = nidiff.GaussianModel(torch.zeros(1, *event), nidiff.matern(event, 6.0))
    denoiser = model.denoiser(nidiff.Process(SCHEDULE, model.power(0.5)))
    x, level = normal(2, 1, *event).float(), SCHEDULE.level(19)
    for boundary, most in (("periodic", 10), ("reflecting", 45)):
        blur = op.blur(2.0, boundary)

        def counted(v: Tensor, blur=blur) -> Tensor:
            calls.append(1)
            return blur(v)

        operator = op.linear(counted, blur)
        y = blur(model.sample((1, 1, *event), 0)) + 0.02 * normal(1, 1, *event, seed=1)
        system = System(nidiff.Observation(y, operator, 0.02), denoiser(x, level).double())
        variance = denoiser.variance(level)
        system.solve(system.misfit, variance, 1e-3, 500)  # which also makes the preconditioner
        numbers = []
        for each in (variance, variance.apply):
            calls.clear()
            system.solve(system.misfit, each, 1e-3, 500)
            numbers.append(len(calls))
        assert numbers[0] <= most
        assert numbers[1] > 100
        exact = system.solve(system.misfit, variance, 1e-12, 3000).update
        found = system.solve(system.misfit, variance, 1e-3, 500).update
        assert relative(found, exact) < 0.01


@pytest.mark.parametrize("kind", ["random", "per image", "hole", "half"])
def test_a_large_mask_takes_tens_of_iterations(kind, monkeypatch):
    """At the noisiest level, with little noise of y; without the preconditioner hundreds. Next to a hole the system is
    the worst: in float32 this preconditioner would not even be positive."""
    event, calls, apply = (64, 64), [], System.matrix
    model = nidiff.GaussianModel(torch.zeros(1, *event), nidiff.matern(event, 8.0))
    level, denoiser = SCHEDULE.level(19), model.denoiser(nidiff.Process(SCHEDULE, model.power(0.5)))
    variance, x0 = denoiser.variance(level), denoiser(normal(2, 1, *event).float(), level)
    count = 2 if kind == "per image" else 1
    places = torch.rand(count, 1, *event, generator=torch.Generator().manual_seed(3)) < 0.5
    if kind == "hole":
        places = torch.ones(1, 1, *event).bool()
        places[..., 20:44, 20:44] = False
    elif kind == "half":
        places = (torch.arange(64) < 32).expand(1, 1, *event)
    seen = op.mask(places)
    y = seen(model.sample((count, 1, *event), 0) + 0.01 * normal(count, 1, *event, seed=1))
    monkeypatch.setattr(System, "matrix", lambda *arguments: calls.append(1) or apply(*arguments))
    system = System(nidiff.Observation(y, seen, 0.01), x0)
    numbers, found = [], []
    for each, tolerance in ((variance, 1e-3), (variance.apply, 1e-3), (variance, 1e-10)):
        calls.clear()
        found.append(system.solve(system.misfit, each, tolerance, 3000).update)
        numbers.append(len(calls))
    assert numbers[0] <= 60
    assert numbers[1] > 150
    assert relative(found[0], found[2]) < 1e-3


def test_a_preconditioner_that_is_not_positive_is_left_out():
    """Rounding can do that. Negative control: what it stops at without the check, after one step, is far off."""
    matrix = normal(1, 30, 30)[0]
    matrix, right = matrix @ matrix.T + 0.1 * torch.eye(30), normal(2, 30)
    exact = torch.linalg.solve(matrix, right.T).T
    assert relative(conjugate_gradients(lambda v: v @ matrix, right, 1e-12, 500, lambda r: -r), exact) < 1e-6
    assert relative(conjugate_gradients(lambda v: v @ matrix, right, 1e-12, 1), exact) > 0.1


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_three_ways_to_solve_agree(noise, monkeypatch):
    """By a matrix, in modes and in the space of y: the same weights and update."""
    level, cov = SCHEDULE.level(9), SIGMAS["designed"]
    denoiser, x0 = DATA.denoiser(nidiff.Process(SCHEDULE, cov)), normal(3, 1, *EVENT)
    variance = denoiser.variance(level)
    per_entry = torch.linspace(0.5, 2.0, SIZE // 4, dtype=torch.float64).reshape(1, 3, 2)
    for operator, deviations in ((op.mask(SEEN), noise), (op.pool(2), noise), (op.pool(2), noise * per_entry)):
        y = operator(normal(1, 1, *EVENT, seed=2))
        found = []
        for most in (1024, 0):
            monkeypatch.setattr("nidiff.inverse.systems.MOST_DENSE", most)
            system = System(nidiff.Observation(y, operator, deviations), x0)
            found.append(system.solve(system.misfit, variance, 1e-13, 500))
        plain = system.solve(system.misfit, variance.apply, 1e-13, 500)
        for solved in found:
            assert relative(solved.update, plain.update) < 1e-7
            assert relative(solved.weights, plain.weights) < 1e-6


# Constraints --------------------------------------------------------------------------------------------------------


def test_hard_constraints_hold_to_rounding_in_the_metric_of_the_data():
    """Mass, and a field without divergence: the samples, and the mean, which an orthogonal projection gets wrong."""
    event = (8, 8)
    flow = nidiff.GaussianModel(torch.zeros(2, *event), nidiff.matern(event, 1.5))
    denoiser = flow.denoiser(nidiff.Process(SCHEDULE, flow.power(0.5)))
    seen = nidiff.Observation(normal(1, 2, *event, seed=4), op.mask(torch.rand(2, *event) < 0.2), 0.1)
    for operator, y in ((op.total(), torch.tensor([[3.0, -1.0]])), (op.divergence(), torch.zeros(1, 1, *event))):
        constraint = nidiff.Observation(y.double(), operator)
        given = nidiff.posterior(denoiser, [seen, constraint], tolerance=1e-12)
        x = nidiff.sample(given, (3, 2, *event), num_steps=8, sampler="ancestral", generator=0, dtype=torch.float64)
        assert (operator(x) - y).abs().max() < 1e-9
        assert x.std(0).mean() > 0.1
        free = nidiff.sample(nidiff.posterior(denoiser, seen), (3, 2, *event), num_steps=8, generator=0)
        assert (operator(free) - y).abs().max() > 0.1  # negative control
    level, x = SCHEDULE.level(9), normal(1, 2, *event)
    x0 = denoiser(x, level)
    weights = torch.linspace(0.5, 2.0, 64, dtype=torch.float64).reshape(event)
    for operator in (op.total(weights), op.divergence()):
        matrix = as_matrix(operator, (2, *event))
        covariance = as_matrix(denoiser.variance(level).apply, (2, *event))
        exact = {
            name: x0.flatten() - v @ matrix.T @ torch.linalg.pinv(matrix @ v @ matrix.T) @ matrix @ x0.flatten()
            for name, v in (("metric", covariance), ("orthogonal", torch.eye(128, dtype=torch.float64)))
        }
        y = torch.zeros_like(operator(x0))
        found = nidiff.posterior(denoiser, nidiff.Observation(y, operator), tolerance=1e-13)(x, level)
        assert relative(found, exact["metric"]) < 1e-6
        if operator.parts[0].name == "total":
            assert relative(found, exact["orthogonal"]) > 1e-3


# Several observations -----------------------------------------------------------------------------------------------


def test_several_observations_are_one():
    """Stations of each image and a coarse field whose errors are correlated: the dense posterior, image by image."""
    level, cov = SCHEDULE.level(9), SIGMAS["designed"]
    denoiser, x = DATA.denoiser(nidiff.Process(SCHEDULE, cov)), normal(2, 1, *EVENT)
    truth = normal(2, 1, *EVENT, seed=2)
    masks = torch.stack([SEEN, ~SEEN])[:, None]
    coloured = 0.3 * nidiff.matern((3, 2), 2.0, boundary="reflecting")
    stations = nidiff.Observation(torch.where(masks, truth, torch.nan), op.mask(masks), 0.1)
    coarse = nidiff.Observation(op.pool(2)(truth), op.pool(2), coloured)
    given = nidiff.posterior(denoiser, [stations, coarse], **TIGHT)
    prior = given_x(level, DATA.covariance.dense(), cov.dense())
    pool, x0 = as_matrix(op.pool(2), (1, *EVENT)), denoiser(x, level)
    for image in range(2):
        seen = masks[image].flatten()
        matrix = torch.cat([torch.eye(SIZE, dtype=torch.float64)[seen], pool])
        noise = torch.block_diag(0.01 * torch.eye(int(seen.sum()), dtype=torch.float64), coloured.dense())
        misfit = matrix @ (truth - x0)[image].flatten()
        gain = prior @ matrix.T @ torch.linalg.inv(matrix @ prior @ matrix.T + noise)
        exact = x0[image].flatten() + gain @ misfit
        assert relative(given(x, level)[image], exact) < 1e-6
        alone = given.for_images(torch.tensor([image]))(x[image : image + 1], level)
        assert relative(alone, exact) < 1e-6
        only = nidiff.posterior(denoiser, coarse, **TIGHT)(x, level)[image]
        assert relative(only, exact) > 0.05  # negative control
    draw = nidiff.sample(given, (2, 1, *EVENT), sampler="ancestral:variance=gaussian", num_steps=3, generator=[1, 2])
    assert draw.isfinite().all()


# Operators that are not linear --------------------------------------------------------------------------------------


def test_a_function_that_bends_too_much_is_reported_and_helped_by_more_linearisations():
    denoiser, level = DATA.denoiser(nidiff.Process(SCHEDULE, SIGMAS["designed"])), SCHEDULE.level(4)
    x = normal(1, 1, *EVENT)

    def misfit(f, amount: float, linearisations: int) -> float:
        y = f(denoiser(x, level)) + amount
        observation = nidiff.Observation(y, op.function(f), 0.01)
        given = nidiff.posterior(denoiser, observation, "gaussian", linearisations=linearisations)
        return ((f(given(x, level)) - y).norm() / abs(amount) / y.numel() ** 0.5).item()

    def mild(x: Tensor) -> Tensor:
        return op.pool(2)(x).tanh()

    def bent(x: Tensor) -> Tensor:
        return (6 * op.pool(2)(x)).exp()

    assert misfit(mild, 0.05, 1) < 0.5  # without a warning, which is an error here
    with pytest.warns(NotLinear, match="not linear enough"):
        once = misfit(bent, 40.0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotLinear)
        assert misfit(bent, 40.0, 8) < 0.3 * once


# Mixtures -----------------------------------------------------------------------------------------------------------

MEANS = torch.stack([1.5 * normal(1, *EVENT, seed=8), -1.5 * normal(1, *EVENT, seed=8)])
MIXTURE = MixtureModel(
    [0.3, 0.7], MEANS, [0.2 * DATA.covariance, 0.5 * DATA.covariance], 0.4 * normal(2, 3, 1, *EVENT, seed=9)
)


def components_given(level: nidiff.Level, x: Tensor, y: Tensor, matrix: Tensor, noise: Tensor, cov: Tensor):
    """Weights [B, K], means [K, B, size] and covariances of x0 given x and y, by dense matrices."""
    signal, variance = float(level.signal), float(level.sigma) ** 2 * cov
    logs, means, spreads = [], [], []
    for k, weight in enumerate(MIXTURE.weights):
        rows = MIXTURE.factors[k].flatten(1).double()
        prior = (0.2, 0.5)[k] * DATA.covariance.dense() + rows.T @ rows
        centre = MIXTURE.means[k].flatten().double()
        both = torch.cat([signal * torch.eye(SIZE, dtype=torch.float64), matrix])
        total = both @ prior @ both.T + torch.block_diag(variance, noise)
        seen = torch.cat([x.flatten(1), y.flatten(1).expand(len(x), -1)], 1)
        law = torch.distributions.MultivariateNormal(both @ centre, total)
        logs.append(weight.double().log() + law.log_prob(seen))
        gain = prior @ both.T @ torch.linalg.inv(total)
        means.append(centre + (seen - both @ centre) @ gain.T)
        spreads.append(prior - gain @ both @ prior)
    return torch.stack(logs, 1).softmax(1), torch.stack(means), torch.stack(spreads)


def test_the_mixture_given_x_and_y_is_exact_where_one_gaussian_is_not():
    """Weights of the components, mean, and what x0 varies by, for components with factors."""
    cov, level, operator = SIGMAS["free field"], SCHEDULE.level(16), op.pool((3, 2))
    process = nidiff.Process(SCHEDULE, cov)
    single = nidiff.fit_gaussian(MIXTURE.sample((20000, 1, *EVENT), 0, dtype=torch.float64), basis=cov)
    exact = MIXTURE.denoiser(process)
    denoiser = nidiff.Denoiser(exact.net, process, "x0", gaussian=single, mixture=MIXTURE)
    x = normal(5, 1, *EVENT)
    y = operator(MEANS[:1].double() * 0.2)
    shares, means, spreads = components_given(
        level, x, y, as_matrix(operator, (1, *EVENT)), 0.04 * torch.eye(4, dtype=torch.float64), cov.dense()
    )
    observation = nidiff.Observation(y, operator, 0.2)
    wanted = torch.einsum("bk,kbn->bn", shares, means)
    before = MIXTURE.at(level, cov).components(x)[0].exp()
    assert (shares - before).abs().min() > 0.03  # what y says of the component
    assert relative(nidiff.posterior(denoiser, observation, "mixture")(x, level), wanted) < 1e-5
    assert relative(nidiff.posterior(denoiser, observation, "gaussian")(x, level), wanted) > 0.05
    method = MixtureMoments()
    source = torch.Generator().manual_seed(1)
    many = x[:1].expand(20000, *x.shape[1:])
    x0 = method(denoiser, observation, many, level)

    def white(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    draws = (x0 + method.vary(denoiser, observation, many, x0, level, white)).flatten(1)
    centred = means[:, 0] - wanted[0]
    covariance = torch.einsum("k,kij->ij", shares[0], spreads + centred[:, :, None] * centred[:, None, :])
    assert relative(draws.mean(0), wanted[0]) < 0.03
    assert relative(draws.T.cov(), covariance) < 0.06
    assert relative(torch.einsum("k,kij->ij", shares[0], spreads), covariance) > 0.1  # between the components


# One number that is 1 or −1 with a spread, seen with noise: the posterior has two peaks, and is known.
PAIR = MixtureModel([0.5, 0.5], torch.tensor([[[1.0]], [[-1.0]]]), [0.04 * nidiff.Identity((1,))] * 2)
WHOLE = nidiff.GaussianModel(torch.zeros(1, 1), 1.04 * nidiff.Identity((1,)))
ONE = nidiff.Observation(torch.tensor([[[0.15]]]), op.mask(torch.ones(1)), 0.6)


def exact_quantiles(count: int) -> Tensor:
    grid = torch.linspace(-3, 3, 60001, dtype=torch.float64)
    prior = sum(torch.distributions.Normal(mean, 0.2).log_prob(grid).exp() for mean in (1.0, -1.0))
    density = prior * torch.distributions.Normal(grid, 0.6).log_prob(torch.tensor(0.15)).exp()
    share = density.cumsum(0) / density.sum()
    return grid[torch.searchsorted(share, (torch.arange(count, dtype=torch.float64) + 0.5) / count)]


def wasserstein(x: Tensor, weights: Tensor | None = None) -> float:
    """W1 to the posterior of one number."""
    order = x.flatten().double().argsort()
    shares = torch.full_like(order, 1 / len(order), dtype=torch.float64) if weights is None else weights.double()[order]
    places = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    found = x.flatten().double()[order][torch.searchsorted(shares.cumsum(0), places).clamp(max=len(order) - 1)]
    return (found - exact_quantiles(20000)).abs().mean().item()


def pair(num_levels: int) -> nidiff.Denoiser:
    process = nidiff.Process(uniform_in_logsnr(num_levels, "variance", -9, 9), nidiff.Identity((1,)))
    return nidiff.Denoiser(PAIR.denoiser(process).net, process, "x0", gaussian=WHOLE, mixture=PAIR)


def test_samples_by_the_mixture_have_the_law_of_the_posterior_where_those_by_one_gaussian_do_not():
    """In five steps, because x0 is drawn given x and y."""
    found = {
        method: wasserstein(
            nidiff.sample(
                nidiff.posterior(pair(5), ONE, method),
                (4000, 1, 1),
                sampler="ancestral:variance=gaussian",
                num_steps=5,
                generator=0,
            )
        )
        for method in ("mixture", "gaussian")
    }
    assert found["mixture"] < 0.05
    assert found["gaussian"] > 3 * found["mixture"]


def test_what_is_remembered_of_an_observation_goes_with_it():
    """The matrices of its levels, and the components given the last x."""
    observation = nidiff.Observation(ONE.y, ONE.operator, 0.6)
    for method in ("mixture", "gaussian"):
        given = nidiff.posterior(pair(5), observation, method)
        nidiff.sample(given, (2, 1, 1), sampler="ancestral:variance=gaussian", num_steps=2, generator=0)
    gone = weakref.ref(observation)
    del observation, given
    gc.collect()
    assert gone() is None


# Particles ----------------------------------------------------------------------------------------------------------


def test_particles_have_the_law_of_the_posterior_as_they_grow_and_without_their_weights_do_not():
    def error(count: int, threshold: float = 0.5, seed: int = 0) -> tuple[float, float]:
        found = sample_particles(pair(60), ONE, count, threshold=threshold, generator=seed)
        return wasserstein(found.x, found.weights[0]), wasserstein(found.x)

    many = error(4000)[0]
    few = sum(error(32, seed=seed)[0] for seed in range(5)) / 5
    unweighted = error(4000, threshold=0.0)[1]
    assert many < 0.05
    assert few > 2 * many
    assert unweighted > 3 * many


def test_the_particles_of_gaussian_data_have_equal_weights():
    """ψ is then exact; it takes the right Gaussian: with another the weights differ."""
    process = nidiff.Process(SCHEDULE, SIGMAS["designed"])
    denoiser = DATA.denoiser(process)
    observation = nidiff.Observation(op.pool(2)(normal(2, 1, *EVENT, seed=2)), op.pool(2), 0.1)
    arguments = {"threshold": 0.0, "num_steps": 6, "generator": 0, "dtype": torch.float64}
    found = sample_particles(denoiser, observation, 20, **arguments)
    assert found.x.shape == (2, 20, 1, *EVENT)
    # At the first level the weights are those of y given x; from there on they stay.
    assert (found.effective - found.effective[:, :1]).abs().max() < 1e-4 * 20
    other = DATA.denoiser(process).with_gaussian(nidiff.GaussianModel(DATA.mean, 0.5 * DATA.covariance))
    other = nidiff.Denoiser(lambda x, t: denoiser(x, SCHEDULE.level(int(t[0]))), process, "x0", gaussian=other.gaussian)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewParticles)
        wrong = sample_particles(other, observation, 20, **arguments)
    assert (wrong.effective - wrong.effective[:, :1]).abs().max() > 0.1 * 20
    drawn = found.resampled(0)
    assert drawn.shape == found.x.shape
    one = Particles(found.x, torch.eye(20, dtype=torch.float64)[:2], found.effective).resampled(0)
    assert torch.equal(one[1], found.x[1, 1:2].expand_as(one[1]))


# As published -------------------------------------------------------------------------------------------------------


def test_diffpir_is_the_published_algorithm_for_white_noise():
    """Algorithm 1 of Zhu et al. (2023): the proximal point with ρ = λ σ_n²/σ̄², and the step with ζ."""
    betas = torch.linspace(1e-3, 0.3, 12, dtype=torch.float64)
    process = nidiff.Process(nidiff.schedules.from_betas(betas), nidiff.Identity(EVENT))
    net, operator, noise, weight, zeta = smooth_net(EVENT), op.pool(2), 0.1, 3.0, 0.4
    matrix, y = as_matrix(operator, (1, *EVENT)), operator(normal(2, 1, *EVENT, seed=2))
    products = (1 - betas).cumprod(0)
    source = torch.Generator().manual_seed(4)
    draws = [process.noise((2, 1, *EVENT), source, dtype=torch.float64) for _ in betas]
    x, fresh = draws[0], iter(draws[1:])
    for i in reversed(range(12)):
        x0 = net(x, torch.full((2,), i)).flatten(1)
        rho = weight * noise**2 * products[i] / (1 - products[i])
        right = y.flatten(1) @ matrix + rho * x0
        x0 = torch.linalg.solve(matrix.T @ matrix + rho * torch.eye(SIZE, dtype=torch.float64), right.T).T
        x0 = x0.reshape(x.shape)
        eps = (x - products[i].sqrt() * x0) / (1 - products[i]).sqrt()
        if i:
            spread = (1 - products[i - 1]).sqrt()
            x = products[i - 1].sqrt() * x0 + spread * ((1 - zeta) ** 0.5 * eps + zeta**0.5 * next(fresh))
    given = nidiff.posterior(
        nidiff.Denoiser(net, process, "x0"), nidiff.Observation(y, operator, noise), f"diffpir:weight={weight}"
    )
    drawn = nidiff.sample(
        given,
        x0.shape,
        sampler=f"diffpir:zeta={zeta}",
        num_steps=12,
        generator=torch.Generator().manual_seed(4),
        dtype=torch.float64,
    )
    assert relative(drawn, x0) < 1e-9


def test_pigdm_is_the_published_algorithm_for_white_noise():
    """Algorithm 1 of Song et al. (2023) with η = 1: DDIM's step, and √ᾱ times the gradient by the pseudoinverse."""
    betas = torch.linspace(1e-3, 0.3, 12, dtype=torch.float64)
    process = nidiff.Process(nidiff.schedules.from_betas(betas), nidiff.Identity(EVENT))
    net, operator, noise, products = smooth_net(EVENT), op.pool(2), 0.1, (1 - betas).cumprod(0)
    matrix, y = as_matrix(operator, (1, *EVENT)), operator(normal(2, 1, *EVENT, seed=2))
    source = torch.Generator().manual_seed(4)
    draws = [process.noise((2, 1, *EVENT), source, dtype=torch.float64) for _ in betas]
    x, fresh = draws[0], iter(draws[1:])
    for i in reversed(range(12)):
        x = x.detach().requires_grad_()
        x0, squared = net(x, torch.full((2,), i)), 1 - products[i]  # r² = sigma²/(signal² + sigma²)
        metric = matrix @ matrix.T + noise**2 / squared * torch.eye(len(matrix), dtype=torch.float64)
        weights = torch.linalg.solve(metric, (y - operator(x0)).flatten(1).detach().T).T
        (slope,) = torch.autograd.grad((x0.flatten(1) * (weights @ matrix)).sum(), x)
        before = products[i - 1] if i else torch.ones((), dtype=torch.float64)
        spread = ((1 - before) / (1 - products[i]) * (1 - products[i] / before)).sqrt()
        eps = (x - products[i].sqrt() * x0) / (1 - products[i]).sqrt()
        x = before.sqrt() * x0 + (1 - before - spread**2).clamp(min=0).sqrt() * eps + products[i].sqrt() * slope
        x = x + spread * next(fresh) if i else x
    given = nidiff.posterior(nidiff.Denoiser(net, process, "x0"), nidiff.Observation(y, operator, noise), "pigdm")
    drawn = nidiff.sample(
        given,
        x.shape,
        sampler="ancestral",
        num_steps=12,
        generator=torch.Generator().manual_seed(4),
        dtype=torch.float64,
    )
    assert relative(drawn, x.detach()) < 1e-9


def test_tmpd_has_the_sums_of_the_rows():
    denoiser = DATA.denoiser(nidiff.Process(SCHEDULE, SIGMAS["designed"]))
    level, x, operator = SCHEDULE.level(9), normal(1, 1, *EVENT), op.pool(2)
    y = operator(normal(1, 1, *EVENT, seed=2))
    x0, variance = with_jacobian(denoiser, x, level)
    matrix = as_matrix(operator, (1, *EVENT))
    columns = torch.cat([variance(row.reshape(1, 1, *EVENT)).flatten(1) for row in torch.eye(SIZE).double()])
    rows = (matrix @ columns.T @ matrix.T).sum(1) + 0.3**2
    wanted = x0.flatten() + columns.T @ matrix.T @ ((y - operator(x0)).flatten() / rows)
    assert (rows > 0.3**2).all()  # else 0 is taken for them
    found = nidiff.posterior(denoiser, nidiff.Observation(y, operator, 0.3), "tmpd")(x, level)
    assert relative(found, wanted) < 1e-9


# Bad input ----------------------------------------------------------------------------------------------------------


def test_what_a_method_cannot_do_is_refused():
    process = nidiff.Process(SCHEDULE, SIGMAS["designed"])
    plain = DATA.denoiser(process)
    mixed = plain.with_mixture(MIXTURE)
    y, seen = torch.zeros(1, 1, 3, 2), nidiff.Observation(torch.zeros(1, 1, 3, 2), op.pool(2), 0.1)
    bent = nidiff.Observation(y, op.function(lambda x: op.pool(2)(x).exp()), 0.1)
    straight = nidiff.Observation(y, op.function(lambda x: 2 * op.pool(2)(x)), 0.1)
    nidiff.posterior(mixed, straight, "mixture")
    per_image = torch.stack([SEEN, ~SEEN])[:, None]
    two = nidiff.Observation(torch.zeros(2, 1, *EVENT), op.mask(per_image), 0.1)
    three = nidiff.Observation(torch.zeros(3, 1, 3, 2), op.pool(2), 0.1)
    dead = nidiff.Denoiser(lambda x, t: x * torch.nan, process, "x0", gaussian=DATA)
    for argument, call in (
        ("method", lambda: nidiff.posterior(plain, seen, "mixture")),
        ("method", lambda: nidiff.posterior(mixed, bent, "mixture")),
        ("method", lambda: nidiff.posterior(mixed, two, "mixture")),
        ("method", lambda: sample_particles(plain, bent, 8)),
        ("particles", lambda: sample_particles(plain, seen, 1)),
        ("particles", lambda: sample_particles(dead, seen, 8)),
        ("threshold", lambda: sample_particles(plain, seen, 8, threshold=2.0)),
        ("y", lambda: sample_particles(plain, nidiff.Observation(torch.zeros(1, 1, 2, 2), op.pool(2), 0.1), 8)),
        ("observation", lambda: nidiff.posterior(plain, [])),
        ("observation", lambda: nidiff.posterior(plain, [two, three])),
        ("operators", lambda: op.stack([op.pool(2), abs])),
        ("operator", lambda: nidiff.posterior(plain, nidiff.Observation(torch.zeros(1, 1, *EVENT), op.divergence()))),
        ("weight", lambda: nidiff.posterior(plain, seen, "diffpir:weight=0")),
        ("linearisations", lambda: nidiff.posterior(plain, seen, "gaussian:linearisations=0")),
        ("method", lambda: nidiff.posterior(plain, nidiff.Observation(y, op.pool(2), SMALL), "tmpd")),
        ("zeta", lambda: nidiff.sample(plain, (1, 1, *EVENT), sampler="diffpir:zeta=2")),
    ):
        with refused(argument):
            call()
    far = nidiff.Observation(y + 3, op.pool(2), 1e-2)
    net = nidiff.Denoiser(smooth_net(EVENT), process, "x0", gaussian=DATA)
    with pytest.warns(FewParticles, match="effective sample size"):
        sample_particles(net, far, 8, generator=0, dtype=torch.float64)


SMALL = nidiff.Identity((3, 2))


def test_what_is_kept_of_all_observations_together_is_bounded(monkeypatch):
    monkeypatch.setattr("nidiff.inverse.systems.MOST_NUMBERS", 30)
    first, second = (nidiff.Observation(torch.zeros(1, 1, 4), nidiff.operators.subsample(1), 0.1) for _ in range(2))
    made = []
    for observation, key in [(first, 0), (first, 1), (first, 0), (second, 0), (second, 1), (second, 0), (first, 1)]:
        kept(observation, key, 10, lambda key=key: made.append(key))
    assert made == [0, 1, 0, 1]  # all but the last of the first one, which was dropped for the second
    kept(first, 0, 10, lambda: made.append("again"))
    assert made[-1] == "again"
