"""Draw the pictures of the first page from the models that ship: `python scripts/front_page.py`.

docs/images/turbulence.png: real fields, and those of the white-noise model and of the designed one at few evaluations,
with their spectra. docs/images/fashion.png: real clothes, and those of DDPM and of the designed model at ten.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import nidiff
from nidiff import style
from nidiff.evaluation.spectrum import field_spectrum

FEW, FIELDS_FEW = 10, 5  # evaluations of the network
COLUMNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--samples", type=int, default=128, help="fields behind each spectrum")
    parser.add_argument("--only", choices=("turbulence", "fashion"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only != "fashion":
        turbulence(options.out / "turbulence.png", options.samples)
    if options.only != "turbulence":
        fashion(options.out / "fashion.png")


@style.drawn
def turbulence(file: Path, samples: int = 128) -> None:
    real = nidiff.load_dataset("turbulence", split="test").batch(torch.arange(0, 1600, 1600 // samples)[:samples])
    white, designed = (
        f"white noise\nDPM-Solver++\n{FIELDS_FEW} evaluations",
        f"noise between white\nand the data\nangle_2m\n{FIELDS_FEW} evaluations",
    )
    rows = {
        "data": (real, style.ink(), "-"),
        white: (draw("turbulence-white", "dpmpp_2m", samples, FIELDS_FEW), style.RED, "--"),
        designed: (draw("turbulence", "angle_2m:spacing=trailing,rescale=true", samples, FIELDS_FEW), style.BLUE, ":"),
    }
    figure = Figure((style.WIDTH, 3.1), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.75, 1))
    axes = left.subplots(len(rows), COLUMNS)
    for line, (name, (fields, colour, _)) in zip(axes, rows.items(), strict=True):
        for axis, field in zip(line, fields, strict=False):
            axis.imshow(field[0], cmap=style.DIVERGING, vmin=-3, vmax=3, interpolation="bilinear")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", color=colour)
    axis = right.subplots()
    for name, (fields, colour, dash) in rows.items():
        found = field_spectrum(fields)
        shown = (found.wavenumber > 0) & (found.wavenumber < fields.shape[-1] // 2)
        power = found.power.mean((0, 1))[shown]
        look = {
            "color": colour,
            "label": name.rpartition("\nangle_2m")[0] or name.partition("\n")[0],
            "linewidth": 3.0 if dash == ":" else 1.8,
        }
        axis.loglog(found.wavenumber[shown], power, dash, **look)
    axis.set(xlabel="wavenumber |k| (cycles per side)", ylabel="power per mode", title="spectrum of the vorticity")
    axis.grid()
    axis.legend(loc="lower left", handlelength=3)
    figure.savefig(file)


@style.drawn
def fashion(file: Path) -> None:
    real = nidiff.load_dataset("fashion-mnist", split="test").batch(torch.arange(36))
    panels = {
        "photographs": real,
        f"DDPM, white noise, {FEW} ancestral steps": draw("fashion-mnist-ddpm", "ancestral", 36),
        f"designed, γ = 0.5, {FEW} ancestral steps": draw("fashion-mnist", "ancestral", 36),
    }
    figure = Figure((style.WIDTH, 3.2), layout="constrained")
    for axis, (name, images) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        grid = images[:, 0].reshape(6, 6, 28, 28).permute(0, 2, 1, 3).reshape(168, 168)
        axis.imshow(grid, cmap=style.GREY, vmin=-1, vmax=1, interpolation="nearest")
        axis.set_axis_off()
        axis.set_title(name, fontsize=style.SMALL)
    figure.savefig(file)


def draw(model: str, sampler: str, count: int, num_steps: int = FEW) -> Tensor:
    denoiser = nidiff.load_model(model)
    shape = (count, *denoiser.gaussian.shape)
    return nidiff.sample(denoiser, shape, sampler=sampler, num_steps=num_steps, generator=range(count), tile=16)


if __name__ == "__main__":
    main()
