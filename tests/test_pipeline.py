"""The pipeline: what nidiff train leaves opens in diffusers, gives the same images, and only under its own Σ."""

import json
import shutil
import subprocess
import sys
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
    flags = [
        "--widths",
        "8",
        "--attention",
        "--batch-size",
        "8",
        "--precision",
        "fp32",
        "--steps",
        "2",
        "--warmup",
        "0",
    ]
    flags += ["--cooldown", "0", "--num-samples", "1", "--num-steps", "2", "--schedule", "ddpm_linear:num_levels=50"]
    assert main(["train", "--out", str(out), "--covariance", "from_data:average=modes", *flags]) == 0
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


@pytest.mark.parametrize("algorithm", ["ddpm", "ddim", "dpmsolver++"])
def test_a_trained_model_gives_the_same_images_in_both_worlds(run, algorithm):
    pipeline = opened(run / "model")
    pipeline.scheduler = NonIsotropicScheduler.from_config(pipeline.scheduler.config, algorithm=algorithm)
    images = pipeline(batch_size=3, num_inference_steps=7, output_type="pt", seeds=[4, 5, 6]).images
    again = pipeline(3, generators_from_seeds([4, 5, 6]), 7, "pt").images
    sampler = {"ddpm": "ancestral", "ddim": "ddim", "dpmsolver++": "dpmpp_2m"}[algorithm]
    rows = pipeline.scheduler.timesteps.tolist()
    denoiser = nidiff.load_model(run)
    expected = nidiff.sample(denoiser, (3, 1, 8, 8), sampler=sampler, spacing=rows, generator=[4, 5, 6])
    assert torch.equal(images, in_unit_range(expected))
    assert torch.equal(images, again)
    other = nidiff.sample(denoiser, (3, 1, 8, 8), sampler=sampler, spacing=rows, generator=[4, 5, 7])
    assert not torch.equal(images, in_unit_range(other))


def test_the_core_knows_nothing_of_it():
    code = "import sys, nidiff.model.folder; print([m for m in sys.modules if 'interop' in m or m == 'diffusers'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_run_directory_opens_as_its_model_does_and_samples_by_the_same_defaults(run):
    assert same_covariance(opened(run).scheduler.covariance, load_model(run).process.covariance)
    pipeline = opened(run)
    images = pipeline(2, output_type="pt", seeds=[0, 1]).images
    assert len(pipeline.scheduler.timesteps) == 20
    assert torch.equal(images, in_unit_range(nidiff.sample(load_model(run), (2, 1, 8, 8), generator=[0, 1])))


def test_a_pipeline_is_saved_and_opened(run, tmp_path):
    first = opened(run)
    first.save_pretrained(tmp_path / "m")
    index = json.loads((tmp_path / "m" / "model_index.json").read_text())
    ours = json.loads((run / "model" / "model_index.json").read_text())
    assert {k: v for k, v in index.items() if k[0] != "_"} == {k: v for k, v in ours.items() if k[0] != "_"}
    assert index["_class_name"] == ours["_class_name"] == "NonIsotropicPipeline"
    second = opened(tmp_path / "m")
    a, b = (p(2, torch.Generator().manual_seed(1), 5, "np").images for p in (first, second))
    assert np.array_equal(a, b)
    # and nidiff opens what diffusers saved
    assert same_covariance(load_model(tmp_path / "m").process.covariance, first.scheduler.covariance)


def test_images_come_as_pil_numpy_or_tensors(network):
    pipeline = NonIsotropicPipeline(network, NonIsotropicScheduler(GFF, "ddpm_linear:num_levels=5"))
    pipeline.set_progress_bar_config(disable=True)
    array = pipeline(2, output_type="np", seeds=[0, 1]).images
    tensor = pipeline(2, output_type="pt", seeds=[0, 1], return_dict=False)[0]
    picture = pipeline(2, seeds=[0, 1]).images[1]
    assert array.shape == (2, 8, 8, 1)
    assert np.array_equal(array.transpose(0, 3, 1, 2), tensor.numpy())
    assert np.abs(np.asarray(picture) / 255 - array[1, ..., 0]).max() <= 0.5 / 255 + 1e-6


def test_the_network_may_be_in_half_precision(network):
    pipeline = NonIsotropicPipeline(network, NonIsotropicScheduler(GFF, "ddpm_linear:num_levels=5"))
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline.to(torch.bfloat16)(2, output_type="np").images
    assert np.isfinite(images).all()


# Only under its own Σ --------------------------------------------------------------------------------------------


def test_another_covariance_is_refused(run, tmp_path):
    own = load_model(run).process.covariance
    assert same_covariance(opened(run, covariance=own).scheduler.covariance, own)
    with pytest.raises(ValueError, match="was trained with"):
        opened(run, covariance=GFF)
    with pytest.raises(ValueError, match="was trained with"):
        opened(run, scheduler=NonIsotropicScheduler(GFF))
    pipeline = opened(run)
    pipeline.scheduler = NonIsotropicScheduler(GFF)
    with pytest.raises(ValueError, match="was trained with"):
        pipeline()
    with pytest.raises(ValueError, match="was trained with"):
        pipeline.save_pretrained(tmp_path / "m")
    pipeline.scheduler = diffusers.DDIMScheduler()
    with pytest.raises(ValueError, match="whitened"):
        pipeline()
    with pytest.raises(ValueError, match="whitened"):
        pipeline.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_the_same_covariance_in_another_scheduler_is_welcome(run):
    own = load_model(run).process.covariance
    faster = NonIsotropicScheduler(own, "ddpm_linear:num_levels=50", algorithm="dpmsolver++")
    assert opened(run, scheduler=faster)(num_inference_steps=3, output_type="np").images.shape == (1, 8, 8, 1)


@pytest.mark.filterwarnings("ignore:Expected types")
def test_a_plain_ddpm_pipeline_warns_of_its_white_start(run):
    """It finds our scheduler in the index, and the scheduler sees what it is started from."""
    plain = diffusers.DDPMPipeline.from_pretrained(run / "model")
    plain.set_progress_bar_config(disable=True)
    with pytest.warns(UserWarning, match="init_noise"):
        plain(batch_size=16, num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:Expected types")
def test_a_pipeline_that_brings_its_own_scheduler_fails_by_name(run):
    """DDIMPipeline makes a DDIMScheduler of whatever it finds."""
    with pytest.raises(NotImplementedError, match="needs nidiff.interop.NonIsotropicScheduler"):
        diffusers.DDIMPipeline.from_pretrained(run / "model")


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
    for other in (GFF, 2.0 * nidiff.Identity((8, 8))):
        with pytest.raises(ValueError, match="was trained with Identity"):
            opened(tmp_path / "plain", scheduler=NonIsotropicScheduler(other))
    with pytest.raises(ValueError, match="was trained with Identity"):
        opened(tmp_path / "plain", scheduler=white, covariance=GFF)
    with pytest.raises(ValueError, match="give a NonIsotropicScheduler"):
        opened(tmp_path / "plain")


def test_the_generic_pipeline_class_fails_by_name(run):
    """diffusers looks for the class among its own, and would take another only as remote code."""
    with pytest.raises(AttributeError, match="NonIsotropicPipeline"):
        diffusers.DiffusionPipeline.from_pretrained(run / "model")


def test_bad_parts_and_arguments_are_refused(network, tmp_path):
    with refused("covariance"):
        NonIsotropicPipeline(network, NonIsotropicScheduler(nidiff.gaussian_free_field((16, 16))))
    with refused("scheduler"):
        NonIsotropicPipeline(network, diffusers.DDPMScheduler())
    pipeline = NonIsotropicPipeline(network, NonIsotropicScheduler(GFF))
    with refused("output_type"):
        pipeline(output_type="jpg")
    with refused("seeds"):
        pipeline(batch_size=2, seeds=[1])
    with refused("num_inference_steps"):
        pipeline(num_inference_steps=1001)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "experiment.json").write_text("{}")
    with pytest.raises(OSError, match="--resume"):
        NonIsotropicPipeline.from_pretrained(tmp_path / "r")
    for nowhere in ("runs/digits", tmp_path / "nowhere"):
        with pytest.raises(OSError, match="neither a folder here nor within reach on the Hub"):
            NonIsotropicPipeline.from_pretrained(nowhere, cache_dir=tmp_path, local_files_only=True)


def test_a_missing_spectrum_is_an_os_error(run, tmp_path):
    shutil.copytree(run / "model", tmp_path / "m")
    (tmp_path / "m" / "scheduler" / "covariance.safetensors").unlink()
    with pytest.raises(OSError, match="covariance.safetensors"):
        NonIsotropicPipeline.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("algorithm", ["ddpm", "ddim", "dpmsolver++"])
def test_a_short_schedule_is_visited_whole_by_default(network, algorithm, spacing):
    options = {"algorithm": algorithm, "timestep_spacing": spacing}
    pipeline = NonIsotropicPipeline(network, NonIsotropicScheduler(GFF, "ddpm_linear:num_levels=5", **options))
    pipeline.set_progress_bar_config(disable=True)
    pipeline(output_type="np")
    assert pipeline.scheduler.timesteps.tolist() == [4, 3, 2, 1, 0]


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
    "not a configuration": (lambda c, _: c.write_text("[]"), SCHEDULER),
    "not text": (lambda c, _: c.write_bytes(b"\xff\xfe\xff"), SCHEDULER),
    "no Σ": (lambda c, _: rewrite(c, covariance=None), SCHEDULER),
    "a word for Σ": (lambda c, _: rewrite(c, covariance="gff"), SCHEDULER),
    "family of Σ": (lambda c, _: rewrite(c, covariance={"covariance": "gff", "shape": [8, 8]}), SCHEDULER),
    "shape of Σ": (lambda c, _: rewrite(c, covariance=LARGER, gaussian=None), r"images \(1, 8, 8\)"),
    "unknown field": (lambda c, _: rewrite(c, beta_start=0.1), f"{SCHEDULER}.*'beta_start'"),
    "algorithm": (lambda c, _: rewrite(c, algorithm="unipc"), f"{SCHEDULER}.*'unipc'"),
    "schedule": (lambda c, _: rewrite(c, schedule=5), SCHEDULER),
    "levels": (lambda c, _: rewrite(c, num_train_timesteps=7), "num_train_timesteps"),
    "prediction": (lambda c, _: rewrite(c, prediction_type=["epsilon"]), SCHEDULER),
    "clip": (lambda c, _: rewrite(c, clip_sample_range="a"), SCHEDULER),
    "no arrays": (lambda c, _: c.with_name(SPECTRUM).unlink(), SPECTRUM),
    "damaged arrays": (lambda c, _: c.with_name(SPECTRUM).write_bytes(b"torn"), SPECTRUM),
    "other arrays": (lambda c, _: save_file({"a": torch.zeros(3)}, c.with_name(SPECTRUM)), "tensors"),
    "no network": (lambda _, folder: shutil.rmtree(folder / "unet"), "unet"),
    "no weights": (lambda _, folder: weights(folder).unlink(), "unet"),
    "damaged weights": (lambda _, folder: weights(folder).write_bytes(b"torn"), "unet"),
    "a weight less": (lambda _, folder: without_one(weights(folder)), "conv_out.bias"),
    "weights of another network": (lambda _, folder: rewrite(folder / "unet" / "config.json", in_channels=3), "unet"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_folder_is_bad_input_and_named(run, case, tmp_path, capsys):
    shutil.copytree(run / "model", tmp_path / "m")
    damage, words = DAMAGES[case]
    assert load_model(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()  # in a folder of version 0.1: a checksum would notice it first
    damage(tmp_path / "m" / "scheduler" / SCHEDULER, tmp_path / "m")
    with pytest.raises(nidiff.InputError, match=words) as caught:
        load_model(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert main(["sample", str(tmp_path / "m"), "--out", str(tmp_path / "out")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_every_target_of_training_has_a_word_in_diffusers(network, tmp_path):
    for target in ("eps", "noise", "x0", "v", "score"):
        save_model(nidiff.Denoiser(network, PROCESS, target, clip=1.0), tmp_path / target)
        images = opened(tmp_path / target)(output_type="pt", seeds=[3]).images
        expected = nidiff.sample(load_model(tmp_path / target), (1, 1, 8, 8), generator=[3])
        assert torch.equal(images, in_unit_range(expected))


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
    assert "diffusers" in front.tags
    assert "unconditional-image-generation" in front.tags
    for fact in ("8 × 8", "digits", "ddpm_linear(num_levels=50", "epsilon", "NonIsotropicPipeline"):
        assert fact in text
    assert "Metrics" not in text
    shutil.copytree(run, tmp_path / "r")
    metrics = {"FD-pixels": Measured(7.0123, 0.12), "recall": Measured(0.5, None, True)}
    remember(tmp_path / "r", Result("r", "ddim", 10, "uniform", {"eta": 0.5}, "0-99", 1.0, metrics, {}))
    opened(tmp_path / "r").save_pretrained(tmp_path / "shared")
    shared = (tmp_path / "shared" / "README.md").read_text()
    assert all(words in shared for words in ("FD-pixels", "7.01 ± 0.12"))
    (tmp_path / "shared" / "README.md").write_text("edited by hand")
    opened(tmp_path / "shared").save_pretrained(tmp_path / "further")
    assert (tmp_path / "further" / "README.md").read_text() == "edited by hand"
    opened(run).save_pretrained(tmp_path / "shared")
    assert (tmp_path / "shared" / "README.md").read_text() == "edited by hand"


def test_another_model_in_the_same_folder_has_its_own_card(network, tmp_path):
    folder, card = tmp_path / "m", tmp_path / "m" / "README.md"
    fitted = [nidiff.from_data(torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(i))) for i in (0, 1)]
    cards = set()
    for covariance in (nidiff.Identity((8, 8)), *fitted, GFF):
        NonIsotropicPipeline(network, NonIsotropicScheduler(covariance)).save_pretrained(folder)
        cards.add(card.read_text())
    assert len(cards) == 4
    assert "gaussian_free_field" in card.read_text()
    card.write_text(card.read_text() + "edited by hand")
    again = opened(folder)
    again.scheduler = NonIsotropicScheduler.from_config(again.scheduler.config, algorithm="ddim")
    for place in (folder, tmp_path / "copy"):  # the same model, sampled otherwise
        again.save_pretrained(place)
        assert "edited by hand" in (place / "README.md").read_text()
    again.scheduler = NonIsotropicScheduler.from_config(again.scheduler.config, schedule="ddpm_cosine:num_levels=9")
    again.save_pretrained(folder)
    assert "ddpm_cosine(num_levels=9" in card.read_text()
    assert "edited by hand" not in card.read_text()


def test_a_readme_that_is_no_card_stays(network, tmp_path):
    (tmp_path / "README.md").write_text("my project")
    NonIsotropicPipeline(network, NonIsotropicScheduler(GFF)).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my project"


def test_the_card_names_the_folder_it_is_saved_in(run, tmp_path, monkeypatch):
    pipeline = opened(run / "model")
    for name, written in {"here": "here", "a\\1b": "a\\U0000005c1b", 'x")\n```': "x\\U00000022)\\U0000000a"}.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        pipeline.save_pretrained(".")
        assert f'from_pretrained("{written}' in (tmp_path / name / "README.md").read_text()


def test_the_card_of_a_white_model_does_not_claim_otherwise(network, tmp_path):
    white = nidiff.Process(PROCESS.schedule, nidiff.Identity((8, 8)))
    save_model(nidiff.Denoiser(network, white), tmp_path / "m")
    assert "not white" not in (tmp_path / "m" / "README.md").read_text()
    save_model(nidiff.Denoiser(network, PROCESS), tmp_path / "m")
    assert "not white" in (tmp_path / "m" / "README.md").read_text()


def test_the_card_does_not_tell_where_the_data_lay(network, tmp_path):
    about = Experiment(data="/home/me/private/cats").about
    save_model(nidiff.Denoiser(network, PROCESS), tmp_path / "m", about)
    text = (tmp_path / "m" / "README.md").read_text()
    assert "cats" in text
    assert "private" not in text


def test_the_cards_python_runs(run, tmp_path, monkeypatch):
    opened(run).save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "mine" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["images"]) == 4


def test_a_model_of_the_hub_opens_from_the_cache(run, tmp_path):
    """The layout of the Hub's cache, so that nothing is fetched: the arrays of Σ and the card come along."""
    repository = tmp_path / "cache" / "models--me--digits"
    commit = "0123456789" * 4
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
    with pytest.raises(OSError, match="covariance.safetensors"):
        NonIsotropicScheduler.from_pretrained("me/digits", subfolder="scheduler", **offline)


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
    assert "digits" in (tmp_path / "hub" / "README.md").read_text()
    assert load_file(tmp_path / "hub" / "scheduler" / "covariance.safetensors").keys()
    assert opened(tmp_path / "hub")(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)
