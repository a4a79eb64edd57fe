"""What the data's Gaussian, or their mixture, alone achieves: the baseline to compare a trained model with."""

import contextlib
import math
from typing import Any

import torch

from nidiff.data.dataset import LARGEST, Dataset
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.mixture import MixtureModel
from nidiff.errors import InputError
from nidiff.recipe import fits
from nidiff.training.draws import spread
from nidiff.training.experiment import Experiment

Density = GaussianModel | MixtureModel
BITS, NATS = "bits_per_dim", "nats_per_dim"
WORDS = {
    BITS: "{:.4g} bits per dimension of {:,} {} images under {}",
    NATS: "{:.4g} nats per dimension of {:,} {} items under {}, in the units of the data",
}
LAWS = {"gaussian": "N(μ, C)", "mixture": "the mixture"}


def held_out_items(experiment: Experiment, images: Dataset) -> Dataset | None:
    """The held-out items of an experiment that trains on ``images``, with their labels and conditions if they have
    those; None if there are none."""
    if experiment.data.source.startswith("hf:"):
        return None
    for annotations in (("labels", "condition"), ()):
        with contextlib.suppress(InputError, OSError):
            loaded = experiment.data.load("test", annotations=annotations, scaling=images.scaling, progress=False)
            return loaded if loaded.shape == images.shape and len(loaded) else None
    return None


def baseline(model: Density | None, images: Dataset, held_out: Dataset | None) -> dict[str, Any]:
    """−log of the density under a model of the data, per dimension, of (at most 2,048) held-out items, or of the
    training ``images`` if there are none; nothing without a model. In bits for whole numbers, and in nats for floats.
    """
    if model is None or images.scaling.domain is not None:  # where x is 0 for certain, there is no density
        return {}
    key, value, count = mean_cost(model, images if held_out is None else held_out)
    return {key: value, "images": count, "split": "train" if held_out is None else "test"}


def mean_cost(model: Density, data: Dataset) -> tuple[str, float, int]:
    """−log of the density under a model of (at most 2,048 of) the data in their own units, per dimension: its key, the
    mean, and of how many.

    A step of whole numbers is 1 in their units, so their density is the probability of a value.
    """
    rows, costs = spread(len(data), 2048), []
    for block in rows.split(256):
        log_prob = model.log_prob(data.batch(block).double()) + data.scaling.log_volume(data.stored(block))
        costs.append(-log_prob / math.prod(data.shape))
    nats = torch.cat(costs).mean().item()
    is_whole = data.grid.dtype in LARGEST
    return BITS if is_whole else NATS, float(f"{nats / math.log(2) if is_whole else nats:.4g}"), len(rows)


def baseline_text(facts: Any, law: str = "gaussian") -> str | None:
    """What `baseline` measured of a law of `LAWS`, in words; None if it is nothing, or is not what it wrote."""
    known = facts if isinstance(facts, dict) else {}
    kind = "held-out" if known.get("split") == "test" else "training"
    for key, words in WORDS.items():
        if fits(known.get(key), float) and fits(known.get("images"), int):
            return words.format(known[key], known["images"], kind, LAWS[law])
    return None
