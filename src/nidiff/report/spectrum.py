"""The power of N(0, Σ) in the modes of any basis."""

import torch
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.covariance.spectral import Cosine, Fourier

BLOCK = 256


def mode_power(covariance: Covariance, basis: Fourier | Cosine) -> Tensor:
    """E |f_kᴴ x|² = f_kᴴ Σ f_k for x ~ N(0, Σ) and every mode f_k of ``basis``: λ where Σ is diagonal in it.

    Elsewhere it is the sum over pixels j of |f_kᴴ Σ^½ e_j|², which costs N transforms.
    """
    if covariance.basis == basis.basis or covariance.is_constant:
        return covariance.eigenvalues
    power = torch.zeros(covariance.event_shape, dtype=torch.float64)
    for pixels in torch.arange(covariance.size).split(BLOCK):
        impulses = torch.nn.functional.one_hot(pixels, covariance.size).double()
        power += basis.periodogram(covariance.sqrt(impulses.reshape(-1, *covariance.event_shape))).sum(0)
    return power
