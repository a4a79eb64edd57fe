"""What the data's Gaussian alone achieves: the baseline that a trained model is to be compared with."""

import contextlib
import math
from typing import Any

import torch

from nidiff.data.dataset import LARGEST, Dataset
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.errors import InputError
from nidiff.recipe import fits
from nidiff.training.draws import spread
from nidiff.training.experiment import Experiment

BITS, NATS = "bits_per_dim", "nats_per_dim"
WORDS = {
    BITS: "{:.4g} bits per dimension of {:,} {} images under N(μ, C)",
    NATS: "{:.4g} nats per dimension of {:,} {} items under N(μ, C), in the units of the data",
}


def gaussian_baseline(experiment: Experiment, images: Dataset, gaussian: GaussianModel | None) -> dict[str, Any]:
    """−log N(x; μ, C) per dimension of (at most 2,048) held-out items, or of the training ``images`` if there are none;
    nothing without a Gaussian. In bits for whole numbers, and in nats for floats."""
    if gaussian is None:
        return {}
    split = "train"
    if not experiment.data.source.startswith("hf:"):
        with contextlib.suppress(InputError, OSError):
            held_out = experiment.data.load("test", annotations=(), scaling=images.scaling, progress=False)
            if held_out.shape == images.shape and len(held_out):
                images, split = held_out, "test"
    key, value, count = mean_cost(gaussian, images)
    return {key: value, "images": count, "split": split}


def mean_cost(gaussian: GaussianModel, data: Dataset) -> tuple[str, float, int]:
    """−log of the density under N(μ, C) of (at most 2,048 of) the data in their own units, per dimension: its key, the
    mean, and of how many.

    A step of whole numbers is 1 in their units, so their density is the probability of a value.
    """
    rows, costs = spread(len(data), 2048), []
    for block in rows.split(256):
        log_prob = gaussian.log_prob(data.batch(block).double()) + data.scaling.log_volume(data.stored(block))
        costs.append(-log_prob / math.prod(data.shape))
    nats = torch.cat(costs).mean().item()
    is_whole = data.grid.dtype in LARGEST
    return BITS if is_whole else NATS, float(f"{nats / math.log(2) if is_whole else nats:.4g}"), len(rows)


def baseline_text(facts: Any) -> str | None:
    """What `gaussian_baseline` measured, in words; None if it is nothing, or is not what it wrote."""
    known = facts if isinstance(facts, dict) else {}
    kind = "held-out" if known.get("split") == "test" else "training"
    for key, words in WORDS.items():
        if fits(known.get(key), float) and fits(known.get("images"), int):
            return words.format(known[key], known["images"], kind)
    return None
