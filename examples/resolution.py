"""Train at 32×32, sample at 64×64 and 128×128: docs/resolution.md has the commands."""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch

import nidiff
from nidiff.report.panels import save_panels


def on_grid(x, n):
    """x [..., m, m] on n × n points: the waves that both have. Of ±n/2, which n points cannot tell, half the power."""
    m, half = x.shape[-1], min(n, x.shape[-1]) // 2
    new, old = (2 * math.pi / side * torch.arange(side, dtype=torch.float64) for side in (n, m))
    waves = 1 + 2 * ((new[:, None] - old).unsqueeze(-1) * torch.arange(1, half)).cos().sum(-1)
    matrix = (waves + 2**0.5 * torch.outer((half * new).cos(), (half * old).cos())).to(x) / m
    return x if n == m else matrix @ x @ matrix.T


def fields(count, n, seed=0, finest=256):
    """g + 0.3 (g² − 1) of a Gaussian field g with spectrum |k|^-3, made on a grid finer than all we look at."""
    law, rng = nidiff.power_law((finest, finest), 3.0), torch.Generator().manual_seed(seed)
    draws = (law.sample((1, 1, finest, finest), rng) for _ in range(count))
    return torch.cat([on_grid(g + 0.3 * (g * g - 1), n) for g in draws])


def own_grid(denoiser, n, shift=0.0):
    """On n × n: the network at its own size for the waves it knows, the data's Gaussian for those beyond."""
    fine, m, schedule = denoiser.at((n, n)), denoiser.process.covariance.event_shape[0], denoiser.process.schedule
    gaussian = fine.gaussian.denoiser(fine.process)

    def net(x, label):
        level = schedule.level(label[0].item())
        own = schedule.level_at(2 * math.log(level.signal / level.sigma) + shift)
        known, beyond = denoiser(own.signal / level.signal * on_grid(x, m), own), gaussian(x, level)
        return beyond + on_grid(known - on_grid(beyond, m), n)

    return nidiff.Denoiser(net, fine.process, "x0", scaling=fine.scaling)


def main(runs, sides=(32, 64, 128), count=64, out="out"):
    """The spectra of samples against those of new data, for every run, way to use it, and grid."""
    found, ways = {}, {"pixels": lambda model, n: model.at((n, n)), "own grid": own_grid}
    for n in sides:
        real, panels = fields(4 * count, n, seed=1), {}
        for run, way in itertools.product(runs, ways):
            model = nidiff.load_model(run)
            x = nidiff.sample(ways[way](model, n), (count, 1, n, n), spacing="logsnr", num_steps=25, seeds=range(count))
            bands = nidiff.compare_spectra(real, model.scaling.to_data(x))
            found[run, way, n], panels[f"{run}, {way}"] = bands, x / 3
            print(f"{run} at {n}×{n}, {way}: log10 S(k) is off by {bands.error:.3f} on average")
        save_panels(Path(out, f"resolution_{n}.png"), {"data": real / 3, **panels}, side=2)
    return found


if __name__ == "__main__":
    np.save(sys.argv[1], fields(4096, 32)) if sys.argv[1].endswith(".npy") else main(sys.argv[1:])
