"""Training with classes, numbers and fields: conditions belong to their image, and a run stays a function of its
experiment."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused
from safetensors.torch import load_file

import nidiff
from nidiff.cli import main
from nidiff.data.annotations import examples_of, rows_of
from nidiff.data.spec import DataSpec
from nidiff.diffusion.condition import Condition
from nidiff.model.network import build_network
from nidiff.model.unet import FieldUNet
from nidiff.training.build import build
from nidiff.training.draws import image_generators, image_indices
from nidiff.training.experiment import Experiment
from nidiff.training.identity import data_digest, network_digest
from nidiff.training.loop import step_batches, train_step

TINY = Experiment(
    network="unet",
    widths=(8,),
    attention=(),
    batch_size=16,
    precision="fp32",
    schedule="ddpm_linear:num_levels=20",
    warmup=2,
    cooldown=0,
    steps=4,
    checkpoint_every=2,
    num_samples=4,
    num_steps=2,
)
ITEMS = 24


def changed(experiment, **settings):
    """The experiment with some settings, also of its data, changed."""
    return Experiment.from_settings({**experiment.settings(), **settings})


def train(folder, experiment=TINY, *flags, **changes):
    config = folder.parent / f"{folder.name}.json"
    config.write_text(json.dumps(changed(experiment, **changes).to_json()))
    return main(["train", "--config", str(config), "--out", str(folder), *flags])


def weights(folder):
    return load_file(folder / "model" / "unet" / "diffusion_pytorch_model.safetensors")


@pytest.fixture
def fields(tmp_path):
    """Fields on 8×8, their means over cells of 4×4, and two numbers of each, in an .npy file each."""
    random = np.random.default_rng(0)
    data = random.normal(3.0, 2.0, (ITEMS, 1, 8, 8)).astype("f4")
    np.save(tmp_path / "data.npy", data)
    np.save(tmp_path / "coarse.npy", data.reshape(ITEMS, 1, 2, 4, 2, 4).mean((3, 5)))
    np.save(tmp_path / "numbers.npy", random.normal(500.0, 30.0, (ITEMS, 2)))
    return tmp_path


def load(folder, **options):
    return nidiff.load_dataset(folder / "data.npy", layout="NCHW", progress=False, **options)


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_with_classes_resumes_to_the_same_bits_and_the_model_knows_them(tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    own = {"labels": "data", "network": "unet2d", "flip": True}
    assert train(straight, **own, steps=2) == 0
    assert train(stopped, **own, steps=1) == 0
    assert main(["train", "--out", str(stopped), "--resume", "--steps", "2"]) == 0
    assert all(torch.equal(weights(straight)[name], value) for name, value in weights(stopped).items())
    model = nidiff.load_model(straight)
    assert model.conditions == {"class_labels": Condition(classes=10, null=10, dropout=0.1)}
    ours = build(changed(TINY, labels="data", condition_dropout=0.0)).denoiser
    assert ours.conditions == {"class_labels": Condition(classes=10, null=-1)}
    assert "10 classes" in (straight / "model" / "README.md").read_text()
    guided = model.given(class_labels=torch.tensor([3, 7])).guided(2.0)
    assert torch.isfinite(nidiff.sample(guided, (2, 1, 8, 8), num_steps=2, generator=range(2))).all()


@pytest.mark.parametrize(("file", "name", "shape"), [("numbers", "parameters", (2,)), ("coarse", "fields", (1, 8, 8))])
def test_a_run_with_numbers_or_fields(fields, file, name, shape):
    own = {"data": str(fields / "data.npy"), "layout": "NCHW", "condition": str(fields / f"{file}.npy"), "steps": 1}
    assert train(fields / "run", **own, condition_dropout=0.5) == 0
    model, stored = nidiff.load_model(fields / "run"), np.load(fields / f"{file}.npy")
    known = model.conditions[name]
    assert (known.classes, known.shape, known.null, known.dropout) == (None, shape, None, 0.5)
    axes = tuple(axis for axis in range(stored.ndim) if axis != 1)
    np.testing.assert_allclose(known.scaling.shift, stored.mean(axes), rtol=1e-5)  # in the units of the file
    np.testing.assert_allclose(known.scaling.scale, stored.std(axes), rtol=1e-5)
    rows = load(fields, condition=str(fields / f"{file}.npy")).conditions[:3]
    drawn = nidiff.sample(model.given(**{name: rows}), (3, 1, 8, 8), num_steps=2, generator=range(3))
    assert torch.isfinite(drawn).all()


def test_training_depends_on_the_conditions(tmp_path):
    """The negative control: the same images with other labels give other weights."""
    learnt = []
    for classes in (2, 3):
        np.save(tmp_path / f"{classes}.npy", np.arange(1498) % classes % 2)
        trainer = build(changed(TINY, labels=str(tmp_path / f"{classes}.npy")))
        batches = step_batches(trainer)
        for _ in range(4):  # residuals begin at 0: the first steps do not reach the classes
            train_step(trainer, batches)
        learnt.append(trainer.net.classes.weight.detach())
    assert not torch.equal(*learnt)


# Draws ---------------------------------------------------------------------------------------------------------------


def test_what_is_left_out_depends_on_the_image_alone():
    """Two halves of a batch have the conditions of the whole one; about a half is left out."""
    trainer = build(changed(TINY, labels="data", condition_dropout=0.5, batch_size=64, flip=True, steps=2))
    halves = build(dataclasses.replace(trainer.experiment, accumulation=2))
    whole, parts = [*step_batches(trainer)], [*step_batches(halves)]
    for step in range(2):
        x0, rows, _ = whole[step]
        pair = parts[2 * step : 2 * step + 2]
        assert torch.equal(x0, torch.cat([half[0] for half in pair]))
        assert torch.equal(rows["class_labels"], torch.cat([half[1]["class_labels"] for half in pair]))
        index = image_indices(0, len(trainer.data), 64 * step, 64)
        known = rows["class_labels"] >= 0
        assert torch.equal(rows["class_labels"][known], trainer.data.labels[index][known])
        assert 16 < int(known.sum()) < 48
    assert not torch.equal(whole[0][1]["class_labels"] < 0, whole[1][1]["class_labels"] < 0)
    assert examples_of(trainer.data, 12)["class_labels"].tolist() == [*range(10), 0, 1]  # all, in turn, in the samples


def test_nothing_more_is_drawn_unless_something_is_left_out():
    """Then a run has the bits that it had before there were conditions: its generators have drawn nothing else."""
    untouched = [generator.get_state() for generator in image_generators(0, 0, 0, 16)]
    for labels, dropout in ((None, 0.1), ("data", 0.0), ("data", 0.1)):
        trainer = build(changed(TINY, labels=labels, condition_dropout=dropout, steps=1))
        _, rows, generators = next(step_batches(trainer))
        assert (rows == {}) == (labels is None)
        for generator, state in zip(generators, untouched, strict=True):
            assert torch.equal(generator.get_state(), state) != bool(labels and dropout)  # the last is the control


def test_fields_are_mirrored_with_their_images_and_left_out_as_a_whole(fields):
    data = load(fields, condition=str(fields / "coarse.npy"))
    index, flip, dropped = torch.arange(4), torch.tensor([True, False] * 2), torch.tensor([False, False, True, True])
    conditions = {"fields": Condition(shape=(1, 8, 8), dropout=0.5)}
    rows, plain = rows_of(data, index, flip, dropped, conditions)["fields"], data.conditions[:4]
    assert torch.equal(rows[0], plain[0].flip(-1))
    assert torch.equal(rows[1], plain[1])
    assert rows[2:].isnan().all()
    assert not data.conditions.isnan().any()  # the data stay as they were
    other = dataclasses.replace(data, conditions=data.conditions.flip(0))
    labelled = dataclasses.replace(data, labels=torch.arange(ITEMS))
    assert len({data_digest(one) for one in (load(fields), data, other, labelled)}) == 4  # which a run goes on with


# Labels --------------------------------------------------------------------------------------------------------------


def test_subfolders_are_classes(tmp_path):
    for name, count in {"dog": 2, "ant": 1, "cat": 3}.items():
        (tmp_path / name / "more").mkdir(parents=True)
        for number in range(count):
            file = tmp_path / name / ("more" if number else ".") / f"{number}.png"
            Image.new("L", (4, 4), 100 * number).save(file)
    data = nidiff.load_dataset(tmp_path, labels="data", progress=False)
    assert data.class_names == ("ant", "cat", "dog")
    assert data.labels.tolist() == [0, 1, 1, 1, 2, 2]
    assert torch.equal(data.labels, nidiff.load_dataset(tmp_path, labels="data", memory_limit=0).labels)
    (tmp_path / "ant" / "broken.png").write_bytes(b"no image")
    skipping = nidiff.load_dataset(tmp_path, labels="data", skip_corrupt=True, progress=False)
    assert skipping.labels.tolist() == data.labels.tolist()
    Image.new("L", (4, 4)).save(tmp_path / "loose.png")
    with pytest.raises(nidiff.InputError, match="labels.*subfolder"):
        nidiff.load_dataset(tmp_path, labels="data", skip_corrupt=True, progress=False)


LABELS = [  # the array, its classes and their names
    (np.arange(ITEMS) % 5, np.arange(ITEMS) % 5, ()),
    ((np.arange(ITEMS) % 5).astype("f8"), np.arange(ITEMS) % 5, ()),
    (np.array(["b", "a"] * 12), np.array([1, 0] * 12), ("a", "b")),
    (np.array([True, False] * 12), np.array([1, 0] * 12), ("False", "True")),
]


def test_labels_of_an_array(fields):
    file = fields / "labels.npz"
    for values, labels, names in LABELS:
        np.savez(file, values)
        data = load(fields, labels=file)
        assert data.labels.tolist() == labels.tolist()
        assert (data.class_names, data.num_classes) == (names, labels.max() + 1)


def test_the_held_out_part_keeps_its_own_labels_and_conditions(fields):
    """They are known by their values; the units are those of the training part."""
    rows = np.arange(ITEMS, dtype="f4")
    np.save(fields / "data.npy", np.broadcast_to(rows[:, None, None, None], (ITEMS, 1, 8, 8)))
    np.save(fields / "labels.npy", rows)
    np.save(fields / "rows.npy", rows)
    own = {"labels": fields / "labels.npy", "condition": fields / "rows.npy", "held_out": "item=0:5"}
    for split, count in {"train": 18, "test": 6}.items():
        data = load(fields, split=split, **own)
        values = data.stored(torch.arange(count))[:, 0, 0, 0]
        assert torch.equal(values, data.labels.float())
        assert data.num_classes == ITEMS
        torch.testing.assert_close(data.condition_scaling.to_data(data.conditions)[:, 0], values)
        assert data.condition_scaling.shift[0] == pytest.approx(rows[6:].mean())


def test_variables_of_a_science_file(tmp_path):
    xarray = pytest.importorskip("xarray")
    random = np.random.default_rng(0)
    axes, coarse = ("time", "lat", "lon"), ("time", "lat4", "lon4")
    table = xarray.Dataset(
        {
            "t": (axes, random.normal(size=(12, 4, 8)).astype("f4")),
            "orography": (("lat", "time", "lon"), random.normal(size=(4, 12, 8)).astype("f4")),
            "low": (coarse, random.normal(size=(12, 2, 2)).astype("f4")),
            "co2": (("time",), random.normal(400, 9, 12)),
            "month": (("time",), np.arange(12)),
            "mask": (("lat", "lon"), np.ones((4, 8), "f4")),
            "label": (("lat",), np.ones(4, "f4")),
        }
    )
    table.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")

    def read(**options):
        return nidiff.load_dataset(tmp_path / "a.nc", progress=False, **options)

    months = read(variables=("t",), labels="month", condition="co2")
    assert months.labels.tolist() == [*range(12)]
    assert months.conditions.shape == (12, 1)
    high = read(variables=("t",), condition="orography", memory_limit=0)  # streamed
    expected = table["orography"].transpose(*axes).values
    np.testing.assert_allclose(high.condition_scaling.to_data(high.conditions)[:, 0], expected, rtol=1e-5, atol=1e-6)
    low = read(variables=("t",), condition="low").conditions
    assert low.shape == (12, 1, 4, 8)
    assert torch.equal(low, low[..., ::2, ::4].repeat_interleave(2, 2).repeat_interleave(4, 3))
    table[["t", "orography"]].to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    rest = nidiff.load_dataset(tmp_path / "b.nc", condition="orography", progress=False)
    assert rest.grid.channels == ("t",)  # a condition is no channel
    spec = DataSpec(str(tmp_path / "b.nc"), condition="orography", labels="gone.npy")
    assert spec.load(annotations=()).grid.channels == ("t",)  # nor where the data are only compared with
    fixed = read(variables=("t",), condition="mask,co2").conditions  # one field for all items, and numbers of each
    assert fixed.shape == (12, 2, 4, 8)
    assert bool((fixed[:, 0] == fixed[0, 0]).all())
    wrongs = {"nothing": "condition.*co2", "label": "condition.*time", "orography,low": "condition.*shape"}
    for wrong, match in wrongs.items():
        with pytest.raises(nidiff.InputError, match=match):
            read(variables=("t",), condition=wrong)


BAD = [
    ({"labels": "data"}, None),  # none of its own
    ({"labels": "labels.npz"}, None),  # no such file
    ({"labels": "a.npy"}, np.zeros((ITEMS, 2), int)),
    ({"labels": "a.npy"}, np.full(ITEMS, 0.5)),
    ({"labels": "a.npy"}, np.full(ITEMS, -1)),
    ({"labels": "a.npy"}, np.arange(ITEMS) * 10**7),  # very many
    ({"labels": "a.npy"}, np.array([{}] * ITEMS)),
    ({"condition": "a.npy"}, np.zeros((5, 2))),  # few rows
    ({"condition": "a.npy"}, np.full((ITEMS, 2), np.nan)),
    ({"condition": "a.npy"}, np.zeros((ITEMS, 1, 3, 3))),  # another grid
    ({"condition": "a.npy"}, np.array([["a"]] * ITEMS)),
    ({"condition": ","}, None),
    ({"condition": "a.npy", "split": "test"}, np.zeros((299, 2))),  # of the training part
]


def test_labels_and_conditions_that_cannot_be_meant(fields, monkeypatch):
    monkeypatch.chdir(fields)
    for options, array in BAD:
        if array is not None:
            np.save("a.npy", array, allow_pickle=True)
        with pytest.raises(nidiff.InputError, match=next(iter(options))) as error:
            nidiff.load_dataset("digits", **options) if "split" in options else load(fields, **options)
        assert "\n" not in str(error.value)


def test_a_dry_run_lists_the_conditions_and_a_bad_one_is_one_sentence(tmp_path, capsys):
    assert train(tmp_path / "run", TINY, "--dry-run", labels="data") == 0
    assert json.loads(capsys.readouterr().out)["conditions"] == {"class_labels": 10}
    for flags in (["--condition-dropout", "1"], ["--condition", "nothing.npy"], ["--labels", "nothing.npy"]):
        assert main(["train", "--out", str(tmp_path / "run"), *flags]) == 2
        assert flags[0] in capsys.readouterr().err
    np.save(tmp_path / "a.npy", np.arange(1498.0))
    own = {"condition": str(tmp_path / "a.npy")}
    assert train(tmp_path / "run", **own, network="unet2d") == 2
    assert "--network='unet2d'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert type(build(changed(TINY, **own, network="auto")).net) is FieldUNet  # which takes them


# Networks ------------------------------------------------------------------------------------------------------------

SMALL = {"widths": (8,), "layers": 1, "attention": ()}


def built(**options):
    """A network whose output is not 0, as it would be before training."""
    torch.manual_seed(0)
    net = build_network("unet", (1, 8, 8), **SMALL, **options).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def test_nan_is_what_is_not_known():
    """None, NaN for all, and NaN for each say the same; a known value says something else; each row is its own."""
    x, label, nan = torch.randn(3, 1, 8, 8), torch.arange(3), torch.nan
    values = {"parameters": torch.randn(3, 2), "fields": torch.randn(3, 4, 8, 8)}
    net = built(num_parameters=2, condition_channels=4)
    nothing = net(x, label)
    assert torch.isfinite(nothing).all()
    for name, value in values.items():
        conditional = net(x, label, **{name: value})
        assert (conditional - nothing).flatten(1).abs().amax(1).min() > 0
        for absent in (torch.full_like(value, nan), torch.full((3,), nan)):
            assert torch.equal(net(x, label, **{name: absent}), nothing)
        mixed = value.clone()
        mixed[1] = nan
        assert torch.equal(net(x, label, **{name: mixed})[[0, 2]], conditional[[0, 2]])
        assert torch.equal(net(x, label, **{name: mixed})[1], nothing[1])
        zero = net(x, label, **{name: torch.zeros_like(value)})
        assert not torch.equal(zero, nothing)  # 0 is a value
        with pytest.raises(nidiff.InputError, match=name):
            built()(x, label, **{name: value})


def test_a_network_without_conditions_is_as_it_was():
    """Its weights, its digest and what it is called with: runs of earlier versions go on."""
    net = built()
    torch.manual_seed(0)
    before = {key: value for key, value in net.config.items() if key not in ("num_parameters", "condition_channels")}
    same = FieldUNet(**{key: value for key, value in before.items() if not key.startswith("_")})
    assert [*same.state_dict()] == [*net.state_dict()]
    assert network_digest(same) == network_digest(net)
    assert network_digest(built(num_parameters=1)) != network_digest(net)

    class Earlier(torch.nn.Module):
        config = before

        def named_parameters(self):
            return net.named_parameters()

    Earlier.__name__ = "FieldUNet"
    assert network_digest(Earlier()) == network_digest(net)


def test_networks_that_cannot_take_a_condition():
    for text, options, argument in (
        ("unet2d", {"num_parameters": 2}, "network"),
        ("unet2d", {"condition_channels": 1}, "network"),
        ("unet:num_classes=3", {"num_classes": 4}, "network"),
        ("unet", {"num_parameters": -1}, "num_parameters"),
        ("unet:condition_channels=-1", {}, "condition_channels"),
    ):
        with refused(argument):
            build_network(text, (1, 8, 8), **SMALL, **options)
