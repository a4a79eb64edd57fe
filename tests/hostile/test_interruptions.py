"""A command that is stopped, or has no room: one line and an exit code, whenever it happens."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import CASES
from test_runs import BEGUN, forked, result, train

import nidiff
from nidiff.cli import COMMANDS, main
from nidiff.training.checkpoint import list_checkpoints, load_checkpoint

PROGRAM = [sys.executable, "-m", "nidiff"]
WIDTHS = ("0", "1", "2", "3", "5", "7", "10", "20", "40", "59", "-1", "1000000", "words", "1e3", "")


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc says which signals a process catches")
def test_a_signal_at_any_moment_of_the_start_ends_it_in_one_line(tmp_path, tally):
    """While it imports, parses and opens; not before Python has come to our first line, which nobody can catch."""
    draw, count, wrong = random.Random("signals"), 4 * CASES, []
    commands = [
        ["train", "--help"],
        ["noise", "--out", str(tmp_path / "x.png")],
        ["sample", "turbulence", "--seeds", "0"],
    ]
    spans: dict[str, float] = {}
    for command in commands:
        began = time.perf_counter()
        subprocess.run([*PROGRAM, *command], cwd=tmp_path, capture_output=True, check=True)
        spans[command[0]] = time.perf_counter() - began
    for case in range(count):
        command, number = draw.choice(commands), draw.choice((signal.SIGINT, signal.SIGTERM))
        with subprocess.Popen(
            [*PROGRAM, *command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None and not catches(process, signal.SIGTERM):
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.8 * spans[command[0]]))  # the random moment
            process.send_signal(number)
            _, said = process.communicate()
        is_line = said.count("\n") == 1 and said.startswith("nidiff: ")
        if not (process.returncode == 130 and is_line) and process.returncode != 0:  # it had ended before
            wrong.append(f"{case} {command[0]} {number.name}: exit {process.returncode} {said[-1000:]}")
    tally("signals at start-up", count, len(wrong))
    assert not wrong, "\n".join(wrong)


def test_help_ends_in_a_terminal_of_any_width(monkeypatch, capsys, tally):
    draw, wrong = random.Random("widths"), []
    cases = [(width, name) for width in WIDTHS for name in COMMANDS]
    cases = cases if CASES > 1 else draw.sample(cases, 12)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it never ends"))
    for width, name in cases:
        monkeypatch.setenv("COLUMNS", width)
        signal.alarm(60)
        code = main([name, "--help"])
        signal.alarm(0)
        if code or not capsys.readouterr().out.strip():
            wrong.append(f"{name} --help with COLUMNS={width}: exit {code}")
    tally("widths of the terminal", len(cases), len(wrong))
    assert not wrong, "\n".join(wrong)


def used() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc says how much memory a process has")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_training_without_memory_ends_in_one_sentence_and_its_checkpoints_stay_whole(tmp_path, tally):
    """With a limit that leaves it a few megabytes, from the start on or from a step on; then it goes on without one."""
    draw, wrong, count = random.Random("memory"), [], 4 * CASES
    flags = [*BEGUN, "--widths", "32", "--batch-size", "64"]
    assert train(tmp_path / "whole", *flags) == 0
    for case in range(count):
        out, spare, at = tmp_path / f"{case}", draw.randrange(0, 60) << 20, draw.randrange(4)

        def work(out: Path = out, spare: int = spare, at: int = at) -> int:
            from nidiff.training import loop

            take = loop.train_step

            def limited(trainer, batches):
                if trainer.step == at:
                    resource.setrlimit(resource.RLIMIT_AS, (used() + spare, resource.RLIM_INFINITY))
                return take(trainer, batches)

            loop.train_step = limited
            return train(out, *flags)

        code, said = forked(work)
        last = said.rstrip().splitlines()[-1] if said.strip() else ""
        problem = "" if code == 0 or (code == 2 and "not enough memory" in last) else f"exit {code} {said[-1500:]}"
        saved = list_checkpoints(out / "checkpoints")
        if saved and load_checkpoint(out / "checkpoints").damaged:
            problem = "a checkpoint is damaged"
        if not problem and (train(out, *flags, "--resume") or result(out, 4) != result(tmp_path / "whole", 4)):
            problem = "it went on to something else"
        wrong += [f"{spare >> 20} MB at step {at}: {problem}"] if problem else []
        shutil.rmtree(out)
    tally("memory that runs out", count, len(wrong))
    assert not wrong, "\n".join(wrong)


def test_a_checkpoint_given_as_a_model_is_whole_or_refused(tmp_path, tally):
    """Any file of it or of its run's outline is damaged, deleted or emptied: the same images, or an `InputError`."""
    run, draw, wrong, count = tmp_path / "run", random.Random("checkpoints"), [], 20 * CASES
    assert train(run, *BEGUN) == 0
    path = run / "checkpoints/000002"
    right = {name: value.clone() for name, value in nidiff.load_model(path).net.state_dict().items()}
    files = [*path.iterdir(), run / "experiment.json", *(file for file in (run / "model").rglob("*") if file.is_file())]
    for case in range(count):
        file, kind = draw.choice(files), draw.choice(("flipped", "deleted", "emptied", "random", "a device"))
        content = file.read_bytes()
        if kind == "flipped":
            place = draw.randrange(len(content))
            file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        elif kind in ("emptied", "random"):
            file.write_bytes(b"" if kind == "emptied" else draw.randbytes(len(content)))
        else:
            file.unlink()
            if kind == "a device":
                os.mkfifo(file)
        try:
            found = nidiff.load_model(path)
            if not all(found.net.state_dict()[name].equal(value) for name, value in right.items()):
                wrong.append(f"{case} {file.name} {kind}: other weights")
        except nidiff.InputError:
            pass
        except Exception as error:
            wrong.append(f"{case} {file.name} {kind}: {type(error).__name__}: {error}"[:300])
        file.unlink(missing_ok=True)
        file.write_bytes(content)
    tally("damaged checkpoints given as models", count, len(wrong))
    assert not wrong, "\n".join(wrong)
