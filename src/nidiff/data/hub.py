"""Images of a dataset of the Hugging Face Hub."""

from functools import partial
from pathlib import Path

import torch

from nidiff.data.encoded import Encoded, read_encoded
from nidiff.data.fit import Reading
from nidiff.data.images import Images
from nidiff.errors import InputError
from nidiff.extras import require


def load_hub(name: str, split: str, reading: Reading) -> Images:
    """The first column of images of the dataset ``name``, and its column ``label`` if there is one."""
    datasets = require("datasets")
    try:
        table = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"name='hf:{name}' cannot be loaded ({error}): correct the name or the split.") from error
    column = next((column for column, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise InputError(f"name='hf:{name}' has no images among {table.column_names}: give a dataset of images.")
    images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def file(row: int) -> Path | bytes:
        image = images[row][column]
        return Path(image["path"]) if image["bytes"] is None else image["bytes"]

    files = [Encoded(f"hf:{name}[{row}]", partial(file, row)) for row in range(len(images))]
    pixels, rows, skipped = read_encoded(files, reading)
    has_labels = isinstance(table.features.get("label"), datasets.ClassLabel)
    return Images(pixels, torch.tensor(table["label"])[rows] if has_labels else None, skipped)
