"""Checkpoints that survive a kill, a full disk and flipped bytes.

``folder/000500/`` holds one ``NAME.safetensors`` per group of tensors, ``optimizer.pt``, ``state.json`` and
``manifest.json``, the checksums of the others. It gets its name only when it is complete and on the disk.
It carries the identity of its run, and a checkpoint of another run is not used. One process writes. Nothing is
unpickled: safetensors, JSON, and ``weights_only=True`` for the optimizer.
"""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.errors import FileError, InputError
from nidiff.files import ASIDE, recover_folder, remove_folder, replacing_folder, sync
from nidiff.sealed import seal, unseal
from nidiff.training.identity import Identity, as_identity, changed_parts

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
    run: dict[str, str]  # the identity of the run that saved it
    damaged: list[str]


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    keep: int,
    run: Identity | None = None,
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
            about = {"format": FORMAT, "step": step, "state": state, "run": run}
            for name, data in _contents(about, tensors, optimizer):
                (written / name).write_bytes(data)
                files[name] = _fingerprint(data)  # of what was meant to be written
            manifest = {"format": FORMAT, "nidiff": __version__, "files": files}
            (written / _MANIFEST).write_bytes(_json(seal(manifest)))
        until_now = [other for other in list_checkpoints(folder) if step_of(other) <= step]
        for other in until_now[:-keep] if keep else []:
            remove_folder(other)
    except OSError as error:
        problem = f"cannot be saved ({error.strerror or error})"
        remedy = f"make room; the run can be resumed from {_newest_whole(folder)}"
        raise FileError("out", str(path), problem, remedy) from error
    return path


def load_checkpoint(
    folder: Path,
    run: Identity | None = None,
    *,
    use: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Checkpoint | None:
    """The newest checkpoint that its manifest verifies; ``None`` if there is none at all.

    ``damaged`` names the newer ones it skipped, newest first: ``001000/model.safetensors: checksum differs``. With
    ``run``, those of another run are skipped too; and one for which ``use``, called with it, fails.
    """
    damaged: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            checkpoint = _read(path)._replace(damaged=damaged)
            _use(checkpoint, run, use)
            return checkpoint
        except _Damage as damage:  # noqa: PERF203 - the next one is the remedy
            damaged.append(f"{path.name}/{damage}")
    if damaged:
        problem = f"has no checkpoint that can be used ({', '.join(damaged)})"
        raise FileError("out", str(folder), problem, "restore one from a copy, or begin a new run")
    return None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint of ours, by its manifest alone."""
    for path in list_checkpoints(folder):
        with contextlib.suppress(_Damage):
            _manifest(path)
            return True
    return False


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, damaged ones included, by step."""
    by_step: dict[int, Path] = {}
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match and match[1] != ASIDE and path.is_dir():
            by_step[int(match[2])] = path  # one that was being replaced comes first, and counts only if it is alone
    return [by_step[step] for step in sorted(by_step)]


# Writing ---------------------------------------------------------------------------------------------------------


def _contents(
    about: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], optimizer: Any
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
    yield _STATE, _json(about)


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


# Reading ---------------------------------------------------------------------------------------------------------


class _Damage(Exception):
    """A file of a checkpoint is not what was written."""


def _read(path: Path) -> Checkpoint:
    """The checkpoint, if it is what its manifest says, and the manifest is what its own checksum says."""
    files = {name: _content(path / name, fingerprint) for name, fingerprint in _manifest(path).items()}
    about, optimizer = files.pop(_STATE, None), files.pop(_OPTIMIZER, None)
    about = about if isinstance(about, dict) else {}
    step, state = about.get("step"), about.get("state")
    if type(step) is not int or step != step_of(path) or not isinstance(state, dict):
        raise _Damage(f"{_STATE}: not of this step")
    tensors = {name.removesuffix(_TENSORS): group for name, group in files.items()}
    return Checkpoint(step, tensors, state, optimizer, path, as_identity(about.get("run")), [])


def _manifest(path: Path) -> dict[str, Any]:
    """The fingerprint of each file, by its name."""
    try:
        manifest = unseal(dict(_content(path / _MANIFEST)), _MANIFEST, "")
    except (FileError, TypeError, ValueError) as error:
        raise _Damage(f"{_MANIFEST}: checksum differs") from error
    files, version = manifest.get("files"), manifest.get("format")
    if isinstance(version, int) and version != FORMAT:
        problem = f"has checkpoint format {version}, and nidiff {__version__} reads format {FORMAT}"
        remedy = f"use nidiff {manifest.get('nidiff')!s:.40}, which wrote it, or start a new run"
        raise FileError("out", str(path), problem, remedy)
    if version != FORMAT or not isinstance(files, dict) or not all(map(_is_named, files.items())):
        raise _Damage(f"{_MANIFEST}: not that of a checkpoint")
    return files


def _is_named(entry: tuple[str, Any]) -> bool:
    """Whether an entry of a manifest is of a file beside it, with a fingerprint."""
    return Path(entry[0]).name == entry[0] and isinstance(entry[1], dict)


def _use(checkpoint: Checkpoint, run: Identity | None, use: Callable[[Checkpoint], None]) -> None:
    if run is not None and (changed := changed_parts(checkpoint.run, run)):
        raise _Damage(f"{_STATE}: of another run, which differs in {changed}")
    try:
        use(checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _Damage(f"{_STATE}: cannot be used ({type(error).__name__})") from error


def _content(file: Path, fingerprint: Mapping[str, Any] | None = None) -> Any:
    """What a file holds; what is parsed is what was verified."""
    try:
        if file.is_char_device() or file.is_fifo():  # which may have no end
            raise _Damage(f"{file.name}: not a file")
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
