"""Samples of what items were, from Python: given observations, tables of stations, or both."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.data.stations import read_stations
from nidiff.errors import InputError, expect, renamed
from nidiff.generation.loaded_model import Model, open_model, process_state
from nidiff.generation.observed import Observed, rows_of
from nidiff.generation.restoration import Restoration, restoration_job
from nidiff.generation.restoration import restore as draw
from nidiff.generation.stations import observe_stations, times_of
from nidiff.inverse.observation import Observation

if TYPE_CHECKING:
    from nidiff.diffusion.climatology import Times


def restore(
    model: str | Path | Model,
    observation: Observation | Sequence[Observation] | None = None,
    *,
    stations: Any = None,
    error: float | None = None,
    interpolation: str = "bilinear",
    times: "Times | None" = None,
    samples: int = 8,
    seed: int = 0,
    method: str | None = None,
    sampler: str | None = None,
    num_steps: int | None = None,
    truth: Tensor | None = None,
    batch: int = 64,
) -> Restoration:
    """Samples of what items were, given an observation of each; on a terminal, with a bar.

    Args:
        model: a run directory, a model folder, the name of a model that ships, or what `open_model` returns.
        observation: in the units of the model: one with a row for each item, whose masks and errors may differ, or one
            observation for each item.
        stations: a table as ``nidiff restore --stations`` takes it: a path, a DataFrame of pandas, a Dataset of xarray,
            or a dict of columns, in the units of the data. With times, these are the items.
        error: the standard deviation of values of stations without one.
        times: of the items of an ``observation``, which a climatology needs.
        truth: the items [N, C, *event] in the units of the data, where they are known: `Restoration.errors` then has
            scores, also of interpolation and of the data's Gaussian alone.
        samples: of each item, with seeds that follow ``seed``.

    Returns:
        a `Restoration`: ``.samples`` [N, S, C, *event], ``.mean`` and ``.spread`` in the units of the data, ``.grid``
        with names, units and coordinates; ``.to_xarray()`` has all of it.
    """
    opened = model if isinstance(model, Model) else open_model(Path(model), process_state())
    table = None if stations is None else read_stations(
        Path(stations) if isinstance(stations, str) else stations, opened.grid, error=error
    )  # fmt: skip
    if table is None and observation is None:
        raise InputError("observation", None, "is needed, or stations are", "give one of them, or both")
    if table is not None and observation is None:
        times = times_of(table)
    each = () if observation is None else _rows(observation)
    count = len(each) or (1 if times is None else len(times))
    along = None if times is None else ("time", times)
    with renamed("file", "times" if table is None else "stations"):
        opened = opened.about(Dataset(torch.zeros(count, *opened.shape), along=along), "the items")
    observed = Observed(each, torch.full((count, *opened.shape), torch.nan))
    if len(each) and isinstance(observation, Observation) and observation.operator.is_mask:
        observed = Observed.of(opened, observation)
    if table is not None:
        seen = observe_stations(opened, table, times_of(table), count=count, kind=interpolation)
        if len(seen) != count:
            problem = f"has {len(seen)} times, and {count} items are observed"
            raise InputError("stations", None, problem, "give the same items in both")
        observed = observed.together(seen) if len(each) else seen
    job = restoration_job(opened, sampler, num_steps)
    drawn = draw(opened, job, observed, method=method, truth=truth, samples=samples, seed=seed, batch=batch)
    return replace(drawn, along=along)


def _rows(observation: Observation | Sequence[Observation]) -> tuple[Observation, ...]:
    """The observation of each item."""
    if isinstance(observation, Observation):
        return rows_of(observation)
    for each in observation:
        expect("observation", each, Observation, "give a nidiff.Observation, or one for each item")
    return tuple(row for each in observation for row in rows_of(each))
