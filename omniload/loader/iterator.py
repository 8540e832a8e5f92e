"""The iterator over one epoch: hands out batches, survives one death, and says how it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from omniload._workers import release_frames
from omniload.batch import PackedBatch
from omniload.errors import StateError, WorkerError
from omniload.loader.run import DiedError, LateError, Run

__all__ = ["LATE_S", "BatchIterator"]

_log = logging.getLogger(__name__)

#: A batch that has not come for so long is told of in the log, and again after twice as long.
LATE_S = 60.0


class BatchIterator(Iterator[PackedBatch]):
    """Counts what is handed out, and not what is prefetched.

    Args:
        run: makes the batches.
        restart: makes a run that begins with the batch after the last that was handed out.
        on_ask: called when a batch is asked for.
        on_batch: called with each batch before it is handed out.
        on_end: called when all were handed out and another is asked for.
        on_error: called when making a batch failed; its workers may be broken.
        timeout_s: seconds to wait for a batch; 0: no limit.
    """

    def __init__(
        self,
        run: Run,
        *,
        restart: Callable[[], Run],
        on_ask: Callable[[], None],
        on_batch: Callable[[PackedBatch], None],
        on_end: Callable[[], None],
        on_error: Callable[[], None],
        timeout_s: float = 0,
    ) -> None:
        # dropping the only reference to torch's iterator ends its worker processes
        self._run: Run | None = run
        self._restart = restart
        self._on_ask = on_ask
        self._on_batch = on_batch
        self._on_end = on_end
        self._on_error = on_error
        self._timeout_s = timeout_s
        self._deaths: list[str] = []
        self._closed_because: str | None = None

    def __next__(self) -> PackedBatch:
        if self._run is None:
            if self._closed_because is None:
                raise StopIteration
            raise StateError(f"{self._closed_because} Call iter() on the loader again.")
        has_processes = self._run.has_processes
        self._on_ask()
        try:
            batch = self._wait()
        except StopIteration:
            self._leave()
            self._on_end()
            raise
        except BaseException as error:
            # going on would leave the failed batch out without a word
            is_own = isinstance(error, Exception) and not isinstance(error, WorkerError)
            self._closed_because = "this iterator was closed by an error in one of its batches."
            self._leave(at_once=not is_own)
            self._on_error()
            if has_processes:
                release_frames(error)
            raise
        self._on_batch(batch)
        return batch

    @property
    def is_closed(self) -> bool:
        """Whether no batch comes any more: all were handed out, or it was ended before."""
        return self._run is None

    def close(self, because: str) -> None:
        """End the workers (processes that persist stay with their loader).

        Args:
            because: what `next()` then says.
        """
        if self._run is not None:
            self._closed_because = because
            self._leave()

    def _leave(self, *, at_once: bool = False) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.stop(at_once=at_once)

    def _wait(self) -> PackedBatch:
        begin, tell_after_s = time.monotonic(), LATE_S
        while True:
            assert self._run is not None
            try:
                return self._run.next()
            except LateError:
                waited_s = time.monotonic() - begin
                if 0 < self._timeout_s <= waited_s:
                    raise WorkerError(self._too_late(waited_s)) from None
                if waited_s >= tell_after_s:
                    tell_after_s *= 2
                    where = self._run.places()
                    _log.warning("no batch has come for %.0f s; %s", waited_s, where)
            except DiedError as died:
                self._survive(died)
                begin, tell_after_s = time.monotonic(), LATE_S

    def _survive(self, died: DiedError) -> None:
        """Go on with new workers where the dead one stopped; once for each iterator.

        Raises:
            WorkerError: one has died before.
        """
        self._leave(at_once=True)
        self._on_error()
        self._deaths.append(str(died))
        if len(self._deaths) > 1:
            raise WorkerError(
                "a worker ended for the second time in one iteration, so that going on is no use. "
                f"Now: {self._deaths[1]} Before: {self._deaths[0]} The state of the loader still "
                "stands before the batch that is missing."
            ) from died.__cause__
        _log.warning(
            "a worker ended; new ones go on with the batch that is missing, and nothing is lost. "
            "A second time in this iteration would be an error. %s",
            self._deaths[0],  # a log record that held the error would hold the workers
        )
        release_frames(died)
        self._run = self._restart()

    def _too_late(self, waited_s: float) -> str:
        assert self._run is not None
        return (
            f"no worker gave a batch in time: expected one within timeout={self._timeout_s} s, "
            f"waited {waited_s:.1f} s; {self._run.places()}. Raise timeout, num_workers or "
            "prefetch_factor, or mend what hangs there; the state of the loader still stands "
            "before that batch."
        )
