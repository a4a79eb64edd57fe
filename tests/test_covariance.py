"""Every covariance is its dense matrix, whatever the family, the shape, the dtype and the mode it is used in."""

import copy
import itertools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from problems import COVARIANCES, refused

import nidiff
from nidiff.covariance.basis import Basis
from nidiff.covariance.config import BASES, as_covariance, describe, save_arrays
from nidiff.covariance.families import remembered
from nidiff.covariance.fields import FIELDS
from nidiff.covariance.waves import frequencies
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.testing.problems import normal, random_matrix

every_covariance = pytest.mark.parametrize("make", COVARIANCES.values(), ids=COVARIANCES.keys())


# The contract ----------------------------------------------------------------------------------------------------


def check_contract(cov, folder):
    """All that `check_covariance` states, and: log det, the score −Σ⁻¹x, `sample` as a linear map of white
    numbers, and of the basis U: Σ = Uᵀ diag(λ) U, `diagonal` for any values, and `power` with mean λ over draws (over
    the columns of a root of Σ, exactly)."""
    findings = nidiff.testing.check_covariance(cov)
    assert findings.passed, findings
    matrix, basis, size = cov.dense(), cov.basis, cov.size
    assert cov.logdet() == pytest.approx(torch.linalg.slogdet(matrix).logabsdet.item(), abs=1e-10)
    x = normal(4, 2, *cov.event_shape)
    assert torch.allclose(cov.log_prob(x[:, 0])[0], cov.log_prob(x[0, 0]), rtol=1e-12)
    named = {0.5: cov.sqrt(x), -0.5: cov.inv_sqrt(x), 1.0: cov.matmul(x), -1.0: cov.solve(x)}
    assert all(torch.equal(value, cov.power(x, exponent)) for exponent, value in named.items())
    assert torch.equal(cov @ x, cov.matmul(x))
    (score,) = torch.autograd.grad(cov.log_prob(probe := x.clone().requires_grad_()).sum(), probe)
    assert torch.allclose(score, -cov.solve(x), atol=1e-9)
    drawn = cov.sample(x.shape, 5, dtype=torch.float64)
    assert torch.equal(drawn, cov.colour(white_noise(x.shape, 5, dtype=torch.float64)))
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *cov.event_shape)
    u = basis.analyse(unit).reshape(size, size).T
    assert torch.allclose(u.T @ (cov.eigenvalues.flatten()[:, None] * u), matrix, atol=1e-10)
    values = basis.evened(normal(*cov.event_shape, seed=3))
    diagonal = (u.T @ (values.flatten()[:, None] * u)).diagonal()
    assert torch.allclose(basis.diagonal(values).flatten(), diagonal, atol=1e-11)
    assert torch.allclose(basis.power(cov.sqrt(unit)).sum(0), cov.eigenvalues, atol=1e-10)
    cov.save(folder)
    assert (nidiff.Covariance.load(folder).dense() - matrix).abs().max() <= 1e-12


@every_covariance
def test_every_covariance_is_its_dense_matrix(make, tmp_path):
    check_contract(make(), tmp_path)


@every_covariance
def test_draws_and_powers_in_any_dtype_batch_and_device(make):
    """The dtype is kept and autocast changes nothing; an image depends on its generator alone; an empty batch stays
    empty; and tables live on the CPU and follow x, whatever torch's default device ("meta" stands in for a GPU)."""
    cov = make()
    x = normal(2, *cov.event_shape)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        exact = cov.sqrt(x.to(dtype).double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, drawn = cov.sqrt(x.to(dtype)), cov.sample(x.shape, 0, dtype=dtype)
        assert y.dtype == drawn.dtype == dtype
        tolerance = max(torch.finfo(dtype).eps, 1e-6) * exact.abs().max()
        assert (y.double() - exact).abs().max() <= 2 * tolerance
        assert torch.equal(drawn, cov.sample(x.shape, 0, dtype=dtype))
    batch, alone = cov.sample((8, *cov.event_shape), range(8)), cov.sample((1, *cov.event_shape), [7])
    assert torch.allclose(batch[7], alone[0], rtol=0, atol=1e-5)  # a matrix product may round differently
    assert not torch.allclose(batch[7], batch[6], rtol=0, atol=1e-2)
    empty = torch.zeros(0, *cov.event_shape)
    assert cov.sqrt(empty).shape == cov.sample(empty.shape).shape == empty.shape
    assert cov.log_prob(empty).shape == (0,)
    with torch.device("meta"):
        cov = make()
        level = nidiff.schedules.ddpm_linear(10).level(torch.tensor([1, 2], device="cpu"))
        x = cov.sample((2, *cov.event_shape), torch.Generator("cpu").manual_seed(0))
        noisy = nidiff.Process(nidiff.schedules.ddpm_cosine(10), cov).perturb(x, level, cov.inv_sqrt(x))
    assert noisy.device.type == "cpu"
    assert torch.isfinite(noisy).all()


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
    other = nidiff.gaussian_free_field(np.array([8, 6]), 0.75)  # a shape may be of numpy
    assert other.to_config()["shape"] == [8, 6]
    assert torch.equal(other.eigenvalues, nidiff.power_law((8, 6), 1.5).eigenvalues)


def test_on_a_non_square_shape_the_field_is_isotropic_in_pixels():
    """The correlation at lag 1 is the same along a long and a short axis, as far as the short one's length allows."""
    shape, (f, g) = (64, 32), (torch.fft.fftfreq(n, dtype=torch.float64) * n for n in (64, 32))
    k = (f[:, None] ** 2 + g[None] ** 2).sqrt()
    k[0, 0] = 1
    impulse = torch.zeros(shape, dtype=torch.float64)
    impulse[0, 0] = 1
    row = nidiff.gaussian_free_field(shape, 1.0) @ impulse
    assert row[1, 0] == pytest.approx(row[0, 1].item(), rel=0.02)
    wrong = nidiff.Fourier(shape, k**-2) @ impulse  # negative control: |k| in cycles per own side
    assert abs(wrong[1, 0] / wrong[0, 1] - 1) > 0.05


def test_matern_has_the_matern_correlation():
    """ν = ½ in 1-D is exp(−r/ℓ), on a grid much longer than ℓ (the rest is the aliasing of the sampled density)."""
    cov = nidiff.matern((512,), length_scale=12.0, smoothness=0.5)
    lags = torch.arange(1, 40, dtype=torch.float64)
    assert torch.allclose(cov.dense()[0, 1:40], torch.exp(-lags / 12.0), atol=0.02)
    impulse = torch.zeros(128, 128, dtype=torch.float64)
    impulse[0, 0] = 1
    for aliased, neighbours in ((True, math.exp(-0.5)), (False, 0.715)):  # in 2-D, where aliasing is not small
        found = nidiff.matern((128, 128), 2.0, 0.5, aliased=aliased).matmul(impulse)[0, 1]
        assert found == pytest.approx(neighbours, abs=1e-10 if aliased else 1e-3)


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


def test_aliased_matern_is_the_kernel_summed_over_its_images():
    for shape, length, boundary, smoothness in (
        ((9,), 0.7, "periodic", 0.5),
        ((12,), 30.0, "reflecting", 0.5),
        ((5, 4), 0.8, "reflecting", 1.5),
        ((3, 2, 4), 0.4, "periodic", 1.5),
    ):
        exact = wrapped_kernel(shape, length, smoothness, boundary == "reflecting")
        for aliased in (True, False):
            found = nidiff.matern(shape, length, smoothness, boundary=boundary, aliased=aliased).dense()
            assert (found - exact).abs().max() < 1e-9 if aliased else (found - exact).abs().max() > 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_event_has_the_same_bits_in_a_batch_of_any_size(dtype):
    """Wherever it stands: a product of matrices rounds by the number of its rows."""
    for cov in (nidiff.Dense(random_matrix(20)), nidiff.matern((20,), 2.0, boundary="reflecting")):
        x = normal(40, 20).to(dtype)
        whole = cov.sqrt(x)
        for size in (1, 2, 7, 33):
            assert torch.equal(cov.sqrt(x[:size]), whole[:size])
            assert torch.equal(cov.sqrt(x[-size:]), whole[-size:])


def test_aliased_matern_sums_the_density_at_any_smoothness():
    """ℓ = 1/10 of a pixel to 10 pixels: the sum over images by hand, with the integral for those far away."""
    n, count = 8, 20000
    for smoothness, length in ((0.01, 1.0), (0.3, 0.1), (0.3, 10.0), (4.0, 1.0), (20.0, 10.0)):
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


def test_from_data_finds_the_spectrum_the_data_came_from():
    for boundary in ("periodic", "reflecting"):
        truth = nidiff.gaussian_free_field((16, 12), 1.0, boundary=boundary)
        data = truth.sample((3000, 3, 16, 12), 0) + 5.0
        modes, radial = (
            nidiff.from_data(data, average=average, shrinkage=0.0, boundary=boundary) for average in ("modes", "radial")
        )
        assert (modes.eigenvalues / truth.eigenvalues - 1).abs().max() < 0.1
        assert (radial.eigenvalues.log() - truth.eigenvalues.log()).std() < 0.25
        assert torch.allclose(nidiff.from_data(data, shrinkage=1.0).eigenvalues, torch.ones(16, 12).double())


def test_from_data_fits_the_axes_it_is_told_or_that_are_clear():
    for shape, axes, event in (((9, 8), None, (8,)), ((9, 2, 4, 6), None, (4, 6)), ((9, 4, 6), 1, (6,))):
        for data in (normal(*shape), normal(*shape).numpy()):
            assert nidiff.from_data(data, axes).event_shape == event


def test_sums_and_scalings_add_the_matrices():
    a, b = nidiff.gaussian_free_field((4, 5)), nidiff.matern((4, 5), 2.0)
    assert torch.allclose((a + 2 * b).dense(), a.dense() + 2 * b.dense(), atol=1e-12)
    eye = nidiff.Identity((4, 5))
    assert torch.allclose((eye + a).dense(), a.dense() + torch.eye(20), atol=1e-12)
    for white in (eye, nidiff.power_law((4, 5), 0.0)):
        assert torch.allclose((eye + white).dense(), 2 * torch.eye(20, dtype=torch.float64))
    dense = nidiff.Dense(random_matrix(20), (4, 5))
    assert torch.allclose((dense + 0.5 * copy.deepcopy(dense)).dense(), 1.5 * dense.dense(), atol=1e-12)
    assert (a + b).normalized().eigenvalues.mean() == pytest.approx(1.0)
    singular = nidiff.gaussian_free_field((4, 5), zero_mode="zero")
    assert not (singular + eye).is_singular


def test_a_sum_without_a_common_basis_is_refused():
    gff = nidiff.gaussian_free_field((4, 4))
    for a, b in (
        (gff, nidiff.gaussian_free_field((4, 4), boundary="reflecting")),
        (gff, nidiff.gaussian_free_field((7, 7))),
        (nidiff.Dense(random_matrix(4)), nidiff.Dense(random_matrix(4, seed=1))),
        tuple(nidiff.Channels(random_matrix(2, seed), nidiff.Identity((3,))) for seed in (0, 1)),
    ):
        with refused("basis"):
            a + b


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
    "in white noise": lambda: 0.3 * nidiff.Identity((3, 4)) + nidiff.Covariance(VALUES, Haar((3, 4))),
    "between channels": lambda: nidiff.Channels(random_matrix(2), nidiff.Covariance(VALUES, Haar((3, 4)))),
    "in a product": lambda: nidiff.Kronecker(nidiff.ar1(2, 0.5), nidiff.Covariance(VALUES, Haar((3, 4)))),
}


@pytest.mark.parametrize("make", IN_HAAR.values(), ids=IN_HAAR.keys())
def test_a_basis_needs_two_methods(make, tmp_path, monkeypatch):
    """It fulfils the contract; with `arguments` and a name in BASES, saving and loading included."""
    monkeypatch.setitem(BASES, "Haar", Haar)
    check_contract(make(), tmp_path)
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


def test_factors_multiply_also_where_sigma_is_saved_printed_and_put_on_another_grid():
    field = nidiff.gaussian_free_field((4, 6))
    twice = 2.0 * (3.0 * field)
    assert torch.allclose(nidiff.Covariance.from_config(twice.to_config()).eigenvalues, 6 * field.eigenvalues)
    assert repr(twice).startswith("6 * gaussian_free_field(")
    white = 2.0 * (3.0 * nidiff.offset((4, 6)))
    assert torch.allclose(white.at((8, 6)).eigenvalues, 6 * nidiff.offset((8, 6)).eigenvalues)


def test_a_text_is_the_call_it_names():
    for text, cov in {
        "gff": nidiff.gaussian_free_field((6, 8)),
        "gff:gamma=0.5,normalize=false": nidiff.gaussian_free_field((6, 8), 0.5, normalize=False),
        "matern: length_scale=2, boundary=reflecting": nidiff.matern((6, 8), 2, boundary="reflecting"),
        "white": nidiff.Identity((6, 8)),
        "pyramid:num_levels=2,discount=8e-1": nidiff.pyramid((6, 8), 0.8, 2),
        "from_data:average=modes": nidiff.from_data(normal(9, 2, 6, 8), average="modes"),
    }.items():
        found = as_covariance(text, (6, 8), data=lambda: normal(9, 2, 6, 8))
        assert torch.equal(found.dense(), cov.dense())
        assert found.to_config() == cov.to_config()


def test_a_covariance_its_configuration_and_a_folder_that_holds_it_name_it(tmp_path, monkeypatch):
    """In the folder of a scheduler, a model or a run, Σ is a key of the scheduler's configuration."""
    cov = nidiff.Dense(random_matrix(4))
    assert as_covariance(cov) is cov
    assert torch.allclose(as_covariance(describe(cov)).dense(), cov.dense(), atol=1e-12)
    assert as_covariance(nidiff.offset((3,)).to_config()).event_shape == (3,)
    monkeypatch.chdir(tmp_path)
    for name, place in {"bare": "", "model": "scheduler", "run": "model/scheduler"}.items():
        folder = tmp_path / name / place
        save_arrays(cov.tensors(), folder)
        (folder / "scheduler_config.json").write_text(json.dumps({"schedule": "vp", "covariance": cov.to_config()}))
        for path in (tmp_path / name, name, f"./{name}"):
            assert torch.allclose(as_covariance(path).dense(), cov.dense(), atol=1e-12)
        (folder / "covariance.safetensors").unlink()
        with refused("file"):
            nidiff.Covariance.load(name)


def test_saving_again_leaves_the_new_one_whole_and_a_place_that_cannot_be_written_is_named(tmp_path):
    nidiff.Dense(random_matrix(4)).save(tmp_path)
    nidiff.offset((3,)).save(tmp_path)
    assert nidiff.Covariance.load(tmp_path).event_shape == (3,)
    assert {file.name for file in tmp_path.iterdir()} == {"covariance.json", "covariance.safetensors"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(nidiff.InputError):
        nidiff.Identity((4,)).save(tmp_path / "file" / "sigma")
    assert (tmp_path / "file").read_text() == "mine"


# Randomness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 32), (48, 40), (64, 64), (16, 16, 16), (31, 8), (100,)])
def test_periodic_noise_is_the_same_to_the_bit_in_a_batch_of_any_size(shape):
    cov = nidiff.gaussian_free_field(shape)
    batch = cov.sample((8, *shape), generators_from_seeds(range(8)))
    for size in (1, 2, 3, 5):
        part = cov.sample((size, *shape), generators_from_seeds(range(8 - size, 8)))
        assert torch.equal(batch[8 - size :], part)


def test_noise_does_not_depend_on_which_eigenvectors_were_found():
    """Repeated eigenvalues: the eigenvectors are arbitrary and may differ after saving; the noise may not."""
    flat = torch.eye(16, dtype=torch.float64) + 0.2
    for cov in (nidiff.Dense(flat, (4, 4)), nidiff.Channels(flat[:3, :3], nidiff.gaussian_free_field((4, 4)))):
        again = nidiff.Covariance.from_config(cov.to_config(), cov.tensors())
        draws = [c.sample((4, *cov.event_shape), 0, dtype=torch.float64) for c in (cov, again)]
        assert torch.allclose(*draws, rtol=0, atol=1e-10)


# Modes of use ----------------------------------------------------------------------------------------------------


def test_works_under_compile():
    cov = COVARIANCES["channels of gff"]()
    x = normal(2, *cov.event_shape).float()
    compiled = torch.compile(lambda x: cov.sqrt(x) + cov.solve(x), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), cov.sqrt(x) + cov.solve(x), atol=1e-5)


def test_sampling_in_inference_mode_does_not_spoil_training():
    cov = nidiff.gaussian_free_field((8, 8))
    with torch.inference_mode():
        cov.sqrt(torch.zeros(8, 8))
    x = torch.ones(8, 8, requires_grad=True)
    cov.sqrt(x).square().sum().backward()
    assert torch.allclose(x.grad, 2 * cov.matmul(torch.ones(8, 8)), atol=1e-5)


# Bad input -------------------------------------------------------------------------------------------------------

SPECTRUM = torch.ones(4, 4)
BAD = [
    ("shape", lambda: nidiff.Identity(())),
    ("shape", lambda: nidiff.gaussian_free_field((4, -4))),
    ("shape", lambda: nidiff.pyramid((128, 128), exact=True)),
    ("shape", lambda: nidiff.Identity((4, 4)).sample((2, 3))),
    ("shape", lambda: nidiff.Dense(torch.ones(0, 0))),
    ("spectrum", lambda: nidiff.Fourier((4, 5), SPECTRUM)),
    ("spectrum", lambda: nidiff.Fourier((4, 4), 0 * SPECTRUM)),
    ("spectrum", lambda: nidiff.Fourier((4,), torch.tensor([1.0, 2, 3, 4]))),
    ("variances", lambda: nidiff.Diagonal(torch.tensor([1.0, 0.0]))),
    ("matrix", lambda: nidiff.Dense(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))),
    ("matrix", lambda: nidiff.Dense(torch.tensor([[1.0, 2], [2, 1]]))),
    ("matrix", lambda: nidiff.Dense(torch.ones(2, 3))),
    ("matrix", lambda: nidiff.Channels(torch.full((2, 2), float("nan")), nidiff.Identity((2,)))),
    ("vectors", lambda: nidiff.Dense(torch.ones(2, 2), eigenvalues=torch.ones(2))),
    ("zero_mode", lambda: nidiff.gaussian_free_field((4, 4), zero_mode="two")),
    ("gamma", lambda: nidiff.gaussian_free_field((4, 4), float("nan"))),
    ("gamma", lambda: as_covariance("gff:gamma=big", (4,))),
    ("length_scale", lambda: nidiff.matern((4, 4), -1.0)),
    ("length_scale", lambda: nidiff.matern((4,), 1e200, aliased=True)),
    ("length_scale", lambda: nidiff.matern((4, 4), (4, 8, 2))),
    ("ratio", lambda: nidiff.pyramid((8, 8), ratio=1.0)),
    ("ratio", lambda: nidiff.pyramid((8, 8), ratio=(4, 2))),
    ("ratio", lambda: nidiff.pyramid((8, 8), ratio=(2, 3, 4))),
    ("data", lambda: nidiff.from_data(torch.ones(1, 4, 4), 2)),
    ("data", lambda: nidiff.from_data(torch.ones(3, 4, 4))),
    ("data", lambda: nidiff.from_data(torch.full((3, 4, 4), float("nan")), 2)),
    ("event_axes", lambda: nidiff.from_data(normal(9, 4, 4), 3)),
    ("shrinkage", lambda: nidiff.from_data(torch.ones(3, 4, 4), 2, shrinkage=2.0)),
    ("x", lambda: nidiff.Identity((4, 4)).sqrt(torch.ones(4, 5))),
    ("x", lambda: nidiff.Identity((2,)).sqrt(torch.ones(2, dtype=torch.int64))),
    ("factor", lambda: -1.0 * nidiff.Identity((2,))),
    ('config["covariance"]', lambda: nidiff.Covariance.from_config({"covariance": "Wavelet"})),
    ("tensors", lambda: nidiff.Covariance.from_config(nidiff.Diagonal(torch.ones(2)).to_config())),
    ("eigenvalues", lambda: nidiff.offset((2,)).with_eigenvalues([1, -1])),
    ("covariance", lambda: as_covariance("gaussian_fre_field", (4,))),
    ("covariance", lambda: as_covariance("gff")),
    ("covariance", lambda: as_covariance("from_data", (4,))),
    ("covariance", lambda: as_covariance(3.0)),
    ("covariance", lambda: as_covariance("matern", (4,))),
    ("covariance", lambda: nidiff.gaussian_free_field((32, 32), 30.0).sqrt(torch.ones(32, 32, dtype=torch.float64))),
    ("covariance", lambda: as_covariance("gff:alpha=1", (4,))),
    ("folder", lambda: nidiff.Covariance.load("nowhere")),
]


def test_bad_input_is_refused_by_the_name_of_the_argument():
    for argument, call in BAD:
        with refused(argument):
            call()


def test_float32_refuses_a_field_it_would_lose_and_float64_keeps_it():
    cov = nidiff.gaussian_free_field((32, 32), gamma=6.0)
    with refused("covariance"):
        cov.sqrt(torch.zeros(32, 32))
    with refused("covariance"):
        cov.sample((2, 32, 32))
    x = normal(32, 32)
    assert torch.allclose(cov.inv_sqrt(cov.sqrt(x)), x, atol=1e-6)


def test_a_length_is_in_the_units_of_the_spacing():
    """Pixels that are twice as far apart see half the length, axis by axis."""
    assert torch.allclose(nidiff.matern((8, 6), 3.0, spacing=2.0).dense(), nidiff.matern((8, 6), 1.5).dense())
    spaced = nidiff.matern((8, 6), 3.0, spacing=(2.0, 1.0))
    assert torch.allclose(spaced.dense(), nidiff.matern((8, 6), (1.5, 3.0)).dense())
