"""What the tiling policies share: checks of settings, and the search for a lowered limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omniload.errors import ConfigError, SampleError

__all__ = ["check_integer", "check_sides", "highest_limit"]


def check_integer(name: str, value: Any, least: int, most: int) -> None:
    """Check a setting, named like `SquarePad.size`.

    Raises:
        ConfigError: not an integer between `least` and `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be an integer between {least} and {most}, got {value!r}.")


def check_sides(width: int, height: int) -> None:
    """Check the sides of an image.

    Raises:
        ConfigError: a side below 1.
    """
    if width < 1 or height < 1:
        raise ConfigError(f"an image has sides of at least 1 pixel, got {width}x{height}.")


def highest_limit(count: Callable[[int], int], want: int, most: int, *, what: str) -> int:
    """Find the highest limit that gives exactly a number of tiles.

    Tries a bisection first, which is right wherever a higher limit never gives fewer tiles; few
    very long images break that rule, and for those each limit is tried.

    Args:
        count: limit -> number of tiles.
        want: number of tiles.
        most: highest limit to try; at least 1.
        what: image and policy, for the message.

    Raises:
        SampleError: no limit gives this number.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if count(middle) <= want:
            low = middle
        else:
            high = middle - 1
    if count(low) == want:
        return low
    for limit in range(most, 0, -1):
        if count(limit) == want:
            return limit
    raise SampleError(f"{what} can't be cut into {want} tiles: it gives {count(most)}.")
