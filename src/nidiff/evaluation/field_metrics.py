"""The metrics of fields: how far generated signals, fields, volumes or videos are from real ones, and the errors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.spectral import Boundary, boundary_per_axis
from nidiff.data.grid import Grid
from nidiff.errors import expect
from nidiff.evaluation.field_spectrum import (
    CrossBands,
    SpectrumBands,
    Waves,
    as_pair_of_fields,
    coherency,
    cross_bands,
    log_ratio,
    spectrum_bands,
)
from nidiff.evaluation.field_values import (
    deviations,
    distances,
    in_units,
    increments,
    quantile_errors,
    structure_function,
)
from nidiff.evaluation.frechet import moments, moments_distance
from nidiff.evaluation.metrics import Metric, check_bootstrap, measure_each
from nidiff.evaluation.points import Array
from nidiff.evaluation.results import Measured
from nidiff.randomness import permutation

VALUES = 1024  # pixels of an item, at most, whose values the distributions are made of


class FieldSet:
    """Fields [N, C, *event] in the units of the data, and what the metrics need of each item.

    That is computed when it is first asked for, and once, also for the resamples of the bootstrap.
    """

    def __init__(
        self,
        fields: Tensor,
        grid: Grid | None = None,
        boundary: Boundary = "periodic",
        features: Tensor | None = None,
        features_name: str = "features",
    ) -> None:
        self.features, self.features_name = features, features_name
        self.num_channels, self.event = fields.shape[1], tuple(fields.shape[2:])
        self.grid = grid or Grid.usual(fields.shape[1:])
        self.grid.check(fields.shape[1:])
        self.boundary = boundary_per_axis(boundary, len(self.event))
        self._all, self._rows = fields, torch.arange(len(fields))
        self._of_each: dict[Any, Tensor] = {}  # of all fields, also of those that a resample has not
        self._of_set: dict[Any, Any] = {}
        self._waves: dict[tuple[int, ...], Waves] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fields(self) -> Tensor:
        """[N, C, *event]."""
        return self._all[self._rows]

    def resampled(self, rows: Tensor) -> "FieldSet":
        """The items of ``rows``."""
        features = None if self.features is None else self.features[rows]
        drawn = FieldSet(self._all, self.grid, self.boundary, features, self.features_name)
        drawn._rows, drawn._of_each, drawn._waves = self._rows[rows], self._of_each, self._waves
        return drawn

    @property
    def is_video(self) -> bool:
        return self.grid.kind == "video" and self.event[0] > 1

    @property
    def long_axes(self) -> list[int]:
        """The axes of two pixels or more."""
        return [axis for axis, size in enumerate(self.event) if size > 1]

    @property
    def main_axes(self) -> tuple[int, ...]:
        """What |k| is made of: all axes, but not time."""
        return tuple(axis for axis in range(len(self.event)) if not (self.grid.kind == "video" and axis == 0))

    def waves(self, axes: tuple[int, ...]) -> Waves:
        if axes not in self._waves:
            self._waves[axes] = Waves(self.event, axes, self.boundary)
        return self._waves[axes]

    def powers(self, axes: tuple[int, ...]) -> Tensor:
        """The power in bands of k along some axes, [N, C, B]."""
        waves = self.waves(axes)
        return self.of_each(("powers", axes), lambda x: waves.banded(waves.powers(x)))

    def crosses(self, axes: tuple[int, ...]) -> Tensor:
        """x̂_a x̂_b* of the pairs of channels in these bands, [N, P, B]."""
        return self.of_each(("crosses", axes), self.waves(axes).crosses)

    def values(self) -> Tensor:
        """The values of some pixels, [N, C, V]."""
        return self.of_each("values", _some)

    def sorted_values(self) -> Tensor:
        """All of these of a channel, rising, [C, N V]."""
        return self.of_set("sorted", lambda: _sorted(self.values()))

    def sorted_steps(self, axis: int) -> Tensor:
        """The increments between neighbours along an axis, of some pixels, rising, [C, N V]."""
        some = self.of_each(("steps", axis), lambda x: _some(increments(x, axis, 1)))
        return self.of_set(("sorted", axis), lambda: _sorted(some))

    def spread(self) -> Tensor:
        """How much the values of these pixels differ between items, [C]."""
        return self.of_set("spread", lambda: deviations(self.values()))

    def structure(self, order: int, axis: int) -> Tensor:
        """`structure_function`, [N, C, number of lags]."""
        return self.of_each(("structure", order, axis), lambda x: structure_function(x, order, axis=axis))

    def of_each(self, key: Any, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``compute`` says of each item, [N, ...]; ``key`` is its name."""
        if key not in self._of_each:
            self._of_each[key] = compute(self._all)
        return self._of_each[key][self._rows]

    def of_set(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What ``compute`` says of the set, once; ``key`` is its name."""
        if key not in self._of_set:
            self._of_set[key] = compute()
        return self._of_set[key]


def compare_fields(
    real: Array,
    generated: Array,
    *,
    grid: Grid | None = None,
    boundary: Boundary = "periodic",
    bootstrap: int = 20,
) -> dict[str, Measured]:
    """Every metric of `FIELD_METRICS` that applies to fields [N, C, *event], in the units of the data, by its name.

    Args:
        grid: the names of the axes: where the first of three is "time" or "frame", it is a video. Default: it is none.
        boundary: as in `nidiff.field_spectrum`.
        bootstrap: resamples of the generated items for the errors; 0: no errors.
    """
    first, second = as_pair_of_fields(real, generated)
    if grid is not None:
        expect("grid", grid, Grid, "give a nidiff.data.grid.Grid, or None")
    check_bootstrap(bootstrap)
    sets = [FieldSet(x, grid, boundary) for x in (first, second)]
    return measure_fields(*sets, bootstrap=bootstrap)


def measure_fields(real: FieldSet, generated: FieldSet, *, bootstrap: int = 20) -> dict[str, Measured]:
    """The same of two sets that are made already."""
    return measure_each(field_metrics(real), real, generated, bootstrap=bootstrap)


def field_metrics(real: FieldSet) -> dict[str, Metric]:
    """The metrics that apply to these fields, by what they are called."""
    return {
        metric.label(real.features_name) if metric.label else key: metric
        for key, metric in FIELD_METRICS.items()
        if metric.applies(real)
    }


def spectra_of(real: FieldSet, generated: FieldSet, axes: tuple[int, ...]) -> SpectrumBands:
    """Their spectra along some axes, in bands."""
    return spectrum_bands(real.waves(axes), real.powers(axes), generated.powers(axes))


def cross_spectra_of(real: FieldSet, generated: FieldSet, axes: tuple[int, ...]) -> CrossBands:
    """Their coherencies along some axes, in bands."""
    return cross_bands(real.waves(axes), *((one.powers(axes), one.crosses(axes)) for one in (real, generated)))


def band_tables(real: FieldSet, generated: FieldSet) -> list[dict[str, Any]]:
    """The bands of every spectrum: per channel over all axes, between channels, and per channel along each axis."""
    tables: list[dict[str, Any]] = []
    for axes in axis_groups(real):
        found, along = spectra_of(real, generated, axes), _named(real, axes)
        for channel in range(real.num_channels):
            about = {"spectrum": along, "channel": real.grid.channel(channel)}
            tables.append(about | {"bands": found.rows(channel)})
        if axes == real.main_axes and real.num_channels > 1:
            crosses = cross_spectra_of(real, generated, axes)
            for index, pair in enumerate(crosses.pairs):
                names = " and ".join(real.grid.channel(channel) for channel in pair)
                tables.append({"coherence": along, "channels": names, "bands": crosses.rows(index)})
    return tables


def axis_groups(real: FieldSet) -> list[tuple[int, ...]]:
    """What spectra are taken along: all axes, then each alone; frames and time for a video."""
    alone = [(0,)] if real.is_video else [(axis,) for axis in real.long_axes]
    groups = [real.main_axes, *(axes for axes in alone if axes != real.main_axes)]
    return [axes for axes in groups if any(real.event[axis] > 1 for axis in axes)]


def _named(real: FieldSet, axes: tuple[int, ...]) -> str:
    return ", ".join(real.grid.axes[axis] for axis in axes)


def _some(x: Tensor) -> Tensor:
    """The same pixels of every item, chosen at random if they are many."""
    flat = x.flatten(2)
    if flat.shape[2] <= VALUES:
        return flat.double().cpu()
    chosen = permutation(flat.shape[2], torch.Generator().manual_seed(0))[:VALUES].sort().values
    return flat[:, :, chosen.to(flat.device)].double().cpu()


def _sorted(values: Tensor) -> Tensor:
    """Of each channel, [C, N V]."""
    return values.transpose(0, 1).flatten(1).sort(1).values


def _average(found: list[Tensor]) -> float:
    return torch.cat([one.flatten() for one in found]).abs().mean().item()


def _spectrum(real: FieldSet, generated: FieldSet, groups: Sequence[tuple[int, ...]]) -> float:
    """The mean of |log10 S_generated − log10 S_real| over bands, channels and groups of axes."""
    pairs = [(generated.powers(axes).mean(0), real.powers(axes).mean(0)) for axes in groups]
    return sum(log_ratio(*pair).abs().mean().item() for pair in pairs) / len(pairs)


def _coherence(real: FieldSet, generated: FieldSet) -> float:
    axes = real.main_axes
    found = [coherency(one.powers(axes), one.crosses(axes)) for one in (real, generated)]
    return (found[1] - found[0]).abs().mean().item()


def _values(real: FieldSet, generated: FieldSet) -> float:
    return _average([distances(real.sorted_values(), generated.sorted_values())])


def _tails(real: FieldSet, generated: FieldSet) -> float:
    return _average([quantile_errors(real.sorted_values(), generated.sorted_values())])


def _increments(real: FieldSet, generated: FieldSet) -> float:
    return _average([distances(real.sorted_steps(axis), generated.sorted_steps(axis)) for axis in real.long_axes])


def _structure(order: int) -> Callable[[FieldSet, FieldSet], float]:
    def error(real: FieldSet, generated: FieldSet) -> float:
        pairs = [[one.structure(order, axis).mean(0) for one in (generated, real)] for axis in real.long_axes]
        return _average([log_ratio(*pair) for pair in pairs])

    return error


def _flatness(real: FieldSet, generated: FieldSet) -> float:
    found = []
    for axis in real.long_axes:
        orders = [[one.structure(order, axis)[..., :1].mean(0) for order in (2, 4)] for one in (generated, real)]
        found.append(log_ratio(*(in_units(fourth, second.square()) for second, fourth in orders)))
    return _average(found)


def _spread(real: FieldSet, generated: FieldSet) -> float:
    mine, other = real.spread(), generated.spread()
    return _average([in_units(other - mine, mine)])


def _flicker(real: FieldSet, generated: FieldSet) -> float:
    mine, other = (one.structure(1, 0)[..., 0].mean(0) for one in (real, generated))
    return _average([in_units(other - mine, mine)])


def _has_axes(real: FieldSet) -> bool:
    return bool(real.long_axes)


def _has_main_axes(real: FieldSet) -> bool:
    return any(real.event[axis] > 1 for axis in real.main_axes)


FIELD_METRICS: dict[str, Metric] = {
    "frechet": Metric(
        lambda real, generated: moments_distance(moments(real.features), moments(generated.features)),
        label=lambda features: f"FD-{features}",
        applies=lambda real: real.features is not None,
    ),
    "spectrum": Metric(lambda real, generated: _spectrum(real, generated, [real.main_axes]), applies=_has_main_axes),
    "axis spectra": Metric(
        lambda real, generated: _spectrum(real, generated, [(axis,) for axis in real.long_axes]),
        applies=lambda real: len(real.long_axes) > 1 and not real.is_video,
    ),
    "time spectrum": Metric(
        lambda real, generated: _spectrum(real, generated, [(0,)]), applies=lambda real: real.is_video
    ),
    "coherence": Metric(_coherence, applies=lambda real: real.num_channels > 1 and _has_main_axes(real)),
    "values": Metric(_values),
    "tails": Metric(_tails),
    "increments": Metric(_increments, applies=_has_axes),
    "flatness": Metric(_flatness, applies=_has_axes),
    "structure 2": Metric(_structure(2), applies=_has_axes),
    "structure 4": Metric(_structure(4), applies=_has_axes),
    "spread": Metric(_spread),
    "flicker": Metric(_flicker, applies=lambda real: real.is_video),
}
"""What `compare_fields` and, for data that are no 8-bit images, ``nidiff evaluate`` measure; all of them are errors."""
