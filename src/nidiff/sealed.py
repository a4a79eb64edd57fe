"""Digests, and JSON that carries its own, so that a change is noticed."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nidiff.errors import FileError
from nidiff.files import file_sha256, read_object

if TYPE_CHECKING:
    from torch import Tensor

SEAL = "sha256"


def digest(values: Any) -> str:
    """The sha256 of values that JSON can hold, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tensors_sha256(parts: "Iterable[Tensor | str]") -> str:
    """The sha256 of the bytes of tensors, and of the texts between them, such as their names and shapes."""
    from torch import uint8

    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
        else:
            content: Any = part.detach().cpu().contiguous().reshape(-1).view(uint8).numpy()
            total.update(content)
    return total.hexdigest()


def shaped(tensor: "Tensor") -> "tuple[str, Tensor]":
    """A tensor with its shape, as parts of `tensors_sha256`."""
    return str(tuple(tensor.shape)), tensor


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
        raise FileError(None, None, f"{what} has changed since it was written, by its checksum", remedy)
    return inner


def read_sealed(file: Path, version: int, remedy: str) -> dict[str, Any]:
    """The values of a sealed JSON file whose ``format`` is ``version``."""
    values = unseal(read_object(file, remedy), repr(str(file)), remedy)
    if values.pop("format", None) != version:
        raise FileError("file", file, "is of another version of nidiff", "use the one that wrote it")
    return values


def check_files(folder: Path, present: Iterable[str], recorded: Mapping[str, str], remedy: str) -> None:
    """Refuse a folder in which a file was added, is missing or has changed, by the ``recorded`` checksums. Only files
    that are ``present`` are opened, whatever is recorded."""
    names = {*present}
    for name in sorted(names | recorded.keys()):
        if name not in recorded:
            problem = "was added"
        elif name not in names:
            problem = "is missing"
        elif file_sha256(folder / name) != recorded[name]:
            problem = "has changed since it was saved, by its checksum"
        else:
            continue
        raise FileError("file", folder / name, problem, remedy)
