"""``nidiff evaluate``: how good the images of one model are."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.comparing import Comparing
from nidiff.commands.drawing import Drawing, parse_seeds
from nidiff.errors import InputError

if TYPE_CHECKING:
    from nidiff.evaluation.results import Result


@dataclass(frozen=True)
class Evaluate:
    """Compare images of a model, or images you have, with real ones: Fréchet distance, KID, precision and recall.

    Images that `nidiff sample` has drawn are not drawn again.
    """

    run_or_images: Annotated[Positional[Path], arg(metavar="RUN_OR_IMAGES")]
    """A run directory or a model folder; or images: a folder, .npy or .npz file."""
    drawing: Annotated[Drawing, arg(name="")]
    comparing: Annotated[Comparing, arg(name="")]
    sampler: str = "dpmpp_2m"
    """Same as in nidiff sample."""
    num_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the sampler's own)")] = None
    """Sampling steps."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON, with all that the numbers depend on."""

    def run(self) -> None:
        from nidiff.evaluation.table import text

        path = self.run_or_images
        has_model = any((path / name).exists() for name in ("experiment.json", "model", "scheduler"))
        result = self._of_model(path) if has_model else self._of_images(path)
        if result is not None:
            print(json.dumps(result.to_json(), indent=2) if self.json else text([result]))

    def _of_model(self, path: Path) -> "Result | None":
        from nidiff.evaluation.cell import evaluate_cell
        from nidiff.generation.opened import run_folder
        from nidiff.report.html import write_report

        run, drawing = run_folder(path), vars(self.drawing) | {"seeds": parse_seeds(self.drawing.seeds)}
        result = evaluate_cell(run, sampler=self.sampler, num_steps=self.num_steps, **drawing, **vars(self.comparing))
        if result is not None and (run / "experiment.json").is_file():
            print(f"wrote {write_report(run)}", file=sys.stderr)
        return result

    def _of_images(self, path: Path) -> "Result | None":
        from nidiff.data.fit import Reading
        from nidiff.data.images import open_images
        from nidiff.evaluation.cell import evaluate_images

        if (self.drawing, self.sampler, self.num_steps) != (Drawing(), "dpmpp_2m", None):
            raise InputError(f"{str(path)!r} holds images, measured as they are: leave out the flags of drawing.")
        file = path / "samples.npz"
        images = open_images(file if file.exists() else path, Reading(memory_limit=None, progress=True))
        return evaluate_images(images, name=path.name, **vars(self.comparing))
