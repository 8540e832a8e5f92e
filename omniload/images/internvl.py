"""Tiles as InternVL takes them: the grid that is nearest to the shape of an image, a thumbnail."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from omniload.errors import ConfigError, SampleError
from omniload.images.checks import check_integer, check_sides

__all__ = ["InternVLTiles"]


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
        check_integer("InternVLTiles.size", self.size, 1, 8192)
        check_integer("InternVLTiles.min_tiles", self.min_tiles, 1, 1024)
        check_integer("InternVLTiles.max_tiles", self.max_tiles, self.min_tiles, 1024)
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
        check_sides(width, height)
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
