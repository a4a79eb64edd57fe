"""The metrics: how far generated data are from real ones, each with its error. `METRICS` has them all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nidiff.covariance.waves import Boundary
from nidiff.data.grid import Grid
from nidiff.errors import InputError
from nidiff.evaluation.arrays import Array, as_pair
from nidiff.evaluation.distributions import distances, in_units, quantile_errors
from nidiff.evaluation.frechet import gaussian_distance
from nidiff.evaluation.inception import RECIPES
from nidiff.evaluation.kernel_distance import kernel_distance
from nidiff.evaluation.results import Measured
from nidiff.evaluation.samples import SampleSet
from nidiff.evaluation.spectrum import coherency, coherency_bands, log_ratio, spectrum_bands
from nidiff.progress import progress_bar
from nidiff.randomness import random_index
from nidiff.recipe import check_whole

MOST_RESAMPLES = 10_000
SUBSET, SUBSETS = 1000, 100  # items in a subset of the kernel distance, at most, and how many subsets
Answer: TypeAlias = "float | tuple[float, float | None]"
Comparison: TypeAlias = Callable[[SampleSet, SampleSet], Answer]


@dataclass(frozen=True)
class Metric:
    """One number about generated data; an entry of `METRICS`.

    ``function(real, generated)`` takes two `SampleSet` and returns the number, or the number and its error where that
    has a formula. A number alone gets the bootstrap error: its standard deviation over resamples of what was generated.
    Return (number, None) where neither makes sense.
    """

    function: Comparison
    higher_is_better: bool = False
    label: Callable[[str], str] | None = None  # its name, from that of the feature network; default: its key
    applies: Callable[[SampleSet], bool] = lambda real: True  # to which real data


def metrics_for(real: SampleSet) -> dict[str, Metric]:
    """The metrics that apply to such data, by their labels."""
    return {
        metric.label(real.features_name) if metric.label else key: metric
        for key, metric in METRICS.items()
        if metric.applies(real)
    }


def measure(
    real: SampleSet, generated: SampleSet, *, bootstrap: int = 20, keys: Iterable[str] | None = None
) -> dict[str, Measured]:
    """The metrics that apply, or those of them with these ``keys`` in `METRICS`, by their labels.

    With 0 resamples (``bootstrap``) there are no bootstrap errors.
    """
    chosen = [METRICS[key] for key in (METRICS if keys is None else keys)]
    measured = {}
    for label, metric in metrics_for(real).items():
        if metric not in chosen:
            continue
        answer = metric.function(real, generated)
        if isinstance(answer, tuple):
            value, error = answer
        else:
            value, error = answer, _bootstrap_error(metric, real, generated, bootstrap) if bootstrap else None
        measured[label] = Measured(float(value), None if error is None else float(error), metric.higher_is_better)
    return measured


def compare_fields(
    real: Array,
    generated: Array,
    *,
    grid: Grid | None = None,
    boundary: Boundary = "periodic",
    bootstrap: int = 20,
) -> dict[str, Measured]:
    """Every metric of `METRICS` that applies to fields [N, C, *event] in the units of the data, by its name.

    Args:
        grid: the names of the axes: where the first of three is "time" or "frame", it is a video. Default: it is none.
        boundary: as in `nidiff.metrics.field_spectrum`.
        bootstrap: resamples of the generated items for the errors; 0: no errors.
    """
    check_bootstrap(bootstrap)
    pair = (x.double() if x.dtype == torch.uint8 else x for x in as_pair(real, generated))
    return measure(*(SampleSet(x, grid=grid, boundary=boundary) for x in pair), bootstrap=bootstrap)


def check_bootstrap(bootstrap: int) -> None:
    """Refuse a number of resamples that gives no error."""
    if check_whole("bootstrap", bootstrap, 0, MOST_RESAMPLES) == 1:
        raise InputError("bootstrap", 1, "gives no error", "use 2 resamples or more, or 0 for none")


def band_tables(real: SampleSet, generated: SampleSet) -> list[dict[str, Any]]:
    """The bands of every spectrum: per channel over all axes, between channels, and per channel along each axis; of a
    video, over its frames and along time."""
    alone = [(0,)] if real.is_video else [(axis,) for axis in real.long_axes]
    tables: list[dict[str, Any]] = []
    ordered = (real.ordered, generated.ordered)
    for axes in dict.fromkeys(axes for axes in (real.main_axes, *alone) if axes):
        shells, along = real.shells(axes), ", ".join(real.grid.axes[axis] for axis in axes)
        powers = [samples.powers(axes) for samples in (real, generated)]
        spectra = spectrum_bands(shells, *powers, ordered=ordered)
        for channel in range(real.num_channels):
            about = {"spectrum": along, "channel": real.grid.channel(channel)}
            tables.append(about | {"bands": spectra.rows(channel)})
        if axes == real.main_axes and real.num_channels > 1:
            products = [samples.crosses(axes) for samples in (real, generated)]
            coherencies = coherency_bands(shells, *zip(powers, products, strict=True), ordered=ordered)
            names = [real.grid.channel(channel) for channel in range(real.num_channels)]
            for index, pair in enumerate(combinations(names, 2)):
                tables.append({"coherence": along, "channels": " and ".join(pair), "bands": coherencies.rows(index)})
    return tables


def _bootstrap_error(metric: Metric, real: SampleSet, generated: SampleSet, count: int) -> float:
    """The standard deviation over sets of as many generated items as are independent, drawn with replacement."""
    generator, total, values = torch.Generator().manual_seed(0), len(generated), []
    size = max(2, round(generated.num_independent))
    with progress_bar("bootstrap", "resamples") as progress:
        for done in range(1, count + 1):
            values.append(metric.function(real, generated.resampled(random_index(total, size, generator))))
            progress(done, count)
    return torch.tensor(values, dtype=torch.float64).std().item()


# Of features


def _kernel(real: SampleSet, generated: SampleSet) -> Answer:
    """With the error of the jackknife: subsets of m of n items vary as √((n − m) / m) times the whole.

    A resample has items twice, which ruins the pairs of the kernel, and distances to neighbours too.
    """
    fewest = min(len(real), len(generated))
    subset, generator = min(SUBSET, fewest // 2), torch.Generator().manual_seed(0)
    distance = kernel_distance(real.features, generated.features, subset, SUBSETS, generator)
    alike = max(len(side) / side.num_independent for side in (real, generated))
    return distance.value, distance.standard_error * (SUBSETS * subset / (fewest - subset) * alike) ** 0.5


def share_with_error(share: float, count: float) -> tuple[float, float]:
    """A share of ``count`` independent items, with its binomial error."""
    return share, (share * (1 - share) / count) ** 0.5


def _has_features(real: SampleSet) -> bool:
    return real.features is not None


# Of fields


def _spectrum(groups: Callable[[SampleSet], Sequence[tuple[int, ...]]]) -> Comparison:
    """`spectrum_error`, averaged over groups of axes."""

    def error(real: SampleSet, generated: SampleSet) -> float:
        pairs = [(generated.powers(axes).mean(0), real.powers(axes).mean(0)) for axes in groups(real)]
        return sum(log_ratio(*pair).abs().mean().item() for pair in pairs) / len(pairs)

    return error


def _values(compare: Callable[[Tensor, Tensor], Tensor]) -> Comparison:
    return lambda real, generated: _magnitude([compare(real.sorted_values(), generated.sorted_values())])


def _coherence(real: SampleSet, generated: SampleSet) -> float:
    axes = real.main_axes
    sides = [(samples.powers(axes).mean(0), samples.crosses(axes).mean(0)) for samples in (real, generated)]
    return (coherency(*sides[1]) - coherency(*sides[0])).abs().mean().item()


def _increments(real: SampleSet, generated: SampleSet) -> float:
    pairs = ((real.sorted_increments(axis), generated.sorted_increments(axis)) for axis in real.long_axes)
    return _magnitude([distances(*pair) for pair in pairs])


def _structure(order: int) -> Comparison:
    def error(real: SampleSet, generated: SampleSet) -> float:
        sides = [[samples.structure(order, axis).mean(0) for axis in real.long_axes] for samples in (generated, real)]
        return _magnitude([log_ratio(*pair) for pair in zip(*sides, strict=True)])

    return error


def _flatness(real: SampleSet, generated: SampleSet) -> float:
    def flatness(samples: SampleSet, axis: int) -> Tensor:
        second, fourth = (samples.structure(order, axis)[..., :1].mean(0) for order in (2, 4))
        return in_units(fourth, second.square())

    return _magnitude([log_ratio(flatness(generated, axis), flatness(real, axis)) for axis in real.long_axes])


def _spread(real: SampleSet, generated: SampleSet) -> float:
    return _magnitude([in_units(generated.spread() - real.spread(), real.spread())])


def _flicker(real: SampleSet, generated: SampleSet) -> float:
    expected, measured = (samples.structure(1, 0)[..., 0].mean(0) for samples in (real, generated))
    return _magnitude([in_units(measured - expected, expected)])


def _magnitude(errors: list[Tensor]) -> float:
    """The mean magnitude of all of them."""
    return torch.cat([error.flatten() for error in errors]).abs().mean().item()


def _is_field(real: SampleSet) -> bool:
    return not real.is_picture


def _has_increments(real: SampleSet) -> bool:
    return _is_field(real) and bool(real.long_axes)


METRICS: dict[str, Metric] = {
    # Only the distances of Inception's features may be called FID and KID, and each recipe's has a name of its own.
    "frechet": Metric(
        lambda real, generated: gaussian_distance(real.gaussian(), generated.gaussian()),
        label=lambda features: features.replace("inception", "FID") if features in RECIPES else f"FD-{features}",
        applies=_has_features,
    ),
    "kernel": Metric(
        _kernel,
        label=lambda features: features.replace("inception", "KID") if features in RECIPES else f"KID-{features}",
        applies=_has_features,
    ),
    "precision": Metric(
        lambda real, generated: share_with_error(generated.precision_recall(real).precision, generated.num_independent),
        higher_is_better=True,
        applies=_has_features,
    ),
    "recall": Metric(
        lambda real, generated: share_with_error(generated.precision_recall(real).recall, real.num_independent),
        higher_is_better=True,
        applies=_has_features,
    ),
    "spectrum": Metric(_spectrum(lambda real: [real.main_axes]), applies=lambda real: bool(real.main_axes)),
    "axis spectra": Metric(
        _spectrum(lambda real: [(axis,) for axis in real.long_axes]),
        applies=lambda real: _is_field(real) and len(real.long_axes) > 1 and not real.is_video,
    ),
    "time spectrum": Metric(_spectrum(lambda real: [(0,)]), applies=lambda real: real.is_video),
    "coherence": Metric(
        _coherence, applies=lambda real: _is_field(real) and real.num_channels > 1 and bool(real.main_axes)
    ),
    "values": Metric(_values(distances), applies=_is_field),
    "tails": Metric(_values(quantile_errors), applies=_is_field),
    "increments": Metric(_increments, applies=_has_increments),
    "flatness": Metric(_flatness, applies=_has_increments),
    "structure 2": Metric(_structure(2), applies=_has_increments),
    "structure 4": Metric(_structure(4), applies=_has_increments),
    "spread": Metric(_spread, applies=_is_field),
    "flicker": Metric(_flicker, applies=lambda real: real.is_video),
}
"""What ``nidiff evaluate`` measures. A metric of features applies to whatever has features; the spectrum applies to all
data; the others apply to data that are not 8-bit pictures, and are errors, of which 0 is best."""
