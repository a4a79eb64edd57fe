"""Conditions that the coordinates of the data say: where each point is, and when each item was."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nidiff.data.grid import Grid
from nidiff.data.match import axis_of
from nidiff.diffusion.climatology import PHASES, phases
from nidiff.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.diffusion.climatology import Times

PLACES = {"latitude": ("latitude_sin",), "longitude": ("longitude_sin", "longitude_cos")}
TIMES = {"dayofyear": ("dayofyear_sin", "dayofyear_cos"), "month": ("month_sin", "month_cos")}
COORDINATES = PLACES | TIMES
"""The names of these conditions, and of their channels. An angle that turns has a sine and a cosine; a latitude does
not, and its sine grows from pole to pole."""
CHANNELS = {channel for channels in COORDINATES.values() for channel in channels}


def coordinate(name: str, grid: Grid, event: tuple[int, ...], times: "Times | None") -> "NDArray[Any]":
    """The channels of a condition in `COORDINATES`: of a place fields [1, C, *event], the same for all items, and of a
    time numbers [N, C]."""
    if name in TIMES:
        if times is None:
            remedy = "give a file with times along the axis of its items, or `times` to sample"
            raise InputError("condition", name, "needs the times of the items, and they have none", remedy)
        by = "month" if name == "month" else "day"
        angle = (phases(times, by) + 0.5) * (2 * np.pi / PHASES[by])
        return np.stack([np.sin(angle), np.cos(angle)], 1)
    axis = axis_of(grid, name)
    if axis is None or grid.axes[axis] not in grid.coordinates:
        problem = f"needs the {name} of the points, and the axes are {', '.join(grid.axes)}"
        raise InputError("condition", name, problem, f"give data with a coordinate of {name}s, or leave it out")
    angle = np.radians(np.array(grid.coordinates[grid.axes[axis]]))
    angle = np.broadcast_to(angle.reshape(-1, *[1] * (len(event) - 1 - axis)), event)
    return np.stack([np.sin(angle), np.cos(angle)][: len(PLACES[name])])[None]


def needs_times(grid: Grid) -> bool:
    """Whether some of the channels of conditions are those of a time."""
    return any(channel in grid.channels for channels in TIMES.values() for channel in channels)


def joined(parts: "list[NDArray[Any]]", count: int, event: tuple[int, ...]) -> "NDArray[Any]":
    """Numbers [N, C] and fields [N, C, *event], or [1, C, *event], of ``count`` items as one array: numbers [N, C] if
    there is nothing else, else fields."""
    if any(part.ndim > 2 for part in parts):
        parts = [part.reshape(*part.shape, *[1] * (2 + len(event) - part.ndim)) for part in parts]
        parts = [np.broadcast_to(part, (count, part.shape[1], *event)) for part in parts]
    return np.concatenate([np.broadcast_to(part, (count, *part.shape[1:])) for part in parts], 1)
