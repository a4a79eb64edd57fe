"""A warm start: where x is still Gaussian to within a bound, sampling can begin with the Gaussian model itself.

At a level x has the mean and covariance of N(signal μ, signal² C + sigma² Σ), and how far it is from that Gaussian is
known. With w = signal² C / total, the share of the signal, and κ = E F² of the exact denoiser, both per mode,

    KL(x ‖ Gaussian) = ½ ∫ Σ_k w_k κ_k dℓ_k          from ℓ = −∞ to the level, ℓ the log-SNR

since its derivative is ½ SNR times what E[x0 | x] is better than the Wiener filter (I-MMSE; Guo, Shamai and Verdú
2005), C (1 − w) κ. κ is at most 1, and with κ = 1 the integral is ½ Σ_k log(1 + signal² C / (sigma² Σ)).
"""

import torch

from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.process import Process
from nidiff.recipe import check_number

MAX_LOSS = 0.005
"""Nats per dimension that a warm start may lose by default, whatever the data."""


def gaussian_loss(process: Process, gaussian: GaussianModel, row: float, kappa: Kappa | None = None) -> float:
    """KL(x ‖ Gaussian) at a row of the schedule, in nats per dimension: an upper bound of it, for any data; with κ, an
    estimate, as good as the network that κ was measured on (one that finds less than there is has too small a κ).

    Between the rows at which κ is known its mean counts; beyond the noisiest of them, what it is there.
    """
    if kappa is None:
        return _information(process, gaussian, row).mean().item()
    kappa.check(gaussian)
    rows = [row, *(each for each in kappa.rows.tolist() if each > row)]
    shares = torch.stack([kappa.at(process.schedule.level(each), gaussian)[0].values for each in rows])
    information = torch.stack([_information(process, gaussian, each).expand(shares[0].shape) for each in rows])
    between = torch.trapezoid(shares.flip(0), information.flip(0), dim=0)
    return (shares[-1] * information[-1] + between).mean().item()


def start_row(
    process: Process, gaussian: GaussianModel, max_loss: float | None = None, kappa: Kappa | None = None
) -> int:
    """The least noisy row at which the loss is at most ``max_loss``, whatever the data; the noisiest if it may be more
    everywhere. With ``kappa`` the loss is an estimate: that of a network is less than the exact one."""
    max_loss = check_number("max_loss", MAX_LOSS if max_loss is None else max_loss, above=0.0)
    low, high = 0, len(process.schedule) - 1  # the loss falls with the rows
    while low < high:
        middle = (low + high) // 2
        if gaussian_loss(process, gaussian, middle, kappa) <= max_loss:
            high = middle
        else:
            low = middle + 1
    return low


def _information(process: Process, gaussian: GaussianModel, row: float) -> torch.Tensor:
    """½ log(1 + signal² C / (sigma² Σ)) of every mode, or of all alike: what x tells of x0 if that is Gaussian."""
    level = process.schedule.level(row)
    return 0.5 * ((level.signal / level.sigma) ** 2 * gaussian.check_basis(process.covariance)).values.log1p()
