"""What generated data are compared with, and how: real pictures with their features, or real fields."""

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
from nidiff.covariance.waves import Boundary, boundary_per_axis
from nidiff.data.dataset import Dataset, quantise
from nidiff.data.grid import Grid
from nidiff.data.sources import take
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError
from nidiff.evaluation.arrays import as_fields, as_tensor
from nidiff.evaluation.cache import reference_features
from nidiff.evaluation.classifier import Classifier, fit_classifier
from nidiff.evaluation.features import FeatureNetwork, compute_features, load_features
from nidiff.evaluation.metrics import band_tables, check_bootstrap, measure, metrics_for, share_with_error
from nidiff.evaluation.real import RealData, real_source
from nidiff.evaluation.results import Measured, Result
from nidiff.evaluation.samples import SampleSet
from nidiff.generation.loaded_model import Model
from nidiff.recipe import check_whole
from nidiff.sealed import shaped, tensors_sha256
from nidiff.training.baseline import mean_cost

USUAL_FEATURES = "efficientnet-lite0"  # of pictures
RIGHT_CLASS = "right class"  # the share of images that the classifier gives the class asked for
FEWEST = 2  # items of a class, for a covariance


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Real data called ``name``, and the settings of the metrics that compare generated data with them."""

    items: Tensor
    """[N, C, *event]: uint8 if they are compared as 8-bit pictures, else floats in the units of the data."""
    name: str
    network: FeatureNetwork | None = None
    """For the metrics of features; pictures need one."""
    k: int = 3
    bootstrap: int = 20
    split: str = "train"
    grid: Grid | None = None
    scaling: Scaling | None = None
    """From the units of the data to those in which ``network`` takes floats."""
    boundary: tuple[str, ...] = ()
    """Of the spectra of data that are not pictures."""
    train: Dataset | None = None
    """What the model was trained on, if the real data are others."""
    labels: Tensor | None = None
    """The class of each item [N], where they have one."""
    classes: tuple[int, ...] = ()
    """Those that are compared; of pictures, each of them is measured by itself too."""
    classifier: Callable[[], Classifier] | None = field(default=None, repr=False)
    """Of all classes of the real images."""

    @property
    def is_picture(self) -> bool:
        return self.items.dtype == torch.uint8

    def of_classes(self, classes: Sequence[int]) -> "Evaluator":
        """The same with the real data of these classes only, if there are labels."""
        classes = tuple(sorted({*classes}))
        if self.labels is None or classes in ((), self.classes):
            return self
        for number in classes:
            if (count := int((self.labels == number).sum())) < FEWEST:
                problem = f"has {number}, and {self.name} has {count} items of it"
                raise InputError("classes", None, problem, "give data with more, or leave the class out")
        chosen, train, classifier = torch.tensor(classes), self.train, self.classifier
        if self.is_picture and classifier is None:
            classifier = cache(partial(fit_classifier, self.items, self.labels))
        if train is not None and train.labels is not None:
            train = take(train, torch.isin(train.labels, chosen).nonzero()[:, 0])
        rows = torch.isin(self.labels, chosen)
        parts: dict[str, Any] = {"items": self.items[rows], "labels": self.labels[rows], "train": train}
        return replace(self, classes=classes, classifier=classifier, **parts)

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        """Refuse items that cannot be compared, before they are drawn."""
        if tuple(self.items.shape[1:]) != tuple(shape):
            real, generated = (" × ".join(map(str, size)) for size in (self.items.shape[1:], shape))
            problem = f"has items {real} ({self.name}), and those to compare are {generated}"
            raise InputError("data", None, problem, "use the same shape")
        check_bootstrap(self.bootstrap)
        least = check_whole("k", self.k) + 1 if self.network else 2
        for argument, kind, count in (("data", "real", len(self.items)), ("seeds", "generated", num_generated)):
            if count < least:
                remedy = f"give {least} or more" + (", or lower `k`" if self.network else "")
                raise InputError(argument, None, f"gives {count} {kind} items, too few for the metrics", remedy)

    @cached_property
    def real(self) -> SampleSet:
        """The real data as the metrics take them; unusable ones are refused."""
        return self._samples(self.items, self.name)

    @property
    def metric_names(self) -> set[str]:
        """What will be measured; known before any features are computed."""
        example = self._set(self.items[:1], torch.zeros(1, 1) if self.network else None)
        return {*metrics_for(example), *([RIGHT_CLASS] if self.classifier else [])}

    @cached_property
    def _items_sha256(self) -> str:
        return tensors_sha256(shaped(self.items))

    def provenance(self, num_generated: int) -> dict[str, Any]:
        """Everything about the comparison that the numbers depend on."""
        about: dict[str, Any] = {}
        if self.network is not None:
            about = {"features": self.network.name, "features_sha256": self.network.sha256, "k": self.k}
            about |= {"preprocessing": self.network.preprocessing}
        if self.is_picture:
            about |= {"num_real": len(self.items), "quantisation": "uint8"}
        else:
            about |= {"num_items": len(self.items), "split": self.split, "boundary": "/".join(self.boundary)}
        about |= {"real": self.name, "real_sha256": self._items_sha256, "num_generated": num_generated}
        versions = {"nidiff": nidiff.__version__, "commit": _commit(), "torch": torch.__version__}
        return about | {"bootstrap": self.bootstrap} | versions

    def baseline(self, gaussian: GaussianModel, scaling: Scaling | None) -> dict[str, float]:
        """What (at most 2,048 of) the real data cost under the data's Gaussian, in the units of a model."""
        about: dict[str, Any] = {"scaling": scaling or self.scaling, "grid": self.grid}
        unit, value, _ = mean_cost(gaussian, Dataset(self.items, **about))
        return {f"gaussian_{unit}": value}

    def evaluate(
        self, asked: Result, generated: Tensor, features: Path | None = None, classes: Tensor | None = None
    ) -> Result:
        """``asked`` with the metrics of what was generated; features of pictures are kept in the folder ``features``.

        Details: of fields, the spectra in bands, and the same metrics of real data against real data; of pictures whose
        ``classes`` [N] are known, the metrics of each class, if the real ones have labels.
        """
        samples = self._samples(generated, "generated", features)
        metrics = measure(self.real, samples, bootstrap=self.bootstrap)
        if not self.is_picture:
            against = "the other half of the real data" if self.train is None else "training data"
            floor = {"floor": self._floor(len(generated)), "floor_of": against}
            return replace(asked, metrics=metrics, details=floor | {"bands": band_tables(self.real, samples)})
        if classes is None or self.classifier is None:
            return replace(asked, metrics=metrics)
        classifier = self.classifier()
        is_right = classifier.is_right(generated, classes)
        details = {"by_class": self._by_class(samples, classes, is_right), "classifier": classifier.accuracy}
        return replace(asked, metrics=metrics | {RIGHT_CLASS: _share(is_right)}, details=details)

    def _by_class(self, samples: SampleSet, classes: Tensor, is_right: Tensor) -> dict[str, Any]:
        """The Fréchet distance of each class, and the share of images of the right class."""
        by_class = {}
        for number in sorted({*classes.tolist()}):
            rows, real_rows = ((labels == number).nonzero()[:, 0] for labels in (classes, self.labels))
            pair = self.real.resampled(real_rows), samples.resampled(rows)
            enough = len(rows) >= FEWEST
            measured = measure(*pair, bootstrap=self.bootstrap, keys=["frechet"]) if enough else {}
            by_class[str(number)] = _as_json(measured | {RIGHT_CLASS: _share(is_right[rows])})
        return by_class

    def _floor(self, count: int) -> dict[str, Any]:
        """The metrics of real data against real data: ``count`` items of what the model was trained on, or of the real
        data one half against the other."""
        if count not in self._floors:
            if self.train is not None:
                pair = self.real, self._samples(all_items(self.train, min(count, len(self.train))), "training data")
            else:
                pair = self._samples(self.items[::2], self.name), self._samples(self.items[1::2], self.name)
            enough = min(map(len, pair)) > (self.k if self.network else 1)
            self._floors[count] = _as_json(measure(*pair, bootstrap=self.bootstrap)) if enough else {}
        return self._floors[count]

    @cached_property
    def _floors(self) -> dict[int, dict[str, Any]]:
        return {}

    def _samples(self, items: Tensor, name: str, folder: Path | None = None) -> SampleSet:
        network, features = self.network, None
        if network is not None and self.is_picture:
            features = reference_features(items, network, name=name, cache=folder).features
        elif network is not None:
            x = items.double() if self.scaling is None else self.scaling.to_model(items.double())
            features = compute_features(network, x.float())
        if network and features is not None and bool((features == features[0]).all()):
            raise InputError("features", network.name, f"are constant for the {name} items", "give items that differ")
        return self._set(items, features)

    def _set(self, items: Tensor, features: Tensor | None) -> SampleSet:
        name, boundary = self.network.name if self.network else "features", self.boundary or "periodic"
        return SampleSet(items, features, features_name=name, grid=self.grid, boundary=boundary, k=self.k)


def open_evaluator(
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
) -> Evaluator:
    """What to compare the samples of ``run`` with: the arguments are the flags of ``nidiff evaluate``.

    ``data`` may also be the data themselves; what it names is read as the data of the run. They are compared as
    pictures if the ``model`` makes 8-bit pictures, or without a model, if they are 8-bit pictures or a tensor
    [N, C, H, W] of uint8 or of floats in [-1, 1]; all others are compared as fields.
    """
    source, train = None, None
    values: Any = data
    if data is None or isinstance(data, str):
        source = real_source(run, data, data_dir, split=split, layout=layout)
        train = source.load(split or "train")
        values = train.data
    settings: dict[str, Any] = {"k": k, "bootstrap": bootstrap}
    if are_pictures(values, model):
        network = load_features(features or USUAL_FEATURES, file=features_file, trust=trust_features)
        items, labels = all_items(values, num_real, pictures=True), _labels(values, num_real)
        return Evaluator(items, train.name if train else "images", network, labels=labels, **settings)
    real = train or RealData(
        values if isinstance(values, Dataset) else Dataset(as_fields(values, "data")), "data", "given"
    )
    if source is not None and split is None:
        real = source.held_out(train)
    shape, denoiser = real.data.shape, None if model is None else model.denoiser
    edge = boundary or (source and source.experiment.boundary)
    if edge is None and denoiser is not None:
        edge = denoiser.process.covariance.spatial.boundary
    return Evaluator(
        all_items(real.data, num_real),
        real.name,
        None if features is None else load_features(features, shape=shape, trust=trust_features),
        split=real.split,
        grid=real.data.grid if model is None else model.grid,
        scaling=real.data.scaling if denoiser is None or denoiser.scaling is None else denoiser.scaling,
        boundary=boundary_per_axis(edge or "periodic", len(shape) - 1),
        train=train.data if train is not None and real is not train else None,
        labels=_labels(real.data, num_real),
        **settings,
    )


def are_pictures(data: Any, model: Model | None = None) -> bool:
    """Whether data are compared as 8-bit pictures."""
    grid = model.grid if model is not None else data.grid if isinstance(data, Dataset) else None
    if grid is not None:
        return grid.kind == "picture" and grid.dtype == "uint8"
    values = as_tensor(data, "data")
    return values.ndim == 4 and (values.dtype == torch.uint8 or not bool((values.abs() > 1).any()))


def all_items(data: Any, count: int | None = None, *, pictures: bool = False) -> Tensor:
    """Items [N, C, *event] in the units of the data, ``count`` of them, spread over all: uint8 as if they were saved if
    they are ``pictures``, else floats."""
    rows = _spread(len(data), count)
    items = as_fields(data.stored(rows) if isinstance(data, Dataset) else as_tensor(data, "data")[rows], "data")
    return quantise(items) if pictures else items.float()


def _labels(data: Any, count: int | None) -> Tensor | None:
    """The labels of the same items, where there are any."""
    labels = data.labels if isinstance(data, Dataset) else None
    return None if labels is None else labels[_spread(len(data), count)]


def _spread(total: int, count: int | None) -> Tensor:
    """All of so many rows, or ``count`` of them, spread."""
    if count is None:
        return torch.arange(total)
    count = check_whole("num_real", count, 1, total)
    return torch.linspace(0, total - 1, count, dtype=torch.float64).long()


def _share(is_right: Tensor) -> Measured:
    return Measured(*share_with_error(is_right.double().mean().item(), len(is_right)), higher_is_better=True)


def _as_json(metrics: dict[str, Measured]) -> dict[str, Any]:
    return {name: {"value": metric.finite, "error": metric.error} for name, metric in metrics.items()}


def _commit() -> str | None:
    """The commit of the checkout that nidiff runs from, marked where it was changed; None where it was installed."""
    root = Path(nidiff.__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
