"""``nidiff report``: write the page about a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.flags import QuietFlag
from nidiff.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.training.run import RunDirectory


@dataclass(frozen=True)
class Report:
    """Write report.html into run directories: settings, Σ, loss, samples, denoising and quality in one file."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """The run directories; a run may still be training. The page of a model that ships, by its name, goes to out/NAME.
    """
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: the digits, or a sample)")] = None
    """Denoise the first of these items, read as those of the run: a data set, a folder, a file, or hf:NAME."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.model.zoo import entry_of, find_model
        from nidiff.report.html import write_report
        from nidiff.training.run import RunDirectory

        if not self.runs:
            raise InputError("runs", None, "is missing", "give a run directory")
        runs = [RunDirectory.open(find_model(folder, "run")) for folder in self.runs]  # all, before a page is written
        for run in runs:
            out = None if entry_of(run.folder) is None else Path("out") / run.name / "report.html"
            print(write_report(run.folder, self._first_image(run), out))

    def _first_image(self, run: "RunDirectory") -> "Tensor | None":
        """The first item of --data, read as the run reads its own, and scaled as its model has it."""
        if self.data is None:
            return None
        import torch

        spec, stored = replace(run.experiment.data, source=self.data, data_dir=None, held_out=None), run.stored()
        scaling = None if stored is None else stored.scaling
        data = spec.load(annotations=(), memory_limit=0, progress=False, scaling=scaling)  # do not decode all
        return data.batch(torch.tensor([0]))[0]
