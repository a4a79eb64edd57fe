"""Crops: every place alike, the same ones to test with, the law of a stationary field, and bits that do not change."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from problems import refused
from safetensors.torch import load_file

import nidiff
from nidiff.cli import main
from nidiff.data.crops import Crops
from nidiff.data.spec import DataSpec
from nidiff.training.build import build
from nidiff.training.draws import crop_places, image_generators, image_indices
from nidiff.training.experiment import Experiment, read_experiment
from nidiff.training.identity import settings_digest
from nidiff.training.loop import step_batches

ITEMS, EVENT = 6, (9, 12)
TINY = Experiment(
    covariance="white",
    schedule="ddpm_linear:num_levels=20",
    target="v",
    widths=(8,),
    attention=(),
    layers=1,
    steps=4,
    batch_size=8,
    warmup=1,
    cooldown=0,
    checkpoint_every=2,
    num_samples=2,
    num_steps=2,
    precision="fp32",
)


@pytest.fixture
def file(tmp_path):
    """Items whose values say where they are: 1000 · item + 20 · row + column, as [N, 1, 9, 12]."""
    item, row, column = np.meshgrid(np.arange(ITEMS), *map(np.arange, EVENT), indexing="ij")
    np.save(tmp_path / "data.npy", (1000.0 * item + 20 * row + column)[:, None].astype("f4"))
    return tmp_path / "data.npy"


def load(file, crop=(4, 5), **options):
    options = {"layout": "NCHW", "scaling": "none", "progress": False, **options}
    return nidiff.load_dataset(file, crop=crop, **options)


def experiment(file, crop=(4, 5), **settings):
    own = {"data": str(file), "layout": "NCHW", "crop": crop, **settings}
    return Experiment.from_settings({**TINY.settings(), **own})


def begins(x: torch.Tensor) -> torch.Tensor:
    """(item, row, column) of the first point of each crop of `file`."""
    first = x[:, 0, 0, 0].round().long()
    return torch.stack([first // 1000, first % 1000 // 20, first % 20], 1)


# Places ----------------------------------------------------------------------------------------------------------


def test_every_place_is_as_probable_as_any_other(file):
    data = load(file)
    places = torch.cat([crop_places(data, image_generators(0, step, 0, 64)) for step in range(90)])
    counts = torch.zeros(6, 8)  # 9 − 4 + 1 and 12 − 5 + 1
    counts.index_put_((*places.T,), torch.ones(len(places)), accumulate=True)
    expected = len(places) / counts.numel()

    def distance(counts: torch.Tensor) -> float:
        """χ² over its degrees of freedom, 1 ± 0.21 if all are as probable."""
        return float((counts - expected).square().sum() / expected / (counts.numel() - 1))

    assert distance(counts) < 2
    edge = torch.zeros(6, 8)
    edge[:, 1:-1] = len(places) / 36  # without the outermost columns
    assert distance(edge) > 2


def test_an_image_is_cut_elsewhere_in_every_step_and_by_every_seed(file):
    data = load(file)

    def drawn(seed, step):
        return crop_places(data, image_generators(seed, step, 0, 32)).tolist()

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0) != drawn(0, 1)
    assert drawn(0, 0) != drawn(1, 0)
    assert len({*map(tuple, drawn(0, 0))}) > 10  # and elsewhere from image to image


def test_a_crop_is_that_part_of_its_item(file):
    data, index = load(file), torch.tensor([5, 0, 17])
    places = torch.tensor([[0, 0], [5, 7], [2, 3]])
    x = data.batch(index, None, places)
    assert x.shape == (3, 1, 4, 5)
    items = data.values.rows[index]
    assert torch.equal(begins(x), torch.cat([items[:, None], places], 1))
    assert torch.equal(x[1, 0], torch.from_numpy(np.load(file))[items[1], 0, 5:9, 7:12])
    mirrored = data.batch(index, torch.tensor([True, False, True]), places)
    assert torch.equal(mirrored, torch.stack([x[0].flip(-1), x[1], x[2].flip(-1)]))


def test_without_places_crops_are_where_they_always_are_and_cover_each_item_alike(file):
    data, again = load(file), load(file)
    assert len(data) == ITEMS * 3 * 3  # ⌈9/4⌉ · ⌈12/5⌉ of each
    assert torch.equal(data.all(), again.all())
    assert torch.equal(begins(data.all())[:, 0], torch.arange(ITEMS).repeat_interleave(9))
    assert len(begins(data.all())[:, 1:].unique(dim=0)) > 20
    few = data.take(torch.tensor([3, 40]))
    assert torch.equal(few.all(), data.batch(torch.tensor([3, 40])))
    assert torch.equal(few.batch(torch.tensor([1]), None, torch.tensor([[1, 1]]))[0, 0, 0, 0], torch.tensor(4021.0))


def test_the_held_out_part_is_of_other_items_and_always_the_same(file):
    train, test = (load(file, held_out="item=4:5", split=split) for split in ("train", "test"))
    assert {*begins(train.all())[:, 0].tolist()} == {0, 1, 2, 3}
    assert {*begins(test.all())[:, 0].tolist()} == {4, 5}
    trainer = build(experiment(file, held_out="item=4:5", scaling=["none"]))
    _ = [*step_batches(trainer)]
    assert torch.equal(trainer.held_out.all(), test.all())


def test_bits_do_not_depend_on_how_a_batch_is_split(file):
    """Nor on which step was the first; each image has its own place, at which its fields are cut too."""
    np.save(file.parent / "fields.npy", np.load(file))
    own = {"condition": str(file.parent / "fields.npy"), "flip": True, "scaling": ["standard"], "seed": 3}
    trainer = build(experiment(file, **own))
    halves = build(dataclasses.replace(trainer.experiment, accumulation=2))
    late = build(trainer.experiment)
    late.step = 2
    whole, parts, rest = ([*step_batches(each)] for each in (trainer, halves, late))
    for step in range(4):
        pair = parts[2 * step : 2 * step + 2]
        assert torch.equal(whole[step][0], torch.cat([x for x, _, _ in pair]))
        left, right = whole[step][1]["fields"], torch.cat([rows["fields"] for _, rows, _ in pair])
        assert torch.equal(left.nan_to_num(), right.nan_to_num())  # NaN: left out
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[2:], rest, strict=True))
    x, rows, _ = whole[0]
    known = ~rows["fields"].isnan().flatten(1).any(1)
    assert known.any()
    torch.testing.assert_close(rows["fields"][known], x[known], atol=1e-4, rtol=0)
    places = begins(trainer.data.scaling.to_data(torch.where(x[:, :, :, :1] < x[:, :, :, -1:], x, x.flip(-1))))
    assert torch.equal(places[:, 0], trainer.data.values.rows[image_indices(3, len(trainer.data), 0, 8)])
    assert not torch.equal(whole[0][0], whole[1][0])


def test_without_crops_nothing_is_drawn_that_was_not_before(file):
    untouched = [generator.get_state() for generator in image_generators(0, 0, 0, 8)]
    for crop, same in (((), True), (EVENT, True), ((4, 5), False)):
        generators = next(step_batches(build(experiment(file, crop))))[2]
        states = [torch.equal(each.get_state(), state) for each, state in zip(generators, untouched, strict=True)]
        assert all(states) == same
    assert not isinstance(load(file, EVENT).values, Crops)
    assert settings_digest(TINY) != settings_digest(experiment(file))
    before = {name: value for name, value in experiment(file, ()).settings().items() if name != "crop"}
    assert settings_digest(Experiment.from_settings(before)) == settings_digest(experiment(file, ()))


# What models of the data become ------------------------------------------------------------------------------------


def test_a_crop_of_a_stationary_field_has_the_covariance_of_the_crop(tmp_path):
    """Of a periodic field of 32 points, 6 of them: not periodic, and the whole field's covariance at those distances.
    The Gaussian that a run fits has the edges and the variance of crops."""
    field, crop = nidiff.matern((32,), length_scale=4.0), 6
    whole = field.dense()
    x = field.sample((6000, 32), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.save(tmp_path / "x.npy", x.numpy())
    data = nidiff.load_dataset(tmp_path / "x.npy", crop=crop, scaling="none", progress=False)
    crops = data.all()[:, 0].double()
    measured = crops.T @ crops / len(crops)
    assert (measured - whole[:crop, :crop]).abs().max() < 0.05
    periodic = nidiff.matern((crop,), length_scale=4.0).dense()  # the negative control
    assert (measured - periodic).abs().max() > 0.2
    own = {"data": str(tmp_path / "x.npy"), "layout": None, "scaling": ["none"], "gaussian": "modes"}
    gaussian = build(experiment(tmp_path / "x.npy", [crop], **own)).denoiser.gaussian
    assert gaussian.spatial.boundary == ("reflecting",)
    assert gaussian.covariance.dense().diagonal().mean() == pytest.approx(1.0, abs=0.05)
    assert gaussian.mean.abs().max() < 0.1


def test_crops_are_reflecting_unless_the_user_says_otherwise(file):
    def edges(crop=(4, 5), **settings):
        trainer = build(experiment(file, crop, covariance="gff", network="unet", **settings))
        denoiser = trainer.denoiser
        assert denoiser.gaussian.spatial.boundary == denoiser.process.covariance.basis.boundary
        said = [note for note in trainer.notes if "boundary" in note]
        return denoiser.process.covariance.basis.boundary, denoiser.net.config["boundary"], said

    assert edges() == (("reflecting",) * 2, ["reflecting"], [])
    assert edges(())[0] == ("periodic",) * 2  # the usual one, of whole items
    mixed, network, said = edges((4, 12), boundary="reflecting/periodic")  # the second axis is not cut
    assert (mixed, network, said) == (("reflecting", "periodic"), ["reflecting", "periodic"], [])
    mixed, _, said = edges((4, 5), boundary="reflecting/periodic")
    assert mixed == ("reflecting", "periodic")
    assert len(said) == 1
    assert "width" in said[0]
    assert "height" not in said[0]


def test_the_fields_of_a_condition_are_cut_at_the_same_places_and_coarse_ones_between_their_cells(tmp_path):
    fine = np.random.default_rng(0).normal(size=(20, 1, 12, 16))
    coarse = fine.reshape(20, 1, 6, 2, 4, 4).mean((3, 5))
    np.save(tmp_path / "fine.npy", fine)
    np.save(tmp_path / "coarse.npy", coarse)
    np.save(tmp_path / "number.npy", np.arange(20.0))
    np.save(tmp_path / "words.npy", np.array(["a", "b"] * 10))
    data = load(tmp_path / "fine.npy", (6, 8), condition=tmp_path / "coarse.npy", labels=tmp_path / "words.npy")
    assert data.conditions.shape == (80, 1, 6, 8)
    known = data.condition_scaling.to_data(data.conditions.index_select(0, torch.arange(80)))
    cells = data.all().reshape(80, 1, 3, 2, 2, 4).mean((3, 5))
    torch.testing.assert_close(known[:, :, ::2, ::4], cells, atol=1e-4, rtol=0)
    places = crop_places(data, image_generators(0, 0, 0, 64))
    assert {*places[:, 0].tolist()} == {0, 2, 4, 6}
    assert {*places[:, 1].tolist()} == {0, 4, 8}
    assert data.labels.tolist() == [label for item in range(20) for label in 4 * [item % 2]]
    numbers = load(tmp_path / "fine.npy", (6, 8), condition=tmp_path / "number.npy")
    assert torch.equal(numbers.conditions[:, 0].unique_consecutive(return_counts=True)[1], torch.full((20,), 4))
    with refused("crop"):  # 5 and 6 points, and cells of 2 and 4
        load(tmp_path / "fine.npy", (6, 6), condition=tmp_path / "coarse.npy")


# Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "shape"), [("NL", (4, 40)), ("NLC", (4, 40, 2)), ("NHWC", (4, 11, 12, 2)), ("NCDHW", (2, 2, 8, 9, 10))]
)
def test_what_is_read_piece_by_piece_are_the_same_bits(layout, shape, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=shape).astype("f4"))
    memory, disk = (load(tmp_path / "x.npy", 7, layout=layout, memory_limit=limit) for limit in (None, 0))
    assert isinstance(memory.values.whole, torch.Tensor)
    assert not isinstance(disk.values.whole, torch.Tensor)
    index = torch.tensor([len(disk) - 1, 0, 3, 3])
    places = disk.values.random_places(4, [1, 2, 3, 4])
    assert torch.equal(disk.all(), memory.all())  # item by item
    for data in (disk, disk.take(torch.arange(len(disk)))):
        assert torch.equal(data.batch(index), memory.batch(index))
        assert torch.equal(data.batch(index, None, places), memory.batch(index, None, places))


def test_pictures_and_variables_are_cut_too(tmp_path):
    from PIL import Image

    xarray = pytest.importorskip("xarray")
    random = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        Image.fromarray(random.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(tmp_path / f"pictures/{number}.png")
    coordinates = {"time": np.arange(5), "lat": np.linspace(60, 40, 9), "lon": np.arange(12) * 30.0}
    t, u = (xarray.DataArray(random.normal(size=(5, 9, 12)), coordinates, ("time", "lat", "lon")) for _ in "tu")
    t.attrs["units"], t["lat"].attrs["units"] = "K", "degrees_north"
    xarray.Dataset({"t": t, "u": u}).to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    for name, layout, crop in (("pictures", None, 8), ("x.nc", None, (4, 12))):
        memory, disk = (load(tmp_path / name, crop, layout=layout, memory_limit=limit) for limit in (None, 0))
        places = disk.values.random_places(len(disk), [*range(len(disk))])
        assert torch.equal(disk.all(), memory.all())
        index = torch.arange(len(disk))
        assert torch.equal(disk.batch(index, None, places), memory.batch(index, None, places))
    assert disk.grid.coordinates == {"lon": tuple(np.arange(12) * 30.0)}  # the other axis is cut anywhere
    assert (disk.grid.axes, disk.grid.units, disk.grid.axis_units) == (("lat", "lon"), ("K", ""), disk.grid.axis_units)
    assert disk.grid.axis_units["lat"] == "degrees_north"
    assert disk.along[1].tolist() == [time for time in range(5) for _ in range(3)]


def test_only_the_crop_is_read_and_a_missing_value_is_named_by_its_place_in_the_item(tmp_path):
    values = np.zeros((2, 1, 30, 30), "f4")
    values[1, 0, 27, 28] = np.nan
    np.save(tmp_path / "x.npy", values)
    data = load(tmp_path / "x.npy", 5, memory_limit=0)
    second = (data.values.rows == 1).nonzero()[:1, 0]
    assert not data.batch(second, None, torch.tensor([[0, 0]])).any()
    with pytest.raises(nidiff.InputError) as error:
        data.batch(second, None, torch.tensor([[25, 25]]))
    assert error.value.argument == "data"
    assert "item 1 at (27, 28)" in str(error.value)


# Runs ------------------------------------------------------------------------------------------------------------


def train(folder, *flags, **settings):
    config = folder.parent / f"{folder.name}.json"
    config.write_text(json.dumps(experiment(**settings).to_json()))
    return main(["train", "--config", str(config), "--out", str(folder), "--no-report", *flags])


def test_a_run_on_crops_resumes_to_the_same_bits_and_makes_items_of_their_size(file, tmp_path):
    straight, stopped, elsewhere = (tmp_path / name for name in ("straight", "stopped", "elsewhere"))
    own = {"file": file, "flip": True, "held_out": "item=5:5", "scaling": ["standard"]}
    assert train(straight, **own) == 0
    assert train(stopped, **own, steps=2) == 0
    assert main(["train", "--out", str(stopped), "--resume", "--steps", "4", "--no-report"]) == 0
    assert train(elsewhere, **own, seed=1) == 0
    a, b, c = (
        load_file(run / "model" / "unet" / "diffusion_pytorch_model.safetensors")
        for run in (straight, stopped, elsewhere)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    assert read_experiment(straight).data.crop == (4, 5)
    assert "--crop 4 5" in read_experiment(straight).command()
    assert main(["sample", str(straight), "--seeds", "0-2", "--num-steps", "2", "--out", str(tmp_path / "s")]) == 0
    with np.load(tmp_path / "s" / "samples.npz") as samples:
        assert samples["arr_0"].shape == (3, 4, 5, 1)
    assert main(["evaluate", str(straight), "--seeds", "0-5", "--num-steps", "2"]) == 0  # with crops of item 5
    assert main(["train", "--out", str(stopped), "--resume", "--crop", "5", "4", "--no-report"]) == 2  # another run


def test_crops_that_cannot_be_meant_are_refused(file):
    for crop in (10, (4, 13), (4, 4, 4), (0, 4), (-1,), ("4",), (2.0,)):
        with refused("crop"):
            load(file, crop)
    assert load(file, 4).shape == (1, 4, 4)
    assert DataSpec(crop=[4, 5]).crop == (4, 5)  # as JSON has it
    for crop, flags in zip((4, (4, 5)), (["--crop", "4"], ["--crop", "4", "5"]), strict=True):
        assert DataSpec("x.npy", crop=crop).flags() == flags


def test_a_single_large_item_is_enough(tmp_path):
    """A volume: its crops are fitted to, and no two of a batch are the same."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(1, 20, 21, 22)))
    trainer = build(experiment(tmp_path / "x.npy", [8], layout="NDHW", scaling=["standard"], covariance="gff"))
    assert len(trainer.data) == 27
    assert trainer.denoiser.gaussian is not None
    x, _, _ = next(step_batches(trainer))
    assert x.shape == (8, 1, 8, 8, 8)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(x, 2))
