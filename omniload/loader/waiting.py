"""Why a training loop waits for data: the likely cause, worked out from figures alone."""

from __future__ import annotations

import logging

from omniload.loader.stats import SlowRow, Span

__all__ = ["WaitWatch", "likely_cause"]

_log = logging.getLogger(__name__)

#: A loop that waits for more than this share of its time is told so.
_MOST_WAIT = 0.05
#: Nothing is said of the first batches and seconds, nor of less than so many after that.
_WARM_BATCHES, _WARM_S = 16, 5.0
_LEAST_BATCHES, _LEAST_S = 32, 20.0
_BUSY, _READING, _MOSTLY = 0.7, 0.5, 0.5


def likely_cause(
    span: Span, *, worker_type: str, slowest: SlowRow | None = None, num_shards: int = 0
) -> str:
    """Say why the loop waited, and what to do about it; a pure function of figures.

    Args:
        span: the time in question.
        worker_type: "process", "thread" or "none".
        slowest: the row that took longest in it; None: not known.
        num_shards: shards of the data; 0: not known.
    """
    if worker_type == "none":
        return "batches are made in the training loop itself: set num_workers"
    if slowest is not None and slowest.seconds > _MOSTLY * span.wait_s:
        return (
            f"one slow row: row {slowest.row} took {slowest.seconds:.1f} s; look at it, or leave "
            "it out with exclude="
        )
    if span.wait_ready_s > _MOSTLY * span.wait_s:
        return (
            "batches are ready, but this process is slow to take them: a larger budget makes "
            "fewer and larger ones; pin_memory=False spares a copy where there is no GPU"
        )
    working = span.read_s + span.transform_s + span.pack_s
    if span.busy_share >= _BUSY and span.read_s <= _READING * working:
        return (
            f"workers are busy {span.busy_share:.0%} of the time with decoding and packing: add "
            "num_workers while there are CPUs, or store smaller images (`omniload preprocess "
            "--store resized`)"
        )
    if working and span.read_s > _READING * working:
        return _of_storage(span, num_shards)
    return (
        f"workers are busy only {span.busy_share:.0%} of the time, so batches come in bursts: "
        "raise prefetch_factor"
        + ("; or try worker_type='process'" if worker_type == "thread" else "")
    )


def _of_storage(span: Span, num_shards: int) -> str:
    cache = span.cache
    if cache is None:
        return (
            "workers wait for the disk: put the shards on a faster one, or raise num_workers so "
            "that more is read at once"
        )
    if 0 < num_shards < cache.fetched_files:
        return (
            f"the cache is too small: {cache.fetched_files} files were fetched where the data has "
            f"{num_shards}; raise Cache.max_bytes, or free space on its disk"
        )
    return (
        f"workers wait for the network, {cache.wait_s:.0f} s in all: raise num_workers or "
        "prefetch_factor, or keep the cache from one run to the next"
    )


class WaitWatch:
    """Warns once an epoch when the loop waits for more than a twentieth of its time."""

    def __init__(self) -> None:
        self.has_told = False

    def begin(self) -> None:
        """Begin an epoch."""
        self.has_told = False

    @staticmethod
    def is_warm(span: Span) -> bool:
        """Say if an epoch is past the batches that come slower while workers start.

        Args:
            span: the epoch until now.
        """
        return span.batches >= _WARM_BATCHES and span.seconds >= _WARM_S

    def look(
        self,
        span: Span,
        *,
        worker_type: str,
        slowest: SlowRow | None = None,
        num_shards: int = 0,
    ) -> None:
        """Warn if the loop waited for too long.

        Args:
            span: the time since the epoch was warm.
            worker_type: as for `likely_cause`.
            slowest: likewise.
            num_shards: likewise.
        """
        if self.has_told or span.batches < _LEAST_BATCHES or span.seconds < _LEAST_S:
            return
        if span.wait_share <= _MOST_WAIT:
            return
        self.has_told = True
        cause = likely_cause(span, worker_type=worker_type, slowest=slowest, num_shards=num_shards)
        _log.warning(
            "the training loop waited for data %.0f %% of the time; likely cause: %s",
            100 * span.wait_share,
            cause,
        )
