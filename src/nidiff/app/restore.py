"""The tab *Restore*: hide a part of an item, and see several draws of what it may have been, their mean and spread."""

import io
import math
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

from nidiff.app.look import Page, labelled, stop_button
from nidiff.app.sample import LIMIT, MOST_WORK, SIDE
from nidiff.app.shelf import Shelf
from nidiff.app.work import LONG, QUICK, Show, said, shown_as, spoken, watched
from nidiff.data.encoded import FORMATS, Encoded, Reading, read_encoded
from nidiff.data.images import SUFFIXES
from nidiff.data.items import load_items
from nidiff.data.load import load_dataset
from nidiff.errors import InputError, first_line, one_of, shown
from nidiff.generation.job import draw_seeds, kept
from nidiff.generation.masks import as_mask
from nidiff.generation.observed import MASK, Observed, View, averaged, blurred, observe, restore, through
from nidiff.generation.opened import Model, plan_job
from nidiff.generation.restoration import Plan, Restoration, errors_text, in_model_units, plan_restoration, seeded
from nidiff.model.zoo import EXPERIMENT
from nidiff.recipe import check_number, check_whole
from nidiff.report.page import figure, picture
from nidiff.report.restored import item_picture, restored_row
from nidiff.sampling.sampler import Visit
from nidiff.style import dark_page
from nidiff.training.experiment import read_experiment

MODEL, NUMBER = "fashion-mnist", 1
DATA, SAMPLE, FILE = "held-out data", "a sample of the model", "my own file"
PAINT, BLUR = "what I paint", "fine detail (blur)"
MASKS = {"the centre": "not-center", "the left half": "not-left", "90 % of the points": "random:0.1"}
SCALES = {f"fine detail (averages over blocks of {factor})": factor for factor in (2, 4)}
UNPAINTED = MASKS["the centre"]
UNTOUCHED = "Paint over what to hide, then press Restore. If you paint nothing, the centre is hidden."
AT_HAND = ("digits",)  # data sets that are built in

MOST_SAMPLES, MOST_STEPS, MOST_NOISE, MOST_BLUR = 8, 100, 1.0, 8.0
MOST_NUMBERS = 2**20  # of an item
MOST_PIXELS = 4096**2  # of a picture that is sent
LARGEST_FILE, LARGEST_LAYER, MOST_LAYERS = 2**24, 2**22, 50  # bytes of a file, of a painted layer; layers that wait
EDITOR = 336  # pixels along the longer side of what is painted on, at least
MOST_EDITOR = 1024
ITEM_SAMPLER, ITEM_STEPS, ITEM_SECONDS = "ancestral", 12, 5.0  # how a sample of the model is drawn, and for how long
COVERED = 0.35  # of a pixel must be painted to hide it
HIDDEN: Any = gr.update(visible="hidden")  # an editor that is taken away while it loads a picture fails in the browser


_layers: dict[str, EditorDataBlobs] = {}
_lock = Lock()


class _Unwritten(ComponentMeta):
    """Makes a component as gradio does, but writes no .pyi file beside its source."""

    def __new__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
        return ABCMeta.__new__(cls, name, bases, attributes)


class MaskEditor(gr.ImageEditor, metaclass=_Unwritten):
    """Paint on a picture. Of what a browser sends only the painted layer is read, after a look at its size."""

    is_template = True  # in the browser it is its parent

    def preprocess(self, payload: EditorData | None) -> Image.Image | None:  # type: ignore[override]
        if payload is None:
            return None
        sent = payload if payload.id is None else self.blob_storage.pop(payload.id, None)
        layer = sent.layers[0] if sent is not None and sent.layers else None
        try:
            return None if layer is None else read_layer(layer if isinstance(layer, bytes) else Path(layer.path))
        except InputError as error:
            raise said(str(error)) from None

    @property
    def blob_storage(self) -> dict[str, EditorDataBlobs]:
        """One for all sessions: gradio makes an editor for each of them."""
        return _layers

    @blob_storage.setter
    def blob_storage(self, value: dict[str, EditorDataBlobs]) -> None:
        pass

    @server  # type: ignore[untyped-decorator]
    def accept_blobs(self, data: AcceptBlobs) -> None:
        """Keep the painted layer of a visitor until `preprocess` asks for it, and those of the last few visitors."""
        sent, files = getattr(data, "data", {}), getattr(data, "files", [])
        if sent.get("type") != "layer" or str(sent.get("index")) != "0" or not files or not sent.get("id"):
            return
        content = files[0][1]
        if len(content) > LARGEST_LAYER:
            raise said(f"the painted layer has more than {LARGEST_LAYER:,} bytes: paint on a smaller item.")
        with _lock:
            _layers[sent["id"]] = EditorDataBlobs(background=None, layers=[content], composite=None)
            while len(_layers) > MOST_LAYERS:
                _layers.pop(next(iter(_layers)))


def read_layer(source: bytes | Path) -> Image.Image:
    """How much of each pixel is painted: the transparency of a picture that is not larger than an editor's."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            if max(image.size) <= 2 * MOST_EDITOR:
                return image.convert("RGBA").getchannel("A")
            problem = f"it has {image.width} × {image.height} pixels"
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        problem = first_line(error)
    raise InputError(f"mask: what was painted cannot be read ({problem}): reload the page and paint again.")


# The item ------------------------------------------------------------------------------------------------------------


def kinds_of(model: Path) -> list[str]:
    """Where an item to restore can come from, for the model in a folder."""
    return [*([DATA] if has_data(model) else []), SAMPLE, FILE]


def has_data(model: Path) -> bool:
    """Whether the data of the model are at hand, without a download."""
    file = model / EXPERIMENT
    try:
        return file.is_file() and read_experiment(file).data in AT_HAND
    except InputError:  # it is damaged: whoever opens the model is told
        return False


def read_item(model: Model, kind: Any, number: Any, file: Any) -> Tensor:
    """An item [1, C, *event] in the units of the data, all of it finite."""
    kind, size = one_of("item", kind, kinds_of(model.path)), math.prod(model.shape)
    if size > MOST_NUMBERS:
        raise InputError(f"model: its items have {size:,} numbers, too many for this page: use nidiff restore.")
    if kind == FILE:
        items = read_file(model, file)
    elif kind == SAMPLE:
        items = draw_item(model, check_whole("number", number, 0, 2**31))
    else:
        data = load_dataset(read_experiment(model.path / EXPERIMENT).data, split="test")
        items = data.stored(torch.tensor([check_whole("number", number, 0, len(data) - 1)]))
    if tuple(items.shape[1:]) != model.shape:
        raise InputError(f"item: it has shape {tuple(items.shape[1:])}, not the model's {model.shape}: give another.")
    stored = str(items.dtype).removeprefix("torch.")
    if not items.is_floating_point() and stored != model.grid.dtype:
        raise InputError(f"item: it is {stored}, and the model's data are {model.grid.dtype}: convert it.")
    if not bool(items.isfinite().all()):
        raise InputError("item: it has NaN or infinite values: fill them in, or use nidiff restore with --missing.")
    return items


def draw_item(model: Model, seed: int) -> Tensor:
    """A sample of the model."""
    job, end = plan_job(model, ITEM_SAMPLER, ITEM_STEPS, tile=1), time.monotonic() + ITEM_SECONDS

    def watch(visit: Visit) -> None:
        if time.monotonic() > end:
            raise InputError(f"item: a sample of this model takes longer than {ITEM_SECONDS:g} s: choose {FILE!r}.")

    x = draw_seeds(model.denoiser.clipped(job.clip), job, [seed], model.shape, watch)
    return kept(x, model.denoiser.scaling, model.grid.dtype)


def read_file(model: Model, file: Any) -> Tensor:
    """The first item of a picture, fitted to the model's size, or of an .npy file; what it claims to be is looked at
    before it is read."""
    if not isinstance(file, str | Path):
        raise InputError("file: none was sent: choose a picture or an .npy file.")
    path = Path(file)
    if path.stat().st_size > LARGEST_FILE:
        raise InputError(f"file={shown(path.name)} has more than {LARGEST_FILE:,} bytes: give a smaller one.")
    try:
        if path.suffix.lower() == ".npy":
            return load_items(path, model.shape)[:1]
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(
                f"file={shown(path.name)} is neither a picture nor .npy: give {', '.join(SUFFIXES)}, .npy."
            )
        return read_picture(model, path)
    except InputError as error:
        raise InputError(str(error).replace(str(path), path.name)) from None  # where it is here is of no use


def read_picture(model: Model, path: Path) -> Tensor:
    if model.grid.kind != "picture":
        raise InputError(f"file={shown(path.name)} is a picture, and the model's items are not: give an .npy file.")
    try:
        with Image.open(path, formats=FORMATS) as image:
            problem = f"{image.width} × {image.height} pixels" if math.prod(image.size) > MOST_PIXELS else ""
    except Exception as error:  # Pillow raises nearly anything when a file is broken, or claims to be huge
        problem = first_line(error)
    if problem:
        remedy = f"give one of at most {MOST_PIXELS:,} pixels"
        raise InputError(f"file={shown(path.name)} cannot be read as a picture ({problem}): {remedy}.")
    channels, height, width = model.shape
    values = read_encoded([Encoded(path.name, path)], Reading((height, width), channels, memory_limit=None))[0]
    return values.index_select(0, torch.tensor([0]))


# What is seen of it --------------------------------------------------------------------------------------------------


def can_paint(model: Model) -> bool:
    return len(model.shape) == 3 and max(model.shape[1:]) <= MOST_EDITOR


def ways_of(model: Model) -> list[str]:
    """How a part of an item can be hidden."""
    whole = [name for name, factor in SCALES.items() if not any(size % factor for size in model.shape[1:])]
    return [*([PAINT] if can_paint(model) else []), *MASKS, BLUR, *whole]


def read_view(model: Model, way: Any, painted: Image.Image | None, width: Any) -> View:
    """How the item is seen."""
    way = one_of("hidden", way, ways_of(model))
    if way == BLUR:
        if check_number("blur", width) > MOST_BLUR:
            raise InputError(f"blur={width} must be at most {MOST_BLUR:g} pixels.")
        return blurred(model, width, 1)
    if way in SCALES:
        return averaged(model, SCALES[way], 1)
    seen = None if way != PAINT or painted is None else unpainted(painted, model.shape[1:])
    if seen is None:
        seen = as_mask(MASKS.get(way, UNPAINTED), model.shape, seeded(0, MASK))
    return through(seen.expand(1, *model.shape))


def unpainted(painted: Image.Image, event: tuple[int, ...]) -> Tensor | None:
    """Which points [H, W] of an item are seen, if any is painted over."""
    height, width = event
    small = painted.convert("L").resize((width, height), Image.Resampling.BOX)
    seen = torch.from_numpy(np.array(small)) < 255 * COVERED
    if not bool(seen.any()):
        raise InputError("mask: everything is painted over: leave something to see.")
    return None if bool(seen.all()) else seen


def read_seen(model: Model, items: Tensor, way: Any, painted: Any, width: Any, noise: Any) -> Observed:
    """The item as it will be observed."""
    amount = check_number("noise", noise)
    if not 0 <= amount <= MOST_NOISE:
        raise InputError(f"noise={amount:g} must be from 0 to {MOST_NOISE:g}, in the units of the model.")
    view = read_view(model, way, painted, width)
    return observe(model, items, view, in_model_units(amount, model, "model"), degrade=True)


def read_plan(model: Model, samples: Any, steps: Any) -> Plan:
    count = check_whole("samples", samples, 2, MOST_SAMPLES)
    steps = min(check_whole("steps", steps, 1, MOST_STEPS), len(model.denoiser.process.schedule))
    if (work := count * steps * math.prod(model.shape)) > MOST_WORK:
        remedy = "ask for fewer samples or steps, or use the command nidiff restore"
        raise InputError(f"samples × steps × size = {work:,} is more than {MOST_WORK:,}: {remedy}.")
    return plan_restoration(model, None, steps, samples=count, seed=0, batch=count)


# What is shown -------------------------------------------------------------------------------------------------------


def gallery(pictures: Iterable[tuple[str, Image.Image]]) -> str:
    """Small pictures with their names, in HTML."""
    figures = [figure(picture(one, SIDE, LIMIT), name, name, "small") for name, one in pictures]
    return f'<div class="grids">{"".join(figures)}</div>'


def restored_view(found: Restoration) -> str:
    """What was observed, the samples, their mean and spread, and the truth."""
    return gallery(restored_row(found, 0, MOST_SAMPLES))


def observed_view(seen: Observed, items: Tensor) -> str:
    """What will be observed of the item, and the truth."""
    shown, grid = {"observed": seen.data[0].float(), "truth": items[0].float()}, seen.model.grid
    return gallery((name, item_picture(one, items[0].float(), grid)) for name, one in shown.items())


def background(items: Tensor, model: Model) -> Image.Image:
    """What is painted on: the item, enlarged by a whole factor."""
    shown = item_picture(items[0].float(), items[0].float(), model.grid)
    height, width = model.shape[1:]
    factor = max(1, EDITOR // max(height, width))
    return shown.convert("RGB").resize((factor * width, factor * height), Image.Resampling.NEAREST)


# Events --------------------------------------------------------------------------------------------------------------


def chosen(shelf: Shelf, name: Any, kind: Any, way: Any) -> tuple[Any, ...]:
    """What another model leaves to choose: where the item comes from, and what can be hidden. A choice that is still
    there is left alone, since the visitor may just be making another."""
    model = shelf.open(name)
    found = []
    for now, choices in ((kind, kinds_of(model.path)), (way, ways_of(model))):
        found.append(gr.update(choices=choices) if now in choices else gr.update(choices=choices, value=choices[0]))
    return tuple(found)


def look(
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
        view = observed_view(read_seen(model, items, way, None, width, noise), items)
    return "Press Restore.", HIDDEN, view, *controls


def look_again(shelf: Shelf, *values: Any) -> tuple[Any, Any]:
    """The same where only numbers have changed: what is painted stays."""
    status, _, view, *_ = look(shelf, *values)
    return status, view


def restored(
    shelf: Shelf, is_dark: Any, name: Any, samples: Any, steps: Any, kind: Any, number: Any, file: Any, *hidden: Any
) -> Iterator[tuple[str, str]]:
    """How far it is, and the pictures, again and again until all is drawn."""
    model = shelf.open(name)
    plan = read_plan(model, samples, steps)
    seen = read_seen(model, read_item(model, kind, number, file), *hidden)
    seeds = np.array([plan.seeds(0)])

    def work(show: Show[Visit]) -> Restoration:
        return restore(seen, plan, watch=show)

    def page(visit: Visit) -> tuple[str, str]:
        with dark_page(is_dark):
            return f"Step {visit.step} of {visit.num_steps}.", restored_view(seen.restored(visit.x0.cpu()[None], seeds))

    found = yield from shown_as(watched(work), page)
    with dark_page(is_dark):  # which must not stay open while the page waits
        view = restored_view(found)
    yield f"Done: {errors_text(found.errors())}.", view


def restore_tab(page: Page) -> None:
    shelf = page.shelf
    known = shelf.models()
    names = [*known]
    model = next(iter([*shelf.own_models(), *(one for one in names if one == MODEL), *names]))
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            name = gr.Dropdown(labelled(names), value=model, label="Model", elem_id="restore-model")
            kind = gr.Radio(kinds_of(known[model]), value=SAMPLE, label="Item", elem_id="restore-item")
            number = gr.Number(NUMBER, label="Number or seed of the item", precision=0, elem_id="restore-number")
            file = gr.File(
                label="File", file_types=[*SUFFIXES, ".npy"], type="filepath", visible=False, elem_id="restore-file"
            )
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
                label="Paint over what to hide",
                image_mode="RGBA",
                sources=(),
                transforms=(),
                layers=False,
                brush=gr.Brush(default_size=32, colors=["#e02020"], color_mode="fixed"),
                format="png",
                buttons=[],
                elem_id="restore-editor",
            )
            status = gr.HTML(UNTOUCHED, elem_id="restore-status", padding=False)
            view = gr.HTML(elem_id="restore-view", padding=False)
    item = [kind, number, file, way]
    quick: dict[str, Any] = {"show_progress": "hidden", **QUICK}
    looked: dict[str, Any] = {
        "fn": spoken(partial(look, shelf)),
        "inputs": [page.dark, name, *item, width, noise],
        "outputs": [status, editor, view, file, number, width],
        "trigger_mode": "always_last",
        **quick,
    }
    options: list[Any] = [spoken(partial(chosen, shelf)), [name, kind, way], [kind, way]]
    page.ready.then(spoken(lambda: gr.update(choices=labelled(shelf.models()))), None, name, **quick)
    page.ready.then(*options, **quick).then(**looked)
    name.input(*options, **quick).then(**looked)
    for changed in (kind.input, way.input, number.change, file.change):
        changed(**looked)
    for moved in (width.release, noise.release):
        moved(**looked | {"fn": spoken(partial(look_again, shelf)), "outputs": [status, view]})
    restoring = go.click(
        spoken(partial(restored, shelf)),
        [page.dark, name, samples, steps, *item, editor, width, noise],
        [status, view],
        show_progress="hidden",
        **LONG,
    )
    stop_button(stop, restoring, status)
