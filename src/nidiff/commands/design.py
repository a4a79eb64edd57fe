"""``nidiff design``: which Σ and which schedule suit the data, before training."""

import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.aligned import aligned
from nidiff.commands.flags import DataArgument, QuietFlag
from nidiff.errors import InputError
from nidiff.progress import progress_bar

if TYPE_CHECKING:
    from nidiff.covariance.covariance import Covariance
    from nidiff.data.dataset import Dataset
    from nidiff.design import candidates as designs
    from nidiff.diffusion.gaussian import GaussianModel
    from nidiff.training.experiment import Experiment

PRESETS = {"cifar10": "cifar10-small", "fashion-mnist": "fashion-mnist"}  # of the network; else that of the digits
HEAD = ("covariance", "schedule", "C/Sigma", "SNR last", "SNR first")
TRAINING = ("--target", "v", "--weighting", "target", "--sampler", "angle_2m")


@dataclass(frozen=True)
class Design:
    """Compare Σ and schedules for a data set by its Gaussian, without training, and recommend one."""

    data: Annotated[DataArgument, arg(name="")] = field(default_factory=DataArgument)
    boundary: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: periodic)")] = None
    """What the data do at their edges, for all Σ: periodic, reflecting or fixed, one word or one per axis
    (reflecting/periodic)."""
    covariances: Annotated[
        tuple[str, ...] | None, arg(metavar="SIGMA ...", help_behavior_hint="(default: six of them)")
    ] = None
    """Each Σ as NAME:key=value,…; by default white, gff, matern, and from_data with power 0.5 and 1."""
    schedules: Annotated[
        tuple[str, ...] | None, arg(metavar="SCHEDULE ...", help_behavior_hint="(default: six of them)")
    ] = None
    """Each as NAME:key=value,…; by default linear, cosine, flow, designed, designed per mode, and equal_snr."""
    gaussian: str = "modes:shrinkage=0.02"
    """The data's Gaussian, as in nidiff train: modes:channels=cross knows how channels go together."""
    num_steps: int = 10
    """The number of steps whose errors the table shows: 5, 10, 20 or 50. --json has all."""
    out: Path = Path("out/design.png")
    """The picture: .png, .pdf or .svg."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.design.candidates import CLOCKS, NOISES, STEPS, compare
        from nidiff.diffusion.schedules import SCHEDULES
        from nidiff.errors import one_of
        from nidiff.report.design import design_figure
        from nidiff.report.noise import check_out, save_figure
        from nidiff.training.build import build_covariance
        from nidiff.training.experiment import Experiment

        check_out(self.out)
        if self.num_steps not in STEPS:
            raise InputError("num_steps", self.num_steps, "is unknown", f"choose from {', '.join(map(str, STEPS))}")
        for text in self.schedules or ():
            one_of("schedules", text.partition(":")[0], SCHEDULES)
        images = self.data.require().load(annotations=())
        experiment = Experiment(self.data, covariance="white", boundary=self.boundary, gaussian=self.gaussian)
        texts = NOISES if self.covariances is None else self.covariances
        noises = {text: build_covariance(replace(experiment, covariance=text), images) for text in texts}
        gaussian, schedules = (
            _gaussian(experiment, images, noises),
            CLOCKS if self.schedules is None else self.schedules,
        )
        with progress_bar("candidates", "") as progress:
            designed = compare(gaussian, noises.__getitem__, texts, schedules, progress)
        for text in designed.left_out:
            print(f"left out {text}, which keeps signal at its last level: it needs start=gaussian", file=sys.stderr)
        save_figure(design_figure(designed), self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        command = shlex.join(self._command(designed.recommended, images))
        if self.json:
            print(json.dumps(self._report(designed, command), indent=2))
            return
        print(f"predicted error of the spectrum, mean |S/C - 1|, with {self.num_steps} steps\n")
        head = (*HEAD, *designed.recommended.errors)
        print(aligned([head, *(self._cells(candidate) for candidate in designed.candidates)]))
        for title, candidate in (("white noise", designed.baseline), ("recommended", designed.recommended)):
            if candidate is not None:
                print(f"\n{title}: {candidate.covariance}, {candidate.schedule}\n")
                errors = candidate.errors.items()
                lines = [(name, *(f"{error:.2g}" for error in by_steps.values())) for name, by_steps in errors]
                print(aligned([("steps", *map(str, STEPS)), *lines]))
        print(f"\nbecause {designed.reason}.\n\n    {command}")

    def _command(self, chosen: "designs.Candidate", images: "Dataset") -> list[str]:
        """How to train with it."""
        preset = PRESETS.get(self.data.source) if images.has_known_range else None
        words = ["nidiff", "train", *(["--preset", preset] if preset else ["--data", self.data.source])]
        words += [] if images.has_known_range else ["--preset", "fields"]
        words += self.data.flags()
        words += [] if self.boundary is None else ["--boundary", self.boundary]
        words += [] if self.gaussian == Design.gaussian else ["--gaussian", self.gaussian]
        words += ["--covariance", chosen.covariance, "--schedule", chosen.schedule, *TRAINING]
        return [*words, "--out", "runs/designed"]

    def _report(self, designed: "designs.Design", command: str) -> dict[str, Any]:
        rows = [vars(candidate) | {"faults": candidate.faults} for candidate in designed.candidates]
        for row in rows:
            del row["logsnr"]
        chosen = rows[designed.candidates.index(designed.recommended)]
        return {
            "data": self.data.source,
            "out": str(self.out),
            "shape": list(designed.gaussian.shape),
            "candidates": rows,
            "recommended": {**chosen, "reason": designed.reason, "command": command},
        }

    def _cells(self, candidate: "designs.Candidate") -> tuple[str, ...]:
        """In plain ASCII, so that it prints on any terminal."""
        numbers = (f"{candidate.roughness:.3g}", f"{candidate.snr_last:.2g}", f"{candidate.snr_first:.2g}")
        errors = (f"{by_steps[self.num_steps]:.2g}" for by_steps in candidate.errors.values())
        return (candidate.covariance, candidate.schedule, *numbers, *errors)


def _gaussian(experiment: "Experiment", images: "Dataset", noises: "dict[str, Covariance]") -> "GaussianModel":
    """The data's Gaussian in the basis that all Σ share; white noise has any."""
    from nidiff.training.build import build_gaussian

    if not noises:
        raise InputError("covariances", None, "is empty", "name at least one, such as white")
    fields = [text for text, covariance in noises.items() if not covariance.is_constant]
    for text in fields:
        if noises[text].spatial != noises[fields[0]].spatial:
            remedy = "compare them in two runs, or give both the same boundary"
            raise InputError("covariances", text, f"has other modes than {fields[0]!r}", remedy)
    gaussian = build_gaussian(experiment, images, noises[(fields or [*noises])[0]])
    assert gaussian is not None
    return gaussian
