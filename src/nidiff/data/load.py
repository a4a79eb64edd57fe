"""From a `DataSpec` to a `Dataset`: a named data set, a path, or a data set of the Hugging Face Hub."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nidiff.data.annotations import with_conditions, with_labels
from nidiff.data.dataset import Dataset
from nidiff.data.encoded import Encoded, read_encoded
from nidiff.data.images import files_of, fit_pixels, open_images
from nidiff.data.missing import MEAN, REFUSE, Cleaning, as_missing, cleaned
from nidiff.data.named import DATASETS
from nidiff.data.science import is_science, open_science
from nidiff.data.sounds import SUFFIXES as SOUNDS
from nidiff.data.sounds import open_sounds
from nidiff.data.sources import Limits, take
from nidiff.data.spec import MEMORY_LIMIT, DataSpec
from nidiff.data.split import held_out_rows
from nidiff.data.units import FITTED, LOG, as_rules, fit_scaling, measure
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, first_line, known_names, one_of
from nidiff.extras import require
from nidiff.files import as_path

HUB = "hf:"


def load_dataset(
    source: str | Path,
    *,
    split: str = "train",
    scaling: str | Sequence[str] | Scaling = "auto",
    missing: str | float = "refuse",
    held_out: str | float | None = None,
    memory_limit: int | None = MEMORY_LIMIT,
    progress: bool = True,
    **options: Any,
) -> Dataset:
    """The data set ``source``: one of `DATASETS`, hf:NAME, or the path of a folder of images, of videos or of WAV
    files, of an .npy or .npz file, of NetCDF or HDF5 (.nc, .h5), or of Zarr (.zarr).

    Args:
        split: "train" or "test", or any split that hf:NAME has. A path has a "test" part if ``held_out`` says which.
        scaling: between the units of the data and those of the model, fitted to the training part: standard (mean 0,
            standard deviation 1), range (to [-1, 1]), log (standard of the logarithm), none, or
            linear:scale=…,shift=…; one for all channels, or one for each; or a `Scaling`. auto: standard of floats;
            uint8 and uint16 go from the range of the type to [-1, 1].
        missing: what to do with NaN and infinite values: "refuse" them, fill in the "mean" of their channel, or a
            number in the units of the data.
        held_out: the fraction of the items, or the range of their coordinate, such as time=2010-01-01:, that is the
            "test" part.
        memory_limit: more bytes than this are read batch by batch. None: no limit.
        progress: show bars on a terminal.
        options: the other fields of `DataSpec`: data_dir, size, channels, skip_corrupt, layout, variables, sample_axis,
            labels and condition. ``size`` may be height and width. Labels become ``.labels``, by default the data set's
            own, and conditions ``.conditions``, with mean 0 and standard deviation 1 per channel over the training
            part.
    """
    known, texts = (scaling, ("auto",)) if isinstance(scaling, Scaling) else (None, scaling)
    for name, kind in {"data_dir": Path, "labels": str, "condition": str, "variables": tuple}.items():
        if options.get(name) is not None:
            options[name] = kind(options[name])
    spec = DataSpec(
        str(as_path("data", source)),
        scaling=(texts,) if isinstance(texts, str) else tuple(texts),
        missing=str(missing),
        held_out=None if held_out is None else str(held_out),
        **options,
    )
    return spec.load(split, scaling=known, memory_limit=memory_limit, progress=progress)


def load(spec: DataSpec, split: str, limits: Limits, *, annotations: Sequence[str], scaling: Scaling | None) -> Dataset:
    """The part ``split`` of the data: with the ``annotations`` that are asked for, without missing values, and with the
    ``scaling`` of the training part, which is fitted if it is not known."""
    data, missing = _open(spec, split, limits), as_missing(spec.missing)
    if "labels" in annotations and spec.labels is not None:
        data = with_labels(data, spec.labels, spec.source)
    is_test = torch.zeros(len(data), dtype=torch.bool)
    if spec.held_out is not None:
        is_test = held_out_rows(data, spec.held_out)
    train, test = (chosen.nonzero()[:, 0] for chosen in (~is_test, is_test))
    if "condition" in annotations and spec.condition is not None:
        if spec.held_out is None and split != "train":
            raise InputError("condition", spec.condition, "is that of the training part", "leave out `split`")
        data = with_conditions(data, spec.condition, spec.source, train)
    rules = [] if scaling is not None else as_rules(spec.scaling, data)
    is_fitted = any(rule.kind in FITTED for rule in rules)
    if is_fitted and spec.source in DATASETS and split != "train":
        scaling, is_fitted = load(spec, "train", limits, annotations=(), scaling=None).scaling, False
    values, cleaning, statistics = data.values, Cleaning(spec.source, data.grid, data.along), None
    if missing != MEAN:
        fills = None if missing == REFUSE else (float(missing),) * data.shape[0]
        values = cleaned(values, replace(cleaning, fills=fills))
    if missing == MEAN or is_fitted:
        statistics = measure(values, train, [rule.kind == LOG for rule in rules], progress=limits.progress)
        if missing == MEAN:
            values = cleaned(values, replace(cleaning, fills=statistics.means(data.grid)))
    whole = replace(data, values=values, scaling=scaling or fit_scaling(rules, data, statistics))
    return whole if spec.held_out is None else take(whole, train if split == "train" else test)


def _open(spec: DataSpec, split: str, limits: Limits) -> Dataset:
    """All of a data set, with its numbers as they are stored."""
    if spec.source in DATASETS:
        spec.refuse("layout", "variables", "sample_axis", "held_out")
        values, labels = DATASETS[spec.source](split, spec.data_dir, limits.progress)
        if values.dtype != torch.uint8:
            spec.refuse("size", "channels")
            return Dataset(values, labels)
        return Dataset(fit_pixels(values, spec), labels)
    if spec.source.startswith(HUB):
        spec.refuse("layout", "variables", "sample_axis", "held_out", "data_dir")
        return _open_hub(spec, split, limits)
    path = as_path("data", spec.source)
    if not path.exists():
        known = f"{known_names(spec.source.lower(), DATASETS)}, or give a path or hf:NAME"
        raise InputError("data", spec.source, "is neither a known name nor an existing path", known)
    spec.refuse("data_dir")
    if spec.held_out is not None:
        one_of("split", split, ("train", "test"))
    elif split != "train":
        remedy = "say with `held_out` which part that is, or give the path of the data you want"
        raise InputError("split", split, f"is not a part of {spec.source!r}, which has no splits", remedy)
    return open_path(path, spec, limits)


def open_path(path: Path, spec: DataSpec, limits: Limits) -> Dataset:
    """All of the data of a file or folder, with their numbers as they are stored."""
    if is_science(path):
        spec.refuse("size", "channels")
        return open_science(path, spec, limits)
    spec.refuse("sample_axis", *([] if path.suffix.lower() == ".npz" else ["variables"]))
    if path.is_dir() and (sounds := files_of(path, SOUNDS)):
        return open_sounds(sounds, spec, limits)
    return open_images(path, spec, limits)


def _open_hub(spec: DataSpec, split: str, limits: Limits) -> Dataset:
    """The first column of images of a data set of the Hub, and its column ``label`` if there is one."""
    datasets, name = require("datasets"), spec.source
    try:
        table = datasets.load_dataset(name.removeprefix(HUB), split=split)
    except Exception as error:  # the Hub, its files and their readers fail in many ways
        problem = f"cannot be loaded ({first_line(error)})"
        raise InputError("data", name, problem, "correct the name or the `split`") from error
    column = next((column for column, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise InputError("data", name, f"has no images among {table.column_names}", "give a data set of images")
    images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def file(row: int) -> Path | bytes:
        image = images[row][column]
        return Path(image["path"]) if image["bytes"] is None else image["bytes"]

    files = [Encoded(f"{name}[{row}]", partial(file, row)) for row in range(len(images))]
    pixels, rows, skipped = read_encoded(files, spec, limits)
    kind = table.features.get("label")
    if not isinstance(kind, datasets.ClassLabel):
        return Dataset(pixels, skipped=skipped)
    return Dataset(pixels, torch.tensor(table["label"])[rows], skipped=skipped, class_names=tuple(kind.names))
