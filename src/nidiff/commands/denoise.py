"""``nidiff denoise``: what noisy data may have been without their noise."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from nidiff.commands.restoring import Restoring
from nidiff.errors import InputError

if TYPE_CHECKING:
    from nidiff.diffusion.denoiser import Denoiser
    from nidiff.generation.restoration import Restoration

VARIATION = 1  # tells the noise that is added from that of other purposes


@dataclass(frozen=True)
class Denoise:
    """Samples of what noisy data were without noise of the model's covariance, or variations of an image.

    With y = x0 + noise of covariance proportional to the model's, y is a state of the process, and sampling starts
    there: samples of x0 given y, as the model knows it, without any guidance."""

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, its model folder, or the name of a model that ships (see nidiff models)."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """The data, in their own units: a picture, .npy, .npz, NetCDF, HDF5, Zarr, or a folder of pictures or sounds."""
    restoring: Annotated[Restoring, arg(name="")]
    noise: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """The standard deviation of the noise that FILE has, in the units of the data (see --units)."""
    add_noise: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Instead, FILE is clean, and so much noise is added first, another for each sample, for variations of it. In the
    units of the model, where data have a standard deviation of about 1, or a range from -1 to 1."""

    def run(self) -> None:
        import torch

        from nidiff.generation.restoration import Restoration, draw, noise_level, seeded, to_model

        flags = self.restoring
        if (self.noise is None) == (self.add_noise is None):
            raise InputError("give one of noise=, the noise that the file has, and add_noise=, what is to be added.")
        model, plan = flags.open(self.model)
        own: dict[str, Any] = {"add_noise": self.add_noise} if self.noise is None else {"noise": self.noise}
        if self.noise is not None:
            level = noise_level(self.noise, model, flags.units)
        else:
            level = noise_level(self.add_noise or 0.0, model, "model", "add_noise")
        items = flags.load(self.file, model, model.shape)
        denoiser, y = plan.denoiser(model), to_model(items, model)

        def prepare(item: int, seeds: list[int]) -> "tuple[Denoiser, dict[str, Any]]":
            start = y[item].expand(len(seeds), *model.shape)
            if self.noise is None:
                sources = [seeded(seed, VARIATION) for seed in seeds]
                noise = denoiser.process.noise(tuple(start.shape), sources, device=y.device)
                start = start + level.sigma / level.signal * noise
            return denoiser, {"start": start, "level": level}

        def make() -> "Restoration":
            x, seeds = draw(model, plan, len(items), prepare, "denoising")
            observed = items.to(torch.float32)
            label = "given" if self.noise is None else "observed"
            return Restoration(x, seeds, observed, model.grid, model.denoiser.scaling, label=label)

        flags.finish(model, flags.task("denoise", self.file, items, plan, **own), make)
