"""What a network is told of the images that it is trained on: their labels, and their conditions."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.diffusion.condition import CLASSES, FIELDS, PARAMETERS, Condition

MOST_NAMES = 20  # classes that a model card lists


def conditions_of(data: Dataset, dropout: float = 0.0) -> dict[str, Condition]:
    """The conditions that the data have, by the names of the network's arguments; a class has no null yet."""
    found = {}
    if data.labels is not None:
        found[CLASSES] = Condition(classes=data.num_classes, dropout=dropout)
    if data.conditions is not None:
        one = Condition(shape=tuple(data.conditions.shape[1:]), dropout=dropout)
        if (units := data.condition_scaling) is not None:
            assert isinstance(units.scale, tuple)
            assert isinstance(units.shift, tuple)
            one = one._replace(scale=units.scale, shift=units.shift)
        found[_name(data.conditions)] = one
    return found


def rows_of(
    data: Dataset,
    index: Tensor,
    flip: Tensor | None = None,
    dropped: Tensor | None = None,
    conditions: Mapping[str, Condition] | None = None,
) -> dict[str, Tensor]:
    """What the network is told of the items of ``index`` [B]: fields are mirrored with their items where ``flip`` [B]
    is true, and all is null, as ``conditions`` say, where ``dropped`` [B] is."""
    told = {}
    if data.labels is not None:
        told[CLASSES] = data.labels[index]
    if data.conditions is not None:
        values, name = data.conditions[index], _name(data.conditions)
        if flip is not None and name == FIELDS:
            values[flip] = values[flip].flip(-1)
        told[name] = values
    if dropped is not None and conditions is not None:
        for name, values in told.items():
            values[dropped] = conditions[name].absent
    return told


def examples_of(data: Dataset, count: int) -> dict[str, Tensor]:
    """What the network is told for ``count`` samples: the classes 0, 1, 2, … in turn, and the conditions of the first
    items."""
    told = rows_of(data, torch.arange(count) % len(data))
    if data.num_classes is not None and CLASSES in told:
        told[CLASSES] = torch.arange(count) % data.num_classes
    return told


def told_in_words(conditions: Mapping[str, Condition], class_names: Sequence[str] = ()) -> dict[str, str]:
    """What the model card says of the conditions, if there are any."""
    words = []
    for name, one in conditions.items():
        what = " × ".join(map(str, one.shape)) if one.classes is None else f"{one.classes} classes"
        if one.classes is not None and 0 < len(class_names) <= MOST_NAMES:
            what += f" ({', '.join(f'{number} {known}' for number, known in enumerate(class_names))})"
        dropped = f", left out of {one.dropout:.3g} of the images" if one.dropout else ""
        words.append(f"{name}: {what}{dropped}")
    return {"conditions": "; ".join(words)} if words else {}


def _name(conditions: Tensor) -> str:
    return PARAMETERS if conditions.ndim == 2 else FIELDS
