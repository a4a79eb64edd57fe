"""How far the power spectrum of generated images is from that of real ones."""

import torch
from torch import Tensor

from nidiff.calibration.distance import as_pixels
from nidiff.covariance.spectral import radial_mean, wavenumber
from nidiff.errors import InputError
from nidiff.evaluation.points import Array, as_tensor

CHUNK = 256  # images at a time


def spectrum_error(real_images: Array, generated_images: Array) -> float:
    """The root mean square over the wavenumbers of log P_generated − log P_real, natural logarithms.

    P is the mean of `radial_powers` over the images [N, C, H, W]. Every wavenumber counts the same, whatever its power,
    up to the corner of the spectrum: 0.1 is about 10 % of power at each. No mean image is removed, since generated
    images must have the right one; but wavenumber 0, the brightness of each channel, is left out.
    """
    real, generated = _as_images(real_images, "real_images"), _as_images(generated_images, "generated_images")
    mine, other = tuple(real.shape[1:]), tuple(generated.shape[1:])
    if other != mine:
        raise InputError(f"generated_images are {other} and real_images {mine}: give images of one shape.")
    return powers_error(radial_powers(real), radial_powers(generated))


def powers_error(real: Tensor, generated: Tensor) -> float:
    """`spectrum_error` from the `radial_powers` of the images."""
    difference = _log_spectrum(generated, "generated_images") - _log_spectrum(real, "real_images")
    return difference.square().mean().sqrt().item()


@torch.no_grad()
def radial_powers(images: Tensor) -> Tensor:
    """|FFT|² of images [N, C, H, W], float64 [N, K]: the mean over channels and the modes of each rounded |k|.

    |k| = 0, 1, … is in cycles per longer side, and NaN stands for one without modes. The FFT is orthonormal, so white
    noise of variance 1 has power 1. uint8 becomes [-1, 1], floats stay.
    """
    shell = wavenumber(tuple(images.shape[-2:])).round().long()
    spectra = (torch.fft.fft2(as_pixels(chunk).double(), norm="ortho").abs().square() for chunk in images.split(CHUNK))
    return torch.cat([radial_mean(spectrum.mean(1).cpu(), shell) for spectrum in spectra])


def _log_spectrum(powers: Tensor, name: str) -> Tensor:
    """The logarithm of the mean power, of the wavenumbers above 0 that have modes."""
    power = powers.mean(0)
    has_modes = ~power.isnan()
    has_modes[0] = False
    # What the FFT leaves of a constant is 1e-32 of its power.
    empty = (has_modes & (power <= 1e-24 * power.nan_to_num().max())).nonzero().flatten().tolist()
    if empty:
        raise InputError(f"{name} have no power at wavenumber {empty[0]}: give images that vary at that scale too.")
    return power[has_modes].log()


def _as_images(images: Array, name: str) -> Tensor:
    images = as_tensor(images, name)
    if images.ndim != 4 or images.numel() == 0 or max(images.shape[-2:]) < 2:
        raise InputError(f"{name} has shape {tuple(images.shape)}: give images [N, C, H, W] of 2 pixels or more.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"{name} has dtype {images.dtype}: give uint8 or floats.")
    return images
