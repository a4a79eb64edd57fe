"""Any diffusers scheduler, unchanged, for a network trained under Σ: it runs on y = Σ^-½ x, where the noise is white.

A scheduler is linear in the sample, in what the network says and in white noise, with scalar coefficients. So it
commutes with Σ^½, and its own white noise is right for y. Without noise (DDIM, DPM-Solver++, UniPC, DEIS, Heun, Euler)
it may as well run on x: only the initial sample has to be coloured and the network to predict coloured noise.
"""

from typing import Any

import torch
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.target import TARGETS
from nidiff.errors import InputError, one_of
from nidiff.training.model import PREDICTIONS


class Whitened(torch.nn.Module):
    """What `whitened` returns: the network of y. Whatever else it is asked for (config, dtype, …) is the U-Net's."""

    def __init__(
        self,
        unet: torch.nn.Module,
        covariance: Covariance,
        prediction_type: str,
        clip: float | None,
        schedule: Schedule | None,
    ) -> None:
        super().__init__()
        self.unet = unet
        self.covariance = covariance
        self.target = TARGETS[PREDICTIONS[one_of("prediction_type", prediction_type, PREDICTIONS)]]
        self.clip = clip
        self.schedule = schedule

    def forward(self, sample: Tensor, timestep: Any, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Σ^(p − ½) of what the network says at x = Σ^½ y: the same quantity in y; p is the power of its target."""
        x = self.colour(sample)
        output = as_tensor(self.unet(x, timestep, *args, **kwargs))
        if self.clip is not None and self.schedule is not None:
            level = self.schedule.level(torch.as_tensor(timestep, dtype=torch.float64).cpu().reshape(-1))
            work = torch.promote_types(x.dtype, torch.float32)
            x0 = self.target.decode(output.to(work), x.to(work), level, self.covariance).clamp(-self.clip, self.clip)
            output = self.target.invert(x0, x.to(work), level, self.covariance).to(output.dtype)
        power = self.target.power - 0.5
        output = self.covariance.power(output, power) if power else output
        return UNet2DOutput(sample=output) if return_dict else (output,)

    def colour(self, y: Tensor) -> Tensor:
        """Back to pixels: x = Σ^½ y."""
        return self.covariance.sqrt(y)

    def whiten(self, x: Tensor) -> Tensor:
        """y = Σ^-½ x."""
        return self.covariance.inv_sqrt(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "unet":  # while it is being built
                raise
            return getattr(self.unet, name)


def whitened(
    unet: torch.nn.Module,
    covariance: Covariance,
    *,
    prediction_type: str = "epsilon",
    clip: float | None = None,
    scheduler: Any = None,
) -> Whitened:
    """``unet``, trained on x under Σ, as a network of y = Σ^-½ x for any diffusers scheduler.

    Start from ``torch.randn``, take the steps of the scheduler, and go back to pixels by ``.colour(y)``. Give the
    scheduler the prediction_type of the network ("epsilon" for a network of coloured "noise").

    Args:
        clip: clip x̂0 to ±clip in pixels, which needs the noise levels of ``scheduler``. The scheduler's own clipping
            acts on y, where it is wrong, and must be off.
        scheduler: the diffusers scheduler that will be used, or a `nidiff.Schedule`.
    """
    covariance._refuse_singular("a whitened network")
    if clip is not None and not clip > 0:
        raise InputError(f"clip={clip} must be positive, or None for no clipping.")
    if clip is not None and scheduler is None:
        raise InputError("clip needs the noise levels: pass scheduler=, the one that will be used.")
    config = getattr(scheduler, "config", {})
    for option in ("clip_sample", "thresholding"):
        if config.get(option):
            raise InputError(f"scheduler has {option}=True, which acts on y: turn it off and pass clip= here.")
    return Whitened(unet, covariance, prediction_type, clip, _schedule(scheduler))


def _schedule(scheduler: Any) -> Schedule | None:
    if scheduler is None or isinstance(scheduler, Schedule):
        return scheduler
    remaining = getattr(scheduler, "alphas_cumprod", None)
    if remaining is None:
        raise InputError(
            f"scheduler={type(scheduler).__name__} has no alphas_cumprod: pass the nidiff.Schedule instead."
        )
    return Schedule(torch.logit(remaining.double()), "variance")
