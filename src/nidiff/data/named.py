"""The datasets that have a name: the digits, which are shipped, others from official files, and computed turbulence."""

import gzip
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nidiff.data.download import Remote, cache_folder, official_file
from nidiff.data.turbulence import load_turbulence
from nidiff.errors import FileError, one_of
from nidiff.files import blaming

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist
FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_MNIST_FILES = {
    "train": {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    },
    "test": {
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
}
CIFAR10 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
IMAGES, RECORD = 10000, 1 + 3 * 32 * 32  # per file of CIFAR-10; a record is the label, then the planes R, G, B
REPLACE = "replace it with the official file"


def load_digits(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 1, 8, 8] and the labels [N]: 1498 handwritten digits to train on, and every sixth of all, 299, to test.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
    https://doi.org/10.24432/C50P49, CC BY 4.0: the images of ``optdigits.tes``, in its order. ``digits.npz`` has its
    numbers 0 … 16 as they are; v becomes v · 255 / 16, rounded (8 to 128). Every sixth, because the beginning and the
    end of the file differ more than two random parts of it do.
    """
    one_of("split", split, ("train", "test"))
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int64)
    pixels = np.rint(images * (255 / 16)).astype(np.uint8)
    mine = (np.arange(len(pixels)) % 6 == 5) == (split == "test")
    return torch.from_numpy(pixels[mine][:, None]), torch.from_numpy(labels[mine])


def load_fashion_mnist(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 1, 28, 28] and the labels [N] of articles of clothing; N is 60 000 to train and 10 000 to test.

    H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST", 2017, https://github.com/zalandoresearch/fashion-mnist (MIT).
    ``data_dir`` has the official .gz files. Without it they come from Debian's package, or are downloaded, once.
    """
    names = FASHION_MNIST_FILES[one_of("split", split, FASHION_MNIST_FILES)]
    folders = [DEBIAN, cache_folder() / "fashion-mnist"]
    remotes = [Remote(f"{FASHION_MNIST}/{name}", sha256) for name, sha256 in names.items()]
    files = [official_file(remote, data_dir, folders, progress) for remote in remotes]
    images, labels = map(read_idx, files)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        problem = f"has images {tuple(images.shape)}, which do not match the labels {tuple(labels.shape)}"
        raise FileError("data_dir", str(files[0]), problem, REPLACE)
    return images[:, None], labels.long()


def read_idx(file: Path) -> Tensor:
    """The uint8 array of a gzipped IDX file: 0, 0, 8 (for uint8), the number of axes, their lengths, the values."""
    with blaming(str(file), REPLACE, "cannot be read as an IDX file of bytes", "data_dir"), gzip.open(file) as stream:
        magic, axes = stream.read(3), stream.read(1)[0]
        shape = struct.unpack(f">{axes}I", stream.read(4 * axes))
        content = bytearray(stream.read())
        if magic != b"\0\0\x08":
            raise ValueError("it does not begin as one")
        return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)


def load_cifar10(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, 32, 32] and the labels [N] of photographs; N is 50 000 to train and 10 000 to test.

    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Dataset", 2009,
    https://www.cs.toronto.edu/~kriz/cifar.html, the binary version: ``data_dir`` has the .bin files, or their folder
    cifar-10-batches-bin, or cifar-10-binary.tar.gz, read as it is. Without ``data_dir`` that is downloaded, once.
    """
    names = CIFAR10_FILES[one_of("split", split, CIFAR10_FILES)]
    folder = cache_folder() if data_dir is None else Path(data_dir)
    places = [place for place in (folder, folder / CIFAR10_FOLDER) if all((place / name).is_file() for name in names)]
    place = places[0] if places else official_file(CIFAR10, data_dir, [folder], progress)
    with blaming(str(place), REPLACE, "cannot be read as the binary version of CIFAR-10", "data_dir"):
        if places:
            contents = [(place / name).read_bytes() for name in names]
        else:
            with tarfile.open(place) as archive:
                files = [archive.extractfile(f"{CIFAR10_FOLDER}/{name}") for name in names]
                contents = [file.read() for file in files if file is not None]
        records = torch.frombuffer(bytearray().join(contents), dtype=torch.uint8).reshape(-1, RECORD)
        labels = records[:, 0].long()
        if len(records) != IMAGES * len(names) or labels.max() > 9:
            raise ValueError(f"it has {len(records)} images, with labels up to {labels.max()}")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


# Values [N, C, *event], uint8 for pictures and float32 for fields, and labels where there are classes.
DATASETS: dict[str, Callable[[str, Path | None, bool], tuple[Tensor, Tensor | None]]] = {
    "digits": load_digits,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "turbulence": load_turbulence,
}
