"""One cell of the table: the quality of one model's samples with one sampler and number of steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nidiff.data.images import Images
from nidiff.evaluation.bench import Bench, all_pixels, open_bench
from nidiff.evaluation.metrics import by_label
from nidiff.evaluation.results import Result, known_results, remember
from nidiff.generation.folder import SampleFolder
from nidiff.generation.job import run_job
from nidiff.generation.opened import Model, cell_name, open_model, plan_job, process_state, seeds_text


def evaluate_cell(
    model: Model | Path | str,
    data: Bench | Images | Tensor | str | None = None,
    *,
    sampler: str = "dpmpp_2m",
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
        clip, batch, tile: as in ``nidiff sample``.
    """
    state, seeds = process_state(), sorted({int(seed) for seed in seeds})
    model = model if isinstance(model, Model) else open_model(Path(model), state)
    job = plan_job(model, sampler, num_steps, clip=clip, tile=tile)
    bench = data if isinstance(data, Bench) else open_bench(model.path, data, **settings)
    bench.check(model.shape, len(seeds))
    provenance = bench.provenance(len(seeds)) | {"model_sha256": model.sha256, "tile": job.tile}
    settled = (job.sampler, job.num_steps, job.spacing, job.options, seeds_text(seeds), job.clip)
    asked = Result(model.name, *settled, provenance=provenance)
    for known in known_results(model.path):
        # A metric may have been added since.
        if known.question == asked.question and known.metrics.keys() >= by_label(bench.network.name).keys():
            return replace(known, run=model.name) if state.is_main_process else None
    if state.is_main_process:
        _ = bench.real  # unusable real images or features are refused before hours of drawing
    folder = SampleFolder(model.path / "generated" / cell_name(job))
    title = f"{model.name}, {job.sampler} {job.num_steps}"
    run_job(job, model.denoiser, model.shape, folder, seeds, batch=batch, state=state, title=title)
    result = None
    if state.is_main_process:
        result = replace(asked, metrics=bench.measure(folder.read(seeds), folder.path / "features"))
        remember(model.path, result)
    state.wait_for_everyone()
    return result


def evaluate_images(
    images: Images | Tensor, data: Bench | Images | Tensor | str | None = None, *, name: str = "images", **settings: Any
) -> Result | None:
    """Compare images that are there already; the arguments are those of `evaluate_cell`, and nothing is kept."""
    state, generated = process_state(), all_pixels(images)
    bench = data if isinstance(data, Bench) else open_bench(Path(name), data, **settings)
    bench.check(tuple(generated.shape[1:]), len(generated))
    if not state.is_main_process:
        return None
    return Result(name, "-", 0, metrics=bench.measure(generated), provenance=bench.provenance(len(generated)))
