"""Ctrl-C while worker processes start: held until they have.

Python drops an exception that is raised in a hook at a fork. A Ctrl-C that comes there would be
lost, and the program would run on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_held"]


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold a SIGINT back until the end; a second one goes through at once.

    Nothing is done outside the main thread, where Python runs no handlers, or where SIGINT is
    ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    here, held = os.getpid(), list[FrameType | None]()

    def hold(number: int, frame: FrameType | None) -> None:
        if held or os.getpid() != here:  # a forked worker has this handler, and never leaves
            handler(number, frame)
        else:
            held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[0])
