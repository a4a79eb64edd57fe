"""NaN and infinite values: refused with their place, or filled."""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.data.dataset import Along, Source
from nidiff.data.grid import Grid
from nidiff.data.sources import blocks
from nidiff.errors import FileError, InputError

REFUSE, MEAN = "refuse", "mean"


@dataclass(frozen=True)
class Cleaning:
    """What is done with the NaN and infinite values of the data set ``name``."""

    name: str
    grid: Grid
    along: "Along | None" = None
    fills: tuple[float, ...] | None = None
    """One number per channel to put in their place; None: they are refused."""

    def clean(self, values: Tensor, rows: Tensor) -> Tensor:
        """``values`` [B, C, *event], which are the ``rows`` of the data; they are changed in place."""
        bad = ~torch.isfinite(values)
        if not bool(bad.any()):
            return values
        if self.fills is None:
            item, channel, *place = bad.nonzero()[0].tolist()
            what = "NaN" if values[item, channel][tuple(place)].isnan() else "an infinite value"
            row = int(rows[item])
            place_along = "" if self.along is None else f" ({self.along[0]} {self.along[1][row]})"
            where = f"{self.grid.channel(channel)} of item {row}{place_along} at {tuple(place)}"
            remedy = "repair or remove it, or fill it with `missing`"
            raise FileError("data", self.name, f"has {what} in {where}", remedy)
        fills = torch.tensor(self.fills, dtype=values.dtype).reshape(-1, *[1] * (values.ndim - 2))
        return torch.where(bad, fills, values, out=values)


class Cleaned:
    """A source whose values are cleaned when they are read."""

    def __init__(self, values: Source, cleaning: Cleaning) -> None:
        self.shape, self.dtype = values.shape, values.dtype
        self._values, self._cleaning = values, cleaning

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        return self._cleaning.clean(self._values.index_select(dim, index), index)


def cleaned(values: Tensor | Source, cleaning: Cleaning) -> Tensor | Source:
    """The values without NaN and infinite ones: those in memory at once, those of a source when they are read."""
    if not values.dtype.is_floating_point:
        return values
    if not isinstance(values, Tensor):
        return Cleaned(values, cleaning)
    for rows in blocks(torch.arange(len(values)), tuple(values.shape[1:])):
        cleaning.clean(values[rows[0] : rows[-1] + 1], rows)
    return values


def as_missing(missing: str) -> str | float:
    """ "refuse", "mean", or the number to fill with."""
    if missing in (REFUSE, MEAN):
        return missing
    with contextlib.suppress(ValueError):
        if abs(number := float(missing)) <= torch.finfo(torch.float32).max:
            return number
    raise InputError("missing", missing, "is unknown", "give refuse, mean or a number that float32 can hold")
