"""The tab *Sample*: watch a model draw, and compare the spectrum of its samples with that of the data."""

import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gradio as gr
import numpy as np
import torch
from gradio.utils import get_upload_folder
from matplotlib.figure import Figure
from torch import Tensor

from nidiff.app.layout import Tab, code, labelled
from nidiff.app.shelf import Shelf
from nidiff.app.work import Show, check_work, watched
from nidiff.data.dataset import as_stored
from nidiff.data.figures import drawable, samples_figure, save_samples_figure
from nidiff.data.pictures import grid_image
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.spacing import ANGLE, SPACINGS
from nidiff.errors import one_of
from nidiff.evaluation.spectrum import Shells
from nidiff.generation.export import Samples, write_npy
from nidiff.generation.job import Job, default_sampler, draw_seeds, plan_job
from nidiff.generation.loaded_model import Model
from nidiff.notation import parse_call, parse_seeds, seeds_text
from nidiff.randomness import generators_from_seeds
from nidiff.recipe import check_number, check_whole
from nidiff.report.page import figure, picture, plot
from nidiff.report.restored import item_picture
from nidiff.report.spectrum import (
    POWER,
    common_shells,
    draw_wavenumbers,
    expected_spectrum,
    mean_spectrum,
    wavenumber_label,
)
from nidiff.sampling.sampler import DEFAULT as USUAL
from nidiff.sampling.sampler import SAMPLERS, rehearse
from nidiff.sampling.step import Visit
from nidiff.style import dark_page, drawn, ink, looks

MOST_SEEDS, MOST_SHOWN, MOST_STEPS, MOST_GUIDANCE = 36, 36, 100, 10.0
SIDE, LIMIT = 1024, 2**18  # pixels of a picture, letters of one without loss
MODEL, SEEDS, STEPS = "turbulence", "0-15", 20
NONE, DEFAULT, ALL = "none", "the sampler's own", "all in turn"
ALL_SPACINGS = [DEFAULT, *SPACINGS, ANGLE]

Shown: TypeAlias = tuple[str, Any, Any, str]  # what is said, the pictures, the files, the commands


class Order(NamedTuple):
    """What one model is to draw; ``name`` is that on the shelf, ``sampler`` as the command line has it."""

    name: str
    model: Model
    job: Job
    seeds: list[int]
    sampler: str

    @property
    def label(self) -> str:
        return f"{self.name}, {self.sampler}, {self.job.num_steps} steps"

    @property
    def command(self) -> str:
        """The command that draws the same samples."""
        words = ["nidiff", "sample", self.name, "--seeds", seeds_text(self.seeds), "--sampler", self.sampler]
        words += ["--num-steps", str(self.job.num_steps)]
        if classes_of(self.model):
            words += ["--classes", self.job.conditioning.labels.get("classes", NONE)]
        if (guidance := self.job.conditioning.guidance) is not None:
            words += ["--guidance", f"{guidance.scale:g}"]
        return shlex.join(words)

    def draw(self, show: Show[Visit]) -> Tensor:
        """The samples [N, C, *event] in the units of the model, the same bits as those of the command."""
        model = self.model
        return draw_seeds(model.denoiser, self.job, self.seeds, model.shape, show)


# The request ---------------------------------------------------------------------------------------------------------


def default_model(shelf: Shelf) -> str:
    """The first of the user's models, or one that ships."""
    return next(iter([*shelf.user_models(), MODEL]))


def classes_of(model: Model) -> int:
    """How many classes the model was trained with."""
    condition = model.denoiser.conditions.get(CLASSES)
    return 0 if condition is None else condition.classes or 0


def samplers_of(model: Model) -> dict[str, tuple[str, int]]:
    """The samplers of a model, each with a label and a number of steps. The first is its usual one: that which nidiff
    tune chose for most evaluations, or that of its picture, or ours."""
    choices = sorted(model.denoiser.choices, key=lambda choice: choice.evaluations, reverse=True)
    tuned = {each.sampler: (f"{each.sampler} (tuned for {each.evaluations})", each.num_steps) for each in choices[::-1]}
    own, steps = default_sampler(model)
    first = [choices[0].sampler, own] if choices else [own]
    samplers = {name: (name, STEPS) for name in (*first, *tuned, USUAL, *SAMPLERS)}
    samplers |= {own: (own, steps or STEPS)} | tuned
    return {name: (label, min(steps, MOST_STEPS)) for name, (label, steps) in samplers.items()}


def read_order(
    shelf: Shelf, name: Any, sampler: Any, steps: Any, seeds: Any, most: int = MOST_SEEDS, *options: Any
) -> Order:
    """What a model is to draw; ``options`` are a spacing, a class and a guidance. A request that cannot be drawn is
    refused before anything is."""
    numbers, count = parse_seeds(str(seeds), most=most), check_whole("steps", steps, 1, MOST_STEPS)
    model = shelf.open(name)
    samplers = samplers_of(model)
    spec = next(iter(samplers)) if sampler is None else one_of("sampler", sampler, samplers)
    spacing, label, guidance = options or (DEFAULT, ALL, 1.0)
    if one_of("spacing", spacing, ALL_SPACINGS) != DEFAULT:
        word, values = parse_call("sampler", spec)
        values = {**values, "spacing": spacing}
        spec = f"{word}:{','.join(f'{key}={value}' for key, value in values.items())}"
    check_work("seeds", len(numbers), count, model.shape)
    job = plan_job(model, spec, count, **_read_classes(classes_of(model), label, guidance))
    rehearse(model.denoiser.clipped(job.clip), model.shape, **job.arguments)
    return Order(name, model, job, numbers, spec)


def _read_classes(classes: int, label: Any, guidance: Any) -> dict[str, Any]:
    """The arguments of `plan_job` about the classes of a model that has some."""
    if not classes:
        return {}
    scale = check_number("guidance", guidance, 0, MOST_GUIDANCE)
    chosen: dict[str, list[int] | None] = {ALL: None, NONE: []}
    chosen |= {str(number): [number] for number in range(classes)}
    label = one_of("class", label, chosen)
    return {"classes": chosen[label], "guidance": None if scale == 1 or label == NONE else scale}


# HTML ----------------------------------------------------------------------------------------------------------------


def state_figure(x: Tensor, name: str, model: Model, caption: str) -> str:
    """States [N, C, *event] in the units of the model as one picture, scaled into the range of the data."""
    x = x.cpu() / max(1.0, x.abs().quantile(0.99).item())
    if model.grid.kind == "picture":
        tiles = as_stored(x, model.denoiser.scaling, model.grid.dtype)
    else:
        images = [np.array(item_picture(item, x.transpose(0, 1), model.grid).convert("RGB")) for item in x]
        tiles = torch.from_numpy(np.stack(images)).movedim(-1, 1)
    return figure(picture(grid_image(tiles), SIDE, LIMIT), f"{name}: {caption}", f"{name}: {caption}", "small")


def noise_view(models: Sequence[tuple[str, Model]], seeds: Any, most: int = MOST_SEEDS) -> str:
    """The noise that the seeds begin with, for each model."""
    numbers, figures = parse_seeds(str(seeds), most=most), []
    for name, model in models:
        check_work("seeds", len(numbers), 1, model.shape)
        figures.append(noise_figure(name, model, numbers))
    return side_by_side(figures)


def noise_figure(name: str, model: Model, seeds: Sequence[int]) -> str:
    few = seeds[:MOST_SHOWN]
    x = model.denoiser.process.prior((len(few), *model.shape), generators_from_seeds(few), device="cpu")
    return state_figure(x, name, model, f"the noise of seeds {seeds_text(few)}")


def samples_view(x: Tensor, order: Order, alone: bool) -> str:
    """The first samples of an order; if it is alone, fields have axes and a colour bar."""
    x, seeds = x[:MOST_SHOWN], seeds_text(order.seeds[:MOST_SHOWN])
    if order.model.grid.kind == "picture" or not alone:
        return state_figure(x, order.label, order.model, f"samples of seeds {seeds}")
    data = as_stored(x, order.model.denoiser.scaling, order.model.grid.dtype)
    return plot(samples_figure(data, order.model.grid), f"Samples of {order.label}", f"{order.label}: samples")


def side_by_side(figures: Sequence[str]) -> str:
    return f'<div class="pair">{"".join(figures)}</div>'


def spectra(gaussian: GaussianModel, x: Tensor) -> tuple[Shells, Tensor, Tensor]:
    """The power of x − μ by wavenumber, in the units of the model: of the data, as N(μ, C) has it, and of samples."""
    shells = common_shells([gaussian.power(1.0)])
    return shells, expected_spectrum(gaussian.covariance, shells), mean_spectrum(x - gaussian.mean.to(x), shells)


@drawn
def spectra_figure(samples: dict[str, tuple[GaussianModel, Tensor]]) -> Figure:
    """The spectra of samples of models, by name, and of their data; those of the same data are drawn once."""
    drawing = Figure((7.2, 3.4), dpi=120, layout="constrained")
    axes, known = drawing.subplots(), list[Tensor]()
    for marker, (colour, _), (name, (gaussian, x)) in zip("os", looks(), samples.items(), strict=False):
        shells, data, measured = spectra(gaussian, x)
        k = shells.wavenumber[1:]
        if not any(other.shape == data.shape and torch.allclose(other, data, rtol=0.05) for other in known):
            of = f" of {drawable(name, 40)}" if known else ""
            axes.plot(k, data[1:], color=colour if known else ink(), linewidth=2.0, label=f"training data{of}")
            known.append(data)
        label = f"{len(x)} samples of {drawable(name, 40)}"
        axes.plot(k, measured[1:], f"{marker}-", color=colour, markersize=4, linewidth=1.0, label=label)
    draw_wavenumbers(axes, k[-1].item(), wavenumber_label(shells.shape, shells.boundary))
    axes.set_ylabel(f"{POWER}\n(squared units of the model)")
    axes.legend(frameon=False)
    return drawing


def spectra_view(orders: Sequence[Order], samples: Sequence[Tensor]) -> str:
    """The spectra of the samples against those of the data."""
    known, view = {}, ""
    for order, x in zip(orders, samples, strict=True):
        if (gaussian := order.model.denoiser.gaussian) is not None:
            known[order.label] = gaussian, x
        else:
            view += f"<p>{escape(order.name)} stores no spectrum of its data, so there is none to compare with.</p>"
    if known:
        note = f"The spectrum of {len(x)} samples, and that of all training data, as it is stored with the models."
        view = plot(spectra_figure(known), f"Power by wavenumber of the data and of {' and '.join(known)}", note) + view
    return view


def save_files(order: Order, x: Tensor) -> list[str]:
    """PNG and NPY of samples in the units of the data, in a new folder from which the page sends them."""
    folder, grid = Path(tempfile.mkdtemp(dir=get_upload_folder(), prefix="samples-")), order.model.grid
    data = as_stored(x, order.model.denoiser.scaling, grid.dtype)
    files = [folder / f"{order.model.name}.png", folder / f"{order.model.name}.npy"]
    save_samples_figure(data, grid, files[0])
    write_npy(Samples(data.numpy(), np.array(order.seeds), grid, {}), files[1])
    return list(map(str, files))


# Events --------------------------------------------------------------------------------------------------------------


def preview(shelf: Shelf, name: Any, seeds: Any) -> tuple[str, str, Any, Any]:
    """The noise of the seeds for a model, and the controls of classes and guidance."""
    model = shelf.open(name)
    most = classes_of(model)
    classes = gr.update(choices=labelled([ALL, NONE, *map(str, range(most))]), value=ALL, visible=most > 0)
    return "Press Draw.", noise_view([(name, model)], seeds), classes, gr.update(visible=most > 0)


def sampler_menu(shelf: Shelf, name: Any, place: int = 0) -> tuple[Any, Any]:
    """The samplers of a model, of which the usual one is chosen, or another ``place``, and its steps."""
    samplers = samplers_of(shelf.open(name))
    value = [*samplers][place]
    choices = [(label, spec) for spec, (label, _) in samplers.items()]
    return gr.update(choices=choices, value=value), gr.update(value=samplers[value][1])


def draw(shelf: Shelf, is_dark: Any, name: Any, sampler: Any, steps: Any, seeds: Any, *options: Any) -> Iterator[Shown]:
    """The progress, the pictures, the files, and the command, again and again until all is drawn."""
    yield from drawn_orders([read_order(shelf, name, sampler, steps, seeds, MOST_SEEDS, *options)], is_dark)


def drawn_orders(
    orders: Sequence[Order], is_dark: Any, judge: Callable[[Sequence[Tensor]], str] | None = None
) -> Iterator[Shown]:
    """What is shown while models draw, and in the end, with what ``judge`` says about the samples."""
    command = "\n".join(order.command for order in orders)
    figures = [noise_figure(order.label, order.model, order.seeds) for order in orders]

    def work(show: Show[tuple[int, Visit]]) -> list[Tensor]:
        return [
            order.draw(lambda visit, place=place: show((place, visit)))  # type: ignore[misc]
            for place, order in enumerate(orders)
        ]

    def render(frame: tuple[int, Visit]) -> Shown:
        place, visit = frame
        order, step = orders[place], f"step {visit.step} of {visit.num_steps}"
        figures[place] = state_figure(visit.x[:MOST_SHOWN], order.label, order.model, step)
        return f"{escape(order.label)}: {step}", side_by_side(figures), None, command

    samples = yield from watched(work, render)
    yield "Drawing the figures…", side_by_side(figures), None, command
    alone = len(orders) == 1
    with dark_page(is_dark):
        view = side_by_side([samples_view(x, order, alone) for order, x in zip(orders, samples, strict=True)])
        view += spectra_view(orders, samples)
    files = [file for order, x in zip(orders, samples, strict=True) for file in save_files(order, x)]
    if judge is not None:
        yield "Measuring the samples…", view, files, command
        view += yield from watched(lambda show: judge(samples))
    yield "Done.", view, files, command


def model_menus(tab: Tab, key: str, label: str, name: str, place: int = 0) -> tuple[list[Any], Any]:
    """The menus of a model and its samplers, with the usual one at first, or not, and the steps; and the event that
    comes when another model was chosen and its samplers are there."""
    shelf, of = tab.shelf, f"{tab.name}-{key}"
    model = tab.models(label, name, f"{key}model")
    sampler = gr.Dropdown([], label="Sampler", elem_id=f"{of}sampler")
    steps = gr.Slider(1, MOST_STEPS, STEPS, step=1, label="Steps", elem_id=f"{of}steps")
    is_shipped = name not in shelf.user_models()
    tab.first(partial(sampler_menu, shelf, place=place), [model], [sampler, steps], now=is_shipped)
    changed = tab.on(model.input, partial(sampler_menu, shelf), [model], [sampler, steps])
    return [model, sampler, steps], changed.then


def sample_tab(tab: Tab) -> None:
    shelf, usual = tab.shelf, default_model(tab.shelf)
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            chosen, changed = model_menus(tab, "", "Model", usual)
            seeds = gr.Textbox(SEEDS, label="Seeds", info=f"at most {MOST_SEEDS}", elem_id="sample-seeds")
            spacing = gr.Dropdown(ALL_SPACINGS, value=DEFAULT, label="Spacing of the steps", elem_id="sample-spacing")
            label = gr.Dropdown([ALL], value=ALL, label="Class", visible=False, elem_id="sample-class")
            guidance = gr.Slider(
                0, MOST_GUIDANCE, 1, step=0.1, label="Guidance", visible=False, elem_id="sample-guidance"
            )
            both = tab.buttons("Draw")
        with gr.Column(scale=3, min_width=320):
            shown = drawing_parts(tab)
    about = partial(preview, shelf), [chosen[0], seeds], [*shown[:2], label, guidance]
    tab.first(*about, now=usual not in shelf.user_models())
    for event in (changed, seeds.submit):
        tab.on(event, *about)
    tab.on_buttons(both, partial(draw, shelf), [tab.dark, *chosen, seeds, spacing, label, guidance], shown)


def drawing_parts(tab: Tab) -> list[Any]:
    """Where `drawn_orders` shows the progress, the pictures, the files and the commands."""
    tab.status.render()
    view = gr.HTML(elem_id=f"{tab.name}-view", padding=False)
    with gr.Accordion("Files, and the same on the command line", open=False):
        files = gr.File(label="Samples", file_count="multiple", interactive=False, elem_id=f"{tab.name}-files")
        return [tab.status, view, files, code("Command", f"{tab.name}-command")]
