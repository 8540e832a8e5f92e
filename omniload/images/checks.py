"""What the tiling policies share: checks of settings, and the search for a lowered limit."""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar

from omniload.errors import ConfigError, SampleError

__all__ = ["MAX_SETTING", "check_integer", "check_sides", "lowered"]

#: Most pixels or patches that a setting may allow an image.
MAX_SETTING = 1 << 28


class _Limited(Protocol):
    def num_tiles(self, width: int, height: int) -> int: ...

    def limited(self, max_tiles: int) -> Self: ...


P = TypeVar("P", bound=_Limited)


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


def lowered(policy: P, width: int, height: int, num_tiles: int, *, most: int) -> P:
    """Find the policy with the highest limit that gives an image exactly a number of tiles.

    Tries a bisection first, which is right wherever a higher limit never gives fewer tiles; few
    very long images break that rule, and for those each limit is tried.

    Args:
        policy: as set.
        width: pixels.
        height: pixels.
        num_tiles: tiles, or patches.
        most: highest limit to try; at least 1.

    Returns:
        `policy` itself if it gives that number.

    Raises:
        SampleError: no limit gives this number.
    """

    def count(limit: int) -> int:
        return policy.limited(limit).num_tiles(width, height)

    if policy.num_tiles(width, height) == num_tiles:
        return policy
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if count(middle) <= num_tiles:
            low = middle
        else:
            high = middle - 1
    if count(low) == num_tiles:
        return policy.limited(low)
    for limit in range(most, 0, -1):
        if count(limit) == num_tiles:
            return policy.limited(limit)
    raise SampleError(
        f"an image of {width}x{height} pixels with {policy} can't be cut into {num_tiles} tiles: "
        f"it gives {count(most)}."
    )
