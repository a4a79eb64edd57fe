"""nidiff restore with stations, operators of the user's own, errors from files and the truth; and that in Python."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from problems import refused

import nidiff
from nidiff.data.grid import Grid
from nidiff.diffusion.scaling import Scaling
from nidiff.generation import restore
from nidiff.generation.baselines import baselines
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.generation.observations import observe, pooling
from nidiff.generation.observed import Observed
from nidiff.metrics import rank_histogram
from nidiff.model.folder import save_model

LAT, LON = np.linspace(70, -70, 8), np.arange(0, 360, 30.0)
SHAPE = (1, len(LAT), len(LON))
FEW = ("--samples", "4", "--num-steps", "6")
TIMES = np.array(["2020-01-01", "2020-02-01", "2020-03-01"], dtype="datetime64[ns]")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose network is 0 beside the data's Gaussian: temperatures in degC on a globe."""
    gaussian = nidiff.GaussianModel(
        torch.zeros(SHAPE), nidiff.matern(SHAPE[1:], 2.5, 2.0, boundary="reflecting/periodic")
    )
    noise = nidiff.gaussian_free_field(SHAPE[1:], boundary="reflecting/periodic")
    net = nidiff.FieldUNet(SHAPE[1:], 1, 1, widths=(8,), layers=1, attention=(), boundary="reflecting/periodic")
    denoiser = nidiff.Denoiser(
        net, nidiff.Process(nidiff.schedules.ddpm_cosine(50), noise), "residual", gaussian=gaussian,
        scaling=Scaling((10.0,), (5.0,)),
    )  # fmt: skip
    coordinates = {"lat": tuple(LAT), "lon": tuple(LON)}
    units = {"lat": "degrees_north", "lon": "degrees_east"}
    folder = tmp_path_factory.mktemp("globe") / "model"
    save_model(denoiser, folder, grid=Grid(("lat", "lon"), ("t2m",), ("degC",), coordinates, units))
    return folder


@pytest.fixture(scope="module")
def truth(model, tmp_path_factory) -> Path:
    """Three months that the model knows, in kelvin."""
    x0 = nidiff.load_model(model).gaussian.sample((3, *SHAPE), 0)
    values = 273.15 + 5 + 10 * x0[:, 0].double().numpy()
    data = xarray.Dataset(
        {"t2m": (("time", "lat", "lon"), values, {"units": "K"})},
        {
            "time": TIMES,
            "lat": ("lat", LAT, {"units": "degrees_north"}),
            "lon": ("lon", LON, {"units": "degrees_east"}),
        },
    )
    file = tmp_path_factory.mktemp("truth") / "truth.nc"
    data.to_netcdf(file, engine="h5netcdf")
    return file


def table(count: int = 30, item: int = 0, seed: int = 0, truth: Path | None = None) -> dict[str, np.ndarray]:
    """Stations with longitudes from −180 to 180, and their values in kelvin."""
    source = np.random.default_rng(seed)
    columns = {"longitude": source.uniform(-180, 180, count), "latitude": source.uniform(-70, 70, count)}
    if truth is not None:
        with xarray.open_dataset(truth, engine="h5netcdf") as data:
            field = data.t2m.isel(time=item).load()
        round_ = xarray.concat([field, field.isel(lon=0).assign_coords(lon=360.0)], "lon")
        places = {"lat": ("p", columns["latitude"]), "lon": ("p", columns["longitude"] % 360)}
        columns["t2m (K)"] = round_.interp(places).values + 0.5 * source.normal(size=count)
    return columns | {"t2m_error (K)": np.full(count, 0.5)}


def written(columns: dict, path: Path) -> Path:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(str(entry) for entry in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "samples.npz", allow_pickle=False) as content:
        found = dict(content)
    return found | {name: np.load(folder / f"{name}.npy")[..., 0] for name in ("mean", "spread", "observed")}


def kelvin(truth: Path) -> np.ndarray:
    with xarray.open_dataset(truth, engine="h5netcdf") as data:
        return data.t2m.values


# Stations -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_is_one_observation_in_whatever_units_order_and_format(run, model, truth, tmp_path):
    columns = table(truth=truth)
    written(columns, tmp_path / "a.csv")
    degrees = {"lat": columns["latitude"], "lon": columns["longitude"] % 360, "t2m": columns["t2m (K)"] - 273.15}
    written(degrees | {"t2m_error": columns["t2m_error (K)"]}, tmp_path / "b.csv")
    long = {"variable": ["t2m"] * 30, "lat": degrees["lat"], "lon": degrees["lon"], "value": degrees["t2m"]}
    written(long | {"error": columns["t2m_error (K)"]}, tmp_path / "c.csv")
    places = {"lat": ("station", degrees["lat"]), "lon": ("station", degrees["lon"])}
    values = {"t2m": ("station", columns["t2m (K)"], {"units": "K"})}
    errors = {"t2m_error": ("station", columns["t2m_error (K)"], {"units": "K"})}
    xarray.Dataset(values | errors, places).to_netcdf(tmp_path / "d.nc", engine="h5netcdf")
    written(columns | {"t2m_error (K)": np.full(30, 5.0)}, tmp_path / "other.csv")
    found = {}
    for name in ("a.csv", "b.csv", "c.csv", "d.nc", "other.csv"):
        out = tmp_path / f"{name}-out"
        code, _, said = run("restore", model, "--stations", tmp_path / name, *FEW, "--out", out)
        assert code == 0, said
        found[name] = read(out)
        assert np.abs(found[name]["mean"] - found["a.csv"]["mean"]).max() < 1e-3 or name == "other.csv"
    assert np.abs(found["other.csv"]["mean"] - found["a.csv"]["mean"]).max() > 0.5  # the control: other errors
    assert found["a.csv"]["arr_0"].shape == (1, 4, *SHAPE[1:], 1)
    seen = np.isfinite(found["a.csv"]["observed"])
    assert 15 < seen.sum() <= 30  # some share a point
    # The whole is the Gaussian's posterior: near the truth, and nearer than the mean of the data.
    error = found["a.csv"]["mean"][0] - (kelvin(truth)[0] - 273.15)
    assert np.sqrt(np.square(error).mean()) < 0.7 * np.std(kelvin(truth)[0])
    pandas = pytest.importorskip("pandas")
    by_python = restore(model, stations=pandas.DataFrame(columns), samples=4, num_steps=6)
    np.testing.assert_allclose(by_python.mean[0, 0].numpy(), found["a.csv"]["mean"][0], atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_converted_is_said(run, model, truth, tmp_path):
    file = written(table(truth=truth) | {"name": ["S"] * 30}, tmp_path / "a.csv")
    with pytest.warns(UserWarning, match="converted t2m from K to degC.*not read: name"):
        restore(model, stations=file, samples=1, num_steps=1)


def test_stations_on_grid_points_are_a_mask(run, model, truth, tmp_path):
    rows, columns = np.array([0, 2, 7, 3, 5]), np.array([0, 11, 5, 4, 7])
    seen = np.zeros(SHAPE[1:], dtype=bool)
    seen[rows, columns] = True
    np.save(tmp_path / "seen.npy", seen)
    values = kelvin(truth)[0] - 273.15
    np.save(tmp_path / "y.npy", values[None])
    stations = {"lat": LAT[rows], "lon": LON[columns] - 360, "t2m": values[rows, columns], "error": [0.3] * 5}
    written(stations, tmp_path / "stations.csv")
    # Without fresh noise, which would be drawn for other numbers y: then the samples have the same law only.
    masked = ("--mask", tmp_path / "seen.npy", "--noise", 0.3, *FEW, "--sampler", "ddim", "--out", tmp_path / "mask")
    assert run("restore", model, tmp_path / "y.npy", *masked)[0] == 0
    by_mask = read(tmp_path / "mask")
    for shift, same in ((0, True), (7, False)):
        file = written(stations | {"lon": stations["lon"] + shift}, tmp_path / f"{shift}.csv")
        with pytest.warns(UserWarning, match="no unit"):
            found = restore(model, stations=file, samples=4, num_steps=6, sampler="ddim")
        assert (np.abs(found.mean[0, 0].numpy() - by_mask["mean"][0]).max() < 1e-3) == same
        nearest = np.isfinite(found.observed[0, 0].numpy())
        assert (nearest == seen).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_time_of_the_stations_is_an_item_and_stays_with_it(run, model, truth, tmp_path):
    parts = [table(20, item, item, truth) | {"time": [str(TIMES[item])[:10]] * 20} for item in (2, 0)]
    both = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    written(both, tmp_path / "s.csv")
    words = ("--stations", tmp_path / "s.csv", "--truth", truth, *FEW, "--format", "netcdf", "--json")
    code, printed, said = run("restore", model, *words, "--out", tmp_path / "out")
    assert code == 0, said
    facts, found = json.loads(printed), read(tmp_path / "out")
    with xarray.open_dataset(tmp_path / "out" / "samples.nc", engine="h5netcdf") as data:
        assert (data.time.values == TIMES[[0, 2]]).all()
        assert data.t2m.dims == ("time", "sample", "lat", "lon")
    assert (found["along"] == TIMES[[0, 2]]).all()
    alone = restore(model, stations=parts[1], samples=4, num_steps=6)
    np.testing.assert_allclose(alone.mean[0, 0].numpy(), found["mean"][0], atol=1e-4)
    expected = np.sqrt(np.square(found["mean"] - (kelvin(truth)[[0, 2]] - 273.15)).mean())
    assert facts["rmse_of_mean"] == pytest.approx(expected, rel=1e-3)
    # The control: against another month, the same samples are far off.
    other = np.sqrt(np.square(found["mean"] - (kelvin(truth)[[1, 1]] - 273.15)).mean())
    assert other > 2 * expected


# Scores -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scores_stand_beside_interpolation_and_the_gaussian_alone(run, model, truth, tmp_path):
    """The network of this model is 0 beside the Gaussian: its posterior is that of the Gaussian, as kriging has it."""
    places = table(40)
    del places["t2m_error (K)"]
    file = written(places | {"t2m_error": np.full(40, 1.0)}, tmp_path / "places.csv")
    words = ("--stations", file, "--degrade", "--samples", 19, "--num-steps", 25, "--json", "--out", tmp_path / "out")
    code, printed, said = run("restore", model, truth, *words)
    assert code == 0, said
    facts = json.loads(printed)
    free = facts["baselines"]
    assert free.keys() == {"nearest", "bilinear", "bicubic", "gaussian"}
    assert facts["rmse_of_mean"] == pytest.approx(free["gaussian"]["rmse_of_mean"], rel=0.15)
    assert facts["crps"] == pytest.approx(free["gaussian"]["crps"], rel=0.1)
    assert free["gaussian"]["rmse_of_mean"] < 0.9 * free["bilinear"]["rmse_of_mean"] < free["nearest"]["rmse_of_mean"]
    assert facts["spread_over_error"] == pytest.approx(1, abs=0.2)
    assert facts["coverage_50"] < facts["coverage"]
    assert sum(facts["ranks"]) == pytest.approx(3 * np.prod(SHAPE))
    power = facts["spectrum"]["power"]
    assert power.keys() == {"truth", "samples", "mean", *free}
    assert np.sum(power["mean"]) < np.sum(power["samples"])
    assert "gaussian" in said
    assert (tmp_path / "out" / "scores.png").stat().st_size > 10_000
    assert run("verify", tmp_path / "out")[0] == 0


def test_kriging_is_the_posterior_of_the_gaussian(model):
    """Against dense matrices; and its draws have the posterior's variance."""
    opened = open_model(model, process_state())
    gaussian = opened.denoiser.gaussian
    seen = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) < 0.2
    items = 5 + 10 * gaussian.sample((1, *SHAPE), 1)
    observation = observe(opened, items, nidiff.operators.mask(seen), 2.0)
    found = baselines(opened, Observed.of(opened, observation), 400)["gaussian"]
    C, chosen = gaussian.covariance.dense(), seen.flatten()
    gain = C[:, chosen] @ torch.linalg.inv(C[chosen][:, chosen] + 0.04 * torch.eye(int(chosen.sum())).double())
    expected = gain @ observation.y.double().flatten()[chosen]
    torch.testing.assert_close(found.mean.double().flatten(), expected, atol=1e-5, rtol=0)
    variance = (C - gain @ C[chosen]).diag()
    ratio = found.samples[0].flatten(1).double().var(0).mean() / variance.mean()
    assert ratio == pytest.approx(1, abs=0.05)
    assert found.samples[0].double().var() > 1.2 * variance.mean()  # the control: with the variance of the mean


def test_interpolation_between_blocks_is_exact_where_it_must_be(model):
    """Bilinear and bicubic interpolation of block means of a linear field is that field, away from its ends; that of a
    field on a circle goes on around it."""
    opened = open_model(model, process_state())
    rising = torch.arange(8.0)[:, None].expand(SHAPE[1:])[None, None].clone()
    turning = torch.cos(2 * np.pi * (torch.arange(12.0) + 0.5) / 12).expand(SHAPE[1:])[None, None].clone()
    for field, inside in ((rising, slice(3, 5)), (turning, slice(0, 8))):
        observation = observe(opened, pooling(opened, 2)(field), pooling(opened, 2), 0.1)
        found = baselines(opened, Observed.of(opened, observation, 2), 2)
        errors = {
            name: (10 * found[name].mean + 5 - field)[..., inside, :].abs().max().item()
            for name in ("nearest", "bilinear", "bicubic")
        }
        limit = 1e-4 if field is rising else 0.15
        assert errors["bilinear"] < limit
        assert errors["bicubic"] < limit
        assert errors["nearest"] > 1.5 * limit
    # Around the circle: the first and the last column see each other.
    assert (10 * found["bilinear"].mean + 5)[0, 0, 3, [0, 11]].tolist() == pytest.approx([0.79, 0.79], abs=0.05)


def test_ranks_are_uniform_for_draws_of_one_law_and_tell_what_is_wrong():
    source = torch.Generator().manual_seed(0)
    values = torch.randn(10, 20000, generator=source)
    share = rank_histogram(values[1:], values[0]) / 20000
    assert (share - 0.1).abs().max() < 0.01
    narrow, wide, high = (
        rank_histogram(x, values[0]) / 20000 for x in (values[1:] / 2, values[1:] * 2, values[1:] + 1)
    )
    assert narrow[[0, -1]].min() > 0.15 > 0.09 > narrow[4]
    assert wide[[0, -1]].max() < 0.05 < 0.12 < wide[4]
    assert high[0] > 0.25 > 0.05 > high[-1]
    assert rank_histogram(torch.zeros(3, 5), torch.zeros(5)).tolist() == pytest.approx([1.25] * 4)  # ties are shared
    assert rank_histogram(torch.tensor([[0.0], [1.0]]), torch.tensor([0.4]), 0.5).tolist() == [0.5, 0.5, 0.0]


# Operators, errors and masks ------------------------------------------------------------------------------------------

OPERATORS = """
import torch

def coarse(x):
    return torch.nn.functional.avg_pool2d(x, 2)

def profile(x):
    return x.mean(-1)

def backwards(y):
    return y[..., None].expand(*y.shape, 12) / 12

profile.transpose = backwards

def wrong(x):
    return x.mean(-1)

wrong.transpose = lambda y: y

def square(x):
    return x.square().mean(-1)

def above(x):
    return x.mean(-1) + 1

def fails(x):
    raise RuntimeError("no such thing")

def rows(x):
    return x.flatten()

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_operators.py").write_text(OPERATORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_operators", raising=False)
    return "my_operators"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_operator_of_the_users_own_is_what_it_computes(run, model, truth, tmp_path, module):
    """The same blocks by the user's function and by --scale; and a function with its transpose, on values of its own
    shape."""
    clean = kelvin(truth)[:2] - 273.15
    np.save("coarse.npy", clean.reshape(2, 4, 2, 6, 2).mean((2, 4)).astype(np.float32))
    np.save("y.npy", clean.reshape(2, 1, 4, 2, 6, 2).mean((3, 5)))
    words = ("--noise", 0.5, *FEW)
    assert run("restore", model, "coarse.npy", "--scale", 2, *words, "--out", "scale")[0] == 0
    assert run("restore", model, "y.npy", "--operator", f"{module}:coarse", *words, "--out", "own")[0] == 0
    assert np.abs(read(Path("scale"))["mean"] - read(Path("own"))["mean"]).max() < 1e-3
    np.save("profiles.npy", clean.mean(-1)[:, None])
    given = ("--operator", f"{module}:profile", "--noise", 0.01, *FEW, "--out", "profiles")
    code, _, said = run("restore", model, "profiles.npy", *given)
    assert code == 0, said
    assert np.abs(read(Path("profiles"))["arr_0"][..., 0].mean(-1) - clean.mean(-1)[:, None]).max() < 0.1
    words = ("--operator", f"{module}:profile", "--degrade", *FEW, "--json", "--out", "degraded")
    code, printed, said = run("restore", model, truth, *words)
    assert code == 0, said
    assert json.loads(printed)["baselines"].keys() == {"gaussian"}


def test_an_operator_that_cannot_be_used_is_refused(run, model, truth, tmp_path, module):
    np.save("y.npy", np.zeros((1, 1, 8)))
    np.save("short.npy", np.zeros((1, 1, 5)))
    for name, file, words in (
        (f"{module}:wrong", "y.npy", "(1, 1, 8)"),
        (f"{module}:square", "y.npy", "linear"),
        (f"{module}:above", "y.npy", "linear"),
        (f"{module}:fails", "y.npy", "no such thing"),
        (f"{module}:rows", "y.npy", "row"),
        (f"{module}:number", "y.npy", "int"),
        (f"{module}:nothing", "y.npy", "nothing"),
        ("no_module_of_this_name:f", "y.npy", "no_module_of_this_name"),
        ("my_operators", "y.npy", "module:function"),
        (f"{module}:profile", "short.npy", "(1, 1, 5)"),
        (f"{module}:profile", "missing.npy", "missing.npy"),
    ):
        code, printed, said = run("restore", model, file, "--operator", name, *FEW, "--out", "out")
        assert (code, printed, said.count("\n"), words in said) == (2, "", 1, True), (name, said)
    assert not Path("out").exists()


@pytest.mark.filterwarnings("always::UserWarning")
def test_errors_and_masks_are_variables_of_the_file_or_arrays(run, model, truth, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = np.random.default_rng(0).random(SHAPE[1:]) < 0.5
    errors = np.random.default_rng(1).uniform(0.5, 5, SHAPE[1:])
    with xarray.open_dataset(truth, engine="h5netcdf") as data:
        data = data.load()
    degrees = data.assign(t2m=data.t2m - 273.15).isel(time=[0])
    degrees.t2m.attrs["units"] = "degC"
    degrees["seen"] = (("lat", "lon"), seen.astype(np.int8))
    degrees["err"] = (("lat", "lon"), np.where(seen, errors, np.nan), {"units": "K"})
    degrees.isel(lat=slice(None, None, -1)).to_netcdf("all.nc", engine="h5netcdf")  # which rises
    np.save("seen.npy", seen)
    np.save("err.npy", errors)
    np.save("squared.npy", np.square(errors))
    np.save("y.npy", degrees.t2m.values)
    means = {}
    for name, file, words in (
        ("variables", "all.nc", ("--mask", "seen", "--noise", "err", "--variables", "t2m")),
        ("arrays", "y.npy", ("--mask", "seen.npy", "--noise", "err.npy")),
        ("squares", "y.npy", ("--mask", "seen.npy", "--variance", "squared.npy")),
        ("number", "y.npy", ("--mask", "seen.npy", "--noise", "2")),
        ("variance", "y.npy", ("--mask", "seen.npy", "--variance", "4")),
        ("not", "all.nc", ("--mask", "not-seen", "--noise", "2", "--variables", "t2m")),
    ):
        code, _, said = run("restore", model, file, *words, *FEW, "--out", name)
        assert (code, "reversed lat" in said) == (0, file == "all.nc"), said
        means[name] = read(Path(name))["mean"]
    for one, other, same in (
        ("variables", "arrays", True),
        ("arrays", "squares", True),
        ("number", "variance", True),
        ("arrays", "number", False),
        ("number", "not", False),
    ):
        assert (np.abs(means[one] - means[other]).max() < 1e-3) == same, (one, other)


# Several at once, and Python ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stations_and_a_coarse_field_are_both_met(run, model, truth, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clean = kelvin(truth)[:1] - 273.15
    np.save("coarse.npy", clean.reshape(1, 4, 2, 6, 2).mean((2, 4)))
    stations = table(truth=truth)
    written(stations, Path("s.csv"))
    words = ("--noise", 0.1, *FEW)
    found = {}
    for name, given in (
        ("both", ("coarse.npy", "--scale", 2, "--stations", "s.csv")),
        ("coarse", ("coarse.npy", "--scale", 2)),
        ("stations", ("--stations", "s.csv")),
    ):
        code, _, said = run("restore", model, *given, *words, "--out", name)
        assert code == 0, said
        found[name] = read(Path(name))["mean"] - clean
    coarse = {name: np.abs(x.reshape(1, 4, 2, 6, 2).mean((2, 4))).max() for name, x in found.items()}
    error = {name: np.sqrt(np.square(x).mean()) for name, x in found.items()}
    assert coarse["both"] < 0.5 < coarse["stations"]
    assert error["both"] < 0.95 * min(error["coarse"], error["stations"])


def test_a_batch_of_observations_with_masks_of_their_own_is_one_call(model):
    denoiser = nidiff.load_model(model)
    y = denoiser.gaussian.sample((3, *SHAPE), 3)
    y[0, :, 2:] = y[1, ..., :6] = y[2, :, ::2] = torch.nan
    together = restore(model, nidiff.Observation.missing(y, 0.1), samples=2, num_steps=4, truth=10 * y.nan_to_num() + 5)
    assert together.samples.shape == (3, 2, *SHAPE)
    assert together.seeds.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert "baselines" in together.errors()
    listed = restore(model, [nidiff.Observation.missing(row[None], 0.1) for row in y], samples=2, num_steps=4)
    torch.testing.assert_close(listed.samples, together.samples)
    dataset = together.to_xarray()
    assert dataset.t2m.dims == ("item", "sample", "lat", "lon")
    assert dataset.t2m.units == "degC"
    assert (dataset.lat.values == LAT).all()
    np.testing.assert_array_equal(dataset.t2m.values, together.samples[:, :, 0].numpy())
    other = restore(model, nidiff.Observation.missing(y[[1, 0, 2]], 0.1), samples=2, num_steps=4)
    assert (other.samples - together.samples).abs().max() > 1  # the control: each has its own
    with refused("observation"):
        restore(model)


# What is refused ----------------------------------------------------------------------------------------------------

GOOD = {"lat": [10.0, -20.0], "lon": [-170.0, 20.0], "t2m (K)": [280.0, 290.0], "t2m_error (K)": [1.0, 1.0]}
BAD_TABLES = {
    "outside": ({"lat": [10.0, 95.0]}, "1 of 2 stations outside", "row 2 at lat 95, lon 20"),
    "zero": ({"t2m_error (K)": [1.0, 0.0]}, "error of 0 or less", "row 2"),
    "negative": ({"t2m_error (K)": [-1.0, 1.0]}, "error of 0 or less", "row 1"),
    "no error": ({"t2m_error (K)": None}, "without an error", "--noise"),
    "units": ({"t2m (K)": None, "t2m (hPa)": [280.0, 290.0]}, "'hPa'", "'degC'"),
    "units of errors": ({"t2m_error (K)": None, "t2m_error (m)": [1.0, 1.0]}, "'m'", "'degC'"),
    "no latitude": ({"lat": None}, "no coordinate lat", "--stations"),
    "no values": ({"t2m (K)": None, "wind": [1.0, 2.0]}, "wind", "t2m"),
    "no place": ({"lon": [1.0, ""]}, "without a coordinate", "row 2"),
    "words": ({"t2m (K)": [280.0, "warm"]}, "'warm'", "row 2"),
    "nothing": ({"t2m (K)": ["", "NaN"]}, "no value", "t2m"),
    "times": ({"time": ["2020-01-01", "yesterday"]}, "time", "2020-01-31"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_that_make_no_sense_are_refused_in_one_sentence_and_nothing_is_written(run, model, truth, tmp_path):
    def columns(change: dict) -> dict:
        return {name: values for name, values in (GOOD | change).items() if values is not None}

    for name, (change, *words) in BAD_TABLES.items():
        file = written(columns(change), tmp_path / f"{name}.csv")
        code, printed, said = run("restore", model, "--stations", file, *FEW, "--out", tmp_path / "out")
        lines = [line for line in said.splitlines() if not line.startswith("nidiff: '")]  # warnings name the file
        assert (code, printed, len(lines)) == (2, "", 1), (name, said)
        assert all(word in lines[0] for word in words), (name, said)
    good = written(GOOD, tmp_path / "good.csv")
    (tmp_path / "ragged.csv").write_text("lat,lon,t2m\n1,2\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00lat")
    late = written(GOOD | {"time": ["2020-01-01", "1999-01-01"]}, tmp_path / "late.csv")
    for words, expected in (
        (("--stations", tmp_path / "ragged.csv"), "2 entries in row 1"),
        (("--stations", tmp_path / "binary.csv"), "binary.csv"),
        (("--stations", tmp_path / "no.csv"), "does not exist"),
        ((truth, "--stations", good), "--degrade"),
        ((truth, "--stations", late, "--degrade"), "1999-01-01"),
        (("--stations", good, "--truth", truth), "3 items"),
        (("--stations", good, "--interpolation", "cubic"), "cubic"),
        (("--mask", "left"), "FILE"),
        ((truth, "--mask", "left", "--degrade", "--truth", truth), "--truth"),
        ((truth, "--mask", "left", "--noise", "-1"), "--noise"),
        ((truth, "--mask", "left", "--noise", "many"), "--noise"),
        ((truth, "--mask", "left", "--noise", "1", "--variance", "1"), "--variance"),
        ((truth, "--mask", "left", "--noise", truth), "--noise"),
    ):
        code, printed, said = run("restore", model, *words, *FEW, "--out", tmp_path / "out")
        assert (code, printed, expected in said) == (2, "", True), (words, said)
    assert not (tmp_path / "out").exists()
    np.save(tmp_path / "zero.npy", np.zeros(SHAPE[1:]))
    np.save(tmp_path / "shape.npy", np.ones((3, 5)))
    for file in ("zero.npy", "shape.npy"):
        words = ("--mask", "left", "--noise", tmp_path / file, *FEW, "--out", tmp_path / "out")
        code, printed, said = run("restore", model, truth, *words)
        assert (code, printed, file in said) == (2, "", True), said
    assert run("restore", model, "--stations", good, *FEW, "--out", tmp_path / "out")[0] == 0  # the control


def test_a_point_of_a_picture_has_one_number(run, tmp_path):
    """Noise that is periodic does not make it a circle: only the gap between the last point and the first counts."""
    for height, code in ((-9.0, 2), (8.5, 2), (-0.6, 0), (7.6, 0)):
        table = {"height": [3.0, height], "width": [2.0, 3.0], "value": [10, 200], "error": [5, 5]}
        file = written(table, tmp_path / "s.csv")
        found, _, said = run("restore", "digits", "--stations", file, *FEW, "--out", tmp_path / f"{height}")
        assert found == code, said
        assert ("1 of 2 stations outside" in said) == (code == 2)
