"""One trained network, five evaluations: what the solver makes of it. Draws docs/images/few_steps.png.

The network is that of ``trained.py`` for turbulence, with white noise and target v; it is trained first if need be.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from trained import Bench, Solver

import nidiff
from nidiff.covariance.spectral import radial_mean, wavenumber

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COUNT, STEPS = 6, 5


def spectrum(x: torch.Tensor) -> torch.Tensor:
    """The mean power of every wavenumber above 0, up to that of the sides."""
    shell = wavenumber(tuple(x.shape[-2:])).round().long()
    power = torch.fft.fft2(x.double(), norm="ortho").abs().square().mean((0, 1))
    return radial_mean(power, shell)[1 : x.shape[-1] // 2 + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("out/fields"), help="folder of data and weights")
    parser.add_argument("--out", type=Path, default=Path("docs/images/few_steps.png"))
    options = parser.parse_args()
    bench = Bench("turbulence", options.cache, None)
    denoiser = nidiff.measure_kappa(bench.denoiser("white, v", 0), bench.data.train)
    rows = {"held-out data": (bench.data.held_out, "black", "-")}
    for label, solver, colour in (
        (f"DPM-Solver++, {STEPS} evaluations", Solver("dpmpp_2m", "trailing"), "tab:orange"),
        (f"angle_2m, {STEPS} evaluations", Solver("angle_2m", "angle", kappa=True), "tab:blue"),
    ):
        rows[label] = (bench.draw(denoiser, solver, STEPS, 0), colour, "--")

    figure = plt.figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.55, 1))
    axes = left.subplots(len(rows), COUNT)
    for line, (label, (fields, colour, _)) in zip(axes, rows.items(), strict=True):
        title = line[0].text(0, 1.08, label, fontsize=10, color=colour, transform=line[0].transAxes)
        title.set_in_layout(False)  # else the others make room for it
        for axis, field in zip(line, fields[:: len(fields) // COUNT], strict=False):
            axis.imshow(field[0], cmap="RdBu_r", vmin=-2.5, vmax=2.5)
            axis.set(xticks=[], yticks=[])
    chart = right.subplots()
    for label, (fields, colour, style) in rows.items():
        power = spectrum(fields)
        chart.loglog(range(1, len(power) + 1), power, style, color=colour, label=label, linewidth=2)
    chart.set(xlabel="wavenumber", ylabel="power", title="spectrum of 256 samples")
    chart.legend(frameon=False, fontsize=9)
    chart.grid(alpha=0.3, which="both")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
