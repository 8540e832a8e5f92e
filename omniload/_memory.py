"""How workers keep their memory or give it back, and how they get that of a batch.

A worker makes and frees tens of megabytes for every image. Left to itself, glibc gives them back
to the system each time, and the system hands out zeroed pages again, 4 KiB at a time: measured, up
to a third of the time from a JPEG to its tiles (0 to 5 ms an image, by its size).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache
from typing import Any

__all__ = ["give_back_freed_memory", "keep_freed_memory", "populate"]

# <asm-generic/mman-common.h>, Linux 5.14
_MADV_POPULATE_WRITE = 23

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

#: Free bytes at the end of the heap that are kept: a batch of tiles and some large photos.
_KEPT_BYTES = 256 << 20
#: Blocks up to this size come from the heap; glibc takes no more than 32 MiB.
_HEAP_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Let this process keep up to 256 MiB that it has freed, for its next image.

    For worker processes: what the main process does with its memory is the user's business. Does
    nothing where the allocator is not glibc's, or where the environment has settings for it
    (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES).

    Returns:
        Whether it was done.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in tunables:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS, musl, Windows
        return False
    done = mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) == 1 and mallopt(_MMAP_THRESHOLD, _HEAP_BYTES) == 1
    return bool(done)


def give_back_freed_memory() -> bool:
    """Give what this process has freed back to the system, from all arenas of glibc.

    For threads that have ended: each has freed blocks of its own, which would stay until others
    ask for such.

    Returns:
        Whether there was any; False where the allocator is not glibc's.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # macOS, musl, Windows
        return False
    return bool(trim(ctypes.c_size_t(0)))


def populate(address: int, num_bytes: int) -> bool:
    """Get all pages of some memory at once, before they are written.

    One call in place of a fault for every 4 KiB of new shared memory: measured, a quarter of the
    time that these faults take. It also finds out that there is no more shared memory, where a
    write would end the process (SIGBUS).

    Args:
        address: of its first byte.
        num_bytes: its size.

    Returns:
        False where the system could not give all of them. True else, also where it can't be asked:
        not Linux, or older than 5.14.
    """
    madvise = _madvise()
    if madvise is None or num_bytes == 0:
        return True
    page = os.sysconf("SC_PAGE_SIZE")
    start = address // page * page
    if madvise(start, address + num_bytes - start, _MADV_POPULATE_WRITE) == 0:
        return True
    # any other error: this system doesn't know the call, or doesn't allow it
    return ctypes.get_errno() not in (errno.ENOMEM, errno.EFAULT)


@cache  # a fact about this process
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
