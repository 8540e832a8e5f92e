"""Tars indexed by several processes, and clear words when one of them dies."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omniload.errors import OmniloadError, ShardError
from omniload.tars.maker import SampleMaker
from omniload.tars.scan import index_tar
from omniload.tars.side_file import open_side
from omniload.tools.pieces import Stopped
from omniload.tools.processes import start_worker
from omniload.tools.recipe import Recipe, make_encoder

__all__ = ["IndexJob", "run_index_jobs"]

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class IndexJob:
    """All that a process needs to index a tar.

    Args:
        path: the tar.
        side: its side file.
        source: name of its data set.
        recipe: how lengths are measured.
        again: the side file is there, of the same tar; only the lengths are measured.
        progress: file of the shared counters, int64.
        slot: which of them counts the bytes of this tar; slot 0 tells to stop.
    """

    path: Path
    side: Path
    source: str
    recipe: Recipe
    again: bool
    progress: Path
    slot: int


def run_index_jobs(
    jobs: Sequence[IndexJob],
    *,
    workers: int,
    progress: npt.NDArray[np.int64],
    tick: Callable[[], None],
) -> None:
    """Index tars, in this process or in several.

    Args:
        jobs: the tars; most bytes first would be quickest, but the order is kept.
        workers: processes; 1: this one.
        progress: the shared counters.
        tick: called several times a second, and after each tar.

    Raises:
        OmniloadError: from a tar, or a process that died.
    """
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            _index(job)
            tick()
        return
    # not fork: it is unsafe once a library has started threads
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(jobs)), mp_context=context, initializer=start_worker
    )
    try:
        waiting: set[Future[None]] = {pool.submit(_index, job) for job in jobs}
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            tick()
            for future in done:
                future.result()
    except BrokenProcessPool:
        raise OmniloadError(
            "a worker process was killed while it indexed; most often the system is out of memory. "
            "Tars that are done are kept: run the same command again, with fewer --workers if it "
            "happens again."
        ) from None
    finally:
        progress[0] = 1  # those that still run end at their next sample
        pool.shutdown(wait=True, cancel_futures=True)


def _index(job: IndexJob) -> None:
    progress: npt.NDArray[np.int64] = np.memmap(job.progress, np.int64, "r+")

    def tick(position: int) -> None:
        if progress[0]:
            raise Stopped("stopped")
        progress[job.slot] = position

    recipe = job.recipe
    maker = SampleMaker(
        encoder=make_encoder(recipe),
        policy=recipe.policy(),
        max_tokens=recipe.max_tokens,
        oversize=recipe.oversize,  # type: ignore[arg-type]
    )
    try:
        known = open_side(job.side) if job.again else None
        facts = index_tar(
            job.path, job.side, maker=maker, source=job.source, known=known, tick=tick
        )
    except OSError as error:
        raise ShardError(
            f"{job.path} can't be indexed: {error}. Tars that are done are kept: repair the cause, "
            "and run the same command again."
        ) from error
    progress[job.slot] = facts.num_bytes
