"""What generated data are compared with, and how: real pictures and their features, or real fields."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nidiff
from nidiff.covariance.spectral import Boundary, boundary_per_axis
from nidiff.data.dataset import Dataset, quantise
from nidiff.data.grid import Grid
from nidiff.data.sources import take
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.errors import InputError
from nidiff.evaluation.by_class import RIGHT, Classifier, check_classes, class_metrics, fit_classifier, share
from nidiff.evaluation.cache import pixels_sha256, reference_features
from nidiff.evaluation.features import FeatureNetwork, compute_features, load_features, load_field_features
from nidiff.evaluation.field_metrics import FieldSet, band_tables, field_metrics, measure_fields
from nidiff.evaluation.field_spectrum import as_fields
from nidiff.evaluation.metrics import ImageSet, by_label, check_bootstrap, measure
from nidiff.evaluation.points import as_tensor
from nidiff.evaluation.real import Real, real_data
from nidiff.evaluation.results import Measured, Result
from nidiff.generation.opened import Model
from nidiff.recipe import check_whole
from nidiff.training.baseline import mean_cost

CHUNK = 256  # items at a time


@dataclass(frozen=True)
class Bench:
    """Real images (uint8 [N, C, H, W]) called ``name``, and the settings of the metrics."""

    pixels: Tensor
    name: str
    network: FeatureNetwork
    k: int = 3
    bootstrap: int = 20
    classes: Tensor | None = None
    """[N], where the real images have them."""
    asked: tuple[int, ...] = ()
    """Those that are compared, each of which is then measured too."""
    classifier: Callable[[], Classifier] | None = field(default=None, repr=False)
    """Of all classes of the real images."""

    def of_classes(self, asked: Sequence[int]) -> "Bench":
        """The same with the real images of these classes only, if there are labels."""
        asked = tuple(sorted({*asked}))
        if self.classes is None or asked in ((), self.asked):
            return self
        check_classes(self.name, self.classes, asked)
        rows = torch.isin(self.classes, torch.tensor(asked))
        classifier = self.classifier or cache(partial(fit_classifier, self.pixels, self.classes))
        own: dict[str, Any] = {"pixels": self.pixels[rows], "classes": self.classes[rows], "classifier": classifier}
        return replace(self, asked=asked, **own)

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        """Refuse images that cannot be compared, before they are drawn."""
        mine, other = (" × ".join(map(str, one)) for one in (self.pixels.shape[1:], shape))
        if mine != other:
            raise InputError(f"the images to compare are {other} and those of {self.name} {mine}: use the same shape.")
        check_bootstrap(self.bootstrap)
        check_whole("k", self.k)
        for which, count in (("real", len(self.pixels)), ("generated", num_generated)):
            if count <= self.k:
                raise InputError(f"there are {count} {which} images, and k={self.k} needs k + 1: add some, or lower k.")

    @property
    def labels(self) -> set[str]:
        """The names of the metrics."""
        return {*by_label(self.network.name), *([RIGHT] if self.asked else [])}

    def prepare(self) -> None:
        """Compute what is needed of the real images, and refuse them if that cannot be."""
        _ = self.real

    @cached_property
    def real(self) -> ImageSet:
        return self._images(self.pixels, self.name)

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
            **_versions(),
        }

    def baseline(self, gaussian: GaussianModel, scaling: Scaling | None) -> dict[str, float]:
        """What (at most 2,048 of) the real images cost under the data's Gaussian, in the units of a model."""
        key, value, _ = mean_cost(gaussian, Dataset(self.pixels, scaling=scaling or PIXELS))
        return {f"gaussian_{key}": value}

    def measured(
        self, asked: Result, generated: Tensor, features: Path | None = None, classes: Tensor | None = None
    ) -> Result:
        """``asked`` with the metrics of what was generated; its features are kept in the folder ``features``.

        Where ``classes`` [N] were asked for and the real images have them, those of each class are in its details.
        """
        images = self._images(generated, "generated", features)
        metrics = measure(self.real, images, self.network.name, bootstrap=self.bootstrap)
        if classes is None or self.classes is None or self.classifier is None:
            return replace(asked, metrics=metrics)
        classifier = self.classifier()
        right, how = classifier.right(generated, classes), (self.network.name, self.bootstrap)
        each = class_metrics(self.real, self.classes, images, classes, right, *how)
        details = {"by_class": each, "classifier": classifier.accuracy}
        return replace(asked, metrics=metrics | {RIGHT: share(right)}, details=details)

    def _images(self, pixels: Tensor, name: str, cache: Path | None = None) -> ImageSet:
        features = reference_features(pixels, self.network, name=name, cache=cache).features
        if bool((features == features[0]).all()):
            raise InputError(f"the features of the {name} images are constant: give images that differ.")
        return ImageSet(pixels, features, self.k)


@dataclass(frozen=True, eq=False)
class FieldBench:
    """Real data [N, C, *event] in their own units that are no 8-bit pictures, and the settings of the metrics."""

    values: Tensor
    name: str
    split: str
    grid: Grid
    scaling: Scaling
    boundary: tuple[str, ...]
    network: FeatureNetwork | None = None
    bootstrap: int = 20
    train: Dataset | None = None
    """What the model was trained on, if the real data are others."""
    classes: Tensor | None = None
    """[N], where the real data have them."""
    asked: tuple[int, ...] = ()
    _floors: dict[int, dict[str, Measured]] = field(default_factory=dict, repr=False)

    def of_classes(self, asked: Sequence[int]) -> "FieldBench":
        """The same with the real data of these classes only, if there are labels."""
        asked = tuple(sorted({*asked}))
        if self.classes is None or asked in ((), self.asked):
            return self
        check_classes(self.name, self.classes, asked)
        chosen, train = torch.tensor(asked), self.train
        rows = torch.isin(self.classes, chosen)
        if train is not None and train.labels is not None:
            train = take(train, torch.isin(train.labels, chosen).nonzero()[:, 0])
        own: dict[str, Any] = {"values": self.values[rows], "classes": self.classes[rows], "train": train}
        return replace(self, asked=asked, _floors={}, **own)

    @property
    def labels(self) -> set[str]:
        return {*field_metrics(self.real)}

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        if tuple(self.values.shape[1:]) != shape:
            mine, other = (" × ".join(map(str, one)) for one in (self.values.shape[1:], shape))
            raise InputError(f"the items to compare are {other} and those of {self.name} {mine}: use the same shape.")
        check_bootstrap(self.bootstrap)
        for which, count in (("real", len(self.values)), ("generated", num_generated)):
            if count < 2:
                raise InputError(f"there is {count} {which} item, and metrics need 2 or more: add some.")

    def prepare(self) -> None:
        _ = self.real

    @cached_property
    def real(self) -> FieldSet:
        return self._set(self.values)

    @cached_property
    def _data_sha256(self) -> str:
        return _values_sha256(self.values)

    def provenance(self, num_generated: int) -> dict[str, Any]:
        features = {}
        if self.network is not None:
            features = {
                "features": self.network.name,
                "features_sha256": self.network.sha256,
                "preprocessing": self.network.preprocessing,
            }
        return {
            **features,
            "real": self.name,
            "split": self.split,
            "real_sha256": self._data_sha256,
            "num_items": len(self.values),
            "num_generated": num_generated,
            "boundary": "/".join(self.boundary),
            "bootstrap": self.bootstrap,
            **_versions(),
        }

    def baseline(self, gaussian: GaussianModel, scaling: Scaling | None) -> dict[str, float]:
        data = Dataset(self.values, scaling=scaling or self.scaling, grid=self.grid)
        key, value, _ = mean_cost(gaussian, data)
        return {f"gaussian_{key}": value}

    def measured(
        self, asked: Result, generated: Tensor, features: Path | None = None, classes: Tensor | None = None
    ) -> Result:
        found = self._set(generated)
        against = "the other half of the real data" if self.train is None else "training data"
        floor = {"floor": self.floor(len(generated)), "floor_of": against}
        details = floor | {"bands": band_tables(self.real, found)}
        return replace(asked, metrics=measure_fields(self.real, found, bootstrap=self.bootstrap), details=details)

    def floor(self, count: int) -> dict[str, Any]:
        """The metrics of real data against real data: ``count`` items of what the model was trained on, or of the
        real data one half against the other."""
        if count not in self._floors:
            if self.train is not None:
                pair = self.real, self._set(all_values(self.train, min(count, len(self.train))))
            else:
                pair = self._set(self.values[::2]), self._set(self.values[1::2])
            enough = min(map(len, pair)) > 1
            self._floors[count] = measure_fields(*pair, bootstrap=self.bootstrap) if enough else {}
        return {name: {"value": one.finite, "error": one.error} for name, one in self._floors[count].items()}

    def _set(self, values: Tensor) -> FieldSet:
        numbers, features = values.float(), None
        if self.network is not None:
            x = self.scaling.to_model(numbers.double()).float()
            features = compute_features(self.network, x)
        return FieldSet(numbers, self.grid, self.boundary, features, self.network.name if self.network else "")


def open_bench(
    run: Path,
    data: str | Dataset | Tensor | None = None,
    *,
    model: Model | None = None,
    data_dir: Path | None = None,
    split: str | None = None,
    num_real: int | None = None,
    features: str | Path | None = None,
    features_file: Path | None = None,
    trust_features: bool = False,
    k: int = 3,
    bootstrap: int = 20,
    boundary: Boundary | None = None,
    layout: str | None = None,
) -> Bench | FieldBench:
    """What to compare the samples of ``run`` with: the arguments are the flags of ``nidiff evaluate``.

    ``data`` may also be the data themselves; what it names is read as the data of the run. They are compared as
    pictures if the ``model`` makes 8-bit pictures, or without a model, if they are 8-bit pictures or a tensor
    [N, C, H, W] of uint8 or of floats in [-1, 1]; all others are compared as fields.
    """
    source = None
    if data is None or isinstance(data, str):
        source = real_data(run, data, data_dir, split=split, layout=layout)
    train = None if source is None else source.load(split or "train")
    given: Any = data if train is None else train.data
    if are_pictures(given, model):
        network = load_features(
            "efficientnet-lite0" if features is None else features, file=features_file, trust=trust_features
        )
        pixels = all_pixels(given)
        rows, name = _rows(len(pixels), num_real), train.name if train else "images"
        return Bench(pixels[rows], name, network, k, bootstrap, _classes(given, rows))
    real = train or Real(given if isinstance(given, Dataset) else Dataset(as_fields(given, "data")), "data", "given")
    if source is not None and split is None:
        real = source.held_out(train)
    shape, scaling = real.data.shape, None if model is None else model.denoiser.scaling
    own = None if model is None else model.denoiser.process.covariance.spatial.boundary
    return FieldBench(
        all_values(real.data, num_real),
        real.name,
        real.split,
        real.data.grid if model is None else model.grid,
        real.data.scaling if scaling is None else scaling,
        boundary_per_axis(boundary or (source and source.experiment.boundary) or own or "periodic", len(shape) - 1),
        None if features is None else load_field_features(features, shape, trust=trust_features),
        bootstrap,
        train.data if train is not None and real is not train else None,
        _classes(real.data, _rows(len(real.data), num_real)),
    )


def are_pictures(data: Any, model: Model | None = None) -> bool:
    """Whether data are compared as 8-bit pictures."""
    grid = model.grid if model is not None else data.grid if isinstance(data, Dataset) else None
    if grid is None:
        if getattr(data, "ndim", 4) != 4:
            return False
        values = as_tensor(data, "images")
        return values.dtype == torch.uint8 or not bool((values.abs() > 1).any())
    return grid.kind == "picture" and grid.dtype == "uint8"


def all_pixels(images: Any) -> Tensor:
    """Images as uint8 [N, C, H, W], as if they were saved."""
    pixels = as_tensor(images.stored(torch.arange(len(images))) if isinstance(images, Dataset) else images, "images")
    if pixels.ndim != 4 or pixels.numel() == 0:
        raise InputError(f"images has shape {tuple(pixels.shape)}: give images [N, C, H, W].")
    return quantise(pixels)


def all_values(data: Any, count: int | None = None) -> Tensor:
    """Fields [N, C, *event] as floats in the units of the data; ``count`` of them, spread over all."""
    if isinstance(data, Dataset):
        data = data.stored(_rows(len(data), count))
        count = None
    values = as_fields(data, "data")
    return values[_rows(len(values), count)].float()


def _classes(data: Any, rows: Tensor) -> Tensor | None:
    """The labels of some of the items, where there are any."""
    labels = data.labels if isinstance(data, Dataset) else None
    return None if labels is None else labels[rows]


def _rows(total: int, count: int | None) -> Tensor:
    """All of so many rows, or ``count`` of them, spread."""
    if count is None:
        return torch.arange(total)
    count = check_whole("num_real", count, 1, total)
    return torch.linspace(0, total - 1, count, dtype=torch.float64).long()


def _values_sha256(values: Tensor) -> str:
    """The checksum of the shape and of all values."""
    digest = hashlib.sha256(repr(tuple(values.shape)).encode())
    for part in values.split(CHUNK):
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _versions() -> dict[str, Any]:
    return {"nidiff": nidiff.__version__, "commit": _commit(), "torch": torch.__version__}


def _commit() -> str | None:
    """The commit of the checkout that nidiff runs from, marked where it was changed; None where it was installed."""
    root = Path(nidiff.__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
