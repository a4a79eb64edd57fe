"""Stations as observations of a model: values between the points of its grid."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.data.grid import Grid
from nidiff.data.match import turn_of
from nidiff.data.stations import ARGUMENT, Stations
from nidiff.errors import FileError, InputError
from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import as_change, observe, seen_scaling
from nidiff.generation.observed import Observed, Points
from nidiff.inverse import operators
from nidiff.inverse.interpolation import Interpolation, OutsideError, interpolation
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator, Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.diffusion.climatology import Times

EVEN = 1e-3  # of a step between the points of an axis: steps that differ by less are the same


def interpolate(model: Model, stations: Stations, kind: str = "bilinear") -> Interpolation:
    """The values of items at the stations."""
    if not model.scaling.is_linear:
        problem = "has no meaning for a model of the logarithm of the data, which is not linear in them"
        raise InputError(ARGUMENT, None, problem, "use `mask`, and noise in `units` model")
    grid, domain = model.grid, model.scaling.domain
    along = [grid.coordinates.get(axis) or size for axis, size in zip(grid.axes, model.shape[1:], strict=True)]
    inside = None if domain is None else domain.all(0)
    try:
        _check_turns(model, stations.places)
        return interpolation(stations.places, along, periods=periods_of(model), kind=kind, domain=inside)
    except OutsideError as error:
        first = int(np.flatnonzero(~error.inside)[0])
        numbers = zip(grid.axes, stations.places[first], strict=True)
        where = ", ".join(f"{axis} {number:g}" for axis, number in numbers)
        problem = (
            f"has {int((~error.inside).sum())} of {len(error.inside)} stations outside of the domain of the model, "
            f"the first in row {stations.rows[first]} at {where}"
        )
        raise FileError(ARGUMENT, stations.name, problem, "leave them out") from error


def _check_turns(model: Model, places: "NDArray[Any]") -> None:
    """Refuse places more than a step beyond the grid along a periodic axis that is not an angle: 370° is 10°, but row
    −9 of a picture is a mistake."""
    inside = np.ones(len(places), dtype=bool)
    for axis, (size, turn) in enumerate(zip(model.shape[1:], periods_of(model), strict=True)):
        if turn is not None and turn_of(model.grid, axis) is None:
            known = np.array(model.grid.coordinates.get(model.grid.axes[axis]) or range(size), dtype=float)
            step = turn / size
            inside &= (known.min() - step <= places[:, axis]) & (places[:, axis] <= known.max() + step)
    if not inside.all():
        raise OutsideError("points", "has places outside of the grid", inside)


def periods_of(model: Model) -> list[float | None]:
    """The circle of each axis: that of longitudes, or of points with equal steps where the model's boundary is
    periodic."""
    return [
        turn_of(model.grid, axis) or (_length(model.grid, axis, size) if boundary == "periodic" else None)
        for axis, (size, boundary) in enumerate(zip(model.shape[1:], model.boundary, strict=True))
    ]


def _length(grid: Grid, axis: int, size: int) -> float | None:
    known = grid.coordinates.get(grid.axes[axis])
    steps = np.abs(np.diff(known)) if known and size > 1 else np.ones(1)
    return float(size * steps.mean()) if np.ptp(steps) <= EVEN * steps.mean() else None


def times_of(stations: Stations) -> "Times | None":
    """The times of the items that the stations are of, rising; None if the table has none: then they are of one."""
    return None if stations.times is None else np.unique(stations.times)


def stations_at(stations: Stations, time: Any) -> Stations:
    """The stations of one time, or all of them where the table has no times."""
    return stations if stations.times is None else stations.take(stations.times == time)


def observe_stations(
    model: Model,
    stations: Stations,
    times: "Times | None" = None,
    items: Tensor | None = None,
    *,
    count: int = 1,
    kind: str = "bilinear",
    seed: int = 0,
) -> Observed:
    """What stations have observed of items, in the units of the data: of ``count`` items, or one for each of their
    ``times``. With clean ``items`` [N, C, *event], the values there and noise of ``seed`` take the place of those of
    the table."""
    count = count if times is None else len(times)
    found = [
        _observe(
            model if model.times is None else model._replace(times=model.times[item : item + 1]),
            stations if times is None else stations_at(stations, times[item]),
            None if items is None else items[item : item + 1],
            kind,
            seed,
            item,
        )
        for item in range(count)
    ]
    observations, shown, points = zip(*found, strict=True)
    return Observed(observations, torch.stack(shown), points=points)


def _observe(
    model: Model, stations: Stations, items: Tensor | None, kind: str, seed: int, item: int
) -> tuple[Observation, Tensor, Points]:
    """The observation of one item, the means of what was observed nearest to each point of the grid, and the same as
    points."""
    made = interpolate(model, stations, kind)
    known = torch.from_numpy(np.isfinite(stations.values))
    operator = operators.mask(known) @ Operator(
        Part(f"stations({known.shape[1]})", made.apply, transpose=made.transpose)
    )
    errors = torch.where(known, torch.from_numpy(stations.errors), 1.0)[None]
    values = torch.from_numpy(stations.values)[None] if items is None else items
    degrading: Any = {"degrade": items is not None, "seed": seed, "first": item}
    observation = observe(model, values, operator, errors, **degrading)
    seen, y = seen_scaling(model, operator)[0], observation.y.cpu().double()
    channels, places = known.nonzero().T
    points = Points(made.places[places], channels, as_change(y, seen)[0][known])
    sizes = zip(points.places.T, model.shape[1:], strict=True)
    nearest = [along.round().long() % size for along, size in sizes]
    return observation, mean_at(model.shape, (channels, *nearest), seen.to_data(y)[0][known]), points


def mean_at(shape: tuple[int, ...], index: tuple[Tensor, ...], values: Tensor) -> Tensor:
    """The mean of the values at each point of an item of this shape, NaN where there is none."""
    total, count = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    total.index_put_(index, values, accumulate=True)
    count.index_put_(index, torch.ones_like(values), accumulate=True)
    return total / torch.where(count > 0, count, torch.nan)
