"""Flow matching with a Gaussian base of any Σ: Euler and Heun in t, loss, likelihood, and diffusers' flow models."""

import math
from itertools import pairwise

import diffusers
import pytest
import torch
from problems import refused
from torch import Tensor

import nidiff
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.schedule import Schedule
from nidiff.interop import FlowNetwork, Whitened, flow_scheduler
from nidiff.interop.config import from_diffusers
from nidiff.testing.problems import Gaussian, normal, slope, smooth_net

COV = nidiff.gaussian_free_field((2, 3), gamma=1.5)
IMAGES = nidiff.gaussian_free_field((8, 8))
SHAPE = (2, 1, 8, 8)


def test_a_flow_is_a_straight_line_and_its_shift_is_a_shift_of_log_snr():
    schedule = nidiff.schedules.flow(100)
    time = torch.arange(1, 101, dtype=torch.float64) / 100
    assert torch.allclose(schedule.sigma, time, atol=2e-6)
    assert torch.allclose(schedule.signal, 1 - time, atol=2e-6)
    shifted = nidiff.schedules.flow(100, time_shift=3.0)
    assert torch.allclose(shifted.sigma, 3 * time / (1 + 2 * time), atol=2e-6)
    assert torch.allclose(shifted.logsnr, schedule.shifted(-2 * math.log(3.0)).logsnr, rtol=1e-12)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_and_heun_are_those_in_t(shift):
    """x' = x + (t' − t) v, and with the mean of the two v: written out; Heun in x̂0 is another rule."""
    schedule, net = nidiff.schedules.flow(40, shift), smooth_net((2, 3))
    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), "velocity")
    rows, start = [39, 30, 18, 9, 3], normal(2, 2, 3)

    def walk(heun: bool) -> Tensor:
        x = start
        for row, after in pairwise(rows):
            t, then = (schedule.sigma[each].item() for each in (row, after))
            v = net(x, torch.tensor([row, row]))
            ahead = net(x + (then - t) * v, torch.tensor([after, after])) if heun else v
            x = x + (then - t) * (v + ahead) / 2
        return x

    given = {"spacing": rows, "start": start, "denoise": False, "dtype": torch.float64}
    for name in ("euler", "ddim"):
        assert torch.allclose(nidiff.sample(denoiser, (2, 2, 3), sampler=name, **given), walk(heun=False), atol=1e-12)
    in_t = nidiff.sample(denoiser, (2, 2, 3), sampler="heun:average=velocity", **given)
    assert torch.allclose(in_t, walk(heun=True), atol=1e-12)
    assert not torch.allclose(nidiff.sample(denoiser, (2, 2, 3), sampler="heun", **given), in_t, atol=1e-4)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun:average=velocity", 2), ("dpmpp_2m", 2)])
def test_order_of_convergence(name, order):
    """Non-commuting Gaussian data, t from 0.98 to 0.1 on a finer and finer grid, against the exact flow."""
    problem, steps, errors = Gaussian(COV), [20, 40, 80], []
    fine = nidiff.Schedule(2 * ((1 - (t := torch.linspace(0.1, 0.98, 321).double())) / t).log(), "sum")
    start = normal(4, 2, 3)
    exact = problem.flow(start, fine.level(320), fine.level(0))
    for count in steps:
        x = nidiff.sample(
            problem.denoiser(nidiff.Process(fine, COV)), (4, 2, 3), sampler=name, start=start,
            spacing=range(320, -1, -320 // count), denoise=False, dtype=torch.float64,
        )  # fmt: skip
        errors.append((x - exact).abs().max().item())
    assert slope(steps, errors) == pytest.approx(order, abs=0.25)


def test_the_loss_is_that_of_flow_matching():
    """E‖v_θ(x_t, t) − (Σ^½ eps − x0)‖² with x_t = (1 − t) x0 + t Σ^½ eps."""
    schedule, net = nidiff.schedules.flow(50), smooth_net((2, 3))
    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), "velocity")
    x0, eps, rows = normal(4, 2, 3), normal(4, 2, 3, seed=1), torch.tensor([0, 10, 30, 49])
    t = schedule.sigma[rows].reshape(-1, 1, 1)
    noise = COV.sqrt(eps)
    expected = (net((1 - t) * x0 + t * noise, rows) - (noise - x0)).square().flatten(1).mean(1)
    given = {"level": schedule.level(rows), "eps": eps}
    assert torch.allclose(nidiff.denoising_loss(denoiser, x0, weighting="target", **given), expected, rtol=1e-9)
    assert not torch.allclose(nidiff.denoising_loss(denoiser, x0, weighting="eps", **given), expected, rtol=0.1)


def test_the_density_of_a_gaussian_is_exact():
    problem, schedule = Gaussian(COV), nidiff.schedules.flow(200)
    x = (problem.mean + normal(3, 6)).reshape(3, 2, 3)
    denoiser = problem.denoiser(nidiff.Process(schedule, COV))
    found = nidiff.log_likelihood(denoiser, x, trace="exact", rtol=1e-7, atol=1e-7)
    assert (found - problem.log_prob(x, schedule.level(0))).abs().max() < 1e-3
    wrong = nidiff.log_likelihood(
        problem.denoiser(nidiff.Process(Schedule(schedule.logsnr), COV)), x, trace="exact", rtol=1e-5, atol=1e-5
    )
    assert (wrong - found).abs().max() > 1e-3  # negative control: the other rule, of the same log-SNR


# diffusers -------------------------------------------------------------------------------------------------------


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8,), norm_num_groups=4,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    ).eval()  # fmt: skip


@torch.no_grad()
def driven(scheduler, network, start: Tensor, rows: list[int]) -> Tensor:
    """The loop of a diffusers pipeline, at the levels of these rows."""
    count = scheduler.config.num_train_timesteps
    scheduler.set_timesteps(sigmas=[(row + 1) / count for row in rows])  # shifted inside
    y = start
    for t in scheduler.timesteps:
        y = scheduler.step(as_tensor(network(y, t)), t, y).prev_sample
    return y


ROWS = [999, 900, 750, 500, 250, 100, 20]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flow_network_of_ours_is_driven_by_diffusers_in_whitened_coordinates(shift):
    """Trained under Σ and told rows: FlowMatchEulerDiscreteScheduler on y = Σ^-½ x gives the images of `euler`."""
    unet, schedule = tiny(), nidiff.schedules.flow(1000, time_shift=shift)
    white = normal(*SHAPE).float()
    scheduler = flow_scheduler(schedule)
    assert scheduler.config.shift == pytest.approx(shift, rel=1e-9)
    network = Whitened(unet, IMAGES, prediction_type="velocity", scheduler=scheduler)
    theirs = network.colour(driven(scheduler, network, white, ROWS))
    denoiser = nidiff.Denoiser(unet, nidiff.Process(schedule, IMAGES), "velocity")
    given = {"sampler": "euler", "spacing": ROWS, "start": IMAGES.sqrt(white)}
    ours = nidiff.sample(denoiser, SHAPE, **given)
    assert (theirs - ours).abs().max() < 1e-5 * ours.abs().max()
    # Negative control: with their timestep taken for a row, which is off by one (and by the shift).
    heard = Whitened(lambda x, row: unet(x, row + 1), IMAGES, prediction_type="velocity", scheduler=scheduler)
    wrong = heard.colour(driven(scheduler, heard, white, ROWS))
    assert (wrong - ours).abs().max() > 10 * (theirs - ours).abs().max()
    by_schedule = Whitened(unet, IMAGES, prediction_type="velocity", scheduler=schedule)
    assert torch.allclose(by_schedule.colour(driven(scheduler, by_schedule, white, ROWS)), theirs)


def test_a_schedule_of_any_length_says_which_rows_the_network_is_told():
    schedule, told = nidiff.schedules.flow(100), []

    def net(x: Tensor, row: Tensor) -> Tensor:
        told.append(float(row))
        return x

    network = Whitened(net, IMAGES, prediction_type="velocity", scheduler=schedule)
    driven(flow_scheduler(schedule), network, normal(*SHAPE).float(), [99, 60, 20, 3])
    assert told == [99, 60, 20, 3]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flow_model_of_diffusers_is_a_denoiser(shift):
    """White noise: Σ = I, the same trajectory; and a model of y = Σ^-½ x under Σ."""
    unet, white = tiny(), normal(*SHAPE).float()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs = driven(scheduler, unet, white, ROWS)
    net = FlowNetwork(unet, scheduler)
    denoiser = nidiff.Denoiser(net, nidiff.Process(net.schedule, nidiff.Identity((8, 8))), "velocity")
    ours = nidiff.sample(denoiser, SHAPE, sampler="euler", spacing=ROWS, start=white)
    assert (theirs - ours).abs().max() < 1e-5 * theirs.abs().max()
    coloured = FlowNetwork(unet, scheduler, IMAGES)
    denoiser = nidiff.Denoiser(coloured, nidiff.Process(net.schedule, IMAGES), "velocity")
    x = nidiff.sample(denoiser, SHAPE, sampler="euler", spacing=ROWS, start=IMAGES.sqrt(white))
    assert (IMAGES.sqrt(theirs) - x).abs().max() < 1e-3 * x.abs().max()
    told = nidiff.Denoiser(unet, nidiff.Process(net.schedule, nidiff.Identity((8, 8))), "velocity")
    wrong = nidiff.sample(told, SHAPE, sampler="euler", spacing=ROWS, start=white)
    assert (theirs - wrong).abs().max() > 10 * (theirs - ours).abs().max()  # negative control: rows for timesteps


def test_heun_in_t_is_that_of_diffusers():
    unet, white = tiny(), normal(*SHAPE).float()
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(6)
    y = white
    with torch.no_grad():
        for t in scheduler.timesteps:
            y = scheduler.step(unet(y, t).sample, t, y).prev_sample
    sigma = scheduler.sigmas[:-1].unique().double()  # rising; each but the last stands there twice
    t = sigma.clamp(max=1 - 1e-6)
    process = nidiff.Process(Schedule(2 * ((1 - t) / t).log(), "sum"), nidiff.Identity((8, 8)))
    denoiser = nidiff.Denoiser(lambda x, row: unet(x, 1000 * sigma[row].float()).sample, process, "velocity")
    ours = nidiff.sample(denoiser, SHAPE, sampler="heun:average=velocity", spacing=range(5, -1, -1), start=white)
    assert (ours - y).abs().max() < 1e-4 * y.abs().max()


FLOW, LINEAR = diffusers.FlowMatchEulerDiscreteScheduler, nidiff.schedules.ddpm_linear(10)


def test_the_schedule_of_a_flow_scheduler_is_read():
    for scheduler in (FLOW(), FLOW(500, shift=1.7)):
        for given in (scheduler, scheduler.config, dict(scheduler.config) | {"_class_name": "FlowMatchEulerDiscrete"}):
            assert torch.allclose(from_diffusers(given).sigma.flip(0).float(), scheduler.sigmas, atol=2e-6)


def heun_on(schedule: str, average: str) -> None:
    denoiser = nidiff.Denoiser(lambda x, label: x, nidiff.Process(schedule, COV), "velocity")
    nidiff.sample(denoiser, (1, 2, 3), sampler=f"heun:average={average}")


BAD = [
    ("use_dynamic_shifting", lambda: from_diffusers(FLOW(use_dynamic_shifting=True))),
    ("use_karras_sigmas", lambda: from_diffusers(FLOW(use_karras_sigmas=True))),
    ("shift_terminal", lambda: from_diffusers(FLOW(shift_terminal=0.1))),
    ("scheduler", lambda: Whitened(tiny(), IMAGES, prediction_type="velocity")),  # of which levels?
    ("scheduler", lambda: Whitened(tiny(), IMAGES, prediction_type="velocity", scheduler=LINEAR)),
    ("schedule", lambda: flow_scheduler(LINEAR)),
    ("scheduler", lambda: FlowNetwork(tiny(), Schedule([3.0, 0.0, -1.0], "sum"))),
    ("scheduler", lambda: FlowNetwork(tiny(), diffusers.DDPMScheduler())),
    ("average", lambda: heun_on("ddpm_linear:beta_max=0.01", "velocity")),
    ("average", lambda: heun_on("flow", "v")),
]


def test_bad_input_is_named():
    for argument, call in BAD:
        with refused(argument):
            call()
