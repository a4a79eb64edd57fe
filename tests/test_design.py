"""``nidiff design``: candidates are judged by the data's Gaussian, and what is recommended can be trained."""

import functools
import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch

import nidiff
from nidiff.cli import main
from nidiff.commands.design import Design
from nidiff.commands.flags import DataArgument
from nidiff.covariance.config import as_covariance
from nidiff.data.dataset import Dataset
from nidiff.design import candidates
from nidiff.design.candidates import SOLVERS, STEPS
from nidiff.diffusion.scaling import Scaling

SHAPE = (16, 16)
STEEP = nidiff.GaussianModel(torch.zeros(1, *SHAPE), nidiff.power_law(SHAPE, 3.0))
FIELDS = STEEP.covariance.sample((64, 1, *SHAPE), torch.Generator().manual_seed(0))
TWO = ("white", "power_law:exponent=3"), ("ddpm_linear", "ddpm_cosine")


@functools.cache
def compare(noises, schedules, gaussian=STEEP):
    return candidates.compare(gaussian, lambda text: as_covariance(text, SHAPE, lambda: FIELDS), noises, schedules)


def test_candidates_are_judged_by_closed_forms():
    found = compare(*TWO)
    assert [(one.covariance, one.schedule) for one in found.candidates] == [(a, b) for a in TWO[0] for b in TWO[1]]
    white, _, matched, _ = found.candidates
    schedule = nidiff.schedules.ddpm_linear()
    data = STEEP.covariance.eigenvalues
    assert white.snr_last == pytest.approx((schedule.logsnr[-1].exp() * data.max()).item())
    assert white.snr_first == pytest.approx((schedule.logsnr[0].exp() * data.min()).item())
    assert matched.roughness == pytest.approx(1.0)
    torch.testing.assert_close(matched.logsnr, matched.logsnr[:, :1].expand_as(matched.logsnr))  # Σ = C: all alike
    assert white.logsnr[50, 1] > white.logsnr[50, -1] + 3
    for one in found.candidates:
        assert {name: tuple(errors) for name, errors in one.errors.items()} == dict.fromkeys(SOLVERS, STEPS)
    process = nidiff.Process("ddpm_linear", nidiff.Identity(SHAPE))
    rows = nidiff.diffusion.spacing.SPACINGS["trailing"](schedule, 20)
    exact = nidiff.design.predict(process, STEEP, "ddim", rows).error
    assert white.errors["ddim"][20] == pytest.approx(exact, rel=1e-6)


def test_matched_noise_is_recommended_for_steep_data_and_white_noise_for_white_data():
    assert compare(*TWO).recommended.covariance == "power_law:exponent=3"
    white = nidiff.GaussianModel(torch.zeros(1, *SHAPE), nidiff.Identity(SHAPE))
    assert compare(TWO[0], ("ddpm_cosine",), white).recommended.covariance == "white"


def test_noise_smoother_than_the_data_and_priors_that_remember_are_not_recommended():
    smooth = compare(("white", "power_law:exponent=6"), ("ddpm_linear",))
    assert "smoother" in smooth.candidates[1].faults[0]
    assert smooth.recommended is smooth.candidates[0]
    short = compare(("white",), ("ddpm_linear:beta_max=0.002", "ddpm_linear:beta_min=0.01"))
    assert "last level" in short.candidates[0].faults[0]
    assert "first level" in short.candidates[1].faults[0]
    assert "no candidate is without fault" in short.reason


def test_equal_snr_is_compared_for_the_noise_of_the_data_alone():
    found = compare(("white", "from_data", "from_data:power=0.5"), ("ddpm_linear", "equal_snr:num_levels=200"))
    pairs = [one.covariance for one in found.candidates if one.schedule.startswith("equal_snr")]
    assert pairs == ["from_data"]


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "fields.npy"
    x = nidiff.power_law((8, 8), 2.5).sample((64, 8, 8), torch.Generator().manual_seed(0))
    np.save(path, (x / x.abs().max()).numpy())
    return path


FEW = ["--covariances", "white", "from_data", "--schedules", "ddpm_cosine"]


def test_what_is_recommended_trains(fields, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["design", str(fields), *FEW]) == 0
    said = capsys.readouterr()
    assert (tmp_path / "out" / "design.png").stat().st_size > 10_000
    assert "wrote out/design.png" in said.err
    said.out.encode("ascii")
    command = shlex.split(said.out.strip().splitlines()[-1])
    assert command[:2] == ["nidiff", "train"]
    assert main([*command[1:], "--steps", "3", "--batch-size", "16", "--num-samples", "4", "--cooldown", "0"]) == 0
    assert (tmp_path / "runs" / "designed" / "model").is_dir()


def test_reflecting_noise_is_compared_in_its_own_basis(fields, tmp_path, capsys):
    """JSON has every number; schedules that keep signal at their last level are left out; two bases are refused."""
    few = ["--schedules", "ddpm_cosine", "heat", "--out", str(tmp_path / "design.svg"), "--json"]
    noises = ["white", "gff:boundary=reflecting"]
    assert main(["design", str(fields), "--covariances", *noises, *few]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found.keys() == {"data", "out", "shape", "candidates", "recommended"}
    assert found["shape"] == [1, 8, 8]
    assert [one["covariance"] for one in found["candidates"]] == noises
    keys = {"covariance", "schedule", "roughness", "snr_last", "snr_first", "errors", "faults"}
    for one in found["candidates"]:
        assert one.keys() == keys
        assert all(errors.keys() == {"5", "10", "20", "50"} for errors in one["errors"].values())
    assert found["recommended"].keys() == keys | {"reason", "command"}
    assert (tmp_path / "design.svg").exists()
    assert "left out heat" in said.err
    assert main(["design", str(fields), "--covariances", "gff", *noises, *few]) == 2
    assert "--covariances='gff:boundary=reflecting' has other modes than 'gff'" in capsys.readouterr().err


def test_the_command_has_one_preset():
    data = Dataset(torch.zeros(1, 1, *SHAPE, dtype=torch.uint8))
    for scaling, images, words in (
        ("auto", data, "--preset cifar10-small"),
        ("standard", replace(data, scaling=Scaling(30.0, 100.0)), "--data cifar10 --preset fields --scaling standard"),
    ):
        command = Design(DataArgument("cifar10", scaling=(scaling,)))._command(compare(*TWO).recommended, images)
        assert shlex.join(command).startswith(f"nidiff train {words} --covariance")


BAD = {
    "leave nothing to compare": "digits --covariances white --schedules equal_snr",
    "--schedules='ddpm_linear:num_levels=49' has 49 levels": "digits --schedules ddpm_linear:num_levels=49",
    "DATA is missing": "",
    "'nowhere.npy'": "nowhere.npy",
    "--num-steps=7": "digits --num-steps 7",
    "--schedules='liner' is unknown": "digits --schedules liner",
    "covariance='whit' is unknown": "digits --covariances whit",
    "--out='design.txt'": "digits --out design.txt",
}


def test_a_bad_command_is_one_sentence(capsys):
    for words, arguments in BAD.items():
        assert main(["design", *arguments.split()]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
