"""What the command line promises: a picture, numbers on stdout, and exit code 2 with one sentence for bad input."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import nidiff
from nidiff.cli import COMMANDS, main
from nidiff.commands.noise import SHOWN, Noise
from nidiff.covariance.summary import summary
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


@pytest.mark.parametrize("shape", [(40,), (6, 8, 10), (1,), (2, 40)])
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
    "four axes": (["--shape", 2, 2, 2, 2], "4 axes"),
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
    "shape beside data": (["--data", "x.npz", "--shape", 8, 8], "shape has no meaning with data"),
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


@pytest.mark.parametrize(
    "arguments", [["noise", "--bogus", "1"], ["noise", "--seed", "x"], ["noise", "--gamma", "1"], ["nonsense"]]
)
def test_usage_errors_exit_with_2_and_say_so_on_stderr(capsys, arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert any(word in err for word in arguments[-2:])
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Noise, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["noise"])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(capsys, arguments):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert all(command in out for command in COMMANDS)
    assert err == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nidiff {nidiff.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["noise", "--help"], ["calibrate", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    probe = (
        "import sys; from nidiff.cli import main; main(sys.argv[2:]);"
        "print(*(name for name in sys.argv[1].split(',') if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, ",".join((*HEAVY, "tyro")), *arguments], capture_output=True, text=True
    )
    assert done.stderr.split() == ["tyro"]  # tyro: the probe does see what is imported


def test_python_m_nidiff_is_the_command(tmp_path):
    command = [sys.executable, "-m", "nidiff", "noise", "--shape", "4", "4", "--json"]
    done = subprocess.run([*command, "--", "gff:gamma=1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["shape"] == [4, 4]
    assert (tmp_path / "out/noise.png").is_file()
    failed = subprocess.run([*command, "--", "gff:gamma=nan"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr


# A light install --------------------------------------------------------------------------------------------------

BLOCKED = """
import sys

class Lacking:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *arguments):
        missing = name.partition(".")[0] in sys.argv[1].split(",")
        return None if missing else self.finder.find_spec(name, *arguments)

sys.meta_path[:] = map(Lacking, sys.meta_path)
"""


def without(modules, code, *arguments, **options):
    """Run ``code`` in a Python that lacks the modules."""
    command = [sys.executable, "-c", BLOCKED + code, ",".join(modules), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("matplotlib", ["noise"]),
        ("matplotlib", ["calibrate", "digits"]),
        ("accelerate", ["train"]),
        ("accelerate", ["sample", "nowhere"]),
        ("datasets", ["train", "--data", "hf:mnist"]),
    ],
)
def test_a_command_that_misses_a_package_names_the_extra(tmp_path, module, arguments):
    done = without([module], "from nidiff.cli import main; sys.exit(main(sys.argv[2:]))", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr[-2000:]
    assert f"{module!r} is not installed" in done.stderr
    assert f"nidiff[{EXTRAS[module]}]" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_core_needs_no_extra():
    """Σ, processes, samplers, models and the diffusers classes, in a Python without any of the extras."""
    code = """
import nidiff, torch
cov = nidiff.gaussian_free_field((8, 8))
denoiser = nidiff.Denoiser(lambda x, label: torch.zeros_like(x), nidiff.Process(nidiff.ddpm_linear(20), cov), clip=1.0)
print(nidiff.sample(denoiser, (2, 1, 8, 8), num_steps=3, seeds=[0, 1]).abs().max().item() <= 1)
nidiff.NonIsotropicScheduler(covariance=cov), nidiff.NonIsotropicPipeline, nidiff.load_model, nidiff.calibrate
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
    done = without(["json5"], "import json5")
    assert done.returncode == 1
    done = without(["safetensors"], "from nidiff.cli import main; main(['noise'])", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


# Threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
    ids=["default", "own count", "own policy"],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP runtime is torch's on Linux")
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(tmp_path, own, expected):
    """What the OpenMP runtime itself says it read when it was loaded."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-m", "nidiff", "calibrate", "--paper"],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", **own},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch has another OpenMP runtime")
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
