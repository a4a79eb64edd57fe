"""Any diffusers scheduler on y = Σ^-½ x; and those that add no noise on x itself, from a coloured start."""

import pickle

import diffusers
import pytest
import torch
from problems import refused
from torch import Tensor

import nidiff
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.target import TARGETS
from nidiff.interop import NonIsotropicScheduler, Whitened
from nidiff.interop.whitened import ON_Y
from nidiff.model.config import predictions
from nidiff.model.network import unet2d
from nidiff.testing.problems import Gaussian, normal, smooth_net

COV = nidiff.gaussian_free_field((4, 4))
SHAPE = (2, 1, 4, 4)
DETERMINISTIC = {
    "DDIM": lambda **o: diffusers.DDIMScheduler(clip_sample=False, **o),
    "DPM++": lambda **o: diffusers.DPMSolverMultistepScheduler(**o),
    "UniPC": lambda **o: diffusers.UniPCMultistepScheduler(**o),
    "DEIS": lambda **o: diffusers.DEISMultistepScheduler(**o),
    "Heun": lambda **o: diffusers.HeunDiscreteScheduler(**o),
    "Euler": lambda **o: diffusers.EulerDiscreteScheduler(**o),
}
STOCHASTIC = {
    "DDPM": lambda **o: diffusers.DDPMScheduler(clip_sample=False, **o),
    "Euler ancestral": lambda **o: diffusers.EulerAncestralDiscreteScheduler(**o),
    "SDE-DPM++": lambda **o: diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", **o),
}


class Smooth(torch.nn.Module):
    """A nonlinear network of (x, timestep) as diffusers calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = smooth_net((4, 4))

    def forward(self, x: Tensor, timestep: Tensor, return_dict: bool = True) -> Tensor:
        label = torch.as_tensor(timestep, dtype=torch.float64).reshape(-1).expand(len(x))
        return self.net(x.double(), label).to(x.dtype)


def run(scheduler, net, start, steps=20, generator=None) -> Tensor:
    """The loop of a diffusers pipeline from N(0, I)-like ``start``."""
    scheduler.set_timesteps(steps)
    x = start * scheduler.init_noise_sigma
    options = {} if generator is None else {"generator": generator}
    for t in scheduler.timesteps:
        x = scheduler.step(as_tensor(net(scheduler.scale_model_input(x, t), t)), t, x, **options).prev_sample
    return x


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# The finding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_without_noise_only_the_start_has_to_be_coloured(name):
    """Σ^½ y of the scheduler run on y is x of the scheduler run on x from a coloured start."""
    net, make, white = Smooth(), DETERMINISTIC[name], normal(*SHAPE)
    network = Whitened(net, COV)
    coloured = network.colour(run(make(), network, white))
    x, white_start = (run(make(), lambda x, t: COV.sqrt(net(x, t)), start) for start in (COV.sqrt(white), white))
    assert (coloured - x).abs().max() <= 1e-5 * x.abs().max()
    assert (white_start - x).abs().max() > 0.1 * x.abs().max()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_on_y_the_noise_of_a_scheduler_leads_to_the_law_of_the_data(name):
    """Gaussian data whose covariance does not commute with Σ; the same scheduler on x ends elsewhere."""
    cov = nidiff.Dense(torch.tensor([[1.7, 0.65], [0.65, 0.3]]))
    problem = Gaussian(cov, mean_scale=0.0)
    schedule = nidiff.schedules.ddpm_linear(1000)

    class Exact(torch.nn.Module):
        def forward(self, x: Tensor, timestep: Tensor, **_: object) -> Tensor:
            level = schedule.level(float(timestep))
            x0 = problem.denoise(x.double(), level)
            return cov.inv_sqrt((x.double() - level.signal * x0) / level.sigma).to(x.dtype)

    def error(x: Tensor) -> float:
        return ((x.T.double().cov() - problem.matrix).norm() / problem.matrix.norm()).item()

    white = torch.randn(5000, 2, generator=seeded(), dtype=torch.float64)
    make, exact = STOCHASTIC[name], Exact()
    network = Whitened(exact, cov)
    right = network.colour(run(make(), network, white, 150, seeded(1)))
    wrong = run(make(), lambda x, t: cov.sqrt(exact(x, t)), cov.sqrt(white), 150, seeded(1))
    assert error(right) < 0.1
    assert error(wrong) > 1


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_ddpm_on_y_is_our_scheduler_on_x_path_by_path(prediction):
    peer = diffusers.DDPMScheduler(clip_sample=False, prediction_type=prediction, timestep_spacing="trailing")
    ours = NonIsotropicScheduler.from_config(peer.config, covariance=COV)
    peer.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    for each in (peer, ours):
        each.set_timesteps(20)
    net = Smooth()
    network = Whitened(net, COV, prediction_type=prediction)
    y = normal(*SHAPE)
    x = network.colour(y)
    for i, t in enumerate(ours.timesteps):
        z = torch.randn(SHAPE, generator=seeded(i), dtype=torch.float64)
        y = peer.step(network(y, t).sample, t, y, generator=seeded(i)).prev_sample
        x = ours.step(net(x, t), t, x, variance_noise=z).prev_sample
        assert (network.colour(y) - x).abs().max() <= 1e-8 * x.abs().max()


# What it predicts, and clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ON_Y)
def test_every_prediction_becomes_its_own_kind_in_y(prediction):
    """The encoder of the target, for white noise and y0 = Σ^-½ x0, says what is right."""
    target = TARGETS[predictions()[prediction]]
    schedule = nidiff.schedules.flow(1000) if prediction == "velocity" else nidiff.schedules.ddpm_linear(1000)
    level = schedule.level(400)
    timestep = 401 if prediction == "velocity" else 400  # 1000 · sigma, or the row
    x0, eps = normal(*SHAPE), normal(*SHAPE, seed=1)

    class Oracle(torch.nn.Module):
        def forward(self, x: Tensor, timestep: int) -> Tensor:
            assert float(timestep) == 400
            return target.encode(x0, eps, level, COV)

    network = Whitened(Oracle(), COV, prediction_type=prediction, clip=10.0, scheduler=schedule)
    y0 = network.whiten(x0)
    y = level.signal * y0 + level.sigma * eps
    expected = target.encode(y0, eps, level, nidiff.Identity((4, 4)))
    assert torch.allclose(network(y, timestep).sample, expected, atol=1e-8)
    assert torch.equal(network(y, timestep, return_dict=False)[0], network(y, timestep).sample)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_clipping_is_done_in_pixels(prediction):
    peer = diffusers.DDIMScheduler(clip_sample=False, prediction_type=prediction)
    network = Whitened(Smooth(), COV, prediction_type=prediction, clip=0.5, scheduler=peer)
    peer.set_timesteps(10)
    y = normal(*SHAPE)
    clean = network.colour(peer.step(network(y, 700).sample, 700, y).pred_original_sample)
    assert clean.abs().max() <= 0.5 + 1e-4
    free = Whitened(Smooth(), COV, prediction_type=prediction)
    assert network.colour(peer.step(free(y, 700).sample, 700, y).pred_original_sample).abs().max() > 0.6


# At home in diffusers --------------------------------------------------------------------------------------------


def test_it_is_used_called_and_pickled_as_the_unet_it_wraps():
    net = unet2d((1, 8, 8), widths=(8,), layers=1, attention=()).eval()
    network = Whitened(net, nidiff.gaussian_free_field((8, 8)), clip=1.0, scheduler=nidiff.schedules.vp())
    assert network.config.sample_size == (8, 8)
    assert (network.dtype, network.device) == (torch.float32, net.device)
    assert not network.eval().unet.training
    pipeline = diffusers.DDPMPipeline(network, diffusers.DDPMScheduler(clip_sample=False))
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)
    y = torch.randn(2, 1, 8, 8, generator=seeded())
    with torch.no_grad():
        result = network(y, 3).sample
        for pair in (network(y, 3, return_dict=False), network(y, 3, None, False)):  # class_labels, return_dict
            assert isinstance(pair, tuple)
            assert torch.equal(pair[0], result)
        assert torch.equal(pickle.loads(pickle.dumps(network))(y, 3).sample, result)
    assert network.to(torch.bfloat16)(y.bfloat16(), 3).sample.dtype == torch.bfloat16
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        network.nothing_of_the_kind  # noqa: B018


def test_without_clipping_no_noise_levels_are_asked_for():
    for scheduler in (diffusers.EDMEulerScheduler(), PURE):
        prediction = scheduler.config.prediction_type
        assert Whitened(Smooth(), COV, prediction_type=prediction, scheduler=scheduler).schedule is None
    assert Whitened(Smooth(), COV, prediction_type="noise", scheduler=levels("epsilon")).prediction_type == "noise"


PURE = diffusers.DDIMScheduler(rescale_betas_zero_snr=True, clip_sample=False, prediction_type="v_prediction")


def levels(prediction):
    return diffusers.DDIMScheduler(clip_sample=False, prediction_type=prediction)


BAD = {
    "singular Σ": ({"covariance": nidiff.gaussian_free_field((4, 4), zero_mode="zero")}, None),
    "clip without levels": ({"clip": 1.0}, "scheduler"),
    "clip in y": ({"clip": 1.0, "scheduler": diffusers.DDPMScheduler()}, "scheduler"),
    "prediction": ({"prediction_type": "eps"}, "prediction_type"),
    "the scheduler's prediction": ({"scheduler": levels("v_prediction")}, "scheduler"),
    "coloured noise in y": ({"prediction_type": "noise", "scheduler": levels("sample")}, "scheduler"),
    "a level of pure noise": ({"clip": 1.0, "prediction_type": "v_prediction", "scheduler": PURE}, "alphas_cumprod"),
}


def test_bad_input_is_refused():
    for options, argument in BAD.values():
        with refused(argument, "covariance"):
            Whitened(Smooth(), **{"covariance": COV, **options})
