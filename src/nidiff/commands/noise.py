"""``nidiff noise``: draw fields and say what each Σ is like."""

import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from nidiff.aligned import aligned
from nidiff.commands.flags import DataFlags, QuietFlag
from nidiff.errors import InputError

SHOWN = tuple(f"gff:gamma={gamma:g}" for gamma in (0, 0.5, 1, 1.5, 2))
HEAD = ("covariance", "marginal variance", "condition", "log-det", "effective rank", "correlation length")


@dataclass(frozen=True)
class Noise:
    """Draw fields N(0, Σ) to a picture with their radial power spectra, and print what each Σ is like."""

    covariances: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="SIGMA", help_behavior_hint="(default: gff:gamma=0 to gff:gamma=2; with --data: white)"),
    ] = ()
    """Each Σ as NAME:key=value,… (white, gff, matern, power_law, offset, pyramid), or the folder of a saved Σ."""
    shape: Annotated[tuple[int, ...] | None, arg(metavar="INT ...", help_behavior_hint="(default: 32 32)")] = None
    """The size of an image: one, two or three numbers."""
    data: Annotated[DataFlags, arg(name="")] = field(default_factory=DataFlags)
    """Also show the Σ fitted to these data (from_data)."""
    seed: int = 0
    """The seed of the first image; the next image has the next seed, and every row has the same seeds."""
    num_images: int = 10
    """Images per row."""
    out: Path = Path("out/noise.png")
    """The picture: .png, .pdf or .svg."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.covariance.checks import check_shape
        from nidiff.covariance.config import as_covariance
        from nidiff.covariance.summary import summary
        from nidiff.report.noise import check_noise, check_out, noise_figure, save_figure

        names, shape, images = self.covariances or SHOWN, (32, 32) if self.shape is None else self.shape, None
        check_out(self.out)
        check_noise(check_shape(shape), len(names), self.num_images, self.seed)
        if not self.data.source:
            self.data.refuse(*(option.name for option in fields(self.data)[1:]))
        elif self.shape is not None:
            raise InputError("shape", self.shape, "has no meaning with `data`, whose items have one", "leave it out")
        else:
            images = self.data.load(annotations=()).all()
            names, shape = self.covariances or ("white",), tuple(images.shape[2:])
            names += () if any(name.startswith("from_data") for name in names) else ("from_data",)
            check_noise(shape, len(names), self.num_images, self.seed)
        covariances = {name: as_covariance(name, shape, images, self.data.edges) for name in names}
        shapes = {name: covariance.event_shape for name, covariance in covariances.items()}
        if len(set(shapes.values())) > 1:
            problem = f"have different shapes ({shapes})"
            raise InputError("covariances", None, problem, "give `shape`, or draw them apart")
        figure = noise_figure(covariances, num_images=self.num_images, seed=self.seed)
        rows = [
            {"label": name, "config": covariance.to_config(), **summary(covariance)._asdict()}
            for name, covariance in covariances.items()
        ]
        save_figure(figure, self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        report = {"shape": shapes[names[0]], "out": str(self.out), "covariances": rows}
        print(json.dumps(report, indent=2) if self.json else aligned([HEAD, *map(_cells, rows)]))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """In plain ASCII, so that it prints on any terminal."""
    low, high = row["marginal_variance_range"]
    return (
        row["label"],
        f"{row['marginal_variance']:.4g}" + (f" ({low:.3g} to {high:.3g})" if high - low > 1e-9 * high else ""),
        f"{row['condition_number']:.4g}",
        "-inf" if row["logdet"] is None else f"{row['logdet']:.6g}",
        f"{row['effective_rank']:.5g}",
        "none" if row["correlation_length"] is None else f"{row['correlation_length']:.3f} px",
    )
