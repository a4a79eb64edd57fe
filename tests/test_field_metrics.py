"""Metrics of fields: closed forms, invariances, errors that are errors, and what is far off must be."""

import json
import math

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.cli import main
from nidiff.data.grid import Grid
from nidiff.evaluation.distributions import by_channel, deviations, quantile_errors
from nidiff.evaluation.evaluate import evaluate_cell, evaluate_images
from nidiff.evaluation.metrics import measure
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


@pytest.mark.parametrize(
    "boundary, axes", [("periodic", None), ("reflecting", (0,)), ("fixed", (1,)), (("reflecting", "periodic"), None)]
)
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
    phase = math.pi * 3 * (place + 0.5) / 32
    for boundary, half_wave in {"reflecting": phase.cos(), "fixed": phase.sin()}.items():
        x = half_wave.expand(2, 1, 32)
        found, other = nidiff.metrics.field_spectrum(x, boundary=boundary), nidiff.metrics.field_spectrum(x)
        total, smeared = found.power[0, 0] * found.modes, other.power[0, 0] * other.modes
        assert found.wavenumber[total.argmax()] == 3
        assert total.max() == pytest.approx(total.sum().item(), rel=1e-12)
        assert smeared.max() < 0.9 * smeared.sum()  # in waves of another boundary


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
    # Another axis that is periodic too, but has one pixel, does not hide it.
    line = both[:, :, 0]
    thin, plain = (nidiff.metrics.compare_cross_spectra(x, x).real for x in (line.unsqueeze(-1), line))
    assert torch.allclose(thin, plain)


# Values, increments, spread -----------------------------------------------------------------------------------------


def test_wasserstein_of_sets_of_different_sizes_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    a, b = draws(7, 1, 5), draws(4, 1, 5, seed=1) ** 2
    expected = stats.wasserstein_distance(a.flatten(), b.flatten()) / a.std()
    assert nidiff.metrics.wasserstein(a, b).item() == pytest.approx(expected.item(), rel=1e-12)
    assert nidiff.metrics.wasserstein(a, a.repeat(3, 1, 1)).item() < 1e-12
    assert nidiff.metrics.wasserstein(5e3 * a, 5e3 * b).item() == pytest.approx(expected.item())  # in any units
    assert torch.allclose(nidiff.metrics.wasserstein(a, a + 0.3) * a.std(), torch.tensor(0.3, dtype=torch.float64))


def test_tails_of_a_heavy_distribution():
    normal, other = draws(500, 1, 200), draws(400, 1, 200, seed=1)
    heavy = other**3 / 15**0.5
    normal, other, heavy = map(by_channel, (normal, other, heavy))
    assert quantile_errors(normal, other).abs().max() < 0.2
    # The 99.9 % quantile of n³/√15 is 3.09³/√15 = 7.62.
    assert quantile_errors(normal, heavy).flatten().tolist() == pytest.approx([-4.5, 4.5], abs=0.5)


def test_structure_functions_of_a_brownian_path_and_of_an_ou_process():
    path, lags = draws(2000, 1, 128).cumsum(-1), torch.tensor([1, 2, 4, 8, 16])
    second, fourth = (nidiff.metrics.structure_function(path, order, lags=lags.tolist()) for order in (2, 4))
    second, fourth = second.mean((0, 1)), fourth.mean((0, 1))
    assert torch.allclose(second, lags.double(), rtol=0.05)  # E (B(s+r) − B(s))² = r
    assert torch.allclose(fourth, 3 * second**2, rtol=0.1)  # a Gaussian is flat: 3
    ou = nidiff.ar1(128, 0.8).sample((2000, 1, 128), 0, dtype=torch.float64)
    found = nidiff.metrics.structure_function(ou, 2, lags=lags.tolist()).mean((0, 1))
    assert torch.allclose(found, 2 * (1 - 0.8 ** lags.double()), rtol=0.05)
    assert nidiff.metrics.structure_function(draws(2, 1, 40), 2).shape == (2, 1, 5)  # 1, 2, 4, 8, 16
    ramp = torch.arange(8, dtype=torch.float64).expand(2, 1, 5, 8)  # which does not wrap around
    assert nidiff.metrics.structure_function(ramp, 2, axis=1, lags=(1, 3)).tolist() == [[[1, 9]], [[1, 9]]]
    assert nidiff.metrics.structure_function(ramp, 4, axis=0, lags=(1, 3)).abs().max() == 0


def test_spread_is_the_distance_of_two_items():
    """2 spread² is the mean squared distance of two items, per pixel; pixels may vary by different amounts."""
    values = draws(7, 2, 5) * torch.tensor([0.1, 1.0, 2.0, 5.0, 30.0], dtype=torch.float64)
    squared = (values[:, None] - values).square().mean(-1).sum((0, 1)) / (7 * 6)
    assert torch.allclose(2 * deviations(values).square(), squared)


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


def test_fields_without_power_are_infinitely_far_and_not_nan():
    real, flat = coloured(5, (8, 8)), torch.ones(5, 1, 8, 8)
    assert nidiff.metrics.compare_spectra(real, flat).error == math.inf
    assert nidiff.metrics.compare_spectra(flat, flat).error == 0
    for pair in ((real, flat), (flat, flat), (flat, real)):
        found = nidiff.metrics.compare_fields(*pair, bootstrap=2)
        assert not any(math.isnan(one.value) for one in found.values())


REFUSED = [
    ("fields", lambda x: nidiff.metrics.field_spectrum(x[0, 0])),
    ("axes", lambda x: nidiff.metrics.field_spectrum(x, axes=(2,))),
    ("generated", lambda x: nidiff.metrics.compare_spectra(x, x[:, :1])),
    ("real", lambda x: nidiff.metrics.compare_spectra(x[:1], x)),
    ("real", lambda x: nidiff.metrics.compare_cross_spectra(x[:, :1], x[:, :1])),
    ("bootstrap", lambda x: nidiff.metrics.compare_fields(x, x, bootstrap=1)),
    ("axis", lambda x: nidiff.metrics.structure_function(x, axis=2)),
    ("lags", lambda x: nidiff.metrics.structure_function(x, lags=(9,))),
    ("generated", lambda x: nidiff.metrics.wasserstein(x, x * math.nan)),
]


def test_refusals_name_the_argument():
    for argument, call in REFUSED:
        with refused(argument):
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
    drawn = ["--num-samples", "1", "--num-steps", "1", "--target", "v", "--precision", "fp32"]
    assert main(["train", *data, *size, *drawn, "--out", str(base / "run")]) == 0
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
    # In kelvins: the spectrum of the real data in the table is that of the file.
    weather = torch.from_numpy(np.load(run.parent / "weather.npy")).double()
    expected = nidiff.metrics.compare_spectra(weather, weather).real[0, -1].item()
    names = [one.get("spectrum") for one in details["bands"]]
    assert names == [*["height, width"] * 2, None, *["height"] * 2, *["width"] * 2]  # None: between channels
    table = details["bands"][0]
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
    flags = ["--seeds", "0-7", "--num-steps", "1", "--bootstrap", "0", "--samplers", "ddim"]
    code, out, _ = asked(capsys, "table", run, *flags, *own, "--out", tmp_path / "table")
    assert code == 0
    assert "FD-means" in out
    assert "structure 4" in out
    assert (tmp_path / "table" / "table.png").exists()
    rows = json.loads((tmp_path / "table" / "table.json").read_text())
    assert all(row["metrics"]["FD-means"]["value"] < 10 for row in rows)  # in kelvins it would be 80,000
    code, _, err = asked(capsys, "evaluate", run, *QUICK, *own[:2])
    assert (code, "--trust-features" in err) == (2, True)


@pytest.mark.filterwarnings("ignore:the model sees values")  # there is no model
def test_fields_of_ones_own_are_compared_without_a_model(run, capsys, tmp_path):
    """Samples of ours are read as we wrote them, whatever the layout of the data."""
    weather = np.load(run.parent / "weather.npy")
    (tmp_path / "mine").mkdir()
    np.savez(tmp_path / "mine" / "samples.npz", arr_0=np.moveaxis(weather[:10], 1, -1))
    flags = ["--data", run.parent / "weather.npy", "--layout", "NCHW", "--bootstrap", "0"]
    code, out, _ = asked(capsys, "evaluate", tmp_path / "mine", *flags, "--json")
    found = json.loads(out)
    assert (code, found["provenance"]["split"], found["provenance"]["num_items"]) == (0, "given", 24)
    same = evaluate_images(weather[:10], torch.from_numpy(weather), bootstrap=0)  # floats beyond 1 are no pictures
    assert same.metrics["values"].value == pytest.approx(found["metrics"]["values"]["value"], rel=1e-6)
    assert same.clip is None
    assert Result.from_json(same.to_json()).details["floor"] == same.to_json()["details"]["floor"]


def test_bad_flags_are_refused_before_anything_is_drawn(run, capsys):
    before = sorted(run.rglob("*"))
    for flags, words in (
        (["--boundary", "fixed/fixed/fixed"], "--boundary"),
        (["--features", "inception"], "--features"),
        (["--bootstrap", "1"], "--bootstrap"),
        (["--seeds", "3"], "generated"),
        (["--data", "digits"], "digits"),
    ):
        code, out, err = asked(capsys, "evaluate", run, "--num-steps", "3", *flags)
        assert (code, out, words in err) == (2, "", True), flags
    assert sorted(run.rglob("*")) == before
