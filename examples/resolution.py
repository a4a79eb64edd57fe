"""Train at 32×32, sample at 64×64 and 128×128 (docs/resolution.md).

python examples/resolution.py fields.npy       writes the data
python examples/resolution.py runs/a runs/b …  samples runs of nidiff train on finer grids, and draws out/resolution.png
"""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import nidiff
from nidiff import style
from nidiff.covariance.spectral import radial_mean, wavenumber
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


def predicted(law, noise, n, way):
    """log10 S/C by |k| on n × n if the network is linear: S = Σ · (C/Σ of its own grid), and C where it has no say."""
    k, fine = (wavenumber((side, side)) for side in (len(law.eigenvalues), n))
    believed, true = ((law.at((side, side)).eigenvalues / noise.at((side, side)).eigenvalues) for side in (len(k), n))
    if way == "pixels":  # it knows cycles per pixel, and takes longer waves for the longest it knows
        order = k.flatten().argsort()[1:]
        known = np.interp(fine * len(k) / n, k.flatten()[order], believed.flatten()[order].log())
        ratio = torch.from_numpy(known).exp() / true
    else:
        low = (torch.fft.fftfreq(n) * n).abs() < len(k) / 2
        ratio = torch.where(low & low[:, None], believed[0, 1] / true[0, 1], 1.0)
    return radial_mean(ratio, fine.round().long()).log10()


@style.drawn
def main(runs, sides=(64, 128), count=64, out="out"):
    """The spectra of samples against those of new data, for every run, way to use it, and grid."""
    found, figure = {}, Figure((style.WIDTH, 4.2), layout="constrained")
    ways = {"pixels": lambda model, n: model.at((n, n)), "own grid": own_grid}
    for n, axes in zip(sides, figure.subplots(1, len(sides), sharey=True, squeeze=False)[0], strict=True):
        real, panels, marks = fields(4 * count, n, seed=1), {}, itertools.cycle(style.MARKERS)
        for run, way in itertools.product(runs, ways):
            model = nidiff.load_model(run)
            x = nidiff.sample(ways[way](model, n), (count, 1, n, n), spacing="logsnr", num_steps=25, seeds=range(count))
            bands = found[run, way, n] = nidiff.compare_spectra(real, model.scaling.to_data(x))
            print(f"{run} at {n}×{n}, {way}: log10 S(k) is off by {bands.error:.3f} on average")
            panels[f"{run}, {way}"] = x / 3
            look = {"marker": next(marks), "label": f"{Path(run).name}, {way}"}
            (line,) = axes.plot((bands.low * bands.high).sqrt(), bands.difference[0], **look)
            noise = model.process.covariance
            expected = predicted(nidiff.power_law(noise.event_shape, 3.0), noise, n, way)
            axes.plot(range(1, len(expected)), expected[1:], "--", color=line.get_color())
        axes.set(xscale="log", title=f"{n}×{n}", xlabel="|k| (cycles per side)", ylabel="log10 S/S of the data")
        axes.grid()
        save_panels(Path(out, f"resolution_{n}.png"), {"data": real / 3, **panels}, side=2)
    axes.legend()
    figure.savefig(Path(out, "resolution.png"))
    return found


if __name__ == "__main__":
    np.save(sys.argv[1], fields(4096, 32)) if sys.argv[1].endswith(".npy") else main(sys.argv[1:])
