"""A boundary per axis: what the modes are, and what the fields are like at the edge."""

import math

import pytest
import torch
from problems import even_spectrum, refused

import nidiff
from nidiff.covariance.config import as_covariance
from nidiff.covariance.waves import boundary_per_axis, frequencies, wavenumber
from nidiff.design.prediction import bands
from nidiff.diffusion.schedules import as_schedule
from nidiff.report.spectrum import common_shells, expected_spectrum, mean_spectrum
from nidiff.testing.problems import normal

MIXED = ("reflecting", "periodic")


# The family ------------------------------------------------------------------------------------------------------


def test_all_periodic_is_fourier_and_all_reflecting_is_cosine():
    """Also with a spectrum that no product of waves along single axes could have: λ(k, l) ≠ λ(k, −l)."""
    shape = (4, 3, 5)
    tilted, any_spectrum = even_spectrum(shape), normal(*shape).square() + 0.1
    assert torch.allclose(nidiff.Spectral(shape, tilted, "periodic").dense(), nidiff.Fourier(shape, tilted).dense())
    reflecting, fixed = (nidiff.Spectral(shape, any_spectrum, name) for name in ("reflecting", "fixed"))
    assert torch.allclose(reflecting.dense(), nidiff.Cosine(shape, any_spectrum).dense())
    assert not torch.allclose(fixed.dense(), reflecting.dense(), atol=1e-3)


def test_longitude_wraps_and_latitude_does_not():
    shape = (12, 16)
    matrix = nidiff.matern(shape, 2.0, boundary=MIXED).dense().reshape(*shape, *shape)
    assert matrix[6, 0, 6, -1] > 0.5  # neighbours across the date line
    assert matrix[0, 8, -1, 8].abs() < 0.01  # the poles
    # Stationary along the second axis, and not along the first.
    shifted = matrix.roll((3, 3), (1, 3))
    assert torch.allclose(shifted, matrix, atol=1e-12)
    assert not torch.allclose(matrix.roll((3, 3), (0, 2)), matrix, atol=0.01)


def test_a_product_of_spectra_is_the_product_of_the_matrices():
    first, second = normal(5).square() + 0.1, even_spectrum((6,))
    cov = nidiff.Spectral((5, 6), torch.outer(first, second), MIXED, normalize=False)
    one = nidiff.Cosine((5,), first, normalize=False)
    other = nidiff.Fourier((6,), second, normalize=False)
    assert torch.allclose(cov.dense(), torch.kron(one.dense(), other.dense()), atol=1e-12)
    assert nidiff.Kronecker(one, other).basis == cov.basis


def test_a_fixed_field_vanishes_at_the_edge_and_a_reflecting_one_is_largest_there():
    """The sines are 0 half a pixel outside the first pixel, cosines are extreme: so are the variances."""
    fixed, reflecting = (nidiff.gaussian_free_field((64,), 1.5, boundary=b) for b in ("fixed", "reflecting"))
    assert fixed.marginal_variance[0] < 0.003 * fixed.marginal_variance.max()
    assert reflecting.marginal_variance[0] == reflecting.marginal_variance.max()
    pixels = torch.arange(64, dtype=torch.float64) + 0.5
    lowest = fixed.basis.synthesise(torch.eye(64, dtype=torch.float64)[0])
    assert torch.allclose(lowest, math.sqrt(2 / 64) * torch.sin(math.pi / 64 * pixels), atol=1e-12)


def test_the_fixed_free_field_in_one_dimension_is_the_brownian_bridge():
    """With the discrete Laplacian's 4 sin²(πk/2n) for (πk/n)², exactly: the bridge at the centres of the pixels."""
    n = 16
    laplacian = 4 * torch.sin(torch.pi * frequencies((n,), "fixed")[0]).square()
    bridge = nidiff.brownian_bridge(range(n), normalize=False)
    assert torch.allclose(
        nidiff.Spectral((n,), 1 / laplacian, "fixed", normalize=False).dense(), bridge.dense(), atol=1e-11
    )
    # The free field itself has |k|, cut off at Nyquist: the bridge up to what the grid does not resolve.
    for n, limit in ((32, 0.02), (256, 0.0025)):
        field, bridge = (
            cov.dense() / cov.dense().diagonal().max()
            for cov in (nidiff.gaussian_free_field((n,), boundary="fixed"), nidiff.brownian_bridge(range(n)))
        )
        assert (field - bridge).abs().max() < limit
    reflecting = nidiff.gaussian_free_field((256,), boundary="reflecting").dense()
    assert (reflecting / reflecting.diagonal().max() - bridge).abs().max() > 0.2


@pytest.mark.parametrize("boundary", ["fixed", ("fixed", "periodic")])
def test_a_fixed_boundary_has_no_zero_mode(boundary):
    """So there is nothing to drop, and the mean of the field is no mode: noise in it comes from many."""
    one, zero = (nidiff.gaussian_free_field((6, 8), zero_mode=mode, boundary=boundary) for mode in ("one", "zero"))
    assert torch.equal(one.eigenvalues, zero.eigenvalues)
    assert not zero.is_singular
    assert nidiff.gaussian_free_field((6, 8), zero_mode="zero", boundary=MIXED).is_singular
    constant = one.basis.analyse(torch.ones(6, 8, dtype=torch.float64))
    assert (constant.abs() > 1e-6).sum() > 1
    with refused("boundary"):
        nidiff.schedules.offset_ramp((6, 8), boundary=boundary)


# Numbers per axis ------------------------------------------------------------------------------------------------


def test_wavenumbers_are_in_units_of_the_lowest_frequency():
    assert wavenumber((8,), "fixed").tolist() == [*range(1, 9)]
    assert wavenumber((8,), "reflecting").tolist() == [*range(8)]
    assert wavenumber((8,)).tolist() == [0, 1, 2, 3, 4, 3, 2, 1]
    mixed = wavenumber((8, 8), MIXED)  # half turns of the first axis, and whole ones of the second
    assert mixed[:, 0].tolist() == [*range(8)]
    assert mixed[0, :5].tolist() == [0, 2, 4, 6, 8]
    assert nidiff.gaussian_free_field((8, 8), boundary=MIXED).basis.wavenumbers.equal(mixed)
    assert nidiff.Identity((8, 8)).basis.wavenumbers is None


def test_unequal_spacing_is_a_stretched_field():
    for make in (nidiff.gaussian_free_field, lambda *given, **options: nidiff.matern(*given, 2.0, **options)):
        assert torch.equal(make((6, 8)).eigenvalues, make((6, 8), spacing=(1, 1)).eigenvalues)
    # Twice the spacing along an axis of half the length is the same domain: the same waves have the same |k|.
    fine, coarse = nidiff.gaussian_free_field((32, 32)), nidiff.gaussian_free_field((16, 32), spacing=(2, 1))
    ratio = coarse.eigenvalues[:8] / fine.eigenvalues[:8]
    assert torch.allclose(ratio, ratio[0, 0])
    plain = nidiff.gaussian_free_field((16, 32)).eigenvalues[:8] / fine.eigenvalues[:8]
    assert not torch.allclose(plain, plain[0, 0])


@pytest.mark.parametrize("aliased", [True, False])
def test_a_matern_field_of_two_lengths_is_the_field_of_one_length_in_other_units(aliased):
    shape = (48, 96)
    both = nidiff.matern(shape, (2.0, 6.0), 0.5, aliased=aliased)
    spaced = nidiff.matern(shape, 6.0, 0.5, aliased=aliased, spacing=(3.0, 1.0))
    assert torch.allclose(both.eigenvalues, spaced.eigenvalues, rtol=1e-12)
    impulse = torch.zeros(shape, dtype=torch.float64)
    impulse[0, 0] = 1
    row = both.matmul(impulse)
    assert row[2, 0] == pytest.approx(row[0, 6].item(), abs=1e-3 if aliased else 0.03)
    assert abs(row[2, 0] - row[0, 2]) > 0.2  # negative control
    if aliased:
        assert row[1, 0] == pytest.approx(math.exp(-1 / 2), abs=1e-5)
        assert row[0, 1] == pytest.approx(math.exp(-1 / 6), abs=1e-5)


# Whatever asks for a boundary ------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", [MIXED, "fixed/periodic"])
def test_data_are_fitted_in_the_modes_of_any_boundary(boundary):
    truth = nidiff.matern((6, 8), 1.5, boundary=boundary)
    data = truth.sample((4000, 2, 6, 8), torch.Generator().manual_seed(0)).double() + 3.0
    modes = nidiff.from_data(data, average="modes", shrinkage=0.0, boundary=boundary)
    assert (modes.eigenvalues / truth.eigenvalues - 1).abs().max() < 0.15
    wrong = nidiff.from_data(data, average="modes", shrinkage=0.0, boundary="reflecting")
    assert (wrong.dense() - truth.dense()).norm() > 2 * (modes.dense() - truth.dense()).norm()
    gaussian = nidiff.fit_gaussian(data, basis=boundary, shrinkage=0.0, channels="shared")
    assert torch.allclose(gaussian.covariance.eigenvalues, data.var(0, correction=0).mean() * modes.eigenvalues)
    radial = nidiff.fit_gaussian(data, basis=boundary, average="radial").covariance.eigenvalues
    shell = truth.basis.wavenumbers.round()
    assert all((values[shell == 3] == values[shell == 3][0]).all() for values in radial)
    assert gaussian.check_basis(truth).values.equal(gaussian.covariance.eigenvalues / truth.eigenvalues)
    with pytest.raises(nidiff.InputError, match="modes"):
        gaussian.check_basis(nidiff.matern((6, 8), 1.5))


def test_bands_and_curves_follow_the_wavenumbers_of_any_boundary():
    cov = nidiff.power_law((8, 8), 2.0, boundary=MIXED)
    gaussian = nidiff.GaussianModel(torch.zeros(1, 8, 8), cov)
    shell = cov.basis.wavenumbers.round().long()
    assert torch.equal(bands(gaussian), torch.unique(shell, return_inverse=True)[1])
    curve = expected_spectrum(cov, common_shells([cov, nidiff.Identity((8, 8))]))
    assert curve[3] == pytest.approx(cov.eigenvalues[shell == 3].mean().item())
    draws = cov.sample((4000, 8, 8), torch.Generator().manual_seed(0))
    assert torch.allclose(mean_spectrum(draws, common_shells([cov])), curve, rtol=0.1)
    assert len(common_shells([cov, nidiff.offset((8, 8))]).wavenumber) < len(curve)  # waves, where boundaries differ


@pytest.mark.parametrize("boundary", ["fixed", MIXED])
def test_a_schedule_per_mode_has_any_boundary(boundary):
    cov = nidiff.gaussian_free_field((4, 6), boundary=boundary)
    schedule = nidiff.schedules.soft_conditioning((4, 6), num_levels=20, boundary=boundary)
    assert torch.isfinite(nidiff.Process(schedule, cov).prior((2, 4, 6))).all()
    assert nidiff.Process(schedule, nidiff.Identity((4, 6))).schedule.basis.boundary == cov.basis.boundary
    again = as_schedule(schedule.to_config())
    assert torch.equal(again.logsnr, schedule.logsnr)
    assert nidiff.Process("soft_conditioning:num_levels=20", cov).schedule.logsnr.equal(schedule.logsnr)
    with pytest.raises(nidiff.InputError, match="boundary"):
        nidiff.Process(schedule, nidiff.gaussian_free_field((4, 6)))
    for name in (nidiff.schedules.blue, nidiff.schedules.heat, nidiff.schedules.blurring):
        assert torch.isfinite(name((4, 6), num_levels=5, boundary=boundary).logsnr).all()


def test_a_boundary_is_a_word_or_one_per_axis_and_a_text_may_leave_it_to_the_data():
    shape = (4, 6)
    for boundary in ("periodic", "reflecting/reflecting", "fixed", MIXED):
        assert nidiff.matern(shape, 2.0, boundary=boundary).basis.boundary == boundary_per_axis(boundary, 2)
    for text in ("gff:gamma=1.5", "matern:length_scale=2", "from_data"):
        assert as_covariance(text, shape, normal(9, 1, 4, 6), MIXED).basis.boundary == MIXED
    assert as_covariance("gff:boundary=fixed/periodic", shape, boundary=MIXED).basis.boundary == ("fixed", "periodic")
    assert as_covariance("white", shape, boundary=MIXED).is_constant


def test_bad_boundaries_and_spacings_are_refused():
    for argument, call in (
        ("boundary", lambda: nidiff.gaussian_free_field((4, 4), boundary=("periodic", "open"))),
        ("boundary", lambda: nidiff.gaussian_free_field((4,), boundary=MIXED)),
        ("boundary", lambda: nidiff.gaussian_free_field((4,), boundary=())),
        ("boundary", lambda: nidiff.Spectral((4,), torch.ones(4), 3)),
        ("boundary", lambda: nidiff.schedules.soft_conditioning((4,), boundary=MIXED)),
        ("spectrum", lambda: nidiff.Spectral((1, 4), [[1.0, 2, 3, 4]], MIXED)),
        ("spectrum", lambda: nidiff.Spectral((4, 5), torch.ones(5, 4), "fixed")),
        ("basis", lambda: nidiff.fit_gaussian(normal(9, 1, 4, 4), basis=("fixed",))),
        ("basis", lambda: nidiff.fit_gaussian(normal(9, 1, 4, 4), basis="open")),
        ("spacing", lambda: nidiff.gaussian_free_field((4, 4), spacing=(1, 0))),
        ("spacing", lambda: nidiff.matern((4, 4), 1.0, spacing=(1,))),
    ):
        with refused(argument):
            call()
