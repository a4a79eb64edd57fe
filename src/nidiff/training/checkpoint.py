"""Checkpoints that survive a kill, a full disk and flipped bytes.

``folder/000500/`` holds one ``NAME.safetensors`` per group of tensors, ``optimizer.pt``, ``state.json`` and
``manifest.json``, the checksums of the others. It gets its name only when it is complete and on the disk.
One process writes. Nothing is unpickled: safetensors, JSON, and ``weights_only=True`` for the optimizer.
"""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.errors import InputError
from nidiff.files import ASIDE, recover_folder, remove_folder, replacing_folder, sync

FORMAT = 1

_MANIFEST, _STATE, _OPTIMIZER, _TENSORS = "manifest.json", "state.json", "optimizer.pt", ".safetensors"
_NAME = re.compile(r"(\.tmp-|\.replaced-|)([0-9]{6}|[1-9][0-9]{6,})")


class Checkpoint(NamedTuple):
    """What `load_checkpoint` returns: every tensor on the CPU, and the newer checkpoints it had to skip."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    optimizer: dict[str, Any] | None
    path: Path
    damaged: list[str]


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    keep: int,
) -> Path:
    """Write ``folder/{step:06d}`` completely or not at all, then remove all but the newest ``keep`` (0 keeps all).

    Checkpoints of a later step are neither counted nor removed: they were skipped as damaged, or are not this run's.
    """
    path = folder / f"{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        for name in {match[2] for other in folder.iterdir() if (match := _NAME.fullmatch(other.name))}:
            recover_folder(folder / name)
        with replacing_folder(path) as written:
            files = {}
            for name, data in _contents(step, tensors, state, optimizer):
                (written / name).write_bytes(data)
                files[name] = _fingerprint(data)  # of what was meant to be written
            manifest = {"format": FORMAT, "nidiff": __version__, "files": files}
            (written / _MANIFEST).write_bytes(_json(manifest | {"sha256": _own_checksum(manifest)}))
        until_now = [other for other in list_checkpoints(folder) if int(other.name) <= step]
        for other in until_now[:-keep] if keep else []:
            remove_folder(other)
    except OSError as error:
        raise InputError(
            f"Checkpoint {path.name} could not be saved in {folder} ({error.strerror or error}): "
            f"the run can be resumed from {_newest_whole(folder)}."
        ) from error
    return path


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that its manifest verifies; ``None`` if there is none at all.

    ``damaged`` names the newer ones it skipped, newest first: ``001000/model.safetensors: checksum differs``.
    """
    damaged: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return _read(path)._replace(damaged=damaged)
        except _Damage as damage:  # noqa: PERF203 - the next one is the remedy
            damaged.append(f"{path.name}/{damage}")
    if damaged:
        raise InputError(
            f"all checkpoints in {folder} are damaged ({', '.join(damaged)}): restore one from a copy, or start again."
        )
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, damaged ones included, by step."""
    found: dict[int, Path] = {}
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): check its permissions and the disk.") from error
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match and match[1] != ASIDE and path.is_dir():
            found[int(match[2])] = path  # one that was being replaced comes first, and counts only if it is alone
    return [found[step] for step in sorted(found)]


# Writing ---------------------------------------------------------------------------------------------------------


def _contents(
    step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], optimizer: Any
) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, one at a time."""
    for name, group in tensors.items():
        # A copy of each: safetensors refuses tensors that share memory or are not contiguous.
        copies = {k: v.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for k, v in group.items()}
        yield name + _TENSORS, safetensors.torch.save(copies)
    if optimizer is not None:
        buffer = io.BytesIO()
        torch.save(_plain(optimizer), buffer)
        yield _OPTIMIZER, buffer.getvalue()
    yield _STATE, _json({"format": FORMAT, "step": step, "state": state})


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _plain(value: Any) -> Any:
    """``value`` with its tensors on the CPU, made only of what ``weights_only=True`` reads back."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (bool, int, float, str, type(None)):  # not a subclass, which would be pickled as such
        return value
    raise TypeError(f"optimizer state holds a {type(value).__name__}, which could not be loaded without unpickling")


def _fingerprint(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    return str(_fingerprint(json.dumps(manifest, sort_keys=True).encode())["sha256"])


# Reading ---------------------------------------------------------------------------------------------------------


class _Damage(Exception):
    """A file of a checkpoint is not what was written."""


def _read(path: Path) -> Checkpoint:
    """The checkpoint, if it is what its manifest says, and the manifest is what its own checksum says."""
    manifest = _content(path / _MANIFEST)
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _own_checksum(manifest):
        raise _Damage(f"{_MANIFEST}: checksum differs")
    if manifest["format"] != FORMAT:
        raise InputError(
            f"{path} has checkpoint format {manifest['format']}, written by nidiff {manifest['nidiff']}, and nidiff "
            f"{__version__} reads format {FORMAT}: use that version of nidiff, or start a new run."
        )
    files = {name: _content(path / name, fingerprint) for name, fingerprint in manifest["files"].items()}
    about, optimizer = files.pop(_STATE), files.pop(_OPTIMIZER, None)
    tensors = {name.removesuffix(_TENSORS): group for name, group in files.items()}
    return Checkpoint(about["step"], tensors, about["state"], optimizer, path, [])


def _content(file: Path, fingerprint: Mapping[str, Any] | None = None) -> Any:
    """What a file holds; what is parsed is what was verified."""
    try:
        data = file.read_bytes()
        if fingerprint is not None and _fingerprint(data) != fingerprint:
            raise _Damage(f"{file.name}: checksum differs")
        if file.suffix == ".json":
            return json.loads(data)
        if file.name == _OPTIMIZER:
            return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        return safetensors.torch.load(data)
    except (_Damage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise _Damage(f"{file.name}: missing") from error
    except Exception as error:  # each of the readers has its own
        raise _Damage(f"{file.name}: unreadable ({type(error).__name__})") from error


def _newest_whole(folder: Path) -> str:
    with contextlib.suppress(InputError):
        if newest := load_checkpoint(folder):
            return newest.path.name
    return "the beginning"
