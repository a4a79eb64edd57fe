"""A set of images as the metrics see it."""

from functools import cached_property

from torch import Tensor

from nidiff.evaluation.frechet import Moments, moments
from nidiff.evaluation.precision_recall import PrecisionRecall, precision_recall
from nidiff.evaluation.spectrum import radial_powers
from nidiff.progress import progress_bar


class ImageSet:
    """Images (``pixels``, uint8 [N, C, H, W]) and their ``features`` [N, D].

    What several metrics need, or one needs for every resample, is computed when it is first asked for, and once.
    ``k`` is the neighbour whose distance decides what is near an image, for precision and recall.
    """

    def __init__(self, pixels: Tensor, features: Tensor, k: int = 3) -> None:
        self.k = k
        self._pixels, self._features = pixels, features
        self._rows: Tensor | None = None  # of a resample, in the set ``_whole``
        self._whole = self
        self._near: dict[ImageSet, PrecisionRecall] = {}

    def resampled(self, rows: Tensor) -> "ImageSet":
        """The images of ``rows``; nothing is copied before it is asked for."""
        drawn = ImageSet(self._pixels, self._features, self.k)
        drawn._whole, drawn._rows = self._whole, rows if self._rows is None else self._rows[rows]
        return drawn

    def __len__(self) -> int:
        return len(self._features if self._rows is None else self._rows)

    @property
    def pixels(self) -> Tensor:
        return self._pixels if self._rows is None else self._pixels[self._rows]

    @property
    def features(self) -> Tensor:
        return self._features if self._rows is None else self._features[self._rows]

    @cached_property
    def moments(self) -> Moments:
        """Mean and covariance of the features."""
        return moments(self.features)

    @cached_property
    def powers(self) -> Tensor:
        """The radial power spectrum of each image, float64 [N, K]."""
        return radial_powers(self.pixels) if self._rows is None else self._whole.powers[self._rows]

    def near(self, real: "ImageSet") -> PrecisionRecall:
        """Precision and recall of these images against ``real`` ones: two metrics from one pass over the pairs."""
        if real not in self._near:
            with progress_bar("precision and recall", "pairs") as progress:
                self._near[real] = precision_recall(real.features, self.features, self.k, progress=progress)
        return self._near[real]
