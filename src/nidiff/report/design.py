"""The picture of ``nidiff design``: when each scale appears under each candidate, and what it costs."""

from collections.abc import Mapping
from itertools import cycle
from textwrap import fill

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nidiff import style
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.waves import radial_mean
from nidiff.data.figures import drawable
from nidiff.design.candidates import FIXED, STEPS, Candidate, Design
from nidiff.design.prediction import bands
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.report.spectrum import POWER, draw_logsnr, draw_wavenumbers, wavenumber_label

CELL, SIDE, LETTERS = (1.3, 1.0), 3.6, 11  # inches; letters of a title per inch


@style.drawn
def design_figure(design: Design) -> Figure:
    """Left: the effective log-SNR of each band at each level, a row for each Σ, a column for each schedule; the
    recommended one has a frame. Right: the spectra of data and noise, and the error against the number of steps."""
    noises = [*design.noises]
    schedules = list(dict.fromkeys(candidate.schedule for candidate in design.candidates))
    width, height = CELL[0] * len(schedules) + 1.4, max(CELL[1] * len(noises) + 1.0, 5.5)
    figure = Figure((width + SIDE, height), layout=ConstrainedLayoutEngine(w_pad=0.08))
    ((left, right),) = figure.subfigures(1, 2, squeeze=False, width_ratios=[width, SIDE])
    grid = left.subplots(len(noises), len(schedules), squeeze=False, sharex=True, sharey=True)
    mesh = None
    for axes in grid.flat:
        axes.set_axis_off()
    for candidate in design.candidates:
        axes = grid[noises.index(candidate.covariance), schedules.index(candidate.schedule)]
        mesh = _draw_candidate(axes, candidate, candidate is design.recommended)
    for row, name in zip(grid, noises, strict=True):
        row[0].set_axis_on()
        row[0].set_ylabel(_short(name))
    for axes, name in zip(grid[0], schedules, strict=True):
        axes.set_title(_short(name), fontsize=style.SMALL)
    title = "effective log-SNR: bands |k| (upwards) at levels from data (left) to noise"
    left.suptitle(fill(title, int(LETTERS * width)), fontsize=style.USUAL)
    left.colorbar(mesh, ax=grid, shrink=0.6, label="log-SNR (nats); blue: the data show")
    top, bottom = right.subplots(2, 1)
    draw_spectra(top, design.gaussian, design.noises)
    _draw_errors(bottom, design)
    return figure


def _short(name: str) -> str:
    return "\n".join(drawable(part, 22) for part in name.replace("length_scale", "ℓ").replace("gamma", "γ").split(":"))


def _draw_candidate(axes: Axes, candidate: Candidate, chosen: bool) -> ScalarMappable:
    axes.set_axis_on()
    mesh = draw_logsnr(axes, candidate.logsnr)
    axes.set_xticks([])
    axes.tick_params(length=2)
    note = f"{min(candidate.errors[name][10] for name in FIXED):.2g}" + (" ×" if candidate.faults else "")
    axes.text(0.97, 0.95, note, ha="right", va="top", fontsize=style.TINY, transform=axes.transAxes,
              bbox={"facecolor": style.look().paper, "edgecolor": "none", "alpha": 0.7, "pad": 1})  # fmt: skip
    if chosen:
        for spine in axes.spines.values():
            spine.set(edgecolor=style.ORANGE, linewidth=3.0, visible=True)
    return mesh


def draw_spectra(axes: Axes, gaussian: GaussianModel, noises: Mapping[str, Covariance]) -> None:
    """The spectra of the data and of each Σ, by band."""
    band = bands(gaussian)

    def mean(values: torch.Tensor) -> np.ndarray:
        return radial_mean(values.expand(band.shape), band).numpy()

    data = gaussian.covariance.eigenvalues
    axes.plot(mean(data / data.mean()), color=style.ink(), linewidth=3.0, label="data")
    looks = zip(style.shades(len(noises)), cycle(style.DASHES), strict=False)
    for (name, covariance), (colour, dash) in zip(noises.items(), looks, strict=True):
        noise = mean(covariance.eigenvalues / covariance.eigenvalues.mean())
        axes.plot(noise, dash, color=colour, label=drawable(name, 24))
    draw_wavenumbers(axes, float(band.max()), _band_label(gaussian))
    axes.set_ylabel(f"{POWER} (mean 1)")
    axes.set_title("spectra of data and noise")
    axes.legend(handlelength=3)


def _band_label(gaussian: GaussianModel) -> str:
    boundary, shape = gaussian.spatial.boundary, gaussian.spatial.event_shape
    return "band, from the most power to the least" if boundary is None else wavenumber_label(shape, boundary)


def _draw_errors(axes: Axes, design: Design) -> None:
    shown = {"recommended": (design.recommended, style.ORANGE)}
    if design.baseline is not None:
        shown["white noise"] = (design.baseline, style.look().soft)
    looks = {"dpmpp_2m": "dotted", "dpmpp_2m:spacing=logsnr": "solid"}
    for label, (candidate, colour) in shown.items():
        for name, dash in looks.items():
            errors = [max(error, 1e-6) for error in candidate.errors[name].values()]
            way = name.partition("=")[2] or "trailing"
            axes.plot(STEPS, errors, color=colour, linestyle=dash, marker=".", label=f"{label}, {way}")
    axes.set_xscale("log")
    axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_ylim(None, 1e3)  # room for the legend
    axes.set(xlabel="steps", ylabel="mean |S/C − 1|")
    axes.set_title("predicted error of the spectrum\nDPM-Solver++")
    axes.grid()
    axes.legend(loc="upper right", handlelength=3)
