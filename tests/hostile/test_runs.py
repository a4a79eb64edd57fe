"""A run directory loses nothing: not by a kill, a full disk, a second writer, or files that are not the run's own.

The trials that end processes run in a program of their own, at the end of this file, which forks the ones that die.
"""

import contextlib
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from pathlib import Path

import pytest
import torch
from conftest import CASES

from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.locks import claimed
from nidiff.model.network import BUILDERS
from nidiff.sealed import seal
from nidiff.training.checkpoint import list_checkpoints, load_checkpoint
from nidiff.training.run import FILES, FOLDERS, RunDirectory

TINY = [
    *("--widths", "8", "--attention", "--layers", "1", "--batch-size", "4", "--precision", "fp32", "--keep", "2"),
    *("--checkpoint-every", "2", "--log-every", "1", "--num-samples", "1", "--num-steps", "2", "--dropout", "0.1"),
    *("--schedule", "ddpm_linear:num_levels=20", "--warmup", "1", "--cooldown", "0", "--no-report"),
]
BEGUN = ["--steps", "4"]  # the run that is there
OTHER = ["--steps", "2", "--seed", "1"]  # and the one that takes its place


def train(out: Path, *flags: str) -> int:
    return main(["train", "--out", str(out), *TINY, *flags])


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder, except what a kill may leave."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name != ".lock" and not name.startswith(".tmp-"):
            files[name] = path.read_bytes() if path.is_file() else None
    return files


def result(folder: Path, step: int) -> dict[str, bytes]:
    """What a run has come to: weights, average and optimizer, to the bit, and its log."""
    names = ("model.safetensors", "ema.safetensors", "optimizer.pt")
    saved = {name: (folder / "checkpoints" / f"{step:06d}" / name).read_bytes() for name in names}
    model = (folder / "model/unet/diffusion_pytorch_model.safetensors").read_bytes()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    lines = json.dumps([[line[key] for key in ("step", "loss", "learning_rate")] for line in log])
    return {**saved, "the model": model, "log": lines.encode()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs, ``mine`` and ``other``."""
    folder = tmp_path_factory.mktemp("runs")
    assert train(folder / "mine", *BEGUN) == 0
    assert train(folder / "other", *OTHER) == 0
    return folder


@pytest.fixture
def mine(runs, tmp_path) -> Path:
    shutil.copytree(runs / "mine", tmp_path / "mine")
    return tmp_path / "mine"


# Kills, full disks, two writers ----------------------------------------------------------------------------------


def test_nothing_is_lost(tmp_path, tally):
    """One test for all classes: their program would run once for each process of the suite that has one of them."""
    done = subprocess.run([sys.executable, __file__, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    trials: dict[str, tuple[int, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    for kind, (tried, failures) in trials.items():
        tally(kind, tried, len(failures))
    assert trials.keys() == KINDS
    assert {kind: failures for kind, (tried, failures) in trials.items() if failures or not tried} == {}


KINDS = {
    *(
        f"{trial}: {name}"
        for trial in ("killed at a file operation", "disk that fails")
        for name in ("begin", "overwrite", "resume")
    ),
    *("two writers at once", "killed at random moments of one run"),
}


def test_a_second_writer_is_told_who_has_the_directory(mine, capsys):
    before = contents(mine)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mine)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "claimed\n"
    for flags in ((), ("--resume",), ("--overwrite",)):
        assert train(mine, *BEGUN, *flags) == 2
        error = capsys.readouterr().err
        assert flags == () or f"in use by process {holder.pid} on {os.uname().nodename}" in error
    assert contents(mine) == before
    holder.kill()  # its .lock stays
    holder.communicate()
    assert (mine / ".lock").exists()
    assert train(mine, "--steps", "6", "--resume") == 0


HOLD = """
import sys
from pathlib import Path
from nidiff.locks import claimed
with claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_not_replaced_while_its_samples_are_drawn(mine, capsys):
    before = contents(mine)
    with claimed(mine / "generated" / "job"):
        assert train(mine, *OTHER, "--overwrite") == 2
        assert "is in use by process" in capsys.readouterr().err
    assert contents(mine) == before


# Directories of other people -------------------------------------------------------------------------------------

THEIRS = ("thesis.tex", "data.csv", "run.json", "checkpoint.pt", "notes", ".git", "000500", "é", "a b")
EXPERIMENTS = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"format": 2, "steps": 5}',
    b'{"experiment_id": "7", "lifecycle_stage": "active", "name": "mlflow"}',
    b'{"format": 2, "covariance": "white", "schedule": "vp", "steps": "many"}',
    b"[" * 100_000,
    b"\xff\xfe",
)


def foreign(folder: Path, draw: random.Random) -> None:
    """Names of ours and of others, with contents that nidiff did not write."""
    names = draw.sample((*FILES, *FOLDERS[:2], *FOLDERS[4:], *THEIRS), draw.randint(1, 6))
    for name in names:
        path = folder / name
        if name == "experiment.json":
            path.write_bytes(draw.choice(EXPERIMENTS))
        elif name in FOLDERS or draw.random() < 0.3:
            for inner in draw.sample(
                ("000500/manifest.json", "manifest.json", "scheduler/scheduler_config.json", "x"), 2
            ):
                (path / inner).parent.mkdir(parents=True, exist_ok=True)
                (path / inner).write_bytes(draw.choice((b"", b"{}", b"work", b'{"_class_name": "DDPMScheduler"}')))
        else:
            path.write_bytes(draw.randbytes(20))


def test_a_directory_of_somebody_else_is_never_touched(tmp_path, capsys, tally):
    count, failures = 15 * CASES, []
    for case in range(count):
        draw, folder = random.Random(case), tmp_path / str(case)
        folder.mkdir()
        foreign(folder, draw)
        before = contents(folder), os.stat(folder).st_mtime_ns
        for flags in ((), ("--overwrite",), ("--resume",)):
            code = train(folder, *BEGUN, *flags)
            error = capsys.readouterr().err
            same = (contents(folder), os.stat(folder).st_mtime_ns) == before
            if code != 2 or "holds other files" not in error or not same:
                failures.append((case, flags, error))
        shutil.rmtree(folder)
    tally("directories of others", count * 3, len(failures))
    assert failures == []


def test_empty_directories_and_what_a_kill_leaves_are_begun_in(tmp_path, runs):
    """Negative control of the refusals above."""
    (tmp_path / "r" / ".tmp-model").mkdir(parents=True)
    (tmp_path / "r" / ".lock").write_text("{")
    assert train(tmp_path / "r", *OTHER) == 0
    assert result(tmp_path / "r", 2) == result(runs / "other", 2)


@pytest.mark.parametrize("damage", ["missing", "other", "cut"])
def test_a_run_that_lost_its_experiment_is_replaced_only_if_asked(damage, mine, runs):
    file = mine / "experiment.json"
    text = file.read_text()
    file.write_text({"missing": "", "other": '{"format": 2}', "cut": text[: len(text) // 2]}[damage])
    if damage == "missing":
        file.unlink()
        shutil.rmtree(mine / "checkpoints")  # then its model says whose it is
    before = contents(mine)
    for flags in ((), ("--resume",)):
        assert train(mine, *BEGUN, *flags) == 2
        assert contents(mine) == before
    assert train(mine, *OTHER, "--overwrite") == 0
    assert result(mine, 2) == result(runs / "other", 2)


@pytest.mark.parametrize("name", [".lock", ".begun-run", "log.jsonl", "samples"])
def test_a_link_in_a_strangers_run_leads_to_no_file_of_ours(name, mine, runs, tmp_path, capsys):
    """What is written where it is would be written there; what is only replaced may be a link."""
    precious = shutil.copytree(runs / "other", tmp_path / "precious")
    before, link = contents(precious), mine / name
    if name not in (".lock", ".begun-run"):
        shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.symlink_to(precious / {".lock": "experiment.json", "log.jsonl": "new"}.get(name, ""))
    assert train(mine, "--resume", "--steps", "6") == 2
    assert name in (error := capsys.readouterr().err) or "symbolic links" in error
    code = train(mine, *BEGUN, "--overwrite")
    assert code == (2 if name.startswith(".") else 0)
    assert contents(precious) == before


def test_a_run_may_have_its_model_and_checkpoints_elsewhere(mine, tmp_path):
    """Negative control of the refusal above: as of a user with a large disk."""
    for name in ("model", "checkpoints"):
        shutil.move(mine / name, tmp_path / f"large-{name}")
        (mine / name).symlink_to(tmp_path / f"large-{name}")
    assert train(mine, "--resume", "--steps", "6") == 0
    assert main(["verify", str(mine)]) == 0


def test_a_device_in_place_of_a_checkpoints_file_is_passed_over(mine, capsys):
    (mine / "checkpoints" / "000004" / "manifest.json").unlink()
    (mine / "checkpoints" / "000004" / "manifest.json").symlink_to("/dev/zero")
    assert train(mine, "--resume", *BEGUN) == 0
    assert "000004/manifest.json" in capsys.readouterr().err


def test_files_of_the_user_survive_an_overwrite(mine, runs):
    (mine / "notes.txt").write_text("the best run")
    (mine / "figures").mkdir()
    (mine / "figures" / "1.png").write_text("figure")
    (mine / "metrics.json").write_text("[]")
    assert train(mine, *OTHER, "--overwrite") == 0
    assert (mine / "notes.txt").read_text() == "the best run"
    assert (mine / "figures" / "1.png").read_text() == "figure"
    assert not (mine / "metrics.json").exists()
    assert result(mine, 2) == result(runs / "other", 2)


# What is exchanged is noticed ------------------------------------------------------------------------------------


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def covariance(mine: Path, runs: Path) -> None:
    file = mine / "model/scheduler/scheduler_config.json"
    sigma = json.loads(file.read_text())["covariance"]
    edit(file, covariance=sigma | {"gamma": 0.5})


def schedule(mine: Path, runs: Path) -> None:
    file = mine / "model/scheduler/scheduler_config.json"
    edit(file, schedule=json.loads(file.read_text())["schedule"] | {"beta_max": 0.03})


def prediction(mine: Path, runs: Path) -> None:
    edit(mine / "model/scheduler/scheduler_config.json", prediction_type="sample")


def settings(mine: Path, runs: Path) -> None:
    edit(mine / "experiment.json", learning_rate=0.5)


def identity(mine: Path, runs: Path) -> None:
    edit(mine / "experiment.json", identity={"settings": 3})


def checkpoints(mine: Path, runs: Path) -> None:
    shutil.rmtree(mine / "checkpoints")
    shutil.copytree(runs / "other" / "checkpoints", mine / "checkpoints")


PROCESS = "Σ, the schedule or the data's Gaussian"
EXCHANGED = {
    **dict.fromkeys((covariance, schedule, prediction), PROCESS),
    settings: "settings",
    identity: "has changed",
    checkpoints: "of another run, which differs in the settings",
}


@pytest.mark.parametrize("exchange", EXCHANGED, ids=lambda exchange: exchange.__name__)
def test_what_was_exchanged_is_named_and_nothing_written(exchange, mine, runs, capsys):
    exchange(mine, runs)
    before = contents(mine)
    assert main(["train", "--no-report", "--out", str(mine), "--resume", "--steps", "6"]) == 2
    error = capsys.readouterr().err
    assert EXCHANGED[exchange] in error
    assert contents(mine) == before


def test_another_network_of_the_same_size_is_noticed(mine, monkeypatch, capsys):
    """As if another version of diffusers had another default."""
    built = BUILDERS["unet2d"]

    def other(shape, **options):
        net = built(shape, **options)
        net.register_to_config(act_fn="gelu")
        return net

    monkeypatch.setitem(BUILDERS, "unet2d", wraps(built)(other))
    assert train(mine, "--steps", "6", "--resume") == 2
    assert "the network" in capsys.readouterr().err


def test_a_run_that_nobody_changed_is_resumed_and_a_lost_covariance_built_again(mine, tmp_path):
    """Negative control: the same commands, and nothing is refused."""
    shutil.copytree(mine, tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / "model")
    for folder in (mine, tmp_path / "lost"):
        assert main(["train", "--no-report", "--out", str(folder), "--resume", "--steps", "6"]) == 0
    assert result(mine, 6) == result(tmp_path / "lost", 6)


def test_a_checkpoint_of_another_run_is_passed_over(mine, tmp_path, runs, capsys):
    straight = tmp_path / "straight"
    shutil.copytree(mine, straight)
    shutil.copytree(runs / "other/checkpoints/000002", mine / "checkpoints/000005")
    shutil.copytree(runs / "mine/checkpoints/000002", mine / "checkpoints/000006")  # its own, with another number
    assert train(mine, "--steps", "8", "--resume") == 0
    error = capsys.readouterr().err
    assert "000006/state.json" in error
    assert "000005/state.json" in error
    assert train(straight, "--steps", "8", "--resume") == 0
    assert result(mine, 8) == result(straight, 8)


MANIFESTS = ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000, '{"format": Infinity}', "[]", "\udcff", ""]
SEALED = [
    {},
    {"format": 1, "nidiff": "0.2.0"},
    {"format": 1, "nidiff": "0.2.0", "files": []},
    {"format": 1, "nidiff": "0.2.0", "files": {}},
    {"format": 1, "nidiff": "0.2.0", "files": {"../../experiment.json": {}}},
    {"format": 1, "nidiff": "0.2.0", "files": {"state.json": None}},
    {"format": "1", "files": {}},
]


def test_any_damage_to_the_newest_manifest_falls_back(mine):
    for text in [*MANIFESTS, *(json.dumps(seal(manifest)) for manifest in SEALED)]:
        (mine / "checkpoints" / "000004" / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
        loaded = load_checkpoint(mine / "checkpoints")
        assert loaded.step == 2
        assert loaded.damaged[0].startswith("000004/")


def test_fewer_steps_than_were_done_are_refused_before_anything_is_written(mine, capsys):
    before = contents(mine)
    assert train(mine, "--steps", "3", "--resume") == 2
    assert "--steps=3" in capsys.readouterr().err
    shutil.copytree(mine / "checkpoints", mine.parent / "copy")
    shutil.rmtree(mine / "checkpoints")
    assert train(mine, "--steps", "3", "--resume") == 2
    shutil.move(mine.parent / "copy", mine / "checkpoints")
    assert contents(mine) == before
    assert train(mine, "--steps", "4", "--resume") == 0


def test_an_edited_experiment_is_still_a_config(mine, tmp_path, runs):
    settings(mine, runs)
    with pytest.raises(InputError):
        RunDirectory.open(mine)
    assert main(["train", "--no-report", "--config", str(mine), "--out", str(tmp_path / "new")]) == 0
    assert RunDirectory.open(tmp_path / "new").experiment.learning_rate == 0.5


# What cannot be done is refused at once --------------------------------------------------------------------------

ABSURD = [
    *(("--widths", "80000000"), ("--widths", *["8"] * 40), ("--size", "100000"), ("--layers", "99999")),
    *(("--batch-size", "4" + "0" * 12), ("--num-samples", "1" + "0" * 12), ("--seed", "1" + "0" * 30)),
    *(("--sampler", "cas"), ("--schedule", "ddpm"), ("--data=",), ("--preset=",), ("--config=",), ("--out=",)),
    *(("--dropout", "nan"), ("--learning-rate", "inf"), ("--out", "x" * 300)),
]


@pytest.mark.parametrize("flags", ABSURD, ids=lambda flags: " ".join(flags)[:30])
def test_what_no_machine_can_do_is_refused_before_the_data_are_read(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--out", "r", *TINY, *BEGUN, *flags]) == 2
    error = capsys.readouterr().err
    assert len(error) < 500
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [("--num-samples", "0"), ("--num-samples", "1" + "0" * 12), ("--steps", "0")])
def test_the_demo_refuses_before_it_trains(flags, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo"), *flags]) == 2
    assert "training" not in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_the_demo_looks_at_both_directories_before_it_trains(tmp_path, capsys):
    (tmp_path / "demo" / "digits").mkdir(parents=True)  # that of its second run
    (tmp_path / "demo" / "digits" / "thesis.tex").write_text("work")
    assert main(["demo", "--out", str(tmp_path / "demo"), "--steps", "1", "--num-samples", "1"]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "demo").rglob("*")] == ["digits", "thesis.tex"]


# The trials that end processes, in a program of their own --------------------------------------------------------

Hook = Callable[[str], None]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def watch(folder: Path, operation: Hook) -> None:
    """Call ``operation`` before every operation that changes a file or folder in ``folder``."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & WRITES and belongs(arguments[0]):
            operation("open")
        elif event in CHANGES and belongs(arguments[0]):
            operation(event)

    def belongs(path: object) -> bool:  # rmtree names what it removes relative to an open folder
        return isinstance(path, str | os.PathLike) and (not os.path.isabs(path) or str(path).startswith(str(folder)))

    os.fsync = lambda descriptor: operation("fsync")
    sys.addaudithook(hook)


def forked(work: Callable[[], object]) -> tuple[int, str]:
    """The exit code of ``work`` in a process of its own (9 if it was killed), and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        said, code = io.StringIO(), 70
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                code = int(work() or 0)
        except BaseException:
            said.write(traceback.format_exc())
        os.write(writing, said.getvalue()[-4000:].encode())
        os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), said


class Scenario:
    """A directory as it is before, a command, and what must be true however the command ends."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root, self.out = name, root, root / "out"
        self.flags = {"begin": BEGUN, "overwrite": [*OTHER, "--overwrite"], "resume": [*BEGUN, "--resume"]}[name]
        self.before = {"begin": None, "overwrite": root / "mine", "resume": root / "half"}[name]

    def prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, self.out)
            (self.out / "notes.txt").write_text("the user's")

    def command(self) -> int:
        return train(self.out, *self.flags)

    @cached_property
    def operations(self) -> int:
        """How many there are, if nothing goes wrong."""
        self.prepare()

        def count() -> None:
            seen: list[str] = []
            watch(self.out, seen.append)
            assert self.command() == 0
            print(len(seen))

        code, said = forked(count)
        assert code == 0, said
        return int(said.split()[-1])

    def lost(self) -> str:
        """What is wrong with the directory now; empty if nothing is."""
        if self.before is not None and (self.out / "notes.txt").read_text() != "the user's":
            return "a file of the user has changed"
        run = RunDirectory(self.out)
        begun = run.exists()
        if not begun and self.name != "begin":
            return "the run is gone"
        if self.name == "overwrite" and run.experiment.seed == 0 and not (self.out / ".begun-run").exists():
            shutil.rmtree(self.out / "generated", ignore_errors=True)
            now = contents(self.out)
            now.pop("notes.txt")
            return "" if now == contents(self.root / "mine") else "the old run is not whole"
        steps = "2" if self.name == "overwrite" else "4"
        again = ["--resume", "--no-report", "--steps", steps] if begun else [*TINY, *BEGUN]
        code, said = forked(lambda: main(["train", "--out", str(self.out), *again]))
        if code:
            return f"it cannot go on: {said[-300:]}"
        step, like = (2, "other") if self.name == "overwrite" else (4, "mine")
        if result(self.out, step) != result(self.root / like, step):
            return "it went on to something else"
        names = {path.name for path in self.out.iterdir() if not path.name.startswith(".tmp-")} - {"notes.txt"}
        same = sorted(names) == sorted(path.name for path in (self.root / like).iterdir())
        return "" if same else f"it holds {sorted(names)}"


def killed_at_operations(scenario: Scenario, count: int) -> tuple[int, list[str]]:
    """A real end of the process before the n-th operation, for ``count`` of them, or all if there are fewer."""
    total, failures = scenario.operations, []
    moments = random.Random(scenario.name).sample(range(total), min(total, count))
    for moment in moments:
        scenario.prepare()

        def work(moment: int = moment) -> int:
            left = iter(range(moment))
            watch(scenario.out, lambda event: None if next(left, None) is not None else os._exit(9))
            return scenario.command()

        code, said = forked(work)
        if code != 9:
            failures.append(f"operation {moment}: exit {code} {said[-300:]}")
        elif lost := scenario.lost():
            failures.append(f"operation {moment} of {total}: {lost}")
    return len(moments), failures


FAILING = {
    errno.ENOSPC: ("open", "os.mkdir", "fsync"),
    errno.EROFS: ("open", "fsync", *CHANGES),
    errno.EACCES: ("open", *CHANGES),
}


def disk_fails(scenario: Scenario, count: int) -> tuple[int, list[str]]:
    """From the n-th operation on, writing fails: one sentence, and nothing is lost."""
    total, failures = scenario.operations, []
    draw = random.Random(f"{scenario.name} fails")
    moments = [(moment, number) for moment in range(total) for number in FAILING]
    moments = draw.sample(moments, min(len(moments), count))
    for moment, number in moments:
        scenario.prepare()

        def work(moment: int = moment, number: int = number) -> int:
            left = iter(range(moment))

            def fail(event: str) -> None:
                if next(left, None) is None and event in FAILING[number]:
                    raise OSError(number, os.strerror(number))

            watch(scenario.out, fail)
            return scenario.command()

        code, said = forked(work)
        where = f"operation {moment} of {total}, {errno.errorcode[number]}"
        last = said.rstrip().splitlines()[-1] if said.strip() else ""
        if code not in (0, 2) or "Traceback" in said or (code == 2 and not last.startswith("nidiff: ")):
            failures.append(f"{where}: exit {code} {said[-1500:]}")
        elif lost := scenario.lost():
            failures.append(f"{where}: {lost}")
    return len(moments), failures


def two_writers(root: Path, count: int) -> tuple[int, list[str]]:
    """Two at the same moment: one trains, and the other is told why not."""
    failures = []
    for case in range(count):
        out = root / "both"
        shutil.rmtree(out, ignore_errors=True)
        ready, go = os.pipe()
        children = []
        for writer in range(2):
            child = os.fork()
            if child == 0:
                os.close(go)
                os.read(ready, 1)
                said = io.StringIO()
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    code = train(out, *OTHER)
                (root / f"said{writer}").write_text(said.getvalue())
                os._exit(code)
            children.append(child)
        os.close(ready)
        os.close(go)  # both see the end of the pipe at once
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        said = "".join((root / f"said{writer}").read_text() for writer in range(2))
        told = "in use by process" in said or "already holds a run" in said
        if codes != [0, 2] or not told or result(out, 2) != result(root / "other", 2):
            failures.append(f"case {case}: {codes} {said[-500:]}")
    return count, failures


def killed_at_random_moments(root: Path, kills: int) -> tuple[int, list[str]]:
    """SIGKILL, and resumed each time: the same bits as a run that nobody disturbed."""
    draw, out = random.Random(0), root / "killed"
    began = time.perf_counter()
    assert forked(lambda: train(root / "timed", "--steps", "4"))[0] == 0
    span = time.perf_counter() - began  # how long a run needs here to get to its first checkpoints

    def go(*flags: str) -> int:
        return train(out, *flags, *(["--resume"] if RunDirectory(out).exists() else []))

    for _ in range(kills):
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
                os._exit(go("--steps", "1000000"))  # it never ends by itself
        time.sleep(draw.uniform(0, span))  # the random moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    steps = max([int(path.name) for path in list_checkpoints(out / "checkpoints")], default=0) + 3
    code, said = forked(lambda: go("--steps", str(steps)))
    assert forked(lambda: train(root / "straight", "--steps", str(steps)))[0] == 0
    failures = [f"exit {code}: {said[-1000:]}"] if code else []
    if not failures and result(out, steps) != result(root / "straight", steps):
        failures.append(f"after {steps} steps it came to something else")
    return kills, failures


def main_program(root: Path) -> Iterator[tuple[str, tuple[int, list[str]]]]:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # a kill, unlike a power cut, loses nothing that was written
    assert train(root / "mine", *BEGUN) == 0  # here, so that no child has to import it all again
    assert forked(lambda: train(root / "half", "--steps", "2"))[0] == 0
    assert forked(lambda: train(root / "other", *OTHER))[0] == 0
    many = 1 if CASES == 1 else 2 * CASES
    for name, kills, faults in (("begin", 2, 1), ("overwrite", 3, 1), ("resume", 2, 1)):
        scenario = Scenario(name, root)
        yield f"killed at a file operation: {name}", killed_at_operations(scenario, kills * many)
        yield f"disk that fails: {name}", disk_fails(scenario, faults * many)
    yield "two writers at once", two_writers(root, min(CASES, 20))
    yield "killed at random moments of one run", killed_at_random_moments(root, 100 if CASES >= 20 else 4)


if __name__ == "__main__":
    print(json.dumps(dict(main_program(Path(sys.argv[1])))))
