"""Who may write to a folder: one process at a time, and the others are told which one it is."""

import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nidiff.errors import InputError
from nidiff.files import writing

LOCK = ".lock"  # in the folder, while it is claimed
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a lock is written to, and a stranger's link could lead to any file


@contextlib.contextmanager
def claimed(folder: Path, argument: str = "out") -> Iterator[None]:
    """Keep ``folder``, which is made if need be, for this process, or say in an `InputError` who has it.

    The lock is the system's own, released however the process ends. On a file system without locks the file `LOCK`
    counts, as long as the process that it names is alive.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    with writing(argument, folder):
        descriptor = _open_lock(folder, argument)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(folder / LOCK)  # before the lock is released: whoever gets it then sees that the file is gone
        os.close(descriptor)
        with contextlib.suppress(OSError):
            for place in made:
                place.rmdir()  # if nothing was written to it


def refuse_claimed(folder: Path, argument: str = "out") -> None:
    """An `InputError` if another process has claimed ``folder``; nothing is written."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | NO_LINK)
    except OSError:
        return  # nobody has it
    try:
        _take(descriptor, folder, argument)
    finally:
        os.close(descriptor)


def _open_lock(folder: Path, argument: str) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | NO_LINK, 0o644)
        except FileNotFoundError:  # the last holder had made the folder, and has just removed it
            continue
        try:
            _take(descriptor, folder, argument)
            if not _holder(descriptor) and os.pread(descriptor, 4096, 0).strip(b"\0"):  # a power cut leaves zeros
                problem = f"has a file {LOCK} that nidiff has not written"
                raise InputError(argument, folder, problem, "move it, or choose another directory")
            with contextlib.suppress(FileNotFoundError):  # its last holder has just removed it
                if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(_self()).encode(), 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(descriptor: int, folder: Path, argument: str) -> None:
    """Lock an open file, or say who has it."""
    import fcntl

    holder = _holder(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        is_taken = True
    except OSError:  # no locks on this file system: go by the file
        is_taken = bool(holder) and _may_be_alive(holder)
    if is_taken:
        who = "process {process} on {host} ({command})".format(**holder) if holder else "another process"
        remedy = f"wait until it has ended, or stop it; if it is gone, delete {folder / LOCK}"
        raise InputError(argument, folder, f"is in use by {who}", remedy)


def _self() -> dict[str, Any]:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
    return {"process": os.getpid(), "host": socket.gethostname(), "command": command}


def _holder(descriptor: int) -> dict[str, Any]:
    """What the holder of a lock wrote; nothing while it is being written, or if it is not ours."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        holder = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(holder, dict) and {*_self()} <= {*holder}:
            return holder
    return {}


def _may_be_alive(holder: dict[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        return True  # we cannot tell
    try:
        os.kill(holder["process"], 0)
    except OSError as error:
        return error.errno == errno.EPERM  # it is another user's
    return bool(holder["process"] != os.getpid())
