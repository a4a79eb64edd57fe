"""A warm start: where x is nearly distributed as a model of the data says, sampling can begin with that model itself.

The models are the data's Gaussian and its mixture, whose laws q of x at a level are known. How far x itself is from
them is known too: in whitened coordinates, mode by mode, the derivative of KL by the signal-to-noise ratio is half of
what the denoiser of q is worse than the exact one (I-MMSE; Guo, Shamai and Verdú 2005, and Verdú 2010 for any q):

    KL(x ‖ q) = ½ Σ_k ∫ (mse_k of q's denoiser − mse_k of the exact one) dSNR_k          from 0 to the level

The excess is measured in units of the variance that the Gaussian leaves, spread² = C Σ sigma² / total, as a share of it
per mode. The integral is then that of share_k d information_k, information = ½ log(1 + signal² C / (sigma² Σ)), which
is what x tells of Gaussian data. Of the Gaussian itself the share is κ ≤ 1, so the information is an upper bound.
"""

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser, require_gaussian
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import interpolate
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_number

MAX_LOSS = {"gaussian": 0.005, "mixture": 0.0005}
"""Nats per dimension that a warm start may lose by default: of the Gaussian mostly an upper bound, of the mixture an
estimate. The latter is a first choice, from one network of Fashion-MNIST."""
STARTS = ("prior", *MAX_LOSS)


def check_start(denoiser: Denoiser, start: str) -> None:
    """Refuse a start from a model of the data that the denoiser does not have."""
    if one_of("start", start, STARTS) == "gaussian":
        require_gaussian(denoiser.gaussian, "start", start)
    elif start == "mixture" and denoiser.mixture is None:
        remedy = "nidiff train fits one when it ends; in Python, denoiser.with_mixture(nidiff.fit_mixture(data))"
        raise InputError("start", start, "needs the data's mixture", remedy)


def start_loss(denoiser: Denoiser, start: str, row: float) -> float:
    """KL(x ‖ model) at a row of the schedule, in nats per dimension: what sampling loses that begins there with the
    "gaussian" or the "mixture".

    Where `nidiff.design.measure_kappa` measured it, an estimate, linear between its rows, and as good as the network:
    one that finds less than there is has too small a loss. Else the upper bound of the Gaussian's, whatever the data.
    """
    check_start(denoiser, start)
    if denoiser.kappa is not None and start in denoiser.kappa.losses:
        position = torch.tensor(float(row), dtype=torch.float64, device="cpu")
        return interpolate(position, denoiser.kappa.rows.double(), denoiser.kappa.losses[start].double()).item()
    gaussian = require_gaussian(denoiser.gaussian, "start", start)
    return _information(denoiser.process, gaussian, row).mean().item()


def start_row(denoiser: Denoiser, start: str, max_loss: float | None = None) -> int:
    """The least noisy row at which `start_loss` is at most ``max_loss``; the noisiest if it is more everywhere."""
    max_loss = check_number("max_loss", MAX_LOSS[start] if max_loss is None else max_loss, above=0.0)
    low, high = 0, len(denoiser.process.schedule) - 1  # the loss falls with the rows
    while low < high:
        middle = (low + high) // 2
        if start_loss(denoiser, start, middle) <= max_loss:
            high = middle
        else:
            low = middle + 1
    return low


def warm_text(
    denoiser: Denoiser, count: int, start: str, max_loss: float | None = None, level: float | None = None, **_: object
) -> str:
    """Where sampling in ``count`` steps begins, and what that loses, in words."""
    check_start(denoiser, start)
    row = max(start_row(denoiser, start, max_loss), count - 1) if level is None else level
    begin = f"beginning with the {start} of the data at row {row:g} of {len(denoiser.process.schedule)}"
    measured = denoiser.kappa is not None and start in denoiser.kappa.losses
    if denoiser.gaussian is None and not measured:
        return f"{begin}; what that loses is not known"
    words = "by measurement" if measured else "at most" if start == "gaussian" else "at most, by its Gaussian,"
    return f"{begin}, which loses {words} {start_loss(denoiser, start, row):.2g} nats per dimension"


def integrated_loss(process: Process, gaussian: GaussianModel, rows: Tensor, shares: Tensor) -> Tensor:
    """KL(x ‖ q) of several models q at rising rows [n], in nats per dimension [models, n], of the shares [models, n,
    *modes] by which their denoisers are worse than the network's there.

    Between two rows the mean of theirs counts. None of the denoisers is better than the exact one, so from row to row
    the best of them, the network or a model, stands for it: a poor network does not make up for what a model loses.
    Beyond the noisiest row, a model loses at most what the signal that is left there tells.
    """
    information = torch.stack(
        [_information(process, gaussian, row).expand(shares[0, 0].shape) for row in rows.tolist()]
    )
    steps = -information.diff(dim=0).double()
    excess = (0.5 * (shares[:, 1:] + shares[:, :-1]).double() * steps).flatten(2).mean(2)
    excess = excess - excess.amin(0).clamp(max=0.0)
    beyond = information[-1].mean().expand(len(shares), 1)
    return torch.cat([excess, beyond], dim=1).flip(1).cumsum(1).flip(1)


def _information(process: Process, gaussian: GaussianModel, row: float) -> Tensor:
    """½ log(1 + signal² C / (sigma² Σ)) of every mode, or of all alike: what x tells of x0 if that is Gaussian."""
    level = process.schedule.level(row)
    return 0.5 * ((level.signal / level.sigma) ** 2 * gaussian.check_basis(process.covariance)).values.log1p()
