"""The files that a source of data names: by a path, a folder, a pattern such as 'months/*.nc', or several of these."""

import glob
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from nidiff.data.dataset import natural_order
from nidiff.data.formats import FOLDERS, conversion, kind_of, suffix_of
from nidiff.errors import FileError, shown
from nidiff.files import as_path

PATTERN = re.compile(r"[*?\[]")


class Files(NamedTuple):
    """Files of one kind."""

    root: Path
    """The folder that they are in; its subfolders may be classes."""
    kind: str
    files: list[Path]
    """In the natural order of their names: 2 before 10."""


def is_path(source: str) -> bool:
    """Whether a source names files: it is there, or is a pattern, or several paths joined by commas."""
    return os.path.lexists(source) or "," in source or PATTERN.search(source) is not None


def find_files(source: str, besides: Iterable[str | None] = ()) -> Files:
    """The files of ``source``, in which those that serve as labels or conditions, ``besides``, do not count.

    All are of one kind. A warning says how many others a folder or pattern has.
    """
    paths, others = _paths(source), {os.path.abspath(name) for name in besides if name}
    found: dict[str, list[Path]] = {}
    unread = Counter[str]()
    for file in dict.fromkeys(file for path in paths for file in _inside(path)):
        if os.path.abspath(file) in others:
            continue
        is_there = file.is_file() or (file.is_dir() and suffix_of(file) in FOLDERS)
        kind = kind_of(file) if is_there else None
        if kind is None:
            unread[suffix_of(file) or "without a suffix" if is_there else "links or pipes"] += 1
        else:
            found.setdefault(kind, []).append(file)
    kinds = ", ".join(f"{count} {kind}" for kind, count in unread.most_common())
    if not found:
        problem = f"has no data in a format that is read{f', but {kinds}' if kinds else ''}"
        if [Path(source)] == paths and not paths[0].is_dir():
            problem = "is in no format that is read"
        remedy = conversion([*unread]) if unread else "give one that has data"
        raise FileError("data", source, problem, remedy)
    if len(found) > 1:
        counts = " and ".join(f"{len(found[kind])} {kind}" for kind in sorted(found, reverse=True))
        example = os.path.join("FOLDER", f"*{suffix_of(min(found.values(), key=len)[0])}")
        raise FileError("data", source, f"has {counts}", f"give those of one kind, as by a pattern such as '{example}'")
    if unread:
        warnings.warn(f"{shown(source)} has files that are not read: {kinds}.", stacklevel=2)
    kind, files = found.popitem()
    if len(paths) == 1 and paths[0].is_dir() and suffix_of(paths[0]) not in FOLDERS:
        root = paths[0]
    else:
        root = Path(os.path.commonpath([os.path.abspath(file.parent) for file in files]))
        root = Path(os.path.relpath(root)) if not any(file.is_absolute() for file in files) else root
    return Files(root, kind, sorted(files, key=lambda file: natural_order(str(file))))


def _paths(source: str) -> list[Path]:
    """What a source names, as far as it is there."""
    if os.path.lexists(source):
        return [as_path("data", source)]
    paths = []
    for word in source.split(","):
        if os.path.lexists(word):
            paths.append(Path(word))
        elif matches := glob.glob(word, recursive=True):
            paths += map(Path, matches)
        else:
            problem = "matches no file" if PATTERN.search(word) else "does not exist"
            raise FileError("data", word, problem, "correct it (a comma joins several paths)")
    return paths


def _inside(path: Path) -> list[Path]:
    """The files of a folder and its subfolders, but for hidden ones; any other path itself."""
    if not path.is_dir() or suffix_of(path) in FOLDERS:
        return [path]
    files = []
    for folder, folders, names in os.walk(path):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        whole = [name for name in folders if Path(name).suffix.lower() in FOLDERS and name not in links]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in whole]
        files += [Path(folder, name) for name in (*names, *links, *whole) if not name.startswith(".")]
    return sorted(files)
