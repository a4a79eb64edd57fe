"""``nidiff table``: quality against the number of steps, for any set of runs and samplers."""

import contextlib
import json
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.flags import Comparing, Drawing, Telling
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
    telling: Annotated[Telling, arg(name="")] = field(default_factory=Telling)
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

    def run(self) -> None:
        from nidiff.evaluation.bench import open_bench
        from nidiff.evaluation.cell import evaluate_cell
        from nidiff.evaluation.seeds import compare_groups, group_runs, groups_json, over_groups
        from nidiff.evaluation.table import csv_text, latex, markdown, text
        from nidiff.generation.opened import open_model, plan_job, process_state
        from nidiff.report.html import write_report
        from nidiff.report.noise import save_figure
        from nidiff.report.quality import quality_figure
        from nidiff.sampling.sampler import rehearse

        state, seeds = process_state(), parse_seeds(self.drawing.seeds)
        if not (self.runs and self.samplers and self.num_steps):
            raise InputError("a table needs a run, a sampler and a number of steps: give one of each, or more.")
        models = [open_model(path, state) for path in self.runs]
        if len({model.name for model in models}) < len(models):
            raise InputError("runs must have different names, which are those of their directories: rename one.")
        cells, results, data = [], [], ""
        lines: list[Result] = []
        paired: list[Comparison] = []
        told = self.telling.given
        drawing = vars(self.drawing) | told | {"seeds": seeds}
        for model in models:  # all of them are checked before the first takes hours
            bench = open_bench(model.path, model=model, **vars(self.comparing))
            bench = bench.of_classes(plan_job(model, **told).classes)
            bench.check(model.shape, len(seeds))
            for sampler, num_steps in product(dict.fromkeys(self.samplers), dict.fromkeys(self.num_steps)):
                job = plan_job(model, sampler, num_steps, clip=self.drawing.clip, tile=self.drawing.tile, **told)
                rehearse(model.denoiser, model.shape, **job.arguments)
                cells.append((model, bench, {"sampler": sampler, "num_steps": num_steps}))
        groups = [] if self.no_groups else group_runs({model.name: model.path for model in models})
        self.check_out()
        with claimed(self.out) if state.is_main_process else contextlib.nullcontext():
            for model, bench, steps in cells:
                result = evaluate_cell(model, bench, **steps, **drawing)
                if result is not None:  # write what there is so far, in every form
                    results.append(result)
                    lines, paired = over_groups(results, groups), compare_groups(results, groups)
                    single = [result.to_json() for result in results]
                    found = {"groups": groups_json(results, groups), "paired": [one.to_json() for one in paired]}
                    data = json.dumps({"results": single, **found} if groups else single, indent=2)
                    text_of = {
                        "json": f"{data}\n",
                        "md": markdown(lines, paired),
                        "tex": latex(lines, paired),
                        "csv": csv_text([*results, *(line for line in lines if line not in results)]),
                    }  # table.json first: it marks the table as ours
                    with writing("out", self.out):
                        for suffix, content in text_of.items():
                            replace_text(self.out / f"table.{suffix}", content)
                    save_figure(quality_figure(lines), self.out / "table.png")
        if state.is_main_process:
            for model in models:
                if model.card is None and (model.path / "experiment.json").is_file():
                    print(f"wrote {write_report(model.path)}", file=sys.stderr)
            print(f"wrote {self.out}/table.md, .tex, .csv, .json and .png", file=sys.stderr)
            print(data if self.json else text(lines, paired))

    def check_out(self) -> None:
        """Refuse a directory with a table that is not ours: ours has results in table.json, which is written first."""
        from nidiff.evaluation.results import read_results

        out, remedy = self.out, "choose another directory, or delete it"
        if out.exists() and not out.is_dir():
            raise InputError(f"out={str(out)!r} is a file: choose another directory.")
        found = [f"table.{suffix}" for suffix in SUFFIXES if (out / f"table.{suffix}").exists()]
        if found and not ("table.json" in found and read_results(out / "table.json")):
            raise InputError(f"out={str(out)!r} holds {found[0]}, which is not a table of nidiff: {remedy}.")
