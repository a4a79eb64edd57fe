"""Fuzzed command lines: whatever is typed, the answer is a result or one sentence, and no other file is touched."""

import contextlib
import io
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from conftest import CASES
from PIL import Image

import nidiff
from nidiff.app.server import free_port
from nidiff.cli import COMMANDS, main
from nidiff.commands.noise import Noise
from nidiff.commands.usage import flags_of

QUICK = 120  # command lines
HANGS = 60  # seconds after which a command line is given up
LONGEST = 1000  # letters of a sentence

# Networks and runs so small that what succeeds is quick.
TINY = ["--widths", "8", "--attention", "--batch-size", "4", "--num-samples", "1", "--num-steps", "1"]
SHORT = ["--steps", "1", "--cooldown", "0", "--out", "out/new", "--precision", "fp32", *TINY]
FEW = ["--seeds", "0-3", "--num-steps", "2"]
COMPARED = ["--data", "digits", "--features", "pixels", "--num-real", "20", "--bootstrap", "2"]
QUICKLY = {
    "train": [["--dry-run", *TINY], ["--dry-run"], SHORT, SHORT],
    "demo": [["--bogus"]],  # it trains a classifier, whatever the flags
    "sample": [FEW],
    "sweep": [["--dry-run", "--warmup", "0", *SHORT], ["--commands", "--warmup", "0", *SHORT]],
    "evaluate": [[*FEW, *COMPARED], COMPARED],
    "table": [[*FEW, *COMPARED, "--samplers", "ddim"]],
    "tune": [["--evaluations", "2", "--candidates", "ddim", "--budget", "200", *COMPARED]],
    "likelihood": [["--num-images", "1", "--rtol", "0.1", "--atol", "0.1"]],
    "noise": [["--shape", "4", "4"], []],
}
POSITIONALS = {
    "sample": [["out/run"], ["out/run/model"]],
    "evaluate": [["out/run"], ["images.npz"]],
    "table": [["out/run"]],
    "tune": [["out/run"], ["out/run/model"]],
    "likelihood": [["out/run"], ["out/run/model"]],
    "report": [["out/run"], ["out/run", "out/run"]],
    "verify": [["out/run"], ["out/run/model"]],
    "noise": [[], ["white"], ["gff:gamma=1", "sigma"]],
    "calibrate": [["digits"], ["images.npz"]],
}
LONG, BYTES = "…" * 300, "b\udcff\udc80"  # a name over 255 bytes, and one that is not UTF-8
WORDS = ["", " ", "-", "--", "=", "None", "nan", LONG, BYTES, "ü", "a\nb", "\x1b[31m", "%s{}", "'\"", "x" * 5000, "\0"]
STRANGE = [f"out/{LONG}.png", f"out/{BYTES}.png", f"out/{BYTES}", "out/ü.png", "out/a b", "out/x.bmp"]
OUTS = [  # what is asked for may be written: only here, or nowhere
    *("file.txt", "file.txt/x.png", "images.npz", "loop", "/dev/null", "/dev/full", "/proc/self/mem", "out/run"),
    *("/proc/nowhere/x.png", *STRANGE),
]
PATHS = [
    *OUTS,
    *(".", "..", "../..", "../../x", "empty", "pictures", "torn", "sigma", "out/x.png", "folder.png", "deep.json"),
    "huge.npy",
]
NUMBERS = [
    *("9223372036854775807", "9223372036854775808", "9" * 400, "9" * 6000),
    *("0", "1", "2", "8", "-1", "1.5", "1e3", "1e308", "1e309", "-1e400", "nan", "inf", "-inf", "abc", "٣", "1_0"),
    *("0x10", "1,2", "0.5", "1e-320"),
]
COVARIANCES = [
    *("white", "gff", "gff:gamma=nan", "gff:gamma=1e308", "gff:gamma=-50", "gff:gamma=", "gff:", ":", "matern"),
    *("sigma", "gff:gamma=1,gamma=2", "matern:length_scale=0", "matern:length_scale=1e300"),
    *("power_law:exponent=1e309", "pyramid", "pyramid:discount=-1", "offset:strength=-1"),
    *("pyramid:ratio=1.0000001,num_levels=1000000000", "offset:strength=1e300", "from_data"),
    *("from_data:shrinkage=nan", "from_data:average=x", "gff:boundary=open", "gff:normalize=no", "gff:zero_mode=zero"),
    *("gff:shape=3", "out/run", "Identity", "pictures", "empty"),
]
SCHEDULES = [
    *("ddpm_linear:num_levels=0", "ddpm_linear:num_levels=1000000000000", "ddpm_linear:num_levels=1", "vp", "ve"),
    *("vp:beta_max=1000", "vp:beta_max=nan", "smld_geometric", "smld_geometric:sigma_max=-1"),
    *("ddpm_linear:beta_max=0.5", "ddpm_cosine:shift=nan", "ddpm_cosine:shift=1e308"),
    "smld_geometric:num_levels=3,sigma_max=1e308,sigma_min=1e-308",
]
SAMPLERS = [
    *("ancestral", "ddim", "ddim:eta=nan", "ddim:eta=2", "als:epsilon=1e309", "cas", "pc", "heun", "euler_maruyama"),
    *("ddim:spacing=karras", "ddim:spacing=x", "pc:corrector_steps=1e9", "ddim:rows=3", "dpmpp_2m:eta=1", "als"),
]
OF_FLAG = {
    "--covariance": COVARIANCES,
    "--schedule": SCHEDULES,
    "--sampler": SAMPLERS,
    "--samplers": SAMPLERS,
    "--candidates": SAMPLERS,
    "--seeds": ["0-3", "3-0", "0-99999999999", "7", "1,1", "0-", "9223372036854775807", "99999999999999999999"],
    "--distance": ["max", "batch", "quantile:quantile=nan", "batch:batch_size=-3", "batch:batch_size=1e9", "max:x=1"],
    "--data": ["digits", "images.npz", "pictures", "torn", "huge.npy", "empty", "out/run", "deep.json", "digit"],
    "--features": ["pixels", "file.txt", "images.npz", "x.pt", "deep.json", "pixel"],
    "--preset": ["digits", "digits-ddpm", "digits-smld", "digit"],
    "--target": ["eps", "noise", "x0", "v", "score", "flow"],
    "--weighting": ["eps", "noise", "score", "target", "snr"],
    "--precision": ["fp32", "bf16", "auto", "fp64"],
    "--format": ["npz", "png", "npy", "gif"],
    "--range": ["unit", "symmetric", "byte"],
    "--ratio": ["overlap", "classic", "1.5", "1.0000000001", "1e308", "nan", "1", "-3"],
    "--split": ["train", "test", "x"],
    # What takes as long as it is asked to is not asked for much.
    "--steps": ["0", "2", "-1", "abc", "nan", "9" * 30],
    "--boundary": ["periodic", "reflecting/periodic", "open", "/", "fixed/fixed/fixed"],
    "--trace": ["exact", "hutchinson", "guess"],
    **{flag: ["0", "1", "2", "-1", "abc", "nan"] for flag in ("--num-images", "--num-probes", "--bootstrap")},
    **{flag: ["0", "-1", "0.1", "nan", "inf", "abc"] for flag in ("--rtol", "--atol")},
}
NETWORK = {"hf:x", "cifar10", "fashion-mnist"}  # nothing here may ask the network


class Slow(BaseException):
    """No InputError, OSError or RuntimeError, so that nothing but the trial catches it."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a run, images and other files; all but out/ must stay as it is."""
    base = tmp_path_factory.mktemp("base") / "a" / "world"
    (base / "kept").mkdir(parents=True)
    train = ["train", "--out", str(base / "kept" / "run"), "--steps", "1", "--cooldown", "0", "--precision", "fp32"]
    assert main([*train, *TINY, "--schedule", "ddpm_linear:num_levels=8"]) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (24, 8, 8), dtype=np.uint8)
    np.savez(base / "images.npz", pixels)
    for folder, content in {"pictures": pixels[:3], "torn": pixels[:2]}.items():
        (base / folder).mkdir()
        for index, image in enumerate(content):
            Image.fromarray(image).save(base / folder / f"{index}.png")
    (base / "torn" / "1.png").write_bytes((base / "torn" / "1.png").read_bytes()[:40])
    (base / "empty").mkdir()
    (base / "folder.png").mkdir()
    (base / "file.txt").write_text("precious")
    (base / "deep.json").write_text("[" * 100_000)
    (base / "loop").symlink_to("loop")
    with (base / "huge.npy").open("wb") as file:  # a header of 10¹² images and no image
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 8, 8)})
    nidiff.gaussian_free_field((4, 4)).save(base / "sigma")
    return base


def snapshot(world: Path) -> dict[str, bytes | str]:
    """All files of the two folders around the world and of the world itself, except those in out/."""
    found: dict[str, bytes | str] = {}
    for folder, folders, files in os.walk(world.parent.parent):
        if folder == str(world):
            folders.remove("out")
        for name in (*folders, *files):
            path = Path(folder) / name
            found[str(path)] = path.read_bytes() if path.is_file() and not path.is_symlink() else "not a file"
    return found


def line(rng: random.Random, command: str) -> list[str]:
    """A command line of which most is right and some is not."""
    words = [*rng.choice(POSITIONALS.get(command, [[]])), *rng.choice(QUICKLY.get(command, [[]]))]
    for _ in range(rng.randint(1, 3)):
        change = rng.randrange(16)
        flags = flags_of(COMMANDS[rng.choice([*COMMANDS]) if change == 0 else command])
        flag, kind = rng.choice([(flag, kind) for flag, kind in flags.items() if flag != "--compile"])  # slow
        value = hostile(rng, flag, kind)
        if change < 11:
            words += [flag] if kind is bool and rng.random() < 0.8 else [flag, value]
        elif change < 13:
            words += [f"{flag}={value}"]
        elif change == 13:
            words += [rng.choice([flag, flag[:-1], flag.replace("-", "_"), f"--{value}", f"-{value}"])]
        elif change == 14 and command in POSITIONALS:
            words[:1] = [value]
        else:
            words.insert(0, rng.choice([value, rng.choice(COVARIANCES), rng.choice(PATHS)]))
    return [command, *words]


def hostile(rng: random.Random, flag: str, kind: object) -> str:
    """A value for a flag: mostly of its kind, good or absurd, and sometimes nothing of the sort."""
    if flag == "--out":
        return rng.choice(OUTS)
    if rng.random() < 0.2 and flag not in ("--steps", "--bootstrap"):
        return rng.choice(WORDS)
    if flag in OF_FLAG:
        return rng.choice(OF_FLAG[flag])
    return rng.choice(PATHS if "Path" in str(kind) else NUMBERS)


def judge(words: list[str], world: Path) -> tuple[int, str]:
    """The exit code of a command line, and what is wrong with the answer ("" if nothing)."""
    shutil.rmtree(world / "out", ignore_errors=True)
    shutil.copytree(world / "kept", world / "out")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    code = -1
    try:
        signal.alarm(HANGS)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except Slow:
        return code, f"it hangs: {traceback.format_exc()[-1500:]}"
    except BaseException:
        return code, traceback.format_exc()[-1500:]
    finally:
        signal.alarm(0)
    said, printed = (stream.buffer.getvalue().decode() for stream in (err, out) if stream.flush() is None)
    if code not in (0, 2, 130):
        return code, f"the exit code is {code}"
    lines = [each for each in said.splitlines() if each.startswith("nidiff: ")]
    if code == 2 and (len(lines) != 1 or not said.endswith(f"{lines[0]}\n") or len(lines[0]) > LONGEST):
        return code, f"not one sentence: {said[-1500:]}"
    if code == 2 and printed and words[0] != "verify":  # it prints what it has found, good and bad
        return code, f"a refusal printed {printed[-300:]!r}"
    if "Traceback" in said or "╭" in said:
        return code, said[-1500:]
    return code, ""


@pytest.fixture
def trial(world, monkeypatch, tmp_path):
    """`judge` in the world, with a clock that stops what hangs and no way to download."""
    (world / "out").mkdir(exist_ok=True)
    monkeypatch.chdir(world)
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def ring(*_):
        raise Slow

    def checked(shelf, host, port, announce):
        """Of `nidiff explore` all but the server, which tests/test_app.py starts."""
        announce(f"http://{host}:{free_port(host, port)}")

    monkeypatch.setattr("nidiff.app.server.serve", checked)
    monkeypatch.setattr("webbrowser.open", lambda url: None)
    before = signal.signal(signal.SIGALRM, ring)
    yield lambda words: judge(words, world)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("default")
def test_any_command_line_gets_a_result_or_one_sentence(world, trial, tally):
    rng, failures, tried, refused = random.Random(11), [], 0, 0
    before = snapshot(world)
    for _ in range(QUICK * CASES):
        words = line(rng, rng.choice([*COMMANDS]))
        if NETWORK & {*words}:
            continue
        code, wrong = trial(words)
        tried, refused = tried + 1, refused + (code == 2)
        if not wrong and (after := snapshot(world)) != before:
            changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
            wrong = f"it changed {changed}"
            before = after
        if wrong:
            failures.append(f"nidiff {' '.join(map(repr, words))}\n{wrong}")
    tally("command lines", tried, len(failures))
    assert not failures, f"{len(failures)} of {tried}:\n" + "\n\n".join(failures[:40])
    assert 0.3 < refused / tried < 0.99  # there are results and refusals


def test_the_trial_sees_a_traceback_a_box_and_a_touched_file(world, trial, monkeypatch):
    assert trial(["noise", "--shape", "4", "4"])[1] == ""

    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Noise, "run", broken)
    assert "ZeroDivisionError" in trial(["noise"])[1]
    monkeypatch.setattr(Noise, "run", lambda self: print("╭─ box", file=sys.stderr))
    assert "box" in trial(["noise"])[1]
    before = snapshot(world)
    monkeypatch.setattr(Noise, "run", lambda self: Path("../new").touch())
    assert trial(["noise"])[1] == ""
    assert snapshot(world) != before
    Path("../new").unlink()
