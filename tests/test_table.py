"""``nidiff evaluate`` and ``nidiff table``: numbers to trust, each computed once, and where they come from."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused, untrained_model, write_run

import nidiff
from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.evaluation.evaluate import evaluate_cell
from nidiff.evaluation.evaluator import open_evaluator
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


def digits_file(path: Path, split: str, rows: slice = slice(None)) -> Path:
    pixels = nidiff.load_dataset("digits", split=split).values[rows]
    np.savez(path, pixels.movedim(1, -1).numpy())
    return path


# evaluate --------------------------------------------------------------------------------------------------------


def test_real_images_are_as_good_as_real_and_noise_is_not(nidiff_run, tmp_path):
    flags = ("--data", "digits", "--features", "pixels", "--bootstrap", "0", "--json")
    same = digits_file(tmp_path / "same.npz", "train")
    held_out = digits_file(tmp_path / "held_out.npz", "test")
    noise = np.random.default_rng(0).integers(0, 256, (299, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", noise)
    found = {}
    for file in (same, held_out, tmp_path / "noise.npz"):
        code, out, _ = nidiff_run("evaluate", file, *flags)
        assert code == 0
        found[file.stem] = {name: pair["value"] for name, pair in json.loads(out)["metrics"].items()}
    assert found["same"]["FD-pixels"] < 1e-8
    assert found["same"]["precision"] == found["same"]["recall"] == 1
    assert found["same"]["spectrum"] == 0
    assert found["same"]["KID-pixels"] < 0  # unbiased: it leaves out each image's pair with itself
    for name in ("FD-pixels", "KID-pixels", "spectrum"):
        assert found["held_out"][name] < found["noise"][name] / 5
    assert found["held_out"]["precision"] > 0.8
    assert found["noise"]["precision"] == found["noise"]["recall"] == 0


def test_a_result_says_what_it_depends_on(nidiff_run, model):
    code, out, _ = nidiff_run("evaluate", model, *FLAGS, "--num-steps", "3", "--sampler", "ddim:eta=0.5", "--json")
    assert code == 0
    result = json.loads(out)
    assert list(result["metrics"]) == NAMES
    assert (result["sampler"], result["num_steps"], result["options"]) == ("ddim", 3, {"eta": 0.5})
    assert result["seeds"] == "0-29"
    provenance = result["provenance"]
    assert (provenance["num_real"], provenance["num_generated"], provenance["k"]) == (50, 30, 3)
    assert provenance["quantisation"] == "uint8"
    assert provenance["features"] == "pixels"
    assert provenance["nidiff"] == nidiff.__version__
    assert len(provenance["model_sha256"]) == len(provenance["real_sha256"]) == 64
    assert json.loads((model / "metrics.json").read_text()) == [result]


def test_what_was_drawn_and_measured_is_not_drawn_or_measured_again(nidiff_run, model):
    flags = ("evaluate", model, *FLAGS, "--num-steps", "3", "--json")
    first = json.loads(nidiff_run(*flags)[1])
    shutil.rmtree(model / "generated")
    assert json.loads(nidiff_run(*flags)[1]) == first
    assert not (model / "generated").exists()
    other = json.loads(nidiff_run(*flags, "--num-real", "40")[1])  # another question
    assert other["metrics"]["FD-pixels"] != first["metrics"]["FD-pixels"]
    assert len(json.loads((model / "metrics.json").read_text())) == 2


def test_sampled_first_and_evaluated_then_is_the_same(nidiff_run, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    nidiff_run("sample", model, "--seeds", "0-29", "--num-steps", "3")
    (drawn,) = (model / "generated").glob("dpmpp_2m-3-*/samples.npz")
    before = drawn.stat().st_mtime_ns
    results = [json.loads(nidiff_run("evaluate", m, *FLAGS, "--num-steps", "3", "--json")[1]) for m in (model, other)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert drawn.stat().st_mtime_ns == before
    assert (other / drawn.relative_to(model)).read_bytes() == drawn.read_bytes()


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


def test_a_cell_from_python_is_that_of_the_command(nidiff_run, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    asked = ("--num-steps", "3", "--sampler", "ddim:eta=0.5", "--json")
    expected = Result.from_json(json.loads(nidiff_run("evaluate", other, *FLAGS, *asked)[1]))
    pixels = nidiff.load_dataset("digits").values
    settings = {"features": "pixels", "bootstrap": 3, "num_real": 50}
    cell = {"sampler": "ddim:eta=0.5", "num_steps": 3, "seeds": range(30)}
    found = evaluate_cell(model, pixels, **cell, **settings)
    assert found.metrics == expected.metrics
    assert (found.seeds, found.num_steps, found.options) == ("0-29", 3, {"eta": 0.5})
    bench = open_evaluator(model, pixels, **settings)
    assert known_results(model) == [found] == [evaluate_cell(str(model), bench, **cell)]
    with refused("seeds"):
        evaluate_cell(model, pixels, **cell, **settings, k=40)


def test_results_of_version_02_are_read_and_what_they_lack_is_measured_without_drawing(nidiff_run, model):
    """It wrote "spectrum error", of another definition, in place of "spectrum"."""
    flags = ("evaluate", model, *FLAGS, "--num-steps", "3", "--json")
    first = json.loads(nidiff_run(*flags)[1])
    old = {key: value for key, value in first.items() if key != "sha256"}
    old["metrics"] = {name: value for name, value in first["metrics"].items() if name != "spectrum"}
    old["metrics"]["spectrum error"] = {"value": 0.3, "error": 0.1, "higher_is_better": False}
    old["provenance"] = {**first["provenance"], "nidiff": "0.2.0"}
    (model / "metrics.json").write_text(json.dumps([seal(old)]))
    (known,) = read_results(model / "metrics.json")
    assert known.metrics["spectrum error"] == Measured(0.3, 0.1)
    (drawn,) = (model / "generated").glob("*/samples.npz")
    before = drawn.stat().st_mtime_ns
    assert json.loads(nidiff_run(*flags)[1]) == first
    assert drawn.stat().st_mtime_ns == before
    assert [one.to_json() for one in read_results(model / "metrics.json")] == [first]  # in the place of the old one


def test_results_of_version_01_are_refused_with_the_version_that_reads_them(nidiff_run, model):
    (model / "metrics.json").write_text('[{"run": "a", "sampler": "ddim", "steps": 3, "metrics": {}}]')
    code, _, log = nidiff_run("evaluate", model, *FLAGS, "--num-steps", "3")
    assert code == 2
    assert "0.2" in log


def test_a_result_that_was_changed_is_refused(nidiff_run, model):
    flags = ("evaluate", model, *FLAGS, "--num-steps", "3", "--json")
    result = json.loads(nidiff_run(*flags)[1])
    result["metrics"]["recall"]["value"] = 0.123
    (model / "metrics.json").write_text(json.dumps([result]))
    code, _, log = nidiff_run(*flags)
    assert code == 2
    assert "is not a list of results" in log
    assert "checksum" in log


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
    flags = ("table", run, other, *FLAGS, "--bootstrap", "50", "--samplers", "ddim", "--num-steps", "3", "--out", out)
    assert "brightness" not in nidiff_run(*flags)[1]
    drawn = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/generated/*/samples.npz")}
    monkeypatch.setitem(METRICS, "brightness", Metric(brightness, higher_is_better=True))
    monkeypatch.setitem(METRICS, "exact", Metric(lambda real, generated: (len(generated), 0.25)))
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
        assert result.metrics["exact"] == Measured(30, 0.25)
    monkeypatch.undo()  # the direction is part of the result: a process without the metric shows it too
    table = markdown(read_results(out / "table.json"))
    assert table == (out / "table.md").read_text()
    assert ("brightness ↑" in table, "exact ↓" in table) == (True, True)
    rows = [line.split(" | ")[8] for line in table.splitlines()[2:4]]
    values = [result.metrics["brightness"].value for result in results]
    assert [row.startswith("**") for row in rows] == [value == max(values) for value in values]
    titles = " ".join(axes.get_title() for axes in quality_figure(results).axes)
    assert ("brightness" in titles, "exact" in titles) == (True, True)
    assert "brightness" in (run / "report.html").read_text()
    assert len(read_results(run / "metrics.json")) == 1  # the new answer is in the place of the old


def test_a_metric_that_returns_no_number_is_refused(monkeypatch):
    pixels = torch.arange(64, dtype=torch.uint8).reshape(16, 1, 2, 2)
    images = SampleSet(pixels, pixels.flatten(1).float())
    for answer in (None, "many", (1.0, 2.0, 3.0), torch.ones(2)):
        monkeypatch.setitem(METRICS, "odd", Metric(lambda real, generated, answer=answer: answer))
        with refused("METRICS"):
            measure(images, images)


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
    flags = ("table", model, other, *FLAGS, "--samplers", "ancestral", "--num-steps", "6", "3")
    code, text, log = nidiff_run(*flags, "--out", tmp_path / "table")
    assert code == 0
    results = json.loads((tmp_path / "table" / "table.json").read_text())
    cells = [(r["run"], r["sampler"], r["num_steps"]) for r in results]
    assert cells == [(m, "ancestral", n) for m in ("noise", "other") for n in (6, 3)]
    assert all(name in text for name in NAMES)
    assert "table.md" in log
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


@pytest.mark.parametrize(
    "flags",
    [
        *(("--seeds", "0-2"), ("--num-real", "3"), ("--num-real", "9999"), ("--k", "0"), ("--bootstrap", "1")),
        *(("--num-steps", "41"), ("--features", "vgg"), ("--data", "nowhere")),
    ],
    ids=" ".join,
)
def test_bad_flags_exit_with_2_before_anything_is_drawn(nidiff_run, model, flags, tmp_path):
    command, out = ("table", ("--out", tmp_path / "t")) if flags[0] in ("--k", "--num-steps") else ("evaluate", ())
    code, result, log = nidiff_run(command, model, *FLAGS, "--num-steps", "3", *flags, *out)
    assert (code, log.count("\n")) == (2, 1)
    assert flags[0] in log or "--data" in log or flags[1] in log
    assert result == ""
    assert not (model / "generated").exists()
    assert not (tmp_path / "t").exists()


def test_images_of_another_size_are_refused(nidiff_run, model, tmp_path):
    np.savez(tmp_path / "large.npz", np.zeros((20, 16, 16, 3), dtype=np.uint8))
    code, _, log = nidiff_run("evaluate", model, *FLAGS, "--data", tmp_path / "large.npz", "--num-real", "20")
    assert code == 2
    assert "1 × 8 × 8" in log
    assert "3 × 16 × 16" in log


def test_constant_images_are_refused(nidiff_run, tmp_path):
    np.savez(tmp_path / "grey.npz", np.full((20, 8, 8, 1), 128, dtype=np.uint8))
    code, _, log = nidiff_run("evaluate", tmp_path / "grey.npz", "--data", "digits", *FAST)
    assert code == 2
    assert "constant" in log


def test_a_model_folder_must_be_told_the_data_and_runs_need_names(nidiff_run, model, tmp_path):
    code, _, log = nidiff_run("evaluate", model, *FAST, "--num-steps", "3")
    assert code == 2
    assert "--data" in log
    twin = shutil.copytree(model, tmp_path / "twin" / "noise")
    code, _, log = nidiff_run("table", model, twin, *FLAGS, "--num-steps", "3", "--out", tmp_path / "t")
    assert code == 2
    assert "different names" in log


def test_images_take_no_flags_of_drawing_and_must_be_there(nidiff_run, tmp_path):
    file = digits_file(tmp_path / "some.npz", "test")
    code, _, log = nidiff_run("evaluate", file, "--data", "digits", *FAST, "--num-steps", "3")
    assert code == 2
    assert "leave out the flags of drawing" in log
    code, _, log = nidiff_run("evaluate", "hf:digits", "--data", "digits", *FAST)  # no such path: not the data set
    assert code == 2
    assert "'hf:digits' does not exist" in log


def test_a_feature_module_that_does_not_fit_is_refused_before_drawing(nidiff_run, model, tmp_path):
    class Fixed(torch.nn.Module):
        def forward(self, x):
            return (x.float().flatten(1) @ torch.ones(3 * 32 * 32, 2)).contiguous()

    path = tmp_path / "fixed.pt2"
    torch.export.save(
        torch.export.export(
            Fixed(), (torch.zeros(2, 3, 32, 32, dtype=torch.uint8),), dynamic_shapes=({0: torch.export.Dim("n")},)
        ),
        path,
    )
    flags = (*FLAGS, "--num-steps", "3", "--features", path)
    code, _, log = nidiff_run("evaluate", model, *flags)
    assert code == 2
    assert "is a program" in log
    code, _, log = nidiff_run("evaluate", model, *flags, "--trust-features")
    assert code == 2
    assert "failed on uint8 [16, 3, 8, 8]" in log
    assert not (model / "generated").exists()


def test_a_spreadsheet_computes_nothing_that_a_name_says():
    names = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)"]
    results = [Result(name, "ddim", 3, metrics={"m": Measured(-1.0, None)}) for name in names]
    rows = [*csv.DictReader(csv_text(results).splitlines())]
    assert [row["run"] for row in rows] == [f"'{name}" for name in names]
    assert {row["m"] for row in rows} == {"-1.0"}
