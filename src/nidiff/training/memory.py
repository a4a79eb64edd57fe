"""Keep freed memory in the process: on a CPU, a training step frees and asks for the same large blocks again."""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Tell glibc not to give large blocks back to the system, which costs page faults at every step."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library or system
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
