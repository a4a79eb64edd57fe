"""Products of covariances, fields over times and graphs, and channels with a spectrum each."""

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
factor = pytest.mark.parametrize("make", FACTORS.values(), ids=FACTORS)
other_factor = pytest.mark.parametrize("make_other", FACTORS.values(), ids=FACTORS)


# Products --------------------------------------------------------------------------------------------------------


@factor
@other_factor
def test_a_product_is_the_product_of_the_matrices(make, make_other):
    a, b = make(), make_other()
    product = nidiff.Kronecker(a, b)
    assert product.event_shape == a.event_shape + b.event_shape
    assert torch.allclose(product.dense(), torch.kron(a.dense(), b.dense()), atol=1e-10)
    if make is not make_other:
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
    assert torch.allclose(product.wavenumbers, plane.wavenumbers)
    assert nidiff.Kronecker(nidiff.ar1(3, 0.5), plane).wavenumbers is None


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


def test_frames_follow_each_other_as_the_product_says():
    """x_t = ρ x_{t−1} + √(1 − ρ²) noise: the correlation between frames is ρ per step at every pixel."""
    video = nidiff.Kronecker(nidiff.ar1(5, 0.9), nidiff.gaussian_free_field((6, 6)))
    x = video.sample((5000, 5, 6, 6), torch.Generator().manual_seed(0))
    for lag in (1, 3):
        assert (x[:, 0] * x[:, lag]).mean() == pytest.approx(0.9**lag, abs=0.02)
    innovation = x[:, 1:] - 0.9 * x[:, :-1]
    assert (innovation[:, 0] * innovation[:, 2]).mean().abs() < 0.005
    assert (innovation * x[:, :-1]).mean().abs() < 0.005


def test_a_bridge_is_pinned_half_a_step_outside_its_times():
    times = [0.0, 0.5, 2.0]
    matrix = nidiff.brownian_bridge(times, normalize=False).dense()
    start, end = -0.25, 2.75
    for i, s in enumerate(times):
        for j, t in enumerate(times):
            assert matrix[i, j] == pytest.approx((min(s, t) - start) * (end - max(s, t)) / (end - start))
    assert nidiff.brownian_bridge(times).marginal_variance.mean() == pytest.approx(1.0)
    # Brownian motion that is told to end at 0: increments of a path from start to end, given their sum.
    gaps = torch.tensor([start, *times, end], dtype=torch.float64).diff()
    walk = torch.tril(torch.ones(4, 4, dtype=torch.float64)) * gaps.sqrt()
    free = walk @ walk.T
    given = free[:3, :3] - torch.outer(free[:3, 3], free[3, :3]) / free[3, 3]
    assert torch.allclose(matrix, given)


# Graphs ----------------------------------------------------------------------------------------------------------


def cycle_laplacian(n: int) -> torch.Tensor:
    eye = torch.eye(n, dtype=torch.float64)
    return 2 * eye - eye.roll(1, 0) - eye.roll(-1, 0)


@pytest.mark.parametrize("gamma", [1.0, 2.5])
def test_on_a_cycle_it_is_the_circulant_with_the_sines_of_the_waves(gamma):
    n = 12
    cov = nidiff.graph(cycle_laplacian(n), gamma)
    waves = 4 * torch.sin(torch.pi * frequencies((n,), "periodic")[0]).square()
    waves[0] = waves[1]
    circulant = nidiff.Fourier((n,), waves**-gamma)
    assert torch.allclose(cov.dense(), circulant.dense(), atol=1e-10)
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
    expected = nidiff.graph(full).dense()
    for laplacian in (
        full.numpy(),
        full.tolist(),
        full.to_sparse(),
        scipy.sparse.csr_matrix(full.numpy()),
        scipy.sparse.coo_array(full.numpy()),
    ):
        assert torch.allclose(nidiff.graph(laplacian).dense(), expected, atol=1e-10)


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
    other = nidiff.CrossSpectral(flat, spatial, normalize=False)
    turn = torch.linalg.qr(normal(3, 3))[0]
    turned = torch.einsum("ci...,ij->cj...", other.basis.vectors, turn).contiguous()
    other = nidiff.Covariance(other.eigenvalues, PerMode(turned, spatial.basis))
    draws = [c.sample((4, 3, 4, 5), torch.Generator().manual_seed(0), dtype=torch.float64) for c in (cov, other)]
    assert torch.allclose(*draws, atol=1e-10)


@pytest.mark.parametrize("boundary", ["periodic", ("fixed", "periodic")])
def test_a_fit_of_cross_spectra_finds_them(boundary):
    truth = nidiff.correlated(spectra(boundary), CORRELATION, normalize=False)
    data = truth.sample((8000, 2, 6, 8), torch.Generator().manual_seed(0), dtype=torch.float64) + 2.0
    cross = nidiff.fit_gaussian(data, basis=boundary, channels="cross", shrinkage=0.0)
    each = nidiff.fit_gaussian(data, basis=boundary, channels="each", shrinkage=0.0)
    joint = nidiff.fit_gaussian(data, basis=boundary, channels="joint", shrinkage=0.0)
    error = {name: (m.covariance.dense() - truth.dense()).norm() for name, m in (("cross", cross), ("each", each))}
    assert error["cross"] < 0.05 * truth.dense().norm()
    assert error["each"] > 5 * error["cross"]
    held_out = truth.sample((500, 2, 6, 8), torch.Generator().manual_seed(1), dtype=torch.float64) + 2.0
    assert all(cross.log_prob(held_out).mean() > m.log_prob(held_out).mean() + 1 for m in (each, joint))
    # Shrunk, it stays positive definite, and its channels have the spectra of "each".
    few = data[:3]
    shrunk = [nidiff.fit_gaussian(few, basis=boundary, channels=c, shrinkage=0.3).covariance for c in ("cross", "each")]
    assert shrunk[0].eigenvalues.min() > 0
    own = cross_spectrum(shrunk[0]).real.diagonal(dim1=-2, dim2=-1).movedim(-1, 0)
    assert torch.allclose(own, shrunk[1].eigenvalues, rtol=1e-6)


@pytest.mark.parametrize("boundary", ["periodic", ("fixed", "periodic"), ("periodic", "reflecting")])
@pytest.mark.parametrize("shape", [(3, 5), (4, 6)])
def test_a_channel_may_lag_behind_another(boundary, shape):
    """The second channel is the first, shifted: Cov(x, shifted x) = C Sᵀ, which is not symmetric."""
    if boundary[1] == "reflecting":
        cov, truth = lagging_down(shape, boundary)
    else:
        cov = lagging(shape, 1, boundary)
        field = nidiff.matern(shape, 1.5, boundary=boundary).dense()
        shift = torch.eye(field.shape[0], dtype=torch.float64).reshape(-1, *shape).roll(1, -1).reshape(field.shape)
        truth = torch.cat([torch.eye(len(field), dtype=torch.float64), shift.T])
        truth = truth @ field @ truth.T
        truth[len(field) :, len(field) :] += 0.3 * torch.eye(len(field), dtype=torch.float64)
    if shape[1] % 2 or boundary[1] == "reflecting":
        assert torch.allclose(cov.dense(), truth, atol=1e-10)
    between = cov.dense()[: cov.size // 2, cov.size // 2 :]
    assert not torch.allclose(between, between.T, atol=1e-2)
    data = cov.sample((8000, 2, *shape), torch.Generator().manual_seed(0), dtype=torch.float64) + 1.0
    found = nidiff.fit_gaussian(data, basis=boundary, channels="cross", shrinkage=0.0).covariance
    joint = nidiff.fit_gaussian(data, basis=boundary, channels="joint", shrinkage=0.0).covariance
    error = [(fit.dense() - cov.dense()).norm() / cov.dense().norm() for fit in (found, joint)]
    assert error[0] < 0.05
    assert error[1] > 0.1
    assert (cross_spectrum(found) - cross_spectrum(cov)).imag.norm() < 0.1 * cross_spectrum(cov).imag.norm()
    loaded = nidiff.Covariance.from_config(found.to_config(), found.tensors())
    assert torch.allclose(loaded.dense(), found.dense(), atol=1e-12)
    finer = found.at([2 * n for n in shape])
    assert torch.allclose(cross_spectrum(finer).imag[1, 1], 4 * cross_spectrum(found).imag[1, 1], rtol=1e-6, atol=1e-9)
    assert nidiff.testing.check_covariance(finer, 1e-8).passed


def lagging_down(shape, boundary):
    """The same along the first axis, by turning the event."""
    cov = lagging(shape[::-1], 1, boundary[::-1])
    turned = nidiff.CrossSpectral(
        cross_spectrum(cov).real.transpose(0, 1),
        nidiff.matern(shape, 1.5, boundary=boundary),
        quadrature=cross_spectrum(cov).imag.transpose(0, 1),
        normalize=False,
    )
    matrix = cov.dense().reshape(2, *shape[::-1], 2, *shape[::-1])
    return turned, matrix.permute(0, 2, 1, 3, 5, 4).reshape(turned.size, turned.size)


def test_data_with_fewer_items_than_channels_have_a_gaussian_all_the_same():
    data = normal(3, 5, 4, 4)
    cov = nidiff.fit_gaussian(data, channels="cross", shrinkage=0.0, floor=1e-6).covariance
    assert cov.eigenvalues.min() == pytest.approx(1e-6 * cov.eigenvalues.mean().item(), rel=0.1)
    with pytest.raises(nidiff.InputError, match="floor"):
        nidiff.fit_gaussian(data, channels="cross", shrinkage=0.0, floor=0.0)


# Texts and mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "make"),
    [
        (
            "ar1:rho=0.9 x gff:gamma=1.5",
            lambda: nidiff.Kronecker(nidiff.ar1(4, 0.9), nidiff.gaussian_free_field((3, 6), 1.5)),
        ),
        (
            "ou:scale=2 x white x gff:boundary=fixed",
            lambda: nidiff.Kronecker(
                nidiff.ou(range(4), 2.0),
                nidiff.Kronecker(nidiff.Identity((3,)), nidiff.gaussian_free_field((6,), boundary="fixed")),
            ),
        ),
        (
            "brownian_bridge x matern:length_scale=2",
            lambda: nidiff.Kronecker(nidiff.brownian_bridge(range(4)), nidiff.matern((3, 6), 2)),
        ),
    ],
)
def test_a_product_may_be_written_in_one_line(text, make):
    cov = as_covariance(text, (4, 3, 6))
    assert torch.equal(cov.dense(), make().dense())
    assert cov.to_config() == make().to_config()
    boundary = ("fixed", "reflecting", "periodic")
    mixed = as_covariance("gff x matern:length_scale=2", (4, 3, 6), boundary=boundary)
    assert mixed.boundary == boundary
    assert as_covariance("gff x gff", (4, 3, 6), boundary="fixed").boundary == ("fixed",) * 3


def test_a_folder_with_such_a_name_is_still_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nidiff.offset((3,)).save(tmp_path / "a x b")
    assert as_covariance("a x b").event_shape == (3,)


def test_times_may_be_written_too():
    assert as_covariance("ou:scale=2", (3,)).to_config()["times"] == [0.0, 1.0, 2.0]


SPATIAL = nidiff.gaussian_free_field((4,))
EYES = torch.eye(2, dtype=torch.float64).expand(4, 2, 2)
BAD = {
    "rho": (lambda: nidiff.ar1(4, 1.0), "rho"),
    "rho too near": (lambda: nidiff.ar1(4, 1 - 1e-16), "rho"),
    "ar1 over two axes": (lambda: nidiff.ar1((4, 4), 0.5), "shape"),
    "falling times": (lambda: nidiff.ou([0.0, 2.0, 1.0], 1.0), "times"),
    "times twice": (lambda: nidiff.brownian_bridge([0.0, 0.0]), "times"),
    "no times": (lambda: nidiff.ou([], 1.0), "times"),
    "times in a square": (lambda: nidiff.ou([[0.0, 1.0]], 1.0), "times"),
    "nan times": (lambda: nidiff.ou([0.0, float("nan")], 1.0), "times"),
    "scale": (lambda: nidiff.ou([0.0, 1.0], 0.0), "scale"),
    "endless scale": (lambda: nidiff.ou([0.0, 1.0], 1e300), "scale"),
    "not square": (lambda: nidiff.graph(torch.ones(2, 3)), "laplacian"),
    "not symmetric": (lambda: nidiff.graph([[1.0, -1.0], [0.0, 1.0]]), "laplacian"),
    "an adjacency": (lambda: nidiff.graph([[0.0, 1.0], [1.0, 0.0]]), "laplacian"),
    "no edges": (lambda: nidiff.graph(torch.zeros(3, 3)), "laplacian"),
    "too many nodes": (lambda: nidiff.graph(scipy.sparse.eye_array(6000)), "laplacian"),
    "nan laplacian": (lambda: nidiff.graph(torch.full((2, 2), float("nan"))), "laplacian"),
    "huge gamma": (lambda: nidiff.graph(path_laplacian(9), 100.0), "gamma"),
    "gamma in words": (lambda: nidiff.graph(path_laplacian(9), "one"), "gamma"),
    "zero mode": (lambda: nidiff.graph(path_laplacian(9), zero_mode="two"), "zero_mode"),
    "matrices of another shape": (lambda: nidiff.CrossSpectral(EYES[:3], SPATIAL), "matrices"),
    "matrices not symmetric": (lambda: nidiff.CrossSpectral(EYES + EYES.cumsum(1), SPATIAL), "matrices"),
    "negative matrices": (lambda: nidiff.CrossSpectral(-EYES, SPATIAL), "matrices"),
    "odd matrices": (
        lambda: nidiff.CrossSpectral(EYES * torch.tensor([1.0, 2, 3, 4])[:, None, None], SPATIAL),
        "matrices",
    ),
    "odd quadrature": (lambda: nidiff.CrossSpectral(EYES, SPATIAL, quadrature=EYES), "quadrature"),
    "even quadrature": (
        lambda: nidiff.CrossSpectral(EYES, SPATIAL, quadrature=EYES * 0 + torch.tensor([[0, 0.1], [-0.1, 0]])),
        "quadrature",
    ),
    "quadrature of another shape": (
        lambda: nidiff.CrossSpectral(EYES, SPATIAL, quadrature=EYES[:, :1, :1]), "quadrature"
    ),
    "quadrature of pixels": (
        lambda: nidiff.CrossSpectral(EYES, nidiff.Identity((4,)), quadrature=0 * EYES), "quadrature"
    ),
    "covariances of two shapes": (
        lambda: nidiff.correlated([SPATIAL, nidiff.gaussian_free_field((5,))], CORRELATION),
        "basis",
    ),
    "correlation of three": (lambda: nidiff.correlated([SPATIAL] * 3, CORRELATION), "correlation"),
    "a covariance for a correlation": (
        lambda: nidiff.correlated([SPATIAL] * 2, 2 * CORRELATION), "correlation"
    ),
    "copies": (lambda: nidiff.correlated([SPATIAL] * 2, torch.ones(2, 2)), "correlation"),
    "product over one axis": (lambda: as_covariance("ar1:rho=0.5 x gff", (8,)), "covariance"),
    "data in a product": (lambda: as_covariance("ar1:rho=0.5 x from_data", (8, 8)), "covariance"),
    "unknown factor": (lambda: as_covariance("ar1:rho=0.5 x gfff", (8, 8)), "covariance"),
    "product without a shape": (lambda: as_covariance("ar1:rho=0.5 x gff"), "covariance"),
    "ou over two axes": (lambda: as_covariance("ou:scale=2", (8, 8)), "shape"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "argument"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_the_name_of_the_argument(call, argument):
    with refused(argument):
        call()


def test_texts_of_products_are_for_the_shape_they_are_asked_for():
    with refused("times"):
        as_covariance("ou:times=0/1/2,scale=1 x gff", (8, 6))
    with refused("covariance"):
        as_covariance("ar1:rho=0.5 x ", (2, 3, 4))
