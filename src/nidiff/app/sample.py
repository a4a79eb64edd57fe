"""The tab *Sample*: watch a model draw, or two of them the same seeds, and compare their spectra with the data's."""

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
import numpy as np
import torch
from gradio.utils import get_upload_folder
from matplotlib.figure import Figure
from torch import Tensor

from nidiff.app.layout import Page, buttons, code, labelled, on, on_buttons
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
from nidiff.generation.job import Job, draw_seeds, plan_job
from nidiff.generation.loaded_model import Model
from nidiff.notation import parse_seeds, seeds_text
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
from nidiff.sampling.sampler import SAMPLERS, rehearse
from nidiff.sampling.step import Visit
from nidiff.style import dark_page, drawn, ink, looks

MOST_SEEDS, MOST_STEPS, MOST_GUIDANCE = 36, 100, 10.0
SIDE, LIMIT = 1024, 2**18  # pixels of a picture, letters of one without loss
PAIR = ("digits-ddpm", "digits")  # of one data set, with white noise and with Σ
SEEDS, SAMPLER, STEPS = "0-15", "ancestral", 12  # the pair draws them in a few seconds
NONE, DEFAULT, ALL = "none", "the sampler's own", "all in turn"
ALL_SPACINGS = [DEFAULT, *SPACINGS, ANGLE]


class Order(NamedTuple):
    """What one model is to draw; ``name`` is that on the shelf, ``sampler`` as the command line has it."""

    name: str
    model: Model
    job: Job
    seeds: list[int]
    sampler: str

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

    def draw(self, show: Show[tuple["Order", Visit]]) -> Tensor:
        """The samples [N, C, *event] in the units of the model, the same bits as those of the command."""
        model = self.model
        return draw_seeds(model.denoiser, self.job, self.seeds, model.shape, lambda visit: show((self, visit)))


# The request ---------------------------------------------------------------------------------------------------------


def default_models(shelf: Shelf) -> tuple[str, str]:
    """The first two of the user, or a pair that ships."""
    first, second, *_ = [*shelf.user_models(), NONE] if shelf.user_models() else PAIR
    return first, second


def classes_of(model: Model) -> int:
    """How many classes the model was trained with."""
    condition = model.denoiser.conditions.get(CLASSES)
    return 0 if condition is None else condition.classes or 0


def read_models(shelf: Shelf, first: Any, second: Any) -> dict[str, Model]:
    """The models that are chosen, one or two, by name."""
    return {name: shelf.open(name) for name in ([first] if second in (NONE, None) else [first, second])}


def read_orders(
    shelf: Shelf, first: Any, second: Any, seeds: Any, sampler: Any, steps: Any, spacing: Any, label: Any, guidance: Any
) -> list[Order]:
    """What each model is to draw. A request that cannot be drawn is refused before anything is."""
    numbers, count = parse_seeds(str(seeds), most=MOST_SEEDS), check_whole("steps", steps, 1, MOST_STEPS)
    spec = one_of("sampler", sampler, SAMPLERS)
    if one_of("spacing", spacing, ALL_SPACINGS) != DEFAULT:
        spec = f"{spec}:spacing={spacing}"
    orders = []
    for name, model in read_models(shelf, first, second).items():
        check_work("seeds", len(numbers), count, model.shape)
        job = plan_job(model, spec, count, **_read_classes(classes_of(model), label, guidance))
        rehearse(model.denoiser.clipped(job.clip), model.shape, **job.arguments)
        orders.append(Order(name, model, job, numbers, spec))
    return orders


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


def noise_figure(name: str, model: Model, seeds: Sequence[int]) -> str:
    """The noise that the seeds begin with."""
    x = model.denoiser.process.prior((len(seeds), *model.shape), generators_from_seeds(seeds), device="cpu")
    return state_figure(x, name, model, f"the noise of seeds {seeds_text(seeds)}")


def samples_view(x: Tensor, order: Order) -> str:
    """The samples of an order: pictures as they are, anything else with axes and a colour bar."""
    if order.model.grid.kind == "picture":
        return state_figure(x, order.name, order.model, f"samples of seeds {seeds_text(order.seeds)}")
    data = as_stored(x, order.model.denoiser.scaling, order.model.grid.dtype)
    return plot(samples_figure(data, order.model.grid), f"Samples of {order.name}", f"{order.name}: samples")


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
            known[order.name] = gaussian, x
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


def preview(shelf: Shelf, first: Any, second: Any, seeds: Any) -> tuple[str, Any, Any]:
    """The noise of the seeds for the chosen models, and the controls of classes and guidance."""
    numbers, models = parse_seeds(str(seeds), most=MOST_SEEDS), read_models(shelf, first, second)
    for model in models.values():
        check_work("seeds", len(numbers), 1, model.shape)
    view = side_by_side([noise_figure(name, model, numbers) for name, model in models.items()])
    most = max(map(classes_of, models.values()))
    classes = gr.update(choices=[ALL, NONE, *map(str, range(most))], value=ALL, visible=most > 0)
    return view, classes, gr.update(visible=most > 0)


def draw(shelf: Shelf, is_dark: Any, *values: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """The progress, the pictures, the files, and the command, again and again until all is drawn."""
    orders = read_orders(shelf, *values)
    command = "\n".join(order.command for order in orders)
    figures = {order.name: noise_figure(order.name, order.model, order.seeds) for order in orders}

    def work(show: Show[tuple[Order, Visit]]) -> list[Tensor]:
        return [order.draw(show) for order in orders]

    def render(frame: tuple[Order, Visit]) -> tuple[str, Any, Any, str]:
        order, visit = frame
        step = f"step {visit.step} of {visit.num_steps}"
        figures[order.name] = state_figure(visit.x, order.name, order.model, step)
        return f"{escape(order.name)}: {step}", side_by_side([*figures.values()]), None, command

    samples = yield from watched(work, render)
    pairs = [*zip(orders, samples, strict=True)]
    with dark_page(is_dark):
        view = side_by_side([samples_view(x, order) for order, x in pairs]) + spectra_view(orders, samples)
    yield "Done.", view, [file for order, x in pairs for file in save_files(order, x)], command


def sample_tab(page: Page) -> None:
    shelf = page.shelf
    names, defaults = [*shelf.models()], default_models(shelf)
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            first = gr.Dropdown(labelled(names), value=defaults[0], label="Model", elem_id="sample-first")
            second = gr.Dropdown(
                labelled([NONE, *names]), value=defaults[1], label="Compare with", elem_id="sample-second"
            )
            seeds = gr.Textbox(SEEDS, label="Seeds", info=f"at most {MOST_SEEDS}", elem_id="sample-seeds")
            sampler = gr.Dropdown([*SAMPLERS], value=SAMPLER, label="Sampler", elem_id="sample-sampler")
            steps = gr.Slider(1, MOST_STEPS, STEPS, step=1, label="Steps", elem_id="sample-steps")
            spacing = gr.Dropdown(ALL_SPACINGS, value=DEFAULT, label="Spacing of the steps", elem_id="sample-spacing")
            label = gr.Dropdown([ALL], value=ALL, label="Class", visible=False, elem_id="sample-class")
            guidance = gr.Slider(
                0, MOST_GUIDANCE, 1, step=0.1, label="Guidance", visible=False, elem_id="sample-guidance"
            )
            both = buttons("sample", "Draw")
        with gr.Column(scale=3, min_width=320):
            status = gr.HTML("Press Draw.", elem_id="sample-status", padding=False)
            view = gr.HTML(elem_id="sample-view", padding=False)
            files = gr.File(label="Samples", file_count="multiple", interactive=False, elem_id="sample-files")
            command = code("The same on the command line", "sample-command")

    def menus() -> tuple[Any, Any]:
        known = [*shelf.models()]  # a training may have ended since the page was made
        return gr.update(choices=labelled(known)), gr.update(choices=labelled([NONE, *known]))

    on(page.ready.then, menus, None, [first, second])
    for event in (page.ready.then, [first.input, second.input, seeds.submit]):
        on(event, partial(preview, shelf), [first, second, seeds], [view, label, guidance])
    inputs = [page.dark, first, second, seeds, sampler, steps, spacing, label, guidance]
    on_buttons(both, partial(draw, shelf), inputs, [status, view, files, command])
