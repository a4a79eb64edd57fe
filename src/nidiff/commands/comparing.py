"""What ``nidiff evaluate`` and ``nidiff table`` share: the real images, the metrics, and one cell of the table."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.commands.drawing import Drawing
from nidiff.errors import InputError
from nidiff.training.experiment import Experiment, read_experiment

if TYPE_CHECKING:
    from accelerate import PartialState

    from nidiff.evaluation.bench import Bench
    from nidiff.evaluation.results import Result
    from nidiff.generation.job import Job
    from nidiff.generation.opened import Model


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
    """inception (its results alone are FID), efficientnet-lite0, pixels, or a TorchScript .pt or exported .pt2 file."""
    features_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: found or downloaded)")] = (
        None
    )
    """Where the weights of inception are."""
    k: int = 3
    """Precision and recall: the neighbour whose distance is the radius."""
    bootstrap: int = 20
    """Resamples of the generated images for the errors of the Fréchet distance and the spectrum; 0: no errors."""

    def bench(self, run: Path) -> "Bench":
        """The real images, fitted as those of ``run`` were, and the settings."""
        import torch

        from nidiff.data.images import quantise
        from nidiff.evaluation.bench import Bench
        from nidiff.evaluation.features import load_features

        network = load_features(self.features, file=self.features_file)
        has_experiment = (run / "experiment.json").is_file()
        if self.data is None and not has_experiment:
            raise InputError(f"data is missing: {str(run)!r} is not a run that says what it was trained on.")
        source = read_experiment(run) if has_experiment else Experiment()
        if self.data is not None:
            source = dataclasses.replace(source, data=self.data, data_dir=self.data_dir)
        elif self.data_dir is not None:
            source = dataclasses.replace(source, data_dir=self.data_dir)
        pixels = source.load_data(split=self.split, memory_limit=None).pixels
        name = source.data if self.split == "train" else f"{source.data}, {self.split}"
        assert isinstance(pixels, torch.Tensor)  # without a limit
        if self.num_real is not None:
            if not 1 <= self.num_real <= len(pixels):
                raise InputError(f"num_real={self.num_real} must be from 1 to {len(pixels)}, the images of {name}.")
            pixels = pixels[torch.linspace(0, len(pixels) - 1, self.num_real, dtype=torch.float64).long()]
        return Bench(quantise(pixels), name, network, self.k, self.bootstrap)


def evaluate_cell(
    model: "Model", job: "Job", bench: "Bench", seeds: list[int], drawing: Drawing, state: "PartialState"
) -> "Result | None":
    """The result of one model, sampler and number of steps: found in the run's metrics.json, or computed and put there.

    Every process draws; the main one computes, and has the result.
    """
    from nidiff.evaluation.bench import same_question
    from nidiff.evaluation.results import known_results, remember
    from nidiff.generation.folder import SampleFolder
    from nidiff.generation.job import run_job
    from nidiff.generation.opened import cell_name, seeds_text

    question: dict[str, Any] = {
        "run": model.name,
        "sampler": job.sampler,
        "steps": job.num_steps,
        "spacing": job.spacing,
        "options": job.options,
        "seeds": seeds_text(seeds),
        "clip": job.clip,
        "provenance": bench.provenance(len(seeds)) | {"model_sha256": model.sha256, "tile": job.tile},
    }
    for known in known_results(model.path):
        if same_question(known, question):
            return {**known, "run": model.name}
    if state.is_main_process:
        _ = bench.real  # what is wrong with the real images or the features shows before hours of drawing
    folder = SampleFolder(model.path / "generated" / cell_name(job))
    title = f"{model.name}, {job.sampler} {job.num_steps}"
    run_job(job, model.denoiser, model.shape, folder, seeds, batch=drawing.batch, state=state, title=title)
    result = None
    if state.is_main_process:
        metrics = bench.metrics(folder.read(seeds), features=folder.path / "features")
        result = {**question, "metrics": metrics}
        remember(model.path, result)
    state.wait_for_everyone()
    return result
