"""Each target decodes to x0 exactly, for every Σ and both kinds of process."""

import pytest
import torch
from problems import COVARIANCES

import nidiff
from nidiff.diffusion.target import TARGETS, Target
from nidiff.testing.problems import Gaussian, normal, smooth_net

SCHEDULES = {"ddpm": nidiff.schedules.ddpm_linear(100), "smld": nidiff.schedules.smld_geometric(50, 20.0, 0.05)}
PLAIN = [name for name, target in TARGETS.items() if isinstance(target, Target)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())


@pytest.mark.parametrize("make", COVARIANCES.values(), ids=COVARIANCES.keys())
def test_decode_inverts_encode(make):
    cov = make()
    x0, eps = normal(3, 2, *cov.event_shape), normal(3, 2, *cov.event_shape, seed=1)
    for schedule in SCHEDULES.values():
        process, level = nidiff.Process(schedule, cov), schedule.level(torch.tensor([0, 20, 49]))
        x = process.perturb(x0, level, eps)
        for name in PLAIN:
            target = TARGETS[name]
            output = target.encode(x0, eps, level, cov)
            assert torch.allclose(target.decode(output, x, level, cov), x0, rtol=1e-8, atol=1e-8), name
            assert torch.allclose(target.invert(x0, x, level, cov), output, rtol=1e-6, atol=1e-6), name


def test_a_wrong_covariance_does_not_decode():
    """Negative control: the targets in which Σ stands need the right one; those without it do not care."""
    cov, other = nidiff.gaussian_free_field((4, 4)), nidiff.Identity((4, 4))
    level, x0, eps = SCHEDULES["ddpm"].level(50), normal(2, 4, 4), normal(2, 4, 4, seed=1)
    x = nidiff.Process(SCHEDULES["ddpm"], cov).perturb(x0, level, eps)
    for name in PLAIN:
        decoded = TARGETS[name].decode(TARGETS[name].encode(x0, eps, level, cov), x, level, other)
        assert torch.allclose(decoded, x0) == (name in ("noise", "x0", "v", "velocity")), name


@pytest.mark.parametrize("name", PLAIN)
@every_schedule
def test_every_target_gives_the_same_denoiser_score_and_eps(name, schedule):
    """A network that says the exact x̂0 in the terms of any target is one denoiser, whose score is ∇ log p (E10)."""
    cov = nidiff.gaussian_free_field((3, 4))
    problem, process = Gaussian(cov), nidiff.Process(schedule, cov)
    level = schedule.level(20)

    def net(x, label):
        return TARGETS[name].invert(problem.denoise(x, schedule.level(label[0].item())), x, level, cov)

    denoiser = nidiff.Denoiser(net, process, target=name)
    x = normal(3, 3, 4).requires_grad_()
    (score,) = torch.autograd.grad(problem.log_prob(x, level).sum(), x)
    x = x.detach()
    assert torch.allclose(denoiser(x, level), problem.denoise(x, level), rtol=1e-8, atol=1e-8)
    assert torch.allclose(denoiser.score(x, level), score, rtol=1e-7, atol=1e-7)
    assert torch.allclose(denoiser.eps(x, level), -level.sigma * cov.sqrt(score), rtol=1e-7, atol=1e-7)


def test_v_is_that_of_diffusers_for_white_noise():
    from diffusers import DDPMScheduler

    peer = DDPMScheduler(num_train_timesteps=100)
    cov, level = nidiff.Identity((4, 4)), nidiff.schedules.ddpm_linear(100).level(torch.tensor([3, 70]))
    x0, eps = normal(2, 1, 4, 4), normal(2, 1, 4, 4, seed=1)
    ours = TARGETS["v"].encode(x0, eps, level, cov)
    assert torch.allclose(ours, peer.get_velocity(x0, eps, torch.tensor([3, 70])), atol=1e-5)


def test_a_diffusers_unet_is_a_network_and_gets_the_label():
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (16,)}
    net = UNet2DModel(8, in_channels=1, out_channels=1, norm_num_groups=4, layers_per_block=1, **blocks).eval()
    process = nidiff.Process(nidiff.schedules.ddpm_linear(100), nidiff.gaussian_free_field((8, 8)))
    denoiser = nidiff.Denoiser(net, process)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        output = denoiser.output(x, process.schedule.level(40))
        assert torch.equal(output, net(x, 40).sample)
        assert not torch.equal(output, net(x, 41).sample)
        assert denoiser(x, process.schedule.level(torch.tensor([3, 40]))).shape == x.shape


def test_clipping_is_a_choice():
    process = nidiff.Process(nidiff.schedules.ddpm_linear(100), nidiff.Identity((4,)))
    net, level, x = smooth_net((4,)), process.schedule.level(99), 50 * normal(3, 4)
    assert nidiff.Denoiser(net, process)(x, level).abs().max() > 1
    assert nidiff.Denoiser(net, process, clip=1.0)(x, level).abs().max() == 1
