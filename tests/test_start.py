"""Noisy data y = x0 + noise · Σ^½ eps are a state of the process: sampling that starts there draws from p(x0 | y)."""

import math

import pytest
import torch
from problems import refused

import nidiff

SHAPE, LEVELS, NOISE = (1, 6, 6), 500, 0.7
SIGMA = nidiff.gaussian_free_field(SHAPE[1:])
DATA = nidiff.GaussianModel(0.5 * torch.ones(SHAPE), nidiff.power_law(SHAPE[1:], 3.0))  # another spectrum than Σ's
PROCESS = nidiff.Process(nidiff.schedules.ddpm_cosine(LEVELS), SIGMA)
EXACT = DATA.denoiser(PROCESS)
LEVEL = PROCESS.schedule.level_with_noise(NOISE)
WHITE = nidiff.Identity(SHAPE[1:])


def noisy(count, noise=SIGMA, seed=0):
    """Clean fields, and the same with noise of a colour."""
    source = torch.Generator().manual_seed(seed)
    x0 = DATA.sample((count, *SHAPE), source, dtype=torch.float64)
    return x0, x0 + NOISE * noise.sample((count, *SHAPE), source, dtype=torch.float64)


def draw(y, **options):
    """A sample for each y, in float64."""
    options = {"sampler": "ancestral", "dtype": torch.float64, "level": LEVEL, **options}
    torch.manual_seed(0)
    return nidiff.sample(EXACT, tuple(y.shape), start=y, **options)


def posterior(y):
    """The mean [N, 1, 6, 6] and the standard deviation per mode of x0 given y, from the spectra alone:
    gain = C / (C + noise² Σ), mean = μ + gain (y − μ), variance = noise² Σ gain."""
    data, noise = DATA.covariance.eigenvalues, NOISE**2 * SIGMA.eigenvalues
    gain = data / (data + noise)
    centred = DATA.covariance.with_eigenvalues(gain).matmul(y - DATA.mean)
    return DATA.mean + centred, (noise * gain) ** 0.5


def in_modes(x):
    """Orthonormal coefficients of every mode, real: amplitudes of cosines and sines."""
    return (torch.fft.fft2(x, norm="ortho").real + torch.fft.fft2(x, norm="ortho").imag).flatten(1)


def covered(x0, draws, k):
    """Which numbers of x0 [N, D] lie between the k-th from below and the k-th from above of their draws [N, S, D]. If
    all are draws of one law, whatever it is, that has the probability 1 − 2k / (S + 1)."""
    rising = draws.sort(1).values
    return (x0 >= rising[:, k - 1]) & (x0 <= rising[:, -k])


def calibration(noise, count=50, samples=39):
    """Coverage of the 50 % and the 90 % interval of the modes, each with its standard error over items."""
    x0, y = noisy(count, noise)
    draws = in_modes(draw(y.repeat_interleave(samples, 0), num_steps=120)).reshape(count, samples, -1)
    inside = [covered(in_modes(x0), draws, k).double().mean(1) for k in (10, 2)]
    return [(one.mean().item(), (one.std() / math.sqrt(count)).item()) for one in inside]


def spread_ratio(variance, num_steps, count=2000):
    """Of samples given one y: their variance over that of the posterior, per mode, and how far their mean is off."""
    _, y = noisy(1, seed=1)
    mean, spread = posterior(y)
    found = draw(y.expand(count, *SHAPE), num_steps=num_steps, variance=variance)
    off = in_modes(found.mean(0, keepdim=True) - mean)[0] / spread.flatten()
    return in_modes(found - mean).square().mean(0) / spread.flatten().square(), off


def test_with_the_variance_of_the_gaussian_they_have_it_in_any_number_of_steps():
    """x' given x is then exact in every mode; with β̃ (the control) the spread is far too small, with β too large."""
    for num_steps in (2, 5):
        gaussian, posterior, beta = (
            (spread_ratio(variance, num_steps)[0] - 1).abs().mean().item()
            for variance in ("gaussian", "posterior", "beta")
        )
        assert gaussian < math.sqrt(2 / 2000)
        assert posterior > 10 * gaussian
        assert beta > 2 * gaussian


def test_the_samples_have_the_mean_and_covariance_of_the_posterior_as_steps_grow():
    errors = []
    for num_steps in (4, 16, 120):
        ratio, off = spread_ratio("posterior", num_steps)
        errors.append((ratio - 1).abs().mean().item())
    assert errors[0] > 2.5 * errors[1] > 4 * errors[2]  # of first order, down to the noise of so many draws
    assert errors[2] < 0.03 + math.sqrt(2 / 2000)
    assert (off.square().sum() * 2000).item() < 36 + 5 * math.sqrt(2 * 36)


def test_the_variance_beta_needs_far_fewer_steps():
    """β̃ is the variance of a step for a known clean image. That it is not known is left out, and the spread too small;
    β is right for data of the noise's own covariance, and nearly right near it. `nidiff denoise` takes it."""
    assert spread_ratio("posterior", 10)[0].mean().item() < 0.8
    assert abs(spread_ratio("beta", 10)[0].mean().item() - 1) < 0.06


def test_intervals_cover_as_often_as_they_say_on_gaussian_fields():
    for (share, error), expected in zip(calibration(SIGMA), (0.5, 0.9), strict=True):
        assert abs(share - expected) < 4 * error + 0.005  # and what is left of the error of the steps


def test_noise_of_another_colour_is_not_calibrated():
    """The control: white noise of the same amount is not a state of a process under Σ."""
    (half, half_error), (most, most_error) = calibration(WHITE)
    assert most < 0.9 - 6 * most_error
    assert half < 0.5 - 2 * half_error


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_a_deterministic_sampler_has_one_answer_and_no_spread(sampler):
    _, y = noisy(1)
    found = draw(y.expand(5, *SHAPE), sampler=sampler, num_steps=10)
    assert torch.equal(found, found[:1].expand_as(found))
    assert draw(y.expand(5, *SHAPE), num_steps=10).std(0).min() > 0.01


def test_seeds_decide_the_draws_and_a_row_is_as_good_as_its_level():
    _, y = noisy(3)
    first = draw(y, generator=[5, 6, 7], num_steps=10)
    assert torch.equal(first, draw(y, generator=[5, 6, 7], num_steps=10, level=LEVEL.label))
    assert torch.equal(first[1:2], draw(y[1:2], generator=[6], num_steps=10))
    assert not torch.equal(first, draw(y, generator=[8, 9, 10], num_steps=10))


def test_below_a_level_between_two_rows_all_rows_are_visited_if_there_are_steps_for_them():
    for level, count, rows in ((2.5, 20, [2.5, 2, 1, 0]), (0.5, 5, [0.5, 0]), (2, 20, [2, 1, 0])):
        visits = []
        draw(noisy(1)[1], level=level, num_steps=count, callback=visits.append)
        assert [float(visit.level.label) for visit in visits] == rows


def test_digits_under_noise_lie_in_the_intervals_of_the_model_that_ships():
    """A trained network: 20 held-out digits, and the tolerance is what such a network is off
    (benchmarks/calibration_of_start.py has the measurement)."""
    denoiser, count, samples = nidiff.load_model("digits"), 20, 19
    data = nidiff.load_dataset("digits", split="test")
    x0 = data.batch(torch.arange(0, len(data), len(data) // count)[:count])
    source = torch.Generator().manual_seed(0)
    y = x0 + 0.5 * denoiser.process.noise(tuple(x0.shape), source)
    level = denoiser.process.schedule.level_with_noise(0.5)
    shown = y.repeat_interleave(samples, 0)
    seeds = range(len(shown))
    found = nidiff.sample(
        denoiser, tuple(shown.shape), sampler="ancestral", num_steps=12, start=shown, level=level, generator=seeds
    )
    draws = in_modes(found).reshape(count, samples, -1)
    for k, expected in ((5, 0.5), (1, 0.9)):
        assert abs(covered(in_modes(x0), draws, k).float().mean().item() - expected) < 0.12


def test_a_level_or_data_that_make_no_sense_are_refused():
    _, y = noisy(2)
    hole = y.clone()
    hole[0, 0, 2, 3] = math.nan
    for argument, given in (
        ("level", {"level": LEVELS}),
        ("level", {"level": -1}),
        ("level", {"level": math.nan}),
        ("level", {"level": LEVEL, "spacing": [3, 0]}),
        ("level", {"level": LEVEL, "start": "prior"}),
        ("max_loss", {"level": LEVEL, "max_loss": 0.1}),
        ("start", {"level": LEVEL, "start": hole}),
        ("start", {"level": LEVEL, "start": y[:1]}),
        ("start", {"level": LEVEL, "start": y[:, 0]}),
    ):
        with refused(argument):
            nidiff.sample(EXACT, tuple(y.shape), **{"start": y, **given})
    low, high = (PROCESS.schedule.level(row) for row in (0, LEVELS - 1))
    for beyond in (0.9 * float(low.sigma / low.signal), 1.1 * float(high.sigma / high.signal), 0.0, -1.0):
        with refused("deviation"):
            PROCESS.schedule.level_with_noise(beyond)
