"""Products of covariances, fields over times and graphs, and channels with a spectrum each."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from problems import lagging, path_laplacian, refused

import nidiff
from nidiff.covariance.basis import PerMode
from nidiff.covariance.config import as_covariance
from nidiff.covariance.families import cross_spectrum
from nidiff.covariance.waves import frequencies
from nidiff.testing.problems import normal, random_matrix

FACTORS = {
    "dense": lambda: nidiff.Dense(random_matrix(3)),
    "waves": lambda: nidiff.gaussian_free_field((4, 3)),
    "cosines": lambda: nidiff.matern((5,), 1.0, boundary="reflecting"),
    "mixed": lambda: nidiff.matern((3, 4), 1.0, boundary=("fixed", "periodic")),
    "channels": lambda: nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4,))),
    "white": lambda: nidiff.Identity((2, 2)),
    "product": lambda: nidiff.Kronecker(nidiff.ar1(2, 0.5), nidiff.power_law((4,), 1.0)),
}
# Products --------------------------------------------------------------------------------------------------------


def test_a_product_is_the_product_of_the_matrices():
    made = {name: make() for name, make in FACTORS.items()}
    for (first, a), (second, b) in itertools.product(made.items(), repeat=2):
        product = nidiff.Kronecker(a, b)
        assert product.event_shape == a.event_shape + b.event_shape
        assert torch.allclose(product.dense(), torch.kron(a.dense(), b.dense()), atol=1e-10)
        if first != second:
            assert not torch.allclose(product.dense(), torch.kron(b.dense(), a.dense()), atol=1e-3)


def test_every_product_of_modes_may_have_its_own_eigenvalue():
    """Σ over λ_ij of (a_i ⊗ b_j)(a_i ⊗ b_j)ᵀ: here a sum of two products that no single product is."""
    a, b = nidiff.ar1(3, 0.5), nidiff.gaussian_free_field((4, 5))
    product = nidiff.Kronecker(a, b)
    more = product + nidiff.Kronecker(nidiff.Identity((3,)), nidiff.Identity((4, 5))) * 0.5
    values = torch.tensordot(a.eigenvalues, b.eigenvalues, 0) + torch.tensordot(a.eigenvalues**2, b.eigenvalues**0.5, 0)
    table = product.with_eigenvalues(values)
    second = torch.kron(a.dense() @ a.dense(), nidiff.Fourier((4, 5), b.eigenvalues**0.5, normalize=False).dense())
    assert torch.allclose(table.dense(), product.dense() + second, atol=1e-10)
    assert torch.allclose(more.dense(), product.dense() + 0.5 * torch.eye(60, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(table.marginal_variance.flatten(), table.dense().diagonal(), atol=1e-10)
    loaded = nidiff.Covariance.from_config(table.to_config(), table.tensors())
    assert torch.allclose(loaded.dense(), table.dense(), atol=1e-12)
    odd = values.clone()
    odd[0, 1, 0] *= 2
    with refused("eigenvalues"):
        product.with_eigenvalues(odd)


def test_waves_times_waves_are_not_mixed_up_with_waves_along_both():
    """λ(k, l) ≠ λ(k, −l) is a spectrum of waves in the plane; a product of waves has no such mode."""
    first, second = nidiff.power_law((6,), 1.0), nidiff.power_law((5,), 2.0)
    product, plane = nidiff.Kronecker(first, second), nidiff.gaussian_free_field((6, 5))
    assert product.basis != plane.basis
    same = nidiff.Fourier((6, 5), torch.outer(first.eigenvalues, second.eigenvalues), normalize=False)
    assert torch.allclose(product.dense(), same.dense(), atol=1e-12)
    cosines = nidiff.Kronecker(*(nidiff.power_law((n,), 1.0, boundary="reflecting") for n in (6, 5)))
    assert cosines.basis == nidiff.gaussian_free_field((6, 5), boundary="reflecting").basis
    assert torch.allclose(product.basis.wavenumbers, plane.basis.wavenumbers)
    assert nidiff.Kronecker(nidiff.ar1(3, 0.5), plane).basis.wavenumbers is None


def test_the_data_of_a_product_are_fitted_in_its_basis():
    sigma = nidiff.Kronecker(nidiff.ar1(4, 0.8), nidiff.gaussian_free_field((4, 6)))
    data = sigma.sample((4000, 1, 4, 4, 6), torch.Generator().manual_seed(0), dtype=torch.float64)
    gaussian = nidiff.fit_gaussian(data, basis=sigma, shrinkage=0.0)
    assert (gaussian.covariance.eigenvalues / sigma.eigenvalues - 1).abs().max() < 0.2
    assert gaussian.check_basis(sigma).values.equal(gaussian.covariance.eigenvalues / sigma.eigenvalues)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(50), sigma)
    drawn = nidiff.sample(gaussian.denoiser(process), (2, 1, 4, 4, 6), sampler="ddim", num_steps=5)
    assert torch.isfinite(drawn).all()
    white = nidiff.Kronecker(nidiff.Identity((4,)), nidiff.gaussian_free_field((4, 6)))
    with refused("gaussian"):
        gaussian.check_basis(white)


# Times -----------------------------------------------------------------------------------------------------------


def test_ou_at_regular_times_is_ar1():
    for step, scale in ((1.0, 3.0), (0.25, 2.0)):
        times = 5.0 + step * torch.arange(6, dtype=torch.float64)
        assert torch.allclose(nidiff.ou(times, scale).dense(), nidiff.ar1(6, math.exp(-step / scale)).dense())
    assert torch.allclose(nidiff.ar1((4,), -0.5).dense()[0], torch.tensor([1, -0.5, 0.25, -0.125], dtype=torch.float64))
    irregular = nidiff.ou(np.array([0.0, 1.0, 5.0]), 2.0).dense()
    assert irregular[0, 2] == pytest.approx(math.exp(-2.5))


def test_a_bridge_is_pinned_half_a_step_outside_its_times():
    """Brownian motion that ends at 0: increments of a path from start to end, given their sum."""
    times = [0.0, 0.5, 2.0]
    start, end = -0.25, 2.75
    gaps = torch.tensor([start, *times, end], dtype=torch.float64).diff()
    walk = torch.tril(torch.ones(4, 4, dtype=torch.float64)) * gaps.sqrt()
    free = walk @ walk.T
    given = free[:3, :3] - torch.outer(free[:3, 3], free[3, :3]) / free[3, 3]
    assert torch.allclose(nidiff.brownian_bridge(times, normalize=False).dense(), given)
    assert nidiff.brownian_bridge(times).marginal_variance.mean() == pytest.approx(1.0)


# Graphs ----------------------------------------------------------------------------------------------------------


def cycle_laplacian(n: int) -> torch.Tensor:
    eye = torch.eye(n, dtype=torch.float64)
    return 2 * eye - eye.roll(1, 0) - eye.roll(-1, 0)


def test_on_a_cycle_it_is_the_circulant_with_the_sines_of_the_waves():
    n, gamma = 12, 2.5
    cov = nidiff.graph(cycle_laplacian(n), gamma)
    waves = 4 * torch.sin(torch.pi * frequencies((n,), "periodic")[0]).square()
    waves[0] = waves[1]
    assert torch.allclose(cov.dense(), nidiff.Fourier((n,), waves**-gamma).dense(), atol=1e-10)
    assert not torch.allclose(cov.dense(), nidiff.gaussian_free_field((n,), gamma).dense(), atol=1e-3)
    fine = [nidiff.gaussian_free_field((256,), 1.5).dense()[0], nidiff.graph(cycle_laplacian(256), 1.5).dense()[0]]
    assert torch.allclose(*fine, atol=2e-3)  # and nearly the free field, on many nodes


def test_on_a_path_it_has_the_cosines_and_with_its_ends_held_the_sines():
    path = path_laplacian(8)
    cosine = nidiff.Cosine((8,), torch.ones(8))
    matrix = cosine.basis.analyse(cosine.basis.analyse(nidiff.graph(path).dense()).T)
    assert (matrix - matrix.diagonal().diag()).abs().max() < 1e-10
    path[0, 0] = path[-1, -1] = 3  # joined to nodes at 0, half a step away
    bridge = nidiff.brownian_bridge(range(8)).dense()
    assert torch.allclose(nidiff.graph(path).dense(), bridge, atol=1e-10)


def test_sparse_and_dense_laplacians_are_the_same():
    full = path_laplacian(9)
    sparse = full.to_sparse(), scipy.sparse.csr_matrix(full.numpy()), scipy.sparse.coo_array(full.numpy())
    for laplacian in (full.numpy(), full.tolist(), *sparse):
        assert torch.allclose(nidiff.graph(laplacian).dense(), nidiff.graph(full).dense(), atol=1e-10)


def test_every_part_of_a_graph_has_its_constant():
    parts = torch.block_diag(path_laplacian(3), path_laplacian(4))
    one, zero = (nidiff.graph(parts, zero_mode=mode, normalize=False) for mode in ("one", "zero"))
    assert (zero.eigenvalues == 0).sum() == 2
    drawn = zero.sample((5, 7), torch.Generator().manual_seed(0), dtype=torch.float64)
    assert drawn[:, :3].sum(1).abs().max() < 1e-6
    assert one.dense()[:3, 3:].abs().max() < 1e-10
    assert not one.is_singular
    again = nidiff.Covariance.from_config(one.to_config(), one.tensors())
    assert torch.equal(again.eigenvalues, one.eigenvalues)
    assert again.basis == one.basis


# Channels --------------------------------------------------------------------------------------------------------

CORRELATION = torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64)


def spectra(boundary="periodic"):
    return [nidiff.power_law((6, 8), p, boundary=boundary) for p in (1.0, 3.0)]


@pytest.mark.parametrize("boundary", ["periodic", ("reflecting", "periodic"), "fixed"])
def test_channels_have_their_own_spectra_and_the_correlation_in_every_mode(boundary):
    each = spectra(boundary)
    cov = nidiff.correlated(each, CORRELATION, normalize=False)
    matrix = cov.dense().reshape(2, 48, 2, 48)
    for c in (0, 1):
        assert torch.allclose(matrix[c, :, c], each[c].dense(), atol=1e-10)
    between = each[0].with_eigenvalues(0.6 * (each[0].eigenvalues * each[1].eigenvalues).sqrt())
    assert torch.allclose(matrix[0, :, 1], between.dense(), atol=1e-10)
    assert torch.allclose(cross_spectrum(cov).real[2, 3].diagonal(), torch.stack([s.eigenvalues[2, 3] for s in each]))
    assert nidiff.correlated(each, CORRELATION).eigenvalues.mean() == pytest.approx(1.0)


def test_one_matrix_for_all_modes_is_channels():
    spatial, matrix = nidiff.gaussian_free_field((4, 5)), random_matrix(3)
    expected = nidiff.Channels(matrix, spatial).dense()
    matrices = spatial.eigenvalues[..., None, None] * matrix
    assert torch.allclose(nidiff.CrossSpectral(matrices, spatial).dense(), expected, atol=1e-10)


def test_noise_does_not_depend_on_which_eigenvectors_were_found():
    spatial = nidiff.gaussian_free_field((4, 5))
    flat = spatial.eigenvalues[..., None, None] * torch.eye(3, dtype=torch.float64)  # any vectors will do
    cov = nidiff.CrossSpectral(flat, spatial, normalize=False)
    turned = torch.einsum("ci...,ij->cj...", cov.basis.vectors, torch.linalg.qr(normal(3, 3))[0]).contiguous()
    other = nidiff.Covariance(cov.eigenvalues, PerMode(turned, spatial.basis))
    draws = [each.sample((4, 3, 4, 5), 0, dtype=torch.float64) for each in (cov, other)]
    assert torch.allclose(*draws, atol=1e-10)


@pytest.mark.parametrize("boundary", ["periodic", ("fixed", "periodic")])
def test_a_fit_of_cross_spectra_finds_them(boundary):
    truth = nidiff.correlated(spectra(boundary), CORRELATION, normalize=False)
    data = truth.sample((4000, 2, 6, 8), torch.Generator().manual_seed(0), dtype=torch.float64) + 2.0
    cross, each, joint = (
        nidiff.fit_gaussian(data, basis=boundary, channels=channels, shrinkage=0.0)
        for channels in ("cross", "each", "joint")
    )
    error, other = ((model.covariance.dense() - truth.dense()).norm() for model in (cross, each))
    assert error < min(0.07 * truth.dense().norm(), other / 5)
    held_out = truth.sample((500, 2, 6, 8), torch.Generator().manual_seed(1), dtype=torch.float64) + 2.0
    assert all(cross.log_prob(held_out).mean() > m.log_prob(held_out).mean() + 1 for m in (each, joint))
    # Shrunk, it stays positive definite, and its channels have the spectra of "each".
    few = data[:3]
    shrunk = [nidiff.fit_gaussian(few, basis=boundary, channels=c, shrinkage=0.3).covariance for c in ("cross", "each")]
    assert shrunk[0].eigenvalues.min() > 0
    own = cross_spectrum(shrunk[0]).real.diagonal(dim1=-2, dim2=-1).movedim(-1, 0)
    assert torch.allclose(own, shrunk[1].eigenvalues, rtol=1e-6)


@pytest.mark.parametrize(
    ("boundary", "shape", "axis"),
    [("periodic", (4, 6), 1), (("fixed", "periodic"), (3, 5), 1), (("periodic", "reflecting"), (5, 4), 0)],
)
def test_a_channel_may_lag_behind_another(boundary, shape, axis):
    """The second channel is the first, shifted: Cov(x, shifted x) = C Sᵀ, which is not symmetric."""
    cov, field = lagging(shape, 1, boundary, axis), nidiff.matern(shape, 1.5, boundary=boundary).dense()
    eye = torch.eye(len(field), dtype=torch.float64)
    both = torch.cat([eye, eye.reshape(-1, *shape).roll(1, 1 + axis).reshape(field.shape).T])
    truth = both @ field @ both.T + torch.block_diag(0 * eye, 0.3 * eye)
    if shape[axis] % 2:
        assert torch.allclose(cov.dense(), truth, atol=1e-10)
    between = cov.dense()[: cov.size // 2, cov.size // 2 :]
    assert not torch.allclose(between, between.T, atol=1e-2)
    data = cov.sample((6000, 2, *shape), torch.Generator().manual_seed(0), dtype=torch.float64) + 1.0
    found, joint = (
        nidiff.fit_gaussian(data, basis=boundary, channels=channels, shrinkage=0.0).covariance
        for channels in ("cross", "joint")
    )
    error = [(fit.dense() - cov.dense()).norm() / cov.dense().norm() for fit in (found, joint)]
    assert error[0] < 0.05
    assert error[1] > 0.1
    assert (cross_spectrum(found) - cross_spectrum(cov)).imag.norm() < 0.1 * cross_spectrum(cov).imag.norm()
    # The mean over a shell has no lag, which is odd in k: shrinkage takes its share of it.
    shrunk = nidiff.fit_gaussian(data, basis=boundary, channels="cross", shrinkage=0.3).covariance
    assert torch.allclose(cross_spectrum(shrunk).imag, 0.7 * cross_spectrum(found).imag, atol=1e-9)
    loaded = nidiff.Covariance.from_config(found.to_config(), found.tensors())
    assert torch.allclose(loaded.dense(), found.dense(), atol=1e-12)
    finer = found.at([2 * n for n in shape])
    assert torch.allclose(cross_spectrum(finer).imag[1, 1], 4 * cross_spectrum(found).imag[1, 1], rtol=1e-6, atol=1e-9)
    assert nidiff.testing.check_covariance(finer, 1e-8).passed


def test_data_with_fewer_items_than_channels_have_a_gaussian_all_the_same():
    data = normal(3, 5, 4, 4)
    cov = nidiff.fit_gaussian(data, channels="cross", shrinkage=0.0, floor=1e-6).covariance
    assert cov.eigenvalues.min() == pytest.approx(1e-6 * cov.eigenvalues.mean().item(), rel=0.1)
    with pytest.raises(nidiff.InputError, match="floor"):
        nidiff.fit_gaussian(data, channels="cross", shrinkage=0.0, floor=0.0)


# Texts and mistakes ----------------------------------------------------------------------------------------------


def test_a_product_may_be_written_in_one_line(tmp_path, monkeypatch):
    free = nidiff.gaussian_free_field((6,), boundary="fixed")
    for text, cov in {
        "ar1:rho=0.9 x gff:gamma=1.5": nidiff.Kronecker(nidiff.ar1((4,), 0.9), nidiff.gaussian_free_field((3, 6), 1.5)),
        "ou:scale=2 x white x gff:boundary=fixed": nidiff.Kronecker(
            nidiff.ou(range(4), 2.0), nidiff.Kronecker(nidiff.Identity((3,)), free)
        ),
        "brownian_bridge x matern:length_scale=2": nidiff.Kronecker(
            nidiff.brownian_bridge(range(4)), nidiff.matern((3, 6), 2)
        ),
    }.items():
        found = as_covariance(text, (4, 3, 6))
        assert torch.equal(found.dense(), cov.dense())
        assert found.to_config() == cov.to_config()
    boundary = ("fixed", "reflecting", "periodic")
    mixed = as_covariance("gff x matern:length_scale=2", (4, 3, 6), boundary=boundary)
    assert mixed.basis.boundary == boundary
    assert as_covariance("gff x gff", (4, 3, 6), boundary="fixed").basis.boundary == ("fixed",) * 3
    assert as_covariance("ou:scale=2", (3,)).to_config()["times"] == [0.0, 1.0, 2.0]
    monkeypatch.chdir(tmp_path)  # a folder with such a name is still a folder
    nidiff.offset((3,)).save(tmp_path / "a x b")
    assert as_covariance("a x b").event_shape == (3,)


SPATIAL = nidiff.gaussian_free_field((4,))
EYES = torch.eye(2, dtype=torch.float64).expand(4, 2, 2)
UNEVEN = EYES * torch.tensor([1.0, 2, 3, 4])[:, None, None]
TURN = torch.tensor([[0, 0.1], [-0.1, 0]])
BAD = [
    ("rho", lambda: nidiff.ar1(4, 1.5)),
    ("matrix", lambda: nidiff.ar1(4, 1.0)),
    ("shape", lambda: nidiff.ar1((4, 4), 0.5)),
    ("shape", lambda: as_covariance("ar1:rho=0.5 x gff", (8,))),
    ("shape", lambda: as_covariance("ou:scale=2", (8, 8))),
    ("times", lambda: nidiff.ou([0.0, 2.0, 1.0], 1.0)),
    ("scale", lambda: nidiff.ou([0.0, 1.0], 0.0)),
    ("laplacian", lambda: nidiff.graph([[1.0, -1.0], [0.0, 1.0]])),
    ("laplacian", lambda: nidiff.graph([[0.0, 1.0], [1.0, 0.0]])),
    ("laplacian", lambda: nidiff.graph(torch.zeros(3, 3))),
    ("laplacian", lambda: nidiff.graph(scipy.sparse.eye_array(6000))),
    ("gamma", lambda: nidiff.graph(path_laplacian(9), 1000.0)),
    ("matrices", lambda: nidiff.CrossSpectral(EYES[:3], SPATIAL)),
    ("matrices", lambda: nidiff.CrossSpectral(EYES + EYES.cumsum(1), SPATIAL)),
    ("matrices", lambda: nidiff.CrossSpectral(-EYES, SPATIAL)),
    ("matrices", lambda: nidiff.CrossSpectral(UNEVEN, SPATIAL)),
    ("matrices", lambda: nidiff.correlated([SPATIAL] * 2, torch.ones(2, 2))),
    ("quadrature", lambda: nidiff.CrossSpectral(EYES, SPATIAL, quadrature=EYES)),
    ("quadrature", lambda: nidiff.CrossSpectral(EYES, SPATIAL, quadrature=EYES * 0 + TURN)),
    ("quadrature", lambda: nidiff.CrossSpectral(EYES, nidiff.Identity((4,)), quadrature=0 * EYES)),
    ("basis", lambda: nidiff.correlated([SPATIAL, nidiff.gaussian_free_field((5,))], CORRELATION)),
    ("correlation", lambda: nidiff.correlated([SPATIAL] * 3, CORRELATION)),
    ("correlation", lambda: nidiff.correlated([SPATIAL] * 2, 2 * CORRELATION)),
    ("covariance", lambda: as_covariance("ar1:rho=0.5 x from_data", (8, 8))),
    ("covariance", lambda: as_covariance("ar1:rho=0.5 x gfff", (8, 8))),
    ("covariance", lambda: as_covariance("ar1:rho=0.5 x ", (2, 3, 4))),
]


def test_bad_input_is_refused_by_the_name_of_the_argument():
    for argument, call in BAD:
        with refused(argument):
            call()
