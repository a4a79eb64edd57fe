"""Files that are the old one or the new one, never half of each; and arrays that are read only if they are whole."""

import contextlib
import errno
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nidiff.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

ASIDE = ".tmp-"  # how a name begins while its file or folder is written or deleted; what a kill leaves can be deleted
REPLACED = ".replaced-"  # and that of a folder while another takes its place


@contextlib.contextmanager
def writing(argument: str, path: Path, remedy: str = "choose another place or make room") -> Iterator[None]:
    """Turn a failure of the file system into one sentence: every file of ours is written inside this."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{argument}={str(path)!r} cannot be written ({error.strerror or error}): {remedy}."
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``path`` when the block ends; after an error ``path`` is untouched.

    Two processes may do this at once: each writes its own file aside, and the last one to finish is kept.
    """
    aside = path.with_name(f"{ASIDE}{os.getpid()}-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``path`` when the block ends and all of it is on the disk.

    After an error ``path`` is as it was. After a kill it may have the name `REPLACED` until `recover_folder` is called.
    """
    recover_folder(path)
    aside = path.with_name(f"{ASIDE}{path.name}")
    try:
        aside.mkdir(parents=True)
        yield aside
        for written in (*aside.rglob("*"), aside):
            sync(written)
        if path.exists():
            os.rename(path, path.with_name(f"{REPLACED}{path.name}"))
        os.rename(aside, path)
        sync(path.parent)
    finally:
        recover_folder(path)


def recover_folder(path: Path) -> None:
    """Give a folder its name back that nothing has replaced, and remove what is not needed."""
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    for left in (path.with_name(f"{ASIDE}{path.name}"), replaced):
        shutil.rmtree(left, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder that nobody shall find half deleted."""
    os.rename(path, path.with_name(f"{ASIDE}{path.name}"))
    sync(path.parent)
    recover_folder(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder, and say so like this
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block, for work that reads a file of ``folder`` and then replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())  # UTF-8, whatever the system's encoding is


def replace_npz(path: Path, arrays: "Mapping[str, ArrayLike]") -> None:
    """As `numpy.savez` does, but the same arrays give the same bytes: no time is stored."""
    import numpy as np

    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read_npz(file: Path, names: list[str], remedy: str) -> "dict[str, NDArray[Any]]":
    """The arrays ``names`` of an npz. Its members have checksums, so what is read is what was written."""
    import numpy as np

    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:  # numpy leaves a bad zip open
            return {name: content[name] for name in names}
    except KeyError as error:
        raise InputError(f"{str(file)!r} lacks one of the arrays {', '.join(names)}: {remedy}.") from error
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{str(file)!r} cannot be read as an npz ({error}): {remedy}.") from error


def file_sha256(path: Path) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        raise InputError(f"file={str(path)!r} cannot be read ({error.strerror}): give a file that exists.") from error
    return digest.hexdigest()
