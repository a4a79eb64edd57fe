"""Draw the pictures of the first page from the models that ship: `python scripts/front_page.py`.

docs/images/turbulence.png: real fields, and those of the white-noise model and of the designed one at few evaluations,
with their spectra. docs/images/fashion.png: real clothes, and those of DDPM and of the designed model at ten.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import nidiff
from nidiff.evaluation.field_spectrum import field_spectrum

FEW, FIELDS_FEW = 10, 5  # evaluations of the network
COLUMNS = 5
BLUE, RED, GREY = "#1f5fa8", "#c8452f", "#444444"


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


def turbulence(file: Path, samples: int) -> None:
    real = nidiff.load_dataset("turbulence", split="test").batch(torch.arange(0, 1600, 1600 // samples)[:samples])
    rows = {
        "data": (real, GREY),
        f"white noise\nDPM-Solver++\n{FIELDS_FEW} evaluations": (
            draw("turbulence-white", "dpmpp_2m", samples, FIELDS_FEW),
            RED,
        ),
        f"designed noise\nangle_2m\n{FIELDS_FEW} evaluations": (
            draw("turbulence", "angle_2m", samples, FIELDS_FEW),
            BLUE,
        ),
    }
    figure = plt.figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.75, 1))
    axes = left.subplots(len(rows), COLUMNS)
    for line, (name, (fields, colour)) in zip(axes, rows.items(), strict=True):
        for axis, field in zip(line, fields, strict=False):
            axis.imshow(field[0], cmap="RdBu_r", vmin=-3, vmax=3, interpolation="bilinear")
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", color=colour, fontsize=9)
    axis = right.subplots()
    for (name, (fields, colour)), style in zip(rows.items(), ("-", "--", ":"), strict=True):
        width = 3.0 if style == ":" else 1.8
        found = field_spectrum(fields)
        shown = (found.wavenumber > 0) & (found.wavenumber < fields.shape[-1] // 2)
        power = found.power.mean((0, 1))[shown]
        axis.loglog(
            found.wavenumber[shown], power, style, color=colour, label=name.replace("\n", ", "), linewidth=width
        )
    axis.set(xlabel="wavenumber", ylabel="power", title="Spectrum of the vorticity")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def fashion(file: Path) -> None:
    real = nidiff.load_dataset("fashion-mnist", split="test").batch(torch.arange(36))
    rows = {
        "photographs": real,
        f"DDPM, white noise, {FEW} ancestral steps": draw("fashion-mnist-ddpm", "ancestral", 36),
        f"designed, γ = 0.5, {FEW} ancestral steps": draw("fashion-mnist", "ancestral", 36),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.5), layout="constrained")
    for axis, (name, images) in zip(axes, rows.items(), strict=True):
        grid = images[:, 0].reshape(6, 6, 28, 28).permute(0, 2, 1, 3).reshape(168, 168)
        axis.imshow(grid, cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_title(name, fontsize=11)
        axis.spines[:].set_visible(False)
    figure.savefig(file, dpi=110)


def draw(model: str, sampler: str, count: int, num_steps: int = FEW) -> Tensor:
    denoiser = nidiff.load_model(model)
    shape = (count, *denoiser.gaussian.shape)
    return nidiff.sample(denoiser, shape, sampler=sampler, num_steps=num_steps, seeds=range(count), tile=16)


if __name__ == "__main__":
    main()
