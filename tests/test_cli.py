"""What ``nidiff noise`` promises: a picture, numbers on stdout, and exit code 2 with one sentence for bad input."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import nidiff
from nidiff.cli import COMMANDS, main
from nidiff.commands.noise import NOISE_FIELDS, Noise
from nidiff.covariance.summary import summary

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
    assert log == "wrote noise.png\n"
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        f"gamma={gamma:g}" for gamma in NOISE_FIELDS["gff"].values
    ]
    assert table.isascii()
    assert opened(tmp_path / "noise.png").std() > 10  # not a blank page


def test_json_is_what_summary_says_of_the_covariance_it_names(run, tmp_path):
    code, out, _ = run("--json", "--gamma", 0, 1.5, "--shape", 8, 12, "--out", "new/folder/x.png")
    assert code == 0
    report = json.loads(out)
    assert report["field"] == "gff"
    assert report["shape"] == [8, 12]
    assert report["out"] == "new/folder/x.png"
    assert (tmp_path / report["out"]).is_file()
    assert [row["label"] for row in report["covariances"]] == ["gamma=0", "gamma=1.5"]
    for row, gamma in zip(report["covariances"], (0.0, 1.5), strict=True):
        covariance = nidiff.Covariance.from_config(row["config"])
        assert repr(covariance) == repr(nidiff.gaussian_free_field((8, 12), gamma))
        for name, value in summary(covariance)._asdict().items():
            assert row[name] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("field", [field for field in NOISE_FIELDS if field != "gff"])
def test_every_field_takes_a_list_of_its_own_parameter(run, field):
    function, parameter, values, _ = NOISE_FIELDS[field]
    numbers = values[:2]
    code, out, _ = run(
        "--json", "--field", field, f"--{parameter.replace('_', '-')}", *numbers, "--shape", 6, 6, "--out", "a.svg"
    )
    assert code == 0
    configs = [row["config"] for row in json.loads(out)["covariances"]]
    assert [config["covariance"] for config in configs] == [function, function]
    assert [config[parameter] for config in configs] == list(numbers)


def test_options_reach_the_field(run):
    code, out, _ = run(
        *("--json", "--field", "matern", "--length-scale", 2, "--smoothness", 0.5),
        *("--boundary", "reflecting", "--shape", 8, 8),
    )
    assert code == 0
    config = json.loads(out)["covariances"][0]["config"]
    assert (config["smoothness"], config["boundary"]) == (0.5, "reflecting")


def test_a_singular_covariance_draws_and_has_log_determinant_minus_infinity(run, tmp_path):
    code, out, _ = run("--zero-mode", "zero", "--gamma", 1, "--shape", 8, 8, "--json")
    assert code == 0
    assert json.loads(out)["covariances"][0]["logdet"] is None
    code, table, _ = run("--zero-mode", "zero", "--gamma", 1, "--shape", 8, 8)
    assert code == 0
    assert "-inf" in table
    assert opened(tmp_path / "noise.png").std() > 10


@pytest.mark.parametrize("shape", [(40,), (6, 8, 10), (1,), (2, 40)])
def test_events_of_one_to_three_axes_are_drawn(run, tmp_path, shape):
    code, _, _ = run("--shape", *shape, "--gamma", 1)
    assert code == 0
    assert opened(tmp_path / "noise.png").size


def test_data_gives_the_fitted_covariance_beside_white(run, smooth_images):
    from nidiff.data.images import load_images

    code, out, _ = run("--json", "--data", smooth_images, "--average", "modes", "--shrinkage", 0.2)
    assert code == 0
    report = json.loads(out)
    assert report["shape"] == [12, 10]
    white, fitted = report["covariances"]
    assert white["effective_rank"] == pytest.approx(120)
    expected = summary(nidiff.from_data(load_images(smooth_images), average="modes", shrinkage=0.2))
    assert fitted["effective_rank"] == expected.effective_rank
    assert fitted["correlation_length"] > 1.5 * white["correlation_length"]


def test_the_seed_decides_the_picture(run, tmp_path):
    pictures = []
    for seed in (3, 3, 4):
        assert run("--seed", seed, "--shape", 8, 8, "--gamma", 1)[0] == 0
        pictures.append((tmp_path / "noise.png").read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0] != pictures[2]


BAD = {
    "unknown field": (["--field", "perlin"], "field='perlin'"),
    "bad shape": (["--shape", 0, 8], "shape=(0, 8)"),
    "no shape": (["--shape"], "shape="),
    "four axes": (["--shape", 2, 2, 2, 2], "4 axes"),
    "negative seed": (["--seed", -1], "seed=-1"),
    "no images": (["--num-images", 0], "num_images=0"),
    "too many images": (["--num-images", 10**6], "num_images=1000000"),
    "too smooth for float32": (["--gamma", 8], "condition number"),
    "too smooth for float64": (["--gamma", 80], "condition number"),
    "not a number": (["--gamma", "nan"], "gamma=nan"),
    "no values": (["--gamma"], "gamma has no values"),
    "unknown boundary": (["--boundary", "open"], "boundary='open'"),
    "data missing": (["--data", "nowhere"], "'nowhere' does not exist"),
    "flag of another field": (["--length-scale", 2], "--length-scale has no meaning with --field gff"),
    "flag of data only": (["--shrinkage", 0.1], "--shrinkage has no meaning with --field gff"),
    "shape beside data": (["--data", "x.npz", "--shape", 8, 8], "--shape has no meaning with --data"),
}


@pytest.mark.parametrize("arguments, words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, arguments, words):
    (tmp_path / "noise.png").write_text("precious")
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("nidiff: ")
    assert err.count("\n") == 1
    assert words in err
    assert (tmp_path / "noise.png").read_text() == "precious"


def test_a_corrupt_image_is_named(run, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(folder / "good.png")
    (folder / "torn.png").write_bytes((folder / "good.png").read_bytes()[:40])
    (tmp_path / "noise.png").write_text("precious")
    code, out, err = run("--data", folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "torn.png" in err
    assert (tmp_path / "noise.png").read_text() == "precious"


@pytest.mark.parametrize("name", ["noise.gif", "noise", "file/noise.png"])
def test_a_picture_that_cannot_be_written_is_refused(run, tmp_path, name):
    (tmp_path / "file").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("--out", name, "--shape", 4, 4, "--gamma", 1)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "out=" in err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "arguments", [["noise", "--bogus", "1"], ["noise", "--seed", "x"], ["noise", "--gamma", "x"], ["nonsense"]]
)
def test_usage_errors_exit_with_2_and_say_so_on_stderr(capsys, arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert arguments[-1] in err or "bogus" in err
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


def test_help_of_noise_states_the_true_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["noise", "--help"]) == 0
    out = capsys.readouterr().out
    for field in NOISE_FIELDS.values():
        assert f"(default: {' '.join(f'{value:g}' for value in field.values)})" in out


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
    command = [sys.executable, "-m", "nidiff", "noise", "--shape", "4", "4", "--gamma"]
    done = subprocess.run([*command, "1", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["shape"] == [4, 4]
    assert (tmp_path / "noise.png").is_file()
    failed = subprocess.run([*command, "nan"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
