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
    "train": {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    },
    "test": {
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
}


def load_fashion_mnist(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 1, 28, 28] and the labels [N]; N is 60 000 to train and 10 000 to test.

    ``data_dir`` has the official .gz files. Without it they come from Debian's package, or are downloaded, once.
    """
    remotes = [Remote(f"{SITE}/{name}", sha256) for name, sha256 in FILES[one_of("split", split, FILES)].items()]
    folders = [DEBIAN, cache_folder() / "fashion-mnist"]
    files = [official_file(remote, data_dir, folders, progress) for remote in remotes]
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
