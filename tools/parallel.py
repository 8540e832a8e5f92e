"""Many small jobs on several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from omniload.errors import OmniloadError
from omniload.tools.processes import start_worker

__all__ = ["choose_workers", "run_parallel"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

#: bytes that are read sooner than processes start
_LITTLE = 32 << 20
_MOST_WORKERS = 16


def choose_workers(given: int | None, num_bytes: int) -> int:
    """Say how many processes to use: what the user says, or one a core where it pays.

    Args:
        given: by the user; None: nothing.
        num_bytes: to read.
    """
    if given is not None:
        return given
    return 1 if num_bytes < _LITTLE else min(os.cpu_count() or 1, _MOST_WORKERS)


def run_parallel(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], *, workers: int
) -> Iterator[tuple[_Job, _Result]]:
    """Run jobs in this process or in several; in the order in which they end.

    Args:
        function: what does a job; picklable.
        jobs: what it is called with.
        workers: processes; 1: this one.

    Raises:
        OmniloadError: from a job, or a process that died.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, function(job)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe once libraries have threads
    pool = ProcessPoolExecutor(
        min(workers, len(jobs)), mp_context=context, initializer=start_worker
    )
    try:
        waiting = iter(jobs)
        running: dict[Future[_Result], _Job] = {}
        while True:
            # no more than can run soon: jobs may be large
            for job in itertools.islice(waiting, 2 * workers - len(running)):
                running[pool.submit(function, job)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise OmniloadError(
            "a worker process was killed while it read data; most often the system is out of "
            "memory. Try again with fewer --workers."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
