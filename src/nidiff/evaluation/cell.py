"""One cell of the table: the quality of one model's samples with one sampler and number of steps."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nidiff
from nidiff.data.dataset import Dataset, quantise
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.errors import InputError
from nidiff.evaluation.cache import pixels_sha256, reference_features
from nidiff.evaluation.features import FeatureNetwork, load_features
from nidiff.evaluation.metrics import ImageSet, by_label, measure
from nidiff.evaluation.points import as_tensor
from nidiff.evaluation.results import Measured, Result, known_results, remember
from nidiff.files import as_path
from nidiff.generation.folder import SampleFolder
from nidiff.generation.job import run_job
from nidiff.generation.opened import (
    Model,
    cell_name,
    checked_seeds,
    open_model,
    plan_job,
    process_state,
    seeds_text,
)
from nidiff.recipe import check_whole
from nidiff.sampling.sampler import DEFAULT
from nidiff.training.baseline import mean_bits
from nidiff.training.experiment import Experiment, read_experiment


@dataclass(frozen=True)
class Bench:
    """Real images (uint8 [N, C, H, W]) called ``name``, and the settings of the metrics."""

    pixels: Tensor
    name: str
    network: FeatureNetwork
    k: int = 3
    bootstrap: int = 20

    def check(self, shape: tuple[int, ...], num_generated: int) -> None:
        """Refuse images that cannot be compared, before they are drawn."""
        mine, other = (" × ".join(map(str, one)) for one in (self.pixels.shape[1:], shape))
        if mine != other:
            raise InputError(f"the images to compare are {other} and those of {self.name} {mine}: use the same shape.")
        if check_whole("bootstrap", self.bootstrap, 0) == 1:
            raise InputError("bootstrap=1 gives no error: use 2 resamples or more, or 0 for none.")
        check_whole("k", self.k)
        for which, count in (("real", len(self.pixels)), ("generated", num_generated)):
            if count <= self.k:
                raise InputError(f"there are {count} {which} images, and k={self.k} needs k + 1: add some, or lower k.")

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
            "nidiff": nidiff.__version__,
            "commit": _commit(),
            "torch": torch.__version__,
        }

    def bits_per_dim(self, gaussian: GaussianModel, scaling: Scaling | None) -> float:
        """Of (at most 2,048 of) the real images under the data's Gaussian, in the units of a model: the baseline."""
        units = scaling or PIXELS
        return mean_bits(gaussian, len(self.pixels), lambda rows: units.to_model(self.pixels[rows]), units)[0]

    def measure(self, generated: Tensor, features: Path | None = None) -> dict[str, Measured]:
        """The metrics of uint8 images; their features are kept in the folder ``features``."""
        images = self._images(generated, "generated", features)
        return measure(self.real, images, self.network.name, bootstrap=self.bootstrap)

    def _images(self, pixels: Tensor, name: str, cache: Path | None = None) -> ImageSet:
        features = reference_features(pixels, self.network, name=name, cache=cache).features
        if bool((features == features[0]).all()):
            raise InputError(f"the features of the {name} images are constant: give images that differ.")
        return ImageSet(pixels, features, self.k)


def evaluate_cell(
    model: Model | Path | str,
    data: Bench | Dataset | Tensor | str | None = None,
    *,
    sampler: str = DEFAULT,
    num_steps: int | None = None,
    seeds: Sequence[int] = range(1000),
    clip: float | None = None,
    batch: int = 128,
    tile: int | None = None,
    **settings: Any,
) -> Result | None:
    """Draw the images of ``seeds`` and compare them with real ones, as ``nidiff evaluate`` does.

    Results are kept in the run's metrics.json and images in its generated/: what is there is not computed again.
    Under torchrun or accelerate launch all processes draw, and the main one has the result.

    Args:
        model: a run directory or a model folder.
        data: the real images: a `Bench`, or what `open_bench` takes, whose other arguments go in ``settings``
            (``features``, ``num_real``, ``k``, …). Default: what the run was trained on.
        sampler: NAME:key=value,…
        clip: as in ``nidiff sample``, and so are ``batch`` and ``tile``.
    """
    state, seeds = process_state(), checked_seeds(seeds)
    model = model if isinstance(model, Model) else open_model(as_path("model", model), state)
    job = plan_job(model, sampler, num_steps, clip=clip, tile=tile)
    bench = data if isinstance(data, Bench) else open_bench(model.path, data, **settings)
    bench.check(model.shape, len(seeds))
    provenance = bench.provenance(len(seeds)) | {"model_sha256": model.sha256, "tile": job.tile}
    if model.denoiser.gaussian is not None:
        provenance["gaussian_bits_per_dim"] = bench.bits_per_dim(model.denoiser.gaussian, model.denoiser.scaling)
    settled = (job.sampler, job.num_steps, job.spacing, job.options, seeds_text(seeds), job.clip)
    asked = Result(model.name, *settled, provenance=provenance)
    for known in known_results(model.path, model.sha256):
        # A metric may have been added since.
        if known.question == asked.question and known.metrics.keys() >= by_label(bench.network.name).keys():
            return replace(known, run=model.name) if state.is_main_process else None
    if state.is_main_process:
        _ = bench.real  # unusable real images or features are refused before hours of drawing
    folder = SampleFolder(model.path / "generated" / cell_name(job), job, model.shape, grid=model.grid)
    title = f"{model.name}, {job.sampler} {job.num_steps}"
    run_job(model.denoiser, folder, seeds, batch=batch, state=state, title=title)
    result = None
    if state.is_main_process:
        result = replace(asked, metrics=bench.measure(folder.read(seeds), folder.path / "features"))
        remember(model.path, result)
    state.wait_for_everyone()
    return result


def evaluate_images(
    images: Dataset | Tensor,
    data: Bench | Dataset | Tensor | str | None = None,
    *,
    name: str = "images",
    **settings: Any,
) -> Result | None:
    """Compare images that are there already; the arguments are those of `evaluate_cell`, and nothing is kept."""
    state, generated = process_state(), _all_pixels(images)
    bench = data if isinstance(data, Bench) else open_bench(as_path("name", name), data, **settings)
    bench.check(tuple(generated.shape[1:]), len(generated))
    if not state.is_main_process:
        return None
    return Result(name, "-", 0, metrics=bench.measure(generated), provenance=bench.provenance(len(generated)))


def open_bench(
    run: Path,
    data: str | Dataset | Tensor | None = None,
    *,
    data_dir: Path | None = None,
    split: str = "train",
    num_real: int | None = None,
    features: str | Path = "efficientnet-lite0",
    features_file: Path | None = None,
    trust_features: bool = False,
    k: int = 3,
    bootstrap: int = 20,
) -> Bench:
    """What to compare the images of ``run`` with: the arguments are the flags of ``nidiff evaluate``.

    ``data`` may also be images themselves, uint8 or floats in [-1, 1]; what it names is fitted as the data of the run.
    """
    network = load_features(features, file=features_file, trust=trust_features)
    images: Dataset | Tensor
    if data is None or isinstance(data, str):
        if data is not None:
            as_path("data", data)  # the name of a data set is a possible path too
        images, name = _load(as_path("run", run), data, data_dir, split)
    else:
        images, name = data, "images"
    pixels = _all_pixels(images)
    if num_real is not None:
        num_real = check_whole("num_real", num_real, 1, len(pixels))
        pixels = pixels[torch.linspace(0, len(pixels) - 1, num_real, dtype=torch.float64).long()]
    return Bench(pixels, name, network, k, bootstrap)


def _all_pixels(images: Any) -> Tensor:
    """Images as uint8 [N, C, H, W], as if they were saved."""
    pixels = as_tensor(images.stored(torch.arange(len(images))) if isinstance(images, Dataset) else images, "images")
    if pixels.ndim != 4 or pixels.numel() == 0:
        raise InputError(f"images has shape {tuple(pixels.shape)}: give images [N, C, H, W].")
    return quantise(pixels)


def _load(run: Path, data: str | None, data_dir: Path | None, split: str) -> tuple[Dataset, str]:
    source = read_experiment(run) if (run / "experiment.json").is_file() else None
    if source is None and data is None:
        raise InputError(f"data is missing: {str(run)!r} is not a run that says what it was trained on.")
    source = source or Experiment()
    if data is not None or data_dir is not None:
        source = replace(source, data=data or source.data, data_dir=data_dir)
    images = source.load_data(split=split, memory_limit=None)
    return images, source.data if split == "train" else f"{source.data}, {split}"


def _commit() -> str | None:
    """The commit of the checkout that nidiff runs from, marked where it was changed; None where it was installed."""
    root = Path(nidiff.__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
