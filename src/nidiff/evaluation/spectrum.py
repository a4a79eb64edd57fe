"""How far the power spectrum of generated images is from that of real ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from nidiff.covariance.spectral import Fourier, radial_mean, wavenumber
from nidiff.distance import as_pixels
from nidiff.errors import InputError

CHUNK = 256  # images at a time


@torch.no_grad()
def spectrum_error(real_images: Tensor, generated_images: Tensor) -> float:
    """The root mean square over the wavenumbers of log P_generated − log P_real, natural logarithms.

    P is the `radial_power` of images [N, C, H, W]. Every wavenumber counts the same, whatever its power, up to the
    corner of the spectrum: 0.1 is about 10 % of power at each. No mean image is removed, since generated images must
    have the right one; but wavenumber 0, the brightness of each channel, is left out.
    """
    return spectrum_to(real_images)(generated_images)


@torch.no_grad()
def spectrum_to(real_images: Tensor) -> Callable[[Tensor], float]:
    """``spectrum_error(real_images, ·)``, with what depends on the real images alone computed once."""
    _check_images(real_images, "real_images")
    real, shape = _log_power(real_images, "real_images"), real_images.shape[1:]

    def error(generated_images: Tensor) -> float:
        _check_images(generated_images, "generated_images")
        if generated_images.shape[1:] != shape:
            raise InputError(
                f"generated_images are {tuple(generated_images.shape[1:])} and real_images {tuple(shape)}: "
                "give images of one shape."
            )
        return (_log_power(generated_images, "generated_images") - real).square().mean().sqrt().item()

    return error


@torch.no_grad()
def radial_power(images: Tensor) -> Tensor:
    """|FFT|² of images [N, C, H, W], float64: the mean over images, channels and the modes of each rounded |k|.

    |k| = 0, 1, … is in cycles per longer side, and NaN stands for one without modes. The FFT is orthonormal, so white
    noise of variance 1 has power 1. uint8 becomes [-1, 1], floats stay.
    """
    height, width = images.shape[-2:]
    power = torch.zeros(height, width, dtype=torch.float64)
    for chunk in images.split(CHUNK):
        modes = torch.fft.fft2(as_pixels(chunk).double(), norm="ortho")
        power += modes.abs().square().sum((0, 1)).cpu()
    shell = wavenumber(Fourier, (height, width)).round().long()
    return radial_mean(power / (images.shape[0] * images.shape[1]), shell)


def _log_power(images: Tensor, name: str) -> Tensor:
    power = radial_power(images)
    has_modes = ~power.isnan()
    has_modes[0] = False
    # What the FFT leaves of a constant is 1e-32 of its power.
    scale = sum(as_pixels(chunk).double().square().sum().item() for chunk in images.split(CHUNK)) / images.numel()
    empty = (has_modes & (power <= 1e-24 * scale)).nonzero().flatten().tolist()
    if empty:
        raise InputError(
            f"{name} have no power at wavenumber {empty[0]}: give images that are not constant or cut off there."
        )
    return power[has_modes].log()


def _check_images(images: Tensor, name: str) -> None:
    if images.ndim != 4 or images.numel() == 0 or max(images.shape[-2:]) < 2:
        raise InputError(f"{name} has shape {tuple(images.shape)}: give images [N, C, H, W] of 2 pixels or more.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InputError(f"{name} has dtype {images.dtype}: give uint8 or floats.")
    if not all(bool(torch.isfinite(chunk).all()) for chunk in images.split(CHUNK)):
        raise InputError(f"{name} has NaN or infinite pixels: remove those images.")
