"""Images by name: a dataset that is known, a path, or one of the Hub."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from torch import Tensor

from nidiff.data.cifar10 import load_cifar10
from nidiff.data.digits import load_digits
from nidiff.data.encoded import MEMORY_LIMIT
from nidiff.data.fashion_mnist import load_fashion_mnist
from nidiff.data.fit import Size, check_fit, fit_pixels
from nidiff.data.hub import load_hub
from nidiff.data.images import Images, open_images
from nidiff.errors import InputError


def load_dataset(
    name: str | Path,
    *,
    split: str = "train",
    data_dir: Path | None = None,
    size: Size = None,
    channels: int | None = None,
    skip_corrupt: bool = False,
    memory_limit: int | None = MEMORY_LIMIT,
    progress: bool = True,
) -> Images:
    """The images of ``name``: one of `DATASETS`, the path of a folder or an .npy or .npz file, or hf:NAME.

    Args:
        split: "train" or "test", or for hf:NAME any it has. A path has no splits: all of it is "train".
        data_dir: where the official files of a known dataset are. Default: they are looked for, and downloaded.
        size: one number, or height and width: images are cropped about the centre and resized.
        channels: 1 (grey) or 3 (RGB). Default: as stored.
        skip_corrupt: leave out images that cannot be read, and list them in ``.skipped``.
        memory_limit: a folder or hf:NAME of more bytes of pixels is decoded batch by batch. None: never.
        progress: show bars on a terminal.
    """
    name = str(name)
    pair = check_fit(size, channels)
    if name in DATASETS:
        pixels, labels = DATASETS[name](split, data_dir, progress)
        return Images(fit_pixels(pixels, pair, channels), labels)
    if not name.startswith("hf:") and not Path(name).exists():
        near = get_close_matches(name.lower(), DATASETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InputError(
            f"name={name!r} is neither a dataset nor an existing path{hint}: give one of "
            f"{', '.join(map(repr, sorted(DATASETS)))}, the path of a folder, .npy or .npz file, or hf:NAME."
        )
    if data_dir is not None:
        raise InputError(f"data_dir={str(data_dir)!r} has no meaning with {name!r}: leave it out.")
    if name.startswith("hf:"):
        return load_hub(
            name.removeprefix("hf:"),
            split,
            size=pair,
            channels=channels,
            skip_corrupt=skip_corrupt,
            memory_limit=memory_limit,
            progress=progress,
        )
    if split != "train":
        raise InputError(f"split={split!r} is not a part of {name!r}: give the path of those images instead.")
    return open_images(
        name,
        size=pair,
        channels=channels,
        skip_corrupt=skip_corrupt,
        memory_limit=memory_limit,
        progress=progress,
    )


DATASETS: dict[str, Callable[[str, Path | None, bool], tuple[Tensor, Tensor]]] = {
    "digits": load_digits,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}
