"""Σ as JSON, with its arrays beside it as safetensors."""

import json
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nidiff.covariance.fields import COVARIANCES
from nidiff.covariance.operator import Covariance
from nidiff.errors import InputError, one_of


def describe(covariance: Covariance, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The call that makes ``covariance`` as JSON, and the arrays it names as ``{"tensor": name}``."""
    name, arguments = covariance.recipe()
    config: dict[str, Any] = {"covariance": name}
    tensors: dict[str, Tensor] = {}
    for key, value in arguments.items():
        if isinstance(value, Covariance):
            config[key], inner = describe(value, f"{prefix}{key}.")
            tensors |= inner
        elif isinstance(value, Tensor):
            tensors[prefix + key] = value
            config[key] = {"tensor": prefix + key}
        else:
            config[key] = list(value) if isinstance(value, tuple) else value
    return config, tensors


def build(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Covariance:
    """The covariance that `describe` described."""
    if "covariance" not in config:
        raise InputError('config has no key "covariance": give what to_config() returned.')
    make = COVARIANCES[one_of('config["covariance"]', config["covariance"], COVARIANCES)]
    known = signature(make).parameters
    arguments: dict[str, Any] = {}
    for key, value in config.items():
        if key == "covariance":
            continue
        if key not in known:
            raise InputError(f"config has the unknown key {key!r} for {config['covariance']}: known are {[*known]}.")
        if isinstance(value, Mapping):
            if "tensor" in value and value["tensor"] not in tensors:
                raise InputError(
                    f"tensors has no {value['tensor']!r}, which config asks for: load its safetensors file."
                )
            value = tensors[value["tensor"]] if "tensor" in value else build(value, tensors)
        arguments[key] = tuple(value) if isinstance(value, list) else value
    try:
        return make(**arguments)
    except TypeError as error:
        raise InputError(
            f"config of {config['covariance']} is not whole ({error}): give what to_config() returned."
        ) from error


def save(covariance: Covariance, folder: Path) -> None:
    """Write covariance.json and, where there are arrays, covariance.safetensors."""
    config, tensors = describe(covariance)
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "covariance.safetensors")
    (folder / "covariance.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> Covariance:
    """Read what `save` wrote."""
    if not (folder / "covariance.json").is_file():
        raise InputError(f"folder={str(folder)!r} has no covariance.json: give a folder that Covariance.save wrote.")
    arrays = folder / "covariance.safetensors"
    try:
        config = json.loads((folder / "covariance.json").read_text())
        tensors = load_file(arrays) if arrays.exists() else {}
    except (UnicodeDecodeError, json.JSONDecodeError, SafetensorError) as error:
        raise InputError(f"folder={str(folder)!r} holds a damaged covariance ({error}): save it again.") from error
    return build(config, tensors)
