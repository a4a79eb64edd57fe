"""Reconstructions that cost nothing, which samples of a model have to beat: interpolation, and the data's Gaussian."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nidiff.data.dataset import WHOLE
from nidiff.data.match import turn_of
from nidiff.extras import require
from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import KRIGING, amplitude, seeded
from nidiff.generation.observed import Observed, Points
from nidiff.inverse.systems import System
from nidiff.randomness import white_noise

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_POINTS = 30_000  # that are joined by triangles
PADDED = 2  # blocks beyond each end of an axis
TOLERANCE, ITERATIONS = 1e-6, 500  # those of the method gaussian
MODES = {
    "nearest": dict.fromkeys((1, 2, 3), "nearest"),
    "bilinear": {1: "linear", 2: "bilinear", 3: "trilinear"},
    "bicubic": {2: "bicubic"},
}


@dataclass(frozen=True, eq=False)
class Baseline:
    """A reconstruction of items, in the units of the model."""

    mean: Tensor
    """[N, C, *event]."""
    samples: Tensor | None = None
    """[N, S, C, *event], of a law."""


Reconstruction = Callable[[Model, Observed, int, int], "Baseline | None"]
"""From a model, what was observed, the number of samples and a seed; None where it does not apply."""


def baselines(model: Model, observed: Observed, samples: int, seed: int = 0) -> dict[str, Baseline]:
    """Each of `BASELINES` that applies."""
    made = {name: make(model, observed, samples, seed) for name, make in BASELINES.items()}
    return {name: _clipped(baseline, model) for name, baseline in made.items() if baseline is not None}


def _clipped(baseline: Baseline, model: Model) -> Baseline:
    """Pictures have a range."""
    clip = model.denoiser.clip
    if model.grid.dtype not in WHOLE or clip is None:
        return baseline
    samples = None if baseline.samples is None else baseline.samples.clamp(-clip, clip)
    return Baseline(baseline.mean.clamp(-clip, clip), samples)


# Interpolation ------------------------------------------------------------------------------------------------------


def interpolated(kind: str) -> Reconstruction:
    """Between points, in triangles, and constant outside of them; or between the centres of blocks. What is
    interpolated is what the model sees, in the units of the data: differences from the climatology where it has one."""

    def make(model: Model, observed: Observed, samples: int, seed: int) -> Baseline | None:
        fields = [_between_blocks(values, model, kind, observed.block) for values in observed.coarse]
        if not fields and importlib.util.find_spec("scipy") is not None:
            fields = [_between_points(points, model, kind) for points in observed.points]
        found = [field for field in fields if field is not None]
        if not fields or len(found) < len(fields):
            return None
        return Baseline((torch.stack(found) / amplitude(model)).float())

    return make


def _between_blocks(values: Tensor, model: Model, kind: str, block: int) -> Tensor | None:
    """Means over blocks [C, …] on the grid of the points [C, *event]; a periodic axis goes on beyond its ends, and any
    other has its last values there."""
    event = model.shape[1:]
    mode = MODES[kind].get(len(event))
    if mode is None or (block == 1 and kind != "nearest"):  # a blurred picture is its only guess
        return None
    x = values[None].double()
    for axis, is_round in enumerate(circles(model), start=2):
        rows, last = torch.arange(-PADDED, x.shape[axis] + PADDED), x.shape[axis] - 1
        x = x.index_select(axis, rows % (last + 1) if is_round else rows.clamp(0, last))
    smooth: Any = {} if kind == "nearest" else {"align_corners": False}
    if kind == "bicubic":
        smooth["antialias"] = True  # then torch has Keys' kernel, as Pillow, which is exact for linear fields
    fine = functional.interpolate(x, size=[n * block for n in x.shape[2:]], mode=mode, **smooth)[0]
    for axis, n in enumerate(event, start=1):
        fine = fine.narrow(axis, PADDED * block, n)
    return fine


def _between_points(points: Points, model: Model, kind: str) -> Tensor | None:
    fields = []
    for channel in range(model.shape[0]):
        chosen = points.channels == channel
        if not bool(chosen.any()):
            fields.append(np.zeros(model.shape[1:]))  # the mean of the data
            continue
        places, values = _around(points.places[chosen].numpy(), points.values[chosen].numpy(), model)
        field = _scattered(places, values, model.shape[1:], kind)
        if field is None:
            return None
        fields.append(field)
    return torch.from_numpy(np.stack(fields))


def circles(model: Model) -> list[bool]:
    """Whether each axis goes round: its boundary is periodic, or it has all longitudes."""
    found = []
    for axis, (name, size, boundary) in enumerate(zip(model.grid.axes, model.shape[1:], model.boundary, strict=True)):
        turn, along = turn_of(model.grid, axis), np.array(model.grid.coordinates.get(name, ()))
        is_globe = turn is not None and len(along) > 1 and abs(size * np.abs(np.diff(along)).mean() / turn - 1) < 1e-3
        found.append(boundary == "periodic" or is_globe)
    return found


def _around(places: "NDArray[Any]", values: "NDArray[Any]", model: Model) -> "tuple[NDArray[Any], NDArray[Any]]":
    """The points, and copies of them half way round each axis that is a circle."""
    for axis, (is_round, size) in enumerate(zip(circles(model), model.shape[1:], strict=True)):
        if is_round:
            step = size * np.eye(places.shape[1])[axis]
            all_places = np.concatenate([places - step, places, places + step])
            near = (all_places[:, axis] >= -size / 2) & (all_places[:, axis] <= 1.5 * size)
            places, values = all_places[near], np.tile(values, 3)[near]
    return places, values


def _scattered(
    places: "NDArray[Any]", values: "NDArray[Any]", event: tuple[int, ...], kind: str
) -> "NDArray[Any] | None":
    interpolate, spatial = require("scipy.interpolate"), require("scipy.spatial")
    grid = np.stack(np.meshgrid(*map(np.arange, event), indexing="ij"), -1).reshape(-1, len(event)).astype(float)
    nearest = values[spatial.cKDTree(places).query(grid)[1]]
    if kind == "nearest":
        return nearest.reshape(event)
    if len(event) == 1 and kind == "bilinear":
        order = np.argsort(places[:, 0])
        return np.interp(grid[:, 0], places[order, 0], values[order])
    if len(event) == 1 or len(places) > MOST_POINTS or (kind == "bicubic" and len(event) != 2):
        return None
    make = interpolate.LinearNDInterpolator if kind == "bilinear" else interpolate.CloughTocher2DInterpolator
    try:
        field = make(places, values)(grid)
    except spatial.QhullError:  # all points on a line
        return nearest.reshape(event)
    return np.where(np.isnan(field), nearest, field).reshape(event)


# The data's Gaussian ------------------------------------------------------------------------------------------------


def gaussian_alone(model: Model, observed: Observed, samples: int, seed: int) -> Baseline | None:
    """The posterior of N(μ, C), the data's Gaussian, in closed form: kriging, with draws by Matheron's rule."""
    gaussian = model.denoiser.gaussian
    is_linear = all(part.is_linear for each in observed.each for part in each.operator.parts)
    if gaussian is None or not is_linear:
        return None
    means, draws = [], []
    for item, observation in enumerate(observed.each):
        source = seeded(seed, item, KRIGING)
        x = gaussian.sample((samples, *model.shape), source).to(observation.y)
        x = torch.cat([gaussian.mean.to(x).expand(1, *model.shape), x])
        system = System(observation, x)
        misfit = system.misfit
        misfit[1:] += observation.draw_noise(misfit[1:], partial(white_noise, generator=source))
        update = system.solve(misfit, gaussian.covariance, TOLERANCE, ITERATIONS).update
        found = (x + update.to(x)).float().cpu()
        means.append(found[0])
        draws.append(found[1:])
    return Baseline(torch.stack(means), torch.stack(draws))


BASELINES: dict[str, Reconstruction] = {
    "nearest": interpolated("nearest"),
    "bilinear": interpolated("bilinear"),
    "bicubic": interpolated("bicubic"),
    "gaussian": gaussian_alone,
}
