"""Σ as a configuration: JSON with its arrays beside it, a folder that holds one, or a line of text.

This is the one place where the arrays of Σ are written and read.
"""

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
from nidiff.covariance.checks import check_shape
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Kronecker
from nidiff.covariance.fields import ALIASES, COVARIANCES, FAMILIES, FIELDS, from_data, one_axis
from nidiff.covariance.waves import Boundary, Waves, check_boundary
from nidiff.errors import FileError, InputError, first_line, one_of, shown
from nidiff.files import as_path, read_object, replace_json, replacing, writing
from nidiff.notation import call, parse_call

FACTOR = "factor"  # by which the result of the call is multiplied
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


def describe(covariance: Covariance, prefix: str = "") -> Config:
    """The call that makes ``covariance`` as JSON, or its eigenvalues in its basis; arrays are named in it as
    ``{"tensor": name}``."""
    origin = covariance.origin
    if origin is None or origin.name not in COVARIANCES:
        arguments = {"eigenvalues": covariance.eigenvalues, "basis": covariance.basis, "allow_singular": True}
        return _as_json("covariance", "Covariance", arguments, prefix)
    config = _as_json("covariance", origin.name, origin.arguments, prefix)
    return config if origin.scale == 1 else Config({**config, FACTOR: origin.scale}, config.tensors)


def _as_json(kind: str, name: str, arguments: Mapping[str, Any], prefix: str) -> Config:
    """A call as JSON: the name under the key ``kind``, and its arguments."""
    tensors: dict[str, Tensor] = {}
    config = Config({kind: name}, tensors)
    for key, value in arguments.items():
        if isinstance(value, Covariance | Basis):
            inner = (
                describe(value, f"{prefix}{key}.")
                if isinstance(value, Covariance)
                else _basis(value, f"{prefix}{key}.")
            )
            config[key] = dict(inner)
            tensors |= inner.tensors
        elif isinstance(value, Tensor | np.ndarray):
            tensors[prefix + key] = torch.as_tensor(value)
            config[key] = {"tensor": prefix + key}
        else:
            try:
                config[key] = json.loads(json.dumps(value, allow_nan=False, default=lambda number: number.item()))
            except (AttributeError, TypeError, ValueError) as error:
                remedy = "build it from numbers, words, tensors and covariances"
                raise InputError(key, value, f"of {name} cannot be saved", remedy) from error
    return config


def _basis(basis: Basis, prefix: str) -> Config:
    name = type(basis).__name__
    if BASES.get(name) is not type(basis):
        remedy = f'add it by nidiff.covariance.config.BASES["{name}"] = {name}'
        raise InputError("basis", None, f"{name} is not registered, so what is saved could not be loaded", remedy)
    return _as_json("basis", name, basis.arguments(), prefix)


def build(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Covariance:
    """The covariance that `describe` described."""
    made: Covariance = _built(config, tensors, ("covariance",))
    return made


def _built(config: Any, tensors: Mapping[str, Tensor], kinds: tuple[str, ...], depth: int = 0) -> Any:
    kind = next((key for key in kinds if isinstance(config, Mapping) and isinstance(config.get(key), str)), None)
    if kind is None or not isinstance(tensors, Mapping):
        raise InputError("config", None, 'has no key "covariance"', "give what to_config() and tensors() returned")
    if depth > DEEPEST:
        raise InputError("config", None, f"has covariances more than {DEEPEST} deep", "save it again")
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
            arguments[key] = _built(value, tensors, ("covariance", "basis"), depth + 1)
        elif key != kind:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    eigenvalues, factor = arguments.pop("with_eigenvalues", None), arguments.pop(FACTOR, 1)
    made = call("config", name, arguments, known)
    if isinstance(made, Covariance) and eigenvalues is not None:
        made = made.with_eigenvalues(eigenvalues)
    return made if factor == 1 else factor * made


# To files and back -----------------------------------------------------------------------------------------------


def save(covariance: Covariance, folder: Path) -> None:
    """Write covariance.json and, where there are arrays, covariance.safetensors."""
    config = describe(covariance)
    with writing("folder", folder):
        save_arrays(config.tensors, folder)
        replace_json(folder / PLACES[0], config)


def save_arrays(tensors: Mapping[str, Tensor], folder: Path, name: str = ARRAYS) -> None:
    """Write the arrays of a Σ, where it has any, beside the configuration that names them (and that comes after)."""
    if tensors:
        with replacing(folder / name) as file:
            file.write(to_bytes({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def names_arrays(config: Any, depth: int = 0) -> bool:
    """Whether the configuration of a Σ refers to arrays."""
    if not isinstance(config, Mapping):
        return False
    return "tensor" in config or (depth <= DEEPEST and any(names_arrays(value, depth + 1) for value in config.values()))


def read_arrays(file: Path, owner: str = "Σ") -> dict[str, Tensor]:
    """The arrays in the file that `save_arrays` wrote."""
    again = "copy it again from where it was saved, or save it again"
    if not file.is_file():
        raise FileError("file", str(file), f"with the arrays of {owner} is missing", again)
    try:
        return dict(from_bytes(file.read_bytes()))  # a path need not be UTF-8
    except (OSError, ValueError, SafetensorError) as error:
        raise FileError("file", str(file), f"is damaged ({first_line(error)})", again) from error


def load(folder: Path) -> Covariance:
    """Read Σ from a folder: what `save` wrote, a model or its scheduler, or a run."""
    places = [as_path("folder", folder / place) for place in PLACES]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InputError("folder", str(folder), "holds no covariance", "give a saved covariance, model or run")
    config = read_object(file, "save it again")
    if "covariance" not in config:
        raise FileError("file", str(file), "holds no covariance", "save it again")
    config = config["covariance"] if file.name == SCHEDULER else config
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
    if isinstance(value, Path):
        return load(as_path("covariance", value))
    if not isinstance(value, str):
        remedy = "give a covariance, its configuration, a folder, or NAME:key=value,…"
        raise InputError("covariance", value, "does not name a covariance", remedy)
    known = _named()
    name = value.partition(":")[0].strip()
    first, times, _ = value.partition(TIMES)
    if times and first.partition(":")[0].strip() in (*known, "from_data"):
        return _product(value, shape, boundary)
    if name not in (*known, "from_data") and ("/" in value or as_path("covariance", value).is_dir()):
        return load(as_path("covariance", value))
    name, arguments = parse_call("covariance", value)
    if name == "from_data":
        if data is None:
            raise InputError("covariance", value, "is fitted to data", "give `data`, or name a field that needs none")
        data = data() if callable(data) else data
        given = {"event_axes": data.ndim - 2, **_with_boundary(from_data, arguments, boundary)}
        return call("covariance", name, given, {name: from_data}, data)
    one_of("covariance", name, [*known, "from_data"])
    arguments = _with_boundary(known[name], arguments, boundary)
    over_times = "times" in signature(known[name]).parameters
    if over_times and "times" in arguments:
        field: Covariance = call("covariance", name, arguments, known)
        if shape is not None and field.event_shape != check_shape(shape):
            problem = f"has {field.size} numbers, and the event is {tuple(shape)}"
            raise InputError("times", None, problem, "give one per step")
        return field
    if shape is None:
        raise InputError("covariance", value, "needs the shape of the event", "give `shape`, such as (32, 32)")
    if over_times:
        return call("covariance", name, arguments, known, range(one_axis(name, shape)))
    return call("covariance", name, arguments, known, shape)


def check_text(text: str) -> None:
    """Refuse a text whose name or keys `as_covariance` does not know; nothing is built. A folder must be there."""
    known = {**_named(), "from_data": from_data}
    factors = text.split(TIMES) if text.partition(":")[0].strip() in known else [text]
    for factor in factors:
        if factor.partition(":")[0].strip() not in known and ("/" in text or as_path("covariance", text).is_dir()):
            load(as_path("covariance", text))
            continue
        name, arguments = parse_call("covariance", factor)
        function = known[one_of("covariance", name, known)]
        keys = [*signature(function).parameters]
        for key in arguments:  # the shape or the data come first, and are not written; times can be
            one_of(f"the key of covariance={shown(text)}", key, keys if keys[0] == "times" else keys[1:])


def _named() -> dict[str, Callable[..., Covariance]]:
    """What a text can name, beside from_data."""
    known = {**FIELDS, **{key: family for key, family in FAMILIES.items() if _is_built_from_a_shape(family)}}
    return known | {alias: COVARIANCES[name] for alias, name in ALIASES.items()}


def _product(text: str, shape: Sequence[int] | None, boundary: Boundary | None) -> Covariance:
    """``A x B``: A over the first axis, and B over the others."""
    first, _, others = text.partition(TIMES)
    if not all(part.strip() for part in text.split(TIMES)):
        raise InputError("covariance", text, "has an empty factor", "name a field on both sides of ' x '")
    if any(part.strip().startswith("from_data") for part in text.split(TIMES)):
        raise InputError("covariance", text, "has from_data, which is over all axes", "use it without a product")
    if shape is not None and len(check_shape(shape)) < 2:
        raise InputError("covariance", text, f"is over two axes or more, and shape={shape} has one", "leave one out")
    leading, rest = (None, None) if shape is None else (tuple(shape)[:1], tuple(shape)[1:])
    front = behind = None if boundary is None else check_boundary(boundary)
    if isinstance(front, tuple):
        front, behind = front[:1], front[1:]
    return Kronecker(as_covariance(first, leading, None, front), as_covariance(others, rest, None, behind))


def _with_boundary(
    function: Callable[..., Covariance], arguments: dict[str, Any], boundary: Boundary | None
) -> dict[str, Any]:
    """The arguments with a boundary, where the function has one and they do not say it."""
    if boundary is None or "boundary" not in signature(function).parameters:
        return arguments
    return {"boundary": boundary, **arguments}


def _is_built_from_a_shape(family: Callable[..., Covariance]) -> bool:
    parameters = signature(family).parameters
    return [*parameters][:1] == ["shape"] and not any(value.annotation is Tensor for value in parameters.values())
