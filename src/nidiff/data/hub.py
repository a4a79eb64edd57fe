"""Images of a dataset of the Hugging Face Hub."""

from pathlib import Path
from typing import Any

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
    columns = [column for column, kind in table.features.items() if isinstance(kind, datasets.Image)]
    if not columns:
        raise InputError(f"name='hf:{name}' has no images among {table.column_names}: give a dataset of images.")
    images = table.select_columns(columns[:1]).cast_column(columns[0], datasets.Image(decode=False))
    pixels, rows, skipped = read_encoded(_Rows(name, images, columns[0]), reading)
    labels = (
        torch.tensor(table["label"])[rows] if isinstance(table.features.get("label"), datasets.ClassLabel) else None
    )
    return Images(pixels, labels, skipped)


class _Rows:
    def __init__(self, name: str, table: Any, column: str) -> None:
        self.name, self.table, self.column = name, table, column

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int, /) -> Encoded:
        image = self.table[row][self.column]
        return Encoded(f"hf:{self.name}[{row}]", Path(image["path"]) if image["bytes"] is None else image["bytes"])
