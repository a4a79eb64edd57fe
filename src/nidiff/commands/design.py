"""``nidiff design``: which Σ and which schedule suit the data, before training."""

import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.aligned import aligned
from nidiff.commands.flags import Loading
from nidiff.errors import InputError
from nidiff.progress import progress_bar

if TYPE_CHECKING:
    from nidiff.calibration import design as designs
    from nidiff.covariance.operator import Covariance
    from nidiff.data.dataset import Dataset
    from nidiff.diffusion.gaussian import GaussianModel
    from nidiff.training.experiment import Experiment

PRESETS = {"cifar10": "cifar10-small", "fashion-mnist": "fashion-mnist"}  # of the network; else that of the digits
HEAD = ("covariance", "schedule", "C/Sigma", "SNR last", "SNR first")
TRAINING = ("--target", "v", "--weighting", "target", "--sampler", "angle_2m")


@dataclass(frozen=True)
class Design:
    """Compare Σ and schedules for a data set by its Gaussian, without training, and recommend one."""

    data: Annotated[Positional[str | None], arg(metavar="DATA", help_behavior_hint="")] = None
    """digits, fashion-mnist, cifar10, turbulence, hf:NAME; a folder of images, videos or WAV files; .npy,
    .npz, .nc, .h5, .zarr."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
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

    def run(self) -> None:
        from nidiff.calibration.design import CLOCKS, NOISES, STEPS, design
        from nidiff.diffusion.schedule import SCHEDULES
        from nidiff.errors import one_of
        from nidiff.report.design import design_figure
        from nidiff.report.noise import check_out, save_figure
        from nidiff.training.experiment import Experiment

        check_out(self.out)
        if self.num_steps not in STEPS:
            raise InputError(f"num_steps={self.num_steps} must be one of {', '.join(map(str, STEPS))}.")
        if self.data is None:
            raise InputError("DATA is missing: name a data set, a folder, or a file.")
        for text in self.schedules or ():
            one_of("schedules", text.partition(":")[0], SCHEDULES)
        experiment = Experiment(
            data=self.data,
            covariance="white",
            boundary=self.boundary,
            gaussian=self.gaussian,
            **self.loading.given,
        )
        images = experiment.load_data()
        texts = NOISES if self.covariances is None else self.covariances
        noises = {text: replace(experiment, covariance=text).build_covariance(images) for text in texts}
        gaussian = _gaussian(experiment, images, noises)
        with progress_bar("candidates", "") as progress:
            found = design(
                gaussian,
                noises.__getitem__,
                texts,
                CLOCKS if self.schedules is None else self.schedules,
                progress,
            )
        for text in found.left_out:
            print(f"left out {text}, which keeps signal at its last level: it needs start=gaussian", file=sys.stderr)
        save_figure(design_figure(found), self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        command = shlex.join(self._command(found.recommended, images))
        if self.json:
            print(json.dumps(self._report(found, command), indent=2))
            return
        print(f"predicted error of the spectrum, mean |S/C - 1|, with {self.num_steps} steps\n")
        print(aligned([(*HEAD, *_samplers(found)), *(self._cells(one) for one in found.candidates)]))
        for title, one in (("white noise", found.baseline), ("recommended", found.recommended)):
            if one is not None:
                print(f"\n{title}: {one.covariance}, {one.schedule}\n")
                lines = [(name, *(f"{error:.2g}" for error in errors.values())) for name, errors in one.errors.items()]
                print(aligned([("steps", *map(str, STEPS)), *lines]))
        print(f"\nbecause {found.reason}.\n\n    {command}")

    def _command(self, chosen: "designs.Candidate", images: "Dataset") -> list[str]:
        """How to train with it."""
        assert self.data is not None
        preset = PRESETS.get(self.data) if images.has_known_range else None
        words = ["nidiff", "train", *(["--preset", preset] if preset else ["--data", self.data])]
        words += [] if images.has_known_range else ["--preset", "fields"]
        words += self.loading.words()
        words += [] if self.boundary is None else ["--boundary", self.boundary]
        words += [] if self.gaussian == Design.gaussian else ["--gaussian", self.gaussian]
        words += ["--covariance", chosen.covariance, "--schedule", chosen.schedule, *TRAINING]
        return [*words, "--out", "runs/designed"]

    def _report(self, found: "designs.Design", command: str) -> dict[str, Any]:
        rows = [
            {
                "covariance": one.covariance,
                "schedule": one.schedule,
                "roughness": one.roughness,
                "snr_last": one.snr_last,
                "snr_first": one.snr_first,
                "errors": {
                    name: {str(steps): error for steps, error in each.items()} for name, each in one.errors.items()
                },
                "faults": one.faults,
            }
            for one in found.candidates
        ]
        chosen = found.candidates.index(found.recommended)
        return {
            "data": self.data,
            "out": str(self.out),
            "shape": list(found.gaussian.shape),
            "candidates": rows,
            "recommended": {**rows[chosen], "reason": found.reason, "command": command},
        }

    def _cells(self, one: "designs.Candidate") -> tuple[str, ...]:
        """In plain ASCII, so that it prints on any terminal."""
        numbers = (f"{one.roughness:.3g}", f"{one.snr_last:.2g}", f"{one.snr_first:.2g}")
        return (
            one.covariance,
            one.schedule,
            *numbers,
            *(f"{each[self.num_steps]:.2g}" for each in one.errors.values()),
        )


def _gaussian(experiment: "Experiment", images: "Dataset", noises: "dict[str, Covariance]") -> "GaussianModel":
    """The data's Gaussian in the basis that all Σ share; white noise has any."""
    fields = [text for text, covariance in noises.items() if not covariance.is_constant]
    if not noises:
        raise InputError("covariances names none: name at least one, such as white.")
    gaussian = experiment.build_gaussian(images, noises[(fields or [*noises])[0]])
    assert gaussian is not None
    for text in fields:
        if not _has_modes(gaussian, noises[text]):
            raise InputError(
                f"covariances={text!r} has other modes than {fields[0]!r}: compare them in two runs, or give both the "
                "same boundary."
            )
    return gaussian


def _has_modes(gaussian: "GaussianModel", covariance: "Covariance") -> bool:
    try:
        gaussian.noise(covariance)
    except InputError:
        return False
    return True


def _samplers(found: "designs.Design") -> tuple[str, ...]:
    return tuple(found.candidates[0].errors)
