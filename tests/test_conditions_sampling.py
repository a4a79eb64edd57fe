"""The conditions of an image are a function of its seed: classes, guidance and conditions on the command line."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import conditional_model, refused

import nidiff
from nidiff.cli import main
from nidiff.commands.flags import parse_classes
from nidiff.data.dataset import Dataset, quantise
from nidiff.data.grid import Grid
from nidiff.data.spec import DataSpec
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError
from nidiff.evaluation.evaluate import evaluate_images
from nidiff.evaluation.evaluator import open_evaluator
from nidiff.evaluation.likelihood import measure_likelihood
from nidiff.evaluation.real import RealSource
from nidiff.evaluation.results import read_results
from nidiff.generation.conditioning import classes_text
from nidiff.generation.folder import SampleFolder, run_job
from nidiff.generation.job import Job, plan_job
from nidiff.generation.loaded_model import Model, SingleProcess, open_model
from nidiff.sealed import digest
from nidiff.training.experiment import Experiment

FLAGS = ("--seeds", "0-19", "--num-steps", "2", "--tile", "8", "--floats")
CPU = SingleProcess(torch.device("cpu"))
PROCESS = nidiff.Process(nidiff.schedules.ddpm_linear(40), nidiff.gaussian_free_field((8, 8)))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return conditional_model(tmp_path_factory.mktemp("conditional") / "model")


@pytest.fixture
def draw(model, tmp_path, capsys):
    """The arrays that a command line draws; each in a folder of its own, unless it is named."""
    count = iter(range(100))

    def run(*flags, out=None):
        out = tmp_path / str(next(count)) if out is None else out
        code = main(["sample", str(model), "--out", str(out), *FLAGS, *flags])
        log = capsys.readouterr().err
        assert code == 0, log
        with np.load(out / "samples.npz", allow_pickle=False) as content:
            return dict(content)

    return run


# A seed has a class ----------------------------------------------------------------------------------------------


def test_the_class_is_a_function_of_the_seed(model, draw):
    found = draw("--classes", "7,0-2")
    assert found["classes"].tolist() == [7, 0, 1, 2] * 5
    denoiser = nidiff.load_model(model).given(class_labels=torch.tensor([7, 0, 1, 2] * 5))
    expected = nidiff.sample(denoiser, (20, 1, 8, 8), num_steps=2, generator=range(20), tile=8)
    assert np.array_equal(found["arr_0"], expected.movedim(1, -1).numpy())
    some = draw("--classes", "7,0-2", "--seeds", "5,6,11")
    assert some["classes"].tolist() == [0, 1, 2]
    assert np.array_equal(some["arr_0"], found["arr_0"][[5, 6, 11]])
    turned = draw("--classes", "0-2,7")
    assert not any(np.array_equal(*pair) for pair in zip(found["arr_0"], turned["arr_0"], strict=True))


def test_all_classes_have_their_turn_in_columns_and_the_batch_changes_no_bit(draw, tmp_path):
    flags = ("--classes", "0,3,5", "--guidance", "2.5")
    draw(*flags, out=tmp_path / "a")
    draw(*flags, "--batch", "7", out=tmp_path / "b")
    assert (tmp_path / "a" / "samples.npz").read_bytes() == (tmp_path / "b" / "samples.npz").read_bytes()
    with Image.open(tmp_path / "a" / "grid.png") as grid:
        assert grid.size == (8 * (3 * 9 - 1), 8 * (7 * 9 - 1))  # a column for each class; each pixel is 8 × 8 there


def test_scale_one_is_the_condition_and_zero_is_none_and_so_is_none_outside_of_the_interval(draw, tmp_path):
    plain, guided, free = draw(out=tmp_path / "plain"), draw("--guidance", "3"), draw("--classes", "none")
    assert plain["classes"].tolist() == [*range(10)] * 2
    assert "classes" not in free
    draw("--classes", "0-9", "--guidance", "1", out=tmp_path / "plain")  # the same job, or it would be refused
    assert np.array_equal(draw("--guidance", "0")["arr_0"], free["arr_0"])
    nowhere, high = (draw("--guidance", "3", "--guidance-interval", *rows) for rows in (("3.1", "3.2"), ("20", "39")))
    assert np.array_equal(nowhere["arr_0"], plain["arr_0"])
    for one, other in itertools.combinations((plain, guided, free, high), 2):
        assert not np.array_equal(one["arr_0"], other["arr_0"])


def test_classes_are_read_in_the_order_given_and_written():
    assert parse_classes("8, 0-2,8") == [8, 0, 1, 2, 8]
    assert parse_classes("none") == []
    for words in ("0-9", "3", "8,0,1", "0-2,7"):
        assert classes_text(parse_classes(words)) == words
    with pytest.raises(InputError, match="classes"):
        parse_classes("a-b")


# Jobs ------------------------------------------------------------------------------------------------------------


def test_conditions_are_part_of_the_job_only_where_they_are_set(model):
    opened = open_model(model, CPU)
    plain = Job("model", "ddim", 5, "uniform").to_json()
    assert not {"classes", "guidance", "interval", "condition", "rows"} & plain.keys()
    asked = [{}, {"classes": []}, {"classes": [1, 2]}, {"classes": [2, 1]}, {"guidance": 2}]
    asked += [{"guidance": 2, "guidance_interval": (3, 7)}]
    jobs = [plan_job(opened, **one) for one in asked]
    assert len({digest(job.to_json()) for job in jobs}) == len({job.name for job in jobs}) == len(asked)
    assert "classes=0-9-guidance=2.0" in jobs[4].name
    assert json.loads(json.dumps(jobs[5].to_json())) == jobs[5].to_json()
    assert plan_job(opened, guidance=1).to_json() == jobs[0].to_json()


# Conditions from a file ------------------------------------------------------------------------------------------


class Shifted(torch.nn.Module):
    """x̂0 is a constant field, the sum of its two parameters."""

    def forward(self, x, label, parameters=None):
        return parameters.reshape(len(x), -1).sum(1).reshape(-1, 1, 1, 1).expand_as(x).nan_to_num(0.5)


def shifted_model(**of_condition) -> Model:
    conditions = {"parameters": nidiff.Condition(**{"shape": (2,), "dropout": 0.1} | of_condition)}
    denoiser = nidiff.Denoiser(Shifted(), PROCESS, "x0", conditions=conditions)
    return Model(Path("shifted"), denoiser, (1, 8, 8), "0" * 64, Grid(("y", "x")))


def means(model: Model, out: Path, seeds, **options) -> np.ndarray:
    job = plan_job(model, "ddim", 3, **options)
    folder = SampleFolder(out, job, model.shape, grid=model.grid)
    run_job(model.denoiser, folder, seeds, batch=2, state=CPU)
    return folder.read(seeds).mean((1, 2, 3)).numpy()


def test_a_seed_has_its_row_of_the_file_in_the_units_of_the_data(tmp_path):
    rows = np.array([[0.1, 0.2], [-0.3, 0.1], [0.0, 0.4]])
    np.save(tmp_path / "c.npy", rows)
    model, seeds, expected = shifted_model(), [0, 1, 2, 3, 8], rows.sum(1)[[0, 1, 2, 0, 2]]
    assert np.allclose(means(model, tmp_path / "a", seeds, condition=tmp_path / "c.npy"), expected, atol=1e-6)
    guided = means(model, tmp_path / "b", seeds, condition=tmp_path / "c.npy", guidance=3)
    assert np.allclose(guided, 0.5 + 3 * (expected - 0.5), atol=1e-5)
    assert np.allclose(means(model, tmp_path / "c", seeds), 0.5, atol=1e-6)  # which null is
    scaled = shifted_model(scaling=Scaling((100.0, 10.0), (20.0, 4.0)))
    np.save(tmp_path / "c.npy", np.array([[30.0, 5.0], [10.0, 4.0]]))
    found = means(scaled, tmp_path / "d", [0, 1], condition=tmp_path / "c.npy")
    assert np.allclose(found, [0.1 + 0.1, -0.1 + 0.0], atol=1e-6)


def test_a_job_knows_the_contents_of_the_file(tmp_path):
    """One channel needs no axis, and a coarse field is repeated."""
    rows, model = np.array([[0.1, 0.2], [-0.3, 0.1]]), shifted_model()
    np.save(tmp_path / "a.npy", rows)
    np.savez(tmp_path / "b.npz", parameters=rows)
    np.save(tmp_path / "c.npy", rows[::-1])
    a, b, c = (plan_job(model, condition=tmp_path / name).to_json() for name in ("a.npy", "b.npz", "c.npy"))
    assert a == b
    assert a["condition"] != c["condition"]
    np.save(tmp_path / "d.npy", coarse := np.arange(8.0).reshape(2, 2, 2))
    (fine,) = plan_job(shifted_model(shape=(1, 8, 8)), condition=tmp_path / "d.npy").conditioning.rows.values()
    assert fine.shape == (2, 1, 8, 8)
    assert np.array_equal(fine[:, 0, ::4, ::4], coarse)
    assert np.array_equal(fine[:, 0, 3::4, 3::4], coarse)


def test_conditions_that_the_network_was_not_trained_with_are_refused(tmp_path, model):
    for rows in (np.zeros((4, 3)), np.zeros((0, 2)), np.zeros(()), np.array([[0.0, np.nan]]), np.array([["a", "b"]])):
        np.save(tmp_path / "c.npy", rows)
        with refused("condition"):
            plan_job(shifted_model(), condition=tmp_path / "c.npy")
    (tmp_path / "c.npy").write_text("no array")
    np.savez(tmp_path / "d.npz", parameters=np.zeros((1, 2)), parametres=np.zeros((1, 2)))
    for name in ("c.npy", "d.npz", "missing.npy"):
        with pytest.raises(InputError, match="condition"):
            plan_job(shifted_model(), condition=tmp_path / name)
    np.save(tmp_path / "e.npy", np.zeros((1, 2)))
    with refused("condition"):
        plan_job(open_model(model, CPU), condition=tmp_path / "e.npy")
    with refused("condition"):
        plan_job(shifted_model(dropout=0.0))


# Bad input -------------------------------------------------------------------------------------------------------


def test_bad_flags_exit_with_2_and_write_nothing(model, draw, tmp_path, capsys):
    draw("--classes", "0-4", out=tmp_path / "a")
    before = (tmp_path / "a" / "samples.npz").read_bytes()
    for flags, words in {
        "--num-steps 41": "num-steps=41",
        "--seeds 0-99999999999": "--seeds",
        "--sampler ddim:eta=x": "eta='x'",
        "--sampler ddmi": "did you mean 'ddim'",
        "--batch 0": "batch=0",
        "--tile 1000000": "tile=1000000",
        "--format gif": "format='gif'",
        "--classes 0-10": "--classes has 10",
        "--classes none --guidance 2": "--guidance=2.0 needs",
        "--guidance-interval 3 4": "--guidance-interval",
        "--guidance 2 --guidance-interval 0 40": "from 0 to 39",
        "--condition c.npy": "--condition='c.npy'",
        "--classes 4": "another job",
    }.items():
        out = tmp_path / ("a" if words == "another job" else "new")
        assert main(["sample", str(model), "--out", str(out), *FLAGS, *flags.split()]) == 2, flags
        printed, log = capsys.readouterr()
        assert (words in log, printed) == (True, ""), flags
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "a" / "samples.npz").read_bytes() == before
    plain = Model(Path("plain"), nidiff.Denoiser(lambda x, t: x, PROCESS), (1, 8, 8), "0" * 64, Grid(("y", "x")))
    for name, value in {"classes": [0, 1], "guidance": 2}.items():  # it was trained without classes
        with refused(name):
            plan_job(plain, **{name: value})
    assert plan_job(plain, classes=[]).to_json() == plan_job(plain).to_json()


@pytest.mark.filterwarnings("default")
def test_guidance_without_dropout_is_warned_of_in_one_sentence(tmp_path, capsys):
    model = conditional_model(tmp_path / "model", dropout=0.0)
    assert main(["sample", str(model), "--out", str(tmp_path / "a"), *FLAGS, "--batch", "5", "--guidance", "2"]) == 0
    log = capsys.readouterr().err
    assert log.startswith("nidiff: the network was trained without dropout")
    assert log.count("nidiff: ") == 1
    assert main(["sample", str(model), "--out", str(tmp_path / "b"), *FLAGS, "--classes", "none"]) == 2
    assert "--classes is missing" in capsys.readouterr().err


# Tables ----------------------------------------------------------------------------------------------------------


def test_real_images_have_their_classes_and_others_have_not():
    """Digits against themselves: each class is at distance 0, and nearly all are recognised. With the labels turned by
    one, the whole is still at distance 0, and no class is."""
    digits = nidiff.load_dataset("digits")
    rows = torch.arange(0, len(digits), 3)
    data = Dataset(digits.stored(rows), digits.labels[rows])
    bench = open_evaluator(Path("digits"), data, features="pixels", bootstrap=0)
    found, turned = (evaluate_images(data, bench, classes=labels) for labels in (data.labels, (data.labels + 1) % 10))
    for one in (found, turned):
        assert one.metrics["FD-pixels"].value == pytest.approx(0, abs=1e-6)
    assert found.metrics["right class"].value > 0.95
    assert turned.metrics["right class"].value < 0.05
    assert found.details["classifier"] > 0.9
    assert [*found.details["by_class"]] == [str(one) for one in range(10)]
    for name, bound in (("FD-pixels", 1e-6), ("right class", None)):
        ours, others = ([one[name]["value"] for one in each.details["by_class"].values()] for each in (found, turned))
        assert (max(ours) < bound < 1 < min(others)) if bound else (max(others) < 0.3 < 0.8 < min(ours))


def test_evaluate_compares_with_real_data_of_the_same_classes(model, tmp_path, capsys):
    run = shutil.copytree(model, tmp_path / "run")
    flags = ("--data", "digits", "--seeds", "0-29", "--num-steps", "2", "--features", "pixels", "--bootstrap", "0")
    flags = (*flags, "--num-real", "300", "--classes", "3,5", "--guidance", "1.5")
    assert main(["evaluate", str(run), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = nidiff.load_dataset("digits").labels
    spread = torch.linspace(0, len(labels) - 1, 300, dtype=torch.float64).long()
    assert found["provenance"]["num_real"] == int(torch.isin(labels[spread], torch.tensor([3, 5])).sum())
    assert found["options"] == {"classes": "3,5", "guidance": 1.5}
    assert [*found["details"]["by_class"]] == ["3", "5"]
    table = ["table", str(run), *flags, "--samplers", "dpmpp_2m", "--out", str(tmp_path / "t")]
    assert main(table) == 0
    assert "## By class: FD-pixels" in (tmp_path / "t" / "table.md").read_text()
    assert len(read_results(run / "metrics.json")) == 1  # asked again, it is not measured again


def test_real_data_without_the_class_are_refused():
    digits = nidiff.load_dataset("digits")
    rows = (digits.labels != 4).nonzero()[:60, 0]
    bench = open_evaluator(Path("digits"), Dataset(digits.stored(rows), digits.labels[rows]), features="pixels")
    with pytest.raises(InputError, match="classes has 4"):
        bench.of_classes([3, 4])
    with pytest.raises(InputError, match="classes has shape"):
        evaluate_images(quantise(torch.zeros(9, 1, 8, 8)), bench, classes=[1, 2])


def test_the_likelihood_is_that_given_the_class(model):
    denoiser, digits = nidiff.load_model(model), nidiff.load_dataset("digits")
    rows = (digits.labels == 3).nonzero()[:2, 0]
    data = Dataset(digits.stored(rows), digits.labels[rows])
    coarse = {"rtol": 1e-2, "atol": 1e-2}
    found = measure_likelihood(denoiser, data, **coarse)
    bound = [measure_likelihood(denoiser.given(class_labels=one), data, **coarse) for one in (3, 4, -1)]
    assert found.of_class
    assert not bound[0].of_class
    assert torch.equal(found.log_prob, bound[0].log_prob)
    assert not torch.equal(found.log_prob, bound[1].log_prob)
    assert torch.equal(measure_likelihood(denoiser, Dataset(data.values), **coarse).log_prob, bound[2].log_prob)


def test_the_real_classes_are_those_of_the_run(tmp_path):
    """A run that was trained with labels of its own is not compared with the classes that the data have."""
    digits = nidiff.load_dataset("digits")
    np.save(tmp_path / "parity.npy", (digits.labels % 2).numpy())
    experiment = Experiment(DataSpec(labels=str(tmp_path / "parity.npy")))
    assert torch.equal(RealSource(experiment, of_run=True).load().data.labels, digits.labels % 2)
    assert RealSource(experiment, of_run=True).load("test").data.labels is None  # the file is for the other part
    assert torch.equal(RealSource(Experiment(DataSpec(labels="data")), of_run=True).load().data.labels, digits.labels)
