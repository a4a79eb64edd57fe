"""The tab *Compare*: two models of the same data, or two samplers of one, draw the same seeds and are measured."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from html import escape
from typing import Any

import gradio as gr
from torch import Tensor

from nidiff.app.layout import Tab
from nidiff.app.sample import (
    Order,
    Shown,
    default_model,
    drawing_parts,
    drawn_orders,
    model_menus,
    noise_view,
    read_order,
)
from nidiff.app.shelf import Shelf
from nidiff.app.work import check_work
from nidiff.data.sources import spread_rows
from nidiff.errors import InputError
from nidiff.evaluation.evaluator import Evaluator, are_pictures, open_evaluator
from nidiff.evaluation.metrics import measure
from nidiff.evaluation.real import real_source
from nidiff.evaluation.table import HTML, number
from nidiff.evaluation.tune import SHOWN, as_data
from nidiff.generation.loaded_model import Model
from nidiff.report.page import table
from nidiff.training.experiment import read_experiment

SEEDS, MOST_SEEDS, MOST_NUMBERS, RESAMPLES = (
    "0-35",
    144,
    2**22,
    10,
)  # of real items, together; for errors
FEATURES = "pixels"  # of pictures: the page needs no other network


def data_of(model: Model) -> str | None:
    """The data that a model was trained on, if it is a run, which says so."""
    return read_experiment(model.path).data.source if (model.path / "experiment.json").is_file() else None


def read_pair(shelf: Shelf, first: Any, second: Any) -> list[tuple[str, Model]]:
    """Two models by name; of different data they are refused, for there is nothing to compare."""
    models = [(name, shelf.open(name)) for name in (first, second)]
    (_, one), (_, other) = models
    if one.shape != other.shape or len({data_of(one), data_of(other)} - {None}) > 1:
        about = " and ".join(f"{data_of(model) or 'items'} {model.shape}" for _, model in models)
        problem = f"was trained on other data than {first} ({about})"
        raise InputError("second model", second, problem, "choose two models of the same data")
    return models


@lru_cache(2)
def real_data(shelf: Shelf, name: str) -> Evaluator | None:
    """What was held out of the data of a model, or all of them; None if they cannot be read here."""
    model = shelf.open(name)
    scaling: dict[str, Any] = {} if model.denoiser.scaling is None else {"scaling": model.denoiser.scaling}
    try:
        real = real_source(model.path, like=model.grid).held_out(**scaling).data
        most = min(len(real), MOST_NUMBERS // math.prod(real.shape))
        features = FEATURES if are_pictures(real, model) else None
        return open_evaluator(model.path, real, model=model, num_real=most, features=features)
    except InputError:
        return None


def scores(shelf: Shelf, orders: Sequence[Order], samples: Sequence[Tensor]) -> str:
    """The distances of both sets of samples, and of as many real items, from the real data."""
    evaluator = real_data(shelf, next((order.name for order in orders if data_of(order.model)), orders[0].name))
    if evaluator is None:
        return "<p>The data of these models cannot be read here, so there are no scores.</p>"
    real, others = evaluator.halves
    sets = {"Real items": others.resampled(spread_rows(len(others), len(samples[0])))}
    for order, x in zip(orders, samples, strict=True):
        items = as_data(x, order.model.denoiser, evaluator)
        sets[order.label] = evaluator.as_set(items, evaluator.features_of(items))
    resamples = 0 if evaluator.is_picture else RESAMPLES
    columns = [measure(real, each, bootstrap=resamples, keys=SHOWN[evaluator.is_picture]) for each in sets.values()]
    rows = [[escape(name), *(number(column[name], HTML) for column in columns)] for name in columns[0]]
    words = f"Distances of {len(samples[0])} items from {len(real)} real ones: 0 is best, real items show the least."
    return table(["", *map(escape, sets)], rows) + f'<p class="caption">{words}</p>'


def preview(shelf: Shelf, first: Any, second: Any, seeds: Any) -> tuple[str, str]:
    """The noise of the seeds for both models, or for the only one."""
    return "Press Compare.", noise_view([*dict(read_pair(shelf, first, second)).items()], seeds, MOST_SEEDS)


def compare(shelf: Shelf, is_dark: Any, seeds: Any, *sides: Any) -> Iterator[Shown]:
    """The progress, the pictures and scores, the files, and the commands, until all is drawn and measured."""
    read_pair(shelf, sides[0], sides[3])
    orders = [read_order(shelf, *side, seeds, MOST_SEEDS) for side in (sides[:3], sides[3:])]
    steps = sum(order.job.num_steps for order in orders)
    check_work("seeds", len(orders[0].seeds), steps, orders[0].model.shape)
    if orders[0].label == orders[1].label:
        raise InputError("second", None, "is the same as the first", "choose another model, sampler or number of steps")
    yield from drawn_orders(orders, is_dark, partial(scores, shelf, orders))


def compare_tab(tab: Tab) -> None:
    shelf, usual = tab.shelf, default_model(tab.shelf)
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            first, changed = model_menus(tab, "first-", "First model", usual)
            second, other_changed = model_menus(tab, "second-", "Second model", usual, place=1)
            seeds = gr.Textbox(SEEDS, label="Seeds of both", info=f"at most {MOST_SEEDS}", elem_id="compare-seeds")
            both = tab.buttons("Compare")
        with gr.Column(scale=3, min_width=320):
            shown = drawing_parts(tab)
    about = partial(preview, shelf), [first[0], second[0], seeds], shown[:2]
    tab.first(*about, now=usual not in shelf.user_models())
    for event in (changed, other_changed, seeds.submit):
        tab.on(event, *about)
    tab.on_buttons(both, partial(compare, shelf), [tab.dark, seeds, *first, *second], shown)
