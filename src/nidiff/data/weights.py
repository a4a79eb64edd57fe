"""How much each point of an item counts, in the loss and in the metrics of fields."""

import math

import torch
from torch import Tensor

from nidiff.data.grid import Grid
from nidiff.data.match import axis_of
from nidiff.errors import InputError, one_of

NONE, LATITUDE = "none", "latitude"
WEIGHTS = (NONE, LATITUDE)


def point_weights(weights: str, grid: Grid, shape: tuple[int, ...], domain: Tensor | None = None) -> Tensor | None:
    """Weights [C, *event] of mean 1 for items of ``shape`` on a grid: with ``latitude``, the area that a point stands
    for, which the cosine of its latitude measures; and 0 outside of the ``domain``. None where all are 1."""
    is_flat = one_of("weights", weights, WEIGHTS) == NONE
    if is_flat and domain is None:
        return None
    each = torch.ones(shape, dtype=torch.float64) if domain is None else domain.double()
    if not is_flat:
        axis = axis_of(grid, LATITUDE)
        if axis is None or grid.axes[axis] not in grid.coordinates:
            problem = f"needs the latitudes of the points, and the axes are {', '.join(grid.axes)}"
            raise InputError("weights", weights, problem, "give data with a coordinate of latitudes, or leave it out")
        degrees = torch.tensor(grid.coordinates[grid.axes[axis]], dtype=torch.float64)
        cosines = (degrees * math.pi / 180).cos().clamp(min=0)
        each = each * cosines.reshape(-1, *[1] * (len(shape) - 2 - axis))
    return each / each.mean()
