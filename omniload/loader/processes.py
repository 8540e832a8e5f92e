"""Worker processes: torch's, watched so that one that dies is noticed at once and named.

This is the one module that looks into torch's iterator: which processes it has, and how to part
with it when one of them was killed. Its own way then takes locks that the dead may hold.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing import connection, util
from typing import Any

import torch
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import Dataset, get_worker_info

from omniload._memory import keep_freed_memory
from omniload._workers import as_raised
from omniload.batch import PackedBatch
from omniload.loader.notes import Phase, WorkerNotes, Writer
from omniload.loader.post_mortem import PostMortem
from omniload.loader.run import DiedError, LateError
from omniload.loader.segments import Lender, Segments
from omniload.loader.sources import cache_figures
from omniload.loader.tasks import Task
from omniload.loader.worker import PackDataset

__all__ = [
    "NotedDataset",
    "ProcessRun",
    "abandon",
    "dead_workers",
    "is_about_workers",
    "share_temporary_folder",
    "start_worker",
]

#: How long a process is waited for that was killed, or whose connection broke.
_JOIN_S = 5.0


class NotedDataset(Dataset[PackedBatch]):
    """Makes batches in a worker process, or without workers, and notes where it is.

    Args:
        dataset: makes the batches.
        notes: of all workers.
        segments: the memory that batches of worker processes are sent in.
    """

    def __init__(self, dataset: PackDataset, notes: WorkerNotes, segments: Segments) -> None:
        self._dataset = dataset
        self._notes = notes
        self._writer: Writer | None = None
        self.segments = segments
        self._lender: Lender | None = None

    def start(self, worker: int, *, with_memory: bool = True) -> None:
        """Begin the notes of this process."""
        self._writer = self._notes.writer(worker, with_memory=with_memory)
        self._lender = Lender(self.segments)

    def shared_buffer(self, num_bytes: int) -> torch.Tensor:
        """Give memory for a batch; asked for by `allocate_buffer` in a worker process."""
        assert self._lender is not None
        return self._lender.lend(num_bytes)

    def __getitem__(self, task: Task) -> Any:
        writer = self._writer
        assert writer is not None  # torch calls start_worker first
        writer.begin(task)
        try:
            batch = self._dataset.make(task, writer)
        except Exception:
            writer.at(Phase.DONE)
            raise  # but sys.exit() ends the process: then the row that did it stays noted
        writer.at(Phase.DONE)
        if get_worker_info() is not None and (figures := cache_figures(self._dataset.source)):
            writer.cache(figures)
        assert self._lender is not None
        return self._lender.parcel(batch)


def start_worker(worker: int) -> None:
    """Set a new process up; called by torch there."""
    keep_freed_memory()
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, NotedDataset):
        info.dataset.start(worker)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # torch's workers look for their parent between two tasks, every five seconds
        watch = threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True)
        watch.start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


class ProcessRun:
    """The batches of one walk, made by the processes of a torch iterator.

    Args:
        batches: torch's iterator.
        post_mortem: puts deaths into words.
        segments: let go of at the end; None: the processes persist, and use them again.
    """

    has_processes = True

    def __init__(
        self,
        batches: Iterator[PackedBatch],
        post_mortem: PostMortem,
        *,
        segments: Segments | None,
    ) -> None:
        self._batches: Any = batches
        self._segments = segments
        self._pids = {worker.pid for worker in getattr(batches, "_workers", ())}
        self._post_mortem = post_mortem
        _heed_deaths(self._batches, False)

    def next(self) -> PackedBatch:
        """Give the next batch; see `Run`."""
        batches = self._batches
        try:
            try:
                if dead_workers(batches):
                    raise DiedError(self._deaths())
                # torch tells of a death by an exception out of a signal handler: outside of this
                # call it would come up anywhere in the user's own code
                _heed_deaths(batches, True)
                batch: PackedBatch = next(batches)
                return batch
            finally:
                _heed_deaths(batches, False)
        except (DiedError, StopIteration):
            raise
        except Exception as error:
            if is_late(error) and not dead_workers(batches):
                pinning = getattr(batches, "_pin_memory_thread", None)
                if pinning is None or pinning.is_alive():
                    raise LateError from None
            if not is_about_workers(error):
                found = as_raised(error)
                raise found from found.__cause__
            raise DiedError(self._deaths()) from error

    def places(self) -> str:
        """Say where each worker is."""
        return self._post_mortem.places()

    def stop(self, *, at_once: bool = False) -> None:
        """End the processes, or let go of them where they persist."""
        batches, self._batches = self._batches, None
        if at_once and batches is not None:
            abandon(batches)
        if self._segments is not None:
            self._segments.let_go(self._pids)

    def _deaths(self) -> str:
        workers = list(getattr(self._batches, "_workers", ()))
        if not any(worker.exitcode is not None for worker in workers):
            # a connection breaks a moment before the process has ended
            ended = connection.wait([worker.sentinel for worker in workers], timeout=_JOIN_S)
            for worker in workers:
                if worker.sentinel in ended:
                    worker.join(_JOIN_S)
        codes = {i: w.exitcode for i, w in enumerate(workers) if w.exitcode is not None}
        alive = {i: w.pid for i, w in enumerate(workers) if w.exitcode is None}
        if not codes:
            return "the way from the workers to this process is broken, but all of them live."
        return self._post_mortem.deaths(codes, alive)


def dead_workers(batches: Any) -> list[int]:
    """Return the numbers of the processes of a torch iterator that have ended."""
    workers = getattr(batches, "_workers", ())
    return [i for i, worker in enumerate(workers) if worker.exitcode is not None]


def is_late(error: BaseException) -> bool:
    """Tell whether torch says that no batch came in time."""
    return type(error) is RuntimeError and str(error).startswith("DataLoader timed out")


def is_about_workers(error: BaseException) -> bool:
    """Tell torch's own errors from those of a batch, which it raises as the type they had."""
    if type(error) is RuntimeError:
        return str(error).startswith(("DataLoader worker (pid", "DataLoader timed out", "Pin mem"))
    return isinstance(error, (OSError, EOFError)) and "Caught " not in str(error)


def abandon(batches: Any) -> None:
    """End the processes of a torch iterator by force, and keep it from doing so itself.

    A process that was killed may have held the locks of its queues and events, and torch would
    wait for them.
    """
    if getattr(batches, "_shutdown", True):
        return
    batches._shutdown = True
    _heed_deaths(batches, False)
    for worker in batches._workers:
        worker.kill()
    for worker in batches._workers:
        worker.join(_JOIN_S)
    done = getattr(batches, "_pin_memory_thread_done_event", None)
    if done is not None:
        done.set()  # its thread looks for that every five seconds
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()
    batches._worker_result_queue.cancel_join_thread()


def share_temporary_folder() -> None:
    """Give worker processes the folder of this one for their sockets.

    Else each makes its own, which stays behind when it is killed.
    """
    util.get_temp_dir()


def _heed_deaths(batches: Any, wanted: bool) -> None:
    """Let torch raise when a worker has died, or not."""
    if batches is None or getattr(batches, "_worker_pids_set", wanted) == wanted:
        return
    if wanted:
        pids = tuple(worker.pid for worker in batches._workers)
        _set_worker_pids(id(batches), pids)
        batches._worker_pids_set = True
    else:
        batches._worker_pids_set = False
        _remove_worker_pids(id(batches))
