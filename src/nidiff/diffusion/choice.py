"""The sampler that was chosen for a number of evaluations of a network, and which of several to use for another."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FAR = 2.0  # how many times more or fewer evaluations than those that were tuned a choice still serves


class Choice(NamedTuple):
    """A sampler as NAME:key=value,… and its steps, which take so many evaluations of the network for an image."""

    evaluations: int
    sampler: str
    num_steps: int
    facts: Mapping[str, Any] = {}
    """What it was chosen by: metric, scores, data, numbers of samples."""


def choices_text(choices: Sequence[Choice]) -> str:
    """Choices in words, for a card or a report."""
    return "; ".join(f"{choice.sampler} at {choice.evaluations}" for choice in choices)


def nearest_choice(choices: Sequence[Choice], evaluations: int) -> Choice | None:
    """The choice for the nearest number of evaluations, by their ratio, with as many steps as ``evaluations`` allow.

    None where that is more than twice the largest number that was tuned, or less than half the smallest.
    """
    if not choices:
        return None
    low, high = (end(choice.evaluations for choice in choices) for end in (min, max))
    if not low / FAR <= evaluations <= high * FAR:
        return None
    choice = min(choices, key=lambda known: abs(math.log(known.evaluations / evaluations)))
    return choice._replace(num_steps=max(1, evaluations * choice.num_steps // choice.evaluations))
