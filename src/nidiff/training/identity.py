"""What a run is: digests of its settings, of Σ and the schedule, of its data and of its network.

experiment.json, every checkpoint and the model carry them, so that the parts of two runs cannot be mixed.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import Config
from nidiff.data.dataset import Dataset
from nidiff.model.config import without_kappa
from nidiff.sealed import digest
from nidiff.training.experiment import BEFORE, Experiment

Identity = Mapping[str, str]
PARTS = {
    "settings": "the settings",
    "process": "Σ, the schedule or the data's Gaussian",
    "data": "the data",
    "network": "the network, or the version of diffusers that builds it",
}
SPREAD = 64  # images that stand for data which do not fit in memory


def changed_parts(before: Identity, now: Identity) -> str:
    """The parts that differ, in words; empty if none does."""
    return ", ".join(words for part, words in PARTS.items() if before.get(part) != now.get(part))


def as_identity(value: Any) -> dict[str, str] | None:
    """An identity that a file holds; None if it holds none, and one that agrees with nothing if it is damaged."""
    if value is None:
        return None
    parts = value if isinstance(value, dict) else {}
    return {part: str(parts.get(part)) for part in PARTS}


def settings_digest(experiment: Experiment) -> str:
    """The digest of the settings that must not change when a run is resumed, with precision "auto" resolved.

    Settings that earlier versions did not have are left out where they are as those did it.
    """
    settings = experiment.resolved().fixed()
    return digest({key: value for key, value in settings.items() if key not in BEFORE or BEFORE[key] != value})


def process_digest(config: Mapping[str, Any]) -> str:
    """The digest of what `scheduler_config` returns and of its arrays. Keys that begin with _ are left out, and so is
    κ, which is measured when training has ended."""
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    tensors = dict(config["covariance"].tensors)
    for key in ("schedule", "gaussian"):
        if isinstance(config.get(key), Config):
            config[key] = without_kappa(config[key])
            tensors |= {f"{key}.{name}": tensor for name, tensor in config[key].tensors.items()}
    return digest([config, {name: _array_digest(tensor) for name, tensor in tensors.items()}])


def data_digest(images: Dataset) -> str:
    """The digest of all pixels if they are in memory, else of a few images spread over the data, and of all labels and
    conditions, where there are any."""
    pixels = images.values if isinstance(images.values, Tensor) else _spread(images)
    told = [_array_digest(one) for one in (images.labels, images.conditions) if one is not None]
    return digest([len(images), list(images.shape), _array_digest(pixels), *told])


def data_checksum(images: Dataset) -> str:
    """The short checksum of version 0.1, of up to 64 images."""
    return hashlib.sha256(images.batch(_spread_rows(len(images))).numpy().tobytes()).hexdigest()[:16]


def network_digest(net: torch.nn.Module) -> str:
    """The digest of its class, its configuration if it is one of diffusers', and the shapes of its parameters."""
    config = {key: value for key, value in getattr(net, "config", {}).items() if not key.startswith("_")}
    shapes = {name: [str(value.dtype), list(value.shape)] for name, value in net.named_parameters()}
    return digest([type(net).__name__, config, shapes])


def _array_digest(tensor: Tensor) -> list[Any]:
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]


def _spread(images: Dataset) -> Tensor:
    return images.values.index_select(0, _spread_rows(len(images)))


def _spread_rows(total: int) -> Tensor:
    return torch.linspace(0, total - 1, min(total, SPREAD)).long()
