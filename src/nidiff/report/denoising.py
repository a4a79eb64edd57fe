"""How a trained network denoises one image at several noise levels."""

from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level, Schedule
from nidiff.randomness import generators_from_seeds, white_noise

VISIBLE = 6.0  # beyond this log-SNR an image looks clean, or like nothing but noise


class Denoised(NamedTuple):
    """One image [C, H, W] at one level."""

    level: Level
    noisy: Tensor  # x / √(signal² + sigma²)
    denoised: Tensor  # x̂0
    error: float  # root mean square of x̂0 − x0


@torch.inference_mode()
def denoise_levels(denoiser: Denoiser, x0: Tensor, num_levels: int = 6, seed: int = 0) -> list[Denoised]:
    """x = signal · x0 + sigma · Σ^½ eps and x̂0(x) of one image [C, H, W], from little noise to much, with one eps."""
    process, steps = denoiser.process, []
    eps = white_noise((1, *x0.shape), generators_from_seeds([seed]))
    for level in map(process.schedule.level, visible_rows(process.schedule, num_levels)):
        x = process.perturb(x0[None], level, eps)
        denoised = denoiser(x, level)[0]
        error = (denoised - x0).square().mean().sqrt().item()
        noisy = x / (level.signal**2 + level.sigma**2) ** 0.5
        steps.append(Denoised(level, noisy[0], denoised, error))
    return steps


def visible_rows(schedule: Schedule, count: int) -> list[int]:
    """Rows nearest to equal strides in log-SNR over what can be seen of the schedule; fewer where it has fewer."""
    logsnr = schedule.mean_logsnr
    high, low = logsnr[0].item(), logsnr[-1].item()
    if high > -VISIBLE and low < VISIBLE:
        high, low = min(high, VISIBLE), max(low, -VISIBLE)
    wanted = torch.linspace(high, low, count, dtype=torch.float64, device="cpu")
    nearest = (logsnr[:, None] - wanted).abs().argmin(0)
    return sorted(set(nearest.tolist()))
