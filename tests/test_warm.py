"""A warm start loses what it says it loses, nothing for Gaussian data, and the prior in its place would be wrong."""

import pytest
import torch
from problems import refused

import nidiff
from nidiff.diffusion.gaussian import Kappa
from nidiff.diffusion.spacing import check_rows
from nidiff.sampling.angle import angle_rows
from nidiff.sampling.warm import integrated_loss, start_loss, start_row

SHAPE = (6, 5)
GAUSSIAN = nidiff.GaussianModel(torch.linspace(-1, 1, 30).reshape(SHAPE), nidiff.matern(SHAPE, 1.5))
PROCESS = nidiff.Process("ddpm_linear", nidiff.gaussian_free_field(SHAPE, 0.5))
X = torch.linspace(-40, 40, 40001, dtype=torch.float64)


class Mixture:
    """Two narrow Gaussians on a line, with mean 0 and variance 1."""

    weight, spread = 0.3, 0.2

    def __init__(self):
        gap = (1 - self.spread**2) ** 0.5
        odds = ((1 - self.weight) / self.weight) ** 0.5
        self.weights = torch.tensor([self.weight, 1 - self.weight], dtype=torch.float64)
        self.means = gap * torch.tensor([odds, -1 / odds], dtype=torch.float64)

    def at(self, level):
        """Density on the grid, E[x0 | x] there, and the variance of x."""
        signal, sigma = float(level.signal), float(level.sigma)
        variance = signal**2 * self.spread**2 + sigma**2
        each = self.weights * torch.exp(-((X[:, None] - signal * self.means) ** 2) / (2 * variance))
        density = each.sum(1) / (2 * torch.pi * variance) ** 0.5
        gain = signal * self.spread**2 / variance
        clean = self.means + gain * (X[:, None] - signal * self.means)
        x0 = (each * clean).sum(1) / each.sum(1).clamp(min=1e-300)
        return density, x0, signal**2 + sigma**2

    def kl(self, level):
        """KL(x ‖ N(0, its variance)) by quadrature."""
        density, _, variance = self.at(level)
        other = torch.exp(-(X**2) / (2 * variance)) / (2 * torch.pi * variance) ** 0.5
        inside = (density > 1e-250) & (other > 1e-250)
        return torch.where(inside, density * (density / other).log(), 0.0).nan_to_num().sum().item() * 0.002

    def kappa(self, level):
        """E F² by quadrature."""
        density, x0, variance = self.at(level)
        signal, sigma = float(level.signal), float(level.sigma)
        linear = signal / variance * X
        residual = (x0 - linear) / (sigma / variance**0.5)
        return (density * residual**2).sum().item() * 0.002


LINE = nidiff.GaussianModel(torch.zeros(1), nidiff.Diagonal(torch.ones(1)))
ON_LINE = nidiff.Process(nidiff.schedules.ddpm_linear(200, 1e-3, 0.1), nidiff.Identity((1,)))


ROWS = torch.tensor([*range(0, 200, 2), 199], dtype=torch.float64)


def bound(process, gaussian, row):
    return start_loss(gaussian.denoiser(process), "gaussian", row)


def with_shares(process, gaussian, rows, values):
    """A denoiser whose network was measured to be better than the Gaussian by these shares of the spread."""
    losses = {"gaussian": integrated_loss(process, gaussian, rows, values[None])[0]}
    one = torch.ones((len(rows), *gaussian.covariance.event_shape), dtype=torch.float64)
    return gaussian.denoiser(process).with_kappa(Kappa(rows, 0.5 * one, one, losses))


def informed():
    """What the exact denoiser of the mixture is better by: κ."""
    values = torch.tensor([[Mixture().kappa(ON_LINE.schedule.level(row))] for row in ROWS.tolist()])
    return with_shares(ON_LINE, LINE, ROWS, values), values


def test_the_loss_is_the_divergence_from_the_gaussian():
    """½ ∫ w κ dℓ against KL by quadrature; without measurement it is an upper bound, and with another κ it is wrong."""
    (denoiser, values), beyond = informed(), bound(ON_LINE, LINE, 199)
    half = with_shares(ON_LINE, LINE, ROWS, values / 2)
    for row in (20, 60, 100, 140):
        exact = Mixture().kl(ON_LINE.schedule.level(row))
        assert start_loss(denoiser, "gaussian", row) - beyond == pytest.approx(exact, rel=5e-3, abs=1e-9)
        assert bound(ON_LINE, LINE, row) > exact
        assert start_loss(half, "gaussian", row) - beyond < 0.6 * exact


def test_the_divergence_is_below_the_bound_where_sampling_begins():
    mixture, (denoiser, _) = Mixture(), informed()
    for most in (0.01, 0.1):
        careful = start_row(LINE.denoiser(ON_LINE), "gaussian", most)
        low = start_row(denoiser, "gaussian", most)
        assert mixture.kl(ON_LINE.schedule.level(careful)) < most
        assert mixture.kl(ON_LINE.schedule.level(low)) == pytest.approx(most, rel=0.2)
        assert low < careful < 199
    assert mixture.kl(ON_LINE.schedule.level(low - 10)) > most


def test_with_levels_per_mode_the_losses_of_modes_add_up():
    table = torch.stack([torch.linspace(6, -7, 50), torch.linspace(4, -9, 50)], 1).double()
    gaussian = nidiff.GaussianModel(torch.zeros(2), nidiff.Diagonal(torch.tensor([2.0, 0.5]), normalize=False))
    both = nidiff.Process(nidiff.Schedule(table), nidiff.Diagonal(torch.tensor([1.5, 0.5]), normalize=False))
    expected = 0.5 * torch.log1p(table[30].exp() * torch.tensor([2 / 1.5, 1.0], dtype=torch.float64)).mean()
    assert bound(both, gaussian, 30) == pytest.approx(expected.item(), rel=1e-12)


def test_for_gaussian_data_a_warm_start_at_any_level_is_exact():
    """With a sampler that is exact from there; from the prior it is not, except at the noisiest level."""
    for row in (0, 3, 200, 640, 999):
        assert nidiff.design.predict(PROCESS, GAUSSIAN, "angle", [row], start="gaussian").error < 1e-12
        prior = nidiff.design.predict(PROCESS, GAUSSIAN, "angle", [row]).error
        assert prior < 1e-3 if row == 999 else prior > 0.01


def test_samples_from_a_warm_start_have_the_data_mean_and_variance():
    given = {"sampler": "angle", "spacing": [300], "generator": 0}
    x = nidiff.sample(GAUSSIAN.denoiser(PROCESS), (4000, *SHAPE), start="gaussian", **given)
    assert (x.mean(0) - GAUSSIAN.mean).abs().max() < 0.1
    assert (x.var(0) - 1).abs().max() < 0.15
    cold = nidiff.sample(GAUSSIAN.denoiser(PROCESS), (4000, *SHAPE), **given)
    assert (cold.mean(0) - GAUSSIAN.mean).abs().max() > 0.15


def labels(denoiser, **arguments):
    visits = []
    x = nidiff.sample(denoiser, (2, *SHAPE), generator=[3, 4], callback=visits.append, dtype=torch.float64, **arguments)
    return x, [visit.level.label for visit in visits]


@pytest.mark.parametrize("spacing", ["trailing", "uniform", "logsnr", "karras", "angle"])
def test_every_spacing_begins_at_the_level_of_the_bound(spacing):
    denoiser = GAUSSIAN.denoiser(PROCESS)
    first = start_row(denoiser, "gaussian", 0.05)
    below, above = (bound(PROCESS, GAUSSIAN, row) for row in (first, first - 1))
    assert below <= 0.05 < above
    x, rows = labels(denoiser, spacing=spacing, num_steps=5, start="gaussian", max_loss=0.05)
    assert rows[0] == first
    assert len(rows) == 5
    text = f"dpmpp_2m:spacing={spacing},start=gaussian,max_loss=0.05"
    again, same = labels(denoiser, sampler=text, num_steps=5)
    assert same == rows
    assert torch.equal(x, again)
    assert labels(denoiser, spacing=spacing, num_steps=5)[1][0] == 999


def test_a_constant_share_is_that_share_of_the_bound_and_all_of_it_beyond_the_noisiest_row():
    """½ ∫ Σ w κ dℓ = κ ½ Σ log(1 + signal² C / (sigma² Σ)); the integral begins at ℓ = −∞, and the schedule at −1."""
    schedule = nidiff.Schedule(torch.linspace(6, -1, 50, dtype=torch.float64))
    process = nidiff.Process(schedule, nidiff.gaussian_free_field(SHAPE, 0.5))
    rows, beyond = torch.tensor([0.0, 20.0, 49.0]).double(), bound(process, GAUSSIAN, 49)
    denoiser = with_shares(process, GAUSSIAN, rows, torch.full((3, *SHAPE), 0.3, dtype=torch.float64))
    for row in (0, 20, 49):
        expected = 0.3 * (bound(process, GAUSSIAN, row) - beyond) + beyond
        assert start_loss(denoiser, "gaussian", row) == pytest.approx(expected, rel=1e-9)
    between = start_loss(denoiser, "gaussian", 13)
    assert start_loss(denoiser, "gaussian", 20) < between < start_loss(denoiser, "gaussian", 0)


def test_the_best_denoiser_at_hand_stands_for_the_exact_one():
    """A network that is worse than a model at some rows does not make up for what the other loses there."""
    rows, one = torch.tensor([0.0, 500.0, 999.0]).double(), torch.ones(3, *SHAPE, dtype=torch.float64)
    shares = torch.stack([0.5 * one, -0.2 * one])  # the network lies between the two models
    gaussian, mixture = integrated_loss(PROCESS, GAUSSIAN, rows, shares)
    alone = integrated_loss(PROCESS, GAUSSIAN, rows, 0.7 * one[None])[0]
    assert torch.allclose(gaussian, alone)
    assert torch.allclose(mixture, mixture[-1:].expand(3))
    assert mixture[0] < 1e-3 < gaussian[0]


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_measured_loss_lowers_the_start(share):
    """A network that says nothing has a loss of 0 and begins at the clean image: so do Gaussian data."""
    usual = labels(GAUSSIAN.denoiser(PROCESS), num_steps=3, start="gaussian")[1]
    rows, shares = torch.linspace(0, 999, 28).round().double(), torch.full((28, *SHAPE), share, dtype=torch.float64)
    denoiser = with_shares(PROCESS, GAUSSIAN, rows, shares)
    lower = labels(denoiser, num_steps=3, start="gaussian")[1]
    assert lower[0] == max(start_row(denoiser, "gaussian"), 2) < usual[0]
    assert labels(denoiser.with_kappa(None), num_steps=3, start="gaussian")[1] == usual
    named = labels(denoiser, num_steps=3, start="gaussian", level=640)
    text = labels(denoiser, sampler="dpmpp_2m:start=gaussian,level=640", num_steps=3)
    assert named[1][0] == 640
    assert torch.equal(named[0], text[0])
    rows = angle_rows(PROCESS, GAUSSIAN, 3, 300)
    assert labels(denoiser, spacing=rows, start="gaussian")[1] == rows


def test_more_steps_than_levels_below_the_bound_begin_higher():
    short = nidiff.Process(nidiff.schedules.ddpm_linear(12, 0.01, 0.9), nidiff.gaussian_free_field(SHAPE, 0.5))
    _, rows = labels(GAUSSIAN.denoiser(short), num_steps=12, start="gaussian", max_loss=10.0)
    assert rows == list(range(11, -1, -1))
    assert start_row(GAUSSIAN.denoiser(short), "gaussian", 1e-12) == 11  # nowhere so little: the noisiest


def test_bad_starts_are_refused():
    unknown = nidiff.Denoiser(lambda x, label: 0 * x, PROCESS, "x0")
    for argument, options in (
        ("start", {"start": "middle"}),
        ("start", {"start": "gaussian", "denoiser": unknown}),
        ("start", {"start": "mixture"}),
        ("max_loss", {"max_loss": 0.1}),
        ("max_loss", {"start": "gaussian", "max_loss": 0.1, "level": 5}),
        ("level", {"level": 5}),
        ("level", {"start": "gaussian", "level": 1000}),
        ("level", {"sampler": "ddim:start=gaussian,level=low"}),
        ("max_loss", {"start": "gaussian", "max_loss": 0.1, "spacing": [5, 3]}),
        ("max_loss", {"start": "gaussian", "max_loss": -1.0}),
        ("start", {"sampler": "ddim:start=low"}),
        ("max_loss", {"sampler": "ddim:start=gaussian,max_loss=low"}),
    ):
        with refused(argument):
            nidiff.sample(**{"denoiser": unknown.with_gaussian(GAUSSIAN), "shape": (1, *SHAPE), **options})


def test_every_number_of_rows_falls_and_ends_in_the_schedule():
    """Also where no row is as near to the data as the angle asks for: as many as there are levels are all of them."""
    process = nidiff.Process(nidiff.Schedule(torch.linspace(-2, -8, 12)), PROCESS.covariance)
    for count in range(1, 13):
        rows = angle_rows(process, GAUSSIAN, count)
        assert [*check_rows("rows", rows, 12)] == rows
        assert len(rows) == count
    assert rows == [*range(11, -1, -1)]
