"""Every file of a run, damaged in every way we can think of, and then every command that reads it.

What a command may do: end with 2 and one sentence, or do exactly what it would have done with the whole file. It may
not fail in another way, and above all not succeed with another result.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import CASES
from safetensors.torch import load_file

from nidiff.cli import main
from nidiff.report.html import write_report

TINY = """--widths 8 --attention 0 --layers 1 --batch-size 4 --warmup 0 --cooldown 0 --checkpoint-every 2 --keep 0
    --num-samples 1 --num-steps 2 --precision fp32""".split()  # noqa: SIM905 - as it is typed
SAMPLING = "--sampler ddim:eta=1 --num-steps 2 --seeds 0-3 --floats".split()  # noqa: SIM905
MEASURING = "--features pixels --seeds 0-7 --num-steps 2 --num-real 20 --bootstrap 0 --json".split()  # noqa: SIM905
QUICK = 16  # damages tried by `make test`


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def digit(content: bytes, draw: random.Random) -> bytes:
    """Another digit in place of one: still well-formed, and another number."""
    places = [i for i, byte in enumerate(content) if chr(byte).isdecimal()]
    if not places:
        return flip(content, draw)
    at = draw.choice(places)
    return content[:at] + str((int(chr(content[at])) + draw.randint(1, 8)) % 10).encode() + content[at + 1 :]


def word(content: bytes, draw: random.Random) -> bytes:
    """Another value where a value is, as someone who edits the file would give it."""
    pairs = [(b"epsilon", b"sample"), (b"silu", b"gelu"), (b"cosine", b"linear"), (b"true", b"false"), (b"1.0", b"2.0")]
    found = [pair for pair in pairs if pair[0] in content]
    return content.replace(*draw.choice(found)) if found else digit(content, draw)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "a bit flipped": flip,
    "a digit changed": digit,
    "a word changed": word,
    "cut short": lambda content, draw: content[: draw.randrange(max(1, len(content)))],
    "emptied": lambda content, draw: b"",
    "deleted": lambda content, draw: None,
    "random bytes": lambda content, draw: draw.randbytes(len(content)),
    "bytes added": lambda content, draw: content + draw.randbytes(draw.randint(1, 40)),
    "nested 100,000 deep": lambda content, draw: b"[" * 100_000 + b"]" * 100_000,
    "5,000 digits": lambda content, draw: b'{"format": ' + b"7" * 5000 + b"}",
    "infinite": lambda content, draw: b'{"format": Infinity, "step": -Infinity, "files": NaN}',
    "another type": lambda content, draw: draw.choice([b"[]", b"null", b'"text"', b"3", b"{}", b'[{"run": 1}]']),
}
# What nobody promises to check: pictures and texts made from the rest, and logs of the past.
TEXTS = ("README.md", "report.html", "log.jsonl", "grid.png", ".tfevents", "samples/")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, and another whose Σ, seed and activation differ."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in {"run": [], "other": ["--covariance", "matern:length_scale=2", "--seed", "3"]}.items():
        assert main(["train", "--out", str(folder / name), "--steps", "4", *TINY, *flags]) == 0
        assert main(["sample", str(folder / name), *SAMPLING]) == 0
        assert main(["evaluate", str(folder / name), *MEASURING]) == 0
    return {name: folder / name for name in ("run", "other")}


def resumed(run: Path, out: Path) -> object:
    code = main(["train", "--resume", "--out", str(run), "--steps", "6"])
    return code or [
        {name: tensor.numpy().tobytes() for name, tensor in load_file(run / place).items()}
        for place in ("checkpoints/000006/model.safetensors", "checkpoints/000006/ema.safetensors")
    ]


def sampled(run: Path, out: Path) -> object:
    code = main(["sample", str(run), "--out", str(out), *SAMPLING])
    return code or np.load(out / "samples.npz")["arr_0"].tobytes()


def averaged(run: Path, out: Path) -> object:
    """The images of a checkpoint before the last."""
    code = main(["sample", str(run), "--checkpoint", "2", "--out", str(out), *SAMPLING])
    return code or np.load(out / "samples.npz")["arr_0"].tobytes()


def sampled_again(run: Path, out: Path) -> object:
    """Into the folder in the run that has the images already."""
    code = main(["sample", str(run), *SAMPLING])
    (file,) = run.glob("generated/ddim*/samples.npz")
    return code or np.load(file)["arr_0"].tobytes()


def measured(run: Path, out: Path) -> object:
    return main(["evaluate", str(run), *MEASURING])


def reported(run: Path, out: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nidiff.report.html.write_report", write_report)
        return main(["report", str(run)])


def verified(run: Path, out: Path) -> object:
    return main(["verify", str(run)])


COMMANDS = {"train --resume": resumed, "sample": sampled, "sample again": sampled_again, "evaluate": measured}
COMMANDS |= {"sample --checkpoint": averaged, "report": reported, "verify": verified}


@pytest.fixture(scope="module")
def right(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What each command gives on the whole run."""
    found = {}
    for name, command in COMMANDS.items():
        folder = tmp_path_factory.mktemp("right")
        shutil.copytree(runs["run"], folder / "run")
        found[name] = command(folder / "run", folder / "out")
        assert found[name] != 2
    return found


def checked_files(run: Path) -> list[Path]:
    files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    return [file for file in files if not any(text in str(file) for text in TEXTS)]


def test_a_damaged_file_is_named_or_makes_no_difference(runs, right, tmp_path, capfd, tally):
    draw, files, wrong = random.Random("damage"), checked_files(runs["run"]), []
    assert len(files) >= 15
    for case in range(QUICK * CASES):
        file, (kind, damage) = draw.choice(files), draw.choice([*DAMAGES.items()])
        command = draw.choice([*COMMANDS])
        run = tmp_path / f"{case}" / "run"
        shutil.copytree(runs["run"], run)
        content = damage((run / file).read_bytes(), draw)
        (run / file).unlink() if content is None else (run / file).write_bytes(content)
        if problem := _problem(command, run, right, capfd):
            wrong.append(f"{file} {kind}, then {command}: {problem}")
        shutil.rmtree(run.parent)
    tally("damaged files of a run", QUICK * CASES, len(wrong))
    assert not wrong, "\n".join(wrong)


def test_a_file_of_another_run_is_named_or_makes_no_difference(runs, right, tmp_path, capfd, tally):
    draw, wrong = random.Random("exchanged"), []
    both = [file for file in checked_files(runs["run"]) if (runs["other"] / file).is_file()]
    folders = [Path(name) for name in ("model", "model/scheduler", "model/unet", "checkpoints/000004", "checkpoints")]
    cases = [*(both if CASES > 1 else draw.sample(both, 3)), *folders]
    for case, (place, command) in enumerate((place, command) for place in cases for command in _commands(draw)):
        run = tmp_path / f"{case}" / "run"
        shutil.copytree(runs["run"], run)
        shutil.rmtree(run / place) if (run / place).is_dir() else (run / place).unlink()
        copy = shutil.copytree if (runs["other"] / place).is_dir() else shutil.copy
        copy(runs["other"] / place, run / place)
        if problem := _problem(command, run, right, capfd):
            wrong.append(f"{place} of another run, then {command}: {problem}")
        shutil.rmtree(run.parent)
    tally("files of a run exchanged for another's", case + 1, len(wrong))
    assert not wrong, "\n".join(wrong)


def _commands(draw: random.Random) -> list[str]:
    return [*COMMANDS] if CASES > 1 else [draw.choice(["train --resume", "sample"])]


def _problem(command: str, run: Path, right: dict[str, object], capfd: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command takes the run, or nothing."""
    capfd.readouterr()
    try:
        found = COMMANDS[command](run, run.parent / "out")
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("nidiff: ")]
    if found == 2:
        return "" if len(lines) == 1 else f"{len(lines)} sentences"
    return "" if found == right[command] else "it succeeded with another result"
