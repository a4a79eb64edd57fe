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
