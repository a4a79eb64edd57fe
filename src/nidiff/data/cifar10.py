"""CIFAR-10 in its binary format: 60 000 photographs of 32×32, in ten classes.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html
"""

import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nidiff.data.download import Remote, cache_folder, official_file
from nidiff.errors import InputError, one_of

ARCHIVE = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
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
    folder = cache_folder() if data_dir is None else Path(data_dir)
    for place in (folder, folder / FOLDER):
        if all((place / name).is_file() for name in names):
            contents = {name: (place / name).read_bytes() for name in names}
            break
    else:
        place = official_file(ARCHIVE, data_dir, [folder], progress)
        contents = _unpack(place, names)
    for name in names:
        if name not in contents:
            raise InputError(f"{str(place)!r} lacks {name!r}: replace it with the official file.")
        numbers = np.frombuffer(contents[name], dtype=np.uint8)
        if numbers.size != IMAGES * RECORD or numbers[::RECORD].max() > 9:
            problem = f"is not {IMAGES} records of CIFAR-10 of {RECORD} bytes"
            raise InputError(f"{name!r} of {str(place)!r} {problem}: replace it with the official file.")
    together = bytearray().join(contents[name] for name in names)
    records = torch.frombuffer(together, dtype=torch.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _unpack(archive: Path, names: list[str]) -> dict[str, bytes]:
    """The content of the files that the archive has; nothing is written to the disk."""
    contents = {}
    try:
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                folder, _, name = member.name.rpartition("/")
                stream = members.extractfile(member) if folder == FOLDER and name in names else None
                if stream is not None:
                    contents[name] = stream.read(IMAGES * RECORD + 1)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        problem = f"cannot be read as an archive ({error})"
        raise InputError(f"{str(archive)!r} {problem}: replace it with the official file.") from error
    return contents
