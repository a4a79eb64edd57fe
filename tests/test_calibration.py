"""Noise scales from data: exact distances, the overlap equation, the Langevin ε, and ``nidiff calibrate``.

The numbers are those of the errata E24 and E29–E31, of the paper, or closed forms.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

import nidiff
from nidiff.cli import main
from nidiff.design import distance
from nidiff.design.distance import (
    batch_whitened_distance,
    max_whitened_distance,
    quantile_whitened_distance,
    sampled_distances,
)
from nidiff.design.scales import CLASSIC_RATIO, Calibration, calibrate, num_levels, overlap, overlap_ratio
from nidiff.errors import InputError
from nidiff.sampling.annealing import cas_interval, langevin_epsilon, variance_ratio
from nidiff.sampling.langevin import best_eta

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from paper_constants import LEVELS, SIGMA_N, _without_mean, initial_scales, paper_constants

sys.path.pop()  # whose sparse.py is not the package of that name

SHAPE = (6, 5)
FIELD = nidiff.gaussian_free_field(SHAPE, 1.0)
CIFAR = nidiff.gaussian_free_field((32, 32))
CIFAR_DROPPED = nidiff.gaussian_free_field((32, 32), zero_mode="zero")
RATIO_20 = 1.0375867506951884  # the paper's, for 207 levels from 20 to 0.01


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def heavy_tailed(count=60, shape=(3, *SHAPE)):
    """Images of very different norms, as real ones are."""
    images = torch.randn(count, *shape, generator=seeded(), dtype=torch.float64)
    scale = torch.randn(count, generator=seeded(1)).exp()
    return images * scale.reshape(-1, *[1] * len(shape)) + 5.0


def all_distances(images, covariance):
    """In float64, pair by pair, with the dense matrix."""
    whitener = torch.linalg.inv(torch.linalg.cholesky(covariance.dense()))
    white = images.double().reshape(len(images), -1, covariance.size) @ whitener.T
    return torch.cdist(white.flatten(1), white.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")


# The largest σ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "covariance",
    [nidiff.Identity(SHAPE), FIELD, nidiff.matern(SHAPE, 2.0, boundary="reflecting"), nidiff.pyramid(SHAPE)],
    ids=["identity", "free field", "matern", "dense"],
)
@pytest.mark.parametrize("chunk", [7, 1024])
def test_the_maximum_is_that_of_all_pairs(monkeypatch, covariance, chunk):
    monkeypatch.setattr(distance, "CHUNK", chunk)
    images = heavy_tailed()
    table = all_distances(images, covariance)
    found = max_whitened_distance(images, covariance)
    assert found.distance == pytest.approx(table.max().item(), rel=1e-12)
    assert table[found.pair].item() == table.max().item()
    assert found.pair[0] < found.pair[1]


def test_blocks_that_cannot_hold_the_maximum_are_left_out(monkeypatch):
    monkeypatch.setattr(distance, "CHUNK", 5)
    calls = []
    product = torch.Tensor.__matmul__

    def counted(a, b):
        calls.append(1)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)

    def blocks(images):
        expected = all_distances(images, nidiff.Identity(SHAPE)).max().item()
        calls.clear()
        assert max_whitened_distance(images, nidiff.Identity(SHAPE)).distance == pytest.approx(expected)
        return len(calls)

    noise = torch.randn(60, 3 * 30, generator=seeded())
    sphere = torch.nn.functional.normalize(noise, dim=1).reshape(-1, 3, *SHAPE)
    assert blocks(sphere) == 12 * 13 // 2  # equal norms: nothing can be left out
    assert blocks(heavy_tailed()) < 10


def test_a_far_cluster_does_not_lose_digits():
    """Centred first: 1e4 away from 0 the Gram matrix alone would not see the distance."""
    images = 1e4 + torch.randn(50, *SHAPE, generator=seeded(), dtype=torch.float64)
    found = max_whitened_distance(images, nidiff.Identity(SHAPE))
    assert found.distance == pytest.approx(all_distances(images, nidiff.Identity(SHAPE)).max().item(), rel=1e-12)


def test_uint8_means_minus_one_to_one():
    pixels = torch.randint(256, (20, 3, *SHAPE), generator=seeded(), dtype=torch.uint8)
    symmetric = pixels.double() / 127.5 - 1
    assert max_whitened_distance(pixels, FIELD).distance == pytest.approx(
        max_whitened_distance(symmetric, FIELD).distance, rel=1e-6
    )
    unit = pixels.double() / 255
    assert max_whitened_distance(unit, FIELD).distance == pytest.approx(
        max_whitened_distance(symmetric, FIELD).distance / 2, rel=1e-12
    )


def test_distances_are_isotropic_ones_of_whitened_images():
    images = heavy_tailed()
    white, _ = max_whitened_distance(FIELD.inv_sqrt(images), nidiff.Identity(SHAPE))
    assert max_whitened_distance(images, FIELD).distance == pytest.approx(white)
    assert max_whitened_distance(images, nidiff.Identity(SHAPE)).distance != pytest.approx(white, rel=0.05)
    assert max_whitened_distance(images, 4.0 * FIELD).distance == pytest.approx(white / 2)


def test_one_batch_of_everything_is_the_maximum_and_smaller_ones_are_below():
    images = heavy_tailed()
    largest = max_whitened_distance(images, FIELD).distance
    assert batch_whitened_distance(images, FIELD, batch_size=100) == pytest.approx(largest, rel=1e-5)
    small = [batch_whitened_distance(images, FIELD, batch_size=4, generator=seeded(seed)) for seed in (0, 0, 1, 2)]
    assert small[0] == small[1]
    assert len(set(small)) > 1
    assert max(small) <= largest * (1 + 1e-6)
    assert min(small) < largest


def test_quantiles_are_those_of_all_pairs_where_there_are_few():
    images = heavy_tailed()
    upper = all_distances(images, FIELD)[tuple(torch.triu_indices(60, 60, 1))]
    assert sorted(sampled_distances(images, FIELD).tolist()) == pytest.approx(upper.sort().values.tolist(), rel=1e-4)
    for quantile in (0.5, 0.99, 1.0):
        found = quantile_whitened_distance(images, FIELD, quantile=quantile)
        assert found == pytest.approx(upper.quantile(quantile, interpolation="higher").item(), rel=1e-2)
    assert len(sampled_distances(images, FIELD, num_images=10)) == 45


def test_progress_rises_to_the_number_of_pairs(monkeypatch):
    monkeypatch.setattr(distance, "CHUNK", 7)
    for measure in (max_whitened_distance, batch_whitened_distance):
        seen = []
        measure(heavy_tailed(), FIELD, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == sorted(seen)
        assert seen[-1] == (1770, 1770)  # 60 · 59 / 2, and one batch


def test_a_mean_of_huge_variance_is_the_pseudo_inverse():
    """E29: the paper's distances drop the zero mode; a shift of an image's brightness is then no distance."""
    images = torch.randn(10, 3, 8, 8, generator=seeded(), dtype=torch.float64)
    dropped = nidiff.gaussian_free_field((8, 8), zero_mode="zero").dense()
    inverse = torch.linalg.pinv(dropped, hermitian=True)
    flat = images.flatten(2)
    difference = flat[:, None] - flat[None]
    expected = torch.einsum("ijcp,pq,ijcq->ij", difference, inverse, difference).sqrt().max().item()
    covariance = _without_mean((8, 8))
    assert max_whitened_distance(images, covariance).distance == pytest.approx(expected, rel=1e-9)
    brighter = images + 10 * torch.arange(10).reshape(10, 1, 1, 1)
    assert max_whitened_distance(brighter, covariance).distance == pytest.approx(expected, rel=1e-6)
    kept = nidiff.gaussian_free_field((8, 8))
    assert max_whitened_distance(brighter, kept).distance > 2 * expected


# The other σ -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [5, 64, 784, 3069, 3072, 196608])
def test_the_overlap_ratio_solves_the_overlap_equation(dimension):
    ratio = overlap_ratio(dimension)
    assert overlap(ratio, dimension) == pytest.approx(0.5, abs=1e-9)
    root = math.sqrt(2 * dimension)
    assert ratio == pytest.approx(root / (root - 3), rel=1e-8)


def test_the_printed_ratios_do_not_solve_it():
    """E30: they are (σ_1/σ_L)^(1/(L−1)), to the last bit, of an L that NCSNv2's ratio gives, rounded down."""
    assert overlap_ratio(3072) == pytest.approx(1.039796, abs=5e-7)
    for (sigma_max, (levels, printed)), found in zip(LEVELS.items(), (0.5670, 0.5661, 0.5632), strict=True):
        assert (sigma_max / 0.01) ** (1 / (levels - 1)) == printed
        assert overlap(printed, 3072) == pytest.approx(found, abs=5e-5)
        fitting = 1 + math.log(sigma_max / 0.01) / math.log(CLASSIC_RATIO)
        assert math.floor(fitting + 1e-9) == levels


def test_the_overlap_is_that_of_whitened_radii():
    """E30: r is ‖Σ^-½x‖, whose spread is σ/√2; that of ‖x‖ is far larger, and the equation would not hold."""
    ratio, x = overlap_ratio(3072), CIFAR.sample((2000, 3, 32, 32), seeded())
    low, high = (ratio * (math.sqrt(3072) + edge / math.sqrt(2)) for edge in (-3, 3))
    white, plain = CIFAR.inv_sqrt(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1)
    assert white.std().item() == pytest.approx(0.707, rel=0.06)
    assert plain.std().item() > 2.5
    assert ((white > low) & (white < high)).double().mean().item() == pytest.approx(0.5, abs=0.04)
    assert not 0.4 < ((plain > low) & (plain < high)).double().mean().item() < 0.6


def test_levels_are_rounded_up_so_that_the_ratio_is_never_exceeded():
    assert num_levels(50, 0.01, CLASSIC_RATIO) == 232  # fits exactly: no level more
    assert num_levels(20, 0.01, CLASSIC_RATIO) == 208  # 207.15
    assert num_levels(50, 0.01, overlap_ratio(3072)) == 220  # 219.2
    assert num_levels(2.0, 1.0, 100.0) == 2
    for sigma_max in (0.02, 1.0, 33.0, 1e4):
        for ratio in (1.001, 1.04, 3.0):
            levels = num_levels(sigma_max, 0.01, ratio)
            span = math.log(sigma_max / 0.01)
            assert span / (levels - 1) <= math.log(ratio) * (1 + 1e-9)
            assert levels == 2 or span / (levels - 2) > math.log(ratio)


# Langevin dynamics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioned", [True, False])
@pytest.mark.parametrize("covariance", [FIELD, nidiff.pyramid(SHAPE)], ids=["free field", "dense"])
def test_the_variance_ratio_is_that_of_the_recursion_of_matrices(covariance, preconditioned):
    """Var[x_t] = P Var[x_{t−1}] Pᵀ + 2αΣ, with P = I − (α/σ²)Σ⁻¹ as printed, or I − (α/σ²)I."""
    sigma, ratio, epsilon, sigma_min, steps = 0.7, 1.2, 3e-6, 0.01, 4
    eta = epsilon / sigma_min**2
    matrix, eye = covariance.dense(), torch.eye(covariance.size, dtype=torch.float64)
    step = eye - eta * (eye if preconditioned else torch.linalg.inv(matrix))
    variance = (ratio * sigma) ** 2 * matrix
    for _ in range(steps):
        variance = step @ variance @ step.T + 2 * eta * sigma**2 * matrix
    modes = variance_ratio(covariance, ratio, epsilon, sigma_min, steps, preconditioned)
    expected = torch.linalg.eigvalsh(torch.linalg.solve(matrix, variance) @ eye / sigma**2).sort().values
    assert modes.shape == covariance.event_shape
    mean = (modes * covariance.eigenvalues).mean().item()
    assert mean == pytest.approx(variance.diagonal().mean().item() / sigma**2, rel=1e-9)
    if covariance is FIELD:
        assert modes.flatten().sort().values.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


E31 = {
    "SMLD, T = 5": (nidiff.Identity((32, 32)), CLASSIC_RATIO, 5, True, 6.184e-6, 1.05547),
    "printed, T = 5, dropped": (CIFAR_DROPPED, RATIO_20, 5, False, 3.169e-7, 1.07542),
    "printed, T = 5, kept": (CIFAR, RATIO_20, 5, False, 3.021e-7, 1.07546),
    "printed, T = 1, dropped": (CIFAR_DROPPED, RATIO_20, 1, False, 2.030e-6, 1.07505),
    "printed, T = 1, kept": (CIFAR, RATIO_20, 1, False, 1.964e-6, 1.07508),
    "preconditioned, T = 5": (CIFAR, RATIO_20, 5, True, 6.188e-6, 1.05550),
    "preconditioned, T = 1": (CIFAR, RATIO_20, 1, True, 7.114e-6, 1.07114),
}


@pytest.mark.parametrize("covariance, ratio, steps, preconditioned, epsilon, least", E31.values(), ids=E31)
def test_epsilon_is_that_of_the_errata_and_the_least(covariance, ratio, steps, preconditioned, epsilon, least):
    def mean(value):
        modes = variance_ratio(covariance, ratio, value, 0.01, steps, preconditioned)
        return (modes * covariance.eigenvalues).mean().item()

    found = langevin_epsilon(covariance, ratio, 0.01, steps, preconditioned)
    assert found == pytest.approx(epsilon, rel=2e-4)
    assert mean(found) == pytest.approx(least, abs=6e-6)
    assert 1 < mean(found) < ratio**2  # no ε reaches 1
    assert all(mean(found) < mean(found * factor) for factor in (0.01, 0.5, 0.99, 1.01, 2, 10))


def test_one_step_has_closed_forms():
    gain = 1 - RATIO_20**-2
    values = CIFAR.eigenvalues
    assert langevin_epsilon(CIFAR, RATIO_20, 0.01, 1) == pytest.approx(1e-4 * gain, rel=1e-6)
    printed = langevin_epsilon(CIFAR, RATIO_20, 0.01, 1, preconditioned=False)
    assert printed == pytest.approx(1e-4 * gain / values.reciprocal().mean().item(), rel=1e-6)
    positive = CIFAR_DROPPED.eigenvalues[CIFAR_DROPPED.eigenvalues > 0]
    dropped = langevin_epsilon(CIFAR_DROPPED, RATIO_20, 0.01, 1, preconditioned=False)
    closed = 1e-4 * (1023 - 1024 / RATIO_20**2) / positive.reciprocal().sum().item()
    assert dropped == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("ratio", [1.001, CLASSIC_RATIO, 1.5, 4.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_preconditioned_epsilon_is_isotropic_and_that_of_the_sampler(ratio, steps):
    found = langevin_epsilon(FIELD, ratio, 0.2, steps)
    assert found == pytest.approx(langevin_epsilon(nidiff.Identity(SHAPE), ratio, 0.2, steps), rel=1e-6)
    assert found / 0.2**2 == pytest.approx(best_eta(ratio, steps), rel=1e-5)


def test_the_printed_update_leaves_modes_on_either_side_of_their_target():
    """E31: the small ε of the paper is a symptom of the missing Σ."""
    printed = variance_ratio(CIFAR_DROPPED, RATIO_20, 3.169e-7, 0.01, 5, preconditioned=False).flatten()[1:]
    assert (printed.min().item(), printed.max().item()) == pytest.approx((0.799, 1.108), abs=1e-3)
    assert variance_ratio(CIFAR, RATIO_20, 6.2e-6).unique().numel() == 1


def test_a_covariance_of_another_scale_has_no_printed_epsilon():
    for steps, expected in ((5, 1.893e-6), (1, 7.735e-6)):
        halved = langevin_epsilon(0.5 * CIFAR_DROPPED, RATIO_20, 0.01, steps, preconditioned=False)
        assert halved == pytest.approx(expected, rel=1e-3)
    with pytest.raises(InputError, match="covariance"):
        langevin_epsilon(2.0 * CIFAR, RATIO_20, 0.01, 5, False)
    assert langevin_epsilon(2.0 * CIFAR, RATIO_20) == pytest.approx(langevin_epsilon(CIFAR, RATIO_20), rel=1e-6)


def test_cas_exists_inside_its_interval_and_not_for_the_printed_epsilons():
    """E24: β² = 1 − ratio² (1 − η)² is negative at the paper's NI-SMLD ε, so β is imaginary."""
    low, high = cas_interval(RATIO_20)
    assert low == pytest.approx(0.03623, abs=5e-6)

    def beta_squared(eta, ratio):
        return 1 - ratio**2 * (1 - eta) ** 2

    for edge in (low, high):
        assert beta_squared(edge, RATIO_20) == pytest.approx(0, abs=1e-12)
    for epsilon, ratio, expected in (
        (3.1e-7, RATIO_20, -0.0699),
        (2.0e-6, RATIO_20, -0.0340),
        (6.2e-6, CLASSIC_RATIO, 0.0528),
    ):
        low, high = cas_interval(ratio)
        assert beta_squared(epsilon / 1e-4, ratio) == pytest.approx(expected, abs=6e-5)
        assert (low <= epsilon / 1e-4 <= high) == (expected > 0)


# All together ----------------------------------------------------------------------------------------------------


def test_calibrate_hangs_together():
    images = heavy_tailed()
    found = calibrate(images, FIELD)
    assert isinstance(found, Calibration)
    largest = max_whitened_distance(images, FIELD)
    assert (found.sigma_max, found.pair) == largest
    assert found.dimension == 90
    assert found.target_ratio == overlap_ratio(90)
    assert found.num_levels == num_levels(found.sigma_max, 0.01, found.target_ratio)
    assert found.ratio <= found.target_ratio
    sigma = found.schedule().sigma
    assert len(sigma) == found.num_levels
    assert (sigma[0].item(), sigma[-1].item()) == pytest.approx((0.01, found.sigma_max))
    assert (sigma[1:] / sigma[:-1]).tolist() == pytest.approx([found.ratio] * (found.num_levels - 1))
    assert found.epsilon == langevin_epsilon(FIELD, found.ratio, 0.01, 5)
    assert found.eta == found.epsilon / 1e-4
    assert found.cas_interval == cas_interval(found.ratio)
    assert found.cas_feasible == (found.cas_interval[0] <= found.eta <= found.cas_interval[1])


def test_every_choice_of_calibrate_is_heard():
    images = heavy_tailed()
    batch = calibrate(images, FIELD, distance="batch", batch_size=5, generator=seeded())
    assert batch.sigma_max == batch_whitened_distance(images, FIELD, batch_size=5, generator=seeded())
    assert batch.pair is None
    median = calibrate(images, FIELD, distance="quantile", quantile=0.5)
    assert median.sigma_max == quantile_whitened_distance(images, FIELD, quantile=0.5)
    assert calibrate(images, FIELD, ratio="classic").target_ratio == CLASSIC_RATIO
    assert calibrate(images, FIELD, ratio=1.5).target_ratio == 1.5
    given = calibrate(images, FIELD, epsilon=3.1e-9, sigma_min=0.02, steps_per_level=1, preconditioned=False)
    assert (given.epsilon, given.sigma_min, given.eta, given.cas_feasible) == (3.1e-9, 0.02, 3.1e-9 / 0.02**2, False)
    printed = variance_ratio(FIELD, given.ratio, 3.1e-9, 0.02, 1, False)
    assert given.variance_ratio == pytest.approx((printed * FIELD.eigenvalues).mean().item())


def test_images_without_a_channel_axis_and_events_with_one():
    grey = heavy_tailed(shape=SHAPE)
    assert calibrate(grey, FIELD).sigma_max == pytest.approx(calibrate(grey[:, None], FIELD).sigma_max)
    colours = nidiff.Channels(torch.eye(3) + 0.5, FIELD)
    assert calibrate(heavy_tailed(), colours).dimension == 90


def with_nan():
    images = heavy_tailed()
    images[31, 1, 2, 3] = math.nan
    return images


BAD = {
    "one image": (lambda: calibrate(heavy_tailed()[:1], FIELD), "images"),
    "no image": (lambda: calibrate(heavy_tailed()[:0], FIELD), "images"),
    "all the same": (lambda: calibrate(heavy_tailed()[:1].expand(9, -1, -1, -1), FIELD), "images"),
    "the same, batch": (
        lambda: calibrate(heavy_tailed()[:1].expand(9, -1, -1, -1), FIELD, distance="batch"),
        "images",
    ),
    "flat": (lambda: calibrate(torch.arange(9.0).reshape(9, 1, 1, 1).expand(9, 3, *SHAPE), FIELD), "images"),
    "black": (lambda: calibrate(torch.zeros(9, *SHAPE, dtype=torch.uint8), FIELD), "images"),
    "NaN": (lambda: calibrate(with_nan(), FIELD), "images"),
    "NaN, batch": (lambda: calibrate(with_nan(), FIELD, distance="batch"), "images"),
    "integers": (lambda: calibrate(torch.arange(60).reshape(2, *SHAPE), FIELD), "images"),
    "other shape": (lambda: calibrate(heavy_tailed(), nidiff.Identity((5, 6))), "images"),
    "no batch axis": (lambda: calibrate(torch.randn(SHAPE), FIELD), "images"),
    "singular": (
        lambda: calibrate(heavy_tailed(), nidiff.gaussian_free_field(SHAPE, zero_mode="zero")),
        'zero_mode="one"',
    ),
    "sigma_min above": (lambda: calibrate(heavy_tailed(), FIELD, sigma_min=1e6), "sigma_min"),
    "sigma_min": (lambda: calibrate(heavy_tailed(), FIELD, sigma_min=0.0), "sigma_min"),
    "sigmas": (lambda: num_levels(1.0, 1.0, 1.1), "sigma_min"),
    "epsilon": (lambda: calibrate(heavy_tailed(), FIELD, epsilon=0.0), "epsilon"),
    "negative epsilon": (lambda: variance_ratio(FIELD, 1.1, -1e-6), "epsilon"),
    "steps": (lambda: calibrate(heavy_tailed(), FIELD, steps_per_level=0), "steps_per_level=0"),
    "ratio": (lambda: calibrate(heavy_tailed(), FIELD, ratio=1.0), "ratio"),
    "ratio by name": (lambda: calibrate(heavy_tailed(), FIELD, ratio="golden"), "ratio"),
    "distance": (lambda: calibrate(heavy_tailed(), FIELD, distance="mean"), "distance"),
    "batch of one": (lambda: calibrate(heavy_tailed(), FIELD, distance="batch", batch_size=1), "batch_size=1"),
    "quantile": (lambda: calibrate(heavy_tailed(), FIELD, distance="quantile", quantile=0.0), "quantile=0.0"),
    "too few dimensions": (lambda: overlap_ratio(4), "ratio"),
}


@pytest.mark.parametrize("call, words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_that_names_it(call, words):
    with pytest.raises(InputError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith(".")


# The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run ``nidiff calibrate`` beside images.npz, in an otherwise empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 6, 3))
    np.savez(tmp_path / "images.npz", pixels.astype(np.uint8))

    def command(*arguments):
        code = main(["calibrate", *map(str, arguments)])
        return code, *capsys.readouterr()

    command.images = torch.from_numpy(pixels).movedim(-1, 1).to(torch.uint8)
    return command


def test_json_is_what_calibrate_says(run, tmp_path):
    code, out, err = run("images.npz", "--json", "--covariance", "gff:gamma=0.5", "--out", "new/c.svg")
    assert (code, err) == (0, "wrote new/c.svg\n")
    assert (tmp_path / "new/c.svg").is_file()
    report = json.loads(out)
    covariance = nidiff.gaussian_free_field((8, 6), 0.5)
    expected = calibrate(run.images, covariance)
    for name, value in vars(expected).items():
        assert report[name] == (list(value) if isinstance(value, tuple) else value)
    assert repr(nidiff.Covariance.from_config(report["covariance"])) == repr(covariance)
    assert report["range"] == "symmetric"
    assert report["formulas"].keys() == vars(expected).keys()


def test_the_table_has_every_number_and_its_formula(run, tmp_path):
    code, table, _ = run("images.npz")
    assert code == 0
    assert table.isascii()
    assert "[-1, 1]" in table
    rows = {line.split()[0]: line for line in table.splitlines()[2:]}
    expected = calibrate(run.images, nidiff.gaussian_free_field((8, 6)))
    assert f"{expected.sigma_max:.6g}" in rows["sigma_max"]
    assert str(expected.pair) in rows["pair"]
    assert "log(sigma_max / sigma_min)" in rows["num_levels"]
    assert all(len(line.split()) >= 3 for line in rows.values())
    assert (tmp_path / "out/calibration.png").stat().st_size > 10_000


def test_flags_reach_the_library(run):
    code, out, _ = run(
        *("images.npz", "--json", "--covariance", "matern:length_scale=2,boundary=reflecting"),
        *("--distance", "batch:batch_size=4", "--ratio", 1.5, "--steps-per-level", 2, "--sigma-min", 0.1),
        *("--printed", "--range", "unit", "--seed", 3),
    )
    assert code == 0
    report = json.loads(out)
    expected = calibrate(
        run.images / 255,
        nidiff.matern((8, 6), 2.0, boundary="reflecting"),
        distance="batch",
        batch_size=4,
        ratio=1.5,
        steps_per_level=2,
        sigma_min=0.1,
        preconditioned=False,
        generator=seeded(3),
    )
    assert report["sigma_max"] == pytest.approx(expected.sigma_max)
    assert report["epsilon"] == pytest.approx(expected.epsilon, rel=1e-5)
    assert (report["target_ratio"], report["num_levels"]) == (1.5, expected.num_levels)


def test_a_covariance_may_be_fitted_to_the_images_or_come_from_a_folder(run, tmp_path):
    fitted = nidiff.from_data(run.images / 127.5 - 1)
    fitted.save(tmp_path / "fitted")
    for text in ("from_data", "fitted"):
        code, out, _ = run("images.npz", "--json", "--covariance", text)
        assert code == 0
        assert json.loads(out)["sigma_max"] == pytest.approx(calibrate(run.images, fitted).sigma_max)


def test_floats_can_be_brought_to_the_range_of_the_paper(run, tmp_path):
    np.save(tmp_path / "floats.npy", (run.images / 127.5 - 1).movedim(1, -1).numpy())
    sigma = []
    for pixels in ("symmetric", "unit"):
        code, out, _ = run("floats.npy", "--json", "--range", pixels, "--scaling", "none")
        assert code == 0
        sigma.append(json.loads(out)["sigma_max"])
    assert sigma[0] == pytest.approx(2 * sigma[1])


BAD_COMMANDS = {
    "no data": ([], "DATA is missing"),
    "nowhere": (["nowhere.npz"], "nowhere.npz"),
    "sigma_min": (["images.npz", "--sigma-min", 1e9], "not below sigma_max"),
    "epsilon": (["images.npz", "--epsilon", 0], "epsilon=0.0"),
    "ratio": (["images.npz", "--ratio", "golden"], "ratio='golden'"),
    "range": (["images.npz", "--range", "byte"], "range='byte'"),
    "covariance": (["images.npz", "--covariance", "perlin"], "covariance='perlin'"),
    "key of another covariance": (["images.npz", "--covariance", "gff:length_scale=2"], "length_scale"),
    "missing number": (["images.npz", "--covariance", "matern"], "length_scale"),
    "distance": (["images.npz", "--distance", "mean"], "distance='mean'"),
    "key of another distance": (["images.npz", "--distance", "max:quantile=0.9"], "'max:quantile=0.9'"),
    "seed": (["images.npz", "--seed", -1], "seed=-1"),
    "picture": (["images.npz", "--out", "c.gif"], "out='c.gif'"),
}


@pytest.mark.parametrize("arguments, words", BAD_COMMANDS.values(), ids=BAD_COMMANDS.keys())
def test_a_bad_command_is_one_sentence_and_exit_code_2(run, tmp_path, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("nidiff: ")
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["images.npz"]


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupt_is_one_line_and_leaves_no_file(run, tmp_path, monkeypatch, after):
    calls = []

    def interrupt(bar, count):
        calls.append(count)
        if len(calls) > after:
            raise KeyboardInterrupt

    monkeypatch.setattr(tqdm, "update", interrupt)
    code, out, err = run("images.npz")
    assert (code, out) == (130, "")
    assert err.count("\n") == 1
    assert "interrupted" in err
    assert [path.name for path in tmp_path.iterdir()] == ["images.npz"]


def test_the_constants_of_the_paper_are_recomputed():
    printed = [row for row in paper_constants() if row.paper is not None]
    assert len(printed) == len(SIGMA_N) + 2 * len(LEVELS) + 5
    for row in printed:
        tolerance = {"sigma_N": 3e-8, "ratio": 1e-15, "L": 0}.get(row.name.split(",")[0], 0.03)
        assert row.ours == pytest.approx(row.paper, rel=tolerance), row.name


def test_initial_scales_are_of_pixels_from_zero_to_one():
    images = torch.randint(256, (200, 3, 32, 32), generator=seeded(), dtype=torch.uint8)
    exact = {row.convention.split("; ")[1]: row.ours for row in initial_scales(images) if "exact" in row.name}
    assert exact["Sigma = I"] == pytest.approx(torch.pdist(images.flatten(1) / 255).max().item(), rel=1e-5)
    whole = max_whitened_distance(images / 255, CIFAR).distance
    assert exact["|k00| := 1"] == pytest.approx(whole, rel=1e-5)
    assert exact["zero mode dropped"] < whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-8, 1.0, 1e8, 1e12, 1e30])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_images_of_any_scale_and_offset_keep_their_distance(scale, shift, dtype):
    generator = torch.Generator().manual_seed(0)
    # In float32 a shift of 1e6 leaves four bits of the images; they are compared as they are then.
    unit = (torch.randn(40, 1, 8, 8, generator=generator, dtype=torch.float64) + shift).to(dtype)
    images = unit * scale if dtype == torch.float64 else (unit.double() * scale).to(dtype)
    for cov in (nidiff.gaussian_free_field((8, 8)), 1e-30 * nidiff.gaussian_free_field((8, 8), gamma=0.5)):
        white = cov.inv_sqrt((images.double() - images.double().mean(0)) / scale).flatten(1)
        exact = torch.cdist(white, white, compute_mode="donot_use_mm_for_euclid_dist").max().item() * scale
        found = [
            max_whitened_distance(images, cov).distance,
            batch_whitened_distance(images, cov, batch_size=40),
            quantile_whitened_distance(images, cov, quantile=1.0),
        ]
        assert found == pytest.approx([exact] * 3, rel=1e-5)
