"""What was observed of several items: an observation of each, and how it is shown and interpolated."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import as_change, observed_data, y_scaling
from nidiff.inverse.observation import Observation, joint


class Points(NamedTuple):
    """Values of an item at points, as differences from the model's zero in the units of the data."""

    places: Tensor
    """[P, axes], in steps of the grid from its first point."""
    channels: Tensor
    """[P], which channel each value is of."""
    values: Tensor
    """[P]."""


@dataclass(frozen=True, eq=False)
class Observed:
    """What was observed of N items."""

    each: tuple[Observation, ...]
    """The observation of each, with one row."""
    shown: Tensor
    """[N, C, …], in the units of the data, NaN where nothing was observed."""
    hidden: Tensor | None = None
    """[N, C, *event], the points that were not observed, where it is points that were; None: errors count
    everywhere."""
    points: tuple[Points, ...] = ()
    """The same as values at points, where it is that; else nothing."""
    coarse: tuple[Tensor, ...] = ()
    """The same as means over blocks [C, …] of points, as differences from the model's zero in the units of the data,
    where it is that; else nothing."""
    block: int = 1
    """How many points a block has along each axis; the last one may have fewer."""

    @classmethod
    def of(cls, model: Model, observation: Observation, block: int = 0) -> "Observed":
        """The rows of an observation, which may be means over blocks of ``block`` points, or blurred: 1."""
        each = rows_of(observation)
        shown, operator = observed_data(model, observation), observation.operator
        if not (operator.is_mask or block):
            return cls(each, shown)
        change = as_change(observation.y, y_scaling(model, observation))
        if block:
            return cls(each, shown, coarse=tuple(change), block=block)
        seen = operator(torch.ones(observation.y.shape, device=observation.y.device)).cpu() > 0
        return cls(each, shown, ~seen, tuple(map(_points, change, seen)))

    def __len__(self) -> int:
        return len(self.each)

    def together(self, other: "Observed") -> "Observed":
        """Both observations of each item."""
        pairs = zip(self.each, other.each, strict=True)
        points = tuple(
            Points(*(torch.cat([mine, its]) for mine, its in zip(one, two, strict=True)))
            for one, two in zip(self.points, other.points, strict=False)
        )
        return Observed(tuple(map(joint, pairs)), self.shown, self.hidden, points, self.coarse, self.block)


def rows_of(observation: Observation) -> tuple[Observation, ...]:
    """The observation of each image."""
    return tuple(observation.for_images(torch.tensor([item])) for item in range(len(observation.y)))


def _points(values: Tensor, seen: Tensor) -> Points:
    """Those of an image [C, *event] that were observed."""
    places = seen.nonzero()
    return Points(places[:, 1:].double(), places[:, 0], values[seen])
