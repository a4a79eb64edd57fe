"""One style for all figures: nothing is coloured by hand, colours can be told apart, light and dark do not mix."""

import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nidiff import style

pytest.importorskip("matplotlib")
from nidiff.report.contact import GAP, WIDEST, save_sheet
from nidiff.report.loss import losses_figure

ROOT = Path(__file__).parent.parent
LOG = {"step": [1.0, 2.0], "loss": [1.0, 0.9], "images_per_s": [5.0, 5.0]}
# Machado et al. (2009), for linear RGB.
EYES = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])


def lab(colour, eye):
    srgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    x = XYZ @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(x > (6 / 29) ** 3, np.cbrt(x), x / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(a, b):
    """The smallest of the colour differences that the four kinds of eyes see."""
    return min(np.linalg.norm(lab(a, eye) - lab(b, eye)) for eye in EYES)


def test_all_colours_can_be_told_apart_by_all_eyes():
    assert min(difference(a, b) for a, b in itertools.combinations((*style.COLOURS, style.LIGHT.ink), 2)) > 15
    assert min(difference(style.DARK.ink, colour) for colour in style.COLOURS) > 15
    assert difference("#d62728", "#2ca02c") < 10  # the control: red and green of matplotlib


def test_light_and_dark_at_once_do_not_mix():
    def paper(is_dark):
        with style.dark_page(is_dark):
            figure = losses_figure({"a": LOG})
            return figure.get_facecolor(), figure.axes[0].title.get_color()

    with ThreadPoolExecutor(2) as both:
        found = list(both.map(paper, [False, True] * 4))
    from matplotlib.colors import to_rgba

    for (face, ink), look in zip(found, [style.LIGHT, style.DARK] * 4, strict=True):
        assert face == to_rgba(look.paper)
        assert ink == look.ink


def test_no_name_on_a_sheet_is_cut_off_or_reaches_the_next_column(tmp_path):
    tile = Image.new("RGB", (8, 8), style.LIGHT.paper)
    for name in ("real", "spread (0 to 1.23e+04)", "a-word-that-is-longer-than-any-square", "words " * 40):
        save_sheet([(name, tile), *[("", tile)] * 7], tmp_path / "a.png", 8, side=128)
        with Image.open(tmp_path / "a.png") as sheet:
            assert sheet.width <= WIDEST
            dark = np.asarray(sheet.convert("L")) < 200
        assert dark.any()
        assert not dark[:3].any()
        assert not dark[:, (sheet.width - GAP) // 8 :].any()


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_of_the_documentation_is_drawn_by_make_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    figures = script("figures")
    there = {file.name for file in (ROOT / "docs" / "images").glob("*.png")}
    screenshots = {name for name in there if figures.is_screenshot(name)}
    assert there - screenshots == figures.FIGURES.keys()
    assert screenshots == {*script("screenshots").NAMES}
    assert "noise.png" not in screenshots  # the control
