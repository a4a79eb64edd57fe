"""One look for all figures: letters, colours that colour-blind readers can tell apart, light and dark."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, NamedTuple, ParamSpec, TypeVar

from nidiff.extras import require


class Look(NamedTuple):
    """The colours of a page."""

    paper: str
    ink: str
    """Words and what is not coloured."""
    soft: str
    """Axes, and what is there for comparison."""
    faint: str
    """Lines of a grid, bands of uncertainty."""


LIGHT = Look("#ffffff", "#1c1e21", "#5b626b", "#e2e5e9")
DARK = Look("#16181b", "#e4e6e9", "#9aa2ab", "#363b42")

# Okabe and Ito's colours, in the order in which lines take them.
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKERS, DASHES = ("o", "s", "D", "^", "v", "P", "X", "*"), ("-", "--", "-.", ":")
DIVERGING, SEQUENTIAL, GREY = "RdBu_r", "viridis", "gray"  # colour maps: red above 0, blue below
LOGSNR = "RdBu"  # of a log-SNR: blue where the data show, red where the noise covers them
MISSING, UNSEEN = "#8c8c8c", "#fabe6e"  # values that are NaN, pixels that were not observed

# A figure of this width has letters of their true size in a column of 830 pixels, such as a README's.
WIDTH, DPI = 8.6, 120
TINY, SMALL, USUAL, LARGE = 8.0, 9.0, 10.0, 11.0  # points

P = ParamSpec("P")
R = TypeVar("R")
_look: ContextVar[Look] = ContextVar("look", default=LIGHT)
_one_at_a_time = RLock()  # matplotlib's settings belong to the process


@contextmanager
def dark_page(is_dark: bool = True) -> Iterator[None]:
    """Figures that are made in this block are for a dark page, or for a light one."""
    before = _look.set(DARK if is_dark else LIGHT)
    try:
        yield
    finally:
        _look.reset(before)


def look() -> Look:
    """The colours of the page that figures are made for."""
    return _look.get()


def ink() -> str:
    """The colour of what is not coloured: black on white, or the other way round."""
    return look().ink


def shades(count: int) -> Any:
    """So many colours in order, from dark to light, each of which shows on the page."""
    linspace, colours = require("numpy").linspace, require("matplotlib").colormaps[SEQUENTIAL]
    return colours(linspace(0.25, 1.0, count) if look() == DARK else linspace(0.0, 0.7, count))


def looks() -> Iterator[tuple[str, str]]:
    """A colour and a style for each of many lines, all different."""
    return ((colour, line) for line in DASHES for colour in COLOURS)


def drawn(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes or saves a figure, in our style."""

    @functools.wraps(function)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with _one_at_a_time, require("matplotlib").rc_context(settings()):
            return function(*args, **kwargs)

    return styled


def settings() -> dict[str, Any]:
    """Those of matplotlib."""
    paper, ink, soft, faint = look()
    return {
        "figure.dpi": DPI,
        "savefig.dpi": "figure",
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": soft,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": soft,
        "ytick.color": soft,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "grid.color": faint,
        "axes.axisbelow": True,
        "legend.facecolor": paper,
        "legend.edgecolor": faint,
        "font.size": USUAL,
        "figure.titlesize": LARGE,
        "axes.titlesize": USUAL,
        "axes.labelsize": SMALL,
        "xtick.labelsize": TINY,
        "ytick.labelsize": TINY,
        "legend.fontsize": TINY,
        "legend.title_fontsize": TINY,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.0,
        "errorbar.capsize": 2.0,
        "image.cmap": SEQUENTIAL,
        "axes.prop_cycle": require("cycler").cycler(color=COLOURS),
    }
