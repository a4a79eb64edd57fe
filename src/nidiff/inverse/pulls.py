"""Methods as published that leave x̂0 as it is and move x after each step: DPS and ΠGDM."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.inverse.moments import isotropic_variance
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import derivative
from nidiff.inverse.systems import System


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
            remedy = "use method='gaussian' or 'mmps'"
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


@dataclass(frozen=True)
class PiGDM:
    """Pseudoinverse-guided diffusion (ΠGDM, Song et al. 2023, algorithm 1) as published: a step of the sampler with the
    model's own x̂0, and then, with V = r² Σ and r² = sigma²/(signal² + sigma²) (of data of mean variance 1),

        x ← x' + ``scale`` · signal · Σ Jᵀ r² Aᵀ (A V Aᵀ + R)⁻¹ (y − A x̂0)

    The paper has white noise; in whitened coordinates this is its step. (The method "gradient" has the size of the
    step by Tweedie's formula instead.) One pass back through the network.
    """

    scale: float = 1.0
    tolerance: float = 1e-3
    iterations: int = 500

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        return denoiser(x, level)

    def pull(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        x0, transpose = derivative(lambda x: denoiser(x, level), x)
        covariance, squared = denoiser.process.covariance, isotropic_variance(denoiser, level)
        system = System(observation, x0)
        variance = Modes(squared * covariance.values, covariance.basis)
        weights = system.solve(system.misfit, variance, self.tolerance, self.iterations).weights
        slope = covariance.matmul(transpose(system.near.transpose(weights).to(x0)))
        return x0, self.scale * squared * level.signal * slope
