"""Tiling policies: pure functions of (width, height), used for lengths and for pixels alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.images.decode import decode
from omniload.images.resize import write_resized

__all__ = ["TilePolicy", "TokenPolicy", "count_tokens", "cut_tiles", "tiles"]

UInt8Array = npt.NDArray[np.uint8]


class TilePolicy(Protocol):
    """What a tiling policy is: how many tiles an image of a size gives, and in which grid.

    A policy with a method `cut(image, *, out)` writes the pixels itself; see `cut_tiles`. One that
    knows how many tokens an image gets is a `TokenPolicy`.
    """

    @property
    def size(self) -> int:
        """Side of a tile, pixels."""

    def num_tiles(self, width: int, height: int) -> int:
        """Tiles of an image of this size, thumbnail included."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of the grid, thumbnail left out."""

    def limited(self, max_tiles: int) -> TilePolicy:
        """The same policy with at most this many tiles in the grid."""

    def for_num_tiles(self, width: int, height: int, num_tiles: int) -> TilePolicy:
        """The policy with the highest limit that gives exactly this many tiles."""

    def settings(self) -> dict[str, Any]:
        """Plain JSON from which `policy_from_settings` makes the policy again."""


@runtime_checkable
class TokenPolicy(TilePolicy, Protocol):
    """A policy that decides how many tokens an image gets; other images get some for each tile."""

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens that the language model sees for an image of this size."""


def count_tokens(policy: TilePolicy, width: int, height: int, *, tokens_per_tile: int) -> int:
    """Count the tokens that the language model sees for an image.

    Args:
        policy: the tiling policy.
        width: pixels.
        height: pixels.
        tokens_per_tile: for a policy that leaves it to the number of tiles.
    """
    # as `isinstance(policy, TokenPolicy)`, which takes longer than all the rest
    num_tokens: Callable[[int, int], int] | None = getattr(policy, "num_tokens", None)
    if num_tokens is not None:
        return num_tokens(width, height)
    return policy.num_tiles(width, height) * tokens_per_tile


def tiles(data: bytes, policy: TilePolicy) -> UInt8Array:
    """Decode an image and cut it into tiles.

    Args:
        data: an encoded image.
        policy: the tiling policy.

    Returns:
        uint8 (num_tiles, 3, size, size), RGB, in the order of the policy; see `cut_tiles`.

    Raises:
        SampleError: the image can't be decoded; see `decode`.
    """
    image = decode(data)
    height, width = image.shape[:2]
    out = np.empty((policy.num_tiles(width, height), 3, policy.size, policy.size), dtype=np.uint8)
    cut_tiles(image, policy, out=out)
    return out


def cut_tiles(image: UInt8Array, policy: TilePolicy, *, out: UInt8Array) -> None:
    """Resize an image to its grid and write its tiles.

    Row by row, the thumbnail last, unless the policy has a method `cut` of its own.

    Args:
        image: uint8 (h, w, 3), RGB.
        policy: the tiling policy.
        out: uint8 (num_tiles, 3, size, size), filled here.

    Raises:
        ConfigError: `out` has another shape.
    """
    height, width = image.shape[:2]
    size = policy.size
    columns, rows = policy.grid(width, height)
    count = columns * rows
    expected = (policy.num_tiles(width, height), 3, size, size)
    if out.shape != expected or out.dtype != np.uint8:
        raise ConfigError(f"out must be uint8 {expected}, got {out.dtype} {out.shape}.")
    cut = getattr(policy, "cut", None)
    if cut is not None:
        cut(image, out=out)
        return
    write_resized(image, columns, rows, out=out[:count])
    if len(out) > count:
        write_resized(image, 1, 1, out=out[count:])
