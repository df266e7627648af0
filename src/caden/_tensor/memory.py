"""Handling of freed memory. Imports nothing heavy: the command line uses it before it loads torch."""

import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


@cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks instead of returning them to the system; return whether it does.

    A round allocates and frees dozens of tensors of k x d numbers. Fetching the same pages from the system again each
    time takes a visible part of the round. CADEN_MALLOC=system leaves the allocator alone.
    """
    if os.environ.get("CADEN_MALLOC") == "system":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
