"""Mean, spread and range of the numbers of each channel, a block at a time."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RunningMoments:
    """Count, mean and spread of the finite numbers of each channel, and their smallest and largest, in float64.

    Blocks are joined by Chan's formula: M2 = M2a + M2b + (mean_b − mean_a)² n_a n_b / n, which never subtracts two
    large sums of squares.
    """

    def __init__(self, channels: int) -> None:
        self.count, self.mean, self.squares = np.zeros((3, channels))
        self.low, self.high = np.full(channels, np.inf), np.full(channels, -np.inf)

    def add(self, block: "NDArray[np.float64]") -> None:
        """Join a block [C, M]."""
        known = np.isfinite(block)
        low = high = block
        count = np.full(len(block), float(block.shape[1]))
        if not known.all():
            count = known.sum(1).astype(np.float64)
            low, high = np.where(known, block, np.inf), np.where(known, block, -np.inf)
            block = np.where(known, block, 0.0)
        mean = block.sum(1) / np.maximum(count, 1)
        off = (block - mean[:, None]) * known
        total, gap = np.maximum(self.count + count, 1), mean - self.mean
        self.squares += np.einsum("cm,cm->c", off, off) + gap**2 * self.count * count / total
        self.mean += gap * count / total
        self.count += count
        self.low, self.high = np.minimum(self.low, low.min(1)), np.maximum(self.high, high.max(1))

    @property
    def deviation(self) -> "NDArray[np.float64]":
        """The root of the mean square about the mean, as of `numpy.std`."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))


class PointMoments:
    """Count and mean of the finite numbers at each of ``size`` points in each phase of the year, and the sum of squares
    about these means, in one pass and in float64."""

    def __init__(self, num_phases: int, size: int) -> None:
        self.count = np.zeros((num_phases, size), dtype=np.int32)
        self.mean = np.zeros((num_phases, size))
        self.squares = np.zeros(size)

    def add(self, block: "NDArray[np.float64]", phases: "NDArray[np.int64]") -> None:
        """Join items [B, size], each of a phase."""
        for phase in np.unique(phases):
            part = block[phases == phase]
            known = np.isfinite(part)
            part, count = np.where(known, part, 0.0), known.sum(0)
            mean = part.sum(0) / np.maximum(count, 1)
            off, gap = (part - mean) * known, mean - self.mean[phase]
            total = np.maximum(self.count[phase] + count, 1)
            self.squares += np.einsum("nm,nm->m", off, off) + gap**2 * self.count[phase] * count / total
            self.mean[phase] += gap * count / total
            self.count[phase] += count.astype(np.int32)

    def about(self, means: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """The variance [size] about other ``means`` [phases, size]; NaN at points without numbers."""
        off = np.where(self.count > 0, self.mean - means, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (self.squares + np.einsum("pm,pm->m", self.count, off**2)) / self.count.sum(0)

    def known(self) -> "NDArray[np.float64]":
        """The means; where a phase has no numbers at a point, the mean of the other phases there, and NaN if the phase
        has no numbers at all, or the point has none."""
        with np.errstate(invalid="ignore"):
            whole = np.einsum("pm,pm->m", self.count, self.mean) / self.count.sum(0)
        means = np.where(self.count > 0, self.mean, whole)
        means[(self.count == 0).all(1)] = np.nan
        return means
