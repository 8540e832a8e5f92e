"""Tiles as LLaVA takes them: one padded square (1.5), or a grid by best resolution (NeXT)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.images.canvas import on_canvas
from omniload.images.cells import write_cells
from omniload.images.checks import check_integer, check_sides
from omniload.images.header import MAX_PIXELS
from omniload.images.resize import resize, write_resized

__all__ = ["AnyResTiles", "SquarePad"]

UInt8Array = npt.NDArray[np.uint8]

P = TypeVar("P", "SquarePad", "AnyResTiles")

_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, kw_only=True)
class SquarePad:
    """One tile an image: padded to a square with one colour, then resized, as LLaVA-1.5 does.

    Args:
        size: side of the tile, pixels.
        fill: colour of the padding, RGB; the default is the mean of CLIP's training images.

    Raises:
        ConfigError: a setting out of range.

    Paper: LLaVA-1.5 (arXiv 2310.03744); the padding is `image_aspect_ratio: pad` of its models.
    """

    size: int = 336
    fill: tuple[int, int, int] = (122, 116, 104)

    def __post_init__(self) -> None:
        check_integer("SquarePad.size", self.size, 1, 8192)
        object.__setattr__(self, "fill", _triple("SquarePad.fill", self.fill))

    def num_tiles(self, width: int, height: int) -> int:
        """Always 1.

        Raises:
            SampleError: the square around the image would have more than `MAX_PIXELS` pixels.
        """
        check_sides(width, height)
        if max(width, height) ** 2 > MAX_PIXELS:
            raise SampleError(
                f"image too long to be padded to a square: at most {MAX_PIXELS} pixels, got "
                f"{width}x{height}. Cut it before preprocessing, or use another tiling."
            )
        return 1

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Always (1, 1)."""
        check_sides(width, height)
        return 1, 1

    def limited(self, max_tiles: int) -> SquarePad:
        """The same policy: there is nothing to lower."""
        return self

    def for_num_tiles(self, width: int, height: int, num_tiles: int) -> SquarePad:
        """The same policy, for a number of tiles of 1.

        Raises:
            SampleError: another number.
        """
        return _same(self, width, height, num_tiles)

    def settings(self) -> dict[str, Any]:
        """Give the settings as plain JSON."""
        return {"policy": "square", **asdict(self), "fill": list(self.fill)}

    def cut(self, image: UInt8Array, *, out: UInt8Array) -> None:
        """Write the tile.

        Args:
            image: uint8 (h, w, 3), RGB.
            out: uint8 (1, 3, size, size).
        """
        side = max(image.shape[:2])
        write_resized(on_canvas(image, side, side, self.fill), 1, 1, out=out)


@dataclass(frozen=True, kw_only=True)
class AnyResTiles:
    """A whole-image tile, then the crops of the best of a list of resolutions, as LLaVA-NeXT does.

    The resolution is chosen that keeps most pixels of the image, and among those the one with least
    padding; of equals, the first. The image is resized into it, its aspect ratio kept, black around
    it, and cut row by row.

    Tokens: those of the whole-image tile; those of the crops as one large grid, without the rows or
    columns that are padding only; and one a row of that grid, the line break. The model counts them
    too, so the pinpoints here must be those of the model's config, in their order.

    LLaVA-OneVision (`vision_aspect_ratio: anyres_max_9`) shrinks the grid of the crops' tokens
    where it has a fifth more than `max_crops` tiles have. In its published recipe the images of a
    sample with several are padded to one tile each; here, and in the model unless it is told
    `batch_num_images`, every image is cut.

    Args:
        size: side of a tile, pixels.
        patch_size: side of a patch of the vision encoder, pixels; (size // patch_size) ** 2 tokens
            a tile.
        pinpoints: (height, width) of each resolution, multiples of `size`, as in
            `image_grid_pinpoints` of the model's config.
        max_crops: tiles whose tokens the crops of an image may have, the 9 of "anyres_max_9"; None:
            no limit, as LLaVA-NeXT.

    Raises:
        ConfigError: a setting out of range.

    Source: LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/), LLaVA-OneVision
    (arXiv 2408.03326), section 3.2. The order (height, width), which decides ties, the rounding to
    7 digits and the limit of 1.1 on the ratio of sides are those of transformers.
    """

    size: int = 336
    patch_size: int = 14
    pinpoints: tuple[tuple[int, int], ...] = _PINPOINTS
    max_crops: int | None = None

    def __post_init__(self) -> None:
        check_integer("AnyResTiles.size", self.size, 1, 8192)
        check_integer("AnyResTiles.patch_size", self.patch_size, 1, self.size)
        try:
            pinpoints = tuple((height, width) for height, width in self.pinpoints)
        except (TypeError, ValueError):
            pinpoints = ()
        for side in (side for pair in pinpoints for side in pair):
            check_integer("AnyResTiles.pinpoints", side, self.size, 64 * self.size)
        if not pinpoints or any(side % self.size for pair in pinpoints for side in pair):
            raise ConfigError(
                "AnyResTiles.pinpoints must be pairs (height, width) of multiples of size="
                f"{self.size}, got {self.pinpoints!r}."
            )
        object.__setattr__(self, "pinpoints", pinpoints)
        if self.max_crops is not None:
            check_integer("AnyResTiles.max_crops", self.max_crops, 1, 1024)

    def resolution(self, width: int, height: int) -> tuple[int, int]:
        """Choose the resolution for an image.

        Args:
            width: pixels.
            height: pixels.

        Returns:
            (width, height), pixels.

        Raises:
            ConfigError: a side below 1.
        """
        check_sides(width, height)
        best, kept_most, padded_least = self.pinpoints[0], -1, 0
        for rows, columns in self.pinpoints:
            scale = min(columns / width, rows / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            padded = rows * columns - kept
            if kept > kept_most or (kept == kept_most and padded < padded_least):
                best, kept_most, padded_least = (rows, columns), kept, padded
        return best[1], best[0]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Choose the grid of crops for an image: (columns, rows), whole-image tile left out."""
        columns, rows = self.resolution(width, height)
        return columns // self.size, rows // self.size

    def num_tiles(self, width: int, height: int) -> int:
        """Count the tiles of an image, the whole-image tile included."""
        columns, rows = self.grid(width, height)
        return 1 + columns * rows

    def num_tokens(self, width: int, height: int) -> int:
        """Count the tokens of an image.

        Args:
            width: pixels.
            height: pixels.

        Raises:
            ConfigError: a side below 1.
        """
        side = self.size // self.patch_size
        columns, rows = (side * count for count in self.grid(width, height))
        if width / height > columns / rows:
            inside = int(round(height * (columns / width), 7))
            rows -= (rows - inside) // 2 * 2
        else:
            inside = int(round(width * (rows / height), 7))
            columns -= (columns - inside) // 2 * 2
        if self.max_crops is not None:
            ratio = math.sqrt(columns * rows / (self.max_crops * side * side))
            if ratio > 1.1:
                columns, rows = int(columns // ratio), int(rows // ratio)
        return side * side + rows * columns + rows

    def limited(self, max_tiles: int) -> AnyResTiles:
        """The same policy: the model works the crops out from the size of the image."""
        return self

    def for_num_tiles(self, width: int, height: int, num_tiles: int) -> AnyResTiles:
        """The same policy, for the number of tiles that it gives.

        Raises:
            SampleError: another number.
        """
        return _same(self, width, height, num_tiles)

    def settings(self) -> dict[str, Any]:
        """Give the settings as plain JSON."""
        given = {**asdict(self), "pinpoints": [list(pair) for pair in self.pinpoints]}
        if self.max_crops is None:  # shards from before there was a limit say the same
            del given["max_crops"]
        return {"policy": "anyres", **given}

    def cut(self, image: UInt8Array, *, out: UInt8Array) -> None:
        """Write the tiles.

        Args:
            image: uint8 (h, w, 3), RGB.
            out: uint8 (num_tiles, 3, size, size), the whole-image tile first.
        """
        height, width = image.shape[:2]
        canvas_width, canvas_height = self.resolution(width, height)
        scale_width, scale_height = canvas_width / width, canvas_height / height
        if scale_width < scale_height:
            inside = canvas_width, min(math.ceil(height * scale_width), canvas_height)
        else:
            inside = min(math.ceil(width * scale_height), canvas_width), canvas_height
        canvas = on_canvas(resize(image, *inside), canvas_width, canvas_height, (0, 0, 0))
        write_resized(image, 1, 1, out=out[:1])
        columns, rows = canvas_width // self.size, canvas_height // self.size
        write_cells(canvas, columns, rows, out=out[1:])


def _same(policy: P, width: int, height: int, num_tiles: int) -> P:
    if policy.num_tiles(width, height) != num_tiles:
        raise SampleError(
            f"an image of {width}x{height} pixels can't be cut into {num_tiles} tiles: it gives "
            f"{policy.num_tiles(width, height)} with {policy}."
        )
    return policy


def _triple(name: str, values: Any) -> tuple[int, int, int]:
    try:
        red, green, blue = values
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be 3 numbers, RGB, got {values!r}.") from None
    for value in (red, green, blue):
        check_integer(name, value, 0, 255)
    return red, green, blue
