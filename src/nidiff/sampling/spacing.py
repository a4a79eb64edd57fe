"""Which levels of the schedule a sampler visits."""

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nidiff.diffusion.schedule import Schedule
from nidiff.errors import InputError, choose, shown
from nidiff.recipe import fits, plain
from nidiff.sampling.step import Spacing

FROM_DATA = ("angle", "planned")  # beside the names in SPACINGS: `sample` chooses, who knows the data's Gaussian


def spaced_rows(schedule: Schedule, num_steps: int, spacing: str | Spacing) -> list[float]:
    """``num_steps`` falling rows of the schedule; ``spacing`` is a name in `SPACINGS`, or such a function."""
    check_count(schedule, num_steps)
    if isinstance(spacing, str) and spacing in FROM_DATA:
        raise InputError(
            f"spacing={spacing!r} needs the data's Gaussian: use it in nidiff.sample, with a denoiser of it."
        )
    chosen = choose("spacing", spacing, SPACINGS)
    if not callable(chosen):
        raise InputError(
            f"spacing={shown(spacing)} must be a name in SPACINGS, or a function (schedule, count) -> rows."
        )
    return checked_rows(schedule, chosen(schedule, plain(num_steps)), "spacing")


def check_count(schedule: Schedule, num_steps: int) -> int:
    """``num_steps``, if the schedule has as many levels."""
    num_steps, top = plain(num_steps), len(schedule)
    if not fits(num_steps, int) or not 1 <= num_steps <= top:
        raise InputError(
            f"num_steps={shown(num_steps)} must be an integer from 1 to {top}, the levels of the schedule."
        )
    return int(num_steps)


def checked_rows(schedule: Schedule, rows: Sequence[float], argument: str = "rows", whole: bool = False) -> list[Any]:
    """``rows``, if they fall and lie in the schedule: integers, or, if they need not be ``whole``, numbers between."""
    try:
        chosen = [_row(row, whole) for row in rows]
    except TypeError as error:
        between = "" if whole else ", or numbers between them"
        raise InputError(
            f"{argument} gives {shown(rows)}: give rows of the schedule, which are integers{between}."
        ) from error
    falling = all(a > b for a, b in pairwise(chosen))
    if not chosen or not falling or not 0 <= chosen[-1] <= chosen[0] <= len(schedule) - 1:
        raise InputError(
            f"{argument} gives the rows {shown(chosen)}: they must fall and lie in 0 … {len(schedule) - 1}."
        )
    return chosen


def _row(row: Any, whole: bool) -> int | float:
    row = plain(row)
    if whole or not isinstance(row, float):
        return operator.index(row)
    return int(row) if row.is_integer() else row


def _uniform(schedule: Schedule, count: int) -> list[int]:
    """Equal strides from the noisiest row to the least noisy, both included."""
    return [
        round(row) for row in torch.linspace(len(schedule) - 1, 0, count, dtype=torch.float64, device="cpu").tolist()
    ]


def _trailing(schedule: Schedule, count: int) -> list[int]:
    """Equal strides from the noisiest row, the last one a stride above the clean image."""
    stride = len(schedule) / count
    return [round(len(schedule) - i * stride) - 1 for i in range(count)]


def _uniform_logsnr(schedule: Schedule, count: int) -> list[int]:
    """Rows nearest to equal strides in log-SNR."""
    first, last = schedule.mean_logsnr[[-1, 0]].tolist()
    return _nearest(schedule, torch.linspace(first, last, count, dtype=torch.float64, device="cpu"))


def _karras(schedule: Schedule, count: int, rho: float = 7.0) -> list[int]:
    """Rows nearest to equal strides in (sigma/signal)^(1/rho) (Karras et al. 2022, eq. 5): dense where noise is low."""
    # sigma/signal = exp(−log-SNR / 2)
    first, last = (math.exp(-logsnr / (2 * rho)) for logsnr in schedule.mean_logsnr[[-1, 0]].tolist())
    roots = torch.linspace(first, last, count, dtype=torch.float64, device="cpu")
    return _nearest(schedule, -2 * rho * roots.log())


def _nearest(schedule: Schedule, logsnr: Tensor) -> list[int]:
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
