"""How a worker process keeps its memory.

A worker makes and frees tens of megabytes for every image. Left to itself, glibc gives them back
to the system each time, and the system hands out zeroed pages again, 4 KiB at a time: measured, up
to a third of the time from a JPEG to its tiles (0 to 5 ms an image, by its size).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

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
