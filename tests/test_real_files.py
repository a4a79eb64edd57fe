"""What real files are like: parts of a range, offsets, frames, other kinds of file beside ours, CF's attributes."""

import json
import re
import struct
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from problems import load, refuse
from scipy.io import wavfile

import nidiff
from nidiff.cli import main
from nidiff.data.dataset import WHOLE, Dataset, as_stored
from nidiff.data.grid import Grid
from nidiff.data.pictures import eight_bits
from nidiff.data.spec import DataSpec
from nidiff.data.units import scaling_remarks
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import printable
from nidiff.evaluation.real import real_source
from nidiff.training.baseline import mean_cost
from nidiff.training.experiment import Experiment
from nidiff.training.identity import data_digest

xarray = pytest.importorskip("xarray")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def save(path, values):
    np.save(path, values)
    return path


def field(values, dims=("time", "lat", "lon"), path=None, coords=None, **attrs):
    """A NetCDF file with one variable."""
    xarray.Dataset({"v": (dims, values, attrs)}, coords).to_netcdf(path, engine="h5netcdf")
    return path


# Parts of a range


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_whole_numbers_that_use_a_small_part_of_their_range_have_that_part(tmp_path, memory_limit):
    values = (1500 + 200 * normal(40, 8, 8)).round().clip(905, 3012).astype(np.uint16)
    values[0, 0, :2] = 905, 3012
    file = save(tmp_path / "ct.npy", values)
    data = load(file, memory_limit=memory_limit)
    x = data.all()
    assert (x.min(), x.max(), data.has_known_range) == (-1, 1, True)
    assert x.std() > 0.1
    assert np.array_equal(as_stored(x, data.scaling, "uint16").numpy(), values[:, None])  # there and back, exactly
    (remark,) = scaling_remarks(data)
    assert "uint16 values use 905 to 3012, a small part of 0 to 65535" in remark
    whole = load(file, memory_limit=memory_limit, scaling="none")
    assert re.search(r"channel 0 -0\.95\d ± 0\.006", scaling_remarks(whole)[0])  # what the whole range makes of them
    assert whole.scaling == WHOLE["uint16"]
    known = nidiff.fit_gaussian([x.double()]), nidiff.fit_gaussian([whole.all().double()])
    parts = [mean_cost(gaussian, each)[:2] for gaussian, each in zip(known, (data, whole), strict=True)]
    assert parts[0] == (parts[1][0], pytest.approx(parts[1][1], rel=1e-3))  # bits per value, whatever the scale
    shown = eight_bits(data.stored(torch.arange(40)))
    assert (shown.min(), shown.max()) == (0, 255)


def test_pictures_that_use_their_range_or_are_all_alike_keep_it(tmp_path):
    random = np.random.default_rng(0)
    for low, high, dtype in ((0, 256, "u1"), (10, 100, "u1"), (0, 40000, "u2"), (7, 8, "u1")):
        file = save(tmp_path / "a.npy", random.integers(low, high, (9, 4, 4)).astype(dtype))
        data = load(file)
        assert data.scaling == WHOLE[data.grid.dtype], (low, high)
        assert data.has_known_range
    wide = torch.tensor([[[[0, 256, 65535]]]], dtype=torch.int32).to(torch.uint16)
    assert eight_bits(wide).flatten().tolist() == [0, 0, 255]


def test_the_range_is_that_of_the_training_part_and_a_given_scaling_is_not_fitted_again(tmp_path):
    values = np.random.default_rng(0).integers(100, 140, (20, 4, 4)).astype(np.uint8)
    values[15:] += 5
    file = save(tmp_path / "a.npy", values)
    test = load(file, held_out="item=15:", split="test")
    assert test.scaling == Scaling(19.5, 119.5)
    assert test.all().max() > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load(file, scaling=test.scaling).has_known_range


def test_training_names_each_channel_that_is_far_from_unit_size(tmp_path, capsys):
    values = np.stack([normal(20, 16), 280 + 15 * normal(20, 16), 1e-3 * normal(20, 16)], 1)
    file = save(tmp_path / "a.npy", values.astype("f4"))
    tiny = "--layout NCL --steps 1 --widths 8 --attention --batch-size 4 --num-samples 1 --precision fp32 --num-steps 1"
    for number, scaling in enumerate(("none", "auto")):
        flags = [*tiny.split(), "--cooldown", "0", "--scaling", scaling, "--out", str(tmp_path / str(number))]
        assert main(["train", "--data", str(file), *flags]) == 0
        named = re.findall(r"channel (\d) \S+ ± ", capsys.readouterr().err)
        assert named == (["1", "2"] if scaling == "none" else [])


# Offsets


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.nc"])
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_numbers_with_a_large_offset_are_scaled_before_they_are_rounded(tmp_path, name, memory_limit):
    exact, file = 1e7 + normal(200, 6, 5), tmp_path / name
    if name == "a.nc":
        field(exact, path=file)
    else:
        (np.save if name == "a.npy" else np.savez)(file, exact)
    data = load(file, memory_limit=memory_limit)
    assert (data.values.dtype, data.grid.dtype, data.grid.floats) == (torch.float64, "float64", "float64")
    wanted = (exact - exact.mean()) / exact.std()
    np.testing.assert_allclose(data.all()[:, 0].numpy(), wanted, atol=1e-6)
    rounded = exact.astype("f4").astype("f8")
    assert abs((rounded - exact.mean()) / exact.std() - wanted).max() > 0.3  # what was lost
    back = as_stored(data.all(), data.scaling, data.grid.dtype)
    np.testing.assert_allclose(back[:, 0].numpy(), exact, atol=2e-6)
    assert Grid.from_json(json.loads(json.dumps(data.grid.to_json()))) == data.grid
    assert data.grid.kind == "field"


def test_float64_that_needs_no_more_is_float32(tmp_path):
    for scale, shift in ((1, 0), (1e-30, 0), (1e30, 0), (1, 500)):
        data = load(save(tmp_path / "a.npy", shift + scale * normal(20, 6, 5)))
        assert (data.values.dtype, data.grid.dtype) == (torch.float32, "float32")
    refuse(save(tmp_path / "a.npy", 1e300 * normal(20, 6, 5)), "data", "inf")


def test_conditions_with_a_large_offset_keep_their_digits(tmp_path):
    save(tmp_path / "a.npy", normal(50, 8).astype("f4"))
    seconds = 1.7e9 + 100 * normal(50, 1)
    save(tmp_path / "c.npy", seconds)
    data = load(tmp_path / "a.npy", condition=str(tmp_path / "c.npy"))
    wanted = (seconds - seconds.mean()) / seconds.std()
    np.testing.assert_allclose(data.conditions.numpy(), wanted, atol=1e-4)


# Types


@pytest.mark.parametrize("dtype", ["i1", "<i2", ">i4", "<i8", "u4", "?", ">f8", "f2"])
def test_every_type_of_number_is_read_exactly(tmp_path, dtype):
    values = np.asfortranarray(np.random.default_rng(0).integers(0 if dtype == "u4" else -100, 100, (12, 5, 4)))
    values = values.astype(dtype)
    for data in (
        load(save(tmp_path / "a.npy", values)),
        load(field(values.astype(dtype[-2:]), path=tmp_path / "a.nc")),
    ):
        assert data.values.dtype == torch.float32
        assert np.array_equal(data.values[:, 0].numpy(), values.astype("f8"))
    large = 2**53 - np.arange(240).reshape(12, 5, 4)
    assert np.array_equal(load(save(tmp_path / "a.npy", large)).values[:, 0].numpy(), large)


def test_whole_numbers_beside_floats_are_read_and_what_is_not_is_named(tmp_path):
    axes = ("time", "lat", "lon")
    table = xarray.Dataset(
        {
            "t": (axes, normal(9, 4, 5).astype("f4")),
            "count": (axes, np.arange(180, dtype="i4").reshape(9, 4, 5)),
            "quality": (axes, np.zeros((9, 4, 5), "i1"), {"flag_meanings": "good bad"}),
            "mask": (("lat", "lon"), np.ones((4, 5), "i1")),
            "word": (("time",), np.full(9, "x")),
            "wave": (axes, np.zeros((9, 4, 5), "c8")),
            "crs": ((), 1),
        }
    )
    file = tmp_path / "a.h5"
    table.to_netcdf(file, engine="h5netcdf", invalid_netcdf=True)
    with pytest.warns(UserWarning, match="not read: quality int8.*mask int8.*word.*wave complex64") as caught:
        data = load(file)
    assert "crs" not in str(caught[0].message)
    assert data.grid.channels == ("t", "count")
    assert np.array_equal(data.values[:, 1].numpy(), table["count"].values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(file, variables=("t",))  # who chooses knows
    refuse(file, "data", "real and imaginary", variables=("wave",))


# CF's attributes


@pytest.mark.parametrize("streamed", [False, True])
def test_values_outside_the_valid_range_are_missing(tmp_path, streamed):
    values = normal(9, 4, 5).astype("f4")
    values[2, 1, 3], values[5, 0, 0] = 99, -99
    for number, about in enumerate(({"valid_range": [-9.0, 9.0]}, {"valid_min": -9.0, "valid_max": 9.0})):
        file, options = (
            field(values, path=tmp_path / f"{number}.nc", **about),
            {"memory_limit": 0 if streamed else None},
        )
        refuse(file, "data", "NaN", "(1, 3)", **options)
        filled = load(file, missing=0, **options).stored(torch.arange(9))[:, 0].numpy()
        assert np.array_equal(filled, np.where(abs(values) > 9, 0, values))
    assert load(field(values, path=tmp_path / "b.nc")).values.abs().max() == 99
    one_side = load(field(values, path=tmp_path / "c.nc", valid_max=9.0), missing=0).values
    assert (one_side.min(), one_side.max() < 9) == (-99, True)


def packed(path, raw, about):
    h5netcdf = pytest.importorskip("h5netcdf")
    with h5netcdf.File(path, "w") as file:
        file.dimensions = {"time": 3, "x": 4}
        variable = file.create_variable("v", ("time", "x"), raw.dtype, data=raw)
        variable.attrs.update(about)
    return path


def test_the_valid_range_is_that_of_the_packed_numbers(tmp_path):
    raw = np.array([[-5, 0, 100, 101], [1, 2, 3, 4], [5, 6, 7, 8]], "i2")
    about = {"scale_factor": 0.1, "add_offset": 20.0, "_FillValue": np.int16(8)}
    wanted = np.isin(raw, (-5, 101, 8))
    for number, limits in enumerate((np.array([0, 100], "i2"), np.array([20.0, 30.0]))):  # packed; else as unpacked
        for scale in (0.1, -0.1):
            ends = limits if limits.dtype.kind == "i" or scale > 0 else 40 - limits[::-1]
            changed = about | {"scale_factor": scale, "valid_range": ends}
            file = packed(tmp_path / f"{number}{scale}.nc", raw, changed)
            filled = load(file, missing=-1).values[:, 0].numpy()
            assert np.array_equal(filled == -1, wanted), (limits, scale)
            np.testing.assert_allclose(filled[~wanted], (20 + scale * raw)[~wanted], rtol=1e-6)
    whole = np.array([[0, 1, 2, 255], [4, 5, 6, 7], [8, 9, 10, 200]], "u1")
    assert load(packed(tmp_path / "a.nc", whole, {"valid_range": np.array([0, 255], "u1")})).grid.dtype == "uint8"
    data = load(packed(tmp_path / "b.nc", whole, {"valid_max": np.uint8(200)}), missing=7)
    assert (data.grid.dtype, data.values[0, 0, 3]) == ("float32", 7)
    signed = {"_Unsigned": "true", "valid_range": np.array([0, -56], "i1")}  # 200, in the bits of int8
    assert load(packed(tmp_path / "c.nc", whole.view("i1"), signed), missing=7).values[0, 0, 3] == 7


SINCE = {"units": "days since 2000-01-01"}


@pytest.mark.parametrize(
    "dims, about, sample",
    [
        (("nlat", "nlon", "time"), {}, "time"),
        (("time", "nlat", "nlon"), {}, "time"),
        (("lat_rho", "T0", "x"), {"T0": SINCE}, "T0"),
        (("rlat", "rlon", "sample"), {}, "sample"),
        (("a", "b", "days"), {"days": {"axis": "T"}, "a": {"axis": "Y"}, "b": {"units": "degrees_east"}}, "days"),
        (("item", "time", "x"), {"time": SINCE}, "item"),
        (("a", "b", "c"), {}, "a"),
        (("step", "time", "lat"), {"time": SINCE}, None),  # either may be
        (("lat", "lon", "lev"), {}, None),
        (("xc", "yc", "foo"), {}, None),
        (("ni", "nj", "member"), {}, "member"),
        (("nlat", "time", "member"), {}, None),
    ],
)
def test_the_axis_of_the_items_is_found_or_asked_for(tmp_path, dims, about, sample):
    sizes = dict(zip(dims, (4, 5, 6), strict=True))
    coords = {name: (name, np.arange(float(sizes[name])), attrs) for name, attrs in about.items()}
    file = field(normal(4, 5, 6), dims, tmp_path / "a.nc", coords)
    if sample is None:
        refuse(file, "data", "sample_axis")
        assert load(file, sample_axis=dims[1]).along[0] == dims[1]
    else:
        data = load(file)
        assert data.along[0] == sample
        assert data.grid.axes == tuple(dim for dim in dims if dim != sample)


def test_axes_under_coordinates_of_two_axes_are_places(tmp_path):
    about = {"lat2": (("a", "b"), normal(4, 5), {"standard_name": "latitude"})}
    file = field(normal(4, 5, 6), ("a", "b", "time"), tmp_path / "a.nc", about)
    assert load(file).along[0] == "time"


# Folders


def frames_file(path, frames, kind=None):
    first, *rest = map(Image.fromarray, frames)
    options = {"lossless": True} if path.suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=rest, **options)


@pytest.mark.parametrize("suffix", ["tiff", "png", "webp"])
def test_files_of_several_frames_are_videos_or_volumes_and_never_one_frame(tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 5, 3), dtype=np.uint8)
    for number, frames in enumerate(pixels):
        frames_file(tmp_path / f"{number}.{suffix}", frames)
    refuse(tmp_path, "data", "4 frames", "NTHWC", "NDHWC")
    for layout, kind in (("NTHWC", "video"), ("NDHWC", "volume")):
        for limit in (None, 0):
            data = load(tmp_path, layout=layout, memory_limit=limit)
            assert data.grid.kind == kind
            assert np.array_equal(data.stored(torch.arange(3)).numpy(), np.moveaxis(pixels, -1, 1))
    assert load(tmp_path / f"1.{suffix}", layout="NDHWC").shape == (3, 4, 6, 5)
    frames_file(tmp_path / f"3.{suffix}", pixels[0, :3])
    refuse(tmp_path, "data", f"3.{suffix}", "3 frames", "4", layout="NTHWC")
    Image.fromarray(pixels[0, 0]).save(tmp_path / f"3.{suffix}")
    refuse(tmp_path, "data", f"3.{suffix}", "1 frames", layout="NTHWC")


def deep_png(path, channels):
    """A PNG of 16 bits of colour, which Pillow does not write."""
    kind = {2: 4, 3: 2, 4: 6}[channels]

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + bytes(range(2 * channels * 3)) for _ in range(2))
    head = struct.pack(">IIBBBBB", 3, 2, 16, kind, 0, 0, 0)
    content = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_16_bits_are_refused_not_cut(tmp_path, channels):
    deep_png(tmp_path / "a.png", channels)
    refuse(tmp_path, "data", "a.png", "16 bits of colour", ".npy")


def test_transparency_of_a_palette_is_a_channel_unless_channels_are_given(tmp_path):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)).convert("P")
    picture.save(tmp_path / "a.png", transparency=bytes([0] * 128 + [255] * 128))
    data = load(tmp_path)
    assert data.shape == (4, 4, 5)
    assert set(data.values[0, 3].flatten().tolist()) == {0, 255}
    assert load(tmp_path, channels=3).shape == (3, 4, 5)


@pytest.mark.parametrize("kind", ["jpg", "webp", "png"])
def test_pictures_are_upright_in_every_format(tmp_path, kind):
    picture, note = (
        Image.fromarray(np.repeat(np.uint8([[0, 80, 255, 90]]) * np.ones((16, 1), "u1"), 8, 1)),
        Image.Exif(),
    )
    note[0x0112] = 6  # the camera was turned: the right side is below
    picture.save(tmp_path / f"a.{kind}", exif=note)
    data = load(tmp_path)
    assert data.shape[1:] == (32, 16)
    assert data.values[0, 0, 2, 3] < 20


def test_what_is_not_read_is_counted_by_kind_and_two_kinds_at_once_are_refused(tmp_path):
    for name in ("1.png", "2.png"):
        Image.fromarray(np.uint8([[0, 255]])).save(tmp_path / name)
    for name in ("a.gif", "b.GIF", "c.zip", "README", ".DS_Store", "._1.png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match=r"not read: 2 \.gif(, 1 [^,]+){3}\.$") as caught:
        assert len(load(tmp_path)) == 2
    for word in ("1 .zip", "1 without a suffix", "1 links or pipes"):
        assert word in str(caught[0].message)
    wavfile.write(tmp_path / "a.wav", 8000, np.zeros(20, "f4"))
    refuse(tmp_path, "data", "1 sounds and 2 images")


def test_classes_and_frames_have_their_natural_order(tmp_path):
    for name in ("1", "2", "10"):
        (tmp_path / name).mkdir()
        for frame in ("1", "2", "10"):
            shade = np.uint8([[0, 255, int(name), int(frame)]])
            Image.fromarray(shade).save(tmp_path / name / f"{frame}.png")
    data = load(tmp_path, labels="data")
    assert data.class_names == ("1", "2", "10")
    assert [data.class_names[label] for label in data.labels] == [str(x) for x in data.values[:, 0, 0, 2].tolist()]
    assert load(tmp_path, layout="NTHWC").values[0, 0, :, 0, 3].tolist() == [1, 2, 10]
    save(tmp_path / "a.npy", normal(3, 8).astype("f4"))
    words = save(tmp_path / "labels.npy", np.array(["c10", "c2", "c1"]))
    named = load(tmp_path / "a.npy", labels=str(words))
    assert (named.class_names, named.labels.tolist()) == (("c1", "c2", "c10"), [2, 1, 0])


def test_a_run_that_numbered_its_classes_otherwise_is_not_evaluated_with_these(tmp_path):
    """Version 0.2 had 1, 10, 2: its class 1 was another one."""
    folder, run = tmp_path / "images", tmp_path / "run"
    for name in ("1", "2", "10"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.uint8([[0, 255, int(name)]])).save(folder / name / "a.png")
    experiment, data = Experiment(data=DataSpec(str(folder), labels="data")), load(folder, labels="data")
    run.mkdir()
    for labels, fits in ((data.labels, True), (torch.arange(3), False)):
        identity = {"data": data_digest(replace(data, labels=labels))}
        (run / "experiment.json").write_text(json.dumps(experiment.to_json() | {"identity": identity}))
        if fits:
            assert real_source(run).load().data.class_names == ("1", "2", "10")
        else:
            with pytest.raises(nidiff.InputError) as error:
                real_source(run).load()
            assert error.value.argument == "data"


# Text from files


def test_no_escape_code_of_a_file_reaches_a_terminal(tmp_path):
    evil = "K\x1b[31m\x9b\x07\u202e"
    coords = {"la\x1bt": ("la\x1bt", np.arange(4.0), {"units": evil})}
    table = xarray.Dataset({"t\x1b2": (("time", "la\x1bt", "lon"), normal(9, 4, 5), {"units": evil})}, coords)
    table.to_zarr(tmp_path / "a.zarr", zarr_format=2)
    data = load(tmp_path / "a.zarr")
    words = [*data.grid.axes, *data.grid.channels, *data.grid.units, *data.grid.coordinates, *data.grid.axis_units]
    words += [*data.grid.axis_units.values()]
    assert len(words) == 8 - 1
    assert all(word.isprintable() for word in words)
    assert data.grid.units[0].startswith("K\\x1b[31m")
    assert np.array_equal(data.values[:, 0].double().numpy(), table["t\x1b2"].values.astype("f4"))
    assert str(nidiff.InputError("x", None, f"has {evil}")).isprintable()
    assert Dataset(data.values, class_names=(evil,)).class_names[0].isprintable()
    assert printable("W\u00a0m⁻² °C") == "W m⁻² °C"  # what is letters stays
