"""``nidiff evaluate``: how good the images of one model are."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.comparing import Comparing, evaluate_cell
from nidiff.commands.drawing import Drawing, open_model, parse_seeds, process_state

if TYPE_CHECKING:
    from nidiff.report.results import Result


@dataclass(frozen=True)
class Evaluate:
    """Compare images of a model, or images you have, with real ones: Fréchet distance, KID, precision and recall.

    What `nidiff sample` drew already is not drawn again.
    """

    run_or_images: Annotated[Positional[Path], arg(metavar="RUN_OR_IMAGES")]
    """A run directory or a model folder; or images: a folder, .npy or .npz file."""
    drawing: Annotated[Drawing, arg(name="")]
    comparing: Annotated[Comparing, arg(name="")]
    sampler: str = "dpmpp_2m"
    """As of nidiff sample."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 20; the schedule's, if fewer)")] = (
        None
    )
    """Levels visited."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON, with all that the numbers depend on."""

    def run(self) -> None:
        from nidiff.report.quality import text

        path = self.run_or_images
        has_model = any((path / name).exists() for name in ("experiment.json", "model", "scheduler"))
        result = self._of_model(path) if has_model else self._of_images(path)
        if result is not None:
            print(json.dumps(result, indent=2) if self.json else text([result]))

    def _of_model(self, path: Path) -> "Result | None":
        from nidiff.report.html import write_report

        state, seeds = process_state(), parse_seeds(self.drawing.seeds)
        model = open_model(path, state)
        steps = min(20, len(model.denoiser.process.schedule)) if self.steps is None else self.steps
        job = self.drawing.job(model, self.sampler, steps)
        bench = self.comparing.bench(path)
        bench.check(model.shape, len(seeds))
        result = evaluate_cell(model, job, bench, seeds, self.drawing, state)
        if state.is_main_process and (path / "experiment.json").is_file():
            print(f"wrote {write_report(path)}", file=sys.stderr)
        return result if state.is_main_process else None

    def _of_images(self, path: Path) -> "Result":
        import torch

        from nidiff.data.dataset import load_dataset
        from nidiff.data.images import quantise

        images = load_dataset(path, memory_limit=None)
        assert isinstance(images.pixels, torch.Tensor)  # without a limit
        bench = self.comparing.bench(path)
        bench.check(images.shape, len(images))
        metrics = bench.metrics(quantise(images.pixels), features=None)
        provenance = bench.provenance(len(images))
        return {"run": path.name, "sampler": "-", "steps": 0, "metrics": metrics, "provenance": provenance}
