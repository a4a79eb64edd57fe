"""Which levels of a schedule a sampler visits."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nidiff.errors import InputError, choose
from nidiff.recipe import check_whole, plain

if TYPE_CHECKING:
    from nidiff.diffusion.schedule import Schedule

# (schedule, count) -> the rows of the levels to visit, falling.
Spacing = Callable[["Schedule", int], Sequence[float]]
ANGLE = "angle"  # beside the names in SPACINGS: rows that `sample` computes from the data's Gaussian


def spaced_rows(schedule: "Schedule", num_steps: int, spacing: str | Spacing) -> list[float]:
    """``num_steps`` falling rows of the schedule; ``spacing`` is a name in `SPACINGS`, or such a function."""
    num_steps = check_whole("num_steps", num_steps, 1, len(schedule))
    return check_rows("spacing", choose("spacing", spacing, SPACINGS)(schedule, num_steps), len(schedule))


def check_rows(argument: str, rows: Sequence[float], num_levels: int) -> list[float]:
    """``rows``, if they fall and lie in a schedule of that many levels; whole ones as integers."""
    numbers = [plain(row) for row in rows]
    falling = all(a > b for a, b in pairwise(numbers))
    if not numbers or not falling or not 0 <= numbers[-1] <= numbers[0] <= num_levels - 1:
        raise InputError(argument, rows, "are not rows of the schedule", f"they fall, and lie in 0 … {num_levels - 1}")
    return [int(row) if row == int(row) else row for row in numbers]


def _uniform(schedule: "Schedule", count: int) -> list[int]:
    """Equal strides from the noisiest row to the least noisy, both included."""
    rows = torch.linspace(len(schedule) - 1, 0, count, dtype=torch.float64, device="cpu")
    return [round(row) for row in rows.tolist()]


def _trailing(schedule: "Schedule", count: int) -> list[int]:
    """Equal strides from the noisiest row, the last one a stride above the clean image."""
    stride = len(schedule) / count
    return [round(len(schedule) - i * stride) - 1 for i in range(count)]


def _uniform_logsnr(schedule: "Schedule", count: int) -> list[int]:
    """Rows nearest to equal strides in log-SNR."""
    first, last = schedule.mean_logsnr[[-1, 0]].tolist()
    return _nearest(schedule, torch.linspace(first, last, count, dtype=torch.float64, device="cpu"))


def _karras(schedule: "Schedule", count: int, rho: float = 7.0) -> list[int]:
    """Rows nearest to equal strides in (sigma/signal)^(1/rho) (Karras et al. 2022, eq. 5): dense where noise is low."""
    # sigma/signal = exp(−log-SNR / 2)
    first, last = (math.exp(-logsnr / (2 * rho)) for logsnr in schedule.mean_logsnr[[-1, 0]].tolist())
    roots = torch.linspace(first, last, count, dtype=torch.float64, device="cpu")
    return _nearest(schedule, -2 * rho * roots.log())


def _nearest(schedule: "Schedule", logsnr: Tensor) -> list[int]:
    """Falling rows nearest to the rising ``logsnr``; where rows are too coarse for that, the next free ones."""
    rows: list[int] = []
    for index, row in enumerate(schedule.nearest_row(logsnr).round().tolist()):
        below = rows[-1] - 1 if rows else len(schedule) - 1
        rows.append(max(min(int(row), below), len(logsnr) - 1 - index))
    return rows


SPACINGS: dict[str, Spacing] = {
    "uniform": _uniform,
    "trailing": _trailing,
    "logsnr": _uniform_logsnr,
    "karras": _karras,
}
