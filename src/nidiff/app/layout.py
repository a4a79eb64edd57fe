"""How the page looks: what every tab is given, its theme, and small parts that several tabs have."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

from nidiff.app.shelf import Shelf
from nidiff.app.work import QUICK
from nidiff.style import DARK, LIGHT

PAUSE = 0.3  # seconds
LONGEST = 32  # letters of a name in a menu
LETTERS, DIGITS = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
HEAD = f"<style>{Path(__file__).with_name('page.css').read_text()}</style>"  # gradio would rewrite its css argument
LARGEST_SEED = 2**31 - 1
HIDDEN_PROGRESS: dict[str, Any] = {"show_progress": "hidden", **QUICK}


class Page(NamedTuple):
    """What every tab is given."""

    shelf: Shelf
    dark: Any
    """A hidden component: whether the browser shows the page dark. It is an input of whatever draws a figure."""
    ready: Any
    """The event after which ``dark`` is known: a tab draws its first picture with ``ready.then(…)``."""


def labelled(names: Iterable[str]) -> list[tuple[str, str]]:
    """Choices of a menu: of a long path its end is shown."""
    return [(name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}", name) for name in names]


def code(label: str, elem_id: str, language: str = "shell") -> Any:
    """A line of code to copy."""
    return gr.Code(label=label, language=language, interactive=False, wrap_lines=True, elem_id=elem_id)


def stop_button(button: Any, work: Any, status: Any) -> None:
    """A press ends the work; then, when no picture of it is on its way any more, the status says so."""

    def stopped() -> str:
        time.sleep(PAUSE)
        return "Stopped."

    button.click(None, None, None, cancels=[work]).then(stopped, None, status, **HIDDEN_PROGRESS)


def theme() -> gr.themes.Base:
    made = gr.themes.Default(primary_hue="blue", neutral_hue="zinc", font=LETTERS, font_mono=DIGITS)
    return made.set(
        body_background_fill=LIGHT.paper,  # that of the figures
        body_background_fill_dark=DARK.paper,
        body_text_color_subdued=LIGHT.soft,
        body_text_color_subdued_dark=DARK.soft,
        block_info_text_color=LIGHT.soft,
        block_info_text_color_dark=DARK.soft,
    )
