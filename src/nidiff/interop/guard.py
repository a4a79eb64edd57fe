"""Two classic mistakes: white noise starts a model of coloured noise, and ``eta`` is passed as the ``generator``."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from nidiff.diffusion.process import Process
from nidiff.errors import InputError

LIMIT = 12.0  # nats


def warn_if_white(process: Process, x: Tensor) -> None:
    """Warn where white noise of some strength explains the initial sample x better than the prior, by a factor e¹².

    A draw from the prior is better explained by a given other law by that factor with a probability of at most e⁻¹²,
    since the mean of the ratio of densities is 1. A start that is white and passes is hardly less likely under the
    prior than under white noise: a single small image, a Σ that differs from I in few modes.
    """
    x = x.detach()
    white = -0.5 * x.numel() * (torch.log(2 * torch.pi * x.double().square().mean()) + 1)
    if bool(white - process.prior_log_prob(x).double().sum() > LIMIT):
        warnings.warn(
            f"The initial sample is not N(0, Σ) with Σ = {process.covariance!r}, so the images will not be the "
            "model's: draw it by scheduler.init_noise(shape), or use nidiff.interop.NonIsotropicPipeline.",
            UserWarning,
            stacklevel=3,
        )


def check_generator(generator: object) -> None:
    """Refuse what is no generator: the fourth argument of `DDIMScheduler.step` is eta."""
    each = generator if isinstance(generator, Sequence) else (generator,)
    if generator is not None and not all(isinstance(one, torch.Generator) for one in each):
        raise InputError(
            f"generator={generator!r} must be a torch.Generator or a list of one per image; give eta by name, eta=…."
        )
