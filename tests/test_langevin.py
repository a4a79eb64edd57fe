"""NI-SMLD: Langevin with the right stationary law, CAS that keeps every mode, and the printed updates that do not."""

import pytest
import torch
from problems import Mixture, Unconditional, refused
from torch import Tensor

import nidiff
from nidiff.sampling.annealing import cas_interval
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


def after_cas(row: int, **options: object) -> Tensor:
    """The covariance after a step of CAS that began with sigma² Σ."""
    here, there = LEVELS.level(row), LEVELS.level(row - 1)
    pull, push = linear_maps(lambda run, x: cas(run, x, torch.zeros_like(x), here, there, **options))
    return pull.T @ (here.sigma**2 * COV.dense()) @ pull + push.T @ push


def test_cas_keeps_the_variance_of_every_mode_at_every_level():
    """From σ²Σ exactly to σ'²Σ, for any feasible η, the ends of the interval included (E24)."""
    low, high = cas_interval((LEVELS.sigma[-1] / LEVELS.sigma[0]).item() ** (1 / 29))
    for share in (None, 0.0, 0.1, 0.5, 0.9, 1.0):
        epsilon = None if share is None else (low + share * (high - low)) * 0.1**2
        for row in (29, 15, 1):
            wanted = LEVELS.sigma[row - 1] ** 2 * COV.dense()
            assert (after_cas(row, epsilon=epsilon) - wanted).abs().max() < 1e-8 * LEVELS.sigma[row] ** 2


def test_printed_cas_does_not_keep_the_variance():
    """Negative control (E24): no scalar β can; with the same η single modes are far off."""
    values, vectors = torch.linalg.eigh(COV.dense())
    ratio = (vectors.T @ after_cas(15, preconditioned=False) @ vectors).diagonal() / (LEVELS.sigma[14] ** 2 * values)
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
def test_in_whitened_coordinates_it_is_the_isotropic_algorithm(cov):
    for name, options in LANGEVIN:
        for whitened, y in whitened_paths(cov, LEVELS, name, options):
            assert (whitened - y).abs().max() <= 1e-10 * max(1.0, y.abs().max().item())


@pytest.mark.parametrize("name", ["als", "cas"])
def test_the_printed_updates_are_not_whitening_equivariant(name):
    epsilon = 5e-4 if name == "als" else 5e-3
    path = whitened_paths(COV, LEVELS, name, {"epsilon": epsilon, "preconditioned": False})
    assert max((whitened - y).abs().max().item() for whitened, y in path) > 0.1


def law_error(name: str, num_levels: int, **options: object) -> float:
    """How far the covariance of the samples of Gaussian data is off, exactly."""
    problem = Gaussian(nidiff.gaussian_free_field((2, 3), gamma=1.5), mean_scale=0.0)
    levels = nidiff.schedules.smld_geometric(num_levels, 50.0, 0.05)
    _, target = problem.marginal(levels.level(0))
    return ((output_covariance(problem, levels, name, options) - target).norm() / target.norm()).item()


def test_more_langevin_steps_bring_the_law_of_gaussian_data():
    errors = [law_error("als", 40, steps_per_level=steps) for steps in (1, 4, 16)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.2


def test_cas_reaches_the_law_of_gaussian_data():
    coarse, fine = (law_error("cas", count) for count in (40, 160))
    assert fine < 0.07
    assert fine < 0.4 * coarse


@pytest.mark.parametrize(("name", "num_levels"), [("als", 50), ("cas", 150)])
def test_the_weights_of_two_modes_need_a_large_enough_first_level(name, num_levels):
    """With σ_max of twice the whitened distance the weights come out; far below it they do not."""
    problem = Mixture(COV)
    apart = (problem.parts[0].mean - problem.parts[1].mean).reshape(4, 4)
    distance, shares = COV.inv_sqrt(apart).norm().item(), []
    for sigma_max in (2 * distance, distance / 50):
        schedule = nidiff.schedules.smld_geometric(num_levels, sigma_max, distance / 500)
        torch.manual_seed(0)
        denoiser = problem.denoiser(nidiff.Process(schedule, COV))
        x = nidiff.sample(denoiser, (1000, 4, 4), sampler=name, dtype=torch.float64)
        shares.append(problem.share_of_the_first(x))
    assert shares[0] == pytest.approx(0.3, abs=0.05)
    assert abs(shares[1] - 0.3) > 0.15


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


# Unconditional networks ------------------------------------------------------------------------------------------


def test_an_unconditional_network_is_the_papers_score():
    """s(x, σ) = −Σ^-½ ε(x) / σ: one network for all levels, never told which."""
    net = smooth_net((4, 4))
    process = nidiff.Process(LEVELS, COV)
    denoiser = nidiff.Denoiser(Unconditional(lambda x: net(x, torch.zeros(len(x)))), process)
    x, level = normal(2, 4, 4), LEVELS.level(7)
    expected = -COV.inv_sqrt(net(x, torch.zeros(2))) / float(level.sigma)
    assert torch.allclose(denoiser.score(x, level), expected, rtol=1e-8)


# Bad input -------------------------------------------------------------------------------------------------------

DENOISER = nidiff.Denoiser(smooth_net((4, 4)), nidiff.Process(LEVELS, COV))
VP = nidiff.Process(nidiff.schedules.ddpm_linear(10), COV)
BAD = [
    ({"sampler": "cas", "epsilon": 1e-6}, "epsilon"),  # infeasible
    ({"sampler": "als", "epsilon": 0.03}, "epsilon"),  # unstable
    ({"sampler": "als", "steps_per_level": 0}, "steps_per_level"),
    ({"sampler": "als", "preconditioned": False}, "epsilon"),  # which has no default then
    ({"sampler": "pc", "eta": 2.5}, "eta"),
    ({"sampler": "pc", "predictor": "als"}, "predictor"),
    ({"sampler": "pc", "corrector_steps": -1}, "corrector_steps"),
    ({"sampler": "als", "denoiser": nidiff.Denoiser(smooth_net((4, 4)), VP)}, "sampler"),
    ({"sampler": "cas", "denoiser": nidiff.Denoiser(smooth_net((4, 4)), VP)}, "sampler"),
]


def test_bad_input_is_named():
    for arguments, blamed in BAD:
        with refused(blamed):
            nidiff.sample(**{"denoiser": DENOISER, "shape": (1, 4, 4), "dtype": torch.float64, **arguments})
