"""The stories of signals and video: every command of their pages runs, in small, and what they rest on holds."""

import json
import re
import runpy
import shlex
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nidiff.cli import main

pytestmark = pytest.mark.usefixtures("no_report")

ROOT = Path(__file__).parent.parent
SMALL = {
    "--steps": "2",
    "--cooldown": "0",
    "--warmup": "1",
    "--widths": "8 8",
    "--attention": "1",
    "--num-samples": "2",
    "--batch-size": "2",
    "--seeds": "0-3",
    "--num-images": "2",
    "--rtol": "0.3",
    "--schedules": "ddpm_cosine",
    "--bootstrap": "2",
    "--num-steps": "20",
    "--covariances": "white power_law:exponent=1",
}
ALSO = {
    "train": ("--steps", "--cooldown", "--warmup", "--widths", "--attention", "--num-samples", "--batch-size"),
    "sample": ("--seeds",),
    "evaluate": ("--seeds", "--bootstrap"),
    "table": ("--seeds", "--bootstrap", "--num-steps"),
    "likelihood": ("--num-images", "--rtol"),
    "design": ("--schedules", "--covariances"),
    "noise": ("--num-images",),
}


def commands(page: str) -> list[list[str]]:
    """The commands of a page of the docs, word by word, without the values of the flags that are made small."""
    blocks = re.sub(r"\\\n +", " ", (ROOT / "docs" / page).read_text())
    lines = re.findall(r"^    ((?:python examples/|nidiff )\S.*)$", blocks, re.M)
    return [shlex.split(line, comments=True) for line in lines]


def smaller(words: list[str]) -> list[str]:
    """The same command with few steps and items; it has no values but those of SMALL for the flags of SMALL."""
    kept, skipping = [], False
    for word in words:
        skipping = word in SMALL or (skipping and not word.startswith("--"))
        kept += [] if skipping else [word]
    return kept + [part for flag in ALSO.get(words[0], ()) for part in (flag, *SMALL[flag].split())]


def run_page(page: str, count: int, capsys) -> dict[str, str]:
    """Run all commands of a page in the current folder, and what each printed, by the command."""
    printed = {}
    for program, *words in commands(page):
        if program == "python":
            runpy.run_path(str(ROOT / words[0]))["main"](Path(words[1]), count)
        else:
            assert main(smaller(words)) == 0, capsys.readouterr().err
            printed[shlex.join(words)] = capsys.readouterr().out
    return printed


def by_command(printed: dict[str, str], start: str) -> list[str]:
    return [out for command, out in printed.items() if command.startswith(start)]


def test_every_command_of_the_signals_page_runs_and_sounds_come_out_as_they_went_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = run_page("signals.md", 20, capsys)
    for out in by_command(printed, "evaluate"):
        assert re.search(r"^(spectrum|values|increments) ", out, re.M)
    (cost,) = by_command(printed, "likelihood runs/beats-pink")
    assert "Gaussian N(mu, C)" in cost
    folder = Path(by_command(printed, "sample")[0].strip())
    numbers = np.load(folder / "samples.npz")["arr_0"]
    for made, sound in zip(sorted((folder / "wav").glob("*.wav")), numbers, strict=True):
        with wave.open(str(made)) as file, wave.open("out/heartbeats/00000.wav") as real:
            assert file.getparams()[:4] == real.getparams()[:4] == (1, 2, 256, 1024)
            pulses = np.frombuffer(file.readframes(1024), "<i2")
        np.testing.assert_allclose(pulses, (32768 * sound[:, 0]).clip(-32768, 32767), atol=0.51)
    assert "power_law" in Path("runs/beats-pink/experiment.json").read_text()
    assert json.loads(Path("runs/beats-pink/model/data.json").read_text())


def test_every_command_of_the_video_page_runs_and_frames_drawn_from_coherent_noise_flicker_less(
    tmp_path, monkeypatch, capsys
):
    """Before it is trained, a model of v gives back its noise, and AR(1) noise moves sqrt(1 - rho) as far as white
    noise; a model of the residual gives back the data's Gaussian, whatever its noise."""
    monkeypatch.chdir(tmp_path)
    printed = run_page("video.md", 20, capsys)
    folder = Path(by_command(printed, "sample")[0].strip())
    for file in (folder / "gif").glob("*.gif"):
        with Image.open(file) as picture:
            assert picture.n_frames == 8
    moved = {}
    for name in ("coherent", "white", "coherent-v", "white-v"):
        (file,) = Path(f"runs/video-{name}/generated").glob("dpmpp_2m-20-*/samples.npz")
        video = np.load(file)["arr_0"]
        assert video.shape == (4, 8, 32, 32, 1)
        moved[name] = flicker(video)
    assert moved["coherent-v"] / moved["white-v"] == pytest.approx(0.1**0.5, rel=0.1)
    assert moved["coherent"] == pytest.approx(moved["white"], rel=0.15)
    assert moved["white"] < 1.5 * flicker(np.load("out/turbulence.npy")) < 0.5 * moved["white-v"]


def flicker(video: np.ndarray) -> float:
    """mean |x(t+1) - x(t)|, in standard deviations."""
    return np.abs(np.diff(video, axis=1)).mean() / video.std()


def test_heartbeats_are_no_gaussian_with_their_spectrum(tmp_path):
    """The R peaks are steep: increments are far from Gaussian, unlike those of signals with other phases."""
    example = runpy.run_path(str(ROOT / "examples/heartbeats.py"))
    rng = np.random.default_rng(0)
    real = np.stack([example["heartbeat"](rng) for _ in range(50)])
    waves = np.fft.rfft(real)
    shuffled = np.fft.irfft(np.abs(waves) * np.exp(2j * np.pi * rng.uniform(size=waves.shape)))
    flatness = [(np.diff(x) ** 4).mean() / (np.diff(x) ** 2).mean() ** 2 for x in (real, shuffled)]
    assert flatness[0] > 10
    assert 2 < flatness[1] < 5
    for folder in ("a", "b"):
        example["main"](tmp_path / folder, 2)
    assert (tmp_path / "a/00001.wav").read_bytes() == (tmp_path / "b/00001.wav").read_bytes()
    assert (tmp_path / "a/00001.wav").read_bytes() != (tmp_path / "a/00000.wav").read_bytes()


def test_frames_of_turbulence_follow_the_flow(tmp_path):
    """The next frame is the last one moved by the velocity that its own vorticity has; moved backwards it is not."""
    example = runpy.run_path(str(ROOT / "examples/video.py"))
    example["main"](tmp_path / "a.npy", 3)
    example["main"](tmp_path / "b.npy", 3)
    video = np.load(tmp_path / "a.npy")
    assert video.shape == (3, 8, 32, 32)
    np.testing.assert_array_equal(video, np.load(tmp_path / "b.npy"))
    assert np.abs(video.mean((2, 3))).max() < 0.01
    waves, steps = np.fft.rfft2(video[:, :-1]), 10
    errors = {}
    for sign in (1, -1):
        moved = waves
        for _ in range(steps):
            moved = moved + sign * 0.25 / steps * example["slope"](
                moved + sign * 0.125 / steps * example["slope"](moved)
            )
        errors[sign] = np.abs(np.fft.irfft2(moved) - video[:, 1:]).mean()
    still = np.abs(np.diff(video, axis=1)).mean()
    assert errors[1] < 0.6 * still < still < errors[-1]
