"""Conditions, guidance and latents with diffusers: the pipeline's images are those of `nidiff.sample`."""

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from problems import refused

import nidiff
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.network import unet, unet2d
from nidiff.randomness import generators_from_seeds

GFF = nidiff.gaussian_free_field((8, 8))
LEVELS = nidiff.schedules.ddpm_linear(50)
SAMPLERS = {"ddpm": "ancestral", "ddim": "ddim", "dpmsolver++": "dpmpp_2m"}
TEXT = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([2, 0, 1])
# The conditions of three images for each network, and what it was trained with.
CASES = {
    "FieldUNet": ({"class_labels": CLASSES}, nidiff.Condition(classes=3, null=-1, dropout=0.1)),
    "UNet2DModel": ({"class_labels": CLASSES}, nidiff.Condition(classes=3, null=3, dropout=0.1)),
    "UNet2DConditionModel": ({"encoder_hidden_states": TEXT}, nidiff.Condition(shape=(2, 6), null=0, dropout=0.1)),
}


def network(name: str):
    """One with weights that all matter: some begin at 0."""
    torch.manual_seed(0)
    build = {"FieldUNet": unet, "UNet2DModel": unet2d}.get(name)
    net = build((1, 8, 8), widths=(8,), layers=1, attention=(), num_classes=3) if build else text_unet(1)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return net.eval()


def text_unet(channels: int) -> UNet2DConditionModel:
    sizes = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 2}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    blocks = {"down_block_types": down, "up_block_types": up, "cross_attention_dim": 6}
    return UNet2DConditionModel(8, channels, channels, **sizes, **blocks)


def model(name: str, **options):
    """The pipeline of a network that knows its conditions."""
    (values, condition) = CASES[name]
    options = {"conditions": dict.fromkeys(values, condition), **options}
    return quiet(NonIsotropicPipeline(network(name), NonIsotropicScheduler(GFF, LEVELS, **options)))


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def in_unit_range(x):
    return (x / 2 + 0.5).clamp(0, 1)


# The images of nidiff.sample -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "algorithm"), [*zip(CASES, SAMPLERS, strict=True)])
def test_a_guided_pipeline_makes_the_images_of_sample_to_the_bit(name, algorithm):
    values, _ = CASES[name]
    pipeline = model(name, algorithm=algorithm)  # x̂0 is clipped, after guidance
    options = {"num_inference_steps": 4, "output_type": "pt", "seeds": [4, 5, 6]}
    images = pipeline(**options, guidance_scale=2.5, **values).images
    denoiser, rows = pipeline.scheduler.denoiser(pipeline.unet), pipeline.scheduler.timesteps.tolist()
    drawing = {"sampler": SAMPLERS[algorithm], "spacing": rows, "generator": [4, 5, 6]}
    expected = {}
    for scale in (1.0, 2.5):
        guided = denoiser.given(**values).guided(scale)
        expected[scale] = in_unit_range(nidiff.sample(guided, (3, 1, 8, 8), **drawing))
    assert torch.equal(images, expected[2.5])
    assert torch.equal(pipeline(**options, **values).images, expected[1.0])
    assert not torch.allclose(expected[1.0], expected[2.5], atol=1e-3)
    # Without a condition the network is given null, which the model knows.
    free = nidiff.sample(denoiser, (3, 1, 8, 8), **drawing)
    assert torch.equal(pipeline(**options).images, in_unit_range(free))
    assert torch.equal(pipeline(**options, guidance_scale=0.0, **values).images, in_unit_range(free))


def test_with_white_noise_a_guided_pipeline_takes_the_steps_of_diffusers():
    net, peer = network("UNet2DModel"), DDIMScheduler(timestep_spacing="trailing", num_train_timesteps=100)
    ours = NonIsotropicScheduler.from_config(peer.config, covariance=nidiff.Identity((8, 8)), clip_sample=False)
    peer = DDIMScheduler.from_config(peer.config, clip_sample=False)
    options = {"num_inference_steps": 5, "output_type": "latent", "generator": torch.Generator().manual_seed(1)}
    guidance = {"class_labels": CLASSES, "guidance_scale": 3.0, "null": {"class_labels": 3}}
    images = quiet(NonIsotropicPipeline(net, ours))(**guidance, **options).images
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    peer.set_timesteps(5)
    with torch.no_grad():
        for t in peer.timesteps:
            eps, free = (net(x, t, class_labels=y).sample for y in (CLASSES, torch.full((3,), 3)))
            x = peer.step(free + 3.0 * (eps - free), t, x).prev_sample
    torch.testing.assert_close(images, x, rtol=1e-3, atol=1e-3 * x.abs().max().item())


def test_conditions_are_one_per_image_or_one_for_all():
    pipeline = model("UNet2DModel")
    options = {"num_inference_steps": 2, "output_type": "pt"}
    one, other = (pipeline(**options, seeds=[1, 2], class_labels=y).images for y in (2, [2, 1]))
    assert not torch.equal(one, other)
    for same in (torch.tensor([2]), torch.tensor([2, 2]).numpy(), [2, 2]):
        assert torch.equal(one, pipeline(**options, seeds=[1, 2], class_labels=same).images)
    assert len(pipeline(**options, class_labels=range(3)).images) == 3  # as many as there are labels


# A model folder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_conditional_model_keeps_its_conditions_in_every_folder(name, tmp_path):
    values, condition = CASES[name]
    first = model(name)
    options = {**values, "guidance_scale": 2.0, "num_inference_steps": 2, "output_type": "pt", "seeds": [1, 2, 3]}
    images = first(**options).images
    nidiff.save_model(first.scheduler.denoiser(first.unet), tmp_path / "ours")
    first.save_pretrained(tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        assert torch.equal(quiet(NonIsotropicPipeline.from_pretrained(folder))(**options).images, images)
        denoiser = nidiff.load_model(folder)
        assert type(denoiser.net).__name__ == name
        assert denoiser.conditions == dict.fromkeys(values, condition)
        rows = first.scheduler.timesteps.tolist()
        x = nidiff.sample(denoiser.given(**values).guided(2.0), (3, 1, 8, 8), spacing=rows, generator=[1, 2, 3])
        assert torch.equal(in_unit_range(x), images)


# Latents ---------------------------------------------------------------------------------------------------------


def latent_model(algorithm, schedule=LEVELS):
    torch.manual_seed(0)
    offset = nidiff.offset((8, 8), strength=0.8, normalize=False)
    options = {"algorithm": algorithm, "clip_sample": False, "prediction_type": "sample"}
    return text_unet(4).eval(), NonIsotropicScheduler(offset, schedule, **options)


def assert_of_sample(latents, net, scheduler, algorithm):
    """They are the guided latents of nidiff.sample from the seeds 4, 5 and 6."""
    denoiser = scheduler.denoiser(net).given(encoder_hidden_states=TEXT)
    rows = {"spacing": scheduler.timesteps.tolist(), "generator": [4, 5, 6], "sampler": SAMPLERS[algorithm]}
    null = {"encoder_hidden_states": torch.zeros_like(TEXT)}
    expected = nidiff.sample(denoiser.guided(3.0, null=null), latents.shape, **rows)
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


SPREAD = {"keeps the variance": LEVELS, "explodes": nidiff.schedules.smld_geometric(20, 30.0, 0.1)}


@torch.no_grad()
@pytest.mark.parametrize(("algorithm", "schedule"), [*zip(["ddpm", "dpmsolver++"], SPREAD, strict=True)])
def test_the_loop_of_a_latent_pipeline_makes_the_latents_of_sample(algorithm, schedule):
    """Both halves of the batch in one call, guidance of what the network says, latents times init_noise_sigma."""
    net, scheduler = latent_model(algorithm, SPREAD[schedule])
    generators, zeros = generators_from_seeds([4, 5, 6]), torch.zeros_like(TEXT)
    scheduler.set_timesteps(4)
    x = scheduler.init_noise((3, 4, 8, 8), generators) / scheduler.init_noise_sigma * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        both = scheduler.scale_model_input(torch.cat([x, x]), t)
        free, conditional = net(both, t, encoder_hidden_states=torch.cat([zeros, TEXT])).sample.chunk(2)
        x = scheduler.step(free + 3.0 * (conditional - free), t, x, eta=0.0, generator=generators, return_dict=False)[0]
    assert_of_sample(x, net, scheduler, algorithm)


@pytest.mark.filterwarnings("ignore")
def test_stable_diffusion_takes_the_scheduler_and_a_coloured_start():
    pytest.importorskip("transformers")
    from diffusers import AutoencoderKL, StableDiffusionPipeline

    net, scheduler = latent_model("dpmsolver++")
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(1, 1, **blocks, block_out_channels=(8, 8), norm_num_groups=4).eval()
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    pipeline = quiet(
        StableDiffusionPipeline(vae=vae, unet=net, scheduler=scheduler, requires_safety_checker=False, **parts)
    )
    zeros, generators = torch.zeros_like(TEXT), generators_from_seeds([4, 5, 6])
    start = scheduler.init_noise((3, 4, 8, 8), generators) / scheduler.init_noise_sigma
    guidance = {"prompt_embeds": TEXT, "negative_prompt_embeds": zeros, "guidance_scale": 3.0}
    options = {"latents": start, "generator": generators, "num_inference_steps": 4, "output_type": "latent"}
    latents = pipeline(**guidance, **options).images
    assert_of_sample(latents, net, scheduler, "dpmsolver++")


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_a_white_start_of_offset_noise_narrows_the_mean_of_a_channel_as_the_example_says(sampler):
    """√(1 + s² N), exactly: with the denoiser of Gaussian latents the samplers without noise are linear maps."""
    strength, white = 0.8, torch.randn(6, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    offset = nidiff.offset((8, 8), strength=strength, normalize=False)
    latents = nidiff.matern((8, 8), length_scale=2.0).sample((200, 4, 8, 8), torch.Generator().manual_seed(1))
    denoiser = nidiff.fit_gaussian(latents + 0.3).denoiser(nidiff.Process(nidiff.schedules.ddpm_linear(1000), offset))
    options = {"sampler": sampler, "num_steps": 5, "dtype": torch.float64}
    start, from_white, own = (
        nidiff.sample(denoiser, white.shape, start=x, **options).mean((2, 3))
        for x in (torch.zeros_like(white), white, offset.sqrt(white))
    )
    torch.testing.assert_close(
        (own - start) / (from_white - start), torch.full_like(own, (1 + strength**2 * 64) ** 0.5)
    )


# Bad input -------------------------------------------------------------------------------------------------------


def test_bad_conditions_are_refused_by_name():
    for name, values, argument in (
        ("UNet2DModel", {"labels": 1}, "labels"),
        ("UNet2DConditionModel", {"class_labels": 1}, "class_labels"),
        ("UNet2DModel", {"batch_size": 2, "class_labels": [0, 1, 2]}, "class_labels"),
        ("UNet2DModel", {"class_labels": 4}, "class_labels"),
        ("UNet2DConditionModel", {"encoder_hidden_states": TEXT[..., :5]}, "encoder_hidden_states"),
        ("UNet2DModel", {"guidance_scale": 2.0, "class_labels": 1, "interval": (5, 1)}, "interval"),
    ):
        with refused(argument):
            model(name)(num_inference_steps=2, output_type="pt", **values)


@pytest.mark.parametrize("name", ["UNet2DModel", "UNet2DConditionModel"])
def test_a_missing_condition_and_a_missing_null_are_asked_for(name):
    values, _ = CASES[name]
    pipeline, argument = model(name, conditions=None), next(iter(values))
    with refused(argument):
        pipeline(3)
    with refused("guidance"):
        pipeline(guidance_scale=2.0, **values)
    null = {key: torch.full_like(value[:1], 3) for key, value in values.items()}
    assert len(pipeline(guidance_scale=2.0, null=null, num_inference_steps=2, **values).images) == 3


def test_a_step_is_taken_with_a_denoiser_of_this_scheduler_only():
    pipeline = model("FieldUNet")
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(2)
    x, t = scheduler.init_noise((1, 1, 8, 8)), scheduler.timesteps[0]
    with refused("denoiser"):
        scheduler.step_with(model("FieldUNet").scheduler.denoiser(pipeline.unet), t, x)
