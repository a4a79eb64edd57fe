"""Data of any kind: what is in a file comes out, in its units and in the model's; or a sentence says what is wrong."""

import itertools
import json
import os
import struct
import sys
import threading
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from problems import load, refuse
from scipy.io import wavfile

import nidiff
from nidiff.cli import main
from nidiff.data.arrays import EXAMPLES, Layout
from nidiff.data.dataset import Dataset, Source
from nidiff.data.grid import AXES
from nidiff.data.load import load_items
from nidiff.data.moments import RunningMoments

xarray = pytest.importorskip("xarray")
SHAPE = {"time": 12, "lat": 4, "lon": 6}
DAYS = np.datetime64("2010-01-01") + np.arange(12) * np.timedelta64(12, "h")


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def climate(**extra):
    """Temperature and wind over a grid, in their units."""
    random = np.random.default_rng(0)
    axes = ("time", "lat", "lon")
    warmth, wind = random.normal(280, 15, (12, 4, 6)), random.normal(-2, 4, (12, 4, 6))
    return xarray.Dataset(
        {
            "t2m": (axes, warmth.astype("f4"), {"units": "K"}),
            "u10": (axes, wind.astype("f4"), {"units": "m/s"}),
            "crs": ((), 1),
            **extra,
        },
        coords={
            "time": DAYS,
            "lat": ("lat", np.linspace(60.0, -60.0, 4), {"units": "degrees_north"}),
            "lon": np.arange(6) * 60.0,
        },
    )


def store(table, path):
    if path.suffix == ".zarr":
        table.to_zarr(path, zarr_format=2, consolidated=True)
    else:
        table.to_netcdf(path, engine="h5netcdf")
    return path


@pytest.fixture(scope="module")
def climate_file(tmp_path_factory):
    """A NetCDF file of `climate`."""
    return store(climate(), tmp_path_factory.mktemp("climate") / "a.nc")


def in_memory_and_streamed(path, **options):
    memory, stream = (load(path, memory_limit=limit, **options) for limit in (None, 0))
    assert isinstance(memory.values, torch.Tensor)
    assert not isinstance(stream.values, torch.Tensor)
    return memory, stream


# Formats


@pytest.mark.parametrize("name", ["a.nc", "a.h5", "a.zarr"])
def test_variables_become_channels_with_units_and_coordinates(tmp_path, name):
    table = climate()
    for data in in_memory_and_streamed(store(table, tmp_path / name)):
        assert np.array_equal(data.stored(torch.arange(12)).numpy(), np.stack([table.t2m, table.u10], 1))
        grid = data.grid
        assert (grid.axes, grid.channels, grid.units) == (("lat", "lon"), ("t2m", "u10"), ("K", "m/s"))
        assert grid.coordinates["lat"] == (60.0, 20.0, -20.0, -60.0)
        assert grid.axis_units == {"lat": "degrees_north"}
        assert np.array_equal(data.along[1], DAYS)
        grid.check(data.shape)


def test_variables_and_the_sample_axis_can_be_named(tmp_path):
    table = climate().transpose("lon", "time", "lat")
    file = store(table, tmp_path / "a.nc")
    for options in ({}, {"sample_axis": "time"}):  # longitude comes first, which is no axis of items
        data = load(file, variables=["u10"], **options)
        assert np.array_equal(data.values.numpy(), table.u10.values.transpose(1, 0, 2)[:, None])
        assert data.grid.axes == ("lon", "lat")
    refuse(file, "variables", "did you mean 'u10'", variables=("u11",))
    refuse(file, "sample_axis", sample_axis="tim")
    refuse(file, "data", "'crs'", variables=("crs",))
    words = store(climate(n=(("time", "lat"), np.full((12, 4), "word"))), tmp_path / "b.nc")
    refuse(words, "data", "n of", variables=("n",))


def test_variables_over_different_axes_are_refused_and_in_another_order_are_not(tmp_path):
    file = store(climate(sp=(("time", "lat"), numbers(12, 4))), tmp_path / "a.nc")
    refuse(file, "data", "'sp'")
    assert load(file, variables=("sp",)).shape == (1, 4)
    assert load(file, variables=("t2m", "u10")).shape == (2, 4, 6)
    turned = climate()
    turned["u10"] = turned.u10.transpose("time", "lon", "lat")
    assert load(store(turned, tmp_path / "b.nc")).shape == (2, 4, 6)


def test_packed_numbers_are_unpacked(tmp_path):
    table = climate()[["t2m"]]
    table.t2m[3, 1, 2] = np.nan
    packed = {"t2m": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -9999}}
    table.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding=packed)
    data = load(tmp_path / "a.nc", missing="mean")
    assert np.nanmax(abs(data.values[:, 0].numpy() - table.t2m.values)) < 0.006
    refuse(tmp_path / "a.nc", "data", "NaN", "t2m (K) of item 3 (time 2010-01-02T12:00", "(1, 2)")


def test_a_plain_hdf5_file_needs_no_names(tmp_path):
    h5py = pytest.importorskip("h5py")
    values = numbers(5, 2, 3, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values
    assert load(tmp_path / "a.h5").shape == (1, 2, 3, 4)
    data = load(tmp_path / "a.h5", layout="NCHW")
    assert np.array_equal(data.values.numpy(), values)
    assert data.grid.axes == ("height", "width")
    assert load(tmp_path / "a.h5", layout="NTHW").grid.axes == ("time", "height", "width")
    with h5py.File(tmp_path / "b.h5", "w") as file:  # nameless axes are told apart by their order
        file["a"], file["b"], file["c"] = numbers(5, 8, 16), numbers(5, 16, 8), numbers(5, 8, 16)
    refuse(tmp_path / "b.h5", "data", "'b'")
    assert load(tmp_path / "b.h5", variables=("a", "c")).shape == (2, 8, 16)


def test_channels_of_one_variable_keep_its_unit_and_their_numbers(tmp_path):
    axes, wind = ("time", "level", "x"), numbers(5, 3, 8)
    table = xarray.Dataset({"u": (axes, wind, {"units": "m/s"})}, {"level": [1000.0, 850.0, 2.5]})
    grid = load(store(table, tmp_path / "a.nc"), layout="NCL").grid
    assert (grid.channels, grid.units) == (("u_1000", "u_850", "u_2.5"), ("m/s",) * 3)
    words = table.assign_coords(level=["low", "middle", "high"])
    assert load(store(words, tmp_path / "b.nc"), layout="NCL").grid.channels == ()


def test_times_of_another_calendar_are_not_called_dates(tmp_path):
    unit = "days since 2000-01-01"
    for calendar, is_kept in (("360_day", False), ("noleap", False), ("standard", True), (None, True)):
        about = {"units": unit} if calendar is None else {"units": unit, "calendar": calendar}
        table = xarray.Dataset({"u": (("item", "time"), numbers(5, 4))}, {"time": ("time", np.arange(4.0), about)})
        grid = load(store(table, tmp_path / f"{calendar}.nc")).grid
        assert grid.coordinates["time"] == (0, 1, 2, 3)
        assert grid.axis_units == ({"time": unit} if is_kept else {})


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_sounds_of_all_widths_are_numbers_in_minus_one_to_one(tmp_path, bits):
    whole = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 50, 2), dtype="<i4")
    for i, sound in enumerate(whole):
        raw = sound.view(np.uint8).reshape(-1, 4)[:, 4 - bits // 8 :]  # the upper bytes
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((2, bits // 8, 8000, 50, "NONE", ""))
            file.writeframes((raw ^ 128 if bits == 8 else raw).tobytes())
    memory, stream = in_memory_and_streamed(tmp_path)
    assert (memory.shape, memory.grid.axes, memory.grid.rate) == ((2, 50), ("time",), 8000)
    wanted = (whole >> (32 - bits)) / 2.0 ** (bits - 1)
    assert np.array_equal(memory.values.numpy(), wanted.transpose(0, 2, 1).astype("f4"))
    assert torch.equal(stream.all(), memory.all())
    assert torch.equal(load(tmp_path, size=10).values, memory.values[..., 20:30])  # the middle


def wav(path, values, rate=8000):
    """A WAV file of floats [C, L], which Python itself does not write."""
    wavfile.write(path, rate, np.ascontiguousarray(values.T))


def test_sounds_of_floats_are_read_as_they_are(tmp_path):
    values = numbers(2, 1, 20)
    for i, one in enumerate(values):
        wav(tmp_path / f"{i}.wav", one)
    data = load(tmp_path)
    assert np.array_equal(data.values.numpy(), values)
    assert data.along[1].tolist() == ["0.wav", "1.wav"]
    assert np.array_equal(load(tmp_path, split="test", held_out="file=1.wav:").values.numpy(), values[1:])
    values[1, 0, 5] = np.nan
    wav(tmp_path / "1.wav", values[1])
    refuse(tmp_path, "data", "NaN", "1.wav", "(5,)")


def test_unlike_or_broken_sounds_are_refused_by_name(tmp_path):
    wav(tmp_path / "a.wav", numbers(1, 20))
    whole = (tmp_path / "a.wav").read_bytes()
    unknown = whole.replace(struct.pack("<HH", 3, 1), struct.pack("<HH", 2, 1))  # another format
    for content in (whole[:-3], whole[:20], b"text", unknown):
        (tmp_path / "b.wav").write_bytes(content)
        refuse(tmp_path, "data", "b.wav")
    wav(tmp_path / "b.wav", numbers(2, 20))
    refuse(tmp_path, "data", "b.wav", "2 channels")
    wav(tmp_path / "b.wav", numbers(1, 20), rate=16000)
    refuse(tmp_path, "data", "b.wav", "16000", "8000", "ffmpeg")
    (tmp_path / "b.wav").unlink()
    refuse(tmp_path, "size", size=(20, 20))


def test_a_folder_of_folders_of_frames_is_video(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 6, 3), dtype=np.uint8)
    for i, clip in enumerate(pixels):
        (tmp_path / f"clip{i}").mkdir()
        for j, frame in enumerate(clip):
            Image.fromarray(frame).save(tmp_path / f"clip{i}" / f"{j}.png")
    for data in in_memory_and_streamed(tmp_path, layout="NTHWC"):
        assert (data.grid.axes, data.grid.kind) == (("time", "height", "width"), "video")
        assert np.array_equal(data.stored(torch.tensor([2, 0])).numpy(), np.moveaxis(pixels, -1, 1)[[2, 0]])
    assert load(tmp_path).shape == (3, 5, 6)  # without a layout they are images
    assert load(tmp_path, layout="NDHWC").grid.kind == "volume"
    Image.fromarray(pixels[0, 0]).save(tmp_path / "stray.png")
    refuse(tmp_path, "data", "stray.png", layout="NTHWC")
    (tmp_path / "stray.png").unlink()
    (tmp_path / "clip1" / "3.png").unlink()
    refuse(tmp_path, "data", "clip1", "3 frames", layout="NTHWC")


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_grey_images_of_16_bits_keep_them(tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 65536, (3, 5, 4), dtype=np.uint16)
    pixels[0, 0, :2] = 0, 65535
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i}.{suffix}")
    data = load(tmp_path)
    assert data.values.dtype == torch.uint16
    assert np.array_equal(data.values.numpy(), pixels[:, None])
    assert data.grid.dtype == "uint16"
    x = data.batch(torch.arange(3), torch.tensor([False, True, False]))
    torch.testing.assert_close(x[1, 0].flip(-1).double().numpy(), pixels[1] / 32767.5 - 1, atol=1e-7, rtol=0)
    assert torch.equal(load(tmp_path, memory_limit=0).all(), data.all())
    small = load(tmp_path, size=(2, 2)).values.double()
    assert pixels.mean() * 0.5 < small.mean() < pixels.mean() * 1.5
    assert np.array_equal(load(tmp_path, channels=3).values.numpy(), pixels[:, None].repeat(3, 1))
    Image.fromarray(pixels[0].astype(np.uint8)).save(tmp_path / f"9.{suffix}")
    refuse(tmp_path, "data", f"9.{suffix}", "uint8", "uint16")


# Layouts


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_layout_says_which_axis_is_which(tmp_path, order, suffix):
    sizes, file = dict(zip("NCLTDHWXYZ", (5, 2, 7, 3, 4, 7, 6, 2, 3, 4), strict=True)), tmp_path / f"a{suffix}"
    for letters in "NL NHW NHWC NCL CNL NTC NCHW HWN NDHW NTHWC NCXYZ".split():  # noqa: SIM905
        values = numbers(*(sizes[letter] for letter in letters))
        (np.save if suffix == ".npy" else np.savez)(file, np.array(values, order=order))
        layout, axes = None if letters in ("NL", "NHW", "NHWC") else letters, letters.replace("N", "").replace("C", "")
        data = load(file, layout=layout)
        wanted = np.einsum(f"{letters.lower()}->{('nc' if 'C' in letters else 'n') + axes.lower()}", values)
        assert np.array_equal(data.values.numpy(), wanted if "C" in letters else wanted[:, None])
        assert data.grid.axes == tuple(AXES[letter] for letter in axes)
        assert torch.equal(load(file, layout=layout, memory_limit=0).all(), data.all())


def test_a_file_that_does_not_say_is_asked_for_a_layout(tmp_path):
    for shape in ((5, 9, 8, 8), (5, 2, 3, 4, 6), (5, 3, 8, 8, 3)):
        np.save(tmp_path / "a.npy", numbers(*shape))
        with pytest.raises(nidiff.InputError) as error:
            load(tmp_path / "a.npy")
        proposed = str(error.value).rpartition("such as ")[2].rstrip(".")
        assert load(tmp_path / "a.npy", layout=proposed).values.ndim == len(shape)  # the example fits the shape
    refuse(tmp_path / "a.npy", "layout", "(5, 3, 8, 8, 3)", layout="NHW")
    for layout in ("NC", "N", "", "NCHWH", "NABC", "nchw", "NTDHW", "NNHW"):  # which are none
        refuse(tmp_path / "a.npy", "layout", layout=layout)
    assert all(Layout(letters) for letters in EXAMPLES.values())


def test_arguments_that_have_no_meaning_are_refused(tmp_path, climate_file):
    np.save(tmp_path / "a.npy", numbers(5, 4, 4))
    parts = "0 1 -0.1 1.5 x time= time=a:b time=2010 lat=0:1 time=2020: 0.01 time=:".split()  # noqa: SIM905
    scalings = ["standrd", "linear", "linear:scale=1,offset=2", "standard:scale=1", "log", ("standard",) * 3, ()]
    for path, argument, values in (
        (tmp_path / "a.npy", "sample_axis", ["time"]),
        (tmp_path / "a.npy", "variables", [("x",)]),
        ("digits", "layout", ["NHWC"]),
        ("digits", "held_out", [0.1]),
        (climate_file, "size", [4]),
        (climate_file, "split", ["test", "validation"]),
        (climate_file, "held_out", parts),
        (climate_file, "scaling", scalings),
    ):
        for value in values:
            refuse(path, argument, **{argument: value})
    for scaling in ("linear:scale=0", "linear:scale=x", "linear:scale=1/2"):
        refuse(climate_file, "scale", scaling=scaling)
    refuse(climate_file, "split", split="validation", held_out=0.5)


def test_an_array_of_an_npz_can_be_named(tmp_path):
    values = numbers(5, 4, 4)
    np.savez(tmp_path / "a.npz", fields=values, labels=np.arange(5))
    assert np.array_equal(load(tmp_path / "a.npz", variables=("fields",)).values[:, 0].numpy(), values)
    for variables in ((), ("field",), ("fields", "field")):
        refuse(tmp_path / "a.npz", "data", "['fields', 'labels']", variables=variables)
    refuse(tmp_path / "a.npz", "data", "fields (5, 4, 4), labels (5,)", variables=("fields", "labels"))


def test_several_arrays_of_an_npz_are_channels(tmp_path):
    u, v = numbers(5, 4, 6), numbers(5, 4, 6, seed=1)
    np.savez(tmp_path / "a.npz", u=u, v=v, lat=np.arange(4))
    data = load(tmp_path / "a.npz", variables=("v", "u"))
    assert np.array_equal(data.values.numpy(), np.stack([v, u], 1))
    assert data.grid.channels == ("v", "u")
    assert np.array_equal(load_items(tmp_path / "a.npz", (2, 4, 6), variables=("v", "u")).numpy(), np.stack([v, u], 1))
    refuse(tmp_path / "a.npz", "layout", layout="NCH", variables=("u", "v"))  # two kinds of channels


# Scaling


def test_the_scaling_is_fitted_per_channel_and_undone(tmp_path):
    """Also where the mean is a million times the deviation, at which a sum of squares has no digit left."""
    random = np.random.default_rng(0)
    values = np.stack([random.normal(1e6, 3, (30, 50)), random.normal(0, 1e-3, (30, 50))], 1).astype("f4")
    np.save(tmp_path / "a.npy", values)
    data = load(tmp_path / "a.npy", layout="NCL")
    exact = values.astype("f8")
    np.testing.assert_allclose(data.scaling.shift, exact.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(data.scaling.scale, exact.std((0, 2)), rtol=1e-6)
    x = data.all()
    torch.testing.assert_close(x.mean((0, 2)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2), correction=0), torch.ones(2), atol=1e-5, rtol=0)
    back = data.scaling.to_data(x.double()).numpy()
    assert abs(back - exact).max((0, 2))[0] < 1
    np.testing.assert_allclose(back[:, 1], exact[:, 1], atol=1e-9)


def test_moments_are_the_same_in_any_blocks():
    values = np.random.default_rng(0).normal(1e8, 1.0, (2, 1000))
    one, many = RunningMoments(2), RunningMoments(2)
    one.add(values)
    for part in np.split(values, [1, 3, 400], 1):
        many.add(part)
    for found in (one, many):
        np.testing.assert_allclose(found.deviation, values.std(1), rtol=1e-9)
        np.testing.assert_allclose(found.mean, values.mean(1), rtol=1e-14)
    naive = np.square(values).mean(1) - values.mean(1) ** 2
    assert not np.allclose(naive, values.var(1), rtol=0.1)  # what the formula is for


def test_each_kind_of_scaling_does_what_it_says(tmp_path):
    values = np.random.default_rng(0).lognormal(1, 0.5, (40, 6, 10)).astype("f4")
    np.save(tmp_path / "a.npy", values)
    kinds = ("standard", "range", "log", "none", "linear:scale=10", "auto")
    data = load(tmp_path / "a.npy", layout="NCL", scaling=kinds)
    x = data.all().double().numpy()
    exact, logs = values.astype("f8"), np.log(values[:, 2].astype("f8"))
    np.testing.assert_allclose(x[:, 0], (exact[:, 0] - exact[:, 0].mean()) / exact[:, 0].std(), atol=1e-5)
    assert (x[:, 1].min(), x[:, 1].max()) == (pytest.approx(-1), pytest.approx(1))
    np.testing.assert_allclose(x[:, 2], (logs - logs.mean()) / logs.std(), atol=1e-5)
    np.testing.assert_allclose(x[:, 3], exact[:, 3], rtol=1e-6)
    np.testing.assert_allclose(x[:, 4], exact[:, 4] / 10, rtol=1e-6)
    assert x[:, 5].std() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(data.scaling.to_data(torch.from_numpy(x)).numpy(), exact, rtol=1e-5)
    again = load(tmp_path / "a.npy", layout="NCL", scaling=data.scaling)
    assert torch.equal(again.all(), data.all())
    assert load(tmp_path / "a.npy", layout="NCL", scaling="none").scaling == nidiff.Scaling(1.0)


def test_whole_numbers_have_the_range_of_their_type_unless_asked(tmp_path):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(10, 100, (9, 4, 4), dtype=np.uint8))
    for scaling in ("auto", "none"):
        assert load(tmp_path / "a.npy", scaling=scaling).scaling == nidiff.Scaling(127.5, 127.5)
    assert load(tmp_path / "a.npy", scaling="standard").all().std(correction=0) == pytest.approx(1, abs=1e-5)


def test_a_channel_without_a_scale_is_refused_by_name(tmp_path):
    file = store(climate(q=(("time", "lat", "lon"), np.full((12, 4, 6), np.nan))), tmp_path / "none.nc")
    refuse(file, "scaling", " q,", missing="mean")
    file = store(climate(q=(("time", "lat", "lon"), np.full((12, 4, 6), 0.3, "f4"))), tmp_path / "a.nc")
    for memory_limit in (None, 0):
        options = {"variables": ("t2m", "q"), "memory_limit": memory_limit}
        for scaling in ("standard", "range", "log", "auto"):
            refuse(file, "scaling", " q,", "0.3", scaling=scaling, **options)
        assert load(file, scaling=("standard", "none"), **options).shape == (2, 4, 6)


# Missing values


def test_a_missing_value_is_refused_with_its_place(tmp_path):
    for bad, word in ((np.nan, "NaN"), (-np.inf, "-inf")):
        table = climate()
        table.u10[7, 2, 5] = bad
        file = store(table, tmp_path / f"{word}.nc")
        for memory_limit, scaling in itertools.product((None, 0), ("standard", "none")):
            options = {"memory_limit": memory_limit, "scaling": scaling}
            refuse(file, "data", f"{word}.nc", f"{word} in u10 (m/s) of item 7", "(2, 5)", **options)


@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
def test_a_missing_value_is_filled_as_asked(tmp_path, memory_limit):
    table = climate()
    table.u10[7, 2, 5] = np.nan
    table.t2m[3, 0, 0] = np.inf
    file = store(table, tmp_path / "a.nc")
    mean = load(file, missing="mean", memory_limit=memory_limit)
    known = table.u10.values[np.isfinite(table.u10.values)].astype("f8")
    assert mean.stored(torch.tensor([7]))[0, 1, 2, 5] == pytest.approx(known.mean(), rel=1e-6)
    assert mean.batch(torch.tensor([7]))[0, 1, 2, 5] == pytest.approx(0, abs=1e-6)
    assert mean.scaling.scale[1] == pytest.approx(known.std(), rel=1e-6)
    filled = load(file, missing=270, memory_limit=memory_limit).stored(torch.tensor([3]))
    assert filled[0, 0, 0, 0] == 270
    assert np.array_equal(filled[0, 1].numpy(), table.u10.values[3])
    for missing in ("zero", float("nan"), 1e300, "-1e39"):
        refuse(file, "missing", missing=missing)


# Parts


def rows_of(data, values):
    """Which rows of ``values`` the data set has."""
    found = data.stored(torch.arange(len(data))).numpy()[:, 0]
    return [int(np.flatnonzero((values == one).all((1, 2)))[0]) for one in found]


@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
def test_the_parts_are_disjoint_and_complete(climate_file, memory_limit):
    warmth = climate().t2m.values
    cases = {
        "time=2010-01-04:": range(6, 12),
        "time=:2010-01-01": range(2),  # all of that day
        "time=2010-01-02T12:00:2010-01-03T00:00": range(3, 5),
        "time=2010-01-03:2010-01-03": range(4, 6),
        0.25: None,
    }
    for held_out, rows in cases.items():
        options = {"held_out": held_out, "memory_limit": memory_limit}
        train, test = (load(climate_file, split=split, **options) for split in ("train", "test"))
        mine, other = (rows_of(part, warmth) for part in (train, test))
        assert sorted(mine + other) == list(range(12))
        assert (len(other) == 3) if rows is None else (other == list(rows))
        assert train.scaling == test.scaling
        assert train.scaling.shift[0] == pytest.approx(warmth[mine].astype("f8").mean(), rel=1e-6)
        assert np.array_equal(test.along[1], DAYS[other])


def test_a_random_part_depends_on_the_number_of_items_alone(tmp_path):
    np.save(tmp_path / "a.npy", numbers(50, 2, 3))
    np.save(tmp_path / "b.npy", np.arange(50.0)[:, None, None] + np.zeros((50, 1, 4)))
    parts = [load(tmp_path / name, split="test", held_out=0.2) for name in ("a.npy", "b.npy")]
    rows = rows_of(parts[0], numbers(50, 2, 3))
    assert parts[1].values[:, 0, 0, 0].tolist() == rows == sorted(rows)
    assert rows != list(range(10))
    part = load(tmp_path / "a.npy", split="test", held_out="item=47:")  # without a coordinate, by number
    assert np.array_equal(part.values.numpy(), numbers(50, 2, 3)[47:, None])


# Streams


def test_a_stream_of_an_array_gives_the_same_bits_as_memory(tmp_path):
    for dtype in (">f8", "<f4", "<f2", ">u2", "u1"):
        values = (60 * abs(numbers(20, 3, 5, 7))).astype(dtype) * (256 if dtype == ">u2" else 1)
        values = values.astype(dtype)
        np.save(tmp_path / "a.npy", values)
        memory, stream = in_memory_and_streamed(tmp_path / "a.npy", layout="NCHW")
        assert np.array_equal(memory.values.numpy(), values.astype(memory.values.numpy().dtype))
        assert memory.scaling == stream.scaling
        index, flip = torch.tensor([7, 19, 0, 7, 8]), torch.tensor([True, False, True, False, False])
        assert torch.equal(stream.batch(index, flip), memory.batch(index, flip))


@pytest.mark.parametrize("name", ["a.npy", "a.nc", "a.zarr"])
def test_threads_may_read_a_stream_at_once(tmp_path, name):
    if name == "a.npy":
        np.save(tmp_path / name, numbers(12, 4, 6))
    else:
        store(climate(), tmp_path / name)
    stream, failures = load(tmp_path / name, memory_limit=0), []
    whole = load(tmp_path / name).all()

    def read(seed):
        for _ in range(5):
            index = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
            if not torch.equal(stream.batch(index), whole[index]):
                failures.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    draws = [(torch.tensor([i, 11 - i]), None) for i in range(12)]
    assert torch.equal(torch.cat(list(stream.prefetch(draws))), whole[torch.cat([index for index, _ in draws])])


WRITE = {
    "a.npy": lambda file: np.save(file, numbers(12, 40, 60)),
    "a.nc": lambda file: store(climate(), file),
    "sounds/a.wav": lambda file: wav(file, numbers(1, 5000)),
    "images/a.png": lambda file: Image.fromarray(np.zeros((4, 4), np.uint8)).save(file),
}
CHANGE = {
    "touched": lambda file: os.utime(file, ns=(1, 1)),
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "removed": lambda file: file.unlink(),
    "smaller": lambda file: Image.fromarray(np.zeros((1, 1), np.uint8)).save(file),
}
CHANGES = [*itertools.product([*WRITE][:3], [*CHANGE][:3]), ("images/a.png", "smaller")]


@pytest.mark.parametrize("name, change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, name, change):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    WRITE[name](file)
    stream = load(file if file.parent == tmp_path else file.parent, memory_limit=0)
    last = torch.tensor([len(stream) - 1])
    stream.stored(last)
    CHANGE[change](file)
    with pytest.raises(nidiff.InputError, match=file.name):
        stream.stored(last)


# Experiments and extras


@pytest.mark.parametrize("module", ["xarray", "h5netcdf", "zarr"])
def test_the_extra_that_is_missing_is_named(tmp_path, module, monkeypatch):
    file = store(climate(), tmp_path / ("a.zarr" if module == "zarr" else "a.nc"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(nidiff.InputError, match=r"nidiff\[science\]"):
        load(file)


def test_a_data_set_of_your_own_source_is_used_like_a_tensor():
    ramp = Source((5, 1, 3), torch.float32, lambda rows: rows[:, None, None] + torch.zeros(1, 3))
    assert Dataset(ramp).batch(torch.tensor([4, 1]))[:, 0, 0].tolist() == [4, 1]


# Commands


def test_design_names_the_flags_that_read_the_same_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    store(climate(), tmp_path / "a.nc")
    flags = ["--variables", "t2m", "u10", "--scaling", "standard", "range", "--held-out", "time=2010-01-05:"]
    quick = ["--covariances", "white", "--schedules", "ddpm_linear:num_levels=50", "--json"]
    assert main(["design", "a.nc", *flags, *quick]) == 0
    found = json.loads(capsys.readouterr().out)
    assert " ".join(["--data", "a.nc", "--preset", "fields", *flags]) in found["recommended"]["command"]
    assert found["shape"] == [2, 4, 6]


def test_calibrate_sees_floats_as_the_model_does(tmp_path, monkeypatch, capsys):
    """Distances do not depend on the units of the data: standard scaling takes them out."""
    monkeypatch.chdir(tmp_path)
    values = numbers(30, 1, 8)
    found = []
    for scale, shift in ((1, 0), (40, 300)):
        np.save("a.npy", values * np.float32(scale) + np.float32(shift))
        assert main(["calibrate", "a.npy", "--layout", "NCL", "--covariance", "white", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["sigma_max"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    wanted = torch.pdist(torch.from_numpy(values[:, 0] / values.std())).max().item()
    assert found[0] == pytest.approx(wanted, rel=1e-4)


def test_the_test_part_of_a_named_data_set_has_the_scaling_of_its_training_part():
    train, test = (nidiff.load_dataset("digits", split=split, scaling="standard") for split in ("train", "test"))
    assert train.scaling == test.scaling
    assert test.all().mean().abs() > 1e-6  # its own mean would have been taken out
