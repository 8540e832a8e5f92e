"""An image cut into the cells of a grid: interleaved pixels to one plane a channel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload import _native
from omniload.errors import ConfigError

__all__ = ["write_cells"]

UInt8Array = npt.NDArray[np.uint8]


def write_cells(
    image: UInt8Array, columns: int, rows: int, *, out: UInt8Array, backend: str = "auto"
) -> None:
    """Cut an image into equal cells, row by row.

    In C++ where the extension is built, without the interpreter lock; NumPy gives the same.

    Args:
        image: uint8 (rows * height, columns * width, 3), in any memory layout.
        columns: cells side by side.
        rows: cells one below the other.
        out: uint8 (rows * columns, 3, height, width), filled here; in any memory layout.
        backend: "auto", "native" or "numpy".

    Raises:
        ConfigError: an image that does not divide into the grid, or another shape of `out`.
        NativeUnavailableError: backend="native" without the extension.
    """
    if columns < 1 or rows < 1 or image.shape[0] % rows or image.shape[1] % columns:
        raise ConfigError(
            f"an image must divide into the cells of its grid: got {image.shape} for {columns} "
            f"columns and {rows} rows."
        )
    height, width = image.shape[0] // rows, image.shape[1] // columns
    if out.shape != (rows * columns, 3, height, width):
        raise ConfigError(
            f"out must have the shape {(rows * columns, 3, height, width)}, got {out.shape}."
        )
    native = _native.choose(backend)
    if native is not None and image.flags.c_contiguous and out.flags.c_contiguous:
        native.image_to_tiles(image, columns, rows, out)
        return
    cells = image.reshape(rows, height, columns, width, 3).transpose(0, 2, 4, 1, 3)
    for row in range(rows):
        out[row * columns : (row + 1) * columns] = cells[row]
