"""An experiment says everything about a run, reads back, and names what it cannot use."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from problems import refused

import nidiff
from nidiff.data.load import load_dataset
from nidiff.data.spec import DataSpec
from nidiff.diffusion.schedules import as_schedule
from nidiff.model.network import unet2d
from nidiff.training.build import build as build_trainer
from nidiff.training.build import build_covariance, needs_gaussian
from nidiff.training.experiment import PRESETS, Experiment, read_experiment
from nidiff.training.identity import settings_digest


def test_experiments_survive_json(tmp_path):
    chosen = {
        "layout": "NCHW",
        "variables": ("t2m", "u10"),
        "scaling": ("standard", "log"),
        "size": (4, 6),
        "crop": (3, 2),
    }
    for experiment in [*PRESETS.values(), Experiment(DataSpec("a.nc", held_out="0.1", data_dir=Path("x"), **chosen))]:
        file = tmp_path / "experiment.json"
        file.write_text(json.dumps(experiment.to_json()))
        assert read_experiment(file) == read_experiment(tmp_path) == experiment


def test_the_papers_two_runs_differ_in_the_noise_alone():
    ddpm, gff = PRESETS["cifar10-ddpm"], PRESETS["cifar10-gff"]
    assert dataclasses.replace(ddpm, covariance=gff.covariance) == gff
    assert gff.steps == 300_000
    net = unet2d((3, 32, 32), widths=gff.widths, layers=gff.layers, attention=gff.attention, dropout=gff.dropout)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 35.7


def test_covariance_and_schedule_are_built_from_their_names():
    images = load_dataset("digits")
    experiment = Experiment(covariance="matern:length_scale=2", schedule="ddpm_linear:num_levels=50,shift=1.5")
    assert torch.equal(build_covariance(experiment, images).eigenvalues, nidiff.matern((8, 8), 2).eigenvalues)
    expected = nidiff.schedules.ddpm_linear(50).shifted(1.5)
    assert torch.equal(as_schedule(experiment.schedule).logsnr, expected.logsnr)
    fitted = build_covariance(Experiment(covariance="from_data:shrinkage=0.1"), images)
    assert torch.equal(
        fitted.eigenvalues, nidiff.from_data(images.batch(torch.arange(len(images))), shrinkage=0.1).eigenvalues
    )
    white = build_covariance(Experiment(covariance="white"), images)
    assert torch.equal(white.eigenvalues, torch.ones(8, 8, dtype=torch.float64))


def test_a_saved_covariance_is_a_covariance_too(tmp_path):
    images = load_dataset("digits")
    saved = nidiff.matern((8, 8), 2.0)
    saved.save(tmp_path / "sigma")
    assert torch.equal(build(str(tmp_path / "sigma")).eigenvalues, saved.eigenvalues)
    assert not torch.equal(build_covariance(Experiment(), images).eigenvalues, saved.eigenvalues)


def test_differences_name_what_matters_and_not_what_is_free():
    a = Experiment(cooldown=0)
    b = dataclasses.replace(a, learning_rate=0.5, steps=7, keep=9, data=DataSpec(data_dir=Path("elsewhere")))
    assert a.differences(b) == ["`learning_rate`: 0.002 → 0.5"]
    assert Experiment(steps=6, cooldown=4).differences(Experiment(steps=8, cooldown=4)) == ["`steps`: 6 → 8"]


def test_the_digest_of_the_settings_is_that_of_version_0_2():
    """Of a run with the defaults, as that version computed it: what it wrote can be resumed."""
    usual = settings_digest(Experiment(precision="fp32"))
    assert usual == "4101a1cc020b5d476c3a507a3d2a4670ce78837f226d9ba4dc5207f027423bc6"
    assert usual != settings_digest(Experiment(DataSpec(missing="mean"), precision="fp32"))
    assert usual == settings_digest(Experiment(DataSpec(data_dir=Path("x")), precision="fp32", keep=5))


def test_automatic_precision_is_one_that_the_processor_survives(monkeypatch):
    assert Experiment().resolved().precision in ("fp32", "bf16")
    assert Experiment(precision="fp16").resolved().precision == "fp16"
    monkeypatch.setattr("nidiff.precision.BF16_TRIAL", "import os; os.abort()")
    assert Experiment().resolved().precision == "fp32"


@pytest.mark.parametrize("native", [True, False])
def test_bf16_of_a_configuration_from_elsewhere_is_never_emulated(monkeypatch, native):
    """The run remains what it was; it is computed in fp32, and a note says so."""
    monkeypatch.setattr("nidiff.training.build.has_bf16", lambda: native)
    experiment = Experiment(precision="bf16", widths=(8,), attention=(), mixture="none", gaussian="none")
    trainer = build_trainer(experiment)
    assert trainer.accelerator.mixed_precision == ("bf16" if native else "no")
    assert trainer.identity["settings"] == settings_digest(experiment)
    assert trainer.facts.get("precision") == (None if native else "fp32")
    assert any("fp32 instead of bf16" in note for note in trainer.notes) is not native


BAD = [
    (lambda: Experiment(steps=0), "steps"),
    (lambda: Experiment(batch_size=-1), "batch_size"),
    (lambda: Experiment(keep=-1), "keep"),
    (lambda: Experiment(precision="fp8"), "precision"),
    (lambda: Experiment(ema_decay=1.0), "ema_decay"),
    (lambda: Experiment(learning_rate=-1.0), "learning_rate"),
    (lambda: Experiment(learning_rate=float("inf")), "learning_rate"),
    (lambda: build("gaussian_fre_field"), "covariance"),
    (lambda: build("gaussian_free_field:alpha=1"), "covariance"),
    (lambda: build("gaussian_free_field:gamma=x"), "gamma"),
    (lambda: build("matern:2"), "covariance"),
    (lambda: as_schedule(Experiment(schedule="vp:shift=abc").schedule), "shift"),
    (lambda: as_schedule(Experiment(schedule="linear").schedule), "schedule"),
    (lambda: unet2d((1, 28, 28), widths=(8, 8, 8, 8)), "network"),
    (lambda: unet2d((1, 8, 8), widths=(10,)), "widths"),
    (lambda: unet2d((1, 8, 8), widths=(8,), attention=(1,)), "attention"),
]


def build(covariance: str) -> nidiff.Covariance:
    return build_covariance(Experiment(covariance=covariance), load_dataset("digits"))


def test_bad_input_is_named():
    for call, argument in BAD:
        with refused(argument):
            call()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "experiment.json.* cannot be read"),
        ("[]", "does not hold an object"),
        ('{"format": 1}', "format 1.* nidiff 0.2"),
        ('{"format": 2, "learning_rat": 1}', "did you mean 'learning_rate'"),
        ('{"format": 2, "steps": "many"}', "steps"),
        ('{"format": 2, "widths": [8.0]}', "widths"),
        ('{"format": 2, "variables": "t2m"}', "variables='t2m'"),
        ('{"format": 2, "data_dir": 3}', "data_dir=3"),
        ('{"format": 2, "batch_size": 8.0}', "batch_size=8.0"),
    ],
)
def test_a_bad_experiment_file_is_named(text, message, tmp_path):
    file = tmp_path / "experiment.json"
    file.write_text(text)
    with pytest.raises(nidiff.InputError, match=message):
        read_experiment(file)


def test_a_run_says_whether_it_can_do_without_the_gaussian():
    needing = [
        {"sampler": "angle_2m:spacing=trailing"},
        {"sampler": "dpmpp_2m:spacing=angle"},
        {"sampler": "ddim:eta=1,start=gaussian"},
        {"schedule": "designed:num_levels=10"},
        {"target": "residual"},
    ]
    assert all(needs_gaussian(Experiment(**settings)) for settings in needing)
    assert not any(needs_gaussian(Experiment(**settings)) for settings in ({}, {"sampler": "ddim:eta=1,start=prior"}))
