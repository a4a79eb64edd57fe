"""Crops: parts of items that are larger than what a model is trained on, at random places or at fixed ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset, Source
from nidiff.data.sources import BLOCK
from nidiff.data.split import ITEM
from nidiff.errors import InputError
from nidiff.randomness import Generators, random_index


@dataclass(frozen=True, eq=False)
class Crops:
    """Crops [M, C, *size] of items, through the interface of a tensor, which has each at a place of its own that never
    changes; `cut` takes them anywhere."""

    whole: Tensor | Source
    """The items [N, C, *event]."""
    size: tuple[int, ...]
    """Of a crop, along each axis of the event."""
    rows: Tensor
    """[M], which item each crop is of."""
    places: Tensor
    """[M, axes], the first point of each crop."""
    steps: tuple[int, ...]
    """Crops begin at multiples of these."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), self.whole.shape[1], *self.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The crops of ``index``, as `torch.Tensor.index_select` along ``dim`` = 0."""
        return self.cut(index, self.places[index])

    def take(self, rows: Tensor) -> "Crops":
        """Some of the crops."""
        return replace(self, rows=self.rows[rows], places=self.places[rows])

    @property
    def cut_axes(self) -> list[int]:
        """The axes of the event along which crops are shorter than the items."""
        return [axis for axis, (n, m) in enumerate(zip(self.whole.shape[2:], self.size, strict=True)) if m < n]

    def random_places(self, count: int, generators: Generators) -> Tensor:
        """Where ``count`` crops begin [count, axes]: every place at which one fits is as probable as any other."""
        ends = zip(self.whole.shape[2:], self.size, self.steps, strict=True)
        drawn = [step * random_index((n - m) // step + 1, count, generators, device="cpu") for n, m, step in ends]
        return torch.stack(drawn, 1)

    def cut(self, index: Tensor, places: Tensor) -> Tensor:
        """Crops of the items that the crops ``index`` [B] are of, which begin at ``places`` [B, axes]."""
        rows, whole = self.rows[index], self.whole
        windows = [
            tuple(slice(first, first + n) for first, n in zip(place, self.size, strict=True))
            for place in places.tolist()
        ]
        pairs = [*zip(rows.tolist(), windows, strict=True)]
        if isinstance(whole, Tensor):
            return torch.stack([whole[(row, slice(None), *window)] for row, window in pairs])
        parts: dict[int, Tensor] = {}
        numbers = math.prod(whole.shape[1:])
        unique, counts = rows.unique(return_counts=True)
        is_apart = 4 * counts * whole.shape[1] * math.prod(self.size) < numbers  # else the item is read once for all
        if (read_part := whole.read_part) is not None:
            for number in torch.isin(rows, unique[is_apart]).nonzero()[:, 0].tolist():
                parts[number] = read_part(*pairs[number])
            unique = unique[~is_apart]
        # A few items at a time, since all of a batch may be far larger than their crops.
        for block in unique.split(max(1, BLOCK // numbers)):
            items = whole.index_select(0, block) if len(block) else ()
            for row, item in zip(block.tolist(), items, strict=True):
                for number in (rows == row).nonzero()[:, 0].tolist():
                    parts[number] = item[(slice(None), *windows[number])].clone()
        return torch.stack([parts[number] for number in range(len(rows))])


def crop_size(crop: Sequence[int], event: Sequence[int], name: str) -> tuple[int, ...]:
    """The size of a crop of items of ``event`` along each axis; ``crop`` is one number for all, or one for each."""
    size, grid = tuple(crop) * (len(event) if len(crop) == 1 else 1), "×".join(map(str, event))
    if len(size) != len(event):
        problem = f"has {len(size)} numbers, and the items of {name!r} are {grid}"
        raise InputError("crop", tuple(crop), problem, "give one for all axes, or one for each")
    if any(m > n for m, n in zip(size, event, strict=True)):
        raise InputError("crop", tuple(crop), f"is larger than the items of {name!r}, {grid}", "give a smaller one")
    return size


def in_crops(data: Dataset, size: tuple[int, ...]) -> Dataset:
    """Crops of the items of ``data``, as many as would cover each of them, at places that depend on their number alone;
    labels and conditions are those of the items, and fields are cut at the same places.

    Over a condition on a coarser grid crops begin with its cells.
    """
    count, event = len(data), data.shape[1:]
    steps = data.condition_cells or (1,) * len(size)
    if any(m % step for m, step in zip(size, steps, strict=True)):
        problem = f"cuts the cells of the condition, which are {'×'.join(map(str, steps))} points"
        raise InputError("crop", size, problem, "give multiples of that")
    if size == event:
        return data
    each = math.prod(-(-n // m) for n, m in zip(event, size, strict=True))
    rows = torch.arange(count).repeat_interleave(each)
    assert not isinstance(data.values, Crops)
    crops = Crops(data.values, size, rows, rows.new_zeros(len(rows), len(size)), steps)
    crops = replace(crops, places=crops.random_places(len(rows), torch.Generator().manual_seed(0)))
    known, along = data.conditions, np.arange(count) if data.along is None else data.along[1]
    if isinstance(known, Tensor):
        known = known[rows] if known.ndim == 2 else replace(crops, whole=known)
    return replace(
        data,
        values=crops,
        labels=None if data.labels is None else data.labels[rows],
        conditions=known,
        lengths=None,  # of crops of a sound, which may begin anywhere
        grid=data.grid.cropped([data.grid.axes[axis] for axis in crops.cut_axes]),
        # Not the names of files, which have no order: crops of one item are neighbours that are alike.
        along=(ITEM, (np.arange(count) if along.dtype.kind == "U" else along)[rows.numpy()]),
    )
