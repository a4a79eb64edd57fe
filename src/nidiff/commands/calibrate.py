"""``nidiff calibrate``: noise scales from data."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.aligned import aligned
from nidiff.errors import InputError, one_of
from nidiff.notation import parse_call
from nidiff.progress import progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.calibration.paper import Constant
    from nidiff.calibration.scales import Calibration

RANGES = {"symmetric": "[-1, 1]", "unit": "[0, 1]"}
DISTANCES = {"max": (), "batch": ("batch_size",), "quantile": ("quantile",)}


@dataclass(frozen=True)
class Calibrate:
    """Find the noise scales of SMLD for a data set and a Σ: sigma_max, the levels, and the Langevin epsilon."""

    data: Annotated[Positional[str | None], arg(metavar="DATA", help_behavior_hint="")] = None
    """cifar10, fashion-mnist or digits; a folder of images, .npy or .npz; or hf:NAME."""
    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: found or downloaded)")] = None
    """Where the official files of a named data set are."""
    covariance: str = "gff:gamma=1"
    """Σ as NAME:key=value,… (white, gff, matern, power_law, offset, pyramid, from_data), or the folder of a saved Σ."""
    range: Annotated[str, arg(metavar="{symmetric,unit}")] = "symmetric"
    """The range of the pixels: [-1, 1], in which nidiff trains, or [0, 1], the paper's."""
    distance: Annotated[str, arg(metavar="{max,batch,quantile}")] = "max"
    """sigma_max: the largest distance of all pairs, the largest within mini-batches (batch:batch_size=128), or a
    quantile (quantile:quantile=0.99)."""
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
    paper: Annotated[bool, arg(help_behavior_hint="")] = False
    """Instead, print the constants of the paper beside ours; with CIFAR-10 as DATA also its initial noise scales."""

    def run(self) -> None:
        if self.paper:
            self._run_paper()
        else:
            self._run_data()

    def _run_data(self) -> None:
        import torch

        from nidiff.calibration.distance import as_pixels
        from nidiff.calibration.scales import calibrate
        from nidiff.covariance.config import as_covariance
        from nidiff.report.calibration import calibration_figure
        from nidiff.report.noise import check_suffix, save_figure

        check_suffix(self.out)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must be 0 or more.")
        one_of("range", self.range, RANGES)
        distance = self._distance()
        images = _in_range(self._load(), self.range)
        covariance = as_covariance(self.covariance, tuple(images.shape[2:]), lambda: as_pixels(images))
        generator = torch.Generator().manual_seed(self.seed)
        with progress_bar("distances", "pairs") as progress:
            found = calibrate(
                images,
                covariance,
                sigma_min=self.sigma_min,
                ratio=_number(self.ratio),
                steps_per_level=self.steps_per_level,
                epsilon=self.epsilon,
                preconditioned=not self.printed,
                generator=generator,
                progress=progress,
                **distance,
            )
        save_figure(calibration_figure(images, covariance, found, generator=generator), self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        formulas = self._formulas(found)
        if self.json:
            about = {"data": self.data, "range": self.range, "out": str(self.out), "covariance": covariance.to_config()}
            print(json.dumps({**about, **asdict(found), "formulas": formulas}, indent=2))
        else:
            numbers = f"{found.num_images} images of {found.dimension} numbers in {RANGES[self.range]}"
            print(f"{numbers}, noise {covariance!r}\n")
            print(aligned([(name, _cell(getattr(found, name)), formula) for name, formula in formulas.items()]))

    def _run_paper(self) -> None:
        from nidiff.calibration.paper import initial_scales, paper_constants

        if self != Calibrate(self.data, self.data_dir, json=self.json, paper=True):
            raise InputError("paper has settings of its own: give it no flags but --data-dir and --json.")
        constants = paper_constants()
        if self.data is not None:
            images = self._load()
            with progress_bar("distances", "pairs") as progress:
                constants += initial_scales(images, progress)
        if self.json:
            print(json.dumps([constant._asdict() for constant in constants], indent=2))
        else:
            print(_paper_table(constants))

    def _distance(self) -> dict[str, Any]:
        """The arguments of `calibrate` for the text of --distance."""
        name, arguments = parse_call("distance", self.distance)
        for key in arguments:
            one_of(f"the key of distance={name}", key, DISTANCES[one_of("distance", name, DISTANCES)])
        return {"distance": name, **arguments}

    def _load(self) -> "Tensor":
        """Images [N, C, H, W]: uint8, or floats in [-1, 1]."""
        import torch

        from nidiff.data.dataset import load_dataset

        if self.data is None:
            raise InputError("DATA is missing: name a data set, a folder of images, or an .npy or .npz file.")
        pixels = load_dataset(self.data, data_dir=self.data_dir, memory_limit=None).pixels
        assert isinstance(pixels, torch.Tensor)  # without a limit
        return pixels

    def _formulas(self, found: "Calibration") -> dict[str, str]:
        """What each number is, in plain ASCII."""
        pairs = found.num_images * (found.num_images - 1) // 2
        distance = {
            "max": f"the largest |Sigma^-1/2 (x_i - x_j)| of all {pairs} pairs: images {found.pair}",
            "batch": "the largest |Sigma^-1/2 (x_i - x_j)| within the mini-batches of one epoch",
            "quantile": "a quantile of |Sigma^-1/2 (x_i - x_j)| over random pairs",
        }
        target = {
            "overlap": f"r with Phi(sqrt(2D)(r-1) + 3r) - Phi(sqrt(2D)(r-1) - 3r) = 1/2, D = {found.dimension}",
            "classic": "5000^(1/231), of NCSNv2",
        }
        step = "1 - eta" if found.preconditioned else "1 - eta/lambda"
        least = "the one with the least variance_ratio" if self.epsilon is None else "given by --epsilon"
        return {
            "sigma_max": distance[found.distance],
            "sigma_min": "given by --sigma-min",
            "target_ratio": target.get(self.ratio, "given by --ratio"),
            "num_levels": "1 + log(sigma_max / sigma_min) / log(target_ratio), rounded up",
            "ratio": "(sigma_max / sigma_min)^(1 / (num_levels - 1))",
            "steps_per_level": "given by --steps-per-level",
            "epsilon": f"{least}; a step at level sigma is epsilon sigma^2 / sigma_min^2",
            "eta": "epsilon / sigma_min^2",
            "variance_ratio": f"mean of lambda v, v = ratio^2, then steps_per_level times v <- ({step})^2 v + 2 eta",
            "cas_interval": "1 - 1/ratio to 1 + 1/ratio",
            "cas_feasible": "whether eta is in cas_interval, that is, beta^2 = 1 - ratio^2 (1 - eta)^2 >= 0",
        }


def _in_range(images: "Tensor", pixels: str) -> "Tensor":
    """Images in the range called ``pixels``; uint8 means [-1, 1] and stays."""
    import torch

    if pixels == "symmetric":
        return images
    return images.float().div_(255) if images.dtype == torch.uint8 else images.add(1).div_(2)


def _number(ratio: str) -> str | float:
    try:
        return float(ratio)
    except ValueError:
        return ratio


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " to ".join(map(_cell, value))
    return f"{value:.6g}"


def _paper_table(constants: "list[Constant]") -> str:
    rows = [("constant", "paper", "ours", "convention")]
    for name, paper, ours, convention in constants:
        rows.append((name, "-" if paper is None else f"{paper:.10g}", f"{ours:.10g}", convention))
    return aligned(rows)
