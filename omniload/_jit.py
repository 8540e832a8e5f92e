"""Compiles hot loops with Numba, cached only in a folder that nobody else can write.

Numba keeps compiled code as pickles, and reading a pickle runs it. So its own choice of folder (the
`__pycache__` beside the source, whoever may write there) is not taken.

Use it at the top of a module that is imported lazily, since decorating imports Numba:

    @jit
    def _walk(order, num_tokens): ...

A function and the functions it calls live in one file: the cache is dropped when the file changes,
and doesn't see a change in another one. With NUMBA_DISABLE_JIT=1 the functions stay plain Python.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["cache_folder", "jit"]

_LOG = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def jit(function: _Function) -> _Function:
    """Compile a function with Numba in nopython mode when it is first called.

    It runs without the interpreter lock, so that a thread can plan while another trains.

    The first call on a machine compiles for some seconds and logs one warning that says so; later
    processes take the code from the cache. `cache_folder` says where that is.

    Args:
        function: a module-level function that Numba understands.

    Returns:
        The Numba dispatcher, or `function` itself with NUMBA_DISABLE_JIT=1.
    """
    import numba

    if numba.config.DISABLE_JIT:
        return function
    _announce_compiling()
    folder, _ = cache_folder()
    if folder is not None:
        # Numba reads the setting while it decorates; then it is put back for everybody else.
        # It would take code that was compiled with other options, so these name the folder inside.
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder / "nogil")
        try:
            with contextlib.suppress(RuntimeError):  # "cannot cache function": no source file
                cached: _Function = numba.njit(cache=True, nogil=True)(function)
                return cached
        finally:
            numba.config.CACHE_DIR = before
    uncached: _Function = numba.njit(nogil=True)(function)
    return uncached


def cache_folder() -> tuple[Path | None, str]:
    """Find the folder for compiled code, and make it.

    It is `omniload` in NUMBA_CACHE_DIR, else in XDG_CACHE_HOME, else in ~/.cache. It must belong to
    this user, and nobody else may write to it or replace a folder above it.

    Returns:
        The folder and "", or None and the reason why nothing is cached.
    """
    given = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        # the home folder is unknown to a user id without an entry in the password file
        folder = (Path(given) if given else Path.home() / ".cache").absolute() / "omniload"
        for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve()
        if not os.access(folder, os.W_OK | os.X_OK):
            return None, f"{folder} can't be written"
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return None, f"{folder} belongs to another user"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None, f"others can write to {folder}"
        for parent in folder.parents:
            found = parent.stat()
            shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if found.st_uid not in (0, os.geteuid()) or (
                shared and not found.st_mode & stat.S_ISVTX
            ):
                return None, f"others can write to {parent}"
    except (OSError, RuntimeError) as error:
        return None, f"no folder for it: {error}"
    return folder, ""


@functools.cache  # Numba keeps the listener for the life of the process: one is enough
def _announce_compiling() -> None:
    from numba.core import event

    class Announcer(event.Listener):  # type: ignore[misc]
        def __init__(self) -> None:
            self.depth = 0  # compiling a function compiles its callees; one line is enough

        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            if self.depth == 0 and function.__module__.startswith("omniload."):
                folder, reason = cache_folder()
                _LOG.warning(
                    "compiling %s.%s for this machine, which takes some seconds (%s)",
                    function.__module__,
                    function.__name__,
                    f"once: kept in {folder}" if folder else f"in every process: {reason}",
                )
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1

    event.register("numba:compile", Announcer())
