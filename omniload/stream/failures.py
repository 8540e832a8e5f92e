"""What becomes of an error while a batch of a stream was made."""

from __future__ import annotations

import traceback

from omniload.errors import WorkerError

__all__ = ["explained", "release_frames"]


def explained(error: Exception) -> Exception:
    """Give the error to raise: one of ours where torch says that a worker has ended."""
    said = str(error)
    if type(error) is RuntimeError and said.startswith("DataLoader "):
        found = WorkerError(
            f"a worker process of the stream ended, or gave nothing in time ({said}). The usual "
            "cause is memory: lower buffer, num_workers or prefetch_factor."
        )
        found.__cause__ = error
        return found
    return error


def release_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold; what went wrong is in its text."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
