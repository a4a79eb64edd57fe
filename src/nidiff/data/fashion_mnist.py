"""Fashion-MNIST: 70 000 articles of clothing of 28×28 grey pixels, in ten classes.

H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST", 2017, https://github.com/zalandoresearch/fashion-mnist (MIT)
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from nidiff.data.download import Remote, cache_folder, official_file
from nidiff.errors import InputError, one_of

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist
SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = {
    "train": (
        Remote(f"{SITE}/train-images-idx3-ubyte.gz", 26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(f"{SITE}/train-labels-idx1-ubyte.gz", 29515, "25c81989df183df01b3e8a0aad5dffbe"),
    ),
    "test": (
        Remote(f"{SITE}/t10k-images-idx3-ubyte.gz", 4422102, "bef4ecab320f06d8554ea6380940ec79"),
        Remote(f"{SITE}/t10k-labels-idx1-ubyte.gz", 5148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
}


def load_fashion_mnist(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 1, 28, 28] and the labels [N]; N is 60 000 to train and 10 000 to test.

    ``data_dir`` has the official .gz files. Without it they come from Debian's package, or are downloaded, once.
    """
    folders = [DEBIAN, cache_folder() / "fashion-mnist"]
    files = [official_file(remote, data_dir, folders, progress) for remote in FILES[one_of("split", split, FILES)]]
    images, labels = map(read_idx, files)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        problem = f"has {tuple(images.shape)} images and {tuple(labels.shape)} labels, which do not match"
        raise InputError(f"{str(files[0].parent)!r} {problem}: replace its files with the official ones.")
    return images[:, None], labels.long()


def read_idx(file: Path) -> Tensor:
    """The uint8 array of a gzipped IDX file: 0, 0, 8 (for uint8), the number of axes, their lengths, the values."""
    replace = "replace it with the official file"
    try:
        content = bytearray(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{str(file)!r} cannot be unzipped ({error}): {replace}.") from error
    if content[:3] != b"\0\0\x08" or len(content) < (start := 4 + 4 * content[3]):
        raise InputError(f"{str(file)!r} does not begin like an IDX file of bytes: {replace}.")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    if not 0 < math.prod(shape) == len(content) - start:
        raise InputError(f"{str(file)!r} has {len(content) - start} values for the shape {shape}: {replace}.")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)
