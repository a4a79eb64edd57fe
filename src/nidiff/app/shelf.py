"""What the page may open: the models that ship, and those in the folders it was given. Nothing else is read."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from nidiff.errors import InputError, one_of
from nidiff.generation.opened import Model, open_model, process_state, run_folder
from nidiff.model.folder import CONFIG, has_network
from nidiff.model.zoo import find_model, zoo_models
from nidiff.training.run import RunDirectory

OPEN = 4  # models kept in memory
MOST = 500  # runs of a folder


class Shelf:
    """Models and runs by the names that the page shows. A browser sends a name, never a path."""

    def __init__(self, paths: Sequence[Path] = (), folder: Path | None = None) -> None:
        """``folder`` may come to hold runs: it is looked into again and again, and need not exist yet."""
        self.shipped = zoo_models()
        self._given: dict[str, Path] = {}
        self._folders = [] if folder is None else [folder]
        self._opened: OrderedDict[tuple[str, int], Model] = OrderedDict()
        self._lock = Lock()
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        """A run or a model whose training has ended, or a folder that holds some, ended or not."""
        found = run_folder(find_model(path, "model"))
        if found in self.shipped.values():
            return
        if not found.is_dir():
            raise InputError(f"model={str(path)!r} is not a folder: give a run, a model, or a folder of runs.")
        if not _is_plain(str(path)):
            raise InputError(f"model={str(path)!r} cannot be shown in a browser: rename it to UTF-8.")
        if is_run(found):
            if not RunDirectory.open(found).has_model:
                remedy = f"wait until it has, or watch it with nidiff explore {found.parent}"
                raise InputError(
                    f"model={str(path)!r} has no model yet, since its training has not finished: {remedy}."
                )
            self._given[str(path)] = found
        elif _is_model(found):
            self._given[str(path)] = found
        elif any(is_run(one) or _is_model(one) for one in _inside(found)):
            self._folders.append(found)
        else:
            remedy = "give a run of nidiff train, a saved model, or a folder that contains some"
            raise InputError(f"model={str(path)!r} is neither a run nor a model, and contains none: {remedy}.")

    def models(self) -> dict[str, Path]:
        """All that can be sampled now, those that were given first. They also hide a model that ships under the same
        name, as they do on the command line."""
        own = self.own_models()
        return own | {name: path for name, path in self.shipped.items() if name not in own}

    def own_models(self) -> dict[str, Path]:
        """All models that were given, or lie in a folder that was, and can be sampled now."""
        return {name: path for name, path in self._all().items() if not is_run(path) or RunDirectory(path).has_model}

    def runs(self) -> dict[str, Path]:
        """All run directories that were given or lie in a folder that was, also those that are still training."""
        return {name: path for name, path in self._all().items() if is_run(path)}

    def _all(self) -> dict[str, Path]:
        """What is there now: a run may go, and another come."""
        found = {name: path for name, path in self._given.items() if is_run(path) or _is_model(path)}
        for folder in self._folders:
            found |= {str(one): one for one in _inside(folder) if is_run(one) or _is_model(one)}
        return found

    def open(self, name: str) -> Model:
        """A model by its name; the last few stay open, until their files change."""
        known = self.models()
        path = known[one_of("model", name, known)]
        key = (name, _changed(path))
        with self._lock:
            if key not in self._opened:
                self._opened[key] = open_model(path, process_state())
            self._opened.move_to_end(key)
            while len(self._opened) > OPEN:
                self._opened.popitem(last=False)
            return self._opened[key]

    def run(self, name: str) -> RunDirectory:
        known = self.runs()
        return RunDirectory.open(known[one_of("run", name, known)])


def is_run(folder: Path) -> bool:
    return (folder / "experiment.json").is_file()


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and has_network(folder)


def _inside(folder: Path) -> list[Path]:
    """The folders in it, the newest first, that are there themselves and have all their files: a link could lead
    anywhere. One that cannot be read, or has just gone, is left out."""
    if not folder.is_dir():
        return []
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if (
                    entry.is_dir(follow_symlinks=False)
                    and _is_plain(entry.name)
                    and not _has_links(folder / entry.name)
                ):
                    found.append((-entry.stat().st_mtime_ns, entry.name))
    return [folder / name for _, name in sorted(found)[:MOST]]


def _is_plain(name: str) -> bool:
    """Whether a browser can be told a name: those of files may be any bytes."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _has_links(folder: Path) -> bool:
    """Whether a file that makes a run or a model is a link; refused by the system if the folder cannot be read."""
    os.listdir(folder)
    model = [
        file for place in (folder / "model", folder) for file in (place, *place.glob("*/*"), *place.glob("*.json"))
    ]
    return any(file.is_symlink() for file in (folder / "experiment.json", *model))


def _changed(path: Path) -> int:
    """When the model was last saved."""
    folder = path / "model" if is_run(path) else path
    return folder.stat().st_mtime_ns
