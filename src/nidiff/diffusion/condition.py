"""What a network may be told beside x and the level: a class, a text's embedding, parameters, other fields.

A denoiser binds conditions (`Denoiser.given`), so that nothing that calls one has to know them.
"""

import math
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.errors import InputError, known_names, one_of, shown
from nidiff.recipe import fits, is_number

CLASSES = "class_labels"  # what diffusers' networks and ours call the class
FORM = "return_dict"  # of diffusers' networks: how they answer, which is no condition
PARAMETERS, FIELDS = "parameters", "fields"  # what our networks call numbers, and fields on the grid of x


class Condition(NamedTuple):
    """One that a network was trained with. Rows without it were given ``null``."""

    classes: int | None = None
    """How many classes there are, 0 … classes − 1; None: it is not a class, but numbers."""
    shape: tuple[int, ...] = ()
    """Of one row."""
    null: int | None = None
    """What says that it is not given; None: NaN."""
    dropout: float = 0.0
    """The share of rows that it was left out of in training: without any, the network does not know null."""
    scale: tuple[float, ...] = ()
    """Of numbers, one per channel: in the units of the data they are scale · value + shift; empty: 1."""
    shift: tuple[float, ...] = ()
    """See ``scale``; empty: 0."""

    @property
    def absent(self) -> float | Tensor:
        """null, as the network is given it: numbers of this ``shape``, NaN alone, or a class."""
        if self.null is None:
            return math.nan
        return torch.full((1, *self.shape), float(self.null)) if self.shape else self.null


def known_conditions(net: Callable[..., Any]) -> list[str] | None:
    """The names of what ``net(x, label, …)`` takes beside x and the label; None if it takes any."""
    parameters = _parameters(net)
    if parameters is None or any(one.kind is Parameter.VAR_KEYWORD for one in parameters):
        return None
    return [one.name for one in parameters if one.kind is not Parameter.POSITIONAL_ONLY]


def needed_conditions(net: Callable[..., Any]) -> list[str]:
    """The names of those that ``net`` cannot be called without."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = [one.name for one in _parameters(net) or () if one.default is Parameter.empty and one.kind in named]
    config = getattr(net, "config", None)
    if isinstance(config, Mapping) and any(config.get(key) for key in ("num_class_embeds", "class_embed_type")):
        names.append(CLASSES)  # by default None, which diffusers' networks of classes refuse
    return names


def _parameters(net: Callable[..., Any]) -> list[Parameter] | None:
    """Those of ``net(x, label, …)`` after the label; None if they are not known."""
    function = net.forward if isinstance(net, torch.nn.Module) else net
    try:
        return [*signature(function).parameters.values()][2:]
    except ValueError:  # a function written in C
        return None


def check_told(conditions: Mapping[str, Condition], bound: Collection[str]) -> None:
    """Refuse to leave out what the network was never trained without."""
    for name, one in conditions.items():
        if name not in bound and not one.dropout:
            raise InputError(
                f"{name} is missing: the network was trained with it in every image, and knows nothing of images "
                f"without: give it, as in denoiser.given({name}=…)."
            )


def check_conditions(net: Callable[..., Any], conditions: Mapping[str, Condition], values: Mapping[str, Any]) -> None:
    """Refuse values that the network does not take, or that are not what it was trained with."""
    names = [*conditions] or known_conditions(net)
    for name, value in values.items():
        if names is not None and name not in names:
            names = [one for one in names if one != FORM]
            takes = known_names(name, names) if names else "it takes none"
            raise InputError(f"{name} is not a condition of the network: {takes}.")
        if value is None:
            raise InputError(f"{name} is None: leave it out, or give one row per image.")
        if name == CLASSES:
            _check_classes(value, *_class_range(net, conditions.get(name)))
        elif isinstance(value, Tensor) and name in conditions and value.ndim:
            shape = conditions[name].shape
            if tuple(value.shape[1:]) != shape:
                rows = f"[B, {', '.join(map(str, shape))}]" if shape else "[B]"
                raise InputError(f"{name} has shape {tuple(value.shape)}: the network was trained with {rows}.")


def _class_range(net: Any, condition: Condition | None) -> tuple[int | None, int | None]:
    """(how many classes, null), as far as they are known."""
    if condition is not None:
        return condition.classes, condition.null
    config = getattr(net, "config", None)
    config = config if isinstance(config, Mapping) else {}
    return config.get("num_classes", config.get("num_class_embeds")), -1 if "num_classes" in config else None


def _check_classes(labels: Any, classes: int | None, null: int | None) -> None:
    """Whole numbers from 0 to classes − 1, or null; diffusers' networks also take floats, of which nothing is known."""
    try:
        values = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{CLASSES}={shown(labels)} must be whole numbers, one per image or one for all.") from error
    if classes is None:
        return
    if values.ndim > 1:
        raise InputError(f"{CLASSES} has shape {tuple(values.shape)}: give one number per image, or one for all.")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InputError(f"{CLASSES}={shown(labels)} must be whole numbers from 0 to {classes - 1}.")
    beyond = (values < 0) | (values >= classes)
    if null is not None:
        beyond &= values != null
    if bool(beyond.any()):
        first = values[beyond].flatten()[0].item()
        none = "" if null is None else f", or {null} for none"
        raise InputError(f"{CLASSES} has {first}, and the classes are 0 … {classes - 1}: give one of these{none}.")


def as_rows(name: str, value: Any, count: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A condition as the network is given it for ``count`` images; what is neither numbers nor a tensor stays as it is.

    Floats have the dtype of the network.
    """
    value = _numbers(value)
    if not isinstance(value, Tensor):
        return value
    value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if not value.ndim:
        return value.expand(count)
    if len(value) not in (1, count):
        raise InputError(f"{name} has {len(value)} rows for {count} images: give one per image, or one for all.")
    return value.expand(count, *value.shape[1:])


def _numbers(value: Any) -> Any:
    """Numbers as a tensor; anything else as it is."""
    several = isinstance(value, list | tuple | range) and value and all(map(is_number, value))
    one = is_number(value) or (isinstance(value, float) and math.isnan(value))
    return torch.as_tensor(value) if several or one or isinstance(value, np.ndarray) else value


def count_rows(value: Any) -> int:
    """For how many images a condition is: 1 where it is for all."""
    value = _numbers(value)
    return len(value) if isinstance(value, Tensor) and value.ndim else 1


def take_rows(value: Any, index: Tensor) -> Any:
    """The rows of some of the images; what has one row for all stays."""
    value = _numbers(value)
    return value[index.to(value.device)] if isinstance(value, Tensor) and value.ndim and len(value) > 1 else value


def as_conditions(conditions: Any) -> dict[str, Condition]:
    """The conditions of a denoiser by name, from `Condition`s or what a model stored of them."""
    if conditions is None:
        return {}
    if not isinstance(conditions, Mapping):
        raise InputError(f"conditions={shown(conditions)} must be a dict of nidiff.Condition by name.")
    found = {}
    for name, one in conditions.items():
        if isinstance(one, Mapping):
            for key in one:
                one_of(f"a key of conditions[{name!r}]", key, Condition._fields)
            lists = {key: tuple(value) for key, value in one.items() if isinstance(value, list)}
            one = Condition(**{**one, **lists})
        if not isinstance(one, Condition) or not _is_sound(one):
            raise InputError(f"conditions[{name!r}]={shown(one)} is not a nidiff.Condition: give one.")
        found[str(name)] = one
    return found


def _is_sound(one: Condition) -> bool:
    numbers = (one.classes, one.null)
    if not (all(n is None or fits(n, int) for n in numbers) and fits(one.shape, tuple[int, ...])):
        return False
    units = all(fits(each, tuple[float, ...]) and all(map(is_number, each)) for each in (one.scale, one.shift))
    return units and (one.classes is None or one.classes > 0) and is_number(one.dropout) and 0 <= one.dropout <= 1
