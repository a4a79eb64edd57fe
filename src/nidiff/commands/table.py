"""``nidiff table``: quality against the number of steps, for any set of runs and samplers."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.comparing import Comparing, evaluate_cell
from nidiff.commands.drawing import Drawing, parse_seeds
from nidiff.errors import InputError
from nidiff.files import replace_text

if TYPE_CHECKING:
    from nidiff.evaluation.results import Result


@dataclass(frozen=True)
class Table:
    """Fill the paper's table for your runs, cell by cell; stopped, the same command goes on.

    Writes table.md, .tex, .csv, .json and .png, and to each run its metrics.json and report.html.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run directories or model folders."""
    drawing: Annotated[Drawing, arg(name="")]
    comparing: Annotated[Comparing, arg(name="")]
    samplers: tuple[str, ...] = ("ancestral", "dpmpp_2m")
    """As of nidiff sample."""
    steps: tuple[int, ...] = (1000, 100, 50, 20, 10)
    """Numbers of steps."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("out/table")
    """Where the table goes."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        from nidiff.evaluation.table import text
        from nidiff.generation.opened import open_model, process_state
        from nidiff.report.html import write_report
        from nidiff.sampling.sampler import rehearse

        state, seeds = process_state(), parse_seeds(self.drawing.seeds)
        if not (self.runs and self.samplers and self.steps):
            raise InputError("runs, samplers and steps must have one entry or more.")
        models = [open_model(path, state) for path in self.runs]
        if len({model.name for model in models}) < len(models):
            raise InputError("runs must have different names, which are those of their directories: rename one.")
        jobs = [
            (model, self.drawing.job(model, sampler, steps))
            for model in models
            for sampler in dict.fromkeys(self.samplers)
            for steps in dict.fromkeys(self.steps)
        ]
        benches = {model.name: self.comparing.bench(model.path) for model in models}
        for model, job in jobs:  # all of them, before the first takes hours
            benches[model.name].check(model.shape, len(seeds))
            rehearse(model.denoiser, model.shape, **job.arguments)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        results: list[Result] = []
        for model, job in jobs:
            result = evaluate_cell(model, job, benches[model.name], seeds, self.drawing, state)
            if result is not None and state.is_main_process:
                results.append(result)
                self._write(results)
        if state.is_main_process:
            for model in models:
                if (model.path / "experiment.json").is_file():
                    print(f"wrote {write_report(model.path)}", file=sys.stderr)
            print(f"wrote {self.out}/table.md, .tex, .csv, .json and .png", file=sys.stderr)
            print(json.dumps(results, indent=2) if self.json else text(results))

    def _write(self, results: "list[Result]") -> None:
        """What there is so far, in every form."""
        from nidiff.evaluation.table import csv_text, latex, markdown
        from nidiff.report.noise import save_figure
        from nidiff.report.quality import quality_figure

        try:
            for suffix, words in {
                "md": markdown(results),
                "tex": latex(results),
                "csv": csv_text(results),
                "json": json.dumps(results, indent=2) + "\n",
            }.items():
                replace_text(self.out / f"table.{suffix}", words)
        except OSError as error:
            raise self._unwritable(error) from error
        save_figure(quality_figure(results), self.out / "table.png")

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"out={str(self.out)!r} cannot be written ({error.strerror}): choose another.")
