"""Flow matching of diffusers: its networks see 1000 · sigma, ours the row of the schedule; Flux has packed latents."""

import math
from collections.abc import Callable, Sequence
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
from nidiff.recipe import check_whole


class FlowNetwork(torch.nn.Module):
    """A network that was trained with FlowMatchEulerDiscreteScheduler, as one of (x, row) for ``nidiff.Denoiser(net,
    nidiff.Process(net.schedule, covariance), target="velocity")``.

    Without ``covariance`` its noise is white, and so is the process': Σ = I. With Σ the network is taken as one of
    y = Σ^-½ x, trained on whitened data: it says Σ^-½ (noise − x0).
    """

    def __init__(self, unet: Callable[..., Any], scheduler: Any, covariance: Covariance | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.schedule = scheduler if isinstance(scheduler, Schedule) else from_diffusers(scheduler)
        self._shift = time_shift("scheduler", self.schedule)
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
    return FlowMatchEulerDiscreteScheduler(len(schedule), time_shift("schedule", schedule))


def row_of_sigma(flow: Schedule, sigma: Tensor) -> Tensor:
    """The row of a flow schedule with this sigma; between two rows, and beyond the ends, as near as there is one."""
    sigma = sigma.detach().cpu().double().clamp(flow.sigma[0], flow.sigma[-1])
    row = torch.as_tensor(flow.level_at(2 * torch.log((1 - sigma) / sigma)).label)
    whole = row.round()
    return torch.where((row - whole).abs() < 1e-3, whole, row).clamp(0, len(flow) - 1)  # sigma comes in float32


def packed(latents: Tensor) -> Tensor:
    """Latents [B, C, H, W] as the tokens [B, H/2 · W/2, 4 C] of Flux, each of them a square of 2×2."""
    return torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).mT


def unpacked(tokens: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
    """The inverse of `packed`: [B, C, H, W] of the first of these grids (H, W) that has as many tokens."""
    for height, width in grids:
        if height % 2 == width % 2 == 0 and height * width == 4 * tokens.shape[1]:
            squares = tokens.mT.unflatten(2, (height // 2, width // 2))
            return torch.nn.functional.pixel_shuffle(squares, 2)
    problem = f"is {tokens.shape[1]} tokens of a shape that is not known"
    remedy = "draw latents by init_noise((B, C, H, W)) first, and start from nidiff.interop.packed of them"
    raise InputError("sample", None, problem, remedy)


def visited_rows(
    flow: FlowMatchEulerDiscreteScheduler, schedule: Schedule, count: Any, sigmas: Any, mu: float | None
) -> list[float]:
    """The rows of the sigmas that ``flow`` chooses: so many, or these before they are shifted."""
    if flow.config["use_dynamic_shifting"] and mu is None:
        remedy = "give it, as calculate_shift of the pipelines does, or use_dynamic_shifting=False in from_config"
        raise InputError("mu", None, "is missing, which use_dynamic_shifting needs", remedy)
    remedy = "give falling numbers from 1 to above 0"
    if sigmas is None:
        check_whole("num_inference_steps", count, 1, len(schedule))
    else:
        try:
            sigmas = [float(sigma) for sigma in sigmas]
        except (TypeError, ValueError) as error:
            raise InputError("sigmas", sigmas, "are not numbers", remedy) from error
        if not sigmas or count not in (None, len(sigmas)):
            problem = f"are {len(sigmas)} levels" + (f" for {count} steps" if sigmas else "")
            raise InputError("sigmas", None, problem, remedy + ", and leave out num_inference_steps")
    flow.set_timesteps(count, sigmas=sigmas, mu=mu)
    chosen = flow.sigmas[:-1].double()
    rows = row_of_sigma(schedule, chosen)  # with a shift below 1 the last one is below the least noisy level
    if not bool((rows.diff() < 0).all() and chosen[0] <= 1 + 1e-6 and chosen[-1] > 0):
        if sigmas is None:
            remedy = f"these are diffusers' choice, and the least level is {schedule.sigma[0]:.2g}; give other `sigmas`"
        raise InputError("sigmas", sigmas, "are not falling levels of the schedule", remedy)
    levels: list[float] = rows.tolist()
    return levels


def time_shift(argument: str, schedule: Schedule) -> float:
    """The s of `nidiff.schedules.flow`; another schedule is refused."""
    if schedule.keeps == "sum" and not schedule.event_shape and len(schedule) > 1:
        shift = (len(schedule) - 1) * math.exp(-schedule.logsnr[0].item() / 2)
        if torch.allclose(flow(len(schedule), shift).logsnr, schedule.logsnr, rtol=1e-9, atol=1e-9):
            return round(shift, 12)
    raise InputError(argument, schedule, "is not that of flow matching, t = (row + 1)/L", "use nidiff.schedules.flow")
