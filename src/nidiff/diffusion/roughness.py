"""Whether the noise is at least as rough as the data: smoother noise covers fine detail last and restores it last."""

from typing import NamedTuple

import torch

from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.gaussian import GaussianModel

LIMIT = 10.0  # how much more of the data's variance than of the noise's a fine mode may have


class Roughness(NamedTuple):
    """The fine mode with the largest (C/λ) / (mean C / mean λ), and that ratio."""

    mode: tuple[int, ...]
    ratio: float

    @property
    def warning(self) -> str | None:
        """A warning if the noise is smoother than the data, else None."""
        if self.ratio <= LIMIT:
            return None
        return (
            f"the noise is smoother than the data: relative to their means, mode {self.mode} has {self.ratio:.0f} "
            "times as much of the data's variance as of the noise's, so that fine detail comes out wrong with few "
            "steps; use a rougher Σ, by a smaller gamma or from_data:power=0.5."
        )


def roughness(gaussian: GaussianModel, covariance: Covariance) -> Roughness:
    """How much smoother the noise N(0, Σ) is than the data, at the worst of the finer half of the modes.

    The finer half is that of the larger wavenumbers, or, where the basis has none, of the smaller C.
    """
    data, noise = gaussian.spectrum(covariance), covariance.eigenvalues
    index = gaussian.spatial.wavenumbers
    coarse_first = -data.flatten() if index is None else index.expand(data.shape).flatten()
    finer = coarse_first.argsort(stable=True)[data.numel() // 2 :]
    ratios = ((data / noise) / (data.mean() / noise.mean())).flatten()[finer]
    worst = int(finer[ratios.argmax()])
    mode = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), data.shape))
    return Roughness(mode, ratios.max().item())
