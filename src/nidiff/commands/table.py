"""``nidiff table``: quality against the number of steps, for any set of runs and samplers."""

import contextlib
import json
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, Comparing, ConditioningFlags, Drawing, PrecisionFlag, QuietFlag
from nidiff.errors import InputError
from nidiff.files import replace_text, writing
from nidiff.locks import claimed
from nidiff.notation import parse_seeds

if TYPE_CHECKING:
    from nidiff.evaluation.results import Result
    from nidiff.evaluation.seeds import Comparison

SUFFIXES = ("json", "md", "tex", "csv", "png")


@dataclass(frozen=True)
class Table:
    """Fill the paper's table for your runs, cell by cell; if it is stopped, the same command resumes."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run directories, model folders, or names of models that ship; their metrics.json and report.html are written
    too."""
    drawing: Annotated[Drawing, arg(name="")]
    comparing: Annotated[Comparing, arg(name="")]
    conditioning: Annotated[ConditioningFlags, arg(name="")] = field(default_factory=ConditioningFlags)
    checkpoint: CheckpointFlag = None
    precision: PrecisionFlag = "fp32"
    samplers: tuple[str, ...] = ("ancestral", "dpmpp_2m")
    """Same as in nidiff sample."""
    num_steps: tuple[int, ...] = (1000, 100, 50, 20, 10)
    """Numbers of steps."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("out/table")
    """Where the table goes, as .md, .tex, .csv, .json and .png."""
    no_groups: Annotated[bool, arg(help_behavior_hint="")] = False
    """A line for each run. By default runs that differ only in the training seed are one line, over the trainings."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.evaluation.evaluate import evaluate_cell
        from nidiff.evaluation.evaluator import open_evaluator
        from nidiff.evaluation.seeds import compare_groups, group_runs, groups_json, over_groups
        from nidiff.evaluation.table import csv_text, latex, markdown, text
        from nidiff.generation.job import plan_job
        from nidiff.generation.loaded_model import open_model, process_state
        from nidiff.report.html import write_report
        from nidiff.report.noise import save_figure
        from nidiff.report.quality import quality_figure
        from nidiff.sampling.sampler import rehearse

        state, seeds = process_state(), parse_seeds(self.drawing.seeds)
        if not (self.runs and self.samplers and self.num_steps):
            problem = "and `samplers` and `num_steps` must not be empty"
            raise InputError("runs", None, problem, "give one of each, or more")
        models = [open_model(path, state, self.checkpoint) for path in self.runs]
        if len({model.name for model in models}) < len(models):
            raise InputError("runs", None, "must have different names, those of their directories", "rename one")
        cells, results, data = [], [], ""
        lines: list[Result] = []
        paired: list[Comparison] = []
        conditions = self.conditioning.arguments
        for model in models:  # all of them are checked before the first takes hours
            evaluator = open_evaluator(model.path, model=model, **vars(self.comparing))
            evaluator = evaluator.of_classes(plan_job(model, **conditions).conditioning.classes)
            evaluator.check(model.shape, len(seeds))
            for sampler, num_steps in product(dict.fromkeys(self.samplers), dict.fromkeys(self.num_steps)):
                drawn: dict[str, Any] = {"clip": self.drawing.clip, "tile": self.drawing.tile}
                drawn |= {"precision": self.precision, **conditions}
                rehearse(model.denoiser, model.shape, **plan_job(model, sampler, num_steps, **drawn).arguments)
                drawn |= {"sampler": sampler, "num_steps": num_steps, "seeds": seeds, "batch": self.drawing.batch}
                cells.append((model, evaluator, drawn))
        ended = {model.name: model.path for model in models if model.step is None}
        groups = [] if self.no_groups else group_runs(ended)
        self.check_out()
        with claimed(self.out) if state.is_main_process else contextlib.nullcontext():
            for model, evaluator, drawn in cells:
                result = evaluate_cell(model, evaluator, **drawn)
                if result is not None:  # write the results so far
                    results.append(result)
                    lines, paired = over_groups(results, groups), compare_groups(results, groups)
                    single = [result.to_json() for result in results]
                    over = {"groups": groups_json(results, groups), "paired": [pair.to_json() for pair in paired]}
                    data = json.dumps({"results": single, **over} if groups else single, indent=2)
                    text_of = {
                        "json": f"{data}\n",
                        "md": markdown(lines, paired),
                        "tex": latex(lines, paired),
                        "csv": csv_text([*results, *(line for line in lines if line not in results)]),
                    }  # table.json first: it marks the table as ours
                    with writing("out", self.out):
                        for suffix, content in text_of.items():
                            replace_text(self.out / f"table.{suffix}", content)
            if lines:
                save_figure(quality_figure(lines), self.out / "table.png")
        if state.is_main_process:
            for model in models:
                if model.has_report:
                    print(f"wrote {write_report(model.path)}", file=sys.stderr)
            print(f"wrote {self.out}/table.md, .tex, .csv, .json and .png", file=sys.stderr)
            print(data if self.json else text(lines, paired))

    def check_out(self) -> None:
        """Refuse a directory with a table that is not ours: ours has results in table.json, which is written first."""
        from nidiff.evaluation.results import read_results

        names = [name for suffix in SUFFIXES if (self.out / (name := f"table.{suffix}")).exists()]
        is_ours = not names or ("table.json" in names and read_results(self.out / "table.json"))
        if self.out.is_file() or not is_ours:
            problem = f"is a file, or holds {', '.join(names)}, which is not a table of nidiff"
            raise InputError("out", str(self.out), problem, "choose another directory, or delete it")
