"""The tab Restore: the samples of nidiff restore, painted masks, and files that are looked at before they are read."""

import math
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import nidiff
from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.generation.observed import restore

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


def huge_png(path, side: int = 20_000):
    """A PNG of a few bytes that claims to have 400 million pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)))
    return path


@pytest.mark.parametrize(
    "way, flags",
    [
        ("the centre", ("--mask", "not-center")),
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
        seen = tab.read_seen(model, tab.read_item(model, tab.DATA, 3, None), way, None, 1.5, noise)
        found = restore(seen, tab.read_plan(model, 2, 2), watch=lambda visit: None)
        return found.samples[0].round().movedim(1, -1).numpy()

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
        return ~tab.read_view(model, tab.PAINT, painted, 1.0).masks[0, 0]

    left = torch.zeros(8, 8, dtype=torch.bool)
    left[:, :4] = True
    assert torch.equal(hidden(layer(336, 336, (0, 0, 168, 336))), left)
    assert torch.equal(hidden(layer(50, 70, (0, 0, 25, 70))), left)  # whatever its size
    one = hidden(layer(336, 336, (42, 84, 84, 126)))  # the pixel of row 2 and column 1
    assert one.nonzero().tolist() == [[2, 1]]
    center = ~tab.read_view(model, "the centre", None, 1.0).masks[0, 0]
    assert torch.equal(hidden(layer(336, 336)), center)
    assert torch.equal(hidden(None), center)
    with pytest.raises(InputError, match="leave something"):
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
    def refused(name: str, match: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            tab.read_item(model, tab.FILE, 0, str(tmp_path / name))
        assert str(tmp_path) not in str(error.value)  # where it is here is of no use
        assert len(str(error.value)) < 600

    huge_png(tmp_path / "huge.png")
    refused("huge.png", "pixels")
    huge_png(tmp_path / "large.png", 5000)
    refused("large.png", "5000 × 5000")
    (tmp_path / "words.png").write_text("<script>alert(1)</script>")
    refused("words.png", "cannot be read")
    (tmp_path / "page.html").write_text("<html>")
    refused("page.html", "neither a picture")
    np.save(tmp_path / "nan.npy", np.full((8, 8), np.nan, np.float32))
    refused("nan.npy", "NaN")
    np.save(tmp_path / "wide.npy", np.zeros((8, 9), np.float32))
    refused("wide.npy", "shape")
    np.save(tmp_path / "deep.npy", np.zeros((8, 8), np.uint16))
    refused("deep.npy", "uint16")
    np.save(tmp_path / "object.npy", np.array([{}] * 64).reshape(8, 8), allow_pickle=True)
    refused("object.npy", "cannot be read")
    with (tmp_path / "claims.npy").open("wb") as file:  # a header that promises what is not there
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**7, 8, 8)})
    refused("claims.npy", "cannot be read")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arr_0.npy", bytes(10**6))
    refused("bomb.npz", "neither a picture")


def test_a_file_of_too_many_bytes_is_not_opened(model, tmp_path):
    with (tmp_path / "large.npy").open("wb") as file:
        file.truncate(tab.LARGEST_FILE + 1)
    with pytest.raises(InputError, match="bytes"):
        tab.read_item(model, tab.FILE, 0, str(tmp_path / "large.npy"))


@pytest.mark.parametrize(
    "name, value, argument",
    [
        *[("name", value, "model") for value in (None, "../digits", math.nan, ["digits"])],
        *[("samples", value, "samples") for value in (None, 1, 9, math.nan, "2", 10**400)],
        *[("steps", value, "steps") for value in (0, 101, math.inf, "x")],
        *[("kind", value, "item") for value in (None, "/etc/passwd", 3)],
        *[("number", value, "number") for value in (None, -1, 10**9, 0.5, math.nan, "0")],
        *[("way", value, "hidden") for value in (None, "not-center", {})],
        *[("noise", value, "noise") for value in (None, -0.1, 1.1, math.nan, "0")],
    ],
)
def test_what_a_browser_may_send_is_refused_in_a_sentence(shelf, name, value, argument):
    with pytest.raises(InputError, match=argument) as refused:
        restored(shelf, **{name: value})
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("width", [None, 0, -1, 100, math.nan, "1"])
def test_a_blur_that_is_none_is_refused(shelf, width):
    with pytest.raises(InputError, match="blur"):
        restored(shelf, way=tab.BLUR, width=width)


def test_no_file_is_a_sentence(shelf):
    with pytest.raises(InputError, match="file"):
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
    with pytest.raises(InputError, match="takes longer"):
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


def test_the_editor_gives_how_much_is_painted(tmp_path):
    editor = tab.MaskEditor()
    blob(editor, "a", as_png(tmp_path / "layer.png"))
    painted = editor.preprocess(tab.EditorData(id="a"))
    assert painted.size == (336, 336)
    assert painted.getextrema() == (255, 255)
    assert editor.preprocess(tab.EditorData(id="a")) is None  # it is kept until it is asked for
    assert editor.preprocess(tab.EditorData(id="nobody")) is None
    assert editor.preprocess(None) is None


def test_the_editor_looks_at_a_picture_before_it_decodes_it(tmp_path):
    editor = tab.MaskEditor()
    for content in (huge_png(tmp_path / "huge.png").read_bytes(), b"no picture"):
        blob(editor, "a", content)
        with pytest.raises(gr.Error, match="painted cannot be read"):
            editor.preprocess(tab.EditorData(id="a"))


def test_the_editor_keeps_little_of_what_is_sent(tmp_path):
    editor, content = tab.MaskEditor(), as_png(tmp_path / "layer.png")
    blob(editor, "a", content, index="99999999999")
    blob(editor, "a", content, kind="background")
    assert not editor.blob_storage
    with pytest.raises(gr.Error, match="bytes"):
        blob(editor, "a", bytes(tab.LARGEST_LAYER + 1))
    for visitor in range(2 * tab.MOST_LAYERS):
        blob(tab.MaskEditor(), str(visitor), content)  # gradio makes an editor for each session
    assert len(editor.blob_storage) == tab.MOST_LAYERS


def test_the_editor_ignores_what_no_browser_sends():
    editor = tab.MaskEditor()
    before = len(editor.blob_storage)
    for sent in ({}, {"type": "layer", "index": 0}, {"type": "layer", "index": 0, "id": "a"}):
        editor.accept_blobs(tab.AcceptBlobs.model_construct(data=sent, files=[]))
    assert len(editor.blob_storage) == before
