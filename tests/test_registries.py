"""An entry added at run time works everywhere: trained, saved, loaded, sampled and measured from the command line."""

import json

import numpy as np
import pytest
import torch
from extensions import ENTRIES, Pairs, even, every_other, lazy

import nidiff
from nidiff.cli import main
from nidiff.covariance.config import BASES
from nidiff.diffusion.schedules import SCHEDULES
from nidiff.diffusion.target import TARGETS
from nidiff.sampling.sampler import SAMPLERS


@pytest.fixture
def registered(monkeypatch):
    for registry, name, entry in ENTRIES:
        monkeypatch.setitem(registry, name, entry)
    return monkeypatch


def test_everything_of_ones_own_through_the_commands(registered, tmp_path, capsys):
    covariance = "striped:strength=1.5"
    run, flags = tmp_path / "run", ["--steps", "2", "--cooldown", "0", "--batch-size", "8", "--precision", "fp32"]
    own = ["--covariance", covariance, "--schedule", "even:num_levels=12", "--target", "twice", "--weighting", "rough"]
    assert main(["train", "--out", str(run), *own, "--sampler", "lazy:share=0.3", *flags]) == 0, capsys.readouterr().err
    denoiser = nidiff.load_model(run)
    assert (denoiser.target_name, len(denoiser.process.schedule)) == ("twice", 12)
    assert denoiser.process.covariance.eigenvalues.unique().numel() == 2
    assert repr(nidiff.Covariance.load(run)) == repr(denoiser.process.covariance)
    registered.setitem(SAMPLERS, "lazy_own", nidiff.sampling.Sampler(lazy, every_other, 6))  # a function as its spacing
    spacings, drawn = [], []
    for sampler in ("lazy:share=0.4", "lazy_own:share=0.4", "lazy_own:share=0.4,spacing=uniform"):
        out = tmp_path / f"samples-{len(drawn)}"
        assert main(["sample", str(run), "--sampler", sampler, "--seeds", "0-3", "--out", str(out)]) == 0
        job = json.loads((out / "job.json").read_text())["job"]
        assert (job["num_steps"], job["options"]) == (6, {"share": 0.4})
        spacings.append(job["spacing"])
        with np.load(out / "samples.npz") as stored:
            drawn.append(stored["arr_0"].tobytes())
    assert spacings == ["every_other", "own-every_other", "uniform"]
    assert drawn[0] == drawn[1] != drawn[2]
    capsys.readouterr()
    measured = ["--seeds", "0-9", "--features", "pixels", "--num-real", "50", "--bootstrap", "0", "--json"]
    assert main(["evaluate", str(run), "--sampler", "lazy", *measured]) == 0
    assert "brightness" in json.loads(capsys.readouterr().out)["metrics"]
    families = [covariance, "Pairs:smooth=4", str(run)]
    assert main(["noise", *families, "--shape", "8", "8", "--out", str(tmp_path / "n.png")]) == 0
    again = [*own[2:], "--covariance", str(run), "--out", str(tmp_path / "again"), *flags]
    assert main(["train", *again]) == 0
    assert repr(nidiff.load_model(tmp_path / "again").process.covariance) == repr(denoiser.process.covariance)


def test_what_is_no_longer_registered_is_refused_in_a_sentence(registered, tmp_path):
    denoiser = nidiff.Denoiser(torch.nn.Identity(), nidiff.Process(even(5), Pairs((2, 4))), target="twice")
    nidiff.save_model(denoiser, tmp_path)
    assert nidiff.load_model(tmp_path, net=torch.nn.Identity()).target_name == "twice"
    for registry, name in ((BASES, "PairBasis"), (SCHEDULES, "even"), (TARGETS, "twice")):
        with registered.context() as missing:
            missing.delitem(registry, name)
            with pytest.raises(nidiff.InputError, match=f"'{name}' is unknown"):
                nidiff.load_model(tmp_path, net=torch.nn.Identity())
