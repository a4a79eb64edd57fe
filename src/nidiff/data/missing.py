"""NaN and infinite values: refused with their place, or filled."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from nidiff.data.dataset import Dataset, Source, Window
from nidiff.data.sources import blocks
from nidiff.errors import FileError, InputError

MEAN, DOMAIN = "mean", "domain"


def as_fills(missing: str, channels: int) -> list[float] | None:
    """The number to fill each channel with; None where missing values are refused, inside of the domain if there is
    one."""
    if missing in ("refuse", DOMAIN):
        return None
    with suppress(ValueError):
        if abs(number := float(missing)) <= torch.finfo(torch.float32).max:
            return [number] * channels
    raise InputError("missing", missing, "is unknown", "give refuse, mean, domain or a number that float32 can hold")


def find_domain(data: Dataset, name: str, progress: bool = False) -> Tensor:
    """Where the items have values, [C, *event]: the same points in all of them, and not everywhere."""
    domain: Tensor | None = None
    for rows in blocks(torch.arange(len(data)), data.shape, "looking for the domain", progress):
        known = data.stored(rows).isfinite()
        domain = known[0] if domain is None else domain
        if bool((differs := known != domain).any()):
            item, *place = differs.nonzero()[0].tolist()
            state = "missing" if domain[tuple(place)] else "known"
            words = f"{data.grid.channel(place[0])} at {tuple(place[1:])} is {state} in item {int(rows[item])}"
            problem = f"has no domain: {words}, unlike in the first item"
            raise FileError("data", name, problem, "use `missing` mean, or mask the same points in all items")
    if domain is None or bool(domain.all()) or not bool(domain.flatten(1).any(1).all()):
        problem = "is empty: " + ("no point is missing" if domain is None or bool(domain.all()) else "no point is left")
        raise InputError(
            "missing", DOMAIN, problem, "leave it out, or give data that miss the same points in all items"
        )
    return domain


def without_missing(data: Dataset, name: str, fills: Sequence[float] | None, domain: Tensor | None = None) -> Dataset:
    """The data set ``name`` with one number per channel, ``fills``, in place of NaN and infinite values; without
    ``fills`` they are refused, but for those outside of the ``domain``, which are NaN. Values in memory are looked at
    now, and changed in place; others when they are read."""
    values = data.values
    if not values.dtype.is_floating_point:
        return data

    def clean(part: Tensor, rows: Tensor, window: Window = ()) -> Tensor:
        bad = ~torch.isfinite(part)
        bad = bad if domain is None else bad & domain
        if not bool(bad.any()):
            return part
        if fills is None:
            item, channel, *place = bad.nonzero()[0].tolist()
            row, what = int(rows[item]), part[(item, channel, *place)].item()
            if window:  # of the item, of which this is a part
                place = [each.start + number for each, number in zip(window, place, strict=True)]
            along = "" if data.along is None else f" ({data.along[0]} {data.along[1][row]})"
            where = f"{data.grid.channel(channel)} of item {row}{along} at {tuple(place)}"
            remedy = "repair or remove it, or fill it with `missing`"
            raise FileError("data", name, f"has {'NaN' if what != what else what} in {where}", remedy)
        numbers = torch.tensor(fills, dtype=part.dtype).reshape(-1, *[1] * (part.ndim - 2))
        return torch.where(bad, numbers, part, out=part)

    if not isinstance(values, Tensor):
        read, part = values.index_select, values.read_part if isinstance(values, Source) else None

        def clean_part(row: int, window: Window) -> Tensor:
            assert part is not None
            return clean(part(row, window)[None], torch.tensor([row]), window)[0]

        whole = Source(values.shape, values.dtype, lambda rows: clean(read(0, rows), rows), part and clean_part)
        return replace(data, values=whole)
    for rows in blocks(torch.arange(len(values)), data.shape, "checking", progress=False):
        clean(values[rows[0] : rows[-1] + 1], rows)
    return data
