"""The data's Gaussian around the core: saved with a model, fitted and measured by training, and shown as a baseline."""

import json
import shutil

import numpy as np
import pytest
import torch
from problems import refused
from safetensors.torch import load_file, save_file

import nidiff
from nidiff.cli import main
from nidiff.data.load import load_dataset
from nidiff.diffusion.roughness import roughness
from nidiff.interop import NonIsotropicPipeline
from nidiff.model.config import scheduler_config
from nidiff.model.network import unet2d
from nidiff.testing.problems import normal
from nidiff.training.baseline import baseline_text
from nidiff.training.build import build_covariance, build_gaussian
from nidiff.training.experiment import Experiment
from nidiff.training.identity import process_digest
from nidiff.training.run import RunDirectory

GFF = nidiff.gaussian_free_field((8, 8))
DATA = nidiff.matern((8, 8), 2.0).sample((64, 1, 8, 8), torch.Generator().manual_seed(0)) + 0.5
EYE = torch.eye(64, dtype=torch.float64)
# Σ of every kind of basis; the last has equal eigenvalues, of which the vectors are not unique.
COVARIANCES = {
    "white": nidiff.Identity((8, 8)),
    "gff": GFF,
    "fitted": nidiff.from_data(DATA, average="modes"),
    "dense, degenerate": nidiff.Dense(EYE + torch.outer(normal(64), normal(64, seed=1)).pow(2).cov() * 1e-3, (8, 8)),
}


def network(sees="x", channels=1):
    torch.manual_seed(0)
    return unet2d((channels, 8, 8), widths=(8,), layers=1, attention=(), both=sees == "both").eval()


def model(covariance=GFF, target="residual", schedule="ddpm_cosine:num_levels=30", sees=None, channels="each"):
    basis = "periodic" if covariance.is_constant else covariance
    gaussian = nidiff.fit_gaussian(DATA, basis=basis, channels=channels)
    process = nidiff.Process(schedule, covariance)
    made = nidiff.Denoiser(network(sees), process, target, clip=1.0, gaussian=gaussian, sees=sees)
    return nidiff.design.measure_kappa(made, DATA, num_images=4, num_rows=3)


def drawn(denoiser, sampler="angle_2m"):
    return nidiff.sample(denoiser, (2, 1, 8, 8), sampler=sampler, num_steps=4, generator=[0, 1])


# Saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "channels", "target", "sees"),
    [
        ("white", "each", "residual", None),
        ("gff", "each", "v", "x"),
        ("fitted", "shared", "residual", "z"),
        ("dense, degenerate", "each", "v", "both"),
    ],
)
def test_a_model_with_a_gaussian_is_the_same_after_saving_and_in_a_pipeline(name, channels, target, sees, tmp_path):
    first = model(COVARIANCES[name], target, sees=sees, channels=channels)
    nidiff.save_model(first, tmp_path / "m")
    second = nidiff.load_model(tmp_path / "m")
    assert torch.equal(second.gaussian.mean, first.gaussian.mean)
    assert torch.equal(second.kappa.values, first.kappa.values)
    assert second.sees == first.sees == (sees or first.sees)
    assert torch.equal(drawn(first), drawn(second))
    assert not torch.equal(drawn(second.with_kappa(None)), drawn(second))  # κ was there
    assert process_digest(scheduler_config(second)) == process_digest(scheduler_config(first))
    pipeline = NonIsotropicPipeline.from_pretrained(tmp_path / "m")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(2, seeds=[0, 1], num_inference_steps=4, output_type="pt").images
    assert torch.equal(images, (drawn(first, "dpmpp_2m") / 2 + 0.5).clamp(0, 1))


def test_kappa_is_no_part_of_the_identity_of_a_run_and_the_gaussian_is():
    first = model()
    own = process_digest(scheduler_config(first))
    assert process_digest(scheduler_config(first.with_kappa(None))) == own
    other = nidiff.fit_gaussian(DATA + 1e-3, basis=GFF)
    assert process_digest(scheduler_config(first.with_gaussian(other))) != own


def damage(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


DAMAGES = {
    "no kappa": lambda arrays: arrays.pop("kappa.values"),
    "kappa beyond 1": lambda arrays: arrays["kappa.trust"].add_(2),
    "kappa of another shape": lambda arrays: arrays.update({"kappa.values": arrays["kappa.values"][:1].clone()}),
    "mean of another shape": lambda arrays: arrays.update(mean=arrays["mean"].repeat(2, 1, 1)),
    "a mean that is not finite": lambda arrays: arrays["mean"].fill_(torch.nan),
    "C that is not positive": lambda arrays: arrays["covariance.eigenvalues"].neg_(),
}


def test_arrays_that_do_not_fit_are_refused_in_a_sentence(tmp_path):
    """With the manifest by its checksum, and without it by what they are."""
    nidiff.save_model(model(), tmp_path / "whole")
    for change in DAMAGES.values():
        folder = shutil.copytree(tmp_path / "whole", tmp_path / "m", dirs_exist_ok=True)
        damage(folder / "scheduler" / "gaussian.safetensors", change)
        with pytest.raises(nidiff.errors.FileError, match=r"gaussian\.safetensors.* has changed"):
            nidiff.load_model(folder)
        (folder / "manifest.json").unlink()
        with pytest.raises(nidiff.errors.FileError, match=r"scheduler_config\.json.* cannot be used"):
            nidiff.load_model(folder)


def test_a_gaussian_that_does_not_fit_the_network_is_not_saved(tmp_path):
    process = nidiff.Process("ddpm_cosine:num_levels=30", GFF)
    colour = nidiff.fit_gaussian(DATA.repeat(1, 3, 1, 1) + 0.1 * normal(64, 3, 8, 8), basis=GFF)
    ours = nidiff.fit_gaussian(DATA, basis=GFF)
    for gaussian, sees, net in ((colour, "x", network()), (ours, "both", network()), (ours, "z", network("both"))):
        with refused("gaussian"):
            nidiff.save_model(nidiff.Denoiser(net, process, "v", gaussian=gaussian, sees=sees), tmp_path / "m")


# Noise smoother than the data ------------------------------------------------------------------------------------


def test_noise_that_is_smoother_than_the_data_is_named_with_its_worst_mode_and_ratio():
    white = nidiff.GaussianModel(torch.zeros(16, 16), nidiff.gaussian_free_field((16, 16), gamma=0.01))
    smooth = nidiff.gaussian_free_field((16, 16), gamma=3.0)
    found = roughness(white, smooth)
    ratios = white.covariance.eigenvalues / smooth.eigenvalues
    ratios = ratios / (white.covariance.eigenvalues.mean() / smooth.eigenvalues.mean())
    assert found.mode == (8, 8)
    assert found.ratio == pytest.approx(ratios.max().item())
    assert found.warning is not None
    for rougher in (nidiff.Identity((16, 16)), nidiff.gaussian_free_field((16, 16)), white.covariance):
        assert roughness(white, rougher).warning is None
    # A coarse mode that the noise lacks is not roughness.
    coarse = smooth.eigenvalues.clone()
    coarse[0, 0] *= 1e-4
    data = nidiff.GaussianModel(torch.zeros(16, 16), smooth)
    assert roughness(data, nidiff.Fourier((16, 16), coarse)).warning is None
    # A basis without wavenumbers.
    dense = nidiff.Dense(torch.cov(normal(64, 200)) + EYE, (8, 8))
    data = nidiff.GaussianModel(torch.zeros(8, 8), dense)
    assert roughness(data, dense).warning is None
    assert roughness(data, dense.with_eigenvalues(dense.eigenvalues**6)).warning is not None


# Training --------------------------------------------------------------------------------------------------------

TINY = [
    *("--widths", "8", "--attention", "--layers", "1", "--batch-size", "8", "--precision", "fp32", "--steps", "2"),
    *("--warmup", "0", "--cooldown", "0", "--num-samples", "2", "--num-steps", "3", "--no-report"),
]


def train(out, *flags):
    return main(["train", "--out", str(out), *TINY, *flags])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "plain"
    assert train(out) == 0
    return out


def test_training_fits_the_gaussian_of_its_images_in_the_basis_of_the_noise(plain):
    images = load_dataset("digits").all()
    denoiser = nidiff.load_model(plain)
    wanted = nidiff.fit_gaussian(images, basis=denoiser.process.covariance)
    assert torch.allclose(denoiser.gaussian.mean, wanted.mean)
    assert torch.allclose(denoiser.gaussian.covariance.eigenvalues, wanted.covariance.eigenvalues)
    assert denoiser.kappa is not None
    assert (denoiser.target_name, denoiser.sees) == ("eps", "x")


def test_training_fits_the_mixture_of_its_classes_and_measures_what_a_start_loses(plain, capsys):
    """Though the network is not given the classes; checkpoints have none, and what a run is does not depend on it."""
    images, denoiser = load_dataset("digits"), nidiff.load_model(plain)
    wanted = nidiff.fit_mixture(images.all(), images.labels, basis=denoiser.process.covariance)
    assert denoiser.mixture.classes.tolist() == [*range(10)]
    assert torch.allclose(denoiser.mixture.means, wanted.means, atol=1e-5)
    assert {*denoiser.kappa.losses} == {"gaussian", "mixture"}
    facts = json.loads((plain / "experiment.json").read_text())["resolved"]
    assert facts["mixture"]["bits_per_dim"] < facts["gaussian"]["bits_per_dim"]
    assert facts["mixture"]["split"] == "test"
    assert (
        main(["sample", str(plain), "--sampler", "dpmpp_2m:start=mixture", "--num-steps", "2", "--seeds", "0-1"]) == 0
    )
    assert "nats per dimension" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["clusters:components=3,rank=4", "none"])
def test_the_mixture_can_be_chosen_also_when_a_run_is_resumed(text, plain, tmp_path):
    run = shutil.copytree(plain, tmp_path / "run")
    assert main(["train", "--resume", "--no-report", "--out", str(run), "--steps", "3", "--mixture", text]) == 0
    mixture = nidiff.load_model(run).mixture
    assert mixture is None if text == "none" else (len(mixture), mixture.rank, mixture.classes) == (3, 4, None)


@pytest.mark.parametrize("text", ["some", "classes:shrink=1", "none:rank=3"])
def test_a_mixture_that_is_none_is_refused_before_training(text, tmp_path, capsys):
    assert train(tmp_path / "run", "--mixture", text) == 2
    assert "mixture" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_images_that_training_mirrors_are_mirrored_in_the_gaussian_too():
    images, experiment = load_dataset("digits"), Experiment(flip=True)
    fitted = build_gaussian(experiment, images, build_covariance(experiment, images))
    assert torch.allclose(fitted.mean, fitted.mean.flip(-1))
    alone = build_gaussian(Experiment(), images, GFF)
    assert not torch.allclose(alone.mean, alone.mean.flip(-1), atol=0.01)


def test_without_a_gaussian_the_weights_are_the_same(plain, tmp_path, capsys):
    assert train(tmp_path / "none", "--gaussian", "none") == 0
    one, other = (nidiff.load_model(run) for run in (plain, tmp_path / "none"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert other.gaussian is None
    assert main(["train", "--resume", "--no-report", "--out", str(tmp_path / "none"), "--steps", "3"]) == 0
    assert main(["sample", str(tmp_path / "none"), "--num-steps", "2", "--seeds", "0-1"]) == 0
    assert main(["sample", str(tmp_path / "none"), "--sampler", "angle", "--num-steps", "2"]) == 2
    assert "Gaussian" in capsys.readouterr().err


RUNS = {
    "residual, both, colour": ["--target", "residual", "--weighting", "target", "--sees", "both", "--channels", "3"],
    "designed per mode": ["--schedule", "designed:num_levels=40,per_mode=true", "--target", "v"],
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_resumed_with_the_gaussian_and_the_schedule_it_stored(case, tmp_path):
    """To the bit what it would have been."""
    assert train(tmp_path / "a", *RUNS[case], "--steps", "3", "--checkpoint-every", "2") == 0
    assert train(tmp_path / "b", *RUNS[case], "--steps", "2", "--checkpoint-every", "2") == 0
    stored = RunDirectory.open(tmp_path / "b").stored()
    assert main(["train", "--resume", "--no-report", "--out", str(tmp_path / "b"), "--steps", "3"]) == 0
    a, b = (nidiff.load_model(tmp_path / name) for name in "ab")
    assert torch.equal(b.gaussian.covariance.eigenvalues, stored.gaussian.covariance.eigenvalues)
    assert torch.equal(b.process.schedule.logsnr, stored.process.schedule.logsnr)
    shape = (2, *a.gaussian.shape)
    one, other = (nidiff.sample(each, shape, sampler="angle_2m", num_steps=3, generator=[0, 1]) for each in (a, b))
    assert torch.equal(one, other)


def test_a_gaussian_that_was_exchanged_is_noticed_on_resume(plain, tmp_path, capsys):
    run = shutil.copytree(plain, tmp_path / "run")
    damage(run / "model" / "scheduler" / "gaussian.safetensors", lambda arrays: arrays["mean"].add_(0.01))
    assert main(["train", "--resume", "--no-report", "--out", str(run), "--steps", "3"]) == 2
    assert "the data's Gaussian" in capsys.readouterr().err
    shutil.copy(plain / "model" / "scheduler" / "gaussian.safetensors", run / "model" / "scheduler")
    damage(run / "model" / "scheduler" / "gaussian.safetensors", lambda arrays: arrays["kappa.values"].mul_(0.5))
    assert main(["train", "--resume", "--no-report", "--out", str(run), "--steps", "3"]) == 0  # it is measured again


def images_at(path, pixels):
    np.save(path, pixels)
    return ["--data", str(path)]


def test_data_that_do_not_vary_are_trained_without_a_gaussian_or_refused(tmp_path, capsys):
    some = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    same = images_at(tmp_path / "same.npy", np.repeat(some[:1], 20, 0))
    assert train(tmp_path / "same", *same) == 0
    assert nidiff.load_model(tmp_path / "same").gaussian is None
    assert train(tmp_path / "residual", *same, "--target", "residual", "--weighting", "target") == 2
    some[:] = some[:, :1, :1]  # every image is one grey: all modes but the first are 0
    constant = [*images_at(tmp_path / "constant.npy", some), "--covariance", "gff:boundary=reflecting"]
    assert train(tmp_path / "shrunk", *constant, "--dry-run") == 0
    capsys.readouterr()
    assert train(tmp_path / "zero", *constant, "--gaussian", "modes:shrinkage=0,floor=0") == 2
    assert "raise shrinkage" in capsys.readouterr().err
    assert not (tmp_path / "zero").exists()


def test_noise_smoother_than_the_data_is_said_once_when_training_begins(tmp_path, capsys):
    data = images_at(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8))
    assert train(tmp_path / "run", *data, "--covariance", "gff:gamma=3") == 0
    assert capsys.readouterr().err.count("the noise is smoother than the data") == 1
    assert main(["train", "--resume", "--no-report", "--out", str(tmp_path / "run"), "--steps", "3"]) == 0
    assert "the noise is smoother" not in capsys.readouterr().err


REFUSED = (
    "--gaussian mode",
    "--gaussian modes:shrink=1",
    "--gaussian none --target residual",
    "--gaussian none --sampler angle",
    "--gaussian none --sees z",
    "--sees y",
    "--gaussian radial --covariance pyramid",  # a basis without wavenumbers
    "--gaussian modes:basis=reflecting",
)


def test_bad_flags_are_refused(tmp_path):
    for flags in REFUSED:
        assert train(tmp_path / "run", *flags.split()) == 2
        assert not (tmp_path / "run").exists()


# The baseline ----------------------------------------------------------------------------------------------------


def test_a_baseline_of_another_kind_is_not_shown():
    assert all(baseline_text(facts) is None for facts in (None, {}, [], {"bits_per_dim": 1.5, "images": "x"}))


def test_the_baseline_is_that_of_held_out_images_and_shown_in_the_card_and_the_report(plain, with_report):
    held_out = load_dataset("digits", split="test").all()
    bits = nidiff.load_model(plain).gaussian.bits_per_dim(held_out.double()).mean().item()
    facts = RunDirectory.open(plain).facts["gaussian"]
    assert facts == {"bits_per_dim": pytest.approx(bits, rel=1e-3), "images": 299, "split": "test"}
    said = f"{facts['bits_per_dim']:.4g} bits per dimension of 299 held-out images"
    assert said in (plain / "model" / "README.md").read_text()
    assert main(["report", str(plain)]) == 0
    assert said in (plain / "report.html").read_text()
