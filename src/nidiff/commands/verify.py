"""``nidiff verify``: whether runs and models are what was written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from nidiff.errors import FileError, InputError


@dataclass(frozen=True)
class Verify:
    """Check the files of runs and models by their checksums: model, checkpoints, drawn images and results."""

    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN_OR_MODEL ...")]
    """Run directories, model folders, or names of models that ship."""
    accept: bool = False
    """Accept the models as they are now, after you have changed them on purpose. They must open."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a line per folder."""

    def run(self) -> None:
        from nidiff.model.folder import accept_model

        if not self.paths:
            raise InputError("RUN_OR_MODEL", None, "is missing", "give a run directory or a model folder")
        results = []
        for path in self.paths:
            try:
                if self.accept:
                    accept_model(path)
                results.append(checked(path))
            except InputError as error:
                results.append({"path": str(path), "model_sha256": None, "wrong": str(error)})
        lines = [f"{result['path']}: {described(result)}" for result in results if not result["wrong"]]
        if self.json or lines:
            print(json.dumps(results, indent=2) if self.json else "\n".join(lines))
        if wrong := [result["wrong"].removesuffix(".") for result in results if result["wrong"]]:
            count = "" if len(wrong) == 1 else f"{len(wrong)} of {len(results)}: "
            raise InputError(None, None, count + "; ".join(wrong))


def checked(path: Path) -> dict[str, Any]:
    """What a run directory or a model folder holds; an `InputError` if any of it has changed since it was written."""
    from nidiff.evaluation.results import read_results
    from nidiff.generation.folder import JOB, check_samples
    from nidiff.generation.loaded_model import run_folder
    from nidiff.model.config import model_folder
    from nidiff.model.folder import has_network, whole_model
    from nidiff.model.manifest import MANIFEST, model_sha256
    from nidiff.model.zoo import find_model

    path = run_folder(find_model(path, "path"))
    place, checkpoints = model_folder(path), 0
    if is_run := (path / "experiment.json").is_file():
        checkpoints = _check_checkpoints(path)
    sha256 = recorded = None
    if not is_run or has_network(place):  # a run that has not ended has no network yet
        sha256, recorded = model_sha256(whole_model(path), checked=True), (place / MANIFEST).is_file()
    samples = sorted(file.parent for file in (path / "generated").glob(f"*/{JOB}"))
    for folder in samples:
        check_samples(folder)
    results = read_results(path / "metrics.json") if (path / "metrics.json").exists() else []
    counts = {"checkpoints": checkpoints, "samples": len(samples), "results": len(results)}
    return {"path": str(path), "model_sha256": sha256, "manifest": recorded, **counts, "wrong": None}


def _check_checkpoints(path: Path) -> int:
    """How many checkpoints a run has; the newest one must be whole, and of this run."""
    from nidiff.training.checkpoint import list_checkpoints, load_checkpoint
    from nidiff.training.run import RunDirectory

    run = RunDirectory.open(path)
    newest = load_checkpoint(run.checkpoints, run.identity)
    if newest and newest.damaged:
        problem = f"has a checkpoint of no use ({'; '.join(newest.damaged)})"
        raise FileError("folder", run.checkpoints, problem, "delete it, and resume the run from the one before")
    return len(list_checkpoints(run.checkpoints))


def described(result: dict[str, Any]) -> str:
    """One line about a folder that is in order."""
    sha256, names = result["model_sha256"], ("checkpoints", "samples", "results")
    model = f"model {sha256}" if sha256 else "no model yet"
    note = "" if result["manifest"] or not sha256 else " (saved without checksums)"
    counts = [f"{name} {result[name]}" for name in names if result[name]]
    return ", ".join([model + note, *counts])
