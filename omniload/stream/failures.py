"""What becomes of an error while a batch of a stream was made."""

from __future__ import annotations

from omniload._workers import as_raised
from omniload.errors import WorkerError

__all__ = ["explained"]


def explained(error: Exception, *, timeout_s: float) -> Exception:
    """Give the error to raise: one of ours where torch says that a worker ended or is late."""
    said = str(error)
    if type(error) is not RuntimeError or not said.startswith("DataLoader "):
        return as_raised(error)
    if said.startswith("DataLoader timed out"):
        found = WorkerError(
            f"no worker gave a batch in time: expected one within timeout={timeout_s} s. What "
            "opens or reads the stream hangs there, or is slower than that: mend it, or raise "
            "timeout, num_workers or prefetch_factor."
        )
    else:
        found = WorkerError(
            f"a worker process of the stream ended ({said}). The usual cause is memory: lower "
            "buffer, num_workers or prefetch_factor."
        )
    found.__cause__ = error
    return found
