"""``nidiff evaluate``: how good the samples of one model are."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, Comparing, ConditioningFlags, Drawing, PrecisionFlag, QuietFlag
from nidiff.errors import InputError, renamed
from nidiff.files import read_npz
from nidiff.notation import parse_seeds

SAMPLES = "samples.npz"
CHANNELS_LAST = {3: "NLC", 4: "NHWC", 5: "NDHWC"}  # how samples.npz holds signals, fields, and volumes or video


@dataclass(frozen=True)
class Evaluate:
    """Compare samples of a model, or images you have, with real ones.

    8-bit images: Fréchet distance, KID, precision and recall of features, and the spectrum. All other data: spectra by
    channel and axis, coherence of channels, distributions of values and increments, structure functions and spread, in
    their own units. Of a model with classes and labelled images, also by class: the Fréchet distance, and the share of
    samples that a classifier gives the class asked for. Samples of some classes are compared with real data of these
    classes.
    """

    run_or_images: Annotated[Positional[Path], arg(metavar="RUN_OR_IMAGES")]
    """A run directory, a model folder, or the name of a model that ships (only missing images are drawn); or images: a
    folder, or a file as in nidiff train, matched with the units and axes of the real data."""
    drawing: Annotated[Drawing, arg(name="")]
    conditioning: Annotated[ConditioningFlags, arg(name="")]
    comparing: Annotated[Comparing, arg(name="")]
    checkpoint: CheckpointFlag = None
    precision: PrecisionFlag = "fp32"
    sampler: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: as tuned, or as in training)")] = (
        None
    )
    """Same as in nidiff sample."""
    num_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the sampler's own)")] = None
    """Sampling steps."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON, with all that the numbers depend on."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.data.spec import DataSpec
        from nidiff.evaluation.evaluate import evaluate_cell, evaluate_images
        from nidiff.evaluation.evaluator import open_evaluator
        from nidiff.evaluation.table import detailed_text
        from nidiff.generation.loaded_model import open_model, process_state, run_folder
        from nidiff.model.checkpoint import is_checkpoint
        from nidiff.model.zoo import find_model
        from nidiff.report.html import write_report

        path = run_folder(find_model(self.run_or_images, "path", self.checkpoint))
        if is_checkpoint(path) or any((path / name).exists() for name in ("experiment.json", "model", "scheduler")):
            model = open_model(path, process_state())
            options = {**vars(self.drawing), **self.conditioning.arguments, **vars(self.comparing)}
            options |= {"seeds": parse_seeds(self.drawing.seeds), "precision": self.precision}
            options |= {"sampler": self.sampler, "num_steps": self.num_steps}
            result = evaluate_cell(model, **options)
            if result is not None and model.has_report:
                print(f"wrote {write_report(path)}", file=sys.stderr)
        else:
            drawing = (self.drawing, self.conditioning, self.precision, self.sampler, self.num_steps)
            if not path.exists() or drawing != (Drawing(), ConditioningFlags(), "fp32", None, None):
                problem = "holds images, which are measured as they are" if path.exists() else "does not exist"
                remedy = "give a run, a model, or images without the flags of drawing"
                raise InputError("run_or_images", str(path), problem, remedy)
            layout, source, classes = self.comparing.layout, path, None
            file = path if path.name == SAMPLES else path / SAMPLES
            if file.is_file():  # of nidiff sample, whatever the layout of the real data is
                arrays = read_npz(file, ["arr_0"], "draw it again with nidiff sample", optional=["classes"])
                layout, source, classes = CHANNELS_LAST.get(arrays["arr_0"].ndim), file, arrays.get("classes")
            evaluator = open_evaluator(path, **vars(self.comparing))
            spec = DataSpec(str(source.absolute()), scaling=("none",), layout=layout)
            with renamed("data", "run_or_images"):
                images = spec.load(memory_limit=None, like=evaluator.data.grid)
            result = evaluate_images(images, evaluator, name=path.name, classes=classes)
        if result is not None:
            print(json.dumps(result.to_json(), indent=2) if self.json else detailed_text(result))
