"""A model of 32×32 on finer grids (docs/resolution.md): the theorems behind it, and the story in small."""

import math

import numpy as np
import pytest
import torch
from test_examples import load

import nidiff
from nidiff.covariance.waves import wavenumber

story = load("resolution")
N, n = 8, 16
LAW = nidiff.power_law((N, N), 3.0)  # of the data
NOISE = {"own": LAW, "smoother": nidiff.power_law((N, N), 4.0), "gff": nidiff.gaussian_free_field((N, N), 1.0)}
SCHEDULE = nidiff.schedules.ddpm_cosine(200)


def model(noise, n=N):
    """The exact denoiser of Gaussian data on n × n."""
    gaussian = nidiff.GaussianModel(torch.zeros(1, N, N), LAW)
    return gaussian.denoiser(nidiff.Process(SCHEDULE, noise)).at((n, n))


def logsnr(noise, n, row):
    """Of every mode on n × n."""
    level = SCHEDULE.level(row)
    law, noise = LAW.at((n, n)), noise.at((n, n))
    return (float(level.signal) ** 2 * law.eigenvalues / (float(level.sigma) ** 2 * noise.eigenvalues)).log()


def shared():
    """The same waves on N × N and on n × n, all below N/2."""
    k = torch.arange(1 - N // 2, N // 2)
    return [(k % side)[:, None] * side + k % side for side in (N, n)]


# Data and noise --------------------------------------------------------------------------------------------------


def test_a_field_on_the_coarse_grid_has_the_law_of_the_coarse_grid():
    """A Σ' Aᵀ = Σ, every mode and pixel of it. White noise is (N/n)² too weak."""
    matrix = story.on_grid(torch.eye(n * n, dtype=torch.float64).reshape(-1, n, n), N).flatten(1).T
    for noise in NOISE.values():
        assert torch.allclose(matrix @ noise.at((n, n)).dense() @ matrix.T, noise.dense(), atol=1e-12)
    white = nidiff.Identity((N, N)).at((n, n)).dense()
    assert torch.allclose(matrix @ white @ matrix.T, (N / n) ** 2 * torch.eye(N * N).double(), atol=1e-12)


def test_fields_of_one_seed_are_one_field_on_all_grids():
    fine, coarse = (story.fields(3, n, seed=1, finest=64) for n in (32, 16))
    assert torch.allclose(story.on_grid(fine, 16), coarse, atol=1e-5)
    assert not torch.allclose(fine[:, :, ::2, ::2], coarse, atol=1e-2)  # every other pixel is another law


# Signal and noise by mode -----------------------------------------------------------------------------------------


def test_snr_per_mode_is_kept_and_off_by_the_square_of_the_ratio_in_white_noise():
    mine, its = shared()
    for row in (20, 100, 180):
        for noise, off in (*((noise, 0.0) for noise in NOISE.values()), (nidiff.Identity((N, N)), 2 * math.log(n / N))):
            before, after = logsnr(noise, N, row).flatten()[mine], logsnr(noise, n, row).flatten()[its]
            assert torch.allclose(after - before, torch.tensor(off).double(), atol=1e-9)


def test_snr_per_pixel_frequency_is_kept_by_the_exponent_of_the_data_alone():
    """Convolutions know cycles per pixel: there log-SNR is off by (q − p) log r. White noise is as good as q = 2."""
    for noise, exponent in {"own": 3.0, "smoother": 4.0, "gff": 2.0, "white": 2.0}.items():
        cov = NOISE.get(noise, nidiff.Identity((N, N)))
        r, k = n // N, torch.arange(1, N // 2)
        before, after = (logsnr(cov, side, 50)[0, k * side // N] for side in (N, n))
        assert torch.allclose(after - before, torch.tensor((exponent - 3.0) * math.log(r)).double(), atol=1e-9)


@pytest.mark.parametrize("noise", [*NOISE, "white"])
def test_the_gaussian_denoiser_is_exact_on_the_finer_grid(noise):
    """E[x0 | x] by dense algebra, with C of the fine grid from its formula."""
    cov = NOISE.get(noise, nidiff.Identity((N, N)))
    k = wavenumber((n, n)).clamp(min=1)
    law = LAW.at((n, n)).with_eigenvalues((n / N) ** 2 * LAW.eigenvalues[0, 1] * k**-3.0).dense()
    level, x = SCHEDULE.level(100), torch.randn(1, 1, n, n, generator=torch.Generator().manual_seed(0)).double()
    total = float(level.signal) ** 2 * law + float(level.sigma) ** 2 * cov.at((n, n)).dense()
    expected = float(level.signal) * law @ torch.linalg.solve(total, x.flatten())
    assert torch.allclose(model(cov, n)(x, level).flatten(), expected, atol=1e-8)


# What a network of the coarse grid makes of it --------------------------------------------------------------------


class Linear(torch.nn.Module):
    """Any linear network that is a convolution: it multiplies the wave at each frequency by the Wiener filter of some
    C and Σ, here the tables [n, n] that it was made for."""

    def __init__(self, law, noise):
        super().__init__()
        self.law, self.noise = law, noise

    def forward(self, x, label):
        level = SCHEDULE.level(label[0].item())
        signal, sigma = float(level.signal), float(level.sigma)
        gain = signal * self.law / (signal**2 * self.law + sigma**2 * self.noise)
        return torch.fft.ifft2(gain * torch.fft.fft2(x)).real


def test_samples_of_a_linear_network_have_the_spectrum_of_the_noise_times_the_snr_it_believes_in():
    """S = Σ · (C/Σ)_believed, whatever is true: C if it is right, and as wrong as C/Σ is."""
    noise = nidiff.gaussian_free_field((n, n), 1.0)
    law, wrong = LAW.at((n, n)).eigenvalues, 0.5 + torch.rand(n, n).double()
    wrong = (wrong + wrong.flip(0, 1).roll((1, 1), (0, 1))) / 2  # the same for k and −k
    denoiser = nidiff.Denoiser(Linear(wrong * law, noise.eigenvalues), nidiff.Process(SCHEDULE, noise), "x0")
    x = nidiff.sample(denoiser, (1000, 1, n, n), sampler="heun", num_steps=40, generator=range(1000))
    ratio = noise.basis.power(x.double()).mean(0)[0] / law
    assert torch.allclose(ratio, wrong, rtol=0.2)
    assert not torch.allclose(ratio, torch.ones(()).double(), rtol=0.3)


def test_the_prediction_is_a_power_of_the_ratio():
    """S/C = r^(p − q) in pixels, where white noise counts as q = 2; on its own grid 1, and r^-2 in white noise."""
    r, noises = n / N, {**NOISE, "white": nidiff.Identity((N, N))}
    for name, power in {"own": 0, "smoother": -1, "gff": 1, "white": 1}.items():
        ratio = story.predicted(LAW, noises[name], n, "in pixels")
        known = ratio[2 * n // N : n // 2]
        assert torch.allclose(known, torch.tensor(power * math.log10(r)).double(), atol=0.06)
        lacking = -2 * math.log10(r) if name == "white" else 0.0
        assert story.predicted(LAW, noises[name], n, "on its own grid")[1 : N // 2] == pytest.approx(lacking, abs=1e-9)
        assert story.predicted(LAW, noises[name], n, "on its own grid")[-1] == 0
    assert story.predicted(LAW, noises["white"], n, "in pixels")[1] < -0.2  # longer than any wave on the coarse grid


class Warped(torch.nn.Module):
    """A network that is not linear, of any size."""

    def forward(self, x, label):
        return torch.tanh(x + x.roll(1, -1)) * (1 + 0.001 * label[0])


@pytest.mark.parametrize("target", ["v", "residual"])
def test_on_its_own_grid_a_network_samples_the_coarse_waves_as_it_would_there(target):
    """Path by path: the fine sample, brought to the coarse grid, is the coarse sample of the noise brought there."""
    gaussian = nidiff.GaussianModel(torch.zeros(1, N, N), LAW)
    denoiser = nidiff.Denoiser(Warped(), nidiff.Process(SCHEDULE, LAW), target, gaussian=gaussian)
    start = LAW.at((n, n)).sample((2, 1, n, n), torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"sampler": "dpmpp_2m", "num_steps": 8, "dtype": torch.float64}
    ways = {"own grid": story.own_grid(denoiser, n), "pixels": denoiser.at((n, n))}
    expected = nidiff.sample(denoiser, (2, 1, N, N), start=story.on_grid(start, N), **options)
    found = {
        name: story.on_grid(nidiff.sample(way, start.shape, start=start, **options), N) for name, way in ways.items()
    }
    assert torch.allclose(found["own grid"], expected, atol=1e-6)
    assert not torch.allclose(found["pixels"], expected, atol=0.05)


def test_in_white_noise_samples_lack_the_square_of_the_ratio_unless_the_level_is_shifted():
    """On its own grid the network sees r² less noise than its level says: S = C / r². It needs a log-SNR 2 log r up."""
    _, its = shared()
    power = {}
    for shift in (0.0, 2 * math.log(n / N)):
        denoiser = story.own_grid(model(nidiff.Identity((N, N))), n, shift)
        x = nidiff.sample(denoiser, (400, 1, n, n), spacing="logsnr", num_steps=25, generator=range(400))
        ratio = LAW.at((n, n)).basis.power(x.double()).mean((0, 1)) / LAW.at((n, n)).eigenvalues
        power[shift] = ratio.flatten()[its].mean().item()
        assert ratio[N // 2 + 1 : n // 2].mean().item() == pytest.approx(1, abs=0.05)  # the Gaussian's own
    unshifted, mended = power.values()
    assert unshifted == pytest.approx((N / n) ** 2, rel=0.1)
    assert mended == pytest.approx(1, abs=0.1)


# The story, in small ----------------------------------------------------------------------------------------------


def test_the_story_in_small(tmp_path):
    """Trained for a few steps, the residual leaves the Gaussian part right on every grid, and white noise does not."""
    from nidiff.cli import main

    data = tmp_path / "fields.npy"
    np.save(data, story.fields(64, 16, finest=64))
    for name, settings in {
        "coloured": ("power_law:exponent=3", "residual", "target"),
        "white": ("white", "v", "eps"),
    }.items():
        covariance, target, weighting = settings
        main(
            f"train --data {data} --layout NCHW --boundary periodic --covariance {covariance} --target {target} "
            f"--weighting {weighting} --network unet:widths=8,layers=1,patch=2,attention=none --steps 30 --warmup 5 "
            f"--cooldown 0 --batch-size 8 --num-samples 1 --num-steps 2 --out {tmp_path / name}".split()
        )
    runs = [str(tmp_path / name) for name in ("coloured", "white")]
    found = story.main(runs, sides=(32,), count=8, out=tmp_path)
    coloured, white, own_grid, _ = np.abs(found["measured 32"]).mean(-1)  # the first two in pixels
    assert max(coloured, own_grid) < 0.15
    assert white > 0.3
    assert (tmp_path / "resolution.png").exists()
    assert (tmp_path / "resolution.npz").exists()
