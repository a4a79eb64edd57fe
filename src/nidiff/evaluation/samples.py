"""A set of items, real or generated, and what the metrics need of each item: computed once."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.waves import Boundary, boundary_per_axis
from nidiff.data.grid import Grid
from nidiff.evaluation.distributions import by_channel, deviations, increments, pair_weights, structure_function
from nidiff.evaluation.frechet import FeatureGaussian, feature_gaussian
from nidiff.evaluation.order import effective_number
from nidiff.evaluation.precision_recall import PrecisionRecall, precision_recall
from nidiff.evaluation.spectrum import Shells
from nidiff.progress import progress_bar
from nidiff.randomness import permutation

COLUMNS = 256  # pixels, at most, whose values say how much neighbouring items are alike
VALUES = 1024  # pixels of an item, at most, whose values the distributions are made of


class SampleSet:
    """Items [N, C, *event]: uint8 if they are pictures, else in the units of the data; and their features [N, D].

    What several metrics need is computed when it is first asked for, and once, also for the resamples of the bootstrap.
    """

    def __init__(
        self,
        items: Tensor,
        features: Tensor | None = None,
        features_name: str = "features",
        *,
        grid: Grid | None = None,
        boundary: Boundary = "periodic",
        k: int = 3,
        ordered: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        self.features: Any = features
        self.ordered = ordered  # whether neighbouring items may be alike
        self.features_name, self.k = features_name, k
        self.is_picture = items.dtype == torch.uint8
        self.num_channels, self.event = items.shape[1], tuple(items.shape[2:])
        self.grid = grid or Grid.usual(items.shape[1:])
        self.grid.check(items.shape[1:])
        self.boundary = boundary_per_axis(boundary, len(self.event))
        self.weights = weights  # [*event], how much a point counts where its place does; spectra have none
        self._all, self._rows = items, torch.arange(len(items))
        self._by_item: dict[Any, Tensor] = {}  # of all items, also of those that a resample has not
        self._of_set: dict[Any, Any] = {}
        self._shells: dict[tuple[int, ...], Shells] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def items(self) -> Tensor:
        """[N, C, *event]."""
        return self._all[self._rows]

    def resampled(self, rows: Tensor) -> "SampleSet":
        """The items of ``rows``."""
        drawn = copy(self)
        drawn.features = None if self.features is None else self.features[rows]
        drawn._rows, drawn._of_set = self._rows[rows], {}
        return drawn

    @property
    def num_independent(self) -> float:
        """How many independent items these are worth: fewer if they follow each other, as the values of some pixels
        say."""

        def compute() -> float:
            values = self.by_item("values", self._some).flatten(1)
            return effective_number(values[:, :: 1 + values.shape[1] // COLUMNS], pooled=True).item()

        return self.of_set("independent", compute) if self.ordered else len(self)

    # Features

    def gaussian(self) -> FeatureGaussian:
        """The mean and the covariance of the features."""
        return self.of_set("gaussian", lambda: feature_gaussian(self.features))

    def precision_recall(self, real: "SampleSet") -> PrecisionRecall:
        """Precision and recall of these items against ``real`` ones: two metrics from one pass over the pairs."""

        def compute() -> PrecisionRecall:
            with progress_bar("precision and recall", "pairs") as progress:
                return precision_recall(real.features, self.features, self.k, progress=progress)

        return self.of_set(("precision and recall", real), compute)

    # Spectra

    @property
    def is_video(self) -> bool:
        return self.grid.kind == "video" and self.event[0] > 1

    @property
    def long_axes(self) -> list[int]:
        """The axes of two pixels or more."""
        return [axis for axis, size in enumerate(self.event) if size > 1]

    @property
    def main_axes(self) -> tuple[int, ...]:
        """The axes that |k| is made of: all of them, but not time; none if they have one pixel each."""
        axes = tuple(axis for axis in range(len(self.event)) if not (self.grid.kind == "video" and axis == 0))
        return axes if any(self.event[axis] > 1 for axis in axes) else ()

    def shells(self, axes: tuple[int, ...]) -> Shells:
        if axes not in self._shells:
            self._shells[axes] = Shells(self.event, axes, self.boundary)
        return self._shells[axes]

    def powers(self, axes: tuple[int, ...]) -> Tensor:
        """The power in bands of k along some axes, [N, C, B]."""
        shells = self.shells(axes)
        return self.by_item(("powers", axes), lambda x: shells.in_bands(shells.powers(x)))

    def crosses(self, axes: tuple[int, ...]) -> Tensor:
        """x̂_a x̂_b* of the pairs of channels in these bands, [N, P, B]."""
        return self.by_item(("crosses", axes), self.shells(axes).crosses)

    # Distributions

    def sorted_values(self) -> Tensor:
        """The values of some pixels of each channel, rising, [C, N V]."""
        return self.of_set("sorted", lambda: by_channel(self.by_item("values", self._some)))

    def sorted_increments(self, axis: int) -> Tensor:
        """The increments between neighbours along an axis, of some pixels, rising, [C, N V]."""
        pairs = None if self.weights is None else pair_weights(self.weights, axis, 1)
        some = self.by_item(("increments", axis), lambda x: _some(increments(x, axis, 1), pairs))
        return self.of_set(("sorted", axis), lambda: by_channel(some))

    def spread(self) -> Tensor:
        """How much the values of some pixels differ between items, [C]."""
        return self.of_set("spread", lambda: deviations(self.by_item("values", self._some)))

    def structure(self, order: int, axis: int) -> Tensor:
        """`structure_function`, [N, C, number of lags]."""
        return self.by_item(
            ("structure", order, axis), lambda x: structure_function(x, order, axis=axis, weights=self.weights)
        )

    def _some(self, x: Tensor) -> Tensor:
        return _some(x, self.weights)

    def by_item(self, key: Any, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``compute`` returns for the items, [N, ...], computed once under the name ``key``."""
        if key not in self._by_item:
            self._by_item[key] = compute(self._all)
        return self._by_item[key][self._rows]

    def of_set(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns for the set, computed once under the name ``key``."""
        if key not in self._of_set:
            self._of_set[key] = compute()
        return self._of_set[key]


def _some(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """The same pixels of every item, chosen at random if they are many; with ``weights`` [*event], each as often as its
    weight says."""
    flat = x.flatten(2)
    if weights is not None:
        order = permutation(flat.shape[2], torch.Generator().manual_seed(0))
        share = weights.flatten()[order].double().cumsum(0)
        ends = (torch.arange(VALUES, dtype=torch.float64) + 0.5) / VALUES * share[-1]
        return flat[:, :, order[torch.searchsorted(share, ends)].to(flat.device)].double().cpu()
    if flat.shape[2] <= VALUES:
        return flat.double().cpu()
    chosen = permutation(flat.shape[2], torch.Generator().manual_seed(0))[:VALUES].sort().values
    return flat[:, :, chosen.to(flat.device)].double().cpu()
