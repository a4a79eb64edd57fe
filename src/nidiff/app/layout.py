"""What every tab is given, how the page looks, and small parts that several tabs have."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

from nidiff.app.shelf import Shelf
from nidiff.app.work import with_user_errors
from nidiff.style import DARK, LIGHT

PAUSE = 0.3  # seconds
LONGEST = 32  # letters of a name in a menu
HEAD = f"<style>{Path(__file__).with_name('page.css').read_text()}</style>"  # gradio would rewrite its css argument
LARGEST_SEED = 2**31 - 1

# Two workers on two cores: a long one never keeps the sliders waiting. Visitors beyond that wait in the queue.
QUICK: dict[str, Any] = {"concurrency_id": "quick", "concurrency_limit": 1, "api_visibility": "private"}
LONG = QUICK | {"concurrency_id": "long"}


class Page(NamedTuple):
    """What every tab is given."""

    shelf: Shelf
    dark: Any
    """A hidden component: whether the browser shows the page dark. It is an input of whatever draws a figure."""
    ready: Any
    """The event after which ``dark`` is known: a tab draws its first picture with ``on(page.ready.then, …)``."""


def on(trigger: Any, function: Callable[..., Any], inputs: Any, outputs: Any, **options: Any) -> Any:
    """Call ``function`` at an event, or at any of a list; of requests that come while it works, the last counts."""
    options = {"show_progress": "hidden", "trigger_mode": "always_last"} | QUICK | options
    event = {"fn": with_user_errors(function), "inputs": inputs, "outputs": outputs} | options
    return gr.on(trigger, **event) if isinstance(trigger, list) else trigger(**event)


def labelled(names: Iterable[str]) -> list[tuple[str, str]]:
    """Choices of a menu: of a long path its end is shown."""
    return [(name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}", name) for name in names]


def code(label: str, elem_id: str, language: str = "shell") -> Any:
    """A line of code to copy."""
    return gr.Code(label=label, language=language, interactive=False, wrap_lines=True, elem_id=elem_id)


def seed_number(tab: str) -> Any:
    return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, elem_id=f"{tab}-seed")


def buttons(tab: str, name: str) -> tuple[Any, Any]:
    """One that begins long work, and one that stops it."""
    with gr.Row():
        go = gr.Button(name, variant="primary", min_width=100, elem_id=f"{tab}-{name.lower()}")
        return go, gr.Button("Stop", min_width=100, elem_id=f"{tab}-stop")


def on_buttons(both: tuple[Any, Any], work: Callable[..., Any], inputs: Any, outputs: list[Any]) -> None:
    """The first of `buttons` begins ``work``, whose first output is its status. A press of the other ends it; then,
    when no picture of it is on its way any more, the status says so."""

    def stopped() -> str:
        time.sleep(PAUSE)
        return "Stopped."

    go, stop = both
    working = on(go.click, work, inputs, outputs, trigger_mode="once", **LONG)
    on(stop.click(None, None, None, cancels=[working]).then, stopped, None, outputs[0])


def theme() -> gr.themes.Base:
    letters, digits = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
    made = gr.themes.Default(primary_hue="blue", neutral_hue="zinc", font=letters, font_mono=digits)
    return made.set(
        body_background_fill=LIGHT.paper,  # that of the figures
        body_background_fill_dark=DARK.paper,
        body_text_color_subdued=LIGHT.soft,
        body_text_color_subdued_dark=DARK.soft,
        block_info_text_color=LIGHT.soft,
        block_info_text_color_dark=DARK.soft,
    )
