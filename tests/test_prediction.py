"""What is predicted of a sampler on Gaussian data is what it does."""

import pytest
import torch
from problems import refused

import nidiff
from nidiff.design.prediction import Prediction, SmallModel
from nidiff.sampling.sampler import as_sampler
from nidiff.sampling.step import Sampler
from nidiff.testing.problems import Impulses

STEEP = nidiff.GaussianModel(torch.zeros(64, 64), nidiff.power_law((64, 64), 2.67))
WHITE = nidiff.Process("ddpm_linear", nidiff.Identity((64, 64)))
SHAPE = (6, 5)


def per_mode_schedule(shape, boundary):
    """Levels that differ from mode to mode, by no rule in particular."""
    spread = nidiff.power_law(shape, 1.0, boundary=boundary).eigenvalues
    return nidiff.Schedule(torch.linspace(6, -7, 40, dtype=torch.float64)[:, None, None] + spread.log())


SAMPLERS = ["ddim", "ddim:eta=0.5", "ancestral", "heun", "dpmpp_2m", "euler_maruyama", "pc:eta=0.1", "angle_2m"]


def exact_variance(process, gaussian, sampler, rows):
    """The variance of every mode of what `nidiff.sample` draws, from one image per unit of noise: all of the event, in
    pixels."""
    root = process.covariance.sqrt(torch.eye(30, dtype=torch.float64).reshape(30, *SHAPE)).reshape(30, 30)

    def draw(root, batch):
        impulses = Impulses(process.schedule, process.covariance, root)
        x = nidiff.sample(
            gaussian.denoiser(impulses), (batch, *SHAPE), sampler=sampler, spacing=rows, dtype=torch.float64
        )
        return x, impulses.draws

    _, draws = draw(root[:, :0], 1)
    x, _ = draw(root, 30 * draws)
    return gaussian.covariance.basis.power(x).sum(0)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("levels", "boundary"), [("scalar", "reflecting"), ("per mode", "periodic")])
def test_the_prediction_is_the_exact_variance_of_the_samples(sampler, levels, boundary):
    noise = nidiff.gaussian_free_field(SHAPE, 0.5, boundary=boundary)
    schedule = nidiff.schedules.ddpm_cosine(40) if levels == "scalar" else per_mode_schedule(SHAPE, boundary)
    process = nidiff.Process(schedule, noise)
    gaussian = nidiff.GaussianModel(torch.zeros(SHAPE), nidiff.matern(SHAPE, 1.5, boundary=boundary))
    rows = [39, 30, 17.5, 9, 3]
    predicted = nidiff.design.predict(process, gaussian, sampler, rows)
    exact = exact_variance(process, gaussian, sampler, rows)
    torch.testing.assert_close(predicted.variance, exact, rtol=1e-9, atol=0)
    ratio = exact / gaussian.covariance.eigenvalues
    torch.testing.assert_close(predicted.ratio, ratio, rtol=1e-9, atol=0)
    assert predicted.error <= (ratio - 1).abs().max()
    other = nidiff.design.predict(process, gaussian, sampler, rows[:-1]).variance
    assert sampler == "angle_2m" or (other / exact - 1).abs().max() > 1e-3  # it does depend on the rows


def test_channels_each_have_their_own_error():
    data = nidiff.Channels(torch.eye(2), nidiff.matern(SHAPE, 2.0)).with_eigenvalues(
        torch.stack([nidiff.matern(SHAPE, 2.0).eigenvalues, nidiff.power_law(SHAPE, 3.0).eigenvalues])
    )
    process = nidiff.Process("ddpm_linear", nidiff.Identity(SHAPE))
    both = nidiff.design.predict(process, nidiff.GaussianModel(torch.zeros(2, *SHAPE), data), "ddim", [999, 300, 20])
    for channel, own in enumerate((nidiff.matern(SHAPE, 2.0), nidiff.power_law(SHAPE, 3.0))):
        alone = nidiff.design.predict(process, nidiff.GaussianModel(torch.zeros(SHAPE), own), "ddim", [999, 300, 20])
        torch.testing.assert_close(both.variance[channel], alone.variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("levels", ["scalar", "per mode"])
def test_it_is_exact_for_many_kinds_of_modes(levels, monkeypatch):
    """Each mode as if it were alone: no two of 600 are alike, one is far from all others, and chunks are small. With
    levels per mode, some agree in C/λ and not in their levels."""
    monkeypatch.setattr("nidiff.design.prediction.CHUNK", 100)
    variances = torch.cat([torch.logspace(-3, 3, 599, dtype=torch.float64), torch.tensor([1e7])])
    table = torch.linspace(6, -7, 40, dtype=torch.float64)
    if levels == "per mode":
        table = table[:, None] + torch.linspace(-1, 1, 600, dtype=torch.float64).roll(1) ** 3
        variances[300:310] = variances[300]

    def predicted(picked: slice) -> torch.Tensor:
        column = nidiff.Schedule(table[:, picked] if table.ndim > 1 else table)
        data = nidiff.Diagonal(variances[picked], normalize=False)
        noise = nidiff.Diagonal(torch.ones(len(variances[picked])), normalize=False)
        gaussian = nidiff.GaussianModel(torch.zeros(len(variances[picked])), data)
        return nidiff.design.predict(nidiff.Process(column, noise), gaussian, "ancestral", [39, 20, 8, 3]).ratio

    every = predicted(slice(None))
    for mode in (0, 17, 300, 301, 305, 450, 598, 599):
        torch.testing.assert_close(every[mode : mode + 1], predicted(slice(mode, mode + 1)), rtol=1e-9, atol=0)


def test_a_comparison_takes_a_few_kinds_of_modes_for_all():
    rows = [999, 700, 300, 100, 20]
    every, few = (SmallModel(WHITE, STEEP, *as_sampler("dpmpp_2m"), most).ratio(rows) for most in (None, 64))
    assert every.unique().numel() > 150
    assert 0 < (every - few).abs().max() < 0.005


def test_modes_without_wavenumbers_are_put_in_bands_by_rank():
    variances = torch.linspace(5, 1, 80, dtype=torch.float64)
    gaussian = nidiff.GaussianModel(torch.zeros(80), nidiff.Diagonal(variances))
    predicted = nidiff.design.predict(
        nidiff.Process("ddpm_linear", nidiff.Identity((80,))), gaussian, "ddim", [999, 99]
    )
    assert len(predicted.errors) == 32
    assert torch.equal(predicted.band, predicted.band.sort().values)


def test_the_error_is_the_mean_over_the_bands():
    ratio, band = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 1, 1])
    assert Prediction((3,), 4 * ratio, ratio, band, ratio - 1).error == pytest.approx(0.25)


def test_a_schedule_that_keeps_signal_starts_at_the_gaussian_alone():
    gaussian = nidiff.GaussianModel(torch.zeros(SHAPE), nidiff.matern(SHAPE, 1.5, boundary="reflecting"))
    process = nidiff.Process(nidiff.schedules.heat(SHAPE, num_levels=50), nidiff.Identity(SHAPE))
    with pytest.raises(nidiff.InputError):
        nidiff.design.predict(process, gaussian, rows=[49, 3])
    assert nidiff.design.predict(process, gaussian, rows=[49, 30, 12, 3], start="gaussian").error < 1


def test_predictions_are_made_on_the_cpu_whatever_the_default_device():
    usual = nidiff.design.predict(WHITE, STEEP, rows=[999, 99])
    with torch.device("meta"):
        assert nidiff.design.predict(WHITE, STEEP, rows=[999, 99]).error == usual.error


def test_what_cannot_be_predicted_is_refused():
    def more(chain, x, x0, here, there):
        return there.signal * x0 + there.sigma * chain.denoiser.eps(x, here)

    smld = nidiff.Process(nidiff.schedules.smld_geometric(10, 5.0, 0.01), nidiff.Identity((64, 64)))
    for process, sampler in ((WHITE, Sampler(more)), (smld, "als"), (smld, "cas")):
        with refused("sampler"):
            nidiff.design.predict(process, STEEP, sampler, rows=[9, 3])
    with refused("sampler"):
        nidiff.design.predict(WHITE, STEEP, "churn:colour=gff", rows=[9, 3])
    with refused("rows"):
        nidiff.design.predict(WHITE, STEEP, rows=[3, 1000])
    with refused("gaussian"):
        nidiff.design.predict(nidiff.Process("ddpm_linear", nidiff.Identity((4, 4))), STEEP, rows=[3])
