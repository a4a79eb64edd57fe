"""The same field on another grid: shared modes keep their law, and a process its signal-to-noise ratio in them."""

import math

import pytest
import torch
from problems import refused

import nidiff
from nidiff.covariance.families import cross_spectrum
from nidiff.covariance.grids import resampled
from nidiff.covariance.waves import wavenumber
from nidiff.testing.problems import normal, random_matrix

MIXED = ("reflecting", "periodic")
FIELDS = {
    "gff": lambda shape=(8, 8): nidiff.gaussian_free_field(shape, 1.5),
    "gff without its mean": lambda shape=(8, 8): nidiff.gaussian_free_field(shape, 1.5, zero_mode="zero"),
    "pink, mixed": lambda shape=(8, 8): nidiff.power_law(shape, 1.0, boundary=MIXED),
    "matern fixed": lambda shape=(8, 8): nidiff.matern(shape, 2.0, boundary="fixed"),
    "scaled": lambda shape=(8, 8): 3.0 * nidiff.matern(shape, 2.0),
    "from data": lambda shape=(8, 8): nidiff.from_data(nidiff.matern(shape, 2.0).sample((50, 1, *shape))),
    "spaced": lambda shape=(8, 8): nidiff.gaussian_free_field(shape, spacing=(2, 1)),
}
every_field = pytest.mark.parametrize("make", FIELDS.values(), ids=FIELDS)


def shared(own, boundary, shape):
    """Masks of the modes that both grids have, below the Nyquist frequency of both."""
    masks = []
    for grid in (own, shape):
        mask = torch.ones(grid, dtype=torch.bool)
        for axis, (n, m, name) in enumerate(zip(own, shape, boundary, strict=True)):
            few = min(n, m)
            k = (torch.fft.fftfreq(grid[axis]) * grid[axis]).round().abs()
            here = 2 * k < few if name == "periodic" else torch.arange(grid[axis]) < few
            mask &= here.reshape([-1 if i == axis else 1 for i in range(len(own))])
        masks.append(mask)
    return masks


# The theorem -----------------------------------------------------------------------------------------------------


@every_field
def test_shared_modes_keep_their_law(make):
    """λ' = (N'/N) λ: with orthonormal modes the same function has coefficients √(N'/N) as large."""
    cov = make()
    for shape in ((16, 16), (4, 4), (12, 9), (5, 7)):
        other = cov.at(shape)
        assert other.event_shape == shape
        assert other.basis.boundary == cov.basis.boundary
        mine, its = shared((8, 8), cov.basis.boundary, shape)
        ratio = math.prod(shape) / 64
        assert torch.allclose(other.eigenvalues[its], ratio * cov.eigenvalues[mine], rtol=1e-9)
        assert not torch.allclose(make(shape).eigenvalues[its], ratio * cov.eigenvalues[mine], rtol=1e-3)
    assert nidiff.testing.check_covariance(other, 1e-8).passed
    assert torch.allclose((1.0 * cov).at((16, 12)).at((8, 8)).eigenvalues, cov.eigenvalues, rtol=1e-12)
    assert cov.at((8, 8)) is cov


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", MIXED])
def test_resampled_to_the_coarse_grid_the_fine_field_has_the_law_of_the_coarse_one(boundary):
    """A Σ' Aᵀ = Σ without what is at Nyquist, A the matrix of resampling."""
    coarse = nidiff.gaussian_free_field((6, 8), 1.5, boundary=boundary)
    fine = coarse.at((12, 16))
    matrix = resampled(torch.eye(192, dtype=torch.float64).reshape(192, 12, 16), fine.basis, (6, 8)).flatten(1).T
    mine, _ = shared((6, 8), coarse.basis.boundary, (12, 16))
    expected = coarse.with_eigenvalues(torch.where(mine, coarse.eigenvalues, 0.0)).dense()
    assert torch.allclose(matrix @ fine.dense() @ matrix.T, expected, atol=1e-12)
    assert not torch.allclose(expected, coarse.dense(), atol=1e-3) or boundary == "reflecting"


@pytest.mark.parametrize("shape", [(6, 8), (5, 8), (5, 7)])
def test_a_finer_periodic_grid_has_the_same_values_at_the_points_of_the_coarse_one(shape):
    """Also of the wave of two pixels, which is its own mirror image: the finer grid has it twice, half in each."""
    x, basis = normal(3, *shape), nidiff.gaussian_free_field(shape).basis
    for factor in (2, 3):
        fine = resampled(x, basis, [factor * n for n in shape])
        assert torch.allclose(fine[:, ::factor, ::factor], x, atol=1e-12)


def test_new_modes_have_the_mean_correlation_of_the_upper_octave():
    """Channels that go together in coarse modes (0.8) and hardly in fine ones (0.2)."""
    spatial = nidiff.gaussian_free_field((8,))
    share = torch.where(wavenumber((8,)) >= 2, 0.2, 0.8).double()
    matrices = torch.stack([torch.ones(8), share, share, torch.full((8,), 2.0)], -1).reshape(8, 2, 2)
    matrices = matrices * torch.tensor([[1, 2**0.5], [2**0.5, 1]]) * spatial.eigenvalues[:, None, None]
    fine = cross_spectrum(nidiff.CrossSpectral(matrices, spatial).at((16,))).real
    found = fine[:, 0, 1] / (fine[:, 0, 0] * fine[:, 1, 1]).sqrt()
    assert torch.allclose(found, torch.where(wavenumber((16,)) >= 2, 0.2, 0.8).double(), atol=1e-6)


def test_a_table_of_a_power_law_goes_on_by_it():
    for boundary in ("periodic", "fixed", MIXED):
        field = nidiff.power_law((12, 12), 2.5, boundary=boundary)
        table = field.with_eigenvalues(field.eigenvalues).at((20, 16))
        assert torch.allclose(table.eigenvalues, field.at((20, 16)).eigenvalues, rtol=1e-9)


def test_a_field_that_is_no_power_law_goes_on_by_its_upper_octave():
    field = nidiff.matern((16, 16), 2.0, smoothness=0.5)
    exact, table = field.at((32, 32)).eigenvalues, field.with_eigenvalues(field.eigenvalues).at((32, 32)).eigenvalues
    assert 1e-3 < (table / exact).log().abs().max() < 0.3  # λ falls by a factor of 20 over the new modes


def test_a_length_in_pixels_grows_with_their_number():
    cov = nidiff.matern((8, 8), 2.0, boundary="reflecting")
    finer = nidiff.matern((16, 16), 4.0, boundary="reflecting")
    ratio = cov.at((16, 16)).eigenvalues / finer.eigenvalues
    assert torch.allclose(ratio, ratio[0, 0], rtol=1e-9)
    stretched = cov.at((16, 8)).eigenvalues / nidiff.matern((16, 8), (4.0, 2.0), boundary="reflecting").eigenvalues
    assert torch.allclose(stretched, stretched[0, 0], rtol=1e-9)
    kernel = nidiff.matern((32, 32), 4.0, 0.5, aliased=True)
    assert kernel.at((64, 64)).marginal_variance.mean() == pytest.approx(1.0)
    impulse = torch.zeros(64, 64, dtype=torch.float64)
    impulse[0, 0] = 1
    assert kernel.at((64, 64)).matmul(impulse)[0, 2] == pytest.approx(math.exp(-1 / 4), abs=1e-2)


# What it means ---------------------------------------------------------------------------------------------------


def test_the_variance_of_a_trace_class_field_converges_and_of_others_does_not():
    """Σ |k|^-2γ over the plane is finite for γ > 1. What is added falls by 2^(2γ − 2) per halving of the pixels."""
    sides = (16, 32, 64, 128, 256)

    def variances(gamma):
        field = nidiff.gaussian_free_field((16, 16), gamma)
        return torch.tensor([field.at((n, n)).eigenvalues.mean().item() for n in sides])

    smooth, border, rough = (variances(gamma).diff() for gamma in (1.5, 1.0, 0.5))
    assert torch.allclose(smooth[1:] / smooth[:-1], torch.tensor(0.5), atol=0.03)
    assert torch.allclose(border[1:] / border[:-1], torch.tensor(1.0), atol=0.03)
    assert torch.allclose(rough[1:] / rough[:-1], torch.tensor(2.0), atol=0.1)


def test_white_stays_white_whatever_channels_have_in_common_and_offset_noise_keeps_its_recipe():
    for cov in (2.0 * nidiff.Identity((4, 4)), nidiff.gaussian_free_field((4, 4), 0.0, boundary=MIXED)):
        other = cov.at((8, 6))
        assert other.is_constant
        assert other.eigenvalues[0, 0] == cov.eigenvalues[0, 0]
    between = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    for white in (nidiff.power_law((8, 8), 0.0), nidiff.Identity((8, 8))):
        finer = nidiff.correlated([white, white], between).at((16, 16))
        assert torch.allclose(cross_spectrum(finer).real, between.double().expand(16, 16, 2, 2))
    for normalize in (True, False):
        cov = nidiff.offset((4, 4), 0.5, normalize=normalize)
        assert torch.equal(cov.at((8, 6)).dense(), nidiff.offset((8, 6), 0.5, normalize=normalize).dense())


# Products and channels -------------------------------------------------------------------------------------------


def test_a_product_goes_by_its_factors():
    frames, field = nidiff.ar1(3, 0.8), nidiff.gaussian_free_field((4, 6))
    product = nidiff.Kronecker(frames, field)
    expected = nidiff.Kronecker(frames, field.at((8, 12)))
    assert torch.allclose(product.at((3, 8, 12)).dense(), expected.dense(), atol=1e-12)
    assert torch.allclose((0.5 * product).at((3, 8, 12)).dense(), 0.5 * expected.dense(), atol=1e-9)
    for cov in (product, 0.5 * product):
        with refused("shape"):
            cov.at((6, 8, 12))
    both = nidiff.Kronecker(nidiff.power_law((4,), 1.0, boundary="reflecting"), field)
    table = both.with_eigenvalues(both.eigenvalues**1.5).at((8, 8, 12))
    mine, its = shared((4, 4, 6), both.basis.boundary, (8, 8, 12))
    assert torch.allclose(table.eigenvalues[its], 8 * both.eigenvalues[mine] ** 1.5, rtol=1e-9)


def test_channels_go_with_their_grid():
    plain = nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4, 6), 1.5))
    for cov in (plain, plain.with_eigenvalues(plain.eigenvalues * wavenumber((4, 6)).clamp(min=1) ** -1)):
        other = cov.at((8, 12))
        mine, its = shared((4, 6), ("periodic",) * 2, (8, 12))
        assert other.event_shape == cov.at((2, 8, 12)).event_shape == (2, 8, 12)
        assert torch.allclose(other.eigenvalues[:, its], 4 * cov.eigenvalues[:, mine], rtol=1e-9)
        assert torch.equal(other.basis.vectors, cov.basis.vectors)
        assert other.eigenvalues.min() > 0
    frames = nidiff.ar1(3, 0.5)
    finer = nidiff.Kronecker(frames, plain).at((3, 2, 8, 12))
    assert torch.equal(finer.eigenvalues, nidiff.Kronecker(frames, plain.at((8, 12))).eigenvalues)


@pytest.mark.parametrize("shape", [(8, 12), (3, 4)])
def test_cross_spectra_keep_their_correlation(shape):
    each = [nidiff.power_law((6, 8), p, boundary=MIXED) for p in (1.0, 2.0)]
    cov = nidiff.correlated(each, [[1.0, -0.7], [-0.7, 1.0]], normalize=False)
    expected = nidiff.correlated([c.at(shape) for c in each], [[1.0, -0.7], [-0.7, 1.0]], normalize=False)
    assert torch.allclose(cross_spectrum(cov.at(shape)), cross_spectrum(expected), rtol=1e-6)


# The data's Gaussian, and a denoiser -----------------------------------------------------------------------------


SMOOTH = {  # of s from 0 to π
    "periodic": lambda s: 2 + torch.sin(2 * s) - torch.cos(4 * s),
    "reflecting": lambda s: 2 + torch.cos(s) - torch.cos(3 * s),
    "fixed": lambda s: torch.sin(s) - torch.sin(2 * s),
}


@pytest.mark.parametrize("boundary", SMOOTH)
def test_a_mean_that_both_grids_resolve_is_that_function_on_both(boundary):
    def smooth(n):
        first = 0.0 if boundary == "periodic" else 0.5  # a periodic axis keeps its first point, the others their edges
        return SMOOTH[boundary](torch.pi * (torch.arange(n, dtype=torch.float64) + first) / n)

    for n, new in ((8, 16), (16, 8), (9, 15), (8, 7)):
        law = nidiff.power_law((n,), 2.0, boundary=boundary)
        finer = nidiff.GaussianModel(smooth(n).expand(2, 1, n), law).on_grid((new,))
        assert finer.shape == (2, 1, new)
        assert torch.allclose(finer.mean[1, 0], smooth(new), atol=1e-10)
        assert finer.covariance.eigenvalues[1] == pytest.approx(new / n * law.eigenvalues[1].item())


@pytest.mark.parametrize("channels", ["each", "shared", "joint", "cross"])
def test_a_fitted_gaussian_goes_to_another_grid(channels):
    data = nidiff.gaussian_free_field((6, 8), 1.5).sample((200, 2, 6, 8), torch.Generator().manual_seed(0)) + 1.0
    model = nidiff.fit_gaussian(data, channels=channels)
    finer = model.on_grid((12, 16))
    assert finer.shape == (2, 12, 16)
    mine, its = shared((6, 8), ("periodic",) * 2, (12, 16))
    sigma = nidiff.gaussian_free_field((6, 8))
    for level in (nidiff.schedules.ddpm_linear(100).level(row) for row in (5, 50, 95)):
        one, other = model.at(level, sigma), finer.at(level, sigma.at((12, 16)))
        assert torch.allclose(other.gain.values[..., its], one.gain.values[..., mine], rtol=1e-8)
        one, other = model.at(level, nidiff.Identity((6, 8))), finer.at(level, nidiff.Identity((12, 16)))
        assert not torch.allclose(other.gain.values[..., its], one.gain.values[..., mine], rtol=1e-2)


def net(x, label):
    """One that takes any size, as convolutions do."""
    return torch.tanh(x)


def test_a_denoiser_goes_to_another_grid_with_its_process():
    sigma = nidiff.gaussian_free_field((6, 8), 1.5)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(100), sigma)
    model = nidiff.GaussianModel(0.3 * normal(2, 6, 8), 0.5 * nidiff.power_law((6, 8), 2.0))
    measured = nidiff.design.measure_kappa(
        model.denoiser(process), model.sample((8, 2, 6, 8)), num_images=4, num_rows=3
    )
    denoiser = nidiff.Denoiser(net, process, "residual", clip=2.0, gaussian=model, kappa=measured.kappa)
    finer = denoiser.at((12, 16))
    assert finer.process.covariance.event_shape == (12, 16)
    assert finer.process.schedule is process.schedule
    assert (finer.clip, finer.sees, finer.target_name, finer.kappa) == (2.0, "z", "residual", None)
    exact = model.on_grid((12, 16)).denoiser(nidiff.Process(process.schedule, sigma.at((12, 16))))
    x, level = normal(3, 2, 12, 16), process.schedule.level(40)
    assert torch.equal(finer.with_zero_net()(x, level), exact.with_zero_net()(x, level).clamp(-2, 2))
    plain = nidiff.Denoiser(net, process).at((12, 16))
    drawn = nidiff.sample(plain, (2, 2, 12, 16), sampler="ddim", num_steps=3)
    assert drawn.shape == (2, 2, 12, 16)
    table = nidiff.Process(nidiff.schedules.soft_conditioning((6, 8), num_levels=20), sigma)
    with pytest.raises(nidiff.InputError, match="schedule"):
        nidiff.Denoiser(net, table).at((12, 16))


def test_what_has_no_modes_on_another_grid_is_refused():
    for cov, shape in (
        (nidiff.gaussian_free_field((4, 4)), (8,)),
        (nidiff.gaussian_free_field((4, 4)), (8, -8)),
        (nidiff.Dense(random_matrix(4)), (8,)),
        (nidiff.Diagonal([1.0, 2.0]), (4,)),
        (nidiff.ar1(4, 0.5), (8,)),
        (nidiff.Channels(random_matrix(2), nidiff.ar1(4, 0.5)), (8,)),
    ):
        with refused("shape"):
            cov.at(shape)


def test_a_multiple_of_a_field_is_that_multiple_on_every_grid():
    kernel = nidiff.matern((16, 16), 2.0, 0.5, aliased=True)
    for there in (kernel.at((8, 8)).at((32, 32)), (1.0 * kernel).at((32, 32))):
        assert there.eigenvalues.mean().item() == pytest.approx(1.0)
    twice = (2 * nidiff.offset((8, 8), 0.5)).at((16, 16))
    assert torch.allclose(twice.eigenvalues, 2 * nidiff.offset((16, 16), 0.5).eigenvalues)


def test_an_axis_that_shrinks_to_one_pixel_takes_its_share_of_every_mode():
    field = nidiff.gaussian_free_field((8, 16))
    ratio = field.at((8, 1)).eigenvalues[:5, 0] / field.eigenvalues[:5, 0]
    assert torch.allclose(ratio, torch.full_like(ratio, 1 / 16))
