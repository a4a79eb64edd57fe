"""What the paper misprints: each test shows the printed formula failing and ours holding. See docs/errata.md.

Everything is exact linear algebra on small grids: a map that is linear in white noise is applied to the identity, and
covariances are products of the matrices that come out. No formula is checked by sampling.
"""

import contextlib
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from problems import Unconditional, refused
from torch import Tensor

import nidiff
from nidiff import Denoiser, Identity, Level, Process, denoising_loss, gaussian_free_field, sample
from nidiff.design.distance import max_whitened_distance
from nidiff.design.scales import CLASSIC_RATIO, num_levels, overlap, overlap_ratio
from nidiff.diffusion.target import TARGETS
from nidiff.sampling.ancestral import ancestral, ddim, jump_variances, mix
from nidiff.sampling.annealing import cas_interval, langevin_epsilon, variance_ratio
from nidiff.sampling.langevin import als, best_eta, cas
from nidiff.sampling.step import Chain
from nidiff.schedules import ddpm_linear, smld_geometric, ve

# Listed in the source of the paper for n = 2, 4, ..., 128: the "standard deviation σ_N at resolution N".
PAPER_SIGMA_N = {
    2: 0.39528470752104744, 4: 0.17030533460540237, 8: 0.053976619959778704, 16: 0.015784561822114067,
    32: 0.004442407825782781, 64: 0.0012219552979003889, 128: 0.00033098344651100604,
}  # fmt: skip
SHAPE, SIZE = (4, 4), 16
EYE, ZEROS = torch.eye(SIZE, dtype=torch.float64), torch.zeros(SIZE, *SHAPE, dtype=torch.float64)
FIELD, LARGE = gaussian_free_field(SHAPE, 1.0), gaussian_free_field((32, 32), 1.0)
SIGMA = FIELD.dense()
PROCESS = Process(ddpm_linear(1000), FIELD)
SMLD = Process(smld_geometric(207, 20.0, 0.01), FIELD)  # the paper's 207 levels from 20 to 0.01


def close(a: Tensor, b: Tensor | float, tolerance: float = 1e-10) -> bool:
    return bool((a - b).abs().max() <= tolerance)


def index(n: int, zero_mode: float) -> Tensor:
    """|k| of the n × n DFT with the centred index fftfreq(n) · n, and the given value at k = 0."""
    f = torch.fft.fftfreq(n, dtype=torch.float64) * n
    k = (f[:, None].square() + f[None, :].square()).sqrt()
    k[0, 0] = zero_mode
    return k


def dft(n: int) -> Tensor:
    """W of the paper: the N × N matrix of the two-dimensional DFT, numpy's normalisation."""
    one = torch.fft.fft(torch.eye(n, dtype=torch.complex128))
    return torch.kron(one, one)


def filtered(n: int, gain: Tensor) -> Tensor:
    """W⁻¹ diag(gain) W, complex."""
    w = dft(n)
    return torch.linalg.solve(w, gain.flatten().to(w.dtype)[:, None] * w)


def paper_sigma(n: int, zero_mode: float = math.inf) -> float:
    """σ_N = √(Σ_k |k|⁻²) / N. An infinite |k₀₀| leaves the mean of the field out, as the listed constants do."""
    return math.sqrt(index(n, zero_mode).pow(-2).sum().item()) / n**2


def data_covariance() -> Tensor:
    """Positive definite, and does not commute with the field's Σ."""
    root = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 4
    matrix = root @ root.T + 0.1 * EYE
    assert (matrix @ SIGMA - SIGMA @ matrix).abs().max() > 0.05
    return matrix


def vectors(seed: int, count: int = 3) -> Tensor:
    return torch.randn(count, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vp_level(remaining: float) -> Level:
    """The level of a given ᾱ."""
    return Level(math.sqrt(remaining), math.sqrt(1 - remaining), 0)


def as_matrix(linear: Callable[[Tensor], Tensor]) -> Tensor:
    """The matrix of a linear map of images [B, 4, 4]: its columns are the images of the unit vectors."""
    return linear(EYE.reshape(SIZE, *SHAPE)).reshape(SIZE, SIZE).T


def test_every_test_that_the_documentation_names_exists():
    here = Path(__file__).parent
    for page in ("maths.md", "errata.md"):
        named = re.findall(r"tests/(\w+\.py)::(\w+)", (here.parent / "docs" / page).read_text())
        assert len(named) > 20
        assert [(file, name) for file, name in named if f"def {name}(" not in (here / file).read_text()] == []


# The Gaussian free field ----------------------------------------------------------------------------------------------


def test_e01_sigma_n_is_a_fourier_domain_constant_without_the_mean():
    for n, listed in PAPER_SIGMA_N.items():
        assert listed == pytest.approx(paper_sigma(n), rel=1e-7)
        assert paper_sigma(n, zero_mode=1.0) > 1.015 * listed  # so the mean of the field was left out, not set to 1

        # Printed: σ_N is the standard deviation of W⁻¹ K⁻¹ W z. It is not: that is √N σ_N.
        raw = gaussian_free_field((n, n), 1.0, zero_mode="zero", normalize=False).marginal_variance.sqrt()[0, 0].item()
        assert raw > 1.9 * listed
        assert raw == pytest.approx(n * listed, rel=1e-7)

        # So unit variance divides by √N σ_N, and the mode with |k| = 1 shows it.
        field = gaussian_free_field((n, n), 1.0, zero_mode="zero")
        assert field.eigenvalues[0, 1].sqrt().item() == pytest.approx(1 / (n * listed), rel=1e-7)


@pytest.mark.parametrize("n", [4, 5, 8])
def test_e02_pixel_recipe_with_the_fourier_constant_is_off_by_sqrt_n(n):
    size, sigma_n = n**2, paper_sigma(n)
    field = gaussian_free_field((n, n), 1.0, zero_mode="zero")

    printed = filtered(n, index(n, math.inf).reciprocal()).real / sigma_n  # eq. 73: √Σ
    assert close((printed @ printed.T).diagonal(), size)
    unit = torch.eye(size, dtype=torch.float64).reshape(size, n, n)
    root = field.sqrt(unit).reshape(size, size)
    assert close(root, printed / n)
    assert close((root @ root.T).diagonal(), 1.0)

    # eq. 75 as a whitener: what should be white on the N − 1 modes of the field has variance 1/N there.
    whitener = filtered(n, index(n, 0.0)).real * sigma_n
    white = whitener @ field.dense() @ whitener.T
    assert white.trace().item() == pytest.approx((size - 1) / size, abs=1e-10)


@pytest.mark.parametrize("n", [2, 4, 5, 8])
def test_e03_the_factor_sqrt_2n_halves_the_variance(n):
    size, sigma_n = n**2, paper_sigma(n)
    raw = filtered(n, index(n, math.inf).pow(-2)).real  # Re(W⁻¹ K⁻² W)
    field = gaussian_free_field((n, n), 1.0, zero_mode="zero")

    printed = raw / (2 * size * sigma_n**2)  # eq. 27, 78
    assert close(printed.diagonal(), 0.5)
    assert close(field.dense().diagonal(), 1.0)
    assert close(field.dense(), raw / (size * sigma_n**2))


def test_e04_without_the_zero_mode_the_mean_is_never_noised_and_there_is_no_density():
    shape = (8, 8)
    singular, regular = gaussian_free_field(shape, 1.0, zero_mode="zero"), gaussian_free_field(shape, 1.0)
    assert torch.linalg.matrix_rank(singular.dense()).item() == 63
    assert torch.linalg.matrix_rank(regular.dense()).item() == 64
    x = torch.ones(1, *shape, dtype=torch.float64)
    uses = (singular.solve, singular.inv_sqrt, singular.log_prob, lambda _: singular.logdet())
    for use in (*uses, lambda _: singular.distribution(), lambda _: Process(ddpm_linear(10), singular)):
        with refused("covariance"):
            use(x)

    # Printed chain (eq. 58) with a network whose output has a mean: every image still ends with mean 0.
    def net(x: Tensor, label: Tensor) -> Tensor:
        return torch.tanh(x) + 0.3

    schedule, source = ddpm_linear(50), torch.Generator().manual_seed(0)
    x = singular.sample((4, *shape), source, dtype=torch.float64)
    for here, there in pairwise(schedule.levels(50)):
        beta, posterior = jump_variances(here, there)
        x = (x - beta / here.sigma * singular.sqrt(net(x, x))) / (1 - beta).root()
        x = x + posterior.root() * singular.sample(x.shape, source, dtype=torch.float64)
    assert x.std() > 0.1
    assert x.mean((1, 2)).abs().max() < 1e-12

    ours = sample(Denoiser(net, Process(schedule, regular)), (4, *shape), generator=range(4), dtype=torch.float64)
    assert ours.mean((1, 2)).abs().min() > 0.01


def test_e05_complex_noise_needs_the_conjugate_transpose():
    n, eye = 4, EYE.to(torch.complex128)
    # Unit vectors times the four phases: a finite law with the second moments of CN(0, I) exactly (eq. 65, 66).
    z = torch.cat([eye, 1j * eye, -eye, -1j * eye], 1) / 2
    g = filtered(n, index(n, 1.0).reciprocal()) @ z
    assert close((z @ z.mH).abs(), EYE)
    assert (g @ g.mT).abs().max() < 1e-12  # printed: E[g gᵀ] with E[z zᵀ] = I. It vanishes.
    raw = gaussian_free_field((n, n), 1.0, normalize=False)
    assert close((g @ g.mH).real, raw.dense())

    # eq. 72: "σ_N² = Var[Σ_N]", a variance of a matrix. Of its entries, it is 85 % too small; the diagonal is meant.
    common = index(n, 1.0).pow(-2).mean().item()
    assert raw.dense().var().item() < 0.2 * common
    assert close(raw.marginal_variance, common)


@pytest.mark.parametrize("n", [2, 4, 5, 8])
def test_e06_the_root_is_real_and_symmetric_only_for_the_centred_index(n):
    root = filtered(n, index(n, 1.0).reciprocal())
    assert root.imag.abs().max() < 1e-14
    assert close(root, root.mT)
    scale = index(n, 1.0).pow(-2).mean().sqrt().item()
    field = gaussian_free_field((n, n), 1.0)
    columns = field.sqrt(torch.eye(n * n, dtype=torch.float64).reshape(-1, n, n)).reshape(n * n, n * n)
    assert close(columns, root.real / scale)  # real z is enough: Re(M (a + ib)) = M a


def test_e06_the_uncentred_index_has_no_real_root():
    n, line = 8, torch.arange(8, dtype=torch.float64)
    k = (line[:, None].square() + line[None, :].square()).sqrt()
    k[0, 0] = 1.0
    root, square = filtered(n, k.reciprocal()), filtered(n, k.pow(-2)).real
    assert root.imag.abs().max() > 0.04
    assert torch.linalg.matrix_norm(root.real @ root.real.T - square) > 0.25 * torch.linalg.matrix_norm(square)
    with pytest.raises(nidiff.InputError, match="not even"):
        nidiff.Fourier((n, n), k.pow(-2))


def test_e07_the_inverse_transform_returns_the_real_part_only():
    n, z = 8, torch.randn(64, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    factor = math.sqrt(2) * n * paper_sigma(n, zero_mode=1.0)
    g = (filtered(n, index(n, 1.0).reciprocal()) @ z).real / factor  # eq. 68, and its claimed inverse
    back = (filtered(n, index(n, 1.0)) @ g.to(z.dtype)).real * factor
    assert torch.linalg.vector_norm(back - z) > 0.5 * torch.linalg.vector_norm(z)
    assert close(back, z.real)

    field, real = gaussian_free_field((n, n), 1.0), z.real.reshape(n, n)  # real noise, which comes back
    assert close(field.sqrt(real).flatten(), math.sqrt(2) * g)
    assert close(field.inv_sqrt(field.sqrt(real)), real)


def test_e08_a_scalar_leaves_a_determinant_with_the_power_n():
    for n, printed_value, right, unit in (
        (2, -0.26199, -1.46581, -0.0795), (4, -6.85155, -7.44528, -1.9001), (8, -105.391, -38.013, -15.8322),
    ):  # fmt: skip
        size, k = n**2, index(n, 1.0)
        factor = 1 / (math.sqrt(2 * size) * paper_sigma(n, zero_mode=1.0))
        exact = torch.linalg.slogdet(filtered(n, k.reciprocal()).real * factor).logabsdet.item()
        printed = factor * -k.log().sum().item()  # after eq. 81
        assert printed == pytest.approx(printed_value, rel=1e-4)
        assert exact == pytest.approx(right, rel=1e-4)
        assert size * math.log(factor) - k.log().sum().item() == pytest.approx(exact, abs=1e-10)
        assert gaussian_free_field((n, n), 1.0).logdet() / 2 == pytest.approx(unit, rel=1e-3)


def test_e09_the_spectrum_of_the_field():
    for n, gamma, largest, smallest in (
        (8, 1.0, 2.2245, 0.3932), (8, 2.0, 3.0543, 0.0954), (28, 1.0, 6.1315, 0.3097), (32, 0.5, 3.0527, 0.6417),
        (32, 1.0, 6.8704, 0.3036), (32, 2.0, 12.080, 0.02360), (64, 1.0, 12.539, 0.2771),
    ):  # fmt: skip
        field = gaussian_free_field((n, n), gamma)
        roots = field.eigenvalues.sqrt()
        assert roots.max().item() == pytest.approx(largest, rel=1e-3)
        assert roots.min().item() == pytest.approx(smallest, rel=2e-3)
        odd = gaussian_free_field((n + 1, n + 1), gamma)  # the highest index of an odd side is (n − 1)/2
        for each in (field, odd):
            assert each.condition_number == pytest.approx((n / math.sqrt(2)) ** (2 * gamma), rel=1e-10)


def test_e09_gamma_zero_is_white_and_neighbours_correlate_more_as_gamma_grows():
    assert close(gaussian_free_field(SHAPE, 0.0).dense(), EYE)
    neighbour = [gaussian_free_field((8, 8), gamma).dense()[0, 1].item() for gamma in (0.0, 0.5, 1.0, 2.0)]
    assert all(b > a + 0.1 for a, b in pairwise(neighbour))


# DDPM and NI-DDPM -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["field", "white"])
def test_e10_the_expected_denoised_sample_divides_by_the_signal(noise):
    cov = FIELD if noise == "field" else Identity(SHAPE)
    mean, spread, x = vectors(1, 1), data_covariance(), vectors(2)
    images = x.reshape(-1, *SHAPE)
    for remaining, error in ((0.9, 0.01), (0.5, 0.05), (0.1, 0.05), (4e-5, 0.05), (None, 0.0)):  # None: signal 1
        level = Level(1.0, 3.0, 0) if remaining is None else vp_level(remaining)
        precision = torch.linalg.inv(level.signal**2 * spread + level.sigma**2 * cov.dense())
        centred = x - level.signal * mean
        exact = mean + level.signal * (centred @ precision @ spread)  # E[x0 | x]
        score = -(centred @ precision).reshape(images.shape)
        printed = images + level.sigma**2 * cov.matmul(score)  # eq. 9, 23, 43, 63; right for signal 1, eq. 91, 103
        off = (printed.flatten(1) - exact).abs().max()
        assert off < 1e-9 if remaining is None else off > error

        denoiser = Denoiser(lambda x, label, score=score: score, Process(ddpm_linear(1000), cov), target="score")
        assert close(denoiser(images, level).flatten(1), exact)
        assert close(denoiser.score(images, level), score)
        eps = denoiser.eps(images, level)
        assert close((images - level.sigma * cov.sqrt(eps)) / level.signal, exact.reshape(images.shape))  # eq. 17


def test_e11_the_network_must_see_coloured_noise():
    process, cov, level = PROCESS, FIELD, vp_level(0.5)

    # x0 ~ N(0, I). Printed input √ᾱ x0 + √(1−ᾱ) eps (eq. 12) is N(0, I) itself; the regression on it is −Σ^-½.
    optimum = -as_matrix(cov.inv_sqrt)
    own, ours = -EYE, -torch.linalg.inv(level.signal**2 * EYE + level.sigma**2 * cov.dense())
    for score in (own, ours):
        assert torch.linalg.matrix_norm(optimum - score) > 0.1 * torch.linalg.matrix_norm(score)

    # With `perturb` and the score target, for data whose covariance does not commute with Σ, it is the score exactly.
    spread = data_covariance()
    of_x0 = as_matrix(lambda x0: process.perturb(x0, level, ZEROS))
    of_eps = as_matrix(lambda eps: process.perturb(ZEROS, level, eps))
    target = as_matrix(lambda eps: TARGETS["score"].encode(ZEROS, eps, level, cov))
    marginal = of_x0 @ spread @ of_x0.T + of_eps @ of_eps.T
    regression = target @ of_eps.T @ torch.linalg.inv(marginal)
    assert close(regression, -torch.linalg.inv(level.signal**2 * spread + level.sigma**2 * cov.dense()))


def test_e12_the_mean_square_of_the_score_is_a_trace():
    process, inverse = PROCESS, torch.linalg.inv(SIGMA)

    def score_at(level: Level) -> Tensor:
        return as_matrix(lambda eps: process.conditional_score(process.perturb(ZEROS, level, eps), ZEROS, level))

    score = score_at(vp_level(0.5))
    mean_square = score.square().sum().item()  # E‖A eps‖² = ‖A‖²
    assert mean_square == pytest.approx(inverse.trace().item() / 0.5, rel=1e-12)
    assert mean_square == pytest.approx(51.603, abs=1e-3)
    assert close(score @ score.T, inverse / 0.5)

    assert 0.1 * mean_square > 1 / 0.5  # eq. 33, dimension left out
    assert 0.7 * mean_square > SIZE / 0.5  # the same with it: isotropic
    printed = inverse * SIZE / 0.5  # eq. 13: a matrix, and 16 times E[s sᵀ]
    assert torch.linalg.matrix_norm(printed) == pytest.approx(16 * torch.linalg.matrix_norm(score @ score.T))
    score = score_at(Level(1.0, 3.0, 0))  # eq. 85, 97: the same with signal 1
    assert close(score @ score.T, inverse / 9)


def test_e13_the_weight_stands_inside_the_norm():
    process, level = PROCESS, vp_level(0.5)
    cov, eps = process.covariance, vectors(3, SIZE).reshape(-1, *SHAPE)
    error = EYE.reshape(-1, *SHAPE)  # one network per unit vector, wrong by it
    score = -cov.inv_sqrt(eps + error) / level.sigma  # what a score network says when it means eps + error (eq. 15)
    denoiser = Denoiser(lambda x, label: score, process, target="score")

    def loss(weighting: str) -> Tensor:
        return denoising_loss(denoiser, ZEROS, level=level, eps=eps, weighting=weighting)

    printed = level.sigma**2 * cov.dense() * loss("target").mean()  # eq. 14: a matrix times a number is no loss
    assert printed.shape == (SIZE, SIZE)
    right = error.square().flatten(1).mean(1)
    ratio = printed.diagonal().mean() / right.mean()  # read as its mean diagonal, it is off by the mean of 1/λ
    assert ratio.item() == pytest.approx(cov.eigenvalues.reciprocal().mean().item(), rel=1e-10)
    assert ratio > 1.6
    assert close(loss("eps"), right)


def test_e14_one_symbol_for_two_roots_holds_only_for_the_symmetric_one():
    process, level, cov, eps = PROCESS, vp_level(0.5), SIGMA, vectors(6, 1)[0]
    factor = torch.linalg.cholesky(cov)
    exact = -torch.linalg.solve(cov, factor @ eps) / level.sigma  # x − signal x0 = sigma L eps
    printed = -torch.linalg.solve(factor, eps) / level.sigma  # eq. 11 with √Σ⁻¹ = (√Σ)⁻¹, as eq. 48 needs
    assert torch.linalg.vector_norm(printed - exact) > 0.3 * torch.linalg.vector_norm(exact)
    assert close(-torch.linalg.solve(factor.T, eps) / level.sigma, exact)

    image, zero = eps.reshape(1, *SHAPE), torch.zeros(1, *SHAPE, dtype=torch.float64)
    score = process.conditional_score(process.perturb(zero, level, image), zero, level)
    assert close(score, -process.covariance.inv_sqrt(image) / level.sigma)


def test_e15_the_normalising_constant_has_the_dimension_as_power():
    level, cov, x, x0 = vp_level(0.5), FIELD, vectors(7), vectors(8)
    variance = float(level.sigma) ** 2
    exact = torch.distributions.MultivariateNormal(level.signal * x0, variance * cov.dense()).log_prob(x)
    residual = (x - level.signal * x0).reshape(-1, *SHAPE)
    quadratic = 0.5 * cov.inv_sqrt(residual).square().flatten(1).sum(1) / variance
    printed = -0.5 * (SIZE * math.log(2 * math.pi) + math.log(variance) + cov.logdet()) - quadratic
    assert close(exact - printed, -(SIZE - 1) / 2 * math.log(variance))  # 5.2 nats
    assert (exact - printed).min() > 5
    assert close((variance * cov).log_prob(residual), exact)


def test_e16_the_posterior_variance_has_the_cumulative_product():
    beta, before = 0.02, 0.6
    after = before * (1 - beta)
    here, there = vp_level(after), vp_level(before)
    right = (1 - before) / (1 - after) * beta
    printed = (1 - before) * beta / (beta + 1 - beta - (1 - beta))  # α_t = 1 − β for ᾱ_t
    assert printed / right == pytest.approx(20.6, abs=0.01)
    assert tuple(map(float, jump_variances(here, there))) == pytest.approx((beta, right), rel=1e-12)


def test_e17_each_reverse_variance_is_exact_for_one_kind_of_data():
    schedule, cov = ddpm_linear(50), SIGMA
    here, there = schedule.level(30), schedule.level(29)
    beta, posterior = map(float, jump_variances(here, there))
    step = math.sqrt(1 - beta)
    assert posterior < 0.95 * beta

    def reverse_covariance(spread: Tensor) -> Tensor:
        """Cov[x' | x] of the chain when the data are N(·, spread)."""
        old, new = (level.signal**2 * spread + level.sigma**2 * cov for level in (here, there))
        return new - step**2 * new @ torch.linalg.solve(old, new)

    assert close(reverse_covariance(torch.zeros_like(cov)), posterior * cov)  # one image: β̃
    assert close(reverse_covariance(cov), beta * cov)  # x0 ~ N(0, Σ): β
    assert not close(reverse_covariance(cov), posterior * cov, 1e-4)
    assert not close(reverse_covariance(torch.zeros_like(cov)), beta * cov, 1e-4)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_e19_ddim_keeps_the_marginals_for_every_eta(eta):
    process, cov = PROCESS, SIGMA
    here, there = process.schedule.level(700), process.schedule.level(400)

    def moved(x: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
        return ddim(Chain(Denoiser(lambda x, label: x, process), lambda: noise), x, x0, here, there, eta=eta)

    of_x = as_matrix(lambda x: moved(x, ZEROS, ZEROS))
    of_x0 = as_matrix(lambda x0: moved(ZEROS, x0, ZEROS))
    of_noise = as_matrix(lambda eps: moved(ZEROS, ZEROS, process.covariance.sqrt(eps)))
    spread = here.sigma**2 * of_x @ cov @ of_x.T + of_noise @ of_noise.T
    assert close(spread, there.sigma**2 * cov)
    assert close(here.signal * of_x + of_x0, there.signal * EYE)

    # The amount of fresh noise in ᾱ, and why the mean of eq. 20, which has none, cannot be kept when there is some.
    ratio = there.sigma / here.sigma * (1 - (here.signal / there.signal) ** 2).root()
    assert of_noise.square().sum().item() == pytest.approx((eta * float(ratio)) ** 2 * SIZE, abs=1e-12)
    if eta:
        assert (there.sigma**2 * cov + of_noise @ of_noise.T - spread).diagonal().min() > 0.05


# SMLD and NI-SMLD -----------------------------------------------------------------------------------------------------


def test_e22_the_initial_sample_has_the_square_of_the_largest_sigma():
    top, process = 20.0, SMLD
    cov, x, zero = process.covariance, 20 * vectors(17), torch.zeros(SIZE, dtype=torch.float64)
    right = torch.distributions.MultivariateNormal(zero, top**2 * cov.dense())
    printed = torch.distributions.MultivariateNormal(zero, top * as_matrix(cov.sqrt))  # N(0, σ_max √Σ)
    assert close(process.prior_log_prob(x.reshape(-1, *SHAPE)), right.log_prob(x))
    assert (printed.log_prob(x) - right.log_prob(x)).abs().min() > 10
    pixel = math.sqrt(top * LARGE.eigenvalues.sqrt().mean().item())
    assert pixel == pytest.approx(3.84, abs=0.005)


def test_e23_without_sigma_before_the_score_langevin_leaves_the_law():
    # Data whose covariance does not commute with Σ, started in the law of the level: what one update changes.
    process, spread = SMLD, data_covariance()
    level, below = process.schedule.level(116), process.schedule.level(115)
    cov = process.covariance.dense()
    law = spread + level.sigma**2 * cov
    denoiser = Denoiser(
        lambda x, label: (spread @ torch.linalg.solve(law, x.flatten(1).T)).T.reshape(x.shape), process, target="x0"
    )

    def change(preconditioned: bool, eta: float) -> Tensor:
        def moved(x: Tensor, noise: Tensor) -> Tensor:
            options = {"epsilon": eta * 0.01**2, "steps_per_level": 1, "preconditioned": preconditioned}
            return als(Chain(denoiser, lambda: noise), x, denoiser(x, level), level, below, **options)

        of_x = as_matrix(lambda x: moved(x, ZEROS))
        of_noise = as_matrix(lambda eps: moved(ZEROS, process.covariance.sqrt(eps)))
        return (of_x @ law @ of_x.T + of_noise @ of_noise.T - law) / eta

    eta = 1e-5
    wrong = 2 * level.sigma**2 * (cov - EYE)  # score without Σ, noise with it (eq. 101)
    assert wrong.abs().max() > 0.25
    assert close(change(False, eta), wrong, 1e-4)
    assert close(change(True, eta), 0.0, 1e-4)


def test_e24_beta_of_cas_is_right_for_the_preconditioned_update_only():
    values, eta = LARGE.eigenvalues, 0.062
    # Printed: each diagonal element of (I − ηΣ⁻¹) Σ (I − ηΣ⁻¹) is (1 − η)².
    for step, diagonal in ((eta, 0.8899), (0.5, 0.9057)):
        exact = ((1 - step / values).square() * values).mean().item()
        assert exact == pytest.approx(diagonal, abs=1e-4)
        assert exact > (1 - step) ** 2 + 0.01
    inverse = torch.linalg.inv(SIGMA)
    pull = EYE - eta * inverse
    assert close((pull @ SIGMA @ pull).diagonal(), 1 - 2 * eta + eta**2 * inverse.trace() / SIZE)

    # β² = 1 − ratio² (1 − η)², and what one step makes of every mode, over its target.
    beta_squared = 1 - (CLASSIC_RATIO * (1 - eta)) ** 2
    printed = (CLASSIC_RATIO * (1 - eta / values)).square() + beta_squared
    assert printed.min() < 0.17
    assert printed.max() > 1.12
    wanted = 1 - (CLASSIC_RATIO * (1 - eta / values)).square()  # the β² each mode would need: no scalar
    assert wanted.min() < 0
    assert wanted.max() > 0.8
    upside_down = (CLASSIC_RATIO * (1 - eta)) ** 2 + 1 - ((1 - eta) / CLASSIC_RATIO) ** 2  # σ_next/σ for the ratio
    assert upside_down == pytest.approx(1.130, abs=1e-3)


def test_e24_the_papers_epsilons_make_beta_imaginary():
    process, ratio = SMLD, 1.0375867506951884
    denoiser, (low, high) = Denoiser(lambda x, label: x, process), cas_interval(ratio)
    for epsilon, beta_squared in ((3.1e-7, -0.0699), (2.0e-6, -0.0340), (6.2e-6, 0.0528)):
        eta = epsilon / 0.01**2
        assert 1 - (ratio * (1 - eta)) ** 2 == pytest.approx(beta_squared, abs=1e-4)
        assert (low <= eta <= high) == (beta_squared > 0)
        given = {"sampler": "cas", "spacing": [206, 205], "generator": [0], "epsilon": epsilon}
        with refused("epsilon") if beta_squared < 0 else contextlib.nullcontext():
            assert sample(denoiser, (1, *SHAPE), **given).isfinite().all()


def test_e24_the_signal_to_noise_ratio_of_cas_is_that_of_the_preconditioned_update():
    process, eta = SMLD, 0.062
    here, there = process.schedule.level(100), process.schedule.level(99)
    cov, ratio = process.covariance, float(here.sigma) / float(there.sigma)

    def signal_to_noise(preconditioned: bool) -> float:
        """Root mean squares over x at its level: how far a step of CAS moves x, over the noise that it adds."""

        def moved(x: Tensor, noise: Tensor) -> Tensor:
            chain = Chain(Denoiser(lambda x, label: 0 * x, process, target="x0"), lambda: noise)
            return cas(chain, x, 0 * x, here, there, epsilon=eta * 0.01**2, preconditioned=preconditioned)

        drift = as_matrix(lambda eps: moved(here.sigma * cov.sqrt(eps), ZEROS) - here.sigma * cov.sqrt(eps))
        return (drift.norm() / as_matrix(lambda eps: moved(ZEROS, cov.sqrt(eps))).norm()).item()

    right = eta * ratio / math.sqrt(1 - (ratio * (1 - eta)) ** 2)  # ηγ/β
    assert signal_to_noise(True) == pytest.approx(right, rel=1e-10)
    plain = cov.eigenvalues.reciprocal().mean().sqrt().item()  # what the missing Σ makes of it
    assert plain > 1.2
    assert signal_to_noise(False) == pytest.approx(plain * right, rel=1e-10)
    assert LARGE.eigenvalues.reciprocal().mean().sqrt().item() == pytest.approx(1.90, abs=0.005)


def test_e27_the_ve_increments_have_no_further_time_step():
    process = Process(ve(1001, 20.0, 0.01), FIELD)
    variance = process.schedule.sigma.square()
    assert close(process.schedule.signal, 1.0, 0.0)  # the mean stays where it is
    increments, step = variance.diff(), 1 / 1000
    printed = (increments * step).sum().item()  # √((σ²(t+Δt) − σ²(t)) Δt), squared and summed
    assert printed == pytest.approx(0.4, rel=1e-3)
    assert increments.sum().item() == pytest.approx(400, rel=1e-3)

    # dCov/dt = g² Σ, f = 0 (midpoints).
    times = ((process.schedule.time[1:] + process.schedule.time[:-1]) / 2).tolist()
    rates = [tuple(map(float, process.coefficients(time))) for time in times]
    assert all(f == 0 for f, _ in rates)
    assert sum(g2 for _, g2 in rates) * step == pytest.approx(variance[-1].item(), rel=1e-4)


def test_e29_the_bound_holds_in_the_whitened_distance():
    cov = nidiff.Dense(torch.tensor([[2.0, 0.7], [0.7, 0.5]], dtype=torch.float64))
    sigma, line = 1.5, torch.linspace(-16.0, 16.0, 161, dtype=torch.float64)
    points, area = torch.cartesian_prod(line, line), (line[1] - line[0]).item() ** 2

    def shared_and_bound(distance: float) -> tuple[float, float]:
        """∫ p q/(p + q) by quadrature and ½ exp(−d²/8σ²), for two images a whitened distance d = σ · distance apart."""
        gap = sigma * distance * cov.sqrt(torch.tensor([[0.6, -0.8]], dtype=torch.float64))
        found = max_whitened_distance(torch.cat([gap, torch.zeros_like(gap)]), cov).distance
        assert found == pytest.approx(sigma * distance, rel=1e-6)
        bound = 0.5 * math.exp(-((found / sigma) ** 2) / 8)
        p, q = (cov.log_prob((points + sign * gap / 2) / sigma) - 2 * math.log(sigma) for sign in (1, -1))
        assert 0.5 * ((p + q) / 2).exp().sum().item() * area == pytest.approx(bound, rel=1e-8)  # the geometric mean
        euclidean = 0.5 * math.exp(-((gap.norm().item() / sigma) ** 2) / 8)
        assert abs(euclidean - bound) > 0.02 * distance**2
        return (p.exp() * torch.sigmoid(q - p)).sum().item() * area, bound

    shared, bounds = zip(*[shared_and_bound(distance) for distance in (2.0, 1.0, 0.5)], strict=True)
    assert bounds == pytest.approx((0.3033, 0.4412, 0.4846), abs=1e-4)
    assert all(share < bound for share, bound in zip(shared, bounds, strict=True))
    # "d²/σ² ≈ 1" does not follow: what is shared passes that point like any other on its way to ½.
    assert shared == pytest.approx((0.2248, 0.3980, 0.4705), abs=1e-4)


@pytest.mark.parametrize("n", [4, 5, 8])
def test_e29_the_last_lines_lack_sqrt_n(n):
    images = torch.randn(5, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    whitener = filtered(n, index(n, 1.0)).real * paper_sigma(n, zero_mode=1.0)  # σ_N Re(W⁻¹ K W)
    printed = torch.nn.functional.pdist(images.flatten(1) @ whitener.T).max().item()
    ours = max_whitened_distance(images, gaussian_free_field((n, n), 1.0)).distance
    dense = torch.linalg.cholesky(gaussian_free_field((n, n), 1.0).dense())
    exact = torch.nn.functional.pdist(torch.linalg.solve_triangular(dense, images.flatten(1).T, upper=False).T).max()
    assert ours == pytest.approx(exact.item(), rel=1e-6)
    assert ours == pytest.approx(n * printed, rel=1e-6)


def test_e30_the_quoted_ratios_do_not_solve_the_equation():
    dimension = 3 * 32 * 32

    # Φ by itself: m = √D σ, s = σ/√2, the interval of the level above, in units of the lower σ.
    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    ratio = overlap_ratio(dimension)
    middle, spread = math.sqrt(dimension), math.sqrt(0.5)
    low, high = ((ratio * (middle + sign * 3 * spread) - middle) / spread for sign in (-1, 1))
    assert phi(high) - phi(low) == pytest.approx(0.5, abs=1e-12)
    assert ratio == pytest.approx(1.039796, abs=1e-6)
    for top, levels, quoted, share, solved in (
        (20.0, 207, 1.0375867506951884, 0.5661, 196), (50.0, 232, 1.0375591319992028, 0.5670, 220),
    ):  # fmt: skip
        assert (top / 0.01) ** (1 / (levels - 1)) == pytest.approx(quoted, rel=1e-15)  # where they come from
        assert overlap(quoted, dimension) == pytest.approx(share, abs=1e-4)
        assert num_levels(top, 0.01, ratio) == solved
        # Neighbours among that many levels overlap by ½ or more; with one level fewer they do not.
        for count, enough in ((solved, True), (solved - 1, False)):
            sigma = smld_geometric(count, top, 0.01).sigma
            assert (overlap((sigma[1] / sigma[0]).item(), dimension) >= 0.5) == enough


def test_e30_the_radius_is_the_whitened_one():
    def deviation(cov: Tensor) -> float:
        """Of ‖x‖, x ~ N(0, cov), to first order: Var‖x‖² = 2 tr cov², and ‖x‖ is near √(tr cov)."""
        return math.sqrt(2 * (cov @ cov).trace().item()) / (2 * math.sqrt(cov.trace().item()))

    whitener = as_matrix(FIELD.inv_sqrt)
    assert deviation(whitener @ SIGMA @ whitener.T) == pytest.approx(math.sqrt(0.5), rel=1e-10)  # σ/√2
    assert deviation(LARGE.eigenvalues.flatten().diag()) == pytest.approx(2.76, abs=0.01)  # the plain radius


def test_e31_the_recursion_is_right_for_the_printed_update():
    cov, ratio, eta, steps = SIGMA, 1.2, 0.03, 5
    power = EYE - eta * torch.linalg.inv(cov)
    moment = torch.linalg.matrix_power
    sums = sum(moment(power, t) @ cov @ moment(power, t) for t in range(steps))
    printed = ratio**2 * moment(power, steps) @ cov @ moment(power, steps) + 2 * eta * sums  # eq. 104, T a power
    transposed = ratio**2 * power.T @ cov @ power.T + 2 * eta * sums  # T read as a transpose
    assert torch.linalg.matrix_norm(printed - transposed) > 0.1 * torch.linalg.matrix_norm(printed)

    spread = ratio**2 * cov  # the update itself, from the level above
    for _ in range(steps):
        spread = power @ spread @ power + 2 * eta * cov
    assert close(printed, spread)


QUOTED_EPSILON = [
    (5, 3.1e-7, 3.021e-7, 3.169e-7, 6.188e-6, 1.05550),
    (1, 2.0e-6, 1.964e-6, 2.030e-6, 7.114e-6, 1.07114),
]


@pytest.mark.parametrize("steps, quoted, one, zero, ours, reached", QUOTED_EPSILON)
def test_e31_the_quoted_epsilons_are_argmins_and_do_not_reach_one(steps, quoted, one, zero, ours, reached):
    ratio, sigma_min = 1.0375867506951884, 0.01
    for mode, argmin in (("one", one), ("zero", zero)):
        field = gaussian_free_field((32, 32), 1.0, zero_mode=mode)

        def pixel(epsilon: float, field: nidiff.Covariance = field) -> float:
            variance = variance_ratio(field, ratio, epsilon, sigma_min, steps, preconditioned=False)
            return (variance * field.eigenvalues).mean().item()

        grid = [pixel(10 ** (-8 + 0.04 * i)) for i in range(100)]
        assert min(grid) > 1.075  # printed: "choose ε such that it is ≈ 1"; ε → 0 gives ratio² = 1.0766
        assert pixel(quoted) < min(grid) + 1e-5
        found = langevin_epsilon(field, ratio, sigma_min, steps, preconditioned=False)
        assert found == pytest.approx(argmin, rel=1e-3)

    field = LARGE
    modes = variance_ratio(field, ratio, one, sigma_min, steps, preconditioned=False)
    assert modes.min() < 0.85  # and single modes are far off: a symptom of E23
    assert modes.max() > 1.1
    if steps == 1:  # closed form
        assert one == pytest.approx(sigma_min**2 * (1 - ratio**-2) / (1 / field.eigenvalues).mean().item(), rel=1e-3)

    # Preconditioned it is the isotropic value, and every mode has the same variance.
    epsilon = langevin_epsilon(field, ratio, sigma_min, steps)
    assert epsilon == pytest.approx(ours, rel=1e-3)
    assert epsilon == pytest.approx(best_eta(ratio, steps) * sigma_min**2, rel=1e-6)
    assert close(variance_ratio(field, ratio, epsilon, sigma_min, steps), reached, 1e-5)


def test_e32_an_unconditional_network_averages_over_the_levels_that_explain_x():
    schedule = smld_geometric(232, 50.0, 0.01)
    process, sigma = Process(schedule, Identity((1,))), schedule.sigma
    harmonic = 1 / (1 / sigma).mean()
    assert harmonic.item() == pytest.approx(0.0840, abs=1e-4)

    # One image, 0, in one dimension: the mean loss over all levels by quadrature, x on a logarithmic grid, both signs.
    logs = torch.linspace(math.log(1e-5), math.log(1e3), 1001, dtype=torch.float64)
    x, width = logs.exp()[:, None], (logs[1] - logs[0]).item()
    density = torch.exp(-(x**2) / (2 * sigma**2)) / (math.sqrt(2 * math.pi) * sigma)
    eps, level = (x / sigma).reshape(-1, 1), schedule.level(torch.arange(232).repeat(len(x)))

    def loss(network: Tensor) -> float:
        """Of the network that has these values on the grid."""

        def net(x: Tensor) -> Tensor:
            return network[((x.log() - logs[0]) / width).round().long()]

        errors = denoising_loss(Denoiser(Unconditional(net), process), 0 * eps, level=level, eps=eps)
        return (2 * width * (x * density * errors.reshape(density.shape)).mean(1).sum()).item()

    optimum = (density * x / sigma).sum(1) / density.sum(1)  # E[x/σ | x]: over p(σ | x)
    printed = x[:, 0] / harmonic  # eq. 105: over the training levels
    assert loss(torch.zeros_like(optimum)) == pytest.approx(1.0, abs=1e-3)
    assert loss(optimum) == pytest.approx(0.2997, abs=1e-3)
    assert loss(printed) == pytest.approx((1 - sigma / harmonic).square().mean().item(), rel=1e-3)
    assert loss(printed) > 2e4
    assert loss(-optimum) > 2  # the sign of lines 2 to 4
    for change in (0.9, 1.1):
        assert loss(change * optimum) > loss(optimum) + 0.005

    at_one = torch.exp(-1 / (2 * sigma**2)) / sigma
    assert ((at_one / sigma).sum() / at_one.sum()).item() == pytest.approx(0.810, abs=1e-3)
    assert 1 / harmonic.item() == pytest.approx(11.9, abs=0.05)


def test_e32_in_the_dimension_of_images_there_is_nothing_to_correct():
    schedule, dimension = smld_geometric(232, 50.0, 0.01), 3 * 32 * 32
    process = Process(schedule, LARGE)
    white = torch.randn(1, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    white = white * math.sqrt(dimension) / white.norm()

    def optimum(x: Tensor) -> Tensor:
        eps = process.covariance.inv_sqrt(x)  # times σ; p(σ | x) ∝ σ^−D exp(−‖Σ^-½ x‖²/2σ²)
        logits = -dimension * schedule.sigma.log() - eps.square().sum() / (2 * schedule.sigma**2)
        return (logits.softmax(0) / schedule.sigma).sum() * eps

    for row, factor in ((231, 0.00168), (174, 0.01374), (116, 0.1166), (58, 0.9898), (0, 8.40)):
        level = schedule.level(row)
        x = process.perturb(torch.zeros_like(white), level, white)
        exact = process.conditional_score(x, torch.zeros_like(white), level)
        plain = Denoiser(Unconditional(optimum), process).score(x, level)
        printed = Denoiser(Unconditional(optimum, harmonic=schedule), process).score(x, level)  # eq. 108
        assert (plain - exact).norm() < 0.001 * exact.norm()
        assert (printed.flatten() @ exact.flatten() / exact.square().sum()).item() == pytest.approx(factor, rel=5e-3)


# Equations that are right as printed and are checked nowhere else -----------------------------------------------------


def test_eq57_the_reverse_mean_has_three_forms():
    process, here, there = PROCESS, PROCESS.schedule.level(500), PROCESS.schedule.level(499)
    beta, posterior = jump_variances(here, there)
    x, eps, noise = (vectors(seed).reshape(-1, *SHAPE) for seed in (14, 15, 16))
    x0 = TARGETS["eps"].decode(eps, x, here, process.covariance)  # eq. 17
    mean, step = mix(x, x0, here, there, fresh=posterior.root()), (1 - beta).root()
    by_x0 = there.signal * beta / here.sigma**2 * x0 + step * there.sigma**2 / here.sigma**2 * x  # eq. 3, 56
    by_eps = (x - beta / here.sigma * process.covariance.sqrt(eps)) / step  # eq. 57
    by_score = (x + beta * process.covariance.matmul(process.conditional_score(x, x0, here))) / step  # eq. 59
    for form in (by_x0, by_eps, by_score):
        assert close(mean, form)

    # The step is that mean plus noise of variance β̃ Σ (eq. 18, 58, 59) or β Σ (eq. 19).
    chain = Chain(Denoiser(lambda x, label: eps, process), lambda: noise)
    assert close(ancestral(chain, x, x0, here, there), by_eps + posterior.root() * noise)
    assert close(ancestral(chain, x, x0, here, there, variance="beta"), by_eps + beta.root() * noise)
    assert not close(posterior.root() * noise, beta.root() * noise, 1e-4)


@pytest.mark.parametrize("n", [4, 5])
def test_eq70_the_dft_matrix_is_symmetric_and_its_inverse_is_its_conjugate_over_n(n):
    w = dft(n)
    assert close((w - w.mT).abs(), 0.0)
    assert close((torch.linalg.inv(w) - w.conj() / n**2).abs(), 0.0)
    # The library's basis is this one, made orthonormal and real: the real part minus the imaginary part.
    x = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    waves = (w @ x.flatten().to(w.dtype)).reshape(n, n) / n
    assert close((gaussian_free_field((n, n), 1.0).basis.analyse(x) - (waves.real - waves.imag)).abs(), 0.0)
