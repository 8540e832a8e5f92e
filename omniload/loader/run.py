"""What the iterator asks of those that make the batches, whether processes, threads or nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from omniload.batch import PackedBatch

__all__ = ["DiedError", "InProcess", "LateError", "Run"]


class LateError(Exception):
    """No batch has come for a second; the next call goes on waiting."""


class DiedError(Exception):
    """A worker has ended. Its text says which, where and how; what told of it is the cause."""


class Run(Protocol):
    """The batches of one walk, in its order, while they are made."""

    @property
    def has_processes(self) -> bool:
        """Whether batches are made in other processes."""

    def next(self) -> PackedBatch:
        """Give the next batch.

        Raises:
            StopIteration: there is none.
            LateError: it is not there yet.
            DiedError: a worker has ended, so that this run can't go on.
        """

    def places(self) -> str:
        """Say where each worker is."""

    def stop(self, *, at_once: bool = False) -> None:
        """End it; workers that persist stay, but not with `at_once`."""


class InProcess:
    """No workers: a batch is made when it is asked for.

    Args:
        batches: torch's iterator.
    """

    has_processes = False

    def __init__(self, batches: Iterator[PackedBatch]) -> None:
        self._batches = batches

    def next(self) -> PackedBatch:
        """Make the next batch."""
        return next(self._batches)

    def places(self) -> str:
        """Say that there are no workers."""
        return "there are no workers"

    def stop(self, *, at_once: bool = False) -> None:
        """Do nothing."""
