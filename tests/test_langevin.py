"""NI-SMLD: Langevin with the right stationary law, CAS that keeps every mode, and the printed updates that do not."""

import math

import pytest
import torch
from problems import Unconditional
from torch import Tensor

import nidiff
from nidiff.sampling.langevin import best_eta, cas, langevin
from nidiff.sampling.step import Chain
from nidiff.testing.problems import Gaussian, normal, output_covariance, random_matrix, smooth_net, whitened_paths

COV = nidiff.gaussian_free_field((4, 4), gamma=1.0)
LEVELS = nidiff.schedules.smld_geometric(30, 10.0, 0.1)


def point_mass(process: nidiff.Process) -> nidiff.Denoiser:
    """The exact denoiser of data that is always 0: every level is N(0, sigma² Σ)."""
    return nidiff.Denoiser(lambda x, label: torch.zeros_like(x), process, target="x0")


def linear_maps(step, **options: object) -> tuple[Tensor, Tensor]:
    """P and A of an affine step x' = P x + A z, by unit vectors."""
    unit = torch.eye(16, dtype=torch.float64).reshape(16, 4, 4)
    zero = torch.zeros_like(unit)
    denoiser = point_mass(nidiff.Process(LEVELS, COV))
    quiet, loud = Chain(denoiser, lambda: zero), Chain(denoiser, lambda: COV.sqrt(unit))
    return step(quiet, unit, **options).reshape(16, 16), step(loud, zero, **options).reshape(16, 16)


def stationary(preconditioned: bool, eta: float) -> Tensor:
    """The stationary covariance of Langevin at sigma = 1, from X = P X P + A Aᵀ, mode by mode of Σ."""
    level = nidiff.Level(1.0, 1.0, 0)

    def step(run, x):
        return langevin(run, x, torch.zeros_like(x), level, eta, preconditioned)

    pull, push = linear_maps(step)
    values, vectors = torch.linalg.eigh(COV.dense())
    p, q = ((vectors.T @ m @ vectors).diagonal() for m in (pull, push.T @ push))
    assert (p.abs() < 1).all()
    return q / (1 - p**2) / values


def test_the_preconditioned_update_has_the_right_stationary_covariance_in_every_mode():
    """σ²Σ / (1 − η/2): right up to the step, the same factor for all modes (E23)."""
    ratio = stationary(True, eta=0.01)
    assert torch.allclose(ratio, torch.full_like(ratio, 1 / (1 - 0.005)), rtol=1e-10)


def test_the_printed_update_does_not():
    """Negative control: its stationary covariance is σ²Σ² (I − η/2 Σ⁻¹)⁻¹ (E23)."""
    values = torch.linalg.eigvalsh(COV.dense())
    ratio = stationary(False, eta=0.01)
    assert torch.allclose(ratio, values / (1 - 0.005 / values), rtol=1e-8)
    assert ratio.max() > 1.5
    assert ratio.min() < 0.5


@pytest.mark.parametrize("epsilon_share", [None, 0.1, 0.5, 0.9])
def test_cas_keeps_the_variance_of_every_mode_at_every_level(epsilon_share):
    """From σ²Σ exactly to σ'²Σ, for any feasible η (E24)."""
    ratio = (LEVELS.sigma[-1] / LEVELS.sigma[0]).item() ** (1 / 29)
    epsilon = None
    if epsilon_share is not None:
        low, high = 1 - 1 / ratio, 1 + 1 / ratio
        epsilon = (low + epsilon_share * (high - low)) * 0.1**2
    for row in (29, 15, 1):
        here, there = LEVELS.level(row), LEVELS.level(row - 1)

        def step(run, x, here=here, there=there):
            return cas(run, x, torch.zeros_like(x), here, there, epsilon=epsilon)

        pull, push = linear_maps(step)
        after = pull.T @ (float(here.sigma) ** 2 * COV.dense()) @ pull + push.T @ push
        assert torch.allclose(after, float(there.sigma) ** 2 * COV.dense(), rtol=0, atol=1e-10 * float(here.sigma) ** 2)


def test_printed_cas_does_not_keep_the_variance():
    """Negative control (E24): no scalar β can; with the same η single modes are far off."""
    here, there = LEVELS.level(15), LEVELS.level(14)

    def step(run, x):
        return cas(run, x, torch.zeros_like(x), here, there, preconditioned=False)

    pull, push = linear_maps(step)
    after = pull.T @ (float(here.sigma) ** 2 * COV.dense()) @ pull + push.T @ push
    values, vectors = torch.linalg.eigh(COV.dense())
    ratio = (vectors.T @ after @ vectors).diagonal() / (float(there.sigma) ** 2 * values)
    assert ratio.max() / ratio.min() > 1.1


def test_cas_by_default_is_the_ancestral_sampler():
    """η = 1 − 1/ratio² makes β² = 1 − 1/ratio²: the posterior of the variance-exploding chain."""
    denoiser = nidiff.Denoiser(smooth_net((4, 4)), nidiff.Process(LEVELS, COV))
    draw = {"generator": [1, 2], "dtype": torch.float64}
    ours = nidiff.sample(denoiser, (2, 4, 4), sampler="cas", **draw)
    assert torch.allclose(ours, nidiff.sample(denoiser, (2, 4, 4), sampler="ancestral", **draw), rtol=1e-9)


LANGEVIN = [("als", {"steps_per_level": 3}), ("als", {"epsilon": 5e-4}), ("cas", {}), ("cas", {"epsilon": 5e-3})]
FAMILIES = {
    "periodic": COV,
    "dense": nidiff.Dense(random_matrix(6), (2, 3)),
    "channels": nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((3, 4))),
}


@pytest.mark.parametrize("cov", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize(("name", "options"), LANGEVIN)
def test_in_whitened_coordinates_it_is_the_isotropic_algorithm(name, options, cov):
    for whitened, y in whitened_paths(cov, LEVELS, name, options):
        assert (whitened - y).abs().max() <= 1e-10 * max(1.0, y.abs().max().item())


@pytest.mark.parametrize("name", ["als", "cas"])
def test_the_printed_updates_are_not_whitening_equivariant(name):
    epsilon = 5e-4 if name == "als" else 5e-3
    path = whitened_paths(COV, LEVELS, name, {"epsilon": epsilon, "preconditioned": False})
    assert max((whitened - y).abs().max().item() for whitened, y in path) > 0.1


def test_more_langevin_steps_bring_the_law_of_gaussian_data():
    problem = Gaussian(nidiff.gaussian_free_field((2, 3), gamma=1.5), mean_scale=0.0)
    levels = nidiff.schedules.smld_geometric(60, 50.0, 0.05)
    _, target = problem.marginal(levels.level(0))
    errors = []
    for steps in (1, 5, 40):
        options = {"steps_per_level": steps}
        found = output_covariance(problem, levels, "als", options)
        errors.append(((found - target).norm() / target.norm()).item())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.12


def test_cas_reaches_the_law_of_gaussian_data():
    problem = Gaussian(nidiff.gaussian_free_field((2, 3), gamma=1.5), mean_scale=0.0)
    errors = []
    for count in (60, 240):
        levels = nidiff.schedules.smld_geometric(count, 50.0, 0.05)
        _, target = problem.marginal(levels.level(0))
        errors.append(((output_covariance(problem, levels, "cas", {}) - target).norm() / target.norm()).item())
    assert errors[1] < 0.05
    assert errors[1] < 0.4 * errors[0]


class TwoModes:
    """Two tight modes far apart, with weights 0.2 and 0.8, and their exact denoiser under N(0, sigma² Σ)."""

    def __init__(self, cov: nidiff.Covariance) -> None:
        self.cov = cov
        self.centres = torch.stack([normal(*cov.event_shape), normal(*cov.event_shape, seed=1)]) * 2
        self.weights = torch.tensor([0.2, 0.8], dtype=torch.float64)

    def denoiser(self, schedule) -> nidiff.Denoiser:
        def net(x, label):
            level = schedule.level(label[0].item())
            logits = torch.stack([self.cov.log_prob((x - c) / float(level.sigma)) for c in self.centres], 1)
            weights = (logits + self.weights.log()).softmax(1)
            return (weights[..., None, None] * self.centres).sum(1)

        return nidiff.Denoiser(net, nidiff.Process(schedule, self.cov), target="x0")

    def share_of_the_first(self, x: Tensor) -> float:
        distance = (x[:, None] - self.centres).square().sum((2, 3))
        return (distance.argmin(1) == 0).double().mean().item()


@pytest.mark.parametrize("name", ["als", "cas"])
def test_the_weights_of_two_modes_need_a_large_enough_first_level(name):
    """With σ_max as large as the whitened distance the weights come out; far below it they do not."""
    problem = TwoModes(COV)
    distance = COV.inv_sqrt(problem.centres[0] - problem.centres[1]).norm().item()
    shares = []
    for sigma_max in (distance, distance / 50):
        schedule = nidiff.schedules.smld_geometric(120, sigma_max, distance / 500)
        torch.manual_seed(0)
        x = nidiff.sample(problem.denoiser(schedule), (3000, 4, 4), sampler=name, dtype=torch.float64)
        shares.append(problem.share_of_the_first(x))
    assert shares[0] == pytest.approx(0.2, abs=0.04)
    assert abs(shares[1] - 0.2) > 0.15


@pytest.mark.parametrize("steps", [1, 5])
def test_best_eta_is_the_argmin_of_the_variance(steps):
    """Against a fine grid; for one step per level it is 1 − 1/ratio² (E31)."""
    ratio = 1.0375591319992028
    grid = torch.linspace(1e-4, 0.5, 200001, dtype=torch.float64)
    variance = ratio**2 * (1 - grid) ** (2 * steps)
    variance = variance + 2 * grid * sum((1 - grid) ** (2 * t) for t in range(steps))
    assert best_eta(ratio, steps) == pytest.approx(grid[variance.argmin()].item(), abs=1e-5)
    if steps == 1:
        assert best_eta(ratio, 1) == pytest.approx(1 - ratio**-2, rel=1e-6)
    else:
        assert best_eta(ratio, 5) * 0.01**2 == pytest.approx(6.18e-6, rel=2e-3)  # NCSNv2's 6.2e-6


def test_als_takes_its_steps_at_every_level_the_last_included_and_ends_with_the_denoised_sample():
    seen = []

    def net(x, label):
        seen.append(int(label[0]))
        return torch.zeros_like(x)

    denoiser = nidiff.Denoiser(net, nidiff.Process(nidiff.schedules.smld_geometric(3, 10.0, 0.1), COV), target="x0")
    x = nidiff.sample(denoiser, (1, 4, 4), sampler="als", steps_per_level=2, dtype=torch.float64)
    assert seen == [2, 2, 1, 1, 0, 0, 0]
    assert (x == 0).all()


def test_initial_sample_has_sigma_max_in_every_mode():
    """E22: N(0, σ_max² Σ); the printed N(0, σ_max √Σ) would have another scale and another shape."""
    process = nidiff.Process(LEVELS, COV)
    x = process.prior((40000, 4, 4), torch.Generator().manual_seed(0), dtype=torch.float64)
    power = torch.fft.fft2(x, norm="ortho").abs().square().mean(0)
    assert (power / (100 * COV.eigenvalues) - 1).abs().max() < 0.05
    assert (power / (10 * COV.eigenvalues.sqrt()) - 1).abs().max() > 1


# Unconditional networks ------------------------------------------------------------------------------------------


def test_an_unconditional_network_is_the_papers_score():
    """s(x, σ) = −Σ^-½ ε(x) / σ: one network for all levels, never told which."""
    net = smooth_net((4, 4))
    process = nidiff.Process(LEVELS, COV)
    denoiser = nidiff.Denoiser(Unconditional(lambda x: net(x, torch.zeros(len(x)))), process)
    x, level = normal(2, 4, 4), LEVELS.level(7)
    expected = -COV.inv_sqrt(net(x, torch.zeros(2))) / float(level.sigma)
    assert torch.allclose(denoiser.score(x, level), expected, rtol=1e-8)


def test_the_harmonic_correction_is_the_printed_factor_and_spoils_the_score_in_high_dimension():
    """Printed: ε · σ_H / σ. In D = 768 the optimum of an unconditional net for one point is (x − x0)·E[1/σ | x], within
    a few percent of the plain 1/σ; the correction multiplies it by σ_H / σ, far from 1 (E32)."""
    cov = nidiff.Identity((768,))
    schedule = nidiff.schedules.smld_geometric(100, 10.0, 0.1)
    process = nidiff.Process(schedule, cov)

    def optimum(x):  # E[1/σ | x] (x − 0), p(σ | x) ∝ σ^-D exp(−|x|²/2σ²)
        logits = -768 * schedule.sigma.log() - x.square().sum(1)[:, None] / (2 * schedule.sigma**2)
        return (logits.softmax(1) / schedule.sigma).sum(1, keepdim=True) * x

    plain = nidiff.Denoiser(Unconditional(optimum), process)
    corrected = nidiff.Denoiser(Unconditional(optimum, harmonic=schedule), process)
    harmonic = 1 / (1 / schedule.sigma).mean()
    for row in (5, 50, 95):
        level = schedule.level(row)
        x = float(level.sigma) * normal(4, 768)
        exact = -x / float(level.sigma) ** 2
        assert ((plain.score(x, level) - exact).norm() / exact.norm()).item() < 0.05
        assert torch.allclose(
            corrected.score(x, level), plain.score(x, level) * harmonic / float(level.sigma), rtol=1e-6
        )
        wrong = ((corrected.score(x, level) - exact).norm() / exact.norm()).item()
        assert wrong > 0.2


# Bad input -------------------------------------------------------------------------------------------------------

DENOISER = nidiff.Denoiser(smooth_net((4, 4)), nidiff.Process(LEVELS, COV))
BAD = {
    "infeasible cas": ({"sampler": "cas", "epsilon": 1e-6}, "epsilon"),
    "cas far too large": ({"sampler": "cas", "epsilon": 1.0}, "epsilon"),
    "zero epsilon": ({"sampler": "als", "epsilon": 0.0}, "epsilon"),
    "negative epsilon": ({"sampler": "cas", "epsilon": -1.0}, "epsilon"),
    "unstable": ({"sampler": "als", "epsilon": 0.03}, "epsilon"),
    "no steps": ({"sampler": "als", "steps_per_level": 0}, "steps_per_level"),
    "printed without epsilon": ({"sampler": "als", "preconditioned": False}, "epsilon"),
    "pc eta": ({"sampler": "pc", "eta": 2.5}, "eta"),
    "pc predictor": ({"sampler": "pc", "predictor": "als"}, "predictor"),
    "pc steps": ({"sampler": "pc", "corrector_steps": -1}, "corrector_steps"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named_in_one_sentence(arguments, message):
    with pytest.raises(nidiff.InputError, match=message):
        nidiff.sample(DENOISER, (1, 4, 4), dtype=torch.float64, **arguments)


@pytest.mark.parametrize("name", ["als", "cas"])
def test_a_variance_preserving_schedule_is_refused(name):
    denoiser = nidiff.Denoiser(smooth_net((4, 4)), nidiff.Process(nidiff.schedules.ddpm_linear(10), COV))
    with pytest.raises(nidiff.InputError, match="sampler"):
        nidiff.sample(denoiser, (1, 4, 4), sampler=name, dtype=torch.float64)


def test_the_feasible_interval_in_the_message_is_feasible():
    with pytest.raises(nidiff.InputError) as caught:
        nidiff.sample(DENOISER, (1, 4, 4), sampler="cas", epsilon=1e-6, dtype=torch.float64)
    words = str(caught.value).split()
    low, high = float(words[words.index("from") + 1]), float(words[words.index("to") + 1].rstrip(","))
    ratio = (LEVELS.sigma[-1] / LEVELS.sigma[0]).item() ** (1 / 29)
    ends = [0.1**2 * edge for edge in (1 - 1 / ratio, 1 + 1 / ratio)]
    for epsilon in (low * 1.001, math.sqrt(low * high), high * 0.999, *ends):
        nidiff.sample(DENOISER, (1, 4, 4), sampler="cas", epsilon=epsilon, dtype=torch.float64)
