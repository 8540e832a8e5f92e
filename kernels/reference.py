"""Plain torch: what every kernel here must compute, and what runs where there is no kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from omniload._checks import check_device
from omniload.errors import ConfigError

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "check_cells",
    "check_table",
    "check_tiles",
    "images_to_tiles",
    "normalize_table",
    "normalize_tiles",
    "patchify",
]

#: Per-channel mean and standard deviation of ImageNet in RGB, pixels scaled to [0, 1]
#: (He et al., "Deep residual learning", and every torchvision recipe since).
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize_table(
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Compute what each of the 256 pixel values of each channel becomes.

    Computed in float32 as `(x / 255 - mean) / std`, step by step, then rounded once to `dtype`: bit
    for bit what the float path gives, free of how a compiler fuses multiply and add.

    Args:
        mean: 3 numbers, RGB, of pixels scaled to [0, 1].
        std: 3 numbers, none of them 0.
        dtype: floating type of the table.
        device: where it is needed.

    Returns:
        `dtype` (3, 256).

    Raises:
        ConfigError: not 3 numbers, a std of 0, or a dtype that is not floating.
    """
    try:
        means, deviations = [[float(value) for value in values] for values in (mean, std)]
        fits = len(means) == len(deviations) == 3 and all(map(math.isfinite, means + deviations))
    except (TypeError, ValueError):
        means, deviations, fits = [], [], False
    if not fits or 0 in deviations:
        raise ConfigError(
            f"mean and std must be 3 numbers each, std without 0, got mean={mean!r}, std={std!r}. "
            "They are of pixels scaled to [0, 1], in the order red, green, blue."
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"pixels must be normalised to a floating dtype, got {dtype!r}.")
    pixels = torch.arange(256, dtype=torch.float32)
    centre = torch.tensor(means, dtype=torch.float32)
    scale = torch.tensor(deviations, dtype=torch.float32)
    table = (pixels / 255 - centre[:, None]) / scale[:, None]
    return table.to(dtype).to(check_device(device), non_blocking=True)


def normalize_tiles(tiles: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look every pixel up in the table of its channel.

    Args:
        tiles: uint8 (num_tiles, 3, height, width).
        table: (3, 256), see `normalize_table`; on the device of the tiles.

    Returns:
        dtype of the table, (num_tiles, 3, height, width).

    Raises:
        ConfigError: tiles that are not uint8 with 3 channels, or a table of another shape or place.
    """
    check_tiles(tiles)
    check_table(table, tiles.device)
    pixels = torch.empty(tiles.shape, dtype=table.dtype, device=tiles.device)
    # a plane at a time stays in a CPU's cache: twice as fast as all tiles at once
    for tile, target in zip(tiles, pixels, strict=True):
        for channel in range(3):
            # int32 indices: a uint8 tensor would be taken for a mask, int64 doubles the traffic
            index = tile[channel].reshape(-1).to(torch.int32)
            torch.index_select(table[channel], 0, index, out=target[channel].view(-1))
    return pixels


def images_to_tiles(
    pixels: torch.Tensor, grids: torch.Tensor, size: int, table: torch.Tensor | None = None
) -> torch.Tensor:
    """Cut images of different sizes, interleaved pixels end to end, into tiles.

    A thumbnail is an image of its own, with the grid (1, 1).

    Args:
        pixels: uint8 (num_bytes,); image i is (rows * size, columns * size, 3), without a gap to
            the next.
        grids: int32 (num_images, 2), (columns, rows) of each image.
        size: side of a tile, pixels.
        table: (3, 256), see `normalize_table`; None: the values stay as they are.

    Returns:
        dtype of the table, else uint8, (num_tiles, 3, size, size); row by row.

    Raises:
        ConfigError: pixels that are not those of the grids, or arguments of another type.
    """
    return _cells(pixels, grids, size=size, merge=1, table=table)


def patchify(
    pixels: torch.Tensor,
    grids: torch.Tensor,
    *,
    patch: int,
    merge: int = 1,
    frames: int = 1,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cut images of different sizes into patches, in the order in which a model merges them.

    As the vision towers of Qwen2-VL, 2.5 and 3 (merge=2, frames=2) and NaViT (merge=1, frames=1)
    take them: the merge x merge patches that become one token follow each other, row by row, and
    the blocks too. An image is a film that stands still: its patch is there `frames` times.

    Args:
        pixels: uint8 (num_bytes,); image i is (rows * patch, columns * patch, 3), without a gap to
            the next.
        grids: int32 (num_images, 2), (columns, rows) in patches, both multiples of `merge`.
        patch: side of a patch, pixels.
        merge: side of a block of patches.
        frames: how often each patch is repeated in time.
        table: (3, 256), see `normalize_table`; None: the values stay as they are.

    Returns:
        dtype of the table, else uint8, (num_patches, 3 * frames * patch * patch), channel first,
        then frame, row, column.

    Raises:
        ConfigError: pixels that are not those of the grids, or arguments of another type.

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1; NaViT (arXiv 2307.06304), section 2.
    """
    cells = _cells(pixels, grids, size=patch, merge=merge, table=table)
    repeated = cells[:, :, None].expand(-1, -1, frames, -1, -1)
    return repeated.reshape(len(cells), 3 * frames * patch * patch)


def _cells(
    pixels: torch.Tensor,
    grids: torch.Tensor,
    *,
    size: int,
    merge: int,
    table: torch.Tensor | None,
) -> torch.Tensor:
    count = check_cells(pixels, grids, size=size, merge=merge, table=table)
    parts, start = [pixels.new_empty(0, 3, size, size)], 0
    for columns, rows in grids.tolist():
        if columns < 0 or rows < 0 or columns % merge or rows % merge:
            raise ConfigError(f"grids must be multiples of merge={merge}, got {[columns, rows]}.")
        stop = start + columns * rows * size * size * 3
        image = pixels[start:stop]
        if len(image) != stop - start:
            break
        blocks = image.view(rows // merge, merge, size, columns // merge, merge, size, 3)
        parts.append(blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size, size))
        start = stop
    cells = torch.cat(parts)
    if len(cells) != count or len(parts) != len(grids) + 1:
        raise ConfigError(
            f"pixels must be those of the grids: expected {size * size * 3} bytes for each cell, "
            f"got {pixels.numel()} bytes for the grids {grids.tolist()[:8]}."
        )
    return cells if table is None else normalize_tiles(cells, table)


def check_tiles(tiles: torch.Tensor) -> None:
    """Check that tiles are uint8 (num_tiles, 3, height, width).

    Raises:
        ConfigError: they are not.
    """
    if tiles.dtype != torch.uint8 or tiles.ndim != 4 or tiles.shape[1] != 3:
        raise ConfigError(
            f"tiles must be uint8 (num_tiles, 3, height, width), got {tiles.dtype} "
            f"{tuple(tiles.shape)}."
        )


def check_table(table: torch.Tensor, device: torch.device) -> None:
    """Check that a table has the shape (3, 256) and lies on the device of the pixels.

    Raises:
        ConfigError: it has not, or does not.
    """
    if table.shape != (3, 256) or table.device != device:
        raise ConfigError(
            f"table must be (3, 256) on {device}, got {tuple(table.shape)} on {table.device}."
        )


def check_cells(
    pixels: torch.Tensor,
    grids: torch.Tensor,
    *,
    size: int,
    merge: int,
    table: torch.Tensor | None,
) -> int:
    """Check what can be checked of images to be cut without waiting for a device.

    Returns:
        The number of cells.

    Raises:
        ConfigError: a wrong type, shape or device, or bytes that are no whole cells.
    """
    if pixels.dtype != torch.uint8 or pixels.ndim != 1:
        raise ConfigError(
            f"pixels must be uint8 (num_bytes,), got {pixels.dtype} {tuple(pixels.shape)}."
        )
    if grids.dtype != torch.int32 or grids.ndim != 2 or grids.shape[1] != 2:
        raise ConfigError(
            f"grids must be int32 (num_images, 2), got {grids.dtype} {tuple(grids.shape)}."
        )
    if grids.device != pixels.device:
        raise ConfigError(f"grids must lie on {pixels.device}, got {grids.device}.")
    if table is not None:
        check_table(table, pixels.device)
    if size < 1 or merge < 1:
        raise ConfigError(f"sides and merge must be at least 1, got {size} and {merge}.")
    count, rest = divmod(pixels.numel(), 3 * size * size)
    if rest or (count and not len(grids)):
        raise ConfigError(
            f"pixels must be those of the grids: got {pixels.numel()} bytes for cells of "
            f"{3 * size * size} bytes in {len(grids)} images."
        )
    return count
