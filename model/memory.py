"""Keeps freed memory in the process, so that the next step does not fault it in again.

A step of serving or training frees and allocates megabytes of temporaries. By default
glibc returns such memory to the kernel, most of all where a thread other than the
main one allocated it, and the page faults then cost more than the arithmetic (see
``docs/contribute/notebook.md``). The process grows to its largest step and stays there, until
what was freed is much more than that: `return_freed_memory`.
"""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Sets glibc's allocator for the life of the process; False where it is another one."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    options = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _NEVER_BYTES),
        (_M_TRIM_THRESHOLD, _NEVER_BYTES),
    )
    return all(mallopt(option, value) == 1 for option, value in options)


def return_freed_memory() -> bool:
    """Returns to the kernel what is free; False where there was nothing, or no such function.

    Other threads wait for some milliseconds where they allocate.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # musl has none
        return False
    return bool(trim(0))
