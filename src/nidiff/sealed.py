"""Digests, and JSON that carries its own, so that a change is noticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from nidiff.errors import FileError

SEAL = "sha256"


def digest(values: Any) -> str:
    """The sha256 of values that JSON can hold, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with their own digest."""
    return {**values, SEAL: digest(values)}


def unseal(values: Mapping[str, Any], what: str, remedy: str) -> dict[str, Any]:
    """What `seal` was given; a `FileError` if it has changed since, or was never sealed."""
    inner = {key: value for key, value in values.items() if key != SEAL}
    try:
        whole = values.get(SEAL) == digest(inner)
    except RecursionError:  # nested too deeply to have been written
        whole = False
    if not whole:
        raise FileError(f"{what} has changed since it was written, by its checksum: {remedy}.")
    return inner
