"""Images from strangers: what they claim is compared with what they are before memory is asked for."""

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import nidiff
from nidiff.data.encoded import FORMATS
from nidiff.data.named import read_idx


def png_of(width: int, height: int) -> bytes:
    """A grey PNG of zeros, of which each kilobyte stands for a megabyte of pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(bytes(width + 1)) for _ in range(min(height, 100))) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def good_image(folder: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "good.png")


@pytest.mark.parametrize("size", [None, 8])
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, size):
    (tmp_path / "bomb.png").write_bytes(png_of(20_000, 20_000))
    with pytest.raises(nidiff.InputError, match="bomb.png"):
        nidiff.load_dataset(tmp_path, size=size)
    good_image(tmp_path)
    kept = nidiff.load_dataset(tmp_path, size=size, skip_corrupt=True)
    assert len(kept) == 1
    assert [Path(name).name for name in kept.skipped] == ["bomb.png"]


@pytest.mark.parametrize(
    "content", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"GIF89a", b"P5 4 4 255\n" + bytes(16)]
)
def test_another_format_under_the_name_of_a_png_reaches_no_decoder(tmp_path, content):
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(nidiff.InputError, match="x.png.*no known format"):
        nidiff.load_dataset(tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_of_ours_is_read(tmp_path, kind):
    Image.fromarray(np.full((4, 5, 3), 200, np.uint8)).save(tmp_path / "x.png", format=kind)
    assert nidiff.load_dataset(tmp_path).shape == (3, 4, 5)


def test_what_is_not_a_file_is_left_out(tmp_path):
    good_image(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken.png").symlink_to("/nonexistent")
    (tmp_path / "loop.png").symlink_to("loop.png")
    assert len(nidiff.load_dataset(tmp_path)) == 1


@pytest.mark.parametrize("shape", ["(1000000000000, 32, 32, 3)", "(3, 1000000, 1000000)", "(3, -4, 5)"])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_an_array_that_claims_more_than_its_file_is_refused(tmp_path, shape, suffix):
    file = tmp_path / f"x{suffix}"
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(60)
    if suffix == ".npy":
        file.write_bytes(array)
    else:
        import zipfile

        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("arr_0.npy", array)
    with pytest.raises(nidiff.InputError, match="path="):
        nidiff.load_dataset(file)


@pytest.mark.parametrize("kind", [">f4", "<f8", "<f2", "|u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_layout_of_an_array_gives_the_same_images(tmp_path, kind, order):
    values = np.linspace(-1, 1, 60).reshape(3, 4, 5) if "f" in kind else np.arange(60).reshape(3, 4, 5)
    for file in (tmp_path / "x.npy", tmp_path / "x.npz"):
        (np.save if file.suffix == ".npy" else np.savez)(file, np.array(values.astype(kind), order=order))
        images = nidiff.load_dataset(file)
        expected = values.astype(kind).astype("f4" if "f" in kind else "u1")[:, None]
        assert np.array_equal(images.values.numpy(), expected)


def test_objects_are_never_unpickled(tmp_path):
    for file in (tmp_path / "x.npy", tmp_path / "x.npz"):
        (np.save if file.suffix == ".npy" else np.savez)(file, np.array([{}, None, 1], object))
        with pytest.raises(nidiff.InputError, match="path="):
            nidiff.load_dataset(file)


def test_a_gzip_bomb_is_read_no_further_than_needed(tmp_path):
    file = tmp_path / "x.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        for _ in range(200):
            stream.write(bytes(2**20))
    with pytest.raises(nidiff.InputError, match="MiB"):
        read_idx(file)


@pytest.mark.parametrize("size", [100_000, (1, 2**40), 10**18])
def test_an_absurd_size_is_refused(size):
    with pytest.raises(nidiff.InputError, match="size="):
        nidiff.load_dataset("digits", size=size)


@pytest.mark.parametrize("name", ["x" * 300, "x\0y", "y/" * 3000, "hf:", "hf:no such name", None, 5, b"x"])
def test_a_name_that_cannot_be_one_is_refused(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(nidiff.InputError, match="name=|data set"):
        nidiff.load_dataset(name, progress=False)


def test_a_name_that_is_not_utf8_is_one(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    good_image(Path(folder))
    assert len(nidiff.load_dataset(folder)) == 1
    nidiff.Identity((2,)).save(folder)
    assert nidiff.Covariance.load(folder).size == 2
