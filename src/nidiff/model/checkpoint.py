"""A checkpoint as a model: its averaged weights, and the outline that the run stored when it began.

Nothing heavy is imported here, so that a path is found at once.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nidiff.errors import FileError, InputError
from nidiff.files import blaming, read_object
from nidiff.sealed import check_files, digest, read_sealed

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
EXPERIMENT, CHECKPOINTS, LATEST = "experiment.json", "checkpoints", "latest"
MANIFEST, STATE, WEIGHTS = "manifest.json", "state.json", "ema.safetensors"
NAME = re.compile("[0-9]{6}|[1-9][0-9]{6,}")


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint's folder in a run directory."""
    path = Path(os.path.abspath(path))
    is_named = NAME.fullmatch(path.name) is not None and path.parent.name == CHECKPOINTS
    return is_named and path.is_dir() and (path.parents[1] / EXPERIMENT).is_file()


def run_of(checkpoint: Path) -> Path:
    """The run directory of a checkpoint."""
    is_whole = checkpoint.parent.name == CHECKPOINTS and len(checkpoint.parts) > 2  # else it is relative to the run
    return checkpoint.parent.parent if is_whole else Path(os.path.abspath(checkpoint)).parents[1]


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint, which is its name."""
    return int(Path(os.path.abspath(path)).name)


def find_checkpoint(path: Path, checkpoint: str | int) -> Path:
    """The folder of the checkpoint of a step, or of the latest one, in the run directory ``path``."""
    run = path.parent if path.name == "model" else path
    if not (run / EXPERIMENT).is_file():
        problem = f"is of a run, and {str(path)!r} is not a run directory"
        raise InputError("checkpoint", checkpoint, problem, "leave it out, or give the run directory")
    folder = run / CHECKPOINTS
    steps = sorted(int(place.name) for place in folder.glob("*") if NAME.fullmatch(place.name) and place.is_dir())
    if not steps:
        remedy = f"continue the run with nidiff train --resume --out {run}"
        raise FileError("checkpoint", checkpoint, f"is not there: {str(run)!r} has no checkpoint", remedy)
    words = str(checkpoint).strip()
    is_number = words.isdecimal() and len(words) < 20  # Python refuses to read thousands of digits
    step = steps[-1] if words == LATEST else int(words) if is_number else None
    if step not in steps:
        known = f"choose from {', '.join(map(str, steps))} and {LATEST}"
        raise FileError("checkpoint", checkpoint, f"is none of {str(run)!r}", known)
    return folder / f"{step:06d}"


def read_averaged(path: Path, place: Path) -> "tuple[dict[str, Tensor], str]":
    """The averaged weights of a checkpoint, and the checksum of what its images depend on.

    ``place`` is the folder of its run's model, which has all but the weights. A file of either that has changed since
    it was written is refused, and so is a checkpoint of another run.
    """
    from safetensors.torch import load

    from nidiff.model.manifest import OUTLINE, check_manifest, identities

    run = run_of(path)
    if not (place / MANIFEST).is_file():
        problem = "is of a run that began with an earlier version, which did not store what its network is"
        raise FileError("checkpoint", path, problem, f"end it with nidiff train --resume --finish --out {run}")
    check_manifest(place, OUTLINE)
    remedy = f"use another checkpoint, or copy it again; nidiff train --resume --out {run} skips it"
    for name in (MANIFEST, STATE, WEIGHTS):
        if not (path / name).is_file():  # a device may have no end
            raise FileError("checkpoint", path, f"has no file {name}", remedy)
    recorded = read_sealed(path / MANIFEST, FORMAT, remedy)
    with blaming(path, remedy):
        checksums = {name: recorded["files"][name]["sha256"] for name in (STATE, WEIGHTS)}
        check_files(path, checksums, checksums, remedy)
        state, weights = read_object(path / STATE, remedy), load((path / WEIGHTS).read_bytes())
        if state["step"] != checkpoint_step(path):
            raise ValueError(f"{STATE} is of step {state['step']}")
        if state["run"] not in identities(read_object(run / EXPERIMENT)):
            raise ValueError("it is of another run")
        parts = [checksums[WEIGHTS], state["run"]["process"], state["run"]["network"]]
    return weights, digest(parts)
