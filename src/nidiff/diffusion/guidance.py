"""Classifier-free guidance, on x̂0.

A score guided by ``scale`` w is ∇ log p(x) + w ∇ log p(c | x). By Tweedie, Σ ∇ log p = (signal · x̂0 − x) / sigma²
with and without the condition c, so Σ, x and the level fall out of the difference of the two:

    x̂0 = x̂0(no condition) + w (x̂0(condition) − x̂0(no condition))         (Ho and Salimans 2022)
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nidiff.diffusion.condition import take_rows
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, shown
from nidiff.recipe import check_number, is_number

if TYPE_CHECKING:
    from nidiff.diffusion.denoiser import Denoiser, Estimate


@dataclass(frozen=True, eq=False)
class Guidance:
    """``null`` are the conditions of a network that is told nothing; ``interval`` the rows of the schedule between
    which it is guided, both included, and outside of which it is only told the condition."""

    scale: float
    null: Mapping[str, Any]
    interval: tuple[float, float] | None = None

    def bind(self, denoiser: "Denoiser") -> "Estimate":
        told = denoiser.clipped(None)  # the sum is clipped, not its parts
        return partial(self._estimate, told, told.given(**self.null))

    def for_images(self, index: Tensor) -> "Guidance":
        return replace(self, null={name: take_rows(value, index) for name, value in self.null.items()})

    def _estimate(self, told: "Denoiser", free: "Denoiser", x: Tensor, level: Level) -> Tensor:
        if self.scale == 1 or not self._includes(level):
            return told(x, level)
        if self.scale == 0:
            return free(x, level)
        return free(x, level).lerp(told(x, level), self.scale)

    def _includes(self, level: Level) -> bool:
        if self.interval is None:
            return True
        if isinstance(level.label, Tensor) and level.label.numel() > 1:
            raise InputError("interval is for one level at a time: leave it out where every image has its own.")
        return self.interval[0] <= float(level.label) <= self.interval[1]


def guided(denoiser: "Denoiser", scale: float, null: Mapping[str, Any] | None, interval: Any) -> Guidance:
    """The guidance of a denoiser, if all of this can be asked for."""
    if not denoiser.bound:
        raise InputError("guided needs a condition: bind it first, as in denoiser.given(class_labels=y).guided(2.0).")
    scale = check_number("scale", scale)
    if null is not None and not (isinstance(null, Mapping) and null):
        raise InputError(
            f"null={shown(null)} must be a dict of what says no condition, such as {{'class_labels': 10}}."
        )
    if interval is not None:
        rows = tuple(interval) if isinstance(interval, list | tuple) else ()
        last = len(denoiser.process.schedule) - 1
        if len(rows) != 2 or not all(map(is_number, rows)) or not 0 <= rows[0] <= rows[1] <= last:
            raise InputError(
                f"interval={shown(interval)} must be two rows of the schedule, from 0 to {last}, the lower one first."
            )
        interval = rows
    known = denoiser.conditions
    if null is None:
        null = {name: known[name].absent for name in denoiser.bound if name in known}
        if not null:
            name = next(iter(denoiser.bound))
            raise InputError(
                f"null is missing, and the denoiser does not know what says no {name}: give null={{{name!r}: …}}."
            )
    if never := [name for name in null if name in known and not known[name].dropout]:
        warnings.warn(
            f"the network was trained without dropout of {never[0]}, so that what it says without is arbitrary: train "
            "with condition_dropout 0.1 for guidance.",
            stacklevel=3,
        )
    return Guidance(scale, null, interval)
