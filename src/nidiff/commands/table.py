"""``nidiff table``: quality against the number of steps, for any set of runs and samplers."""

import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.comparing import Comparing
from nidiff.commands.drawing import Drawing, parse_seeds
from nidiff.errors import InputError
from nidiff.files import replace_text, writing

if TYPE_CHECKING:
    from nidiff.evaluation.results import Result


@dataclass(frozen=True)
class Table:
    """Fill the paper's table for your runs, cell by cell; if it is stopped, the same command resumes.

    Writes table.md, .tex, .csv, .json and .png, and metrics.json and report.html of each run.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run directories or model folders."""
    drawing: Annotated[Drawing, arg(name="")]
    comparing: Annotated[Comparing, arg(name="")]
    samplers: tuple[str, ...] = ("ancestral", "dpmpp_2m")
    """Same as in nidiff sample."""
    num_steps: tuple[int, ...] = (1000, 100, 50, 20, 10)
    """Numbers of steps."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("out/table")
    """Where the table goes."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        from nidiff.evaluation.cell import evaluate_cell
        from nidiff.evaluation.table import text
        from nidiff.generation.opened import open_model, process_state
        from nidiff.report.html import write_report
        from nidiff.sampling.sampler import rehearse

        state, seeds = process_state(), parse_seeds(self.drawing.seeds)
        if not (self.runs and self.samplers and self.num_steps):
            raise InputError("runs, samplers and num_steps must have one entry or more.")
        models = [open_model(path, state) for path in self.runs]
        if len({model.name for model in models}) < len(models):
            raise InputError("runs must have different names, which are those of their directories: rename one.")
        cells = list(product(models, dict.fromkeys(self.samplers), dict.fromkeys(self.num_steps)))
        benches = {model.name: self.comparing.bench(model.path) for model in models}
        for model, sampler, num_steps in cells:  # all of them, before the first takes hours
            benches[model.name].check(model.shape, len(seeds))
            rehearse(model.denoiser, model.shape, **self.drawing.job(model, sampler, num_steps).arguments)
        with writing("out", self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        results: list[Result] = []
        drawing = vars(self.drawing) | {"seeds": seeds}
        for model, sampler, num_steps in cells:
            result = evaluate_cell(model, benches[model.name], sampler=sampler, num_steps=num_steps, **drawing)
            if result is not None:
                results.append(result)
                self._write(results)
        if state.is_main_process:
            for model in models:
                if (model.path / "experiment.json").is_file():
                    print(f"wrote {write_report(model.path)}", file=sys.stderr)
            print(f"wrote {self.out}/table.md, .tex, .csv, .json and .png", file=sys.stderr)
            print(_json(results) if self.json else text(results))

    def _write(self, results: "list[Result]") -> None:
        """What there is so far, in every form."""
        from nidiff.evaluation.table import csv_text, latex, markdown
        from nidiff.report.noise import save_figure
        from nidiff.report.quality import quality_figure

        forms = {"md": markdown, "tex": latex, "csv": csv_text, "json": lambda results: _json(results) + "\n"}
        with writing("out", self.out):
            for suffix, written in forms.items():
                replace_text(self.out / f"table.{suffix}", written(results))
        save_figure(quality_figure(results), self.out / "table.png")


def _json(results: "list[Result]") -> str:
    return json.dumps([result.to_json() for result in results], indent=2)
