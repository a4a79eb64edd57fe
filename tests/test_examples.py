"""The examples are short, run, and show what they say."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import nidiff
from nidiff.covariance import BASES
from nidiff.sampling.sampler import SAMPLERS

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_listed(path):
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


def test_smld_digits(tmp_path):
    named = load("smld_digits").main(tmp_path, steps=4, count=2)
    assert named.keys() == {"cas", "als"}
    assert (tmp_path / "smld_digits.png").exists()


def test_points_come_nearer_to_the_moons_than_their_prior(tmp_path):
    distances = load("toy_2d").main(tmp_path, steps=300, count=300)
    assert distances["samples"] < distances["prior"] / 3
    assert (tmp_path / "toy_2d.png").exists()


def test_samples_of_the_plain_loop_look_like_digits_on_average(tmp_path):
    samples = load("gff_loop").main(tmp_path, steps=20, count=16)
    digits = nidiff.load_dataset("digits")
    real = digits.batch(torch.arange(len(digits)))
    noise = nidiff.gaussian_free_field((8, 8)).sample(samples.shape, torch.Generator().manual_seed(0))
    alike, control = (
        torch.corrcoef(torch.stack([real.mean(0).flatten(), x.mean(0).flatten()]))[0, 1] for x in (samples, noise)
    )
    assert alike > 0.7 > control.abs()
    assert (tmp_path / "gff_loop.png").exists()


def test_the_spectrum_of_signals_is_nearer_to_the_data_than_pink_noise(tmp_path):
    errors = load("pink_noise_1d").main(tmp_path, steps=100, count=100)
    assert errors["more data"] < errors["samples"] < errors["noise"] / 2
    assert (tmp_path / "pink_noise_1d.png").exists()


def test_the_spectrum_of_fields_is_nearer_to_the_data_than_the_noise():
    example, shape = load("matern_3d"), (6, 6, 6)
    example.SHAPE, example.FIELD = shape, nidiff.matern(shape, length_scale=2.0)
    example.NOISE = nidiff.matern(shape, length_scale=1.0, smoothness=0.5)
    results = example.main(steps=250, count=40)
    assert results["samples"][0] < 0.85 * results["noise"][0]
    assert results["samples"][1] > 0.4 > abs(results["noise"][1])  # the data are skewed, noise is not


def test_digits_are_likelier_than_shuffled_ones():
    bits = load("likelihood").main(steps=20, count=8)
    for noise in ("white", "GFF"):
        gain = bits[noise, "shuffled"] - bits[noise, "held out"]
        assert gain.mean() > 2 * gain.std() / 8**0.5


def test_white_sampling_of_an_offset_model_narrows_the_brightness(tmp_path):
    spreads = load("offset_noise").main(tmp_path, steps=20, count=30)
    (narrow, error), (right, _) = spreads["trained offset, sampled white"], spreads["own Σ in both"]
    assert narrow + 3 * error < 0.75 * right
    assert (tmp_path / "offset_noise.png").exists()


def test_a_white_start_of_offset_latents_narrows_the_brightness(tmp_path):
    spreads = load("latent_offset").main(tmp_path, vae_steps=60, steps=2, count=40)
    for model in ("", "Gaussian, "):  # the network has learnt nothing yet, and the start is all there is
        coloured, white = (spreads[key] for key in ((f"{model}its own Σ", f"{model}white start")))
        assert white < 0.5 * coloured
    assert (tmp_path / "latent_offset.png").exists()
    conditions = nidiff.load_model(tmp_path / "latent_offset").conditions
    assert conditions["encoder_hidden_states"].shape == (2, 16)


def test_two_changed_lines_train_a_pipeline_that_keeps_its_covariance(tmp_path):
    from nidiff.interop import NonIsotropicPipeline

    load("diffusers_training").main(tmp_path / "model", epochs=1, count=4)
    cov = nidiff.gaussian_free_field((8, 8))
    assert torch.equal(
        NonIsotropicPipeline.from_pretrained(tmp_path / "model").scheduler.covariance.dense(), cov.dense()
    )
    with pytest.raises(ValueError, match="covariance"):
        NonIsotropicPipeline.from_pretrained(tmp_path / "model", covariance=nidiff.Identity((8, 8)))
    source = (EXAMPLES / "diffusers_training.py").read_text()
    assert source.count("# changed") == 2


@pytest.mark.filterwarnings("ignore:The start is white noise")
def test_three_changed_lines_train_a_lora_under_offset_noise_at_two_shapes():
    """The loop runs with diffusers' scheduler first. The start decides on the brightness, before anything is learnt."""
    spreads = load("lora_training").main(steps=4, lora_steps=4, count=40)
    for shape in ("8×8", "8×12"):
        assert spreads[f"white start, {shape}"] < 0.5 * spreads[f"own Σ, {shape}"]
    source = (EXAMPLES / "lora_training.py").read_text()
    assert source.count("# changed") == 3


def test_a_folder_becomes_a_pipeline_with_the_covariance_of_its_images(tmp_path):
    from nidiff.interop import NonIsotropicPipeline

    error = load("pipeline_from_folder").main(tmp_path, steps=2, count=4)
    assert error > 0
    digits = nidiff.load_dataset("digits")
    fitted = nidiff.from_data(digits.batch(torch.arange(len(digits))))
    saved = NonIsotropicPipeline.from_pretrained(tmp_path / "run" / "model").scheduler.covariance
    torch.testing.assert_close(saved.dense(), fitted.dense())
    assert (tmp_path / "samples.png").exists()


def test_a_model_with_everything_of_ones_own_is_loaded_and_sampled_in_a_new_process(tmp_path, monkeypatch):
    for registry, name in ((BASES, "Haar"), (SAMPLERS, "restless")):
        monkeypatch.setitem(registry, name, None)  # so that what the example registers is removed after the test
    example = load("your_own")
    assert nidiff.testing.check_covariance(example.wavelets(8)).passed
    assert nidiff.testing.check_sampler("restless").passed
    once, off = {}, {}
    for steps in (1, 300):
        printed = example.main(str(tmp_path / f"{steps}"), steps=steps)
        once[steps], off[steps] = map(float, re.match(r"(.*)% of 500 samples jump .* by (.*)$", printed).groups())
    assert once[300] > 90 > once[1]  # of one optimiser step nothing is learnt
    assert off[300] < 0.3 < off[1]
    torch.manual_seed(0)
    samples = nidiff.sample(nidiff.load_model(tmp_path / "300", net=example.Net()), (20, 32), sampler="restless")
    assert samples.shape == (20, 32)
    assert samples.isfinite().all()
    with pytest.raises(nidiff.InputError, match="net"):
        nidiff.load_model(tmp_path / "300")
