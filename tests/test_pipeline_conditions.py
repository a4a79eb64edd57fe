"""Conditions, guidance and latents with diffusers: the pipeline's images are those of `nidiff.sample`."""

import json

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel, UNet2DModel

import nidiff
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.network import unet
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
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    if name == "FieldUNet":
        net = unet((1, 8, 8), widths=(8,), layers=1, attention=(), num_classes=3)
    elif name == "UNet2DModel":
        blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
        net = UNet2DModel(**sizes, **blocks, num_class_embeds=4)
    else:
        net = text_unet(1)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return net.eval()


def text_unet(channels: int) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=6,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


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
    expected = {
        scale: in_unit_range(
            nidiff.sample(
                denoiser.given(**values).guided(scale),
                (3, 1, 8, 8),
                sampler=SAMPLERS[algorithm],
                spacing=rows,
                generator=[4, 5, 6],
            )
        )
        for scale in (1.0, 2.5)
    }
    assert torch.equal(images, expected[2.5])
    assert torch.equal(pipeline(**options, **values).images, expected[1.0])
    assert not torch.allclose(expected[1.0], expected[2.5], atol=1e-3)
    # Without a condition the network is given null, which the model knows.
    free = nidiff.sample(denoiser, (3, 1, 8, 8), sampler=SAMPLERS[algorithm], spacing=rows, generator=[4, 5, 6])
    assert torch.equal(pipeline(**options).images, in_unit_range(free))
    assert torch.equal(pipeline(**options, guidance_scale=0.0, **values).images, in_unit_range(free))


@pytest.mark.parametrize("target", ["eps", "v", "score"])
def test_guidance_of_the_output_is_guidance_of_x0(target):
    """x̂0 is affine in what the network says: diffusers' formula, in eps, is ours. Clipping each part is another."""
    net = network("UNet2DModel").double()
    denoiser = nidiff.Denoiser(net, nidiff.Process(LEVELS, GFF), target).given(class_labels=1)
    free, level = denoiser.given(class_labels=3), LEVELS.level(25)
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        guided = denoiser.guided(3.0, null={"class_labels": 3})
        output = free.output(x, level) + 3.0 * (denoiser.output(x, level) - free.output(x, level))
        expected = denoiser.target.decode(output, x, level, GFF)
        torch.testing.assert_close(guided(x, level), expected, rtol=1e-9, atol=1e-9)
        bound = 0.5 * expected.abs().max().item()
        torch.testing.assert_close(guided.clipped(bound)(x, level), expected.clamp(-bound, bound))
        parts = [each.clipped(bound)(x, level) for each in (free, denoiser)]
        assert (parts[0].lerp(parts[1], 3.0) - expected.clamp(-bound, bound)).abs().max() > 1e-3 * bound


def test_with_white_noise_a_guided_pipeline_takes_the_steps_of_diffusers():
    net, peer = network("UNet2DModel"), DDIMScheduler(timestep_spacing="trailing", num_train_timesteps=100)
    ours = NonIsotropicScheduler.from_config(peer.config, covariance=nidiff.Identity((8, 8)), clip_sample=False)
    peer = DDIMScheduler.from_config(peer.config, clip_sample=False)
    images = quiet(NonIsotropicPipeline(net, ours))(
        class_labels=CLASSES,
        guidance_scale=3.0,
        null={"class_labels": 3},
        num_inference_steps=5,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
    ).images
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
    one, tensor, array, every = (
        pipeline(**options, seeds=[1, 2], class_labels=y).images
        for y in (2, torch.tensor([2]), torch.tensor([2, 2]).numpy(), [2, 2])
    )
    assert torch.equal(one, tensor)
    assert torch.equal(one, array)
    assert torch.equal(one, every)
    assert not torch.equal(one, pipeline(**options, seeds=[1, 2], class_labels=[2, 1]).images)
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


def test_a_damaged_conditional_network_is_named(tmp_path):
    pipeline = model("UNet2DConditionModel")
    nidiff.save_model(pipeline.scheduler.denoiser(pipeline.unet), tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    file = tmp_path / "m" / "unet" / "config.json"
    config = json.loads(file.read_text())
    for key, value in (("cross_attention_dim", 7), ("act_fn", "nothing"), ("sample_size", "large")):
        file.write_text(json.dumps({**config, key: value}))
        with pytest.raises(nidiff.InputError, match="unet"):
            nidiff.load_model(tmp_path / "m")


# Latents ---------------------------------------------------------------------------------------------------------


def latent_model(algorithm, schedule=LEVELS):
    torch.manual_seed(0)
    offset = nidiff.offset((8, 8), strength=0.8, normalize=False)
    options = {"algorithm": algorithm, "clip_sample": False, "prediction_type": "sample"}
    return text_unet(4).eval(), NonIsotropicScheduler(offset, schedule, **options)


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
    denoiser = scheduler.denoiser(net).given(encoder_hidden_states=TEXT)
    rows = {"spacing": scheduler.timesteps.tolist(), "generator": [4, 5, 6], "sampler": SAMPLERS[algorithm]}
    expected = nidiff.sample(denoiser.guided(3.0, null={"encoder_hidden_states": zeros}), x.shape, **rows)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["ddpm", "dpmsolver++"])
def test_stable_diffusion_takes_the_scheduler_and_a_coloured_start(algorithm):
    pytest.importorskip("transformers")
    from diffusers import AutoencoderKL, StableDiffusionPipeline

    net, scheduler = latent_model(algorithm)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(1, 1, **blocks, block_out_channels=(8, 8), norm_num_groups=4).eval()
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    pipeline = quiet(
        StableDiffusionPipeline(vae=vae, unet=net, scheduler=scheduler, requires_safety_checker=False, **parts)
    )
    zeros, generators = torch.zeros_like(TEXT), generators_from_seeds([4, 5, 6])
    start = scheduler.init_noise((3, 4, 8, 8), generators) / scheduler.init_noise_sigma
    latents = pipeline(
        prompt_embeds=TEXT,
        negative_prompt_embeds=zeros,
        guidance_scale=3.0,
        latents=start,
        generator=generators,
        num_inference_steps=4,
        output_type="latent",
    ).images
    denoiser = scheduler.denoiser(net).given(encoder_hidden_states=TEXT)
    rows = {"spacing": scheduler.timesteps.tolist(), "generator": [4, 5, 6], "sampler": SAMPLERS[algorithm]}
    expected = nidiff.sample(denoiser.guided(3.0, null={"encoder_hidden_states": zeros}), latents.shape, **rows)
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("name", "values", "argument"),
    [
        ("UNet2DModel", {"labels": 1}, "labels"),
        ("UNet2DConditionModel", {"class_labels": 1}, "class_labels"),
        ("UNet2DModel", {"batch_size": 2, "class_labels": [0, 1, 2]}, "class_labels"),
        ("UNet2DModel", {"class_labels": 4}, "class_labels"),
        ("UNet2DConditionModel", {"encoder_hidden_states": TEXT[..., :5]}, "encoder_hidden_states"),
        ("UNet2DModel", {"guidance_scale": 2.0}, "guidance_scale"),
        ("UNet2DModel", {"guidance_scale": 2.0, "class_labels": 1, "interval": (5, 1)}, "interval"),
    ],
)
def test_bad_conditions_are_refused_by_name(name, values, argument):
    with pytest.raises(nidiff.InputError, match=f"^{argument}"):
        model(name)(num_inference_steps=2, output_type="pt", **values)


@pytest.mark.parametrize("name", ["UNet2DModel", "UNet2DConditionModel"])
def test_a_missing_condition_and_a_missing_null_are_asked_for(name):
    values, _ = CASES[name]
    pipeline, argument = model(name, conditions=None), next(iter(values))
    with pytest.raises(nidiff.InputError, match=f"^{argument} is missing"):
        pipeline(3)
    with pytest.raises(nidiff.InputError, match="^guidance.*null"):
        pipeline(guidance_scale=2.0, **values)
    null = {key: torch.full_like(value[:1], 3) for key, value in values.items()}
    assert len(pipeline(guidance_scale=2.0, null=null, num_inference_steps=2, **values).images) == 3


def test_a_step_is_taken_with_a_denoiser_of_this_scheduler_only():
    pipeline = model("FieldUNet")
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(2)
    x, t = scheduler.init_noise((1, 1, 8, 8)), scheduler.timesteps[0]
    denoiser = scheduler.denoiser(pipeline.unet)
    with torch.no_grad():
        ours = scheduler.step_with(denoiser.given(class_labels=2), t, x)
        output = pipeline.unet(x, t, class_labels=torch.tensor([2]))
    theirs = scheduler.step(output, t, x)
    assert torch.equal(ours.prev_sample, theirs.prev_sample)
    assert torch.equal(ours.pred_original_sample, theirs.pred_original_sample)
    with pytest.raises(nidiff.InputError, match="^denoiser"):
        scheduler.step_with(model("FieldUNet").scheduler.denoiser(pipeline.unet), t, x)
