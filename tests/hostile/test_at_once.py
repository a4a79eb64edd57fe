"""Three processes write to one place at once, with every command and function that writes: nothing is lost.

Each ends with 0, having done what it was asked for, or with 2 and one sentence; what is there afterwards is whole, and
nothing of the user's beside it has changed.
"""

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.backends.backend_agg  # noqa: F401 - what each process would import anew
import numpy as np
import pytest
import torch
import xarray  # noqa: F401
import zarr  # noqa: F401
from conftest import CASES
from PIL import Image
from problems import untrained_model
from test_runs import TINY, begin_fork, end_fork

import nidiff
from nidiff.cli import main
from nidiff.evaluation.results import read_results
from nidiff.files import is_aside, replaced_name
from nidiff.generation.restoration import FACTS
from nidiff.interop import NonIsotropicPipeline
from nidiff.locks import LOCK
from nidiff.model.zoo import Picture, check_entry

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from packing import pack

ROUNDS, PROCESSES = CASES, 3
FEW = ["--samples", "2", "--num-steps", "2"]
DRAWN = ["--seeds", "0-3", "--num-steps", "2"]
PIXELS = ["--features", "pixels", "--num-real", "20", "--bootstrap", "0"]
pytestmark = pytest.mark.filterwarnings("ignore:.*fork")
Work = Callable[[int], object]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A finished run, the first half of it, and three digits."""
    folder = tmp_path_factory.mktemp("shared")
    for name, steps in (("run", "4"), ("half", "2")):
        assert main(["train", "--out", str(folder / name), *TINY, "--steps", steps]) == 0
    np.save(folder / "digits.npy", nidiff.load_dataset("digits").stored(torch.arange(2))[:, 0].numpy())
    untrained_model(folder / "model")
    return folder


def at_once(work: Work) -> list[tuple[int, str]]:
    """``work(0)``, ``work(1)``, … in processes that begin together: their exit codes, and what they said."""
    ready, go = os.pipe()

    def waiting(number: int) -> int:
        os.close(go)
        os.read(ready, 1)  # until the end of the pipe, which all see at once
        return int(work(number) or 0)

    children = [begin_fork(lambda number=number: waiting(number)) for number in range(PROCESSES)]
    os.close(ready)
    os.close(go)
    return [end_fork(*child) for child in children]


def verified(*folders: Path, of: str = "") -> bool:
    """Whether they are as they were written, and the first has the file ``of``."""
    return main(["verify", *map(str, folders)]) == 0 and (folders[0] / of).exists()


def is_picture(file: Path) -> bool:
    with Image.open(file) as picture:
        picture.verify()
    return True


def trained(out: Path, step: int) -> bool:
    return (out / "checkpoints" / f"{step:06d}").is_dir() and verified(out)


def drawn(out: Path, codes: Sequence[int]) -> bool:
    """The seeds 0-3 of the first process, 1-4 of the second, …, of all that ended well."""
    with np.load(out / "samples.npz") as stored:
        seeds = {*stored["seeds"].tolist()}
    return verified(out) and all({*range(n, n + 4)} <= seeds for n, code in enumerate(codes) if code == 0)


# Each writes to a folder: its arguments, whether it is to hold a copy of the run or of its half, and a check.
Check = Callable[[Path, Sequence[int]], bool]
COMMANDS: dict[str, tuple[str, str | None, Check]] = {
    "train": ("train --out OUT TINY --steps 2", None, lambda out, _: trained(out, 2)),
    "train --resume": ("train --out OUT TINY --steps 4 --resume", "half", lambda out, _: trained(out, 4)),
    "train --overwrite": (
        "train --out OUT TINY --steps 2 --overwrite --seed NUMBER", "run", lambda out, _: trained(out, 2)),
    "sample": ("sample RUN --out OUT --num-steps 2 --format zarr --seeds FOUR", None, drawn),
    "restore": (
        "restore RUN DIGITS --mask left FEW --format zarr --out OUT", None, lambda out, _: verified(out, of=FACTS)),
    "restore, another each": (
        "restore RUN DIGITS --mask left FEW --seed NUMBER --out OUT", None,
        lambda out, codes: verified(out) and codes.count(0) == 1),
    "denoise": ("denoise RUN DIGITS --noise 40 FEW --out OUT", None, lambda out, _: verified(out, of=FACTS)),
    "evaluate": (
        "evaluate OUT DRAWN PIXELS", "run",
        lambda out, _: verified(out) and len(read_results(out / "metrics.json")) == 1),
    "evaluate, another each": (
        "evaluate OUT PIXELS --num-steps 2 --seeds FOUR --clip 1.NUMBER", "run",
        lambda out, codes: verified(out) and len(read_results(out / "metrics.json")) == codes.count(0)),
    "table": (
        "table RUN DRAWN PIXELS --samplers ddim --out OUT", None,
        lambda out, _: len(read_results(out / "table.json")) == 1 and is_picture(out / "table.png")),
    "sweep": (
        "sweep TINY PIXELS --seeds 0-3 --steps 1 --seed 0-1 --samplers ddim --out OUT", None,
        lambda out, _: verified(*out.glob("digits*")) and is_picture(out / "table" / "table.png")),
    "report": (
        "report OUT", "run",
        lambda out, _: (out / "report.html").read_text().rstrip().endswith("</html>") and verified(out)),
    "verify --accept": ("verify --accept OUT", "run", lambda out, _: verified(out)),
    "demo": (
        "demo --steps 1 --num-samples 2 --out OUT", None,
        lambda out, _: verified(out / "digits", out / "digits-ddpm") and is_picture(out / "demo.png")),
    "design": (
        "design digits --covariances white --schedules ddpm_cosine --out OUT.png", None,
        lambda out, _: is_picture(out)),
    "calibrate": ("calibrate digits --out OUT.png", None, lambda out, _: is_picture(out)),
    "noise": ("noise --shape 8 8 --out OUT.png", None, lambda out, _: is_picture(out)),
    "models": ("models --out OUT.png", None, lambda out, _: is_picture(out)),
}  # fmt: skip
SINGLE_FILE = ("design", "calibrate", "noise", "models", "report", "verify --accept")  # never in each other's way


def command_line(text: str, out: Path, shared: Path, number: int) -> list[str]:
    words = {"TINY": TINY, "FEW": FEW, "DRAWN": DRAWN, "PIXELS": PIXELS, "FOUR": [f"{number}-{number + 3}"]}
    words |= {"OUT": [str(out)], "OUT.png": [str(out)]}
    words |= {"RUN": [str(shared / "run")], "DIGITS": [str(shared / "digits.npy")]}
    return [part for word in text.split() for part in words.get(word, [word.replace("NUMBER", str(number))])]


REFUSED = re.compile("is in use by|already holds|holds another")  # what may be said to who comes second


def tried(
    name: str, place: Path, rounds: int, work: Work, check: Callable[[Sequence[int]], bool], prepare=None
) -> list:
    """What went wrong in so many rounds in the folder ``place``, which is made anew for each; `work` writes to its
    ``out``."""
    theirs = {f"{start}{end}": "the user's" for start in (".tmp-", ".replaced-") for end in ("out", "out.png", "model")}
    wrong = []
    for turn in range(rounds):
        shutil.rmtree(place, ignore_errors=True)
        for their in theirs:
            (place / their).mkdir(parents=True)
            (place / their / "notes.txt").write_text("the user's")
        if prepare is not None:
            prepare()
        ended = at_once(work)
        codes = [code for code, _ in ended]
        problems = [said[-500:] for code, said in ended if code not in (0, 2) or "Traceback" in said]
        problems += [said[-500:] for code, said in ended if code == 2 and not REFUSED.search(said)]
        problems += [] if 0 in codes else [f"nobody has done it: {ended}"]
        problems += [] if problems or check(codes) else [f"it is not whole, after {codes}"]
        problems += [f"{their} has changed" for their in theirs if not (place / their / "notes.txt").is_file()]
        left = [path.name for path in place.rglob("*") if is_aside(path.name) or replaced_name(path.name)]
        left += [path.name for path in place.rglob(LOCK)]
        wrong += [f"{name}, round {turn}: {problem}" for problem in [*problems, *([f"{left} left"] if left else [])]]
    return wrong


@pytest.mark.parametrize("name", COMMANDS)
def test_of_three_commands_at_once_none_destroys_what_another_writes(
    name, shared, tmp_path, capfd, tally, request, monkeypatch
):
    monkeypatch.setattr("nidiff.commands.demo.FIRST", "digits")  # a small model
    if name == "report":
        request.getfixturevalue("with_report")
    text, before, check = COMMANDS[name]
    place = tmp_path / "place"
    out, tallied = place / ("out.png" if "OUT.png" in text else "out"), []

    def prepare() -> None:
        if before is not None:
            shutil.copytree(shared / before, out)

    def checked(codes: Sequence[int]) -> bool:
        tallied.extend(codes)
        return check(out, codes) and (name not in SINGLE_FILE or 2 not in codes)

    work: Work = lambda number: main(command_line(text, out, shared, number))  # noqa: E731
    wrong = tried(name, place, ROUNDS, work, checked, prepare)
    tally(f"three at once: {name} ({tallied.count(0)} did it, {tallied.count(2)} refused)", ROUNDS, len(wrong))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["restore, another each", "sample"])
def test_the_trial_notices_a_lock_that_does_not_lock(name, shared, tmp_path, capfd, monkeypatch):
    """Negative control of the trial above."""
    for place in ("locks", "generation.folder"):
        monkeypatch.setattr(f"nidiff.{place}.claimed", lambda folder: contextlib.nullcontext())
    out = tmp_path / "place" / "out"
    words, _, check = COMMANDS[name]
    work: Work = lambda number: main(command_line(words, out, shared, number))  # noqa: E731
    assert any(tried(name, out.parent, 1, work, lambda codes: check(out, codes)) for _ in range(10))


def saved(number: int, model: Path, folder: Path) -> None:
    denoiser = nidiff.load_model(model)
    with torch.no_grad():
        for parameter in denoiser.net.parameters():
            parameter.fill_(number)
    nidiff.save_model(denoiser, folder)


def weights(folder: Path) -> set[float]:
    return {value for parameter in nidiff.load_model(folder).net.parameters() for value in parameter.unique().tolist()}


def packing(run: Path, destination: Path) -> None:
    picture = Picture((0, 1), "ddim", 2)
    pack(run, destination, title="t", command="c", seconds=1.0, images=1, processor="p", picture=picture)


FUNCTIONS: dict[str, tuple[Callable[[int, Path, Path], object], Callable[[Path], bool]]] = {
    "save_model": (
        lambda number, shared, out: saved(number, shared / "model", out),
        lambda out: verified(out) and len(weights(out)) == 1,
    ),
    "pack": (
        lambda number, shared, out: packing(shared / "run", out),
        lambda out: bool(check_entry(out)) and verified(out),
    ),
    "Covariance.save": (
        lambda number, shared, out: nidiff.Dense((number + 1.0) * torch.eye(4)).save(out),
        lambda out: nidiff.Covariance.load(out).eigenvalues.unique().numel() == 1,
    ),
    "save_pretrained": (
        lambda number, shared, out: NonIsotropicPipeline.from_pretrained(shared / "run" / "model").save_pretrained(out),
        lambda out: verified(out),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_three_that_save_at_once_one_stays_and_is_whole(name, shared, tmp_path, capfd, tally):
    save, check = FUNCTIONS[name]
    place = tmp_path / "place"
    wrong = tried(
        name, place, ROUNDS, lambda number: save(number, shared, place / "out"), lambda _: check(place / "out")
    )
    tally(f"three at once: {name}", ROUNDS, len(wrong))
    assert not wrong, "\n".join(wrong)


def test_threads_that_save_one_model_leave_a_whole_one(shared, tmp_path, tally):
    for _ in range(ROUNDS):
        arguments = [(number, shared / "model", tmp_path / "out") for number in range(PROCESSES)]
        threads = [threading.Thread(target=saved, args=values) for values in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(weights(tmp_path / "out")) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    tally("three threads at once: save_model", ROUNDS, 0)
