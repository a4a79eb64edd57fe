"""``nidiff likelihood``: what data cost under a model, in nats and bits per dimension."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, QuietFlag

if TYPE_CHECKING:
    from nidiff.evaluation.results import Measured


@dataclass(frozen=True)
class Likelihood:
    """Nats and bits per dimension of held-out data under a model, their mixture and their Gaussian, with errors.

    A model that was trained with classes is given those of the data, which gives log p(x | class). Other conditions are
    left out.
    """

    run_or_model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory, a model folder, or the name of a model that ships."""
    checkpoint: CheckpointFlag = None
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: what the run was trained on)")] = None
    """The data, as in nidiff train; units and axes that a file names are matched with the model's."""
    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: found or downloaded)")] = None
    """Where the official files of a named data set are."""
    layout: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: the run's, or the usual)")] = None
    """What the axes of arrays are, such as NCHW, as in nidiff train."""
    split: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: test if there is one)")] = None
    """train or test, the held-out part."""
    unconditional: bool = False
    """Do not give the model the classes of the data: log p(x)."""
    num_images: int = 64
    """Items at most, spread over the data."""
    trace: str = "hutchinson"
    """How the divergence of the flow is found: hutchinson (random probes) or exact (a pass for each dimension)."""
    num_probes: int = 1
    """Probes of hutchinson for each item; their noise is part of the errors."""
    rtol: float = 1e-4
    """Relative tolerance of the solver."""
    atol: float = 1e-4
    """Absolute tolerance of the solver."""
    batch: int = 16
    """Items at a time."""
    seed: int = 0
    """Decides the probes and the noise that is added to whole numbers."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON."""
    quiet: QuietFlag = False

    def run(self) -> None:
        import torch

        from nidiff.data.match import check_type
        from nidiff.diffusion.condition import CLASSES
        from nidiff.errors import InputError
        from nidiff.evaluation.likelihood import measure_likelihood
        from nidiff.evaluation.real import real_source
        from nidiff.extras import require
        from nidiff.generation.loaded_model import open_model, process_state
        from nidiff.generation.observations import check_range
        from nidiff.progress import progress_bar

        require("torchdiffeq")
        model = open_model(self.run_or_model, process_state(), self.checkpoint)
        reading: dict[str, Any] = {"split": self.split, "layout": self.layout, "like": model.grid}
        source = real_source(model.path, self.data, self.data_dir, **reading)
        units: dict[str, Any] = {} if model.denoiser.scaling is None else {"scaling": model.denoiser.scaling}
        real = source.held_out(**units) if self.split is None else source.load(self.split, **units)
        if real.data.shape != model.shape:
            problem = f"has items {real.data.shape}, and the model makes {model.shape}"
            raise InputError("data", None, problem, "give data of the shape of the model")
        items = real.data.stored(torch.arange(len(real.data)))
        check_type(items, model.grid, "data", real.name)
        check_range(model.about(real.data, real.name), items, real.name)
        names = ("num_images", "batch", "seed", "trace", "num_probes", "rtol", "atol")
        settings: dict[str, Any] = {key: getattr(self, key) for key in names}
        denoiser, classes = model.denoiser, model.denoiser.conditions.get(CLASSES)
        if self.unconditional and classes is not None:
            denoiser = denoiser.given(**{CLASSES: classes.absent})
        with progress_bar(f"likelihood of {real.name}", "items") as progress:
            likelihood = measure_likelihood(denoiser, real.data, **settings, progress=progress)
        about = {
            "run": model.name,
            "model_sha256": model.sha256,
            "data": real.name,
            "split": real.split,
            "dimensions": likelihood.dimensions,
            "dequantised": likelihood.is_whole,
            **({} if classes is None else {"of_class": likelihood.of_class}),
            **settings,
            "num_images": len(likelihood.log_prob),
            "num_independent": likelihood.num_independent,
        }
        summary = likelihood.summary()
        costs = {of: {name: cost.to_json() for name, cost in row.items()} for of, row in summary.items()}
        print(json.dumps({**about, **costs}, indent=2) if self.json else _text(about, summary))


COLUMNS = {
    "bits_per_dim": "bits/dim",
    "nats_per_dim": "nats/dim",
    "nats_per_dim_of_model": "nats/dim (units of the model)",
}
NAMES = {"model": "model", "mixture": "mixture of Gaussians", "gaussian": "Gaussian N(mu, C)"}
NAMES |= {"difference": "model - Gaussian"}


def _text(about: dict[str, Any], summary: dict[str, dict[str, "Measured"]]) -> str:
    from nidiff.aligned import aligned
    from nidiff.evaluation.table import LOWEST, PLAIN, number

    rows = [["", *COLUMNS.values()]]
    rows += [[NAMES[of], *(number(row[key], PLAIN) for key in COLUMNS)] for of, row in summary.items()]
    part = {"train": "training data", "given": "not a part of the run"}.get(str(about["split"]), "held-out data")
    whole, density = "whole numbers with uniform noise, a step is 1", "the density in the units of the data"
    units = whole if about["dequantised"] else density
    n, independent = about["num_images"], about["num_independent"]
    alike = (
        "" if independent > LOWEST * n else f", of which neighbours are alike (about {independent:.0f} independent),"
    )
    lines = [
        f"-log p per dimension of {n} items{alike} of {about['data']} ({part}), less is better",
        aligned(rows),
        f"Of {about['dimensions']} dimensions; {units}; +- is the standard error over items.",
    ]
    if "of_class" in about:
        lines.append(f"The model is given {'the' if about['of_class'] else 'no'} class of each item.")
    if "gaussian" not in summary:
        lines.append("The model has no Gaussian of its data (--gaussian none), so there is no baseline.")
    return "\n".join(lines)
