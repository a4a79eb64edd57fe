"""Flow matching of diffusers: its networks see 1000 · sigma, ours the row of the schedule."""

import math
from typing import Any

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.denoiser import as_tensor
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import flow
from nidiff.errors import InputError
from nidiff.interop.config import from_diffusers


class FlowNetwork(torch.nn.Module):
    """A network that was trained with FlowMatchEulerDiscreteScheduler, as one of (x, row) for ``nidiff.Denoiser(net,
    nidiff.Process(net.schedule, covariance), target="velocity")``.

    Without ``covariance`` its noise is white, and so is the process': Σ = I. With Σ the network is taken as one of
    y = Σ^-½ x, trained on whitened data: it says Σ^-½ (noise − x0).
    """

    def __init__(self, unet: torch.nn.Module, scheduler: Any, covariance: Covariance | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.schedule = scheduler if isinstance(scheduler, Schedule) else from_diffusers(scheduler)
        self._shift = _time_shift("scheduler", self.schedule)
        self.covariance = None if covariance is None else as_covariance(covariance)

    def forward(self, x: Tensor, label: Tensor, **conditions: Any) -> Tensor:
        """The network's output at 1000 · sigma of the row ``label``, with ``conditions``."""
        # sigma = s t / (1 + (s − 1) t) of t = (row + 1) / L. Theirs ends at 1, of which our last row is a hair short.
        count, step = len(self.schedule), (label + 1).float()
        timestep = count * self._shift * step / (count + (self._shift - 1) * step)
        if self.covariance is None:
            return as_tensor(self.unet(x, timestep, **conditions))
        return self.covariance.sqrt(as_tensor(self.unet(self.covariance.inv_sqrt(x), timestep, **conditions)))


def flow_scheduler(schedule: Schedule) -> FlowMatchEulerDiscreteScheduler:
    """The diffusers scheduler with the levels of a `nidiff.schedules.flow`: drive `nidiff.interop.Whitened` by it."""
    return FlowMatchEulerDiscreteScheduler(len(schedule), _time_shift("schedule", schedule))


def _time_shift(argument: str, schedule: Schedule) -> float:
    """The s of `nidiff.schedules.flow`; another schedule is refused."""
    if schedule.keeps == "sum" and not schedule.event_shape and len(schedule) > 1:
        shift = (len(schedule) - 1) * math.exp(-schedule.logsnr[0].item() / 2)
        if torch.allclose(flow(len(schedule), shift).logsnr, schedule.logsnr, rtol=1e-9, atol=1e-9):
            return round(shift, 12)
    raise InputError(argument, schedule, "is not that of flow matching, t = (row + 1)/L", "use nidiff.schedules.flow")
