"""Fields to train on at 32×32, and what the networks make of them at 64×64 and 128×128 (docs/resolution.md).

python examples/resolution.py fields.npy       writes the data
python examples/resolution.py runs/a runs/b …  samples what nidiff train made of them, and draws resolution.png
"""

import math
import sys

import numpy as np
import torch

import nidiff


def on_grid(x: torch.Tensor, n: int) -> torch.Tensor:
    """x [..., m, m] on n × n points: the waves that both have. Of ±n/2, which n points cannot tell, half the power."""
    for axis in (-2, -1):
        m, half, waves = x.shape[axis], min(n, x.shape[axis]) // 2, torch.fft.fft(x, dim=axis, norm="forward")
        edges = waves.narrow(axis, half, 1) / 2**0.5, waves.narrow(axis, m - half, 1) / 2**0.5
        none = torch.zeros_like(edges[0]).repeat_interleave(max(n - m - 1, 0), axis)
        between = [edges[0] + edges[1]] if n < m else [edges[0], none, edges[1]]
        waves = [waves.narrow(axis, 0, half), *between, waves.narrow(axis, m - half + 1, half - 1)]
        x = torch.fft.ifft(torch.cat(waves, axis), dim=axis, norm="forward").real
    return x


def fields(count: int, n: int, seed: int = 0, finest: int = 256) -> torch.Tensor:
    """g + 0.3 (g² − 1) of a Gaussian field g with spectrum |k|^-3, on a grid that is finer than all that follow."""
    law, rng = nidiff.power_law((finest, finest), 3.0), torch.Generator().manual_seed(seed)
    gaussian = (law.sample((1, 1, finest, finest), rng) for _ in range(count))
    return torch.cat([on_grid(g + 0.3 * (g.square() - 1), n) for g in gaussian])


def own_grid(denoiser: nidiff.Denoiser, n: int, shift: float = 0.0) -> nidiff.Denoiser:
    """The model on n × n: its network for the waves of its own grid, told a log-SNR that is higher by ``shift``, and
    the data's Gaussian for those beyond."""
    fine, m, schedule = denoiser.at((n, n)), denoiser.process.covariance.event_shape[0], denoiser.process.schedule
    gaussian = fine.gaussian.denoiser(fine.process)

    def net(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        level = schedule.level(label[0].item())
        own = schedule.level_at(2 * math.log(level.signal / level.sigma) + shift)
        known, beyond = denoiser(own.signal / level.signal * on_grid(x, m), own), gaussian(x, level)
        return beyond + on_grid(known - on_grid(beyond, m), n)

    return nidiff.Denoiser(net, fine.process, "x0", scaling=fine.scaling)
