"""nidiff denoise and nidiff restore: files of samples, mean and spread of what was observed."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import conditional_model, refused, untrained_model
from test_sample_command import run_killed

import nidiff
from nidiff.data.grid import Grid
from nidiff.data.load import load_items
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.generation.baselines import BASELINES
from nidiff.generation.loaded_model import Model, open_model, process_state
from nidiff.generation.observations import as_mask, observe, pooling
from nidiff.generation.observed import Observed
from nidiff.generation.restoration import Restoration, begin_restoration, read_facts
from nidiff.locks import claimed
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


def read(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "samples.npz", allow_pickle=False) as content:
        found = dict(content)
    return found | {name: np.load(folder / f"{name}.npy") for name in ("mean", "spread", "observed")}


# What is written ----------------------------------------------------------------------------------------------------


def test_denoising_writes_samples_their_mean_and_their_spread(run, model, digits, tmp_path):
    out = tmp_path / "out"
    code, _, said = run("denoise", model, digits, "--noise", 40, *FEW, "--out", out, "--seed", 7)
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
    for item, seed in ((0, 7), (2, 15)):
        with Image.open(out / "png" / f"{item:04d}-{seed:06d}.png") as picture:
            assert np.array_equal(np.asarray(picture), found["arr_0"][item, seed - 7 - 3 * item, :, :, 0])


def test_a_data_set_is_named_where_a_file_is_given(run, model, digits, tmp_path):
    for file in (digits, "digits:1-3", "digits"):
        assert run("denoise", model, file, "--noise", 40, *FEW, "--out", tmp_path / Path(file).name[-3:])[0] == 0
    mine, named, first = (read(tmp_path / name) for name in ("npy", "1-3", "its"))
    assert np.array_equal(mine["arr_0"], named["arr_0"])
    held_out = nidiff.load_dataset("digits", split="test").stored(torch.tensor([0]))
    assert np.array_equal(first["observed"][..., 0], held_out[:, 0].numpy())
    for wrong in ("digits:299", "digits:x", "digits:", "digit:0", "turbulence-9"):
        code, _, said = run("denoise", model, wrong, "--noise", 40, *FEW, "--out", tmp_path / "wrong")
        assert code == 2
        assert said.count("\n") == 1
        assert wrong.partition(":")[0] in said
    restoring = ("restore", model, "digits:2,5", "--mask", "left", "--degrade", *FEW)
    assert run(*restoring, "--out", tmp_path / "restored")[0] == 0
    truth = nidiff.load_dataset("digits", split="test").values[[2, 5], 0]
    seen = read(tmp_path / "restored")["observed"][..., 0]
    np.testing.assert_allclose(seen[..., :4], truth[..., :4], atol=1e-3)


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
    """10 K are 1 in the model, 10 of the other channel are 20: of that, the observation says nothing. A start has one
    level, in the units of the model."""
    y = np.stack([np.full((4, 6), 300.0), np.full((4, 6), 3.0)])[None]
    np.save(tmp_path / "y.npy", y.astype(np.float32))
    words = ["--mask", "random:1", "--noise", 10, "--samples", 64, "--num-steps", 10, "--out", tmp_path / "out"]
    assert run("restore", fields, tmp_path / "y.npy", *words)[0] == 0
    mean = read(tmp_path / "out")["mean"][0]
    moved = (mean.mean((0, 1)) - [280.0, 1.0]) / [10.0, 0.5]  # y is at 2 and at 4
    assert moved[0] > 0.5
    assert abs(moved[1]) < 0.5
    words = ["denoise", fields, tmp_path / "y.npy", "--noise", 0.5, *FEW, "--out", tmp_path / "denoised"]
    code, _, said = run(*words)
    assert (code, "--units" in said) == (2, True)
    assert run(*words, "--units", "model")[0] == 0


def test_a_model_with_classes_is_given_one(run, digits, tmp_path):
    model = conditional_model(tmp_path / "conditional")
    found = {}
    for name, flags in {"none": [], "three": ["--classes", 3], "guided": ["--classes", 3, "--guidance", 2]}.items():
        words = ["--noise", 60, "--samples", 2, "--num-steps", 2, *flags, "--out", tmp_path / name]
        assert run("denoise", model, digits, *words)[0] == 0
        found[name] = read(tmp_path / name)["arr_0"]
    assert len({values.tobytes() for values in found.values()}) == 3
    denoiser = nidiff.load_model(model)
    y = PIXELS.to_model(torch.from_numpy(np.load(digits))[:1].float()).reshape(1, 1, 8, 8)
    begin = {"start": y.expand(2, 1, 8, 8), "level": denoiser.process.schedule.level_with_noise(60 / 127.5)}
    how = {"sampler": "ancestral:variance=beta", "num_steps": 2, "generator": [0, 1], "tile": 8}
    drawn = nidiff.sample(denoiser.given(class_labels=3).guided(2.0), (2, 1, 8, 8), **begin, **how)
    assert np.abs(PIXELS.to_data(drawn)[:, 0].clamp(0, 255).numpy() - found["guided"][0, ..., 0]).max() <= 1


def test_the_batch_does_not_change_the_bits(run, model, digits, tmp_path):
    np.save(digits, np.load(digits)[:1])
    for command, *flags in (
        ("denoise", "--add-noise", "0.5"),
        ("restore", "--mask", "random:0.3", "--noise", "5", "--degrade", "--method", "jacobian"),
    ):
        for name, others in {"a": ["--batch", 2], "b": [], "other": ["--seed", 100]}.items():
            out = tmp_path / command / name
            assert run(command, model, digits, *flags, *FEW, *others, "--out", out)[0] == 0
        a, b, other = ((tmp_path / command / name / "samples.npz").read_bytes() for name in ("a", "b", "other"))
        assert (a == b, a == other) == (True, False)


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
    flags = ("--mask", "left", "--degrade", "--num-steps", "10", "--samples", "4", "--json")
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


def bicubic(model, observation, block):
    """What cubic interpolation makes of means over blocks, in the units of the data."""
    found = BASELINES["bicubic"](model, Observed.of(model, observation, block), 1, 0).mean
    return model.scaling.to_data(found.double())


def test_the_error_of_bicubic_interpolation_stands_beside_that_of_the_samples(run, fields, tmp_path):
    """4 × 6 points, in blocks of 3 and of 1, where the axes go round."""
    truth = np.random.default_rng(0).normal(size=(2, 4, 6, 2)) * [10, 0.5] + [280, 1]
    np.save(tmp_path / "truth.npy", truth.astype(np.float32))
    words = ("restore", fields, tmp_path / "truth.npy", *FEW, "--degrade", "--json")
    code, printed, said = run(*words, "--scale", 3, "--out", tmp_path / "coarse")
    assert code == 0
    error_of_bicubic = json.loads(printed)["baselines"]["bicubic"]["rmse_of_mean"]
    assert f"{error_of_bicubic:.4g}" in said
    seen = read(tmp_path / "coarse")["observed"]
    assert seen.shape == (2, 2, 2, 2)
    np.testing.assert_allclose(seen[:, 1, 0], truth[:, 3, :3].mean(1), rtol=1e-5)
    model = open_model(fields, process_state())
    coarse = pooling(model, 3)
    guess = bicubic(model, observe(model, torch.from_numpy(truth).movedim(-1, 1), coarse, 0.0, degrade=True), 3)
    error = (guess.movedim(1, -1).numpy() - truth) / [10, 0.5]  # channels of two units, in those of the model
    assert error_of_bicubic == pytest.approx(np.sqrt(np.square(error).mean()), rel=1e-4)
    assert run(*words, "--scale", 5, "--out", tmp_path / "far")[0] == 2  # blocks larger than the field


@pytest.mark.parametrize("boundary", ["reflecting", "periodic"])
def test_means_are_interpolated_as_by_pillow_but_across_an_edge_that_goes_round(boundary):
    shape, rng = (8, 12), np.random.default_rng(0)
    process = nidiff.Process("ddpm_cosine", nidiff.gaussian_free_field(shape, boundary=boundary))
    denoiser = nidiff.Denoiser(lambda x, t: 0 * x, process, "v", scaling=Scaling(10.0, 280.0))
    model = Model(Path("none"), denoiser, (1, *shape), "", Grid.usual((1, *shape)))
    means = torch.from_numpy(rng.normal(280, 10, (1, 1, 4, 6)))
    mine = bicubic(model, observe(model, means, nidiff.operators.pool(2), 0.0), 2)[0, 0]
    image = Image.fromarray(means[0, 0].float().numpy())
    theirs = np.asarray(image.resize((12, 8), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(mine[3:-3, 3:-3], theirs[3:-3, 3:-3], atol=1e-3)
    rolled = observe(model, means.roll((1, 2), (-2, -1)), nidiff.operators.pool(2), 0.0)
    same = np.allclose(bicubic(model, rolled, 2)[0, 0], mine.roll((2, 4), (-2, -1)), atol=1e-3)
    assert same == (boundary == "periodic")


def test_missing_values_are_unobserved_and_the_channels_have_units_of_their_own(run, fields, tmp_path):
    data = np.random.default_rng(0).normal(size=(2, 4, 6, 2)) * [10, 0.5] + [280, 1]
    data[0, 1, 2, 0] = data[1, :, 3:, 1] = np.nan
    np.save(tmp_path / "gaps.npy", data.astype(np.float32))
    out, flags = tmp_path / "out", ("--missing", *FEW, "--format", "netcdf")
    code, _, said = run("restore", fields, tmp_path / "gaps.npy", *flags, "--out", out)
    assert code == 0, said
    found = read(out)
    assert found["arr_0"].shape == (2, 3, 4, 6, 2)
    assert np.isfinite(found["arr_0"]).all()
    known = np.isfinite(data)
    assert np.array_equal(np.isfinite(found["observed"]), known)
    assert np.abs(found["mean"] - data)[known].max() < 0.05
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(out / "samples.nc", engine="h5netcdf") as table:
        assert table["t"].dims == ("item", "sample", "lat", "lon")
        assert table["t"].attrs["units"] == "K"
        assert np.array_equal(table["q"].values, found["arr_0"][..., 1])


def test_the_same_command_again_changes_nothing_and_another_is_refused(run, model, digits, tmp_path):
    out, words = tmp_path / "out", ("denoise", model, digits, "--noise", 60, *FEW, "--json")
    assert run(*words, "--out", out)[0] == 0
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    code, printed, _ = run(*words, "--out", out)
    assert (code, json.loads(printed)["items"]) == (0, 3)
    code, _, said = run(*words, "--out", out, "--seed", 1)
    assert (code, "seed" in said) == (2, True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    assert run(*words, "--out", other)[0] == 2
    assert run(*words, "--out", other / "mine.txt")[0] == 2
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before}


@pytest.fixture
def restored(run, model, digits, tmp_path):
    """A restoration, and the words that made it."""
    words = ["restore", model, digits, "--mask", "left", "--degrade", *FEW, "--format", "zarr", "--out", tmp_path / "r"]
    assert run(*words)[0] == 0
    return tmp_path / "r", words


def test_a_damaged_restoration_is_named_by_the_same_command_and_by_verify(run, restored):
    out, words = restored
    code, printed, _ = run("verify", out)
    assert (code, printed) == (0, f"{out}: restorations 1\n")
    files = [file for file in out.rglob("*") if file.is_file() and file.parent.name != "png"]
    files.append(out / "png" / "0001-000004.png")
    assert len(files) > 10
    (out / "notes.txt").write_text("the user's")  # which does not matter
    for number, file in enumerate(files):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        damage = (bytes(flipped), b"", None)[0 if file.name == "restoration.json" else number % 3]
        file.unlink() if damage is None else file.write_bytes(damage)
        for command in (["verify", out], words):
            code, printed, said = run(*command)
            assert (code, printed, said.count("\n"), file.name in said) == (2, "", 1, True), (file, damage, said)
        file.write_bytes(content)
    assert run(*words)[0] == run("verify", out)[0] == 0


def test_an_edited_score_is_not_repeated(run, restored):
    out, words = restored
    facts = json.loads((out / "restoration.json").read_text())
    facts["found"]["rmse_of_mean"] = 0.001
    (out / "restoration.json").write_text(json.dumps(facts))
    code, printed, said = run(*words)
    assert (code, printed, "0.001" in said, "checksum" in said) == (2, "", False, True)


def test_a_restoration_of_version_0_2_is_said_to_have_no_checksums(run, restored):
    out, words = restored
    facts = json.loads((out / "restoration.json").read_text())
    (out / "restoration.json").write_text(json.dumps({"task": facts["task"], "found": facts["found"]}))
    code, printed, _ = run("verify", out)
    assert (code, "without checksums" in printed) == (0, True)
    code, _, said = run(*words)
    assert (code, "--out" in said, "0.2" in said) == (2, True, True)


def test_a_restoration_that_was_stopped_is_written_again_and_another_task_refused(run, restored):
    out, words = restored
    whole = contents(out)
    begin_restoration(out, read_facts(out)["task"])
    (out / "mean.npy").unlink()
    assert run("verify", out)[0] == 0  # it has just begun
    assert run(*words, "--seed", 5)[0] == 2
    assert run(*words)[0] == 0
    assert contents(out) == whole


@pytest.mark.slow
def test_killed_again_and_again_it_leaves_the_same_files(run, restored):
    out, words = restored
    whole = contents(out)
    shutil.rmtree(out)
    run_killed([[str(word) for word in words]])
    assert contents(out) == whole


def contents(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_restoration_leaves_the_users_files_alone_and_waits_for_nobody(run, model, digits, tmp_path):
    out, words = tmp_path / "uo", ["denoise", model, digits, "--noise", 60, *FEW, "--out", tmp_path / "uo"]
    for name in (".tmp-uo", ".replaced-uo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years")
    with claimed(out):
        code, printed, said = run(*words)
        assert (code, printed, f"in use by process {os.getpid()}" in said) == (2, "", True)
    assert not out.exists()
    assert run(*words)[0] == 0
    assert {(tmp_path / name / "thesis.tex").read_text() for name in (".tmp-uo", ".replaced-uo")} == {"years"}


def test_a_link_in_a_restoration_that_was_stopped_leads_to_no_file_of_ours(run, restored, tmp_path):
    out, words = restored
    facts = read_facts(out)
    shutil.rmtree(out / "png")
    (tmp_path / "precious").mkdir()
    (out / "png").symlink_to(tmp_path / "precious")
    begin_restoration(out, facts["task"])
    assert run(*words)[0] == 2
    assert not any((tmp_path / "precious").iterdir())


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
    Image.fromarray(65535 * chosen.numpy().astype(np.uint16)).save(tmp_path / "deep.png")
    for name in ("m.npy", "m.png", "deep.png"):
        assert torch.equal(mask(str(tmp_path / name)), chosen)
    assert torch.equal(mask(f"not-{tmp_path / 'm.npy'}"), ~chosen)
    np.save(tmp_path / "empty.npy", np.zeros((5, 8), dtype=bool))
    np.save(tmp_path / "small.npy", np.ones((4, 8), dtype=bool))
    for text in ("lefd", "random:0", "random:x", str(tmp_path / "empty.npy"), str(tmp_path / "small.npy")):
        with refused("mask"):
            mask(text)


def test_coverage_is_that_of_the_order_of_the_samples():
    """Draws of one law, whatever it is: 1 − 2k / (S + 1), and less where the samples are too narrow."""
    source = torch.Generator().manual_seed(0)
    for count, interval in ((4, 0.6), (19, 0.9)):
        values = torch.randn(400, count + 1, 1, 8, 8, generator=source).exp()
        seeds = np.zeros((400, count), dtype=np.int64)
        for scale, calibrated in ((1.0, True), (0.5, False)):
            found = Restoration(
                scale * values[:, 1:], seeds, values[:, 0], Grid.usual((1, 8, 8)), None, values[:, 0]
            ).errors()
            assert found["interval"] == pytest.approx(interval)
            assert (abs(found["coverage"] - interval) < 4 * np.sqrt(interval * (1 - interval) / 25600)) == calibrated


# What is refused ----------------------------------------------------------------------------------------------------


REFUSED = {
    ("denoise",): "--noise",
    ("denoise", "--noise", "50", "--add-noise", "0.5"): "--add-noise",
    ("denoise", "--noise", "50", "--units", "kelvin"): "--units='kelvin'",
    ("denoise", "--noise", "50", "--sampler", "ancestral:start=gaussian"): "--sampler=",
    ("denoise", "--noise", "50", "--guidance", "2"): "--guidance",
    ("restore",): "--mask",
    ("restore", "--mask", "left", "--scale", "2"): "--scale",
    ("restore", "--scale", "9"): "--scale=9",
    ("restore", "--blur", "0"): "--blur=0",
    ("restore", "--missing", "--degrade"): "--degrade",
    ("restore", "--mask", "left", "--method", "magic"): "--method='magic'",
}


def test_what_makes_no_sense_is_refused_in_one_sentence_and_nothing_is_written(run, model, digits, tmp_path):
    for (command, *flags), words in REFUSED.items():
        code, printed, said = run(command, model, digits, *flags, *FEW, "--out", tmp_path / "out")
        assert (code, printed, said.count("\n"), words in said) == (2, "", 1, True), (flags, said)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / "file"):
        code, _, said = run("denoise", model, digits, "--noise", 60, *FEW, "--out", out)
        assert (code, "--out" in said, "denoising" in said) == (2, True, False)  # and nothing is drawn
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_fit_are_refused(run, model, digits, tmp_path):
    with_hole = tmp_path / "hole.npy"
    array = np.load(digits).astype(np.float32)
    array[0, 2, 3] = np.nan
    np.save(with_hole, array)
    np.save(tmp_path / "wide.npy", np.zeros((2, 8, 9), dtype=np.uint8))
    np.save(tmp_path / "deep.npy", np.zeros((2, 8, 8), dtype=np.uint16))
    np.save(tmp_path / "blank.npy", np.full((1, 8, 8), np.nan, dtype=np.float32))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for file, words, flags in (
        (tmp_path / "nothing.npy", "does not exist", ("--mask", "left")),
        (tmp_path / "wide.npy", "(2, 8, 9)", ("--mask", "left")),
        (tmp_path / "deep.npy", "uint16", ("--mask", "left")),
        (tmp_path / "broken.png", "broken.png", ("--mask", "left")),
        (digits, "(3, 8, 8)", ("--scale", "2")),  # which is not coarse
        (with_hole, "--missing", ("--scale", "2", "--degrade")),
        (with_hole, "--missing", ("--mask", "left")),  # the hole is in the left half
        (with_hole, "--degrade", ("--mask", "right", "--degrade")),
        (tmp_path / "blank.npy", "blank.npy", ("--missing",)),
    ):
        code, _, said = run("restore", model, file, *flags, *FEW, "--out", tmp_path / "out")
        assert (code, words in said) == (2, True), (file, said)
    assert "--missing" in run("denoise", model, with_hole, "--noise", 50)[2]
    assert not (tmp_path / "out").exists()
    # What a mask does not see may be missing.
    assert run("restore", model, with_hole, "--mask", "right", *FEW, "--out", tmp_path / "out")[0] == 0
