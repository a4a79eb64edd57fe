"""Official files: found, or downloaded and kept only if they are the right ones."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from tqdm import tqdm

from nidiff.errors import FileError
from nidiff.files import blaming, replacing

PART, LARGEST = 2**16, 2**30  # bytes: several times our largest file, so that a wrong one does not fill the disk


class Remote(NamedTuple):
    """A file on the network, pinned by its checksum."""

    url: str
    sha256: str


def cache_folder() -> Path:
    """Where downloads are kept: the environment variable NIDIFF_DATA, or ~/.cache/nidiff."""
    return Path(os.environ.get("NIDIFF_DATA") or Path.home() / ".cache" / "nidiff")


def official_file(remote: Remote, data_dir: Path | None, folders: Sequence[Path], progress: bool) -> Path:
    """The file in ``data_dir``. Without one: in the first of ``folders`` that has it, or downloaded to the last."""
    name = remote.url.rpartition("/")[2]
    for file in [Path(folder) / name for folder in (folders if data_dir is None else [data_dir])]:
        if file.is_file():
            return file
    if data_dir is not None:
        remedy = "put it there, or leave `data_dir` out to download it"
        raise FileError("data_dir", str(data_dir), f"has no {name}", remedy)
    download(remote, file, progress)
    return file


def download(remote: Remote, file: Path, progress: bool = True, remedy: str = "give `data_dir`, where it is") -> None:
    """Download ``remote`` to ``file``, which appears only once its checksum is right."""
    digest, hidden = hashlib.sha256(), None if progress else True  # None: hidden unless stderr is a terminal
    blamed = blaming(None, remedy, f"{remote.url} cannot be downloaded to {str(file.parent)!r}", None)
    with blamed, urlopen(remote.url, timeout=30) as page, replacing(file) as out:
        with tqdm.wrapattr(page, "read", page.length, desc=file.name, leave=False, disable=hidden) as stream:
            while out.tell() <= LARGEST and (part := stream.read(PART)):
                out.write(part)
                digest.update(part)
        if digest.hexdigest() != remote.sha256:
            raise ValueError("its checksum is not that of the expected file")
