"""The power of N(0, Σ) and of images by wavenumber."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nidiff.covariance.kronecker import Kronecker
from nidiff.covariance.operator import Covariance
from nidiff.covariance.spectral import Boundary, boundary_per_axis, radial_mean, wavenumber, white_in

BLOCK = 256
POWER = "power per mode"
UNITS = {"periodic": "cycles", "reflecting": "half cycles", "fixed": "half cycles"}  # of the lowest wave


def wavenumber_label(shape: Sequence[int], boundary: Boundary = "periodic") -> str:
    """What |k| = 1 is, for an axis of a figure."""
    units = {UNITS[name] for name in boundary_per_axis(boundary, len(shape))}
    side = "signal" if len(shape) == 1 else "side" if len(set(shape)) == 1 else "longest side"
    return f"wavenumber |k| ({f'{units.pop()} per {side}' if len(units) == 1 else '1 = lowest frequency'})"


class RadialModes:
    """Modes by their rounded |k|: those of the boundary that all of ``covariances`` have, else waves."""

    def __init__(self, covariances: Iterable[Covariance]) -> None:
        covariances = list(covariances)
        shape = covariances[0].event_shape
        boundaries = {covariance.boundary for covariance in covariances if not covariance.is_constant}
        boundary = boundaries.pop() if len(boundaries) == 1 else None
        self._basis = white_in(boundary or "periodic", shape)
        self._shell = wavenumber(shape, boundary or "periodic").round().long()
        self.label = wavenumber_label(shape, boundary or "periodic")

    def expected(self, covariance: Covariance) -> Tensor:
        """The power of each |k| in draws of N(0, Σ); the mean over the channels where Σ is over them, too."""
        power = mode_power(covariance, self._basis).reshape(-1, *self._shell.shape)
        return radial_mean(power.mean(0), self._shell)

    def measured(self, images: Tensor) -> Tensor:
        """The mean power of each |k| in images [..., *event]."""
        power = self._basis.periodogram(images.double())
        return radial_mean(power.reshape(-1, *self._shell.shape).mean(0), self._shell)


def mode_power(covariance: Covariance, basis: Covariance) -> Tensor:
    """E |f_kᴴ x|² = f_kᴴ Σ f_k for x ~ N(0, Σ) and every mode f_k of ``basis``: λ where Σ is diagonal in it.

    A wave of a ⊗ b is a product of waves, and its power that of their powers. Elsewhere it is the sum over pixels j of
    |f_kᴴ Σ^½ e_j|², which costs N transforms.
    """
    if covariance.spatial.boundary == basis.boundary or covariance.is_constant:
        return covariance.eigenvalues
    if isinstance(covariance, Kronecker) and covariance.is_product and set(basis.boundary or ()) == {"periodic"}:
        a, b = (mode_power(one, white_in("periodic", one.event_shape)) for one in (covariance.a, covariance.b))
        return torch.tensordot(a, b, 0)
    power = torch.zeros(covariance.event_shape, dtype=torch.float64)
    for pixels in torch.arange(covariance.size).split(BLOCK):
        impulses = torch.nn.functional.one_hot(pixels, covariance.size).double()
        power += basis.periodogram(covariance.sqrt(impulses.reshape(-1, *covariance.event_shape))).sum(0)
    return power
