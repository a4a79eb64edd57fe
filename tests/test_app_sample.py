"""The tab Sample: the samples of the command line, watched; spectra; and nothing that a browser sends is trusted."""

import math
import shlex

import numpy as np
import pytest
import torch
from problems import conditional_model, refused, untrained_model

from nidiff.cli import main
from nidiff.errors import InputError

pytest.importorskip("gradio")

from nidiff.app import sample as tab
from nidiff.app import work
from nidiff.app.shelf import Shelf

PAIR = ("digits-ddpm", "digits")


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture(autouse=True)
def downloads(tmp_path, monkeypatch):
    (tmp_path / "downloads").mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "downloads"))


def drawn(shelf, *values):
    """All that the page shows, one after the other; of a model without classes, if nothing else is said."""
    return [*tab.draw(shelf, False, *values, *(tab.ALL, 1.0)[len(values) - 6 :])]


def as_command(line: str, out) -> np.ndarray:
    """What the command that the page shows draws."""
    assert main([*shlex.split(line)[1:], "--out", str(out), "--format", "npy"]) == 0
    return np.load(out / "samples.npy")


def test_the_page_draws_the_samples_of_the_command_it_shows(shelf, tmp_path, capsys):
    shown = drawn(shelf, *PAIR, "0-2,7", "ddim", 3, "karras")
    status, view, files, command = shown[-1]
    assert "step 1 of 3" in shown[0][0]
    assert status == "Done."
    assert all(f"{name}: samples" in view for name in PAIR)
    pages, commands = [file for file in files if file.endswith(".npy")], command.splitlines()
    assert len(pages) == len(commands) == 2
    for number, (file, line) in enumerate(zip(pages, commands, strict=True)):
        assert np.array_equal(np.load(file), as_command(line, tmp_path / str(number)))
    other = as_command(commands[0].replace("0-2,7", "0-2,8"), tmp_path / "other")
    assert not np.array_equal(np.load(pages[0]), other)  # the control


def test_classes_and_guidance_are_those_of_the_command(tmp_path, capsys):
    shelf = Shelf([conditional_model(tmp_path / "model")])
    name, none = tab.default_models(shelf)
    _, label, guidance = tab.preview(shelf, name, none, "0-3")
    assert label["visible"]
    assert guidance["visible"]
    samples = {}
    for chosen, scale in (("3", 2.0), (tab.ALL, 1.0), (tab.NONE, 1.0)):
        *_, files, command = drawn(shelf, name, none, "0-3", "ddim", 2, tab.DEFAULT, chosen, scale)[-1]
        samples[chosen] = np.load(files[1])
        assert np.array_equal(samples[chosen], as_command(command, tmp_path / f"out{chosen}"))
    assert not np.array_equal(samples["3"], samples[tab.NONE])
    with refused("class"):
        drawn(shelf, name, none, "0", "ddim", 2, tab.DEFAULT, "10", 1.0)
    with refused("guidance"):
        drawn(shelf, name, none, "0", "ddim", 2, tab.DEFAULT, "3", math.nan)


def test_the_spectrum_of_draws_of_the_gaussian_is_that_of_the_data(shelf):
    model = shelf.open("digits")
    draws = model.denoiser.gaussian.sample((4000, *model.shape), torch.Generator().manual_seed(0))
    _, data, right = tab.spectra(model.denoiser.gaussian, draws)
    _, _, wrong = tab.spectra(model.denoiser.gaussian, torch.randn_like(draws))
    assert torch.allclose(right, data, rtol=0.1)
    assert not torch.allclose(wrong, data, rtol=1.0)


def test_the_data_of_two_models_are_drawn_once_if_they_are_the_same(shelf):
    def lines(*names):
        gaussians = {name: shelf.open(name).denoiser.gaussian for name in names}
        samples = {name: (gaussian, torch.ones(2, *gaussian.shape)) for name, gaussian in gaussians.items()}
        return tab.spectra_figure(samples).axes[0].lines

    assert len(lines(*PAIR)) == 3
    both = lines("digits", "fashion-mnist")
    assert len(both) == 4
    _, data, _ = tab.spectra(shelf.open("digits").denoiser.gaussian, torch.ones(2, 1, 8, 8))
    torch.testing.assert_close(torch.tensor(both[0].get_ydata()), data[1:])


def test_a_model_without_a_gaussian_says_so_and_its_name_is_no_html(tmp_path):
    folder = untrained_model(tmp_path / "<b>bold")
    shelf = Shelf([folder])
    assert tab.default_models(shelf) == (str(folder), tab.NONE)
    _, view, _, _ = drawn(shelf, str(folder), tab.NONE, "0-1", "ddim", 2, tab.DEFAULT)[-1]
    assert "stores no spectrum" in view
    assert "<b>" not in view
    assert "&lt;b&gt;bold" in view
    assert not [*folder.rglob("*.npy")]  # nothing is written to the model


GOOD = {"first": "digits", "second": "none", "seeds": "0", "sampler": "ddim", "steps": 2, "spacing": tab.DEFAULT}
HOSTILE = [
    ("first", "model", (None, "", "../digits", "/etc", 7, ["digits"], "<script>")),
    ("second", "model", ("../digits", math.nan)),
    ("seeds", "seeds", (None, math.nan, "", "-1", "0-36", "0-999999999999", "a" * 10**6)),
    ("steps", "steps", (None, 0, 101, math.nan, math.inf, "5", [1])),
    ("sampler", "sampler", (None, "", "ddim:eta=1", {})),
    ("spacing", "spacing", (None, "x", math.nan)),
]


def test_what_a_browser_may_send_is_refused_in_a_sentence(shelf):
    for name, argument, values in HOSTILE:
        for value in values:
            with pytest.raises(InputError, match=argument) as caught:
                drawn(shelf, *(GOOD | {name: value}).values())
            assert len(str(caught.value)) < 600


def test_too_much_work_is_refused_before_it_begins(shelf, monkeypatch):
    monkeypatch.setattr(work, "MOST_WORK", 2 * 64)
    assert drawn(shelf, *GOOD.values())[-1][0] == "Done."
    with refused("seeds"):
        drawn(shelf, *(GOOD | {"steps": 3}).values())


def test_a_visitor_who_stops_leaves_no_file(shelf, tmp_path):
    drawing = tab.draw(shelf, False, "digits", tab.NONE, "0", "ddim", 100, tab.DEFAULT, tab.ALL, 1.0)
    assert "step" in next(drawing)[0]
    drawing.close()
    assert not [*(tmp_path / "downloads").iterdir()]
