"""What every tab is given, how the page looks, and small parts that several tabs have."""

import time
from collections.abc import Callable, Iterable
from inspect import isgenerator
from pathlib import Path
from typing import Any

import gradio as gr

from nidiff.app.shelf import Shelf
from nidiff.app.work import with_messages
from nidiff.style import DARK, LIGHT

PAUSE = 0.3  # seconds
LONGEST = 32  # letters of a name in a menu
HEAD = f"<style>{Path(__file__).with_name('page.css').read_text()}</style>"  # gradio would rewrite its css argument
LARGEST_SEED = 2**31 - 1

# Two workers on two cores: a long one never keeps the sliders waiting. Visitors beyond that wait in the queue.
QUICK: dict[str, Any] = {"concurrency_id": "quick", "concurrency_limit": 1, "api_visibility": "private"}
HIDDEN: dict[str, Any] = {"show_progress": "hidden"}
LONG = QUICK | {"concurrency_id": "long"}


class Tab:
    """A tab. What it waits for, and what went wrong, is said in its own `status`, not on top of another tab."""

    def __init__(self, name: str, shelf: Shelf, dark: Any, ready: Any) -> None:
        """``dark`` is a hidden component, an input of whatever draws a figure: whether the browser shows the page dark.
        It is known after the event ``ready``."""
        self.name, self.shelf, self.dark, self.ready = name, shelf, dark, ready
        self.status = gr.HTML(elem_id=f"{name}-status", elem_classes="status", padding=False, render=False)

    def on(self, trigger: Any, function: Callable[..., Any], inputs: Any, outputs: list[Any], **options: Any) -> Any:
        """Call ``function`` at an event, or at any of a list; of requests that come while it works, the last counts.

        It says something itself if the first of ``outputs`` is the status, which is else cleared.
        """
        speaks = outputs[0] is self.status
        outputs = outputs if speaks else [self.status, *outputs]
        event = {"fn": with_messages(function, len(outputs), speaks), "inputs": inputs, "outputs": outputs, **QUICK}
        event |= {"show_progress": "minimal", "show_progress_on": self.status, "trigger_mode": "always_last"}
        return gr.on(trigger, **event | options) if isinstance(trigger, list) else trigger(**event | options)

    def first(self, function: Callable[..., Any], inputs: list[Any], outputs: list[Any], now: bool = True) -> None:
        """What the tab begins with: the page is sent with the answer to its first values, drawn light and dark. Unless
        it is asked for ``now``, which keeps the page from being served, it comes when a browser shows the page."""
        if not now:
            self.on(self.ready.then, function, inputs, outputs)
            return
        looks = []
        for is_dark in (False, True) if self.dark in inputs else (False,):
            answer = function(*(is_dark if one is self.dark else one.value for one in inputs))
            answer = [*answer][-1] if isgenerator(answer) else answer
            looks.append(answer if isinstance(answer, tuple) else (answer,))
        for output, light, dark in zip(outputs, looks[0], looks[-1], strict=True):
            both = light if light == dark else f'<div class="by-day">{light}</div><div class="by-night">{dark}</div>'
            changes = light if isinstance(light, dict) else {"value": both}
            for key in changes.keys() - {"__type__"}:
                setattr(output, key, changes[key])

    def models(self, label: str, value: str, key: str = "model") -> Any:
        """The menu of models, to which others may have come since the page was made."""
        menu = gr.Dropdown(labelled(self.shelf.models()), value=value, label=label, elem_id=f"{self.name}-{key}")
        self.ready.then(lambda: gr.update(choices=labelled(self.shelf.models())), None, menu, **QUICK, **HIDDEN)
        return menu

    def buttons(self, name: str) -> tuple[Any, Any]:
        """One that begins long work, and one that stops it."""
        with gr.Row():
            go = gr.Button(name, variant="primary", min_width=100, elem_id=f"{self.name}-{name.lower()}")
            return go, gr.Button("Stop", min_width=100, elem_id=f"{self.name}-stop")

    def on_buttons(self, both: tuple[Any, Any], work: Callable[..., Any], inputs: Any, outputs: list[Any]) -> None:
        """The first of `buttons` begins ``work``, whose first output is the status. A press of the other ends it; then,
        when no picture of it is on its way any more, the status says so."""

        def stopped() -> str:
            time.sleep(PAUSE)
            return "Stopped."

        go, stop = both
        working = self.on(go.click, work, inputs, outputs, trigger_mode="once", **LONG)
        self.on(stop.click(None, None, None, cancels=[working]).then, stopped, None, [self.status])

    def seed(self) -> Any:
        return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, elem_id=f"{self.name}-seed")


def labelled(names: Iterable[str]) -> list[tuple[str, str]]:
    """Choices of a menu: of a long path its end is shown."""
    return [(name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}", name) for name in names]


def code(label: str, elem_id: str, language: str = "shell") -> Any:
    """A line of code to copy."""
    return gr.Code(label=label, language=language, interactive=False, wrap_lines=True, elem_id=elem_id)


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
