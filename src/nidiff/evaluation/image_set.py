"""A set of images as the metrics see it."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from nidiff.evaluation.frechet import Moments, moments
from nidiff.evaluation.precision_recall import PrecisionRecall, precision_recall
from nidiff.evaluation.spectrum import radial_powers
from nidiff.progress import progress_bar


@dataclass(eq=False)
class ImageSet:
    """Images and their features; what several metrics need is computed when it is first asked for, and once."""

    pixels: Tensor
    """uint8 [N, C, H, W]."""
    features: Tensor
    """[N, D]."""
    k: int = 3
    """For precision and recall: the neighbour whose distance decides what is near an image."""
    _near: "dict[ImageSet, PrecisionRecall]" = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.features)

    def resampled(self, rows: Tensor) -> "ImageSet":
        """The images of ``rows``."""
        drawn = ImageSet(self.pixels[rows], self.features[rows], self.k)
        drawn.powers = self.powers[rows]
        return drawn

    @cached_property
    def moments(self) -> Moments:
        """Mean and covariance of the features."""
        return moments(self.features)

    @cached_property
    def powers(self) -> Tensor:
        """The radial power spectrum of each image, float64 [N, K]."""
        return radial_powers(self.pixels)

    def near(self, real: "ImageSet") -> PrecisionRecall:
        """Precision and recall of these images against ``real`` ones: two metrics from one pass over the pairs."""
        if real not in self._near:
            with progress_bar("precision and recall", "pairs") as progress:
                self._near[real] = precision_recall(real.features, self.features, self.k, progress=progress)
        return self._near[real]
