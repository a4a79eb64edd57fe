"""The pipeline: what nidiff train leaves opens in diffusers, gives the same images, and only under its own Σ."""

import json
import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard, RepoUrl
from problems import refused
from safetensors.torch import load_file, save_file

import nidiff
from nidiff.cli import main
from nidiff.evaluation.results import Measured, Result, remember
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.folder import load_model, same_covariance, save_model
from nidiff.model.network import unet2d
from nidiff.randomness import generators_from_seeds
from nidiff.training.experiment import Experiment

GFF = nidiff.gaussian_free_field((8, 8))
PROCESS = nidiff.Process(nidiff.schedules.ddpm_linear(5), GFF)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What ``nidiff train`` leaves after two steps, with a Σ that is arrays."""
    out = tmp_path_factory.mktemp("runs") / "r"
    flags = "--widths 8 --attention --batch-size 8 --precision fp32 --steps 2 --warmup 0 --cooldown 0 --num-samples 1"
    flags += " --num-steps 2 --schedule ddpm_linear:num_levels=50 --covariance from_data:average=modes"
    assert main(["train", "--out", str(out), *flags.split()]) == 0
    return out


@pytest.fixture
def network():
    torch.manual_seed(0)
    return unet2d((1, 8, 8), widths=(8,), layers=1, attention=()).eval()


def opened(path, **options) -> NonIsotropicPipeline:
    pipeline = NonIsotropicPipeline.from_pretrained(path, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def in_unit_range(x: torch.Tensor) -> torch.Tensor:
    return (x / 2 + 0.5).clamp(0, 1)


# One model, two ways to open it ----------------------------------------------------------------------------------


def test_a_trained_model_gives_the_same_images_in_both_worlds(run):
    pipeline, denoiser = opened(run / "model"), nidiff.load_model(run)
    for algorithm, sampler in (("ddpm", "ancestral"), ("ddim", "ddim"), ("dpmsolver++", "dpmpp_2m")):
        pipeline.scheduler = NonIsotropicScheduler.from_config(pipeline.scheduler.config, algorithm=algorithm)
        images = pipeline(batch_size=3, num_inference_steps=7, output_type="pt", seeds=[4, 5, 6]).images
        options = {"sampler": sampler, "spacing": pipeline.scheduler.timesteps.tolist()}
        expected = nidiff.sample(denoiser, (3, 1, 8, 8), generator=[4, 5, 6], **options)
        assert torch.equal(images, in_unit_range(expected))
        assert torch.equal(images, pipeline(3, generators_from_seeds([4, 5, 6]), 7, "pt").images)
        other = nidiff.sample(denoiser, (3, 1, 8, 8), generator=[4, 5, 7], **options)
        assert not torch.equal(images, in_unit_range(other))
    pipeline = opened(run)  # the run directory, and the defaults of nidiff.sample
    images = pipeline(2, output_type="pt", seeds=[0, 1]).images
    assert len(pipeline.scheduler.timesteps) == 20
    assert torch.equal(images, in_unit_range(nidiff.sample(denoiser, (2, 1, 8, 8), generator=[0, 1])))


def test_images_come_as_pil_numpy_or_tensors_and_a_short_schedule_is_visited_whole(network):
    pipeline = NonIsotropicPipeline(network, NonIsotropicScheduler(GFF, "ddpm_linear:num_levels=5"))
    pipeline.set_progress_bar_config(disable=True)
    array = pipeline(2, output_type="np", seeds=[0, 1]).images
    assert pipeline.scheduler.timesteps.tolist() == [4, 3, 2, 1, 0]
    tensor = pipeline(2, output_type="pt", seeds=[0, 1], return_dict=False)[0]
    picture = pipeline(2, seeds=[0, 1]).images[1]
    assert array.shape == (2, 8, 8, 1)
    assert np.array_equal(array.transpose(0, 3, 1, 2), tensor.numpy())
    assert np.abs(np.asarray(picture) / 255 - array[1, ..., 0]).max() <= 0.5 / 255 + 1e-6
    images = pipeline.to(torch.bfloat16)(2, output_type="np").images
    assert np.isfinite(images).all()


# Only under its own Σ --------------------------------------------------------------------------------------------


def test_another_covariance_is_refused(run, tmp_path):
    own = load_model(run).process.covariance
    assert same_covariance(opened(run, covariance=own).scheduler.covariance, own)
    faster = NonIsotropicScheduler(own, "ddpm_linear:num_levels=50", algorithm="ddim")  # the same Σ is welcome
    assert opened(run, scheduler=faster)(num_inference_steps=3, output_type="np").images.shape == (1, 8, 8, 1)
    pipeline, other = opened(run), opened(run)
    pipeline.scheduler, other.scheduler = NonIsotropicScheduler(GFF), diffusers.DDIMScheduler()
    for argument, act in (
        ("covariance", lambda: opened(run, covariance=GFF)),
        ("covariance", lambda: opened(run, scheduler=NonIsotropicScheduler(GFF))),
        ("covariance", pipeline),
        ("covariance", lambda: pipeline.save_pretrained(tmp_path / "m")),
        ("scheduler", other),
        ("scheduler", lambda: other.save_pretrained(tmp_path / "m")),
    ):
        with refused(argument):
            act()
    assert not (tmp_path / "m").exists()


@pytest.mark.filterwarnings("ignore:Expected types")
def test_pipelines_of_diffusers_warn_or_fail_by_name(run):
    """DDPMPipeline finds our scheduler in the index, which sees what it is started from. DDIMPipeline makes a
    DDIMScheduler of whatever it finds. The generic class looks for the pipeline among diffusers' own."""
    plain = diffusers.DDPMPipeline.from_pretrained(run / "model")
    plain.set_progress_bar_config(disable=True)
    with pytest.warns(UserWarning, match="init_noise"):
        plain(batch_size=16, num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotImplementedError, match="needs nidiff.interop.NonIsotropicScheduler"):
        diffusers.DDIMPipeline.from_pretrained(run / "model")
    with pytest.raises(AttributeError, match="NonIsotropicPipeline"):
        diffusers.DiffusionPipeline.from_pretrained(run / "model")


def test_a_model_of_diffusers_opens_with_white_noise_only(network, tmp_path):
    peer = diffusers.DDPMPipeline(network, diffusers.DDPMScheduler())
    peer.set_progress_bar_config(disable=True)
    peer.save_pretrained(tmp_path / "plain")
    config = diffusers.DDPMScheduler().config
    white = NonIsotropicScheduler.from_config(config, covariance=nidiff.Identity((8, 8)))
    ours = opened(tmp_path / "plain", scheduler=white)
    a, b = (p(2, torch.Generator().manual_seed(1), 5, output_type="np").images for p in (ours, peer))
    assert np.abs(a - b).max() <= 1e-4
    ours.save_pretrained(tmp_path / "ours")
    assert same_covariance(opened(tmp_path / "ours").scheduler.covariance, nidiff.Identity((8, 8)))
    for argument, options in (
        ("covariance", {"scheduler": NonIsotropicScheduler(2.0 * nidiff.Identity((8, 8)))}),
        ("covariance", {"scheduler": white, "covariance": GFF}),
        ("scheduler", {}),
    ):
        with refused(argument):
            opened(tmp_path / "plain", **options)


def test_bad_parts_and_arguments_are_refused(network, tmp_path):
    pipeline = NonIsotropicPipeline(network, NonIsotropicScheduler(GFF))
    larger = NonIsotropicScheduler(nidiff.gaussian_free_field((16, 16)))
    for argument, act in (
        ("covariance", lambda: NonIsotropicPipeline(network, larger)),
        ("scheduler", lambda: NonIsotropicPipeline(network, diffusers.DDPMScheduler())),
        ("output_type", lambda: pipeline(output_type="jpg")),
        ("generator", lambda: pipeline(batch_size=2, seeds=[1])),
        ("num_inference_steps", lambda: pipeline(num_inference_steps=1001)),
    ):
        with refused(argument):
            act()
    for nowhere in ("runs/digits", tmp_path / "nowhere"):
        with pytest.raises(OSError, match="neither a folder here nor within reach on the Hub"):
            NonIsotropicPipeline.from_pretrained(nowhere, cache_dir=tmp_path, local_files_only=True)


# Damaged folders -------------------------------------------------------------------------------------------------


def rewrite(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def weights(folder):
    return folder / "unet" / "diffusion_pytorch_model.safetensors"


def without_one(file):
    tensors = load_file(file)
    tensors.pop("conv_out.bias")
    save_file(tensors, file)


SCHEDULER, SPECTRUM = "scheduler_config.json", "covariance.safetensors"
LARGER = {"covariance": "gaussian_free_field", "shape": [16, 16], "gamma": 1.0}
DAMAGES = {  # what happens to the file of scheduler/ or to the folder, and what the message names
    "no JSON": (lambda c, _: c.write_text("{"), SCHEDULER),
    "no Σ": (lambda c, _: rewrite(c, covariance=None), SCHEDULER),
    "family of Σ": (lambda c, _: rewrite(c, covariance={"covariance": "gff", "shape": [8, 8]}), SCHEDULER),
    "shape of Σ": (lambda c, _: rewrite(c, covariance=LARGER, gaussian=None), r"\(1, 8, 8\)"),
    "unknown field": (lambda c, _: rewrite(c, beta_start=0.1), f"{SCHEDULER}.*'beta_start'"),
    "algorithm": (lambda c, _: rewrite(c, algorithm="unipc"), f"{SCHEDULER}.*'unipc'"),
    "levels": (lambda c, _: rewrite(c, num_train_timesteps=7), "num_train_timesteps"),
    "no arrays": (lambda c, _: c.with_name(SPECTRUM).unlink(), SPECTRUM),
    "damaged arrays": (lambda c, _: c.with_name(SPECTRUM).write_bytes(b"torn"), SPECTRUM),
    "other arrays": (lambda c, _: save_file({"a": torch.zeros(3)}, c.with_name(SPECTRUM)), "tensors"),
    "no network": (lambda _, folder: shutil.rmtree(folder / "unet"), "unet"),
    "damaged weights": (lambda _, folder: weights(folder).write_bytes(b"torn"), "unet"),
    "a weight less": (lambda _, folder: without_one(weights(folder)), "conv_out.bias"),
    "weights of another network": (lambda _, folder: rewrite(folder / "unet" / "config.json", in_channels=3), "unet"),
}


def test_a_damaged_folder_is_bad_input_and_named(run, tmp_path, capsys):
    folder = tmp_path / "m"
    for damage, words in DAMAGES.values():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run / "model", folder)
        (folder / "manifest.json").unlink()  # a checksum would notice it first
        damage(folder / "scheduler" / SCHEDULER, folder)
        with pytest.raises(nidiff.InputError, match=words) as caught:
            load_model(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert main(["sample", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_pipeline_and_a_scheduler_notice_a_change(network, tmp_path):
    NonIsotropicPipeline(network, NonIsotropicScheduler(GFF)).save_pretrained(tmp_path / "m")
    assert opened(tmp_path / "m")
    for part, name, old, new in (
        ("unet", "config.json", '"silu"', '"relu"'),
        ("scheduler", SCHEDULER, '"epsilon"', '"sample"'),
        (".", "model_index.json", "NonIsotropicPipeline", "DDPMPipeline"),
    ):
        file = tmp_path / "m" / part / name
        whole = file.read_text()
        assert old in whole
        file.write_text(whole.replace(old, new))
        with pytest.raises(OSError, match=f"{name}' has changed.*nidiff verify --accept"):
            opened(tmp_path / "m")
        if part == "scheduler":
            with pytest.raises(OSError, match="has changed"):
                NonIsotropicScheduler.from_pretrained(tmp_path / "m" / "scheduler")
        file.write_text(whole)
    assert opened(tmp_path / "m")


# The card and the Hub --------------------------------------------------------------------------------------------


def test_the_card_states_what_the_model_is(run, tmp_path):
    text = (run / "model" / "README.md").read_text()
    front = ModelCard(text).data
    assert front.library_name == "nidiff"
    assert {"diffusers", "unconditional-image-generation"} <= {*front.tags}
    assert "Metrics" not in text
    shutil.copytree(run, tmp_path / "r")
    metrics = {"FD-pixels": Measured(7.0123, 0.12), "recall": Measured(0.5, None, True)}
    remember(tmp_path / "r", Result("r", "ddim", 10, "uniform", {"eta": 0.5}, "0-99", 1.0, metrics, {}))
    opened(tmp_path / "r").save_pretrained(tmp_path / "shared")
    shared = (tmp_path / "shared" / "README.md").read_text()
    assert "FD-pixels" in shared
    (tmp_path / "shared" / "README.md").write_text("edited by hand")
    opened(run).save_pretrained(tmp_path / "shared")  # a README.md that is no card stays
    assert (tmp_path / "shared" / "README.md").read_text() == "edited by hand"


def test_another_model_in_the_same_folder_has_its_own_card(network, tmp_path):
    folder, card = tmp_path / "m", tmp_path / "m" / "README.md"
    fitted = [nidiff.from_data(torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(i))) for i in (0, 1)]
    cards = set()
    for covariance in (nidiff.Identity((8, 8)), *fitted, GFF):
        NonIsotropicPipeline(network, NonIsotropicScheduler(covariance)).save_pretrained(folder)
        cards.add(card.read_text())
    assert len(cards) == 4
    card.write_text(card.read_text() + "edited by hand")
    again = opened(folder)
    again.scheduler = NonIsotropicScheduler.from_config(again.scheduler.config, algorithm="ddim")
    for place in (folder, tmp_path / "copy"):  # the same model, sampled otherwise
        again.save_pretrained(place)
        assert "edited by hand" in (place / "README.md").read_text()
    again.scheduler = NonIsotropicScheduler.from_config(again.scheduler.config, schedule="ddpm_cosine:num_levels=9")
    again.save_pretrained(folder)
    assert "edited by hand" not in card.read_text()


def test_the_card_says_neither_where_the_data_lay_nor_that_fields_have_a_pipeline(network, tmp_path):
    save_model(nidiff.Denoiser(network, PROCESS), tmp_path / "m", Experiment(data="/home/me/private/cats").about)
    text = (tmp_path / "m" / "README.md").read_text()
    assert all(words in text for words in ("cats", "NonIsotropicPipeline.from_pretrained"))
    assert "private" not in text
    save_model(nidiff.Denoiser(network, PROCESS, scaling=nidiff.Scaling(3.0, 1.0)), tmp_path / "m")
    assert "from_pretrained" not in (tmp_path / "m" / "README.md").read_text()  # which makes 8-bit images


def test_the_cards_python_runs_in_the_folder_it_names(run, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    opened(run).save_pretrained(".")
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "mine" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert '"mine"' in code
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["images"]) == 4


def test_a_model_of_the_hub_opens_from_the_cache(run, tmp_path):
    """The layout of the Hub's cache, so that nothing is fetched: the arrays of Σ and the card come along."""
    repository, commit = tmp_path / "cache" / "models--me--digits", "0123456789" * 4
    shutil.copytree(run / "model", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    offline = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    pipeline = opened("me/digits", **offline)
    own = load_model(run).process.covariance
    assert same_covariance(pipeline.scheduler.covariance, own)
    alone = NonIsotropicScheduler.from_pretrained("me/digits", subfolder="scheduler", **offline)
    assert same_covariance(alone.covariance, own)
    pipeline.save_pretrained(tmp_path / "copy")
    card = (run / "model" / "README.md").read_text()
    assert (tmp_path / "copy" / "README.md").read_text() == card.replace('"PATH_OR_REPOSITORY"', '"copy"')
    (repository / "snapshots" / commit / "scheduler" / "covariance.safetensors").unlink()
    for folder, missing in (("scheduler", "covariance.safetensors"), ("nowhere", "scheduler_config.json")):
        with pytest.raises(OSError, match=missing):
            NonIsotropicScheduler.from_pretrained("me/digits", subfolder=folder, **offline)


def test_what_is_pushed_is_the_model_with_its_card(run, tmp_path, monkeypatch):
    """The Hub itself is out of reach of a test: its two calls are caught where diffusers makes them."""
    from diffusers.utils import hub_utils

    monkeypatch.setattr(hub_utils, "create_repo", lambda name, **_: RepoUrl(f"https://huggingface.co/{name}"))
    monkeypatch.setattr(hub_utils, "load_or_create_model_card", lambda *_, **__: ModelCard("---\n{}\n---\nempty"))
    monkeypatch.setattr(
        hub_utils, "upload_folder", lambda folder_path, **_: shutil.copytree(folder_path, tmp_path / "hub")
    )
    opened(run).push_to_hub("me/digits")
    assert 'from_pretrained("me/digits")' in (tmp_path / "hub" / "README.md").read_text()
    assert load_file(tmp_path / "hub" / "scheduler" / "covariance.safetensors").keys()
    assert opened(tmp_path / "hub")(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)
