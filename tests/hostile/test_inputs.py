"""Data from strangers: what they claim is compared with what they are before memory is asked for."""

import gzip
import json
import os
import pickle
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
    with pytest.raises(nidiff.InputError, match="data="):
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
        with pytest.raises(nidiff.InputError, match="data="):
            nidiff.load_dataset(file)


def test_a_gzip_bomb_is_read_no_further_than_needed(tmp_path):
    file = tmp_path / "x.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        for _ in range(200):
            stream.write(bytes(2**20))
    with pytest.raises(nidiff.InputError, match="x.gz"):
        read_idx(file)


@pytest.mark.parametrize("size", [100_000, (1, 2**40), 10**18])
def test_an_absurd_size_is_refused(size):
    with pytest.raises(nidiff.InputError, match="size="):
        nidiff.load_dataset("digits", size=size)


@pytest.mark.parametrize("name", ["x" * 300, "x\0y", "y/" * 3000, "hf:", "hf:no such name"])
def test_a_name_that_cannot_be_one_is_refused(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(nidiff.InputError, match="data="):
        nidiff.load_dataset(name, progress=False)


def test_a_name_that_is_not_utf8_is_one(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    good_image(Path(folder))
    assert len(nidiff.load_dataset(folder)) == 1
    nidiff.Identity((2,)).save(folder)
    assert nidiff.Covariance.load(folder).size == 2


# NetCDF, HDF5 and Zarr


def refuse(path: Path, *words: str, **options: object) -> None:
    with pytest.raises(nidiff.InputError) as error:
        nidiff.load_dataset(path, progress=False, **options).all()
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["link", "a link behind another", "external", "virtual"])
def test_an_hdf5_file_reads_no_other_file(tmp_path, kind):
    h5py = pytest.importorskip("h5py")
    secret = np.random.default_rng(0).normal(size=(6, 4, 4)).astype("f4")
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = secret
    (tmp_path / "secret.bin").write_bytes(secret.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "link":
            file["x"] = h5py.ExternalLink("secret.h5", "/x")
        elif kind == "a link behind another":
            file.create_group("g")["there"] = h5py.ExternalLink("secret.h5", "/")
            file["x"] = h5py.SoftLink("/g/there/x")
        elif kind == "external":
            file.create_dataset("x", secret.shape, "f4", external=[(str(tmp_path / "secret.bin"), 0, secret.nbytes)])
        else:
            layout = h5py.VirtualLayout(secret.shape, "f4")
            layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "x", shape=secret.shape)
            file.create_virtual_dataset("x", layout)
    refuse(tmp_path / "a.h5", "another file")
    assert nidiff.load_dataset(tmp_path / "secret.h5").shape == (1, 4, 4)  # which is a good file by itself


def zarr_of(folder: Path, **changes: object) -> Path:
    """A Zarr array by hand, of which only the metadata are there."""
    store = folder / "a.zarr"
    (store / "field").mkdir(parents=True)
    array = {"zarr_format": 2, "shape": [6, 4, 4], "chunks": [1, 4, 4], "dtype": "<f4", "fill_value": 1.0, "order": "C"}
    array |= {"compressor": None, "filters": None, **changes}
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    (store / "field" / ".zarray").write_text(json.dumps(array))
    (store / "field" / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["time", "y", "x"]}')
    return store


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


@pytest.mark.parametrize("where", ["compressor", "filters"])
def test_a_zarr_codec_that_runs_programs_is_refused(tmp_path, where, monkeypatch):
    pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    codec = {"id": "pickle"}
    store = zarr_of(tmp_path, **{where: codec if where == "compressor" else [codec]})
    for row in range(6):
        (store / "field" / f"{row}.0.0").write_bytes(pickle.dumps(Planted()))
    refuse(store, "codec 'pickle'")
    assert not Path("planted").exists()


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"shape": [10**12, 400, 400], "chunks": [1, 400, 400]}, "claims"),
        ({"shape": [10**12, 400, 400], "chunks": [10**9, 400, 400]}, "claims"),
        ({"chunks": [10**9, 400, 400]}, "chunks"),
        ({"dtype": "|O"}, "a.zarr"),
        ({"dtype": "<U4"}, "a.zarr"),
        ({"shape": [0, 4, 4]}, "at least one item"),
        ({"shape": [6, -4, 4]}, "a.zarr"),
        ({"shape": "all"}, "a.zarr"),
    ],
)
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_a_zarr_folder_that_claims_more_than_it_has_is_refused(tmp_path, changes, word, memory_limit):
    pytest.importorskip("zarr")
    refuse(zarr_of(tmp_path / "bad", **changes), word, memory_limit=memory_limit)
    good = nidiff.load_dataset(zarr_of(tmp_path / "good"), memory_limit=memory_limit, scaling="none", missing=3)
    assert good.all().tolist() == np.full((6, 1, 4, 4), 3.0).tolist()  # what was never written is missing


def test_a_coordinate_that_claims_more_than_it_has_is_refused(tmp_path):
    """They are read as soon as a file is opened."""
    pytest.importorskip("zarr")
    for name, changes in (("a", {"shape": [10**13], "chunks": [10]}), ("b", {"shape": [6], "chunks": [10**13]})):
        store = zarr_of(tmp_path / name)
        array = json.loads((store / "field" / ".zarray").read_text()) | changes
        (store / "time").mkdir()
        (store / "time" / ".zarray").write_text(json.dumps(array))
        (store / "time" / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["time"]}')
        refuse(store, "a.zarr", "claims" if name == "a" else "chunks")


@pytest.mark.parametrize("shape, chunks", [((10**9, 400, 400), (1, 400, 400)), ((6, 10**6, 10**6), (1, 10**6, 10**4))])
def test_an_hdf5_file_that_claims_more_than_it_has_is_refused(tmp_path, shape, chunks):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape, "f4", chunks=chunks)
    for memory_limit in (None, 0):
        refuse(tmp_path / "a.h5", "claims", memory_limit=memory_limit)


@pytest.mark.parametrize("name", ["a.nc", "a.h5", "a.zarr", "a.npy", "a.npz"])
def test_another_format_under_a_name_of_ours_is_refused(tmp_path, name):
    pytest.importorskip("xarray")
    for content in (b"", b"text", b"CDF\x01" + bytes(40), b"\x89HDF\r\n\x1a\n" + bytes(60), b"PK\x03\x04" + bytes(40)):
        (tmp_path / name).write_bytes(content)
        refuse(tmp_path / name, name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refuse(tmp_path / name, name)


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, 10**6])
def test_a_sound_that_claims_more_than_its_file_is_refused(tmp_path, length):
    form = struct.pack("<HHIIHH", 1, 1, 8000, 16000, 2, 16)
    parts = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", length) + bytes(100)
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", len(parts)) + parts)
    refuse(tmp_path, "a.wav")
    (tmp_path / "a.wav").write_bytes(b"RIFF" + bytes(4) + b"WAVE" + b"fmt " + struct.pack("<I", length) + form)
    refuse(tmp_path, "a.wav")
