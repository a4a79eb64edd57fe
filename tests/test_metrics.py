"""Distances between sets of features: closed forms, definitions written out, invariances, refusals."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from problems import refused

from nidiff.evaluation import precision_recall as precision_recall_module
from nidiff.evaluation.evaluate import evaluate_images
from nidiff.evaluation.frechet import FeatureGaussian, frechet_distance, gaussian_distance, statistics
from nidiff.evaluation.kernel_distance import kernel_distance
from nidiff.evaluation.metrics import compare_fields
from nidiff.evaluation.precision_recall import precision_recall
from nidiff.evaluation.spectrum import compare_spectra, spectrum_error


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def decaying(count, size, seed):
    """Features whose variances fall as 1/i, as those of networks do, in a basis that is not theirs."""
    mixing = torch.linalg.qr(draws(size, size, seed=7)).Q if size <= 256 else torch.eye(size, dtype=torch.float64)
    return draws(count, size, seed=seed) * torch.arange(1, size + 1) ** -0.5 @ mixing


def textbook_frechet(a, b):
    """With the matrix square root of Ca Cb itself."""
    a, b = a.numpy(), b.numpy()
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(cov_a @ cov_b)
    return np.square(a.mean(0) - b.mean(0)).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * np.trace(root).real


def factor_of(covariance):
    """F with FᵀF = C, one row per eigenvalue above rounding: the root of 1e-16 would be 1e-8."""
    values, vectors = torch.linalg.eigh(covariance)
    positive = values > values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    return (vectors[:, positive] * values[positive].sqrt()).T


def from_statistics(mu1, sigma1, mu2, sigma2):
    """The Fréchet distance from means and covariances."""
    pairs = ((mu1, sigma1), (mu2, sigma2))
    return gaussian_distance(*(FeatureGaussian(mu.double(), factor_of(sigma.double())) for mu, sigma in pairs))


# Fréchet distance -------------------------------------------------------------------------------------------------


def test_frechet_of_gaussians_in_closed_form():
    # Covariances that commute: ‖μ1 − μ2‖² + Σ (s1 − s2)², in any orthonormal basis; zeros where they have no rank.
    first, second = torch.tensor([3.0, 2.0, 0.0, 1.0, 0.0]).double(), torch.tensor([1.0, 2.5, 4.0, 0.0, 0.0]).double()
    basis = torch.linalg.qr(draws(5, 5)).Q
    mu1, mu2 = draws(5, seed=1), draws(5, seed=2)
    sigma1, sigma2 = ((basis * deviations**2) @ basis.T for deviations in (first, second))
    expected = (mu1 - mu2).square().sum() + (first - second).square().sum()
    assert from_statistics(mu1, sigma1, mu2, sigma2) == pytest.approx(expected.item(), rel=1e-12)
    assert from_statistics(mu1, sigma1, mu1, sigma1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("count, other, size", [(900, 700, 128), (60, 50, 128), (60, 700, 128)])
def test_frechet_is_that_of_scipys_matrix_root(count, other, size):
    a, b = decaying(count, size, 1), 1.3 * decaying(other, size, 2) + 0.1
    assert frechet_distance(a, b) == pytest.approx(textbook_frechet(a, b), rel=1e-6)
    assert from_statistics(*statistics(a), *statistics(b)) == pytest.approx(frechet_distance(a, b), rel=1e-9)
    assert frechet_distance(a.float(), b.float()) == pytest.approx(frechet_distance(a, b), rel=1e-5)


@pytest.mark.parametrize("count", [40, 400])  # fewer points than dimensions, and more
def test_frechet_invariances(count):
    a, b = decaying(count, 64, 1), 0.7 * decaying(count + 10, 64, 2) + 0.2
    distance = frechet_distance(a, b)
    trace = statistics(a)[1].trace().item()
    assert distance > 0.1 * trace
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-12 * trace)
    assert frechet_distance(a, a.flip(0)) == pytest.approx(0, abs=1e-12 * trace)
    assert frechet_distance(b, a) == pytest.approx(distance, rel=1e-9)
    rotation = torch.linalg.qr(draws(64, 64, seed=3)).Q
    assert frechet_distance(a @ rotation, b @ rotation) == pytest.approx(distance, rel=1e-9)
    shift = draws(64, seed=4)
    assert frechet_distance(a, a + shift) == pytest.approx(shift.square().sum().item(), rel=1e-9)
    assert frechet_distance(a, a @ rotation) > 0.01 * trace  # rotating one of them is not nothing
    assert frechet_distance(3 * a, 3 * b) == pytest.approx(9 * distance, rel=1e-9)


def test_statistics_are_those_of_numpy_beyond_one_chunk():
    features = draws(2500, 5, dtype=torch.float32) + 100
    mu, sigma = statistics(features)
    assert mu.dtype == sigma.dtype == torch.float64
    np.testing.assert_allclose(mu, features.double().mean(0), rtol=1e-13)
    np.testing.assert_allclose(sigma, np.cov(features.double().numpy(), rowvar=False), rtol=1e-10, atol=1e-12)


# Precision and recall ---------------------------------------------------------------------------------------------


def share_inside(points, reference, k):
    """The share of points in a ball of the reference set, by all distances written out."""
    points, reference = points.double().numpy(), reference.double().numpy()
    own = np.linalg.norm(reference[:, None] - reference[None], axis=2)
    radii = np.sort(own, axis=1)[:, k]  # the 0th is the point itself
    distances = np.linalg.norm(points[:, None] - reference[None], axis=2)
    return (distances <= radii + 1e-9).any(1).mean()


@pytest.mark.parametrize("k, dtype", [(1, torch.float32), (3, torch.float64), (5, torch.float32)])
def test_precision_and_recall_by_brute_force(k, dtype):
    real, generated = draws(150, 6, seed=1, dtype=dtype) + 50, 0.8 * draws(130, 6, seed=2, dtype=dtype) + 50.8
    found = precision_recall(real, generated, k)
    assert found == (share_inside(generated, real, k), share_inside(real, generated, k))
    assert 0.05 < found.recall < found.precision < 1
    assert precision_recall(generated, real, k) == (found.recall, found.precision)


def test_precision_and_recall_where_many_distances_are_equal():
    # Whole numbers: points that coincide, and balls whose edge passes through points.
    generator = torch.Generator().manual_seed(0)
    real, generated = (torch.randint(4, (n, 3), generator=generator).double() for n in (60, 50))
    for shift in (0.0, 1 / 3, 100.1):
        found = precision_recall(real + shift, generated + shift, 2)
        assert found == (share_inside(generated, real, 2), share_inside(real, generated, 2))


def test_precision_and_recall_of_constructed_sets():
    line = torch.arange(20.0)[:, None] * torch.tensor([1.0, 0.0])
    assert precision_recall(line, line) == (1, 1)
    assert precision_recall(line, line + 100) == (0, 0)
    half = line[:8]
    # The neighbour of rank 3 of the last point, at 7, is at 4: the generated balls end at 10.
    assert precision_recall(line, half) == (1, 11 / 20)
    assert precision_recall(half, line) == (11 / 20, 1)
    collapsed = torch.zeros(10, 2)  # one real point, again and again
    assert precision_recall(line, collapsed) == (1, 1 / 20)
    assert precision_recall(line, collapsed + 100) == (0, 0)


def test_the_size_of_the_chunks_changes_nothing_but_the_progress(monkeypatch):
    real, generated = draws(50, 4, seed=1), draws(40, 4, seed=2) + 0.5
    whole, total = precision_recall(real, generated), 50 * 49 // 2 + 40 * 39 // 2 + 50 * 40
    assert 0 < whole.recall < 1
    for chunk in (7, 50):
        monkeypatch.setattr(precision_recall_module, "CHUNK", chunk)
        seen = []
        assert precision_recall(real, generated, progress=lambda *numbers: seen.append(numbers)) == whole  # noqa: B023
        assert (seen[0], seen[-1]) == ((0, total), (total, total))
        assert seen == sorted(seen)


# Kernel distance --------------------------------------------------------------------------------------------------


def kernel_by_loops(a, b):
    def kernel(x, y):
        return (float(x @ y) / len(x) + 1) ** 3

    n, m = len(a), len(b)
    first = sum(kernel(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    second = sum(kernel(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return first + second - 2 * sum(kernel(x, y) for x in a for y in b) / (n * m)


def test_kernel_distance_is_its_definition_and_subsets_average_to_it():
    a, b = draws(60, 5, seed=1), draws(60, 5, seed=2) + 0.3
    expected, whole = kernel_by_loops(a, b), kernel_distance(a, b, subset_size=60, num_subsets=2)
    assert whole.value == pytest.approx(expected, rel=1e-12)
    assert whole.standard_error == pytest.approx(0, abs=1e-12)

    def of_subsets(count):
        return kernel_distance(a, b, 20, count, torch.Generator().manual_seed(0))

    found = of_subsets(400)
    assert 0 < abs(found.value - expected) < 4 * found.standard_error
    assert of_subsets(400) == found
    assert of_subsets(100).standard_error == pytest.approx(2 * found.standard_error, rel=0.3)


def test_kernel_distance_is_unbiased():
    values = torch.tensor(
        [kernel_distance(draws(20, 4, seed=2 * i), draws(20, 4, seed=2 * i + 1), 20, 2).value for i in range(400)]
    )
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean()) < 4 * error
    assert (values < 0).double().mean() > 0.3
    # With the pairs of a point with itself the mean would be 2 (E k(x, x) − E k(x, y)) / 20, which is about 1.
    assert 4 * error < 0.1
    moved = kernel_distance(draws(400, 4), draws(400, 4, seed=1) + 1, 100, 10)
    assert moved.value > 10 * error


# Spectrum ---------------------------------------------------------------------------------------------------------


def test_spectrum_error_of_the_same_images_and_of_a_gain():
    images = draws(300, 3, 16, 12, dtype=torch.float32)
    for other in (2 * images, images / 2):
        assert spectrum_error(images, other) == pytest.approx(math.log10(4), rel=1e-6)
    assert spectrum_error(images, images.flip(0) + 5) == pytest.approx(0, abs=1e-4)  # brightness plays no part
    assert spectrum_error(images, draws(300, 3, 16, 12, seed=1)) < 0.05
    pixels = torch.arange(512, dtype=torch.int).remainder(256).to(torch.uint8).reshape(2, 1, 16, 16)
    assert spectrum_error(pixels, pixels / 127.5 - 1) == pytest.approx(0, abs=1e-6)


def test_the_spectrum_error_is_the_same_everywhere():
    real, other = draws(20, 3, 12, 16), draws(20, 3, 12, 16, seed=1).cumsum(-1)
    expected = spectrum_error(real, other)
    assert compare_spectra(real, other).error == expected
    assert compare_fields(real, other, bootstrap=0)["spectrum"].value == pytest.approx(expected, rel=1e-12)
    pictures = [(30 * x + 127).clamp(0, 255).to(torch.uint8) for x in (real, other)]
    found = evaluate_images(pictures[1], pictures[0], features="pixels", bootstrap=0).metrics["spectrum"].value
    assert found == pytest.approx(spectrum_error(*pictures), rel=1e-6)


# Arrays -----------------------------------------------------------------------------------------------------------


def test_numpy_arrays_are_taken_as_tensors_are():
    a, b = draws(30, 4), draws(25, 4, seed=1) + 0.3
    images, others = draws(6, 1, 8, 8), draws(5, 1, 8, 8, seed=1)
    for function, pair in (
        (frechet_distance, (a, b)),
        (precision_recall, (a, b)),
        (lambda a, b: kernel_distance(a, b, 20, 5, torch.Generator().manual_seed(0)), (a, b)),
        (spectrum_error, (images, others)),
    ):
        first, second = (tensor.numpy() for tensor in pair)
        first.setflags(write=False)
        assert function(first, second) == function(*pair)
        assert function(pair[0], second[::-1]) == pytest.approx(function(pair[0], pair[1].flip(0)))


# Refusals ---------------------------------------------------------------------------------------------------------

POINTS, IMAGES = draws(20, 4), draws(3, 1, 7, 9)
NAN = torch.where(torch.arange(20)[:, None] == 7, math.nan, POINTS)

REFUSED = [
    ("b", lambda: frechet_distance(POINTS, POINTS[:1])),
    ("b", lambda: frechet_distance(POINTS, POINTS[:, :3])),
    ("a", lambda: frechet_distance(NAN, POINTS)),
    ("b", lambda: frechet_distance(POINTS, IMAGES)),
    ("real", lambda: precision_recall(POINTS[:3], POINTS)),
    ("generated", lambda: precision_recall(POINTS, POINTS[:5], k=5)),
    ("k", lambda: precision_recall(POINTS, POINTS, k=0)),
    ("subset_size", lambda: kernel_distance(POINTS, POINTS)),
    ("num_subsets", lambda: kernel_distance(POINTS, POINTS, 10, 1)),
    ("generated", lambda: spectrum_error(IMAGES, IMAGES[..., :4])),
    ("real", lambda: spectrum_error(POINTS, IMAGES)),
    ("generated", lambda: spectrum_error(IMAGES, IMAGES * math.nan)),
]


def test_refusals_name_the_argument():
    for argument, call in REFUSED:
        with refused(argument):
            call()
