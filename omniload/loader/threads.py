"""Worker threads: the same tasks and batches in the same order, without processes.

Decoding, resizing and packing release the GIL, so threads do these at the same time. The rest, and
all text, they do in turn with the training loop.

Not the default. `omniload bench workers` on 2 busy cores, one run each: a sample costs less
CPU time than with processes, by 53 to 69 % for text and 640x480 photos and 7 to 23 % for pages of
1654x2339. But what a loop that launches kernels loses to the GIL could not be told apart from noise
there, a native crash ends the program and not one worker, and a hung thread can't be ended.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

import torch

from omniload._memory import give_back_freed_memory
from omniload.batch import PackedBatch
from omniload.errors import WorkerError
from omniload.loader.notes import Phase, WorkerNotes, Writer
from omniload.loader.post_mortem import PostMortem
from omniload.loader.run import LateError
from omniload.loader.tasks import Task
from omniload.loader.worker import PackDataset

__all__ = ["ThreadRun"]

#: How long a batch is waited for until the caller may look around.
_SLICE_S = 1.0
#: How long the end of a run waits for its threads, which end at their next row.
_JOIN_S, _SHORT_JOIN_S = 5.0, 1.0

_Job = tuple[Task, "Future[PackedBatch]"]
_Inbox = queue.SimpleQueue[_Job | None]


class ThreadRun:
    """The batches of one walk, made by threads of this process.

    Args:
        dataset: makes the batches.
        tasks: what to make.
        notes: a note for each thread.
        prefetch_factor: batches that are made ahead, for each thread.
        pin_memory: copy batches to page-locked memory, where there is a GPU.
        slice_s: seconds until `next` says that a batch is late.
    """

    has_processes = False

    def __init__(
        self,
        dataset: PackDataset,
        tasks: Iterable[Task],
        *,
        notes: WorkerNotes,
        prefetch_factor: int,
        pin_memory: bool = False,
        slice_s: float = _SLICE_S,
    ) -> None:
        self._tasks = iter(tasks)
        self._post_mortem = PostMortem(notes, dataset.rows, kind="thread")
        self._slice_s = slice_s
        self._inbox: _Inbox = queue.SimpleQueue()
        self._ahead: deque[Future[PackedBatch]] = deque()
        device = torch.cuda.current_device() if pin_memory and torch.cuda.is_available() else None
        stop = threading.Event()
        # daemons, because a program must be able to end while one of them hangs
        threads = [
            threading.Thread(
                target=_work,
                args=(dataset, self._inbox, notes.writer(i, with_memory=False), stop, device),
                name=f"omniload-worker-{i}",
                daemon=True,
            )
            for i in range(notes.num_workers)
        ]
        for thread in threads:
            thread.start()
        # also at the end of the program: daemons that are cut off in native code may crash it
        self._end = weakref.finalize(self, _end, threads, self._inbox, stop)
        for _ in range(notes.num_workers * prefetch_factor):
            self._put()

    def next(self) -> PackedBatch:
        """Give the next batch; see `Run`. A thread does not die: what it raises comes up here."""
        if not self._ahead:
            raise StopIteration
        if not wait([self._ahead[0]], timeout=self._slice_s).done:
            raise LateError
        made = self._ahead.popleft()
        self._put()
        return made.result()

    def places(self) -> str:
        """Say where each worker is."""
        return self._post_mortem.places()

    def stop(self, *, at_once: bool = False) -> None:
        """End the threads: each at its next row. With `at_once` one that hangs is left behind."""
        if (end := self._end.detach()) is not None:
            _, call, (threads, inbox, stopping), _ = end
            call(threads, inbox, stopping, _SHORT_JOIN_S if at_once else _JOIN_S)
            give_back_freed_memory()

    def _put(self) -> None:
        task = next(self._tasks, None)
        if task is None:
            return
        made: Future[PackedBatch] = Future()
        self._ahead.append(made)
        self._inbox.put((task, made))


class _Stopped(BaseException):
    """The run has ended while a batch of it was made."""


class _Watched:
    """Notes of a thread, which end its work at the next row once the run is stopped."""

    def __init__(self, writer: Writer, stop: threading.Event) -> None:
        self._writer = writer
        self._stop = stop

    def at(self, phase: Phase, row: int = -1) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._writer.at(phase, row)

    def key(self, key: str) -> None:
        self._writer.key(key)

    def took(self, num_bytes: int) -> None:
        self._writer.took(num_bytes)


def _work(
    dataset: PackDataset,
    inbox: _Inbox,
    writer: Writer,
    stop: threading.Event,
    device: int | None,
) -> None:
    """Make batches until the run ends; this is what a thread does."""
    notes = _Watched(writer, stop)
    if device is not None:
        torch.cuda.set_device(device)  # each thread has its own, and starts with the first GPU
    while (job := inbox.get()) is not None and not stop.is_set():
        task, made = job
        writer.begin(task)
        try:
            batch = dataset.make(task, notes)
            made.set_result(batch if device is None else batch.pin_memory())
            del batch
        except _Stopped:
            return
        except Exception as error:
            made.set_exception(error)
        except BaseException as error:
            # sys.exit() in a transform ends a worker process, so it must not end the program here
            why = WorkerError(f"a worker thread was ended by {type(error).__name__}: {error}.")
            why.__cause__ = error
            made.set_exception(why)
        finally:
            writer.at(Phase.DONE)
        del job, task, made  # the batch belongs to the one who asked for it
    inbox.put(None)  # for the next thread


def _end(
    threads: Sequence[threading.Thread],
    inbox: _Inbox,
    stop: threading.Event,
    join_s: float = _SHORT_JOIN_S,
) -> None:
    stop.set()
    inbox.put(None)
    latest = time.monotonic() + join_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(latest - time.monotonic(), 0))
