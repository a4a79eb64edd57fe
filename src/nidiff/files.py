"""Files that are the old one or the new one, never half of each; and arrays that are read only if they are whole."""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nidiff.errors import FileError, InputError, first_line

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

ASIDE = ".tmp-"  # how a name begins while its file or folder is written or deleted; what a kill leaves is rubbish
COPY_AGAIN = "copy it again from where it was saved"  # the remedy for a damaged file
REPLACED = ".replaced-"  # how the name of a folder begins while another takes its place; its old name follows
REMEDIES = {  # of what the file system refuses
    "make room": (errno.ENOSPC, errno.EDQUOT),
    "make it writable, or choose another place": (errno.EACCES, errno.EPERM, errno.EROFS),
    "close some files, or allow more of them with ulimit -n": (errno.EMFILE, errno.ENFILE),
    "allow larger files with ulimit -f": (errno.EFBIG,),
    "choose a shorter name": (errno.ENAMETOOLONG,),
}


def remedy_for(error: OSError, then: str = "") -> str:
    """What helps where the file system has refused to write, and what to do after that."""
    remedy = next((words for words, numbers in REMEDIES.items() if error.errno in numbers), "choose another place")
    return f"{remedy}, then {then}" if then else remedy


@contextlib.contextmanager
def writing(argument: str, path: Path, then: str = "") -> Iterator[None]:
    """Turn a failure of the file system into one sentence: every file of ours is written inside this. Its remedy is
    that of `remedy_for`, with what to do ``then``."""
    try:
        yield
    except FileError:  # of a file that was read
        raise
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise InputError(argument, path, problem, remedy_for(error, then)) from error


@contextlib.contextmanager
def blaming(
    file: str | Path | None, remedy: str = COPY_AGAIN, problem: str = "cannot be used", argument: str | None = "file"
) -> Iterator[None]:
    """Turn whatever goes wrong inside into one sentence that blames ``file``; a `FileError` stays as it is."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:  # libraries raise nearly anything when a file is broken
        reason = getattr(error, "strerror", None) or first_line(error)
        raise FileError(argument, file, f"{problem} ({reason})", remedy) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``path`` when the block ends; after an error ``path`` is untouched.

    Two processes may do this at once: each writes its own file aside, and the last one to finish is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(marked(ASIDE))
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``path`` when the block ends and all of it is on the disk.

    After an error ``path`` is as it was. After a kill it may have another name until `recover_folder` is called. Two
    processes may do this at once, as with `replacing`.
    """
    with locked(path.parent):
        _recover(path)
        aside = path.with_name(marked(ASIDE))
        aside.mkdir()
        held = os.open(aside, os.O_RDONLY)
        _lock(held)  # so that nobody takes it for what a kill left
    try:
        yield aside
        for written in (*aside.rglob("*"), aside):
            sync(written)
        with locked(path.parent):
            if path.exists():
                os.rename(path, path.with_name(marked(f"{REPLACED}{path.name}-")))
            os.rename(aside, path)
            sync(path.parent)
    finally:
        os.close(held)
        recover_folder(path)


def recover_folder(path: Path) -> None:
    """Give a folder back its name if nothing has replaced it, and remove what a kill left: only what has a name that we
    have made, and that no process is at work on."""
    with locked(path.parent):
        _recover(path)


def _recover(path: Path) -> None:
    for replaced in [folder for folder in replaced_folders(path) if replaced_name(folder.name)]:
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, path)
    for left in [path.with_name(name) for name in os.listdir(path.parent) if is_aside(name)]:
        if left.is_dir() and not left.is_symlink() and _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)


def replaced_folders(path: Path) -> list[Path]:
    """The folder that had the name ``path`` until another was to take its place and a kill came; none, as a rule.

    Version 0.2 gave it a name that others can have made, too, by which it may be read but not deleted.
    """
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):  # it is missing, closed to us, or no path at all
        return []
    by_0_2 = f"{REPLACED}{path.name}" if path.name else None
    return [path.with_name(name) for name in names if path.name == replaced_name(name) or name == by_0_2]


def remove_folder(path: Path) -> None:
    """Delete a folder so that it is never found half deleted."""
    os.rename(path, path.with_name(marked(ASIDE)))
    sync(path.parent)
    recover_folder(path)


def remove_left(*folders: Path) -> None:
    """Remove the files that a kill left while they were written. Nobody else may be writing to these folders."""
    for folder in folders:
        for left in folder.glob(f"{ASIDE}*"):
            if is_aside(left.name) and left.is_file():
                left.unlink(missing_ok=True)


def marked(start: str) -> str:
    """A name that begins so and that only we can have made: it is random, and ends in a digest of itself."""
    start += secrets.token_hex(8)
    return f"{start}-{_mark(start)}"


def _mark(start: str) -> str:
    return hashlib.sha256(b"made by nidiff: " + os.fsencode(start)).hexdigest()[:16]


def _is_marked(name: str) -> bool:
    start, _, mark = name.rpartition("-")
    return mark == _mark(start)


def is_aside(name: str) -> bool:
    """Whether a file or folder has a name that we gave it while it was written or deleted."""
    return name.startswith(ASIDE) and _is_marked(name)


def replaced_name(name: str) -> str | None:
    """The name that a folder had before another was to take its place; None if it has no name that we gave it."""
    return name[len(REPLACED) :].rsplit("-", 2)[0] if name.startswith(REPLACED) and _is_marked(name) else None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block, for work on the names in ``folder``, which is made if need be. It
    waits; `nidiff.locks.claimed` is for work that takes long."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool = True) -> bool:
    """Whether a lock was taken; on a file system without locks it never is."""
    import fcntl  # not on Windows, where models can be read all the same

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_abandoned(folder: Path) -> bool:
    """Whether no process is filling a folder; one on a file system without locks may be in use."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _lock(descriptor, wait=False)
    finally:
        os.close(descriptor)


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


def replace_text(path: Path, text: str) -> None:
    """UTF-8, whatever the system's encoding is; a name that is not UTF-8 keeps its bytes."""
    with replacing(path) as file:
        file.write(text.encode(errors="surrogateescape"))


def replace_json(path: Path, values: Any) -> None:
    replace_text(path, json.dumps(values, indent=2) + "\n")


def read_json(file: Path, remedy: str = COPY_AGAIN) -> Any:
    """What a JSON file holds; a `FileError` if it is not JSON, or has NaN or infinite numbers, which we never write."""
    with blaming(file, remedy, "cannot be read"):
        return json.loads(file.read_text("utf-8"), parse_float=_finite, parse_constant=_finite)


def read_object(file: Path, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """The object in a JSON file."""
    values = read_json(file, remedy)
    if not isinstance(values, dict):
        raise FileError("file", file, "cannot be read (it does not hold an object)", remedy)
    return values


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"it has the number {digits[:20]}")
    return value


def as_path(argument: str, value: Any) -> Path:
    """``value`` as a path that the system can look for: every public function that takes a path begins with this."""
    # Refused: a name that is too long or has a zero byte, or a folder that is closed to us. What is missing may come.
    missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with blaming(value, "give another path", argument=argument), missing:
        os.lstat(value)
    return Path(os.fsdecode(value))


def replace_npz(path: Path, arrays: "Mapping[str, ArrayLike]") -> None:
    """As `numpy.savez` does, but the same arrays give the same bytes: no time is stored."""
    import numpy as np

    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read_npz(file: Path, names: list[str], remedy: str, optional: Sequence[str] = ()) -> "dict[str, NDArray[Any]]":
    """The arrays ``names`` of an npz, and those of ``optional`` that it has. Each is read to its end, so that its
    checksum is compared: what is read is what was written."""
    import numpy as np

    with blaming(file, remedy, "cannot be read as an npz"), zipfile.ZipFile(file) as archive:
        wanted = [*names, *(name for name in optional if f"{name}.npy" in archive.namelist())]
        members = {name: BytesIO(archive.read(f"{name}.npy")) for name in wanted}
        return {name: np.load(member, allow_pickle=False) for name, member in members.items()}


def file_sha256(path: Path) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    with blaming(path, "give a file that exists", "cannot be read"), path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
