"""The power of N(0, Σ) and of images by wavenumber, and how it is drawn."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nidiff import style
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.waves import Boundary, Waves, boundary_per_axis
from nidiff.evaluation.spectrum import Shells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

BLOCK = 256
MANY = 200  # wavenumbers
LIMIT = 12.0  # of log-SNR, in colour
POWER = "power per mode"
UNITS = {"periodic": "cycles", "reflecting": "half cycles", "fixed": "half cycles"}  # of the lowest wave


def wavenumber_label(shape: Sequence[int], boundary: Boundary = "periodic") -> str:
    """What |k| = 1 is, for an axis of a figure."""
    units = {UNITS[name] for name in boundary_per_axis(boundary, len(shape))}
    side = "signal" if len(shape) == 1 else "side" if len(set(shape)) == 1 else "longest side"
    return f"wavenumber |k| ({f'{units.pop()} per {side}' if len(units) == 1 else '1 = lowest frequency'})"


def draw_wavenumbers(axes: "Axes", largest: float, label: str) -> None:
    """The axes of a spectrum, logarithmic; that of |k| is linear from 0 to 1, so that the mean (k = 0) can be shown."""
    axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.7)
    axes.set_yscale("log")
    if largest > MANY:  # a label for every power of 2 would not fit
        axes.set_xticks([0, *(4**power for power in range(12) if 4**power <= largest)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)
    axes.grid()


def draw_logsnr(axes: "Axes", logsnr: Tensor, radii: Sequence[float] | None = None) -> "ScalarMappable":
    """The log-SNR [levels, bands] in colour over levels from 0 to 1, with a line where it is 0."""
    values = logsnr.T.numpy()
    levels, bands = np.linspace(0, 1, values.shape[1]), np.arange(values.shape[0]) if radii is None else radii
    mesh = axes.pcolormesh(levels, bands, values, cmap=style.LOGSNR, vmin=-LIMIT, vmax=LIMIT, shading="nearest")
    if min(values.shape) > 1 and values.min() < 0 < values.max():
        axes.contour(levels, bands, values, levels=[0.0], colors=style.LIGHT.ink, linewidths=1.2)
    return mesh


def common_shells(covariances: Iterable[Covariance]) -> Shells:
    """The modes of the boundary that all of ``covariances`` have, else waves."""
    covariances = list(covariances)
    boundaries = {covariance.basis.boundary for covariance in covariances if not covariance.is_constant}
    boundary = boundaries.pop() if len(boundaries) == 1 else None
    return Shells(covariances[0].event_shape, None, boundary or "periodic")


def expected_spectrum(covariance: Covariance, shells: Shells) -> Tensor:
    """The power of each |k| in draws of N(0, Σ); the mean over the channels where Σ is over them, too."""
    power = mode_power(covariance, shells.basis)
    return shells.mean(power.reshape(-1, *shells.shape).mean(0))


def mean_spectrum(images: Tensor, shells: Shells) -> Tensor:
    """The mean power of each |k| in images [..., *event]."""
    return shells.powers(images.reshape(-1, 1, *shells.shape)).mean((0, 1))


def mode_power(covariance: Covariance, basis: Waves) -> Tensor:
    """E |f_kᴴ x|² = f_kᴴ Σ f_k for x ~ N(0, Σ) and every mode f_k of ``basis``: λ where Σ is diagonal in it.

    A wave of a ⊗ b is a product of waves, and its power that of their powers. Elsewhere it is the sum over pixels j of
    |f_kᴴ Σ^½ e_j|², which costs N transforms.
    """
    if covariance.spatial.boundary == basis.boundary or covariance.is_constant:
        return covariance.eigenvalues
    origin = covariance.origin
    if origin is not None and origin.name == "Kronecker" and set(basis.boundary) == {"periodic"}:
        factors = origin.arguments["a"], origin.arguments["b"]
        a, b = (mode_power(factor, Waves(factor.event_shape)) for factor in factors)
        return origin.scale * torch.tensordot(a, b, 0)
    power = torch.zeros(covariance.event_shape, dtype=torch.float64)
    for pixels in torch.arange(covariance.size).split(BLOCK):
        impulses = torch.nn.functional.one_hot(pixels, covariance.size).double()
        power += basis.power(covariance.sqrt(impulses.reshape(-1, *covariance.event_shape))).sum(0)
    return power
