"""Data from strangers: what they claim is compared with what they are before memory is asked for."""

import json
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CASES
from PIL import Image
from visitor import claimed_png

import nidiff
from nidiff.data.encoded import FORMATS


def refuse(path: Path | str, *words: str, **options: object) -> None:
    with pytest.raises(nidiff.InputError) as error:
        nidiff.load_dataset(path, progress=False, **options).all()
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def good_image(folder: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "good.png")


@pytest.mark.parametrize("size", [None, 8])
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, size):
    (tmp_path / "bomb.png").write_bytes(claimed_png(20_000, 20_000))
    refuse(tmp_path, "bomb.png", size=size)
    good_image(tmp_path)
    kept = nidiff.load_dataset(tmp_path, size=size, skip_corrupt=True)
    assert len(kept) == 1
    assert [Path(name).name for name in kept.skipped] == ["bomb.png"]


def test_only_formats_of_ours_reach_a_decoder(tmp_path):
    """Whatever they are called."""
    for kind in FORMATS:
        Image.fromarray(np.full((4, 5, 3), 200, np.uint8)).save(tmp_path / "x.png", format=kind)
        assert nidiff.load_dataset(tmp_path).shape == (3, 4, 5)
    for content in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"GIF89a", b"P5 4 4 255\n" + bytes(16)):
        (tmp_path / "x.png").write_bytes(content)
        refuse(tmp_path, "x.png", "cannot identify")


def test_what_is_not_a_file_is_left_out(tmp_path):
    good_image(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken.png").symlink_to("/nonexistent")
    (tmp_path / "loop.png").symlink_to("loop.png")
    with pytest.warns(UserWarning, match="not read: 3 links or pipes"):
        assert len(nidiff.load_dataset(tmp_path)) == 1


@pytest.mark.parametrize("shape", ["(1000000000000, 32, 32, 3)", "(3, 1000000, 1000000)", "(3, -4, 5)"])
def test_an_array_that_claims_more_than_its_file_is_refused(tmp_path, shape):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(60)
    (tmp_path / "x.npy").write_bytes(array)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("arr_0.npy", array)
    for name in ("x.npy", "x.npz"):
        refuse(tmp_path / name, name)
        (np.save if name == "x.npy" else np.savez)(tmp_path / name, np.array([{}, None, 1], object))
        refuse(tmp_path / name, name)  # objects are never unpickled


def test_a_name_that_is_not_utf8_is_one_and_an_absurd_name_or_size_is_refused(tmp_path, monkeypatch):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    good_image(Path(folder))
    assert len(nidiff.load_dataset(folder)) == 1
    nidiff.Identity((2,)).save(folder)
    assert nidiff.Covariance.load(folder).size == 2
    for size in (10**7, (1, 2**45)):
        refuse("digits", size=size)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("x" * 300, "x\0y", "hf:", "hf:no such name"):
        refuse(name, "data=")


# NetCDF, HDF5 and Zarr


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


def test_a_zarr_codec_that_runs_programs_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    for where, codec in {"compressor": {"id": "pickle"}, "filters": [{"id": "pickle"}]}.items():
        store = zarr_of(tmp_path / where, **{where: codec})
        for row in range(6):
            (store / "field" / f"{row}.0.0").write_bytes(pickle.dumps(Planted()))
        refuse(store, "'pickle'")
    for codec in ({"name": "numcodecs.pickle"}, {"name": "sharding_indexed", "configuration": {"codecs": ["pickle"]}}):
        store = tmp_path / "three.zarr"
        store.mkdir(exist_ok=True)
        (store / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "array", "codecs": [codec]}))
        refuse(store, "'pickle'")
    store = zarr_of(tmp_path / "consolidated")
    metadata = {"field/.zarray": {"filters": [{"id": "unheard-of"}]}, "field/.zattrs": {"filters": ["any word"]}}
    (store / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": metadata}))
    refuse(store, "'unheard-of'")
    assert not Path("planted").exists()


def test_what_zarr_itself_writes_is_read(tmp_path):
    xarray = pytest.importorskip("xarray")
    zarr = pytest.importorskip("zarr")
    table = xarray.Dataset({"v": (("time", "y", "x"), np.arange(96.0, dtype="f4").reshape(6, 4, 4))})
    table.attrs = {"codecs": ["mine"], "filters": [{"id": "pickle"}]}  # what a user notes is no codec
    for version in (2, 3):
        table.to_zarr(tmp_path / f"{version}.zarr", zarr_format=version, consolidated=version == 2)
    shards = zarr.create_group(tmp_path / "shards.zarr").create_array(
        "v", shape=(6, 4, 4), shards=(2, 4, 4), chunks=(1, 4, 4), dtype="f4", dimension_names=("time", "y", "x")
    )
    shards[:] = table.v.values
    for name in ("2.zarr", "3.zarr", "shards.zarr"):
        assert np.array_equal(nidiff.load_dataset(tmp_path / name).values[:, 0].numpy(), table.v.values)


@pytest.mark.parametrize("place", ["chunk", "array", "metadata", "pipe"])
def test_a_link_inside_a_zarr_folder_is_refused_and_a_link_to_it_is_not(tmp_path, place):
    pytest.importorskip("zarr")
    secret = np.arange(2, 18, dtype="<f4")
    (tmp_path / "secret").write_bytes(secret.tobytes())
    store = zarr_of(tmp_path / "good")
    for row in range(6):
        (store / "field" / f"{row}.0.0").write_bytes(secret.tobytes())
    (tmp_path / "linked.zarr").symlink_to(store)
    assert len(nidiff.load_dataset(tmp_path / "linked.zarr")) == 6
    if place == "chunk":
        (store / "field" / "2.0.0").unlink()
        (store / "field" / "2.0.0").symlink_to(tmp_path / "secret")
    elif place == "array":  # in which there may be codecs that nobody has looked at
        (store / "field").rename(tmp_path / "elsewhere")
        (store / "field").symlink_to(tmp_path / "elsewhere")
    elif place == "metadata":
        (store / "field" / ".zarray").rename(tmp_path / "zarray")
        (store / "field" / ".zarray").symlink_to(tmp_path / "zarray")
    else:
        os.mkfifo(store / "field" / "pipe")
    refuse(store, "a link or no file")


def test_consolidated_metadata_do_not_lead_out_of_a_zarr_folder(tmp_path):
    pytest.importorskip("zarr")
    store = zarr_of(tmp_path / "in")
    secret = np.full(16, 42, "<f4").tobytes()
    (store / "field").rename(tmp_path / "secret")
    for row in range(6):
        (tmp_path / "secret" / f"{row}.0.0").write_bytes(secret)
    group, path = {".zgroup": {"zarr_format": 2}}, tmp_path / "secret"
    for name in ("../../secret", f"{path}", "x/../../../secret"):
        files = {f"{name}/{part}": json.loads((path / part).read_text()) for part in (".zarray", ".zattrs")}
        about = {"zarr_consolidated_format": 1, "metadata": group | files}
        (store / ".zmetadata").write_text(json.dumps(about))
        refuse(store, "a.zarr", missing=1)


def random_file(folder: Path, random: np.random.Generator) -> tuple[Path, dict[str, object]]:
    """A file as somebody might have it: its type, range, frames, attributes and names are anything."""
    xarray = pytest.importorskip("xarray")
    kind = random.choice(["array", "netcdf", "zarr", "frames", "folder"])
    dtype = random.choice(["u1", "u2", ">u2", "i1", "i2", ">i4", "i8", "u4", "f2", "f4", ">f8", "?", "c8", "M8[s]"])
    low = float(random.choice([0, -5, 1e4, 1e7, 1e12]))
    shape = tuple(random.integers(1, 6, random.integers(1, 5)))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what does not fit wraps round
        values = (low + random.normal(size=shape) * random.choice([0, 1, 50])).astype("f8").astype(dtype)
    if kind == "array":
        path = folder / "a.npy"
        np.save(path, np.asfortranarray(values) if random.random() < 0.5 else values)
        return path, {"layout": random.choice([None, "NL", "NCL", "NHW", "NCHW"])}
    if kind in ("netcdf", "zarr") and values.dtype.kind in "iuf":
        words = ["time", "lat", "nlon", "xc", "item", "a\x1b[31m", "b\u202e", "member", "lev_1"]
        about: dict[str, object] = {"units": str(random.choice(["K", "\x1b]0;x\x07", "days since 2000-01-01", ""]))}
        if random.random() < 0.5:
            about["valid_range"] = np.sort(random.normal(low, 2, 2))
        if random.random() < 0.2:
            about["valid_max"] = "word"
        dims = tuple(random.permutation(words)[: len(shape)])
        table = xarray.Dataset(
            {str(random.choice(words)) + "_v": (dims, values.astype(values.dtype.newbyteorder("=")))}
        )
        next(iter(table.data_vars.values())).attrs.update(about)
        path = folder / ("a.zarr" if kind == "zarr" else "a.h5")
        if kind == "zarr":
            table.to_zarr(path, zarr_format=2)
        else:
            table.to_netcdf(path, engine="h5netcdf", invalid_netcdf=True)
        return path, {"missing": random.choice(["refuse", "mean", "0"])}
    pixels = random.integers(0, 256, (random.integers(1, 4), 5, 4, 3), dtype=np.uint8)
    for number in random.choice([1, 2, 3, 10], 3):
        mode = random.choice(["RGB", "L"])
        first, *rest = (Image.fromarray(frame).convert(mode) for frame in pixels)
        path = folder / f"{number}.{random.choice(['png', 'tiff', 'webp', 'gif', 'wav', 'txt'])}"
        first.save(path, format="tiff" if path.suffix in (".wav", ".txt") else None, save_all=True, append_images=rest)
    return folder, {"layout": random.choice([None, "NTHWC", "NDHWC", "NHWC"])}


def test_random_files_are_read_whole_or_refused_in_a_sentence(tmp_path, tally):
    """Nothing but an `InputError` comes out of any of them, values are finite, and no text can drive a terminal."""
    failed = []
    cases = 150 * CASES
    for case in range(cases):
        folder = tmp_path / str(case)
        folder.mkdir()
        path, options = random_file(folder, np.random.default_rng(case))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                data = nidiff.load_dataset(path, progress=False, **{k: v for k, v in options.items() if v})
                words = [*data.grid.axes, *data.grid.channels, *data.grid.units, *data.grid.axis_units.values()]
                is_good = bool(data.all().isfinite().all()) and all(word.isprintable() for word in words)
                is_good &= data.values.dtype in (torch.uint8, torch.uint16, torch.float32, torch.float64)
            except nidiff.InputError as error:
                is_good = str(error).isprintable()
            except Exception as error:
                is_good = False
                print(case, repr(error))
        if not is_good or any(issubclass(each.category, RuntimeWarning) for each in caught):
            failed.append(case)
    tally("files of random types, ranges, frames and attributes", cases, len(failed))
    assert not failed


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_a_zarr_folder_that_claims_more_than_it_has_is_refused(tmp_path, memory_limit):
    pytest.importorskip("zarr")
    claims = [{"shape": [10**12, 4000, 4000]}, {"dtype": "|O"}, {"dtype": "<U4"}, {"shape": [0, 4, 4]}]
    for number, changes in enumerate([*claims, {"shape": [6, -4, 4]}, {"shape": "all"}]):
        if memory_limit is None or number > 0:  # of a stream only the items must fit
            refuse(zarr_of(tmp_path / f"{number}", **changes), "a.zarr", memory_limit=memory_limit)
    good = nidiff.load_dataset(zarr_of(tmp_path / "good"), memory_limit=memory_limit, scaling="none", missing=3)
    assert good.all().tolist() == np.full((6, 1, 4, 4), 3.0).tolist()  # what was never written is missing
    store = tmp_path / "good" / "a.zarr"  # and a coordinate, which is read as soon as a file is opened
    array = json.loads((store / "field" / ".zarray").read_text()) | {"shape": [10**13], "chunks": [10**13]}
    (store / "time").mkdir()
    (store / "time" / ".zarray").write_text(json.dumps(array))
    (store / "time" / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["time"]}')
    refuse(store, "a.zarr", memory_limit=memory_limit)


@pytest.mark.parametrize("name", ["a.nc", "a.h5", "a.zarr", "a.npy", "a.npz"])
def test_another_format_under_a_name_of_ours_is_refused(tmp_path, name):
    pytest.importorskip("xarray")
    for content in (b"", b"text", b"CDF\x01" + bytes(40), b"\x89HDF\r\n\x1a\n" + bytes(60), b"PK\x03\x04" + bytes(40)):
        (tmp_path / name).write_bytes(content)
        refuse(tmp_path / name, name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refuse(tmp_path / name, name)


def test_a_sound_that_claims_more_than_its_file_is_refused(tmp_path):
    form = struct.pack("<HHIIHH", 1, 1, 8000, 16000, 2, 16)
    for length in (2**32 - 1, 2**31, 10**6):
        claimed = struct.pack("<I", length)
        parts = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + claimed + bytes(100)
        for content in (b"RIFF" + bytes(4) + parts, b"RIFF" + bytes(4) + b"WAVEfmt " + claimed + form):
            (tmp_path / "a.wav").write_bytes(content)
            refuse(tmp_path, "a.wav")
