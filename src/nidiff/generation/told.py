"""What the image of a seed is told: its class, and its row of a file of conditions.

Both are functions of the seed alone, so that a seed stays an image, whatever the batch and the number of processes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.arrays import read_array
from nidiff.data.beside import on_grid
from nidiff.diffusion.condition import CLASSES, Condition
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.guidance import Guidance
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, shown
from nidiff.files import as_path
from nidiff.notation import seeds_text
from nidiff.recipe import check_number, is_number

if TYPE_CHECKING:
    from nidiff.generation.job import Job


def of_seeds(values: Any, seeds: Sequence[int]) -> Any:
    """``values[seed % len(values)]`` of each seed, as a tensor."""
    values = torch.as_tensor(values)
    return values[torch.tensor([seed % len(values) for seed in seeds], dtype=torch.long)]


def tell(denoiser: Denoiser, job: "Job", seeds: Sequence[int]) -> Denoiser:
    """The denoiser that draws the images of ``seeds``: bound to what each is told, and guided."""
    values = {name: of_seeds(rows, seeds) for name, rows in job.rows.items()}
    if job.classes:
        values[CLASSES] = of_seeds(job.classes, seeds)
    if not values:
        return denoiser
    bound = denoiser.given(**values)
    if job.guidance is None:
        return bound
    null = {name: denoiser.conditions[name].absent for name in values}
    return bound.corrected(Guidance(job.guidance, null, job.interval))  # `planned` has checked it, and warned


def planned(
    denoiser: Denoiser,
    classes: Sequence[int] | None,
    guidance: float | None,
    interval: Sequence[float] | None,
    condition: str | Path | None,
) -> dict[str, Any]:
    """The fields of a `Job` that say what its images are told, if a model can be told so.

    ``classes`` are all of the model's without any, and none if it is empty.
    """
    known = denoiser.conditions
    chosen = _classes(known.get(CLASSES), classes)
    rows = {} if condition is None else read_rows(condition, known)
    given = {*rows, *([CLASSES] if chosen else [])}
    for name in known.keys() - given:
        if not known[name].dropout:
            argument = "classes" if name == CLASSES else "condition"
            raise InputError(f"{argument} is missing: the model was trained with {name} in every item, so give it.")
    found: dict[str, Any] = {"classes": chosen, "rows": rows, "condition": rows_digest(rows) if rows else ""}
    if interval is not None and guidance is None:
        raise InputError("guidance_interval has no meaning without guidance: give both, or leave it out.")
    if guidance is None:
        return found
    scale, between = check_number("guidance", guidance), _interval(interval, len(denoiser.process.schedule))
    if not given:
        remedy = "give classes or a condition" if known else "the model was trained without any, so leave it out"
        raise InputError(f"guidance={shown(guidance)} needs something that the images are told: {remedy}.")
    if scale == 1:  # the conditional law itself
        return found
    first = {name: of_seeds(values, [0]) for name, values in rows.items()} | ({CLASSES: chosen[0]} if chosen else {})
    denoiser.given(**first).guided(scale, interval=between)  # which warns, and refuses the rest
    return found | {"guidance": scale, "interval": between}


def _classes(condition: Condition | None, classes: Sequence[int] | None) -> tuple[int, ...]:
    if condition is None or condition.classes is None:
        if classes:
            raise InputError(
                f"classes={shown(classes_text(classes))}: the model was trained without classes: leave them out."
            )
        return ()
    if classes is None:
        return tuple(range(condition.classes))
    if beyond := [one for one in classes if not (type(one) is int and 0 <= one < condition.classes)]:
        text = f"classes has {shown(beyond[0])}, and those of the model are 0 … {condition.classes - 1}"
        raise InputError(f"{text}: give some of these.")
    return tuple(classes)


def _interval(interval: Sequence[float] | None, rows: int) -> tuple[float, float] | None:
    if interval is None:
        return None
    values = tuple(interval) if isinstance(interval, list | tuple) else ()
    if len(values) != 2 or not all(map(is_number, values)) or not 0 <= values[0] <= values[1] <= rows - 1:
        text = f"guidance_interval={shown(interval)} must be two rows of the schedule"
        raise InputError(f"{text}, the lower one first: give some from 0 to {rows - 1}.")
    return values[0], values[1]


def read_rows(file: str | Path, known: Mapping[str, Condition]) -> dict[str, Tensor]:
    """The condition of a model that has one beside classes, [N, …] in the units of the model, from an .npy or .npz
    file in those of the data. One channel may go without its axis, and fields may be coarser."""
    path, names = as_path("condition", file), [name for name in known if name != CLASSES]
    argument = f"condition={str(path)!r}"
    if not names:
        raise InputError(f"{argument}: the model was trained without such a condition: leave it out.")
    if len(names) > 1:
        raise InputError(f"{argument}: the model takes {' and '.join(names)}, more than a file can hold: use Python.")
    condition, values = known[names[0]], read_array(path, "condition")
    shape = condition.shape
    if values.ndim == len(shape) and shape[:1] == (1,):
        values = values[:, None]
    is_numbers = values.dtype.kind in "biuf"
    if len(shape) > 1 and values.ndim == len(shape) + 1 and is_numbers:
        values = on_grid(str(path), values, shape[1:])
    if not is_numbers or values.shape[1:] != shape or not values.size:
        wanted = "".join(f", {size}" for size in shape)
        found = f"{values.dtype} {list(values.shape)}"
        raise InputError(f"{argument} holds {found}, and the model takes numbers [N{wanted}]: give such.")
    numbers = torch.from_numpy(values.astype(np.float64))
    bad = ~numbers.isfinite().reshape(len(numbers), -1).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise InputError(f"{argument} has NaN or infinite numbers in row {row}: leave that row out, or fill it in.")
    return {names[0]: _in_units_of_model(numbers, condition).float()}


def _in_units_of_model(numbers: Tensor, condition: Condition) -> Tensor:
    """What a file holds as the network is given it: (value − shift) / scale per channel. The one place that knows the
    units of conditions."""
    if not condition.scale:
        return numbers
    return Scaling(condition.scale, condition.shift).to_model(numbers)


def rows_digest(rows: Mapping[str, Tensor]) -> str:
    """The checksum of conditions by name, whatever the file was."""
    found = hashlib.sha256()
    for name in sorted(rows):
        found.update(f"{name} {tuple(rows[name].shape)}\n".encode())
        found.update(rows[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def classes_text(classes: Sequence[int]) -> str:
    """Classes as they are written: 0-9, or 3,1,2 where they do not rise."""
    rises = all(a < b for a, b in pairwise(classes))
    return seeds_text(classes) if rises else ",".join(map(str, classes))
