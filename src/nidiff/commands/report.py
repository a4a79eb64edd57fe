"""``nidiff report``: write the page about a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nidiff.errors import InputError


@dataclass(frozen=True)
class Report:
    """Write report.html into run directories: settings, Σ, loss, samples, denoising and quality in one file."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """The run directories; a run may still be training."""

    def run(self) -> None:
        from nidiff.report.html import write_report
        from nidiff.training.run import RunDirectory

        if not self.runs:
            raise InputError("runs is empty: give at least one run directory.")
        runs = [RunDirectory.open(folder) for folder in self.runs]  # all, before a page is written
        for run in runs:
            print(write_report(run.folder))
