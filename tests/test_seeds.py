"""Tables over training seeds: what is one group, its mean and spread in every format, and the paired test."""

import csv
import html
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from problems import refused, untrained_model, write_run
from scipy import stats

from nidiff.cli import main
from nidiff.evaluation.results import Measured, Result, Trainings, read_results
from nidiff.evaluation.seeds import (
    compare_groups,
    group_runs,
    groups_json,
    over_groups,
    over_seeds,
    paired_test,
    shared_name,
)
from nidiff.evaluation.table import HTML, cells, csv_text, latex, markdown, notes, text
from nidiff.report.quality import quality_figure
from nidiff.training.experiment import Experiment

FLAGS = ("--features", "pixels", "--bootstrap", "3", "--num-real", "50", "--seeds", "0-9", "--samplers", "ddim")


def results_of(values, metric="FD", steps=10, sampler="ddim", error=0.5, **others):
    """A result per run, of the value given for it."""
    return [
        Result(run, sampler, steps, metrics={metric: Measured(value, error)}, **others) for run, value in values.items()
    ]


@pytest.fixture
def two_groups(tmp_path):
    """White and coloured noise, three seeds each."""
    names = {f"{noise}-seed{seed}": (noise, seed) for noise in ("white", "gff") for seed in (0, 1, 2)}
    runs = {name: write_run(tmp_path / name, Experiment(covariance=c, seed=seed)) for name, (c, seed) in names.items()}
    return group_runs(runs)


# What is one group -----------------------------------------------------------------------------------------------


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path):
    def make(other_data="", **experiments):
        runs = {name: write_run(tmp_path / name, one, name in other_data) for name, one in experiments.items()}
        return [dict(group.runs) for group in group_runs(runs)]

    base = Experiment(cooldown=0)
    assert make(b=replace(base, seed=1), a=base, c=replace(base, seed=7)) == [{0: "a", 1: "b", 7: "c"}]
    changes = [{"covariance": "white"}, {"learning_rate": 1e-3}, {"target": "v"}, {"data": "elsewhere.npz"}]
    changes.append({"steps": 900})  # which may change when a run is resumed, and yet decides the weights
    for change in changes:
        assert make(a=base, b=replace(base, seed=1, **change)) == [], change
    assert make("b", a=base, b=replace(base, seed=1)) == []  # other data of the same name
    # The same number in other words, and what does not decide the weights.
    first = Experiment(covariance="gff:gamma=1")
    second = Experiment(covariance="gaussian_free_field:gamma=1.0", seed=1, log_every=7, keep=0, sampler="ddim")
    assert make(a=first, b=second) == [{0: "a", 1: "b"}]


def test_a_run_without_settings_and_a_second_run_of_a_seed_stay_alone(tmp_path):
    seeds = {"a": 0, "b": 1, "copy of b": 1}
    runs = {name: write_run(tmp_path / name, Experiment(seed=seed)) for name, seed in seeds.items()}
    (tmp_path / "bare").mkdir()
    (group,) = group_runs(runs | {"bare": tmp_path / "bare"})
    assert group.runs == {0: "a", 1: "b"}
    assert group_runs({"b": runs["b"], "copy of b": runs["copy of b"]}) == []


def test_a_group_is_named_by_what_its_runs_share(tmp_path):
    for names, shared in (
        ("ddpm-seed0 ddpm-seed12", "ddpm"),
        ("ddpm_s10 ddpm_s11", "ddpm"),
        ("digits digits-1 digits-2", "digits"),
        ("gamma=0.5,seed=0 gamma=0.5,seed=1", "gamma=0.5"),
        ("apple pear", "apple"),
    ):
        assert shared_name(names.split()) == shared
    kinds = {"x1": ("white", 0), "x2": ("white", 1), "x3": ("gff", 1), "x4": ("gff", 2)}
    runs = {name: write_run(tmp_path / name, Experiment(covariance=c, seed=seed)) for name, (c, seed) in kinds.items()}
    groups = group_runs(runs)
    assert [group.name for group in groups] == ["x1, x2", "x3, x4"]  # two groups never have one name
    assert compare_groups(results_of(dict.fromkeys(runs, 1.0)), groups) == []  # of other seeds


# Over the trainings ----------------------------------------------------------------------------------------------


def test_over_seeds_is_the_mean_the_deviation_of_one_training_and_the_mean_error():
    values, errors = [1.0, 4.0, 7.5], [0.1, 0.2, 0.6]
    found = over_seeds([Measured(*pair, True) for pair in zip(values, errors, strict=True)])
    assert found.value == pytest.approx(np.mean(values))
    assert found.over == Trainings(pytest.approx(np.std(values, ddof=1)), 3)
    assert found.error == pytest.approx(0.3)
    assert found.higher_is_better
    assert over_seeds([1.0, 3.0]) == Measured(2.0, None, False, Trainings(pytest.approx(2**0.5), 2))
    assert over_seeds([2.0]).over == Trainings(None, 1)
    # A training without a value is not left out, and an error that is no number is not shown.
    assert over_seeds([Measured(1.0, 0.1), Measured(float("nan"), 0.1)]).value is None
    found = over_seeds([Measured(1.0, 0.1), Measured(3.0, float("inf"))])
    assert (found.value, found.error) == (2.0, None)


def test_a_group_is_one_line_in_every_format(two_groups):
    values = {"white-seed0": 69.7, "white-seed1": 71.2, "white-seed2": 72.7, "gff-seed0": 50.0, "other": 60.0}
    single = [one for steps in (10, 20) for one in results_of(values, steps=steps, error=0.8)]
    lines = over_groups(single, two_groups)
    assert [line.run for line in lines] == ["white (3 seeds)", "gff (3 seeds)", "other"] * 2
    for written in (markdown(lines), latex(lines), text(lines), str(cells(lines, HTML))):
        plain = html.unescape(written).replace(r"$\pm$", "±").replace("+-", "±")
        assert "71.2 ± 1.5 (samples ± 0.8)" in plain
    assert "**50.0 ± 0.8**" in markdown(lines)  # one of three so far
    assert len(notes(lines, HTML)) > len(notes(single, HTML))  # what ± is over trainings
    rows = [*csv.DictReader(csv_text([*single, *lines]).splitlines())]
    row = next(row for row in rows if row["run"] == "white (3 seeds)")
    found = [float(row[name]) for name in ("FD", "FD (error)", "FD (std over trainings)", "trainings")]
    assert found == pytest.approx([71.2, 0.8, 1.5, 3])
    first = groups_json(single, two_groups)[0]
    assert first["runs"] == {"0": "white-seed0", "1": "white-seed1", "2": "white-seed2"}
    expected = {"mean": 71.2, "std": 1.5, "error": 0.8, "n": 3, "higher_is_better": False}
    assert first["metrics"]["FD"] == pytest.approx(expected)


def test_results_that_were_measured_otherwise_are_not_averaged(two_groups):
    first = results_of({"white-seed0": 1.0}, provenance={"num_real": 10})
    second = results_of({"white-seed1": 3.0}, provenance={"num_real": 20})
    assert [line.metrics["FD"].value for line in over_groups([*first, *second], two_groups)] == [1.0, 3.0]
    second = results_of({"white-seed1": 3.0}, provenance={"num_real": 10, "model_sha256": "b"})
    (line,) = over_groups([*first, *second], two_groups)
    assert line.metrics["FD"].value == 2.0
    assert "model_sha256" not in line.provenance  # which they do not share


def test_the_plot_has_the_mean_with_the_deviation_over_trainings(two_groups):
    single = results_of({"white-seed0": 1.0, "white-seed1": 3.0, "other": 5.0}, error=0.25)
    figure = quality_figure(over_groups(single, two_groups))
    heights = [np.ptp(one[2][0].get_segments()[0][:, 1]) for one in figure.axes[0].containers]
    assert [list(one[0].get_ydata()) for one in figure.axes[0].containers] == [[2.0], [5.0]]
    assert heights == pytest.approx([2 * 2**0.5, 2 * 0.25])


# The paired test -------------------------------------------------------------------------------------------------


def test_the_paired_test_is_that_of_scipy_where_differences_differ():
    rng = np.random.default_rng(0)
    for n, shift in itertools.product((2, 3, 4, 5, 8, 13), (0.0, 0.5, 25.0)):
        first, second = rng.normal(size=n) + shift, rng.normal(size=n)
        found, expected = paired_test([*first], [*second]), stats.ttest_rel(first, second)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-8, abs=1e-13)
        assert found.difference == pytest.approx(np.mean(first - second))
        assert found.error == pytest.approx(stats.sem(first - second))
        assert paired_test([*second], [*first]).p == pytest.approx(found.p)
    assert paired_test([1.0, 2.0], [1.0, 2.0]).p is None  # equal differences are not tested
    assert paired_test([1.1, 2.1], [0.1, 1.1]).p is None  # but for rounding
    for first, second in (([1.0], [2.0]), ([1.0, 2.0], [1.0])):
        with refused("first"):
            paired_test(first, second)


def test_groups_are_compared_seed_by_seed_where_both_were_measured_alike(two_groups):
    white = {"white-seed0": 5.0, "white-seed1": 7.0, "white-seed2": 6.0}
    gff = {"gff-seed2": 4.5, "gff-seed1": 5.0, "gff-seed0": 4.0}  # in another order
    (found,) = compare_groups(results_of(white) + results_of(gff), two_groups)
    assert (found.group, found.baseline, found.seeds) == ("gff (3 seeds)", "white (3 seeds)", (0, 1, 2))
    expected = stats.ttest_rel([4.0, 5.0, 4.5], [5.0, 7.0, 6.0])
    assert found.tests["FD"].p == pytest.approx(expected.pvalue)
    assert found.tests["FD"].difference == pytest.approx(-1.5)
    for other in ({"steps": 20}, {"sampler": "heun"}, {"provenance": {"num_real": 7}}, {"metric": "KID"}):
        assert compare_groups(results_of(white) + results_of(gff, **other), two_groups) == []
    lines = over_groups(results_of(white) + results_of(gff), two_groups)
    for write in (markdown, latex, text):
        assert f"(p = {expected.pvalue:.2g})" in write(lines, [found])
        assert "p =" not in write(lines)


# The command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two settings with two seeds each; other levels stand for what other weights would change."""
    folder = tmp_path_factory.mktemp("runs")
    for name, levels in {"ddpm-0": 20, "ddpm-1": 24, "gff-0": 30, "gff-1": 36}.items():
        kind, seed = name.split("-")
        untrained_model(folder / name / "model", num_levels=levels)
        write_run(folder / name, Experiment(covariance="white" if kind == "ddpm" else "gff", seed=int(seed)))
    return folder


def test_the_table_has_groups_and_their_paired_test_or_single_runs(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path / "cache"))
    paths = [str(path) for path in sorted(runs.iterdir())]
    words = ["table", *paths, *FLAGS, "--num-steps", "3", "--out", str(tmp_path / "t")]
    assert main(words) == 0
    assert "gff (2 seeds) - ddpm (2 seeds)" in capsys.readouterr().out
    found = json.loads((tmp_path / "t" / "table.json").read_text())
    assert [one["run"] for one in found["results"]] == ["ddpm-0", "ddpm-1", "gff-0", "gff-1"]
    assert [one["group"] for one in found["groups"]] == ["ddpm (2 seeds)", "gff (2 seeds)"]
    values = [one["metrics"]["FD-pixels"]["value"] for one in found["results"]]
    metric = found["groups"][1]["metrics"]["FD-pixels"]
    assert (metric["mean"], metric["std"]) == pytest.approx((np.mean(values[2:]), np.std(values[2:], ddof=1)))
    test = found["paired"][0]["tests"]["FD-pixels"]
    assert test["p"] == pytest.approx(stats.ttest_rel(values[2:], values[:2]).pvalue)
    assert len(read_results(tmp_path / "t" / "table.json")) == 4
    assert main(["table", *paths[:2], *words[5:], "--no-groups", "--json"]) == 0  # of what was measured already
    assert json.loads(capsys.readouterr().out) == found["results"][:2]
    assert "seeds)" not in (tmp_path / "t" / "table.md").read_text().partition("Features")[0]
