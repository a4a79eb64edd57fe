"""The scheduler with configurations of flow matching: with Σ = I diffusers' own steps, and with Σ those on Σ^-½ x.
Packed latents, the pipelines of SD3 and Flux, and what is refused."""

import copy
import json

import diffusers
import pytest
import torch
from problems import refused

import nidiff
from nidiff.interop import FlowNetwork, NonIsotropicScheduler, packed
from nidiff.interop.flow import unpacked
from nidiff.randomness import generators_from_seeds
from nidiff.testing.problems import normal, smooth_net

FLOW = diffusers.FlowMatchEulerDiscreteScheduler
SHAPE = (2, 4, 8, 8)
OFFSET = nidiff.offset((8, 8), strength=0.4)
WHITE = nidiff.Identity((8, 8))

# The fields of scheduler_config.json on the Hub, and what their pipelines give to set_timesteps.
SD3 = {"num_train_timesteps": 1000, "shift": 3.0}
FLUX = {**SD3, "base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15}
FLUX |= {"use_dynamic_shifting": True}
EIGHT = {"sigmas": torch.linspace(1, 1 / 8, 8).tolist(), "mu": 0.63}
CASES = {
    "SD3": (SD3, {"num_inference_steps": 8}),
    "SD3, sigmas": (SD3, {"sigmas": [1.0, 0.7, 0.4, 0.1]}),
    "Flux": (FLUX, EIGHT),
    "Flux, schnell": ({**FLUX, "shift": 1.0, "use_dynamic_shifting": False}, {"sigmas": EIGHT["sigmas"]}),
    "SD3, dynamic": ({**SD3, "use_dynamic_shifting": True}, {"num_inference_steps": 8, "mu": 0.9}),
    "linear, terminal": ({**FLUX, "time_shift_type": "linear", "shift_terminal": 0.1}, EIGHT),
    "karras": ({**SD3, "use_karras_sigmas": True}, {"num_inference_steps": 8}),
    "exponential": ({**SD3, "use_exponential_sigmas": True}, {"num_inference_steps": 8}),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def from_theirs(case, covariance, **options):
    """Their scheduler and ours of its configuration, after set_timesteps."""
    fields, arguments = CASES[case]
    pair = FLOW(**fields), NonIsotropicScheduler.from_config(FLOW(**fields).config, covariance=covariance, **options)
    for each in pair:
        each.set_timesteps(**arguments)
    return pair


def loop(scheduler, net, x):
    for t in scheduler.timesteps:
        x = scheduler.step(net(x, t.expand(len(x))), t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize("case", CASES)
def test_with_white_noise_each_step_is_diffusers_and_under_another_covariance_too(case):
    """Euler's step of a velocity noise − x0 has no Σ in it; the start has, and what is added to images."""
    theirs, white = from_theirs(case, WHITE)
    coloured = from_theirs(case, OFFSET)[1]
    net = smooth_net(SHAPE[1:])
    for ours in (white, coloured):
        assert torch.equal(ours.timesteps, theirs.timesteps)
        assert torch.equal(ours.sigmas, theirs.sigmas)
        x = ours.init_noise(SHAPE, seeded()).double()
        for t in ours.timesteps:
            v = net(x, t.expand(2))
            expected = theirs.step(v, t, x).prev_sample
            assert torch.allclose(ours.step(v, t, x).prev_sample, expected, atol=1e-5)
            x = expected.double()
        theirs.set_timesteps(**CASES[case][1])
    noise, t = normal(*SHAPE, seed=1).float(), theirs.timesteps[[2, 3]]
    expected = theirs.scale_noise(x.float(), t, noise)
    assert torch.allclose(white.scale_noise(x.float(), t, noise), expected, atol=1e-5)
    assert torch.allclose(coloured.scale_noise(x.float(), t, OFFSET.inv_sqrt(noise)), expected, atol=1e-5)
    assert not torch.allclose(coloured.scale_noise(x.float(), t, noise), expected, atol=1e-2)


@pytest.mark.parametrize("algorithm", ["euler", "dpmsolver++", "ddpm"])
def test_under_a_covariance_the_path_is_that_of_white_noise_on_whitened_images(algorithm):
    """y = Σ^-½ x, the network whitened too: the path of every algorithm, with the same white noise. Not without the
    whitening of the network."""
    net, generators = smooth_net(SHAPE[1:]), generators_from_seeds([3, 4])
    white, coloured = (from_theirs("SD3", covariance, algorithm=algorithm)[1] for covariance in (WHITE, OFFSET))
    start = normal(*SHAPE)
    steps = [normal(*SHAPE, seed=2 + step) for step in range(8)]

    def path(scheduler, velocity, x):
        if scheduler is coloured:
            scheduler.init_noise(SHAPE, generators)  # as if from there
        for t, white_noise in zip(scheduler.timesteps, steps, strict=True):
            x = scheduler.step(velocity(x, t.expand(2)), t, x, variance_noise=white_noise).prev_sample
        return x

    on_y = path(white, net, start)
    on_x = path(coloured, lambda x, t: OFFSET.sqrt(net(OFFSET.inv_sqrt(x), t)), OFFSET.sqrt(start))
    assert torch.allclose(OFFSET.sqrt(on_y), on_x, atol=1e-9 * on_x.abs().max())
    assert not torch.allclose(OFFSET.sqrt(on_y), path(coloured, net, OFFSET.sqrt(start)), atol=1e-2)


def test_a_denoiser_of_the_scheduler_is_called_at_1000_sigma_and_samples_the_same():
    """The loop is nidiff.sample of `FlowNetwork`, whose network sees what diffusers' would."""
    ours, net, seen = from_theirs("SD3", OFFSET)[1], smooth_net(SHAPE[1:]), []

    def spied(x, t):
        seen.append(t[0].item())
        return net(x, t)

    denoiser = ours.denoiser(spied)
    assert isinstance(denoiser.net, FlowNetwork)
    rows = [(each - 1) for each in (1000, 700, 400, 20)]
    nidiff.sample(denoiser, SHAPE, sampler="euler", spacing=rows, generator=[0, 1], dtype=torch.float64)
    assert seen == pytest.approx([3000 * t / (1 + 2 * t) for t in (1.0, 0.7, 0.4, 0.02)], rel=1e-5)
    x = ours.init_noise(SHAPE, seeded(), dtype=torch.float64)
    guided = x
    for t in ours.timesteps:
        guided = ours.step_with(ours.denoiser(net), t, guided).prev_sample
    assert torch.allclose(guided, loop(ours, net, x), atol=1e-6)


def test_before_set_timesteps_the_levels_are_those_that_a_training_script_draws_from():
    theirs = FLOW(**SD3)
    ours = copy.deepcopy(NonIsotropicScheduler.from_config(theirs.config, covariance=OFFSET))
    assert torch.equal(ours.sigmas, theirs.sigmas)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    noise = ours.init_noise((4000, 1, 8, 8), seeded())  # the one changed line: torch.randn_like
    assert noise.mean((1, 2, 3)).var() == pytest.approx(OFFSET.eigenvalues[0, 0].item() / 64, rel=0.1)


@pytest.mark.parametrize("shift", [0.5, 0.05])
def test_a_shift_below_1_takes_the_last_sigma_for_the_least_one_of_the_schedule(shift):
    fields = {"num_train_timesteps": 1000, "shift": shift}
    theirs, ours, net = FLOW(**fields), of(**fields), smooth_net(SHAPE[1:])
    for count in (1000, 8):
        for each in (theirs, ours):
            each.set_timesteps(count)
        assert torch.equal(ours.timesteps, theirs.timesteps)
    x = ours.init_noise(SHAPE, seeded()).double()
    expected = loop(theirs, net, x)
    assert torch.allclose(loop(ours, net, x), expected, atol=1e-3 * expected.abs().max())


def test_a_saved_configuration_has_the_fields_that_pipelines_look_for(tmp_path):
    ours = from_theirs("Flux", OFFSET)[1]
    ours.save_pretrained(tmp_path)
    again = NonIsotropicScheduler.from_pretrained(tmp_path)
    for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift", "use_dynamic_shifting"):
        assert again.config.get(key) == FLUX[key]
    again.set_timesteps(**EIGHT)
    assert torch.equal(again.sigmas, ours.sigmas)
    fixed = NonIsotropicScheduler.from_config(again.config, use_dynamic_shifting=False, shift=2.0)
    for each in (fixed, peer := FLOW(shift=2.0)):
        each.set_timesteps(8)
    assert torch.equal(fixed.sigmas, peer.sigmas)
    assert fixed.process.schedule.sigma[0] == pytest.approx(2 / 1001)
    assert not torch.equal(fixed.sigmas, ours.sigmas)
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert saved["shift"] == 3.0


@pytest.mark.parametrize("fields", [{}, {"use_dynamic_shifting": True}, {"use_karras_sigmas": True}])
def test_flow_matching_is_kept_by_a_copy_and_a_folder_where_the_configuration_leaves_fields_out(fields, tmp_path):
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, **fields}
    ours = NonIsotropicScheduler.from_config(config, covariance=OFFSET)
    ours.save_pretrained(tmp_path)
    short = NonIsotropicScheduler(OFFSET, nidiff.schedules.flow(1000), "velocity", "euler", flow=fields)
    for first in (ours, short):
        for each in (first, NonIsotropicScheduler.from_config(first.config)):
            each.set_timesteps(8, mu=0.7)
            assert each.timesteps.dtype == torch.float32
        assert torch.equal(each.timesteps, first.timesteps)
    again = NonIsotropicScheduler.from_pretrained(tmp_path)
    for each in (again, peer := FLOW(**fields)):
        each.set_timesteps(8, mu=0.7)
    assert torch.equal(again.timesteps, peer.timesteps)


# Packed latents --------------------------------------------------------------------------------------------------


def test_packed_latents_are_noised_and_stepped_as_the_field_that_they_are():
    """Also on a grid that Σ was not made for, once it was seen; the tokens taken as a field are another thing."""
    ours, net = from_theirs("Flux", OFFSET, algorithm="ddpm")[1], lambda x, t: (x - 0.3).tanh()
    for shape in (SHAPE, (2, 4, 4, 16), (2, 4, 6, 12)):
        x = ours.init_noise(shape, seeded(), dtype=torch.float64)
        white, t = normal(*shape, seed=4), ours.timesteps[3]
        noised = ours.scale_noise(x, t[None], white)
        assert torch.equal(ours.scale_noise(packed(x), t[None], packed(white)), packed(noised))
        given = {"timestep": t, "variance_noise": white}
        stepped = ours.step(net(x, t), sample=x, **given).prev_sample
        given["variance_noise"] = packed(white)
        tokens = ours.step(packed(net(x, t)), sample=packed(x), **given).prev_sample
        assert torch.equal(tokens, packed(stepped))
    as_field = nidiff.offset(tokens.shape[-2:], strength=0.4).sqrt(packed(white))
    assert not torch.allclose(as_field, packed(OFFSET.at(shape[-2:]).sqrt(white)), atol=1e-2)
    with refused("sample"):
        ours.step(torch.zeros(2, 7, 16), t, torch.zeros(2, 7, 16))


def test_tokens_that_could_be_of_two_shapes_are_of_the_one_in_which_their_start_was_drawn_or_refused():
    """4×16 and 16×4 have as many. A run keeps its shape until another one is drawn."""
    ours = from_theirs("Flux", nidiff.gaussian_free_field((8, 8)), algorithm="ddpm")[1]
    tall, wide = (ours.init_noise((2, 4, *grid), seeded()) for grid in ((16, 4), (4, 16)))
    white = {"variance_noise": normal(2, 16, 16)}
    for field in (tall, wide, tall.bfloat16().float()):
        x, grids = packed(field), [field.shape[2:]]
        as_field = {"variance_noise": unpacked(white["variance_noise"], grids)}
        for t in ours.timesteps[:3]:
            y = ours.step(packed(0.1 * field), t, x, **white).prev_sample
            assert torch.equal(y, packed(ours.step(0.1 * field, t, unpacked(x, grids), **as_field).prev_sample))
            x = y
    with refused("sample"):
        ours.step(torch.zeros(2, 16, 16), ours.timesteps[0], normal(2, 16, 16))
    ours.scale_noise(tall, ours.timesteps[3][None], tall)  # image to image
    again = NonIsotropicScheduler.from_config(ours.config)
    again.set_timesteps(**EIGHT)
    again.add_noise(wide, wide, ours.timesteps[3][None])  # a training step is no start
    again.init_noise(tall.shape)
    t, x = again.timesteps[2], packed(tall)
    assert torch.equal(again.step(x, t, x, **white).prev_sample, ours.step(x, t, x, **white).prev_sample)


def test_packing_is_that_of_flux():
    """Token i has the 2×2 square i, channel by channel."""
    x = normal(2, 3, 4, 6)
    tokens = packed(x)
    assert tokens.shape == (2, 6, 12)
    assert torch.equal(tokens[0, 4].reshape(3, 2, 2), x[0, :, 2:4, 2:4])  # the second row of squares, the second of it


# The pipelines ---------------------------------------------------------------------------------------------------


def tiny_sd3():
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
    text = {"joint_attention_dim": 8, "pooled_projection_dim": 8}
    return diffusers.SD3Transformer2DModel(8, 2, 4, out_channels=4, pos_embed_max_size=8, **sizes, **text).eval()


def tiny_flux():
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
    text = {"joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}
    return diffusers.FluxTransformer2DModel(1, 16, **sizes, **text).eval()


TEXT = {"prompt_embeds": normal(2, 3, 8).float(), "pooled_prompt_embeds": normal(2, 8, seed=1).float()}


@torch.no_grad()
def test_the_loop_of_sd3_makes_the_latents_of_sample():
    """With a transformer of SD3 that sees 1000 · sigma. Under Σ from N(0, Σ); from white noise it warns."""
    net, given = tiny_sd3(), {"encoder_hidden_states": TEXT["prompt_embeds"]}
    given["pooled_projections"] = TEXT["pooled_prompt_embeds"]
    ours = from_theirs("SD3", OFFSET)[1]
    start = ours.init_noise(SHAPE, generators_from_seeds([0, 1]))
    x = loop(ours, lambda x, t: net(hidden_states=x, timestep=t, **given).sample, start)

    def called(x, timestep, **conditions):
        return net(hidden_states=x, timestep=timestep, **conditions).sample

    denoiser, rows = ours.denoiser(called).given(**given), ours._rows
    expected = nidiff.sample(denoiser, SHAPE, sampler="euler", spacing=rows, generator=[0, 1])
    assert torch.allclose(x, expected, atol=1e-4)
    many = torch.randn(40, 4, 8, 8, generator=seeded())
    with pytest.warns(UserWarning, match="init_noise"):
        ours.step(many, ours.timesteps[0], many)
    again = from_theirs("SD3", OFFSET)[1]
    again.set_timesteps(sigmas=[0.6, 0.3])  # from an image: not from the prior, and no warning, which is an error here
    again.step(many, again.timesteps[0], many)


@torch.no_grad()
def test_the_loop_of_flux_runs_on_packed_latents_of_every_shape():
    """With Σ = I as by diffusers' scheduler; under Σ the path is that on whitened fields."""
    net = tiny_flux()

    def velocity(grid):
        ids = torch.stack(torch.meshgrid(*map(torch.arange, (1, *grid)), indexing="ij"), -1).reshape(-1, 3)
        text = {"encoder_hidden_states": TEXT["prompt_embeds"], "pooled_projections": TEXT["pooled_prompt_embeds"]}
        return lambda x, t: net(x, timestep=t / 1000, img_ids=ids.float(), txt_ids=torch.zeros(3, 3), **text).sample

    theirs, white = from_theirs("Flux", WHITE)
    coloured = from_theirs("Flux", OFFSET)[1]
    for shape in ((2, 4, 8, 8), (2, 4, 4, 12)):
        v, start = velocity((shape[2] // 2, shape[3] // 2)), packed(white.init_noise(shape, seeded()))
        theirs.set_timesteps(**EIGHT)
        expected = loop(theirs, v, start)
        assert torch.allclose(loop(white, v, start), expected, atol=1e-4)
        start = packed(coloured.init_noise(shape, seeded()))
        theirs.set_timesteps(**EIGHT)
        assert torch.allclose(loop(coloured, v, start), loop(theirs, v, start), atol=1e-4)
        assert not torch.allclose(loop(coloured, v, start), expected, atol=1e-2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "FluxPipeline"])
def test_the_pipelines_take_the_scheduler_and_a_coloured_start(name, recwarn):
    """The latents are those of their loop; the latents that they draw by themselves are warned of."""
    pytest.importorskip("transformers")
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = diffusers.AutoencoderKL(1, 1, **blocks, block_out_channels=(8, 8), norm_num_groups=4).eval()
    flux = name == "FluxPipeline"
    parts = [f"{part}{each}" for part in ("text_encoder", "tokenizer") for each in ("", "_2", "_3")[: 2 if flux else 3]]
    strong = nidiff.offset((8, 8), strength=2.0)
    ours = NonIsotropicScheduler.from_config(FLOW(**(FLUX if flux else SD3)).config, covariance=strong)
    net = tiny_flux() if flux else tiny_sd3()
    pipeline = getattr(diffusers, name)(vae=vae, transformer=net, scheduler=ours, **dict.fromkeys(parts))
    pipeline.set_progress_bar_config(disable=True)
    arguments = {**TEXT, "num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "latent"}
    arguments |= {"height": 16, "width": 16}
    start = ours.init_noise(SHAPE, seeded())
    latents = pipeline(**arguments, latents=packed(start) if flux else start).images
    assert latents.isfinite().all()
    assert not [each for each in recwarn if "init_noise" in str(each.message)]
    with pytest.warns(UserWarning, match="init_noise"):
        pipeline(**arguments, generator=seeded())


# What is refused -------------------------------------------------------------------------------------------------


def of(covariance=OFFSET, **fields):
    return NonIsotropicScheduler.from_config(FLOW(**fields).config, covariance=covariance)


def changed(**fields):
    return NonIsotropicScheduler.from_config({**FLOW().config, **fields}, covariance=OFFSET)


BAD = {
    "Mochi's": ("invert_sigmas", lambda: of(invert_sigmas=True)),
    "noise anew": ("stochastic_sampling", lambda: of(stochastic_sampling=True)),
    "Heun's": ("config", lambda: NonIsotropicScheduler.from_config(HEUN, covariance=OFFSET)),
    "a field": ("config", lambda: NonIsotropicScheduler.from_config({**FLOW().config, "shfit": 1}, covariance=OFFSET)),
    "no mu": ("mu", lambda: of(**FLUX).set_timesteps(8)),
    "timesteps": ("timesteps", lambda: of(**SD3).set_timesteps(timesteps=[1000.0, 500.0])),
    "rising sigmas": ("sigmas", lambda: of(**SD3).set_timesteps(sigmas=[0.5, 1.0])),
    "sigmas down to 0": ("sigmas", lambda: of(**SD3).set_timesteps(sigmas=[1.0, 0.5, 0.0])),
    "sigmas below the levels": ("sigmas", lambda: of(**SD3).set_timesteps(sigmas=[1.0, 1e-5, 1e-6])),
    "their sigmas below the levels": ("sigmas", lambda: of(shift=0.5, use_karras_sigmas=True).set_timesteps(28)),
    "no sigmas": ("sigmas", lambda: of(**SD3).set_timesteps(sigmas=[])),
    "sigmas of letters": ("sigmas", lambda: of(**SD3).set_timesteps(sigmas="abc")),
    "sigmas that are a number": ("sigmas", lambda: of(**SD3).set_timesteps(sigmas=0.5)),
    "two sigmas for three steps": ("sigmas", lambda: of(**SD3).set_timesteps(3, sigmas=[1.0, 0.5])),
    "a time shift": ("time_shift_type", lambda: changed(time_shift_type="cubic")),
    "flow of betas": ("schedule", lambda: NonIsotropicScheduler(OFFSET, "ddpm_linear", flow={"shift": 3.0})),
    "flow as a number": ("flow", lambda: NonIsotropicScheduler(OFFSET, nidiff.schedules.flow(9), flow=3)),
    "a field of flow": ("flow", lambda: NonIsotropicScheduler(OFFSET, nidiff.schedules.flow(9), flow={"shfit": 3})),
    "too many": ("num_inference_steps", lambda: of(**SD3).set_timesteps(2000)),
    "mu of betas": ("mu", lambda: NonIsotropicScheduler(OFFSET).set_timesteps(8, mu=0.3)),
    "sigmas of betas": ("sigmas", lambda: NonIsotropicScheduler(OFFSET).set_timesteps(sigmas=[1.0])),
    "our pipeline": ("scheduler", lambda: nidiff.NonIsotropicPipeline(diffusers.UNet2DModel(8), of(**SD3))),
}
HEUN = {**diffusers.FlowMatchHeunDiscreteScheduler().config, "_class_name": "FlowMatchHeunDiscreteScheduler"}


@pytest.mark.parametrize("case", BAD)
def test_what_flow_matching_asks_for_is_done_or_refused_by_name(case):
    argument, act = BAD[case]
    with refused(argument):
        act()
