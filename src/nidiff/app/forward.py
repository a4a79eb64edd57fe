"""The tab *Forward*: how noise covers an item, white beside Σ, and which of its scales still show at each level."""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
import torch
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import Tensor

from nidiff.app.layout import LARGEST_SEED, Tab
from nidiff.app.uploads import LIMITS, SUFFIXES, read_picture
from nidiff.covariance.config import as_covariance
from nidiff.data.figures import drawable, thumbnail
from nidiff.data.grid import Grid
from nidiff.data.load import load_dataset
from nidiff.data.pictures import grid_image
from nidiff.design.candidates import band_logsnr
from nidiff.diffusion.gaussian import GaussianModel, fit_gaussian
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import as_schedule
from nidiff.errors import one_of
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.model.zoo import zoo_models
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_number, check_whole
from nidiff.report.design import draw_spectra
from nidiff.report.page import data_uri, figure, image, picture, plot
from nidiff.report.spectrum import draw_logsnr
from nidiff.sampling.sampler import sample
from nidiff.style import BLUE, ORANGE, dark_page, drawn, ink

SOURCES = TURBULENCE, DIGIT, UPLOAD = "Turbulence", "A digit", "Your picture"
SIDE = 64  # pixels of a visitor's picture, after it was cropped and resized
WHITE = "white"
NOISES = (
    "gff:gamma=1",
    "gff:gamma=0.5",
    "power_law:exponent=3",
    "matern:length_scale=4",
    "offset:strength=0.1",
    "from_data",
    "from_data:power=0.5",
    WHITE,
)
SCHEDULES = ("ddpm_linear", "ddpm_cosine", "scaled_linear", "flow")
CACHED = 32  # scenes and charts that stay in memory
STEPS, DRAWS = 10, 512  # of the turbulence
MOST_LETTERS = 100_000  # of a picture as a data URI


# The item x0 ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # a key of caches
class Subject:
    """An item [C, H, W] in the units of a model, and data [N, C, H, W] that have its spectrum."""

    x0: Tensor
    data: Tensor
    caption: str
    average: str = "modes"
    """How the power of the data is averaged."""
    is_picture: bool = True


@lru_cache(CACHED)
def read_upload(path: str) -> Subject:
    """The picture in a file, cropped to its middle and resized."""
    x0 = read_picture("picture", Path(path), (SIDE, SIDE)).float() / 127.5 - 1
    # With its negative the mean is 0, so that the power of the picture is that of the data. One picture says too little
    # of each mode.
    return Subject(x0, torch.stack([x0, -x0]), "Your picture; its spectrum is that of this picture alone.", "radial")


@cache
def digit_subject(digit: int) -> Subject:
    digits = load_dataset("digits")
    data, labels = digits.all(), digits.labels
    assert labels is not None
    caption = f"The first {digit} of the digits; the spectrum is that of all {len(data)}."
    return Subject(data[labels == digit][0], data, caption)


@cache
def turbulence_subject() -> Subject:
    model = open_model(zoo_models()["turbulence"], process_state())
    gaussian = model.denoiser.gaussian
    assert gaussian is not None
    x0 = sample(model.denoiser, (1, *model.shape), sampler="angle_2m", num_steps=STEPS, generator=[0])[0]
    data = gaussian.sample((DRAWS, *model.shape), generators_from_seeds(range(DRAWS)))
    caption = f"x0 is a sample of the turbulence model in {STEPS} steps; the spectrum is that of its training data."
    return Subject(x0.cpu(), data.cpu(), caption, is_picture=False)


# Σ, and what it does at each level ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scene:
    """A subject with white noise and with Σ under one schedule."""

    subject: Subject
    gaussian: GaussianModel
    schedule: Schedule
    processes: dict[str, Process]


@lru_cache(CACHED)
def scene(subject: Subject, noise: str, schedule_name: str) -> Scene:
    covariance = as_covariance(noise, subject.data.shape[2:], subject.data)
    schedule = as_schedule(schedule_name)
    basis = "periodic" if covariance.is_constant else covariance
    gaussian = fit_gaussian(subject.data, basis=basis, event_axes=2, average=subject.average)
    noises = {WHITE: as_covariance(WHITE, covariance.event_shape), noise: covariance}
    return Scene(subject, gaussian, schedule, {name: Process(schedule, each) for name, each in noises.items()})


def noisy(scene: Scene, row: int, seed: int) -> dict[str, Tensor]:
    """x / √(signal² + sigma²) [C, H, W] at a row of the schedule with each of the noises, of one eps."""
    x0 = scene.subject.x0[None]
    eps, level = white_noise(x0.shape, generators_from_seeds([seed])), scene.schedule.level(row)
    scale = (level.signal**2 + level.sigma**2) ** 0.5
    return {name: process.perturb(x0, level, eps)[0] / scale for name, process in scene.processes.items()}


# The page -----------------------------------------------------------------------------------------------------------


def render(
    source: Any, digit: Any, file: Any, noise: Any, schedule: Any, level: Any, seed: Any, is_dark: Any
) -> tuple[str, str, str]:
    """The three pictures, the maps of the effective log-SNR with the level marked, and the spectra, as HTML."""
    share, seed = check_number("level", level, 0, 1), check_whole("seed", seed, 0, LARGEST_SEED)
    noise, schedule = one_of("covariance", noise, NOISES), one_of("schedule", schedule, SCHEDULES)
    if one_of("source", source, SOURCES) == UPLOAD and file is None:
        return f"<p>Choose a picture: {LIMITS}.</p>", "", ""
    if source == TURBULENCE:
        subject = turbulence_subject()
    elif source == DIGIT:
        subject = digit_subject(check_whole("digit", digit, 0, 9))
    else:
        subject = read_upload(str(file))
    shown = scene(subject, noise, schedule)
    charts = _charts(shown, is_dark is True)
    return _pictures(shown, share, seed), charts.marked(share), charts.spectra


def _pictures(scene: Scene, share: float, seed: int) -> str:
    """x0, and x with white noise and with Σ."""
    schedule = scene.schedule
    row = round(share * (len(schedule) - 1))
    level = schedule.level(row)
    tiles = [_tile(scene.subject.x0, scene.subject, "x0, without noise")]
    for name, x in noisy(scene, row, seed).items():
        tiles.append(_tile(x, scene.subject, "x, white noise" if name == WHITE else f"x, {name}"))
    about = (
        f"Level {row} of {len(schedule) - 1}: signal {float(level.signal):.3g}, sigma {float(level.sigma):.3g}, "
        f"log-SNR {schedule.logsnr[row].item():.2f} nats. "
        "Both x have the same eps, are divided by √(signal² + sigma²), "
        f"and are shown on the scale of x0. {scene.subject.caption}"
    )
    return f'<div class="three">{"".join(tiles)}</div><p class="caption">{about}</p>'


def _tile(x: Tensor, subject: Subject, caption: str) -> str:
    tile = grid_image(x[None]) if subject.is_picture else thumbnail(x, subject.x0, Grid.usual(tuple(x.shape)))
    return figure(picture(tile, SIDE, MOST_LETTERS), caption, caption, "small")


class Charts(NamedTuple):
    """What does not depend on the level, drawn once; ``frames`` are those of the maps, as shares of the picture."""

    maps: str
    frames: list[Bbox]
    spectra: str

    def marked(self, share: float) -> str:
        """The maps with a line at the level."""
        lines = "".join(
            f'<i style="left:{frame.x0 + share * frame.width:.2%};bottom:{frame.y0:.2%};height:{frame.height:.2%}"></i>'
            for frame in self.frames
        )
        caption = "Blue: the data stand out. Red: noise covers them. Black line: as much of both. Dashed: this level."
        return f'<figure><div class="marked">{self.maps}{lines}</div><figcaption>{caption}</figcaption></figure>'


@lru_cache(CACHED)
def _charts(scene: Scene, is_dark: bool) -> Charts:
    with dark_page(is_dark):
        return _draw_charts(scene)


@drawn
def _draw_charts(scene: Scene) -> Charts:
    maps = _maps_figure(scene)
    source = data_uri(maps.savefig, "png")  # which lays it out, too
    frames = [axes.get_position() for axes in maps.axes[: len(scene.processes)]]
    shown = image(source, "The effective log-SNR of each wavenumber at each level, white noise and Σ")
    return Charts(shown, frames, plot(_spectra_figure(scene), "The spectra of data and noise", kind=""))


def _maps_figure(scene: Scene) -> Figure:
    made = Figure((4.8, 3.0), dpi=120, layout="constrained")
    maps = made.subplots(1, len(scene.processes), squeeze=False, sharey=True)[0]
    for axes, (name, process) in zip(maps, scene.processes.items(), strict=True):
        mesh = draw_logsnr(axes, band_logsnr(scene.schedule, scene.gaussian, process.covariance))
        axes.set_title("white noise" if name == WHITE else drawable(name, 24))
        axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        axes.set_xlabel("level")
    maps[0].set_ylabel("wavenumber |k|")
    made.colorbar(mesh, ax=list(maps), label="effective log-SNR (nats)")
    return made


def _spectra_figure(scene: Scene) -> Figure:
    made = Figure((3.7, 3.0), dpi=120, layout="constrained")
    axes = made.subplots()
    draw_spectra(axes, scene.gaussian, {name: process.covariance for name, process in scene.processes.items()})
    for line, colour in zip(axes.lines, (ink(), ORANGE, BLUE), strict=False):
        line.set_color(colour)
    axes.legend(frameon=False)
    axes.set(xlabel="wavenumber |k|", ylabel="power, mean 1", title="")
    axes.minorticks_off()  # they take as long to draw as all the rest
    return made


def controls_of(source: Any) -> tuple[Any, Any]:
    return gr.update(visible=source == DIGIT), gr.update(visible=source == UPLOAD)


def forward_tab(tab: Tab) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            source = gr.Radio(SOURCES, value=TURBULENCE, label="Image x0", elem_id="forward-source")
            digit = gr.Dropdown(list(range(10)), value=3, label="Digit", visible=False, elem_id="forward-digit")
            file = gr.File(label="Picture", file_types=SUFFIXES, height=120, visible=False, elem_id="forward-file")
            noise = gr.Dropdown(NOISES, value=NOISES[0], label="Noise Σ", elem_id="forward-noise")
            schedule = gr.Dropdown(SCHEDULES, value=SCHEDULES[0], label="Schedule", elem_id="forward-schedule")
            level = gr.Slider(0, 1, 0.3, step=0.01, label="Level", info="0: data, 1: noise", elem_id="forward-level")
            seed = tab.seed()
        with gr.Column(scale=3, min_width=320):
            tab.status.render()
            pictures = gr.HTML(elem_id="forward-pictures")
            with gr.Row():
                with gr.Column(scale=4, min_width=320):
                    maps = gr.HTML(elem_id="forward-maps")
                with gr.Column(scale=3, min_width=280):
                    spectra = gr.HTML(elem_id="forward-spectra")
    inputs, outputs = [source, digit, file, noise, schedule, level, seed, tab.dark], [pictures, maps, spectra]
    tab.first(render, inputs, outputs)
    chosen = tab.on(source.change, controls_of, [source], [digit, file])
    changes = [control.change for control in (digit, file, noise, schedule, level, seed)]
    for event in (chosen.then, changes):
        tab.on(event, render, inputs, outputs)
