"""Shared memory for batches that worker processes use again.

New shared memory costs a page fault and a zeroed page for every 4 KiB, in the worker and again in
the training process. So a worker keeps a few segments. Each is sent once; from then on its number
is. Its first byte says who has it: the worker sets it when it sends a batch, the training process
clears it when the last tensor that looks into the batch is gone. There is no other message and no
lock. A worker never waits: where all segments are in use it lets go of the oldest, which lives on
for as long as tensors look into it, and makes a new one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omniload._layout import new_shared_buffer
from omniload.batch import PackedBatch

__all__ = ["Lender", "Segments"]

Bytes = npt.NDArray[np.uint8]

#: Bytes before the batch; a cache line keeps its tensors aligned.
_HEAD = 64
_FREE, _SENT = 0, 1
#: Segments are a multiple of it, so that batches of nearly one size can use the same.
_UNIT_BYTES = 1 << 20


class Segments:
    """What the training process has mapped of the segments of all workers of one torch loader.

    Args:
        prefetch_factor: batches that each worker prepares ahead.
    """

    def __init__(self, prefetch_factor: int) -> None:
        #: segments that a worker keeps: those of batches made ahead, one at the user's, one spare
        self.most = prefetch_factor + 2
        self.name = os.urandom(8).hex()
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        _here().pools[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reference, (self.name, self.most)

    def let_go(self, pids: Container[int]) -> None:
        """Let go of the segments of workers; those with a live batch live on until that is gone."""
        for key in [key for key in self._mapped if key[0] in pids]:
            self._mapped.pop(key, None)

    def receive(self, parcel: _Sent) -> torch.Tensor | None:
        """Give the buffer of a batch that a worker has sent."""
        for number in parcel.gone:
            self._mapped.pop((parcel.pid, number), None)
        key = parcel.pid, parcel.number
        if parcel.memory is not None:
            self._mapped[key] = parcel.memory
        memory = self._mapped.get(key)
        return None if memory is None else _borrowed(memory.numpy(), parcel.num_bytes)


def _reference(name: str, most: int) -> Segments:
    segments = Segments.__new__(Segments)
    segments.name, segments.most, segments._mapped = name, most, {}
    return segments


class _Here:
    """What this process knows of the segments of its workers."""

    def __init__(self) -> None:
        self.pools: weakref.WeakValueDictionary[str, Segments] = weakref.WeakValueDictionary()
        self.num_forks = 0
        os.register_at_fork(before=self._fork)

    def _fork(self) -> None:
        # the child sees the same memory: nobody knows how long it looks into batches of now
        self.num_forks += 1


@cache  # a fact about this process
def _here() -> _Here:
    return _Here()


def _borrowed(memory: Bytes, num_bytes: int) -> torch.Tensor:
    num_forks = _here().num_forks
    part = memory[_HEAD : _HEAD + num_bytes]
    # tensors and arrays that look into the batch hold `part`, however they were made
    end = weakref.finalize(part, _give_back, memory, num_forks)
    end.atexit = False
    return torch.from_numpy(part)


def _give_back(memory: Bytes, num_forks: int) -> None:
    if _here().num_forks == num_forks:
        memory[0] = _FREE


@dataclass(frozen=True, slots=True)
class _Sent:
    """Where a batch is; `memory` is the segment, the first time, `gone` are those dropped since."""

    pid: int
    number: int
    memory: torch.Tensor | None
    num_bytes: int
    gone: tuple[int, ...]


class _Parcel:
    """A batch on its way out of a worker."""

    def __init__(self, pool: str, sent: _Sent, batch: PackedBatch) -> None:
        self._pool, self._sent, self._batch = pool, sent, batch

    def __reduce__(self) -> tuple[Any, ...]:
        restore, (_, *rest) = self._batch.__reduce__()
        sent = self._sent
        where = sent.pid, sent.number, sent.memory, sent.num_bytes, sent.gone
        return _open, (self._pool, where, restore, rest)


def _open(
    pool: str, where: tuple[Any, ...], restore: Callable[..., PackedBatch], rest: list[Any]
) -> PackedBatch | None:
    segments = _here().pools.get(pool)
    buffer = None if segments is None else segments.receive(_Sent(*where))
    # None: the loader is gone, and nobody takes this batch
    return None if buffer is None else restore(buffer, *rest)


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    memory: torch.Tensor
    head: Bytes
    was_sent: bool = False
    #: the part that a batch is made in, in this process
    lent: weakref.ref[Bytes] | None = None

    def is_free(self) -> bool:
        return self.head[0] == _FREE and (self.lent is None or self.lent() is None)


class Lender:
    """The segments of one worker, in its process.

    Args:
        segments: the pool that they belong to.
    """

    def __init__(self, segments: Segments) -> None:
        self._pool, self._most = segments.name, segments.most
        self._segments: list[_Segment] = []
        self._made = 0
        self._gone: list[int] = []

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Give shared memory for a batch: uint8 (num_bytes,), whatever is in it.

        Raises:
            ConfigError: no shared memory is left.
        """
        need = _HEAD + num_bytes
        free = [segment for segment in self._segments if segment.is_free()]
        fitting = [segment for segment in free if len(segment.memory) >= need]
        if fitting:
            found = min(fitting, key=lambda segment: len(segment.memory))
        else:
            if free or len(self._segments) >= self._most:
                self._drop(free[0] if free else self._segments[0])
            memory = new_shared_buffer(-(-need // _UNIT_BYTES) * _UNIT_BYTES)
            self._made += 1
            found = _Segment(self._made, memory, memory.numpy()[:_HEAD])
            self._segments.append(found)
        part = found.memory.numpy()[_HEAD:need]
        found.lent = weakref.ref(part)
        return torch.from_numpy(part)

    def parcel(self, batch: PackedBatch) -> PackedBatch | _Parcel:
        """Make a batch ready to be sent; its segment is the other process's from now on."""
        begin = batch.buffer.data_ptr() - _HEAD
        for segment in self._segments:
            if segment.memory.data_ptr() == begin:
                break
        else:
            return batch
        gone, self._gone = tuple(self._gone), []
        memory = None if segment.was_sent else segment.memory
        segment.head[0], segment.was_sent = _SENT, True
        sent = _Sent(os.getpid(), segment.number, memory, len(batch.buffer), gone)
        return _Parcel(self._pool, sent, batch)

    def _drop(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        self._gone.append(segment.number)
