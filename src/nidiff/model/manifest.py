"""manifest.json of a model: the checksums of its files, so that a change is noticed, and the run that made it."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nidiff import __version__
from nidiff.errors import FileError
from nidiff.files import REPLACED, file_sha256, read_object, replace_json, replaced_name
from nidiff.model.zoo import AGAIN, entry_of
from nidiff.sealed import check_files, read_sealed, seal

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "model_index.json"
EARLIER = "earlier_plans"  # of a run that was ended early: how many steps it was to have
PARTS = ("unet", "network", "scheduler")  # the folders of a model
DATA = "data.json"  # names, units and coordinates of its data
OUTLINE = (DATA, "scheduler", "unet/config.json")  # all but the weights: what a run stores when it begins
OPENED_BY_0_2 = "open and save it with version 0.2, which reads it"


def write_manifest(folder: Path, run: Mapping[str, str] | None = None) -> None:
    """Write down what is in a model's folder. ``run`` is the identity of the run that made it."""
    values = {"format": FORMAT, "nidiff": __version__, "files": _checksums(folder, [INDEX, DATA, *PARTS]), "run": run}
    replace_json(folder / MANIFEST, seal(values))


def check_manifest(folder: Path, parts: Sequence[str] = (INDEX, DATA, *PARTS)) -> None:
    """Refuse a model of which a file has changed, was added or is missing, or that is of another run.

    A folder without a manifest is accepted, for diffusers writes none, but not in a run.
    """
    identity = run_identity(folder)
    if identity is None and not (folder / MANIFEST).exists():
        return
    manifest = read_manifest(folder)
    if identity not in (None, manifest.get("run")):
        raise FileError("folder", folder, "is the model of another run", _remedy(folder))
    recorded = {name: sha256 for name, sha256 in manifest["files"].items() if {name, name.split("/")[0]} & {*parts}}
    check_files(folder, _names(folder, parts), recorded, _remedy(folder))


def recorded_run(folder: Path) -> Mapping[str, str] | None:
    """The identity of the run that made the model, if its manifest can be read and names one."""
    try:
        return read_manifest(folder).get("run")
    except FileError:
        return None


def run_identity(folder: Path) -> Mapping[str, str] | None:
    """The identity of the run whose model ``folder`` is; None outside of a run."""
    place = Path(os.path.abspath(folder))
    file = place.parent / "experiment.json"
    if "model" not in (place.name, replaced_name(place.name), place.name.removeprefix(REPLACED)) or not file.is_file():
        return None
    identity = read_object(file, "restore it from a copy").get("identity")
    if not isinstance(identity, dict):
        raise FileError("file", file, "is of a run of version 0.1, or damaged", OPENED_BY_0_2)
    return identity


def identities(experiment: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """The identity of the run that an experiment.json holds, and those that its older checkpoints carry, from before
    ``--finish`` changed its end."""
    identity, resolved = experiment.get("identity"), experiment.get("resolved")
    plans = resolved.get(EARLIER) if isinstance(resolved, dict) else None
    earlier = [plan.get("settings") for plan in plans if isinstance(plan, dict)] if isinstance(plans, list) else []
    if not isinstance(identity, dict):
        return []
    return [identity, *({**identity, "settings": settings} for settings in earlier)]


def renew_identity(folder: Path, before: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Let a model of the run with the identity ``before`` be one of the run as it is ``now``; its checksums stay."""
    if before != now and recorded_run(folder) == before:
        replace_json(folder / MANIFEST, seal({"format": FORMAT, **read_manifest(folder), "run": now}))


def model_sha256(folder: Path, *, checked: bool = False) -> str:
    """The checksum of the network and of its Σ, schedule and target: what the images of a model depend on.

    If the files were just ``checked``, those in the manifest are theirs, and nothing is read twice.
    """
    digest, recorded = hashlib.sha256(), checked and (folder / MANIFEST).is_file()
    checksums = read_manifest(folder)["files"] if recorded else _checksums(folder, PARTS)
    for name, sha256 in sorted(checksums.items()):
        if name.split("/")[0] in PARTS:
            digest.update(f"{name} {sha256}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _checksums(folder: Path, parts: Sequence[str]) -> dict[str, str]:
    return {name: file_sha256(folder / name) for name in sorted(_names(folder, parts))}


def _names(folder: Path, parts: Sequence[str]) -> list[str]:
    """The files of a model. Names that begin with a dot are the system's, and never read."""
    files = [file for part in parts for file in (folder / part, *(folder / part).glob("*"))]
    files = [file for file in files if file.is_file() or (file.is_dir() and file.parent != folder)]
    return [file.relative_to(folder).as_posix() for file in files if not file.name.startswith(".")]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a model, if it is what was written."""
    file, remedy = folder / MANIFEST, _remedy(folder)
    values = read_sealed(file, FORMAT, remedy)
    if not isinstance(values.get("files"), dict):
        raise FileError("file", file, "is damaged", remedy)
    return values


def _remedy(folder: Path) -> str:
    if entry_of(folder) is not None:
        return AGAIN
    accept = f"run nidiff verify --accept {str(folder)!r}"
    return f"copy the model again from where it was saved, or, if you changed it on purpose, {accept}"
