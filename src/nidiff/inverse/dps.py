"""Diffusion posterior sampling as published, which leaves x̂0 as it is and moves x after each step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import derivative


@dataclass(frozen=True)
class DPS:
    """Diffusion posterior sampling as published (Chung et al. 2023, algorithm 1 with ζ_i = ζ/‖y − A x̂0‖): a step of the
    sampler with the model's own x̂0, and then

        x ← x' − ζ/‖y − A x̂0‖ · Σ ∇_x ‖y − A x̂0‖²

    with ζ the ``scale`` and the norms of each image. The paper has white noise; in whitened coordinates u = Σ^-½ x this
    is its step, − ζ/‖…‖ ∇_u ‖…‖², and with Σ = I its algorithm. (The authors' program differentiates the norm and not
    its square: its scale is 2 ζ.) The size of the noise of y does not enter: how far the samples are pulled depends on
    ζ and on the number of steps. One pass back through the network.
    """

    scale: float = 1.0

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if not isinstance(observation.noise, float):
            remedy = "use method='gaussian', 'mmps' or 'pigdm'"
            raise InputError("method", "dps", "is for an observation with noise of one size", remedy)

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        return denoiser(x, level)

    def pull(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        x0, transpose = derivative(lambda x: denoiser(x, level), x)
        near = observation.operator.linearise(x0)
        misfit = (observation.rows(near.value) - near.value).flatten(1)
        size = misfit.norm(dim=1, keepdim=True).clamp(min=torch.finfo(misfit.dtype).tiny)
        unit = (misfit / size).reshape(near.value.shape)
        return x0, 2 * self.scale * denoiser.process.covariance.matmul(transpose(near.transpose(unit).to(x0)))
