"""Images by name: a dataset we know, a path, or a dataset of the Hugging Face Hub."""

from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch

from nidiff.data.dataset import Dataset
from nidiff.data.encoded import MEMORY_LIMIT, Encoded, Reading, Size, read_encoded
from nidiff.data.images import fit_pixels, open_images
from nidiff.data.named import DATASETS
from nidiff.errors import InputError, first_line, shown
from nidiff.extras import require
from nidiff.files import as_path
from nidiff.recipe import check_kinds


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
) -> Dataset:
    """The images of ``name``: one of `DATASETS`, the path of a folder or an .npy or .npz file, or hf:NAME.

    Args:
        split: "train" or "test", or any split that hf:NAME has. A path has no splits: all of it is "train".
        data_dir: where the official files of a named dataset are. Default: they are found or downloaded.
        size: one number, or height and width: images are cropped about the centre and resized.
        channels: 1 (grey) or 3 (RGB). Default: as stored.
        skip_corrupt: leave out images that cannot be read, and list them in ``.skipped``.
        memory_limit: a folder or hf:NAME with more bytes of pixels is decoded batch by batch. None: no limit.
        progress: show bars on a terminal.
    """
    reading = Reading(size, channels, skip_corrupt, memory_limit, progress)
    check_kinds(load_dataset, {"skip_corrupt": skip_corrupt, "progress": progress})
    if not isinstance(split, str):
        raise InputError(f"split={shown(split)} must be a name, such as 'train'.")
    if data_dir is not None:
        data_dir = as_path("data_dir", data_dir)
    if not (isinstance(name, str) and (name in DATASETS or name.startswith("hf:"))):
        name = str(as_path("name", name))
    if name in DATASETS:
        pixels, labels = DATASETS[name](split, data_dir, progress)
        return Dataset(fit_pixels(pixels, reading), labels)
    if not name.startswith("hf:") and not Path(name).exists():
        near = get_close_matches(name.lower(), DATASETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        known = f"{', '.join(map(repr, sorted(DATASETS)))}, the path of a folder, .npy or .npz file, or hf:NAME"
        raise InputError(
            f"the data set {name!r} is neither a known name nor an existing path{hint}: give one of {known}."
        )
    if data_dir is not None:
        raise InputError(f"data_dir={str(data_dir)!r} has no meaning with {name!r}: leave it out.")
    if name.startswith("hf:"):
        return _load_hub(name, split, reading)
    if split != "train":
        raise InputError(f"split={split!r}: {name!r} has no splits; give the path of the images you want instead.")
    return open_images(name, reading)


def _load_hub(name: str, split: str, reading: Reading) -> Dataset:
    """The first column of images of a dataset of the Hub, and its column ``label`` if there is one."""
    datasets = require("datasets")
    try:
        table = datasets.load_dataset(name.removeprefix("hf:"), split=split)
    except Exception as error:  # the Hub, its files and their readers fail in many ways
        failed = f"the data set {name!r} cannot be loaded ({first_line(error)})"
        raise InputError(f"{failed}: correct the name or the split.") from error
    column = next((column for column, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise InputError(f"the data set {name!r} has no images among {table.column_names}: give a dataset of images.")
    images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def file(row: int) -> Path | bytes:
        image = images[row][column]
        return Path(image["path"]) if image["bytes"] is None else image["bytes"]

    files = [Encoded(f"{name}[{row}]", partial(file, row)) for row in range(len(images))]
    pixels, rows, skipped = read_encoded(files, reading)
    has_labels = isinstance(table.features.get("label"), datasets.ClassLabel)
    return Dataset(pixels, torch.tensor(table["label"])[rows] if has_labels else None, skipped)
