"""The mean of every month or day of the year, at every point: what anomalies are differences from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError, one_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Times: TypeAlias = "np.ndarray[Any, np.dtype[np.datetime64]]"
NAME = "climatology"
LEAP_YEAR = 2000
MOST_TIMES = 100_000
UNITS = ("datetime64[M]", "datetime64[D]")
PHASES = {"month": 12, "day": 366}
"""How many means there are of each kind: a day has the same place in every year, and 29 February has one too."""


@dataclass(frozen=True, eq=False)
class Climatology:
    """Means [P, C, *event] in the units of the data by ``month`` or by ``day`` of the year; NaN of one that the
    training part never has."""

    by: str
    means: Tensor

    def __post_init__(self) -> None:
        count = PHASES[one_of("by", self.by, PHASES)]
        if self.means.ndim < 3 or len(self.means) != count:
            problem = f"has shape {tuple(self.means.shape)}"
            raise InputError("climatology", None, problem, f"give means [{count}, C, *event] by {self.by}")
        object.__setattr__(self, "means", self.means.detach().cpu().double())

    def at(self, times: Times) -> Tensor:
        """The mean of each of the ``times``, [N, C, *event]; one that is not known is refused."""
        self.check(times)
        return self.means[torch.from_numpy(phases(times, self.by))]

    def check(self, times: Times) -> None:
        """Refuse a time whose mean is not known."""
        unknown = self.means.flatten(1).isnan().all(1)[torch.from_numpy(phases(times, self.by))]
        if bool(unknown.any()):
            day = np.datetime_as_string(times[int(unknown.nonzero()[0])], "D")
            problem = f"has no mean for the {self.by} of {day}, which the training part lacks"
            raise InputError("remove", NAME, problem, f"give other times, or train with items of that {self.by}")

    @property
    def name(self) -> str:
        """How a sentence calls it."""
        return "climatology by month" if self.by == "month" else "climatology by day of the year"

    @classmethod
    def from_json(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Climatology":
        return cls(values["by"], tensors[values["means"]["tensor"]])


def phases(times: Times, by: str) -> "NDArray[np.int64]":
    """The number of the month or the day of the year of each time, from 0."""
    months = times.astype("datetime64[M]")
    month = months.astype(np.int64) % 12
    if by == "month":
        return month
    starts = np.arange(f"{LEAP_YEAR}-01", f"{LEAP_YEAR + 1}-01", dtype="datetime64[M]").astype("datetime64[D]")
    before = (starts - starts[0]).astype(np.int64)
    return before[month] + (times.astype("datetime64[D]") - months.astype("datetime64[D]")).astype(np.int64)


def parse_times(text: str, argument: str = "times") -> Times:
    """2020-01:2020-12, 2020-06-15 or several of these, joined by commas: months, which are written by their first day,
    or days, from the first to the last one."""
    times: list[Times] = []
    for part in text.split(","):
        ends = [end.strip() for end in part.split(":")]
        try:
            first, last = (np.datetime64(end) for end in (ends[0], ends[-1]))
            is_sound = len(ends) <= 2 and first.dtype == last.dtype and first.dtype in UNITS and bool(first <= last)
        except (ValueError, TypeError):
            is_sound = False
        if not is_sound or (last - first).astype(np.int64) >= MOST_TIMES:
            remedy = "give months such as 2020-01:2020-12, or days such as 2020-06-15"
            raise InputError(argument, text, "cannot be read, or does not rise", remedy)
        times.append(np.arange(first, last + 1).astype("datetime64[D]"))
    return np.concatenate(times).astype("datetime64[s]")
