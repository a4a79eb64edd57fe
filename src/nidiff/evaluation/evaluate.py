"""The quality of samples: those of one model with one sampler and number of steps, or data that are there already."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nidiff.data.coordinates import needs_times
from nidiff.data.dataset import Dataset
from nidiff.errors import InputError
from nidiff.evaluation.evaluator import Evaluator, open_evaluator, spread_items
from nidiff.evaluation.order import is_ordered
from nidiff.evaluation.results import Result, known_results, remember
from nidiff.files import as_path
from nidiff.generation.conditioning import rows_of_seeds
from nidiff.generation.folder import SampleFolder, run_job
from nidiff.generation.job import plan_job
from nidiff.generation.loaded_model import Model, open_model, process_state
from nidiff.notation import seeds_text

if TYPE_CHECKING:
    from numpy.typing import NDArray


def evaluate_cell(
    model: Model | Path | str,
    data: Evaluator | Dataset | Tensor | str | None = None,
    *,
    sampler: str | None = None,
    num_steps: int | None = None,
    seeds: Sequence[int] = range(1000),
    clip: float | None = None,
    batch: int = 128,
    tile: int | None = None,
    precision: str = "fp32",
    classes: Sequence[int] | None = None,
    guidance: float | None = None,
    guidance_interval: Sequence[float] | None = None,
    condition: Path | None = None,
    **settings: Any,
) -> Result | None:
    """Draw the items of ``seeds`` and compare them with real ones, as ``nidiff evaluate`` does.

    Results are kept in the run's metrics.json and images in its generated/: what is there is not computed again.
    Under torchrun or accelerate launch all processes draw, and the main one has the result.

    Args:
        model: a run directory, a model folder, or the name of a model that ships, whose results go to out/NAME.
        data: the real data: an `Evaluator`, or what `open_evaluator` takes, whose other arguments go in ``settings``
            (``features``, ``num_real``, ``k``, …). Default: what the run was trained on.
        sampler: NAME:key=value,…; by default that which the run was trained with or, of a model that ships, that of
            its picture. ``clip``, ``batch``, ``tile``, ``precision``, ``guidance`` and ``condition`` are those of
            ``nidiff sample``.
            Conditions that are times, such as the month, are those of the real items in turn.
        classes: those of the seeds in turn; by default all that the model was trained with. They are compared with
            real items of these classes, where the data have labels, and pictures of each class are measured too.
    """
    state, seeds = process_state(), sorted({*map(int, seeds)})
    model = model if isinstance(model, Model) else open_model(as_path("model", model), state)
    if model.grid.condition is not None and needs_times(model.grid.condition):  # seeds have those of the real items
        data = data if isinstance(data, Evaluator) else open_evaluator(model.path, data, model=model, **settings)
        model = model._replace(times=data.data.times)
    conditions: dict[str, Any] = {"guidance": guidance, "guidance_interval": guidance_interval, "condition": condition}
    job = plan_job(model, sampler, num_steps, clip=clip, tile=tile, precision=precision, classes=classes, **conditions)
    evaluator = data if isinstance(data, Evaluator) else open_evaluator(model.path, data, model=model, **settings)
    evaluator = evaluator.of_classes(job.conditioning.classes)
    evaluator.check(model.shape, len(seeds))
    compared = evaluator.provenance(len(seeds))
    provenance = compared | {"model_sha256": model.sha256, "tile": job.tile}
    provenance |= {"drawn_in": job.precision} if job.precision != "fp32" else {}
    settled = (job.sampler, job.num_steps, job.spacing, job.options | job.conditioning.labels, seeds_text(seeds))
    asked = Result(model.name, *settled, job.clip, provenance=provenance)
    for known in known_results(model.home, model.sha256):
        # A metric may have been added since, and errors of items that follow each other.
        is_whole = known.metrics.keys() >= evaluator.metric_names and (
            "items" in known.details or not evaluator.is_ordered
        )
        if known.question == asked.question and is_whole:
            return replace(known, run=model.name) if state.is_main_process else None
        if "floor" in known.details and compared.items() <= known.provenance.items():
            evaluator.floors[len(seeds)] = dict(known.details["floor"])
    if state.is_main_process:
        _ = evaluator.real  # unusable real data or features are refused before hours of drawing
    folder = SampleFolder(model.home / "generated" / job.name, job, model.shape, grid=model.grid)
    title = f"{model.name}, {job.sampler} {job.num_steps}"
    run_job(model.denoiser, folder, seeds, batch=batch, state=state, title=title)
    result = None
    if state.is_main_process:
        asked_for = job.conditioning.classes
        drawn = rows_of_seeds(torch.tensor(asked_for), seeds) if asked_for else None
        result = evaluator.evaluate(asked, folder.read(seeds), folder.path / "features", drawn)
        remember(model.home, result)
    state.wait_for_everyone()
    return result


def evaluate_images(
    images: Dataset | Tensor,
    data: Evaluator | Dataset | Tensor | str | None = None,
    *,
    name: str = "images",
    classes: "Sequence[int] | NDArray[Any] | Tensor | None" = None,
    **settings: Any,
) -> Result | None:
    """Compare images or fields that are there already; the arguments are those of `evaluate_cell`, and nothing is kept.

    ``classes`` are those of the images, one for each.
    """
    evaluator = data if isinstance(data, Evaluator) else open_evaluator(as_path("name", name), data, **settings)
    generated: Any = spread_items(images, pictures=evaluator.is_picture).values
    labels = None if classes is None else torch.as_tensor(classes)
    if labels is not None:
        if labels.shape != (len(generated),):
            problem = f"has shape {tuple(labels.shape)} for {len(generated)} images"
            raise InputError("classes", None, problem, "give one for each")
        evaluator = evaluator.of_classes(labels.tolist())
    evaluator.check(tuple(generated.shape[1:]), len(generated))
    if not process_state().is_main_process:
        return None
    clip = 1.0 if evaluator.is_picture else None  # nothing was drawn; 1.0 is what tables leave out
    asked = Result(name, "-", 0, clip=clip, provenance=evaluator.provenance(len(generated)))
    return evaluator.evaluate(asked, generated, classes=labels, ordered=is_ordered(images))
