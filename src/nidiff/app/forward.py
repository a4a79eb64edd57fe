"""The tab *Forward*: how noise covers an item, white beside Σ, and which of its scales still show at each level."""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
import torch
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image, ImageOps
from torch import Tensor

from nidiff.app.look import Page
from nidiff.app.work import QUICK, spoken
from nidiff.calibration.design import band_logsnr
from nidiff.covariance.config import TIMES, as_covariance
from nidiff.covariance.operator import Covariance
from nidiff.data.encoded import MODES, Reading, fit
from nidiff.data.figures import drawable, thumbnail
from nidiff.data.grid import Grid
from nidiff.data.load import load_dataset
from nidiff.data.pictures import grid_pixels
from nidiff.diffusion.gaussian import GaussianModel, fit_gaussian
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Schedule, as_schedule
from nidiff.errors import InputError, one_of, shown
from nidiff.generation.opened import open_model, process_state
from nidiff.model.zoo import zoo_models
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_number, check_whole
from nidiff.report.design import draw_logsnr, draw_spectra
from nidiff.report.page import data_uri, figure, image, picture, plot
from nidiff.sampling.sampler import sample
from nidiff.style import BLUE, ORANGE, dark_page, drawn, ink

DIGIT, TURBULENCE, OWN = "A digit", "Turbulence", "Your picture"
SIDE = 64  # pixels of a visitor's picture, after it was cropped and resized
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
LARGEST, WIDEST = 16 * 2**20, 4096  # bytes and pixels along a side, of a visitor's file
WHITE = "white"
LIMITS = (
    f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]} of 8 bits, at most {WIDEST} × {WIDEST} pixels and {LARGEST >> 20} MB"
)
# Fields whose modes have a wavenumber |k|, and that take no time to build.
FIELDS = (WHITE, "gff", "power_law", "matern", "offset", "from_data")
NOISES = (
    "gff:gamma=1",
    "gff:gamma=0.5",
    "matern:length_scale=4",
    "offset:strength=0.1",
    "from_data",
    "from_data:power=0.5",
)
SCHEDULES = ("ddpm_linear", "ddpm_cosine", "scaled_linear", "flow")
LONGEST = 120  # letters of Σ as a text
LARGEST_SEED = 2**31 - 1
KEPT = 32  # what was prepared: data, Σ and schedules; of pictures, the last few
STEPS, DRAWS = 10, 512  # of the turbulence
MOST_LETTERS = 100_000  # of a picture as a data URI


# Where x0 comes from ------------------------------------------------------------------------------------------------


class Upload(NamedTuple):
    """A visitor's picture as uint8 [channels, SIDE, SIDE]: small, and the key of what is prepared for it."""

    channels: int
    pixels: bytes


class Subject(NamedTuple):
    """An item [C, H, W] in the units of a model, and data [N, C, H, W] that have its spectrum."""

    x0: Tensor
    data: Tensor
    caption: str
    is_picture: bool = True


def read_upload(path: Any) -> Upload | None:
    """The picture in a file, cropped to its middle and resized. Its size is looked at before it is decoded."""
    if path is None:
        return None
    try:
        file = Path(path)
        if (size := file.stat().st_size) > LARGEST:
            raise InputError(f"the picture has {size:,} bytes: send {LIMITS}.")
        with Image.open(file, formats=FORMATS) as opened:
            if max(opened.size) > WIDEST:
                raise InputError(f"the picture has {opened.width} × {opened.height} pixels: send {LIMITS}.")
            channels = 1 if opened.mode in ("1", "L", "LA") else 3
            upright = ImageOps.exif_transpose(opened)
            pixels = fit(upright.convert(MODES[upright.mode]), Reading(SIDE, channels))
    except InputError:
        raise
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        raise InputError(f"the file cannot be read as a picture: send {LIMITS}.") from error
    return Upload(channels, pixels.tobytes())


@lru_cache(KEPT)
def subject(source: str, digit: int, upload: Upload | None) -> Subject:
    if source == DIGIT:
        return _digit(digit)
    if source == TURBULENCE:
        return _turbulence()
    if upload is None:
        raise InputError("there is no picture yet: upload one, or choose a digit.")
    pixels = torch.frombuffer(bytearray(upload.pixels), dtype=torch.uint8)
    x0 = pixels.reshape(upload.channels, SIDE, SIDE).float() / 127.5 - 1
    # With its negative the mean is 0, so that the picture's own power is that of the data.
    return Subject(x0, torch.stack([x0, -x0]), "Your picture; its spectrum is that of this picture alone.")


def _digit(digit: int) -> Subject:
    digits = load_dataset("digits")
    data, labels = digits.all(), digits.labels
    assert labels is not None
    words = f"The first {digit} of the digits; the spectrum is that of all {len(data)}."
    return Subject(data[labels == digit][0], data, words)


@cache
def _turbulence() -> Subject:
    model = open_model(zoo_models()["turbulence"], process_state())
    gaussian = model.denoiser.gaussian
    assert gaussian is not None
    x0 = sample(model.denoiser, (1, *model.shape), sampler="angle_2m", num_steps=STEPS, seeds=[0])[0]
    data = gaussian.sample((DRAWS, *model.shape), generators_from_seeds(range(DRAWS)))
    words = f"x0 is a sample of the turbulence model in {STEPS} steps; the spectrum is that of its training data."
    return Subject(x0.cpu(), data.cpu(), words, is_picture=False)


# Σ, and what it does at each level ----------------------------------------------------------------------------------


class Scene(NamedTuple):
    """A subject with white noise and with Σ under one schedule."""

    subject: Subject
    gaussian: GaussianModel
    schedule: Schedule
    processes: dict[str, Process]


@lru_cache(KEPT)
def scene(source: str, digit: int, upload: Upload | None, noise: str, schedule: str) -> Scene:
    found = subject(source, digit, upload)
    covariance = build_noise(noise, found.data)
    white = as_covariance(WHITE, covariance.event_shape)
    average = "radial" if source == OWN else "modes"  # one picture says too little of each mode
    basis = "periodic" if covariance.is_constant else covariance
    gaussian = fit_gaussian(found.data, basis=basis, event_axes=2, average=average)
    made = as_schedule(schedule)
    return Scene(found, gaussian, made, {WHITE: Process(made, white), noise: Process(made, covariance)})


def build_noise(text: str, data: Tensor) -> Covariance:
    """Σ of a visitor's text. A name of a folder, which `as_covariance` would open, is refused."""
    for factor in text.split(TIMES):
        one_of("covariance", factor.partition(":")[0].strip(), FIELDS)
    covariance = as_covariance(text, data.shape[2:], data)
    if covariance.wavenumbers is None and not covariance.is_constant:
        raise InputError(f"covariance={shown(text)} has no wavenumbers: name one field, such as gff:gamma=1.")
    return covariance


class Asked(NamedTuple):
    """What a browser asks for, after it was checked."""

    source: str
    digit: int
    upload: Upload | None
    noise: str
    schedule: str


def checked(source: Any, digit: Any, upload: Any, noise: Any, schedule: Any) -> Asked:
    if not isinstance(noise, str) or len(noise) > LONGEST:
        raise InputError(f"covariance={shown(noise)} must be a text of at most {LONGEST} letters, such as gff:gamma=1.")
    source = one_of("source", source, (DIGIT, TURBULENCE, OWN))
    return Asked(
        source,
        check_whole("digit", digit, 0, 9) if source == DIGIT else 0,
        upload if source == OWN and isinstance(upload, Upload) else None,
        " ".join(noise.split()),
        one_of("schedule", schedule, SCHEDULES),
    )


# The page -----------------------------------------------------------------------------------------------------------


def looked_at(
    source: Any, digit: Any, upload: Any, noise: Any, schedule: Any, level: Any, seed: Any, is_dark: Any
) -> tuple[str, str, str]:
    """The three pictures, the maps of the effective log-SNR with the level marked, and the spectra, as HTML."""
    asked = checked(source, digit, upload, noise, schedule)
    place, seed = check_number("level", level), check_whole("seed", seed, 0, LARGEST_SEED)
    if not 0 <= place <= 1:
        raise InputError(f"level={place:g} must be from 0 (data) to 1 (noise).")
    if asked.source == OWN and asked.upload is None:
        return f"<p>Choose a picture: {LIMITS}.</p>", "", ""
    charts = _charts(asked, is_dark is True)
    return _pictures(scene(*asked), place, seed), charts.marked(place), charts.spectra


def noisy(found: Scene, row: int, seed: int) -> dict[str, Tensor]:
    """x / √(signal² + sigma²) [C, H, W] at a row of the schedule with each of the noises, of one eps."""
    x0 = found.subject.x0[None]
    eps, level = white_noise(x0.shape, generators_from_seeds([seed])), found.schedule.level(row)
    scale = (level.signal**2 + level.sigma**2) ** 0.5
    return {name: process.perturb(x0, level, eps)[0] / scale for name, process in found.processes.items()}


def _pictures(found: Scene, place: float, seed: int) -> str:
    """x0, and x with white noise and with Σ."""
    schedule = found.schedule
    row = round(place * (len(schedule) - 1))
    level = schedule.level(row)
    tiles = [_tile(found.subject.x0, found.subject, "x0, without noise")]
    for name, x in noisy(found, row, seed).items():
        tiles.append(_tile(x, found.subject, "x, white noise" if name == WHITE else f"x, {name}"))
    about = (
        f"Level {row} of {len(schedule) - 1}: signal {level.signal:.3g}, sigma {level.sigma:.3g}, "
        f"log-SNR {schedule.logsnr[row].item():.2f} nats. "
        "Both x have the same eps, are divided by √(signal² + sigma²), "
        f"and are shown on the scale of x0. {found.subject.caption}"
    )
    return f'<div class="three">{"".join(tiles)}</div><p class="caption">{about}</p>'


def _tile(x: Tensor, of: Subject, words: str) -> str:
    if of.is_picture:
        seen = Image.fromarray(grid_pixels(x[None]).squeeze(-1).numpy())
    else:
        seen = thumbnail(x, of.x0, Grid.usual(tuple(x.shape)))
    return figure(picture(seen, SIDE, MOST_LETTERS), words, words, "small")


class Charts(NamedTuple):
    """What does not depend on the level, drawn once; ``places`` are the maps' frames, as shares of the picture."""

    maps: str
    places: list[Bbox]
    spectra: str

    def marked(self, place: float) -> str:
        """The maps with a line at the level."""
        lines = "".join(
            f'<i style="left:{one.x0 + place * one.width:.2%};bottom:{one.y0:.2%};height:{one.height:.2%}"></i>'
            for one in self.places
        )
        caption = "Blue: the data stand out. Red: noise covers them. Black line: as much of both. Dashed: this level."
        return f'<figure><div class="marked">{self.maps}{lines}</div><figcaption>{caption}</figcaption></figure>'


@lru_cache(KEPT)
def _charts(asked: Asked, is_dark: bool) -> Charts:
    with dark_page(is_dark):
        return _draw_charts(scene(*asked))


@drawn
def _draw_charts(found: Scene) -> Charts:
    maps, spectra = _maps_figure(found), _spectra_figure(found)
    source = data_uri(maps.savefig, "png")  # which lays it out, too
    places = [axes.get_position() for axes in maps.axes[: len(found.processes)]]
    shown = image(source, "The effective log-SNR of each wavenumber at each level, white noise and Σ")
    return Charts(shown, places, plot(spectra, "The spectra of data and noise", kind=""))


def _maps_figure(found: Scene) -> Figure:
    made = Figure((4.8, 3.0), dpi=120, layout="constrained")
    maps = made.subplots(1, len(found.processes), squeeze=False, sharey=True)[0]
    for axes, (name, process) in zip(maps, found.processes.items(), strict=True):
        mesh = draw_logsnr(axes, band_logsnr(found.schedule, found.gaussian, process.covariance))
        axes.set_title("white noise" if name == WHITE else drawable(name, 24))
        axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        axes.set_xlabel("level")
    maps[0].set_ylabel("wavenumber |k|")
    made.colorbar(mesh, ax=list(maps), label="effective log-SNR (nats)")
    return made


def _spectra_figure(found: Scene) -> Figure:
    made = Figure((3.7, 3.0), dpi=120, layout="constrained")
    axes = made.subplots()
    draw_spectra(axes, found.gaussian, {name: process.covariance for name, process in found.processes.items()})
    for line, colour in zip(axes.lines, (ink(), ORANGE, BLUE), strict=False):
        line.set_color(colour)
    axes.legend(frameon=False)
    axes.set(xlabel="wavenumber |k|", ylabel="power, mean 1", title="")
    axes.minorticks_off()  # they take as long to draw as all the rest
    return made


def forward_tab(page: Page) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            source = gr.Radio([DIGIT, TURBULENCE, OWN], value=DIGIT, label="Image x0", elem_id="forward-source")
            digit = gr.Dropdown(list(range(10)), value=3, label="Digit", elem_id="forward-digit")
            file = gr.File(
                label="Picture", file_types=[f".{name.lower()}" for name in (*FORMATS, "jpg")], height=120,
                visible=False, elem_id="forward-file",
            )  # fmt: skip
            noise = gr.Dropdown(
                NOISES, value=NOISES[0], label="Noise Σ", info="Or write your own: NAME:key=value,…",
                allow_custom_value=True, elem_id="forward-noise",
            )  # fmt: skip
            schedule = gr.Dropdown(SCHEDULES, value=SCHEDULES[0], label="Schedule", elem_id="forward-schedule")
            level = gr.Slider(0, 1, 0.3, step=0.01, label="Level", info="0: data, 1: noise", elem_id="forward-level")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, elem_id="forward-seed")
            upload = gr.State(None)
        with gr.Column(scale=3, min_width=320):
            pictures = gr.HTML(elem_id="forward-pictures")
            with gr.Row():
                with gr.Column(scale=4, min_width=320):
                    maps = gr.HTML(elem_id="forward-maps")
                with gr.Column(scale=3, min_width=280):
                    spectra = gr.HTML(elem_id="forward-spectra")
    event: dict[str, Any] = {
        "fn": spoken(looked_at),
        "inputs": [source, digit, upload, noise, schedule, level, seed, page.dark],
        "outputs": [pictures, maps, spectra],
        "show_progress": "hidden",
        **QUICK,
    }
    page.ready.then(**event)
    gr.on([each.change for each in (digit, noise, schedule, level, seed)], trigger_mode="always_last", **event)
    source.change(spoken(controls_of), source, [digit, file], show_progress="hidden", **QUICK).then(**event)
    file.change(spoken(read_upload), file, upload, **QUICK).then(**event)


def controls_of(source: Any) -> tuple[Any, Any]:
    return gr.update(visible=source == DIGIT), gr.update(visible=source == OWN)
