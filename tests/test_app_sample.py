"""The tabs Sample and Compare: the samples of the command line, watched and measured; and no browser is trusted."""

import dataclasses
import math
import re
import shlex

import numpy as np
import pytest
import torch
from problems import conditional_model, refused, untrained_model

import nidiff
from nidiff.cli import main
from nidiff.data.dataset import Dataset
from nidiff.diffusion.choice import Choice
from nidiff.errors import InputError
from nidiff.evaluation.evaluator import Evaluator
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.model.sampling import store_choices
from nidiff.sampling.sampler import SAMPLERS

pytest.importorskip("gradio")

from nidiff.app import compare, work
from nidiff.app import sample as tab
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
    return [*tab.draw(shelf, False, *values, *(tab.DEFAULT, tab.ALL, 1.0)[len(values) - 4 :])]


def as_command(line: str, out) -> np.ndarray:
    """What the command that the page shows draws."""
    assert main([*shlex.split(line)[1:], "--out", str(out), "--format", "npy"]) == 0
    return np.load(out / "samples.npy")


def test_the_page_draws_the_samples_of_the_command_it_shows(shelf, tmp_path, capsys):
    shown = drawn(shelf, "digits", "ddim", 3, "0-2,7", "karras")
    status, view, files, command = shown[-1]
    assert "step 1 of 3" in shown[0][0]
    assert status == "Done."
    assert "digits, ddim:spacing=karras, 3 steps: samples of seeds 0-2,7" in view
    (file,) = [file for file in files if file.endswith(".npy")]
    assert np.array_equal(np.load(file), as_command(command, tmp_path / "same"))
    other = as_command(command.replace("0-2,7", "0-2,8"), tmp_path / "other")
    assert not np.array_equal(np.load(file), other)  # the control


def test_the_sampler_that_tune_chose_is_the_usual_one(tmp_path, capsys):
    folder = untrained_model(tmp_path / "model")
    assert next(iter(tab.samplers_of(Shelf([folder]).open(str(folder))))) == "dpmpp_2m"  # the control
    model = open_model(folder, process_state())
    texts = {5: "ddim:eta=0.5,spacing=logsnr", 8: "ddim:spacing=karras", 6: "heun"}
    store_choices(model.sampling_file, [Choice(count, text, count // 2) for count, text in texts.items()], model.sha256)
    shelf, name = Shelf([folder]), str(folder)
    sampler, steps = tab.sampler_menu(shelf, name)
    assert (sampler["value"], steps["value"]) == (texts[8], 4)
    assert {*texts.values(), *SAMPLERS} == {spec for _, spec in sampler["choices"]}
    assert ("heun (tuned for 6)", "heun") in sampler["choices"]
    assert f"--sampler {texts[8]}" in drawn(shelf, name, texts[8], 1, "0")[-1][-1]
    assert "--sampler ddim:eta=0.5,spacing=trailing" in drawn(shelf, name, texts[5], 1, "0", "trailing")[-1][-1]
    with refused("sampler"):
        drawn(shelf, name, "ddim:eta=0.4", 1, "0")


def test_classes_and_guidance_are_those_of_the_command(tmp_path, capsys):
    shelf = Shelf([conditional_model(tmp_path / "model")])
    name = tab.default_model(shelf)
    _, _, label, guidance = tab.preview(shelf, name, "0-3")
    assert label["visible"]
    assert guidance["visible"]
    samples = {}
    for chosen, scale in (("3", 2.0), (tab.ALL, 1.0), (tab.NONE, 1.0)):
        *_, files, command = drawn(shelf, name, "ddim", 2, "0-3", tab.DEFAULT, chosen, scale)[-1]
        samples[chosen] = np.load(files[1])
        assert np.array_equal(samples[chosen], as_command(command, tmp_path / f"out{chosen}"))
    assert not np.array_equal(samples["3"], samples[tab.NONE])
    with refused("class"):
        drawn(shelf, name, "ddim", 2, "0", tab.DEFAULT, "10", 1.0)
    with refused("guidance"):
        drawn(shelf, name, "ddim", 2, "0", tab.DEFAULT, "3", math.nan)


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
    assert tab.default_model(shelf) == str(folder)
    _, view, _, _ = drawn(shelf, str(folder), "ddim", 2, "0-1")[-1]
    assert "stores no spectrum" in view
    assert "<b>" not in view
    assert "&lt;b&gt;bold" in view
    assert not [*folder.rglob("*.npy")]  # nothing is written to the model


GOOD = {"name": "digits", "sampler": "ddim", "steps": 2, "seeds": "0", "spacing": tab.DEFAULT}
HOSTILE = [
    ("name", "model", (None, "", "../digits", "/etc", 7, ["digits"], "<script>")),
    ("seeds", "seeds", (None, math.nan, "", "-1", "0-36", "0-999999999999", "a" * 10**6)),
    ("steps", "steps", (None, 0, 101, math.nan, math.inf, "5", [1])),
    ("sampler", "sampler", ("", "ddim:eta=1", {})),
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
    drawing = tab.draw(shelf, False, "digits", "ddim", 100, "0", tab.DEFAULT, tab.ALL, 1.0)
    assert "step" in next(drawing)[0]
    drawing.close()
    assert not [*(tmp_path / "downloads").iterdir()]


# Compare ------------------------------------------------------------------------------------------------------------


def compared(shelf, seeds, *sides):
    return [*compare.compare(shelf, False, seeds, *sides)]


def cells(view: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', view)
    return {name: re.findall("<td>(.*?)</td>", rest) for name, rest in rows}


def test_two_models_draw_the_seeds_of_their_commands_and_are_measured(shelf, tmp_path, capsys):
    shown = compared(shelf, "0-99", "digits-ddpm", "ddim", 2, "digits", "ddim", 3)
    status, view, files, commands = shown[-1]
    assert (status, shown[-2][0]) == ("Done.", "Measuring the samples…")
    assert "Real items" not in shown[-2][1]
    for file, line in zip([file for file in files if file.endswith(".npy")], commands.splitlines(), strict=True):
        assert np.array_equal(np.load(file), as_command(line, tmp_path / line.split()[2]))
    assert view.count("<img") == 3  # the samples of each, and all spectra
    scores = cells(view)
    assert [*scores] == ["FD-pixels", "KID-pixels"]
    assert all(len(row) == 3 for row in scores.values())
    real, *others = (float(cell.split()[0]) for cell in scores["FD-pixels"])
    assert real < min(others)  # of real digits in place of samples


def test_two_samplers_of_fields_are_measured_as_nidiff_evaluate_does(monkeypatch):
    shelf = Shelf()
    model = shelf.open("digits")
    real = nidiff.load_dataset("digits", split="test").stored(torch.arange(299)).float()
    fields = dataclasses.replace(Dataset(real), scaling=model.denoiser.scaling)
    evaluator = Evaluator(fields, "fields", boundary=("periodic", "periodic"))
    monkeypatch.setattr(compare, "real_data", lambda *_: evaluator)
    orders = [tab.read_order(shelf, "digits", name, 2, "0-3") for name in ("ddim", "heun")]
    half = model.denoiser.scaling.to_model(evaluator.halves[0].items)
    table = cells(compare.scores(shelf, orders, [half, half / 2]))
    assert [*table] == ["spectrum", "values", "increments"]
    for real_items, same, flatter in table.values():
        assert float(same.split()[0]) < 0.01 < float(real_items.split()[0]) < float(flatter.split()[0])


def test_models_of_other_data_are_refused_and_so_is_comparing_one_with_itself(shelf):
    assert compare.preview(shelf, "digits", "digits-ddpm", "0-3")[1].count("<img") == 2
    assert compare.preview(shelf, "digits", "digits", "0-3")[1].count("<img") == 1
    for other in ("turbulence", "fashion-mnist"):
        with refused("second model"):
            compare.preview(shelf, "digits", other, "0-3")
        with refused("second model"):
            compared(shelf, "0-3", "digits", "ddim", 2, other, "ddim", 2)
    with refused("second"):
        compared(shelf, "0-3", "digits", "ddim", 2, "digits", "ddim", 2)


def test_the_limits_on_work_hold_for_a_comparison(shelf, monkeypatch):
    sides = "digits", "ddim", 2, "digits-ddpm", "ddim", 2
    for place, argument, value in (
        (0, "model", "/etc"), (3, "model", None), (1, "sampler", "x"), (5, "steps", 101), (2, "steps", math.nan)
    ):  # fmt: skip
        with refused(argument):
            compared(shelf, "0-1", *sides[:place], value, *sides[place + 1 :])
    for seeds in (None, "", f"0-{compare.MOST_SEEDS}", "a" * 10**6):
        with refused("seeds"):
            compared(shelf, seeds, *sides)
    monkeypatch.setattr(work, "MOST_WORK", 2 * 2 * 2 * 64 - 1)
    with refused("seeds"):
        compared(shelf, "0-1", *sides)


def test_data_that_cannot_be_read_cost_the_scores_only(shelf, monkeypatch):
    monkeypatch.setattr(compare, "real_data", lambda *_: None)
    view = compared(shelf, "0-1", "digits", "ddim", 2, "digits", "heun", 2)[-1][1]
    assert "there are no scores" in view
    assert view.count("<img") == 3
