"""``nidiff calibrate``: noise scales from data."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.aligned import aligned
from nidiff.commands.field_flags import NOISE_FIELDS, given_flags
from nidiff.errors import InputError, one_of
from nidiff.progress import progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.calibration.paper import Constant
    from nidiff.calibration.scales import Calibration
    from nidiff.covariance.operator import Covariance

ALWAYS = ("data", "data_dir", "seed", "out", "json", "paper", "printed")
RANGES = {"symmetric": "[-1, 1]", "unit": "[0, 1]"}
DISTANCES = {"max": (), "batch": ("batch_size",), "quantile": ("quantile",)}


@dataclass(frozen=True)
class Calibrate:
    """Find the noise scales of SMLD for a data set and a field: sigma_max, the levels, and the Langevin epsilon."""

    # None is "not given": the library has the defaults, and a flag without meaning is refused.
    data: Annotated[Positional[str | None], arg(metavar="DATA", help_behavior_hint="")] = None
    """cifar10, fashion-mnist or digits; a folder of images, .npy or .npz; or hf:NAME."""
    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: found or downloaded)")] = None
    """Where the official files of a named data set are."""
    field: Annotated[
        str | None, arg(metavar="{" + ",".join(NOISE_FIELDS) + "}", help_behavior_hint="(default: gff)")
    ] = None
    """The kind of field: Gaussian free field, Matérn, power law, offset noise, pyramid noise."""
    gamma: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1)")] = None
    """gff: the index power γ; 0 is white."""
    length_scale: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(required for matern)")] = None
    """matern: the length scale in pixels."""
    smoothness: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1.5)")] = None
    """matern: the smoothness ν."""
    exponent: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(required for power_law)")] = None
    """power_law: the exponent of 1/|k|."""
    strength: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.1)")] = None
    """offset: the strength."""
    discount: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.9)")] = None
    """pyramid: the discount."""
    boundary: Annotated[str | None, arg(metavar="{periodic,reflecting}", help_behavior_hint="(default: periodic)")] = (
        None
    )
    """gff, matern, power_law: what happens at the edges."""
    range: Annotated[str | None, arg(metavar="{symmetric,unit}", help_behavior_hint="(default: symmetric)")] = None
    """The range of the pixels: [-1, 1], in which nidiff trains, or [0, 1], the paper's."""
    distance: Annotated[str | None, arg(metavar="{max,batch,quantile}", help_behavior_hint="(default: max)")] = None
    """sigma_max: the largest distance of all pairs, that within mini-batches, or a quantile."""
    batch_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 128)")] = None
    """--distance batch: the size of a mini-batch."""
    quantile: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.99)")] = None
    """--distance quantile: which one."""
    sigma_min: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.01)")] = None
    """The smallest noise scale."""
    ratio: Annotated[str | None, arg(metavar="{overlap,classic,FLOAT}", help_behavior_hint="(default: overlap)")] = None
    """The ratio of two noise scales: from the overlap equation, 1.03756, or a number."""
    steps_per_level: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 5)")] = None
    """Langevin steps per level."""
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: the best)")] = None
    """The Langevin epsilon, instead of the one with the least variance."""
    printed: Annotated[bool, arg(help_behavior_hint="")] = False
    """The Langevin update as the paper prints it, without Σ before the score."""
    seed: int = 0
    """For the mini-batches, the quantile and the pairs of the picture."""
    out: Path = Path("calibration.png")
    """The picture: .png, .pdf or .svg."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    paper: Annotated[bool, arg(help_behavior_hint="")] = False
    """Instead: the constants of the paper beside ours; with CIFAR-10 as DATA also its initial noise scales."""

    def run(self) -> None:
        if self.paper:
            self._run_paper()
        else:
            self._run_data()

    def _run_data(self) -> None:
        import torch

        from nidiff.calibration.scales import calibrate
        from nidiff.report.calibration import calibration_figure
        from nidiff.report.noise import check_suffix, save_figure

        check_suffix(self.out)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must be 0 or more.")
        field, arguments, pixels = self._arguments()
        images = _in_range(self._load(), pixels)
        covariance = _covariance(field, tuple(images.shape[2:]), arguments)
        generator = torch.Generator().manual_seed(self.seed)
        with progress_bar("distances", "pairs") as progress:
            found = calibrate(
                images,
                covariance,
                preconditioned=not self.printed,
                generator=generator,
                progress=progress,
                **arguments,
            )
        boundary = self.boundary or "periodic"
        figure = calibration_figure(images, covariance, found, boundary=boundary, generator=generator)
        formulas = _formulas(found, arguments)
        save_figure(figure, self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        if self.json:
            about = {
                "data": str(self.data),
                "range": pixels,
                "out": str(self.out),
                "covariance": covariance.to_config(),
            }
            print(json.dumps({**about, **asdict(found), "formulas": formulas}, indent=2))
        else:
            print(f"{found.num_images} images of {found.dimension} numbers in {RANGES[pixels]}, noise {covariance!r}\n")
            values = {name: _cell(getattr(found, name)) for name in formulas}
            print(aligned([(name, values[name], formula) for name, formula in formulas.items()]))

    def _run_paper(self) -> None:
        from nidiff.calibration.paper import initial_scales, paper_constants

        given_flags(self, "--paper", (), ALWAYS)
        constants = paper_constants()
        if self.data is not None:
            images = self._load()
            with progress_bar("distances", "pairs") as progress:
                constants += initial_scales(images, progress)
        if self.json:
            print(json.dumps([constant._asdict() for constant in constants], indent=2))
        else:
            print(_paper_table(constants))

    def _load(self) -> "Tensor":
        """Images [N, C, H, W]: uint8, or floats in [-1, 1]."""
        import torch

        from nidiff.data.dataset import load_dataset

        if self.data is None:
            raise InputError("DATA is missing: name a data set, a folder of images, or an .npy or .npz file.")
        pixels = load_dataset(self.data, data_dir=self.data_dir, memory_limit=None).pixels
        assert isinstance(pixels, torch.Tensor)  # without a limit
        return pixels

    def _arguments(self) -> tuple[str, dict[str, Any], str]:
        """The field, the flags for it and for `calibrate`, and the range of the pixels."""
        name = one_of("field", self.field or "gff", NOISE_FIELDS)
        distance = one_of("distance", self.distance or "max", DISTANCES)
        pixels = one_of("range", self.range or "symmetric", RANGES)
        field = NOISE_FIELDS[name]
        of_field = {flag for other in NOISE_FIELDS.values() for flag in (other.parameter, *other.options)}
        of_distance = {flag for flags in DISTANCES.values() for flag in flags}
        flags = set(vars(self)) - set(ALWAYS)
        given = given_flags(self, f"--field {name}", flags - of_field | {field.parameter, *field.options}, ALWAYS)
        given_flags(self, f"--distance {distance}", flags - of_distance | {*DISTANCES[distance]}, ALWAYS)
        for flag in ("field", "range"):
            given.pop(flag, None)
        if "ratio" in given:
            given["ratio"] = _number(given["ratio"])
        return name, given, pixels


def _covariance(name: str, shape: tuple[int, ...], arguments: dict[str, Any]) -> "Covariance":
    """Σ of the field; takes its flags out of the arguments."""
    from nidiff.covariance.fields import FIELDS

    field = NOISE_FIELDS[name]
    own = {flag: arguments.pop(flag) for flag in (field.parameter, *field.options) if flag in arguments}
    if name in ("matern", "power_law") and field.parameter not in own:
        flag = field.parameter.replace("_", "-")
        raise InputError(f"--{flag} is missing: --field {name} needs a number there.")
    return FIELDS[field.function](shape, **own)


def _in_range(images: "Tensor", pixels: str) -> "Tensor":
    """uint8 stays for [-1, 1], which it means."""
    import torch

    if pixels == "symmetric":
        return images
    return images.float().div_(255) if images.dtype == torch.uint8 else images.add(1).div_(2)


def _number(ratio: str) -> str | float:
    try:
        return float(ratio)
    except ValueError:
        return ratio


def _formulas(found: "Calibration", arguments: dict[str, Any]) -> dict[str, str]:
    """What each number is, in plain ASCII."""
    pairs = found.num_images * (found.num_images - 1) // 2
    distance = {
        "max": f"the largest |Sigma^-1/2 (x_i - x_j)| of all {pairs} pairs: images {found.pair}",
        "batch": f"the largest |Sigma^-1/2 (x_i - x_j)| in batches of {arguments.get('batch_size', 128)}, one epoch",
        "quantile": f"quantile {arguments.get('quantile', 0.99)} of |Sigma^-1/2 (x_i - x_j)| over random pairs",
    }
    target = {
        "overlap": f"r with Phi(sqrt(2D)(r-1) + 3r) - Phi(sqrt(2D)(r-1) - 3r) = 1/2, D = {found.dimension}",
        "classic": "5000^(1/231), of NCSNv2",
    }
    step = "1 - eta" if found.preconditioned else "1 - eta/lambda"
    least = "given" if "epsilon" in arguments else "the one with the least variance_ratio"
    return {
        "sigma_max": distance[found.distance],
        "sigma_min": "given" if "sigma_min" in arguments else "the usual value",
        "target_ratio": target.get(arguments.get("ratio", "overlap"), "given"),
        "num_levels": "1 + log(sigma_max / sigma_min) / log(target_ratio), rounded up",
        "ratio": "(sigma_max / sigma_min)^(1 / (num_levels - 1))",
        "steps_per_level": "given" if "steps_per_level" in arguments else "the usual value",
        "epsilon": f"{least}; a step at level sigma is epsilon sigma^2 / sigma_min^2",
        "eta": "epsilon / sigma_min^2",
        "variance_ratio": f"mean of lambda v, v = ratio^2, then steps_per_level times v <- ({step})^2 v + 2 eta",
        "cas_interval": "1 - 1/ratio to 1 + 1/ratio",
        "cas_feasible": "whether eta is in cas_interval, that is, beta^2 = 1 - ratio^2 (1 - eta)^2 >= 0",
    }


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
