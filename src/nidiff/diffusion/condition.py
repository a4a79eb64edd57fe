"""Conditions: what a network takes beside x and the level, such as a class, a text embedding, numbers or fields.

A denoiser binds their values (`Denoiser.given`), so that samplers and losses need not know about them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, known_names, shown
from nidiff.recipe import is_number

CLASSES = "class_labels"  # what diffusers' networks and ours call the class
PARAMETERS, FIELDS = "parameters", "fields"  # what our networks call numbers, and fields on the grid of x
RETURN_FORM = "return_dict"  # an argument of diffusers' networks that is no condition


class Condition(NamedTuple):
    """A condition that a network was trained with."""

    classes: int | None = None
    """The number of classes, 0 … classes − 1; None: the condition is not a class, but numbers."""
    shape: tuple[int, ...] = ()
    """The shape of one row."""
    null: int | None = None
    """The value that stands for no condition; None: NaN."""
    dropout: float = 0.0
    """The share of training items without the condition. At 0 the network has never seen ``null``."""
    scaling: Scaling | None = None
    """The units of numbers, per channel; None: the network is given them as they are."""

    @property
    def absent(self) -> float | Tensor:
        """``null`` as the network is given it: numbers of this ``shape``, NaN alone, or a class."""
        if self.null is None:
            return math.nan
        return torch.full((1, *self.shape), float(self.null)) if self.shape else self.null

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {
            "scaling": None if self.scaling is None else {"log": False, **self.scaling.to_json()[0]}
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Condition":
        """The inverse of `to_json`. Version 0.2 stored ``scale`` and ``shift``, empty where there was no scaling."""
        values = dict(values)
        scale, shift = values.pop("scale", ()), values.pop("shift", ())
        if isinstance(scaling := values.get("scaling"), Mapping):
            values["scaling"] = Scaling.from_json(scaling)
        elif scale:
            values["scaling"] = Scaling(scale, shift)
        return cls(**{**values, "shape": tuple(values.get("shape", ()))})

    @property
    def is_sound(self) -> bool:
        """Whether its numbers are those of a condition; a damaged file may hold others."""
        whole = all(number is None or isinstance(number, int) for number in (self.classes, self.null, *self.shape))
        return whole and (self.classes is None or self.classes > 0) and 0 <= self.dropout <= 1


def as_conditions(conditions: Mapping[str, Condition | Mapping[str, Any]] | None) -> dict[str, Condition]:
    """The conditions of a denoiser by name, from `Condition`s or their stored JSON."""
    result = {}
    for name, condition in (conditions or {}).items():
        try:
            result[str(name)] = condition if isinstance(condition, Condition) else Condition.from_json(condition)
            sound = result[str(name)].is_sound
        except (TypeError, ValueError):
            sound = False
        if not sound:
            raise InputError("conditions", None, f"has {shown(condition)} as {name!r}", "give a nidiff.Condition")
    return result


def describe_conditions(conditions: Mapping[str, Condition], class_names: Sequence[str] = ()) -> str:
    """The conditions in words, for a model card."""
    words = []
    for name, condition in conditions.items():
        what = " × ".join(map(str, condition.shape)) if condition.classes is None else f"{condition.classes} classes"
        if condition.classes is not None and 0 < len(class_names) <= 20:  # a model card lists no more
            what += f" ({', '.join(f'{number} {known}' for number, known in enumerate(class_names))})"
        dropped = f", left out of {condition.dropout:.3g} of the images" if condition.dropout else ""
        words.append(f"{name}: {what}{dropped}")
    return "; ".join(words)


# What a network takes -----------------------------------------------------------------------------------------------


def known_conditions(net: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments of ``net(x, label, …)`` after the label; None if it takes any."""
    parameters = _parameters(net)
    if parameters is None or any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def needed_conditions(net: Callable[..., Any]) -> list[str]:
    """The names of the conditions without which ``net`` cannot be called."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = [p for p in _parameters(net) or () if p.default is Parameter.empty and p.kind in named]
    names = [parameter.name for parameter in needed]
    if any(_config(net).get(key) for key in ("num_class_embeds", "class_embed_type")):
        names.append(CLASSES)  # by default None, which diffusers' networks of classes refuse
    return names


def null_class(net: Any, classes: int) -> int:
    """The class that stands for "no class": diffusers' networks have one more for it; for others it is −1."""
    return -1 if _config(net).get("num_class_embeds") is None else classes


def _parameters(net: Callable[..., Any]) -> list[Parameter] | None:
    function = net.forward if isinstance(net, torch.nn.Module) else net
    try:
        return [*signature(function).parameters.values()][2:]
    except ValueError:  # a function written in C
        return None


def _config(net: Any) -> Mapping[str, Any]:
    config = getattr(net, "config", None)
    return config if isinstance(config, Mapping) else {}


# Values of conditions -----------------------------------------------------------------------------------------------


def check_not_missing(conditions: Mapping[str, Condition], names: Collection[str]) -> None:
    """Refuse to leave out a condition that the network was never trained without; ``names`` have a value."""
    for name, condition in conditions.items():
        if name not in names and not condition.dropout:
            problem = "is missing, and the network was trained with it in every item"
            raise InputError(name, None, problem, f"give it, as in denoiser.given({name}=…)")


def check_conditions(net: Callable[..., Any], conditions: Mapping[str, Condition], values: Mapping[str, Any]) -> None:
    """Refuse values that the network does not take, or that differ from those it was trained with."""
    names = [*conditions] or known_conditions(net)
    for name, value in values.items():
        if names is not None and name not in names:
            others = {*names} - {RETURN_FORM}
            remedy = known_names(name, others) if others else "it takes none"
            raise InputError(name, None, "is not a condition of the network", remedy)
        condition = conditions.get(name)
        if condition is not None and condition.classes is not None:
            _check_classes(name, value, condition.classes, condition.null)
        elif condition is not None and isinstance(value, Tensor) and value.shape[1:] != condition.shape and value.ndim:
            problem = f"has rows {tuple(value.shape[1:])}"
            raise InputError(name, None, problem, f"the network was trained with {condition.shape}")


def _check_classes(name: str, labels: Any, classes: int, null: int | None) -> None:
    """Refuse all but whole numbers from 0 to classes − 1, or null."""
    values = torch.as_tensor(labels)
    whole = values.ndim <= 1 and not values.is_floating_point() and values.dtype != torch.bool
    known = (values >= 0) & (values < classes)
    if null is not None:
        known |= values == null
    if not whole or not bool(known.all()):
        remedy = f"give whole numbers from 0 to {classes - 1}" + ("" if null is None else f", or {null} for none")
        raise InputError(name, labels, "is not a class of the model", f"{remedy}; one per image, or one for all")


def as_rows(name: str, value: Any, count: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The value of a condition as the network is given it for ``count`` images, floats in its ``dtype``; a value that
    is neither numbers nor a tensor stays as it is."""
    value = _as_tensor(value)
    if not isinstance(value, Tensor):
        return value
    value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if value.ndim and len(value) not in (1, count):
        raise InputError(name, None, f"has {len(value)} rows for {count} images", "give one per image, or one for all")
    return value.expand(count, *value.shape[1:])


def count_rows(value: Any) -> int:
    """The number of images that a value is for; 1 for all."""
    value = _as_tensor(value)
    return len(value) if isinstance(value, Tensor) and value.ndim else 1


def take_rows(value: Any, index: Tensor) -> Any:
    """The rows of some of the images; a value with one row for all stays as it is."""
    value = _as_tensor(value)
    return value[index.to(value.device)] if isinstance(value, Tensor) and value.ndim and len(value) > 1 else value


def _as_tensor(value: Any) -> Any:
    """Numbers as a tensor; anything else as it is."""
    several = isinstance(value, list | tuple | range) and value and all(map(is_number, value))
    single = isinstance(value, int | float | np.ndarray | np.generic) and not isinstance(value, bool)
    return torch.as_tensor(value) if several or single else value
