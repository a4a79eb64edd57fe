"""Σ in a diffusers configuration: a dictionary, and its arrays in a file beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.training.model import ARRAYS

# Options of ``from_pretrained`` that are about fetching from the Hub.
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class Recipe(dict[str, Any]):
    """Σ as JSON that has its arrays at hand, so that ``from_config(scheduler.config)`` needs no file."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(config)
        self.tensors = tensors


def describe(covariance: Covariance) -> Recipe:
    return Recipe(covariance.to_config(), covariance.tensors())


def names_arrays(config: Any) -> bool:
    """Whether the configuration of a Σ refers to arrays."""
    if not isinstance(config, Mapping):
        return False
    return "tensor" in config or any(names_arrays(value) for value in config.values())


def read_arrays(source: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arrays beside scheduler_config.json in the folder or the Hub repository ``source``; ``options`` are those of
    ``from_pretrained``."""
    subfolder, place = options.get("subfolder"), Path(source)
    if place.exists():
        folder = place if place.is_dir() else place.parent
        inner = folder / (subfolder or "") / ARRAYS
        file = inner if inner.is_file() else folder / ARRAYS
    else:
        chosen = {key: options[key] for key in DOWNLOAD if options.get(key) is not None}
        try:
            file = Path(hf_hub_download(source, ARRAYS, subfolder=subfolder, **chosen))
        except (HfHubHTTPError, OSError) as error:
            raise OSError(f"{source} gives no {ARRAYS}, the arrays of its Σ ({error}): look for it there.") from error
    if not file.is_file():
        raise OSError(
            f"{str(file)!r} is missing, which holds the arrays of Σ: copy it from where the scheduler was saved, or "
            "save it again by save_pretrained."
        )
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise OSError(
            f"{str(file)!r} is damaged ({error}): copy it again from where the scheduler was saved."
        ) from error
