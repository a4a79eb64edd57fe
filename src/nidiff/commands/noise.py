"""``nidiff noise``: draw fields and say what each Σ is like."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.aligned import aligned
from nidiff.commands.field_flags import NOISE_FIELDS, given_flags
from nidiff.errors import InputError, one_of

if TYPE_CHECKING:
    from nidiff.covariance.operator import Covariance


@dataclass(frozen=True)
class Noise:
    """Draw fields N(0, Σ) to a picture with their radial power spectra, and print what each Σ is like."""

    # None is "not given": a flag that the field does not use is refused, and the library has the defaults.
    field: Annotated[
        str | None, arg(metavar="{" + ",".join(NOISE_FIELDS) + "}", help_behavior_hint="(default: gff)")
    ] = None
    """The kind of field: Gaussian free field, Matérn, power law, offset noise, pyramid noise."""
    gamma: Annotated[
        tuple[float, ...] | None, arg(metavar="FLOAT ...", help_behavior_hint="(default: 0 0.5 1 1.5 2)")
    ] = None
    """gff: the index powers γ, one Σ each; 0 is white."""
    length_scale: Annotated[
        tuple[float, ...] | None, arg(metavar="FLOAT ...", help_behavior_hint="(default: 1 2 4 8)")
    ] = None
    """matern: the length scales in pixels, one Σ each."""
    smoothness: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1.5)")] = None
    """matern: the smoothness ν."""
    exponent: Annotated[
        tuple[float, ...] | None, arg(metavar="FLOAT ...", help_behavior_hint="(default: -1 0 1 2 3)")
    ] = None
    """power_law: the exponents of 1/|k|, one Σ each."""
    strength: Annotated[
        tuple[float, ...] | None, arg(metavar="FLOAT ...", help_behavior_hint="(default: 0 0.1 0.3 1)")
    ] = None
    """offset: the strengths, one Σ each."""
    discount: Annotated[
        tuple[float, ...] | None, arg(metavar="FLOAT ...", help_behavior_hint="(default: 0.3 0.6 0.9)")
    ] = None
    """pyramid: the discounts, one Σ each."""
    boundary: Annotated[str | None, arg(metavar="{periodic,reflecting}", help_behavior_hint="(default: periodic)")] = (
        None
    )
    """gff, matern, power_law, --data: what happens at the edges."""
    zero_mode: Annotated[str | None, arg(metavar="{one,zero}", help_behavior_hint="(default: one)")] = None
    """gff, power_law: keep the mean of the image (one) or drop it (zero), which makes Σ singular."""
    shape: Annotated[tuple[int, ...] | None, arg(metavar="INT ...", help_behavior_hint="(default: 32 32)")] = None
    """The size of an image: one, two or three numbers."""
    data: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(optional)")] = None
    """Instead of --field: a folder of images, .npy or .npz. Shows the Σ fitted to them beside white noise."""
    average: Annotated[str | None, arg(metavar="{radial,modes}", help_behavior_hint="(default: radial)")] = None
    """--data: one power per |k| (radial) or per mode (modes)."""
    shrinkage: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.01)")] = None
    """--data: how far the spectrum is pulled to white, from 0 to 1."""
    seed: int = 0
    """The first image has this seed, the next the next; every row has the same."""
    num_images: int = 10
    """Images per row."""
    out: Path = Path("noise.png")
    """The picture: .png, .pdf or .svg."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        from nidiff.covariance.summary import summary
        from nidiff.report.noise import check_suffix, noise_figure, save_figure

        check_suffix(self.out)
        covariances = self._of_field() if self.data is None else self._of_data()
        figure = noise_figure(
            covariances, num_images=self.num_images, seed=self.seed, boundary=self.boundary or "periodic"
        )
        rows = [
            {"label": label, "config": covariance.to_config(), **summary(covariance)._asdict()}
            for label, covariance in covariances.items()
        ]
        save_figure(figure, self.out)
        print(f"wrote {self.out}", file=sys.stderr)
        if self.json:
            shape = next(iter(covariances.values())).event_shape
            field = "from_data" if self.data else self.field or "gff"
            print(json.dumps({"field": field, "shape": shape, "out": str(self.out), "covariances": rows}, indent=2))
        else:
            print(_table(rows))

    def _of_field(self) -> "dict[str, Covariance]":
        from nidiff.covariance.fields import FIELDS

        name = one_of("field", self.field or "gff", NOISE_FIELDS)
        function, parameter, default, options = NOISE_FIELDS[name]
        given = self._given(f"--field {name}", (parameter, "shape", "field", *options))
        values = given.pop(parameter, default)
        if not values:
            raise InputError(f"{parameter} has no values: give at least one number.")
        arguments = {option: given[option] for option in options if option in given}
        shape = given.get("shape", (32, 32))
        return {f"{parameter}={v:.12g}": FIELDS[function](shape, **{parameter: v}, **arguments) for v in values}

    def _of_data(self) -> "dict[str, Covariance]":
        from nidiff.covariance.fields import from_data
        from nidiff.covariance.matrix import Identity
        from nidiff.data.images import load_images

        given = self._given("--data", ("data", "average", "shrinkage", "boundary"))
        fitted = from_data(load_images(given.pop("data")), **given)
        return {"white": Identity(fitted.event_shape), "from_data": fitted}

    def _given(self, what: str, understood: tuple[str, ...]) -> dict[str, Any]:
        return given_flags(self, what, understood, always=("seed", "num_images", "out", "json"))


def _table(rows: list[dict[str, Any]]) -> str:
    """Plain ASCII, so that it prints on any terminal."""
    head = ("covariance", "marginal variance", "condition", "log-det", "effective rank", "correlation length")
    lines = [head]
    for row in rows:
        low, high = row["marginal_variance_range"]
        spread = f" ({low:.3g} to {high:.3g})" if high - low > 1e-9 * high else ""
        lines.append(
            (
                row["label"],
                f"{row['marginal_variance']:.4g}{spread}",
                f"{row['condition_number']:.4g}",
                "-inf" if row["logdet"] is None else f"{row['logdet']:.6g}",
                f"{row['effective_rank']:.5g}",
                "none" if row["correlation_length"] is None else f"{row['correlation_length']:.3f} px",
            )
        )
    return aligned(lines)
