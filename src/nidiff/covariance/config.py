"""Σ as a configuration: JSON with its arrays beside it, a folder that holds one, or a line of text.

This is the one place where the arrays of Σ are written and read.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from nidiff.covariance.basis import Basis, Eigen, PerMode, Pixels, Product
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import FAMILIES, Kronecker
from nidiff.covariance.fields import ALIASES, COVARIANCES, FIELDS, from_data, one_axis
from nidiff.covariance.waves import Boundary, Waves, check_boundary
from nidiff.errors import FileError, InputError, first_line, known_names, one_of, shown
from nidiff.files import as_path, read_object, replacing
from nidiff.notation import call, parse_call

TIMES = " x "  # between the factors of a product
DEEPEST = 8  # covariances inside each other
ARRAYS = "covariance.safetensors"  # beside the JSON that names them, if it names any
# Where a folder may hold Σ: one of its own, a scheduler's, a model's, a run's.
SCHEDULER = "scheduler_config.json"
PLACES = ("covariance.json", SCHEDULER, f"scheduler/{SCHEDULER}", f"model/scheduler/{SCHEDULER}")

BASES: dict[str, Callable[..., Basis]] = {
    "Pixels": Pixels,
    "Waves": Waves,
    "Eigen": Eigen,
    "Product": Product,
    "PerMode": PerMode,
}


class Config(dict[str, Any]):
    """Σ as JSON that has its arrays at hand, in ``tensors``."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(config)
        self.tensors = tensors


# To JSON and back ------------------------------------------------------------------------------------------------


def describe(value: Covariance | Basis, prefix: str = "") -> Config:
    """The call that makes a covariance or a basis, as JSON: its name and its arguments. Without a call a covariance is
    its eigenvalues in its basis. Arrays are named as ``{"tensor": name}``."""
    arguments: Mapping[str, Any] | None
    kind, scale = "covariance", 1.0
    if isinstance(value, Basis):
        kind, name, arguments = "basis", type(value).__name__, value.arguments()
    elif value.origin is None or value.origin.name not in COVARIANCES:
        name, arguments = "Covariance", {"eigenvalues": value.eigenvalues, "basis": value.basis, "allow_singular": True}
    else:
        name, arguments, scale = value.origin
    if arguments is None or (kind == "basis" and BASES.get(name) is not type(value)):
        remedy = f'give it a method arguments, and add it by nidiff.covariance.BASES["{name}"] = {name}'
        raise InputError("basis", None, f"{name} could not be loaded if it were saved", remedy)
    tensors: dict[str, Tensor] = {}
    config = Config({kind: name}, tensors)
    for key, argument in arguments.items():
        if isinstance(argument, Covariance | Basis):
            inner = describe(argument, f"{prefix}{key}.")
            config[key] = dict(inner)
            tensors |= inner.tensors
        elif isinstance(argument, Tensor | np.ndarray):
            tensors[prefix + key] = torch.as_tensor(argument)
            config[key] = {"tensor": prefix + key}
        else:
            config[key] = json.loads(json.dumps(argument, allow_nan=False, default=lambda number: number.item()))
    if scale != 1:
        config["factor"] = scale
    return config


def build(config: Any, tensors: Mapping[str, Tensor], kinds: Sequence[str] = ("covariance",), depth: int = 0) -> Any:
    """The covariance that `describe` described."""
    kind = next((key for key in kinds if isinstance(config, Mapping) and isinstance(config.get(key), str)), None)
    if kind is None or depth > DEEPEST:
        problem = f'has no key "covariance", or more than {DEEPEST} inside each other'
        raise InputError("config", None, problem, "give what to_config() and tensors() returned")
    known: Mapping[str, Callable[..., Any]] = BASES if kind == "basis" else COVARIANCES
    name = one_of(f'config["{kind}"]', config[kind], known)
    arguments: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and "tensor" in value:
            array = value["tensor"]
            if not isinstance(array, str) or array not in tensors:
                raise InputError("tensors", None, f"has no {shown(array)}", "load the safetensors file of config")
            arguments[key] = tensors[array]
        elif isinstance(value, Mapping):
            arguments[key] = build(value, tensors, ("covariance", "basis"), depth + 1)
        elif key != kind:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    eigenvalues, factor = arguments.pop("with_eigenvalues", None), arguments.pop("factor", 1)
    made = call("config", name, arguments, known)
    if isinstance(made, Covariance) and eigenvalues is not None:  # as early versions of 0.2 wrote it
        made = made.with_eigenvalues(eigenvalues)
    return made if factor == 1 else factor * made


# To files and back -----------------------------------------------------------------------------------------------


def save_arrays(tensors: Mapping[str, Tensor], folder: Path, name: str = ARRAYS) -> None:
    """Write the arrays of a Σ, where it has any, beside the configuration that names them (and that comes after)."""
    if tensors:
        with replacing(folder / name) as file:
            file.write(to_bytes({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def names_arrays(config: Any) -> bool:
    """Whether the configuration of a Σ refers to arrays."""
    return '"tensor":' in json.dumps(config)


def read_arrays(file: Path, owner: str = "Σ") -> dict[str, Tensor]:
    """The arrays in the file that `save_arrays` wrote."""
    try:
        return dict(from_bytes(file.read_bytes()))  # a path need not be UTF-8
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"with the arrays of {owner} is missing or damaged ({first_line(error)})"
        remedy = "copy it again from where it was saved, or save it again"
        raise FileError("file", str(file), problem, remedy) from error


def load(folder: Path) -> Covariance:
    """Read Σ from a folder: what `save` wrote, a model or its scheduler, or a run."""
    places = [as_path("folder", folder / place) for place in PLACES]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InputError("folder", str(folder), "holds no covariance", "give a saved covariance, model or run")
    config = read_object(file, "save it again")
    config = config.get("covariance", {}) if file.name == SCHEDULER else config
    tensors = read_arrays(file.with_name(ARRAYS)) if names_arrays(config) else {}
    try:
        return build(config, tensors)
    except InputError as error:
        raise FileError("file", str(file), f"cannot be used ({first_line(error)})", "save it again") from error


# Whatever names one ----------------------------------------------------------------------------------------------


def as_covariance(
    value: Covariance | Mapping[str, Any] | str | Path,
    shape: Sequence[int] | None = None,
    data: Tensor | Callable[[], Tensor] | None = None,
    boundary: Boundary | None = None,
) -> Covariance:
    """A covariance from itself, its configuration, a folder that `load` knows, or a text ``NAME:key=value,…``.

    A text is the call of a field, or of a family that is built from a shape, for the event ``shape``; "gff" and "white"
    are short for gaussian_free_field and Identity. ``A x B`` is their Kronecker product: A is over the first axis and
    B over the others, as in ``ar1:rho=0.9 x gff:gamma=1``. ``from_data:…`` is fitted to ``data`` [N, C, *event], or to
    what ``data()`` returns. ``boundary``, a word or one per axis, is for the fields that have one and do not say it. A
    name wins over a folder of that name: write ./NAME for the folder.
    """
    if isinstance(value, Covariance):
        return value
    if isinstance(value, Mapping):
        return build(value, getattr(value, "tensors", {}))
    if not isinstance(value, str | Path):
        remedy = "give a covariance, its configuration, a folder, or NAME:key=value,…"
        raise InputError("covariance", value, "does not name a covariance", remedy)
    calls = _calls(value) if isinstance(value, str) else []
    if not calls:
        return load(as_path("covariance", value))
    edges = None if boundary is None else check_boundary(boundary)
    factors, last = [], len(calls) - 1
    for number, (name, arguments) in enumerate(calls):
        axes = slice(number, None if number == last else number + 1)  # one each, and the last has the rest
        event = None if shape is None else tuple(shape)[axes]
        edge = edges[axes] if isinstance(edges, tuple) else edges
        factors.append(_field(name, arguments, event, None if last else data, edge))
    return functools.reduce(lambda rest, factor: Kronecker(factor, rest), reversed(factors))


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The factors that a text names, each with its arguments; none where the text is a folder."""
    known = _named()
    first = text.partition(TIMES)[0].partition(":")[0].strip()
    if first not in known and ("/" in text or as_path("covariance", text).is_dir()):
        return []
    calls = [parse_call("covariance", factor) for factor in text.split(TIMES)]
    for name, arguments in calls:
        keys = [*signature(known[one_of("covariance", name, known)]).parameters]
        keys = keys if keys[0] == "times" else keys[1:]  # the shape or the data are not written; times can be
        for key in arguments:
            if key not in keys:
                raise InputError("covariance", name, f"has no argument {key!r}", known_names(key, keys))
    return calls


def _named() -> dict[str, Callable[..., Covariance]]:
    """What a text can name: fields, families that are built from a shape and no array, and from_data."""
    known = {**FIELDS, "from_data": from_data}
    for name, family in FAMILIES.items():
        parameters = signature(family).parameters
        if [*parameters][:1] == ["shape"] and not any(value.annotation is Tensor for value in parameters.values()):
            known[name] = family
    return known | {alias: COVARIANCES[name] for alias, name in ALIASES.items()}


def _field(
    name: str,
    arguments: Mapping[str, Any],
    shape: Sequence[int] | None,
    data: Tensor | Callable[[], Tensor] | None,
    boundary: Boundary | None,
) -> Covariance:
    """The field that one call names, with what the text leaves out."""
    known = _named()
    parameters = signature(known[name]).parameters
    if boundary is not None and "boundary" in parameters:
        arguments = {"boundary": boundary, **arguments}
    if "times" in arguments:
        return call("covariance", name, arguments, known)
    if name == "from_data":
        if data is None:
            raise InputError("covariance", name, "is fitted to data", "give `data`, or name a field that needs none")
        data = data() if callable(data) else data
        return call("covariance", name, {"event_axes": data.ndim - 2, **arguments}, known, data)
    if shape is None:
        raise InputError("covariance", name, "needs the shape of the event", "give `shape`, such as (32, 32)")
    first = range(one_axis(name, shape)) if "times" in parameters else shape
    return call("covariance", name, arguments, known, first)
