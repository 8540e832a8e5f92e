"""An image on a canvas, and an image cut into patches in merge order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["on_canvas", "write_patches"]

UInt8Array = npt.NDArray[np.uint8]


def on_canvas(image: UInt8Array, width: int, height: int, fill: tuple[int, int, int]) -> UInt8Array:
    """Put an image in the middle of a canvas of one colour; an odd pixel goes right and below.

    Args:
        image: uint8 (h, w, 3), not larger than the canvas.
        width: columns of the canvas.
        height: rows of the canvas.
        fill: colour, RGB.

    Returns:
        uint8 (height, width, 3); `image` itself if it fills the canvas.
    """
    rows, columns = image.shape[:2]
    if (rows, columns) == (height, width):
        return image
    canvas = np.empty((height, width, 3), dtype=np.uint8)
    canvas[:] = np.array(fill, dtype=np.uint8)
    top, left = (height - rows) // 2, (width - columns) // 2
    canvas[top : top + rows, left : left + columns] = image
    return canvas


def write_patches(
    image: UInt8Array, columns: int, rows: int, *, merge: int, out: UInt8Array
) -> None:
    """Cut an image into patches, block by block.

    Args:
        image: uint8 (rows * size, columns * size, 3).
        columns: patches in a row.
        rows: rows of patches.
        merge: side of a block, patches; divides columns and rows.
        out: uint8 (rows * columns, 3, size, size), filled here: blocks of merge x merge patches
            row by row, and the patches row by row inside each.
    """
    size = out.shape[-1]
    patches = image.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    shape = (rows // merge, columns // merge, merge, merge, 3, size, size)
    out.reshape(shape)[:] = patches.transpose(0, 3, 1, 4, 6, 2, 5)
