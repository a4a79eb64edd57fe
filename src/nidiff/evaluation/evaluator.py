"""What generated data are compared with, and how: real pictures with their features, or real fields."""

import math
import warnings
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
from nidiff.data.sources import spread_rows
from nidiff.data.weights import NONE, point_weights
from nidiff.errors import InputError
from nidiff.evaluation.arrays import as_fields
from nidiff.evaluation.classifier import Classifier, fit_classifier
from nidiff.evaluation.features import FeatureNetwork, compute_features, load_features, reference_features
from nidiff.evaluation.inception import DIMENSIONS, RECIPES
from nidiff.evaluation.metrics import band_tables, check_bootstrap, measure, metrics_for, share_with_error
from nidiff.evaluation.order import is_ordered
from nidiff.evaluation.real import HELD_OUT, RealData, real_source
from nidiff.evaluation.results import Measured, Result
from nidiff.evaluation.samples import SampleSet
from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import check_range
from nidiff.recipe import check_whole
from nidiff.sealed import shaped, tensors_sha256

USUAL_FEATURES = "efficientnet-lite0"  # of pictures
RIGHT_CLASS = "right class"  # the share of images that the classifier gives the class asked for
BEYOND, FEW = 16, 0.01  # floats so far from [-1, 1], and more of them than this, are no pictures in its units
FEWEST = 2  # items of a class, for a covariance


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Real data called ``name``, and the settings of the metrics that compare generated data with them."""

    data: Dataset
    """In memory: uint8 if they are compared as 8-bit pictures, else floats in the units of the data."""
    name: str
    network: FeatureNetwork | None = None
    """For the metrics of features; pictures need one."""
    k: int = 3
    bootstrap: int = 20
    split: str = "train"
    boundary: tuple[str, ...] = ()
    """Of the spectra of data that are not pictures."""
    weights: Tensor | None = None
    """How much a point counts, [*event], by the choice ``weighted``, and 0 outside of a domain."""
    weighted: str = NONE
    other: Dataset | None = None
    """The other part of the data, for real against real: what the model was trained on, or what was held out."""
    classes: tuple[int, ...] = ()
    """Those that are compared; of pictures, each of them is measured by itself too."""
    classifier: Callable[[], Classifier] | None = field(default=None, repr=False)
    """Of all classes of the real images."""
    floors: dict[int, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    """The metrics of so many real items in place of samples, where they are known."""

    @property
    def items(self) -> Tensor:
        """The real data [N, C, *event]."""
        return self.data.values  # type: ignore[return-value]

    @property
    def is_picture(self) -> bool:
        return self.items.dtype == torch.uint8

    def of_classes(self, classes: Sequence[int]) -> "Evaluator":
        """The same with the real data of these classes only, if there are labels."""
        classes, labels = tuple(sorted({*classes})), self.data.labels
        if labels is None or classes in ((), self.classes):
            return self
        if rare := [number for number in classes if (labels == number).sum() < FEWEST]:
            problem = f"has {rare[0]}, of which {self.name} has fewer than {FEWEST} items"
            raise InputError("classes", None, problem, "give data with more, or leave the class out")
        classifier = self.classifier
        if self.is_picture and classifier is None:
            classifier = cache(partial(fit_classifier, self.items, labels))
        other = None if self.other is None or self.other.labels is None else _of_classes(self.other, classes)
        return replace(self, data=_of_classes(self.data, classes), other=other, classes=classes, classifier=classifier)

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        """Refuse items that cannot be compared, before they are drawn."""
        if (real := tuple(self.items.shape[1:])) != tuple(shape):
            problem = f"has items {real} ({self.name}), and those to compare are {tuple(shape)}"
            raise InputError("data", None, problem, "use the same shape")
        check_bootstrap(self.bootstrap)
        least = check_whole("k", self.k) + 1 if self.network else 2
        for argument, kind, count in (("data", "real", len(self.items)), ("seeds", "generated", num_generated)):
            if count < least:
                remedy = f"give {least} or more" + (", or lower `k`" if self.network else "")
                raise InputError(argument, None, f"gives {count} {kind} items, too few for the metrics", remedy)
            if self.network and self.network.name in RECIPES and count <= DIMENSIONS:
                problem = f"FID from {count} {kind} images is far too large, for their covariance is singular"
                remedy = (
                    f"give more than {DIMENSIONS}, the number of features, or compare it with FID from as many only"
                )
                warnings.warn(f"{problem}: {remedy}.", stacklevel=2)

    @cached_property
    def real(self) -> SampleSet:
        """The real data as the metrics take them; unusable ones are refused."""
        return self._samples(self.items, self.name, ordered=self.is_ordered)

    @property
    def is_ordered(self) -> bool:
        """Whether the real items follow each other, so that neighbours may be alike."""
        return not self.is_picture and is_ordered(self.data)

    @cached_property
    def halves(self) -> tuple[SampleSet, SampleSet]:
        """The real data in two parts: blocks in turn, since of neighbours that are alike both halves would have one."""
        block = max(1, min(len(self.items) // 2, math.ceil(len(self.items) / self.real.num_independent)))
        half = torch.arange(len(self.items)) // block % 2
        first, second = (self.real.resampled((half == side).nonzero()[:, 0]) for side in (0, 1))
        return first, second

    @property
    def metric_names(self) -> set[str]:
        """What will be measured; known before any features are computed."""
        example = self.as_set(self.items[:1], torch.zeros(1, 1) if self.network else None)
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
            about |= {"weights": self.weighted} if self.weighted != NONE else {}
        about |= {"real": self.name, "real_sha256": self._items_sha256, "num_generated": num_generated}
        return about | {"bootstrap": self.bootstrap, "nidiff": nidiff.__version__, "torch": torch.__version__}

    def evaluate(
        self,
        asked: Result,
        generated: Tensor,
        features: Path | None = None,
        classes: Tensor | None = None,
        *,
        ordered: bool = False,
    ) -> Result:
        """``asked`` with the metrics of what was generated; features of pictures are kept in the folder ``features``.
        Samples of different seeds are independent; others may be ``ordered``.

        Details: the same metrics of real items in place of samples (of pictures, where as many are held out); of
        fields, the spectra in bands, and how many independent items the real and the generated ones are worth; of
        pictures whose ``classes`` [N] are known, the metrics of each class, if the real ones have labels.
        """
        samples = self._samples(generated, "generated", features, ordered and not self.is_picture)
        metrics = measure(self.real, samples, bootstrap=self.bootstrap)
        details: dict[str, Any] = {}
        if not self.is_picture or (self.other is not None and len(self.other) >= len(generated)):
            details = {"floor": self._floor(len(generated)), "floor_of": self._floor_of(len(generated))}
        if not self.is_picture:
            sides = {"real": self.real, "generated": samples}
            details |= {"items": {name: [len(side), side.num_independent] for name, side in sides.items()}}
            return replace(asked, metrics=metrics, details=details | {"bands": band_tables(self.real, samples)})
        if classes is None or self.classifier is None:
            return replace(asked, metrics=metrics, details=details)
        classifier = self.classifier()
        is_right = classifier.is_right(generated, classes)
        details |= {"by_class": self._by_class(samples, classes, is_right), "classifier": classifier.accuracy}
        return replace(asked, metrics=metrics | {RIGHT_CLASS: _share(is_right)}, details=details)

    def _by_class(self, samples: SampleSet, classes: Tensor, is_right: Tensor) -> dict[str, Any]:
        """The Fréchet distance of each class, and the share of images of the right class."""
        by_class = {}
        for number in sorted({*classes.tolist()}):
            rows, real_rows = ((labels == number).nonzero()[:, 0] for labels in (classes, self.data.labels))
            pair = self.real.resampled(real_rows), samples.resampled(rows)
            enough = len(rows) >= FEWEST
            measured = measure(*pair, bootstrap=self.bootstrap, keys=["frechet"]) if enough else {}
            measured |= {RIGHT_CLASS: _share(is_right[rows])}
            by_class[str(number)] = {name: metric.to_json() for name, metric in measured.items()}
        return by_class

    def _floor(self, count: int) -> dict[str, Any]:
        """The metrics of real data against real data: ``count`` items of the other part, or of the real data one half
        against the other."""
        if count not in self.floors:
            if self.other is not None:
                some = spread_items(self.other, min(count, len(self.other)), pictures=self.is_picture).values
                ordered = not self.is_picture and is_ordered(self.other)
                pair = self.real, self._samples(some, f"{self.name}, other part", ordered=ordered)
            else:
                pair = self.halves
            enough = min(map(len, pair)) > (self.k if self.network else 1)
            measured = measure(*pair, bootstrap=self.bootstrap) if enough else {}
            self.floors[count] = {name: metric.to_json() for name, metric in measured.items()}
        return self.floors[count]

    def _floor_of(self, count: int) -> str:
        if self.other is None:
            return "the other half of the real data"
        return f"{count} held-out images" if self.is_picture else "training data"

    def _samples(self, items: Any, name: str, folder: Path | None = None, ordered: bool = False) -> SampleSet:
        network = self.network
        if network is not None and self.is_picture:
            features: Tensor | None = reference_features(items, network, name=name, cache=folder).features
        else:
            features = self.features_of(items)
        if network and features is not None and bool((features == features[0]).all()):
            raise InputError("features", network.name, f"are constant for the {name} items", "give items that differ")
        return self.as_set(items, features, ordered)

    def features_of(self, items: Tensor) -> Tensor | None:
        """The features of items in the units of the data, where features are compared; nothing is stored."""
        if self.network is None:
            return None
        seen = items if self.is_picture else self.data.scaling.to_model(items.double()).float()
        return compute_features(self.network, seen)

    def as_set(self, items: Tensor, features: Tensor | None, ordered: bool = False) -> SampleSet:
        """Items and their features as the metrics take them."""
        about: dict[str, Any] = {"grid": self.data.grid, "boundary": self.boundary or "periodic", "k": self.k}
        about |= {"ordered": ordered, "weights": self.weights}
        if (domain := self.data.scaling.domain) is not None:
            items = filled(items, domain, self.items)
        return SampleSet(items, features, self.network.name if self.network else "features", **about)


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
    weights: str = "none",
) -> Evaluator:
    """What to compare the samples of ``run`` with: the arguments are the flags of ``nidiff evaluate``.

    ``data`` may also be the data themselves; what it names is read as the data of the run. They are compared as
    pictures if the ``model`` makes 8-bit pictures, or without a model, if they are 8-bit pictures or a tensor
    [N, C, H, W] of uint8 or of floats in [-1, 1]; all others are compared as fields.
    """
    source, train = None, None
    scaling = None if model is None else model.denoiser.scaling
    fitted = {"scaling": scaling} if scaling is not None and scaling.is_per_pixel else {}  # anomalies are the model's
    values: Any = data
    if data is None or isinstance(data, str):
        source = real_source(run, data, data_dir, split=split, layout=layout, like=model and model.grid)
        train = source.load(split or "train", **fitted)
        values = train.data
    settings: dict[str, Any] = {"k": k, "bootstrap": bootstrap}
    if are_pictures(values, model):
        if weights != NONE:
            raise InputError("weights", weights, "has no meaning for pictures", "leave it out")
        network = load_features(features or USUAL_FEATURES, file=features_file, trust=trust_features)
        pictures = spread_items(values, num_real, pictures=True)
        other = source.held_out(train) if source is not None and split is None else None
        settings["other"] = None if other is None or other is train else other.data
        return Evaluator(pictures, train.name if train else "images", network, **settings)
    real = train or RealData(values, "data", "given")
    if source is not None and split is None:
        real = source.held_out(train, **fitted)
    items, edge = spread_items(real.data, num_real), boundary or (source and source.experiment.edges)
    if model is not None:
        items = replace(items, grid=model.grid, scaling=model.denoiser.scaling or items.scaling)
        if items.shape == model.shape:  # any other is refused later
            check_range(model, items.values, real.name)  # type: ignore[arg-type]  # in memory
        edge = edge or model.denoiser.process.covariance.spatial.boundary
    each = point_weights(weights, items.grid, items.shape, items.scaling.domain)
    settings |= {"weights": None if each is None else each.amin(0), "weighted": weights}
    return Evaluator(
        items,
        real.name,
        None if features is None else load_features(features, shape=items.shape, trust=trust_features),
        split=real.split,
        boundary=boundary_per_axis(edge or "periodic", len(items.shape) - 1),
        other=train.data if train is not None and real is not train else None,
        **settings,
    )


def open_held_out(model: Model, data: str | None = None, split: str | None = None, **settings: Any) -> Evaluator:
    """What `nidiff.metrics.tune` compares the samples of a model with: the held-out part of what it was trained on, or
    other ``data``. The arguments are those of `open_evaluator`; a run without a held-out part is refused."""
    split = split if split or data is not None else HELD_OUT
    try:
        evaluator = open_evaluator(model.path, data, model=model, split=split, **settings)
    except InputError as error:
        if split != HELD_OUT or error.argument not in ("split", "held_out"):
            raise
        problem = "holds nothing out, and what it was trained on cannot say how well it samples"
        raise InputError("model", model.path, problem, "give `data` that it has not seen") from error
    return evaluator


def are_pictures(data: Any, model: Model | None = None) -> bool:
    """Whether data are compared as 8-bit pictures."""
    grid = model.grid if model is not None else data.grid if isinstance(data, Dataset) else None
    if grid is not None:
        return grid.kind == "picture" and grid.dtype == "uint8"
    values = as_fields(data, "data")
    return values.ndim == 4 and (values.dtype == torch.uint8 or not bool((values.abs() > 1).any()))


def spread_items(data: Any, count: int | None = None, *, pictures: bool = False) -> Dataset:
    """Items of a data set or an array, ``count`` of them, spread over all, in memory and in the units of the data:
    uint8 as if they were saved if they are ``pictures``, else floats."""
    data = data if isinstance(data, Dataset) else Dataset(as_fields(data, "data"))
    rows = torch.arange(len(data))
    if count is not None:
        count = check_whole("num_real", count, 1, len(data))
        rows = spread_rows(len(data), count)
    items = _known_fields(data, rows)
    if pictures and items.is_floating_point() and (items.abs() > BEYOND).double().mean() > FEW:
        ends = f"go from {float(items.min()):.3g} to {float(items.max()):.3g}"
        warnings.warn(f"floats {ends} and are cut to [-1, 1], the range of pictures: give uint8.", stacklevel=2)
    floats = items if items.dtype == torch.float64 else items.float()
    return replace(data.take(rows), values=quantise(items) if pictures else floats)


def _known_fields(data: Dataset, rows: Tensor) -> Tensor:
    """Items as samples without times are, with the mean of their channel outside of the domain."""
    items, domain = data.compared(rows), data.scaling.domain
    if domain is not None:
        items = filled(items, domain, items)
    return as_fields(items, "data")


def filled(items: Tensor, domain: Tensor, like: Tensor) -> Tensor:
    """Items with the mean of each channel of others, inside of the domain, where they have no numbers."""
    inside = (like.double() * domain).nan_to_num(0.0).sum((0, *range(2, like.ndim)))
    count = len(like) * domain.flatten(1).sum(1)
    means = (inside / count).reshape(-1, *[1] * (like.ndim - 2)).to(items.dtype)
    return torch.where(domain, items, means)


def _of_classes(data: Dataset, classes: Sequence[int]) -> Dataset:
    """The items of some classes; all of them where there are no labels."""
    if data.labels is None:
        return data
    return data.take(torch.isin(data.labels, torch.tensor(classes)).nonzero()[:, 0])


def _share(is_right: Tensor) -> Measured:
    return Measured(*share_with_error(is_right.double().mean().item(), len(is_right)), higher_is_better=True)
