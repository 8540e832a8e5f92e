"""The iterator over one epoch: hands out batches and says how it ended."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

from omniload.batch import PackedBatch
from omniload.errors import StateError, WorkerError

__all__ = ["BatchIterator"]


class BatchIterator(Iterator[PackedBatch]):
    """Counts what is handed out; torch's own iterator counts what is prefetched.

    Args:
        batches: torch's iterator.
        on_batch: called with each batch before it is handed out.
        on_end: called when all were handed out and another is asked for.
        on_error: called when making a batch failed; its workers may be broken.
        has_workers: whether worker processes make the batches.
    """

    def __init__(
        self,
        batches: Iterator[PackedBatch],
        *,
        on_batch: Callable[[PackedBatch], None],
        on_end: Callable[[], None],
        on_error: Callable[[], None],
        has_workers: bool,
    ) -> None:
        # dropping the only reference to torch's iterator ends its worker processes
        self._batches: Iterator[PackedBatch] | None = batches
        self._on_batch = on_batch
        self._on_end = on_end
        self._on_error = on_error
        self._has_workers = has_workers
        self._closed_because: str | None = None

    def __next__(self) -> PackedBatch:
        if self._batches is None:
            if self._closed_because is None:
                raise StopIteration
            raise StateError(f"{self._closed_because} Call iter() on the loader again.")
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            self._on_end()
            raise
        except BaseException as error:
            # going on would leave the failed batch out without a word
            self.close("this iterator was closed by an error in one of its batches.")
            self._on_error()
            if not self._has_workers:
                raise
            _release_frames(error)
            if not _is_about_workers(error):
                raise
            raise WorkerError(_explain(error)) from error
        self._on_batch(batch)
        return batch

    def close(self, because: str) -> None:
        """End the workers (persistent ones stay with their loader); `next()` then says why."""
        if self._batches is not None:
            self._batches = None
            self._closed_because = because


def _is_about_workers(error: BaseException) -> bool:
    """Tell torch's own errors from those of a batch, which it raises as the type they had."""
    if type(error) is RuntimeError:
        return str(error).startswith(("DataLoader worker (pid", "DataLoader timed out"))
    return isinstance(error, (ConnectionError, EOFError)) and "Caught " not in str(error)


def _explain(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    if "timed out" in str(error):
        return (
            f"no worker process gave a batch in time ({said}). Raise timeout, num_workers or "
            "prefetch_factor; the state of the loader still stands before that batch."
        )
    return (
        f"a worker process ended ({said}). The usual cause is memory: lower num_workers or "
        "prefetch_factor, or give a container more of it, /dev/shm too. The state of the loader "
        "still stands before the batch that is missing."
    )


def _release_frames(error: BaseException) -> None:
    # whoever keeps the error (a notebook, a debugger) would keep torch's iterator in its frames,
    # and with it the worker processes; what went wrong in them is in the error's text
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
