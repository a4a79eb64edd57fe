"""Data of any kind: what is in a file comes out, in its units and in the model's; or a sentence says what is wrong."""

import os
import struct
import sys
import threading
import wave

import numpy as np
import pytest
import torch
from PIL import Image

import nidiff
from nidiff.data.dataset import Dataset
from nidiff.data.grid import AXES
from nidiff.data.layout import EXAMPLES, Layout
from nidiff.data.units import RunningMoments
from nidiff.training.draws import image_indices

xarray = pytest.importorskip("xarray")
SHAPE = {"time": 12, "lat": 4, "lon": 6}
DAYS = np.datetime64("2010-01-01") + np.arange(12) * np.timedelta64(12, "h")


def load(path, **options):
    return nidiff.load_dataset(path, progress=False, **options)


def refuse(path, argument, *words, **options):
    """Whatever reads ``path`` is refused for this argument, in a sentence with these words."""
    with pytest.raises(nidiff.InputError) as error:
        load(path, **options).all()
    assert error.value.argument == argument, str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


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


SCIENCE = ["a.nc", "a.h5", "a.zarr"]


# Formats


@pytest.mark.parametrize("name", SCIENCE)
@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
def test_variables_become_channels_with_units_and_coordinates(tmp_path, name, memory_limit):
    table = climate()
    data = load(store(table, tmp_path / name), memory_limit=memory_limit)
    assert isinstance(data.values, torch.Tensor) == (memory_limit is None)
    stored = data.stored(torch.arange(12)).numpy()
    assert np.array_equal(stored, np.stack([table.t2m, table.u10], 1))
    grid = data.grid
    assert (grid.axes, grid.channels, grid.units) == (("lat", "lon"), ("t2m", "u10"), ("K", "m/s"))
    assert grid.coordinates["lat"] == (60.0, 20.0, -20.0, -60.0)
    assert grid.axis_units == {"lat": "degrees_north"}
    assert np.array_equal(data.along[1], DAYS)
    grid.check(data.shape)


def test_variables_and_the_sample_axis_can_be_named(tmp_path):
    table = climate().transpose("lon", "time", "lat")
    file = store(table, tmp_path / "a.nc")
    refuse(file, "data", "sample_axis")  # longitude comes first, which is no axis of items
    data = load(file, variables=["u10"], sample_axis="time")
    assert np.array_equal(data.values.numpy(), table.u10.values.transpose(1, 0, 2)[:, None])
    assert data.grid.axes == ("lon", "lat")
    refuse(file, "variables", "did you mean 'u10'", variables=("u11",))
    refuse(file, "sample_axis", sample_axis="tim")
    refuse(file, "data", "'crs'", variables=("crs",))
    counts = store(climate(n=(("time", "lat"), np.ones((12, 4), int))), tmp_path / "b.nc")
    refuse(counts, "data", "n of", "int64", variables=("n",))


def test_variables_over_different_axes_are_refused(tmp_path):
    file = store(climate(sp=(("time", "lat"), numbers(12, 4))), tmp_path / "a.nc")
    refuse(file, "data", "'sp'")
    assert load(file, variables=("sp",)).shape == (1, 4)
    assert load(file, variables=("t2m", "u10")).shape == (2, 4, 6)


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


def test_nameless_axes_are_told_apart_by_their_order(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"], file["b"], file["c"] = numbers(5, 8, 16), numbers(5, 16, 8), numbers(5, 8, 16)
    refuse(tmp_path / "a.h5", "data", "'b'")
    assert load(tmp_path / "a.h5", variables=("a", "c")).shape == (2, 8, 16)
    named = climate()
    named["u10"] = named.u10.transpose("time", "lon", "lat")
    assert load(store(named, tmp_path / "a.nc")).shape == (2, 4, 6)


def test_channels_of_one_variable_keep_its_unit_and_their_numbers(tmp_path):
    axes, wind = ("time", "level", "x"), numbers(5, 3, 8)
    table = xarray.Dataset({"u": (axes, wind, {"units": "m/s"})}, {"level": [1000.0, 850.0, 2.5]})
    grid = load(store(table, tmp_path / "a.nc"), layout="NCL").grid
    assert (grid.channels, grid.units) == (("u_1000", "u_850", "u_2.5"), ("m/s",) * 3)
    words = table.assign_coords(level=["low", "middle", "high"])
    assert load(store(words, tmp_path / "b.nc"), layout="NCL").grid.channels == ()


@pytest.mark.parametrize("calendar, is_kept", [("360_day", False), ("noleap", False), ("standard", True), (None, True)])
def test_times_of_another_calendar_are_not_called_dates(tmp_path, calendar, is_kept):
    unit = "days since 2000-01-01"
    about = {"units": unit} if calendar is None else {"units": unit, "calendar": calendar}
    table = xarray.Dataset({"u": (("item", "time"), numbers(5, 4))}, {"time": ("time", np.arange(4.0), about)})
    grid = load(store(table, tmp_path / "a.nc")).grid
    assert grid.coordinates["time"] == (0, 1, 2, 3)
    assert grid.axis_units == ({"time": unit} if is_kept else {})


@pytest.mark.parametrize("bits, tolerance", [(8, 1 / 128), (16, 2**-15), (24, 2**-23), (32, 2**-24)])
def test_sounds_of_all_widths_are_numbers_in_minus_one_to_one(tmp_path, bits, tolerance):
    wanted = np.random.default_rng(0).uniform(-1, 1, (3, 2, 50))
    for i, sound in enumerate(wanted):
        whole = np.clip(np.rint(sound.T * 2 ** (bits - 1)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype("<i8")
        content = (whole + (128 if bits == 8 else 0)).astype("<i8").tobytes()
        raw = np.frombuffer(content, np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((2, bits // 8, 8000, 50, "NONE", ""))
            file.writeframes(raw)
    data = load(tmp_path)
    assert (data.shape, data.grid.axes, data.grid.rate) == ((2, 50), ("time",), 8000)
    assert abs(data.values.numpy() - wanted).max() <= tolerance
    stream = load(tmp_path, memory_limit=0)
    assert torch.equal(stream.all(), data.all())
    refuse(tmp_path, "data", "50 samples", size=16000)  # a length, whose square means nothing
    middle = load(tmp_path, size=10)
    assert torch.equal(middle.values, data.values[..., 20:30])
    refuse(tmp_path, "data", "50 samples", size=51)


def wav(path, values, kind=3, rate=8000):
    """A WAV file by hand: of floats, which the standard library does not write."""
    raw = np.ascontiguousarray(values.T).tobytes()
    bits, channels = 8 * values.dtype.itemsize, len(values)
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    parts = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    parts += b"data" + struct.pack("<I", len(raw)) + raw
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts)


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
    for content in (whole[:-3], whole[:20], b"text"):
        (tmp_path / "b.wav").write_bytes(content)
        refuse(tmp_path, "data", "b.wav")
    wav(tmp_path / "b.wav", numbers(1, 20), kind=2)
    refuse(tmp_path, "data", "b.wav", "format 2")
    wav(tmp_path / "b.wav", numbers(2, 20))
    refuse(tmp_path, "data", "b.wav", "2 channels")
    wav(tmp_path / "b.wav", numbers(1, 20), rate=16000)
    refuse(tmp_path, "data", "b.wav", "16000")
    wav(tmp_path / "b.wav", numbers(1, 30))
    refuse(tmp_path, "data", "b.wav", "30 samples")


@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
def test_a_folder_of_folders_of_frames_is_video(tmp_path, memory_limit):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 6, 3), dtype=np.uint8)
    for i, clip in enumerate(pixels):
        (tmp_path / f"clip{i}").mkdir()
        for j, frame in enumerate(clip):
            Image.fromarray(frame).save(tmp_path / f"clip{i}" / f"{j}.png")
    data = load(tmp_path, layout="NTHWC", memory_limit=memory_limit)
    assert data.grid.axes == ("time", "height", "width")
    assert data.grid.kind == "video"
    assert np.array_equal(data.stored(torch.tensor([2, 0])).numpy(), np.moveaxis(pixels, -1, 1)[[2, 0]])
    assert load(tmp_path, memory_limit=memory_limit).shape == (3, 5, 6)  # without a layout they are images
    refuse(tmp_path, "layout", layout="NDHW")
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
    assert (x[0, 0, 0, 0], x[0, 0, 0, 1]) == (-1, 1)
    torch.testing.assert_close(x[1, 0].flip(-1).double().numpy(), pixels[1] / 32767.5 - 1, atol=1e-7, rtol=0)
    assert torch.equal(load(tmp_path, memory_limit=0).all(), data.all())
    small = load(tmp_path, size=(2, 2)).values.double()
    assert pixels.mean() * 0.5 < small.mean() < pixels.mean() * 1.5
    refuse(tmp_path, "channels", channels=3)
    Image.fromarray(pixels[0].astype(np.uint8)).save(tmp_path / f"9.{suffix}")
    refuse(tmp_path, "data", f"9.{suffix}", "8 bits")


# Layouts


@pytest.mark.parametrize(
    "shape, layout, axes",
    [
        ((5, 7), None, "L"),
        ((5, 7, 6), None, "HW"),
        ((5, 7, 6, 3), None, "HW"),
        ((5, 2, 7), "NCL", "L"),
        ((2, 5, 7), "CNL", "L"),
        ((5, 7, 2), "NTC", "T"),
        ((5, 9, 7, 6), "NCHW", "HW"),
        ((7, 6, 5), "HWN", "HW"),
        ((5, 3, 7, 6), "NDHW", "DHW"),
        ((5, 3, 7, 6, 2), "NTHWC", "THW"),
        ((5, 2, 3, 4, 6), "NCXYZ", "XYZ"),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_layout_says_which_axis_is_which(tmp_path, shape, layout, axes, order):
    values = numbers(*shape)
    for file in (tmp_path / "a.npy", tmp_path / "a.npz"):
        (np.save if file.suffix == ".npy" else np.savez)(file, np.array(values, order=order))
        data = load(file, layout=layout)
        letters = layout or {2: "NL", 3: "NHW", 4: "NHWC"}[len(shape)]
        wanted = np.einsum(f"{letters.lower()}->{('nc' if 'C' in letters else 'n') + axes.lower()}", values)
        assert np.array_equal(data.values.numpy(), wanted if "C" in letters else wanted[:, None])
        assert data.grid.axes == tuple(AXES[letter] for letter in axes)
        stream = load(file, layout=layout, memory_limit=0)
        assert torch.equal(stream.all(), data.all())


@pytest.mark.parametrize("layout", ["CHW", "NC", "N", "", "NCHWH", "NABC", "nchw", "NTDHW", "NNHW"])
def test_what_is_no_layout_is_refused(tmp_path, layout):
    np.save(tmp_path / "a.npy", numbers(5, 4, 4))
    refuse(tmp_path / "a.npy", "layout", layout=layout)


def test_a_file_that_does_not_say_is_asked_for_a_layout(tmp_path):
    for shape in ((5, 9, 8, 8), (5, 2, 3, 4, 6), (5, 3, 8, 8, 3)):
        np.save(tmp_path / "a.npy", numbers(*shape))
        with pytest.raises(nidiff.InputError) as error:
            load(tmp_path / "a.npy")
        proposed = str(error.value).partition("layout ")[2].partition(" ")[0]
        assert load(tmp_path / "a.npy", layout=proposed).values.ndim == len(shape)  # the example fits the shape
    refuse(tmp_path / "a.npy", "layout", "(5, 3, 8, 8, 3)", layout="NHW")
    assert all(Layout(letters) for letters in EXAMPLES.values())


def test_arguments_that_have_no_meaning_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", numbers(5, 4, 4))
    refuse(tmp_path / "a.npy", "sample_axis", sample_axis="time")
    refuse(tmp_path / "a.npy", "variables", variables=("x",))
    refuse("digits", "layout", layout="NHWC")
    refuse("digits", "held_out", held_out=0.1)
    refuse(store(climate(), tmp_path / "a.nc"), "size", size=4)


def test_an_array_of_an_npz_can_be_named(tmp_path):
    values = numbers(5, 4, 4)
    np.savez(tmp_path / "a.npz", fields=values, labels=np.arange(5))
    assert np.array_equal(load(tmp_path / "a.npz", variables=("fields",)).values[:, 0].numpy(), values)
    refuse(tmp_path / "a.npz", "variables", variables=("field",))
    refuse(tmp_path / "a.npz", "data", "['fields', 'labels']")


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
    one, many = RunningMoments(np.zeros(2)), RunningMoments(np.zeros(2))
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
    kinds = ("standard", "range", "log", "none", "linear:scale=10,shift=280", "auto")
    data = load(tmp_path / "a.npy", layout="NCL", scaling=kinds)
    x = data.all().double().numpy()
    exact, logs = values.astype("f8"), np.log(values[:, 2].astype("f8"))
    np.testing.assert_allclose(x[:, 0], (exact[:, 0] - exact[:, 0].mean()) / exact[:, 0].std(), atol=1e-5)
    assert (x[:, 1].min(), x[:, 1].max()) == (pytest.approx(-1), pytest.approx(1))
    np.testing.assert_allclose(x[:, 2], (logs - logs.mean()) / logs.std(), atol=1e-5)
    np.testing.assert_allclose(x[:, 3], exact[:, 3], rtol=1e-6)
    np.testing.assert_allclose(x[:, 4], (exact[:, 4] - 280) / 10, rtol=1e-6)
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


@pytest.mark.parametrize("scaling", ["standard", "range", "log", "auto"])
@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
def test_a_constant_channel_is_refused_by_name(tmp_path, scaling, memory_limit):
    file = store(climate(q=(("time", "lat", "lon"), np.full((12, 4, 6), 0.3, "f4"))), tmp_path / "a.nc")
    options = {"variables": ("t2m", "q"), "memory_limit": memory_limit}
    refuse(file, "scaling", " q,", "0.3", scaling=scaling, **options)
    assert load(file, scaling=("standard", "none"), **options).shape == (2, 4, 6)


@pytest.mark.parametrize(
    "scaling, word",
    [
        ("standrd", "did you mean 'standard'"),
        ("linear", "scale"),
        ("linear:scale=0", "scale=0"),
        ("linear:scale=x", "scale='x'"),
        ("linear:scale=1,offset=2", "offset"),
        ("linear:scale=1/2", "scale"),
        ("standard:scale=1", "standard:scale=1"),
        ("log", "u10 (m/s)"),
        (("standard",) * 3, "3 texts for 2 channels"),
        ((), "0 texts"),
    ],
)
def test_what_is_no_scaling_is_refused(tmp_path, scaling, word):
    with pytest.raises(nidiff.InputError) as error:
        load(store(climate(), tmp_path / "a.nc"), scaling=scaling)
    assert word in str(error.value)


# Missing values


@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
@pytest.mark.parametrize("scaling", ["standard", "none"])
@pytest.mark.parametrize("bad, word", [(np.nan, "NaN"), (-np.inf, "infinite")])
def test_a_missing_value_is_refused_with_its_place(tmp_path, memory_limit, scaling, bad, word):
    table = climate()
    table.u10[7, 2, 5] = bad
    file = store(table, tmp_path / "a.nc")
    refuse(file, "data", "a.nc", word, "u10 (m/s) of item 7", "(2, 5)", memory_limit=memory_limit, scaling=scaling)


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
    for missing in (270, "270"):
        filled = load(file, missing=missing, memory_limit=memory_limit).stored(torch.tensor([3]))
        assert filled[0, 0, 0, 0] == 270
        assert np.array_equal(filled[0, 1].numpy(), table.u10.values[3])
    for missing in ("zero", float("nan"), 1e300, "-1e39"):
        refuse(file, "missing", missing=missing)


def test_a_channel_without_a_value_has_no_mean(tmp_path):
    file = store(climate(q=(("time", "lat", "lon"), np.full((12, 4, 6), np.nan))), tmp_path / "a.nc")
    refuse(file, "missing", " q,", missing="mean")


# Parts


def rows_of(data, values):
    """Which rows of ``values`` the data set has."""
    found = data.stored(torch.arange(len(data))).numpy()[:, 0]
    return [int(np.flatnonzero((values == one).all((1, 2)))[0]) for one in found]


@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
@pytest.mark.parametrize(
    "held_out, rows",
    [
        ("time=2010-01-04:", range(6, 12)),
        ("time=:2010-01-01", range(2)),  # all of that day
        ("time=2010-01-02T12:00:2010-01-03T00:00", range(3, 5)),
        ("time=2010-01-03:2010-01-03", range(4, 6)),
        (0.25, None),
        ("0.25", None),
    ],
)
def test_the_parts_are_disjoint_and_complete(tmp_path, memory_limit, held_out, rows):
    table = climate()
    file = store(table, tmp_path / "a.nc")
    train, test = (load(file, split=s, held_out=held_out, memory_limit=memory_limit) for s in ("train", "test"))
    mine, other = (rows_of(part, table.t2m.values) for part in (train, test))
    assert sorted(mine + other) == list(range(12))
    assert other == (list(rows) if rows is not None else other)
    assert len(other) == (3 if rows is None else len(rows))
    assert train.scaling == test.scaling
    assert train.scaling.shift[0] == pytest.approx(table.t2m.values[mine].astype("f8").mean(), rel=1e-6)
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


@pytest.mark.parametrize(
    "held_out",
    [0, 1, -0.1, "1.5", "x", "time=", "time=a:b", "time=2010", "lat=0:1", "time=2020:", "0.01", "time=:"],
)
def test_what_is_no_part_is_refused(tmp_path, held_out):
    refuse(store(climate(), tmp_path / "a.nc"), "held_out", held_out=held_out)


def test_a_part_that_nobody_named_is_refused(tmp_path):
    file = store(climate(), tmp_path / "a.nc")
    refuse(file, "split", "held_out", split="test")
    refuse(file, "split", split="validation", held_out=0.5)
    assert len(load(file, split="test", held_out=0.5)) == 6


# Streams


@pytest.mark.parametrize("dtype", [">f8", "<f4", "<f2", ">u2", "u1"])
def test_a_stream_of_an_array_gives_the_same_bits_as_memory(tmp_path, dtype):
    values = (100 * abs(numbers(20, 3, 5, 7))).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    memory = load(tmp_path / "a.npy", layout="NCHW")
    stream = load(tmp_path / "a.npy", layout="NCHW", memory_limit=values.size)
    assert not isinstance(stream.values, torch.Tensor) or dtype == "u1"
    assert memory.scaling == stream.scaling
    index, flip = torch.tensor([7, 19, 0, 7, 8]), torch.tensor([True, False, True, False, False])
    assert torch.equal(stream.batch(index, flip), memory.batch(index, flip))
    for data in (memory, stream):
        with pytest.raises(IndexError):
            data.batch(torch.tensor([20]))


@pytest.mark.parametrize("name", ["a.npy", "a.nc", "a.zarr"])
def test_threads_may_read_a_stream_at_once(tmp_path, name):
    if name == "a.npy":
        np.save(tmp_path / name, numbers(12, 4, 6))
    else:
        store(climate(), tmp_path / name)
    stream, failures = load(tmp_path / name, memory_limit=0), []
    whole = load(tmp_path / name).all()

    def read(seed):
        for _ in range(10):
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


@pytest.mark.parametrize("name", ["a.npy", "a.nc", "sounds"])
@pytest.mark.parametrize("change", ["touched", "truncated", "removed"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, name, change):
    path = file = tmp_path / name
    if name == "a.npy":
        np.save(path, numbers(12, 40, 60))
    elif name == "a.nc":
        store(climate(), path)
    else:
        path.mkdir()
        file = path / "a.wav"
        wav(file, numbers(1, 5000))
    stream = load(path, memory_limit=0)
    last = torch.tensor([len(stream) - 1])
    stream.batch(last)
    if change == "touched":
        os.utime(file, ns=(1, 1))
    elif change == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    with pytest.raises(nidiff.InputError, match=file.name):
        stream.batch(last)


def test_an_image_that_changes_its_size_while_it_is_read_is_refused(tmp_path):
    for name, side in (("a.png", 4), ("b.png", 4)):
        Image.fromarray(np.zeros((side, side), np.uint8)).save(tmp_path / name)
    stream = load(tmp_path, memory_limit=0)
    Image.fromarray(np.zeros((1, 1), np.uint8)).save(tmp_path / "b.png")
    with pytest.raises(nidiff.InputError, match="b.png"):
        stream.all()


def test_processes_of_one_launch_read_disjoint_rows():
    """Of each step, and together those that one process alone would read."""
    for step in range(20):
        alone = image_indices(3, 50, 8 * step, 8)
        parts = [image_indices(3, 50, 8 * step + 4 * rank, 4) for rank in range(2)]
        assert torch.equal(torch.cat(parts), alone)
        if step < 6:  # within one pass over the data
            assert len(set(alone.tolist())) == 8


# Experiments and extras


@pytest.mark.parametrize("module", ["xarray", "h5netcdf", "zarr"])
def test_the_extra_that_is_missing_is_named(tmp_path, module, monkeypatch):
    file = store(climate(), tmp_path / ("a.zarr" if module == "zarr" else "a.nc"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(nidiff.InputError, match=r"nidiff\[science\]"):
        load(file)


def test_a_data_set_of_your_own_source_is_used_like_a_tensor():
    """The protocol that a stream has to follow is three names."""

    class Ramp:
        shape, dtype = (5, 1, 3), torch.float32

        def __len__(self):
            return 5

        def index_select(self, dim, index):
            return index[:, None, None] + torch.zeros(1, 3)

    assert Dataset(Ramp()).batch(torch.tensor([4, 1]))[:, 0, 0].tolist() == [4, 1]


# Commands


@pytest.mark.parametrize(
    "words, message",
    [
        (["noise", "--missing", "mean"], "--missing='mean' has no meaning"),
        (["noise", "--data", "a.nc", "--layout", "NCHW"], "--layout='NCHW'"),
        (["noise", "--data", "a.nc", "--variables", "q"], "--variables='q' is unknown"),
        (["design", "a.nc", "--scaling", "range", "log"], "--scaling='log'"),
        (["calibrate", "a.nc", "--sample-axis", "day"], "--sample-axis='day'"),
        (["calibrate", "a.nc", "--range", "unit"], "--range='unit'"),
        (["train", "--data", "a.nc", "--held-out", "lat=0:1", "--dry-run"], "--held-out='lat=0:1'"),
        (["train", "--data", "bad.nc", "--dry-run"], "t2m (K) of item 2 (time 2010-01-02T00:00:00"),
        (["train", "--data", "bad.nc", "--missing", "x", "--dry-run"], "--missing='x'"),
    ],
)
def test_a_command_says_in_one_line_what_is_wrong(tmp_path, words, message, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    from nidiff.cli import main

    monkeypatch.chdir(tmp_path)
    table = climate()
    store(table, tmp_path / "a.nc")
    table.t2m[2, 0, 0] = np.nan
    store(table, tmp_path / "bad.nc")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_design_names_the_flags_that_read_the_same_data(tmp_path, monkeypatch, capsys):
    import json

    from nidiff.cli import main

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
    import json

    from nidiff.cli import main

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
