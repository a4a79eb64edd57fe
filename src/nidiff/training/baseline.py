"""What the data's Gaussian alone achieves: the baseline that a trained model is to be compared with."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.data.named import DATASETS
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.errors import InputError
from nidiff.recipe import fits
from nidiff.training.experiment import Experiment

KEYS = ("bits_per_dim", "images", "split")
MOST, BLOCK = 2048, 256  # images, and so many at a time


def gaussian_baseline(experiment: Experiment, images: Dataset, gaussian: GaussianModel | None) -> dict[str, Any]:
    """Bits per dimension under N(μ, C) of (at most 2,048) held-out images, or of the training ``images`` if there are
    none; nothing without a Gaussian."""
    if gaussian is None:
        return {}
    split = "train"
    if experiment.data in DATASETS:
        with contextlib.suppress(InputError, OSError):
            held_out = experiment.load_data(split="test", progress=False)
            if held_out.shape == images.shape:
                images, split = held_out, "test"
    return dict(zip(KEYS, (*mean_bits(gaussian, len(images), images.batch), split), strict=True))


def mean_bits(
    gaussian: GaussianModel, total: int, batch: Callable[[Tensor], Tensor], scaling: Scaling = PIXELS
) -> tuple[float, int]:
    """Bits per dimension under N(μ, C) of (at most 2,048 of) ``total`` images, and of how many; ``batch`` gives some
    rows of them as the model sees them, and ``scaling`` says how wide a step of their 8 bits is there."""
    scales = scaling.scale if isinstance(scaling.scale, tuple) else (scaling.scale,)
    width = 1 / math.prod(abs(scale) for scale in scales) ** (1 / len(scales))
    count = min(total, MOST)
    chosen = torch.linspace(0, total - 1, count, dtype=torch.float64).long()
    bits = [gaussian.bits_per_dim(batch(rows).double(), bin_width=width) for rows in chosen.split(BLOCK)]
    return float(f"{torch.cat(bits).mean().item():.4g}"), count


def baseline_text(found: Any) -> str | None:
    """What `gaussian_baseline` found, in words; None if it is nothing, or is not what it wrote."""
    bits, count, split = (found.get(key) if isinstance(found, dict) else None for key in KEYS)
    if not (fits(bits, float) and fits(count, int)):
        return None
    kind = "held-out" if split == "test" else "training"
    return f"{bits:.4g} bits per dimension of {count:,} {kind} images under N(μ, C)"
