"""The tab *Restore*: hide a part of an item, and see several draws of what it may have been, their mean and spread."""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from PIL import Image
from torch import Tensor

from nidiff.app.layout import Tab
from nidiff.app.sample import LIMIT, SIDE, default_model
from nidiff.app.shelf import Shelf
from nidiff.app.uploads import SUFFIXES, read_picture
from nidiff.app.work import Show, check_time, check_work, watched
from nidiff.data.dataset import as_stored
from nidiff.data.load import load_items
from nidiff.errors import InputError, one_of
from nidiff.generation.job import Job, draw_seeds, plan_job
from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import MASK, as_mask, blurring, observe, observed_data, pooling, seeded
from nidiff.generation.restoration import Restoration, errors_text, item_seeds, restoration_job, restore
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator, mask
from nidiff.recipe import check_number, check_whole
from nidiff.report.page import figure, picture
from nidiff.report.restored import item_picture, restored_row
from nidiff.sampling.step import Visit
from nidiff.style import dark_page

SAMPLE, FILE = "a sample of the model", "my own file"
MASKS = {
    "90 % of the points": "random:0.1",
    "the centre": "not-center",
    "the left half": "not-left",
    "the lower half": "not-bottom",
}
OWN, BLUR = "what is black in my mask", "fine detail (blur)"
SCALES = {f"fine detail (averages over blocks of {factor})": factor for factor in (2, 4)}

MOST_SAMPLES, MOST_STEPS, MOST_NOISE, LEAST_BLUR, MOST_BLUR = 8, 100, 1.0, 0.01, 8.0
ITEM_SAMPLER, ITEM_STEPS, ITEM_SECONDS = "ancestral", 12, 5.0  # how a sample of the model is drawn, and for how long


# The request ---------------------------------------------------------------------------------------------------------


def read_item(model: Model, kind: Any, seed: Any, file: Any) -> Tensor:
    """An item [1, C, *event] in the units of the data, all of it finite: a sample of the model, the first of an .npy
    file, or a picture, fitted to the model's size."""
    check_work("item", 1, ITEM_STEPS, model.shape)
    if one_of("item", kind, (SAMPLE, FILE)) == SAMPLE:
        job, end = plan_job(model, ITEM_SAMPLER, ITEM_STEPS, tile=1), time.monotonic() + ITEM_SECONDS
        seeds = [check_whole("seed", seed, 0, 2**31)]
        x = draw_seeds(model.denoiser, job, seeds, model.shape, lambda visit: check_time(end))
        return as_stored(x, model.denoiser.scaling, model.grid.dtype)
    path = Path(str(file))
    if model.scaling.climatology is not None:
        raise InputError(
            "file", path.name, f"is not read for a model of {model.scaling.anomalies}", "use nidiff restore"
        )
    if path.suffix.lower() != ".npy" and model.grid.kind == "picture":
        channels, height, width = model.shape
        items = read_picture("file", path, (height, width), channels)[None]
    else:
        try:
            items = load_items(path, model.shape, grid=model.grid)[:1]
        except InputError:  # which would say where the file is on this computer
            items = torch.empty(0)
    dtype = str(items.dtype).removeprefix("torch.")
    if not len(items) or not (items.isfinite().all() if items.is_floating_point() else dtype == model.grid.dtype):
        problem = f"has no finite {model.grid.dtype} items of shape {model.shape}"
        raise InputError("file", path.name, problem, "give another .npy file, or use nidiff restore")
    return items


def ways_of(model: Model) -> list[str]:
    """How a part of an item can be hidden."""
    event = model.shape[1:]
    whole = [name for name, factor in SCALES.items() if not any(size % factor for size in event)]
    words = [name for name, word in MASKS.items() if word != "not-bottom" or len(event) > 1]
    return [*words, *([OWN] if len(event) == 2 else []), BLUR, *whole]


def read_operator(model: Model, way: Any, picture: Any, width: Any) -> Operator:
    """How the item is observed."""
    way = one_of("hidden", way, ways_of(model))
    if way == BLUR:
        return blurring(model, check_number("blur", width, LEAST_BLUR, MOST_BLUR))
    if way in SCALES:
        return pooling(model, SCALES[way])
    if way == OWN:
        height, across = model.shape[1:]
        seen = read_picture("mask", Path(str(picture)), (height, across), 1)[0] > 127
    else:
        seen = as_mask(MASKS[way], model.shape, seeded(0, MASK))
    return mask(seen.expand(1, *model.shape))


def read_observation(model: Model, items: Tensor, way: Any, picture: Any, width: Any, noise: Any) -> Observation:
    """The item as it will be observed."""
    amount = check_number("noise", noise, 0, MOST_NOISE)
    return observe(model, items, read_operator(model, way, picture, width), amount, units="model", degrade=True)


def read_job(model: Model, samples: Any, steps: Any) -> tuple[Job, int]:
    """The job, and the number of samples."""
    count = check_whole("samples", samples, 2, MOST_SAMPLES)
    steps = min(check_whole("steps", steps, 1, MOST_STEPS), len(model.denoiser.process.schedule))
    check_work("samples", count, steps, model.shape)
    return restoration_job(model, None, steps), count


def gallery(pictures: Iterable[tuple[str, Image.Image]]) -> str:
    """Small pictures with their names, in HTML."""
    figures = [figure(picture(image, SIDE, LIMIT), name, name, "small") for name, image in pictures]
    return f'<div class="grids">{"".join(figures)}</div>'


# Events --------------------------------------------------------------------------------------------------------------


def ways_menu(shelf: Shelf, name: Any, way: Any) -> Any:
    """What a model can hide; a choice that is still there stays, since the visitor may just be making another."""
    ways = ways_of(shelf.open(name))
    return gr.update(choices=ways) if way in ways else gr.update(choices=ways, value=ways[0])


def preview(
    shelf: Shelf, is_dark: Any, name: Any, kind: Any, seed: Any, file: Any, way: Any, *how: Any
) -> tuple[Any, ...]:
    """What is seen of the item, and which controls have a meaning."""
    shown = (kind != FILE, kind == FILE, way == OWN, way == BLUR)
    controls = [gr.update(visible=is_shown) for is_shown in shown]
    if (kind == FILE and file is None) or (way == OWN and how[0] is None):
        return "Choose a file.", "", *controls
    model = shelf.open(name)
    items = read_item(model, kind, seed, file)
    seen, truth = observed_data(model, read_observation(model, items, way, *how))[0].double(), items[0].double()
    with dark_page(is_dark):
        view = gallery((name, item_picture(x, truth, model.grid)) for name, x in (("observed", seen), ("truth", truth)))
    return "Press Restore.", view, *controls


def restored(
    shelf: Shelf, is_dark: Any, samples: Any, steps: Any, name: Any, kind: Any, seed: Any, file: Any, *how: Any
) -> Iterator[tuple[str, str]]:
    """The progress and the pictures, again and again until all is drawn."""
    model = shelf.open(name)
    (job, count), items = read_job(model, samples, steps), read_item(model, kind, seed, file)
    observation, truth = read_observation(model, items, *how), items.double()
    seeds = item_seeds(1, count)

    def work(show: Show[Visit]) -> Restoration:
        return restore(model, job, observation, samples=count, batch=count, truth=truth, watch=show)

    def render(visit: Visit) -> tuple[str, str]:
        with dark_page(is_dark):
            so_far = Restoration.of(model, observation, visit.x0.cpu()[None], seeds, truth)
            view = gallery(restored_row(so_far, 0, MOST_SAMPLES))
        return f"Step {visit.step} of {visit.num_steps}.", view

    restoration = yield from watched(work, render)
    with dark_page(is_dark):  # which must not stay open while the page waits
        view = gallery(restored_row(restoration, 0, MOST_SAMPLES))
    yield f"Done: {errors_text(restoration.errors())}.", view


def restore_tab(tab: Tab) -> None:
    shelf, model = tab.shelf, default_model(tab.shelf)
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            name = tab.models("Model", model)
            kind = gr.Radio([SAMPLE, FILE], value=SAMPLE, label="Item", elem_id="restore-item")
            seed = gr.Number(1, label="Seed of the item", precision=0, elem_id="restore-seed")
            file = gr.File(label="File", file_types=[*SUFFIXES, ".npy"], visible=False, elem_id="restore-file")
            ways = [*MASKS, OWN, BLUR, *SCALES]
            way = gr.Dropdown(ways, value=ways[0], label="Hide", elem_id="restore-way")
            hidden = gr.File(label="Mask", file_types=SUFFIXES, height=120, visible=False, elem_id="restore-mask")
            width = gr.Slider(
                0.5, MOST_BLUR, 1.5, step=0.5, label="Blur in pixels", visible=False, elem_id="restore-blur"
            )
            noise = gr.Slider(0, MOST_NOISE, 0, step=0.05, label="Noise (units of the model)", elem_id="restore-noise")
            samples = gr.Slider(2, MOST_SAMPLES, 6, step=1, label="Samples", elem_id="restore-samples")
            steps = gr.Slider(1, MOST_STEPS, 20, step=1, label="Steps", elem_id="restore-steps")
            both = tab.buttons("Restore")
        with gr.Column(scale=3, min_width=320):
            tab.status.render()
            view = gr.HTML(elem_id="restore-view", padding=False)
    request = [name, kind, seed, file, way, hidden, width, noise]
    about = partial(preview, shelf), [tab.dark, *request], [tab.status, view, seed, file, hidden, width]
    if model in shelf.user_models():  # which may be large: what is seen of an item, and only when somebody looks
        tab.first(*about, now=False)
    else:
        tab.first(partial(restored, shelf, False), [samples, steps, *request], [tab.status, view])
        tab.status.value = tab.status.value.replace("Done", "An example")
    menu = tab.on(name.input, partial(ways_menu, shelf), [name, way], [way])
    changes = [kind.input, way.input, seed.change, file.change, hidden.change, width.release, noise.release]
    for event in (menu.then, changes):
        tab.on(event, *about)
    tab.on_buttons(both, partial(restored, shelf), [tab.dark, samples, steps, *request], [tab.status, view])
