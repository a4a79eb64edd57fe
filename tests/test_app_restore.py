"""The tab Restore: the samples of nidiff restore, masks of visitors, and files that are checked before use."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused
from visitor import claimed_png

import nidiff
from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.generation.restoration import restore

pytest.importorskip("gradio")

from nidiff.app import restore as tab
from nidiff.app.shelf import Shelf

GOOD = {"samples": 2, "steps": 2, "name": "digits", "kind": tab.SAMPLE, "seed": 3, "file": None}
HIDDEN = {"way": "the centre", "mask": None, "width": 1.5, "noise": 0.0}


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture(scope="module")
def model(shelf):
    return shelf.open("digits")


def restored(shelf, **changed):
    """All that the page shows, one after the other."""
    return [*tab.restored(shelf, False, *(GOOD | HIDDEN | changed).values())]


def test_the_page_draws_the_samples_of_nidiff_restore(model, tmp_path, capsys):
    file = tmp_path / "digit.npy"
    np.save(file, nidiff.load_dataset("digits", split="test").stored(torch.tensor([3]))[0, 0].numpy())
    ways = {
        "90 % of the points": ("--mask", "random:0.1"),
        tab.BLUR: ("--blur", "1.5"),
        next(iter(tab.SCALES)): ("--scale", "2"),
    }
    for way, flags in ways.items():
        few = ("--samples", "2", "--num-steps", "2", "--noise", "0.1", "--units", "model")
        out = tmp_path / flags[0]
        assert main(["restore", "digits", str(file), *flags, *few, "--degrade", "--out", str(out)]) == 0
        expected = np.load(out / "samples.npz")["arr_0"][0]
        for noise in (0.1, 0.2):
            items = tab.read_item(model, tab.FILE, 0, file)
            seen, (job, count) = tab.read_observation(model, items, way, None, 1.5, noise), tab.read_job(model, 2, 2)
            drawn = restore(model, job, seen, samples=count, truth=items.float(), watch=lambda visit: None)
            samples = drawn.samples[0].round().movedim(1, -1).numpy()
            assert np.array_equal(samples, expected) == (noise == 0.1)


def test_the_page_shows_steps_samples_mean_spread_and_truth(shelf):
    (first, _), *_, (last, view) = restored(shelf)
    assert "of 2" in first
    assert "of the mean" in last
    for name in ("observed", "sample 0", "sample 1", "mean", "spread", "truth"):
        assert f'alt="{name}' in view


def test_what_is_black_in_a_picture_is_hidden_whatever_its_size(model, tmp_path):
    for size in ((8, 8), (336, 336), (48, 48)):
        half = Image.new("L", size, 255)
        half.paste(0, (0, 0, size[0] // 2, size[1]))
        half.save(tmp_path / "mask.png")
        seen = tab.read_operator(model, tab.OWN, tmp_path / "mask.png", 1.0).observed[0, 0]
        assert torch.equal(seen, torch.arange(8).expand(8, 8) >= 4)
    (tmp_path / "mask.png").write_bytes(claimed_png(20_000, 20_000))
    for path in (tmp_path / "mask.png", None, 7, "/etc/passwd"):
        with refused("mask"):
            tab.read_operator(model, tab.OWN, path, 1.0)
    Image.new("L", (8, 8), 0).save(tmp_path / "black.png")
    with pytest.raises(InputError):
        tab.read_operator(model, tab.OWN, tmp_path / "black.png", 1.0)


def test_a_picture_is_fitted_to_the_model_and_arrays_are_as_they_are(model, tmp_path):
    Image.new("RGB", (40, 30), (51, 51, 51)).save(tmp_path / "grey.png")
    picture = tab.read_item(model, tab.FILE, 0, str(tmp_path / "grey.png"))
    assert torch.equal(picture, torch.full((1, 1, 8, 8), 51).byte())
    values = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)
    np.save(tmp_path / "two.npy", values)
    assert np.array_equal(tab.read_item(model, tab.FILE, 0, str(tmp_path / "two.npy"))[0, 0], values[0])


def test_files_that_cannot_be_used_are_refused_and_their_place_is_not_shown(model, tmp_path):
    (tmp_path / "huge.png").write_bytes(claimed_png(20_000, 20_000))
    (tmp_path / "words.png").write_text("<script>alert(1)</script>")
    (tmp_path / "page.html").write_text("<html>")
    np.save(tmp_path / "nan.npy", np.full((8, 8), np.nan, np.float32))
    np.save(tmp_path / "wide.npy", np.zeros((8, 9), np.float32))
    np.save(tmp_path / "deep.npy", np.zeros((8, 8), np.uint16))
    np.save(tmp_path / "object.npy", np.array([{}] * 64).reshape(8, 8), allow_pickle=True)
    with (tmp_path / "claims.npy").open("wb") as file:  # a header that promises what is not there
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**7, 8, 8)})
    files = [*tmp_path.iterdir(), None, 3, tmp_path / "missing.npy"]
    assert len(files) == 11
    for file in files:
        with pytest.raises(InputError) as caught:
            tab.read_item(model, tab.FILE, 0, None if file is None else str(file))
        assert caught.value.argument == "file"
        assert str(tmp_path) not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_what_a_browser_may_send_is_refused_in_a_sentence(shelf):
    hostile = {
        "name": ("model", (None, "../digits", math.nan, ["digits"])),
        "samples": ("samples", (None, 1, 9, math.nan, "2")),
        "steps": ("steps", (0, 101, math.inf, "x")),
        "kind": ("item", (None, "/etc/passwd", 3)),
        "seed": ("seed", (None, -1, 10**10, 0.5, math.nan)),
        "way": ("hidden", (None, "not-center", {})),
        "noise": ("noise", (None, -0.1, 1.1, math.nan, "0")),
    }
    for name, (argument, values) in hostile.items():
        for value in values:
            with refused(argument):
                restored(shelf, **{name: value})
    for width in (None, 0, -1, 100, math.nan, "1"):
        with refused("blur"):
            restored(shelf, way=tab.BLUR, width=width)


def test_what_can_be_hidden_depends_on_the_axes(model):
    assert {*tab.ways_of(model)} == {*tab.MASKS, tab.OWN, tab.BLUR, *tab.SCALES}
    for shape in ((1, 64), (1, 8, 8, 8)):
        assert tab.OWN not in tab.ways_of(model._replace(shape=shape))
    assert "the lower half" not in tab.ways_of(model._replace(shape=(1, 64)))
    assert not {*tab.SCALES} & {*tab.ways_of(model._replace(shape=(1, 7, 8)))}


def test_the_preview_shows_what_is_observed_and_asks_for_files(shelf, tmp_path):
    values = ["digits", tab.SAMPLE, 3, None, "the centre", None, 1.5, 0.0]
    status, view, *_ = tab.preview(shelf, False, *values)
    assert (status, view.count("<img")) == ("Press Restore.", 2)
    for place, value in ((1, tab.FILE), (4, tab.OWN)):
        assert tab.preview(shelf, False, *values[:place], value, *values[place + 1 :])[:2] == ("Choose a file.", "")


def test_a_sample_is_of_its_seed_and_does_not_take_long(model, monkeypatch):
    first, again, other = (tab.read_item(model, tab.SAMPLE, seed, None) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    monkeypatch.setattr(tab, "ITEM_SECONDS", -1.0)
    with pytest.raises(InputError):
        tab.read_item(model, tab.SAMPLE, 1, None)
