"""Classifier-free guidance, on x̂0.

A score guided by ``scale`` w is ∇ log p(x) + w ∇ log p(c | x). By Tweedie, Σ ∇ log p = (signal · x̂0 − x) / sigma²
with and without the condition c, so Σ, x and the level fall out of the difference of the two:

    x̂0 = x̂0(no condition) + w (x̂0(condition) − x̂0(no condition))         (Ho and Salimans 2022)
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nidiff.diffusion.condition import Condition, take_rows
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError
from nidiff.recipe import check_number, is_number

if TYPE_CHECKING:
    from nidiff.diffusion.denoiser import Denoiser, Estimate


@dataclass(frozen=True, eq=False)
class Guidance:
    """``null`` are the values of the conditions that stand for "none". ``interval`` has two rows of the schedule;
    outside of them, x̂0 is that of the condition, unguided."""

    scale: float
    null: Mapping[str, Any]
    interval: tuple[float, float] | None = None

    def bind(self, denoiser: "Denoiser") -> "Estimate":
        return partial(self._estimate, denoiser, denoiser.given(**self.null))

    def for_images(self, index: Tensor) -> "Guidance":
        return replace(self, null={name: take_rows(value, index) for name, value in self.null.items()})

    def _estimate(self, conditional: "Denoiser", unconditional: "Denoiser", x: Tensor, level: Level) -> Tensor:
        if self.scale == 1 or not self._includes(level):
            return conditional.unclipped(x, level)
        if self.scale == 0:
            return unconditional.unclipped(x, level)
        # The sum is clipped, not its parts.
        return unconditional.unclipped(x, level).lerp(conditional.unclipped(x, level), self.scale)

    def _includes(self, level: Level) -> bool:
        return self.interval is None or self.interval[0] <= float(level.label) <= self.interval[1]


def make_guidance(
    conditions: Mapping[str, Condition],
    names: Iterable[str],
    scale: float,
    *,
    null: Mapping[str, Any] | None = None,
    interval: Sequence[float] | None = None,
    num_rows: int,
    argument: str = "interval",
) -> Guidance:
    """The guidance by the conditions ``names``, of a model that was trained with ``conditions`` on a schedule of
    ``num_rows``; ``argument`` is what the caller calls ``interval``. Warns where the network does not know "none"."""
    check_number("scale", scale)
    if null is None:
        null = {name: conditions[name].absent for name in names if name in conditions}
    if not null:
        known = [*names]
        remedy = f"give null={{{known[0]!r}: …}}" if known else "give a class or a condition first"
        raise InputError("guidance", scale, "needs a condition, and the value that stands for none", remedy)
    if never := [name for name in null if name in conditions and not conditions[name].dropout]:
        warnings.warn(
            f"the network was trained without dropout of {never[0]}, so its estimate without it is arbitrary: train "
            "with condition_dropout 0.1 for guidance.",
            stacklevel=4,
        )
    if interval is None:
        return Guidance(scale, null)
    rows = tuple(interval)
    if len(rows) != 2 or not all(map(is_number, rows)) or not 0 <= rows[0] <= rows[1] <= num_rows - 1:
        remedy = f"give two rows of the schedule from 0 to {num_rows - 1}, the lower one first"
        raise InputError(argument, interval, "is not an interval of the schedule", remedy)
    return Guidance(scale, null, (rows[0], rows[1]))
