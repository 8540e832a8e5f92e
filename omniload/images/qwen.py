"""Patches as Qwen2-VL and later take them: an image keeps its shape, patches lie block by block.

A tile is a patch here: `size` is its side, `num_tiles` counts patches, and a budget's tiles bound
patches. The encoder sees them in the order of `tiles`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import SampleError
from omniload.images.canvas import write_patches
from omniload.images.checks import MAX_SETTING, check_integer, check_sides, lowered
from omniload.images.resize import resize

__all__ = ["QwenPatches"]

UInt8Array = npt.NDArray[np.uint8]

#: Beyond it, the published rule refuses an image.
_MAX_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class QwenPatches:
    """Patches as Qwen2-VL, Qwen2.5-VL and Qwen3-VL take them.

    Both sides are rounded to multiples of patch_size * merge, the factor. If that is more than
    `max_pixels`, the image is shrunk to them first and the sides rounded down; if it is less than
    `min_pixels`, it is enlarged and they are rounded up. merge x merge patches, which lie side by
    side in the order of patches, become one token.

    |              | patch_size | min_pixels | max_pixels of the checkpoints |
    |--------------|-----------|------------|-------------------------------|
    | Qwen2, 2.5   | 14        | 56 * 56    | 12845056 (16384 tokens)       |
    | Qwen3        | 16        | 256 * 256  | 16777216 (16384 tokens)       |

    Args:
        patch_size: side of a patch, pixels.
        merge: side of the square of patches that become one token.
        min_pixels: least pixels after the resize, as far as the rounding allows.
        max_pixels: most pixels after the resize; an image more than some ten times as long as wide
            may have more, because no side is less than the factor.

    Raises:
        ConfigError: a setting out of range.

    Paper: Qwen2-VL (arXiv 2409.12191), section 2.1; the rule is `smart_resize` of transformers,
    where sides far below the factor are first rounded to 0.
    """

    patch_size: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        check_integer("QwenPatches.patch_size", self.patch_size, 1, 1024)
        check_integer("QwenPatches.merge", self.merge, 1, 16)
        check_integer("QwenPatches.max_pixels", self.max_pixels, 1, MAX_SETTING)
        check_integer("QwenPatches.min_pixels", self.min_pixels, 0, self.max_pixels)

    @property
    def size(self) -> int:
        """Side of a patch, pixels."""
        return self.patch_size

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Choose the size of an image.

        Args:
            width: pixels.
            height: pixels.

        Returns:
            (columns, rows) of patches, multiples of `merge`.

        Raises:
            ConfigError: a side below 1.
            SampleError: one side is more than 200 times the other.
        """
        check_sides(width, height)
        if max(width, height) / min(width, height) > _MAX_ASPECT:
            raise SampleError(
                f"an image may be at most {_MAX_ASPECT} times as long as wide, got "
                f"{width}x{height} pixels."
            )
        factor = self.patch_size * self.merge
        columns, rows = round(width / factor), round(height / factor)
        pixels = columns * rows * factor * factor
        least = max(self.min_pixels, 1)  # a side that was rounded to nothing is too little
        if pixels > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            columns = max(1, math.floor(width / shrink / factor))
            rows = max(1, math.floor(height / shrink / factor))
        elif pixels < least:
            enlarge = math.sqrt(least / (height * width))
            columns = math.ceil(width * enlarge / factor)
            rows = math.ceil(height * enlarge / factor)
        return columns * self.merge, rows * self.merge

    def num_tiles(self, width: int, height: int) -> int:
        """Count the patches of an image; see `grid`."""
        columns, rows = self.grid(width, height)
        return columns * rows

    def num_tokens(self, width: int, height: int) -> int:
        """Count the tokens of an image: one for merge x merge patches; see `grid`."""
        return self.num_tiles(width, height) // (self.merge * self.merge)

    def limited(self, max_tiles: int) -> QwenPatches:
        """Make the same policy with at most `max_tiles` patches, and no least number.

        Args:
            max_tiles: at least 1.
        """
        pixels = min(self.max_pixels, max_tiles * self.patch_size * self.patch_size)
        return replace(self, max_pixels=pixels, min_pixels=0)

    def for_num_tiles(self, width: int, height: int, num_tiles: int) -> QwenPatches:
        """Find the policy with the highest limit that gives an image `num_tiles` patches.

        Args:
            width: pixels.
            height: pixels.
            num_tiles: patches.

        Raises:
            SampleError: no limit gives this number.
        """
        most = max(self.max_pixels // self.patch_size**2, 1)
        return lowered(self, width, height, num_tiles, most=most)

    def settings(self) -> dict[str, Any]:
        """Give the settings as plain JSON."""
        return {"policy": "qwen", **asdict(self)}

    def cut(self, image: UInt8Array, *, out: UInt8Array) -> None:
        """Write the patches in merge order.

        Args:
            image: uint8 (h, w, 3), RGB.
            out: uint8 (num_tiles, 3, patch_size, patch_size): square by square of merge x merge
                patches, row by row among the squares and inside each.
        """
        columns, rows = self.grid(image.shape[1], image.shape[0])
        resized = resize(image, columns * self.patch_size, rows * self.patch_size)
        write_patches(resized, columns, rows, merge=self.merge, out=out)
