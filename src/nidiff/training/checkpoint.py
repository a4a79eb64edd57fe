"""Checkpoints that survive a kill, a full disk and flipped bytes.

``folder/000500/`` holds one ``NAME.safetensors`` per group of tensors, ``optimizer.pt``, ``state.json`` and
``manifest.json``, the checksums of the others. A checkpoint gets its name only when it is complete and on the disk:

    .tmp-000500        is being written; after a crash, can be deleted
    .replaced-000500   an earlier one of the same step, while the new one takes its name
    .old-000500        is being deleted; after a crash, can be deleted

One process writes. Nothing is unpickled: safetensors, JSON, and ``weights_only=True`` for the optimizer.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.errors import InputError

FORMAT = 1

_MANIFEST, _STATE, _OPTIMIZER, _TENSORS = "manifest.json", "state.json", "optimizer.pt", ".safetensors"
_NAME = re.compile(r"(\.tmp-|\.replaced-|\.old-|)([0-9]{6}|[1-9][0-9]{6,})")


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
    if keep < 0:
        raise InputError(f"keep={keep} is negative: use 0 to keep every checkpoint, or how many to keep.")
    name = f"{step:06d}"
    path, written = folder / name, folder / f".tmp-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
        _tidy(folder)
        written.mkdir()
        files = {name: _write(written / name, data) for name, data in _contents(step, tensors, state, optimizer)}
        manifest = {"format": FORMAT, "nidiff": __version__, "files": files}
        _write(written / _MANIFEST, _json(manifest | {"sha256": _digest_of_manifest(manifest)}))
        _sync(written)
        if path.exists():
            os.rename(path, folder / f".replaced-{name}")
        os.rename(written, path)
        _sync(folder)
        until_now = [other for other in list_checkpoints(folder) if _step(other) <= step]
        for other in until_now[:-keep] if keep else []:
            os.rename(other, folder / f".old-{other.name}")
        _sync(folder)
        _tidy(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            _tidy(folder)
        raise InputError(
            f"Checkpoint {name} could not be saved in {folder} ({error.strerror or error}): "
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
    # A kill between the two renames of a replacement leaves only the replaced one, which is still a checkpoint.
    try:
        for prefix in (".replaced-", ""):
            found |= {_step(path): path for path in _entries(folder, prefix)}
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): check its permissions and disk.") from error
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


def _write(path: Path, data: bytes) -> dict[str, Any]:
    """Write and sync ``data``. It is hashed in memory: the checksum is that of what was meant to be written."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


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


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory, and say so like this
            raise
    finally:
        os.close(descriptor)


def _tidy(folder: Path) -> None:
    """Remove what a crash left behind, and give a replaced checkpoint its name back if nothing took its place."""
    for path in _entries(folder, ".replaced-"):
        home = folder / path.name.removeprefix(".replaced-")
        os.rename(path, home if not home.exists() else folder / f".old-{home.name}")
    for path in _entries(folder, ".tmp-") + _entries(folder, ".old-"):
        shutil.rmtree(path, ignore_errors=True)


# Reading ---------------------------------------------------------------------------------------------------------


class _Damage(Exception):
    """A file of a checkpoint is not what was written."""


def _read(path: Path) -> Checkpoint:
    files = {name: _parse(name, data) for name, data in _verified(path)}
    content, optimizer = files.pop(_STATE), files.pop(_OPTIMIZER, None)
    tensors = {name.removesuffix(_TENSORS): group for name, group in files.items()}
    return Checkpoint(content["step"], tensors, content["state"], optimizer, path, [])


def _parse(name: str, data: bytes) -> Any:
    try:
        if name == _STATE:
            return json.loads(data)
        if name == _OPTIMIZER:
            return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        return safetensors.torch.load(data)
    except MemoryError:
        raise
    except Exception as error:  # each of the readers has its own
        raise _Damage(f"{name}: unreadable ({type(error).__name__})") from error


def _verified(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, one at a time, after its checksum: what is parsed is what was verified."""
    for name, expected in _manifest(path)["files"].items():
        data = _bytes(path / name)
        if len(data) != expected["size"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise _Damage(f"{name}: checksum differs")
        yield name, data


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest, which holds its own checksum: a flipped digit must not pass for another format."""
    try:
        manifest = dict(json.loads(_bytes(path / _MANIFEST)))
    except (ValueError, TypeError) as error:
        raise _Damage(f"{_MANIFEST}: unreadable") from error
    if manifest.pop("sha256", None) != _digest_of_manifest(manifest):
        raise _Damage(f"{_MANIFEST}: checksum differs")
    if manifest["format"] != FORMAT:
        raise InputError(
            f"{path} has checkpoint format {manifest['format']}, written by nidiff {manifest['nidiff']}, and nidiff "
            f"{__version__} reads format {FORMAT}: use that version of nidiff, or start a new run."
        )
    return manifest


def _digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _Damage(f"{path.name}: missing") from error
    except OSError as error:
        raise _Damage(f"{path.name}: unreadable ({error.strerror})") from error


def _newest_whole(folder: Path) -> str:
    for path in reversed(list_checkpoints(folder)):
        with contextlib.suppress(_Damage, InputError):
            for _ in _verified(path):
                pass
            return path.name
    return "the beginning"


def _entries(folder: Path, prefix: str) -> list[Path]:
    """The directories of ``folder`` called ``prefix`` and a step."""
    if not folder.is_dir():
        return []
    return [p for p in folder.iterdir() if (match := _NAME.fullmatch(p.name)) and match[1] == prefix and p.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
