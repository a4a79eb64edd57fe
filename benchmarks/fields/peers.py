"""A solver of diffusers, for a network trained with eps."""

from collections.abc import Sequence

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

import nidiff
from nidiff.interop import Whitened
from nidiff.randomness import generators_from_seeds, white_noise


@torch.no_grad()
def unipc(denoiser: nidiff.Denoiser, shape: Sequence[int], num_steps: int, seeds: Sequence[int]) -> Tensor:
    """Samples by diffusers' UniPC of order 2 on trailing rows, with the denoiser's clipping."""
    schedule = denoiser.process.schedule
    kept = torch.cat([torch.ones(1, dtype=torch.float64), torch.sigmoid(schedule.logsnr)])  # signal²
    scheduler = UniPCMultistepScheduler(
        num_train_timesteps=len(schedule),
        trained_betas=(1 - kept[1:] / kept[:-1]).numpy(),
        prediction_type="epsilon",
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(num_steps)
    net = Whitened(denoiser.net, denoiser.process.covariance, clip=denoiser.clip, scheduler=schedule)
    y = white_noise(shape, generators_from_seeds(seeds))
    for time in scheduler.timesteps:
        y = scheduler.step(net(y, time.expand(len(y))).sample, time, y).prev_sample
    return net.colour(y)
