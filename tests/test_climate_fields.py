"""Fields as scientists have them: a scaling per point, anomalies, a domain, weights, coordinates, outputs by item."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.data.annotations import conditions_of
from nidiff.data.dataset import Dataset
from nidiff.data.grid import Grid
from nidiff.data.weights import point_weights
from nidiff.diffusion.climatology import Climatology, parse_times, phases
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError
from nidiff.evaluation.distributions import structure_function
from nidiff.evaluation.samples import SampleSet
from nidiff.generation.baselines import BASELINES
from nidiff.generation.conditioning import plan_conditions, rows_digest
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.generation.observations import observe, observed_data, pooling, seen_scaling
from nidiff.generation.observed import Observed
from nidiff.model.folder import save_model
from nidiff.testing.problems import normal

xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")

LAT, LON = np.linspace(70, -70, 4), np.arange(0, 360, 60.0)
SHAPE = (1, 4, 6)


def table(first="1990-01", last="2000-01", unit="M", noise=1.0):
    """Temperatures with a mean and a spread at each latitude, and a season that is a cosine."""
    times = np.arange(first, last, dtype=f"datetime64[{unit}]").astype("datetime64[ns]")
    year = (times - times.astype("datetime64[Y]")) / np.timedelta64(1, "D") / 365.25
    season = np.cos(2 * np.pi * year)[:, None, None] * 15 * np.sin(np.radians(LAT))[:, None]
    spread = noise * (1 + np.abs(LAT) / 10)[:, None]
    values = 280 + season - np.abs(LAT)[:, None] / 3 + spread * np.random.default_rng(0).normal(size=(len(times), 4, 6))
    coordinates = {
        "time": times,
        "lat": ("lat", LAT, {"units": "degrees_north"}),
        "lon": ("lon", LON, {"units": "degrees_east"}),
    }
    return xarray.Dataset({"t2m": (("time", "lat", "lon"), values, {"units": "K"})}, coordinates)


def write(data, path):
    data.to_netcdf(path, engine="h5netcdf")
    return path


@pytest.fixture
def file(tmp_path):
    return write(table(), tmp_path / "t2m.nc")


# A scaling per point --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "log"])
def test_a_scaling_per_pixel_makes_every_point_standard_and_its_inverse_is_exact(file, kind):
    data = nidiff.load_dataset(file, scaling=f"{kind}:per=pixel")
    x = data.all().double()
    torch.testing.assert_close(x.mean(0), torch.zeros(SHAPE, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(SHAPE, dtype=torch.float64), atol=1e-6, rtol=0)
    values = data.stored(torch.arange(5)).double()
    torch.testing.assert_close(data.scaling.to_data(data.scaling.to_model(values)), values, atol=1e-9, rtol=0)
    streamed = nidiff.load_dataset(file, scaling=f"{kind}:per=pixel", memory_limit=0)
    assert streamed.scaling == data.scaling
    # The negative control: numbers per channel leave the points as different as they are.
    assert nidiff.load_dataset(file, scaling=kind).all().std(0).amin() < 0.6


def test_the_volume_of_a_scaling_per_pixel_is_that_of_its_jacobian(file):
    for kind in ("standard", "log"):
        scaling = nidiff.load_dataset(file, scaling=f"{kind}:per=pixel").scaling
        values = nidiff.load_dataset(file, scaling="none").stored(torch.tensor([3])).double()
        jacobian = torch.func.jacrev(lambda v, scaling=scaling: scaling.to_model(v))(values).reshape(24, 24)
        torch.testing.assert_close(scaling.log_volume(values)[0], torch.linalg.slogdet(jacobian)[1])


def test_the_density_in_kelvin_is_that_of_a_normal_law_at_every_point(file):
    data = nidiff.load_dataset(file, scaling="standard:per=pixel")
    x, values = data.all().double(), data.stored(torch.arange(len(data))).double()
    standard = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
    law = torch.distributions.Normal(data.scaling.shift, data.scaling.scale)
    mine = standard.log_prob(x).flatten(1).sum(1) + data.scaling.log_volume(values)
    torch.testing.assert_close(mine, law.log_prob(values).flatten(1).sum(1), atol=1e-3, rtol=0)


def test_a_point_that_never_varies_is_taken_to_vary_by_a_hundredth_of_the_rest(tmp_path):
    data = table()
    data.t2m[:, 1, 2] = 271.5
    loaded = nidiff.load_dataset(write(data, tmp_path / "ice.nc"), scaling="standard:per=pixel")
    x = loaded.all()
    assert bool((x[:, 0, 1, 2].abs() < 1e-3).all())
    whole = x.new_tensor(loaded.stored(torch.arange(len(loaded))).double().var(0, correction=0).mean().sqrt().item())
    assert math.isclose(float(loaded.scaling.scale[0, 1, 2]), 0.01 * float(whole), rel_tol=1e-6)
    data.t2m[:] = 271.5
    with refused("scaling"):
        nidiff.load_dataset(write(data, tmp_path / "constant.nc"), scaling="standard:per=pixel")


def test_items_on_another_grid_and_mirrored_ones_are_refused(file):
    scaling = nidiff.load_dataset(file, scaling="standard:per=pixel").scaling
    with refused("data"):
        scaling.to_model(torch.zeros(1, 1, 6, 4))
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(10), nidiff.gaussian_free_field(SHAPE[1:]))
    denoiser = nidiff.Denoiser(lambda x, t: x, process, scaling=scaling)
    with refused("shape"):
        denoiser.at((8, 12))
    nidiff.Denoiser(lambda x, t: x, process, scaling=Scaling(2.0)).at((8, 12))  # the control


def test_parts_of_items_are_refused(file):
    for options in ({"scaling": "standard:per=pixel"}, {"remove": "climatology"}):
        with refused("crop"):
            nidiff.load_dataset(file, crop=2, **options)
    nidiff.load_dataset(file, crop=2)  # the control


def test_many_files_and_a_table_have_the_climatology_of_one_file(file, tmp_path):
    (tmp_path / "years").mkdir()
    for year, part in table().groupby("time.year"):
        write(part, tmp_path / "years" / f"{year}.nc")
    options = {"remove": "climatology", "scaling": "standard:per=pixel"}
    single = nidiff.load_dataset(file, **options).scaling
    for source in (tmp_path / "years", table()):
        other = nidiff.load_dataset(source, **options).scaling
        torch.testing.assert_close(other.climatology.means, single.climatology.means, atol=1e-4, rtol=0)
        torch.testing.assert_close(other.scale, single.scale, atol=1e-4, rtol=0)
    rich = table().assign(orog=(("lat", "lon"), np.arange(24.0).reshape(4, 6)))
    data = nidiff.load_dataset(rich, variables=["t2m"], condition="orog,latitude,month")
    assert data.conditions.shape == (120, 4, 4, 6)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(2):
        write(rich.isel(time=slice(60 * number, 60 * number + 60)), parts / f"{number}.nc")
    joined = nidiff.load_dataset(parts, variables=["t2m"], condition="orog,latitude,month")
    torch.testing.assert_close(joined.conditions, data.conditions)


def test_a_run_that_mirrors_is_refused(run, file, tmp_path):
    words = ("--data", file, "--steps", 1, "--batch-size", 2, "--out", tmp_path / "run", "--dry-run")
    code, _, said = run("train", *words, "--scaling", "standard:per=pixel", "--flip")
    assert code != 0
    assert "flip" in said
    assert not (tmp_path / "run").exists()


# Anomalies ------------------------------------------------------------------------------------------------------------


def test_anomalies_have_no_season_and_put_it_back(file):
    options = {"held_out": "time=1998-01:", "remove": "climatology"}
    train, test = (nidiff.load_dataset(file, split=split, **options) for split in ("train", "test"))
    assert train.scaling == test.scaling
    x = train.all().double().reshape(8, 12, *SHAPE)
    torch.testing.assert_close(x.mean(0), torch.zeros(12, *SHAPE, dtype=torch.float64), atol=1e-6, rtol=0)
    assert math.isclose(x.square().mean(), 1, rel_tol=1e-6)
    rows = torch.arange(len(test))
    values = test.stored(rows).double()
    back = test.scaling_of(rows).to_data(test.batch(rows).double())
    torch.testing.assert_close(back, values, atol=1e-4, rtol=0)
    # Without times the numbers are differences in kelvin; and by the times of others they are wrong.
    assert test.compared(rows).abs().mean() < 15 < values.mean()
    wrong = test.scaling.at_times(np.roll(test.times, 6)).to_data(test.batch(rows).double())
    assert (wrong - values).abs().amax() > 5
    assert nidiff.load_dataset(file, memory_limit=0, **options).scaling == train.scaling


def test_a_climatology_by_day_follows_the_year_and_knows_29_february(tmp_path):
    path = write(table("2001-01-01", "2004-01-01", "D", noise=0.5), tmp_path / "days.nc")
    data = nidiff.load_dataset(path, remove="climatology:by=day")
    left = data.compared(torch.arange(len(data)))
    season = np.cos(2 * np.pi * np.arange(len(data)) / 365.25)
    kept = np.einsum("n,nchw->chw", season, left.numpy()) * 2 / len(data)
    removed = 15 * np.sin(np.radians(LAT))[:, None]
    assert np.abs(kept / removed).max() < 0.03
    assert float(left.square().mean()) < 1.05 * float((0.5 * (1 + np.abs(LAT) / 10)) ** 2 @ np.ones(4) / 4)
    leap = data.scaling.at_times(np.array(["2004-02-29"], "datetime64[D]")).to_data(torch.zeros(1, *SHAPE))
    near = data.scaling.at_times(np.array(["2003-02-28"], "datetime64[D]")).to_data(torch.zeros(1, *SHAPE))
    assert (leap - near).abs().amax() < 0.5


def test_a_day_of_the_year_has_the_same_place_in_every_year():
    for year in (1999, 2000):
        assert phases(np.array([f"{year}-03-01", f"{year}-12-31"], "datetime64[D]"), "day").tolist() == [60, 365]
    assert phases(np.array(["1999-12-31T23:00"], "datetime64[s]"), "month").tolist() == [11]


def test_a_calendar_that_does_not_fit_is_refused(file, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4, 6)))
    with refused("remove"):
        nidiff.load_dataset(tmp_path / "a.npy", remove="climatology")
    ideal = table("1990-01", "1992-01")
    days = np.arange(24) * 30.0
    ideal["time"] = ("time", days, {"units": "days since 1990-01-01", "calendar": "360_day"})
    for by in ("month", "day"):
        with refused("remove"):
            nidiff.load_dataset(write(ideal, tmp_path / "ideal.nc"), remove=f"climatology:by={by}")
    with refused("remove"):  # August is only held out
        years = table("1990-01", "1992-01")
        years = write(years.sel(time=years.time != np.datetime64("1990-08-01")), tmp_path / "years.nc")
        nidiff.load_dataset(years, remove="climatology", held_out="time=1991-08:1991-08")
    nidiff.load_dataset(years, remove="climatology", held_out="time=1991-09:1991-09")  # the control
    with refused("remove"):
        nidiff.load_dataset(file, scaling=Scaling(2.0), remove="climatology")
    for wrong in ("season", "climatology:by=week"):
        with refused("remove"):
            nidiff.load_dataset(file, remove=wrong)
    with refused("remove"):
        nidiff.load_dataset(file, remove="climatology", scaling="log")


@pytest.mark.parametrize(
    ("text", "count", "last"),
    [
        ("2020-01:2020-12", 12, "2020-12-01"),
        ("2020-02-27:2020-03-01", 4, "2020-03-01"),
        ("2020-05,2021-07", 2, "2021-07-01"),
    ],
)
def test_times_are_months_or_days(text, count, last):
    times = parse_times(text)
    assert (len(times), str(times[-1])[:10]) == (count, last)


@pytest.mark.parametrize(
    "text", ["2020", "2020-13", "2020-05:2020-01", "2020-01:2020-02-01", "", "a:b", "2020-01:2020-02:2020-03"]
)
def test_other_times_are_refused(text):
    with refused("times"):
        parse_times(text)


# The model in a folder ------------------------------------------------------------------------------------------------


def model_of(data, folder):
    """An untrained model of a data set, with a Gaussian that is white in its units."""
    torch.manual_seed(0)
    shape = data.shape
    gaussian = nidiff.GaussianModel(torch.zeros(shape), nidiff.Fourier(shape[1:], torch.ones(shape[1:])))
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(50), nidiff.gaussian_free_field(shape[1:]))
    net = nidiff.FieldUNet(shape[1:], shape[0], shape[0], widths=(8,), layers=1, attention=())
    denoiser = nidiff.Denoiser(net, process, "residual", gaussian=gaussian, scaling=data.scaling, clip=5.0)
    save_model(denoiser, folder, grid=data.grid)
    return folder


@pytest.fixture
def anomalous(file, tmp_path):
    data = nidiff.load_dataset(file, remove="climatology", scaling="standard:per=pixel")
    return model_of(data, tmp_path / "model"), data


def test_a_model_keeps_its_fields_and_notices_a_change(anomalous):
    folder, data = anomalous
    assert nidiff.load_model(folder).scaling == data.scaling
    arrays = folder / "scheduler" / "scaling.safetensors"
    content = bytearray(arrays.read_bytes())
    content[-1] ^= 1
    arrays.write_bytes(content)
    with pytest.raises(InputError):
        nidiff.load_model(folder)


def test_samples_at_times_differ_from_anomalies_by_the_climatology(run, anomalous, tmp_path):
    folder, data = anomalous
    words = ("--seeds", "0-13", "--num-steps", 2, "--format", "netcdf")
    code, _, said = run("sample", folder, *words, "--out", tmp_path / "plain")
    assert code == 0
    assert "climatology" in said
    code, _, said = run("sample", folder, *words, "--out", tmp_path / "timed", "--times", "2020-01:2020-12")
    assert code == 0
    assert "climatology" not in said
    with (
        xarray.open_dataset(tmp_path / "plain" / "samples.nc", engine="h5netcdf") as plain,
        xarray.open_dataset(tmp_path / "timed" / "samples.nc", engine="h5netcdf") as timed,
    ):
        assert plain.t2m.units_metadata == "temperature: difference"
        assert "units_metadata" not in timed.t2m.attrs
        assert "climatology" in plain.comment
        months = timed.time.dt.month.values
        assert months.tolist() == [*range(1, 13), 1, 2]
        expected = data.scaling.climatology.means[torch.from_numpy(months - 1), 0].numpy()
        assert np.abs(timed.t2m.values - plain.t2m.values - expected).max() < 1e-3
    assert run("sample", folder, *words, "--out", tmp_path / "bad", "--times", "soon")[0] != 0


def test_a_model_without_a_climatology_takes_no_times(run, file, tmp_path):
    folder = model_of(nidiff.load_dataset(file), tmp_path / "model")
    code, _, said = run("sample", folder, "--seeds", 0, "--num-steps", 1, "--times", "2020-01", "--out", tmp_path / "o")
    assert code != 0
    assert "times" in said


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_restorations_keep_the_times_of_their_items(run, anomalous, tmp_path, suffix):
    folder, _ = anomalous
    some = table().isel(time=slice(30, 33))
    path, out = write(some, tmp_path / "some.nc"), tmp_path / "out"
    kind = "netcdf" if suffix == "nc" else "zarr"
    words = ("--mask", "left", "--samples", 2, "--num-steps", 5, "--format", kind, "--out", out)
    if suffix == "zarr":
        pytest.importorskip("zarr")
    assert run("restore", folder, path, *words)[0] == 0
    with xarray.open_dataset(out / f"samples.{suffix}", engine="h5netcdf" if suffix == "nc" else "zarr") as found:
        assert found.t2m.dims == ("time", "sample", "lat", "lon")
        assert found.t2m.shape == (3, 2, 4, 6)
        assert (found.time.values == some.time.values).all()
        assert found.t2m.units == "K"
        assert found.seed.values.tolist() == [[0, 1], [2, 3], [4, 5]]
        left = dict(lon=slice(0, 3))
        assert np.abs(found.t2m.isel(left).values - some.t2m.isel(left).values[:, None]).max() < 0.1  # as observed
    observed = np.load(out / "observed.npy")[..., 0]
    assert np.abs(observed - some.t2m.values)[:, :, :3].max() < 1e-3
    assert np.isnan(observed[:, :, 3:]).all()
    single = write(some.isel(time=1), tmp_path / "single.nc")  # whose time is a coordinate without an axis
    assert run("restore", folder, single, *words[:-1], tmp_path / "one")[0] == 0
    assert np.abs(np.load(tmp_path / "one" / "observed.npy")[0] - np.load(out / "observed.npy")[1])[:, :3].max() < 1e-4
    nameless = write(some.drop_vars("time"), tmp_path / "nameless.nc")
    code, _, said = run("restore", folder, nameless, *words[:-1], tmp_path / "other")
    assert code != 0
    assert "times" in said


def test_items_without_a_coordinate_are_numbered_and_every_channel_has_its_name(run, tmp_path):
    data = table().assign(q=table().t2m * 0.01)
    data.q.attrs["units"] = "kg kg-1"
    folder = model_of(nidiff.load_dataset(write(data, tmp_path / "two.nc")), tmp_path / "model")
    np.save(tmp_path / "x.npy", nidiff.load_dataset(tmp_path / "two.nc").stored(torch.arange(3)).numpy())
    words = ("--noise", 0.2, "--units", "model", "--samples", 2, "--num-steps", 2, "--format", "netcdf")
    assert run("denoise", folder, tmp_path / "x.npy", *words, "--out", tmp_path / "out")[0] == 0
    with xarray.open_dataset(tmp_path / "out" / "samples.nc", engine="h5netcdf") as found:
        assert found.t2m.dims == found.q.dims == ("item", "sample", "lat", "lon")
        assert (found.t2m.units, found.q.units, found.item.values.tolist()) == ("K", "kg kg-1", [0, 1, 2])


def test_means_over_blocks_in_kelvin_are_observed_as_they_are(anomalous):
    """y = A(data) and the operator on x must agree, though neither points nor months have one scaling."""
    folder, data = anomalous
    rows = torch.tensor([1, 40])
    model = open_model(folder, process_state()).about(data.take(rows), "file")
    values = data.stored(rows).double()
    observation = observe(model, pooling(model, 2)(values), pooling(model, 2), 0.5)
    torch.testing.assert_close(observation.operator(data.batch(rows)), observation.y, atol=1e-4, rtol=0)
    torch.testing.assert_close(observed_data(model, observation).double(), pooling(model, 2)(values), atol=1e-3, rtol=0)
    degraded = observe(model, values, pooling(model, 2), 0.0, degrade=True)
    torch.testing.assert_close(degraded.y, observation.y, atol=1e-4, rtol=0)
    scaling, _ = seen_scaling(model, pooling(model, 2))
    assert math.isclose(observation.noise * scaling.scale[0], 0.5, rel_tol=1e-6)
    # The means of the months are known at every point, so that where there is no anomaly, interpolation has no error.
    normals = model.scaling.to_data(torch.zeros(2, *SHAPE, dtype=torch.float64))
    seen = observe(model, pooling(model, 3)(normals), pooling(model, 3), 0.0)
    for observed, block, same in ((seen, 3, True), (degraded, 2, False)):
        found = BASELINES["bicubic"](model, Observed.of(model, observed, block), 1, 0)
        assert (found.mean.abs().amax() < 1e-3) == same
    # The control: the plain operator is another one.
    assert (pooling(model, 2)(data.batch(rows)) - observation.y).abs().amax() > 0.05


# A domain -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ocean(tmp_path):
    data = table()
    data.t2m[:, 1:3, 2:4] = np.nan
    return write(data, tmp_path / "ocean.nc")


def test_outside_of_the_domain_the_model_sees_zeros_and_data_are_missing(ocean):
    for options in ({}, {"scaling": "standard:per=pixel"}, {"remove": "climatology"}, {"memory_limit": 0}):
        data = nidiff.load_dataset(ocean, missing="domain", **options)
        x, land = data.all(), ~data.scaling.domain
        assert int(land.sum()) == 4
        assert bool((x[:, land] == 0).all())
        assert bool(x.isfinite().all())
        inside = x[:, ~land].double()
        assert abs(inside.mean()) < 1e-5
        assert math.isclose(inside.std(correction=0), 1, rel_tol=1e-5)
        back = data.scaling_of(torch.arange(3)).to_data(x[:3])
        assert bool(back[:, land].isnan().all())
        assert bool(back[:, ~land].isfinite().all())
    with pytest.raises(InputError):
        nidiff.load_dataset(ocean)  # the control


def test_a_domain_that_is_empty_or_differs_between_items_is_refused(file, ocean, tmp_path):
    with refused("missing"):
        nidiff.load_dataset(file, missing="domain")
    data = table()
    data.t2m[:, 1, 2] = np.nan
    data.t2m[5, 2, 3] = np.nan
    with refused("data"):
        nidiff.load_dataset(write(data, tmp_path / "holes.nc"), missing="domain")
    data.t2m[:] = np.nan
    with refused("missing"):
        nidiff.load_dataset(write(data, tmp_path / "nothing.nc"), missing="domain")


def test_the_loss_does_not_depend_on_what_is_said_outside_of_the_domain(ocean):
    data = nidiff.load_dataset(ocean, missing="domain")
    weights = point_weights("none", data.grid, data.shape, data.scaling.domain)
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(10), nidiff.Identity(SHAPE[1:]))
    losses = []
    for wrong in (0.0, 3.0):
        net = lambda x, t, wrong=wrong: wrong * (~data.scaling.domain) + 0 * x  # noqa: E731
        denoiser = nidiff.Denoiser(net, process, "eps", scaling=data.scaling)
        each = {"generator": 0, "weights": weights}
        losses.append(
            [nidiff.denoising_loss(denoiser, data.all()[:8], **{**each, **more}) for more in ({}, {"weights": None})]
        )
    torch.testing.assert_close(losses[0][0], losses[1][0])
    assert (losses[0][1] - losses[1][1]).abs().amax() > 0.1  # without weights they count


def test_samples_and_metrics_know_the_domain(run, ocean, tmp_path):
    data = nidiff.load_dataset(ocean, missing="domain")
    folder, out = model_of(data, tmp_path / "model"), tmp_path / "out"
    assert run("sample", folder, "--seeds", "0-3", "--num-steps", 2, "--out", out)[0] == 0
    with np.load(out / "samples.npz") as stored:
        assert np.array_equal(np.isnan(stored["arr_0"][0, ..., 0]), ~data.scaling.domain[0].numpy())
    some = write(xarray.open_dataset(ocean, engine="h5netcdf").isel(time=slice(0, 2)), tmp_path / "some.nc")
    words = ("--mask", "random:0.5", "--degrade", "--samples", 2, "--num-steps", 2)
    code, _, said = run("restore", folder, some, *words, "--out", tmp_path / "restored")
    assert (code, "nan" in said) == (0, False), said
    whole = write(table().isel(time=slice(0, 2)), tmp_path / "whole.nc")  # which has numbers on the land too
    code, _, again = run("restore", folder, whole, *words, "--out", tmp_path / "again")
    assert (code, again.replace("again", "restored")) == (0, said)
    weights = data.scaling.domain.double()[0]
    sets = [
        SampleSet(torch.where(data.scaling.domain, normal(20, *SHAPE), fill), weights=weights) for fill in (0.0, 1e6)
    ]
    for name in ("sorted_values", "spread"):
        assert torch.equal(*(getattr(each, name)() for each in sets))
    torch.testing.assert_close(*(each.structure(2, 0) for each in sets))
    with refused("scale"):
        model = open_model(folder, process_state())
        seen_scaling(model, pooling(model, 2))


# Weights --------------------------------------------------------------------------------------------------------------


def test_latitudes_weigh_by_their_cosine(file):
    data = nidiff.load_dataset(file)
    weights = point_weights("latitude", data.grid, data.shape)
    expected = np.cos(np.radians(LAT)) / np.cos(np.radians(LAT)).mean()
    assert np.abs(weights[0].numpy() - expected[:, None]).max() < 1e-12
    assert point_weights("none", data.grid, data.shape) is None
    with refused("weights"):
        point_weights("latitude", Grid(("height", "width")), SHAPE)
    with refused("weights"):
        point_weights("area", data.grid, data.shape)


def test_weighted_values_are_drawn_as_often_as_their_points_weigh(file):
    data = nidiff.load_dataset(file)
    weights = point_weights("latitude", data.grid, data.shape)[0]
    rows = torch.from_numpy(LAT)[:, None].expand(4, 6)
    values = SampleSet(rows.expand(2, 1, 4, 6).clone(), weights=weights).sorted_values()
    share = (values.abs() > 50).double().mean()
    assert math.isclose(share, (weights * (rows.abs() > 50)).sum() / weights.sum(), abs_tol=0.005)
    assert (SampleSet(rows.expand(2, 1, 4, 6).clone()).sorted_values().abs() > 50).double().mean() == 0.5  # the control
    x = rows.expand(1, 1, 4, 6) ** 2
    pairs = (weights[1:] * weights[:-1]).sqrt()
    expected = ((x[0, 0, 1:] - x[0, 0, :-1]).square() * pairs).sum() / pairs.sum()
    torch.testing.assert_close(structure_function(x, 2, lags=(1,), weights=weights)[0, 0, 0], expected)


# Coordinates and static fields as conditions --------------------------------------------------------------------------


@pytest.fixture
def rich(tmp_path):
    data = table()
    data["orog"] = (("lat", "lon"), np.random.default_rng(1).normal(size=(4, 6)), {"units": "m"})
    data["nino"] = ("time", np.random.default_rng(2).normal(size=120))
    return write(data, tmp_path / "rich.nc")


def test_coordinates_and_static_fields_are_conditions(rich):
    data = nidiff.load_dataset(rich, variables=["t2m"], condition="orog,latitude,longitude,month,nino")
    known = data.condition_scaling.to_data(data.conditions)
    names = data.grid.condition.channels
    assert names == ("orog", "latitude_sin", "longitude_sin", "longitude_cos", "month_sin", "month_cos", "nino")
    assert known.shape == (120, 7, 4, 6)
    assert bool((known[:, :4] == known[:1, :4]).all())
    assert np.abs(known[0, 1].numpy() - np.sin(np.radians(LAT))[:, None]).max() < 1e-5
    assert np.abs(known[0, 2].numpy() - np.sin(np.radians(LON))).max() < 1e-5
    angle = 2 * np.pi * (np.arange(120) % 12 + 0.5) / 12
    assert np.abs(known[:, 4, 0, 0].numpy() - np.sin(angle)).max() < 1e-5
    named = write(xarray.open_dataset(rich, engine="h5netcdf").rename(nino="month"), rich.with_name("named.nc"))
    own = nidiff.load_dataset(named, variables=["t2m"], condition="month")
    assert own.grid.condition.channels == ("month",)  # a variable of that name is what it says
    numbers = nidiff.load_dataset(rich, variables=["t2m"], condition="nino,dayofyear")
    assert numbers.conditions.shape == (120, 3)
    assert numbers.grid.condition.axes == ()
    with refused("condition"):
        nidiff.load_dataset(rich, variables=["t2m"], condition="mountains,latitude")


def test_coordinates_need_coordinates(tmp_path):
    np.save(tmp_path / "a.npy", normal(4, 4, 6).numpy())
    for name in ("latitude", "month"):
        with refused("condition"):
            nidiff.load_dataset(tmp_path / "a.npy", condition=name)


def test_a_model_is_given_its_coordinates_again(run, rich, tmp_path):
    """A file of static fields and --times give the conditions that training had."""
    data = nidiff.load_dataset(rich, variables=["t2m"], condition="orog,latitude,month")
    conditions = conditions_of(data)
    denoiser = SimpleNamespace(conditions=conditions, process=None)
    static = write(xarray.open_dataset(rich, engine="h5netcdf")[["orog"]], tmp_path / "static.nc")
    times = parse_times("1990-01:1990-12")
    rows = plan_conditions(denoiser, condition=static, grid=data.grid, times=times).rows["fields"]
    torch.testing.assert_close(rows, data.conditions[:12], atol=1e-5, rtol=0)
    everything = write(xarray.open_dataset(rich, engine="h5netcdf")[["orog", "time"]], tmp_path / "times.nc")
    rows = plan_conditions(denoiser, condition=everything, grid=data.grid).rows["fields"]
    torch.testing.assert_close(rows, data.conditions, atol=1e-5, rtol=0)
    with refused("condition"):  # the month is missing
        plan_conditions(denoiser, condition=static, grid=data.grid)
    with refused("condition"):  # the orography is
        plan_conditions(denoiser, grid=data.grid, times=times)
    places = nidiff.load_dataset(rich, variables=["t2m"], condition="latitude,month")
    denoiser = SimpleNamespace(conditions=conditions_of(places), process=None)
    rows = plan_conditions(denoiser, grid=places.grid, times=times).rows["fields"]
    torch.testing.assert_close(rows, places.conditions[:12], atol=1e-5, rtol=0)


# Python --------------------------------------------------------------------------------------------------------------


def test_a_scaling_is_equal_to_itself_and_to_nothing_else():
    means = normal(12, *SHAPE)
    means[3] = torch.nan
    one = Scaling(torch.ones(SHAPE), torch.zeros(SHAPE), climatology=Climatology("month", means))
    values, arrays = one.to_json()
    assert Scaling.from_json(values, arrays) == one
    assert hash(Scaling.from_json(values, arrays)) == hash(one)
    assert one != replace(one, scale=2 * torch.ones(SHAPE))
    assert one != replace(one, climatology=None)
    assert Scaling(2.0, 1.0).to_json() == ({"scale": 2.0, "shift": 1.0}, {})
    for scale in (torch.zeros(SHAPE), torch.full(SHAPE, torch.nan)):
        with refused("scale"):
            Scaling(scale)
    with refused("remove"):
        one.at_times(np.array(["2020-04-01"], "datetime64[D]"))
    assert Dataset(normal(2, *SHAPE).float(), scaling=one).batch(torch.tensor([0])).shape == (1, *SHAPE)


def test_a_restored_item_is_given_its_own_month(run, file, tmp_path):
    """Samples of one seed and observation differ as the months do, and from those without a time."""
    data = nidiff.load_dataset(file, condition="month")
    torch.manual_seed(0)
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(50), nidiff.gaussian_free_field(SHAPE[1:]))
    net = nidiff.FieldUNet(SHAPE[1:], 1, 1, widths=(8,), layers=1, attention=(), num_parameters=2)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.2)  # else an untrained network does not look at its condition
    conditions = conditions_of(data, 0.1)
    save_model(
        nidiff.Denoiser(net, process, "v", scaling=data.scaling, conditions=conditions, clip=3.0),
        tmp_path / "model", grid=data.grid,
    )  # fmt: skip
    winter = table().isel(time=slice(0, 1))
    files = {"winter": winter, "summer": winter.assign_coords(time=winter.time.values + np.timedelta64(181, "D"))}
    files["never"], samples = winter.drop_vars("time"), {}
    for name, each in files.items():
        words = ("--mask", "left", "--samples", 1, "--num-steps", 3, "--out", tmp_path / f"{name}-out")
        assert run("restore", tmp_path / "model", write(each, tmp_path / f"{name}.nc"), *words)[0] == 0
        with np.load(tmp_path / f"{name}-out" / "samples.npz") as stored:
            samples[name] = stored["arr_0"]
    assert np.abs(samples["winter"] - samples["summer"]).max() > 1e-2
    assert np.abs(samples["winter"] - samples["never"]).max() > 1e-2


def test_evaluated_samples_are_given_the_months_of_the_real_items(run, file, tmp_path):
    held_out, flags = "time=1998-03:", ("--remove", "climatology", "--condition", "latitude,month", "--target", "v")
    train = (
        "--widths",
        8,
        "--attention",
        "--steps",
        1,
        "--warmup",
        0,
        "--cooldown",
        0,
        "--num-samples",
        1,
        "--no-report",
        "--condition-dropout",
        0,
    )
    code, _, said = run("train", "--data", file, "--held-out", held_out, *flags, *train, "--out", tmp_path / "run")
    assert code == 0, said
    code, _, said = run("evaluate", tmp_path / "run", "--num-steps", 2, "--seeds", "0-7", "--bootstrap", 2)
    assert code == 0, said
    (job,) = (tmp_path / "run" / "generated").glob("*/job.json")
    options = {"condition": "latitude,month", "remove": "climatology", "held_out": held_out}
    for split in ("test", "train"):
        months = nidiff.load_dataset(file, split=split, **options).conditions
        assert (rows_digest({"fields": months}) in job.read_text()) == (split == "test")
