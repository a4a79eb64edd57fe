"""Many files are one data set if they agree, and data come straight from Python as they do from a file."""

import os
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import load, refuse, write_run
from scipy.io import wavfile

import nidiff
from nidiff.cli import main
from nidiff.data.load import load_items
from nidiff.data.spec import DataSpec
from nidiff.data.split import held_out_rows
from nidiff.evaluation.real import real_source
from nidiff.training.experiment import Experiment

xarray = pytest.importorskip("xarray")
AXES = ("time", "lat", "lon")


def table(first=0, count=3, seed=0, unit="K", north=60.0, dims=AXES, **extra):
    """``count`` days of two variables from day ``first``: a part of one record, whatever the part."""
    random = np.random.default_rng(seed)
    values = random.normal(280, 15, (2, 40, 4, 6)).astype("f4")[:, first : first + count]
    record = xarray.Dataset(
        {"t2m": (AXES, values[0], {"units": unit}), "u10": (AXES, values[1], {"units": "m/s"}), **extra},
        coords={
            "time": np.datetime64("2010-01-01") + (first + np.arange(count)) * np.timedelta64(1, "D"),
            "lat": ("lat", np.linspace(north, -60.0, 4), {"units": "degrees_north"}),
            "lon": np.arange(6) * 60.0,
        },
    )
    return record.transpose(*dims, ...)


def write(path, *args, **options):
    path.parent.mkdir(exist_ok=True, parents=True)
    engine = {"engine": "h5netcdf"} | options.pop("how", {})
    table(*args, **options).to_netcdf(path, **engine)
    return path


@pytest.fixture
def months(tmp_path):
    """One record in a folder of four files, whose names have the order 1, 2, 10, 11."""
    counts = dict(zip((1, 2, 10, 11), (5, 3, 1, 4), strict=True))
    first = 0
    for number, count in counts.items():
        write(tmp_path / "months" / f"m{number}.nc", first, count)
        first += count
    return tmp_path / "months"


# One data set of many files


def test_files_are_the_record_that_they_were_cut_from(tmp_path, months):
    whole = load(write(tmp_path / "whole.nc", 0, 13))
    some = [str(months / f"m{number}.nc") for number in (1, 2, 10, 11)]
    for source in (months, f"{months}/*.nc", f"{months}/m?.nc,{months}/m1?.nc", some, ",".join(some)):
        for limit in (None, 0):
            data = load(source, memory_limit=limit, held_out=None)
            assert isinstance(data.values, torch.Tensor) is (limit is None)
            assert torch.equal(data.stored(torch.arange(13)), whole.values)
            assert data.grid == whole.grid
            assert np.array_equal(data.along[1], whole.along[1])
            assert data.scaling == whole.scaling
    rows = torch.tensor([12, 0, 8, 8, 5])
    assert torch.equal(load(months, memory_limit=0).stored(rows), whole.values[rows])
    test = load(months, split="test", held_out="time=2010-01-06:2010-01-09")  # over the edges of files
    assert torch.equal(test.values, whole.values[5:9])


def test_files_may_have_their_own_order_of_variables_and_axes_and_epoch(tmp_path):
    write(tmp_path / "a" / "1.nc", 0, 3)
    other = table(3, 4, dims=("lon", "time", "lat"))[["u10", "t2m"]]
    other.time.encoding["units"] = "hours since 1900-01-01"
    other.to_netcdf(tmp_path / "a" / "2.nc", engine="h5netcdf")
    data, whole = load(tmp_path / "a"), load(write(tmp_path / "b.nc", 0, 7))
    assert torch.equal(data.values, whole.values)
    assert np.array_equal(data.along[1], whole.along[1])


@pytest.mark.parametrize(
    "word, changed",
    [
        ("degC", {"unit": "degC"}),
        ("lat", {"north": 50.0}),
        ("tp", {"tp": (AXES, np.zeros((3, 4, 6), "f4"))}),
        ("other", {"other": (AXES, np.zeros((3, 4, 6), "f4")), "without": "u10"}),
    ],
)
def test_files_that_disagree_are_refused_and_both_are_named(tmp_path, word, changed):
    write(tmp_path / "1.nc")
    without = changed.pop("without", [])
    table(3, **changed).drop_vars(without).to_netcdf(tmp_path / "2.nc", engine="h5netcdf")
    refuse(tmp_path / "*.nc", "data", "1.nc", "2.nc", word)
    table(3).to_netcdf(tmp_path / "2.nc", engine="h5netcdf")
    assert len(load(tmp_path / "*.nc")) == 6  # nothing else was wrong


def test_arrays_that_disagree_in_shape_or_type_are_refused_and_both_are_named(tmp_path):
    for name, array in {"1": np.zeros((2, 5), "f4"), "2": np.ones((2, 6), "f4"), "3": np.ones((2, 5), "u1")}.items():
        np.save(tmp_path / f"{name}.npy", array)
    for other in ("2", "3"):
        refuse(f"{tmp_path}/[1{other}].npy", "data", "1.npy", f"{other}.npy", layout="NL")
    np.save(tmp_path / "3.npy", np.ones((1, 5), "f8"))
    assert len(load(f"{tmp_path}/[13].npy", layout="NL")) == 3


def test_days_that_are_there_twice_are_warned_of_and_members_of_an_ensemble_are_not(tmp_path):
    write(tmp_path / "1.nc", 0, 5)
    write(tmp_path / "2.nc", 3, 5)
    with pytest.warns(UserWarning, match="2 items of the same time"):
        assert len(load(tmp_path)) == 10
    write(tmp_path / "2.nc", 0, 5, seed=1)
    assert len(load(tmp_path)) == 10


def test_files_of_one_time_each_are_items(tmp_path):
    for day in range(4):
        one = table(day, 1).isel(time=0)
        one["kind"] = day % 2
        one.to_netcdf(tmp_path / f"{day}.nc", engine="h5netcdf")
    data, whole = load(tmp_path, variables=("t2m", "u10")), table(0, 4)
    assert np.array_equal(data.values.numpy(), np.stack([whole.t2m, whole.u10], 1))
    assert data.along[0] == "time"
    assert np.array_equal(data.along[1], whole.time)
    assert load(tmp_path, labels="kind").labels.tolist() == [0, 1, 0, 1]
    each = load(tmp_path, layout="HW", variables=("t2m",))  # no N: each file is one item
    assert np.array_equal(each.values[:, 0].numpy(), whole.t2m)


def test_hdf5_without_names_of_axes_is_joined_by_the_order_of_the_axes(tmp_path):
    h5py = pytest.importorskip("h5py")
    values = np.random.default_rng(0).normal(size=(12, 4, 6)).astype("f4")
    for number, (first, last) in enumerate(((0, 3), (3, 7), (7, 12))):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = values[first:last]
    assert np.array_equal(load(tmp_path).values[:, 0].numpy(), values)
    assert load(tmp_path, split="test", held_out="item=2:4").values.shape == (3, 1, 4, 6)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_layout_without_n_makes_each_file_an_item(tmp_path, suffix):
    values = np.random.default_rng(0).normal(size=(12, 3, 4)).astype("f4")
    for number, value in enumerate(values, 1):
        (np.save if suffix == ".npy" else np.savez)(tmp_path / f"{number}{suffix}", value)
    refuse(tmp_path, "layout", "such as NL", "CL")  # which of the two it is cannot be known
    for limit in (None, 0):
        data = load(tmp_path, layout="CL", memory_limit=limit)
        assert np.array_equal(data.stored(torch.arange(12)).numpy(), values)  # 2 before 10
    assert torch.equal(load(tmp_path, layout="NL").values[:, 0], torch.from_numpy(values.reshape(36, 4)))
    only = load(tmp_path, layout="CL", split="test", held_out=f"file=3{suffix}:3{suffix}")
    assert np.array_equal(only.values.numpy(), values[2:3])  # a file can be held out


def test_what_is_missing_mixed_or_of_no_known_format_is_said_with_the_remedy(tmp_path):
    refuse(tmp_path / "none*.nc", "data", "none*.nc")
    np.save(tmp_path / "a.npy", np.ones((3, 4)))
    refuse(f"{tmp_path}/a.npy,{tmp_path}/gone.npy", "data", "gone.npy")
    write(tmp_path / "b.nc")
    refuse(tmp_path, "data", "1 tables and 1 arrays", "*.npy")
    labels = tmp_path / "labels.npy"
    np.save(labels, np.arange(3))
    (tmp_path / "a.npy").unlink()
    assert len(load(tmp_path, labels=str(labels))) == 3  # it is the labels, not another kind of data
    for name, word in {"a.fits": "astropy", "a.rds": "readRDS", "a.sgy": "segyio", "a.xyz": "load_dataset"}.items():
        (tmp_path / name).write_bytes(b"x")
        refuse(tmp_path / name, "data", name, word)
    with pytest.warns(UserWarning, match=r"not read: 1 \.fits, 1 \.rds"):
        load(tmp_path, labels=str(labels))
    os.symlink(tmp_path / "b.nc", tmp_path / "month, 1.nc")
    assert len(load(tmp_path / "month, 1.nc")) == 3  # a path that is there is one path


def test_a_shell_may_write_the_names_out(tmp_path, months, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = ["--covariances", "white", "--schedules", "ddpm_linear:num_levels=50", "--json"]
    found = []
    for words in (["months/*.nc"], [f"months/m{number}.nc" for number in (1, 2, 10, 11)]):
        assert main(["design", *words, *quick]) == 0
        found.append(capsys.readouterr().out)
    assert found[0].replace("'months/*.nc'", "X").replace("months/*.nc", "X") == found[1].replace(
        ",".join(f"months/m{number}.nc" for number in (1, 2, 10, 11)), "X"
    )


def test_a_run_says_how_many_files_it_is_from():
    assert Experiment(data=DataSpec("/home/me/a.nc,/home/me/b.nc")).about["data"] == "a.nc and 1 more"


def test_variables_of_all_files_are_labels_and_conditions_and_what_is_not_read_is_said_once(tmp_path):
    extra = {name: ("time", np.arange(9.0) % 3) for name in ("kind", "phase", "other")}
    for first, last in ((0, 4), (4, 9)):
        table(0, 9, **extra).isel(time=slice(first, last)).to_netcdf(tmp_path / f"{first}.nc", engine="h5netcdf")
    with pytest.warns(UserWarning, match="not read: other") as caught:
        data = load(tmp_path, labels="kind", condition="phase")
    assert len(caught) == 1
    assert data.labels.tolist() == (np.arange(9) % 3).tolist()
    assert torch.allclose(data.condition_scaling.to_data(data.conditions)[:, 0], torch.arange(9.0) % 3, atol=1e-6)


# Classic NetCDF


@pytest.mark.parametrize("kind", ["NETCDF3_CLASSIC", "NETCDF3_64BIT"])
def test_classic_netcdf_is_read_as_any_other(tmp_path, kind):
    how = {"engine": "scipy", "format": kind}
    classic, modern = write(tmp_path / "a.nc", 0, 5, how=how), write(tmp_path / "b.nc", 0, 5)
    for limit in (None, 0):
        data = load(classic, memory_limit=limit)
        assert torch.equal(data.all(), load(modern).all())
        assert data.grid == load(modern).grid
    stream = load(classic, memory_limit=0)
    os.truncate(classic, 500)  # it is mapped: to read it would end the process
    with pytest.raises(nidiff.InputError, match="changed"):
        stream.stored(torch.tensor([4]))
    refuse(classic, "data", "a.nc")


# Data from Python


def test_a_table_of_xarray_is_as_its_file(tmp_path):
    record = table(0, 9, kind=("time", np.arange(9) % 3))
    record.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    options = {"variables": ("u10", "t2m"), "labels": "kind", "held_out": "time=2010-01-05:", "scaling": "range"}
    for given in (record, xarray.open_dataset(tmp_path / "a.nc", engine="h5netcdf")):
        for part in ("train", "test"):
            mine, file = (nidiff.load_dataset(each, split=part, **options) for each in (given, tmp_path / "a.nc"))
            assert torch.equal(mine.all(), file.all())
            assert (mine.grid, mine.scaling) == (file.grid, file.scaling)
            assert torch.equal(mine.labels, file.labels)
            assert np.array_equal(mine.along[1], file.along[1])
        assert given.t2m.shape == (9, 4, 6)  # it is neither changed nor closed
        assert given.t2m.values.any()
    assert given.time.dtype.kind == "M"
    one = nidiff.load_dataset(record.t2m)
    assert (one.grid.channels, one.grid.units) == (("t2m",), ("K",))
    assert np.array_equal(one.values[:, 0].numpy(), record.t2m)


def test_arrays_and_tensors_are_as_their_file(tmp_path):
    values = np.random.default_rng(0).normal(size=(20, 5, 2)).astype("f4")
    np.save(tmp_path / "a.npy", values)
    coarse, kind = values[:, :1].transpose(0, 2, 1).copy(), np.array(["b", "a"] * 10)
    np.save(tmp_path / "coarse.npy", coarse)
    np.save(tmp_path / "kind.npy", kind)
    files = {"labels": str(tmp_path / "kind.npy"), "condition": str(tmp_path / "coarse.npy")}
    wanted = nidiff.load_dataset(tmp_path / "a.npy", layout="NLC", held_out=0.2, **files)
    for given, labels, condition in (
        (values, kind, coarse),
        (torch.from_numpy(values), kind.tolist(), torch.from_numpy(coarse)),
        (tmp_path / "a.npy", kind, coarse),
    ):
        data = nidiff.load_dataset(given, layout="NLC", held_out=0.2, labels=labels, condition=condition)
        assert torch.equal(data.all(), wanted.all())
        assert torch.equal(data.labels, wanted.labels)
        assert torch.equal(data.conditions, wanted.conditions)
        assert (data.class_names, data.grid, data.scaling) == (wanted.class_names, wanted.grid, wanted.scaling)
    data = nidiff.load_dataset(values, layout="NLC", scaling="none")
    values[:] = 0
    assert data.all().abs().min() > 0  # they are copied


def test_what_python_cannot_give_is_refused(tmp_path):
    values = np.ones((4, 3, 2), "f4")
    for given, argument, options in (
        ([1.0, 2.0], "data", {}),
        ({"a": values}, "data", {}),
        (values, "layout", {"layout": "NCHW"}),
        (values, "variables", {"variables": ("a",)}),
        (values, "labels", {"labels": np.arange(3)}),
        (values, "labels", {"labels": "kind"}),
        (values, "condition", {"condition": np.ones((3, 2))}),
        (values, "split", {"split": "test"}),
        (values.astype("c8"), "data", {}),
        (table(), "variables", {"variables": ("nothing",)}),
    ):
        refuse(given, argument, **options)
    with pytest.raises(nidiff.InputError) as error:
        Experiment(data=load(table()))  # a run is repeated from the path of its data
    assert error.value.argument == "data"


# Sounds of any length


def sounds(folder, lengths, rate=8000):
    values = np.random.default_rng(0).uniform(0.1, 0.9, (len(lengths), max(lengths))).astype("f4")
    for number, length in enumerate(lengths):
        path = folder / "ab"[number % 2] / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        wavfile.write(path, rate, values[number, :length])
    order = [*range(0, len(lengths), 2), *range(1, len(lengths), 2)]  # by folder
    return values[order], [lengths[number] for number in order]


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("size", [None, 12])
def test_shorter_sounds_end_in_silence_and_the_middle_is_taken_of_longer_ones(tmp_path, size, limit):
    values, lengths = sounds(tmp_path, [20, 12, 7, 1, 20])
    shorter = sum(length < (size or 20) for length in lengths)
    with pytest.warns(UserWarning, match=f"{shorter} of 5 sounds are shorter than {size or 20} samples"):
        data = load(tmp_path, size=size, memory_limit=limit, scaling="none", labels="data")
    wanted = torch.zeros(5, 1, size or 20)
    for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
        count = min(length, size or 20)
        start = (length - count) // 2
        wanted[row, 0, :count] = torch.from_numpy(value[start : start + count])
    assert torch.equal(data.stored(torch.arange(5)), wanted)
    assert data.lengths.tolist() == [min(length, size or 20) for length in lengths]
    mask = torch.arange(size or 20) < data.lengths[:, None]
    assert torch.equal(mask, wanted[:, 0] != 0)  # `lengths` is where there is sound
    assert (data.class_names, data.labels.tolist()) == (("a", "b"), [0, 0, 0, 1, 1])
    part = data.take(torch.tensor([3, 0]))
    assert part.lengths.tolist() == data.lengths[[3, 0]].tolist()


def test_sounds_of_one_length_are_said_nothing_of(tmp_path):
    sounds(tmp_path, [9, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path).lengths.tolist() == [9, 9]


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "WAV"])
def test_sounds_of_other_formats(tmp_path, kind):
    soundfile = pytest.importorskip("soundfile")
    wave = (0.5 * np.sin(np.arange(4000) / 10)).astype("f4")
    soundfile.write(tmp_path / f"a.{kind.lower()}", wave, 8000, format=kind)
    data = load(tmp_path, scaling="none")
    assert (data.grid.rate, data.shape) == (8000, (1, 4000))
    assert np.abs(data.values[0, 0].numpy() - wave).max() < (0.05 if kind == "OGG" else 2**-15)


def test_a_sound_that_is_cut_short_is_refused_not_shortened(tmp_path):
    sounds(tmp_path, [500])
    (file,) = tmp_path.rglob("*.wav")
    whole = file.read_bytes()
    assert load_items(file, (1, 500)).shape == (1, 1, 500)
    file.write_bytes(whole[:-100])
    refuse(file, "data", file.name, "cut short")


# The parts of many files are a data set like any other


def test_a_range_is_held_out_of_the_joined_coordinate(months):
    data = load(months)
    assert held_out_rows(data, "time=2010-01-06:2010-01-09").nonzero()[:, 0].tolist() == [5, 6, 7, 8]
    assert held_out_rows(replace(data, along=None), "item=1:2").nonzero()[:, 0].tolist() == [1, 2]


def test_a_run_on_several_arrays_of_a_file_is_compared_with_the_same_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", u=np.ones((3, 4)), v=np.zeros((3, 4)))
    experiment = Experiment(data=DataSpec(str(tmp_path / "a.npz"), variables=("u", "v"), scaling=("none",)))
    write_run(tmp_path / "run", experiment)
    grid = experiment.data.load().grid
    assert real_source(tmp_path / "run", like=grid).load().data.grid.channels == ("u", "v")
