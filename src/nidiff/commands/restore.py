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

    from nidiff.diffusion.denoiser import Denoiser
    from nidiff.generation.opened import Model
    from nidiff.generation.restoration import Restoration
    from nidiff.inverse.operators import Operator

ROUNDING = 12**-0.5  # the standard deviation of what rounding to whole numbers takes away
MASK, NOISE = 2, 3  # tell the randomness of one purpose from that of another


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
        import torch

        from nidiff.diffusion.scaling import Scaling
        from nidiff.generation.restoration import Restoration, draw, in_model_units, seeded, to_model, values_sha256
        from nidiff.inverse.observation import Observation
        from nidiff.inverse.posterior import posterior
        from nidiff.randomness import white_noise

        flags, how = self.restoring, self._how()
        model, plan = flags.open(self.model)
        scaling = model.denoiser.scaling or Scaling(1.0)
        if how in ("scale", "blur") and not scaling.is_linear:
            raise InputError(f"{how} has no meaning where the model sees the logarithm of the data: use mask=.")
        try:
            items = flags.load(self.file, model, self._shape(model), with_nan=how in ("mask", "missing"))
        except InputError as error:
            if self.scale is None or self.degrade:
                raise
            raise InputError(f"{str(error).rstrip('.')}; for a file of full size, add --degrade.") from error
        deviations = in_model_units(self.noise, model, flags.units)
        if how in ("scale", "blur") and not self.degrade and not items.is_floating_point():
            rounding = in_model_units(ROUNDING, model, "data")
            deviations = tuple(math.hypot(*both) for both in zip(deviations, rounding, strict=True))
        masks, operators = self._operators(model, items)
        denoiser, y = plan.denoiser(model), to_model(_filled(items, masks, scaling), model)
        noise: Any = deviations[0]
        if len({*deviations}) > 1:
            noise = torch.tensor(deviations, device=y.device).reshape(-1, *[1] * (len(model.shape) - 1))
        if self.degrade:
            rows = [operators[item](y[item : item + 1])[0] for item in range(len(y))]
            clean = torch.stack(rows)
            sources = [seeded(flags.seed, item, NOISE) for item in range(len(y))]
            y = clean + noise * white_noise(clean.shape, sources, device=y.device)
        given: dict[int, Denoiser] = {}

        def prepare(item: int, seeds: list[int]) -> "tuple[Denoiser, dict[str, Any]]":
            if item not in given:
                given.clear()
                observation = Observation(y[item : item + 1], operators[item], noise)
                given[item] = posterior(denoiser, observation, self.method)
            return given[item], {}

        def make() -> "Restoration":
            x, seeds = draw(model, plan, len(items), prepare, "restoring")
            observed = scaling.to_data(y.cpu())
            observed = observed if masks is None else torch.where(masks, observed, torch.nan)
            truth = items.float() if self.degrade else None
            hidden = None if masks is None else ~masks
            return Restoration(x, seeds, observed, model.grid, model.denoiser.scaling, truth, hidden)

        own: dict[str, Any] = {how: getattr(self, how), "noise": self.noise, "method": self.method}
        own |= {"degrade": self.degrade} | ({} if masks is None else {"masks": values_sha256(masks)})
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
        from nidiff.recipe import check_whole

        channels, *event = model.shape
        factor = 1 if self.scale is None else check_whole("scale", self.scale, 2)
        if any(size % factor for size in event):
            raise InputError(f"scale={factor} does not divide the model's {tuple(event)}: give a number that does.")
        return (channels, *(event if self.degrade else [size // factor for size in event]))

    def _operators(self, model: "Model", items: "Tensor") -> "tuple[Tensor | None, list[Operator]]":
        """The operator of each item, and, of masks, what each sees, [N, C, *event]."""
        from nidiff.generation.masks import as_mask
        from nidiff.generation.opened import boundaries
        from nidiff.generation.restoration import seeded
        from nidiff.inverse import operators as op

        if self.scale is not None:
            return None, [op.pool(self.scale)] * len(items)
        if self.blur is not None:
            boundary = boundaries(model.denoiser, len(model.shape) - 1)
            if not 0 < self.blur <= max(model.shape[1:]):
                raise InputError(f"blur={self.blur} must be a width in pixels, above 0 and below the size of an item.")
            return None, [op.blur(self.blur, boundary)] * len(items)
        if self.mask is not None:
            masks = as_mask(self.mask, model.shape, seeded(self.restoring.seed, MASK)).expand(items.shape)
            if items.is_floating_point() and bool((masks & items.isnan()).any()):
                raise InputError(f"mask={self.mask!r} sees points that are NaN in the file: use --missing instead.")
            if self.degrade and items.is_floating_point() and bool(items.isnan().any()):
                raise InputError(f"--degrade needs clean data, and file={str(self.file)!r} has NaN: leave it out.")
        else:
            masks = items.isfinite()
        return masks, [op.mask(one) for one in masks]


def _filled(items: "Tensor", masks: "Tensor | None", scaling: Any) -> "Tensor":
    """What no mask sees may be NaN, or have no logarithm: there, the data that the model sees as 0."""
    import torch

    if masks is None or not items.is_floating_point():
        return items
    return torch.where(masks, items, scaling.to_data(torch.zeros_like(items)))
