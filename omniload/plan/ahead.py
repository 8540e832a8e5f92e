"""Plans that a thread makes ahead of their use, and that a fork waits for."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Ahead", "wait_for_plans"]

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")

#: How long a fork waits for plans: a lock that the forking thread holds could keep them for ever.
_MOST_WAIT_S = 60.0
#: When a Ctrl-C that came in a hook is raised again.
_LATER_S = 0.05

# The state of this module: threads of this process that plan, or have planned. Python's hooks at a
# fork belong to the process, so what they look at does too.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_lock = threading.RLock()
_interrupts: list[float] = []


class Ahead(Generic[_Result]):
    """A result that a thread computes until it is asked for.

    A fork of this process, as that of worker processes, waits until the thread has ended. The child
    would else have a copy of locks that the thread held, as Numba's and those of imports, which
    nobody there unlocks.

    Args:
        make: computes it; what it raises is raised by `result`.
    """

    def __init__(self, make: Callable[[], _Result]) -> None:
        self._make = make
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._is_made = False
        # a daemon: a program that ends doesn't wait for a plan that nobody needs any more
        self._thread = threading.Thread(target=self._run, name="omniload-plan", daemon=True)
        with _lock:  # not between the wait of a fork and the fork
            _threads.add(self._thread)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._make()
        except BaseException as error:  # whoever asks gets it
            self._error = error
        self._is_made = True

    def result(self) -> _Result:
        """Wait for the result."""
        self._thread.join()
        if not self._is_made:
            self._run()  # in a process that was forked without waiting: it hasn't that thread
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set unless there is an error


def wait_for_plans() -> None:
    """Wait until no thread plans; where a fork comes next, Ctrl-C is heeded here and not there."""
    end = time.monotonic() + _MOST_WAIT_S
    while planning := _planning():
        if time.monotonic() >= end:
            return
        for thread in planning:
            thread.join(max(0.0, end - time.monotonic()))


def _planning() -> list[threading.Thread]:
    with _lock:
        here = threading.current_thread()
        return [thread for thread in _threads if thread.is_alive() and thread is not here]


def _settle() -> None:
    """Wait until no thread plans, and keep new ones from starting until `_lock` is released."""
    end = time.monotonic() + _MOST_WAIT_S
    _lock.acquire()
    try:
        while planning := _planning():
            if time.monotonic() >= end:
                _LOG.warning(
                    "a process is forked while a plan is made, for %.0f s already: it may hang",
                    _MOST_WAIT_S,
                )
                return
            _lock.release()  # a plan may begin another one before it is done
            try:
                for thread in planning:
                    thread.join(max(0.0, end - time.monotonic()))
            finally:
                _lock.acquire()
    except KeyboardInterrupt:
        _interrupts.append(time.monotonic())  # Python drops what a hook raises


def _go_on() -> None:
    _lock.release()
    if _interrupts:
        _interrupts.clear()
        # not here: it would be dropped again
        threading.Timer(_LATER_S, _thread.interrupt_main).start()


def _begin_child() -> None:
    _lock.release()
    _interrupts.clear()


# Hooks, not a call where workers start: these see every fork, that of a program around us too, and
# none where workers persist, are threads or are spawned.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_settle, after_in_parent=_go_on, after_in_child=_begin_child)
