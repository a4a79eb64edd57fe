"""Files that know their units: what a file says of itself is matched with a model's grid, or refused with both values.

MISMATCHES is the table of docs/data.md: a file is converted or reordered to what it was before, taken on trust with a
warning, or refused.
"""

import json
import re
import wave
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.cli import main
from nidiff.data.annotations import conditions_of
from nidiff.data.dataset import Dataset, Source
from nidiff.data.grid import Grid
from nidiff.data.load import load_items
from nidiff.data.match import match
from nidiff.diffusion.scaling import Scaling
from nidiff.generation.conditioning import read_rows
from nidiff.model.folder import read_grid, save_model

xarray = pytest.importorskip("xarray")
LAT, LON = np.linspace(67.5, -67.5, 4), np.arange(4) * 90.0  # a square: its axes cannot be told by their sizes
CONVERTED, REORDERED, TRUSTED, REFUSED = "converted", "reordered", "taken, with a warning", "refused"


def fields(count: int = 3) -> "xarray.Dataset":
    random, axes = np.random.default_rng(0), ("time", "lat", "lon")
    return xarray.Dataset(
        {
            "t2m": (axes, random.normal(285, 15, (count, 4, 4)).astype("f4"), {"units": "K"}),
            "u10": (axes, random.normal(2, 4, (count, 4, 4)).astype("f4"), {"units": "m s-1"}),
        },
        {
            "time": ("time", np.arange(count), {"units": "days since 2000-01-01"}),
            "lat": ("lat", LAT, {"units": "degrees_north"}),
            "lon": ("lon", LON, {"units": "degrees_east"}),
        },
    )


def volumes() -> "xarray.Dataset":
    """Of three axes, the first of which is a pressure, or another."""
    values = np.random.default_rng(1).normal(size=(2, 3, 4, 4)).astype("f4")
    level = ("level", [1000.0, 850.0, 500.0], {"units": "hPa"})
    return xarray.Dataset({"w": (("time", "level", "y", "x"), values)}, {"level": level})


def videos() -> "xarray.Dataset":
    times = ("time", [0.0, 6.0, 12.0], {"units": "hours since 2000-01-01"})
    return volumes().drop_vars("level").rename(time="event", level="time").assign_coords(time=times)


def with_unit(table, unit: str | None, change: Callable = lambda x: x, name: str = "t2m"):
    """The variable with its numbers, in float64, in another unit."""
    attributes = {} if unit is None else {"units": unit}
    return table.assign({name: (table[name].dims, change(table[name].values.astype("f8")), attributes)})


def at(table, axis: str, values, unit: str | None = None):
    attributes = table[axis].attrs if unit is None else {"units": unit}
    return table.assign_coords({axis: (axis, np.asarray(values), attributes)})


def celsius(table):
    return with_unit(table, "degC", lambda x: x - 273.15)


def transposed(*axes: str) -> Callable:
    return lambda table: table.transpose(*axes)


def kilometres(table):
    return with_unit(table, "km/h", lambda x: 3.6 * x, "u10")


def westward(table):
    return at(table, "lon", (table.lon.values + 180) % 360 - 180).sortby("lon")


def wider(table):
    """The same fields with a row around them, and longitudes that begin elsewhere."""
    return table.pad(lat=1, mode="edge").assign_coords(lat=np.linspace(112.5, -112.5, 6)).roll(lon=1, roll_coords=True)


@dataclass(frozen=True)
class Case:
    file: str
    model: str
    result: str
    change: Callable
    words: tuple[str, ...]  # of the sentence
    base: Callable = fields
    options: tuple = ()
    control: bool = True  # whether the numbers would be others if the file were not matched


def sounds(rate: int, folder: Path) -> Path:
    folder.mkdir()
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(np.arange(32, dtype="<i2").tobytes())
    return folder


MISMATCHES = [
    Case("t2m in `degC`", "K", CONVERTED, celsius, ("t2m from degC to K",)),
    Case("t2m in `deg C`", "K", CONVERTED, lambda t: with_unit(t, "deg C", lambda x: x - 273.15), ("deg C to K",)),
    Case("t2m in `Fahrenheit`", "K", CONVERTED, lambda t: with_unit(t, "Fahrenheit", lambda x: x * 1.8 - 459.67),
         ("Fahrenheit",)),
    Case("u10 in `km/h`", "m s-1", CONVERTED, kilometres, ("u10", "km/h")),
    Case("t2m without a unit", "K", TRUSTED, lambda t: with_unit(t, None), ("no unit for t2m", "K"), control=False),
    Case("t2m in `m s-1`", "K", REFUSED, lambda t: with_unit(t, "m s-1"), ("'m s-1'", "'K'")),
    Case("t2m in `counts per pixel`", "K", REFUSED, lambda t: with_unit(t, "counts per pixel"), ("counts", "'K'")),
    Case("latitude reversed", "north first", REORDERED, lambda t: t.isel(lat=slice(None, None, -1)), ("reversed lat",)),
    Case("longitude -180 … 90", "0 … 270", REORDERED, westward, ("rolled lon by 2",)),
    Case("axes (time, lon, lat)", "(lat, lon)", REORDERED, transposed("time", "lon", "lat"), ("(lon, lat)",)),
    Case("axes (time, longitude, latitude)", "(lat, lon)", REORDERED,
         lambda t: t.rename(lat="latitude", lon="longitude").transpose("time", "longitude", "latitude"), ("latitude",)),
    Case("axes (lat, lon, time)", "(lat, lon)", REORDERED, transposed("lat", "lon", "time"), ("along time",),
         control=False),
    Case("a larger region", "a part of it", REORDERED, wider, ("4 of its 6 points along lat", "rolled lon by 1")),
    Case("latitudes 2.5° further north", "67.5 … -67.5", REFUSED, lambda t: at(t, "lat", LAT + 2.5), ("70 to", "67.5")),
    Case("longitudes 0, 60, … 180", "0, 90, … 270", REFUSED, lambda t: at(t, "lon", LON * 2 / 3), ("180", "270")),
    Case("no coordinates", "67.5 … -67.5", TRUSTED, lambda t: t.drop_vars(["lat", "lon"]), ("67.5", "-67.5"),
         control=False),
    Case("variables t and u10", "t2m and u10", REFUSED, lambda t: t.rename(t2m="t"), ("t, u10", "t2m, u10")),
    Case("the same with `--variables t u10`", "t2m and u10", TRUSTED, lambda t: t.rename(t2m="t"),
         ("t is taken as t2m",), options=(("variables", ("t", "u10")),), control=False),
    Case("levels in Pa, the lowest last", "hPa, the lowest first", REORDERED,
         lambda t: at(t, "level", t.level.values * 100, "Pa").isel(level=slice(None, None, -1)),
         ("level from Pa to hPa", "reversed level"), volumes),
    Case("times of a video in days from another date", "every 6 hours", CONVERTED,
         lambda t: at(t, "time", [7.0, 7.25, 7.5], "days since 1900-01-01"), ("days to hours",), videos, control=False),
    Case("times of a video every 3 hours", "every 6 hours", REFUSED, lambda t: at(t, "time", [0.0, 3.0, 6.0]),
         ("steps of 3", "steps of 6"), videos),
]  # fmt: skip


OTHERS = [  # which are no tables, and have tests of their own below
    ("sound at 44,100 samples per second", "8,000", REFUSED),
    ("pictures of 16 bits", "8 bits", REFUSED),
    ("pictures as floats from 0 to 1", "0 … 255", REFUSED),
    ("an array with `--layout NWH`", "(height, width)", REORDERED),
]


def store(table, path: Path) -> Path:
    table.to_netcdf(path, engine="h5netcdf")
    return path


def grid_of(path: Path, **options) -> tuple[tuple[int, ...], Grid]:
    data = nidiff.load_dataset(path, progress=False, **options)
    return data.shape, data.grid


@pytest.mark.parametrize("case", MISMATCHES, ids=lambda case: case.file)
def test_a_mismatched_file_is_converted_reordered_or_refused(case, tmp_path):
    shape, grid = grid_of(store(case.base(), tmp_path / "model.nc"))
    given, options = store(case.change(case.base()), tmp_path / "given.nc"), dict(case.options)
    expected = load_items(tmp_path / "model.nc", shape, grid=grid)  # which needs nothing, and warns of nothing
    if case.result == REFUSED:
        with pytest.raises(nidiff.InputError) as error:
            load_items(given, shape, grid=grid, **options)
        assert error.value.argument == "file"
        assert all(word in str(error.value) for word in case.words), str(error.value)
        return
    with pytest.warns(UserWarning, match=re.escape(case.words[0])) as caught:
        items = load_items(given, shape, grid=grid, **options)
    said = " ".join(str(warning.message) for warning in caught)
    assert all(word in said for word in case.words), said
    if case.result == CONVERTED:
        torch.testing.assert_close(items, expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(items, expected)
    if case.control:  # as they are stored, they are other numbers
        other = nidiff.load_dataset(given, progress=False, **options).values
        assert other.shape != expected.shape or not torch.allclose(other, expected)


def test_the_table_of_the_documentation_is_this_one():
    page = (Path(__file__).parent.parent / "docs/data.md").read_text()
    section = page.partition("## Files for a model")[2].partition("\n## ")[0]
    rows = [tuple(line.strip("| ").split(" | "))[:3] for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [*((case.file, case.model, case.result) for case in MISMATCHES), *OTHERS]


def test_sounds_of_another_rate_are_refused_and_a_file_is_as_good_as_a_folder(tmp_path):
    shape, grid = grid_of(sounds(8000, tmp_path / "slow"))
    expected = load_items(tmp_path / "slow", shape, grid=grid)
    assert torch.equal(load_items(tmp_path / "slow" / "a.wav", shape, grid=grid), expected)
    with pytest.raises(nidiff.InputError, match=r"44100 samples per second, and 8000"):
        load_items(sounds(44100, tmp_path / "fast"), shape, grid=grid)


def test_the_letters_of_a_layout_are_names_of_axes(tmp_path):
    array = np.random.default_rng(0).normal(size=(2, 3, 3)).astype("f4")
    np.save(tmp_path / "a.npy", array)
    with pytest.warns(UserWarning, match="transposed"):
        items = load_items(tmp_path / "a.npy", (1, 3, 3), grid=Grid(("height", "width")), layout="NWH")
    assert np.array_equal(items[:, 0], array.transpose(0, 2, 1))
    assert np.array_equal(load_items(tmp_path / "a.npy", (1, 3, 3), grid=Grid(("lat", "lon")))[:, 0], array)


def test_the_bits_of_pictures_are_those_of_the_model(tmp_path):
    pixels = np.arange(32).reshape(2, 4, 4)
    grid = Grid.usual((1, 4, 4), "uint8")
    for array, words in (
        (pixels.astype("u2"), ("uint16", "uint8")),
        (pixels / 32, ("0 to 0.969", "0 to 255")),
        (pixels / 16 - 1, ("-1 to", "0 to 255")),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(nidiff.InputError) as error:
            load_items(tmp_path / "a.npy", (1, 4, 4), grid=grid)
        assert error.value.argument == "file"
        assert all(word in str(error.value) for word in words), str(error.value)
    for array in (pixels.astype("u1"), pixels * 8.0, 0.0 * pixels):
        np.save(tmp_path / "a.npy", array)
        assert np.array_equal(load_items(tmp_path / "a.npy", (1, 4, 4), grid=grid)[:, 0], array)


def test_a_file_without_an_axis_of_items_is_one_item(tmp_path):
    shape, grid = grid_of(store(fields(), tmp_path / "model.nc"))
    store(fields().isel(time=1, drop=True), tmp_path / "single.nc")
    expected = load_items(tmp_path / "model.nc", shape)[1:2]
    assert torch.equal(load_items(tmp_path / "single.nc", shape, grid=grid), expected)
    with refused("data"):  # without a model nothing says which axes are those of an item
        nidiff.load_dataset(tmp_path / "single.nc")


def test_means_over_blocks_lie_in_their_middle(tmp_path):
    shape, grid = grid_of(store(fields(), tmp_path / "model.nc"))
    coarse = fields().coarsen(lat=2, lon=2).mean()
    expected = load_items(store(coarse, tmp_path / "coarse.nc"), shape, grid=grid, scale=2)
    assert np.array_equal(expected[:, 0], coarse.t2m.values)
    reversed_file = store(coarse.isel(lat=slice(None, None, -1)), tmp_path / "reversed.nc")
    with pytest.warns(UserWarning, match="reversed lat"):
        items = load_items(reversed_file, shape, grid=grid, scale=2)
    assert torch.equal(items, expected)
    for thinned in (fields(), fields().isel(lat=slice(None, None, 2), lon=slice(None, None, 2))):
        with refused("file"):
            load_items(store(thinned, tmp_path / "fine.nc"), shape, grid=grid, scale=2)
    # The middle of three points is one of them: a file of all the points has no means.
    grid = Grid(("lat",), ("t",), (), {"lat": tuple(range(6))})
    points = Dataset(torch.zeros(1, 1, 6), grid=grid)
    assert match(points, grid.coarse(3), "file", "a", are_means=True).shape == (1, 6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_order_units_and_turns_lead_back_to_the_same_numbers():
    """Values that are the index of their point, under a hundred random changes of unit and order."""
    random = np.random.default_rng(0)
    grid = Grid(
        ("lat", "lon"), ("p", "q"), ("Pa", "1"), {"lat": tuple(LAT), "lon": tuple(LON)},
        {"lat": "degrees_north", "lon": "degrees_east"},
    )  # fmt: skip
    values = torch.arange(64.0).reshape(2, 2, 4, 4)
    for _ in range(100):
        rows, (down, across) = random.permutation(2), (random.permutation(4), random.permutation(4))
        turns = 360.0 * random.integers(-2, 3, 4)
        units = random.choice(["Pa", "hPa"]), random.choice(["1", "%"])
        factors = torch.tensor(
            [1.0 if units[0] == "Pa" else 100.0, 1.0 if units[1] == "1" else 0.01], dtype=torch.float64
        )
        changed = (values.double() / factors.reshape(1, 2, 1, 1))[:, rows][:, :, down][:, :, :, across]
        is_turned = bool(random.integers(2))
        axes = ("longitude", "latitude") if is_turned else ("latitude", "longitude")
        given = Grid(
            axes, tuple(np.array(grid.channels)[rows]), tuple(np.array(units)[rows]),
            {"latitude": tuple(LAT[down] + 1e-6), "longitude": tuple((LON + turns)[across])},
        )  # fmt: skip
        changed = changed.transpose(2, 3) if is_turned else changed
        streamed = Source(tuple(changed.shape), changed.dtype, lambda index, all=changed: all[index])
        for stored in (changed, streamed):
            data = match(Dataset(stored, grid=given), grid, "data", "file")
            torch.testing.assert_close(data.stored(torch.arange(2)), values.double(), rtol=1e-12, atol=0)
            assert data.grid == grid
    with refused("data"):  # and with a point of its own nothing does
        match(Dataset(values, grid=replace(given, coordinates={"latitude": (0.0, 1, 2, 3)})), grid, "data", "file")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("psu", "g/kg"), ("degrees", "1"), ("dB", "1"), ("degrees_west", "degrees_east"), ("9**9**9**9", "1"),
     ("m**9**9**9", "m"), ("m" * 10_000, "m"), ("\x1b[31mK", "K"), ("K", "K s-1")],
)  # fmt: skip
def test_a_unit_that_is_not_certain_is_refused(given, wanted):
    """However alike their dimensions are, and whatever a stranger wrote there."""
    grid = Grid(("x",), ("a",), (wanted,))
    data = Dataset(torch.zeros(1, 1, 3), grid=replace(grid, units=(given,)))
    with pytest.raises(nidiff.InputError) as error:
        match(data, grid, "data", "file")
    assert "\x1b" not in str(error.value)
    assert (
        match(data, replace(grid, units=(given,)), "data", "file").values is not None
    )  # but the same text is the same


SAID = pytest.mark.filterwarnings("default::UserWarning")  # what a command warns of is on stderr
# Commands ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """An untrained network of the fields, with their Gaussian."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("match")
    data = nidiff.load_dataset(store(fields(40), folder / "train.nc"), progress=False)
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(20), nidiff.gaussian_free_field((4, 4)))
    net = nidiff.FieldUNet((4, 4), 2, 2, widths=(8,), layers=1, attention=())
    gaussian = nidiff.fit_gaussian(data.all(), basis=process.covariance)
    options = {"gaussian": gaussian, "scaling": data.scaling}
    save_model(nidiff.Denoiser(net, process, "residual", **options), folder / "model", grid=data.grid)
    return folder / "model"


@SAID
def test_the_restored_field_does_not_depend_on_how_the_file_is_written(model, run, tmp_path):
    """The same bytes from °C, south first, as (time, lon, lat), and others if nothing says so."""
    turned = celsius(fields()).isel(lat=slice(None, None, -1)).transpose("time", "lon", "lat")
    files = {"same": fields(), "turned": turned, "mute": fields().isel(lat=slice(None, None, -1)).drop_vars("lat")}
    samples, few = {}, ("--samples", 2, "--num-steps", 2)
    for command in (("restore", "--mask", "left"), ("denoise", "--noise", 0.3, "--units", "model")):
        for name, table in files.items():
            out = tmp_path / f"{name}-{command[0]}"
            file = store(table, tmp_path / f"{name}.nc")
            code, _, said = run(command[0], model, file, *command[1:], *few, "--out", out, "--format", "netcdf")
            assert code == 0, said
            assert ("from degC to K" in said, "reversed lat" in said, "no coordinates along lat" in said) == (
                name == "turned", name == "turned", name == "mute"), said  # fmt: skip
            samples[name] = (out / "samples.npz").read_bytes()
        assert samples["turned"] == samples["same"]
        assert samples["mute"] != samples["same"]
    written = xarray.open_dataset(tmp_path / "turned-restore" / "samples.nc", engine="h5netcdf")
    assert (written.t2m.dims, written.t2m.units) == (("time", "sample", "lat", "lon"), "K")
    assert np.array_equal(written.lat, LAT)


@SAID
def test_scores_do_not_depend_on_how_the_file_is_written(model, run, tmp_path):
    turned = westward(celsius(fields(6))).transpose("time", "lon", "lat")
    files = {"same": store(fields(6), tmp_path / "a.nc"), "turned": store(turned, tmp_path / "b.nc")}
    wrong = store(at(fields(6), "lat", LAT / 2), tmp_path / "wrong.nc")
    quick = ("--rtol", 0.05, "--atol", 0.05, "--json")
    for words, argument in (
        (("likelihood", model, *quick, "--data"), "--data="),
        (("evaluate", "--data", model.parent / "train.nc", "--bootstrap", 0, "--json"), "run_or_images="),
    ):
        scores = {}
        for name, file in files.items():
            code, out, said = run(*words, file)
            assert (code, "from degC to K" in said) == (0, name == "turned"), said
            found = json.loads(out)
            scores[name] = found["metrics"] if "metrics" in found else found["model"]
        assert scores["turned"] == scores["same"]
        code, out, said = run(*words, wrong)
        assert (code, out) == (2, "")
        assert all(word in said for word in (argument, "33.75", "67.5")), said


@SAID
def test_numbers_far_from_the_model_s_are_warned_of(model, run, tmp_path):
    """Degrees of Celsius that nothing calls so; the model's own numbers, or a constant, are not warned of."""
    few = ("--mask", "left", "--samples", 2, "--num-steps", 2)
    arrays = [fields()[name].values for name in ("t2m", "u10")]
    for shift, is_far in ((0.0, False), (-273.15, True)):
        np.save(tmp_path / "a.npy", np.stack([arrays[0] + shift, arrays[1]], 1))
        code, _, said = run("restore", model, tmp_path / "a.npy", *few, "--out", tmp_path / f"out{shift}")
        assert (code, "t2m (K)" in said) == (0, is_far), said
    assert re.search(r"1\d(\.\d+)? ± 1\d.* 28\d(\.\d+)? ± 1\d", said), said  # both values


# Conditions ----------------------------------------------------------------------------------------------------------


def test_conditions_are_matched_with_those_of_training(tmp_path):
    """Fields and numbers, from the file of the data and from another in other units and order."""
    train = fields().assign(
        day=("time", [1.0, 2.0, 3.0], {"units": "days"}), hour=("time", [6.0, 5.0, 4.0], {"units": "hours"})
    )
    path = store(train, tmp_path / "train.nc")
    for names, changed in {
        "u10": kilometres(westward(train)).isel(lat=slice(None, None, -1)),
        "day,hour": with_unit(train, "hours", lambda x: 24 * x, "day"),
    }.items():
        data = nidiff.load_dataset(path, variables=["t2m"], condition=names, progress=False)
        grid = Grid.from_json(json.loads(json.dumps(data.grid.to_json())))
        assert grid == data.grid
        assert grid.condition.channels == tuple(names.split(","))
        conditions = conditions_of(data)
        (expected,) = read_rows(path, conditions, grid).values()
        assert torch.equal(expected, data.conditions)
        file = store(changed, tmp_path / f"{names}.nc")
        with pytest.warns(UserWarning, match="converted"):
            (rows,) = read_rows(file, conditions, grid).values()
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
        first = names.split(",")[0]
        bad = [with_unit(train, "kg", name=first), train.drop_vars(first)] + [at(train, "lat", LAT + 5)] * (
            names == "u10"
        )
        for table in bad:
            with refused("condition"):
                read_rows(store(table, tmp_path / "bad.nc"), conditions, grid)
        with refused("condition"):  # a model that was trained with an array cannot know which variables
            read_rows(path, conditions, replace(grid, condition=None))


@SAID
def test_the_model_of_a_run_remembers_the_names_of_its_condition(tmp_path):
    path = store(fields(8), tmp_path / "train.nc")
    tiny = "--steps 1 --cooldown 0 --widths 8 --attention --batch-size 4 --num-samples 1 --precision fp32 --num-steps 1"
    flags = ["--variables", "t2m", "--condition", "u10", "--target", "v", *tiny.split(), "--out", str(tmp_path / "run")]
    assert main(["train", "--data", str(path), *flags]) == 0
    grid = read_grid(tmp_path / "run", (1, 4, 4), Scaling(1.0))
    assert (grid.channels, grid.condition.channels, grid.condition.units) == (("t2m",), ("u10",), ("m s-1",))
    changed = store(kilometres(fields(8)), tmp_path / "other.nc")
    for name, file in {"a": path, "b": changed}.items():
        words = ["--condition", str(file), "--seeds", "0-1", "--num-steps", "2", "--out", str(tmp_path / name)]
        assert main(["sample", str(tmp_path / "run"), *words]) == 0
    a, b = (np.load(tmp_path / name / "samples.npz")["arr_0"] for name in ("a", "b"))
    assert np.allclose(a, b, rtol=1e-4)
