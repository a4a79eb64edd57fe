"""What the commands with ``--field`` share: which fields there are, and which flags each understands."""

from collections.abc import Collection
from typing import Any, NamedTuple

from nidiff.errors import InputError


class Field(NamedTuple):
    """How a command makes the Σ of one ``--field``."""

    function: str
    """Its name in `nidiff.covariance.fields`."""
    parameter: str
    """The flag of its main number; ``nidiff noise`` takes a list."""
    values: tuple[float, ...]
    """That list where the flag is not given."""
    options: tuple[str, ...] = ()
    """The other flags it understands."""


NOISE_FIELDS = {
    "gff": Field("gaussian_free_field", "gamma", (0, 0.5, 1, 1.5, 2), ("zero_mode", "boundary")),
    "matern": Field("matern", "length_scale", (1, 2, 4, 8), ("smoothness", "boundary")),
    "power_law": Field("power_law", "exponent", (-1, 0, 1, 2, 3), ("zero_mode", "boundary")),
    "offset": Field("offset", "strength", (0, 0.1, 0.3, 1)),
    "pyramid": Field("pyramid", "discount", (0.3, 0.6, 0.9)),
}


def given_flags(command: object, what: str, understood: Collection[str], always: Collection[str]) -> dict[str, Any]:
    """The flags that were given (are not None), or an `InputError` for one that ``what`` does not use.

    Those of ``always`` are left out: they have a meaning whatever the others are.
    """
    given = {name: value for name, value in vars(command).items() if value is not None and name not in always}
    for name in given:
        if name not in understood:
            raise InputError(f"--{name.replace('_', '-')} has no meaning with {what}: leave it out.")
    return given
