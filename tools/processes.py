"""Pieces on several processes, with a progress bar, and clear words when one of them dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import numpy.typing as npt

from omniload.errors import OmniloadError
from omniload.tools.pieces import PieceJob, Stopped, run_piece
from omniload.tools.receipts import Receipt

__all__ = ["run_pieces", "start_worker"]

_POLL_S = 0.2


def run_pieces(
    jobs: Sequence[Callable[[], PieceJob]],
    *,
    workers: int,
    progress: npt.NDArray[np.int64],
    tick: Callable[[], None],
) -> Iterator[Receipt]:
    """Run pieces, in this process or in several.

    Args:
        jobs: make the jobs; called when a piece is about to run, because jobs are large.
        workers: processes; 1: this one.
        progress: the shared counters; row 0 tells pieces to stop.
        tick: called several times a second and after each piece.

    Yields:
        Receipts, in the order in which pieces end.

    Raises:
        OmniloadError: from a piece, or a process that died.
    """
    if workers == 1:
        for make in jobs:
            yield run_piece(make())
            tick()
        return
    # not fork: it is unsafe once a library has started threads
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    try:
        yield from _drive(pool, jobs, workers, tick)
    finally:
        progress[0, 0] = 1  # those that still run end at their next sample
        pool.shutdown(wait=True, cancel_futures=True)


def _drive(
    pool: ProcessPoolExecutor,
    jobs: Sequence[Callable[[], PieceJob]],
    workers: int,
    tick: Callable[[], None],
) -> Iterator[Receipt]:
    waiting = iter(jobs)
    running: dict[Future[Receipt], int] = {}

    def submit() -> None:
        make = next(waiting, None)
        if make is not None:
            job = make()
            with _without_interrupt():
                running[pool.submit(run_piece, job)] = job.number

    try:
        # only as many as can run, so that those named below are those that did
        for _ in range(workers):
            submit()
        while running:
            done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            tick()
            for future in done:
                receipt = _result(future)
                del running[future]
                submit()
                yield receipt
    except BrokenProcessPool:
        pieces = ", ".join(str(number) for number in sorted(running.values()))
        raise OmniloadError(
            f"a worker process was killed while it did one of the pieces {pieces}; most often the "
            "system is out of memory. What is done is kept: run the same command again, with fewer "
            "--workers if it happens again."
        ) from None
    except Stopped:
        raise OmniloadError("the run was stopped. Run the same command again to go on.") from None


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Start processes with Ctrl-C blocked, or it would hit them before `start_worker` has run."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(future: Future[Receipt]) -> Receipt:
    try:
        return future.result()
    except OmniloadError as error:
        raise error from None  # its message says it all; not where in another process it was raised


def start_worker() -> None:
    """Set a worker process up: the main process alone decides when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process tells us to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the main one is killed: nobody would wait for its result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
