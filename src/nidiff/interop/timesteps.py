"""Which levels a scheduler visits: the three spacings of diffusers (Lin et al. 2024, table 2)."""

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from nidiff.errors import InputError, one_of


def spaced(levels: int, count: int, spacing: str, spare: int) -> list[int]:
    """``count`` falling rows of a schedule; ``spare`` rows more are laid out, as far as the schedule has them, and the
    least noisy ones left out."""
    try:
        count = operator.index(count)
    except TypeError as error:
        raise InputError(f"num_inference_steps={count!r} must be an integer.") from error
    if not 1 <= count <= levels:
        raise InputError(f"num_inference_steps={count} must be from 1 to {levels}, the levels of the schedule.")
    rows = SPACINGS[one_of("timestep_spacing", spacing, SPACINGS)](levels, count, min(count + spare, levels))[:count]
    if any(a == b for a, b in pairwise(rows)):
        raise InputError(
            f"num_inference_steps={count} visits a level twice with timestep_spacing={spacing!r}: use fewer."
        )
    return rows


def checked(levels: int, timesteps: Sequence[int]) -> list[int]:
    """Timesteps that a user chose."""
    rows = [int(t) for t in timesteps]
    if not rows or any(a <= b for a, b in pairwise(rows)) or rows[0] >= levels or rows[-1] < 0:
        raise InputError(f"timesteps={rows} must fall and lie in 0 … {levels - 1}, the levels of the schedule.")
    return rows


def _leading(levels: int, count: int, laid_out: int) -> list[int]:
    return (np.arange(laid_out)[::-1] * (levels // laid_out)).tolist()


def _linspace(levels: int, count: int, laid_out: int) -> list[int]:
    return np.linspace(0, levels - 1, laid_out).round()[::-1].astype(int).tolist()


def _trailing(levels: int, count: int, laid_out: int) -> list[int]:
    return (np.arange(levels, 0, -levels / count).round().astype(int) - 1).tolist()


SPACINGS: dict[str, Callable[[int, int, int], list[int]]] = {
    "leading": _leading,
    "linspace": _linspace,
    "trailing": _trailing,
}
