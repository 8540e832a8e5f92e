"""Locks between processes: the kernel gives them back when a process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omniload.errors import ConfigError, ShardError

__all__ = ["locked", "open_own", "share", "try_lock"]

_SHORTEST_S, _LONGEST_S = 0.001, 0.05


def try_lock(descriptor: int) -> bool:
    """Lock an opened file for this opening alone; False: another holds it.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the file system of the cache folder must have locks (flock), got {error.strerror}. "
            "Use a folder on a local disk."
        ) from None
    return True


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of ours: never through a link that somebody put there, never past an exec.

    Raises:
        OSError: it can't be opened, or is no file.
    """
    # not blocking: a named pipe would wait for its other end for ever
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a file", os.fspath(path))
    return descriptor


def share(descriptor: int) -> None:
    """Mark an opened file as in use, for as long as it, or a map of it, is open."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextmanager
def locked(path: Path, *, is_stuck: Callable[[float], str] | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is not there and never deleted.

    Args:
        path: the file.
        is_stuck: called with the seconds waited so far; what it says becomes the error, unless "".

    Raises:
        ShardError: `is_stuck` said so.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        begin, pause = time.monotonic(), _SHORTEST_S
        while not try_lock(descriptor):
            fault = "" if is_stuck is None else is_stuck(time.monotonic() - begin)
            if fault:
                raise ShardError(fault)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        try:
            yield
        finally:
            # said aloud: a child that was forked meanwhile has the file open too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
