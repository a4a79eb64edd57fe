"""A run directory loses nothing: not by a kill, a full disk, a second writer, or files that are not the run's own."""

import contextlib
import errno
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
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
    """Three runs: ``mine``, the first ``half`` of it, and ``other``."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in {"mine": BEGUN, "half": ["--steps", "2"], "other": OTHER}.items():
        assert train(folder / name, *flags) == 0
    return folder


@pytest.fixture
def mine(runs, tmp_path) -> Path:
    shutil.copytree(runs / "mine", tmp_path / "mine")
    return tmp_path / "mine"


# Kills, full disks, two writers ----------------------------------------------------------------------------------

Hook = Callable[[str], None]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
FAILING = {
    errno.ENOSPC: ("open", "os.mkdir", "fsync"),
    errno.EROFS: ("open", "fsync", *CHANGES),
    errno.EACCES: ("open", *CHANGES),
}
MANY = 1 if CASES == 1 else 2 * CASES
pytestmark = pytest.mark.filterwarnings("ignore:.*fork")


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


def begin_fork(work: Callable[[], object]) -> tuple[int, int]:
    """``work`` in a process of its own: its number, and where to read what it says."""
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
    return child, reading


def end_fork(child: int, reading: int) -> tuple[int, str]:
    """Its exit code (9 if it was killed), and what it said."""
    with open(reading, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), said


def forked(work: Callable[[], object]) -> tuple[int, str]:
    return end_fork(*begin_fork(work))


class Scenario:
    """A directory as it is before, a command, and what must be true however the command ends."""

    def __init__(self, name: str, runs: Path, out: Path) -> None:
        self.name, self.runs, self.out = name, runs, out
        self.flags = {"begin": BEGUN, "overwrite": [*OTHER, "--overwrite"], "resume": [*BEGUN, "--resume"]}[name]
        self.before = {"begin": None, "overwrite": runs / "mine", "resume": runs / "half"}[name]

    def run(self, hook: Hook) -> tuple[int, str]:
        """The command in a process of its own, in which ``hook`` is called before every operation."""
        shutil.rmtree(self.out, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, self.out)
            (self.out / "notes.txt").write_text("the user's")

        def work() -> int:
            watch(self.out, hook)
            return train(self.out, *self.flags)

        return forked(work)

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
            return "" if now == contents(self.runs / "mine") else "the old run is not whole"
        step, like = (2, "other") if self.name == "overwrite" else (4, "mine")
        again = ["--resume", "--no-report", "--steps", str(step)] if begun else [*TINY, *BEGUN]
        code, said = forked(lambda: main(["train", "--out", str(self.out), *again]))
        if code:
            return f"it cannot go on: {said[-300:]}"
        if result(self.out, step) != result(self.runs / like, step):
            return "it went on to something else"
        names = {path.name for path in self.out.iterdir() if not path.name.startswith(".tmp-")} - {"notes.txt"}
        same = sorted(names) == sorted(path.name for path in (self.runs / like).iterdir())
        return "" if same else f"it holds {sorted(names)}"


@pytest.mark.parametrize(("name", "kills"), [("begin", 2), ("overwrite", 3), ("resume", 2)])
def test_nothing_is_lost_by_a_kill_or_by_a_disk_that_fails(name, kills, runs, tmp_path, tally):
    """The process ends before the n-th operation, or from the n-th on, writing fails, which is one sentence."""
    scenario, draw = Scenario(name, runs, tmp_path / "out"), random.Random(name)
    counter = tmp_path / "counter"
    code, said = scenario.run(lambda event: counter.open("a").write("1"))
    assert code == 0, said
    total, failures = len(counter.read_text()), []
    for moment in draw.sample(range(total), min(total, kills * MANY)):
        left = iter(range(moment))
        code, said = scenario.run(lambda event, left=left: None if next(left, None) is not None else os._exit(9))
        if lost := f"exit {code} {said[-300:]}" if code != 9 else scenario.lost():
            failures.append(f"killed at operation {moment} of {total}: {lost}")
    tally(f"killed at a file operation: {name}", min(total, kills * MANY), len(failures))
    moments = [(moment, number) for moment in range(total) for number in FAILING]
    moments = draw.sample(moments, min(len(moments), MANY))
    for moment, number in moments:
        left = iter(range(moment))

        def fail(event: str, left=left, number=number) -> None:
            if next(left, None) is None and event in FAILING[number]:
                raise OSError(number, os.strerror(number))

        code, said = scenario.run(fail)
        last = said.rstrip().splitlines()[-1] if said.strip() else ""
        refused = code == 2 and last.startswith("nidiff: ") and "Traceback" not in said
        if lost := scenario.lost() if code == 0 or refused else f"exit {code} {said[-1500:]}":
            failures.append(f"operation {moment} of {total}, {errno.errorcode[number]}: {lost}")
    tally(f"disk that fails: {name}", len(moments), len(failures))
    assert failures == []


def test_of_two_writers_at_once_one_trains_and_the_other_is_told_why_not(runs, tmp_path, tally):
    count = min(CASES, 20)
    for case in range(count):
        out = tmp_path / str(case)
        ready, go = os.pipe()

        def work(out: Path = out, ready: int = ready, go: int = go) -> int:
            os.close(go)
            os.read(ready, 1)
            return train(out, *OTHER)

        children = [begin_fork(work) for _ in range(2)]
        os.close(ready)
        os.close(go)  # both see the end of the pipe at once
        (first, one), (second, other) = (end_fork(*child) for child in children)
        assert sorted((first, second)) == [0, 2], one + other
        assert "is in use by" in one + other or "already holds a run" in one + other
        assert result(out, 2) == result(runs / "other", 2)
    tally("two writers at once", count, 0)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path, tally):
    """By SIGKILL at random moments, and resumed each time."""
    draw, out, kills = random.Random(0), tmp_path / "killed", 100 if CASES >= 20 else 4
    began = time.perf_counter()
    assert train(tmp_path / "timed", "--steps", "4") == 0
    span = time.perf_counter() - began  # how long a run needs here to get to its first checkpoints

    def go(steps: int) -> int:
        return train(out, "--steps", str(steps), *(["--resume"] if RunDirectory(out).exists() else []))

    for _ in range(kills):
        child = begin_fork(lambda: go(1_000_000))  # it never ends by itself
        time.sleep(draw.uniform(0, span))  # the random moment
        os.kill(child[0], signal.SIGKILL)
        end_fork(*child)
    steps = max([int(path.name) for path in list_checkpoints(out / "checkpoints")], default=0) + 3
    assert go(steps) == 0
    assert train(tmp_path / "straight", "--steps", str(steps)) == 0
    assert result(out, steps) == result(tmp_path / "straight", steps)
    tally("killed at random moments of one run", kills, 0)


def test_a_second_writer_is_told_who_has_the_directory(mine, capsys):
    """Another training of the run, or a job that draws its samples."""
    before, job = contents(mine), mine / "generated" / "job"
    for folder, flags in ((mine, "--resume"), (mine, "--overwrite"), (job, "--overwrite")):
        with claimed(folder):
            assert train(mine, *BEGUN, flags) == 2
            assert f"in use by process {os.getpid()} on {os.uname().nodename}" in capsys.readouterr().err
        assert contents(mine) == before


# Directories of other people -------------------------------------------------------------------------------------

THEIRS = ("thesis.tex", "data.csv", "run.json", "checkpoint.pt", "notes", ".git", "000500", "é", "a b")
EXPERIMENTS = (
    *(b"", b"{}", b"[]", b"null", b'{"format": 2, "steps": 5}', b"[" * 100_000, b"\xff\xfe"),
    b'{"experiment_id": "7", "lifecycle_stage": "active", "name": "mlflow"}',
    b'{"format": 2, "covariance": "white", "schedule": "vp", "steps": "many"}',
)
INNER = ("000500/manifest.json", "manifest.json", "scheduler/scheduler_config.json", "x")


def foreign(folder: Path, draw: random.Random) -> None:
    """Names of ours and of others, with contents that nidiff did not write."""
    names = draw.sample((*FILES, *FOLDERS, *THEIRS), draw.randint(1, 6))
    for name in names:
        path = folder / name
        if name == "experiment.json":
            path.write_bytes(draw.choice(EXPERIMENTS))
        elif name in FOLDERS or draw.random() < 0.3:
            for inner in draw.sample(INNER, 2):
                (path / inner).parent.mkdir(parents=True, exist_ok=True)
                (path / inner).write_bytes(draw.choice((b"", b"{}", b"work", b'{"_class_name": "DDPMScheduler"}')))
        else:
            path.write_bytes(draw.randbytes(20))


def test_a_directory_of_somebody_else_or_a_run_that_lost_its_experiment_is_never_touched(mine, tmp_path, capsys, tally):
    count, failures, text = 15 * CASES, [], (mine / "experiment.json").read_text()
    for case in (*range(count), text[: len(text) // 2], '{"format": 2}', ""):
        folder = tmp_path / str(case) if isinstance(case, int) else mine
        if isinstance(case, int):
            folder.mkdir()
            foreign(folder, random.Random(case))
        else:
            (folder / "experiment.json").write_text(case) if case else (folder / "experiment.json").unlink()
        before = contents(folder), os.stat(folder).st_mtime_ns
        for flags in ((), ("--overwrite",), ("--resume",)):
            code = train(folder, *BEGUN, *flags)
            error = capsys.readouterr().err
            same = (contents(folder), os.stat(folder).st_mtime_ns) == before
            if code != 2 or "holds other files" not in error or not same:
                failures.append((case, flags, error))
    tally("directories of others", (count + 3) * 3, len(failures))
    assert failures == []


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


def test_files_of_the_user_survive_an_overwrite(mine, runs):
    (mine / "figures").mkdir()
    for name in ("figures/1.png", "metrics.json"):
        (mine / name).write_text("[]")
    assert train(mine, *OTHER, "--overwrite") == 0
    assert (mine / "figures" / "1.png").read_text() == "[]"
    assert not (mine / "metrics.json").exists()
    assert result(mine, 2) == result(runs / "other", 2)


# What is exchanged is noticed ------------------------------------------------------------------------------------


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def exchange_checkpoints(mine: Path, runs: Path) -> None:
    shutil.rmtree(mine / "checkpoints")
    shutil.copytree(runs / "other" / "checkpoints", mine / "checkpoints")


def test_what_was_exchanged_is_named_and_nothing_written(mine, runs, capsys):
    config, experiment = mine / "model/scheduler/scheduler_config.json", mine / "experiment.json"
    stored = json.loads(config.read_text())
    process = "Σ, the schedule or the data's Gaussian"
    exchanges = [
        (lambda: edit(config, covariance=stored["covariance"] | {"gamma": 0.5}), process),
        (lambda: edit(config, schedule=stored["schedule"] | {"beta_max": 0.03}), process),
        (lambda: edit(config, prediction_type="sample"), process),
        (lambda: edit(experiment, learning_rate=0.5), "the settings"),
        (lambda: edit(experiment, identity={"settings": 3}), "the data"),
        (lambda: exchange_checkpoints(mine, runs), "of another run, which differs in the settings"),
    ]
    for exchange, words in exchanges:
        shutil.rmtree(mine)
        shutil.copytree(runs / "mine", mine)
        exchange()
        before = contents(mine)
        assert main(["train", "--no-report", "--out", str(mine), "--resume", "--steps", "6"]) == 2
        assert words in capsys.readouterr().err
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


def test_a_lost_covariance_is_built_again_and_a_checkpoint_of_another_run_passed_over(mine, runs, tmp_path, capsys):
    """Negative control: the same commands, and nothing is refused; one of the runs nobody changed."""
    lost, mixed = (shutil.copytree(mine, tmp_path / name) for name in ("lost", "mixed"))
    shutil.rmtree(lost / "model")
    shutil.copytree(runs / "other/checkpoints/000002", mixed / "checkpoints/000005")
    shutil.copytree(runs / "mine/checkpoints/000002", mixed / "checkpoints/000006")  # its own, with another number
    for folder in (mine, lost, mixed):
        assert main(["train", "--no-report", "--out", str(folder), "--resume", "--steps", "8"]) == 0
        assert result(folder, 8) == result(mine, 8)
    error = capsys.readouterr().err
    assert "000006/state.json" in error
    assert "000005/state.json" in error


MANIFESTS = ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000, '{"format": Infinity}', "[]", "\udcff", ""]
SEALED = [
    *({}, {"format": 1}, {"format": 1, "files": []}, {"format": 1, "files": {}}, {"format": "1", "files": {}}),
    *({"format": 1, "files": {"../../experiment.json": {}}}, {"format": 1, "files": {"state.json": None}}),
]


def test_any_damage_to_the_newest_manifest_falls_back(mine):
    manifest = mine / "checkpoints" / "000004" / "manifest.json"
    for text in [*MANIFESTS, *(json.dumps(seal(manifest)) for manifest in SEALED), None]:
        manifest.unlink()
        if text is None:
            manifest.symlink_to("/dev/zero")
        else:
            manifest.write_bytes(text.encode(errors="surrogateescape"))
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


def test_an_edited_experiment_is_still_a_config(mine, tmp_path):
    edit(mine / "experiment.json", learning_rate=0.5)
    with pytest.raises(InputError):
        RunDirectory.open(mine)
    assert main(["train", "--no-report", "--config", str(mine), "--out", str(tmp_path / "new")]) == 0
    assert RunDirectory.open(tmp_path / "new").experiment.learning_rate == 0.5


def test_the_demo_looks_at_both_directories_before_it_trains(tmp_path, capsys):
    (tmp_path / "demo" / "digits").mkdir(parents=True)  # that of its second run
    (tmp_path / "demo" / "digits" / "thesis.tex").write_text("work")
    assert main(["demo", "--out", str(tmp_path / "demo"), "--steps", "1", "--num-samples", "1"]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "demo").rglob("*")] == ["digits", "thesis.tex"]
