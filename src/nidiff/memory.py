"""Memory: refuse what can never fit before it is allocated, and keep freed blocks for the next call."""

import contextlib
import ctypes
import os

from nidiff.errors import InputError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def require_memory(argument: str | None, value: object, needed: float, remedy: str) -> None:
    """Refuse the ``value`` of an argument that needs more bytes than the machine has."""
    if needed > (total := total_memory()):
        size = f"about {needed / 2**30:,.0f} GiB" if needed < 2**70 else "more memory than any machine has"
        raise InputError(argument, value, f"needs {size}, and this machine has {total / 2**30:,.0f} GiB", remedy)


def total_memory() -> float:
    """Bytes of main memory; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, since returning them to the system costs page faults at every call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library or system
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
