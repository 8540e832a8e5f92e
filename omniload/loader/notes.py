"""What each worker is at, in memory that the main process can still read after its death."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.sharedctypes import RawArray
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omniload.loader.tasks import Task

__all__ = ["NO_NOTES", "Count", "Note", "Notes", "Phase", "WorkerNotes", "Writer"]

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


class Count(IntEnum):
    """What a worker counts for as long as the loader lives; the first five are nanoseconds."""

    START = 0  # by phase, as in `Phase`
    READ = 1
    TRANSFORM = 2
    PACK = 3
    DONE = 4
    BATCHES = 5
    BYTES = 6  # of the records that it read
    CACHE_HITS = 7  # from here on: of a worker process alone, see `CacheClient.figures`
    CACHE_MISSES = 8
    FETCHED_FILES = 9
    FETCHED_BYTES = 10
    CACHE_WAIT = 11  # nanoseconds
    SLOWEST = 12  # nanoseconds that the slowest row took in one phase, until this is set to 0
    SLOWEST_ROW = 13


_COUNTS = 16
_CACHE = {
    "hits": (Count.CACHE_HITS, 1),
    "misses": (Count.CACHE_MISSES, 1),
    "fetched_files": (Count.FETCHED_FILES, 1),
    "fetched_bytes": (Count.FETCHED_BYTES, 1),
    "wait_s": (Count.CACHE_WAIT, 1_000_000_000),
}


class Notes(Protocol):
    """Told by who makes a batch where it is."""

    def at(self, phase: Phase, row: int = -1) -> None:
        """Note what is begun now, and for which row."""

    def key(self, key: str) -> None:
        """Note the key of the row at hand, known once it was read."""

    def took(self, num_bytes: int) -> None:
        """Count the bytes of records that were read."""


class _NoNotes:
    def at(self, phase: Phase, row: int = -1) -> None:
        pass

    def key(self, key: str) -> None:
        pass

    def took(self, num_bytes: int) -> None:
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
    """The notes of all workers: 384 bytes a worker, which forked and spawned processes share.

    The memory has no name that could be left behind.

    Args:
        num_workers: how many workers there are.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._numbers = RawArray("q", num_workers * _WIDTH)
        self._keys = RawArray("B", num_workers * _KEY_BYTES)
        self._counts = RawArray("q", num_workers * _COUNTS)

    def writer(self, worker: int, *, with_memory: bool = True) -> Writer:
        """Return what a worker writes with; to be called in its process.

        Args:
            worker: its number.
            with_memory: whether to note the memory of the process.
        """
        return Writer(*self._views(worker), self._counted(worker), with_memory=with_memory)

    def clear(self) -> None:
        """Forget all notes, but not what was counted, before new workers start."""
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

    def counts(self) -> npt.NDArray[np.int64]:
        """Return what the workers have counted: int64 (num_workers, 16), columns as in `Count`.

        Time that a worker has spent on what it is at now is in it.
        """
        found = np.frombuffer(self._counts, np.int64).reshape(-1, _COUNTS).copy()
        lines = np.frombuffer(self._numbers, np.int64).reshape(-1, _WIDTH)
        now = time.monotonic_ns()
        for worker, line in enumerate(lines):
            if line[_SINCE]:
                found[worker, line[_PHASE]] += max(now - int(line[_SINCE]), 0)
        return found

    def num_made(self) -> int:
        """Count the batches that all workers have made."""
        return sum(self._counts[Count.BATCHES :: _COUNTS])

    def forget_slowest(self) -> None:
        """Look for the slowest row anew."""
        for worker in range(self.num_workers):
            self._counts[worker * _COUNTS + Count.SLOWEST] = 0

    def _counted(self, worker: int) -> memoryview:
        whole = memoryview(self._counts).cast("B").cast("q")
        return whole[worker * _COUNTS : (worker + 1) * _COUNTS]

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
        counts: 16 integers of 64 bits, shared.
        with_memory: whether to note the memory of this process.
    """

    def __init__(
        self,
        numbers: memoryview,
        keys: memoryview,
        counts: memoryview,
        *,
        with_memory: bool = True,
    ) -> None:
        self._numbers = numbers
        self._keys = keys
        self._counts = counts
        self._cached: dict[str, float] = {}
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
        self._count(line[_PHASE], now - line[_SINCE], line[_ROW])
        if phase == Phase.DONE:
            self._counts[Count.BATCHES] += 1
        if row != line[_ROW]:
            self._keys[0] = 0
            line[_ROW] = row
        line[_PHASE] = phase
        line[_SINCE] = now
        if self._statm is not None and now - self._weighed > _WEIGH_NS:
            self._weighed = now
            pages = os.pread(self._statm, 64, 0).split(maxsplit=3)
            line[_RESIDENT], line[_SHARED] = int(pages[1]), int(pages[2])

    def took(self, num_bytes: int) -> None:
        """Count the bytes of records that were read."""
        self._counts[Count.BYTES] += num_bytes

    def cache(self, figures: Mapping[str, float]) -> None:
        """Count what this process did with caches, as it stands since its start."""
        for name, (count, unit) in _CACHE.items():
            value = figures.get(name, 0.0)
            self._counts[count] += round((value - self._cached.get(name, 0.0)) * unit)
            self._cached[name] = value

    def _count(self, phase: int, spent: int, row: int) -> None:
        counts = self._counts
        counts[phase] += spent
        if spent > counts[Count.SLOWEST] and phase in (Phase.READ, Phase.TRANSFORM):
            counts[Count.SLOWEST], counts[Count.SLOWEST_ROW] = spent, row

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
