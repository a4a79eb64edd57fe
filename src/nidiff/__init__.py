"""Diffusion models with non-isotropic Gaussian noise.

The public names are listed in ``__init__.pyi``; each is imported when it is first used, so ``import nidiff`` is quick.
"""

from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.3.0"

# Names that version 0.2 had at the top, by the namespace that has them now.
MOVED = {
    "schedules": "blue blurring ddpm_cosine ddpm_linear designed equal_snr flow from_alphas_cumprod from_betas heat"
    " offset_ramp scaled_linear smld_geometric soft_conditioning ve vp",
    "metrics": "compare_cross_spectra compare_fields compare_spectra field_spectrum frechet_distance kernel_distance"
    " precision_recall spectrum_error structure_function wasserstein",
    "design": "Calibration Prediction calibrate gaussian_loss measure_kappa predict",
    "interop": "Whitened whitened",
    "diffusion.target": "Target",
}


def __getattr__(name: str) -> Any:
    for namespace, names in MOVED.items():
        if name in names.split():
            raise AttributeError(f"nidiff.{name} has moved to nidiff.{namespace}.{name}.")
    return _attribute(name)
