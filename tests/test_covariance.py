"""Every covariance is its dense matrix, whatever the family, the shape, the dtype and the mode it is used in."""

import copy
import itertools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from problems import COVARIANCES, even_spectrum, refused
from torch import Tensor

import nidiff
from nidiff.covariance.basis import Basis
from nidiff.covariance.config import BASES, as_covariance, describe, save_arrays
from nidiff.covariance.families import remembered
from nidiff.covariance.fields import FIELDS
from nidiff.covariance.waves import frequencies
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.testing.problems import normal, random_matrix

every_covariance = pytest.mark.parametrize("make", COVARIANCES.values(), ids=COVARIANCES.keys())


def matrix_power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.T


# The contract ----------------------------------------------------------------------------------------------------


@every_covariance
def test_dense_is_symmetric_and_has_the_eigenvalues(make):
    cov = make()
    matrix = cov.dense()
    assert (matrix - matrix.T).abs().max() <= 1e-10
    assert torch.allclose(torch.linalg.eigvalsh(matrix), cov.eigenvalues.flatten().sort().values, rtol=0, atol=1e-10)
    assert (cov.marginal_variance.flatten() - matrix.diagonal()).abs().max() <= 1e-10
    assert cov.eigenvalues.dtype == torch.float64
    assert cov.eigenvalues.shape == cov.event_shape


@every_covariance
@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.0, -1.0, 0.3])
def test_powers_are_those_of_the_dense_matrix(make, exponent):
    cov = make()
    x = normal(2, 3, *cov.event_shape)
    expected = x.reshape(6, -1) @ matrix_power(cov.dense(), exponent)
    assert (cov.power(x, exponent).reshape(6, -1) - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max())
    named = {0.5: cov.sqrt, -0.5: cov.inv_sqrt, 1.0: cov.matmul, -1.0: cov.solve}
    if exponent in named:
        assert torch.equal(named[exponent](x), cov.power(x, exponent))


@every_covariance
def test_logdet_and_log_prob_are_those_of_the_dense_matrix(make):
    cov = make()
    matrix = cov.dense()
    assert cov.logdet() == pytest.approx(torch.linalg.slogdet(matrix).logabsdet.item(), abs=1e-10)
    x = normal(4, 2, *cov.event_shape)
    peer = torch.distributions.MultivariateNormal(torch.zeros(cov.size, dtype=torch.float64), matrix)
    expected = peer.log_prob(x.reshape(4, 2, -1)).sum(1)
    assert torch.allclose(cov.log_prob(x), expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(cov.log_prob(x[:, 0])[0], cov.log_prob(x[0, 0]), rtol=1e-12)


@every_covariance
def test_samples_have_exactly_this_covariance(make):
    """`sample` is linear in its white numbers; pushing unit vectors through it gives A, and A Aᵀ must be Σ."""
    cov = make()
    unit = torch.eye(cov.size, dtype=torch.float64).reshape(cov.size, *cov.event_shape)
    response = cov.colour(unit).reshape(cov.size, -1)
    assert (response.T @ response - cov.dense()).abs().max() <= 1e-10


@every_covariance
def test_sample_is_that_linear_map_of_the_white_numbers(make):
    cov = make()
    shape = (3, 2, *cov.event_shape)
    drawn = cov.sample(shape, torch.Generator().manual_seed(5), dtype=torch.float64)
    numbers = white_noise(shape, torch.Generator().manual_seed(5), dtype=torch.float64)
    assert torch.equal(drawn, cov.colour(numbers))
    assert (drawn.reshape(6, -1) != 0).any()


@every_covariance
def test_the_basis_is_orthonormal_and_diagonalises(make):
    """analyse is an orthonormal matrix U, synthesise its transpose, Σ = Uᵀ diag(λ) U, `diagonal` the diagonal of that
    for any values, and `power` has the mean λ over draws (over the columns of a root of Σ, exactly)."""
    cov = make()
    basis, size = cov.basis, cov.size
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *cov.event_shape)
    u = basis.analyse(unit).reshape(size, size).T
    assert torch.allclose(u @ u.T, torch.eye(size, dtype=torch.float64), atol=1e-11)
    assert torch.allclose(basis.synthesise(unit).reshape(size, size), u, atol=1e-11)
    assert torch.allclose(u.T @ (cov.eigenvalues.flatten()[:, None] * u), cov.dense(), atol=1e-10)
    values = basis.evened(normal(*cov.event_shape, seed=3))
    diagonal = (u.T @ (values.flatten()[:, None] * u)).diagonal()
    assert torch.allclose(basis.diagonal(values).flatten(), diagonal, atol=1e-11)
    assert torch.allclose(basis.power(cov.sqrt(unit)).sum(0), cov.eigenvalues, atol=1e-10)
    assert torch.allclose(cov @ unit, cov.matmul(unit))


@every_covariance
def test_configuration_survives_json_and_safetensors(make, tmp_path):
    cov = make()
    again = nidiff.Covariance.from_config(json.loads(json.dumps(cov.to_config())), cov.tensors())
    cov.save(tmp_path)
    loaded = nidiff.Covariance.load(tmp_path)
    for other in (again, loaded):
        assert other.event_shape == cov.event_shape
        assert (other.dense() - cov.dense()).abs().max() <= 1e-12


@every_covariance
def test_differentiable_in_x(make):
    """Σ^p is symmetric, so the gradient of ⟨v, Σ^p x⟩ is Σ^p v; that of log N(x; 0, Σ) is −Σ⁻¹ x."""
    cov = make()
    x, v = normal(1, *cov.event_shape).requires_grad_(), normal(1, *cov.event_shape, seed=1)
    for exponent in (0.5, -1.0):
        (gradient,) = torch.autograd.grad((v * cov.power(x, exponent)).sum(), x)
        assert torch.allclose(gradient, cov.power(v, exponent), rtol=1e-9, atol=1e-9)
    (score,) = torch.autograd.grad(cov.log_prob(x).sum(), x)
    assert torch.allclose(score, -cov.solve(x.detach()), atol=1e-9)


@every_covariance
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_autocast_changes_nothing(make, dtype):
    cov = make()
    x = normal(2, *cov.event_shape).to(dtype)
    exact = cov.sqrt(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = cov.sqrt(x)
        drawn = cov.sample(x.shape, torch.Generator().manual_seed(0), dtype=dtype)
    assert y.dtype == drawn.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 1e-6) * exact.abs().max()
    assert (y.double() - exact).abs().max() <= 2 * tolerance
    assert torch.equal(drawn, cov.sample(x.shape, torch.Generator().manual_seed(0), dtype=dtype))


def test_the_list_of_cases_covers_every_family_and_field():
    """Of the constructors from arrays, whose configuration is the eigenvalues in a basis, every basis."""
    configs = [make().to_config() for make in COVARIANCES.values()]
    assert {config["covariance"] for config in configs} == {*FIELDS, "Identity", "Channels", "Kronecker", "Covariance"}
    assert {config["basis"]["basis"] for config in configs if "basis" in config} == {*BASES}


# What the fields are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (16,), (4, 6, 3)])
def test_periodic_fields_have_unit_variance_at_every_pixel_and_are_stationary(shape):
    for cov in (nidiff.gaussian_free_field(shape, 1.3), nidiff.matern(shape, 2.0), nidiff.offset(shape, 0.4)):
        matrix = cov.dense()
        assert (matrix.diagonal() - 1).abs().max() <= 1e-12
        first = matrix[0].reshape(shape)
        index = tuple(n // 2 for n in shape)
        row = matrix[torch.arange(cov.size).reshape(shape)[index]].reshape(shape)
        assert (row - first.roll(index, tuple(range(len(shape))))).abs().max() <= 1e-12


def test_reflecting_fields_have_unit_mean_variance_and_do_not_wrap():
    periodic, reflecting = (nidiff.matern((24,), 3.0, boundary=b).dense() for b in ("periodic", "reflecting"))
    assert reflecting.diagonal().mean() == pytest.approx(1.0)
    assert periodic[0, -1] > 0.5  # neighbours across the edge
    assert reflecting[0, -1].abs() < 0.01


def test_gff_is_the_formula_of_the_paper():
    """Σ^½ = W⁻¹ diag(s) W, s = |k|^-γ / sqrt(mean |k|^-2γ), |k₀₀| = 1 (R1)."""
    n, gamma = 6, 1.5
    dft = torch.fft.fft(torch.eye(n, dtype=torch.complex128))
    dft = torch.kron(dft, dft)
    f = torch.fft.fftfreq(n, dtype=torch.float64) * n
    k = (f[:, None] ** 2 + f[None] ** 2).sqrt().flatten()
    k[0] = 1
    s = k**-gamma / (k ** (-2 * gamma)).mean().sqrt()
    root = torch.linalg.inv(dft) @ torch.diag(s.to(dft.dtype)) @ dft
    x = normal(n, n)
    expected = (root @ x.flatten().to(dft.dtype)).reshape(n, n)
    assert expected.imag.abs().max() < 1e-12
    assert (nidiff.gaussian_free_field((n, n), gamma).sqrt(x) - expected.real).abs().max() <= 1e-12
    assert torch.equal(nidiff.gaussian_free_field((n, n), 0.0).eigenvalues, torch.ones(n, n, dtype=torch.float64))


def test_power_law_is_the_gff_with_twice_the_power():
    gff, law = nidiff.gaussian_free_field((8, 6), 0.75), nidiff.power_law((8, 6), 1.5)
    assert torch.equal(gff.eigenvalues, law.eigenvalues)


def test_on_a_non_square_shape_the_field_is_isotropic_in_pixels():
    """The correlation at lag 1 is the same along a long and a short axis, as far as the short one's length allows."""
    row = nidiff.gaussian_free_field((64, 32), 1.0).dense()[0].reshape(64, 32)
    assert row[1, 0] == pytest.approx(row[0, 1].item(), rel=0.02)
    per_axis = nidiff.Fourier((64, 32), stretched_gff((64, 32)))
    wrong = per_axis.dense()[0].reshape(64, 32)
    assert abs(wrong[1, 0] / wrong[0, 1] - 1) > 0.05  # negative control: |k| in cycles per own side


def stretched_gff(shape: tuple[int, int]) -> Tensor:
    f, g = (torch.fft.fftfreq(n, dtype=torch.float64) * n for n in shape)
    k = (f[:, None] ** 2 + g[None] ** 2).sqrt()
    k[0, 0] = 1
    return k**-2


def test_matern_has_the_matern_correlation():
    """ν = ½ in 1-D is exp(−r/ℓ), on a grid much longer than ℓ (the rest is the aliasing of the sampled density)."""
    cov = nidiff.matern((512,), length_scale=12.0, smoothness=0.5)
    lags = torch.arange(1, 40, dtype=torch.float64)
    assert torch.allclose(cov.dense()[0, 1:40], torch.exp(-lags / 12.0), atol=0.02)


KERNELS = {0.5: lambda r: torch.exp(-r), 1.5: lambda r: (1 + math.sqrt(3) * r) * torch.exp(-math.sqrt(3) * r)}


def wrapped_kernel(shape, length, smoothness, reflecting):
    """Σ of the Matérn kernel summed over its images: periods of n, or of 2n with the mirror image about each edge."""
    total = torch.zeros(math.prod(shape), math.prod(shape), dtype=torch.float64)
    axes = []
    for n in shape:
        pixel, period = torch.arange(n, dtype=torch.float64), (2 * n if reflecting else n)
        far = math.ceil(45 * length / period)
        lags = [pixel[:, None] - pixel, pixel[:, None] + pixel + 1][: 2 if reflecting else 1]
        axes.append([lag + period * m for lag in lags for m in range(-far, far + 1)])
    for lags in itertools.product(*axes):
        square = torch.zeros(1, 1, dtype=torch.float64)
        for lag in lags:
            one, other = torch.ones_like(square), torch.ones_like(lag)
            square = torch.kron(square, other) + torch.kron(one, lag.square())
        total += KERNELS[smoothness](square.sqrt() / length)
    return total / total.diagonal().mean()


@pytest.mark.parametrize("smoothness", KERNELS)
@pytest.mark.parametrize("boundary", ["periodic", "reflecting"])
@pytest.mark.parametrize(("shape", "length"), [((9,), 0.7), ((12,), 30.0), ((5, 4), 0.8), ((3, 2, 4), 0.4)])
def test_aliased_matern_is_the_kernel_summed_over_its_images(shape, length, boundary, smoothness):
    exact = wrapped_kernel(shape, length, smoothness, boundary == "reflecting")
    aliased, cut = (
        nidiff.matern(shape, length, smoothness, boundary=boundary, aliased=aliased).dense()
        for aliased in (True, False)
    )
    assert (aliased - exact).abs().max() < 1e-9
    assert (cut - exact).abs().max() > 1e-7


def test_neighbours_in_an_aliased_matern_field_have_the_correlation_of_the_kernel():
    """exp(−1/ℓ) for ν = ½ in any dimension; with the spectrum cut at Nyquist it is 0.715 in 2-D."""

    def neighbours(shape, **options):
        cov = nidiff.matern(shape, 2.0, smoothness=0.5, **options)
        impulse = torch.zeros(shape, dtype=torch.float64)
        impulse[(0,) * len(shape)] = 1
        return cov.matmul(impulse).flatten()[1].item()

    for shape in ((512,), (128, 128)):
        assert neighbours(shape, aliased=True) == pytest.approx(math.exp(-0.5), abs=1e-10)
        assert neighbours(shape) > 0.68
    assert neighbours((128, 128)) == pytest.approx(0.715, abs=1e-3)


@pytest.mark.parametrize("smoothness", [0.01, 0.3, 4.0, 20.0])
def test_aliased_matern_sums_the_density_at_any_smoothness(smoothness):
    """ℓ = 1/10 of a pixel to 10 pixels: the sum over images by hand, with the integral for those far away."""
    n, count = 8, 20000
    for length in (0.1, 1.0, 10.0):
        power = smoothness + 0.5
        omega = 2 * math.pi * frequencies((n,), "periodic")[0]
        images = omega[:, None] + 2 * math.pi * torch.arange(-count, count + 1, dtype=torch.float64)
        direct = (2 * smoothness + (length * images).square()).pow(-power).sum(1)
        edge = 2 * math.pi * (count + 0.5)
        direct += 2 * edge ** (1 - 2 * power) * length ** (-2 * power) / (2 * power - 1) / (2 * math.pi)
        cov = nidiff.matern((n,), length, smoothness, aliased=True, normalize=False)
        assert torch.allclose(cov.eigenvalues, direct, rtol=1e-7, atol=0)


def test_offset_is_the_recipe_everyone_uses():
    """randn + s · randn of one number per channel has covariance I + s² 11ᵀ."""
    size, strength = 20, 0.3
    recipe = torch.cat([torch.eye(size), strength * torch.ones(size, 1)], dim=1).double()
    matrix = nidiff.offset((4, 5), strength, normalize=False).dense()
    assert torch.allclose(matrix, recipe @ recipe.T, atol=1e-6)


def pyramid_recipe(shape: tuple[int, int], discount: float, overwrite: bool) -> tuple[Tensor, list[int]]:
    """The common code with its ratio fixed at 2, called on unit vectors of white noise: Σ, and the heights it used."""
    matrix, heights = torch.eye(math.prod(shape), dtype=torch.float64), []
    height, width = shape
    for level in range(10):
        h, w = max(1, int(height / 2**level)), max(1, int(width / 2**level))
        if overwrite:
            height, width = h, w
        unit = torch.eye(h * w, dtype=torch.float64).reshape(h * w, 1, h, w)
        up = torch.nn.functional.interpolate(unit, size=shape, mode="bilinear").reshape(h * w, -1)
        matrix += discount ** (2 * level) * up.T @ up
        heights.append(h)
        if h == 1 or w == 1:
            break
    return matrix, heights


@pytest.mark.parametrize("shape", [(32, 32), (8, 6), (7, 12)])
def test_pyramid_is_the_recipe_everyone_uses(shape):
    """White noise at falling resolutions, upsampled bilinearly and added, in the two variants found in trainers."""
    powers, compounded = (pyramid_recipe(shape, 0.8, overwrite) for overwrite in (False, True))
    assert torch.allclose(nidiff.pyramid(shape, 0.8, normalize=False).dense(), powers[0], atol=1e-11)
    other = nidiff.pyramid(shape, 0.8, normalize=False, sizes="compounded")
    assert torch.allclose(other.dense(), compounded[0], atol=1e-11)
    assert not torch.allclose(powers[0], compounded[0], atol=0.1)
    if shape == (32, 32):
        assert powers[1] == [32, 16, 8, 4, 2, 1]
        assert compounded[1] == [32, 16, 4, 1]


@pytest.mark.parametrize(("symmetric", "blocks"), [((), 1), ((0,), 2), ((1,), 2), ((0, 1), 4)])
def test_reflections_split_the_eigenproblem_and_change_nothing(symmetric, blocks, monkeypatch):
    """A matrix that commutes with reflections along axes is diagonalised in even and odd parts: same Σ, less work."""
    shape, matrix = (4, 3), random_matrix(12).reshape(4, 3, 4, 3)
    for axis in symmetric:
        matrix = matrix + matrix.flip(axis, axis + 2)
    sizes = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda part: sizes.append(len(part)) or eigh(part))
    cov = nidiff.Dense(matrix.reshape(12, 12), shape, normalize=False)
    assert len(sizes) == blocks
    assert sum(sizes) == 12
    assert torch.allclose(cov.dense(), matrix.reshape(12, 12), rtol=0, atol=1e-12)
    assert torch.equal(cov.eigenvalues.flatten(), cov.eigenvalues.flatten().sort().values)
    x = normal(12, 4, 3)
    assert torch.allclose(cov.basis.synthesise(cov.basis.analyse(x)), x, atol=1e-12)  # orthonormal
    assert cov.basis.analyse(x).square().sum() == pytest.approx(x.square().sum().item())


@pytest.mark.parametrize("boundary", ["periodic", "reflecting"])
def test_from_data_finds_the_spectrum_the_data_came_from(boundary):
    truth = nidiff.gaussian_free_field((16, 12), 1.0, boundary=boundary)
    data = truth.sample((4000, 3, 16, 12), torch.Generator().manual_seed(0)) + 5.0
    modes = nidiff.from_data(data, average="modes", shrinkage=0.0, boundary=boundary)
    assert (modes.eigenvalues / truth.eigenvalues - 1).abs().max() < 0.1
    radial = nidiff.from_data(data, shrinkage=0.0, boundary=boundary)
    assert (radial.eigenvalues.log() - truth.eigenvalues.log()).std() < 0.25
    white = nidiff.from_data(data, shrinkage=1.0, boundary=boundary)
    assert torch.allclose(white.eigenvalues, torch.ones(16, 12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "axes", "event"),
    [
        ((9, 8), None, (8,)),
        ((9, 2, 4, 6), None, (4, 6)),
        ((9, 4, 6), 1, (6,)),
        ((9, 4, 6), 2, (4, 6)),
        ((9, 1, 4, 6, 3), 3, (4, 6, 3)),
        ((9, 4, 6, 3), 3, (4, 6, 3)),
    ],
)
def test_from_data_fits_the_axes_it_is_told_or_that_are_clear(shape, axes, event):
    assert nidiff.from_data(normal(*shape), axes).event_shape == event
    assert nidiff.from_data(normal(*shape).numpy(), axes).event_shape == event


def test_sums_and_scalings_add_the_matrices():
    a, b = nidiff.gaussian_free_field((4, 5)), nidiff.matern((4, 5), 2.0)
    assert torch.allclose((a + 2 * b).dense(), a.dense() + 2 * b.dense(), atol=1e-12)
    eye = nidiff.Identity((4, 5))
    assert torch.allclose((eye + a).dense(), a.dense() + torch.eye(20), atol=1e-12)
    assert torch.allclose((eye + eye).dense(), 2 * torch.eye(20, dtype=torch.float64))
    assert torch.allclose((eye + nidiff.power_law((4, 5), 0.0)).dense(), 2 * torch.eye(20, dtype=torch.float64))
    dense = nidiff.Dense(random_matrix(20), (4, 5))
    assert torch.allclose((dense + 0.5 * dense).dense(), 1.5 * dense.dense(), atol=1e-12)
    assert torch.allclose((dense + copy.deepcopy(dense)).dense(), 2 * dense.dense(), atol=1e-12)
    assert (a + b).normalized().eigenvalues.mean() == pytest.approx(1.0)
    singular = nidiff.gaussian_free_field((4, 5), zero_mode="zero")
    assert not (singular + eye).is_singular


@pytest.mark.parametrize(
    "pair",
    [
        lambda: (nidiff.gaussian_free_field((4, 4)), nidiff.gaussian_free_field((4, 4), boundary="reflecting")),
        lambda: (nidiff.Dense(random_matrix(4)), nidiff.Dense(random_matrix(4, seed=1))),
        lambda: tuple(nidiff.Channels(random_matrix(2, seed), nidiff.Identity((3,))) for seed in (0, 1)),
    ],
)
def test_a_sum_without_a_common_basis_is_refused(pair):
    a, b = pair()
    with refused("basis"):
        a + b
    with refused("basis"):
        a + nidiff.gaussian_free_field((7, 7))


# A basis and a field of one's own ---------------------------------------------------------------------------------


class Haar(Basis):
    """Sum and difference of each pair of neighbours."""

    def __init__(self, shape):
        self.event_shape = tuple(shape)

    def analyse(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a + b, a - b], -1).flatten(-2) / 2**0.5

    synthesise = analyse

    def arguments(self):
        return {"shape": self.event_shape}


VALUES = normal(3, 4).square() + 0.1
IN_HAAR = {
    "alone": lambda: nidiff.Covariance(VALUES, Haar((3, 4))),
    "scaled": lambda: 3.0 * nidiff.Covariance(VALUES, Haar((3, 4))),
    "in white noise": lambda: 0.3 * nidiff.Identity((3, 4)) + nidiff.Covariance(VALUES, Haar((3, 4))),
    "between channels": lambda: nidiff.Channels(random_matrix(2), nidiff.Covariance(VALUES, Haar((3, 4)))),
    "in a product": lambda: nidiff.Kronecker(nidiff.ar1(2, 0.5), nidiff.Covariance(VALUES, Haar((3, 4)))),
}


@pytest.mark.parametrize("make", IN_HAAR.values(), ids=IN_HAAR.keys())
def test_a_basis_needs_two_methods(make, tmp_path, monkeypatch):
    """It fulfils the contract; with `arguments` and a name in BASES, saving and loading included."""
    monkeypatch.setitem(BASES, "Haar", Haar)
    test_dense_is_symmetric_and_has_the_eigenvalues(make)
    test_the_basis_is_orthonormal_and_diagonalises(make)
    test_powers_are_those_of_the_dense_matrix(make, -0.5)
    test_logdet_and_log_prob_are_those_of_the_dense_matrix(make)
    test_samples_have_exactly_this_covariance(make)
    test_configuration_survives_json_and_safetensors(make, tmp_path)
    assert torch.equal(pickle.loads(pickle.dumps(make())).dense(), make().dense())


def test_what_could_not_be_loaded_is_not_saved(tmp_path, monkeypatch):
    cov = nidiff.Covariance(VALUES, Haar((3, 4)))
    with refused("basis"):
        cov.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setitem(BASES, "Haar", Haar)
    cov.save(tmp_path / "new")
    monkeypatch.delitem(BASES, "Haar")
    with refused("file"):
        nidiff.Covariance.load(tmp_path / "new")


def test_a_field_of_ones_own_is_saved_as_its_call(monkeypatch):
    """A function in FIELDS is found by name; with `remembered` the configuration is the call, without it the array."""

    @remembered
    def flat(shape, level: float = 1.0):
        return nidiff.Diagonal(torch.full(shape, level), normalize=False)

    assert flat((2, 3), 2.0).to_config()["covariance"] == "Covariance"
    monkeypatch.setitem(FIELDS, "flat", flat)
    cov = as_covariance("flat:level=2.0", (2, 3))
    assert cov.to_config() == {"covariance": "flat", "shape": [2, 3], "level": 2.0}
    assert torch.equal(nidiff.Covariance.from_config(cov.to_config()).dense(), 2 * torch.eye(6, dtype=torch.float64))
    assert (3 * cov).to_config()["factor"] == 3
    with refused("level"):
        as_covariance("flat:level=high", (2, 3))


def test_a_covariance_keeps_the_numbers_it_was_built_from():
    matrix = random_matrix(2)
    cov = nidiff.Channels(matrix, nidiff.Identity((3,)))
    before = cov.dense()
    matrix *= 7
    assert torch.equal(nidiff.Covariance.from_config(cov.to_config(), cov.tensors()).dense(), before)


# One way to write Σ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("gff", lambda: nidiff.gaussian_free_field((6, 8))),
        ("gff:gamma=0.5,normalize=false", lambda: nidiff.gaussian_free_field((6, 8), 0.5, normalize=False)),
        ("matern: length_scale=2, boundary=reflecting", lambda: nidiff.matern((6, 8), 2, boundary="reflecting")),
        ("white", lambda: nidiff.Identity((6, 8))),
        ("Identity", lambda: nidiff.Identity((6, 8))),
        ("pyramid:num_levels=2,discount=8e-1", lambda: nidiff.pyramid((6, 8), 0.8, 2)),
        ("from_data:average=modes", lambda: nidiff.from_data(normal(9, 2, 6, 8), average="modes")),
    ],
)
def test_a_text_is_the_call_it_names(text, make):
    cov = as_covariance(text, (6, 8), data=lambda: normal(9, 2, 6, 8))
    assert torch.equal(cov.dense(), make().dense())
    assert cov.to_config() == make().to_config()


def test_a_covariance_and_its_configuration_name_themselves():
    cov = nidiff.Dense(random_matrix(4))
    assert as_covariance(cov) is cov
    assert torch.allclose(as_covariance(describe(cov)).dense(), cov.dense(), atol=1e-12)
    assert as_covariance(nidiff.offset((3,)).to_config()).event_shape == (3,)


@pytest.mark.parametrize("place", ["", "scheduler", "model/scheduler"])
def test_a_folder_that_holds_a_covariance_names_it(tmp_path, place, monkeypatch):
    """A scheduler's, a model's or a run's: there Σ is a key of the scheduler's configuration."""
    cov = nidiff.Dense(random_matrix(4))
    folder = tmp_path / "saved" / place
    save_arrays(cov.tensors(), folder)
    (folder / "scheduler_config.json").write_text(json.dumps({"schedule": "vp", "covariance": cov.to_config()}))
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "saved", str(tmp_path / "saved"), "saved", "./saved"):
        assert torch.allclose(as_covariance(path).dense(), cov.dense(), atol=1e-12)
    (folder / "covariance.safetensors").unlink()
    with refused("file"):
        nidiff.Covariance.load("saved")
    (folder / "scheduler_config.json").write_text("{}")
    with refused("file"):
        nidiff.Covariance.load("saved")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(nidiff.InputError):
        nidiff.Identity((4,)).save(tmp_path / "file" / "sigma")
    assert (tmp_path / "file").read_text() == "mine"


def test_saving_again_leaves_the_new_one_whole(tmp_path):
    nidiff.Dense(random_matrix(4)).save(tmp_path)
    nidiff.offset((3,)).save(tmp_path)
    assert nidiff.Covariance.load(tmp_path).event_shape == (3,)
    assert {file.name for file in tmp_path.iterdir()} == {"covariance.json", "covariance.safetensors"}


# Randomness ------------------------------------------------------------------------------------------------------


@every_covariance
def test_an_image_depends_on_its_generator_alone(make):
    cov = make()
    shape = (3, *cov.event_shape)
    batch = cov.sample((8, *shape), generators_from_seeds(range(8)))
    alone = cov.sample((1, *shape), generators_from_seeds([7]))
    assert torch.allclose(batch[7], alone[0], rtol=0, atol=1e-5)  # a matrix product may round differently
    assert not torch.allclose(batch[7], batch[6], rtol=0, atol=1e-2)


@pytest.mark.parametrize("shape", [(32, 32), (48, 40), (64, 64), (16, 16, 16), (31, 8), (100,)])
def test_periodic_noise_is_the_same_to_the_bit_in_a_batch_of_any_size(shape):
    cov = nidiff.gaussian_free_field(shape)
    batch = cov.sample((8, *shape), generators_from_seeds(range(8)))
    for size in (1, 2, 3, 5):
        part = cov.sample((size, *shape), generators_from_seeds(range(8 - size, 8)))
        assert torch.equal(batch[8 - size :], part)


@pytest.mark.parametrize(
    "cov",
    [
        nidiff.Dense(torch.eye(16, dtype=torch.float64) + 0.2, (4, 4)),
        nidiff.Channels(torch.eye(3, dtype=torch.float64) + 0.1, nidiff.gaussian_free_field((4, 4))),
    ],
)
def test_noise_does_not_depend_on_which_eigenvectors_were_found(cov):
    """Repeated eigenvalues: the eigenvectors are arbitrary and may differ after saving; the noise may not."""
    again = nidiff.Covariance.from_config(cov.to_config(), cov.tensors())
    draws = [
        c.sample((4, *cov.event_shape), torch.Generator().manual_seed(0), dtype=torch.float64) for c in (cov, again)
    ]
    assert torch.allclose(*draws, rtol=0, atol=1e-10)


@every_covariance
def test_an_empty_batch_stays_empty(make):
    cov = make()
    empty = torch.zeros(0, *cov.event_shape)
    assert cov.sqrt(empty).shape == empty.shape
    assert cov.log_prob(empty).shape == (0,)
    assert cov.sample((0, 2, *cov.event_shape)).shape == (0, 2, *cov.event_shape)


def test_measured_spectrum_of_samples_is_the_eigenvalues():
    """A Monte Carlo look at the public function, with white noise as the negative control."""
    cov = nidiff.gaussian_free_field((8, 8))
    x = cov.sample((20000, 8, 8), torch.Generator().manual_seed(0))
    power = torch.fft.fft2(x, norm="ortho").abs().square().mean(0)
    assert (power / cov.eigenvalues - 1).abs().max() < 0.06
    white = torch.fft.fft2(torch.randn(20000, 8, 8), norm="ortho").abs().square().mean(0)
    assert (white / cov.eigenvalues - 1).abs().max() > 1.0


# Modes of use ----------------------------------------------------------------------------------------------------


def test_works_under_compile():
    cov = COVARIANCES["channels of gff"]()
    x = normal(2, *cov.event_shape).float()
    compiled = torch.compile(lambda x: cov.sqrt(x) + cov.solve(x), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), cov.sqrt(x) + cov.solve(x), atol=1e-5)
    assert torch.allclose(compiled(x), cov.sqrt(x) + cov.solve(x), atol=1e-5)


def test_sampling_in_inference_mode_does_not_spoil_training():
    cov = nidiff.gaussian_free_field((8, 8))
    with torch.inference_mode():
        cov.sqrt(torch.zeros(8, 8))
    x = torch.ones(8, 8, requires_grad=True)
    cov.sqrt(x).square().sum().backward()
    assert torch.allclose(x.grad, 2 * cov.matmul(torch.ones(8, 8)), atol=1e-5)


@every_covariance
def test_torchs_default_device_does_not_matter(make):
    """Tables live on the CPU and follow the tensor they are applied to ("meta" stands in for a GPU here)."""
    with torch.device("meta"):
        cov = make()
        level = nidiff.schedules.ddpm_linear(10).level(torch.tensor([1, 2], device="cpu"))
        x = cov.sample((2, *cov.event_shape), torch.Generator("cpu").manual_seed(0))
        noisy = nidiff.Process(nidiff.schedules.ddpm_cosine(10), cov).perturb(x, level, cov.inv_sqrt(x))
    assert noisy.device.type == "cpu"
    assert torch.isfinite(noisy).all()


# Bad input -------------------------------------------------------------------------------------------------------

SPECTRUM = torch.ones(4, 4)
BAD = {
    "empty shape": (lambda: nidiff.Identity(()), "shape"),
    "negative size": (lambda: nidiff.gaussian_free_field((4, -4)), "shape"),
    "float size": (lambda: nidiff.gaussian_free_field((4.0, 4)), "shape"),
    "spectrum of another shape": (lambda: nidiff.Fourier((4, 5), SPECTRUM), "spectrum"),
    "nan spectrum": (lambda: nidiff.Fourier((4, 4), SPECTRUM * float("nan")), "spectrum"),
    "negative spectrum": (lambda: nidiff.Cosine((4, 4), SPECTRUM - 2), "spectrum"),
    "zero spectrum": (lambda: nidiff.Fourier((4, 4), 0 * SPECTRUM), "spectrum"),
    "a zero in the spectrum": (lambda: nidiff.Diagonal(torch.tensor([1.0, 0.0])), "variances"),
    "spectrum not even": (lambda: nidiff.Fourier((4,), torch.tensor([1.0, 2, 3, 4])), "spectrum"),
    "asymmetric matrix": (lambda: nidiff.Dense(torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "matrix"),
    "indefinite matrix": (lambda: nidiff.Dense(torch.tensor([[1.0, 2], [2, 1]])), "matrix"),
    "singular matrix": (lambda: nidiff.Dense(torch.ones(2, 2)), "matrix"),
    "not square": (lambda: nidiff.Dense(torch.ones(2, 3)), "matrix"),
    "nan matrix": (lambda: nidiff.Channels(torch.full((2, 2), float("nan")), nidiff.Identity((2,))), "matrix"),
    "matrix of another size": (lambda: nidiff.Dense(torch.eye(4), (2, 3)), "matrix"),
    "vectors not orthonormal": (lambda: nidiff.Dense(torch.ones(2, 2), eigenvalues=torch.ones(2)), "vectors"),
    "unknown zero mode": (lambda: nidiff.gaussian_free_field((4, 4), zero_mode="two"), "zero_mode"),
    "unknown boundary": (lambda: nidiff.matern((4, 4), 1.0, boundary="open"), "boundary"),
    "nan gamma": (lambda: nidiff.gaussian_free_field((4, 4), float("nan")), "gamma"),
    "huge gamma": (lambda: nidiff.gaussian_free_field((32, 32), 30.0), "gamma"),
    "negative length": (lambda: nidiff.matern((4, 4), -1.0), "length_scale"),
    "pyramid too large": (lambda: nidiff.pyramid((128, 128)), "shape"),
    "pyramid ratio": (lambda: nidiff.pyramid((8, 8), ratio=1.0), "ratio"),
    "one image": (lambda: nidiff.from_data(torch.ones(1, 4, 4), 2), "data"),
    "images or signals": (lambda: nidiff.from_data(torch.ones(3, 4, 4)), "data"),
    "volumes": (lambda: nidiff.from_data(normal(9, 1, 4, 4, 4)), "data"),
    "too many axes": (lambda: nidiff.from_data(normal(9, 4, 4), 3), "event_axes"),
    "unknown sizes": (lambda: nidiff.pyramid((8, 8), sizes="running"), "sizes"),
    "constant images": (lambda: nidiff.from_data(torch.ones(3, 4, 4), 2), "data"),
    "nan images": (lambda: nidiff.from_data(torch.full((3, 4, 4), float("nan")), 2), "data"),
    "shrinkage": (lambda: nidiff.from_data(torch.ones(3, 4, 4), 2, shrinkage=2.0), "shrinkage"),
    "average": (lambda: nidiff.from_data(torch.ones(3, 4, 4), 2, average="none"), "average"),
    "wrong trailing shape": (lambda: nidiff.Identity((4, 4)).sqrt(torch.ones(4, 5)), "x"),
    "too few axes": (lambda: nidiff.Identity((4, 4)).sqrt(torch.ones(4)), "x"),
    "sample of another shape": (lambda: nidiff.Identity((4, 4)).sample((2, 3)), "shape"),
    "integers": (lambda: nidiff.Identity((2,)).sqrt(torch.ones(2, dtype=torch.int64)), "x"),
    "negative scaling": (lambda: -1.0 * nidiff.Identity((2,)), "factor"),
    "unknown family": (lambda: nidiff.Covariance.from_config({"covariance": "Wavelet"}), 'config["covariance"]'),
    "no key": (lambda: nidiff.Covariance.from_config({}), "config"),
    "missing array": (lambda: nidiff.Covariance.from_config(nidiff.Diagonal(torch.ones(2)).to_config()), "tensors"),
    "eigenvalues of another shape": (lambda: nidiff.offset((2,)).with_eigenvalues(torch.ones(3)), "eigenvalues"),
    "negative eigenvalues": (lambda: nidiff.offset((2,)).with_eigenvalues([1, -1]), "eigenvalues"),
    "no matrix": (lambda: nidiff.Dense(torch.ones(0, 0)), "shape"),
    "endless length": (lambda: nidiff.matern((4,), 1e200, aliased=True), "length_scale"),
    "scaled to infinity": (lambda: 1e300 * (1e300 * nidiff.Identity((2,))), "eigenvalues"),
    "unknown name": (lambda: as_covariance("gaussian_fre_field", (4,)), "covariance"),
    "word for a number": (lambda: as_covariance("gff:gamma=big", (4,)), "gamma"),
    "number for true or false": (lambda: as_covariance("gff:normalize=2", (4,)), "normalize"),
    "part of a level": (lambda: as_covariance("pyramid:num_levels=2.5", (4,)), "num_levels"),
    "text without a shape": (lambda: as_covariance("gff"), "covariance"),
    "text without data": (lambda: as_covariance("from_data", (4,)), "covariance"),
    "neither text nor covariance": (lambda: as_covariance(3.0), "covariance"),
    "three lengths": (lambda: nidiff.matern((4, 4), (4, 8, 2)), "length_scale"),
    "negative lengths": (lambda: nidiff.matern((4, 4), torch.tensor([1.0, -1.0])), "length_scale"),
    "channels of a row": (lambda: nidiff.Channels([1.0, 2.0], nidiff.Identity((2,))), "matrix"),
    "singular channels": (lambda: nidiff.Channels(torch.ones(2, 2), nidiff.Identity((2,))), "matrix"),
    "missing folder": (lambda: nidiff.Covariance.load("nowhere"), "folder"),
}


@pytest.mark.parametrize(("call", "argument"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_the_name_of_the_argument(call, argument):
    with refused(argument):
        call()


# A call that cannot be made says what it takes.
@pytest.mark.parametrize("text", ["gff:alpha=1", "matern", "gff:gamma=1,gamma=2", "gff:gamma="])
def test_a_text_that_is_no_call_is_refused(text):
    with pytest.raises(nidiff.InputError):
        as_covariance(text, (4,))


def test_a_singular_covariance_samples_and_multiplies_but_has_no_inverse():
    cov = nidiff.gaussian_free_field((6, 6), zero_mode="zero")
    assert cov.sample((10, 6, 6), dtype=torch.float64).mean((1, 2)).abs().max() < 1e-12  # the mean is never noised (E4)
    assert cov.matmul(torch.ones(6, 6)).abs().max() < 1e-6
    calls = (cov.solve, cov.inv_sqrt, cov.log_prob)
    for call in (*[lambda f=f: f(torch.ones(6, 6)) for f in calls], cov.logdet, cov.distribution):
        with refused("covariance"):
            call()
    with refused("covariance"):
        nidiff.Process(nidiff.schedules.ddpm_linear(10), cov)


def test_float32_refuses_a_field_it_would_lose_and_float64_keeps_it():
    cov = nidiff.gaussian_free_field((32, 32), gamma=6.0)
    with refused("covariance"):
        cov.sqrt(torch.zeros(32, 32))
    with refused("covariance"):
        cov.sample((2, 32, 32))
    x = normal(32, 32)
    assert torch.allclose(cov.inv_sqrt(cov.sqrt(x)), x, atol=1e-6)


def test_a_shape_may_be_of_numpy():
    assert nidiff.gaussian_free_field(np.array([4, 6])).event_shape == (4, 6)
    assert all(type(n) is int for n in nidiff.Identity((np.int64(4), 6)).event_shape)


def test_even_spectra_are_accepted_and_others_would_not_be_real():
    spectrum = even_spectrum((4, 6))
    assert nidiff.Fourier((4, 6), spectrum).eigenvalues.mean() == pytest.approx(1.0)
    spectrum[1, 2] *= 2
    with refused("spectrum"):
        nidiff.Fourier((4, 6), spectrum)
