"""``nidiff verify``: whether runs, models, samples and restorations are what was written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, QuietFlag
from nidiff.errors import FileError, InputError

COUNTS = ("checkpoints", "samples", "restorations", "results")


@dataclass(frozen=True)
class Verify:
    """Check files by their checksums: model, checkpoints, drawn samples, restorations and results."""

    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="FOLDER ...")]
    """Run directories, model folders, names of models that ship, checkpoints, or folders that nidiff sample, restore or
    denoise wrote. Of a run, all that lies in it is checked."""
    checkpoint: CheckpointFlag = None
    accept: bool = False
    """Accept the models as they are now, after you have changed them on purpose. They must open."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a line per folder."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.model.folder import accept_model
        from nidiff.model.zoo import find_model

        if not self.paths:
            raise InputError("FOLDER", None, "is missing", "give a run directory or a model folder")
        results = []
        for path in self.paths:
            try:
                if self.accept:
                    accept_model(path)
                results.append(checked(find_model(path, "path", self.checkpoint)))
            except InputError as error:
                results.append({"path": str(path), "model_sha256": None, "wrong": str(error)})
        lines = [f"{result['path']}: {described(result)}" for result in results if not result["wrong"]]
        if self.json or lines:
            print(json.dumps(results, indent=2) if self.json else "\n".join(lines))
        if wrong := [result["wrong"].removesuffix(".") for result in results if result["wrong"]]:
            count = "" if len(wrong) == 1 else f"{len(wrong)} of {len(results)}: "
            raise InputError(None, None, count + "; ".join(wrong))


def checked(path: Path) -> dict[str, Any]:
    """What a run directory or a model folder holds, or a folder of samples or of a restoration; an `InputError` if any
    of it has changed since it was written."""
    from nidiff.evaluation.results import read_results
    from nidiff.generation.folder import JOB, check_samples
    from nidiff.generation.loaded_model import run_folder
    from nidiff.generation.restoration import FACTS, check_restoration
    from nidiff.model.checkpoint import is_checkpoint
    from nidiff.model.config import model_folder
    from nidiff.model.folder import has_network, open_stored, whole_model
    from nidiff.model.manifest import MANIFEST, check_manifest, model_sha256
    from nidiff.model.sampling import SAMPLING, read_choices

    path = run_folder(path)
    if is_checkpoint(path):
        facts = {"model_sha256": open_stored(path)[1], "manifest": True, **dict.fromkeys(COUNTS, 0)}
        return {"path": str(path), "run": False, **facts, "without_checksums": [], "wrong": None}
    samples = [path] if (path / JOB).is_file() else _parents(path, f"generated/*/{JOB}")
    restored = [path] if (path / FACTS).is_file() else _parents(path, f"restored/*/{FACTS}", f"denoised/*/{FACTS}")
    place, checkpoints = model_folder(path), 0
    if is_run := (path / "experiment.json").is_file():
        checkpoints = _check_checkpoints(path)
    sha256 = recorded = None
    # A run that has not ended has no network yet.
    if path not in (*samples, *restored) and (not is_run or has_network(place)):
        sha256, recorded = model_sha256(whole_model(path), checked=True), (place / MANIFEST).is_file()
        read_choices(place / SAMPLING, sha256)
    elif is_run and (place / MANIFEST).is_file():
        check_manifest(place)
    for folder in samples:
        check_samples(folder)
    unsealed = [str(folder) for folder in restored if not check_restoration(folder)]
    results = read_results(path / "metrics.json") if (path / "metrics.json").exists() else []
    numbers = (checkpoints, len(samples), len(restored), len(results))
    about = {"path": str(path), "run": is_run, "model_sha256": sha256, "manifest": recorded}
    return {**about, **dict(zip(COUNTS, numbers, strict=True)), "without_checksums": unsealed, "wrong": None}


def _parents(path: Path, *names: str) -> list[Path]:
    """The folders of the files that match, of a run and of its checkpoints."""
    patterns = [home + each for home in ("", "steps/*/") for each in names]
    return sorted(file.parent for each in patterns for file in path.glob(each))


def _check_checkpoints(path: Path) -> int:
    """How many checkpoints a run has; the newest one must be whole, and of this run."""
    from nidiff.training.checkpoint import list_checkpoints, load_checkpoint
    from nidiff.training.run import RunDirectory

    run = RunDirectory.open(path)
    newest = load_checkpoint(run.checkpoints, *run.identities)
    if newest and newest.damaged:
        problem = f"has a checkpoint of no use ({'; '.join(newest.damaged)})"
        raise FileError("folder", run.checkpoints, problem, "delete it, and resume the run from the one before")
    return len(list_checkpoints(run.checkpoints))


def described(result: dict[str, Any]) -> str:
    """One line about a folder that is in order."""
    sha256, words = result["model_sha256"], []
    if sha256:
        words = [f"model {sha256}" + ("" if result["manifest"] else " (saved without checksums)")]
    elif result["run"]:
        words = ["no model yet"]
    words += [f"{name} {result[name]}" for name in COUNTS if result[name]]
    if unsealed := result["without_checksums"]:
        words.append(f"written by version 0.2 without checksums: {' and '.join(unsealed)}")
    return ", ".join(words)
