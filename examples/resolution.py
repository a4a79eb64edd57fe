"""Train at 32×32, sample at 64×64 and 128×128 (docs/resolution.md).

python examples/resolution.py fields.npy       writes the data
python examples/resolution.py runs/a runs/b …  samples runs of nidiff train on finer grids, and draws them into out/
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
from nidiff.covariance.waves import radial_mean, wavenumber

WAYS = ("in pixels", "on its own grid")
NAMES = {  # of the runs of docs/resolution.md
    "own": "Σ, v",
    "white": "white, v",
    "own-residual": "Σ, residual",
    "white-residual": "white, residual",
}


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
        here = schedule.level_at(2 * math.log(level.signal / level.sigma) + shift)
        known, beyond = denoiser(here.signal / level.signal * on_grid(x, m), here), gaussian(x, level)
        return beyond + on_grid(known - on_grid(beyond, m), n)

    return nidiff.Denoiser(net, fine.process, "x0", scaling=fine.scaling)


def predicted(law, noise, n, way):
    """log10 S/C by |k| on n × n if the network is linear: S = Σ · (C/Σ of its own grid), and C elsewhere."""
    k, fine = (wavenumber((side, side)) for side in (len(law.eigenvalues), n))
    believed, true = ((law.at((side, side)).eigenvalues / noise.at((side, side)).eigenvalues) for side in (len(k), n))
    if way == WAYS[0]:  # it knows cycles per pixel, and takes longer waves for the longest it knows
        order = k.flatten().argsort()[1:]
        known = np.interp(fine * len(k) / n, k.flatten()[order], believed.flatten()[order].log())
        ratio = torch.from_numpy(known).exp() / true
    else:
        low = (torch.fft.fftfreq(n) * n).abs() < len(k) / 2
        ratio = torch.where(low & low[:, None], believed[0, 1] / true[0, 1], 1.0)
    return radial_mean(ratio, fine.round().long()).log10()


def gather(runs, sides=(64, 128), count=64):
    """log10 S/S of new data, measured and predicted, by way, run and grid; fields of the last grid."""
    ways = dict(zip(WAYS, (lambda model, n: model.at((n, n)), own_grid), strict=True))
    models, results = [nidiff.load_model(run) for run in runs], {"runs": np.array([Path(run).name for run in runs])}
    for n in sides:
        real, lines, shown = fields(4 * count, n, seed=1), [], []
        for (row, way), (run, model) in itertools.product(enumerate(WAYS), zip(runs, models, strict=True)):
            x = nidiff.sample(
                ways[way](model, n), (count, 1, n, n), spacing="logsnr", num_steps=25, generator=range(count)
            )
            x, noise = model.scaling.to_data(x), model.process.covariance
            bands = nidiff.metrics.compare_spectra(real, x)
            shared = bands.high <= noise.event_shape[0] / 2
            off = bands.difference[0, shared].abs().mean()
            print(f"{run} at {n}×{n}, {way}: log10 S(k) is off by {off:.3f} on average, for the waves that it knows")
            expected = predicted(nidiff.power_law(noise.event_shape, 3.0), noise, n, way)[1:]
            if way == WAYS[0] and model.target_name == "residual":
                expected = 0 * expected  # its linear part is that of the finer grid
            lines.append((bands.difference[0], expected))
            shown += [real[row, 0], x[0, 0]] if run == runs[0] else [x[0, 0]]
        results[f"k {n}"] = (bands.low * bands.high).sqrt().numpy()
        results[f"measured {n}"], results[f"predicted {n}"] = (np.stack(curves) for curves in zip(*lines, strict=True))
    results["fields"] = (torch.stack(shown) * 16).round().div(16).half().numpy()  # few digits, a small file
    return results | {"side": np.array(noise.event_shape[0]), "sides": np.array(sides)}


@style.drawn
def picture(results, out):
    """A panel for each way and grid, a line for each run; dashed as predicted."""
    figure, runs = Figure((style.WIDTH, 6.4), layout="constrained"), results["runs"]
    panels = figure.subplots(2, len(results["sides"]), sharey="row", squeeze=False)
    for (row, column), axes in np.ndenumerate(panels):
        n, mine = results["sides"][column], slice(row * len(runs), (row + 1) * len(runs))
        looks = zip(
            runs,
            results[f"measured {n}"][mine],
            results[f"predicted {n}"][mine],
            style.COLOURS,
            style.MARKERS,
            strict=False,
        )
        for run, measured, expected, colour, mark in looks:
            axes.plot(results[f"k {n}"], measured, color=colour, marker=mark, label=NAMES.get(run, run))
            axes.plot(range(1, len(expected) + 1), expected, "--", color=colour, linewidth=1)
        axes.plot([], [], "--", color=style.ink(), linewidth=1, label="predicted")
        finest = results["side"] / 2
        name = f"k = {finest:g}, the finest at {results['side']}×{results['side']}"
        axes.axvline(finest, color=style.look().soft, linestyle=":", linewidth=1.6, label=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(title=f"{n}×{n}, {WAYS[row]}", xlabel="wavenumber |k| (cycles per side)")
        axes.grid()
    for axes in panels[:, 0]:
        axes.set_ylabel("log10 of power per mode\nover the data's")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, handlelength=3)
    figure.savefig(out)


def main(runs, sides=(64, 128), count=64, out="out"):
    """Draw what `gather` finds, and keep it beside the figure."""
    results = gather(runs, sides, count)
    Path(out).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(Path(out, "resolution.npz"), **results)
    picture(results, Path(out, "resolution.png"))
    return results


if __name__ == "__main__":
    np.save(sys.argv[1], fields(4096, 32)) if sys.argv[1].endswith(".npy") else main(sys.argv[1:])
