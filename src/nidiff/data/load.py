"""Data sets by name: one that we know, a path, or one of the Hugging Face Hub."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch

from nidiff.data.beside import variables_beside, with_conditions, with_labels
from nidiff.data.dataset import Dataset
from nidiff.data.encoded import MEMORY_LIMIT, Encoded, Reading, Size, read_encoded
from nidiff.data.images import files_of, fit_pixels, open_images
from nidiff.data.missing import MEAN, REFUSE, Cleaning, as_missing, cleaned
from nidiff.data.named import DATASETS
from nidiff.data.science import is_science, open_science
from nidiff.data.sounds import SUFFIXES as SOUNDS
from nidiff.data.sounds import open_sounds
from nidiff.data.sources import take
from nidiff.data.split import held_out_rows
from nidiff.data.units import FITTED, LOG, as_rules, fit_scaling, measure
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, first_line, one_of, shown
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
    layout: str | None = None,
    variables: Sequence[str] = (),
    sample_axis: str | None = None,
    scaling: str | Sequence[str] | Scaling = "auto",
    missing: str | float = "refuse",
    held_out: str | float | None = None,
    labels: str | Path | None = None,
    condition: str | Path | None = None,
    memory_limit: int | None = MEMORY_LIMIT,
    progress: bool = True,
) -> Dataset:
    """The data set ``name``: one of `DATASETS`, hf:NAME, or the path of a folder of images, of videos or of WAV files,
    of an .npy or .npz file, of NetCDF or HDF5 (.nc, .h5), or of Zarr (.zarr).

    Args:
        split: "train" or "test", or any split that hf:NAME has. A path has a "test" part if ``held_out`` says which.
        data_dir: where the official files of a named dataset are. Default: they are found or downloaded.
        size: one number, or height and width: images are cropped about the centre and resized. Of sounds: the number
            of samples, from the middle.
        channels: 1 (grey) or 3 (RGB). Default: as stored.
        skip_corrupt: leave out images that cannot be read, and list them in ``.skipped``.
        layout: what the axes of an array are, such as NCHW, in the order of the file: N for the items, C for the
            channels, and L, T, D, H, W, X, Y or Z. With T, each subfolder of a folder has the frames of one video.
        variables: of NetCDF, HDF5 and Zarr, those that become channels; of .npz, its array. Default: all that fit.
        sample_axis: of NetCDF, HDF5 and Zarr, the axis of the items. Default: the first one.
        scaling: between the units of the data and those of the model, fitted to the training part: standard (mean 0,
            standard deviation 1), range (to [-1, 1]), log (standard of the logarithm), none, or
            linear:scale=…,shift=…; one for all channels, or one for each; or a `Scaling`. auto: standard of floats;
            uint8 and uint16 go from the range of the type to [-1, 1].
        missing: what to do with NaN and infinite values: "refuse" them, fill in the "mean" of their channel, or a
            number in the units of the data.
        held_out: the fraction of the items, or the range of their coordinate, such as time=2010-01-01:, that is the
            "test" part.
        labels: the class of each item, as ``.labels``: "data" (the data set's own, or the subfolders of a folder), an
            .npy or .npz file [N] of whole numbers from 0 or of words, which are sorted, or a variable of the NetCDF,
            HDF5 or Zarr file. Default: the data set's own, if it has any.
        condition: what else is known of each item, as ``.conditions``: an .npy or .npz file [N, P] of numbers or
            [N, C, *event] of fields, on the grid of the data or on one whose sizes divide those; or variables of the
            NetCDF, HDF5 or Zarr file, as "a,b". They get mean 0 and standard deviation 1 per channel over the training
            part.
        memory_limit: more bytes than this are read batch by batch. None: no limit.
        progress: show bars on a terminal.
    """
    given = tuple(variables) if isinstance(variables, list | tuple) else variables
    labels, condition = (str(one) if isinstance(one, Path) else one for one in (labels, condition))
    beside = variables_beside(labels, condition)
    reading = Reading(size, channels, skip_corrupt, memory_limit, progress, layout, given, sample_axis, beside)  # type: ignore[arg-type]
    check_kinds(load_dataset, {"skip_corrupt": skip_corrupt, "progress": progress})
    if not isinstance(split, str):
        raise InputError(f"split={shown(split)} must be a name, such as 'train'.")
    if data_dir is not None:
        data_dir = as_path("data_dir", data_dir)
    if not (isinstance(name, str) and (name in DATASETS or name.startswith("hf:"))):
        name = str(as_path("name", name))
    data = _open(name, split, data_dir, reading, held_out is not None)
    if labels is not None:
        data = with_labels(data, labels, name)
    if condition is not None and held_out is None and split != "train":
        raise InputError(f"condition={condition!r} belongs to the training part of {name!r}: leave split out.")
    own_split = name in DATASETS and split != "train" and not isinstance(scaling, Scaling)
    if own_split and any(rule.kind in FITTED for rule in as_rules(scaling, data)):  # it is fitted to the training part
        train = _open(name, "train", data_dir, reading, False)
        scaling = _finished(train, name, "train", None, scaling, as_missing(missing), progress).scaling
    return _finished(data, name, split, held_out, scaling, as_missing(missing), progress, condition)


def _open(name: str, split: str, data_dir: Path | None, reading: Reading, is_split: bool) -> Dataset:
    """All of a data set with its numbers as they are stored."""
    if name in DATASETS or name.startswith("hf:"):
        for argument in ("layout", "variables", "sample_axis"):
            if getattr(reading, argument):
                raise InputError(
                    f"{argument}={getattr(reading, argument)!r} has no meaning with {name!r}: leave it out."
                )
        if is_split:
            raise InputError(f"held_out has no meaning with {name!r}, which has splits of its own: leave it out.")
    if name in DATASETS:
        values, labels = DATASETS[name](split, data_dir, reading.progress)
        if values.dtype == torch.uint8:
            return Dataset(fit_pixels(values, reading), labels)
        if reading.size is not None or reading.channels is not None:
            raise InputError(f"size and channels have no meaning with {name!r}, which are no images: leave them out.")
        return Dataset(values, labels)
    if not name.startswith("hf:") and not Path(name).exists():
        near = get_close_matches(name.lower(), DATASETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        known = (
            f"{', '.join(map(repr, sorted(DATASETS)))}, the path of a folder, .npy, .npz, .nc, .h5 or .zarr, or hf:NAME"
        )
        raise InputError(
            f"the data set {name!r} is neither a known name nor an existing path{hint}: give one of {known}."
        )
    if data_dir is not None:
        raise InputError(f"data_dir={str(data_dir)!r} has no meaning with {name!r}: leave it out.")
    if name.startswith("hf:"):
        return _load_hub(name, split, reading)
    if not is_split and split != "train":
        remedy = "say with held_out= which part that is, or give the path of the data you want"
        raise InputError(f"split={split!r}: {name!r} has no splits: {remedy}.")
    if is_split:
        one_of("split", split, ("train", "test"))
    return _open_path(Path(name), reading)


def _open_path(path: Path, reading: Reading) -> Dataset:
    if is_science(path):
        if reading.size is not None or reading.channels is not None:
            raise InputError(f"size and channels have no meaning with path={str(path)!r}: leave them out.")
        return open_science(path, reading)
    if reading.sample_axis is not None or (reading.variables and path.suffix.lower() != ".npz"):
        which = "sample_axis" if reading.sample_axis is not None else "variables"
        raise InputError(f"{which} has no meaning with path={str(path)!r}: leave it out.")
    if path.is_dir() and (sounds := files_of(path, SOUNDS)):
        return open_sounds(path, sounds, reading)
    return open_images(path, reading)


def _finished(
    data: Dataset,
    name: str,
    split: str,
    held_out: object,
    scaling: object,
    missing: str | float,
    progress: bool,
    condition: str | None = None,
) -> Dataset:
    """The part that is asked for, without missing values, and with the scaling of the training part."""
    is_test = torch.zeros(len(data), dtype=torch.bool) if held_out is None else held_out_rows(data, held_out)
    train, test = (chosen.nonzero()[:, 0] for chosen in (~is_test, is_test))
    if condition is not None:
        data = with_conditions(data, condition, name, train)
    rules = [] if isinstance(scaling, Scaling) else as_rules(scaling, data)
    values, refusing, found = data.values, Cleaning(f"path={name!r}", data.grid, data.along), None
    if missing != MEAN:
        fills = None if missing == REFUSE else (float(missing),) * data.shape[0]
        values = cleaned(values, replace(refusing, fills=fills))
    if missing == MEAN or any(rule.kind in FITTED for rule in rules):
        found = measure(values, train, [rule.kind == LOG for rule in rules], progress=progress)
        if missing == MEAN:
            values = cleaned(values, replace(refusing, fills=found.means(data.grid)))
    made = scaling if isinstance(scaling, Scaling) else fit_scaling(rules, data, found)
    whole = replace(data, values=values, scaling=made)
    return whole if held_out is None else take(whole, train if split == "train" else test)


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
    labels = torch.tensor(table["label"])[rows] if has_labels else None
    return Dataset(
        pixels, labels, skipped=skipped, class_names=tuple(table.features["label"].names) if has_labels else ()
    )
