"""One trained network, five evaluations: what the solver makes of it. Draws out/few_steps.png.

The network is that of ``trained.py`` for turbulence, with white noise and target v; it is trained first if need be.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from trained import Bench, Solver

import nidiff
from nidiff import style
from nidiff.covariance.waves import radial_mean, wavenumber

COUNT, STEPS = 6, 5


def spectrum(x: torch.Tensor) -> torch.Tensor:
    """The mean power of every wavenumber above 0, up to that of the sides."""
    shell = wavenumber(tuple(x.shape[-2:])).round().long()
    power = torch.fft.fft2(x.double(), norm="ortho").abs().square().mean((0, 1))
    return radial_mean(power, shell)[1 : x.shape[-1] // 2 + 1]


def gather(cache: Path) -> dict[str, np.ndarray]:
    """Some fields of the data and of both solvers, and the spectra of all, by their names."""
    bench = Bench("turbulence", cache, None)
    denoiser = nidiff.design.measure_kappa(bench.denoiser("white, v", 0), bench.data.train)
    rows = {"held-out data": bench.data.held_out}
    for name, solver in (
        ("DPM-Solver++", Solver("dpmpp_2m", "trailing")),
        ("angle_2m", Solver("angle_2m", "angle", kappa=True)),
    ):
        rows[f"{name}, {STEPS} evaluations"] = bench.draw(denoiser, solver, STEPS, 0)
    fields = np.stack([x[:: len(x) // COUNT][:COUNT, 0].numpy() for x in rows.values()]).astype(np.float16)
    power = np.stack([spectrum(x).numpy() for x in rows.values()])
    return {"names": np.array([*rows]), "fields": fields, "power": power}


@style.drawn
def picture(found: Mapping[str, np.ndarray], file: Path) -> None:
    figure = Figure((style.WIDTH, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.55, 1))
    axes, chart = left.subplots(len(found["names"]), COUNT), right.subplots()
    looks = ((style.ink(), "-"), (style.RED, "--"), (style.BLUE, ":"))
    for line, name, fields, power, (colour, dash) in zip(
        axes, found["names"], found["fields"], found["power"], looks, strict=True
    ):
        title = line[0].text(0, 1.05, name, fontsize=style.SMALL, color=colour, transform=line[0].transAxes)
        title.set_in_layout(False)  # else the others make room for it
        for axis, field in zip(line, fields.astype(np.float32), strict=True):
            axis.imshow(field, cmap=style.DIVERGING, vmin=-2.5, vmax=2.5, interpolation="nearest")
            axis.set_axis_off()
        width = 3.0 if dash == ":" else 1.8
        chart.loglog(range(1, len(power) + 1), power, dash, color=colour, label=name, linewidth=width)
    chart.set(xlabel="wavenumber |k| (cycles per side)", ylabel="power per mode", title="spectrum of 256 samples")
    chart.legend()
    chart.grid()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("out/fields"), help="folder of data and weights")
    parser.add_argument("--out", type=Path, default=Path("out/few_steps.png"), help="its numbers are kept beside it")
    options = parser.parse_args()
    found = gather(options.cache)
    picture(found, options.out)
    np.savez_compressed(options.out.with_suffix(".npz"), **found)


if __name__ == "__main__":
    main()
