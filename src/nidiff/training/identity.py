"""What a run is: digests of its settings, of Σ and the schedule, of its data and of its network.

experiment.json, every checkpoint and the model carry them, so that the parts of two runs cannot be mixed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import Config
from nidiff.data.crops import Crops
from nidiff.data.dataset import Dataset
from nidiff.model.config import without_kappa
from nidiff.sealed import digest, tensors_sha256
from nidiff.training.experiment import Experiment

Identity = Mapping[str, str]
PARTS = {
    "settings": "the settings",
    "process": "Σ, the schedule or the data's Gaussian",
    "data": "the data",
    "network": "the network, or the version of diffusers that builds it",
}
SPREAD = 64  # items that stand for data which do not fit in memory


def changed_parts(before: Identity, now: Identity) -> str:
    """The parts that differ, in words; empty if none does."""
    return ", ".join(words for part, words in PARTS.items() if before.get(part) != now.get(part))


def as_identity(value: Any) -> dict[str, str]:
    """An identity that a file holds; one that agrees with nothing if it is damaged or missing."""
    parts = value if isinstance(value, dict) else {}
    return {part: str(parts.get(part)) for part in PARTS}


# Settings that are left out of the digest where they have these values, as they always were: they came later than it.
LEFT_OUT = {
    "gaussian": "none",
    "weights": "none",
    "sees": "auto",
    "network": "auto",
    "boundary": None,
    "initial": None,
    "crop": (),
    "layout": None,
    "variables": (),
    "sample_axis": None,
    "scaling": ("none",),
    "missing": "refuse",
    "remove": None,
    "held_out": None,
    "labels": None,
    "condition": None,
    "condition_dropout": 0.1,
}


def settings_digest(experiment: Experiment) -> str:
    """The digest of the settings that must not change when a run is resumed, with precision "auto" resolved."""
    settings = experiment.resolved().fixed()
    return digest({name: value for name, value in settings.items() if name not in LEFT_OUT or LEFT_OUT[name] != value})


def process_digest(config: Mapping[str, Any]) -> str:
    """The digest of what `scheduler_config` returns and of its arrays. Keys that begin with _ are left out, and so are
    κ and the mixture, which come when training has ended."""
    config = {key: value for key, value in config.items() if not key.startswith("_") and key != "mixture"}
    tensors = dict(config["covariance"].tensors)
    for key in ("schedule", "gaussian", "scaling"):
        if isinstance(config.get(key), Config):
            config[key] = without_kappa(config[key])
            tensors |= {f"{key}.{name}": tensor for name, tensor in config[key].tensors.items()}
    return digest([config, {name: _described(tensor) for name, tensor in tensors.items()}])


def data_digest(data: Dataset) -> str:
    """The digest of all values in memory, or of a few items spread over the data, and of all labels and conditions."""
    values = data.values
    if isinstance(values, Crops) and isinstance(values.whole, Tensor):
        values = values.whole
    if not isinstance(values, Tensor):
        values = values.index_select(0, torch.linspace(0, len(data) - 1, min(len(data), SPREAD)).long())
    known = data.conditions.whole if isinstance(data.conditions, Crops) else data.conditions
    annotations = [_described(each) for each in (data.labels, known) if isinstance(each, Tensor)]
    return digest([len(data), list(data.shape), _described(values), *annotations])


def network_digest(net: torch.nn.Module) -> str:
    """The digest of its class, its configuration if it is one of diffusers', and the shapes of its parameters."""
    config = {key: value for key, value in getattr(net, "config", {}).items() if not key.startswith("_")}
    shapes = {name: [str(value.dtype), list(value.shape)] for name, value in net.named_parameters()}
    return digest([type(net).__name__, config, shapes])


def _described(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), tensors_sha256([tensor])]
