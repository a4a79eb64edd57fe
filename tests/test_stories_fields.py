"""The stories of docs/climate.md and docs/volumes.md: their own commands, on smaller data and for a few steps."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from nidiff.cli import main

pytestmark = pytest.mark.usefixtures("no_report")

xarray = pytest.importorskip("xarray")
ROOT = Path(__file__).parent.parent
SMALL = {
    "--steps": "3",
    "--warmup": "1",
    "--cooldown": "1",
    "--batch-size": "8",
    "--seeds": "0-31",
    "--held-out": "0.5",
    "--network": "unet:patch=2",
}


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(page: str) -> list[list[str]]:
    """The commands of a page, made small."""
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in re.findall(r"^ {4}((?:nidiff|python) .*)$", text, re.M)]
    return [[SMALL.get(flag, word) for flag, word in zip(["", *line], line, strict=False)] for line in lines]


def without(folder: str, lines: list[list[str]]) -> list[list[str]]:
    """The commands that are not about one run: another like it would take as long."""
    return [[word for word in line if word != folder] for line in lines if folder not in (line[2], line[-1])]


def run(line: list[str], capsys, *more: str) -> str:
    assert line[0] == "nidiff"
    assert main([*line[1:], *more]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def train_and_measure(lines: list[list[str]], capsys) -> None:
    for line in lines:
        if line[1] == "train":
            run(line, capsys, *(["--widths", "8"] if "--config" not in line else []))
        if line[1] in ("sample", "table"):
            run(line, capsys)


def test_climate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    story, (make, design, *lines, draw) = example("climate"), commands("climate.md")
    story.make(make[2], shape=(8, 16), years=2)
    few = ["--covariances", "white", "gff:gamma=1", "--schedules", "ddpm_linear", "--out", "design.svg"]
    assert "--boundary reflecting/periodic" in run(design, capsys, *few).splitlines()[-1]
    train_and_measure(without("out/solver", without("runs/white", lines)), capsys)

    (file,) = tmp_path.glob("runs/designed/generated/angle_2m-10-*/samples.nc")
    with xarray.open_dataset(make[2]) as data, xarray.open_dataset(file) as samples:
        assert {name: samples[name].units for name in samples.data_vars} == {"t2m": "K", "u10": "m/s"}
        for axis in ("latitude", "longitude"):
            np.testing.assert_array_equal(samples[axis], data[axis])
            assert samples[axis].units == data[axis].units
        assert samples.t2m.shape == (32, 8, 16)
        means = [one.t2m.mean(("longitude", one.t2m.dims[0])).values for one in (data, samples)]
        assert np.corrcoef(*means)[0, 1] > 0.9  # the equator is warm, in kelvin
        assert abs(means[0] - means[1]).max() < 10

    results = {
        name: json.loads(Path(f"runs/{name}/metrics.json").read_text())[0] for name in ("designed", "designed-v")
    }
    about = results["designed"]["provenance"]
    assert (about["boundary"], about["split"]) == ("reflecting/periodic", "test")
    first, second, both = results["designed"]["details"]["bands"][:3]
    assert (first["channel"], second["channel"], both["channels"]) == ("t2m (K)", "u10 (m/s)", "t2m (K) and u10 (m/s)")
    # After three steps the network says nothing yet, so that samples are the data's Gaussian: it knows both spectra and
    # the coherence. The network that predicts v knows neither.
    inside = {
        name: np.mean([abs(band["z"]) < 3 for table in one["details"]["bands"][:3] for band in table["bands"]])
        for name, one in results.items()
    }
    assert inside["designed"] > 0.8 > inside["designed-v"]
    story.draw(make[2], without("runs/white", [draw])[0][3:])
    assert (tmp_path / "climate.png").stat().st_size > 30_000


def test_volumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    story, (make, *lines, draw) = example("volumes"), commands("volumes.md")
    story.make(make[2], size=8, count=64)
    train_and_measure(without("runs/white", lines), capsys)
    found = {row["run"]: row for row in json.loads(Path("out/volumes/table.json").read_text())}
    assert found.keys() == {"matern", "own"}
    (file,) = tmp_path.glob("runs/matern/generated/dpmpp_2m-20-*/samples.nc")
    with xarray.open_dataset(make[2]) as data, xarray.open_dataset(file) as samples:
        assert samples.density.shape == (32, 8, 8, 8)
        assert samples.density.min() > 0  # of any sample: the scaling is a logarithm
        assert samples.x.units == "Mpc"
        ratio = np.log(samples.density).std() / np.log(data.density).std()
        assert 0.5 < ratio < 1.5
    story.draw(make[2], without("runs/white", [draw])[0][3:])
    assert (tmp_path / "volumes.png").stat().st_size > 30_000
