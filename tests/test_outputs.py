"""Samples leave in the units that their data came in, in files that others read; a kill changes no byte of them."""

import json
import wave
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from PIL import Image
from problems import refused, untrained_model
from test_sample_command import KILLED, run_killed

import nidiff
from nidiff.cli import main
from nidiff.data.dataset import as_stored
from nidiff.data.grid import Grid
from nidiff.diffusion.scaling import Scaling
from nidiff.files import file_sha256
from nidiff.generation.export import Samples, as_xarray, write_gif, write_wav
from nidiff.generation.folder import SampleFolder
from nidiff.generation.job import Job, as_saved
from nidiff.generation.loaded_model import Model, resized
from nidiff.model.folder import save_model
from nidiff.model.unet import FieldUNet

LATITUDE, LONGITUDE = tuple(np.linspace(-70.0, 70.0, 8)), tuple(np.arange(16) * 22.5)
CLIMATE = Grid(
    ("latitude", "longitude"),
    ("temperature", "wind"),
    ("K", "m/s"),
    {"latitude": LATITUDE, "longitude": LONGITUDE},
    {"latitude": "degrees_north", "longitude": "degrees_east"},
)
# The shape [C, *event] of each kind, its scaling and its grid.
KINDS = {
    "signal": ((1, 32), Scaling(0.05), Grid(("time",), ("sound",), rate=8000)),
    "field": ((2, 8, 16), Scaling((12.0, 7.0), (280.0, -1.0)), CLIMATE),
    "volume": ((1, 8, 8, 8), Scaling(0.5, 2.0, True), Grid(("z", "y", "x"), ("density",), ("kg/m3",))),
    "video": ((1, 4, 8, 8), Scaling(3.0), Grid(("time", "y", "x"))),
    "picture16": ((1, 8, 8), Scaling(32767.5, 32767.5), Grid(("height", "width"), dtype="uint16")),
}
STEPS = ("--num-steps", "3", "--tile", "4")


def model_of(kind: str, folder: Path) -> Path:
    """A small model that was never trained: what it makes is a function of the seed."""
    shape, scaling, grid = KINDS[kind]
    torch.manual_seed(0)
    net = FieldUNet(shape[1:], shape[0], shape[0], widths=(8,), layers=1, attention=())
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(10), nidiff.gaussian_free_field(shape[1:]))
    save_model(nidiff.Denoiser(net, process, "v", scaling=scaling), folder, grid=grid)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return cache(lambda kind: model_of(kind, place / kind))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No grid.png, which takes a second; test_figures.py has it."""
    monkeypatch.setattr("nidiff.generation.folder.save_samples_figure", lambda *_: None)


@pytest.fixture
def sample(models, capsys):
    def run(kind, out, *flags):
        code = main(["sample", str(models(kind)), "--out", str(out), "--seeds", "3-6", *STEPS, *flags])
        return code, capsys.readouterr().err

    return run


def stored(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "samples.npz", allow_pickle=False) as content:
        return dict(content)


def drawn(folder: Path, kind: str) -> np.ndarray:
    """What the library draws for the same seeds, in the units of the data, channels last."""
    shape, scaling, grid = KINDS[kind]
    x = nidiff.sample(nidiff.load_model(folder), (4, *shape), num_steps=3, generator=range(3, 7), tile=4)
    return as_stored(x, scaling, grid.dtype).movedim(1, -1).numpy()


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): file_sha256(path) for path in files}


# Units -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["field", "volume", "picture16"])  # the others below, as sounds and films
def test_samples_are_in_the_units_of_the_data(models, sample, tmp_path, kind):
    assert sample(kind, tmp_path / "s", "--format", "npy")[0] == 0
    found = stored(tmp_path / "s")
    assert found["seeds"].tolist() == [3, 4, 5, 6]
    assert found["arr_0"].dtype == KINDS[kind][2].dtype
    assert np.array_equal(found["arr_0"], drawn(models(kind), kind))
    mapped = np.load(tmp_path / "s" / "samples.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, found["arr_0"])
    if kind == "picture16":  # a PNG of 16 bits is exact
        assert sample(kind, tmp_path / "s", "--format", "png")[0] == 0
        with Image.open(tmp_path / "s" / "png" / "000004.png") as picture:
            assert np.array_equal(np.asarray(picture), found["arr_0"][1, ..., 0])
    else:  # floats are written as they are: it is the same job
        assert sample(kind, tmp_path / "s", "--floats")[0] == 0
        assert json.loads((tmp_path / "s" / "job.json").read_text())["job"]["floats"] is False


def test_floats_are_never_clipped_and_whole_numbers_stay_in_their_range():
    x = torch.tensor([-3.0, -0.5, 0.0, 1.0, 7.0]).reshape(1, 1, 5)
    assert as_saved(x, Scaling(2.0, 1.0), "float32", False).flatten().tolist() == [-5.0, 0.0, 1.0, 3.0, 15.0]
    assert as_saved(x, Scaling(127.5, 127.5), "uint8", False).flatten().tolist() == [0, 64, 128, 255, 255]
    assert as_saved(x, Scaling(127.5, 127.5), "uint8", True).flatten().tolist() == [-1.0, -0.5, 0.0, 1.0, 1.0]
    fitted = as_saved(x, Scaling(64.0, 64.0), "uint8", True)  # 64 x + 64 is a pixel, whose range is [-1, 1]
    assert torch.allclose(fitted.flatten(), torch.tensor([-1.0, -0.749, -0.498, 0.0039, 1.0]), atol=1e-3)


# Formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_names_units_and_coordinates_come_back_through_xarray(sample, tmp_path, format):
    """A file of all samples is kept up to date, and can be read as data."""
    assert sample("field", tmp_path / "s", "--format", format, "--seeds", "5-6")[0] == 0
    assert sample("field", tmp_path / "s", "--seeds", "3-4")[0] == 0
    found = stored(tmp_path / "s")
    if format == "netcdf":
        opened = xarray.open_dataset(tmp_path / "s" / "samples.nc", engine="h5netcdf")
    else:
        opened = xarray.open_zarr(tmp_path / "s" / "samples.zarr")
    with opened as data:
        assert set(data.data_vars) == {"temperature", "wind"}
        assert data.temperature.dims == ("sample", "latitude", "longitude")
        assert data.temperature.dtype == np.float32
        assert (data.temperature.units, data.wind.units) == ("K", "m/s")
        assert data.longitude.units == "degrees_east"
        assert np.array_equal(data.latitude, LATITUDE)
        assert data["sample"].values.tolist() == [3, 4, 5, 6]
        for channel, name in enumerate(("temperature", "wind")):
            assert np.array_equal(data[name], found["arr_0"][..., channel])
        assert data.attrs["source"] == f"nidiff {nidiff.__version__}"
        assert data.attrs["job"] == str(found["job"])
    if format == "netcdf":
        data = nidiff.load_dataset(tmp_path / "s" / "samples.nc", progress=False)
        assert data.grid == CLIMATE
        assert np.array_equal(data.stored(torch.arange(4)).movedim(1, -1), found["arr_0"])


def test_names_that_clash_are_told_apart():
    grid = Grid(("sample", "time"), ("wind", "wind", "time", "a/b"))
    data = as_xarray(Samples(np.zeros((1, 4, 2, 3), np.float32), np.array([7]), grid, {}))
    assert list(data.data_vars) == ["wind_0", "wind_1", "time_2", "a_b_3"]
    assert data.wind_0.dims == ("sample_", "sample", "time")
    plain = as_xarray(Samples(np.zeros((1, 2, 3), np.float32), np.array([7]), Grid(("x",)), {}))
    assert list(plain.data_vars) == ["channel_0", "channel_1"]


def test_a_wav_file_is_the_signal(sample, tmp_path):
    assert sample("signal", tmp_path / "s", "--format", "wav")[0] == 0
    signals = stored(tmp_path / "s")["arr_0"]
    for seed, signal in zip(range(3, 7), signals, strict=True):
        with wave.open(str(tmp_path / "s" / "wav" / f"{seed:06d}.wav")) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (8000, 1, 2)
            pulses = np.frombuffer(sound.readframes(1000), "<i2")
        assert np.abs(pulses / 2**15 - signal[:, 0]).max() <= 0.5 / 2**15
    assert np.abs(signals).max() > 0.01  # the control: they are not silent
    sounds = nidiff.load_dataset(tmp_path / "s" / "wav", progress=False)  # they can be read as data
    assert sounds.grid.rate == 8000
    assert np.abs(sounds.stored(torch.arange(4)).movedim(1, -1).numpy() - signals).max() <= 0.5 / 2**15
    assert sample("signal", tmp_path / "t", "--format", "wav", "--rate", "4000", "--seeds", "3")[0] == 0
    assert nidiff.load_dataset(tmp_path / "t" / "wav", progress=False).grid.rate == 4000


def test_what_a_wav_file_cannot_hold_is_said(tmp_path, capsys):
    grid, quiet = Grid(("time",), rate=100), np.zeros((2, 1, 1000), np.float32)
    write_wav(Samples(quiet, np.array([0, 1]), grid, {}), tmp_path)
    assert capsys.readouterr().err == ""
    quiet[1, 0, :5] = (-1.5, -1.0, 0.5, 1.0, 1.5)
    write_wav(Samples(quiet, np.array([0, 1]), grid, {}), tmp_path)
    assert "1 of the sounds" in capsys.readouterr().err
    with wave.open(str(tmp_path / "000001.wav")) as sound:
        assert np.frombuffer(sound.readframes(5), "<i2").tolist() == [-32768, -32768, 16384, 32767, 32767]
    with refused("format"):
        write_wav(Samples(quiet + 3, np.array([0, 1]), grid, {}), tmp_path)
    stereo = np.stack([np.full(3, 0.25), np.full(3, -0.5)])[None].astype(np.float32)
    write_wav(Samples(stereo, np.array([2]), grid, {}), tmp_path)
    with wave.open(str(tmp_path / "000002.wav")) as sound:  # the channels take turns
        assert np.frombuffer(sound.readframes(3), "<i2").tolist() == [8192, -16384] * 3


def test_a_gif_has_every_frame(sample, tmp_path):
    assert sample("video", tmp_path / "s", "--format", "gif")[0] == 0
    with Image.open(tmp_path / "s" / "gif" / "000005.gif") as film:
        assert film.n_frames == 4
        assert film.info["duration"] == 100
        assert b"seed 5" in film.info["comment"]
    pixels = np.random.default_rng(0).integers(0, 256, (1, 1, 5, 8, 6), dtype=np.uint8)
    write_gif(Samples(pixels, np.array([0]), Grid(("time", "y", "x"), dtype="uint8"), {}), tmp_path)
    with Image.open(tmp_path / "000000.gif") as film:
        for number in range(5):
            film.seek(number)
            shown = np.asarray(film.convert("L"))
            factor = shown.shape[1] // 6
            assert np.array_equal(shown[::factor, ::factor], pixels[0, 0, number])


def test_what_is_no_picture_is_drawn_once_for_each_seed(sample, tmp_path):
    flags = ("--format", "png", "--seeds", "3,4")
    assert sample("signal", tmp_path / "s", *flags)[0] == 0
    files = [tmp_path / "s" / "png" / f"00000{seed}.png" for seed in (3, 4)]
    with Image.open(files[0]) as picture:
        assert picture.info["seed"] == "3"
        assert picture.width > 300
    before, unchanged = [file.read_bytes() for file in files], files[1].stat().st_mtime_ns
    assert before[0] != before[1]
    files[0].write_bytes(before[1])  # that of another seed
    assert sample("signal", tmp_path / "s", *flags)[0] == 0
    assert [file.read_bytes() for file in files] == before
    assert files[1].stat().st_mtime_ns == unchanged


def test_what_does_not_fit_is_refused_before_anything_is_drawn(sample, tmp_path):
    for kind, flags, message in (
        ("field", ("--format", "wav"), "format='wav'"),
        ("signal", ("--format", "gif"), "format='gif'"),
        ("field", ("--format", "hdf4"), "format='hdf4'"),
        ("signal", ("--rate", "8000"), "rate"),
        ("signal", ("--rate", "-5", "--format", "wav"), "rate=-5"),
        ("field", ("--shape", "8"), "shape=(8,)"),
        ("field", ("--shape", "0", "8"), "shape="),
    ):
        code, log = sample(kind, tmp_path / "x", *flags)
        assert (code, log.count("\n")) == (2, 1), flags
        assert message in log
        assert not (tmp_path / "x").exists()
    job, grid = Job("model", "ddim", 5, "uniform"), Grid(("time",))
    with refused("format"):  # a signal needs a rate
        SampleFolder(tmp_path / "x", job, (1, 8), "wav", grid).check()
    SampleFolder(tmp_path / "x", job, (1, 8), "wav", replace(grid, rate=8000)).check()


# Again, more, and killed -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_again_and_again_it_leaves_the_same_files(models, sample, tmp_path):
    own = ["sample", str(models("field")), "--seeds", "3-6", *STEPS, "--batch", "2"]
    # The folder of Zarr gets its name by os.rename.
    code = "import h5netcdf, xarray, zarr, nidiff.generation.folder as f\nf.save_samples_figure = lambda *_: None\n"
    code += KILLED.replace("os.replace = dying", "os.replace = os.rename = dying")
    run_killed([[*own, "--out", str(tmp_path / format), "--format", format] for format in ("netcdf", "zarr")], code)
    for format in ("netcdf", "zarr"):
        assert sample("field", tmp_path / f"straight-{format}", "--format", format)[0] == 0
        assert hashes(tmp_path / format) == hashes(tmp_path / f"straight-{format}")


def test_links_and_other_files_are_left_alone(sample, tmp_path):
    assert sample("field", tmp_path / "s")[0] == 0
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("years")
    (tmp_path / "s" / "samples.zarr").symlink_to(tmp_path / "precious")
    code, log = sample("field", tmp_path / "s", "--format", "zarr")
    assert (code, "samples.zarr" in log) == (2, True)
    assert (tmp_path / "precious" / "data").read_text() == "years"
    assert sample("field", tmp_path / "precious", "--format", "netcdf")[0] == 2
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["data"]


# On another grid -------------------------------------------------------------------------------------------------


def test_coordinates_of_another_grid_lie_over_the_same_domain():
    """A periodic axis keeps its first point; any other keeps its edges, half a step beyond its ends."""
    grid = resized(CLIMATE, (8, 16), (16, 32), ("reflecting", "periodic"))
    latitude, longitude = grid.coordinates["latitude"], grid.coordinates["longitude"]
    assert np.allclose(longitude, np.arange(32) * 11.25)
    assert np.allclose(np.diff(latitude), 10)
    assert np.allclose((latitude[0] - 5, latitude[-1] + 5), (-80, 80))
    back = resized(grid, (16, 32), (8, 16), ("reflecting", "periodic"))
    assert np.allclose(back.coordinates["latitude"], LATITUDE)
    assert resized(Grid(("time",), rate=8000), (32,), (64,), ("periodic",)).rate == 16000
    assert resized(Grid(("x",), coordinates={"x": (3.0,)}), (1,), (2,), ("fixed",)).coordinates["x"] == (3.0, 3.0)


def test_a_model_is_sampled_on_another_grid(models, sample, tmp_path, capsys):
    assert sample("field", tmp_path / "s", "--format", "netcdf", "--shape", "16", "32")[0] == 0
    denoiser, scaling = nidiff.load_model(models("field")).at((16, 32)), KINDS["field"][1]
    x = nidiff.sample(denoiser, (4, 2, 16, 32), num_steps=3, generator=range(3, 7), tile=4)
    found = stored(tmp_path / "s")["arr_0"]
    assert np.array_equal(found, as_stored(x, scaling, "float32").movedim(1, -1).numpy())
    with xarray.open_dataset(tmp_path / "s" / "samples.nc", engine="h5netcdf") as data:
        assert np.allclose(data.longitude, np.arange(32) * 11.25)  # the noise is periodic
    assert sample("field", tmp_path / "s")[0] == 2  # another job
    assert sample("field", tmp_path / "t", "--shape", "8", "16")[0] == 0  # the model's own
    assert "shape" not in json.loads((tmp_path / "t" / "job.json").read_text())["job"]
    halving = untrained_model(tmp_path / "m")  # each axis, once
    assert main(["sample", str(halving), "--out", str(tmp_path / "x"), "--shape", "9", "8"]) == 2
    assert "shape=(9, 8)" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("boundary", ["periodic", None])
def test_with_white_noise_the_gaussian_of_the_data_says_what_the_edges_are(boundary):
    shape, event = (2, 8, 16), (8, 16)
    gaussian = None
    if boundary is not None:
        gaussian = nidiff.GaussianModel(torch.zeros(shape), nidiff.gaussian_free_field(event, boundary=boundary))
    net = FieldUNet(event, 2, 2, widths=(8,), layers=1, attention=())
    process = nidiff.Process(nidiff.schedules.ddpm_linear(10), nidiff.Identity(event))
    denoiser = nidiff.Denoiser(net, process, "v", gaussian=gaussian)
    longitude = Model(Path(), denoiser, shape, "", CLIMATE).at((8, 32)).grid.coordinates["longitude"]
    assert longitude[0] == (0 if boundary == "periodic" else -22.5 / 4)
