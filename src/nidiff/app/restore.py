"""The tab *Restore*: hide a part of an item, and see several draws of what it may have been, their mean and spread."""

import time
from abc import ABCMeta
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import gradio as gr
import numpy as np
import torch
from gradio.component_meta import ComponentMeta
from gradio.components.base import server
from gradio.components.image_editor import AcceptBlobs, EditorData, EditorDataBlobs
from PIL import Image
from torch import Tensor

from nidiff.app.layout import HIDDEN_PROGRESS, Page, labelled, stop_button
from nidiff.app.sample import LIMIT, SIDE
from nidiff.app.shelf import Shelf
from nidiff.app.uploads import open_picture
from nidiff.app.work import LONG, Show, check_between, check_work, user_error, watched, with_user_errors
from nidiff.data.dataset import as_stored
from nidiff.data.encoded import Encoded, read_encoded
from nidiff.data.images import SUFFIXES
from nidiff.data.items import load_items
from nidiff.data.load import load_dataset
from nidiff.data.sources import Limits
from nidiff.data.spec import DataSpec
from nidiff.errors import InputError, one_of
from nidiff.generation.job import Job, draw_seeds, plan_job
from nidiff.generation.loaded_model import Model
from nidiff.generation.masks import as_mask
from nidiff.generation.restoration import (
    MASK,
    Restoration,
    blurring,
    item_seeds,
    observe,
    observed_data,
    pooling,
    restoration_job,
    restore,
    seeded,
)
from nidiff.generation.restoration_folder import errors_text
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator, mask
from nidiff.model.zoo import EXPERIMENT
from nidiff.recipe import check_whole
from nidiff.report.page import figure, picture
from nidiff.report.restored import item_picture, restored_row
from nidiff.sampling.step import Visit
from nidiff.style import dark_page
from nidiff.training.experiment import read_experiment

MODEL, NUMBER = "fashion-mnist", 1
DATA, SAMPLE, FILE = "held-out data", "a sample of the model", "my own file"
PAINT, BLUR = "what I paint", "fine detail (blur)"
MASKS = {"the centre": "not-center", "the left half": "not-left", "90 % of the points": "random:0.1"}
SCALES = {f"fine detail (averages over blocks of {factor})": factor for factor in (2, 4)}
UNPAINTED = MASKS["the centre"]
UNTOUCHED = "Paint over what to hide, then press Restore. If you paint nothing, the centre is hidden."
BUILT_IN = ("digits",)  # data sets that need no download

MOST_SAMPLES, MOST_STEPS, MOST_NOISE, LEAST_BLUR, MOST_BLUR = 8, 100, 1.0, 0.01, 8.0
LARGEST_LAYER, MOST_LAYERS = 2**22, 50  # bytes of a painted layer; layers that wait
EDITOR = 336  # pixels along the longer side of what is painted on, at least
MOST_EDITOR = 1024
ITEM_SAMPLER, ITEM_STEPS, ITEM_SECONDS = "ancestral", 12, 5.0  # how a sample of the model is drawn, and for how long
COVERED = 0.35  # of a pixel must be painted to hide it
HIDDEN: Any = gr.update(visible="hidden")  # an editor that is taken away while it loads a picture fails in the browser


# The editor ----------------------------------------------------------------------------------------------------------


painted_layers: dict[str, EditorDataBlobs] = {}
_lock = Lock()


class _Unwritten(ComponentMeta):
    """Makes a component as gradio does, but writes no .pyi file beside its source."""

    def __new__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
        return ABCMeta.__new__(cls, name, bases, attributes)


class MaskEditor(gr.ImageEditor, metaclass=_Unwritten):
    """Paint on a picture. Of what a browser sends only the painted layer is read, after its size was checked."""

    is_template = True  # in the browser it is its parent

    def preprocess(self, payload: EditorData | None) -> Image.Image | None:
        """How much of each pixel is painted: the transparency of the painted layer."""
        if payload is None:
            return None
        sent = payload if payload.id is None else painted_layers.pop(payload.id, None)
        if sent is None or not sent.layers:
            return None
        layer: Any = sent.layers[0]
        try:
            with open_picture(
                "mask", layer if isinstance(layer, bytes) else Path(layer.path), 2 * MOST_EDITOR
            ) as image:
                return image.convert("RGBA").getchannel("A")
        except InputError as error:
            raise user_error(str(error)) from None

    @server  # type: ignore[untyped-decorator]
    def accept_blobs(self, data: AcceptBlobs) -> None:
        """Store the painted layer of a visitor until `preprocess` asks for it, and those of the last few visitors. One
        store serves all sessions: gradio makes an editor for each of them."""
        sent, files = getattr(data, "data", {}), getattr(data, "files", [])
        if sent.get("type") != "layer" or str(sent.get("index")) != "0" or not files or not sent.get("id"):
            return
        content = files[0][1]
        if len(content) > LARGEST_LAYER:
            raise user_error(f"the painted layer has more than {LARGEST_LAYER:,} bytes: paint on a smaller item.")
        with _lock:
            painted_layers[sent["id"]] = EditorDataBlobs(background=None, layers=[content], composite=None)
            while len(painted_layers) > MOST_LAYERS:
                painted_layers.pop(next(iter(painted_layers)))


# The item ------------------------------------------------------------------------------------------------------------


def kinds_of(model: Path) -> list[str]:
    """Where an item to restore can come from, for the model in a folder."""
    file = model / EXPERIMENT
    try:
        has_data = file.is_file() and read_experiment(file).data.source in BUILT_IN
    except InputError:  # it is damaged, as whoever opens the model will hear
        has_data = False
    return [*([DATA] if has_data else []), SAMPLE, FILE]


def read_item(model: Model, kind: Any, number: Any, file: Any) -> Tensor:
    """An item [1, C, *event] in the units of the data, all of it finite."""
    check_work("item", 1, ITEM_STEPS, model.shape)
    if one_of("item", kind, kinds_of(model.path)) == FILE:
        items = read_file(model, file)
    elif kind == SAMPLE:
        items = draw_item(model, check_whole("number", number, 0, 2**31))
    else:
        data = load_dataset(read_experiment(model.path / EXPERIMENT).data.source, split="test")
        items = data.stored(torch.tensor([check_whole("number", number, 0, len(data) - 1)]))
    dtype, shape = str(items.dtype).removeprefix("torch."), tuple(items.shape[1:])
    problem = ""
    if shape != model.shape:
        problem = f"has shape {shape}, not the model's {model.shape}"
    elif not items.is_floating_point() and dtype != model.grid.dtype:
        problem = f"is {dtype}, and the model's data are {model.grid.dtype}"
    elif not bool(items.isfinite().all()):
        problem = "has NaN or infinite values"
    if problem:
        raise InputError("item", None, problem, "give another, or use nidiff restore")
    return items


def draw_item(model: Model, seed: int) -> Tensor:
    """A sample of the model."""
    job, end = plan_job(model, ITEM_SAMPLER, ITEM_STEPS, tile=1), time.monotonic() + ITEM_SECONDS

    def watch(visit: Visit) -> None:
        if time.monotonic() > end:
            problem = f"is a sample that takes longer than {ITEM_SECONDS:g} s"
            raise InputError("item", None, problem, f"choose {FILE!r}")

    x = draw_seeds(model.denoiser, job, [seed], model.shape, watch)
    return as_stored(x, model.denoiser.scaling, model.grid.dtype)


def read_file(model: Model, file: Any) -> Tensor:
    """The first item of a picture, fitted to the model's size, or of an .npy file."""
    path = Path(str(file))
    is_array, is_picture = path.suffix.lower() == ".npy", path.suffix.lower() in SUFFIXES
    if file is None or not (is_array or (is_picture and model.grid.kind == "picture")):
        kinds = f"{', '.join(SUFFIXES)} or .npy" if model.grid.kind == "picture" else ".npy"
        raise InputError("file", file and path.name, "is not a file for this model", f"choose one of type {kinds}")
    try:
        if is_array:
            return load_items(path, model.shape)[:1]
        channels, *size = model.shape
        with open_picture("file", path):
            spec = DataSpec(size=(size[0], size[1]), channels=channels)
            values = read_encoded([Encoded(path.name, path)], spec, Limits(memory_limit=None))[0]
            return values.index_select(0, torch.tensor([0]))
    except InputError as error:  # which need not say where the file is on this computer
        raise InputError(None, None, str(error).replace(str(path), path.name).rstrip(".")) from None


# The observation -----------------------------------------------------------------------------------------------------


def ways_of(model: Model) -> list[str]:
    """How a part of an item can be hidden."""
    can_paint = len(model.shape) == 3 and max(model.shape[1:]) <= MOST_EDITOR
    whole = [name for name, factor in SCALES.items() if not any(size % factor for size in model.shape[1:])]
    return [*([PAINT] if can_paint else []), *MASKS, BLUR, *whole]


def read_operator(model: Model, way: Any, painted: Image.Image | None, width: Any) -> Operator:
    """How the item is observed."""
    way = one_of("hidden", way, ways_of(model))
    if way == BLUR:
        return blurring(model, check_between("blur", width, LEAST_BLUR, MOST_BLUR))
    if way in SCALES:
        return pooling(model, SCALES[way])
    seen = None if way != PAINT or painted is None else unpainted(painted, model.shape[1:])
    if seen is None:
        seen = as_mask(MASKS.get(way, UNPAINTED), model.shape, seeded(0, MASK))
    return mask(seen.expand(1, *model.shape))


def unpainted(painted: Image.Image, event: tuple[int, ...]) -> Tensor | None:
    """Which points [H, W] of an item are not painted over; None if all are not."""
    height, width = event
    small = painted.convert("L").resize((width, height), Image.Resampling.BOX)
    seen = torch.from_numpy(np.array(small)) < 255 * COVERED
    if not bool(seen.any()):
        raise InputError("mask", None, "covers everything", "leave something to see")
    return None if bool(seen.all()) else seen


def read_observation(model: Model, items: Tensor, way: Any, painted: Any, width: Any, noise: Any) -> Observation:
    """The item as it will be observed."""
    amount = check_between("noise", noise, 0, MOST_NOISE)
    return observe(model, items, read_operator(model, way, painted, width), amount, units="model", degrade=True)


def read_job(model: Model, samples: Any, steps: Any) -> tuple[Job, int]:
    """The job, and the number of samples."""
    count = check_whole("samples", samples, 2, MOST_SAMPLES)
    steps = min(check_whole("steps", steps, 1, MOST_STEPS), len(model.denoiser.process.schedule))
    check_work("samples", count, steps, model.shape)
    return restoration_job(model, None, steps), count


# HTML ----------------------------------------------------------------------------------------------------------------


def gallery(pictures: Iterable[tuple[str, Image.Image]]) -> str:
    """Small pictures with their names."""
    figures = [figure(picture(image, SIDE, LIMIT), name, name, "small") for name, image in pictures]
    return f'<div class="grids">{"".join(figures)}</div>'


def restored_view(restoration: Restoration) -> str:
    """What was observed, the samples, their mean and spread, and the truth."""
    return gallery(restored_row(restoration, 0, MOST_SAMPLES))


def observed_view(model: Model, observation: Observation, items: Tensor) -> str:
    """What will be observed of the item, and the truth."""
    truth = items[0].float()
    values = {"observed": observed_data(model, observation)[0].float(), "truth": truth}
    return gallery((name, item_picture(item, truth, model.grid)) for name, item in values.items())


def background(items: Tensor, model: Model) -> Image.Image:
    """What is painted on: the item, enlarged by a whole factor."""
    shown = item_picture(items[0].float(), items[0].float(), model.grid)
    height, width = model.shape[1:]
    factor = max(1, EDITOR // max(height, width))
    return shown.convert("RGB").resize((factor * width, factor * height), Image.Resampling.NEAREST)


# Events --------------------------------------------------------------------------------------------------------------


def menus_of(shelf: Shelf, name: Any, kind: Any, way: Any) -> list[Any]:
    """What another model leaves to choose: where the item comes from, and what can be hidden. A choice that is still
    there is left alone, since the visitor may just be making another."""
    model = shelf.open(name)
    menus = ((kind, kinds_of(model.path)), (way, ways_of(model)))
    return [
        gr.update(choices=known) if now in known else gr.update(choices=known, value=known[0]) for now, known in menus
    ]


def preview(
    shelf: Shelf, is_dark: Any, name: Any, kind: Any, number: Any, file: Any, way: Any, width: Any, noise: Any
) -> tuple[Any, ...]:
    """What is chosen: the picture to paint on, what is seen of the item, and which controls have a meaning."""
    model = shelf.open(name)
    controls = gr.update(visible=kind == FILE), gr.update(visible=kind != FILE), gr.update(visible=way == BLUR)
    if kind == FILE and file is None:
        return "Choose a file.", HIDDEN, "", *controls
    items = read_item(model, kind, number, file)
    if one_of("hidden", way, ways_of(model)) == PAINT:
        return UNTOUCHED, gr.update(visible=True, value=background(items, model)), "", *controls
    with dark_page(is_dark):
        view = observed_view(model, read_observation(model, items, way, None, width, noise), items)
    return "Press Restore.", HIDDEN, view, *controls


def preview_again(shelf: Shelf, *values: Any) -> tuple[Any, Any]:
    """The same where only numbers have changed: what is painted stays."""
    status, _, view, *_ = preview(shelf, *values)
    return status, view


def restored(
    shelf: Shelf, is_dark: Any, name: Any, samples: Any, steps: Any, kind: Any, number: Any, file: Any, *hidden: Any
) -> Iterator[tuple[str, str]]:
    """The progress and the pictures, again and again until all is drawn."""
    model = shelf.open(name)
    (job, count), items = read_job(model, samples, steps), read_item(model, kind, number, file)
    observation, truth = read_observation(model, items, *hidden), items.float()
    seeds = np.array([item_seeds(0, count, 0)])

    def work(show: Show[Visit]) -> Restoration:
        return restore(model, job, observation, samples=count, batch=count, truth=truth, watch=show)

    def render(visit: Visit) -> tuple[str, str]:
        with dark_page(is_dark):
            view = restored_view(Restoration.of(model, observation, visit.x0.cpu()[None], seeds, truth))
        return f"Step {visit.step} of {visit.num_steps}.", view

    restoration = yield from watched(work, render)
    with dark_page(is_dark):  # which must not stay open while the page waits
        view = restored_view(restoration)
    yield f"Done: {errors_text(restoration.errors())}.", view


def restore_tab(page: Page) -> None:
    shelf = page.shelf
    known = shelf.models()
    model = next(iter([*shelf.user_models(), *(name for name in known if name == MODEL), *known]))
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            name = gr.Dropdown(labelled(known), value=model, label="Model", elem_id="restore-model")
            kind = gr.Radio(kinds_of(known[model]), value=SAMPLE, label="Item", elem_id="restore-item")
            number = gr.Number(NUMBER, label="Number or seed of the item", precision=0, elem_id="restore-number")
            file = gr.File(label="File", file_types=[*SUFFIXES, ".npy"], visible=False, elem_id="restore-file")
            way = gr.Dropdown([PAINT, *MASKS, BLUR, *SCALES], value=PAINT, label="Hide", elem_id="restore-way")
            width = gr.Slider(
                0.5, MOST_BLUR, 1.5, step=0.5, label="Blur in pixels", visible=False, elem_id="restore-blur"
            )
            noise = gr.Slider(0, MOST_NOISE, 0, step=0.05, label="Noise (units of the model)", elem_id="restore-noise")
            samples = gr.Slider(2, MOST_SAMPLES, 6, step=1, label="Samples", elem_id="restore-samples")
            steps = gr.Slider(1, MOST_STEPS, 20, step=1, label="Steps", elem_id="restore-steps")
            with gr.Row():
                go = gr.Button("Restore", variant="primary", min_width=100, elem_id="restore-restore")
                stop = gr.Button("Stop", min_width=100, elem_id="restore-stop")
        with gr.Column(scale=3, min_width=320):
            editor = MaskEditor(
                label="Paint over what to hide", image_mode="RGBA", sources=(), transforms=(), layers=False,
                brush=gr.Brush(default_size=32, colors=["#e02020"], color_mode="fixed"), format="png", buttons=[],
                elem_id="restore-editor",
            )  # fmt: skip
            status = gr.HTML(UNTOUCHED, elem_id="restore-status", padding=False)
            view = gr.HTML(elem_id="restore-view", padding=False)
    item = [kind, number, file, way]
    previewed: dict[str, Any] = {
        "fn": with_user_errors(partial(preview, shelf)),
        "inputs": [page.dark, name, *item, width, noise],
        "outputs": [status, editor, view, file, number, width],
        "trigger_mode": "always_last",
        **HIDDEN_PROGRESS,
    }
    numbers = previewed | {"fn": with_user_errors(partial(preview_again, shelf)), "outputs": [status, view]}
    models = with_user_errors(lambda: gr.update(choices=labelled(shelf.models())))
    page.ready.then(models, None, name, **HIDDEN_PROGRESS)
    for event in (page.ready.then, name.input):
        menus = event(with_user_errors(partial(menus_of, shelf)), [name, kind, way], [kind, way], **HIDDEN_PROGRESS)
        menus.then(**previewed)
    for event in (kind.input, way.input, number.change, file.change):
        event(**previewed)
    for event in (width.release, noise.release):
        event(**numbers)
    inputs = [page.dark, name, samples, steps, *item, editor, width, noise]
    restoring = go.click(
        with_user_errors(partial(restored, shelf)), inputs, [status, view], show_progress="hidden", **LONG
    )
    stop_button(stop, restoring, status)
