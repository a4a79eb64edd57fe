"""Any diffusers scheduler, unchanged, for a network trained under Σ: it runs on y = Σ^-½ x, where the noise is white.

A scheduler is linear in the sample, in what the network says and in white noise, with scalar coefficients. So it
commutes with Σ^½, and its own white noise is right for y. Without noise (DDIM, DPM-Solver++, UniPC, DEIS, Heun, Euler)
it may as well run on x: only the initial sample has to be coloured and the network to predict coloured noise.
"""

from typing import Any

import torch
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor

from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import from_alphas_cumprod
from nidiff.diffusion.target import target_on_its_own
from nidiff.errors import InputError, one_of
from nidiff.interop.config import from_diffusers, is_flow
from nidiff.interop.flow import row_of_sigma
from nidiff.model.config import predictions

# What a network predicts on x, and the scheduler's word for it on y; "velocity" is of FlowMatchEulerDiscreteScheduler.
ON_Y = {word: word for word in ("epsilon", "sample", "v_prediction", "velocity")} | {"noise": "epsilon"}


class Whitened(torch.nn.Module):
    """``unet``, trained on x under Σ, as a network of y = Σ^-½ x for any diffusers scheduler.

    Start from ``torch.randn``, take the steps of the scheduler, and go back to pixels by ``.colour(y)``. Give the
    scheduler the prediction_type of the network ("epsilon" for a network of coloured "noise"). Whatever else this is
    asked for (config, dtype, …) is the U-Net's. A network of "velocity" is for FlowMatchEulerDiscreteScheduler, whose
    timesteps (its number of them times sigma) become rows of the schedule here, which the network was told in training.

    Args:
        clip: clip x̂0 to ±clip in pixels, which needs the noise levels of ``scheduler``. The scheduler's own clipping
            acts on y, where it is wrong, and must be off.
        scheduler: the diffusers scheduler that will be used, or a `nidiff.Schedule`. "velocity" needs one: the schedule
            of training, or FlowMatchEulerDiscreteScheduler with its shift (`nidiff.interop.flow_scheduler`).
    """

    def __init__(
        self,
        unet: torch.nn.Module,
        covariance: Covariance,
        *,
        prediction_type: str = "epsilon",
        clip: float | None = None,
        scheduler: Any = None,
    ) -> None:
        super().__init__()
        self.unet = unet
        self.covariance = as_covariance(covariance)
        self.covariance.require_invertible("a whitened network")
        self.prediction_type = one_of("prediction_type", prediction_type, ON_Y)
        on_y, config = ON_Y[prediction_type], getattr(scheduler, "config", {})
        clips = config.get("clip_sample") or config.get("thresholding")
        if clips or config.get("prediction_type", on_y) != on_y:
            remedy = f"give it prediction_type={on_y!r} and no clipping, which would act on y: pass `clip`"
            raise InputError("scheduler", None, "clips, or expects another prediction than that of the network", remedy)
        self.clip = clip
        # A scheduler of flow matching says this number times sigma.
        self._count = len(scheduler) if isinstance(scheduler, Schedule) else config.get("num_train_timesteps", 1000)
        needed = clip is not None or prediction_type == "velocity" or isinstance(scheduler, Schedule)
        self.schedule = _levels(scheduler) if needed else None
        if prediction_type == "velocity" and self.schedule is not None and self.schedule.keeps != "sum":
            problem = f"has the levels of {self.schedule!r}, not of flow matching"
            raise InputError("scheduler", None, problem, "use nidiff.schedules.flow")

    def forward(self, sample: Tensor, timestep: Any, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Σ^(p − ½) of what the network says at x = Σ^½ y: the same quantity in y; p is the power of its target."""
        x, target = self.colour(sample), target_on_its_own(predictions()[self.prediction_type])
        if self.prediction_type == "velocity" and self.schedule is not None:
            row = row_of_sigma(self.schedule, torch.as_tensor(timestep) / self._count)
            timestep = row.to(x.device, torch.promote_types(x.dtype, torch.float32))
        answer = self.unet(x, timestep, *args, **kwargs)
        if isinstance(answer, tuple):  # return_dict=False stood among the arguments without a name
            answer, return_dict = answer[0], False
        output = as_tensor(answer)
        if self.clip is not None and self.schedule is not None:
            level = self.schedule.level(torch.as_tensor(timestep).cpu().reshape(-1))
            work = torch.promote_types(x.dtype, torch.float32)
            x0 = target.decode(output.to(work), x.to(work), level, self.covariance).clamp(-self.clip, self.clip)
            output = target.invert(x0, x.to(work), level, self.covariance).to(output.dtype)
        power = target.power - 0.5
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


def _levels(scheduler: Any) -> Schedule:
    """The noise levels of a scheduler, which may be a `Schedule` itself."""
    if isinstance(scheduler, Schedule):
        if scheduler.event_shape:
            raise InputError("scheduler", scheduler, "differs from mode to mode", "use NonIsotropicScheduler")
        return scheduler
    if is_flow(getattr(scheduler, "config", {})):
        return from_diffusers(scheduler)
    if not hasattr(scheduler, "alphas_cumprod"):
        remedy = "pass one with alphas_cumprod, one of flow matching, or a nidiff.Schedule"
        raise InputError("scheduler", None, "has no noise levels, which `clip` and velocity need", remedy)
    return from_alphas_cumprod(scheduler.alphas_cumprod.double())
