"""What the command line promises: a picture, numbers on stdout, and exit code 2 with one sentence for bad input."""

import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from problems import without

import nidiff
from nidiff.cli import COMMANDS, main
from nidiff.commands.noise import SHOWN, Noise
from nidiff.covariance.summary import summary
from nidiff.errors import InputError
from nidiff.extras import EXTRAS

HEAVY = ("torch", "matplotlib", "diffusers", "torchdiffeq", "numpy", "PIL")


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run ``nidiff noise`` on something small, in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def noise(*arguments, small=True):
        size = ["--num-images", "2"] if small else []
        code = main(["noise", *size, *map(str, arguments)])
        return code, *capsys.readouterr()

    return noise


@pytest.fixture
def smooth_images(tmp_path):
    """An .npz of smooth images: the mean of their neighbours."""
    noise = np.random.default_rng(0).uniform(0, 255, (20, 12, 10))
    for axis in (1, 2):
        noise = (noise + np.roll(noise, 1, axis) + np.roll(noise, 2, axis)) / 3
    np.savez(tmp_path / "smooth.npz", noise.astype(np.uint8))
    return tmp_path / "smooth.npz"


def opened(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).copy()


def test_the_defaults_draw_the_free_field_from_white_on(run, tmp_path):
    code, table, log = run(small=False)
    assert code == 0
    assert log == "wrote out/noise.png\n"
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(SHOWN)
    assert table.isascii()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert opened(tmp_path / "out/noise.png").std() > 10  # not a blank page


def test_json_is_what_summary_says_of_the_covariances_that_are_named(run, tmp_path):
    """By a field with its options, or by the folder of a saved one."""
    shape = (8, 12)
    named = {
        "white": nidiff.Identity(shape),
        "gff:gamma=1.5": nidiff.gaussian_free_field(shape, 1.5),
        "saved": nidiff.matern(shape, 2.0, boundary="reflecting"),
        "power_law:exponent=-1": nidiff.power_law(shape, -1),
        "pyramid:discount=0.6": nidiff.pyramid(shape, discount=0.6),
    }
    named["saved"].save(tmp_path / "saved")
    code, out, _ = run("--json", *named, "--shape", *shape, "--out", "new/folder/x.svg")
    assert code == 0
    report = json.loads(out)
    assert (report["shape"], report["out"]) == ([8, 12], "new/folder/x.svg")
    assert (tmp_path / report["out"]).is_file()
    assert [row["label"] for row in report["covariances"]] == [*named]
    for row, covariance in zip(report["covariances"], named.values(), strict=True):
        assert repr(nidiff.Covariance.from_config(row["config"])) == repr(covariance)
        for name, value in summary(covariance)._asdict().items():
            assert row[name] == (list(value) if isinstance(value, tuple) else value)


def test_events_of_one_to_three_axes_and_singular_covariances_are_drawn(run, tmp_path):
    cases = [("gff:gamma=1", shape) for shape in ((2,), (6, 8, 10), (2, 40))]
    for covariance, shape in (*cases, ("gff:zero_mode=zero", (8, 8))):
        assert run(covariance, "--shape", *shape)[0] == 0
        assert opened(tmp_path / "out/noise.png").std() > 10


def test_data_gives_the_fitted_covariance_beside_white(run, smooth_images):
    images = nidiff.load_dataset(smooth_images).all()
    code, out, _ = run("--json", "--data", smooth_images)
    assert code == 0
    report = json.loads(out)
    assert report["shape"] == [12, 10]
    white, fitted = report["covariances"]
    assert white["effective_rank"] == pytest.approx(120)
    assert fitted["effective_rank"] == summary(nidiff.from_data(images)).effective_rank
    assert fitted["correlation_length"] > 1.5 * white["correlation_length"]
    code, out, _ = run("--json", "gff", "from_data:average=modes,shrinkage=0.2", "--data", smooth_images)
    assert code == 0
    field, fitted = json.loads(out)["covariances"]
    assert field["config"]["shape"] == [12, 10]
    expected = summary(nidiff.from_data(images, average="modes", shrinkage=0.2))
    assert fitted["effective_rank"] == expected.effective_rank


def test_the_seed_decides_the_picture_and_a_full_disk_leaves_the_old_one(run, tmp_path, monkeypatch):
    pictures = []
    for seed in (3, 3, 4):
        assert run("gff", "--seed", seed, "--shape", 8, 8)[0] == 0
        pictures.append((tmp_path / "out/noise.png").read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0] != pictures[2]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, log = run("gff", "--seed", 3, "--shape", 8, 8)
    assert (code, "No space left on device" in log) == (2, True)
    assert (tmp_path / "out/noise.png").read_bytes() == pictures[2]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["noise.png"]


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert all(command in out for command in COMMANDS)
    assert err == ""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nidiff {nidiff.__version__}\n"


def test_help_imports_nothing_heavy():
    probe = f"""
import sys
from nidiff.cli import main
for words in ([], ["--help"], ["noise", "--help"], ["calibrate", "--help"], ["--version"]):
    main(words)
print(*(name for name in {(*HEAVY, "tyro")!r} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stderr.split() == ["tyro"]  # tyro: the probe does see what is imported


# A light install --------------------------------------------------------------------------------------------------


MISSING = [
    ("matplotlib", ["noise"]),
    ("matplotlib", ["calibrate", "digits"]),
    ("accelerate", ["train"]),
    ("torchdiffeq", ["likelihood", "nowhere"]),
    ("datasets", ["train", "--data", "hf:mnist"]),
]
# Imports torch once; each command, and then the core, runs in a child that lacks packages. Nothing that is blocked was
# imported.
RUN_MISSING = """
import json, os
import torch
from nidiff.cli import main

def core():
    import nidiff
    cov = nidiff.gaussian_free_field((8, 8))
    process = nidiff.Process("ddpm_linear:num_levels=20", cov)
    denoiser = nidiff.Denoiser(lambda x, label: torch.zeros_like(x), process, clip=1.0)
    print(nidiff.sample(denoiser, (2, 1, 8, 8), num_steps=3, generator=[0, 1]).abs().max().item() <= 1)
    nidiff.NonIsotropicScheduler(covariance=cov), nidiff.NonIsotropicPipeline, nidiff.load_model
    print(len(nidiff.load_dataset("digits")))
    for call in (
        lambda: nidiff.load_dataset("hf:mnist"),
        lambda: nidiff.log_likelihood(denoiser, torch.zeros(1, 1, 8, 8)),
    ):
        try:
            call()
        except nidiff.InputError as error:
            print(error)
    return 0

trials = json.loads(sys.argv[2])
assert not {module for modules, _ in trials for module in modules.split(",")} & set(sys.modules)
for number, (modules, arguments) in enumerate(trials):
    child = os.fork()
    if child == 0:
        sys.argv[1] = modules
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(f"{number}.{stream.fileno()}", os.O_WRONLY | os.O_CREAT), stream.fileno())
        os.mkdir(f"{number}")
        os.chdir(f"{number}")
        try:
            code = main(arguments) if arguments else core()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_command_that_misses_a_package_names_the_extra_and_the_core_needs_none(tmp_path):
    """Σ, processes, samplers, models and the diffusers classes work without any of the extras."""
    trials = [*MISSING, ("safetensors", ["noise"]), (",".join(EXTRAS), [])]
    done = without([], RUN_MISSING, json.dumps(trials), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [[(tmp_path / f"{number}.{stream}").read_text() for stream in (1, 2)] for number in range(len(trials))]
    *codes, of_no_extra, of_core = done.stdout.split()
    for number, ((module, _), code, (out, err)) in enumerate(zip(MISSING, codes, said, strict=False)):
        assert (code, out, err.count("\n")) == ("2", "", 1), err[-2000:]
        assert f"{module!r} is not installed" in err
        assert f"nidiff[{EXTRAS[module]}]" in err
        assert not list((tmp_path / f"{number}").iterdir())
    assert (of_no_extra, of_core) == ("1", "0")
    assert "ModuleNotFoundError" in said[-2][1]  # a bug, which keeps its traceback
    sampled, count, hub, likelihood = said[-1][0].splitlines()
    assert (sampled, count) == ("True", "1498")
    assert "nidiff[hub]" in hub
    assert "nidiff[likelihood]" in likelihood


# Threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP runtime is torch's on Linux")
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise():
    """What the OpenMP runtime itself says it read when it was loaded."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = [sys.executable, "-c", "from nidiff.cli import main; main(['--version']); import torch"]
    for mine, expected in (({}, "10000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")):
        given = {**environment, "OMP_DISPLAY_ENV": "VERBOSE", **mine}
        done = subprocess.run(program, env=given, capture_output=True, text=True)
        if "GOMP_SPINCOUNT" not in done.stderr:
            pytest.skip("this torch has another OpenMP runtime")
        assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


# Usage ------------------------------------------------------------------------------------------------------------

BAD = [
    (["noise", "perlin"], "covariance='perlin'"),
    (["noise", "gff:length_scale=2"], "length_scale"),
    (["noise", "--shape", "0", "8"], "shape=(0, 8)"),
    (["noise", "--shape", "2", "2", "2", "2"], "--shape"),
    (["noise", "--shape", "1000000", "1000000"], "--shape=(1000000, 1000000) needs about"),
    (["noise", "--seed", "-1"], "seed=-1"),
    (["noise", "--num-images", "1000000"], "--num-images=1000000"),
    (["noise", "gff:gamma=8"], "condition number"),  # for float32
    (["noise", "gff:gamma=80"], "condition number"),  # for float64
    (["noise", "gff:gamma=nan"], "gamma=nan"),
    (["noise", "gff:gamma"], "NAME:key=value"),
    (["noise", "runs/nowhere"], "runs/nowhere"),
    (["noise", "--data", "nowhere"], "'nowhere'"),
    (["noise", "from_data"], "from_data"),
    (["noise", "--data", "x.npz", "--shape", "8", "8"], "--shape"),
    (["noise", "--size", "4"], "--size"),
    (["calibrate", "digits", "--steps-per-level", "1000000000"], "--steps-per-level="),
    (["calibrate", "digits", "--distance", "batch:batch_size=1.5"], "--distance="),
    (["train", "--preset", "digit"], "did you mean 'digits'"),
    (["train", "--target", "flow"], "target='flow'"),
    (["train", "--weighting", "snr"], "weighting='snr'"),
    (["train", "--sampler", "plms"], "sampler='plms'"),
    (["train", "--batch-size", "16", "--accumulation", "3"], "batch-size=16"),
    (["train", "--config", "missing.json"], "missing.json"),
    # What no machine can do.
    (["train", "--widths", "80000000", "--attention"], "--widths=(80000000,) needs about"),
    (["train", "--widths", *["8"] * 40], "fewer widths"),
    (["train", "--size", "10000000"], "needs about"),
    (["train", "--layers", "99999"], "layers"),
    (["train", "--batch-size", "4" + "0" * 12], "batch-size"),
    (["train", "--num-samples", "1" + "0" * 12], "num-samples"),
    (["demo", "--num-samples", "1" + "0" * 12], "num-samples"),
    (["demo", "--steps", "0"], "steps"),
    # What cannot be parsed.
    (["train", "--steps", "abc"], "--steps='abc' is not a whole number"),
    (["train", "--learning-rate", "fast"], "--learning-rate='fast' is not a number"),
    (["noise", "--seed", "9" * 30], "too large"),
    (["train", "--learning-rate", "1e400"], "too large"),
    (["train", "--ema-decay", "nan"], "--ema-decay='nan' is not a number"),
    (["noise", "--seed"], "--seed has no value"),
    (["train", "--preset="], "--preset has no value"),
    (["noise", "--out", ""], "--out has no value"),
    (["noise", "--json=yes"], "--json takes no value"),
    (["train", "--learning-rat", "1"], "did you mean --learning-rate?"),
    (["report", "x", "--steps", "1"], "'--steps' is not a flag of nidiff report"),
    (["sample", "a", "b"], "'b' is one argument too many"),
    (["sample"], "RUN_OR_MODEL is missing: see nidiff sample --help"),
    (["trian"], "did you mean 'train'?"),
    (["--verbose"], "'noise'"),
    (["noise", "--out", "x" * 300], "File name too long"),
    (["noise", "--out", "a\0.png"], "--out"),
    (["noise", "--tyro-print-completion", "x", "y"], "is not a flag"),  # tyro's own
]


def test_bad_input_is_one_sentence_and_exit_code_2_however_narrow_the_terminal_is(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "30")
    for arguments, words in BAD:
        code, (out, err) = main(arguments), capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
        assert err.startswith("nidiff: ")
        assert words in err, arguments
        assert len(err) < 400, arguments
        assert not list(tmp_path.iterdir())


def test_arguments_are_named_as_flags_and_only_those_that_the_command_has(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "images"
    folder.mkdir()
    for name, side in (("a", 4), ("b", 6)):
        Image.fromarray(np.zeros((side, side), dtype=np.uint8)).save(folder / f"{name}.png")
    commands = {"noise": ["--data"], "calibrate": [], "evaluate": [], "train": ["--dry-run", "--data"]}
    for name, flags in commands.items():
        assert main([name, *flags, str(folder)]) == 2
        assert ("give --size" in capsys.readouterr().err) == (name != "evaluate")
    # What was written inside NAME:key=value is not a flag, though calibrate has one of that name.
    assert main(["calibrate", "digits", "--covariance", "pyramid:ratio=0.5"]) == 2
    assert "nidiff: ratio=0.5" in capsys.readouterr().err


# The net at the top -----------------------------------------------------------------------------------------------


REFUSED = [
    (PermissionError(13, "Permission denied", "a/b"), "'a/b' cannot be read or written (Permission denied)"),
    (OSError(28, "No space left on device"), "No space left on device"),
    (OSError(36, "File name too long", b"a\xff" * 200), "…"),
    (MemoryError(), "not enough memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), "not enough memory"),
    (InputError("name", "a b", "is\n\x1b[31m \udcff bad"), r"name='a b' is \x1b[31m \udcff bad."),
]
BUGS = [RuntimeError("expected scalar type Float"), RecursionError(), KeyError("x"), ZeroDivisionError()]


def test_what_the_system_refuses_is_one_sentence_and_a_bug_keeps_its_traceback(monkeypatch, capsys):
    def broken(self):
        raise errors.pop()

    monkeypatch.setattr(Noise, "run", broken)
    for error, words in REFUSED:
        errors = [error]
        assert main(["noise"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
        assert len(err) < 400
    for error in BUGS:
        errors = [error]
        with pytest.raises(type(error)):
            main(["noise"])


def command(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "nidiff", *arguments], stderr=subprocess.PIPE, **options)


def test_any_name_can_be_printed_in_any_locale(tmp_path):
    """All in one process, which imports torch once: each name is drawn to, and refused as that of a covariance."""
    names = ["größe.png".encode(), b"not-utf8-\xff.png"]
    code = (
        "import sys; from nidiff.cli import main\n"
        "for name in sys.argv[1:]:\n"
        "    print(main(['noise', 'white', '--shape', '4', '4', '--out', name]), flush=True)\n"
        "    print(main(['noise', name]), flush=True)\n"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=tmp_path, env=plain, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == [b"0", b"2"] * len(names)
    assert sorted(os.listdir(os.fsencode(tmp_path))) == sorted(names)
    assert done.stderr.isascii()
    said = done.stderr.splitlines()
    assert [line.split()[0] for line in said] == [b"wrote", b"nidiff:"] * len(names)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_that_nobody_takes_ends_quietly_and_a_full_disk_in_a_sentence():
    for arguments in (["--version"], ["--completion", "bash"]):  # which import no torch
        read, write = os.pipe()
        os.close(read)  # nobody reads
        with os.fdopen(write, "wb") as pipe:
            done = command(*arguments, stdout=pipe)
        assert (done.returncode, done.stderr) == (141, b"")
        with open("/dev/full", "wb") as full:
            done = command(*arguments, stdout=full)
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
        assert done.stderr.startswith(b"nidiff: ")
        assert b"No space left" in done.stderr


def test_streams_that_are_closed_are_not_missed(tmp_path):
    """What a command prints, refuses and writes; only the last imports torch."""
    cases = [("--version >&-", 0), ("noise --bogus 2>&-", 2), ("noise white --shape 4 4 <&- >&- 2>&-", 0)]
    for line, code in cases:
        line = f"{shlex.quote(sys.executable)} -m nidiff {line}"
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
    assert opened(tmp_path / "out/noise.png").std() > 10  # nothing that was printed went into it


# Refused before the work ------------------------------------------------------------------------------------------


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    def computed(*_, **__):
        raise AssertionError("it was computed first")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("nidiff.covariance.config.as_covariance", computed)
    monkeypatch.setattr("nidiff.data.load.load_dataset", computed)
    for arguments in (["noise"], ["calibrate", "digits"]):
        for out in ("x.bmp", "noise", "folder.png", "file/x.png"):
            assert main([*arguments, "--out", out]) == 2
            assert f"--out='{out}'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "precious"
