"""The UCI digits: 1797 handwritten digits of 8×8 grey pixels, shipped with the package.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, CC BY 4.0: the images of ``optdigits.tes``, in its order. ``digits.npz`` has its
numbers 0 … 16 as they are, and the labels.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError, one_of


def load_digits(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 [N, 1, 8, 8] and the labels [N]: 1498 images to train on, and every sixth of all, 299, to test.

    Value v of 0 … 16 becomes v · 255 / 16, rounded (8 to 128). Every sixth, because the beginning and the end of the
    file differ more than two random parts of it do.
    """
    one_of("split", split, ("train", "test"))
    if data_dir is not None:
        raise InputError(f"data_dir={str(data_dir)!r} has no meaning with 'digits', which are built in: leave it out.")
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int64)
    pixels = np.rint(images * (255 / 16)).astype(np.uint8)
    mine = (np.arange(len(pixels)) % 6 == 5) == (split == "test")
    return torch.from_numpy(pixels[mine][:, None]), torch.from_numpy(labels[mine])
