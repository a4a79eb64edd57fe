"""CIFAR-10 in its binary format: 60 000 photographs of 32×32, in ten classes.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html
"""

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nidiff.data.download import Remote, cache_folder, download
from nidiff.errors import InputError, one_of

ARCHIVE = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 170052171, "c32a1d4ab5d03f1284b67883e8d87530"
)
FOLDER = "cifar-10-batches-bin"
FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
IMAGES, RECORD = 10000, 1 + 3 * 32 * 32  # per file; a record is the label, then the planes R, G, B


def load_cifar10(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 3, 32, 32] and the labels [N]; N is 50 000 to train and 10 000 to test.

    ``data_dir`` has the .bin files, or the folder cifar-10-batches-bin with them, or cifar-10-binary.tar.gz, which is
    read as it is. Without ``data_dir`` that archive is downloaded, once.
    """
    names = FILES[one_of("split", split, FILES)]
    pixels = torch.empty((len(names), IMAGES, 3, 32, 32), dtype=torch.uint8)
    labels = torch.empty((len(names), IMAGES), dtype=torch.int64)
    found = set()
    place = _place(names, data_dir, progress)
    for name, content in _contents(place, names):
        records = np.frombuffer(content, dtype=np.uint8)
        if records.size != IMAGES * RECORD or records[::RECORD].max() > 9:
            raise InputError(
                f"{name!r} of {str(place)!r} is not {IMAGES} records of CIFAR-10 of {RECORD} bytes: "
                "replace it with the official file."
            )
        records = records.reshape(IMAGES, RECORD)
        pixels.numpy()[names.index(name)] = records[:, 1:].reshape(IMAGES, 3, 32, 32)
        labels.numpy()[names.index(name)] = records[:, 0]
        found.add(name)
    if found != set(names):
        raise InputError(f"{str(place)!r} lacks {min(set(names) - found)!r}: replace it with the official file.")
    return pixels.flatten(0, 1), labels.flatten()


def _place(names: list[str], data_dir: Path | None, progress: bool) -> Path:
    """The folder that has the files, or the archive."""
    folder = cache_folder() if data_dir is None else Path(data_dir)
    for place in (folder, folder / FOLDER):
        if all((place / name).is_file() for name in names):
            return place
    archive = folder / "cifar-10-binary.tar.gz"
    if not archive.is_file():
        if data_dir is not None:
            raise InputError(
                f"data_dir={str(data_dir)!r} has no {names[0]}, {FOLDER} or {archive.name}: "
                "put the binary version of CIFAR-10 there, or leave data_dir out to download it."
            )
        download(ARCHIVE, archive, progress)
    return archive


def _contents(place: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """The files as (name, content), in any order. Nothing of an archive is written to the disk."""
    if place.is_dir():
        for name in names:
            yield name, (place / name).read_bytes()
        return
    wanted = {f"{FOLDER}/{name}": name for name in names}
    try:
        with tarfile.open(place, "r|gz") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.name in wanted and member.isfile() else None
                if stream is not None:
                    yield wanted[member.name], stream.read(IMAGES * RECORD + 1)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(
            f"{str(place)!r} cannot be read as an archive ({error}): replace it with the official file."
        ) from error
