"""One look for all figures: letters, colours that colour-blind readers can tell apart, light and dark."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, ParamSpec, TypeVar

from nidiff.extras import require

# Okabe and Ito's colours, in the order in which lines take them.
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
LINES = ("solid", "dashed", "dotted", "dashdot")
DIVERGING, SEQUENTIAL = "RdBu_r", "viridis"
PAPER, INK, SOFT, LINE = {}, {}, {}, {}  # by whether the page is dark
for _dark, _colours in {
    False: ("#ffffff", "#1c1e21", "#5b626b", "#e2e5e9"),
    True: ("#16181b", "#e4e6e9", "#9aa2ab", "#363b42"),
}.items():
    PAPER[_dark], INK[_dark], SOFT[_dark], LINE[_dark] = _colours

P = ParamSpec("P")
R = TypeVar("R")
_is_dark: ContextVar[bool] = ContextVar("is_dark", default=False)
_one_at_a_time = RLock()  # matplotlib's settings belong to the process


@contextmanager
def dark_page(is_dark: bool = True) -> Iterator[None]:
    """Figures that are made in this block are for a dark page, or for a light one."""
    before = _is_dark.set(bool(is_dark))
    try:
        yield
    finally:
        _is_dark.reset(before)


def ink() -> str:
    """The colour of what is not coloured: black on white, or the other way round."""
    return INK[_is_dark.get()]


def looks() -> Iterator[tuple[str, str]]:
    """A colour and a style for each of many lines, all different."""
    return ((colour, line) for line in LINES for colour in COLOURS)


def drawn(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes or saves a figure, in our style."""

    @functools.wraps(function)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with _one_at_a_time, require("matplotlib").rc_context(settings()):
            return function(*args, **kwargs)

    return styled


def settings() -> dict[str, Any]:
    """Those of matplotlib."""
    dark = _is_dark.get()
    return {
        "figure.facecolor": PAPER[dark],
        "axes.facecolor": PAPER[dark],
        "text.color": INK[dark],
        "axes.labelcolor": INK[dark],
        "axes.edgecolor": SOFT[dark],
        "xtick.color": SOFT[dark],
        "ytick.color": SOFT[dark],
        "grid.color": LINE[dark],
        "axes.prop_cycle": require("cycler").cycler(color=COLOURS),
    }
