"""``nidiff sweep``: lists of values become runs, each is checked before the first, and a sweep can be continued."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nidiff.cli import main
from nidiff.commands.grid import expand, values_of
from nidiff.commands.sweep import Sweep
from nidiff.commands.train import Train
from nidiff.commands.usage import own_flags
from nidiff.training import loop
from nidiff.training.experiment import Experiment

TINY = {
    **{"--steps": ["4"], "--warmup": ["0"], "--cooldown": ["0"], "--widths": ["8"], "--attention": []},
    **{"--batch-size": ["8"], "--num-samples": ["1"], "--precision": ["fp32"], "--gaussian": ["none"]},
    **{"--checkpoint-every": ["2"], "--schedule": ["ddpm_linear:num_levels=8"]},
}
TABLE = shlex.split("--samplers ddim --num-steps 2 --seeds 0-9 --features pixels --bootstrap 2 --num-real 50")


def words(*given: str) -> list[str]:
    """A sweep of tiny runs; flags that are given replace those of the tiny ones."""
    flags = [word.partition("=")[0] for word in given if word.startswith("--")]
    return ["sweep", *(word for flag, value in TINY.items() if flag not in flags for word in (flag, *value)), *given]


def steps_of(monkeypatch) -> list[tuple[int, int]]:
    """The seed and the number of each step that is trained from now on."""
    done, step = [], loop.train_step

    def counted(trainer, batches):
        loss = step(trainer, batches)
        done.append((trainer.experiment.seed, trainer.step))
        return loss

    monkeypatch.setattr(loop, "train_step", counted)
    return done


def test_a_sweep_hides_few_flags_of_training():
    """All others of `nidiff train` can be given a list of values."""
    assert {*own_flags(Sweep)} & {*own_flags(Train)} == {"--num-steps", "--out", "--quiet", "--dry-run"}


# The grammar -----------------------------------------------------------------------------------------------------


LISTS = [
    ("--covariance", "gff:gamma=0,0.5,1", ["gff:gamma=0", "gff:gamma=0.5", "gff:gamma=1"]),
    ("--covariance", "white gff:gamma=1", ["white", "gff:gamma=1"]),
    ("--covariance", "white,gff:gamma=1,2", ["white", "gff:gamma=1", "gff:gamma=2"]),
    ("--covariance", "matern:length_scale=2,nu=1", ["matern:length_scale=2,nu=1"]),
    ("--covariance", "matern:length_scale=2,nu=1,3", ["matern:length_scale=2,nu=1", "matern:length_scale=2,nu=3"]),
    ("--schedule", "flow ddpm_linear:num_levels=1,2", ["flow", *(f"ddpm_linear:num_levels={n}" for n in (1, 2))]),
    ("--target", "eps,v x0", ["eps", "v", "x0"]),
    ("--seed", "0-2", ["0", "1", "2"]),
    ("--seed", "0,3 7-8", ["0", "3", "7", "8"]),
    ("--widths", "32/64 64/128", ["32 64", "64 128"]),
    ("--attention", "", [""]),
    ("--data", "a,b.npz", ["a,b.npz"]),  # a path may have a comma
    ("--held-out", "time=2010-01-01:", ["time=2010-01-01:"]),
    ("--no-flip", "", [""]),
]


def test_a_list_of_values_is_what_the_grammar_says():
    for flag, given, expected in LISTS:
        assert [" ".join(value) for value in values_of(flag, given.split())] == expected
    values = values_of("--covariance", ["ar1:rho=0.5,0.9 x gff:gamma=0,1"])  # each factor of a product may have a list
    pairs = [(rho, gamma) for rho in (0.5, 0.9) for gamma in (0, 1)]
    assert values == [(f"ar1:rho={rho} x gff:gamma={gamma}",) for rho, gamma in pairs]


def test_the_grid_is_the_product_and_the_names_say_what_varies():
    grid = {"--seed": ["0-1"], "--covariance": ["gff:gamma=0,0.5"], "--steps": ["7"]}
    runs = expand(grid)
    assert [run.name for run in runs] == [
        f"covariance=gff-gamma={gamma},seed={seed}" for gamma in (0, 0.5) for seed in (0, 1)
    ]
    assert runs[3].words == tuple(shlex.split("--covariance gff:gamma=0.5 --steps 7 --seed 1"))
    assert [run.name for run in expand({"--seed": ["3"], "--preset": ["fields"]})] == ["fields,seed=3"]
    assert [run.name for run in expand({"--config": ["runs/mine/experiment.json"]})] == ["mine"]


def test_names_are_different_and_no_paths_and_fit_every_file_system():
    names = [run.name for run in expand({"--data": ["a/b", "a-b", "A-b", "../x", "y" * 500], "--seed": ["0-1"]})]
    assert len({name.lower() for name in names}) == 10
    assert all("/" not in name and len(name) <= 120 for name in names)
    for run in expand({"--data": ["日" * 100, "月" * 100]}):
        assert 100 < len(run.name.encode()) <= 120


def test_a_run_without_a_list_never_lies_in_the_place_of_the_sweep_or_of_its_table(tmp_path, monkeypatch):
    (tmp_path / "mine" / "below").mkdir(parents=True)
    for config, folder in {".": "mine", "experiment.json": "mine", "../mine": "mine", "..": "mine/below"}.items():
        monkeypatch.chdir(tmp_path / folder)
        assert [run.name for run in expand({"--config": [config]})] == ["mine"]
        assert Train(Experiment(), config=Path(config)).directory().folder == Path("runs/mine")
    (run,) = expand({"--config": ["Table"]})
    assert run.name.startswith("Table-")


# What it does ----------------------------------------------------------------------------------------------------


def test_the_commands_are_exactly_what_the_sweep_runs(tmp_path, capsys):
    out = tmp_path / "a b"
    given = words(
        *shlex.split("--covariance white gff:gamma=0,1 --seed 0-1 --flip --widths 8/16 8 --learning-rate=1e-3"),
        *("--out", str(out), *TABLE),
    )
    runs = Sweep.parsed(given[1:]).planned()
    assert main([*given, "--commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(runs) == 12
    for line, run in zip(lines, runs, strict=True):
        program, command, *rest = shlex.split(line)
        made = Train.parsed(rest)
        assert (program, command) == ("nidiff", "train")
        assert (made.experiment, made.out, made.resume) == (run.train.experiment, run.train.out, False)
    assert {run.train.experiment.covariance for run in runs} == {"white", "gff:gamma=0", "gff:gamma=1"}
    assert {run.train.experiment.widths for run in runs} == {(8, 16), (8,)}
    assert all(run.train.experiment.flip for run in runs)
    assert not out.exists()


@pytest.mark.slow
def test_the_lines_of_the_documentation_run_the_commands(tmp_path, monkeypatch, capsys):
    """What SLURM gives the shell of a task, and GNU parallel where it is installed: as printed, they leave nothing."""
    page = (Path(__file__).parent.parent / "docs" / "sweep.md").read_text()
    (task,) = re.findall(r"sbatch .* --wrap '(.*)'$", page, re.M)
    (parallel,) = re.findall(r"^    (parallel .*)$", page, re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def left() -> int:
        assert main(words("--seed", "0-2", "--no-report", "--out", "my runs", *TABLE, "--commands")) == 0
        lines = capsys.readouterr().out
        Path("commands.txt").write_text(lines)
        return lines.count("\n")

    def run(line: str) -> None:
        subprocess.run(["sh", "-c", line], check=True, capture_output=True)

    assert left() == 3
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    run(task)
    assert left() == 2
    if shutil.which("parallel") is None:
        pytest.skip("GNU parallel is not installed")
    run(parallel)
    assert left() == 0


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two seeds that ran to its end."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIDIFF_DATA", str(out.parent / "cache"))
        done = steps_of(patch)
        assert main(words("--seed", "0-1", "--out", str(out), *TABLE)) == 0
    assert done == [(seed, step) for seed in (0, 1) for step in (1, 2, 3, 4)]
    return out


@pytest.fixture
def cache(swept, monkeypatch):
    monkeypatch.setenv("NIDIFF_DATA", str(swept.parent / "cache"))


def test_a_killed_sweep_continues_and_ends_with_the_same_table(swept, cache, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    shutil.copytree(swept / "digits,seed=0", out / "digits,seed=0")  # the first run is finished
    given = words("--seed", "0-1", "--out", str(out), *TABLE)
    step = loop.train_step

    def stopped(trainer, batches):
        loss = step(trainer, batches)
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    monkeypatch.setattr(loop, "train_step", stopped)
    assert main(given) == 130
    assert "the same nidiff sweep command continues" in capsys.readouterr().err
    assert not (out / "table").exists()
    monkeypatch.setattr(loop, "train_step", step)
    assert main([*given, "--dry-run"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["finished", "to"]
    assert main([*given, "--commands"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert Train.parsed(shlex.split(line)[2:]).resume
    done = steps_of(monkeypatch)
    assert main(given) == 0
    assert done == [(1, 4)]
    for name in ("table.md", "table.tex"):
        assert (out / "table" / name).read_text() == (swept / "table" / name).read_text()


def test_it_ends_in_a_table_and_a_figure_and_when_finished_trains_nothing_and_can_grow(
    swept, cache, monkeypatch, capsys
):
    found, done = json.loads((swept / "table" / "table.json").read_text()), steps_of(monkeypatch)
    assert [one["run"] for one in found["results"]] == ["digits,seed=0", "digits,seed=1"]
    assert [one["group"] for one in found["groups"]] == ["digits (2 seeds)"]
    assert found["groups"][0]["metrics"]["FD-pixels"]["std"] > 0
    assert (swept / "table" / "table.png").stat().st_size > 1000
    assert main(words("--seed", "0-3", "--out", str(swept), *TABLE, "--dry-run")) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["finished"] * 2 + ["new"] * 2
    before = (swept / "table" / "table.md").read_text()
    assert main(words("--seed", "0-1", "--out", str(swept), *TABLE)) == 0
    assert done == []
    assert (swept / "table" / "table.md").read_text() == before


# Bad input -------------------------------------------------------------------------------------------------------


BAD = [
    ("--covariance gff:gamma=1,1.0", "the same training"),
    ("--covariance gff gaussian_free_field:gamma=1", "the same training"),
    ("--keep 1,2", "the same training"),  # the weights are the same
    ("--seed 0 --seed 1", "--seed is given twice"),
    ("--flip --no-flip", "--flip is given twice"),
    ("--seed 0-5000", "1,000"),
    ("--covariance gff:gamma=1,,2", "--covariance"),
    ("--covariance gff:gama=1,2", "has no argument 'gama'"),
    ("--covariance white gfff", "--covariance='gfff'"),
    ("--target eps,nope", "--target='nope'"),
    ("--widths 32 64", "32/64"),
    ("--cooldown 0,100", "--cooldown=100"),
    ("--batch-size 8 7 --accumulation 2", "--batch-size=7"),
    ("--resume", "--resume is not a flag"),
    # What the last run or the table would refuse.
    ("--num-steps 2 5000", "--num-steps=5000"),
    ("--samplers nope", "--sampler='nope'"),
    ("--seeds 0-2", "--seeds"),
    ("--data nowhere.npz", "nowhere.npz"),
]


def test_a_bad_grid_is_refused_in_one_sentence_before_the_first_run(tmp_path, capsys):
    usual = {"--seeds": "0-9", "--features": "pixels", "--num-steps": "2"}
    for given, message in BAD:
        flags = [word for flag, value in usual.items() if flag not in given.split() for word in (flag, value)]
        assert main(words("--out", str(tmp_path / "out"), *flags, *given.split())) == 2, given
        printed, said = capsys.readouterr()
        assert message in said
        assert (printed, said.count("nidiff: ")) == ("", 1)
        assert not (tmp_path / "out").exists()


def test_a_directory_with_another_experiment_is_refused_before_the_first_run(swept, tmp_path, monkeypatch, capsys):
    done, out = steps_of(monkeypatch), tmp_path / "out"
    shutil.copytree(swept / "digits,seed=1", out / "digits,seed=1")
    assert main(words("--seed", "0-1", "--out", str(out), "--learning-rate", "0.5", *TABLE)) == 2
    assert "learning-rate" in capsys.readouterr().err
    (out / "table").mkdir()
    (out / "table" / "table.csv").write_text("mine")
    assert main(words("--seed", "0-1", "--out", str(out), *TABLE)) == 2
    assert "table.csv" in capsys.readouterr().err
    shutil.rmtree(out / "digits,seed=1")
    (out / "digits,seed=1").mkdir()
    (out / "digits,seed=1" / "thesis.tex").touch()
    assert main(words("--seed", "0-1", "--out", str(out), *TABLE, "--commands")) == 2
    assert done == []
    assert sorted(path.name for path in out.iterdir()) == ["digits,seed=1", "table"]
