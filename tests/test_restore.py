"""nidiff denoise and nidiff restore: files of samples, mean and spread of what was observed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import untrained_model

import nidiff
from nidiff.cli import main
from nidiff.data.grid import Grid
from nidiff.data.items import load_items
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.generation.masks import as_mask
from nidiff.generation.restoration import Restoration
from nidiff.model.folder import save_model

FEW = ("--samples", "3", "--num-steps", "2")
FILES = {"restoration.json", "samples.npz", "mean.npy", "spread.npy", "observed.npy", "restored.png"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("untrained") / "model")


@pytest.fixture(scope="module")
def fields(tmp_path_factory) -> Path:
    """A model of two channels of floats, each with a scale of its own."""
    torch.manual_seed(0)
    shape = (2, 4, 6)
    grid = Grid(("lat", "lon"), channels=("t", "q"), units=("K", ""))
    gaussian = nidiff.GaussianModel(torch.zeros(shape), nidiff.power_law(shape[1:], 2.0))
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(50), nidiff.gaussian_free_field(shape[1:]))
    denoiser = nidiff.Denoiser(
        nidiff.FieldUNet(shape[1:], 2, 2, widths=(8,), layers=1, attention=()), process, "residual", gaussian=gaussian,
        scaling=Scaling((10.0, 0.5), (280.0, 1.0)),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("fields") / "model"
    save_model(denoiser, folder, grid=grid)
    return folder


@pytest.fixture
def digits(tmp_path) -> Path:
    """Three held-out digits."""
    values = nidiff.load_dataset("digits", split="test").stored(torch.tensor([1, 2, 3]))
    np.save(tmp_path / "digits.npy", values[:, 0].numpy())
    return tmp_path / "digits.npy"


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


def read(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "samples.npz", allow_pickle=False) as content:
        found = dict(content)
    return found | {name: np.load(folder / f"{name}.npy") for name in ("mean", "spread", "observed")}


# What is written ----------------------------------------------------------------------------------------------------


def test_denoising_writes_samples_their_mean_and_their_spread(run, model, digits, tmp_path):
    out = tmp_path / "out"
    code, printed, said = run("denoise", model, digits, "--noise", 40, *FEW, "--out", out, "--seed", 7, "--json")
    assert code == 0, said
    assert {path.name for path in out.iterdir()} == FILES | {"png"}
    found = read(out)
    assert found["arr_0"].dtype == np.uint8
    assert found["arr_0"].shape == (3, 3, 8, 8, 1)
    assert found["seeds"].tolist() == [[7, 8, 9], [10, 11, 12], [13, 14, 15]]
    assert found["mean"].dtype == found["spread"].dtype == np.float32
    assert np.abs(found["mean"] - found["arr_0"].mean(1)).max() <= 0.5  # of rounding
    assert np.abs(found["spread"] - found["arr_0"].astype(float).std(1, ddof=1)).max() <= 0.6
    assert np.array_equal(found["observed"][..., 0], np.load(digits))
    assert json.loads(printed) == {"out": str(out), "items": 3, "samples": 3, "same": False}
    for item, seed in ((0, 7), (2, 15)):
        with Image.open(out / "png" / f"{item:04d}-{seed:06d}.png") as picture:
            assert np.array_equal(np.asarray(picture), found["arr_0"][item, seed - 7 - 3 * item, :, :, 0])
    with Image.open(out / "png" / "0001-mean.png") as picture:
        assert np.abs(np.asarray(picture) - found["mean"][1, :, :, 0]).max() <= 0.51
    with Image.open(out / "restored.png") as sheet:
        assert sheet.width > sheet.height  # a row per item: observed, samples, mean, spread


def test_the_samples_are_those_of_the_library(run, model, digits, tmp_path):
    """x0 + noise in the units of the data is the level noise / 127.5 of the model."""
    assert run("denoise", model, digits, "--noise", 51, *FEW, "--out", tmp_path / "out")[0] == 0
    denoiser = nidiff.load_model(model)
    y = torch.from_numpy(np.load(digits)[1:2, None]).float() / 127.5 - 1
    expected = nidiff.sample(
        denoiser, (3, 1, 8, 8), sampler="ancestral", variance="beta", num_steps=2, generator=[3, 4, 5],
        start=y.expand(3, 1, 8, 8), level=denoiser.process.schedule.level_with_noise(0.4),
    )  # fmt: skip
    found = read(tmp_path / "out")["arr_0"][1].astype(float)
    assert np.abs(found - (127.5 * expected.clamp(-1, 1) + 127.5).movedim(1, -1).numpy()).max() <= 1
    # The same in the units of the model; and another amount is another result.
    for noise, same in ((0.4, True), (0.5, False)):
        out = tmp_path / str(noise)
        assert run("denoise", model, digits, "--noise", noise, "--units", "model", *FEW, "--out", out)[0] == 0
        assert np.array_equal(read(out)["arr_0"], read(tmp_path / "out")["arr_0"]) == same


def test_the_rounding_of_a_blurred_picture_counts_as_noise(run, tmp_path):
    """Without it, undoing the blur would magnify the rounding to far more than a picture has."""
    clean = nidiff.load_dataset("digits", split="test").stored(torch.tensor([1]))
    blurred = nidiff.operators.blur(1.0)(clean.float()).round().byte()
    np.save(tmp_path / "blurred.npy", blurred.numpy())
    words = ["--blur", 1, "--samples", 4, "--num-steps", 5, "--out", tmp_path / "out"]
    assert run("restore", "digits", tmp_path / "blurred.npy", *words)[0] == 0
    error = read(tmp_path / "out")["mean"][0, ..., 0] - clean[0, 0].numpy()
    assert np.sqrt(np.square(error).mean()) < 30


def test_noise_differs_between_channels_of_other_scales(run, fields, tmp_path):
    """10 K are 1 in the model, 10 of the other channel are 20: of that, the observation says nothing."""
    y = np.stack([np.full((4, 6), 300.0), np.full((4, 6), 3.0)])[None]
    np.save(tmp_path / "y.npy", y.astype(np.float32))
    words = ["--mask", "random:1", "--noise", 10, "--samples", 64, "--num-steps", 10, "--out", tmp_path / "out"]
    assert run("restore", fields, tmp_path / "y.npy", *words)[0] == 0
    mean = read(tmp_path / "out")["mean"][0]
    moved = (mean.mean((0, 1)) - [280.0, 1.0]) / [10.0, 0.5]  # y is at 2 and at 4
    assert moved[0] > 0.5
    assert abs(moved[1]) < 0.5


def test_a_mask_of_16_bits_and_data_of_another_type(run, model, digits, tmp_path):
    mask = np.zeros((8, 8), dtype=np.uint16)
    mask[:, :4] = 65535
    Image.fromarray(mask).save(tmp_path / "mask.png")
    words = [*FEW, "--out", tmp_path / "out"]
    assert run("restore", model, digits, "--mask", tmp_path / "mask.png", "--degrade", *words)[0] == 0
    assert np.isnan(read(tmp_path / "out")["observed"][0, :, 4:]).all()
    code, _, said = run("restore", model, tmp_path / "mask.png", "--mask", "left", *FEW, "--out", tmp_path / "other")
    assert code == 2
    assert "uint16" in said


def test_where_nothing_can_be_written_nothing_is_drawn(run, model, digits, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, said = run("denoise", model, digits, "--noise", 60, *FEW, "--out", tmp_path / "file" / "out")
    assert code == 2
    assert "--out" in said
    assert "denoising" not in said


def test_a_model_with_classes_is_given_one(run, digits, tmp_path):
    net = nidiff.FieldUNet((8, 8), widths=(8,), layers=1, attention=(), num_classes=10)
    torch.manual_seed(0)
    for weight in net.parameters():  # some layers are 0 before training
        torch.nn.init.normal_(weight, std=0.2)
    conditions = {"class_labels": nidiff.Condition(10, (), -1, 0.1)}
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(20), nidiff.gaussian_free_field((8, 8)))
    conditional = nidiff.Denoiser(net, process, "v", 1.0, PIXELS, conditions=conditions)
    nidiff.save_model(conditional, tmp_path / "conditional")
    found = {}
    for name, flags in {"none": [], "three": ["--classes", 3], "guided": ["--classes", 3, "--guidance", 2]}.items():
        words = ["--noise", 60, "--samples", 2, "--num-steps", 2, *flags, "--out", tmp_path / name]
        assert run("denoise", tmp_path / "conditional", digits, *words)[0] == 0
        found[name] = np.load(tmp_path / name / "samples.npz")["arr_0"]
    assert len({values.tobytes() for values in found.values()}) == 3
    y = PIXELS.to_model(torch.from_numpy(np.load(digits))[:1].float()).reshape(1, 1, 8, 8)
    level = process.schedule.level_with_noise(60 / 127.5)
    drawn = nidiff.sample(
        conditional.given(class_labels=3).guided(2.0),
        (2, 1, 8, 8),
        sampler="ancestral:variance=beta",
        num_steps=2,
        start=y.expand(2, 1, 8, 8),
        level=level,
        generator=[0, 1],
        tile=8,
    )
    assert np.abs(PIXELS.to_data(drawn)[:, 0].clamp(0, 255).numpy() - found["guided"][0, ..., 0]).max() <= 1


@pytest.mark.parametrize(
    "words",
    [
        ("denoise", "--add-noise", "0.5"),
        ("restore", "--mask", "random:0.3", "--noise", "5", "--degrade", "--method", "jacobian"),
    ],
)
def test_the_batch_does_not_change_the_bits(run, model, digits, tmp_path, words):
    command, *flags = words
    found = []
    np.save(digits, np.load(digits)[:2])
    for batch in (2, 64):
        out = tmp_path / str(batch)
        code, _, said = run(command, model, digits, *flags, *FEW, "--batch", batch, "--out", out)
        assert code == 0, said
        found.append((out / "samples.npz").read_bytes() + (out / "mean.npy").read_bytes())
    assert found[0] == found[1]
    assert run(command, model, digits, *flags, *FEW, "--seed", 100, "--out", tmp_path / "other")[0] == 0
    assert not np.array_equal(read(tmp_path / "other")["arr_0"], read(tmp_path / "2")["arr_0"])


def test_a_sampler_without_fresh_noise_says_that_it_has_one_answer(run, model, digits, tmp_path):
    flags = ("--sampler", "dpmpp_2m", *FEW)
    code, printed, said = run("denoise", model, digits, "--noise", 60, *flags, "--out", tmp_path / "a", "--json")
    assert code == 0
    assert json.loads(printed)["same"]
    assert "not draws of the posterior" in said
    assert np.load(tmp_path / "a" / "spread.npy").max() == 0
    # Variations begin with another noise each.
    code, _, said = run("denoise", model, digits, "--add-noise", 0.5, *flags, "--out", tmp_path / "b")
    assert code == 0
    assert "posterior" not in said
    assert np.load(tmp_path / "b" / "spread.npy").max() > 0


def test_the_shipped_digits_are_restored_from_a_half(run, digits, tmp_path):
    flags = ("--mask", "left", "--degrade", "--num-steps", "12", "--samples", "4", "--json")
    code, printed, said = run("restore", "digits", digits, *flags, "--out", tmp_path / "out")
    assert code == 0, said
    facts, found, truth = json.loads(printed), read(tmp_path / "out"), np.load(digits)[..., None].astype(float)
    seen, hidden = np.s_[:, :, :4], np.s_[:, :, 4:]
    assert np.isnan(found["observed"][hidden]).all()
    assert np.abs(found["observed"][seen] - truth[seen]).max() < 1e-3
    assert np.abs(found["mean"][seen] - truth[seen]).max() < 3  # what was seen is kept
    assert found["spread"][seen].max() < 3 < found["spread"][hidden].max()
    error = np.sqrt(np.square(found["mean"] - truth)[hidden].mean())
    assert facts["rmse_of_mean"] == pytest.approx(error, rel=1e-3)
    assert facts["interval"] == pytest.approx(0.6)  # between the least and the largest of four
    # Better than the mean of the data, which knows nothing of the left half.
    mean = nidiff.load_dataset("digits").stored(torch.arange(1000)).float().mean(0)[0, :, :, None].numpy()
    assert error < 0.95 * np.sqrt(np.square(mean - truth)[hidden].mean())


def test_coarse_and_blurred_data_are_met_by_the_samples(run, fields, tmp_path):
    """The samples, seen as the data were, are the data."""
    truth = np.random.default_rng(0).normal(size=(1, 4, 6, 2)) * [10, 0.5] + [280, 1]
    np.save(tmp_path / "truth.npy", truth.astype(np.float32))
    for words, operator in (
        (("--scale", "2"), nidiff.operators.pool(2)),
        (("--blur", "0.5"), nidiff.operators.blur(0.5, "periodic")),
    ):
        out, flags = tmp_path / words[0], (*words, *FEW)
        assert run("restore", fields, tmp_path / "truth.npy", *flags, "--degrade", "--out", out)[0] == 0
        found = read(out)
        samples = torch.from_numpy(found["arr_0"][0]).double().movedim(-1, 1)
        seen = operator(torch.from_numpy(truth).movedim(-1, 1)).movedim(1, -1).numpy()
        assert np.abs(operator(samples).movedim(1, -1).numpy() - seen).max() < 0.02
        assert np.abs(found["observed"] - seen).max() < 1e-3
        # Means leave something open; a blur without noise can be undone, and then nothing is.
        assert (found["spread"].max() > 0.1) == (words[0] == "--scale")
        assert (np.abs(found["mean"] - truth).max() > 0.1) == (words[0] == "--scale")
        # What was computed of the clean file is what the command takes as it is.
        np.save(tmp_path / "seen.npy", found["observed"])
        assert run("restore", fields, tmp_path / "seen.npy", *flags, "--out", tmp_path / f"{words[0]}-again")[0] == 0
        assert np.abs(read(tmp_path / f"{words[0]}-again")["mean"] - found["mean"]).max() < 0.02


def test_missing_values_are_unobserved_and_the_channels_have_units_of_their_own(run, fields, tmp_path):
    data = np.random.default_rng(0).normal(size=(2, 4, 6, 2)) * [10, 0.5] + [280, 1]
    data[0, 1, 2, 0] = data[1, :, 3:, 1] = np.nan
    np.save(tmp_path / "gaps.npy", data.astype(np.float32))
    out, flags = tmp_path / "out", ("--missing", *FEW, "--format", "netcdf")
    code, _, said = run("restore", fields, tmp_path / "gaps.npy", *flags, "--out", out)
    assert code == 0, said
    found = read(out)
    assert not (out / "png").exists()
    assert found["arr_0"].dtype == np.float32
    assert found["arr_0"].shape == (2, 3, 4, 6, 2)
    assert np.isfinite(found["arr_0"]).all()
    known = np.isfinite(data)
    assert np.array_equal(np.isfinite(found["observed"]), known)
    assert np.abs(found["mean"] - data)[known].max() < 0.05
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(out / "samples.nc", engine="h5netcdf") as table:
        assert table["t"].dims == ("sample", "lat", "lon")
        assert table["t"].attrs["units"] == "K"
        assert np.array_equal(table["q"].values.reshape(2, 3, 4, 6), found["arr_0"][..., 1])


def test_the_same_command_again_changes_nothing_and_another_is_refused(run, model, digits, tmp_path):
    out, words = tmp_path / "out", ("denoise", model, digits, "--noise", 60, *FEW, "--json")
    assert run(*words, "--out", out)[0] == 0
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    code, printed, said = run(*words, "--out", out)
    assert code == 0
    assert "before" in said
    assert json.loads(printed)["items"] == 3
    code, _, said = run(*words, "--out", out, "--seed", 1)
    assert code == 2
    assert "seed" in said
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    assert run(*words, "--out", other)[0] == 2
    assert run(*words, "--out", other / "mine.txt")[0] == 2
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before}


# What is read -------------------------------------------------------------------------------------------------------


def test_arrays_may_have_their_channels_first_last_or_left_out(tmp_path):
    items = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).byte()
    for name, array, expected in (
        ("last", items.movedim(1, -1), items),
        ("first", items, items),
        ("one, last", items[0].movedim(0, -1), items[:1]),
        ("one, first", items[0], items[:1]),
    ):
        np.save(tmp_path / f"{name}.npy", array.numpy())
        assert torch.equal(load_items(tmp_path / f"{name}.npy", (3, 4, 5)), expected), name
    for name, array in (("grey", items[0]), ("one grey", items[0, 0])):
        np.save(tmp_path / f"{name}.npy", array.numpy())
        assert torch.equal(load_items(tmp_path / f"{name}.npy", (1, 4, 5)), array.reshape(-1, 1, 4, 5)), name
    Image.fromarray(items[0].movedim(0, -1).numpy()).save(tmp_path / "colours.png")
    assert torch.equal(load_items(tmp_path / "colours.png", (3, 4, 5)), items[:1])
    assert load_items(tmp_path / "colours.png", (1, 4, 5)).shape == (1, 1, 4, 5)  # grey, for a model of grey pictures
    np.save(tmp_path / "turned.npy", items.movedim(0, -1).numpy())
    assert torch.equal(load_items(tmp_path / "turned.npy", (3, 4, 5), layout="CHWN"), items)
    with pytest.raises(nidiff.InputError, match="layout"):
        load_items(tmp_path / "turned.npy", (3, 4, 5))


def test_masks_say_what_is_observed(tmp_path):
    def mask(text, shape=(1, 5, 8)):
        return as_mask(text, shape, torch.Generator().manual_seed(0))

    assert mask("left").int().sum(1).tolist() == [4] * 5
    assert torch.equal(mask("left"), ~mask("right"))
    assert mask("top")[:3].all()
    assert not mask("top")[3:].any()
    assert torch.equal(mask("not-top"), mask("bottom"))
    assert mask("center").int().sum() == 3 * 4
    assert mask("center", (1, 8)).tolist() == [False] * 2 + [True] * 4 + [False] * 2
    assert mask("random:0.1").int().sum() == 4
    assert mask("random:0.0001").int().sum() == 1
    chosen = torch.rand(5, 8) > 0.5
    np.save(tmp_path / "m.npy", chosen.numpy())
    Image.fromarray((255 * chosen).byte().numpy()).save(tmp_path / "m.png")
    for name in ("m.npy", "m.png"):
        assert torch.equal(mask(str(tmp_path / name)), chosen)
    assert torch.equal(mask(f"not-{tmp_path / 'm.npy'}"), ~chosen)


def test_coverage_is_that_of_the_order_of_the_samples():
    """Draws of one law, whatever it is: 1 − 2k / (S + 1), and less where the samples are too narrow."""
    source = torch.Generator().manual_seed(0)
    for count, interval in ((4, 0.6), (19, 0.9), (99, 0.9)):
        values = torch.randn(400, count + 1, 1, 8, 8, generator=source).exp()
        seeds = np.zeros((400, count), dtype=np.int64)
        for scale, calibrated in ((1.0, True), (0.5, False)):
            found = Restoration(
                scale * values[:, 1:], seeds, values[:, 0], Grid.usual((1, 8, 8)), None, values[:, 0]
            ).errors()
            assert found["interval"] == pytest.approx(interval)
            assert (abs(found["coverage"] - interval) < 4 * np.sqrt(interval * (1 - interval) / 25600)) == calibrated


# What is refused ----------------------------------------------------------------------------------------------------


def hole(path: Path) -> Path:
    array = np.load(path).astype(np.float32)
    array[0, 2, 3] = np.nan
    np.save(path.with_name("hole.npy"), array)
    return path.with_name("hole.npy")


REFUSED = {
    "no noise": (("denoise",), "--noise"),
    "two noises": (("denoise", "--noise", "50", "--add-noise", "0.5"), "--add-noise"),
    "too little": (("denoise", "--noise", "0"), "--noise=0"),
    "negative": (("denoise", "--noise", "-3"), "--noise=-3"),
    "too much added": (("denoise", "--add-noise", "1e9"), "--add-noise="),
    "unknown units": (("denoise", "--noise", "50", "--units", "kelvin"), "--units='kelvin'"),
    "a start of its own": (("denoise", "--noise", "50", "--sampler", "ancestral:start=gaussian"), "--sampler="),
    "no samples": (("denoise", "--noise", "50", "--samples", "0"), "--samples=0"),
    "guidance alone": (("denoise", "--noise", "50", "--guidance", "2"), "--guidance"),
    "an unknown format": (("denoise", "--noise", "50", "--format", "gif"), "--format='gif'"),
    "no operator": (("restore",), "--mask"),
    "two operators": (("restore", "--mask", "left", "--scale", "2"), "--scale"),
    "an unknown mask": (("restore", "--mask", "lefd"), "--mask='lefd'"),
    "an empty mask": (("restore", "--mask", "{empty}"), "--mask="),
    "a mask of another shape": (("restore", "--mask", "{small}"), "--mask="),
    "a share of nothing": (("restore", "--mask", "random:0"), "--mask='random:0'"),
    "not a divisor": (("restore", "--scale", "3"), "--scale=3"),
    "full size as coarse": (("restore", "--scale", "2"), "--degrade"),
    "no blur": (("restore", "--blur", "0"), "--blur=0"),
    "missing and clean": (("restore", "--missing", "--degrade"), "--degrade"),
    "an unknown method": (("restore", "--mask", "left", "--method", "magic"), "--method='magic'"),
    "replacement of no mask": (("restore", "--scale", "2", "--degrade", "--method", "replacement"), "--method="),
}


def test_what_makes_no_sense_is_refused_in_one_sentence_and_nothing_is_written(run, model, digits, tmp_path):
    np.save(tmp_path / "empty.npy", np.zeros((8, 8), dtype=bool))
    np.save(tmp_path / "small.npy", np.ones((4, 8), dtype=bool))
    for case, ((command, *flags), words) in REFUSED.items():
        flags = [flag.format(empty=tmp_path / "empty.npy", small=tmp_path / "small.npy") for flag in flags]
        few = [] if "--samples" in flags else ["--samples", "2"]
        code, printed, said = run(command, model, digits, *flags, *few, "--num-steps", 2, "--out", tmp_path / "out")
        assert (code, printed, said.count("\n")) == (2, "", 1), case
        assert words in said, case
        assert not (tmp_path / "out").exists(), case


def test_files_that_do_not_fit_are_refused(run, model, digits, tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((2, 8, 9), dtype=np.uint8))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    np.save(tmp_path / "blank.npy", np.full((1, 8, 8), np.nan, dtype=np.float32))
    with_hole = hole(digits)
    for file, words, flags in (
        (tmp_path / "nothing.npy", "does not exist", ("--mask", "left")),
        (tmp_path / "wide.npy", "(2, 8, 9)", ("--mask", "left")),
        (tmp_path / "broken.png", "broken.png", ("--mask", "left")),
        (with_hole, "--missing", ("--scale", "2", "--degrade")),
        (with_hole, "--missing", ("--mask", "left")),  # the hole is in the left half
        (with_hole, "--degrade", ("--mask", "right", "--degrade")),
        (tmp_path / "blank.npy", "blank.npy", ("--missing",)),
    ):
        code, _, said = run("restore", model, file, *flags, *FEW, "--out", tmp_path / "out")
        assert code == 2, file
        assert words in said
    assert "--missing" in run("denoise", model, with_hole, "--noise", 50)[2]
    assert not (tmp_path / "out").exists()
    # What a mask does not see may be missing.
    assert run("restore", model, with_hole, "--mask", "right", *FEW, "--out", tmp_path / "out")[0] == 0


def test_noise_of_channels_with_other_scales_is_one_level_only_in_the_units_of_the_model(run, fields, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((1, 4, 6, 2), dtype=np.float32))
    code, _, said = run("denoise", fields, tmp_path / "x.npy", "--noise", 2, *FEW, "--out", tmp_path / "out")
    assert code == 2
    assert "--units" in said
    flags = ("--noise", 0.5, "--units", "model", *FEW)
    assert run("denoise", fields, tmp_path / "x.npy", *flags, "--out", tmp_path / "out")[0] == 0
    # An observation may have any noise: 2 K is 0.2 of the first channel.
    flags = ("--mask", "left", "--noise", 2, *FEW)
    assert run("restore", fields, tmp_path / "x.npy", *flags, "--out", tmp_path / "seen")[0] == 0
