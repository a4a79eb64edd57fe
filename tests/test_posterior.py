"""Inverse problems: the posterior of Gaussian data in closed form, by dense matrices. Σ does not commute with the
operators."""

import math

import pytest
import torch
from problems import refused
from torch import Tensor

import nidiff
from nidiff import operators as op
from nidiff.covariance.waves import Waves
from nidiff.diffusion.gaussian import Kappa
from nidiff.diffusion.mixture import MixtureModel
from nidiff.inverse.posterior import METHODS
from nidiff.inverse.systems import conjugate_gradients
from nidiff.sampling.sampler import rehearse
from nidiff.testing.problems import (
    Gaussian,
    normal,
    output_law,
    random_matrix,
    smooth_net,
    uniform_in_logsnr,
    whitened_paths,
)

EVENT = (6, 4)
SIZE = math.prod(EVENT)
COV = nidiff.gaussian_free_field(EVENT)
GAUSSIAN = nidiff.GaussianModel(0.5 * normal(1, *EVENT, seed=7), nidiff.matern(EVENT, 1.5))
MIXTURE = MixtureModel([0.3, 0.7], normal(2, 1, *EVENT, seed=8), [nidiff.matern(EVENT, 1.5), 0.3 * COV])
SCHEDULE = uniform_in_logsnr(20, "variance")
PROCESS = nidiff.Process(SCHEDULE, COV)
SEEN = torch.rand(EVENT, generator=torch.Generator("cpu").manual_seed(3), device="cpu") < 0.4
OPERATORS = {
    "mask": op.mask(SEEN),
    "subsample": op.subsample((2, 3)),
    "pool": op.pool(2),
    "pool, uneven": op.pool(4),
    "blur": op.blur(0.7),
    "waves": op.waves(1.5, "reflecting"),
    "some waves": op.waves(SEEN),
    "linear": op.linear(lambda x: x[..., 1:] - x[..., :-1]),
    "composed": op.mask(SEEN[:3, :2]) @ op.pool(2) @ op.blur(0.5, "periodic"),
}
TIGHT = {"gaussian": {"tolerance": 1e-13}, "mmps": {"tolerance": 1e-13, "iterations": 500}}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())


def as_matrix(operator: op.Operator, event: tuple[int, ...]) -> Tensor:
    """What it does to each pixel."""
    size = math.prod(event)
    return operator(torch.eye(size, dtype=torch.float64, device="cpu").reshape(size, 1, *event)).flatten(1).T


def observe(operator: op.Operator, noise: float = 0.1, count: int = 1, gaussian=GAUSSIAN) -> Tensor:
    y = operator(gaussian.sample((count, *gaussian.shape), torch.Generator("cpu").manual_seed(11), dtype=torch.float64))
    return y + noise * normal(*y.shape, seed=5)


def kalman(operator: op.Operator, y: Tensor, mean: Tensor, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, size] and covariance of x0 ~ N(mean, variance) given y = A x0 + N(0, noise), where anything is seen."""
    matrix = as_matrix(operator, mean.shape[2:])
    seen = matrix.abs().sum(1) > 0
    matrix, noise = matrix[seen], noise[seen][:, seen]
    gain = variance @ matrix.T @ torch.linalg.inv(matrix @ variance @ matrix.T + noise)
    mean = mean.reshape(len(mean), -1)
    misfit = y.flatten(1)[:, seen] - mean @ matrix.T
    return mean + misfit @ gain.T, variance - gain @ matrix @ variance


def given_x(level: nidiff.Level, data: Tensor) -> Tensor:
    """Cov[x0 | x]."""
    ratio = float(level.signal) ** 2 / float(level.sigma) ** 2
    return torch.linalg.inv(torch.linalg.inv(data) + ratio * torch.linalg.inv(COV.dense()))


def white(y: Tensor, noise: float) -> Tensor:
    return noise**2 * torch.eye(y[0].numel(), dtype=torch.float64, device="cpu")


def close(found: Tensor, wanted: Tensor, share: float = 1e-6) -> None:
    assert (found.flatten(1) - wanted.flatten(1)).norm() <= share * wanted.norm()


# The denoiser -------------------------------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("method", TIGHT)
def test_moment_matching_is_the_exact_posterior_mean_of_gaussian_data(method, operator):
    """E[x0 | x, y] at noisy, middle and clean levels, with noise of the observation and without."""
    denoiser, x = GAUSSIAN.denoiser(PROCESS), normal(2, 1, *EVENT)
    for noise in (0.1, 0.0):
        y = observe(operator, noise, 2)
        given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, noise), method, **TIGHT[method])
        for row in (0, 8, 19):
            level = SCHEDULE.level(row)
            variance = given_x(level, GAUSSIAN.covariance.dense())
            exact, _ = kalman(operator, y, denoiser(x, level), variance, white(y, noise))
            if noise or operator not in (OPERATORS["blur"], OPERATORS["linear"]):  # which see next to nothing twice
                close(given(x, level), exact)


@pytest.mark.parametrize("method", TIGHT)
@pytest.mark.parametrize("name", ["mask", "pool"])
def test_noise_may_have_a_covariance_or_a_deviation_per_entry(method, name):
    operator = OPERATORS[name]
    y, denoiser, level, x = observe(operator), GAUSSIAN.denoiser(PROCESS), SCHEDULE.level(9), normal(1, 1, *EVENT)
    coloured = 0.2 * nidiff.matern(tuple(y.shape[2:]), 2.0, boundary="reflecting")
    deviations = normal(*y.shape[1:], seed=4).abs()
    variance = given_x(level, GAUSSIAN.covariance.dense())
    for noise, matrix in ((coloured, coloured.dense()), (deviations, deviations.flatten().square().diag())):
        given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, noise), method, **TIGHT[method])
        close(given(x, level), kalman(operator, y, denoiser(x, level), variance, matrix)[0])


def test_the_jacobian_needs_no_basis_in_common():
    """Data of any covariance: V is that of the network."""
    problem, x, level = Gaussian(COV), normal(3, 1, *EVENT), SCHEDULE.level(9)
    denoiser = problem.denoiser(PROCESS)
    for name in ("mask", "pool", "blur"):
        operator = OPERATORS[name]
        y = observe(operator)
        given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, 0.1), **TIGHT["mmps"])
        variance = given_x(level, problem.matrix)
        close(given(x, level), kalman(operator, y, denoiser(x, level), variance, white(y, 0.1))[0])


def test_moments_hold_where_every_mode_has_its_own_level():
    process = nidiff.Process(nidiff.schedules.soft_conditioning(EVENT, num_levels=20), COV)
    denoiser, operator, x = GAUSSIAN.denoiser(process), OPERATORS["pool"], normal(2, 1, *EVENT)
    y, level = observe(OPERATORS["pool"]), process.schedule.level(10)
    observation = nidiff.Observation(y, operator, 0.1)
    close(*(nidiff.posterior(denoiser, observation, method, **TIGHT[method])(x, level) for method in TIGHT))


def test_a_kappa_of_one_does_not_make_what_is_seen_impossible():
    """κ is measured, and may be 1: then V would be 0 there, and an exact y could not be met."""
    share = torch.zeros(2, *EVENT)
    share[:, 2:] = 1.0
    kappa = Kappa(torch.tensor([0.0, 19.0]), share, torch.ones_like(share))
    y = observe(op.mask(SEEN), 0.0)
    given = nidiff.posterior(GAUSSIAN.denoiser(PROCESS).with_kappa(kappa), nidiff.Observation(y, op.mask(SEEN)))
    x = nidiff.sample(given, (4, 1, *EVENT), num_steps=4, generator=range(4))
    assert x.abs().max() < 20
    assert (x - y)[..., SEEN].abs().max() < 1e-3


def test_kappa_makes_the_spread_smaller():
    """V (1 − κ) per mode; it can be left out."""
    operator, x, level = OPERATORS["pool"], normal(1, 1, *EVENT), SCHEDULE.level(9)
    share = torch.full((2, *EVENT), 0.4, dtype=torch.float64, device="cpu")
    plain, y = GAUSSIAN.denoiser(PROCESS), observe(OPERATORS["pool"])
    denoiser = plain.with_kappa(Kappa(torch.tensor([0, 19]), share, share))
    observation = nidiff.Observation(y, operator, 0.1)
    variance = given_x(level, GAUSSIAN.covariance.dense())
    for kappa, factor in ((True, 0.6), (False, 1.0)):
        given = nidiff.posterior(denoiser, observation, kappa=kappa, tolerance=1e-12)
        close(given(x, level), kalman(operator, y, plain(x, level), factor * variance, white(y, 0.1))[0])


def test_the_gradient_is_a_gradient():
    """r = 0: x̂0 + (sigma²/signal) Σ ∇ log N(y; A x̂0(x), R), by autograd, for a network that is not linear."""
    denoiser = nidiff.Denoiser(smooth_net(EVENT), PROCESS)
    x, level, noise = normal(2, 1, *EVENT), SCHEDULE.level(9), 0.5
    f = op.function(lambda x: torch.tanh(x[..., :2]))
    for operator in (OPERATORS["pool"], f, OPERATORS["mask"]):
        y = observe(operator, noise, 2)
        at = x.clone().requires_grad_()
        log_density = -0.5 * (y - operator(denoiser(at, level))).square().sum() / noise**2
        (slope,) = torch.autograd.grad(log_density, at)
        exact = denoiser(x, level) + float(level.sigma) ** 2 / float(level.signal) * COV.matmul(slope)
        given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, noise), "gradient", r=0)
        with torch.no_grad():
            close(given(x, level), exact.detach())


@pytest.mark.parametrize("r", [None, 0.4])
def test_the_gradient_has_the_metric_of_r_by_default_that_of_data_of_the_same_mean_variance(r):
    """x̂0 + V Aᵀ (r² A Aᵀ + R)⁻¹ (y − A x̂0), r² = c sigma²/(c signal² + sigma²), for data whose mean variance is c."""
    operator, x, c = OPERATORS["pool"], normal(2, 1, *EVENT), 0.3
    model = nidiff.GaussianModel(GAUSSIAN.mean, c * GAUSSIAN.covariance)
    denoiser, y, matrix = model.denoiser(PROCESS), observe(OPERATORS["pool"], 0.1, 2), as_matrix(operator, EVENT)
    given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, 0.1), "gradient", r=r, tolerance=1e-12)
    for row in (2, 9, 17):
        level = SCHEDULE.level(row)
        signal, sigma = float(level.signal) ** 2, float(level.sigma) ** 2
        squared = c * sigma / (c * signal + sigma) if r is None else r**2
        metric = squared * matrix @ matrix.T + white(y, 0.1)
        gain = given_x(level, model.covariance.dense()) @ matrix.T @ torch.linalg.inv(metric)
        x0 = denoiser(x, level)
        close(given(x, level), x0.flatten(1) + (y - operator(x0)).flatten(1) @ gain.T)


@pytest.mark.parametrize("method", ["gaussian", "mmps", "gradient"])
def test_a_function_is_linearised_at_x0(method):
    """A linear one is the same by `linear` and by `function`; of another one, the derivative counts."""
    denoiser, y, x, level = GAUSSIAN.denoiser(PROCESS), observe(op.pool(2)), normal(1, 1, *EVENT), SCHEDULE.level(9)

    def estimate(operator: op.Operator, y: Tensor) -> Tensor:
        return nidiff.posterior(denoiser, nidiff.Observation(y, operator, 0.1), method)(x, level)

    close(estimate(op.function(op.pool(2)), y), estimate(op.pool(2), y), 1e-9)
    x0 = denoiser(x, level)

    def f(x: Tensor) -> Tensor:
        return op.pool(2)(x).sinh()

    slope = op.pool(2)(x0).cosh()
    tangent = op.linear(lambda v: slope * op.pool(2)(v))
    close(estimate(op.function(f), y), estimate(tangent, y - f(x0) + tangent(x0)), 1e-9)


def test_the_names_of_version_0_2_are_the_same_methods():
    """Under the names of the literature; others are refused."""
    denoiser, observation = GAUSSIAN.denoiser(PROCESS), nidiff.Observation(Y, op.pool(2), 0.1)
    names = ("jacobian:iterations=2", "mmps:iterations=2")
    old, new = (nidiff.posterior(denoiser, observation, each).corrections[0].method for each in names)
    assert old == new
    with refused("method"):
        nidiff.posterior(denoiser, observation, "kalman")


def test_replacement_puts_y_where_the_mask_sees():
    denoiser, y, x, level = GAUSSIAN.denoiser(PROCESS), observe(op.mask(SEEN)), normal(3, 1, *EVENT), SCHEDULE.level(9)
    found = nidiff.posterior(denoiser, nidiff.Observation(y, OPERATORS["mask"]), "replacement")(x, level)
    assert torch.equal(found, torch.where(SEEN, y, denoiser(x, level)))


# The law of the samples ---------------------------------------------------------------------------------------------

SMALL = {"mask": op.mask(SEEN[:4]), "pool": op.pool(2), "blur": op.blur(0.7)}  # of 4 × 4 pixels
FIELD = nidiff.GaussianModel(0.5 * normal(1, 4, 4, seed=7), nidiff.matern((4, 4), 1.0))
NOISE = nidiff.gaussian_free_field((4, 4))


def law_errors(method: str, operator: op.Operator, steps: int, sampler: str = "ancestral", **options) -> Tensor:
    """Errors of mean and covariance of the samples, as shares of what y moves the mean by and of the covariance."""
    noise, injected = 0.3, options.pop("white", False)
    y = observe(operator, noise, gaussian=FIELD)
    exact, spread = kalman(operator, y, FIELD.mean[None], FIELD.covariance.dense(), white(y, noise))
    denoiser = FIELD.denoiser(nidiff.Process(uniform_in_logsnr(steps, "variance"), NOISE))
    observation = nidiff.Observation(y, operator, 0.0 if method == "replacement" else noise)
    mean, covariance = output_law(nidiff.posterior(denoiser, observation, method, **options), sampler, white=injected)
    moved = (exact[0] - FIELD.mean.flatten()).norm()
    return torch.stack([(mean - exact[0]).norm() / moved, (covariance - spread).norm() / spread.norm()])


@pytest.mark.parametrize(("sampler", "name"), [("ancestral", "mask"), ("ancestral", "blur"), ("heun", "pool")])
def test_the_samples_have_the_law_of_the_posterior(sampler, name):
    """Mean and covariance, exactly, at N steps and at 4 N."""
    coarse, fine = (law_errors("gaussian", SMALL[name], steps, sampler) for steps in (10, 40))
    assert fine[0] < 2e-3
    assert fine[1] < 0.4 * coarse[1]
    assert fine[1] < (0.3 if sampler == "ancestral" else 0.06)
    if name == "mask":  # negative control: the prior and the steps draw white noise
        assert law_errors("gaussian", SMALL["mask"], 40, white=True)[1] > max(0.3, 1.5 * fine[1])


def test_guidance_by_a_gradient_and_replacement_are_biased():
    """More steps do not help: what is left is the method's own. Moment matching has none of it."""
    operator = SMALL["mask"]
    right, guided, replaced = (
        law_errors(method, operator, 40, "heun") for method in ("gaussian", "gradient", "replacement")
    )
    assert (guided > 5 * right).all()
    assert (replaced > 5 * right).all()
    assert replaced[1] > 0.5  # what is not seen hardly hears of y
    repainted, plain = (law_errors("replacement", operator, 15, sampler)[1] for sampler in ("repaint", "ancestral"))
    assert repainted < 0.9 * plain


# Resampling ---------------------------------------------------------------------------------------------------------


def test_repaint_keeps_the_law():
    """With an exact denoiser, up and down again changes nothing: neither does white noise repair it."""
    problem = Gaussian(nidiff.gaussian_free_field((2, 3), gamma=1.5), mean_scale=0.0)

    def error(steps: int, **options: bool) -> Tensor:
        denoiser = problem.denoiser(nidiff.Process(uniform_in_logsnr(steps, "variance"), problem.covariance))
        return (output_law(denoiser, "repaint:repeats=3", **options)[1] - problem.matrix).norm() / problem.matrix.norm()

    assert error(60) < min(0.2, 0.45 * error(15))
    assert error(60, white=True) > 0.2


def test_repaint_is_the_isotropic_algorithm_in_whitened_coordinates():
    for x, y in whitened_paths(COV, nidiff.schedules.ddpm_linear(40), "repaint", {"repeats": 2}):
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-9)
    once, plain = (
        nidiff.sample(GAUSSIAN.denoiser(PROCESS), (2, 1, *EVENT), sampler=sampler, generator=[1, 2])
        for sampler in ("repaint:repeats=1", "ancestral")
    )
    assert torch.equal(once, plain)


# Wherever a denoiser works ------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, label: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)) + 0.1 * shift[:, None, None, None]


@pytest.mark.parametrize("method", METHODS)
def test_it_is_a_denoiser_like_any_other(method):
    """Every kind of sampler, tiles, seeds, guidance, clipping, a rehearsal, and no gradients around it."""
    process = nidiff.Process(nidiff.schedules.ddpm_linear(50), COV)
    denoiser = nidiff.Denoiser(Net(), process, "residual", gaussian=GAUSSIAN, mixture=MIXTURE, clip=3.0)
    y = observe(OPERATORS["mask"], count=2).float()
    observation = nidiff.Observation(y, op.mask(SEEN))
    denoiser = denoiser.given(shift=torch.tensor([1.0, 2.0])).guided(2.0, null={"shift": 0.0})
    given = nidiff.posterior(denoiser, observation, method)
    for sampler in ("ancestral", "heun", "dpmpp_2m", "angle_2m", "pc", "repaint:repeats=2"):
        x = nidiff.sample(given, (2, 1, *EVENT), sampler=sampler, num_steps=4, generator=[1, 2])
        assert x.isfinite().all()
        assert x.dtype == torch.float32
        assert x.abs().max() <= 3
        assert not x.requires_grad
    tiled = nidiff.sample(given, (2, 1, *EVENT), num_steps=4, generator=[1, 2], tile=2)
    with torch.inference_mode():
        assert torch.allclose(tiled, nidiff.sample(given, (2, 1, *EVENT), num_steps=4, generator=[1, 2]), atol=1e-4)
    second = nidiff.sample(given.for_images(torch.tensor([1])), (1, 1, *EVENT), num_steps=4, generator=[2])
    assert torch.allclose(second, tiled[1:], atol=1e-4)
    rehearse(given, (1, *EVENT), num_steps=4)
    plain = nidiff.Denoiser(smooth_net(EVENT), PROCESS, "x0", gaussian=GAUSSIAN, mixture=MIXTURE)  # no gradient
    rehearse(nidiff.posterior(plain, observation, method), (1, *EVENT))
    assert given.clipped(0.5)(normal(2, 1, *EVENT).float(), process.schedule.level(40)).abs().max() <= 0.5


def test_what_is_missing_may_differ_between_images():
    denoiser = GAUSSIAN.denoiser(PROCESS)
    y, x, level = observe(OPERATORS["mask"], count=2), normal(2, 1, *EVENT), SCHEDULE.level(9)
    y[0, 0, ~SEEN] = y[1, 0, SEEN] = torch.nan
    given = nidiff.posterior(denoiser, nidiff.Observation.missing(y, noise=0.1), tolerance=1e-8)
    for index, seen in enumerate((SEEN, ~SEEN)):
        one = slice(index, index + 1)
        observation = nidiff.Observation(y[one], op.mask(seen), 0.1)
        alone = nidiff.posterior(denoiser, observation, tolerance=1e-8)(x[one], level)
        close(given(x, level)[one], alone, 1e-5)
        close(given.for_images(torch.tensor([index]))(x[one], level), alone, 1e-5)


# Operators ----------------------------------------------------------------------------------------------------------


@every_operator
def test_the_transpose_is_that_of_the_operator(operator):
    """⟨A u, v⟩ = ⟨u, Aᵀ v⟩."""
    u = normal(2, 3, *EVENT)
    v = normal(*operator(u).shape, seed=1)
    assert torch.allclose((operator(u) * v).sum(), (u * operator.transpose(v, u)).sum(), rtol=1e-10)


def test_operators_do_what_they_say():
    x = normal(2, 3, *EVENT)
    assert torch.equal(op.subsample(2)(x), x[..., ::2, ::2])
    assert torch.equal(op.subsample((2, 3))(x), x[..., ::2, ::3])
    assert torch.allclose(op.pool((3, 2))(x)[..., 0, 1], x[..., :3, 2:].mean((-2, -1)))
    uneven = op.pool(4)(x)  # 6 × 4: the last block of an axis has what is left
    assert torch.allclose(
        uneven, torch.stack([x[..., :4, :].mean((-2, -1)), x[..., 4:, :].mean((-2, -1))], -1)[..., None]
    )
    assert torch.equal(op.channels([2, 0])(x), x[:, [2, 0]])
    assert torch.equal((op.pool(2) @ op.mask(SEEN))(x), op.pool(2)(op.mask(SEEN)(x)))
    assert torch.allclose(op.blur(0.0)(x), x)
    assert torch.allclose(op.blur(0.8)(torch.ones_like(x)), torch.ones_like(x))
    # A blur is a convolution: variances add up, and the weights have the variance that was asked for.
    assert torch.allclose((op.blur(0.6) @ op.blur(0.8))(x), op.blur(1.0)(x))
    rows = x[..., :1].expand_as(x)
    assert torch.allclose(op.blur((0.0, 0.8))(rows), rows)  # one width per axis
    assert not torch.allclose(op.blur((0.8, 0.0))(rows), rows, atol=0.1)
    point = torch.zeros(1, 1, 41, dtype=torch.float64)
    point[..., 20] = 1.0
    places = torch.arange(41, dtype=torch.float64) - 20
    assert (op.blur(1.5, "periodic")(point) * places**2).sum().item() == pytest.approx(1.5**2, rel=1e-6)
    for boundary in ("fixed", "reflecting"):
        every = op.waves(torch.ones(EVENT, dtype=torch.bool), boundary)(x)
        assert torch.allclose(every, Waves(EVENT, boundary).analyse(x).flatten(-2))
    assert torch.allclose(op.waves(0)(x)[..., 0], x.sum((-2, -1)) / SIZE**0.5)
    with_transpose = op.linear(lambda x: x.cumsum(-1), lambda y: y.flip(-1).cumsum(-1).flip(-1))
    v = normal(2, 3, *EVENT, seed=1)
    plain = op.linear(lambda x: x.cumsum(-1))
    assert torch.allclose(with_transpose.transpose(v, x), plain.transpose(v, x))
    with_transpose.check_transposes(x)


def test_conjugate_gradients_end_for_every_row_by_itself():
    """A row of 0, one in the range of a singular matrix, and one of another size; at most n iterations, to rounding."""
    factor = normal(8, 5)
    matrix = factor @ factor.T
    right = torch.stack([torch.zeros(8, dtype=torch.float64), matrix @ normal(8), 1e6 * (matrix @ normal(8, seed=1))])
    found = conjugate_gradients(lambda v: v @ matrix, right, 1e-12, 50)
    assert torch.equal(found[0], right[0])
    assert ((found @ matrix - right).norm(dim=1) <= 1e-10 * right.norm(dim=1)).all()
    alone = conjugate_gradients(lambda v: v @ matrix, right[1:2], 1e-12, 50)
    assert torch.allclose(found[1:2], alone, rtol=1e-9)
    well = random_matrix(8)
    first = conjugate_gradients(lambda v: v @ well, normal(2, 8), 0.0, 1)
    assert (first @ well - normal(2, 8)).norm() > 1e-3  # one iteration is not enough


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_conjugate_gradients_end_at_the_tolerance(tolerance):
    """‖S w − right‖ ≤ tolerance ‖right‖, and not far below it: eigenvalues that lie close together."""
    values = torch.logspace(0, 4, 60, dtype=torch.float64, device="cpu")
    right = torch.stack([normal(60), 1e6 * normal(60, seed=1)])
    found = conjugate_gradients(lambda v: v * values, right, tolerance, 500)
    left = (found * values - right).norm(dim=1) / right.norm(dim=1)
    assert (left <= 1.001 * tolerance).all()
    assert (left > 0.1 * tolerance).all()


# Bad input ----------------------------------------------------------------------------------------------------------

Y, WHOLE = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 6, 4)
NAN = torch.full((1, 1, 3, 2), torch.nan)

BAD = [  # the argument that is blamed, and an observation with the options of its posterior
    ("y", lambda: (nidiff.Observation(NAN, op.pool(2)), {})),
    ("y", lambda: (nidiff.Observation(Y, op.blur(1.0)), {})),
    ("function", lambda: (nidiff.Observation(torch.zeros(1, 1), op.function(lambda x: x.sum())), {})),
    ("function", lambda: (nidiff.Observation(WHOLE, op.linear(lambda x: x.long())), {})),
    ("function", lambda: (nidiff.Observation(WHOLE, op.linear(lambda x: x[..., :0])), {})),
    ("function", lambda: (nidiff.Observation(WHOLE, op.linear(lambda x: x.tolist())), {})),
    ("function", lambda: (op.linear(None), {})),
    ("y", lambda: (nidiff.Observation(WHOLE.to("meta"), op.blur(1.0)), {})),
    ("y", lambda: (nidiff.Observation([[1.0]], op.blur(1.0)), {})),
    ("mask", lambda: (op.mask(torch.zeros(6, 4)), {})),
    ("mask", lambda: (op.mask([]), {})),
    ("factor", lambda: (op.pool(8)(WHOLE), {})),
    ("step", lambda: (op.subsample(0), {})),
    ("keep", lambda: (op.waves(-1.0), {})),
    ("keep", lambda: (op.waves(0.5, "fixed")(WHOLE), {})),
    ("keep", lambda: (op.waves(torch.zeros(6, 4)), {})),
    ("keep", lambda: (op.waves(torch.full((6, 4), 0.5)), {})),
    ("mask", lambda: (nidiff.Observation.missing(NAN), {})),
    ("mask", lambda: (nidiff.Observation(Y, op.mask([1, 0, 1])), {})),
    ("mask", lambda: (op.mask([0.5, 1.0]), {})),
    ("noise", lambda: (nidiff.Observation(Y, op.pool(2), -1), {})),
    ("noise", lambda: (nidiff.Observation(Y, op.pool(2), torch.ones(5)), {})),
    ("noise", lambda: (nidiff.Observation(Y, op.pool(2), nidiff.Identity((5,))), {})),
    ("factor", lambda: (nidiff.Observation(Y, op.pool(5)), {})),
    ("width", lambda: (op.blur(-1.0), {})),
    ("indices", lambda: (nidiff.Observation(torch.zeros(1, 1, 6, 4), op.channels([0, 1])), {})),
    ("keep", lambda: (nidiff.Observation(torch.zeros(1, 1, 3), op.waves(torch.ones(5, 5) > 0)), {})),
    ("function", lambda: (nidiff.Observation(WHOLE, op.linear(lambda x: x + 1)), {})),
    ("function", lambda: (nidiff.Observation(WHOLE, op.linear(lambda x: x.cumsum(-1), lambda y: y)), {})),
    ("method", lambda: (nidiff.Observation(Y, op.pool(2)), {"steps": 3})),
    ("method", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "replacement"})),
    ("r", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "gradient", "r": 0})),
    ("r", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "gradient:r=-1"})),
    ("scale", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "dps:scale=much"})),
    ("scale", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "dps", "scale": math.nan})),
    ("iterations", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "mmps:iterations=0"})),
    ("iterations", lambda: (nidiff.Observation(Y, op.pool(2)), {"iterations": 2.5})),
    ("method", lambda: (nidiff.Observation(Y, op.pool(2)), {"method": "dps:zeta=1"})),
    ("method", lambda: (nidiff.Observation(Y, op.pool(2), torch.ones(1, 3, 2)), {"method": "dps"})),
    ("repeats", lambda: nidiff.sample(GAUSSIAN.denoiser(PROCESS), WHOLE.shape, sampler="repaint", repeats=0)),
]


def test_what_makes_no_sense_or_does_not_fit_the_denoiser_is_refused():
    denoiser, pooled = GAUSSIAN.denoiser(PROCESS), nidiff.Observation(Y.expand(2, -1, -1, -1), op.pool(2))
    for argument, make in BAD:
        with refused(argument):
            observation, options = make()
            nidiff.posterior(denoiser, observation, **options)
    given = nidiff.posterior(denoiser, pooled)
    for argument, call in (
        ("y", lambda: nidiff.sample(given, (3, 1, *EVENT), num_steps=2)),
        ("denoiser", lambda: nidiff.posterior(given, pooled)),
        ("method", lambda: nidiff.posterior(nidiff.Denoiser(smooth_net(EVENT), PROCESS), pooled, "gaussian")),
        ("denoiser", lambda: nidiff.log_likelihood(given, torch.zeros(2, 1, *EVENT))),
    ):
        with refused(argument):
            call()


# Diffusion posterior sampling as published -------------------------------------------------------------------------


def published_dps(denoise, operator, y, betas, zeta, noise):
    """Algorithm 1 of Chung et al. (2023) with ζ_i = ζ/‖y − A x̂0‖, for white noise; ``denoise(x, i)`` is x̂0."""
    alphas, (x, *noise) = 1 - betas, noise
    products = alphas.cumprod(0)
    for i in reversed(range(len(betas))):
        x = x.detach().requires_grad_()
        x0 = denoise(x, i)
        distance = (y - operator(x0)).flatten(1).norm(dim=1)
        (slope,) = torch.autograd.grad(distance.square().sum(), x)
        before = products[i - 1] if i else torch.ones(())
        mean = alphas[i].sqrt() * (1 - before) * x + before.sqrt() * betas[i] * x0
        x = mean / (1 - products[i])
        if i:
            x = x + (betas[i] * (1 - before) / (1 - products[i])).sqrt() * noise.pop(0)
        x = x - (zeta / distance)[:, None, None, None] * slope
    return x.detach()


@pytest.mark.parametrize("zeta", [1.0, 0.3])
def test_dps_is_the_published_algorithm_for_white_noise(zeta):
    """DDPM's steps on Gaussian data, with an operator that is linear and with one that is not; norms per image."""
    betas = torch.linspace(1e-3, 0.3, 30, dtype=torch.float64)
    schedule, data = nidiff.schedules.from_betas(betas), random_matrix(SIZE)
    process = nidiff.Process(schedule, nidiff.Identity(EVENT))

    def denoise(x: Tensor, row: int) -> Tensor:
        share = (1 - betas).cumprod(0)[row]
        gain = share.sqrt() * data @ torch.linalg.inv(share * data + (1 - share) * torch.eye(SIZE))
        return (x.flatten(1) @ gain.T).reshape(x.shape)

    denoiser = nidiff.Denoiser(lambda x, label: denoise(x, int(label[0])), process, "x0")
    for operator in (OPERATORS["pool"], op.function(lambda x: torch.tanh(x[..., :2]))):
        y = observe(operator, 0.1, 3)
        source = torch.Generator().manual_seed(4)
        noise = [process.noise((3, 1, *EVENT), source, dtype=torch.float64) for _ in betas]
        exact = published_dps(denoise, operator, y, betas, zeta, noise)
        given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, 0.1), f"dps:scale={zeta}")
        drawing = {"sampler": "ancestral", "generator": torch.Generator().manual_seed(4), "dtype": torch.float64}
        close(nidiff.sample(given, noise[0].shape, **drawing), exact, 1e-9)
        drawing["generator"].manual_seed(4)
        assert (nidiff.sample(denoiser, noise[0].shape, **drawing) - exact).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("method", ["dps", "pigdm", "diffpir"])
def test_it_is_the_published_algorithm_in_whitened_coordinates(method):
    """u = Σ^-½ x, with the network and the operator of u: the same path, seed by seed. Without Σ it is another."""
    net, twin = smooth_net(EVENT), COV.with_eigenvalues(torch.ones_like(COV.eigenvalues))
    operator = OPERATORS["mask"]
    y = operator(observe(operator, 0.1, 2))
    coloured = nidiff.Denoiser(net, PROCESS, "x0")
    inner = nidiff.Process(SCHEDULE, twin)
    white = nidiff.Denoiser(lambda u, label: COV.inv_sqrt(net(COV.sqrt(u), label)), inner, "x0")
    seen = op.linear(lambda u: operator(COV.sqrt(u.double())).to(u))
    x, u = (
        nidiff.sample(
            nidiff.posterior(denoiser, nidiff.Observation(y, a, 0.1), method),
            (2, 1, *EVENT),
            sampler="ancestral",
            generator=[5, 6],
            dtype=torch.float64,
        )
        for denoiser, a in ((coloured, operator), (white, seen))
    )
    close(COV.inv_sqrt(x), u, 1e-6)


def test_a_method_that_diverges_is_named_and_images_that_are_not_finite_are_refused():
    """What leaves the data's range by far is a warning, with the method's name; NaN and infinity are no images."""
    y = observe(OPERATORS["mask"], 1e-3)
    arguments = {"shape": (2, 1, *EVENT), "sampler": "ancestral", "generator": [0, 1]}

    def draw(noise: float, method: str) -> Tensor:
        observation = nidiff.Observation(y, OPERATORS["mask"], noise)
        return nidiff.sample(nidiff.posterior(GAUSSIAN.denoiser(PROCESS), observation, method), **arguments)

    with refused("method"):
        draw(1e-3, "gradient:r=0")
    with pytest.warns(UserWarning, match="'gradient' has probably diverged"):
        assert draw(0.1, "gradient:r=0").isfinite().all()
    for method in ("gaussian", "mmps", "gradient", "dps"):  # without a warning, which is an error here
        assert draw(1e-3, method).abs().max() < 20


def test_an_observation_by_dps_is_the_last_correction():
    """It moves x, which another correction of x̂0 would not hear of."""
    given = nidiff.posterior(GAUSSIAN.denoiser(PROCESS), nidiff.Observation(Y, op.pool(2), 0.1), "dps")
    with refused("denoiser"):
        given.guided(2.0, null={"shift": 0.0})
