"""The commands of the stories in docs/ run, on small data and for a few steps, and what the stories rest on holds."""

import importlib.util
import json
import re
import runpy
import shlex
import wave
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import xarray
from PIL import Image

import nidiff
from nidiff.cli import main

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
SHORT = {"--steps": "2", "--cooldown": "0", "--warmup": "1", "--num-samples": "2"}
FIELDS = {
    "train": SHORT | {"--batch-size": "8", "--network": "unet:patch=2", "--widths": "8", "--held-out": "0.5"},
    "sample": {"--seeds": "0-31"},
    "table": {"--seeds": "0-31"},
    "design": {"--covariances": "white gff:gamma=1", "--schedules": "ddpm_linear", "--out": "design.svg"},
}
TIME = {
    "train": SHORT | {"--batch-size": "2", "--widths": "8 8", "--attention": "1"},
    "sample": {"--seeds": "0-3"},
    "evaluate": {"--seeds": "0-3", "--bootstrap": "2"},
    "table": {"--seeds": "0-3", "--bootstrap": "2", "--num-steps": "20"},
    "likelihood": {"--num-images": "2", "--rtol": "0.3"},
    "design": {"--covariances": "white power_law:exponent=1", "--schedules": "ddpm_cosine"},
    "noise": {"--num-images": "2"},
}


def example(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def commands(page: str) -> list[list[str]]:
    """The commands of a page, word by word."""
    text = re.sub(r"\\\n +", " ", (ROOT / "docs" / page).read_text())
    return [shlex.split(line, comments=True) for line in re.findall(r"^    ((?:python|nidiff) .*)$", text, re.M)]


def smaller(words: list[str], small: dict[str, dict[str, str]]) -> list[str]:
    """The same command with the flags of ``small``."""
    replaced = small.get(words[0], {})
    result, skipping = [], False
    for word in words:
        skipping = word in replaced or (skipping and not word.startswith("--"))
        result += [] if skipping else [word]
    return result + [part for flag, values in replaced.items() for part in (flag, *values.split())]


def run(lines: list[list[str]], small: dict[str, dict[str, str]], capsys, without: str = "-") -> dict[str, str]:
    """Run the nidiff commands, but for those about the run ``without``, and return their output by command."""
    printed = {}
    for program, *words in lines:
        if program == "nidiff" and without not in (words[1], words[-1]):
            words = smaller([word for word in words if word != without], small)
            assert main(words) == 0, capsys.readouterr().err
            printed[shlex.join(words)] = capsys.readouterr().out
    return printed


def output(printed: dict[str, str], start: str) -> str:
    return next(text for command, text in printed.items() if command.startswith(start))


def test_climate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    story, lines = example("climate"), commands("climate.md")
    story["make"]("climate.nc", shape=(8, 16), years=2)
    small = FIELDS | {"design": FIELDS["design"] | {"--held-out": "0.5"}}
    lines = [line for line in lines if "out/solver" not in line and line[1] != "evaluate"]
    printed = run(lines, small, capsys, without="runs/white")
    assert "--boundary reflecting/periodic" in output(printed, "design").splitlines()[-1]

    (file,) = tmp_path.glob("runs/designed/generated/angle_2m-10-*/samples.nc")
    with xarray.open_dataset("climate.nc") as data, xarray.open_dataset(file) as samples:
        assert {name: samples[name].units for name in samples.data_vars} == {"t2m": "K", "u10": "m/s"}
        for axis in ("latitude", "longitude"):
            np.testing.assert_array_equal(samples[axis], data[axis])
            assert samples[axis].units == data[axis].units
        assert samples.t2m.shape == (32, 8, 16)
        means = [maps.t2m.mean(("longitude", maps.t2m.dims[0])).values for maps in (data, samples)]
        assert np.corrcoef(*means)[0, 1] > 0.9  # the equator is warm, in kelvin
        assert abs(means[0] - means[1]).max() < 10

    results = {
        name: json.loads(Path(f"runs/{name}/metrics.json").read_text())[0] for name in ("designed", "designed-v")
    }
    provenance = results["designed"]["provenance"]
    assert (provenance["boundary"], provenance["split"]) == ("reflecting/periodic", "test")
    first, second, both = results["designed"]["details"]["bands"][:3]
    assert (first["channel"], second["channel"], both["channels"]) == ("t2m (K)", "u10 (m/s)", "t2m (K) and u10 (m/s)")
    # The output of the untrained network is 0. With the residual target, samples are then draws of the data's Gaussian,
    # which has both spectra and the coherence; with v they are not.
    inside = {
        name: np.mean([abs(band["z"]) < 3 for table in result["details"]["bands"][:3] for band in table["bands"]])
        for name, result in results.items()
    }
    assert inside["designed"] > 0.8 > inside["designed-v"]
    story["draw"]("climate.nc", ["runs/designed", "runs/designed-v"])
    assert Path("climate.png").stat().st_size > 30_000


def test_volumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    story = example("volumes")
    story["make"]("volumes.nc", size=8, count=64)
    run(commands("volumes.md"), FIELDS, capsys, without="runs/white")
    assert {row["run"] for row in json.loads(Path("out/volumes/table.json").read_text())} == {"matern", "own"}
    (file,) = tmp_path.glob("runs/matern/generated/dpmpp_2m-20-*/samples.nc")
    with xarray.open_dataset("volumes.nc") as data, xarray.open_dataset(file) as samples:
        assert samples.density.shape == (32, 8, 8, 8)
        assert samples.density.min() > 0  # of any sample: the scaling is a logarithm
        assert samples.x.units == "Mpc"
        assert 0.5 < np.log(samples.density).std() / np.log(data.density).std() < 1.5
    story["draw"]("volumes.nc", ["runs/matern", "runs/own"])
    assert Path("volumes.png").stat().st_size > 30_000


def benchmark(name: str, monkeypatch) -> dict:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "stories"))
    return runpy.run_path(str(ROOT / "benchmarks" / "stories" / f"{name}.py"))


def test_rock(tmp_path, monkeypatch, capsys):
    """Blocks of a small rock, held out below those to train on, and what is observed without a slab."""
    monkeypatch.chdir(tmp_path)
    field = nidiff.matern((64, 64, 64), length_scale=4.0).sample((64, 64, 64), torch.Generator().manual_seed(0))
    planes = [Image.fromarray(np.where(plane > 0.8, 255, 0).astype(np.uint8)) for plane in field.numpy()]
    planes[0].save("berea.tif", save_all=True, append_images=planes[1:])
    example("rock")["main"]("berea.tif", "berea.nc", size=8)
    small = {
        "train": SHORT | {"--batch-size": "8", "--widths": "8", "--held-out": "start=23:", "--no-report": ""},
        "sample": {"--seeds": "0-3"},
        "restore": {"--num-steps": "2"},
    }
    printed = run(commands("rock.md"), small, capsys)
    (file,) = tmp_path.glob("runs/matern-0/generated/*/samples.nc")
    with xarray.open_dataset("berea.nc") as data, xarray.open_dataset(file) as samples:
        assert samples.pore.shape == (4, 8, 8, 8)
        np.testing.assert_allclose(data.porosity, data.pore.mean(("z", "y", "x")), rtol=1e-5)
        first, held_out = data.start.values, data.start.values >= 23
        assert first[~held_out].max() + 8 <= 23  # no block to train on reaches into those that are held out
        np.testing.assert_array_equal(np.load("block.npy"), data.pore[held_out][0])
    folder = Path(output(printed, "restore").strip())
    observed, known = np.load(folder / "observed.npy")[0, ..., 0], np.load("slab.npy")
    np.testing.assert_array_equal(np.isnan(observed), ~known)
    assert np.abs(observed - np.load("block.npy"))[known].max() < 0.1  # the noise


def test_measures_of_pores_and_rocks_by_formula(monkeypatch):
    """Chords and faces of a box, and the porosity, surface and two-point function of the baselines."""
    rock, generator = benchmark("rock", monkeypatch), torch.Generator().manual_seed(0)
    box = torch.zeros(1, 8, 8, 8, dtype=torch.bool)
    box[0, 2:5, 3:5, 1:7] = True  # 3 x 2 x 6 voxels
    shares = np.zeros(9)
    shares[[3, 2, 6]] = np.array([12, 18, 6]) / 36
    np.testing.assert_allclose(rock["chords"](box), shares)
    assert rock["surface"](box) == pytest.approx(2 * (6 + 12 + 18) / (7 * 8 * 8))
    assert rock["connected"](box) == 1
    box[0, 0, 0, 0] = True
    assert rock["connected"](box) == 36 / 37

    asked = torch.full((12,), 0.2, dtype=torch.float64)
    wanted = 0.04 + 0.16 * torch.exp(-torch.arange(32) / 3.0)
    gaussian = rock["truncated_gaussian"](wanted, asked, generator)
    assert gaussian.double().mean((1, 2, 3)).sub(0.2).abs().max() < 1e-3
    assert (rock["two_point"](gaussian)[1:6] - wanted[1:6]).abs().max() < 0.01
    spheres = rock["overlapping_spheres"](4.0, asked, generator)
    assert spheres.double().mean().item() == pytest.approx(0.2, abs=0.03)
    measured = rock["two_point"](spheres)
    assert rock["radius_of"](measured) == pytest.approx(4.0, abs=0.5)


@pytest.mark.filterwarnings("ignore:.*continued with silence")
def test_speech(tmp_path, monkeypatch, capsys):
    """From WAV files named as those of the data set to sounds of the same kind; the noise is other speakers'."""
    monkeypatch.chdir(tmp_path)
    rng, recordings = np.random.default_rng(0), Path("free-spoken-digit-dataset/recordings")
    recordings.mkdir(parents=True)
    for digit, (speaker, pitch), take in product((0, 1), (("george", 200), ("lucas", 900)), range(10)):
        wave = np.sin(2 * np.pi * pitch * (1 + digit / 4) / 8000 * np.arange(rng.integers(2000, 6000)))
        soundfile.write(recordings / f"{digit}_{speaker}_{take}.wav", 0.3 * rng.random() * wave, 8000)
    example("speech")["main"](recordings, Path("out/fsdd"))
    small = {
        "train": SHORT | {"--batch-size": "4", "--widths": "16 16", "--attention": "1", "--no-report": ""},
        "sample": {"--seeds": "0-3", "--num-steps": "2"},
        "evaluate": {"--seeds": "0-3", "--num-steps": "2", "--bootstrap": "0"},
        "denoise": {"--num-steps": "2"},
    }
    printed = run(commands("speech.md"), small, capsys)
    assert re.search(r"^(spectrum|values|increments) ", output(printed, "evaluate"), re.M)
    folder = Path(output(printed, "sample").strip())
    assert np.load(folder / "samples.npz")["classes"].tolist() == [0, 1, 2, 3]
    for path in (folder / "wav").glob("*.wav"):
        sound, rate = soundfile.read(path)
        assert (len(sound), rate) == (4096, 8000)

    # Of the noise of a clip nothing is at the pitches of its own speaker.
    for name, own, other in (("0_george", (200, 250), (900, 1125)), ("1_lucas", (900, 1125), (200, 250))):
        clean = example("speech")["middle"](soundfile.read(f"out/fsdd/test/{name}/0.wav")[0])
        noise = soundfile.read(f"out/fsdd/noisy/{name}.wav")[0] - clean
        power = np.abs(np.fft.rfft(noise * np.hanning(4096))) ** 2
        at_own, at_other = (sum(power[round(f * 4096 / 8000)] for f in pitches) for pitches in (own, other))
        assert at_own < 0.1 * at_other
        assert noise.std() == pytest.approx(0.07, rel=0.02)


def test_measures_of_speech_by_formula(monkeypatch):
    """No loudness improves the ratio, and the filter in short windows does, of a tone that begins in the middle."""
    speech, generator = benchmark("speech", monkeypatch), torch.Generator().manual_seed(0)
    tone = torch.sin(0.3 * torch.arange(4096)).view(1, 1, -1) * (torch.arange(4096) > 2000)
    noise = torch.randn(50, 1, 4096, generator=generator)
    ratio = speech["si_sdr"](tone + 0.5 * noise[:1], tone)
    expected = 10 * torch.log10(tone.square().mean() / 0.25)
    assert ratio.item() == pytest.approx(expected.item(), abs=0.3)
    torch.testing.assert_close(speech["si_sdr"](7 * (tone + 0.5 * noise[:1]), tone), ratio)
    power = 0.25 * speech["window_power"](noise)
    filtered = speech["short_time_wiener"](tone + 0.5 * noise[:1], power)
    assert speech["si_sdr"](filtered, tone) > ratio + 6


def test_sounds_come_out_as_they_went_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example("heartbeats")["main"](Path("out/heartbeats"), 20)
    printed = run(commands("signals.md"), TIME, capsys)
    assert re.search(r"^(spectrum|values|increments) ", output(printed, "evaluate"), re.M)
    assert "Gaussian N(mu, C)" in output(printed, "likelihood runs/beats-pink")
    folder = Path(output(printed, "sample").strip())
    numbers = np.load(folder / "samples.npz")["arr_0"]
    for path, sound in zip(sorted((folder / "wav").glob("*.wav")), numbers, strict=True):
        with wave.open(str(path)) as file, wave.open("out/heartbeats/00000.wav") as real:
            assert file.getparams()[:4] == real.getparams()[:4] == (1, 2, 256, 1024)
            pulses = np.frombuffer(file.readframes(1024), "<i2")
        np.testing.assert_allclose(pulses, (32768 * sound[:, 0]).clip(-32768, 32767), atol=0.51)


def test_frames_drawn_from_coherent_noise_flicker_less(tmp_path, monkeypatch, capsys):
    """Before it is trained, a model of v returns its noise, and AR(1) noise moves sqrt(1 - rho) as far as white
    noise; a model of the residual returns the data's Gaussian, whatever its noise."""
    monkeypatch.chdir(tmp_path)
    example("video")["main"](Path("out/turbulence.npy"), 20)
    printed = run(commands("video.md"), TIME, capsys)
    for path in (Path(output(printed, "sample").strip()) / "gif").glob("*.gif"):
        with Image.open(path) as picture:
            assert picture.n_frames == 8
    moved = {}
    for name in ("coherent", "white", "coherent-v", "white-v"):
        (file,) = Path(f"runs/video-{name}/generated").glob("dpmpp_2m-20-*/samples.npz")
        video = np.load(file)["arr_0"]
        assert video.shape == (4, 8, 32, 32, 1)
        moved[name] = flicker(video)
    assert moved["coherent-v"] / moved["white-v"] == pytest.approx(0.1**0.5, rel=0.1)
    assert moved["coherent"] == pytest.approx(moved["white"], rel=0.15)
    assert moved["white"] < 1.5 * flicker(np.load("out/turbulence.npy")) < 0.5 * moved["white-v"]


def flicker(video: np.ndarray) -> float:
    """mean |x(t+1) - x(t)|, in standard deviations."""
    return np.abs(np.diff(video, axis=1)).mean() / video.std()


def test_heartbeats_are_not_gaussian_signals_with_their_spectrum():
    """The R peaks are steep: increments are far from Gaussian, unlike those of signals with random phases."""
    rng, heartbeat = np.random.default_rng(0), example("heartbeats")["heartbeat"]
    real = np.stack([heartbeat(rng) for _ in range(50)])
    waves = np.fft.rfft(real)
    shuffled = np.fft.irfft(np.abs(waves) * np.exp(2j * np.pi * rng.uniform(size=waves.shape)))
    flatness = [(np.diff(x) ** 4).mean() / (np.diff(x) ** 2).mean() ** 2 for x in (real, shuffled)]
    assert flatness[0] > 10
    assert 2 < flatness[1] < 5


def test_frames_of_turbulence_follow_the_flow(tmp_path):
    """The next frame is the last one moved by the velocity of its own vorticity; moved backwards it is not."""
    story = example("video")
    story["main"](tmp_path / "video.npy", 3)
    video = np.load(tmp_path / "video.npy")
    assert video.shape == (3, 8, 32, 32)
    assert np.abs(video.mean((2, 3))).max() < 0.01
    waves, steps = np.fft.rfft2(video[:, :-1]), 10
    errors = {}
    for sign in (1, -1):
        moved = waves
        for _ in range(steps):
            half = moved + sign * 0.125 / steps * story["slope"](moved)
            moved = moved + sign * 0.25 / steps * story["slope"](half)
        errors[sign] = np.abs(np.fft.irfft2(moved) - video[:, 1:]).mean()
    still = np.abs(np.diff(video, axis=1)).mean()
    assert errors[1] < 0.6 * still < still < errors[-1]


def record(path: str, times: np.ndarray) -> None:
    """A file as that of NOAA PSL: the first row is the north pole, and temperatures have seasons and a Pacific."""
    latitude, longitude = np.linspace(90, -90, 7), np.arange(0, 360, 30.0)
    rng, count = np.random.default_rng(0), len(times)
    month = (times.astype("datetime64[M]").astype(int) % 12)[:, None, None]
    season = 15 * np.cos(2 * np.pi * month / 12) * np.sin(np.radians(latitude))[:, None]
    warm = rng.normal(size=(count, 1, 1)) * np.exp(-(((longitude - 210) / 60) ** 2) - (latitude[:, None] / 30) ** 2)
    values = 20 - np.abs(latitude)[:, None] / 2 - season + 3 * warm + 0.3 * rng.normal(size=(count, 7, 12))
    coordinates = {
        "time": times.astype("datetime64[ns]"),
        "lat": ("lat", latitude.astype("f4"), {"units": "degrees_north"}),
        "lon": ("lon", longitude.astype("f4"), {"units": "degrees_east"}),
    }
    air = (("time", "lat", "lon"), values.astype("f4"), {"units": "degC", "long_name": "Monthly Mean Air Temperature"})
    xarray.Dataset({"air": air}, coordinates).to_netcdf(path, engine="h5netcdf")


RECORD = {
    "train": SHORT | {"--batch-size": "4", "--widths": "8 8", "--attention": "1"},
    "sample": {"--seeds": "0-3", "--num-steps": "2"},
    "evaluate": {"--seeds": "0-7", "--num-steps": "2", "--bootstrap": "2"},
    "restore": {"--samples": "2", "--num-steps": "2"},
}


@pytest.fixture
def climate_story(tmp_path, monkeypatch):
    """The script that measures the story, for small data in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "stories"))
    times = np.arange("1948-01", "2026-01", dtype="datetime64[M]")
    record("air.mon.mean.nc", times)
    script = ROOT / "benchmarks" / "stories" / "climate.py"
    story = importlib.util.module_from_spec(importlib.util.spec_from_file_location("climate_story", script))
    story.__spec__.loader.exec_module(story)
    return story


def test_a_climate_record(climate_story, monkeypatch, capsys):
    lines = commands("climate_real.md")
    (cut,) = (words for program, *words in lines if program == "python" and words[0] == "-c")
    exec(cut[1])
    with xarray.open_dataset("months.nc") as months:
        assert len(months.time) == 18
        assert len({*months.time.dt.month.values}) == 12
    printed = run(lines, RECORD, capsys)
    folder = Path(output(printed, "sample").strip())
    with xarray.open_dataset(folder / "samples.nc") as samples, xarray.open_dataset("air.mon.mean.nc") as data:
        np.testing.assert_array_equal(samples.lat, data.lat)
        assert samples.air.units == "degC"
    found = Path(output(printed, "restore runs/ncep-white-0 months.nc --mask").strip())
    with xarray.open_dataset(found / "samples.nc") as samples:
        assert samples.air.dims == ("time", "sample", "lat", "lon")
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "climate_real.md").read_text(), re.S)
    names: dict = {}
    exec(program.replace("< 0.01", "< 0.2"), names)  # of few points
    normals, truth = names["scaling"].to_data(torch.zeros_like(names["x"])), names["months"].air.values[:, None]
    errors = [np.square(guess.numpy() - truth).mean() for guess in (names["mean"], normals)]
    assert errors[0] < 0.7 * errors[1]
    # What the page measures, in the same folder, and once more from what is stored.
    for name, value in {"EVERY": 40, "COUNT": 9, "MAPS": 16, "BANDS": (1, 2, 3, 7)}.items():
        monkeypatch.setattr(climate_story, name, value)
    tasks = {"stations": ("--mask", "random:0.2", "--noise", "0.5"), "coarse": ("--scale", "4")}
    monkeypatch.setattr(climate_story, "TASKS", tasks)
    Path("months.nc").unlink()
    results = climate_story.Results("climate", Path("out"))
    for _ in range(2):
        story = climate_story.Story("air.mon.mean.nc", [Path("runs/ncep-white-0")], results, Path("."))
        story.measure()
    values = results.values
    assert values["climatology-0/stations"]["rmse"] > values["optimal interpolation-0/stations"]["rmse"]
    assert values["held-out years/maps"]["spectrum"] == 0 < values["training years/maps"]["spectrum"]
    assert "kriging" in climate_story.tables(values)


def test_optimal_interpolation_is_the_posterior_of_its_gaussian(climate_story):
    """Draws have the mean and the covariance of Kalman's formulas with the dense matrix."""
    rng, shape = np.random.default_rng(0), (3, 4)
    fields, cov = rng.normal(size=(9, *shape)), nidiff.matern(shape, length_scale=1.0)
    law = climate_story.Gaussian(fields, cov, 0.3)
    dense = 0.7 * np.cov(fields.reshape(9, 12).T, bias=True) + 0.7 * np.outer(*2 * [fields.reshape(9, 12).mean(0)])
    dense = dense + 0.3 * cov.dense().numpy()
    rows = climate_story.rows_of(np.where(rng.uniform(size=shape) < 0.3, 1.0, np.nan), np.full(shape, 2.0))
    matrix = rows.reshape(len(rows), 12)
    y = rng.normal(size=(1, len(rows)))
    seen = matrix @ dense @ matrix.T + 0.25 * np.eye(len(rows))
    gain = np.linalg.solve(seen, matrix @ dense).T
    draws = law.posterior(y, rows, 0.5, 20_000)[:, 0].reshape(-1, 12)
    np.testing.assert_allclose(draws.mean(0), gain @ y[0], atol=0.04)
    np.testing.assert_allclose(np.cov(draws.T), dense - gain @ matrix @ dense, atol=0.05)
    assert np.abs(np.cov(draws.T) - dense).max() > 0.2  # the control: the prior is another law
