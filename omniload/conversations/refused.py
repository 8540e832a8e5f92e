"""Why a record of raw data is not used, with a short name of the reason for counting."""

from __future__ import annotations

from omniload.errors import SampleError

__all__ = ["RefusedError", "refusal", "refused_image"]


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


def refused_image(error: SampleError, number: int, num_images: int) -> RefusedError:
    """Make the refusal of a record whose image can't be used.

    Args:
        error: what is wrong with the image.
        number: of the image, from 0.
        num_images: of the record.
    """
    is_whole = "images can't be read" in str(error)  # a kind that PIL lacks: nothing is damaged
    category = "kind of image" if is_whole else "damaged image"
    return RefusedError(category, f"image {number + 1} of {num_images}: {error}")


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
