"""What ``nidiff evaluate`` and ``nidiff table`` share: the flags about the real images and the metrics."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

if TYPE_CHECKING:
    from nidiff.evaluation.cell import Bench


@dataclass(frozen=True)
class Comparing:
    """Flags of every command that compares images with real ones."""

    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: what the run was trained on)")] = None
    """The real images: digits, fashion-mnist, cifar10, a folder of images, an .npy or .npz file, or hf:NAME."""
    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: found or downloaded)")] = None
    """Where the official files of a named data set are."""
    split: str = "train"
    """train or test, of a named data set."""
    num_real: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """Real images to compare with, spread over the data."""
    features: str = "efficientnet-lite0"
    """inception (only its distances are FID and KID), efficientnet-lite0, pixels, or a TorchScript .pt or exported .pt2
    file."""
    features_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: found or downloaded)")] = (
        None
    )
    """Where the weights of inception are."""
    k: int = 3
    """Precision and recall: the neighbour whose distance is the radius."""
    bootstrap: int = 20
    """Resamples of the generated images for the errors of the Fréchet distance and the spectrum; 0: no errors."""

    def bench(self, run: Path) -> "Bench":
        from nidiff.evaluation.cell import open_bench

        return open_bench(run, **vars(self))
