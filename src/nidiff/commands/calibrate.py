"""``nidiff calibrate``: noise scales from data."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from tyro.conf import arg

from nidiff.aligned import aligned
from nidiff.commands.flags import DataArgument, QuietFlag
from nidiff.errors import InputError, one_of
from nidiff.notation import parse_call
from nidiff.progress import progress_bar
from nidiff.recipe import check_whole, fits

RANGES = {"symmetric": "[-1, 1]", "unit": "[0, 1]"}
OPTIONS: dict[str, dict[str, type]] = {"batch": {"batch_size": int}, "quantile": {"quantile": float}}  # of --distance


@dataclass(frozen=True)
class Calibrate:
    """Find the noise scales of SMLD for a data set and a Σ: sigma_max, the levels, and the Langevin epsilon."""

    data: Annotated[DataArgument, arg(name="")] = field(default_factory=DataArgument)
    covariance: str = "gff:gamma=1"
    """Σ as NAME:key=value,… (white, gff, matern, power_law, offset, pyramid, from_data), or the folder of a saved Σ."""
    range: Annotated[str, arg(metavar="{symmetric,unit}")] = "symmetric"
    """The range of 8-bit pixels: [-1, 1], in which nidiff trains, or [0, 1], the paper's."""
    distance: Annotated[str, arg(metavar="{max,batch,quantile}")] = "max"
    """sigma_max is the largest distance of all pairs, or within mini-batches (batch:batch_size=128), or a quantile."""
    sigma_min: float = 0.01
    """The smallest noise scale."""
    ratio: Annotated[str, arg(metavar="{overlap,classic,FLOAT}")] = "overlap"
    """The ratio of two noise scales: from the overlap equation, 1.03756, or a number."""
    steps_per_level: int = 5
    """Langevin steps per level."""
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: the best)")] = None
    """The Langevin epsilon, instead of the one with the least variance."""
    printed: Annotated[bool, arg(help_behavior_hint="")] = False
    """Use the Langevin update as the paper prints it, without Σ before the score."""
    seed: int = 0
    """For the mini-batches, the quantile and the pairs in the picture."""
    out: Path = Path("out/calibration.png")
    """The picture: .png, .pdf or .svg."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    quiet: QuietFlag = False

    def run(self) -> None:
        import torch

        from nidiff.covariance.config import as_covariance
        from nidiff.design.distance import as_pixels
        from nidiff.design.scales import Calibration, calibrate
        from nidiff.diffusion.scaling import PIXELS
        from nidiff.report.calibration import calibration_figure
        from nidiff.report.noise import check_out, save_figure

        check_out(self.out)
        one_of("range", self.range, RANGES)
        check_whole("seed", self.seed, 0)
        distance, options = parse_call("distance", self.distance)
        known = OPTIONS.get(distance, {})
        if not all(key in known and fits(value, known[key]) for key, value in options.items()):
            remedy = "use max, batch:batch_size=128 or quantile:quantile=0.99"
            raise InputError("distance", self.distance, "is unknown", remedy)
        options |= {"sigma_min": self.sigma_min, "ratio": self.ratio, "distance": distance, "epsilon": self.epsilon}
        options |= {"steps_per_level": self.steps_per_level, "preconditioned": not self.printed}
        data, generator = self.data.require().load(memory_limit=None, annotations=()), torch.Generator()
        generator.manual_seed(self.seed)
        # 8-bit images as they are, which need less memory; all else as floats in the model's units.
        images = data.stored(torch.arange(len(data))) if data.scaling == PIXELS else data.all()
        if self.range == "unit":
            if images.dtype != torch.uint8 and bool((images.abs() > 1).any()):
                raise InputError("range", self.range, "is for images with pixels in [-1, 1]", "leave it out")
            images = as_pixels(images).add(1).div_(2)
        shape, edges = tuple(images.shape[2:]), self.data.edges
        covariance = as_covariance(self.covariance, shape, lambda: as_pixels(images), edges)
        with progress_bar("distances", "pairs") as progress:
            calibration = calibrate(images, covariance, generator=generator, progress=progress, **options)
        save_figure(calibration_figure(images, covariance, calibration, generator=generator), self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        hints = get_type_hints(Calibration, include_extras=True)
        formulas = {name: hint.__metadata__[0] for name, hint in hints.items()}
        if self.json:
            about = {"data": self.data.source, "range": self.range, "out": str(self.out)}
            results = {"covariance": covariance.to_config(), **asdict(calibration), "formulas": formulas}
            print(json.dumps({**about, **results}, indent=2))
        else:
            numbers = f"pixels in {RANGES[self.range]}" if data.scaling == PIXELS else "numbers as the model sees them"
            print(f"{numbers}, noise {covariance!r}\n")
            print(aligned([(name, _cell(value), formulas[name]) for name, value in asdict(calibration).items()]))


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_cell, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
