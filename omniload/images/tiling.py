"""Tiling policies: pure functions of (width, height), used for lengths and for pixels alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.images.decode import decode
from omniload.images.resize import write_resized

__all__ = ["InternVLTiles", "TilePolicy", "TokenPolicy", "count_tokens", "cut_tiles", "tiles"]

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


@dataclass(frozen=True, kw_only=True)
class InternVLTiles:
    """Dynamic tiles as InternVL 1.5 and later cut them.

    Of all grids of columns x rows with min_tiles .. max_tiles tiles, the one whose aspect ratio is
    nearest to the image's wins. Grids are tried from few tiles to many; of two that are equally
    near, the later one wins if the image has more than half of its pixels. The image is resized to
    the grid without regard to its aspect ratio and cut; if that gives more than one tile, the whole
    image as one more tile, the thumbnail, comes last.

    The published code leaves open which of two equally near grids with the same number of tiles
    comes first (possible with min_tiles > 1 only); here it is the one with fewer columns.

    Args:
        size: side of a tile, pixels.
        min_tiles: least tiles of a grid.
        max_tiles: most tiles of a grid; the thumbnail is not counted.
        thumbnail: whether a grid of several tiles is followed by a thumbnail.

    Raises:
        ConfigError: a setting out of range.

    Paper: InternVL 1.5 (arXiv 2404.16821), section 3.3.
    """

    size: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (("size", 1, 8192), ("min_tiles", 1, 1024)):
            _check_integer(name, getattr(self, name), least, most)
        _check_integer("max_tiles", self.max_tiles, self.min_tiles, 1024)
        if not isinstance(self.thumbnail, bool):
            raise ConfigError(f"InternVLTiles.thumbnail must be a bool, got {self.thumbnail!r}.")

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Choose the grid for an image.

        Args:
            width: pixels.
            height: pixels.

        Returns:
            (columns, rows).

        Raises:
            ConfigError: a side below 1.
        """
        if width < 1 or height < 1:
            raise ConfigError(f"an image has sides of at least 1 pixel, got {width}x{height}.")
        aspect = width / height
        area = width * height
        nearest = float("inf")
        best = (1, 1)
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            distance = abs(aspect - columns / rows)
            if distance < nearest:
                nearest, best = distance, (columns, rows)
            elif distance == nearest and 2 * area > self.size * self.size * columns * rows:
                best = (columns, rows)
        return best

    def num_tiles(self, width: int, height: int) -> int:
        """Count the tiles of an image, thumbnail included.

        Args:
            width: pixels.
            height: pixels.

        Raises:
            ConfigError: a side below 1.
        """
        columns, rows = self.grid(width, height)
        return columns * rows + self._has_thumbnail(columns, rows)

    def limited(self, max_tiles: int) -> InternVLTiles:
        """Make the same policy with at most `max_tiles` tiles in a grid.

        Args:
            max_tiles: at least 1; `min_tiles` is lowered with it.
        """
        return replace(self, max_tiles=max_tiles, min_tiles=min(self.min_tiles, max_tiles))

    def for_num_tiles(self, width: int, height: int, num_tiles: int) -> InternVLTiles:
        """Find the policy that gives an image exactly `num_tiles` tiles.

        Preprocessing may have lowered `max_tiles` for one image to make its sample fit; only the
        number of tiles is stored. The highest limit that gives this number is the policy, on every
        machine.

        Args:
            width: pixels.
            height: pixels.
            num_tiles: tiles, thumbnail included.

        Raises:
            SampleError: no limit up to `max_tiles` gives this number.
        """
        for limit in range(self.max_tiles, 0, -1):
            policy = self.limited(limit)
            if policy.num_tiles(width, height) == num_tiles:
                return policy
        raise SampleError(
            f"an image of {width}x{height} pixels can't be cut into {num_tiles} tiles: it gives "
            f"{self.num_tiles(width, height)} with {self}."
        )

    def settings(self) -> dict[str, Any]:
        """Give the settings as plain JSON."""
        return {"policy": "internvl", **asdict(self)}

    def _has_thumbnail(self, columns: int, rows: int) -> bool:
        return self.thumbnail and columns * rows > 1


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


@lru_cache(maxsize=256)
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) with min_tiles .. max_tiles tiles, from few tiles to many."""
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    ]
    return tuple(sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[0])))


def _check_integer(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"InternVLTiles.{name} must be an integer between {least} and {most}, got {value!r}."
        )
