"""What the data's Gaussian alone achieves: the baseline that a trained model is to be compared with."""

import contextlib
from typing import Any

import torch

from nidiff.data.images import Images
from nidiff.data.named import DATASETS
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.errors import InputError
from nidiff.recipe import fits
from nidiff.training.experiment import Experiment

KEYS = ("bits_per_dim", "images", "split")
MOST, BLOCK = 2048, 256  # images, and so many at a time


def gaussian_baseline(experiment: Experiment, images: Images, gaussian: GaussianModel | None) -> dict[str, Any]:
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
    count = min(len(images), MOST)
    chosen = torch.linspace(0, len(images) - 1, count, dtype=torch.float64).long()
    total = sum(gaussian.bits_per_dim(images.batch(index).double()).sum().item() for index in chosen.split(BLOCK))
    return dict(zip(KEYS, (float(f"{total / count:.4g}"), count, split), strict=True))


def baseline_text(found: Any) -> str | None:
    """What `gaussian_baseline` found, in words; None if it is nothing, or is not what it wrote."""
    bits, count, split = (found.get(key) if isinstance(found, dict) else None for key in KEYS)
    if not (fits(bits, float) and fits(count, int)):
        return None
    kind = "held-out" if split == "test" else "training"
    return f"{bits:.4g} bits per dimension of {count:,} {kind} images under N(μ, C)"
