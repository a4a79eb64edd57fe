"""What generated images are compared with, and how: one place for the numbers and for where they come from."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nidiff
from nidiff.errors import InputError
from nidiff.evaluation.cache import pixels_sha256, reference_features
from nidiff.evaluation.features import FeatureNetwork
from nidiff.evaluation.measure import Sample, check_counts, check_varied, measure
from nidiff.evaluation.provenance import commit
from nidiff.evaluation.results import Result

VERSIONS = ("nidiff", "commit", "torch")  # they do not decide whether a result must be computed again


@dataclass(frozen=True)
class Bench:
    """Real images (uint8 [N, C, H, W]) called ``name``, and the settings of the metrics."""

    pixels: Tensor
    name: str
    network: FeatureNetwork
    k: int = 3
    bootstrap: int = 20
    cache: Path | None = None

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        """Refuse images that cannot be compared, before they are drawn."""
        if tuple(self.pixels.shape[1:]) != tuple(shape):
            raise InputError(
                f"the images to compare are {_size(shape)} and those of {self.name} {_size(self.pixels.shape[1:])}: "
                "give data of that shape."
            )
        if self.bootstrap < 0 or self.bootstrap == 1:
            raise InputError(f"bootstrap={self.bootstrap} gives no error: use 2 resamples or more, or 0 for none.")
        check_counts(len(self.pixels), num_generated, self.k)

    @cached_property
    def real(self) -> Sample:
        found = reference_features(self.pixels, self.network, name=self.name, cache=self.cache)
        check_varied(found.features, "real")
        return Sample(self.pixels, found.features)

    @cached_property
    def _data_sha256(self) -> str:
        return pixels_sha256(self.pixels)

    def provenance(self, num_generated: int) -> dict[str, Any]:
        return {
            "features": self.network.name,
            "features_sha256": self.network.sha256,
            "preprocessing": self.network.preprocessing,
            "real": self.name,
            "real_sha256": self._data_sha256,
            "num_real": len(self.pixels),
            "num_generated": num_generated,
            "k": self.k,
            "bootstrap": self.bootstrap,
            "quantisation": "uint8",
            "nidiff": nidiff.__version__,
            "commit": commit(),
            "torch": torch.__version__,
        }

    def metrics(self, generated: Tensor, features: Path | None) -> dict[str, Any]:
        """The metrics of uint8 images; their features are kept in the folder ``features``."""
        found = reference_features(generated, self.network, name="generated", cache=features)
        generated_set = Sample(generated, found.features)
        measured = measure(self.real, generated_set, self.network, k=self.k, bootstrap=self.bootstrap)
        return {name: one._asdict() for name, one in measured.items()}


def same_question(one: Result, other: Result) -> bool:
    """Whether two results answer the same question, whatever versions answered it and the name of the run."""

    def question(result: Result) -> dict[str, Any]:
        provenance = {k: v for k, v in result["provenance"].items() if k not in VERSIONS}
        return {**result, "provenance": provenance, "metrics": None, "run": None}

    return question(one) == question(other)


def _size(shape: tuple[int, ...] | torch.Size) -> str:
    return " × ".join(map(str, shape))
