"""Values of images between their points: at any place, the weighted mean of the points around it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError, one_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("bilinear", "nearest")
CLOSED = 1.5  # of the largest other step: a gap up to this long closes a circle


@dataclass(frozen=True, eq=False)
class Interpolation:
    """y = A x for images x [B, C, *event]: y [B, C, P] at P places, from the points ``index`` [P, K] of the event,
    counted in one row, with the ``weights`` [P, K]."""

    event: tuple[int, ...]
    index: Tensor
    weights: Tensor
    places: Tensor
    """[P, axes], in steps of the grid from its first point."""

    def apply(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.event:
            problem = f"are those of an event {self.event}, and x has shape {tuple(x.shape)}"
            raise InputError("coordinates", None, problem, "give one coordinate for each axis of x [B, C, *event]")
        return (x.flatten(2)[..., self.index.to(x.device)] * self.weights.to(x)).sum(-1)

    def transpose(self, y: Tensor) -> Tensor:
        parts = (y.unsqueeze(-1) * self.weights.to(y)).flatten(-2)
        x = torch.zeros(*y.shape[:-1], int(np.prod(self.event)), dtype=y.dtype, device=y.device)
        return x.index_add_(-1, self.index.flatten().to(y.device), parts).reshape(*y.shape[:-1], *self.event)


def interpolation(
    points: Any,
    coordinates: Sequence[Any],
    *,
    periods: Sequence[float | None] = (),
    kind: str = "bilinear",
    domain: Tensor | None = None,
) -> Interpolation:
    """The interpolation at ``points`` [P, axes]; the arguments are those of `nidiff.operators.stations`."""
    one_of("interpolation", kind, KINDS)
    along = [_as_coordinate(each) for each in coordinates]
    event, axes = tuple(map(len, along)), len(along)
    places = _as_places(points, axes)
    turns = tuple(periods) or (None,) * axes
    if len(turns) != axes or any(turn is not None and not turn > 0 for turn in turns):
        remedy = f"give one number above 0, or None, for each of {axes} axes"
        raise InputError("periods", periods, "are not those of the axes", remedy)
    inside = np.ones(len(places), dtype=bool)
    low, high, shares, steps = [], [], [], []
    for axis, (values, turn) in enumerate(zip(along, turns, strict=True)):
        below, above, share, is_inside = _between(places[:, axis], values, turn)
        inside &= is_inside
        low.append(below)
        high.append(above)
        away = above - below  # around a circle, the last point is next to the first
        steps.append(below + share * np.where(np.abs(away) > 1, -np.sign(away), away))
        shares.append(share.round() if kind == "nearest" else share)
    corners = [*product((False, True), repeat=axes)]
    index = np.stack([np.ravel_multi_index(_corner(low, high, corner), event) for corner in corners], 1)
    weights = np.stack([np.prod(_corner([1 - s for s in shares], shares, corner), axis=0) for corner in corners], 1)
    if domain is not None:  # points outside of it have no values
        weights = weights * np.broadcast_to(domain.cpu().numpy(), event).reshape(-1)[index]
        total = weights.sum(1, keepdims=True)
        inside &= total[:, 0] > 0
        weights = weights / np.where(total > 0, total, 1.0)
    if not inside.all():
        first = int(np.flatnonzero(~inside)[0])
        where = ", ".join(f"{number:g}" for number in places[first])
        problem = (
            f"has {int((~inside).sum())} of {len(places)} outside of the domain, the first at ({where}), row {first}"
        )
        raise OutsideError("points", problem, inside)
    used = weights.any(0)
    arrays = (index[:, used], weights[:, used], np.stack(steps, 1))
    return Interpolation(event, *(torch.from_numpy(array) for array in arrays))


class OutsideError(InputError):
    """Some places are outside of the domain; ``inside`` [P] says which are not."""

    def __init__(self, argument: str, problem: str, inside: "NDArray[Any]") -> None:
        super().__init__(argument, None, problem, "leave them out")
        self.inside = inside


def _corner(low: list[Any], high: list[Any], corner: tuple[bool, ...]) -> list[Any]:
    return [above if is_high else below for below, above, is_high in zip(low, high, corner, strict=True)]


def _as_coordinate(values: Any) -> "NDArray[np.float64]":
    """The coordinate of an axis: numbers that rise or fall, also around a circle; a single n is 0, 1, …, n − 1."""
    along: NDArray[np.float64] = np.asarray(np.arange(values) if isinstance(values, int) else values, dtype=np.float64)
    if along.ndim != 1 or not len(along) or not np.isfinite(along).all() or len(np.unique(along)) < len(along):
        remedy = "give the coordinate of each point along an axis, all different, or how many there are"
        raise InputError("coordinates", None, f"has {along.shape} numbers that are not those of an axis", remedy)
    return along


def _as_places(points: Any, axes: int) -> "NDArray[np.float64]":
    places = np.asarray(points.detach().cpu() if isinstance(points, Tensor) else points, dtype=np.float64)
    if places.ndim != 2 or places.shape[1] != axes or not len(places) or not np.isfinite(places).all():
        problem = f"has shape {places.shape}, or numbers that are not finite"
        raise InputError("points", None, problem, f"give one row of {axes} numbers for each point")
    return places


def _between(
    at: "NDArray[Any]", along: "NDArray[Any]", turn: float | None
) -> "tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]":
    """Of each number the points below and above it, the share of the way from the one to the other, and whether it is
    inside: between the points, or at most half a step beyond the ends, where the last point counts."""
    order = np.argsort(along if turn is None else along % turn)
    rising = along[order] if turn is None else along[order] % turn
    if turn is not None:  # the circle is cut where its points are farthest apart
        gaps = np.diff(rising, append=rising[0] + turn)
        first = (int(gaps.argmax()) + 1) % len(gaps)
        gap, others = gaps.max(), np.delete(gaps, gaps.argmax())
        origin, order = rising[first], np.roll(order, -first)
        rising, at = (np.roll(rising, -first) - origin) % turn, (at - origin) % turn
        if len(others) and gap <= CLOSED * others.max():
            rising, order = np.append(rising, turn), np.append(order, order[0])
        else:
            at = np.where(at > rising[-1] + gap / 2, at - turn, at)
    if len(rising) == 1:
        zero = np.zeros(len(at), dtype=np.int64)
        return zero, zero, zero * 1.0, np.isclose(at, rising[0])
    steps = np.diff(rising)
    inside = (at >= rising[0] - steps[0] / 2) & (at <= rising[-1] + steps[-1] / 2)
    at = at.clip(rising[0], rising[-1])
    above = np.searchsorted(rising, at, side="right").clip(1, len(rising) - 1)
    share = (at - rising[above - 1]) / steps[above - 1]
    return order[above - 1], order[above], share, inside
