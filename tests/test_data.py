"""Named datasets: what is in the files is what comes out, batches are exact, and a wrong file is refused by name."""

import gzip
import hashlib
import os
import struct
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

import nidiff
from nidiff.data import download as download_module
from nidiff.data import named
from nidiff.data.dataset import Dataset
from nidiff.data.download import Remote, cache_folder, download
from nidiff.data.load import DATASETS, load_dataset


def refuse(argument, *words, name, **options):
    with pytest.raises(nidiff.InputError) as error:
        load_dataset(name, **options)
    assert error.value.argument == argument
    for word in words:
        assert word in str(error.value)


# Batches


def test_a_batch_is_the_pixels_scaled_to_minus_one_to_one():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    images = Dataset(pixels)
    assert (len(images), images.shape) == (4, (1, 8, 8))
    batch = images.batch(torch.tensor([3, 0, 3]))
    assert batch.dtype == torch.float32
    assert torch.equal(batch, pixels[[3, 0, 3]].float() / 127.5 - 1)
    floats = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)  # which are given as they are
    batch = Dataset(floats).batch(torch.tensor([1]))
    assert torch.equal(batch, floats[1:])
    batch.zero_()
    assert floats[1].min() > 0  # a batch is a copy


def test_flips_mirror_the_last_axis_where_asked():
    images = Dataset(torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8))
    before = images.values.clone()
    index, flip = torch.tensor([4, 1, 1]), torch.tensor([True, False, True])
    plain, flipped = images.batch(index), images.batch(index, flip)
    assert torch.equal(flipped, torch.where(flip[:, None, None, None], plain.flip(-1), plain))
    assert torch.equal(images.values, before)


def test_prefetch_gives_the_batches_in_order():
    images = Dataset(torch.randint(0, 256, (9, 1, 2, 2), dtype=torch.uint8))
    draws = [(torch.tensor([i, 8 - i]), torch.tensor([True, False]) if i % 2 else None) for i in range(9)]
    made = list(images.prefetch(iter(draws)))
    assert len(made) == 9
    for batch, draw in zip(made, draws, strict=True):
        assert torch.equal(batch, images.batch(*draw))
    assert list(images.prefetch([])) == []
    assert torch.equal(next(images.prefetch(draws)), made[0])  # and can be left early


# The digits


def test_the_digits_are_all_there_in_two_parts():
    train, test = load_dataset("digits"), load_dataset("digits", split="test")
    assert (len(train), len(test)) == (1498, 299)
    for images in (train, test):
        assert images.shape == (1, 8, 8)
        assert images.values.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert len(images.labels) == len(images)
        assert images.labels.unique().tolist() == list(range(10))
        assert images.values.unique().tolist() == [round(v * 255 / 16) for v in range(17)]
    every = {(tuple(p.flatten().tolist())) for images in (train, test) for p in images.values}
    assert len(every) == 1797  # no two digits are alike, so the parts share none
    assert train.labels[:10].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 0]  # the file begins 0 1 2 … 9 0 1
    # The first row of optdigits.tes.
    first = (0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0)
    assert train.values[0, 0, :2].flatten().tolist() == [round(v * 255 / 16) for v in first]
    fitted = load_dataset("digits", split="test", size=(16, 12), channels=3)
    assert fitted.shape == (3, 16, 12)
    assert torch.equal(fitted.labels, test.labels)


# CIFAR-10


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A folder with the six files of ten images, all black, but image 1 of each has known pixels and the label 7."""
    monkeypatch.setattr(named, "IMAGES", 10)
    known = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, name in enumerate(named.CIFAR10_FILES["train"] + named.CIFAR10_FILES["test"]):
        record = bytes([7]) + (known ^ i).tobytes()  # red, green, blue; each by rows
        (folder / name).write_bytes(bytes(3073) + record + bytes(8 * 3073))
    return folder, known


def test_cifar10_has_the_pixels_and_labels_of_its_files(cifar):
    folder, known = cifar
    train = load_dataset("cifar10", data_dir=folder)
    assert train.values.shape == (50, 3, 32, 32)
    assert train.values.dtype == torch.uint8
    for i in range(5):
        assert np.array_equal(train.values[10 * i + 1], known ^ i)
        assert train.labels[10 * i : 10 * i + 3].tolist() == [0, 7, 0]
    test = load_dataset("cifar10", split="test", data_dir=folder.parent)  # the folder above will do
    assert test.values.shape == (10, 3, 32, 32)
    assert np.array_equal(test.values[1], known ^ 5)


def test_cifar10_is_read_from_its_archive_and_other_files_are_refused(cifar, tmp_path):
    folder, known = cifar
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        members.add(folder / "test_batch.bin", "cifar-10-batches-bin/test_batch.bin")
    (folder / "test_batch.bin").unlink()
    test = load_dataset("cifar10", split="test", data_dir=tmp_path)
    assert np.array_equal(test.values[1], known ^ 5)
    assert not (folder / "test_batch.bin").exists()
    (folder / "data_batch_1.bin").unlink()
    refuse("data_dir", "data_batch_1.bin", name="cifar10", data_dir=tmp_path)
    archive.write_bytes(archive.read_bytes()[:1000])
    refuse("data_dir", archive.name, name="cifar10", split="test", data_dir=tmp_path)
    (folder / "test_batch.bin").write_bytes(bytes([10]) + bytes(10 * 3073 - 1))  # a label
    refuse("data_dir", name="cifar10", split="test", data_dir=folder)
    (folder / "test_batch.bin").write_bytes(bytes(9 * 3073))
    refuse("data_dir", name="cifar10", split="test", data_dir=folder)
    refuse("split", name="cifar10", split="validation")


# Fashion-MNIST


def write_idx(file, array, magic=None):
    header = bytes([0, 0, 8, array.ndim]) if magic is None else magic
    file.write_bytes(gzip.compress(header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()))


@pytest.fixture
def fashion(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.uint8([3, 1, 4, 1, 5]))
    return images


def test_fashion_mnist_has_the_pixels_and_labels_of_its_files(fashion, tmp_path, monkeypatch):
    images = load_dataset("fashion-mnist", split="test", data_dir=tmp_path)
    assert np.array_equal(images.values, fashion[:, None])
    assert images.labels.tolist() == [3, 1, 4, 1, 5]
    refuse("data_dir", "train-images-idx3-ubyte.gz", name="fashion-mnist", data_dir=tmp_path)
    monkeypatch.setattr(named, "DEBIAN", tmp_path)  # where Debian's package puts them
    assert np.array_equal(load_dataset("fashion-mnist", split="test").values, fashion[:, None])


def test_damaged_idx_files_are_refused(fashion, tmp_path):
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    for content in (whole[:-100], gzip.compress(gzip.decompress(whole)[:-1]), b"text", b"", gzip.compress(b"")):
        file.write_bytes(content)
        refuse("data_dir", file.name, name="fashion-mnist", split="test", data_dir=tmp_path)
    for magic in (bytes([0, 0, 9, 3]), bytes([1, 0, 8, 3]), bytes([0, 0, 8, 2]), bytes([0, 0, 8, 255])):
        write_idx(file, fashion[:, :3, :3], magic)
        refuse("data_dir", file.name, name="fashion-mnist", split="test", data_dir=tmp_path)
    write_idx(file, fashion[:4])  # fewer than the labels
    refuse("data_dir", file.name, name="fashion-mnist", split="test", data_dir=tmp_path)


# Downloads


@pytest.fixture
def site(monkeypatch):
    """A web site on this machine with one file."""
    content = np.random.default_rng(0).bytes(200_000)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/file":
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/file", content
        server.shutdown()
        thread.join()


def test_only_the_right_file_is_kept(site, tmp_path, monkeypatch):
    url, content = site
    right, file = Remote(url, hashlib.sha256(content).hexdigest()), tmp_path / "new" / "file.gz"

    def refuse_download(remote, reason):
        with pytest.raises(nidiff.InputError, match=reason):
            download(remote, file)
        assert not file.parent.exists() or not list(file.parent.iterdir())

    refuse_download(Remote(url, hashlib.sha256(content[:-1]).hexdigest()), "checksum")
    for missing in (url + "s", "http://127.0.0.1:1/file"):
        refuse_download(Remote(missing, "0" * 64), "cannot be downloaded")
    with monkeypatch.context() as patch:  # the checksum is right, so that only the limit can refuse it
        patch.setattr(download_module, "LARGEST", len(content) // 2)
        patch.setattr(download_module, "PART", 16)
        refuse_download(right, "checksum")
    download(right, file)
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


def test_a_dataset_is_downloaded_once(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    asked = []

    def fetch(remote, file, progress):
        asked.append(remote.url)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_idx(file, images if "images" in remote.url else np.uint8([0, 1, 2]))

    monkeypatch.setattr(named, "DEBIAN", tmp_path / "nowhere")
    monkeypatch.setattr(download_module, "download", fetch)
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    for _ in range(2):
        assert np.array_equal(load_dataset("fashion-mnist").values, images[:, None])
    assert [url.rsplit("/", 1)[1] for url in asked] == list(named.FASHION_MNIST_FILES["train"])


# Names


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(tmp_path):
    refuse("data", "did you mean 'fashion-mnist'", *DATASETS, "hf:NAME", name="Fashion_MNIST")
    refuse("data", *DATASETS, name=str(tmp_path / "nowhere"))
    refuse("data_dir", name=tmp_path, data_dir=tmp_path)  # a path has no other folder


@pytest.mark.slow
def test_a_dataset_of_the_hub_gives_its_images_and_labels(tmp_path):
    """A folder is a dataset to the Hub's library too, read by the same code and without a network."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        folder = tmp_path / "animals" / ("cat", "dog")[i // 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.png")
    code = "import nidiff, sys; d = nidiff.load_dataset(sys.argv[1]); print(d.labels.tolist(), d.values.tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code, f"hf:{tmp_path / 'animals'}"],
        env={**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"[0, 0, 1, 1] {np.moveaxis(pixels, -1, 1).tolist()}"
