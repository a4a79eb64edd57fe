"""How the page looks: the frame of a tab, colours and letters without a network, and pictures as HTML."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

from nidiff.app.shelf import Shelf
from nidiff.style import DARK, LIGHT

LONGEST = 32  # letters of a name in a menu
LETTERS, DIGITS = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
HEAD = (
    f"<style>{Path(__file__).with_name('page.css').read_text()}</style>"  # gradio rewrites css that it is given as such
)


class Page(NamedTuple):
    """What every tab is given."""

    shelf: Shelf
    dark: Any
    """A hidden component that says whether the browser shows the page dark; an input of whatever draws a figure."""
    ready: Any
    """The event after which ``dark`` is known: a tab draws its first picture with ``ready.then(…)``."""


def labelled(names: Iterable[str]) -> list[tuple[str, str]]:
    """Choices of a menu: of a long path its end is shown."""
    return [(name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}", name) for name in names]


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
