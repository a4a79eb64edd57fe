"""The tab Sample: the samples of the command line, watched; spectra; and nothing that a browser sends is trusted."""

import math
import shlex

import numpy as np
import pytest
import torch
from problems import conditional_model, untrained_model

from nidiff.cli import main
from nidiff.errors import InputError

pytest.importorskip("gradio")

from nidiff.app import sample as tab
from nidiff.app.shelf import Shelf

PAIR = ("digits-ddpm", "digits")


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture(autouse=True)
def downloads(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "downloads"))


def drawn(shelf, *values, watch=tab.NOISY):
    """All that the page shows, one after the other."""
    return [*tab.draw(shelf, False, watch, *values)]


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
    own = Shelf([conditional_model(tmp_path / "model")])
    name, none = tab.default_models(own)
    _, label, guidance = tab.chosen(own, name, none, "0-3")
    assert label["visible"]
    assert guidance["visible"]
    found = {}
    for chosen, scale in (("3", 2.0), (tab.ALL, 1.0), (tab.NONE, 1.0)):
        *_, files, command = drawn(own, name, none, "0-3", "ddim", 2, tab.OWN, chosen, scale)[-1]
        found[chosen] = np.load(files[1])
        assert np.array_equal(found[chosen], as_command(command, tmp_path / f"out{chosen}"))
    assert not np.array_equal(found["3"], found[tab.NONE])
    with pytest.raises(InputError, match="class"):
        drawn(own, name, none, "0", "ddim", 2, tab.OWN, "10", 1.0)
    with pytest.raises(InputError, match="guidance"):
        drawn(own, name, none, "0", "ddim", 2, tab.OWN, "3", math.nan)


def test_what_is_watched_is_the_noisy_state_or_the_clean_one(shelf):
    values = ("digits", tab.NONE, "0", "ddim", 2, tab.OWN)
    noisy, clean = drawn(shelf, *values), drawn(shelf, *values, watch=tab.CLEAN)
    assert noisy[0][1] != clean[0][1]
    assert noisy[-1][1] == clean[-1][1]


def test_the_spectrum_of_draws_of_the_gaussian_is_that_of_the_data(shelf):
    (order,) = tab.read_orders(shelf, "digits", tab.NONE, "0", "ddim", 2, tab.OWN)
    gaussian = order.model.denoiser.gaussian
    draws = gaussian.sample((4000, *order.model.shape), torch.Generator().manual_seed(0))
    (right,), (wrong,) = (tab.spectra([order], [x]) for x in (draws, torch.randn_like(draws)))
    assert torch.allclose(right.samples["digits"], right.data, rtol=0.1)
    assert not torch.allclose(wrong.samples["digits"], wrong.data, rtol=1.0)


def test_models_of_one_data_set_share_a_spectrum(shelf):
    orders = tab.read_orders(shelf, *PAIR, "0-1", "ddim", 2, tab.OWN)
    together = tab.spectra(orders, [torch.zeros(2, 1, 8, 8)] * 2)
    assert [[*one.samples] for one in together] == [[*PAIR]]


def test_a_model_without_a_gaussian_says_so_and_its_name_is_no_html(tmp_path):
    folder = untrained_model(tmp_path / "<b>bold")
    own = Shelf([folder])
    assert tab.default_models(own) == (str(folder), tab.NONE)
    _, view, _, _ = drawn(own, str(folder), tab.NONE, "0-1", "ddim", 2, tab.OWN)[-1]
    assert "stores no spectrum" in view
    assert "<b>" not in view
    assert "&lt;b&gt;bold" in view
    assert not [*folder.rglob("*.npy")]  # nothing is written to the model


GOOD = {"first": "digits", "second": "none", "seeds": "0", "sampler": "ddim", "steps": 2, "spacing": tab.OWN}
HOSTILE = [
    *[("first", value, "model") for value in (None, "", "../digits", "/etc", 7, ["digits"], "<script>")],
    *[("second", value, "model") for value in ("../digits", math.nan)],
    *[("seeds", value, "seeds") for value in (None, 3, math.nan, "", "-1", "0-36", "0-999999999999", "a" * 10**6)],
    *[("steps", value, "steps") for value in (None, 0, -1, 101, 10**400, math.nan, math.inf, "5", True, [1])],
    *[("sampler", value, "sampler") for value in (None, "", "ddim:eta=1", 5, {})],
    *[("spacing", value, "spacing") for value in (None, "x", math.nan)],
]


@pytest.mark.parametrize("name, value, argument", HOSTILE)
def test_what_a_browser_may_send_is_refused_in_a_sentence(shelf, name, value, argument):
    with pytest.raises(InputError, match=argument) as refused:
        drawn(shelf, *(GOOD | {name: value}).values())
    assert len(str(refused.value)) < 600


def test_too_much_work_is_refused_before_it_begins(shelf, monkeypatch):
    monkeypatch.setattr(tab, "MOST_WORK", 2 * 64)
    assert drawn(shelf, *GOOD.values())[-1][0] == "Done."
    with pytest.raises(InputError, match="fewer seeds or steps"):
        drawn(shelf, *(GOOD | {"steps": 3}).values())


def test_a_visitor_who_stops_leaves_no_file(shelf, tmp_path):
    drawing = tab.draw(shelf, False, tab.NOISY, "digits", tab.NONE, "0", "ddim", 100, tab.OWN)
    assert "step" in next(drawing)[0]
    drawing.close()
    assert not (tmp_path / "downloads").exists()
