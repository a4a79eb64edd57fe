"""What the page may open: the models that ship, and those in the folders it was given. Nothing else is read."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from nidiff.errors import FileError, one_of
from nidiff.generation.loaded_model import Model, open_model, process_state, run_folder
from nidiff.model.checkpoint import is_checkpoint
from nidiff.model.folder import CONFIG, has_network
from nidiff.model.zoo import find_model, zoo_models
from nidiff.training.run import RunDirectory

OPEN = 4  # models that stay in memory
MOST = 500  # runs of a folder


class Shelf:
    """Models and runs by the names that the page shows. A browser sends a name, never a path."""

    def __init__(self, paths: Sequence[Path] = (), folder: Path | None = None, checkpoint: str | None = None) -> None:
        """``paths`` are runs, models, checkpoints, or folders of runs and models. ``folder`` need not exist yet: it may
        come to hold runs. With ``checkpoint``, a step or "latest", that of each path is shown, which must be a run."""
        self.shipped = zoo_models()
        self._paths: dict[str, Path] = {}
        self._folders = [] if folder is None else [folder]
        for path in paths:
            self._add(path if checkpoint is None else find_model(path, "model", checkpoint))

    def _add(self, path: Path) -> None:
        """A run or a model whose training has ended, or a folder that holds some, ended or not."""
        place = run_folder(find_model(path, "model"))
        if place in self.shipped.values():
            return
        if is_run(place) and not RunDirectory.open(place).has_model:
            remedy = f"give `checkpoint` latest, or watch it with nidiff explore {place.parent}"
            raise FileError("model", str(path), "has no model yet, since its training has not finished", remedy)
        if _is_run_or_model(place) and _is_utf8(str(path)):
            self._paths[str(path)] = place
        elif any(map(_is_run_or_model, _inside(place))):
            self._folders.append(place)
        else:
            remedy = "give a run of nidiff train, a saved model, or a folder that contains some"
            raise FileError("model", str(path), "is neither a run nor a model, and contains none", remedy)

    def models(self) -> dict[str, Path]:
        """All that can be sampled now. A model of the user hides one that ships under the same name."""
        return self.user_models() | {**self.shipped, **self.user_models()}

    def user_models(self) -> dict[str, Path]:
        """All models that the user has named, directly or by their folder, and that can be sampled now."""
        return {name: path for name, path in self._all().items() if not is_run(path) or RunDirectory(path).has_model}

    def runs(self) -> dict[str, Path]:
        """All run directories that the user has named, also those that are still training."""
        return {name: path for name, path in self._all().items() if is_run(path)}

    def _all(self) -> dict[str, Path]:
        """All runs and models of the user that are there now: one may go, and another come."""
        inside = {str(path): path for folder in self._folders for path in _inside(folder)}
        return {name: path for name, path in (self._paths | inside).items() if _is_run_or_model(path)}

    def open(self, name: str) -> Model:
        """A model by its name; the last few stay in memory until their files change."""
        known = self.models()
        path = known[one_of("model", name, known)]
        return _opened(path, (path / "model" if is_run(path) else path).stat().st_mtime_ns)

    def run(self, name: str) -> RunDirectory:
        known = self.runs()
        return RunDirectory.open(known[one_of("run", name, known)])


@lru_cache(OPEN)
def _opened(path: Path, changed: int) -> Model:
    return open_model(path, process_state())


def is_run(folder: Path) -> bool:
    return (folder / "experiment.json").is_file()


def _is_run_or_model(folder: Path) -> bool:
    return is_run(folder) or is_checkpoint(folder) or ((folder / CONFIG).is_file() and has_network(folder))


def _inside(folder: Path) -> list[Path]:
    """The folders inside that can be read, the newest first, without links, which could lead anywhere."""
    folders = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False) and _is_utf8(entry.name)
                if is_folder and not _has_links(folder / entry.name):
                    folders.append((-entry.stat().st_mtime_ns, entry.name))
    return [folder / name for _, name in sorted(folders)[:MOST]]


def _is_utf8(name: str) -> bool:
    """Whether a browser can show a name: those of files may be any bytes, and others are read as lone surrogates."""
    return name == name.encode(errors="ignore").decode()


def _has_links(folder: Path) -> bool:
    """Whether a file of a run or a model is a link. An OSError says that the folder cannot be read."""
    os.listdir(folder)
    inside = [file for place in (folder / "model", folder) for file in (*place.glob("*/*"), *place.glob("*.json"))]
    return any(file.is_symlink() for file in (folder / "experiment.json", folder / "model", *inside))
