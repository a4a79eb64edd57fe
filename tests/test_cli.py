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


def test_json_is_what_summary_says_of_the_covariance_it_names(run, tmp_path):
    code, out, _ = run("--json", "gff:gamma=0", "gff:gamma=1.5", "--shape", 8, 12, "--out", "new/folder/x.png")
    assert code == 0
    report = json.loads(out)
    assert report["shape"] == [8, 12]
    assert report["out"] == "new/folder/x.png"
    assert (tmp_path / report["out"]).is_file()
    assert [row["label"] for row in report["covariances"]] == ["gff:gamma=0", "gff:gamma=1.5"]
    for row, gamma in zip(report["covariances"], (0, 1.5), strict=True):
        covariance = nidiff.Covariance.from_config(row["config"])
        assert repr(covariance) == repr(nidiff.gaussian_free_field((8, 12), gamma))
        for name, value in summary(covariance)._asdict().items():
            assert row[name] == (list(value) if isinstance(value, tuple) else value)


def test_fields_folders_and_options_stand_beside_each_other(run, tmp_path):
    saved = nidiff.matern((6, 6), 2.0, boundary="reflecting")
    saved.save(tmp_path / "saved")
    texts = ["white", "saved", "power_law:exponent=-1", "offset:strength=0.3", "pyramid:discount=0.6"]
    code, out, _ = run("--json", *texts, "--shape", 6, 6, "--out", "a.svg")
    assert code == 0
    rows = json.loads(out)["covariances"]
    assert [row["label"] for row in rows] == texts
    assert rows[1]["effective_rank"] == summary(saved).effective_rank
    assert rows[2]["config"]["exponent"] == -1


def test_a_singular_covariance_draws_and_has_log_determinant_minus_infinity(run, tmp_path):
    code, out, _ = run("gff:zero_mode=zero", "--shape", 8, 8, "--json")
    assert code == 0
    assert json.loads(out)["covariances"][0]["logdet"] is None
    code, table, _ = run("gff:zero_mode=zero", "--shape", 8, 8)
    assert code == 0
    assert "-inf" in table
    assert opened(tmp_path / "out/noise.png").std() > 10


@pytest.mark.parametrize("shape", [(40,), (6, 8, 10), (2,), (2, 40)])
def test_events_of_one_to_three_axes_are_drawn(run, tmp_path, shape):
    code, _, _ = run("gff:gamma=1", "--shape", *shape)
    assert code == 0
    assert opened(tmp_path / "out/noise.png").size


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


def test_the_seed_decides_the_picture(run, tmp_path):
    pictures = []
    for seed in (3, 3, 4):
        assert run("gff", "--seed", seed, "--shape", 8, 8)[0] == 0
        pictures.append((tmp_path / "out/noise.png").read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0] != pictures[2]


BAD = {
    "unknown field": (["perlin"], "covariance='perlin'"),
    "unknown key": (["gff:length_scale=2"], "length_scale"),
    "bad shape": (["--shape", 0, 8], "shape=(0, 8)"),
    "no shape": (["--shape"], "shape="),
    "four axes": (["--shape", 2, 2, 2, 2], "--shape"),
    "negative seed": (["--seed", -1], "seed=-1"),
    "no images": (["--num-images", 0], "--num-images=0"),
    "too many images": (["--num-images", 10**6], "--num-images=1000000"),
    "too smooth for float32": (["gff:gamma=8"], "condition number"),
    "too smooth for float64": (["gff:gamma=80"], "condition number"),
    "not a number": (["gff:gamma=nan"], "gamma=nan"),
    "not a pair": (["gff:gamma"], "NAME:key=value"),
    "unknown boundary": (["gff:boundary=open"], "boundary='open'"),
    "no folder": (["runs/nowhere"], "runs/nowhere"),
    "data missing": (["--data", "nowhere"], "'nowhere'"),
    "from no data": (["from_data"], "from_data"),
    "shape beside data": (["--data", "x.npz", "--shape", 8, 8], "--shape"),
}


@pytest.mark.parametrize("arguments, words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, arguments, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/noise.png").write_text("precious")
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("nidiff: ")
    assert err.count("\n") == 1
    assert words in err
    assert (tmp_path / "out/noise.png").read_text() == "precious"


def test_a_corrupt_image_is_named(run, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(folder / "good.png")
    (folder / "torn.png").write_bytes((folder / "good.png").read_bytes()[:40])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/noise.png").write_text("precious")
    code, out, err = run("--data", folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "torn.png" in err
    assert (tmp_path / "out/noise.png").read_text() == "precious"


@pytest.mark.parametrize("name", ["noise.gif", "noise", "file/noise.png"])
def test_a_picture_that_cannot_be_written_is_refused(run, tmp_path, name):
    (tmp_path / "file").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("gff", "--out", name, "--shape", 4, 4)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "out=" in err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "precious"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Noise, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["noise"])


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert all(command in out for command in COMMANDS)
    assert err == ""


def test_version(capsys):
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


def test_python_m_nidiff_is_the_command(tmp_path):
    command = [sys.executable, "-m", "nidiff", "noise", "--shape", "4", "4", "--json"]
    done = subprocess.run([*command, "--", "gff:gamma=1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["shape"] == [4, 4]
    assert (tmp_path / "out/noise.png").is_file()
    failed = subprocess.run([*command, "--seed", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)


# A light install --------------------------------------------------------------------------------------------------


MISSING = [
    ("matplotlib", ["noise"]),
    ("matplotlib", ["calibrate", "digits"]),
    ("accelerate", ["train"]),
    ("torchdiffeq", ["likelihood", "nowhere"]),
    ("datasets", ["train", "--data", "hf:mnist"]),
]
# Imports torch once; each command then runs in a child that lacks one package. Nothing that is blocked was imported.
RUN_MISSING = """
import json, os
import torch
from nidiff.cli import main
assert not {module for module, _ in json.loads(sys.argv[2])} & set(sys.modules)
for number, (module, arguments) in enumerate(json.loads(sys.argv[2])):
    child = os.fork()
    if child == 0:
        sys.argv[1] = module
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(f"{number}.{stream.fileno()}", os.O_WRONLY | os.O_CREAT), stream.fileno())
        os.mkdir(f"{number}")
        os.chdir(f"{number}")
        try:
            code = main(arguments)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_command_that_misses_a_package_names_the_extra(tmp_path):
    done = without([], RUN_MISSING, json.dumps(MISSING), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for number, ((module, _), code) in enumerate(zip(MISSING, done.stdout.split(), strict=True)):
        out, err = ((tmp_path / f"{number}.{stream}").read_text() for stream in (1, 2))
        assert (code, out, err.count("\n")) == ("2", "", 1), err[-2000:]
        assert f"{module!r} is not installed" in err
        assert f"nidiff[{EXTRAS[module]}]" in err
        assert not list((tmp_path / f"{number}").iterdir())


def test_the_core_needs_no_extra():
    """Σ, processes, samplers, models and the diffusers classes, in a Python without any of the extras."""
    code = """
import nidiff, torch
cov = nidiff.gaussian_free_field((8, 8))
process = nidiff.Process("ddpm_linear:num_levels=20", cov)
denoiser = nidiff.Denoiser(lambda x, label: torch.zeros_like(x), process, clip=1.0)
print(nidiff.sample(denoiser, (2, 1, 8, 8), num_steps=3, generator=[0, 1]).abs().max().item() <= 1)
nidiff.NonIsotropicScheduler(covariance=cov), nidiff.NonIsotropicPipeline, nidiff.load_model, nidiff.design.calibrate
print(len(nidiff.load_dataset("digits")))
for call in (
    lambda: nidiff.load_dataset("hf:mnist"),
    lambda: nidiff.log_likelihood(denoiser, torch.zeros(1, 1, 8, 8)),
):
    try:
        call()
    except nidiff.InputError as error:
        print(error)
"""
    done = without(EXTRAS, code)
    assert done.returncode == 0, done.stderr[-2000:]
    sampled, count, hub, likelihood = done.stdout.splitlines()
    assert (sampled, count) == ("True", "1498")
    assert "nidiff[hub]" in hub
    assert "nidiff[likelihood]" in likelihood


def test_a_missing_module_of_no_extra_is_a_bug_and_keeps_its_traceback(tmp_path):
    done = without(["safetensors"], "from nidiff.cli import main; main(['noise'])", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


# Threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "10000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
    ids=["default", "own policy"],
)
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP runtime is torch's on Linux")
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(tmp_path, own, expected):
    """What the OpenMP runtime itself says it read when it was loaded."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", "from nidiff.cli import main; main(['--version']); import torch"],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", **own},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch has another OpenMP runtime")
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


# Usage ------------------------------------------------------------------------------------------------------------

LONG = "x" * 300
USAGE = {
    "not a number": (["train", "--steps", "abc"], "--steps='abc' is not a whole number"),
    "not a float": (["train", "--learning-rate", "fast"], "--learning-rate='fast' is not a number"),
    "one of several": (["noise", "--shape", "8", "x"], "--shape='x' is not a whole number"),
    "too large": (["noise", "--seed", "9" * 30], "too large"),
    "beyond a float": (["train", "--learning-rate", "1e400"], "too large"),
    "nan": (["train", "--ema-decay", "nan"], "--ema-decay='nan' is not a number"),
    "no value": (["noise", "--seed"], "--seed has no value"),
    "an empty value": (["train", "--preset="], "--preset has no value"),
    "an empty path": (["noise", "--out", ""], "--out has no value"),
    "an empty config": (["train", "--config="], "--config has no value"),
    "a value too many": (["noise", "--json=yes"], "--json takes no value"),
    "misspelled": (["train", "--learning-rat", "1"], "did you mean --learning-rate?"),
    "another's flag": (["report", "x", "--steps", "1"], "'--steps' is not a flag of nidiff report"),
    "a word too many": (["sample", "a", "b"], "'b' is one argument too many"),
    "a word missing": (["sample"], "RUN_OR_MODEL is missing: see nidiff sample --help"),
    "unknown command": (["trian"], "did you mean 'train'?"),
    "a flag for a command": (["--verbose"], "'noise'"),
    "a name too long": (["noise", "--out", LONG], "File name too long"),
    "a zero byte": (["noise", "--out", "a\0.png"], "--out"),
    "tyro's own": (["noise", "--tyro-print-completion", "x", "y"], "is not a flag"),
}


@pytest.mark.parametrize("arguments, words", USAGE.values(), ids=USAGE.keys())
def test_a_usage_error_is_one_sentence_however_narrow_the_terminal_is(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "30")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("nidiff: ")
    assert words in err
    assert len(err) < 300
    assert not list(tmp_path.iterdir())


def test_help_shows_plain_kinds_of_values(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "{None}" not in out
    assert "--num-steps INT" in out
    assert "--widths INT ..." in out


def test_arguments_are_named_as_flags_and_only_those_that_the_command_has(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "images"
    folder.mkdir()
    for name, side in (("a", 4), ("b", 6)):
        Image.fromarray(np.zeros((side, side), dtype=np.uint8)).save(folder / f"{name}.png")
    sentences = {}
    commands = {"noise": ["--data"], "calibrate": [], "evaluate": [], "train": ["--dry-run", "--data"]}
    for name, flags in commands.items():
        assert main([name, *flags, str(folder)]) == 2
        sentences[name] = capsys.readouterr().err
    assert all("make all images alike" in sentence for sentence in sentences.values())
    with_size = {name for name, sentence in sentences.items() if sentence.endswith(", or give --size.\n")}
    assert with_size == {"noise", "calibrate", "train"}
    (folder / "b.png").write_bytes(b"no picture")
    assert main(["train", "--dry-run", "--data", str(folder)]) == 2
    assert "with --skip-corrupt." in capsys.readouterr().err
    # What was written inside NAME:key=value is not a flag, though calibrate has one of that name.
    assert main(["calibrate", "digits", "--covariance", "pyramid:ratio=0.5"]) == 2
    assert "nidiff: ratio=0.5" in capsys.readouterr().err


# The net at the top -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, words",
    [
        (PermissionError(13, "Permission denied", "a/b"), "'a/b' cannot be read or written (Permission denied)"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("reset by peer"), "reset by peer"),
        (OSError(36, "File name too long", b"a\xff" * 200), "…"),
        (MemoryError(), "not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "not enough memory",
        ),
        (InputError("name", "a b", "is\n\x1b[31m \udcff bad"), r"name='a b' is \x1b[31m \udcff bad."),
    ],
)
def test_what_the_system_refuses_is_one_sentence(monkeypatch, capsys, error, words):
    def broken(self):
        raise error

    monkeypatch.setattr(Noise, "run", broken)
    assert main(["noise"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert len(err) < 400


@pytest.mark.parametrize("error", [RuntimeError("expected scalar type Float"), RecursionError(), KeyError("x")])
def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch, error):
    def broken(self):
        raise error

    monkeypatch.setattr(Noise, "run", broken)
    with pytest.raises(type(error)):
        main(["noise"])


def command(*arguments, environment=None, **options):
    own = {**os.environ, **(environment or {})}
    return subprocess.run([sys.executable, "-m", "nidiff", *arguments], env=own, stderr=subprocess.PIPE, **options)


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
def test_output_that_nobody_takes_ends_quietly_and_a_full_disk_in_a_sentence(tmp_path):
    arguments = ("noise", "white", "--shape", "4", "4")
    read, write = os.pipe()
    os.close(read)  # nobody reads
    with os.fdopen(write, "wb") as pipe:
        done = command(*arguments, cwd=tmp_path, stdout=pipe)
    assert (done.returncode, done.stderr) == (141, b"wrote out/noise.png\n")
    for light in (["--version"], ["--completion", "bash"]):  # which import no torch
        with open("/dev/full", "wb") as full:
            done = command(*light, stdout=full)
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


@pytest.mark.parametrize("arguments", [["noise"], ["calibrate", "digits"]])
@pytest.mark.parametrize("out", ["x.bmp", "folder.png", "file/x.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path, monkeypatch, capsys, arguments, out
):
    def computed(*_, **__):
        raise AssertionError("it was computed first")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("nidiff.covariance.config.as_covariance", computed)
    monkeypatch.setattr("nidiff.data.load.load_dataset", computed)
    assert main([*arguments, "--out", out]) == 2
    assert f"--out='{out}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["noise", "--shape", "1000000", "1000000"], "--shape=(1000000, 1000000) needs about"),
        (["noise", "--shape", "1000001"], "--shape="),
        (["noise", "--seed", "9223372036854775807"], "--seed="),
        (["noise", "--size", "4"], "--size"),
        (["calibrate", "digits", "--steps-per-level", "1000000000"], "--steps-per-level="),
        (["calibrate", "digits", "--distance", "batch:batch_size=1.5"], "--distance="),
    ],
)
def test_absurd_sizes_are_refused_at_once(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_picture(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    assert main(["noise", "white", "--shape", "4", "4"]) == 0
    before = (tmp_path / "out/noise.png").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    assert main(["noise", "gff", "--shape", "4", "4"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out/noise.png").read_bytes() == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["noise.png"]
