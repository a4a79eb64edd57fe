"""Whether sampling starts from N(0, Σ), or from the white noise that the pipelines of diffusers draw by themselves."""

import math
import warnings

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.process import Process
from nidiff.precision import widest

EVIDENCE = 4.0  # of all starts of a scheduler together, in nats
SURPRISE = 12.0  # of one start, for white noise of whatever strength


class StartCheck:
    """Warns once of initial samples that white noise explains better than N(0, Σ).

    What `init_noise` drew is known to be right and is not looked at. Of other starts the log-ratios of the densities
    under white noise and under the prior are added up. The ratio has mean 1 under the prior, so that right starts from
    elsewhere ever pass e⁴ with a probability of at most e⁻⁴ in all, however many there are (Ville's inequality). One
    image of Stable Diffusion, 4 channels of 64×64 under offset noise of strength 0.1, gives 5.5 nats in the mean.
    """

    def __init__(self) -> None:
        self._drawn = self._warned = False
        self._evidence = 0.0

    def drawn(self) -> None:
        """The next start was drawn from the prior."""
        self._drawn = True

    def __call__(self, process: Process, x: Tensor, remedy: str) -> None:
        """Look at the initial sample x."""
        known, self._drawn = self._drawn, False
        if known or self._warned:
            return
        white, best, prior = _log_densities(process.covariance, x.detach() / process.schedule.prior_scale)
        self._evidence += white - prior
        if self._evidence > EVIDENCE or best - prior > SURPRISE:
            self._warned = True
            warnings.warn(
                f"The initial sample is white noise, or something else that is not N(0, Σ) with Σ = "
                f"{process.covariance!r}, so the images will not be the model's: {remedy}.",
                stacklevel=5,
            )


def _log_densities(covariance: Covariance, x: Tensor) -> tuple[float, float, float]:
    """Of white noise, of white noise with the mean square of x, and of N(0, Σ), up to the same constant."""
    wide, numbers = x.to(widest(x.device)), x.numel()
    square = wide.square().sum()
    best = -0.5 * numbers * (torch.log(square / numbers) + 1)
    prior = covariance.log_prob(wide).sum() + 0.5 * numbers * math.log(2 * math.pi)
    white, best, prior = torch.stack([-0.5 * square, best, prior]).tolist()
    return white, best, prior
