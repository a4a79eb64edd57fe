"""The numbers that describe Σ, against closed forms and dense matrices."""

import math

import pytest
import torch

import nidiff
from nidiff.covariance.families import Cosine, Fourier
from nidiff.covariance.summary import correlation_length, summary
from nidiff.covariance.waves import radial_mean, wavenumber
from nidiff.report.spectrum import mode_power


def white(family, shape):
    return family(shape, torch.ones(shape, dtype=torch.float64))


def test_white_noise_has_full_rank_and_no_correlation():
    for covariance in (nidiff.Identity((12, 10)), white(Cosine, (12, 10))):
        numbers = summary(covariance)
        assert numbers.marginal_variance == pytest.approx(1)
        assert numbers.marginal_variance_range == pytest.approx((1, 1))
        assert numbers.condition_number == pytest.approx(1)
        assert numbers.logdet == pytest.approx(0, abs=1e-9)
        assert numbers.effective_rank == pytest.approx(120)
        assert numbers.correlation_length == pytest.approx(1 - 1 / math.e)


def test_effective_rank_counts_the_modes_that_share_the_power():
    spectrum = torch.full((64,), 1e-9, dtype=torch.float64)
    spectrum[0] = 1.0
    assert summary(nidiff.Fourier((64,), spectrum)).effective_rank == pytest.approx(1, abs=1e-4)
    spectrum[[3, -3, 7, -7]] = 1.0  # five equal modes
    assert summary(nidiff.Fourier((64,), spectrum)).effective_rank == pytest.approx(5, abs=1e-4)


def test_the_exponential_kernel_has_its_length_scale():
    # Matérn ν = ½ is exp(−r/ℓ), which is 1/e at ℓ; the event is long against ℓ, so its edges do not matter.
    for boundary, length_scale in (("periodic", 10.0), ("reflecting", 20.0)):
        covariance = nidiff.matern((1024,), length_scale, smoothness=0.5, boundary=boundary)
        assert correlation_length(covariance) == pytest.approx(length_scale, rel=0.03)


def test_correlation_length_averages_axes_and_divides_by_the_standard_deviations():
    # Correlation 0.9^|rows| · 0.6^|columns| on 3×5, with another variance at every pixel: at lag 1 the mean over four
    # neighbours is 0.75, at lag 2, where only columns reach, it is 0.36, just below 1/e.
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in (3, 5))
    between_rows = 0.9 ** (rows[:, None] - rows).abs()
    between_columns = 0.6 ** (columns[:, None] - columns).abs()
    std = torch.linspace(0.5, 3, 15, dtype=torch.float64).square()
    matrix = std[:, None] * torch.kron(between_rows, between_columns) * std
    expected = 1 + (0.75 - 1 / math.e) / (0.75 - 0.36)
    assert correlation_length(nidiff.Dense(matrix, (3, 5))) == pytest.approx(expected)


def test_no_correlation_length_where_the_field_never_forgets():
    assert correlation_length(nidiff.offset((16, 16), strength=2.0)) is None
    assert correlation_length(nidiff.Identity((1, 1))) is None
    assert correlation_length(nidiff.offset((16, 16), strength=0.1)) is not None


def test_noise_free_pixels_do_not_spoil_the_correlation():
    variances = torch.ones(8, 8, dtype=torch.float64)
    variances[:, 5:] = 0
    covariance = nidiff.Diagonal(variances, allow_singular=True)
    assert correlation_length(covariance) == pytest.approx(1 - 1 / math.e)


def test_a_singular_covariance_has_no_log_determinant():
    numbers = summary(nidiff.gaussian_free_field((16, 16), 1.0, zero_mode="zero"))
    assert numbers.logdet is None
    assert math.isfinite(numbers.condition_number)
    assert numbers.effective_rank < 255


def test_marginal_variance_of_a_reflecting_field_varies_over_the_image():
    covariance = nidiff.gaussian_free_field((12, 10), 1.0, boundary="reflecting")
    diagonal = covariance.dense().diagonal()
    numbers = summary(covariance)
    assert numbers.marginal_variance == pytest.approx(1)
    assert numbers.marginal_variance_range == pytest.approx((diagonal.min().item(), diagonal.max().item()))
    assert numbers.marginal_variance_range[1] > 1.5 * numbers.marginal_variance_range[0]


def test_all_axes_of_channels_count():
    mix = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    covariance = nidiff.Channels(mix, nidiff.Identity((8, 8)))
    # One neighbour across channels (0.9) and four in space (0) at lag 1.
    assert correlation_length(covariance) == pytest.approx((1 - 1 / math.e) / (1 - 0.9 / 5))


FRAMES = nidiff.Kronecker(nidiff.ar1(6, 0.8), nidiff.gaussian_free_field((5,), 1.0, boundary="reflecting"))


MATRICES = {
    "pyramid": nidiff.pyramid((6, 5), 0.9),
    "periodic": nidiff.gaussian_free_field((6, 5), 1.0),
    "reflecting": nidiff.gaussian_free_field((6, 5), 1.0, boundary="reflecting"),
    "diagonal": nidiff.Diagonal(torch.linspace(0.5, 2, 30, dtype=torch.float64).reshape(6, 5)),
    "product": FRAMES,
    "no product any more": FRAMES.with_eigenvalues(torch.linspace(0.5, 2, 30, dtype=torch.float64).reshape(6, 5)),
}


@pytest.mark.parametrize("covariance", MATRICES.values(), ids=MATRICES)
def test_mode_power_is_the_diagonal_of_the_matrix_in_that_basis(covariance):
    impulses = torch.eye(30, dtype=torch.float64).reshape(30, 6, 5)
    for family in (Fourier, Cosine):
        basis = white(family, (6, 5)).basis
        modes = basis.analyse(impulses).reshape(30, 30).T.to(torch.complex128)
        if family is Fourier:
            modes = torch.fft.fftn(impulses, dim=(-2, -1), norm="ortho").reshape(30, 30).T
        expected = (modes @ covariance.dense().to(torch.complex128) @ modes.conj().T).diagonal().real.reshape(6, 5)
        torch.testing.assert_close(mode_power(covariance, basis), expected)


def test_radial_mean_is_the_mean_over_each_ring():
    power = radial_mean(nidiff.gaussian_free_field((64,), 1.0).eigenvalues, wavenumber((64,)).round().long())
    torch.testing.assert_close(power[1:] / power[1], torch.arange(1, 33).double() ** -2)
    covariance = nidiff.gaussian_free_field((12, 6), 1.0)
    tall, wide = torch.fft.fftfreq(12).double() * 12, torch.fft.fftfreq(6).double() * 12  # cycles per longest side
    ring = torch.hypot(tall[:, None], wide[None, :]).round()
    power = radial_mean(covariance.eigenvalues, wavenumber((12, 6)).round().long())
    for k, value in enumerate(power):  # a ring without modes has no mean: NaN on both sides
        torch.testing.assert_close(value, covariance.eigenvalues[ring == k].mean(), equal_nan=True)
