"""The scheduler: with Σ = I diffusers' own, with any Σ nidiff.sample, and what diffusers promises of schedulers."""

import copy
import itertools
import json

import diffusers
import pytest
import torch
from problems import refused

import nidiff
from nidiff.diffusion.gaussian import Kappa
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.config import ALGORITHMS, SPACINGS, predictions
from nidiff.model.folder import same_covariance
from nidiff.model.network import unet2d
from nidiff.randomness import generators_from_seeds
from nidiff.testing.problems import normal, smooth_net

SHAPE = (2, 1, 4, 4)
GFF = nidiff.gaussian_free_field((4, 4))
PREDICTIONS = predictions()
THEIR_SPACINGS = [spacing for spacing in SPACINGS if spacing != "angle"]
FITTED = nidiff.from_data(normal(50, 1, 4, 4), average="modes")  # a Σ that is arrays
GAUSSIAN = nidiff.fit_gaussian(normal(50, 1, 4, 4, seed=3), basis=FITTED)
KAPPA = Kappa(
    torch.tensor([0.0, 60.0, 99.0], dtype=torch.float64),
    normal(3, 1, 4, 4).sigmoid(),
    normal(3, 1, 4, 4, seed=1).sigmoid(),
)
SAMPLER_OPTIONS = {"ddpm": {"variance": "posterior"}, "ddim": {"eta": 0.0}}


def scheduler(covariance=GFF, **options):
    diffusers_own = {"algorithm": "ddpm", "timestep_spacing": "leading", "clip_sample": False}
    if options.get("algorithm", "").startswith(("angle", "gaussian")):
        options = {"gaussian": nidiff.GaussianModel(torch.zeros(1, 4, 4), covariance), **options}
    options = {"schedule": "ddpm_linear:num_levels=100,beta_max=0.2", **diffusers_own, **options}
    return NonIsotropicScheduler(covariance, **options)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def loop(ours, net, x, generator=None, **options):
    for t in ours.timesteps:
        x = ours.step(net(ours.scale_model_input(x, t), t.expand(len(x))), t, x, generator, **options).prev_sample
    return x


# Σ = I is diffusers ----------------------------------------------------------------------------------------------

LARGE = {"variance_type": "fixed_large"}
PEERS = {  # our algorithm, the peer, options of both, and arguments of their steps
    "ddpm": ("ddpm", diffusers.DDPMScheduler, {}, {}),
    "ddpm, large variance": ("ddpm", diffusers.DDPMScheduler, LARGE, {}),
    "ddim": ("ddim", diffusers.DDIMScheduler, {}, {}),
    "ddim, eta": ("ddim", diffusers.DDIMScheduler, {}, {"eta": 0.7}),
    "dpmsolver++": ("dpmsolver++", diffusers.DPMSolverMultistepScheduler, {}, {}),
}
THEIR_PREDICTIONS = ("epsilon", "sample", "v_prediction")


def in_float64(peer):
    """The tables of a diffusers scheduler, which are float32, in float64; call after set_timesteps."""
    remaining = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    peer.alphas_cumprod = remaining
    if hasattr(peer, "sigmas"):
        sigmas = ((1 - remaining) / remaining).sqrt()[peer.timesteps]
        peer.sigmas = torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])


# Left out: where diffusers' DDIM steps to t − 1000 // n, which is not the next of its linspace timesteps, and where its
# DDPM adds noise of variance β to the final image because its last timestep is not 0.
CASES = [
    (name, spacing)
    for name, spacing in itertools.product(PEERS, THEIR_SPACINGS)
    if not (name.startswith("ddim") and spacing == "linspace")
    and not (name == "ddpm, large variance" and spacing == "trailing")
]


@pytest.mark.parametrize(
    ("name", "spacing", "prediction"),
    [(*case, prediction) for case, prediction in zip(CASES, itertools.cycle(THEIR_PREDICTIONS), strict=False)],
)
def test_with_white_noise_each_step_is_diffusers(name, spacing, prediction):
    """Every peer with every spacing, and the predictions in turn: a target is decoded before the step."""
    algorithm, peer_class, options, arguments = PEERS[name]
    both = {"prediction_type": prediction, "timestep_spacing": spacing, **options}
    peer = peer_class(**both, **({} if algorithm == "dpmsolver++" else {"clip_sample": False}))
    white, levels = nidiff.Identity((4, 4)), "ddpm_linear:num_levels=1000"
    ours = scheduler(white, schedule=levels, algorithm=algorithm, **both)
    peer.set_timesteps(20)
    ours.set_timesteps(20)
    in_float64(peer)
    assert ours.timesteps.tolist() == peer.timesteps.tolist()
    net = smooth_net((4, 4))
    x = ours.init_noise(SHAPE, seeded(), dtype=torch.float64)
    generators = seeded(1), seeded(1)
    for t in ours.timesteps:
        output = net(x, t.expand(2))
        theirs = peer.step(output, t, x, generator=generators[0], **arguments)
        mine = ours.step(output, t, x, generators[1], **arguments)
        scale = max(1.0, theirs.prev_sample.abs().max().item())
        assert (mine.prev_sample - theirs.prev_sample).abs().max() <= 1e-6 * scale
        if hasattr(theirs, "pred_original_sample"):
            assert torch.allclose(mine.pred_original_sample, theirs.pred_original_sample, rtol=1e-6, atol=1e-6)
        x = theirs.prev_sample.double()


@pytest.mark.parametrize(("spacing", "count", "differs"), [("trailing", 20, False), ("trailing", 30, True)])
def test_diffusers_ddim_goes_on_by_a_stride_of_its_own(spacing, count, differs):
    """It steps to t − 1000 // n, which is not the next of its "trailing" timesteps if n does not divide 1000."""
    both = {"timestep_spacing": spacing, "clip_sample": False}
    peer = diffusers.DDIMScheduler(**both)
    ours = scheduler(nidiff.Identity((4, 4)), schedule="ddpm_linear:num_levels=1000", algorithm="ddim", **both)
    for each in (peer, ours):
        each.set_timesteps(count)
    in_float64(peer)
    assert ours.timesteps.tolist() == peer.timesteps.tolist()
    x, output = normal(*SHAPE), normal(*SHAPE, seed=1)

    def to(t: int, there: int) -> torch.Tensor:
        here, there = ours.process.schedule.level(t), ours.process.schedule.level(there)
        x0 = (x - here.sigma * output) / here.signal
        return there.signal * x0 + there.sigma * output

    strays = 0
    for t, following in itertools.pairwise(ours.timesteps.tolist()):
        torch.testing.assert_close(ours.step(output, t, x).prev_sample, to(t, following))
        torch.testing.assert_close(peer.step(output, t, x).prev_sample, to(t, t - 1000 // count), atol=1e-6, rtol=1e-6)
        strays += following != t - 1000 // count
    assert (strays > 0) == differs


def test_before_set_timesteps_every_level_is_a_step_as_in_ddpm():
    peer = diffusers.DDPMScheduler(clip_sample=False)
    ours = NonIsotropicScheduler.from_config(peer.config, covariance=nidiff.Identity((4, 4)))
    in_float64(peer)
    x, output = normal(*SHAPE), normal(*SHAPE, seed=1)
    theirs = peer.step(output, 500, x, generator=seeded()).prev_sample
    assert torch.allclose(ours.step(output, 500, x, generator=seeded()).prev_sample, theirs, atol=1e-6)
    for each in (ours, peer):
        assert (each.num_inference_steps, each.previous_timestep(500)) == (None, 499)
        each.set_timesteps(10)
    for t in ours.timesteps:
        assert ours.previous_timestep(t) == peer.previous_timestep(t)
    after = ours.step(output, 500, x, generator=seeded()).prev_sample
    assert not torch.allclose(after, theirs, atol=1e-2)  # now it leads to 400


@pytest.mark.parametrize("algorithm", ["ddpm", "ddim"])
def test_clipping_is_diffusers_too(algorithm):
    """DDIM's with use_clipped_model_output: the noise direction follows the clipped image."""
    peer = PEERS[algorithm][1](clip_sample_range=0.8)
    ours = NonIsotropicScheduler.from_config(peer.config, covariance=nidiff.Identity((4, 4)))
    assert ours.config.algorithm == algorithm
    for each in (peer, ours):
        each.set_timesteps(10)
    in_float64(peer)
    extra = {"use_clipped_model_output": True} if algorithm == "ddim" else {}
    x, output = normal(*SHAPE), normal(*SHAPE, seed=1)
    theirs = peer.step(output, 500, x, generator=seeded(), **extra)
    mine = ours.step(output, 500, x, generator=seeded())
    assert mine.pred_original_sample.abs().max() == 0.8
    assert torch.allclose(mine.prev_sample, theirs.prev_sample, rtol=0, atol=1e-6)


THEIRS = {
    "default": {},
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "cosine": {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 500},
    "betas": {"trained_betas": torch.linspace(1e-4, 0.03, 300).tolist(), "num_train_timesteps": 300},
    "other words": {"variance_type": "fixed_large", "prediction_type": "v_prediction", "clip_sample_range": 0.5},
    "sample, unclipped": {"prediction_type": "sample", "clip_sample": False, "timestep_spacing": "trailing"},
}


@pytest.mark.parametrize("case", THEIRS)
def test_a_configuration_of_ddpm_gives_its_images(case, tmp_path):
    """From the object's config and from the file; with Σ = I the images are DDPMScheduler's own, else others."""
    peer = diffusers.DDPMScheduler(**THEIRS[case])
    peer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    white = NonIsotropicScheduler.from_config(peer.config, covariance=nidiff.Identity((4, 4)))
    others = [NonIsotropicScheduler.from_config(saved, covariance=cov) for cov in (nidiff.Identity((4, 4)), GFF)]
    assert torch.allclose(white.alphas_cumprod, peer.alphas_cumprod, rtol=1e-4, atol=1e-9)
    peer.alphas_cumprod = torch.sigmoid(white.process.schedule.logsnr)  # in float64, as ours are
    start, net, images = normal(*SHAPE), smooth_net((4, 4)), []
    for each in (peer, white, *others):
        each.set_timesteps(10)
        x, generator = start if each is not others[1] else GFF.sqrt(start), seeded()
        for t in each.timesteps:
            x = each.step(net(x, t.expand(2)), t, x, generator=generator).prev_sample
        images.append(x)
    assert torch.allclose(images[1], images[0], atol=1e-5)
    assert torch.equal(images[2], images[1])
    assert (images[3] - images[0]).abs().max() > 1e-2


def test_a_configuration_of_an_early_diffusers_has_its_defaults():
    """The scheduler of google/ddpm-cifar10-32: what it does not say is what DDPMScheduler takes it for."""
    early = {"_class_name": "DDPMScheduler", "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
    early |= {"num_train_timesteps": 1000, "trained_betas": None, "clip_sample": True, "variance_type": "fixed_large"}
    ours = NonIsotropicScheduler.from_config(early, covariance=GFF)
    peer = diffusers.DDPMScheduler.from_config(early)
    for field in ("variance_type", "clip_sample", "clip_sample_range", "prediction_type", "timestep_spacing"):
        assert ours.config[field] == peer.config[field]
    assert ours.config.algorithm == "ddpm"


REFUSED = {
    "thresholding": diffusers.DDPMScheduler(thresholding=True),
    "variance_type": diffusers.DDPMScheduler(variance_type="learned_range"),
    "beta_schedule": diffusers.DDPMScheduler(beta_schedule="sigmoid"),
    "solver_order": diffusers.DPMSolverMultistepScheduler(solver_order=3),
    "algorithm_type": diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
    "use_karras_sigmas": diffusers.EulerDiscreteScheduler(use_karras_sigmas=True),
    "HeunDiscreteScheduler": diffusers.HeunDiscreteScheduler(),
    "LCMScheduler": diffusers.LCMScheduler(),
}


def test_what_a_configuration_of_diffusers_asks_for_is_done_or_refused_by_name():
    for field, peer in REFUSED.items():
        config = {**peer.config, "_class_name": type(peer).__name__}
        with pytest.raises(nidiff.InputError, match=field):
            NonIsotropicScheduler.from_config(config, covariance=GFF)
    misspelt = {**diffusers.DDPMScheduler().config, "_class_name": "DDPMScheduler", "beta_strat": 1}
    with pytest.raises(nidiff.InputError, match="beta_strat"):
        NonIsotropicScheduler.from_config(misspelt, covariance=GFF)


# scheduler_config.json of Stable Diffusion 1.5, as it is on the Hub: PNDM with a field that PNDM does not have.
STABLE = {"_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_start": 0.00085, "beta_end": 0.012}
STABLE |= {"beta_schedule": "scaled_linear", "num_train_timesteps": 1000, "trained_betas": None, "clip_sample": False}
STABLE |= {"set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1}
SWAPPED = {  # what pipelines of diffusers are given in place of it
    "ddim": diffusers.DDIMScheduler,
    "dpmsolver++": diffusers.DPMSolverMultistepScheduler,
    "ddpm": diffusers.DDPMScheduler,
}


@pytest.mark.parametrize("algorithm", SWAPPED)
def test_the_configuration_of_stable_diffusion_is_taken_by_every_algorithm(algorithm):
    """With Σ = I the images are those of diffusers' scheduler from the same file; the last step gives x̂0."""
    options = {"ddim": {"set_alpha_to_one": True}, "dpmsolver++": {"timestep_spacing": "leading"}, "ddpm": {}}
    peer = SWAPPED[algorithm].from_config(STABLE, **options[algorithm])
    given = {"covariance": nidiff.Identity((4, 4)), "algorithm": algorithm}
    ours = NonIsotropicScheduler.from_config(STABLE, **given)
    assert NonIsotropicScheduler.from_config(STABLE, covariance=GFF).config.algorithm == "ipndm"
    assert torch.allclose(ours.alphas_cumprod, peer.alphas_cumprod, rtol=1e-4, atol=1e-9)
    for each in (peer, ours):
        each.set_timesteps(10)
    assert peer.timesteps.tolist() == ours.timesteps.tolist()
    assert (ours.timesteps[-1].item() % 2, ours.config.clip_sample) == (1, False)
    if algorithm == "dpmsolver++":
        return  # whose steps are compared above
    peer.alphas_cumprod = torch.sigmoid(ours.process.schedule.logsnr)  # in float64, as ours are
    start, net, images = normal(*SHAPE), smooth_net((4, 4)), []
    for each in (peer, ours):
        x, generator = start, seeded()
        for t in each.timesteps:
            x = each.step(net(x, t.expand(2)), t, x, generator=generator).prev_sample
        images.append(x)
    assert torch.allclose(*images, rtol=1e-5)


def test_the_configuration_of_an_own_peer_is_its_algorithm():
    for name, peer in {
        "dpmsolver++": diffusers.DPMSolverMultistepScheduler(),
        "euler": diffusers.EulerDiscreteScheduler(timestep_spacing="trailing"),
        "ipndm": diffusers.PNDMScheduler(skip_prk_steps=True),
    }.items():
        ours = NonIsotropicScheduler.from_config(peer.config, covariance=GFF)
        assert (ours.config.algorithm, ours.config.clip_sample) == (name, False)
        assert ours.config.timestep_spacing == peer.config.timestep_spacing
    heun = {**diffusers.HeunDiscreteScheduler().config, "_class_name": "HeunDiscreteScheduler"}
    ours = NonIsotropicScheduler.from_config(heun, covariance=GFF, algorithm="dpmsolver++")
    assert torch.allclose(ours.alphas_cumprod, diffusers.HeunDiscreteScheduler().alphas_cumprod, rtol=1e-4)


def test_zero_terminal_snr_is_that_of_diffusers():
    peer = diffusers.DDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction", clip_sample=False)
    ours = NonIsotropicScheduler.from_config(peer.config, covariance=nidiff.Identity((4, 4)))
    assert torch.allclose(ours.alphas_cumprod, peer.alphas_cumprod, rtol=1e-4, atol=1e-7)
    assert 0 < ours.alphas_cumprod[-1] < 1e-7
    assert not torch.allclose(ours.alphas_cumprod, diffusers.DDIMScheduler().alphas_cumprod, rtol=1e-2)


# Any Σ is nidiff.sample ------------------------------------------------------------------------------------------


def per_mode(covariance, num_levels=100):
    """A schedule in which fine modes are noisy first, and its configuration has arrays."""
    column = nidiff.schedules.ddpm_cosine(num_levels).logsnr.reshape(-1, 1, 1)
    return nidiff.Schedule(column + covariance.eigenvalues.log() / 2, boundary="periodic")


SCHEDULED = {
    "cosine": "ddpm_cosine:num_levels=100",
    "smld": "smld_geometric:num_levels=100,sigma_max=9,sigma_min=0.02",
    "per mode": per_mode(FITTED),
}


SAMPLED = [
    *zip(ALGORITHMS, itertools.repeat("epsilon"), itertools.cycle(SCHEDULED), strict=False),
    *zip(itertools.cycle(ALGORITHMS), PREDICTIONS, itertools.repeat("cosine"), strict=False),
]


@pytest.mark.parametrize("algorithm, prediction, schedule", dict.fromkeys(SAMPLED))
def test_it_is_nidiff_sample_to_the_bit(algorithm, prediction, schedule):
    """Also after its configuration was written and read."""
    options = {"schedule": SCHEDULED[schedule], "prediction_type": prediction, "algorithm": algorithm}
    ours = scheduler(FITTED, clip_sample=True, gaussian=GAUSSIAN, kappa=KAPPA, **options)
    ours = NonIsotropicScheduler.from_config(ours.config)
    net = smooth_net((4, 4))
    ours.set_timesteps(6)
    generators = generators_from_seeds([5, 6])
    x = ours.init_noise(SHAPE, generators, dtype=torch.float64)
    x = loop(ours, net, x, generators)
    process, told = nidiff.Process(SCHEDULED[schedule], FITTED), {"gaussian": GAUSSIAN, "kappa": KAPPA}
    denoiser = nidiff.Denoiser(net, process, PREDICTIONS[prediction], clip=1.0, **told)
    rows = ours.timesteps.tolist()
    options = {"spacing": rows, "sampler": ALGORITHMS[algorithm], **SAMPLER_OPTIONS.get(algorithm, {})}
    expected = nidiff.sample(denoiser, SHAPE, generator=[5, 6], dtype=torch.float64, **options)
    assert torch.equal(x, expected)
    process = nidiff.Process(SCHEDULED[schedule], nidiff.Identity((4, 4)))
    white = nidiff.Denoiser(net, process, PREDICTIONS[prediction], clip=1.0, **told)
    other = nidiff.sample(white, SHAPE, generator=[5, 6], dtype=torch.float64, **options)
    assert not torch.allclose(other, expected, atol=1e-3)


@pytest.mark.parametrize("sees", ["x", "z", "both"])
def test_scale_model_input_makes_what_the_network_sees(sees):
    given = {"gaussian": GAUSSIAN, "sees": sees}
    ours = scheduler(FITTED, prediction_type="residual", algorithm="angle", **given)
    ours.set_timesteps(5)
    seen = []

    def net(x, label):
        seen.append(x)
        return smooth_net((4, 4))(x[:, :1], label)

    x = loop(ours, net, ours.init_noise(SHAPE, generators_from_seeds([5, 6]), dtype=torch.float64))
    assert {tuple(one.shape[1:]) for one in seen} == {(2 if sees == "both" else 1, 4, 4)}
    denoiser = nidiff.Denoiser(net, ours.process, "residual", **given)
    options = {"spacing": ours.timesteps.tolist(), "sampler": "angle", "generator": [5, 6], "dtype": torch.float64}
    assert torch.equal(x, nidiff.sample(denoiser, SHAPE, **options))
    first = ours.scale_model_input(normal(*SHAPE), ours.timesteps[0])
    both = ours.scale_model_input(normal(*SHAPE), ours.timesteps[[0, 0]])  # one per image, as a training script
    assert torch.allclose(first, both, atol=1e-12)
    if sees == "x":
        assert torch.equal(first, normal(*SHAPE))


def test_a_white_noise_model_of_diffusers_is_sampled_by_angles_without_retraining(tmp_path):
    """What DDPMPipeline saved, with a Gaussian fitted to the data and κ measured: nidiff.sample of the same network."""
    torch.manual_seed(0)
    algorithm, unet = "angle_2m", unet2d((1, 8, 8), widths=(8,), layers=1, attention=()).eval()
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=100)).save_pretrained(tmp_path / "theirs")
    theirs = diffusers.DDPMScheduler.from_pretrained(tmp_path / "theirs", subfolder="scheduler")
    data = nidiff.gaussian_free_field((8, 8)).sample((64, 1, 8, 8), seeded())
    options = {"covariance": nidiff.Identity((8, 8)), "gaussian": nidiff.fit_gaussian(data), "algorithm": algorithm}
    plain = NonIsotropicScheduler.from_config(theirs.config, **options)
    measured = nidiff.design.measure_kappa(plain.denoiser(unet), data, num_images=16, num_rows=3)
    ours = NonIsotropicScheduler.from_config(theirs.config, kappa=measured.kappa, **options)
    images = []
    for each, name in ((ours, "measured"), (plain, "plain")):
        NonIsotropicPipeline.from_pretrained(tmp_path / "theirs", scheduler=each).save_pretrained(tmp_path / name)
        again = NonIsotropicPipeline.from_pretrained(tmp_path / name)
        assert (again.scheduler.config.algorithm, again.scheduler.denoiser(unet).sees) == (algorithm, "x")
        again.set_progress_bar_config(disable=True)
        images.append(again(2, seeds=[0, 1], num_inference_steps=4, output_type="pt").images)
    expected = nidiff.sample(measured, (2, 1, 8, 8), sampler=algorithm, num_steps=4, generator=[0, 1])  # on its rows
    assert torch.equal(images[0], (expected / 2 + 0.5).clamp(0, 1))
    assert not torch.allclose(images[1], images[0], atol=1e-4)  # κ was used, and saved


def test_the_spacing_is_the_algorithms_own_if_nothing_is_said():
    gaussian = nidiff.GaussianModel(torch.zeros(1, 4, 4), GFF)
    for algorithm in ALGORITHMS:
        options = {"algorithm": algorithm, "gaussian": gaussian, "schedule": "ddpm_linear:num_levels=20"}
        own = "angle" if algorithm in ("angle", "angle_2m", "gaussian_2m") else "trailing"
        plain = NonIsotropicScheduler(GFF, **options)
        assert plain.config.timestep_spacing == own
        assert NonIsotropicScheduler.from_config(plain.config).config.timestep_spacing == own
        asked = NonIsotropicScheduler(GFF, timestep_spacing="trailing", **options)
        again = NonIsotropicScheduler.from_config(asked.config)
        assert asked.config.timestep_spacing == again.config.timestep_spacing == "trailing"
        assert NonIsotropicScheduler.from_config(asked.config, timestep_spacing=None).config.timestep_spacing == own
    config = diffusers.DDPMScheduler().config  # its "leading" is for its own steps
    options = {"algorithm": "angle_2m", "gaussian": gaussian, "covariance": nidiff.Identity((4, 4))}
    assert NonIsotropicScheduler.from_config(config, **options).config.timestep_spacing == "angle"


def test_another_schedule_leaves_kappa_behind():
    """Its rows are those of the schedule that it was measured with."""
    ours = scheduler(FITTED, gaussian=GAUSSIAN, kappa=KAPPA)
    assert NonIsotropicScheduler.from_config(ours.config).denoiser(smooth_net((4, 4))).kappa is not None
    other = NonIsotropicScheduler.from_config(ours.config, schedule="ddpm_linear:num_levels=30")
    told = other.denoiser(smooth_net((4, 4)))
    assert told.kappa is None
    assert torch.equal(told.gaussian.mean, GAUSSIAN.mean)
    with pytest.raises(nidiff.InputError, match="^kappa"):
        NonIsotropicScheduler.from_config(ours.config, schedule="ddpm_linear:num_levels=30", kappa=KAPPA)


def test_a_schedule_that_keeps_signal_starts_from_the_gaussian():
    """As start="gaussian" of nidiff.sample does; without a warning, which is an error here."""
    gaussian = nidiff.fit_gaussian(3 + 2 * normal(50, 1, 4, 4))
    ours = scheduler(schedule=HEAT, gaussian=gaussian, algorithm="ddim", prediction_type="sample")
    ours.set_timesteps(timesteps=[19, 12, 5])
    net, source = smooth_net((4, 4)), generators_from_seeds([0, 1])
    x = loop(ours, net, ours.init_noise(SHAPE, source, dtype=torch.float64), source)
    given = {"sampler": "ddim", "spacing": [19, 12, 5], "start": "gaussian", "generator": [0, 1]}
    expected = nidiff.sample(ours.denoiser(net), SHAPE, dtype=torch.float64, **given)
    assert torch.allclose(x, expected, atol=1e-10)
    at_last = gaussian.at(ours.process.schedule.level(19), GFF)
    many = ours.init_noise((4000, 1, 4, 4), seeded(), dtype=torch.float16).double()
    assert at_last.to_z(many).mean(0).abs().max() < 0.1
    assert (many.mean() - 3).abs() < 0.1  # negative control: noise alone has mean 0


def test_noise_is_given_white_and_coloured_inside():
    ours = scheduler()
    ours.set_timesteps(10)
    x, output, z = GFF.sqrt(normal(*SHAPE)), normal(*SHAPE, seed=1), normal(*SHAPE, seed=2)
    without = ours.step(output, 50, x, variance_noise=torch.zeros_like(z)).prev_sample
    added = ours.step(output, 50, x, variance_noise=z).prev_sample - without
    assert torch.allclose(added / added.std(), GFF.sqrt(z) / GFF.sqrt(z).std(), atol=1e-6)
    level = ours.process.schedule.level(30)
    noisy = ours.add_noise(output, z, torch.tensor([30, 30]))
    assert torch.allclose(noisy, level.signal * output + level.sigma * GFF.sqrt(z), atol=1e-12)


def test_the_targets_of_a_training_script_lead_back_to_the_image():
    """noise, the image or get_velocity(image, noise): what a diffusers script compares the output with."""
    x0, noise, t = normal(*SHAPE), normal(*SHAPE, seed=1), torch.tensor([40])
    targets = {"epsilon": noise, "sample": x0, "v_prediction": scheduler().get_velocity(x0, noise, t)}
    for prediction, target in targets.items():
        ours = scheduler(prediction_type=prediction)
        ours.set_timesteps(100)
        assert torch.allclose(ours.step(target, 40, ours.add_noise(x0, noise, t)).pred_original_sample, x0, atol=1e-10)


# diffusers' promises about schedulers ----------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", [GFF, FITTED, nidiff.Channels(torch.eye(1) * 2, FITTED)], ids=repr)
def test_a_saved_scheduler_is_the_same(covariance, tmp_path):
    """The Gaussian, κ and tables of modes are arrays beside the configuration."""
    options = {"prediction_type": "v_prediction", "variance_type": "fixed_large", "timestep_spacing": "trailing"}
    if covariance is FITTED:
        options |= {"schedule": per_mode(FITTED), "gaussian": GAUSSIAN, "kappa": KAPPA}
    first = scheduler(covariance, clip_sample=True, clip_sample_range=0.7, **options)
    first.save_pretrained(tmp_path / "s")
    assert (tmp_path / "s" / "covariance.safetensors").exists() == bool(covariance.tensors())
    assert (tmp_path / "s" / "scheduler_config.json").stat().st_size < 4000
    second = NonIsotropicScheduler.from_pretrained(tmp_path, subfolder="s")
    third = NonIsotropicScheduler.from_config(copy.deepcopy(first.config))  # no file in between
    x, output = first.init_noise(SHAPE, seeded(), dtype=torch.float64), normal(*SHAPE)
    first.set_timesteps(7)
    expected = first.step(output, first.timesteps[0], x, generator=seeded()).prev_sample
    for other in (second, third):
        assert all(other.config[key] == value for key, value in first.config.items() if key[0] != "_")
        assert same_covariance(other.covariance, covariance)
        other.set_timesteps(7)
        assert torch.equal(other.step(output, other.timesteps[0], x, generator=seeded()).prev_sample, expected)
        model = other.denoiser(smooth_net((4, 4)))
        if covariance is FITTED:
            assert torch.equal(other.process.schedule.logsnr, first.process.schedule.logsnr)
            assert torch.equal(model.gaussian.mean, GAUSSIAN.mean)
            assert torch.equal(model.gaussian.covariance.eigenvalues, GAUSSIAN.covariance.eigenvalues)
            assert torch.equal(model.kappa.values, KAPPA.values)


def test_a_configuration_is_changed_on_the_way_and_a_saved_covariance_is_not(tmp_path):
    config = scheduler(FITTED, algorithm="ddpm", prediction_type="sample").config
    assert same_covariance(NonIsotropicScheduler.from_config(config, covariance=GFF).covariance, GFF)
    shorter = NonIsotropicScheduler.from_config(config, schedule="ddpm_linear:num_levels=30")
    assert len(shorter) == shorter.config.num_train_timesteps == 30
    assert NonIsotropicScheduler.from_config(config, return_unused_kwargs=True, foo=1)[1]["foo"] == 1
    NonIsotropicScheduler.from_config(config, algorithm="ddim").save_pretrained(tmp_path)
    # diffusers marks what was not in a file as a default, which its from_config then leaves out.
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_use_default_values": ["algorithm"]}))
    reloaded = NonIsotropicScheduler.from_pretrained(tmp_path, covariance=FITTED)
    again = NonIsotropicScheduler.from_config(reloaded.config)
    assert again.config == reloaded.config
    assert (again.config.algorithm, again.config.prediction_type) == ("ddim", "sample")
    assert same_covariance(again.covariance, FITTED)
    for other in (GFF, GFF.to_config()):
        with refused("covariance"):
            NonIsotropicScheduler.from_pretrained(tmp_path, covariance=other)


def test_a_scheduler_of_diffusers_refuses_our_configuration(tmp_path):
    """It would drop Σ and take its own betas; instead it names the class that is needed."""
    ours = scheduler()
    ours.save_pretrained(tmp_path)
    for name in ("DDPM", "DDIM", "DPMSolverMultistep", "EulerDiscrete", "UniPCMultistep"):
        peer = getattr(diffusers, f"{name}Scheduler")
        for act, source in ((peer.from_config, ours.config), (peer.from_pretrained, tmp_path)):
            with pytest.raises(NotImplementedError, match="needs nidiff.interop.NonIsotropicScheduler"):
                act(source)


@pytest.mark.parametrize("spacing", THEIR_SPACINGS)
@pytest.mark.parametrize("algorithm", ["ddpm", "ddim", "dpmsolver++"])
def test_timesteps_are_those_of_diffusers_for_any_number_of_steps(algorithm, spacing):
    theirs = PEERS[algorithm][1](timestep_spacing=spacing)
    ours = scheduler(schedule=nidiff.schedules.ddpm_linear(1000), algorithm=algorithm, timestep_spacing=spacing)
    for steps in (*range(1, 12), 20, 33, 50, 61, 103, 250, 499, 500, 999):
        for each in (theirs, ours):
            each.set_timesteps(steps)
        # By rounding, diffusers' "trailing" has one timestep more than asked for with 61, 103, … steps.
        assert ours.timesteps.tolist() == theirs.timesteps.tolist()[:steps]


@pytest.mark.parametrize(("algorithm", "spacing"), [*zip(ALGORITHMS, itertools.cycle(SPACINGS), strict=False)])
def test_timesteps_fall_within_the_schedule(algorithm, spacing):
    ours = scheduler(algorithm=algorithm, timestep_spacing=spacing)
    assert ours.timesteps.tolist() == list(range(99, -1, -1))
    for steps in (1, 2, 3, 7, 33, 49, 98, 99, 100):
        ours.set_timesteps(steps)
        rows = ours.timesteps.tolist()
        assert len(rows) == steps == ours.num_inference_steps
        assert all(a > b for a, b in itertools.pairwise(rows))
        assert rows[0] <= 99
        assert rows[-1] >= 0
    ours.set_timesteps(timesteps=[90, 50, 3])
    assert ours.timesteps.tolist() == [90, 50, 3]


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [*zip(ALGORITHMS, itertools.cycle([torch.float16, torch.bfloat16]), strict=False)]
)
def test_half_precision_stays_finite_and_keeps_its_type(algorithm, dtype):
    options = {"algorithm": algorithm, "timestep_spacing": "trailing", "gaussian": GAUSSIAN}
    ours = NonIsotropicScheduler(FITTED, "ddpm_cosine:num_levels=1000", **options)
    ours.set_timesteps(10)
    x = ours.init_noise(SHAPE, seeded(), dtype=dtype)
    x = loop(ours, lambda x, t: x.tanh(), x, seeded(1))
    assert x.dtype == dtype
    assert bool(x.isfinite().all())
    noisy = ours.add_noise(x, torch.randn(SHAPE, generator=seeded()).to(dtype), torch.tensor([0, 999]))
    assert noisy.dtype == dtype
    assert bool(noisy.isfinite().all())


def test_a_step_returns_what_diffusers_users_unpack():
    ours = ready()
    x, output = ours.init_noise(SHAPE, seeded()), torch.zeros(SHAPE)
    result = ours.step(output, ours.timesteps[0], x, seeded())
    pair = ours.step(output, int(ours.timesteps[0]), x, seeded(), return_dict=False)
    assert torch.equal(result.prev_sample, pair[0])
    assert torch.equal(result["pred_original_sample"], pair[1])
    assert ours.scale_model_input(x, 3) is x
    assert len(ours) == ours.config.num_train_timesteps == 100
    assert ours.order == 1
    assert ours.compatibles == []  # a scheduler for white noise is not


def test_dpmsolver_looks_back_only_at_the_step_that_led_here():
    """Of second order in one run; a run before, another batch in between, or a start half way, is not mixed with it."""
    ours = scheduler(algorithm="dpmsolver++", timestep_spacing="trailing")
    net = smooth_net((4, 4))
    ours.set_timesteps(10)

    def run(x, rows):
        for t in ours.timesteps[rows]:
            x = ours.step(net(x, t.expand(len(x))), t, x).prev_sample
        return x

    x, other = (ours.init_noise(SHAPE, seeded(seed), dtype=torch.float64) for seed in (0, 1))
    middle = run(x, slice(0, 5))
    second_order = run(middle, slice(5, 6))
    run(other, slice(0, 5))
    first_order = run(middle, slice(5, 6))
    assert (first_order - second_order).abs().max() > 1e-6
    ours.set_timesteps(10)
    assert torch.equal(run(middle, slice(5, 6)), first_order)  # as if it began there
    run(x, slice(0, 5))
    rounded = run(middle.float().double(), slice(5, 6))
    assert torch.allclose(rounded, second_order, atol=1e-5 * second_order.abs().max())
    assert torch.equal(run(x, slice(0, 10)), run(x, slice(0, 10)))


# What makes a Σ the same -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_a_difference_in_one_mode_is_seen(gamma):
    """The largest mode, the smallest, and one in between."""
    cov = nidiff.gaussian_free_field((32, 32), gamma=gamma)
    again = nidiff.gaussian_free_field((32, 32), gamma=gamma)
    assert same_covariance(cov, again)
    for mode in ((0, 1), (16, 16), (4, 7)):
        spectrum = cov.eigenvalues.clone()
        spectrum[mode] *= 1.5
        spectrum[-mode[0], -mode[1]] = spectrum[mode]
        assert not same_covariance(cov, nidiff.Fourier((32, 32), spectrum))
    singular = [nidiff.gaussian_free_field((32, 32), gamma=gamma, zero_mode="zero") for _ in range(2)]
    assert same_covariance(*singular)
    assert not same_covariance(singular[0], cov)


# Bad input -------------------------------------------------------------------------------------------------------


def ready(**options):
    ours = scheduler(**options)
    ours.set_timesteps(10)
    return ours


X = torch.zeros(SHAPE)
PAIRS = nidiff.Dense(torch.cov(normal(50, 16).T), (4, 4))
HEAT = nidiff.schedules.heat((4, 4), 20, boundary="periodic")
DENSE = nidiff.fit_gaussian(
    normal(50, 1, 4, 4), basis=nidiff.Dense(torch.cov(normal(50, 16).T) + torch.eye(16, dtype=torch.float64), (4, 4))
)
BAD = {
    "schedule": (lambda: scheduler(schedule="ddpm_liner"), "schedule"),
    "prediction": (lambda: scheduler(prediction_type="eps"), "prediction_type"),
    "algorithm": (lambda: scheduler(algorithm="dpmsolver"), "algorithm"),
    "variance": (lambda: scheduler(variance_type="learned"), "variance_type"),
    "spacing": (lambda: scheduler(timestep_spacing="even"), "timestep_spacing"),
    "clip": (lambda: scheduler(clip_sample=True, clip_sample_range=0), "clip"),
    "spacing without a Gaussian": (lambda: scheduler(timestep_spacing="angle").set_timesteps(5), "timestep_spacing"),
    "heat without a Gaussian": (lambda: scheduler(schedule=HEAT).init_noise(SHAPE), "schedule"),
    "angles without a Gaussian": (lambda: scheduler(algorithm="angle", gaussian=None), "algorithm"),
    "gaussian of another basis": (lambda: scheduler(gaussian=DENSE), "gaussian"),
    "kappa without a Gaussian": (lambda: scheduler(FITTED, kappa=KAPPA), "kappa"),
    "unknown option": (lambda: NonIsotropicScheduler.from_config(scheduler().config, algoritm="ddim"), "config"),
    "a DDPM config": (lambda: NonIsotropicScheduler.from_config(diffusers.DDPMScheduler().config), "covariance"),
    "too many steps": (lambda: scheduler().set_timesteps(101), "num_inference_steps"),
    "neither": (lambda: scheduler().set_timesteps(), "num_inference_steps"),
    "rising timesteps": (lambda: scheduler().set_timesteps(timesteps=[3, 50]), "timesteps"),
    "another timestep": (lambda: ready().step(X, 3, X), "timestep"),
    "eta for a generator": (lambda: ready(algorithm="ddim").step(X, 50, X, 0.5), "generator"),
    "a shape without a Σ": (lambda: ready(covariance=PAIRS).step(X[..., :3], 50, X[..., :3]), "covariance"),
    "a signal for images": (lambda: ready().step(X[0, 0], 50, X[0, 0]), "sample"),
    "shape of the output": (lambda: ready().step(X[:1], 50, X), "net"),
    "eta of ddpm": (lambda: ready().step(X, 50, X, eta=0.5), "eta"),
    "generators": (lambda: ready().step(X, 50, X, [seeded()]), "generator"),
    "noise beyond": (lambda: scheduler().add_noise(X, X, torch.tensor([3, 100])), "label"),
    "shape of the noise": (lambda: scheduler().add_noise(X, X[:1], torch.tensor([1])), "eps"),
}


def test_bad_input_is_refused_by_the_name_of_its_argument():
    for act, argument in BAD.values():
        with refused(argument):
            act()
