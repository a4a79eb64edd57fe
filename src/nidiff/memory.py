"""Memory: refuse what can never fit before it is asked for, and keep what is asked for again and again."""

import contextlib
import ctypes
import os

from nidiff.errors import InputError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def require_memory(what: str, needed: float, remedy: str) -> None:
    """Refuse work that needs more bytes than the machine has: ``what`` names the argument and its value."""
    if needed > (total := total_memory()):
        size = f"about {needed / 2**30:,.0f} GiB" if needed < 2**70 else "more memory than any machine has"
        raise InputError(f"{what} needs {size}, and this machine has {total / 2**30:,.0f} GiB: {remedy}.")


def total_memory() -> float:
    """Bytes of main memory; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def keep_freed_memory() -> None:
    """Tell glibc not to give large blocks back to the system, which costs page faults at every call of a network."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library or system
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
