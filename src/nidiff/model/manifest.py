"""manifest.json of a model: the checksums of its files, so that a change is noticed, and the run that made it."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nidiff import __version__
from nidiff.errors import FileError, shown
from nidiff.files import REPLACED, file_sha256, read_object, replace_json
from nidiff.model.zoo import AGAIN, entry_of
from nidiff.sealed import seal, unseal

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "model_index.json"
PARTS = ("unet", "network", "scheduler")  # the folders of a model
DATA = "data.json"  # names, units and coordinates of its data
SHA256 = re.compile("[0-9a-f]{64}")
OPENED_BY_0_2 = "open and save it with version 0.2, which reads it"


def write_manifest(folder: Path, run: Mapping[str, str] | None = None) -> None:
    """Write down what is in a model's folder. ``run`` is the identity of the run that made it."""
    values = {"format": FORMAT, "nidiff": __version__, "files": _checksums(folder, [INDEX, DATA, *PARTS]), "run": run}
    replace_json(folder / MANIFEST, seal(values))


def check_manifest(folder: Path, parts: Sequence[str] = (INDEX, DATA, *PARTS)) -> None:
    """Refuse a model of which a file has changed, was added or is missing, or that is of another run.

    A folder without a manifest is accepted, for diffusers writes none, but not in a run. Only files that lie in the
    folder are opened, whatever a manifest names.
    """
    identity = run_identity(folder)
    if identity is None and not (folder / MANIFEST).exists():
        return
    manifest = read_manifest(folder)
    if identity not in (None, manifest["run"]):
        raise FileError("folder", folder, "is the model of another run", _remedy(folder))
    recorded = {name: sha256 for name, sha256 in manifest["files"].items() if name.split("/")[0] in parts}
    present = _files(folder, parts)
    for name in sorted(present.keys() | recorded.keys()):
        if name not in recorded:
            problem = "was added to the model"
        elif name not in present:
            problem = "is missing"
        elif file_sha256(present[name]) != recorded[name]:
            problem = "has changed since the model was saved"
        else:
            continue
        raise FileError("file", folder / name, problem, _remedy(folder))


def recorded_run(folder: Path) -> Mapping[str, str] | None:
    """The identity of the run that made the model, if its manifest can be read and names one."""
    try:
        return read_manifest(folder)["run"]
    except FileError:
        return None


def run_identity(folder: Path) -> Mapping[str, str] | None:
    """The identity of the run whose model ``folder`` is; None outside of a run."""
    place = Path(os.path.abspath(folder))
    file = place.parent / "experiment.json"
    if place.name not in ("model", f"{REPLACED}model") or not file.is_file():
        return None
    identity = read_object(file, "restore it from a copy").get("identity")
    if not is_identity(identity):
        problem = "is of a run of version 0.1" if identity is None else "has a damaged identity"
        raise FileError("file", file, problem, OPENED_BY_0_2 if identity is None else "restore it from a copy")
    return cast(Mapping[str, str], identity)


def model_sha256(folder: Path, *, checked: bool = False) -> str:
    """The checksum of the network and of its Σ, schedule and target: what the images of a model depend on.

    If the files were just ``checked``, those in the manifest are theirs, and nothing is read twice.
    """
    digest = hashlib.sha256()
    recorded = checked and (folder / MANIFEST).is_file()
    checksums = read_manifest(folder)["files"] if recorded else _checksums(folder, PARTS)
    for name, sha256 in sorted(checksums.items()):
        if name.split("/")[0] in PARTS:
            digest.update(f"{name} {sha256}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _checksums(folder: Path, parts: Sequence[str]) -> dict[str, str]:
    return {name: file_sha256(file) for name, file in sorted(_files(folder, parts).items())}


def _files(folder: Path, parts: Sequence[str]) -> dict[str, Path]:
    """The files of a model by their names in it. Names that begin with a dot are the system's, and never read."""
    found = {}
    for part in parts:
        place = folder / part
        for file in place.iterdir() if place.is_dir() else [place]:
            if (file.is_file() or file.is_dir()) and not file.name.startswith("."):
                found[file.relative_to(folder).as_posix()] = file
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a model, if it is what was written."""
    file, remedy = folder / MANIFEST, _remedy(folder)
    values = unseal(read_object(file, remedy), repr(str(file)), remedy)
    if values.get("format") != FORMAT:
        problem = f"has format {shown(values.get('format'))}, and this version reads {FORMAT}"
        raise FileError("file", file, problem, f"use nidiff {shown(values.get('nidiff'))}")
    files, run = values.get("files"), values.get("run")
    if not (isinstance(files, dict) and all(isinstance(sha256, str) for sha256 in files.values())) or not (
        run is None or is_identity(run)
    ):
        raise FileError("file", file, "is damaged", remedy)
    return values


def is_identity(values: Any) -> bool:
    """Whether it is a mapping of words to digests."""
    return isinstance(values, Mapping) and all(
        isinstance(value, str) and SHA256.fullmatch(value) for value in values.values()
    )


def _remedy(folder: Path) -> str:
    if entry_of(folder) is not None:
        return AGAIN
    accept = f"run nidiff verify --accept {str(folder)!r}"
    return f"copy the model again from where it was saved, or, if you changed it on purpose, {accept}"
