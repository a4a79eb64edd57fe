"""Problems with a known answer: data whose exact denoiser, flow and density are closed forms, and networks to try."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Coefficient, as_modes
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Level, Schedule
from nidiff.randomness import white_noise
from nidiff.sampling.sampler import sample
from nidiff.sampling.step import Sampler, Step, Visit

AnySampler = str | Sampler | Step


def random_matrix(size: int, seed: int = 0) -> Tensor:
    """A symmetric positive-definite matrix that commutes with nothing in particular."""
    factor = normal(size, size, seed=seed)
    return factor @ factor.T / size + 0.3 * torch.eye(size, dtype=torch.float64, device="cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """N(0, I) in float64, the same for the same seed."""
    return white_noise(shape, torch.Generator("cpu").manual_seed(seed), dtype=torch.float64)


def as_matrix(coefficient: Coefficient, size: int) -> Tensor:
    """What a number, or one number per mode, does to an event of ``size`` entries, as a matrix."""
    unit = torch.eye(size, dtype=torch.float64, device="cpu")
    modes = as_modes(coefficient)
    return (modes @ unit.reshape(size, *modes.event_shape or (size,))).reshape(size, size)


class Gaussian:
    """x0 ~ N(mean, matrix), ``matrix`` not commuting with Σ: denoiser, flow and density are exact."""

    def __init__(self, covariance: Covariance, seed: int = 1, mean_scale: float = 0.5) -> None:
        self.covariance = covariance
        self.shape = covariance.event_shape
        self.noise_matrix = covariance.dense()
        self.matrix = random_matrix(covariance.size, seed)
        self.mean = mean_scale * normal(covariance.size, seed=seed + 1)
        assert (self.matrix @ self.noise_matrix - self.noise_matrix @ self.matrix).abs().max() > 1e-2

    def marginal(self, level: Level) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x at a level."""
        signal, sigma = (as_matrix(modes, self.covariance.size) for modes in (level.signal, level.sigma))
        return signal @ self.mean, signal @ self.matrix @ signal.T + sigma @ self.noise_matrix @ sigma.T

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        """E[x0 | x] = m + signal · C (signal² C + sigma² Σ)⁻¹ (x − signal · m), all images at one level; where signal
        is one number per mode, C · signal, both being matrices."""
        mean, covariance = self.marginal(level)
        gain = self.matrix @ as_matrix(level.signal, self.covariance.size) @ torch.linalg.inv(covariance)
        flat = x.reshape(len(x), -1)
        return (self.mean + (flat - mean) @ gain.T).reshape(x.shape)

    def flow(self, x: Tensor, here: Level, there: Level) -> Tensor:
        """The probability-flow ODE from ``here`` to ``there``: a linear map in whitened coordinates."""
        root = torch.linalg.cholesky(self.noise_matrix)
        whiten = torch.linalg.inv(root)
        c, modes = torch.linalg.eigh(whiten @ self.matrix @ whiten.T)
        (signal, sigma), (signal_there, sigma_there) = (
            (float(level.signal), float(level.sigma)) for level in (here, there)
        )
        scale = ((signal_there**2 * c + sigma_there**2) / (signal**2 * c + sigma**2)).sqrt()
        flow = root @ (modes * scale) @ modes.T @ whiten
        flat = x.reshape(len(x), -1) - signal * self.mean
        return (signal_there * self.mean + flat @ flow.T).reshape(x.shape)

    def log_prob(self, x: Tensor, level: Level) -> Tensor:
        mean, covariance = self.marginal(level)
        law = torch.distributions.MultivariateNormal(mean, covariance, validate_args=False)
        return law.log_prob(x.reshape(len(x), -1))

    def denoiser(self, process: Process, **options: Any) -> Denoiser:
        """`denoise` as a network that predicts x0 and is told a label, the same for all images."""

        def net(x: Tensor, label: Tensor) -> Tensor:
            return self.denoise(x, process.schedule.level(label[0].item()))

        return Denoiser(net, process, target="x0", **options)


def smooth_net(event_shape: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """An arbitrary smooth nonlinear float64 network of (x, label)."""
    size = math.prod(event_shape)
    first, second = normal(size, size) / size**0.5, normal(size, size, seed=1) / size**0.5

    def net(x: Tensor, label: Tensor) -> Tensor:
        hidden = torch.tanh(x.flatten(1) @ first + 0.01 * label.to(x.dtype).reshape(-1, 1))
        return (hidden @ second).reshape(x.shape)

    return net


def uniform_in_logsnr(num_levels: int, keeps: str, low: float = -14.0, high: float = 7.0) -> Schedule:
    """Levels at equal strides in log-SNR."""
    return Schedule(torch.linspace(high, low, num_levels, dtype=torch.float64), keeps)


class Impulses(Process):
    """A process whose noise, draw by draw, is the columns of ``root``, one per image of the batch.

    Every step is affine in x and in its noise, so that the images are the responses to one unit of noise each, and
    their outer products add up to the exact covariance of the sampler's output: no Monte Carlo.
    """

    def __init__(self, schedule: Schedule, covariance: Covariance, root: Tensor) -> None:
        super().__init__(schedule, covariance)
        self.root, self.draws = root, 0

    def noise(self, shape: Sequence[int], *args: object, **kwargs: object) -> Tensor:
        noise, count = torch.zeros(shape[0], self.covariance.size, dtype=torch.float64), self.root.shape[1]
        noise[self.draws * count :][:count] = self.root.T
        self.draws += 1
        return noise.reshape(tuple(shape))


def output_law(
    denoiser: Denoiser,
    sampler: AnySampler,
    options: dict[str, Any] | None = None,
    *,
    white: bool = False,
    denoise: bool = True,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of what a sampler makes of noise, exactly, for a denoiser that is affine in x: [size] and
    [size, size], for images of one channel and all levels of the schedule. With ``white`` noise in place of Σ's.

    Every step is affine, too: an image without noise ends at the mean, and one with a unit of a single draw away from
    it by the response to that unit.
    """
    covariance, schedule = denoiser.process.covariance, denoiser.process.schedule
    size, gaussian = covariance.size, denoiser.gaussian
    item = covariance.event_shape if gaussian is None else gaussian.shape
    root = torch.eye(size, dtype=torch.float64) if white else torch.linalg.cholesky(covariance.dense())

    def states(root: Tensor, batch: int) -> tuple[Tensor, int]:
        noisy = copy(denoiser)
        noisy.process = process = Impulses(schedule, covariance, root)
        every: dict[str, Any] = {"num_steps": len(schedule), "dtype": torch.float64, **(options or {})}
        return sample(noisy, (batch, *item), sampler=sampler, denoise=denoise, **every).flatten(1), process.draws

    mean, draws = states(root[:, :0], 1)
    responses = states(root, draws * size)[0] - mean
    return mean[0], responses.T @ responses


def output_covariance(
    problem: Gaussian, schedule: Schedule, sampler: AnySampler, options: dict[str, Any], white: bool = False
) -> Tensor:
    """The exact covariance of the sampler's state at the last level."""
    denoiser = problem.denoiser(Process(schedule, problem.covariance))
    return output_law(denoiser, sampler, options, white=white, denoise=False)[1]


def whitened_paths(
    covariance: Covariance, schedule: Schedule, sampler: AnySampler, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Σ^-½ x and y along the path of the same sampler, for an arbitrary nonlinear network: eps_y(y, t) = eps(Σ^½ y, t).

    The isotropic twin has the same basis and all eigenvalues 1, so that equal seeds mean equal white noise.
    """
    twin = covariance.with_eigenvalues(torch.ones_like(covariance.eigenvalues))
    net = smooth_net(covariance.event_shape)
    coloured = Denoiser(net, Process(schedule, covariance))
    white = Denoiser(lambda y, label: net(covariance.sqrt(y), label), Process(schedule, twin))
    paths = []
    for denoiser in (coloured, white):
        visits: list[Visit] = []
        given: dict[str, Any] = {"num_steps": 15, "generator": [5, 6, 7], "dtype": torch.float64, **options}
        torch.manual_seed(5)  # for a sampler that does not draw from its chain
        sample(denoiser, (3, *covariance.event_shape), sampler=sampler, callback=visits.append, **given)
        paths.append([visit.x for visit in visits])
    return [(covariance.inv_sqrt(x), y) for x, y in zip(*paths, strict=True)]


def slope(steps: list[int], errors: list[float]) -> float:
    """Order of convergence: minus the least-squares slope of log error against log steps."""
    return -float(np.polyfit(np.log(steps), np.log(errors), 1)[0])
