"""A figure fits what it shows: its kind, names, units and coordinates; what went wrong is shown, and is no error."""

import builtins
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from nidiff.data.figures import samples_figure, save_samples_figure, thumbnail
from nidiff.data.grid import Grid

CLIMATE = Grid(
    ("latitude", "longitude"),
    ("temperature", "wind"),
    ("K", "m/s"),
    {"latitude": (60.0, 20.0, -20.0, -60.0), "longitude": tuple(45.0 * np.arange(8))},
    {"latitude": "degrees", "longitude": "degrees"},
)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def bars(figure):
    """The colour bars by their labels."""
    return {axes.get_ylabel(): axes for axes in figure.findobj() if getattr(axes, "_colorbar", None) is not None}


def panels(figure):
    found = [axes for part in (figure, *figure.subfigs) for axes in part.axes]
    return [axes for axes in dict.fromkeys(found) if getattr(axes, "_colorbar", None) is None]


def texts(figure):
    return {text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))}


def test_signals_are_lines_over_their_coordinates_with_units():
    grid = Grid(("time",), ("lead I", "lead II"), ("mV", "µV"), {"time": tuple(np.arange(50) / 10)}, {"time": "s"})
    data = normal(9, 2, 50)
    figure = samples_figure(data, grid)
    drawn = panels(figure)
    assert len(drawn) == 5 * 2  # the first signals, and a column for each channel
    assert {"lead I (mV)", "lead II (µV)", "time (s)"} <= texts(figure)
    (line,) = drawn[3].lines  # the second signal, second channel
    assert np.allclose(line.get_xdata(), np.arange(50) / 10)
    assert np.allclose(line.get_ydata(), data[1, 1])


def test_a_sound_is_drawn_over_seconds():
    figure = samples_figure(normal(1, 1, 80), Grid(("position",), rate=8000))
    assert "time (s)" in texts(figure)
    assert panels(figure)[0].lines[0].get_xdata()[-1] == pytest.approx(79 / 8000)
    assert "position" in texts(samples_figure(normal(1, 1, 80), Grid(("position",))))  # the control


def test_a_field_has_a_colour_bar_for_each_channel_and_its_coordinates():
    data = torch.stack([280 + normal(6, 4, 8), normal(6, 4, 8)], 1)
    figure = samples_figure(data, CLIMATE)
    assert {"temperature (K)", "wind (m/s)"} <= {*bars(figure)}
    assert {"latitude (degrees)", "longitude (degrees)"} <= texts(figure)
    first = panels(figure)[0]
    assert first.get_ylim()[0] < first.get_ylim()[1]  # the north is up, though it comes first in the data
    assert first.get_ylim() == pytest.approx((-80, 80))
    assert first.get_box_aspect() == pytest.approx(160 / 360)  # degrees are degrees
    (mesh,) = first.collections
    assert np.allclose(np.asarray(mesh.get_array()).reshape(4, 8), data[0, 0])


def test_colours_are_about_zero_only_for_values_on_both_sides_of_it():
    def colours(data):
        (mesh,) = panels(samples_figure(data.reshape(1, 1, 10, 10), Grid(("y", "x"))))[0].collections
        return mesh.get_cmap().name, mesh.get_clim(), type(mesh.norm).__name__

    name, (low, high), _ = colours(normal(100))
    assert name == "RdBu_r"
    assert low == -high
    assert colours(normal(100) + 10)[0] == "viridis"
    assert colours((4 * normal(100)).exp())[2] == "LogNorm"
    assert colours((normal(100) / 2).exp())[2] == "Normalize"
    assert colours(torch.full((100,), 3.0))[1] == (2.5, 3.5)


def test_video_and_volumes_are_a_row_of_planes_for_each_sample():
    for axis, kind in (("time", "m/s"), ("z", "kg")):
        grid = Grid((axis, "y", "x"), ("speed",), (kind,), {axis: (0.0, 0.5, 1.0)}, {axis: "s"})
        data = normal(2, 1, 3, 16, 8)
        figure = samples_figure(data, grid)
        (panel,) = panels(figure)
        shown = np.ma.filled(panel.images[0].get_array(), np.nan)
        assert shown.shape == (2 * 16 + 1, 3 * 8 + 2)
        assert np.allclose(shown[17:, 9:17], data[1, 0, 1])  # the second sample, second plane
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "0.5", "1"]
        assert {f"{axis} (s)", f"speed ({kind})"} <= texts(figure)


def test_video_of_pixels_has_its_own_colours_and_no_bar():
    pixels = torch.randint(256, (1, 3, 2, 4, 4), dtype=torch.uint8)
    figure = samples_figure(pixels, Grid(("time", "height", "width"), dtype="uint8"))
    shown = np.asarray(panels(figure)[0].images[0].get_array())
    assert np.allclose(shown[:4, :4] * 255, pixels[0, :, 0].movedim(0, -1))
    assert not bars(figure)


def test_values_and_names_that_went_wrong_are_drawn(tmp_path):
    for shape, value in (((1, 16), np.nan), ((1, 16), np.inf), ((1, 4, 4), np.nan), ((1, 4, 4), -np.inf)):
        data = normal(2, *shape)
        for wrong in (data.masked_fill(data > 1, value), torch.full_like(data, value)):
            save_samples_figure(wrong, Grid.usual(shape), tmp_path / "a.png")
    save_samples_figure(normal(1, 1, 4, 4), Grid(("$x", "y_{"), ("$\\frac",), ("%" * 99,)), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 100


def test_a_picture_needs_no_matplotlib_and_a_figure_says_that_it_does(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name, name="matplotlib")
        return real(name, *arguments, **options)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "__import__", without)
    save_samples_figure(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), Grid(("y", "x"), dtype="uint8"), tmp_path / "p.png")
    assert (tmp_path / "p.png").is_file()
    assert capsys.readouterr().err == ""
    save_samples_figure(normal(1, 1, 8), Grid(("x",)), tmp_path / "f.png")
    assert not (tmp_path / "f.png").exists()
    assert "nidiff[report]" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "axes"), [((1, 40), 1), ((2, 6, 8), 2), ((1, 4, 6, 8), 3)])
def test_a_thumbnail_is_on_the_scale_of_another_item(shape, axes):
    like, grid = normal(*shape), Grid.usual(shape)
    small, same, large = (np.asarray(thumbnail(factor * like, like, grid).convert("RGB")) for factor in (0.1, 1.0, 9.0))
    assert small.shape == same.shape == large.shape
    assert not np.array_equal(small, same)
    assert not np.array_equal(large, same)
    if axes > 1:
        assert same.shape[:2] == (6, 8 * shape[0] + shape[0] - 1)


def test_a_thumbnail_rises_with_its_coordinates_and_takes_a_single_one():
    like = normal(1, 2, 8)

    def drawn(x, *known):
        return np.asarray(thumbnail(x, like, Grid(("depth", "x"), coordinates={"depth": known})).convert("RGB"))

    assert drawn(like[:, :1], 5.0).shape[:2] == (1, 8)
    assert np.array_equal(drawn(like, 0.0, 1.0), drawn(like, 1.0, 0.0)[::-1])
