"""Noise scales from data: exact distances, the overlap equation, the Langevin ε, and ``nidiff calibrate``.

That the numbers of the paper are wrong, and by how much, is in test_errata.py: E24 and E29–E31.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import refused
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
from nidiff.design.scales import CLASSIC_RATIO, calibrate, num_levels, overlap, overlap_ratio
from nidiff.sampling.annealing import cas_interval, langevin_epsilon, variance_ratio
from nidiff.sampling.langevin import best_eta

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from paper_constants import LEVELS, SIGMA_N, initial_scales, paper_constants

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


@pytest.mark.parametrize("chunk", [7, 1024])
def test_the_maximum_is_that_of_all_pairs(monkeypatch, chunk):
    monkeypatch.setattr(distance, "CHUNK", chunk)
    images = heavy_tailed()
    for covariance in (FIELD, nidiff.matern(SHAPE, 2.0, boundary="reflecting"), nidiff.pyramid(SHAPE)):
        table, seen = all_distances(images, covariance), []
        found = max_whitened_distance(images, covariance, progress=lambda *numbers: seen.append(numbers))  # noqa: B023
        assert (seen, seen[-1]) == (sorted(seen), (1770, 1770))  # 60 · 59 / 2 pairs
        assert found.distance == pytest.approx(table.max().item(), rel=1e-12)
        assert table[found.pair].item() == table.max().item()
        assert found.pair[0] < found.pair[1]


def test_uint8_means_minus_one_to_one():
    pixels = torch.randint(256, (20, 3, *SHAPE), generator=seeded(), dtype=torch.uint8)
    raw, symmetric, unit = (
        max_whitened_distance(images, FIELD).distance
        for images in (pixels, pixels.double() / 127.5 - 1, pixels.double() / 255)
    )
    assert raw == pytest.approx(symmetric, rel=1e-6)
    assert unit == pytest.approx(symmetric / 2, rel=1e-12)


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


# The other σ -----------------------------------------------------------------------------------------------------


def test_the_overlap_ratio_solves_the_overlap_equation():
    for dimension in (5, 784, 3072, 196608):
        ratio, root = overlap_ratio(dimension), math.sqrt(2 * dimension)
        assert overlap(ratio, dimension) == pytest.approx(0.5, abs=1e-9)
        assert ratio == pytest.approx(root / (root - 3), rel=1e-8)


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
def test_the_variance_ratio_is_that_of_the_recursion_of_matrices(preconditioned):
    """Var[x_t] = P Var[x_{t−1}] Pᵀ + 2ησ²Σ, with P = I − ηΣ⁻¹ as printed, or I − ηI; here σ = 1."""
    ratio, eta, steps = 1.2, 0.03, 4
    matrix, eye = FIELD.dense(), torch.eye(FIELD.size, dtype=torch.float64)
    step = eye - eta * (eye if preconditioned else torch.linalg.inv(matrix))
    variance = ratio**2 * matrix
    for _ in range(steps):
        variance = step @ variance @ step.T + 2 * eta * matrix
    modes = variance_ratio(FIELD, ratio, eta * 1e-4, 0.01, steps, preconditioned)
    assert torch.allclose(FIELD.with_eigenvalues(modes * FIELD.eigenvalues).dense(), variance, rtol=1e-9)


@pytest.mark.parametrize(("ratio", "steps"), [(1.001, 5), (CLASSIC_RATIO, 1), (1.5, 50), (4.0, 2)])
def test_preconditioned_epsilon_is_isotropic_and_that_of_the_sampler(ratio, steps):
    found = langevin_epsilon(FIELD, ratio, 0.2, steps)
    assert found == pytest.approx(langevin_epsilon(nidiff.Identity(SHAPE), ratio, 0.2, steps), rel=1e-6)
    assert found / 0.2**2 == pytest.approx(best_eta(ratio, steps), rel=1e-5)


def test_a_covariance_of_another_scale_has_no_printed_epsilon():
    for steps, expected in ((5, 1.893e-6), (1, 7.735e-6)):
        halved = langevin_epsilon(0.5 * CIFAR_DROPPED, RATIO_20, 0.01, steps, preconditioned=False)
        assert halved == pytest.approx(expected, rel=1e-3)
    with refused("covariance"):
        langevin_epsilon(2.0 * CIFAR, RATIO_20, 0.01, 5, False)
    assert langevin_epsilon(2.0 * CIFAR, RATIO_20) == pytest.approx(langevin_epsilon(CIFAR, RATIO_20), rel=1e-6)


# All together ----------------------------------------------------------------------------------------------------


def test_calibrate_hangs_together_and_hears_every_choice():
    images = heavy_tailed()
    found = calibrate(images, FIELD)
    assert (found.sigma_max, found.pair) == max_whitened_distance(images, FIELD)
    assert (found.dimension, found.target_ratio) == (90, overlap_ratio(90))
    assert found.num_levels == num_levels(found.sigma_max, 0.01, found.target_ratio)
    sigma = found.schedule().sigma
    assert (sigma[0].item(), sigma[-1].item()) == pytest.approx((0.01, found.sigma_max))
    assert (sigma[1:] / sigma[:-1]).tolist() == pytest.approx([found.ratio] * (found.num_levels - 1))
    assert found.epsilon == langevin_epsilon(FIELD, found.ratio, 0.01, 5)
    assert found.cas_interval == cas_interval(found.ratio)
    assert found.cas_feasible == (found.cas_interval[0] <= found.eta <= found.cas_interval[1])
    batch = calibrate(images, FIELD, distance="batch", batch_size=5, generator=seeded())
    assert batch.sigma_max == batch_whitened_distance(images, FIELD, batch_size=5, generator=seeded())
    assert batch.pair is None
    median = calibrate(images, FIELD, distance="quantile", quantile=0.5, ratio="classic")
    assert median.sigma_max == quantile_whitened_distance(images, FIELD, quantile=0.5)
    assert median.target_ratio == CLASSIC_RATIO
    given = calibrate(images, FIELD, epsilon=3.1e-9, sigma_min=0.02, steps_per_level=1, preconditioned=False)
    assert (given.epsilon, given.sigma_min, given.eta, given.cas_feasible) == (3.1e-9, 0.02, 3.1e-9 / 0.02**2, False)
    printed = variance_ratio(FIELD, given.ratio, 3.1e-9, 0.02, 1, False)
    assert given.variance_ratio == pytest.approx((printed * FIELD.eigenvalues).mean().item())

    grey = heavy_tailed(shape=SHAPE)
    assert calibrate(grey, FIELD).sigma_max == pytest.approx(calibrate(grey[:, None], FIELD).sigma_max)
    assert calibrate(images, nidiff.Channels(torch.eye(3) + 0.5, FIELD)).dimension == 90


IMAGES = heavy_tailed()
BAD = [
    ("images", {"images": IMAGES[:1]}),
    ("images", {"images": IMAGES[:1].expand(9, -1, -1, -1)}),  # all the same
    ("images", {"images": IMAGES.masked_fill(IMAGES.gt(6), math.nan)}),
    ("images", {"images": torch.arange(60).reshape(2, *SHAPE)}),
    ("images", {"covariance": nidiff.Identity((5, 6))}),
    ("covariance", {"covariance": nidiff.gaussian_free_field(SHAPE, zero_mode="zero")}),
    ("sigma_min", {"sigma_min": 1e6}),
    ("epsilon", {"epsilon": 0.0}),
    ("steps_per_level", {"steps_per_level": 0}),
    ("ratio", {"ratio": 1.0}),
    ("ratio", {"ratio": "golden"}),
    ("distance", {"distance": "mean"}),
    ("batch_size", {"distance": "batch", "batch_size": 1}),
    ("quantile", {"distance": "quantile", "quantile": 0.0}),
]


def test_bad_input_is_refused_by_the_name_of_the_argument():
    for argument, given in BAD:
        with refused(argument):
            calibrate(**{"images": IMAGES, "covariance": FIELD} | given)
    with refused("ratio"):
        overlap_ratio(4)


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


def test_the_command_prints_what_calibrate_says(run, tmp_path):
    """As JSON with the flags given, and as a table that has every number and its formula."""
    flags = (
        "--distance batch:batch_size=4 --ratio 1.5 --steps-per-level 2 --sigma-min 0.1 --printed --range unit --seed 3"
    )
    sigma = "matern:length_scale=2,boundary=reflecting"
    code, out, err = run("images.npz", "--json", "--covariance", sigma, *flags.split(), "--out", "new/c.svg")
    assert (code, err) == (0, "wrote new/c.svg\n")
    assert (tmp_path / "new/c.svg").is_file()
    report, covariance = json.loads(out), nidiff.matern((8, 6), 2, boundary="reflecting")
    options = {"distance": "batch", "batch_size": 4, "ratio": 1.5, "steps_per_level": 2, "sigma_min": 0.1}
    expected = calibrate(run.images / 255, covariance, preconditioned=False, generator=seeded(3), **options)
    for name, value in vars(expected).items():
        assert report[name] == (value if isinstance(value, str | None) else pytest.approx(value, rel=1e-5))
    assert repr(nidiff.Covariance.from_config(report["covariance"])) == repr(covariance)
    assert report["formulas"].keys() == vars(expected).keys()
    code, table, _ = run("images.npz")
    assert code == 0
    assert table.isascii()
    rows = {line.split()[0]: line for line in table.splitlines()[2:]}
    expected = calibrate(run.images, nidiff.gaussian_free_field((8, 6)))
    assert f"{expected.sigma_max:.6g}" in rows["sigma_max"]
    assert str(expected.pair) in rows["pair"]
    assert rows.keys() == vars(expected).keys()
    assert (tmp_path / "out/calibration.png").stat().st_size > 10_000


BAD_COMMANDS = {
    "DATA is missing": [],
    "nowhere.npz": ["nowhere.npz"],
    "sigma_max": ["images.npz", "--sigma-min", 1e9],
    "golden": ["images.npz", "--ratio", "golden"],
    "byte": ["images.npz", "--range", "byte"],
    "length_scale": ["images.npz", "--covariance", "gff:length_scale=2"],
    "max:quantile=0.9": ["images.npz", "--distance", "max:quantile=0.9"],
    "seed": ["images.npz", "--seed", -1],
    "c.gif": ["images.npz", "--out", "c.gif"],
}


def test_a_bad_command_is_one_sentence_and_exit_code_2(run, tmp_path):
    for words, arguments in BAD_COMMANDS.items():
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("nidiff: ")
        assert words in err
        assert [path.name for path in tmp_path.iterdir()] == ["images.npz"]


def test_an_interrupt_is_one_line_and_leaves_no_file(run, tmp_path, monkeypatch):
    def interrupt(bar, count):
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
    """Without the zero mode, as the paper's are (E29), a distance is that of the pseudo-inverse."""
    images = torch.randint(256, (200, 3, 32, 32), generator=seeded(), dtype=torch.uint8)
    exact = {row.convention.split("; ")[1]: row.ours for row in initial_scales(images) if "exact" in row.name}
    assert exact["Sigma = I"] == pytest.approx(torch.pdist(images.flatten(1) / 255).max().item(), rel=1e-5)
    whole = max_whitened_distance(images / 255, CIFAR).distance
    assert exact["|k00| := 1"] == pytest.approx(whole, rel=1e-5)
    values = CIFAR_DROPPED.eigenvalues
    white = torch.where(values > 0, CIFAR_DROPPED.basis.analyse(images.double() / 255) / values.sqrt(), 0.0)
    assert exact["zero mode dropped"] == pytest.approx(torch.pdist(white.flatten(1)).max().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("scale", "shift", "dtype"),
    [(1e-30, 0.0, torch.float32), (1.0, 1e6, torch.float32), (1e30, 1e6, torch.float64)],
)
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
