"""An entry added at run time works everywhere: trained, saved, loaded, sampled and measured from the command line."""

import json

import numpy as np
import pytest
import torch

import nidiff
from nidiff.cli import main
from nidiff.covariance.basis import Basis
from nidiff.covariance.config import BASES
from nidiff.covariance.families import remembered as remembered_field
from nidiff.covariance.fields import FAMILIES, FIELDS
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.schedules import SCHEDULES
from nidiff.diffusion.spacing import SPACINGS
from nidiff.diffusion.target import TARGETS, Target
from nidiff.evaluation.metrics import METRICS, Metric
from nidiff.model.network import unet2d
from nidiff.recipe import remembered
from nidiff.sampling.ancestral import mix
from nidiff.sampling.sampler import SAMPLERS


class PairBasis(Basis):
    """Sums and differences of neighbours in pairs."""

    def __init__(self, shape):
        self.event_shape = tuple(shape)

    def analyse(self, x):
        return torch.stack([x[..., ::2] + x[..., 1::2], x[..., ::2] - x[..., 1::2]], -1).flatten(-2) / 2**0.5

    synthesise = analyse

    def arguments(self):
        return {"shape": self.event_shape}


def Pairs(shape, smooth=3.0):
    """The variance of a sum is ``smooth`` times that of a difference."""
    eigenvalues = torch.ones(shape)
    eigenvalues[..., ::2] = smooth
    return nidiff.Covariance(eigenvalues, PairBasis(shape), normalize=True)


@remembered_field
def striped(shape, strength: float = 2.0):
    return Pairs(shape, 1 + strength)


@remembered
def even(num_levels: int = 20):
    return nidiff.Schedule(torch.linspace(8, -8, num_levels, dtype=torch.float64))


def twice(x0, eps, level, covariance):
    return 2 * x0


def from_twice(signal, sigma):
    return 0.0 * signal, 0.5 + 0.0 * signal


def lazy(chain, x, x0, here, there, *, share: float = 0.2):
    return mix(x, x0, here, there, share * there.sigma) + share * there.sigma * chain.noise()


def every_other(schedule, count):
    return [2 * (count - 1 - i) + 1 for i in range(count)]


def brightness(real, generated):
    return generated.items.double().mean().item()


@pytest.fixture
def registered(monkeypatch):
    for registry, name, entry in (
        (BASES, "PairBasis", PairBasis),
        (FAMILIES, "Pairs", Pairs),
        (FIELDS, "striped", striped),
        (SCHEDULES, "even", even),
        (TARGETS, "twice", Target(twice, from_twice, 0.0)),
        (WEIGHTINGS, "rough", -0.25),
        (SAMPLERS, "lazy", nidiff.sampling.Sampler(lazy, "every_other", 6)),
        (SPACINGS, "every_other", every_other),
        (METRICS, "brightness", Metric(brightness)),
    ):
        monkeypatch.setitem(registry, name, entry)
    return monkeypatch


@pytest.mark.parametrize("covariance", ["Pairs:smooth=4", "striped:strength=1.5"])
def test_everything_of_ones_own_through_the_commands(covariance, registered, tmp_path, capsys):
    run, flags = tmp_path / "run", ["--steps", "2", "--cooldown", "0", "--batch-size", "8", "--precision", "fp32"]
    own = ["--covariance", covariance, "--schedule", "even:num_levels=12", "--target", "twice", "--weighting", "rough"]
    assert main(["train", "--out", str(run), *own, "--sampler", "lazy:share=0.3", *flags]) == 0, capsys.readouterr().err
    denoiser = nidiff.load_model(run)
    assert (denoiser.target_name, len(denoiser.process.schedule)) == ("twice", 12)
    assert denoiser.process.covariance.eigenvalues.unique().numel() == 2
    assert repr(nidiff.Covariance.load(run)) == repr(denoiser.process.covariance)
    assert (
        main(["sample", str(run), "--sampler", "lazy:share=0.4", "--seeds", "0-3", "--out", str(tmp_path / "s")]) == 0
    )
    job = json.loads((tmp_path / "s/job.json").read_text())["job"]
    assert (job["num_steps"], job["spacing"], job["options"]) == (6, "every_other", {"share": 0.4})
    capsys.readouterr()
    measured = ["--seeds", "0-9", "--features", "pixels", "--num-real", "50", "--bootstrap", "0", "--json"]
    assert main(["evaluate", str(run), "--sampler", "lazy", *measured]) == 0
    assert "brightness" in json.loads(capsys.readouterr().out)["metrics"]
    assert main(["noise", covariance, str(run), "--shape", "8", "8", "--out", str(tmp_path / "n.png")]) == 0
    again = [*own[2:], "--covariance", str(run), "--out", str(tmp_path / "again"), *flags]
    assert main(["train", *again]) == 0
    assert repr(nidiff.load_model(tmp_path / "again").process.covariance) == repr(denoiser.process.covariance)


def test_a_sampler_may_bring_a_function_as_its_spacing(registered, tmp_path, capsys):
    denoiser = nidiff.Denoiser(unet2d((1, 8, 8), widths=(8,), attention=()), nidiff.Process(even(12), Pairs((8, 8))))
    nidiff.save_model(denoiser, tmp_path / "m")
    registered.setitem(SAMPLERS, "lazy_own", nidiff.sampling.Sampler(lazy, every_other, 6))
    drawn = {}
    for sampler in ("lazy", "lazy_own", "lazy_own:spacing=uniform"):
        out = tmp_path / sampler.replace(":", "-")
        assert main(["sample", str(tmp_path / "m"), "--sampler", sampler, "--seeds", "0-3", "--out", str(out)]) == 0
        with np.load(out / "samples.npz") as stored:
            drawn[sampler] = stored["arr_0"].tobytes()
    assert json.loads((tmp_path / "lazy_own/job.json").read_text())["job"]["spacing"] == "own-every_other"
    assert drawn["lazy"] == drawn["lazy_own"] != drawn["lazy_own:spacing=uniform"]


def test_what_is_no_longer_registered_is_refused_in_a_sentence(registered, tmp_path):
    denoiser = nidiff.Denoiser(torch.nn.Identity(), nidiff.Process(even(5), Pairs((2, 4))), target="twice")
    nidiff.save_model(denoiser, tmp_path)
    assert nidiff.load_model(tmp_path, net=torch.nn.Identity()).target_name == "twice"
    for registry, name in ((BASES, "PairBasis"), (SCHEDULES, "even"), (TARGETS, "twice")):
        with registered.context() as missing:
            missing.delitem(registry, name)
            with pytest.raises(nidiff.InputError, match=f"'{name}' is unknown"):
                nidiff.load_model(tmp_path, net=torch.nn.Identity())
