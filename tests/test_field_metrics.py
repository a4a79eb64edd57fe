"""Metrics of fields: closed forms, invariances, errors that are errors, and what is far off must be."""

import json
import math

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.cli import main
from nidiff.data.dataset import Dataset
from nidiff.data.grid import Grid
from nidiff.evaluation.distributions import by_channel, deviations, quantile_errors
from nidiff.evaluation.evaluate import evaluate_cell, evaluate_images
from nidiff.evaluation.metrics import METRICS, Metric, band_tables, measure
from nidiff.evaluation.results import Result
from nidiff.evaluation.samples import SampleSet
from nidiff.evaluation.spectrum import Shells


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coloured(count, shape=(24, 32), exponent=3.0, channels=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    covariance = nidiff.power_law(shape, exponent=exponent)
    return covariance.sample((count, channels, *shape), generator, dtype=torch.float64)


# Spectra ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (24, 32), (8, 12, 16)])
def test_a_power_law_is_recovered(shape):
    found = nidiff.metrics.field_spectrum(coloured(300, shape, 2.0))
    k, power = found.wavenumber, found.power.mean((0, 1))
    inside = (k >= 2) & (k <= max(shape) // 2)
    logs = torch.stack([k[inside].double().log(), torch.ones(int(inside.sum()), dtype=torch.float64)], 1)
    slope = torch.linalg.lstsq(logs, power[inside].log()[:, None]).solution[0].item()
    assert slope == pytest.approx(-2, abs=0.12)


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "fixed", ("reflecting", "periodic")])
@pytest.mark.parametrize("axes", [None, (0,), (1,)])
def test_the_modes_hold_all_of_the_energy(boundary, axes):
    # Parseval: an orthonormal transform keeps the sum of squares, whatever the axes and boundaries.
    x = draws(3, 2, 9, 14)
    found = nidiff.metrics.field_spectrum(x, axes=axes, boundary=boundary)
    others = 1 if axes is None else x[0, 0].numel() // math.prod(x.shape[2 + axis] for axis in axes)
    assert found.modes.sum().item() == x[0, 0].numel() / others
    energy = (found.power * found.modes).sum(-1) * others
    assert torch.allclose(energy, x.square().sum((2, 3)), rtol=1e-12)


def test_a_wave_has_its_power_at_its_wavenumber():
    place = torch.arange(32, dtype=torch.float64)
    wave = (2**0.5 * torch.cos(2 * math.pi * 5 * place / 32)).expand(2, 1, 24, 32)
    both, along, across = (nidiff.metrics.field_spectrum(wave, axes=axes) for axes in (None, (1,), (0,)))
    for found in (both, along):
        total = found.power[0, 0] * found.modes
        assert found.wavenumber[total.argmax()] == 5
        assert total.max() == pytest.approx(total.sum().item(), rel=1e-12)
    assert across.power[0, 0, 0] == pytest.approx(24, rel=1e-12)  # it is constant along the other axis
    half_wave = torch.cos(math.pi * 3 * (place + 0.5) / 32).expand(2, 1, 32)
    cosines = nidiff.metrics.field_spectrum(half_wave, boundary="reflecting").power[0, 0]
    assert cosines.argmax() == 3
    assert cosines[3] == pytest.approx(cosines.sum().item(), rel=1e-12)
    sines = torch.sin(math.pi * 4 * (place + 0.5) / 32).expand(2, 1, 32)
    found = nidiff.metrics.field_spectrum(sines, boundary="fixed")
    assert found.wavenumber[found.power[0, 0].argmax()] == 4
    # In waves of another boundary it is smeared out.
    other = nidiff.metrics.field_spectrum(half_wave).power[0, 0]
    assert other.max() < 0.9 * (other * nidiff.metrics.field_spectrum(half_wave).modes).sum()


def test_a_field_that_does_not_wrap_needs_the_waves_of_its_boundary():
    # A slope is steep in cosines, k^-4, and the jump at the edge of a periodic box makes it k^-2.
    slope = torch.linspace(0, 1, 64, dtype=torch.float64).expand(2, 1, 64)
    cosines, waves = (
        nidiff.metrics.field_spectrum(slope, boundary=name).power[0, 0] for name in ("reflecting", "periodic")
    )
    assert cosines[21] / cosines[3] == pytest.approx(7.0**-4, rel=0.1)
    assert waves[14] / waves[2] == pytest.approx(7.0**-2, rel=0.2)


def test_bands_are_half_octaves_and_cover_every_mode_but_the_mean():
    for event in [(64,), (48, 96), (32, 32, 32), (3,), (2, 7)]:
        shells = Shells(event, None, "periodic")
        bands = shells.bands
        inside = [k for low, high in bands for k in range(low, high + 1)]
        assert set(shells.wavenumber.tolist()) - {0} <= set(inside)
        assert len(set(inside)) == len(inside)
        assert bands[-1][1] == shells.wavenumber[-1]
    highest = [high for _, high in Shells((48, 96), None, "periodic").bands[:8]]
    assert highest == [1, 2, 3, 4, 6, 8, 11, 16]


def test_a_gain_is_known_in_every_band_and_units_do_not_matter():
    x, y = coloured(40, channels=2), coloured(40, channels=2, seed=1)
    assert nidiff.metrics.compare_spectra(x, x).error == 0
    assert nidiff.metrics.compare_spectra(x, x).within == 1
    gain = nidiff.metrics.compare_spectra(x, 10**0.5 * x)
    assert torch.allclose(gain.difference, torch.ones_like(gain.difference))
    assert gain.error == pytest.approx(1, rel=1e-12)
    assert gain.rows(1)[0]["ratio"] == pytest.approx(10)
    scale = torch.tensor([1e-6, 3e4], dtype=torch.float64).reshape(2, 1, 1)
    for compare in (nidiff.metrics.compare_spectra, nidiff.metrics.compare_cross_spectra):
        assert compare(scale * x, scale * y).error == pytest.approx(compare(x, y).error, rel=1e-9)


def test_errors_of_the_bands_are_those_of_repeated_draws():
    sets = [coloured(50, (16, 16), seed=seed) for seed in range(60)]
    found = [nidiff.metrics.compare_spectra(one, other) for one, other in zip(sets[::2], sets[1::2], strict=True)]
    z = torch.cat([one.z.flatten() for one in found])
    assert z.square().mean().sqrt().item() == pytest.approx(1, abs=0.15)
    assert np.mean([one.within for one in found]) > 0.9
    fourfold = nidiff.metrics.compare_spectra(torch.cat(sets[:4]), torch.cat(sets[4:8]))
    assert (fourfold.real_error / found[0].real_error).mean().item() == pytest.approx(0.5, abs=0.1)
    # The control: 10 % of power more is seen.
    assert nidiff.metrics.compare_spectra(torch.cat(sets[:20]), 1.05 * torch.cat(sets[20:40])).within < 0.5


# Between channels -------------------------------------------------------------------------------------------------


def test_the_coherence_of_a_known_mixture():
    # x2 = a x1 + b n: γ = a / √(a² + b²) at every scale, with the sign of a.
    one, noise = coloured(400, seed=3), coloured(400, seed=4)
    for a, b in [(0.6, 0.8), (-2.0, 1.0)]:
        both = torch.cat([one, a * one + b * noise], 1)
        found = nidiff.metrics.compare_cross_spectra(both[:200], both[200:])
        expected = a / math.hypot(a, b)
        assert torch.allclose(found.real.mean(0).real, torch.tensor(expected, dtype=torch.float64), atol=0.08)
        assert found.real.imag.abs().mean() < 0.05
        assert found.within > 0.7
        assert found.rows()[0]["real"] == pytest.approx(abs(expected), abs=0.1)
    alone = torch.cat([noise, one], 1)
    assert nidiff.metrics.compare_cross_spectra(both, alone).error > 0.8  # the control
    assert nidiff.metrics.compare_cross_spectra(both, both).error == 0


def test_a_channel_that_leads_another_has_a_phase():
    # x2(s) = x1(s − 1): γ(k) = e^(2πik/n) along that axis, and 1 along the other.
    one = coloured(20, (16, 32), 1.0)
    both = torch.cat([one, one.roll(1, -1)], 1)
    along = nidiff.metrics.compare_cross_spectra(both, both, axes=(1,))
    assert along.real.abs().min() > 0.9
    assert along.rows()[3]["real_phase"] == pytest.approx(2 * math.pi * 4 / 32, rel=1e-9)
    across = nidiff.metrics.compare_cross_spectra(both, both, axes=(0,))
    assert across.real.imag.abs().max() < 0.2
    # The same mistake the other way round has the same coherence but another phase, which counts as an error.
    mirrored = torch.cat([one, one.roll(-1, -1)], 1)
    assert nidiff.metrics.compare_cross_spectra(both, mirrored, axes=(1,)).error > 0.5


# Values, increments, spread -----------------------------------------------------------------------------------------


def test_wasserstein_of_a_shift_and_of_a_gain():
    x = draws(50, 2, 64)
    shift = torch.tensor([0.3, -2.0], dtype=torch.float64).reshape(2, 1)
    assert torch.allclose(
        nidiff.metrics.wasserstein(x, x + shift) * x.transpose(0, 1).flatten(1).std(1), shift.abs().flatten()
    )
    # N(0, 1) and N(m, 1): |m|; N(0, 1) and N(0, s²): (s − 1) √(2/π).
    many, others = draws(2000, 1, 100, seed=1), draws(1500, 1, 100, seed=2)
    assert nidiff.metrics.wasserstein(many, others + 0.7).item() == pytest.approx(0.7, abs=0.01)
    assert nidiff.metrics.wasserstein(many, 1.5 * others).item() == pytest.approx(0.5 * (2 / math.pi) ** 0.5, abs=0.01)
    assert nidiff.metrics.wasserstein(many, others).item() < 0.01
    # Units do not matter.
    assert nidiff.metrics.wasserstein(5e3 * many, 5e3 * others).item() == pytest.approx(
        nidiff.metrics.wasserstein(many, others).item()
    )


def test_wasserstein_of_sets_of_different_sizes_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    a, b = draws(7, 1, 5), draws(4, 1, 5, seed=1) ** 2
    expected = stats.wasserstein_distance(a.flatten(), b.flatten()) / a.std()
    assert nidiff.metrics.wasserstein(a, b).item() == pytest.approx(expected.item(), rel=1e-12)
    assert nidiff.metrics.wasserstein(a, a.repeat(3, 1, 1)).item() < 1e-12


def test_tails_of_a_heavy_distribution():
    normal, other = draws(500, 1, 200), draws(400, 1, 200, seed=1)
    heavy = other**3 / 15**0.5
    normal, other, heavy = map(by_channel, (normal, other, heavy))
    assert quantile_errors(normal, other).abs().max() < 0.2
    # The 99.9 % quantile of n³/√15 is 3.09³/√15 = 7.62.
    assert quantile_errors(normal, heavy).flatten().tolist() == pytest.approx([-4.5, 4.5], abs=0.5)


def test_structure_functions_of_a_brownian_path_and_of_an_ou_process():
    steps = draws(2000, 1, 128)
    path = steps.cumsum(-1)
    lags = (1, 2, 4, 8, 16)
    second, fourth = (nidiff.metrics.structure_function(path, order, lags=lags).mean((0, 1)) for order in (2, 4))
    assert torch.allclose(second, torch.tensor(lags, dtype=torch.float64), rtol=0.05)  # E (B(s+r) − B(s))² = r
    assert torch.allclose(fourth, 3 * second**2, rtol=0.1)  # a Gaussian is flat: 3
    rho, ou = 0.8, torch.empty_like(steps)
    ou[..., 0] = steps[..., 0]
    for t in range(1, steps.shape[-1]):
        ou[..., t] = rho * ou[..., t - 1] + (1 - rho**2) ** 0.5 * steps[..., t]
    found = nidiff.metrics.structure_function(ou, 2, lags=lags).mean((0, 1))
    assert torch.allclose(found, 2 * (1 - rho ** torch.tensor(lags, dtype=torch.float64)), rtol=0.05)
    assert nidiff.metrics.structure_function(draws(2, 1, 40), 2).shape == (2, 1, 5)  # 1, 2, 4, 8, 16


def test_structure_functions_along_an_axis_do_not_wrap():
    ramp = torch.arange(8, dtype=torch.float64).expand(2, 1, 5, 8)
    assert nidiff.metrics.structure_function(ramp, 2, axis=1, lags=(1, 3)).tolist() == [[[1, 9]], [[1, 9]]]
    assert nidiff.metrics.structure_function(ramp, 4, axis=0, lags=(1, 3)).abs().max() == 0


def test_spread_sees_a_collapse_that_spectra_do_not():
    real, good = coloured(60), coloured(60, seed=1)
    collapsed = good[:1].expand(60, -1, -1, -1) + 1e-3 * draws(60, 1, 24, 32, seed=5)
    assert torch.allclose(deviations(draws(500, 3, 40)), torch.ones(3, dtype=torch.float64), atol=0.02)
    fine, one = (nidiff.metrics.compare_fields(real, other, bootstrap=0) for other in (good, collapsed))
    assert fine["spread"].value < 0.1
    assert one["spread"].value > 0.99
    assert one["increments"].value < 0.3


# All metrics --------------------------------------------------------------------------------------------------------


def test_every_metric_is_0_for_the_same_fields_and_large_for_white_noise():
    real = coloured(50, channels=2)
    mixed = torch.cat([real[:, :1], 0.8 * real[:, :1] + 0.6 * real[:, 1:]], 1)
    same = nidiff.metrics.compare_fields(mixed, mixed, bootstrap=0)
    assert {name: one.value for name, one in same.items()} == dict.fromkeys(same, 0.0)
    expected = {"spectrum", "axis spectra", "coherence", "values", "tails", "increments", "flatness"}
    assert set(same) == expected | {"structure 2", "structure 4", "spread"}
    fair = nidiff.metrics.compare_fields(mixed[:25], mixed[25:], bootstrap=0)
    noise = nidiff.metrics.compare_fields(mixed[:25], 2 * draws(25, 2, 24, 32, seed=9), bootstrap=0)
    worse = {name for name in fair if noise[name].value > 3 * fair[name].value}
    assert worse >= set(fair) - {"flatness"}  # white noise has Gaussian increments too


def test_a_video_has_a_spectrum_in_time_and_flicker():
    smooth = coloured(40, (8, 8), channels=1)[:, :, None].expand(-1, -1, 8, -1, -1)
    video = smooth + 0.1 * draws(40, 1, 8, 8, 8)
    grid = Grid(("time", "height", "width"))
    shuffled = torch.stack(
        [one[:, torch.randperm(8, generator=torch.Generator().manual_seed(i))] for i, one in enumerate(video)]
    )
    jumping = coloured(40, (8, 8), channels=8, seed=3)[:, None] + 0.1 * draws(40, 1, 8, 8, 8)
    still, flickers = (nidiff.metrics.compare_fields(video, one, grid=grid, bootstrap=0) for one in (shuffled, jumping))
    assert {"time spectrum", "flicker"} <= set(still)
    assert still["flicker"].value < 0.02
    assert flickers["flicker"].value > 3
    assert flickers["time spectrum"].value > 0.5
    assert flickers["spectrum"].value < 0.1  # each frame is fine
    assert "flicker" not in nidiff.metrics.compare_fields(video, shuffled, bootstrap=0)


def test_errors_are_what_other_draws_would_change_and_fall_with_their_number():
    real = SampleSet(coloured(300, (16, 16), seed=50))
    few = [measure(real, SampleSet(coloured(40, (16, 16), seed=seed)), bootstrap=0) for seed in range(12)]
    error = measure(real, SampleSet(coloured(40, (16, 16), seed=20)), bootstrap=30)
    fewer = measure(real, SampleSet(coloured(10, (16, 16), seed=20)), bootstrap=30)
    for name in ("structure 2", "spread", "values"):
        between = np.std([one[name].value for one in few], ddof=1)
        assert between / 2.5 < error[name].error < 2.5 * between
        assert 1.2 < fewer[name].error / error[name].error < 3.5  # √4, within what 10 fields tell


def test_a_metric_of_ones_own_sees_the_resampled_fields(monkeypatch):
    monkeypatch.setitem(METRICS, "mean", Metric(lambda a, b: abs(b.items.mean() - a.items.mean())))
    found = nidiff.metrics.compare_fields(draws(50, 1, 16), draws(50, 1, 16, seed=1) + 3, bootstrap=10)["mean"]
    assert found.value == pytest.approx(3, abs=0.2)
    assert 0 < found.error < 0.2


def test_tables_name_channels_and_axes():
    grid = Grid(("lat", "lon"), channels=("t", "u"), units=("K", "m/s"))
    real = coloured(8, (6, 12), channels=2)
    tables = band_tables(SampleSet(real, grid=grid), SampleSet(real, grid=grid))
    assert [one.get("spectrum") for one in tables] == [*["lat, lon"] * 2, None, *["lat"] * 2, *["lon"] * 2]
    assert tables[1]["channel"] == "u (m/s)"
    assert tables[2]["channels"] == "t (K) and u (m/s)"
    assert all(row["ratio"] == 1 and row["z"] == 0 for row in tables[0]["bands"])


def test_fields_without_power_are_infinitely_far_and_not_nan():
    real, flat = coloured(5, (8, 8)), torch.ones(5, 1, 8, 8)
    assert nidiff.metrics.compare_spectra(real, flat).error == math.inf
    assert nidiff.metrics.compare_spectra(flat, flat).error == 0
    for pair in ((real, flat), (flat, flat), (flat, real)):
        found = nidiff.metrics.compare_fields(*pair, bootstrap=2)
        assert not any(math.isnan(one.value) for one in found.values())


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("fields", lambda x: nidiff.metrics.field_spectrum(x[0, 0])),
        ("axes", lambda x: nidiff.metrics.field_spectrum(x, axes=(2,))),
        ("boundary", lambda x: nidiff.metrics.field_spectrum(x, boundary="open")),
        ("generated", lambda x: nidiff.metrics.compare_spectra(x, x[:, :1])),
        ("real", lambda x: nidiff.metrics.compare_spectra(x[:1], x)),
        ("real", lambda x: nidiff.metrics.compare_cross_spectra(x[:, :1], x[:, :1])),
        ("bootstrap", lambda x: nidiff.metrics.compare_fields(x, x, bootstrap=1)),
        ("axis", lambda x: nidiff.metrics.structure_function(x, axis=2)),
        ("lags", lambda x: nidiff.metrics.structure_function(x, lags=(9,))),
        ("order", lambda x: nidiff.metrics.structure_function(x, 0)),
        ("generated", lambda x: nidiff.metrics.wasserstein(x, x * math.nan)),
    ],
)
def test_refusals_name_the_argument(argument, call):
    with refused(argument, None):
        call(draws(4, 2, 6, 8))


# The commands -------------------------------------------------------------------------------------------------------

QUICK = ("--seeds", "0-7", "--num-steps", "2", "--bootstrap", "2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on temperatures and winds, of which a third is held out."""
    base = tmp_path_factory.mktemp("fields")
    one, other = coloured(24, (8, 12), seed=1), coloured(24, (8, 12), seed=2)
    both = torch.cat([280 + 5 * one, 10 * (0.8 * one + 0.6 * other)], 1)
    np.save(base / "weather.npy", both.float().numpy())
    data = ["--data", str(base / "weather.npy"), "--layout", "NCHW", "--held-out", "0.34", "--boundary", "periodic"]
    size = ["--steps", "1", "--cooldown", "0", "--widths", "8", "--attention", "--batch-size", "4"]
    drawn = [
        "--num-samples",
        "1",
        "--num-steps",
        "1",
        "--target",
        "v",
        "--precision",
        "fp32",
        "--out",
        str(base / "run"),
    ]
    assert main(["train", *data, *size, *drawn]) == 0
    return base / "run"


def asked(capsys, *words):
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_a_run_on_fields_is_compared_with_what_was_held_out(run, capsys):
    code, out, _ = asked(capsys, "evaluate", run, *QUICK, "--json")
    found = json.loads(out)
    assert code == 0
    about, details = found["provenance"], found["details"]
    assert (about["split"], about["num_items"], about["num_generated"]) == ("test", 8, 8)
    assert about["boundary"] == "periodic/periodic"
    assert "features" not in about
    assert isinstance(about["gaussian_nats_per_dim"], float)
    # In kelvins: the spectrum of the real data in the table is that of the file.
    weather = torch.from_numpy(np.load(run.parent / "weather.npy")).double()
    expected = nidiff.metrics.compare_spectra(weather, weather).real[0, -1].item()
    table = next(one for one in details["bands"] if one.get("spectrum") == "height, width")
    assert table["bands"][-1]["real"] == pytest.approx(expected, rel=0.3)
    assert details["floor"].keys() == found["metrics"].keys()
    assert found["metrics"]["coherence"]["value"] > 2 * details["floor"]["coherence"]["value"]  # it is untrained
    # What was measured is not measured again, and is what Python says.
    file = run / "metrics.json"
    before = file.read_bytes()
    code, out, _ = asked(capsys, "evaluate", run, *QUICK, "--json")
    assert (code, json.loads(out), file.read_bytes()) == (0, found, before)
    result = evaluate_cell(run, seeds=range(8), num_steps=2, bootstrap=2)
    assert result.metrics["spectrum"].value == found["metrics"]["spectrum"]["value"]


def test_a_table_of_fields_and_features_of_ones_own(run, capsys, tmp_path):
    class Means(torch.nn.Module):
        def forward(self, x):
            return x.mean((2, 3))  # of what the model sees, which has a mean of 0

    torch.jit.script(Means()).save(tmp_path / "means.pt")
    own = ["--features", tmp_path / "means.pt", "--trust-features"]
    flags = ["--seeds", "0-7", "--num-steps", "2", "1", "--bootstrap", "0", "--samplers", "ddim"]
    code, out, _ = asked(capsys, "table", run, *flags, *own, "--out", tmp_path / "table")
    assert code == 0
    assert "FD-means" in out
    assert "structure 4" in out
    assert (tmp_path / "table" / "table.png").exists()
    rows = json.loads((tmp_path / "table" / "table.json").read_text())
    assert all(row["metrics"]["FD-means"]["value"] < 10 for row in rows)  # in kelvins it would be 80,000
    code, _, err = asked(capsys, "evaluate", run, *QUICK, *own[:2])
    assert (code, "--trust-features" in err) == (2, True)


def test_fields_of_ones_own_are_compared_without_a_model(run, capsys, tmp_path):
    weather = np.load(run.parent / "weather.npy")
    np.save(tmp_path / "mine.npy", weather[:10])
    flags = ["--data", run.parent / "weather.npy", "--layout", "NCHW", "--bootstrap", "0"]
    code, out, _ = asked(capsys, "evaluate", tmp_path / "mine.npy", *flags, "--json")
    found = json.loads(out)
    assert (code, found["provenance"]["split"], found["provenance"]["num_items"]) == (0, "given", 24)
    same = evaluate_images(weather[:10], Dataset(torch.from_numpy(weather)), bootstrap=0)
    assert same.metrics["values"].value == pytest.approx(found["metrics"]["values"]["value"], rel=1e-6)
    assert Result.from_json(same.to_json()).details["floor"] == same.to_json()["details"]["floor"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--boundary", "fixed/fixed/fixed"], "--boundary"),
        (["--features", "inception"], "--features"),
        (["--bootstrap", "1"], "--bootstrap"),
        (["--seeds", "3"], "generated"),
        (["--data", "digits"], "digits"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_drawn(run, capsys, flags, words):
    before = sorted(run.rglob("*"))
    code, out, err = asked(capsys, "evaluate", run, "--num-steps", "3", *flags)
    assert (code, out) == (2, "")
    assert words in err
    assert sorted(run.rglob("*")) == before


def test_an_axis_of_one_pixel_does_not_hide_the_phase():
    """A shift along the first axis, of fields whose last axis, periodic too, has one pixel or is not there."""
    x = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(0))
    shifted = torch.cat([x, x.roll(1, 2)], 1)
    line, thin = (nidiff.metrics.compare_cross_spectra(z[:32], z[32:]).real for z in (shifted, shifted.unsqueeze(-1)))
    assert torch.allclose(line, thin)
    assert line.abs().min() > 0.7


def test_samples_of_ours_are_read_as_we_wrote_them_whatever_the_layout_of_the_data(tmp_path, capsys):
    x = torch.randn(32, 8, 8, 8, generator=torch.Generator().manual_seed(0)).cumsum(-1).numpy()
    np.save(tmp_path / "data.npy", x)
    (tmp_path / "samples").mkdir()
    np.savez(tmp_path / "samples" / "samples.npz", arr_0=np.moveaxis(x, 1, -1))
    given = ["--data", str(tmp_path / "data.npy"), "--layout", "NCHW", "--bootstrap", "0", "--json"]
    assert main(["evaluate", str(tmp_path / "samples"), *given]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["spectrum"]["value"] == pytest.approx(0.0, abs=1e-6)


def test_a_tensor_of_floats_beyond_one_is_no_picture():
    data = 300 + 100 * torch.randn(30, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    result = evaluate_images(data, data.flip(0), bootstrap=0)
    assert result is not None
    assert "spectrum" in result.metrics
    assert result.clip is None
