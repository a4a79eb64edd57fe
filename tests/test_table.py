"""``nidiff evaluate`` and ``nidiff table``: numbers to trust, each computed once, and where they come from."""

import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused, untrained_model, write_run

import nidiff
from nidiff.cli import main
from nidiff.data.sources import spread_rows
from nidiff.errors import InputError
from nidiff.evaluation.evaluate import evaluate_cell
from nidiff.evaluation.evaluator import Evaluator, open_evaluator
from nidiff.evaluation.features import load_features
from nidiff.evaluation.metrics import METRICS, Metric, measure
from nidiff.evaluation.results import Measured, Result, known_results, read_results, remember
from nidiff.evaluation.samples import SampleSet
from nidiff.evaluation.table import csv_text, markdown
from nidiff.locks import claimed
from nidiff.report.quality import quality_figure
from nidiff.sealed import seal
from nidiff.testing.problems import normal
from nidiff.training.experiment import Experiment

NAMES = ["FD-pixels", "KID-pixels", "precision", "recall", "spectrum"]
FAST = ("--features", "pixels", "--bootstrap", "3", "--num-real", "50")
FLAGS = (*FAST, "--data", "digits", "--seeds", "0-29", "--batch", "32")
CELL = ("--num-steps", "3", "--sampler", "ddim:eta=0.5", "--json")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("untrained") / "noise")


@pytest.fixture
def model(untrained, tmp_path) -> Path:
    return shutil.copytree(untrained, tmp_path / "noise")


@pytest.fixture
def nidiff_run(capsys):
    def run(*arguments):
        code = main([str(word) for word in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def measured(untrained, tmp_path_factory) -> Path:
    """A model with the samples and the result of one cell."""
    folder = shutil.copytree(untrained, tmp_path_factory.mktemp("measured") / "noise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIDIFF_DATA", str(folder.parent / "cache"))
        assert main(["evaluate", str(folder), *FLAGS, *CELL]) == 0
    return folder


@pytest.fixture
def known(measured, tmp_path) -> Path:
    return shutil.copytree(measured, tmp_path / "known")


# evaluate --------------------------------------------------------------------------------------------------------


def test_real_images_are_as_good_as_real_and_noise_is_not(nidiff_run, tmp_path):
    real, held_out = (nidiff.load_dataset("digits", split=split).values[:300] for split in ("train", "test"))
    noise = torch.randint(256, real.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, pixels in {"same": real, "held_out": held_out, "noise": noise}.items():
        np.savez(tmp_path / f"{name}.npz", pixels.movedim(1, -1).numpy())
        flags = ("--data", tmp_path / "same.npz", "--features", "pixels", "--bootstrap", "0", "--json")
        code, out, _ = nidiff_run("evaluate", tmp_path / f"{name}.npz", *flags)
        assert code == 0
        found[name] = {metric: pair["value"] for metric, pair in json.loads(out)["metrics"].items()}
    assert found["same"]["FD-pixels"] < 1e-8
    assert found["same"]["precision"] == found["same"]["recall"] == 1
    assert found["same"]["spectrum"] == 0
    assert found["same"]["KID-pixels"] < 0  # unbiased: it leaves out each image's pair with itself
    for name in ("FD-pixels", "KID-pixels", "spectrum"):
        assert found["held_out"][name] < found["noise"][name] / 5
    assert found["held_out"]["precision"] > 0.6
    assert found["noise"]["precision"] == found["noise"]["recall"] == 0


def test_a_result_says_what_it_depends_on_and_is_neither_drawn_nor_measured_again(nidiff_run, known):
    (result,) = json.loads((known / "metrics.json").read_text())
    assert list(result["metrics"]) == NAMES
    assert (result["sampler"], result["num_steps"], result["options"]) == ("ddim", 3, {"eta": 0.5})
    provenance = result["provenance"]
    assert (provenance["num_real"], provenance["num_generated"], provenance["k"]) == (50, 30, 3)
    assert (result["seeds"], provenance["quantisation"], provenance["features"]) == ("0-29", "uint8", "pixels")
    assert len(provenance["model_sha256"]) == len(provenance["real_sha256"]) == 64
    shutil.rmtree(known / "generated")
    assert json.loads(nidiff_run("evaluate", known, *FLAGS, *CELL)[1]) == result | {"run": "known", "sha256": ANY}
    assert not (known / "generated").exists()
    other = json.loads(nidiff_run("evaluate", known, *FLAGS, *CELL, "--num-real", "40")[1])  # another question
    assert other["metrics"]["FD-pixels"] != result["metrics"]["FD-pixels"]
    assert len(json.loads((known / "metrics.json").read_text())) == 2


def test_held_out_images_stand_beside_the_samples(nidiff_run, known):
    """As many real images in place of samples, by the same metrics; where none are held out, there are none."""
    (result,) = json.loads((known / "metrics.json").read_text())
    floor = result["details"]["floor"]
    assert [*floor] == NAMES
    assert result["details"]["floor_of"] == "30 held-out images"
    real, held_out = (nidiff.load_dataset("digits", split=split).values for split in ("train", "test"))
    points = [pixels[spread_rows(len(pixels), n)].flatten(1) / 127.5 - 1 for pixels, n in ((real, 50), (held_out, 30))]
    assert floor["FD-pixels"]["value"] == pytest.approx(nidiff.metrics.frechet_distance(*points), rel=1e-5)
    assert floor["FD-pixels"]["value"] < result["metrics"]["FD-pixels"]["value"]
    assert "30 held-out images in place of samples: FD-pixels" in nidiff_run("evaluate", known, *FLAGS, *CELL[:-1])[1]
    other = json.loads(nidiff_run("evaluate", known, *FLAGS, *CELL, "--split", "test")[1])
    assert "details" not in other


def test_held_out_images_are_measured_once_for_a_run(nidiff_run, known, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "nidiff.evaluation.evaluator.measure", lambda *args, **options: calls.append(1) or measure(*args, **options)
    )
    before = json.loads((known / "metrics.json").read_text())[0]["details"]
    for num_real, count in (("50", 1), ("40", 3)):  # the control: to other real images they are compared anew
        cell = (*FLAGS, "--num-real", num_real, "--sampler", "ddim", "--num-steps", "2", "--json")
        details = json.loads(nidiff_run("evaluate", known, *cell)[1])["details"]
        assert (details == before, len(calls)) == (num_real == "50", count)


@pytest.mark.parametrize("labels", [None, [1, 2, 3] * 10])
def test_held_out_images_of_other_classes_or_of_none_known_never_stand_beside_the_samples(labels):
    images = nidiff.load_dataset("digits", labels="data")
    held_out = replace(images.take(torch.arange(30)), labels=labels if labels is None else torch.tensor(labels))
    features = load_features("pixels")
    evaluator = replace(Evaluator(images, "digits", features, bootstrap=0), other=held_out)
    asked, some = Result("a", "ddim", 3), images.values[:5]
    assert not evaluator.of_classes([7]).evaluate(asked, some).details
    assert ("floor" in evaluator.of_classes([1]).evaluate(asked, some).details) is (labels is not None)  # the control


def test_the_precision_of_the_network_and_that_of_the_samples_are_two_columns(nidiff_run, known, monkeypatch, tmp_path):
    monkeypatch.setattr("nidiff.generation.job.has_bf16", lambda device: True)
    nidiff_run(
        "table", known, *FLAGS, "--num-steps", "3", "--samplers", "ddim", "--precision", "bf16", "--out", tmp_path
    )
    (row,) = csv.DictReader((tmp_path / "table.csv").read_text().splitlines())
    assert (row["drawn_in"], 0 <= float(row["precision"]) <= 1) == ("bf16", True)


def test_sampled_first_and_evaluated_from_python_it_is_the_same(nidiff_run, model, measured):
    nidiff_run("sample", model, "--seeds", "0-29", *CELL[:4])
    (drawn,) = (model / "generated").glob("ddim-eta=0.5-3-*/samples.npz")
    before, settings = drawn.stat().st_mtime_ns, {"features": "pixels", "bootstrap": 3, "num_real": 50}
    cell = {"sampler": "ddim:eta=0.5", "num_steps": 3, "seeds": range(30)}
    pixels = nidiff.load_dataset("digits").values
    found = evaluate_cell(model, pixels, **cell, **settings)
    (expected,) = known_results(measured)
    assert found.metrics == expected.metrics
    assert drawn.stat().st_mtime_ns == before
    assert (measured / drawn.relative_to(model)).read_bytes() == drawn.read_bytes()
    bench = open_evaluator(model, pixels, **settings)
    assert known_results(model) == [found] == [evaluate_cell(str(model), bench, **cell)]
    with refused("seeds"):
        evaluate_cell(model, pixels, **cell, **settings, k=40)


def test_results_of_version_02_are_read_and_what_they_lack_is_measured_without_drawing(nidiff_run, known):
    """It wrote "spectrum error", of another definition, in place of "spectrum"."""
    (first,) = json.loads((known / "metrics.json").read_text())
    old = {key: value for key, value in first.items() if key != "sha256"}
    old["metrics"] = {name: value for name, value in first["metrics"].items() if name != "spectrum"}
    old["metrics"]["spectrum error"] = {"value": 0.3, "error": 0.1, "higher_is_better": False}
    old["provenance"] = {**first["provenance"], "nidiff": "0.2.0"}
    (known / "metrics.json").write_text(json.dumps([seal(old)]))
    (result,) = read_results(known / "metrics.json")
    assert result.metrics["spectrum error"] == Measured(0.3, 0.1)
    (drawn,) = (known / "generated").glob("*/samples.npz")
    before = drawn.stat().st_mtime_ns
    assert json.loads(nidiff_run("evaluate", known, *FLAGS, *CELL)[1])["metrics"] == first["metrics"]
    assert drawn.stat().st_mtime_ns == before
    (again,) = read_results(known / "metrics.json")  # in the place of the old one
    assert again.metrics.keys() == first["metrics"].keys()
    result = json.loads((known / "metrics.json").read_text())
    result[0]["metrics"]["recall"]["value"] = 0.123
    (known / "metrics.json").write_text(json.dumps(result))
    code, _, log = nidiff_run("evaluate", known, *FLAGS, *CELL)
    assert (code, "metrics.json" in log, "checksum" in log) == (2, True, True)  # one that was changed is refused


def test_the_errors_say_how_much_other_samples_would_differ():
    """Their mean over many sets is the spread of the metric over those sets, within the half."""
    pixels = torch.randint(256, (500, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    real = SampleSet(pixels, normal(500, 3, seed=100).float())
    sets = [normal(200, 3, seed=seed).float() + 0.5 for seed in range(20)]
    found = [measure(real, SampleSet(pixels[:200], one), bootstrap=10, keys=["frechet", "kernel"]) for one in sets]
    for name in ("FD-features", "KID-features"):
        spread = torch.tensor([one[name].value for one in found]).std().item()
        error = sum(one[name].error for one in found) / len(found)
        assert 0.5 * spread < error < 1.5 * spread, name


def test_a_metric_that_is_not_finite_is_kept_as_null(tmp_path):
    metrics = {"a": Measured(float("nan"), float("inf")), "b": Measured(1.5, None)}
    remember(tmp_path, Result("r", "ddim", num_steps=3, metrics=metrics))
    (found,) = read_results(tmp_path / "metrics.json")
    assert found.metrics == {"a": Measured(None, None), "b": Measured(1.5, None)}
    (tmp_path / "metrics.json").write_text((tmp_path / "metrics.json").read_text().replace("null", "NaN", 1))
    with pytest.raises(InputError, match="NaN"):
        read_results(tmp_path / "metrics.json")


# A metric of one's own -------------------------------------------------------------------------------------------


def brightness(real, generated):
    return generated.items.double().mean().item()


def test_a_metric_of_ones_own_is_measured_tabled_plotted_reported_and_read_back(
    nidiff_run, model, tmp_path, monkeypatch, with_report
):
    run, other = tmp_path / "run", untrained_model(tmp_path / "other", num_levels=30)
    shutil.copytree(model, run / "model")
    write_run(run, Experiment())
    out = tmp_path / "t"
    flags = ("table", run, other, *FLAGS, "--bootstrap", "40", "--samplers", "ddim", "--num-steps", "3", "--out", out)
    assert "brightness" not in nidiff_run(*flags)[1]
    drawn = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/generated/*/samples.npz")}
    monkeypatch.setitem(METRICS, "brightness", Metric(brightness, higher_is_better=True))
    assert "brightness" in nidiff_run(*flags)[1]  # though the results without it are known
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn
    results = read_results(out / "table.json")
    for result, path in zip(results, sorted(drawn, reverse=True), strict=True):
        with np.load(path) as samples:
            means = samples["arr_0"].astype(float).mean((1, 2, 3))
        value, error, higher_is_better, _ = result.metrics["brightness"]
        assert value == pytest.approx(means.mean(), rel=1e-12)
        assert error == pytest.approx(means.std() / len(means) ** 0.5, rel=0.35)
        assert higher_is_better
    monkeypatch.undo()  # the direction is part of the result: a process without the metric shows it too
    table = markdown(read_results(out / "table.json"))
    assert table == (out / "table.md").read_text()
    assert "brightness ↑" in table
    rows = [line.split(" | ")[8] for line in table.splitlines()[2:4]]
    values = [result.metrics["brightness"].value for result in results]
    assert [row.startswith("**") for row in rows] == [value == max(values) for value in values]
    assert "brightness" in " ".join(axes.get_title() for axes in quality_figure(results).axes)
    assert "brightness" in (run / "report.html").read_text()
    assert len(read_results(run / "metrics.json")) == 1  # the new answer is in the place of the old


def test_a_resample_has_everything_of_the_items_it_drew():
    pixels = torch.randint(256, (20, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = SampleSet(pixels, pixels.flatten(1).float(), k=2)
    rows, again = torch.tensor([3, 3, 19, 0, 7]), torch.tensor([4, 1, 1])
    for drawn, chosen in ((images.resampled(rows), rows), (images.resampled(rows).resampled(again), rows[again])):
        fresh = SampleSet(pixels[chosen], pixels[chosen].flatten(1).float())
        assert (len(drawn), drawn.k) == (len(chosen), 2)
        assert torch.equal(drawn.items, fresh.items)
        torch.testing.assert_close(drawn.powers((0, 1)), fresh.powers((0, 1)))
        assert all(torch.equal(a, b) for a, b in zip(drawn.gaussian(), fresh.gaussian(), strict=True))


# table -----------------------------------------------------------------------------------------------------------


def test_the_table_is_filled_in_every_format_and_only_once(nidiff_run, model, tmp_path):
    other = untrained_model(tmp_path / "other", num_levels=30)
    flags = ("table", model, other, *FLAGS, "--seeds", "0-5", "--samplers", "ancestral", "--num-steps", "6", "3")
    code, text, _ = nidiff_run(*flags, "--out", tmp_path / "table")
    assert code == 0
    results = json.loads((tmp_path / "table" / "table.json").read_text())
    cells = [(r["run"], r["sampler"], r["num_steps"]) for r in results]
    assert cells == [(m, "ancestral", n) for m in ("noise", "other") for n in (6, 3)]
    assert all(name in text for name in NAMES)
    with (tmp_path / "table" / "table.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    for name in ("table.md", "table.tex"):
        assert (tmp_path / "table" / name).stat().st_size > 200
    with Image.open(tmp_path / "table" / "table.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 5

    # Stopped after some cells, the same command goes on: here one cell of four is lost.
    for folder in (model, other):
        shutil.rmtree(folder / "generated")
    known = json.loads((model / "metrics.json").read_text())
    (model / "metrics.json").write_text(json.dumps(known[1:]))
    code, again, _ = nidiff_run(*flags, "--out", tmp_path / "table")
    assert code == 0
    assert again == text
    assert [path.name.rpartition("-")[0] for path in (model / "generated").iterdir()] == ["ancestral-6"]
    assert not (other / "generated").exists()


def test_a_table_that_is_not_ours_is_left_alone(nidiff_run, model, tmp_path):
    out = tmp_path / "mine"
    flags = ("table", model, *FLAGS, "--samplers", "ddim", "--num-steps", "3", "--out", out)
    for name, content in {"table.md": "mine", "table.json": '{"mine": 1}', "table.csv": "1,2"}.items():
        out.mkdir()
        (out / name).write_text(content)
        code, _, log = nidiff_run(*flags)
        assert code == 2
        assert name in log
        assert {path.name: path.read_text() for path in out.iterdir()} == {name: content}
        shutil.rmtree(out)
    assert not (model / "generated").exists()
    with claimed(out):
        pid = os.getpid()
        if (child := os.fork()) == 0:
            code, _, log = nidiff_run(*flags)
            os._exit(code == 2 and f"is in use by process {pid}" in log)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert nidiff_run(*flags)[0] == nidiff_run(*flags)[0] == 0
    assert sorted(path.suffix for path in out.iterdir()) == [".csv", ".json", ".md", ".png", ".tex"]


def test_another_model_in_the_same_run_is_measured_anew_and_alone(nidiff_run, model, tmp_path):
    """A run that was trained further: what is known of the old weights is kept, and shown no more."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    write_run(run, Experiment())
    first = json.loads(nidiff_run("evaluate", run, *FLAGS, "--num-steps", "3", "--json")[1])
    shutil.rmtree(run / "model")
    untrained_model(run / "model", num_levels=30)
    write_run(run, Experiment())
    second = json.loads(nidiff_run("evaluate", run / "model", *FLAGS, "--num-steps", "3", "--json")[1])
    assert first["metrics"] != second["metrics"]
    assert [one.to_json() for one in read_results(run / "metrics.json")] == [first, second]
    assert [one.to_json() for one in known_results(run)] == [second]


def test_results_of_many_at_once_are_all_kept(tmp_path):
    children = []
    for child in range(4):
        if (pid := os.fork()) == 0:
            for steps in range(5):
                remember(tmp_path, Result("a", "ddim", num_steps=10 * child + steps))
            os._exit(0)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    assert len(read_results(tmp_path / "metrics.json")) == 20


# Bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_exits_with_2_before_anything_is_drawn(nidiff_run, model, tmp_path):
    np.savez(tmp_path / "large.npz", np.zeros((20, 16, 16, 3), dtype=np.uint8))
    np.savez(tmp_path / "grey.npz", np.full((20, 8, 8, 1), 128, dtype=np.uint8))
    twin, out = shutil.copytree(model, tmp_path / "twin" / "noise"), ("--out", tmp_path / "t")
    for words, sentence in (
        (("evaluate", model, *FLAGS, "--seeds", "0-2"), "--seeds"),
        (("evaluate", model, *FLAGS, "--num-real", "3"), "--data"),
        (("evaluate", model, *FLAGS, "--bootstrap", "1"), "--bootstrap"),
        (("table", model, *FLAGS, "--num-steps", "41", *out), "--num-steps"),
        (("table", model, twin, *FLAGS, "--num-steps", "3", *out), "different names"),
        (("evaluate", model, *FLAGS, "--features", "vgg"), "vgg"),
        (("evaluate", model, *FLAGS, "--data", tmp_path / "large.npz", "--num-real", "20"), "(3, 16, 16)"),
        (("evaluate", model, *FAST), "--data"),  # a model folder does not say what it was trained on
        (("evaluate", tmp_path / "grey.npz", "--data", "digits", *FAST), "constant"),
        (("evaluate", tmp_path / "grey.npz", "--data", "digits", *FAST, "--num-steps", "3"), "flags of drawing"),
        (("evaluate", "hf:digits", "--data", "digits", *FAST), "'hf:digits' does not exist"),  # not the data set
    ):
        code, result, log = nidiff_run(*words)
        assert (code, result, log.count("\n")) == (2, "", 1), (words, log)
        assert sentence in log
        assert not (model / "generated").exists()
        assert not (tmp_path / "t").exists()


def test_a_spreadsheet_computes_nothing_that_a_name_says():
    names = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)"]
    results = [Result(name, "ddim", 3, metrics={"m": Measured(-1.0, None)}) for name in names]
    rows = [*csv.DictReader(csv_text(results).splitlines())]
    assert [row["run"] for row in rows] == [f"'{name}" for name in names]
    assert {row["m"] for row in rows} == {"-1.0"}
