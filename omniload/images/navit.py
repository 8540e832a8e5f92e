"""Patches as Pixtral takes them: an image keeps its shape, its patches lie row by row.

A tile is a patch here: `size` is its side, `num_tiles` counts patches, and a budget's tiles bound
patches. The encoder sees them in the order of `tiles`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.images.checks import MAX_SETTING, check_integer, check_sides, lowered
from omniload.images.resize import write_resized

__all__ = ["NaViTPatches"]

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class NaViTPatches:
    """Patches of an image at its own resolution, one token each.

    An image whose longer side is over `max_side` is shrunk to it, its aspect ratio kept, sides
    rounded down. Then both sides are brought to the next multiple of the patch, up. This is the
    rule of Pixtral. With `max_patches`, an image with more is shrunk further, sides rounded down.

    Pixtral has a token after each row of patches but the last: with `row_breaks` they are counted,
    and the chat template must say which token it is (`image_break`).

    Args:
        patch_size: side of a patch, pixels.
        max_side: longest side, pixels.
        max_patches: most patches of an image; None: only `max_side` limits them.
        row_breaks: whether rows of patches are set apart by a token.

    Raises:
        ConfigError: a setting out of range.

    Paper: NaViT (arXiv 2307.06304), Pixtral (arXiv 2410.07073).
    """

    patch_size: int = 16
    max_side: int = 1024
    max_patches: int | None = None
    row_breaks: bool = False

    def __post_init__(self) -> None:
        check_integer("NaViTPatches.patch_size", self.patch_size, 1, 1024)
        check_integer("NaViTPatches.max_side", self.max_side, 1, 1 << 14)
        if self.max_patches is not None:
            check_integer("NaViTPatches.max_patches", self.max_patches, 1, MAX_SETTING)
        if not isinstance(self.row_breaks, bool):
            raise ConfigError(f"NaViTPatches.row_breaks must be a bool, got {self.row_breaks!r}.")

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
            (columns, rows) of patches.

        Raises:
            ConfigError: a side below 1.
        """
        check_sides(width, height)
        ratio = max(width, height) / self.max_side
        if ratio > 1:  # the published rule loses a side that is shrunk below 1 pixel
            width, height = (max(1, math.floor(side / ratio)) for side in (width, height))
        columns, rows = (-(-side // self.patch_size) for side in (width, height))
        most = self.max_patches
        if most is not None and columns * rows > most:
            shrink = math.sqrt(width * height / most)  # a patch's side in the image, afterwards
            columns = min(max(1, math.floor(width / shrink)), columns, most)
            rows = min(max(1, math.floor(height / shrink)), rows, most // columns)
        return columns, rows

    def num_tiles(self, width: int, height: int) -> int:
        """Count the patches of an image; see `grid`."""
        columns, rows = self.grid(width, height)
        return columns * rows

    def num_tokens(self, width: int, height: int) -> int:
        """Count the tokens of an image: one a patch, and the breaks between rows."""
        columns, rows = self.grid(width, height)
        return columns * rows + (rows - 1 if self.row_breaks else 0)

    def limited(self, max_tiles: int) -> NaViTPatches:
        """Make the same policy with at most `max_tiles` patches.

        Args:
            max_tiles: at least 1.
        """
        most = max_tiles if self.max_patches is None else min(self.max_patches, max_tiles)
        return replace(self, max_patches=most)

    def for_num_tiles(self, width: int, height: int, num_tiles: int) -> NaViTPatches:
        """Find the policy with the highest limit that gives an image `num_tiles` patches.

        Args:
            width: pixels.
            height: pixels.
            num_tiles: patches.

        Raises:
            SampleError: no limit gives this number.
        """
        most = self.num_tiles(width, height)
        return lowered(self, width, height, num_tiles, most=most)

    def settings(self) -> dict[str, Any]:
        """Give the settings as plain JSON."""
        given = asdict(self)
        if not self.row_breaks:  # shards from before there were breaks say the same
            del given["row_breaks"]
        return {"policy": "navit", **given}

    def cut(self, image: UInt8Array, *, out: UInt8Array) -> None:
        """Write the patches.

        Args:
            image: uint8 (h, w, 3), RGB.
            out: uint8 (num_tiles, 3, patch_size, patch_size), row by row.
        """
        columns, rows = self.grid(image.shape[1], image.shape[0])
        write_resized(image, columns, rows, out=out)
