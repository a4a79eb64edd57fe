"""Checkpoints that survive a kill, a full disk and flipped bytes.

``folder/000500/`` holds one ``NAME.safetensors`` per group of tensors, ``optimizer.pt``, ``state.json`` and
``manifest.json``, the checksums of the others. It gets its name only when it is complete and on the disk. Its averaged
weights and the outline in the run's model folder are a model, which `nidiff.model.checkpoint` reads.
It carries the identity of its run, and a checkpoint of another run is not used. One process writes. Nothing is
unpickled: safetensors, JSON, and ``weights_only=True`` for the optimizer.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.errors import FileError
from nidiff.files import REPLACED, recover_folder, remedy_for, remove_folder, replaced_name, replacing_folder, sync
from nidiff.model.checkpoint import FORMAT, MANIFEST, NAME, STATE
from nidiff.sealed import seal, unseal
from nidiff.training.identity import Identity, as_identity, changed_parts

_OPTIMIZER, _TENSORS = "optimizer.pt", ".safetensors"


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
    run: Identity | None = None,
) -> Path:
    """Write ``folder/{step:06d}`` completely or not at all, then remove all but the newest ``keep`` (0 keeps all).

    Checkpoints of a later step are neither counted nor removed: they were skipped as damaged, or are not this run's.
    """
    path = folder / f"{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        for name in filter(None, [replaced_name(other.name) for other in folder.iterdir()]):  # after a kill
            recover_folder(folder / name)
        with replacing_folder(path) as written:
            files = {}
            about = {"format": FORMAT, "step": step, "state": state, "run": run}
            for name, data in _contents(about, tensors, optimizer):
                (written / name).write_bytes(data)
                files[name] = _fingerprint(data)  # of what was meant to be written
            manifest = {"format": FORMAT, "nidiff": __version__, "files": files}
            (written / MANIFEST).write_bytes(_json(seal(manifest)))
        until_now = [other for other in list_checkpoints(folder) if step_of(other) <= step]
        for other in until_now[:-keep] if keep else []:
            remove_folder(other)
    except OSError as error:
        problem = f"cannot be saved ({error.strerror or error})"
        raise FileError("out", str(path), problem, remedy_for(error, "continue the run with --resume")) from error
    return path


def load_checkpoint(folder: Path, *runs: Identity) -> Checkpoint | None:
    """The newest checkpoint that its manifest verifies; ``None`` if there is none at all.

    ``damaged`` names the newer ones it skipped, newest first: ``001000/model.safetensors: checksum differs``. With
    ``runs``, those of any other run are skipped too.
    """
    damaged: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return _read(path, runs)._replace(damaged=damaged)
        except _Damage as damage:
            damaged.append(f"{path.name}/{damage}")
    if damaged:
        problem = f"has no checkpoint that can be used ({', '.join(damaged)})"
        raise FileError("out", str(folder), problem, "restore one from a copy, or begin a new run")
    return None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(_name_of(path))


def _name_of(path: Path) -> str:
    """The name of a checkpoint, which a kill may have left under another one, as version 0.2 did under its own."""
    is_whole = path.name.startswith(REPLACED) and (path / MANIFEST).is_file()
    return replaced_name(path.name) or (path.name.removeprefix(REPLACED) if is_whole else path.name)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, damaged ones included, by step."""
    by_step: dict[int, Path] = {}
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in entries:
        if NAME.fullmatch(_name_of(path)) and path.is_dir():
            by_step[step_of(path)] = path  # one that was being replaced comes first, and counts only if it is alone
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
        torch.save(optimizer, buffer)
        yield _OPTIMIZER, buffer.getvalue()
    yield STATE, _json(about)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _fingerprint(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


# Reading ---------------------------------------------------------------------------------------------------------


class _Damage(Exception):
    """A file of a checkpoint is not what was written."""


def _read(path: Path, runs: Sequence[Identity]) -> Checkpoint:
    """The checkpoint, if it is what its manifest says, and the manifest is what its own checksum says."""
    try:
        manifest = unseal(_content(path / MANIFEST), MANIFEST, "")
    except FileError as error:
        raise _Damage(f"{MANIFEST}: checksum differs") from error
    fingerprints = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(fingerprints, dict):
        version = f"{manifest.get('nidiff')!s:.40}"
        raise _Damage(f"{MANIFEST}: not one that this version reads, but of nidiff {version}")
    files = {name: _content(path / Path(name).name, fingerprint) for name, fingerprint in fingerprints.items()}
    about, optimizer = files.pop(STATE, {}), files.pop(_OPTIMIZER, None)
    if about.get("step") != step_of(path):
        raise _Damage(f"{STATE}: not of this step")
    changed = [changed_parts(as_identity(about.get("run")), run) for run in runs]
    if changed and all(changed):
        raise _Damage(f"{STATE}: of another run, which differs in {changed[0]}")
    tensors = {name.removesuffix(_TENSORS): group for name, group in files.items()}
    return Checkpoint(step_of(path), tensors, about["state"], optimizer, path, [])


def _content(file: Path, fingerprint: Any = None) -> Any:
    """What a file holds; what is parsed is what was verified."""
    try:
        if file.is_char_device() or file.is_fifo():  # which may have no end
            raise _Damage(f"{file.name}: not a file")
        data = file.read_bytes()
        if file.name != MANIFEST and _fingerprint(data) != fingerprint:
            raise _Damage(f"{file.name}: checksum differs")
        if file.suffix == ".json":
            return dict(json.loads(data))
        if file.name == _OPTIMIZER:
            return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        return safetensors.torch.load(data)
    except (_Damage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise _Damage(f"{file.name}: missing") from error
    except Exception as error:  # each of the readers has its own
        raise _Damage(f"{file.name}: unreadable ({type(error).__name__})") from error
