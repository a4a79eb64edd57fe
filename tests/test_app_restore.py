"""The tab Restore: the samples of nidiff restore, painted masks, and files that are looked at before they are read."""

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

gr = pytest.importorskip("gradio")

from nidiff.app import restore as tab  # noqa: E402
from nidiff.app.shelf import Shelf  # noqa: E402

GOOD = {"name": "digits", "samples": 2, "steps": 2, "kind": tab.DATA, "number": 3, "file": None}
HIDDEN = {"way": "the centre", "painted": None, "width": 1.5, "noise": 0.0}


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture(scope="module")
def model(shelf):
    return shelf.open("digits")


def restored(shelf, **changed):
    """All that the page shows, one after the other."""
    return [*tab.restored(shelf, False, *(GOOD | HIDDEN | changed).values())]


def layer(width: int, height: int, box=None) -> Image.Image:
    """What an editor sends: painted in the box, transparent elsewhere."""
    painted = Image.new("L", (width, height), 0)
    if box is not None:
        painted.paste(255, box)
    return painted


@pytest.mark.parametrize(
    "way, flags",
    [
        ("90 % of the points", ("--mask", "random:0.1")),
        (tab.BLUR, ("--blur", "1.5")),
        (next(iter(tab.SCALES)), ("--scale", "2")),
    ],
)
def test_the_page_draws_the_samples_of_nidiff_restore(model, tmp_path, capsys, way, flags):
    items = nidiff.load_dataset("digits", split="test").stored(torch.tensor([3]))
    np.save(tmp_path / "digit.npy", items[0, 0].numpy())
    few = ("--samples", "2", "--num-steps", "2", "--noise", "0.1", "--units", "model")
    words = ("restore", "digits", str(tmp_path / "digit.npy"), *flags, *few, "--degrade")
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    expected = np.load(tmp_path / "out" / "samples.npz")["arr_0"][0]

    def drawn(noise):
        items = tab.read_item(model, tab.DATA, 3, None)
        seen, (job, count) = tab.read_observation(model, items, way, None, 1.5, noise), tab.read_job(model, 2, 2)
        restoration = restore(model, job, seen, samples=count, truth=items.float(), watch=lambda visit: None)
        return restoration.samples[0].round().movedim(1, -1).numpy()

    assert np.array_equal(drawn(0.1), expected)
    assert not np.array_equal(drawn(0.2), expected)  # the control


def test_the_page_shows_steps_samples_mean_spread_and_truth(shelf):
    (first, _), *_, (last, view) = restored(shelf, painted=layer(336, 336, (0, 0, 168, 336)), way=tab.PAINT)
    assert "of 2" in first
    assert "of the mean" in last
    for name in ("observed", "sample 0", "sample 1", "mean", "spread", "truth"):
        assert f'alt="{name}' in view


def test_what_is_painted_is_hidden(model):
    def hidden(painted):
        return ~tab.read_operator(model, tab.PAINT, painted, 1.0).observed[0, 0]

    left = torch.zeros(8, 8, dtype=torch.bool)
    left[:, :4] = True
    assert torch.equal(hidden(layer(336, 336, (0, 0, 168, 336))), left)
    assert torch.equal(hidden(layer(50, 70, (0, 0, 25, 70))), left)  # whatever its size
    pixel = hidden(layer(336, 336, (42, 84, 84, 126)))  # the pixel of row 2 and column 1
    assert pixel.nonzero().tolist() == [[2, 1]]
    center = ~tab.read_operator(model, "the centre", None, 1.0).observed[0, 0]
    assert torch.equal(hidden(layer(336, 336)), center)
    assert torch.equal(hidden(None), center)
    with refused("mask"):
        hidden(layer(336, 336, (0, 0, 336, 336)))


def test_a_picture_is_fitted_to_the_model_and_arrays_are_as_they_are(model, tmp_path):
    Image.new("RGB", (40, 30), (51, 51, 51)).save(tmp_path / "grey.png")
    assert torch.equal(
        tab.read_item(model, tab.FILE, 0, str(tmp_path / "grey.png")), torch.full((1, 1, 8, 8), 51).byte()
    )
    values = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)
    np.save(tmp_path / "two.npy", values)
    assert np.array_equal(tab.read_item(model, tab.FILE, 0, str(tmp_path / "two.npy"))[0, 0], values[0])


def test_files_that_cannot_be_used_are_refused_by_name(model, tmp_path):
    (tmp_path / "huge.png").write_bytes(claimed_png(20_000, 20_000))
    (tmp_path / "words.png").write_text("<script>alert(1)</script>")
    (tmp_path / "page.html").write_text("<html>")
    np.save(tmp_path / "nan.npy", np.full((8, 8), np.nan, np.float32))
    np.save(tmp_path / "wide.npy", np.zeros((8, 9), np.float32))
    np.save(tmp_path / "deep.npy", np.zeros((8, 8), np.uint16))
    np.save(tmp_path / "object.npy", np.array([{}] * 64).reshape(8, 8), allow_pickle=True)
    with (tmp_path / "claims.npy").open("wb") as file:  # a header that promises what is not there
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**7, 8, 8)})
    files = [*tmp_path.iterdir()]
    assert len(files) == 8
    for file in files:
        with pytest.raises(InputError) as caught:
            tab.read_item(model, tab.FILE, 0, str(file))
        assert str(tmp_path) not in str(caught.value)  # where it is here is of no use
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "name, argument, values",
    [
        ("name", "model", (None, "../digits", math.nan, ["digits"])),
        ("samples", "samples", (None, 1, 9, math.nan, "2")),
        ("steps", "steps", (0, 101, math.inf, "x")),
        ("kind", "item", (None, "/etc/passwd", 3)),
        ("number", "number", (None, -1, 10**9, 0.5, math.nan)),
        ("way", "hidden", (None, "not-center", {})),
        ("noise", "noise", (None, -0.1, 1.1, math.nan, "0")),
    ],
)
def test_what_a_browser_may_send_is_refused_in_a_sentence(shelf, name, argument, values):
    for value in values:
        with refused(argument):
            restored(shelf, **{name: value})


def test_a_blur_without_a_width_is_refused(shelf):
    for width in (None, 0, -1, 100, math.nan, "1"):
        with refused("blur"):
            restored(shelf, way=tab.BLUR, width=width)


def test_no_file_is_a_sentence(shelf):
    with refused("file"):
        restored(shelf, kind=tab.FILE)


def test_only_two_axes_can_be_painted_on(model):
    assert tab.PAINT in tab.ways_of(model)
    for shape in ((1, 64), (1, 8, 8, 8), (1, 2048, 2048)):
        assert tab.PAINT not in tab.ways_of(model._replace(shape=shape))
    assert not {*tab.SCALES} & {*tab.ways_of(model._replace(shape=(1, 7, 8)))}


def test_a_model_whose_data_are_elsewhere_has_samples_and_files(shelf, model):
    assert tab.kinds_of(model.path) == [tab.DATA, tab.SAMPLE, tab.FILE]
    assert tab.kinds_of(model.path / "model") == [tab.SAMPLE, tab.FILE]


def test_a_sample_is_of_its_seed_and_does_not_take_long(model, monkeypatch):
    first, again, other = (tab.read_item(model, tab.SAMPLE, seed, None) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    monkeypatch.setattr(tab, "ITEM_SECONDS", -1.0)
    with refused("item"):
        tab.read_item(model, tab.SAMPLE, 1, None)


# The editor ----------------------------------------------------------------------------------------------------------


def blob(editor, visitor: str, content: bytes, index="0", kind="layer"):
    data = tab.AcceptBlobs.model_construct(
        data={"type": kind, "index": index, "file": content, "id": visitor}, files=[("file", content)]
    )
    editor.accept_blobs(data)


def as_png(path, size=(336, 336)) -> bytes:
    Image.new("RGBA", size, (224, 32, 32, 255)).save(path)
    return path.read_bytes()


def test_the_editor_gives_how_much_is_painted_once(tmp_path):
    editor = tab.MaskEditor()
    blob(editor, "a", as_png(tmp_path / "layer.png"))
    painted = editor.preprocess(tab.EditorData(id="a"))
    assert painted.size == (336, 336)
    assert painted.getextrema() == (255, 255)
    for payload in (tab.EditorData(id="a"), tab.EditorData(id="nobody"), None):
        assert editor.preprocess(payload) is None
    for content in (claimed_png(20_000, 20_000), b"no picture"):
        blob(editor, "a", content)
        with pytest.raises(gr.Error, match="mask"):
            editor.preprocess(tab.EditorData(id="a"))


def test_the_editor_stores_little_of_what_is_sent(tmp_path):
    editor, content = tab.MaskEditor(), as_png(tmp_path / "layer.png")
    blob(editor, "a", content, index="99999999999")
    blob(editor, "a", content, kind="background")
    for sent in ({}, {"type": "layer", "index": 0}, {"type": "layer", "index": 0, "id": "a"}):
        editor.accept_blobs(tab.AcceptBlobs.model_construct(data=sent, files=[]))
    assert not tab.painted_layers
    with pytest.raises(gr.Error, match="bytes"):
        blob(editor, "a", bytes(tab.LARGEST_LAYER + 1))
    for visitor in range(2 * tab.MOST_LAYERS):
        blob(tab.MaskEditor(), str(visitor), content)  # gradio makes an editor for each session
    assert len(tab.painted_layers) == tab.MOST_LAYERS
