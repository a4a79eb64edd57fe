"""``nidiff restore``: what data may have been of which a part, a coarse or a blurred version was observed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.commands.restoring import Restoring
from nidiff.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.generation.observed import View
    from nidiff.generation.opened import Model
    from nidiff.generation.restoration import Restoration

ROUNDING = 12**-0.5  # the standard deviation of what rounding to whole numbers takes away


@dataclass(frozen=True)
class Restore:
    """Samples of what data were, given some of their points, their means over blocks, or a blurred version.

    Give one of --mask, --scale, --blur and --missing."""

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, its model folder, or the name of a model that ships (see nidiff models)."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """What was observed, in the units of the data: a picture, .npy, .npz, NetCDF, HDF5, Zarr, or a folder of pictures
    or sounds."""
    restoring: Annotated[Restoring, arg(name="")]
    mask: Annotated[str | None, arg(metavar="FILE_OR_WORD", help_behavior_hint="")] = None
    """What is observed: the left, right, top or bottom half, the center, random:0.03 (that share of the points), or the
    ones of an array or the white of a picture; not-center is all but the center, and so on."""
    scale: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """FILE has means over blocks of so many points along each axis."""
    blur: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """FILE is blurred by a Gaussian of this standard deviation in pixels."""
    missing: bool = False
    """NaN in FILE are unobserved, and all else is observed."""
    noise: float = 0.0
    """The standard deviation of white noise in the observation, in the units of the data (see --units). Means over
    blocks and blurred pictures in whole numbers have that of rounding, 0.29, besides."""
    degrade: bool = False
    """FILE is clean: it is masked, averaged or blurred first, noise is added, and the error against FILE measured."""
    method: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: gaussian or jacobian)")] = None
    """gaussian (with the Gaussian of the data that the model knows), jacobian (with that of the network: slower, for
    any model), gradient, or replacement (for masks without noise)."""

    def run(self) -> None:
        from nidiff.generation.observed import observe, restore
        from nidiff.generation.restoration import in_model_units, values_sha256

        flags, how = self.restoring, self._how()
        model, plan = flags.open(self.model)
        try:
            items = flags.load(self.file, model, self._shape(model), with_nan=how in ("mask", "missing"))
        except InputError as error:
            if self.scale is None or self.degrade:
                raise
            raise InputError(f"{str(error).rstrip('.')}; for a file of full size, add --degrade.") from error
        noise = in_model_units(self.noise, model, flags.units)
        if how in ("scale", "blur") and not self.degrade and not items.is_floating_point():
            rounding = in_model_units(ROUNDING, model, "data")
            noise = tuple(math.hypot(*both) for both in zip(noise, rounding, strict=True))
        view = self._view(model, items)

        def make() -> "Restoration":
            return restore(observe(model, items, view, noise, degrade=self.degrade, seed=flags.seed), plan, self.method)

        own: dict[str, Any] = {how: getattr(self, how), "noise": self.noise, "method": self.method}
        own |= {"degrade": self.degrade} | ({} if view.masks is None else {"masks": values_sha256(view.masks)})
        flags.finish(model, flags.task("restore", self.file, items, plan, **own), make)

    def _how(self) -> str:
        """The one that is given of mask, scale, blur and missing."""
        asked = {"mask": self.mask is not None, "scale": self.scale is not None, "blur": self.blur is not None}
        given = [name for name, is_given in {**asked, "missing": self.missing}.items() if is_given]
        if len(given) != 1:
            count = "none" if not given else " and ".join(f"{name}=" for name in given)
            raise InputError(
                f"give one of mask=, scale=, blur= and --missing, which say what was observed: not {count}."
            )
        if self.missing and self.degrade:
            raise InputError("--degrade needs clean data, and --missing says that some are not known: give mask=.")
        return given[0]

    def _shape(self, model: "Model") -> tuple[int, ...]:
        """Of the items in the file."""
        from nidiff.generation.observed import coarse_event

        if self.scale is None:
            return model.shape
        event = coarse_event(model, self.scale)  # which refuses a number that does not divide the model's
        return model.shape if self.degrade else (model.shape[0], *event)

    def _view(self, model: "Model", items: "Tensor") -> "View":
        """How each item is seen."""
        from nidiff.generation.masks import as_mask
        from nidiff.generation.observed import MASK, averaged, blurred, through
        from nidiff.generation.restoration import seeded

        if self.scale is not None:
            return averaged(model, self.scale, len(items))
        if self.blur is not None:
            return blurred(model, self.blur, len(items))
        if self.mask is None:
            return through(items.isfinite())
        masks = as_mask(self.mask, model.shape, seeded(self.restoring.seed, MASK)).expand(items.shape)
        if items.is_floating_point() and bool((masks & items.isnan()).any()):
            raise InputError(f"mask={self.mask!r} sees points that are NaN in the file: use --missing instead.")
        if self.degrade and items.is_floating_point() and bool(items.isnan().any()):
            raise InputError(f"--degrade needs clean data, and file={str(self.file)!r} has NaN: leave it out.")
        return through(masks)
