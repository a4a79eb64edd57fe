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
    assert len(images) == 4
    assert images.shape == (1, 8, 8)
    batch = images.batch(torch.tensor([3, 0, 3]))
    assert batch.dtype == torch.float32
    assert torch.equal(batch, pixels[[3, 0, 3]].float() / 127.5 - 1)
    torch.testing.assert_close(batch, (2 * pixels[[3, 0, 3]].double() / 255 - 1).float())
    assert batch[0].max() == 1
    assert batch[1].min() == -1


def test_floats_are_given_as_they_are():
    pixels = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)
    batch = Dataset(pixels).batch(torch.tensor([1]))
    assert torch.equal(batch, pixels[1:])
    batch.zero_()
    assert pixels[1].min() > 0  # a batch is a copy


def test_flips_mirror_the_last_axis_where_asked():
    images = Dataset(torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8))
    before = images.values.clone()
    index = torch.tensor([4, 1, 1])
    plain, flipped = images.batch(index), images.batch(index, torch.tensor([True, False, True]))
    assert torch.equal(flipped[0], plain[0].flip(-1))
    assert torch.equal(flipped[1], plain[1])
    assert torch.equal(flipped[2], plain[2].flip(-1))
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
    assert len(train) == 1498
    assert len(test) == 299
    for images in (train, test):
        assert images.shape == (1, 8, 8)
        assert images.values.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert len(images.labels) == len(images)
        assert images.labels.unique().tolist() == list(range(10))
        levels = images.values.unique().tolist()
        assert levels == [round(v * 255 / 16) for v in range(17)]
    every = {(tuple(p.flatten().tolist())) for images in (train, test) for p in images.values}
    assert len(every) == 1797  # no two digits are alike, so the parts share none
    assert train.labels[:10].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 0]  # the file begins 0 1 2 … 9 0 1
    # The first row of optdigits.tes.
    first = (0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0)
    assert train.values[0, 0, :2].flatten().tolist() == [round(v * 255 / 16) for v in first]


def test_a_known_dataset_is_fitted_too():
    images = load_dataset("digits", size=(16, 12), channels=3)
    assert images.shape == (3, 16, 12)
    assert len(images.labels) == len(images) == 1498


# CIFAR-10


@pytest.fixture
def cifar(tmp_path):
    """A folder with the six files, all black, except that image 1 of each has known pixels and the label 7."""
    known = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, name in enumerate(named.CIFAR10_FILES["train"] + named.CIFAR10_FILES["test"]):
        with (folder / name).open("wb") as file:
            file.seek(3073)
            file.write(bytes([7]) + (known ^ i).tobytes())  # red, green, blue; each by rows
            file.truncate(30730000)
    return folder, known


def test_cifar10_has_the_pixels_and_labels_of_its_files(cifar):
    folder, known = cifar
    train = load_dataset("cifar10", data_dir=folder)
    assert train.values.shape == (50000, 3, 32, 32)
    assert train.values.dtype == torch.uint8
    for i in range(5):
        assert np.array_equal(train.values[10000 * i + 1], known ^ i)
        assert train.labels[10000 * i : 10000 * i + 3].tolist() == [0, 7, 0]
    test = load_dataset("cifar10", split="test", data_dir=folder.parent)  # the folder above will do
    assert test.values.shape == (10000, 3, 32, 32)
    assert np.array_equal(test.values[1], known ^ 5)


def test_cifar10_is_read_from_its_archive(cifar, tmp_path):
    folder, known = cifar
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(folder / "test_batch.bin", "cifar-10-batches-bin/test_batch.bin")
    (folder / "test_batch.bin").unlink()
    test = load_dataset("cifar10", split="test", data_dir=tmp_path)
    assert np.array_equal(test.values[1], known ^ 5)
    assert not (folder / "test_batch.bin").exists()
    (folder / "data_batch_1.bin").unlink()
    refuse("data_dir", "data_batch_1.bin", name="cifar10", data_dir=tmp_path)
    whole = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(whole[: len(whole) // 2])
    refuse("data_dir", "cifar-10-binary.tar.gz", name="cifar10", split="test", data_dir=tmp_path)


def test_other_files_than_cifar10s_are_refused(cifar, tmp_path):
    folder, _ = cifar
    with (folder / "test_batch.bin").open("r+b") as file:
        file.write(bytes([10]))  # a label
    refuse("data_dir", "test_batch.bin", name="cifar10", split="test", data_dir=folder)
    with (folder / "data_batch_3.bin").open("r+b") as file:
        file.truncate(30730000 - 3073)
    refuse("data_dir", "data_batch_3.bin", name="cifar10", data_dir=folder)
    (folder / "data_batch_3.bin").unlink()
    refuse("data_dir", name="cifar10", data_dir=folder)
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


def test_fashion_mnist_has_the_pixels_and_labels_of_its_files(fashion, tmp_path):
    images = load_dataset("fashion-mnist", split="test", data_dir=tmp_path)
    assert np.array_equal(images.values, fashion[:, None])
    assert images.labels.tolist() == [3, 1, 4, 1, 5]
    refuse("data_dir", "train-images-idx3-ubyte.gz", name="fashion-mnist", data_dir=tmp_path)


def test_fashion_mnist_is_found_where_debian_puts_it(fashion, tmp_path, monkeypatch):
    monkeypatch.setattr(named, "DEBIAN", tmp_path)
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


def test_the_right_file_is_kept(site, tmp_path):
    url, content = site
    file = tmp_path / "new" / "file.gz"
    download(Remote(url, hashlib.sha256(content).hexdigest()), file)
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


def test_another_file_leaves_nothing(site, tmp_path):
    url, content = site
    with pytest.raises(nidiff.InputError, match="not the expected file"):
        download(Remote(url, hashlib.sha256(content[:-1]).hexdigest()), tmp_path / "file.gz")
    assert not list(tmp_path.iterdir())


def test_an_endless_file_does_not_fill_the_disk(site, tmp_path, monkeypatch):
    """The checksum is right, so that only the limit can refuse it."""
    url, content = site
    remote = Remote(url, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(download_module, "LARGEST", len(content) // 2)
    monkeypatch.setattr(download_module, "PART", 16)
    with pytest.raises(nidiff.InputError, match="not the expected file"):
        download(remote, tmp_path / "file.gz")
    assert not list(tmp_path.iterdir())


def test_no_network_is_an_input_error(site, tmp_path):
    url, _ = site
    for missing in (url + "s", "http://127.0.0.1:1/file"):
        with pytest.raises(nidiff.InputError, match="cannot be downloaded"):
            download(Remote(missing, "0" * 64), tmp_path / "file.gz")
    assert not list(tmp_path.iterdir())


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


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NIDIFF_DATA", raising=False)
    monkeypatch.setattr(download_module.Path, "home", no_home)
    with pytest.raises(nidiff.InputError, match="NIDIFF_DATA"):
        cache_folder()


# Names


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(tmp_path):
    refuse("data", "did you mean 'fashion-mnist'", *DATASETS, "hf:NAME", name="Fashion_MNIST")
    refuse("data", *DATASETS, name=str(tmp_path / "nowhere"))


def test_a_path_is_a_dataset(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    np.save(tmp_path / "a.npy", pixels)
    images = load_dataset(tmp_path / "a.npy")
    assert np.array_equal(images.values, pixels[:, None])
    assert images.labels is None
    assert load_dataset(str(tmp_path / "a.npy"), size=3).shape == (1, 3, 3)
    refuse("split", name=tmp_path / "a.npy", split="test")


def test_a_data_dir_that_is_not_used_is_refused(tmp_path):
    for name in ("digits", tmp_path):
        refuse("data_dir", name=name, data_dir=tmp_path)


def test_the_hub_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(nidiff.InputError, match=r"nidiff\[hub\]"):
        load_dataset("hf:some/name")


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
