"""Download a file, and keep it only if it is the right one."""

import hashlib
import os
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from nidiff.errors import InputError
from nidiff.files import replacing


class Remote(NamedTuple):
    """A file on the network, pinned by its size and one of the two checksums."""

    url: str
    size: int
    md5: str = ""
    sha256: str = ""


def cache_folder() -> Path:
    """Where downloads are kept: the environment variable NIDIFF_DATA, or ~/.cache/nidiff."""
    return Path(os.environ.get("NIDIFF_DATA") or Path.home() / ".cache" / "nidiff")


def download(
    remote: Remote, file: Path, progress: bool = True, *, remedy: str = "give data_dir, a folder that has it"
) -> None:
    """Download ``remote`` to ``file``, which appears only once its size and checksum are right."""
    from tqdm import tqdm

    digest = hashlib.sha256() if remote.sha256 else hashlib.md5(usedforsecurity=False)
    size = 0
    bar = tqdm(
        total=remote.size, desc=file.name, unit="B", unit_scale=True, leave=False, disable=None if progress else True
    )
    try:
        with bar, urlopen(remote.url, timeout=30) as response, replacing(file) as out:
            while size <= remote.size and (part := response.read(1 << 16)):
                out.write(part)
                digest.update(part)
                bar.update(len(part))
                size += len(part)
            if size != remote.size or digest.hexdigest() != (remote.sha256 or remote.md5):
                raise InputError(
                    f"{remote.url} is not the expected file ({size} bytes for {remote.size}, or another checksum): "
                    f"try again, or {remedy}."
                )
    except (OSError, HTTPException) as error:
        raise InputError(f"{remote.url} cannot be downloaded to {str(file.parent)!r} ({error}): {remedy}.") from error
