"""What each worker is at, in memory that the main process can still read after its death."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.sharedctypes import RawArray
from typing import Protocol

from omniload.loader.tasks import Task

__all__ = ["NO_NOTES", "Note", "Notes", "Phase", "WorkerNotes", "Writer"]

#: numbers and bytes of key that each worker has
_WIDTH, _KEY_BYTES = 16, 128
#: how often the memory is looked up, which takes ten times as long as all else
_WEIGH_NS = 20_000_000
_PID, _EPOCH, _STEP, _MICRO, _ROWS, _ROW, _PHASE, _SINCE, _RESIDENT, _SHARED = range(10)


class Phase(IntEnum):
    """What a worker does with a batch."""

    START = 0
    READ = 1
    TRANSFORM = 2
    PACK = 3
    DONE = 4  # made; perhaps still on its way


class Notes(Protocol):
    """Told by who makes a batch where it is."""

    def at(self, phase: Phase, row: int = -1) -> None:
        """Note what is begun now, and for which row."""

    def key(self, key: str) -> None:
        """Note the key of the row at hand, known once it was read."""


class _NoNotes:
    def at(self, phase: Phase, row: int = -1) -> None:
        pass

    def key(self, key: str) -> None:
        pass


NO_NOTES: Notes = _NoNotes()


@dataclass(frozen=True, kw_only=True)
class Note:
    """Where a worker was when this was read.

    Args:
        pid: its process; 0: it has not begun.
        epoch: epoch of its last batch.
        step: optimizer step of that.
        micro_step: micro-batch in the step.
        num_rows: rows of that batch.
        row: row of the index it was at; -1: none.
        key: key of the row; "": not known.
        phase: what it did.
        since_s: seconds since it began that.
        resident_bytes: memory of the process before the row, with what it shares; 0: not known.
        own_bytes: of it what no file and no shared memory holds.
    """

    pid: int
    epoch: int
    step: int
    micro_step: int
    num_rows: int
    row: int
    key: str
    phase: Phase
    since_s: float
    resident_bytes: int
    own_bytes: int


class WorkerNotes:
    """The notes of all workers: 256 bytes a worker, which forked and spawned processes share.

    The memory has no name that could be left behind.

    Args:
        num_workers: how many workers there are.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._numbers = RawArray("q", num_workers * _WIDTH)
        self._keys = RawArray("B", num_workers * _KEY_BYTES)

    def writer(self, worker: int, *, with_memory: bool = True) -> Writer:
        """Return what a worker writes with; to be called in its process.

        Args:
            worker: its number.
            with_memory: whether to note the memory of the process.
        """
        return Writer(*self._views(worker), with_memory=with_memory)

    def clear(self) -> None:
        """Forget all notes, before new workers start."""
        for worker in range(self.num_workers):
            for view in self._views(worker):
                view.cast("B")[:] = bytes(view.nbytes)

    def read(self, worker: int) -> Note:
        """Say what a worker has noted last."""
        numbers, keys = self._views(worker)
        line = numbers.tolist()
        key = keys.tobytes().partition(b"\0")[0].decode(errors="replace")
        page = os.sysconf("SC_PAGE_SIZE")
        return Note(
            pid=line[_PID],
            epoch=line[_EPOCH],
            step=line[_STEP],
            micro_step=line[_MICRO],
            num_rows=line[_ROWS],
            row=line[_ROW],
            key=key,
            phase=Phase(line[_PHASE]),
            since_s=max(time.monotonic_ns() - line[_SINCE], 0) / 1e9 if line[_SINCE] else 0.0,
            resident_bytes=line[_RESIDENT] * page,
            own_bytes=(line[_RESIDENT] - line[_SHARED]) * page,
        )

    def _views(self, worker: int) -> tuple[memoryview, memoryview]:
        # made anew each time, because views can't be pickled
        numbers = memoryview(self._numbers).cast("B").cast("q")
        keys = memoryview(self._keys).cast("B")
        return (
            numbers[worker * _WIDTH : (worker + 1) * _WIDTH],
            keys[worker * _KEY_BYTES : (worker + 1) * _KEY_BYTES],
        )


class Writer:
    """Writes the notes of one worker; a microsecond each.

    Args:
        numbers: 16 integers of 64 bits, shared.
        keys: 128 bytes, shared.
        with_memory: whether to note the memory of this process.
    """

    def __init__(self, numbers: memoryview, keys: memoryview, *, with_memory: bool = True) -> None:
        self._numbers = numbers
        self._keys = keys
        self._statm = _open_statm() if with_memory else None
        self._weighed = 0
        numbers[_PID] = os.getpid()
        numbers[_ROW] = -1
        numbers[_SINCE] = time.monotonic_ns()

    def begin(self, task: Task) -> None:
        """Note that a batch is begun."""
        line = self._numbers
        line[_EPOCH], line[_STEP], line[_MICRO] = task.epoch, task.step, task.micro_step
        line[_ROWS] = len(task.rows)

    def at(self, phase: Phase, row: int = -1) -> None:
        """Note what is begun now, and for which row."""
        line, now = self._numbers, time.monotonic_ns()
        if row != line[_ROW]:
            self._keys[0] = 0
            line[_ROW] = row
        line[_PHASE] = phase
        line[_SINCE] = now
        if self._statm is not None and now - self._weighed > _WEIGH_NS:
            self._weighed = now
            pages = os.pread(self._statm, 64, 0).split(maxsplit=3)
            line[_RESIDENT], line[_SHARED] = int(pages[1]), int(pages[2])

    def key(self, key: str) -> None:
        """Note the key of the row at hand, known once it was read."""
        data = key.encode(errors="replace")[: _KEY_BYTES - 1] + b"\0"
        self._keys[: len(data)] = data


def _open_statm() -> int | None:
    # kept open for the life of the process; there is none outside of Linux
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
