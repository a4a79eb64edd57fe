"""The conditions of the image of a seed: its class, and its row of a file.

Both are functions of the seed alone, so that a seed stays an image, whatever the batch and the number of processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.annotations import as_finite, coordinate_rows, on_grid, read_conditions
from nidiff.data.arrays import read_array
from nidiff.data.coordinates import needs_times
from nidiff.data.grid import Grid
from nidiff.data.science import is_table
from nidiff.diffusion.condition import CLASSES, Condition
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.guidance import Guidance, make_guidance
from nidiff.errors import InputError
from nidiff.files import as_path
from nidiff.notation import seeds_text
from nidiff.recipe import check_number
from nidiff.sealed import tensors_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.diffusion.climatology import Times


@dataclass(frozen=True, eq=False)
class Conditioning:
    """The conditions and the guidance of a job."""

    classes: tuple[int, ...] = ()
    """The class of a seed is classes[seed % len(classes)]; empty: no class."""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Other conditions [N, …] by name, in the units of the model; a seed has row seed % N."""
    guidance: Guidance | None = None

    def bind(self, denoiser: Denoiser, seeds: Sequence[int]) -> Denoiser:
        """The denoiser with the conditions of ``seeds``, and guided."""
        values = {name: rows_of_seeds(rows, seeds) for name, rows in self.rows.items()}
        if self.classes:
            values[CLASSES] = rows_of_seeds(torch.tensor(self.classes), seeds)
        if not values:
            return denoiser
        conditional = denoiser.given(**values)
        return conditional if self.guidance is None else conditional.corrected(self.guidance)

    def to_json(self) -> dict[str, Any]:
        """What decides the numbers of a seed, and only where it is set."""
        values: dict[str, Any] = {"classes": list(self.classes)} if self.classes else {}
        if self.guidance is not None:
            values["guidance"] = self.guidance.scale
            values |= {"interval": list(self.guidance.interval)} if self.guidance.interval else {}
        return values | ({"condition": rows_digest(self.rows)} if self.rows else {})

    @property
    def labels(self) -> dict[str, Any]:
        """The conditions as a file name and a table write them."""
        values = self.to_json()
        if self.classes:
            values["classes"] = classes_text(self.classes)
        if "interval" in values:
            values["guidance_interval"] = "/".join(f"{row:g}" for row in values.pop("interval"))
        if self.rows:
            values["condition"] = values.pop("condition")[:8]
        return values


def rows_of_seeds(rows: Tensor, seeds: Sequence[int]) -> Tensor:
    """Row ``seed % len(rows)`` of each seed."""
    return rows[torch.tensor([seed % len(rows) for seed in seeds], dtype=torch.long)]


def plan_conditions(
    denoiser: Denoiser,
    classes: Sequence[int] | None = None,
    guidance: float | None = None,
    guidance_interval: Sequence[float] | None = None,
    condition: str | Path | None = None,
    grid: Grid | None = None,
    times: "Times | None" = None,
) -> Conditioning:
    """The conditioning of a job, if the model can be conditioned so.

    ``classes`` are those of the seeds in turn: by default all of the model's, and empty for none. ``condition`` is a
    file of conditions, a row per seed in turn; ``grid`` has their names and units as the model knows them. Conditions
    that are coordinates need no file, but ``times`` where they are those of the items.
    """
    conditions = denoiser.conditions
    chosen = _chosen_classes(conditions.get(CLASSES), classes)
    if condition is not None:
        rows = read_rows(condition, conditions, grid, times)
    else:
        rows = {} if grid is None else _rows_of_coordinates(conditions, grid, times)
    names = [*rows, *([CLASSES] if chosen else [])]
    for name in conditions.keys() - {*names}:
        if not conditions[name].dropout:
            argument, problem = "classes" if name == CLASSES else "condition", f"the model was trained with {name}"
            raise InputError(argument, None, f"is missing: {problem} in every item", "give it, or use Python")
    if guidance is None:
        if guidance_interval is not None:
            raise InputError("guidance_interval", None, "has no meaning without `guidance`", "give both, or neither")
        return Conditioning(chosen, rows)
    scale, rows_known = check_number("guidance", guidance), len(denoiser.process.schedule)
    interval: dict[str, Any] = {"interval": guidance_interval, "argument": "guidance_interval"}
    guided = make_guidance(conditions, names, scale, num_rows=rows_known, **interval)
    return Conditioning(chosen, rows, None if scale == 1 else guided)  # scale 1 is the conditional law itself


def _chosen_classes(condition: Condition | None, classes: Sequence[int] | None) -> tuple[int, ...]:
    """``classes``, by default all of the model's."""
    known = range(0 if condition is None else condition.classes or 0)
    if beyond := [number for number in classes or () if number not in known]:
        remedy = f"give classes from 0 to {len(known) - 1}" if known else "leave it out"
        raise InputError("classes", None, f"has {beyond[0]}, which is not a class of the model", remedy)
    return tuple(known if classes is None else classes)


def _rows_of_coordinates(conditions: Mapping[str, Condition], grid: Grid, times: "Times | None") -> dict[str, Tensor]:
    """The values of conditions that are coordinates, at these times, or of any time where none of them needs it."""
    name = next((name for name in conditions if name != CLASSES), None)
    if name is None or grid.condition is None or (times is None and needs_times(grid.condition)):
        return {}
    event = conditions[name].shape[1:]
    values = coordinate_rows(grid.condition, grid, event, np.zeros(1, "datetime64[s]") if times is None else times)
    return {} if values is None else {name: as_finite("coordinates", values, conditions[name].scaling)}


def read_rows(
    file: str | Path, conditions: Mapping[str, Condition], grid: Grid | None = None, times: "Times | None" = None
) -> dict[str, Tensor]:
    """The values [N, …] of the model's condition other than the class, in the units of the model, from an .npy or .npz
    file in those of the data. One channel may go without its axis, and fields may be coarser. Of NetCDF, HDF5 or Zarr,
    the variables of ``grid``, the model's of its condition, matched with it."""
    path = as_path("condition", file)
    names = [name for name in conditions if name != CLASSES]
    if len(names) != 1:
        takes = " and ".join(names) or "none"
        remedy = "use Python" if names else "leave it out"
        raise InputError("condition", path, f"cannot be used: the model takes {takes}", remedy)
    condition, shape = conditions[names[0]], conditions[names[0]].shape
    values = _variables(path, grid, shape[1:], times) if is_table(path) else read_array(path, "condition")
    if values.ndim == len(shape) and shape[:1] == (1,):
        values = values[:, None]
    if len(shape) > 1 and values.ndim == len(shape) + 1:
        values = on_grid(str(path), values, shape[1:])
    if values.shape[1:] != shape or not values.ndim:
        wanted = "".join(f", {size}" for size in shape)
        raise InputError("condition", path, f"has shape {values.shape}", f"give numbers [N{wanted}]")
    return {names[0]: as_finite(str(path), values, condition.scaling)}


def _variables(path: Path, grid: Grid | None, event: tuple[int, ...], times: "Times | None") -> "NDArray[Any]":
    """The variables [N, C, …] that the model was trained with."""
    if grid is None or grid.condition is None:
        problem = "has names for its variables, and the model was trained with an array, which has none"
        raise InputError("condition", path, problem, "give an .npy or .npz file")
    return read_conditions(path, grid.condition, grid, event, times)


def rows_digest(rows: Mapping[str, Tensor]) -> str:
    """The checksum of conditions by name, whatever the file was."""
    return tensors_sha256(part for name in sorted(rows) for part in (f"{name} {tuple(rows[name].shape)}\n", rows[name]))


def classes_text(classes: Sequence[int]) -> str:
    """Classes as they are written: 0-9, or 3,1,2 where they do not rise."""
    rises = all(a < b for a, b in pairwise(classes))
    return seeds_text(classes) if rises else ",".join(map(str, classes))
