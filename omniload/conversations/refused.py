"""Why a record of raw data is not used, with a short name of the reason for counting."""

from __future__ import annotations

from omniload.errors import SampleError

__all__ = ["RefusedError", "refusal"]


class RefusedError(SampleError):
    """A record can't be used.

    Args:
        category: short name of the reason, for counting.
        reason: what must hold and what was found.
    """

    def __init__(self, category: str, reason: str) -> None:
        super().__init__(category, reason)
        self.category = category
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def refusal(error: SampleError) -> tuple[str, str]:
    """Give category and reason of an error that a record caused, in the words of the commands."""
    if isinstance(error, RefusedError):
        return error.category, error.reason
    text = str(error).replace("oversize='fewer-tiles'", "--oversize fewer-tiles")
    if text.startswith("too long"):
        return "too long", text
    if text.startswith("empty answer"):
        return "empty answer", text
    if text.startswith("no token that gives loss"):
        return "no loss token", text
    return "conversation", text
