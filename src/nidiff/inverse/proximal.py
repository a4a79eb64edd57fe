"""Methods that move x̂0 itself to y, without a gradient through the network and without a model of the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.inverse.moments import kalman
from nidiff.inverse.observation import Observation


@dataclass(frozen=True)
class DiffPIR:
    """DiffPIR (Zhu et al. 2023): the proximal point argmin ‖y − A x0‖²_R + ``weight`` signal²/sigma² ‖x0 − x̂0‖²_Σ.

    This is Kalman's update with V = sigma²/(``weight`` signal²) Σ; the paper has white noise, and in whitened
    coordinates this is its step. With the sampler "diffpir:zeta=0.3" it is its algorithm.
    """

    weight: float = 7.0
    tolerance: float = 1e-3
    iterations: int = 500

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if self.weight == 0:
            raise InputError("weight", self.weight, "leaves nothing of x̂0", "give a number above 0, such as 7")

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        variance = level.sigma**2 / level.signal**2 * denoiser.process.covariance / self.weight
        return kalman(observation, denoiser(x, level), level, variance, None, self.tolerance, self.iterations)


@dataclass(frozen=True)
class Replacement:
    """x̂0 with the observed entries of a mask replaced by y (the samplers then add coloured noise to it). The other
    entries depend on y only through the next x: cheap, and not the posterior. With the sampler "repaint", which mixes
    the two, it is RePaint (Lugmayr et al. 2022).
    """

    def check(self, denoiser: Denoiser, observation: Observation) -> None:
        if not observation.operator.is_mask or not isinstance(observation.noise, float) or observation.noise:
            remedy = "use method='gaussian' or 'mmps'"
            raise InputError("method", "replacement", "is for a mask without noise", remedy)

    def __call__(self, denoiser: Denoiser, observation: Observation, x: Tensor, level: Level) -> Tensor:
        x0 = denoiser(x, level)
        observed = observation.operator(torch.ones_like(x0)) > 0
        return torch.where(observed, observation.rows(x0), x0)
