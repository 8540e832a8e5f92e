"""Triton: pixels to the device's float types, and images to tiles and patches.

`reference.py` says what each function must compute; the results are equal bit for bit, because
values are looked up in a table and never computed with. Every function only reads inside its inputs
and writes inside its output whatever the values are, and never waits for the device.

Nothing is multiplied and added, so fusing the two changes nothing; it is turned off by name because
Triton 3.9 warns where it is left open.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omniload.errors import ConfigError
from omniload.kernels.reference import check_cells, check_table, check_tiles

__all__ = ["images_to_tiles", "normalize_tiles", "patchify"]

#: Pixels of one program: at 448 x 448, 49 programs a plane, 16 bytes in for each thread.
_MAX_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def normalize_kernel(tiles, table, out, plane, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Look one block of one plane up: axis 0 counts planes, which may be many, axis 1 blocks."""
    index = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * block + tl.arange(0, block)
    inside = x < plane
    pixels = tl.load(tiles + index * plane + x, mask=inside, other=0).to(tl.int32)
    # 256 values of a channel stay in the first cache
    values = tl.load(table + (index % 3) * 256 + pixels, mask=inside)
    tl.store(out + index * plane + x, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def cells_kernel(  # type: ignore[no-untyped-def]
    pixels,
    grids,
    first_cells,
    table,
    out,
    num_images,
    num_bytes,
    num_steps,
    size: tl.constexpr,
    merge: tl.constexpr,
    frames: tl.constexpr,
    has_table: tl.constexpr,
    block: tl.constexpr,
):
    """Write one block of one cell: axis 0 counts cells, axis 1 blocks of its pixels."""
    cell = tl.program_id(0).to(tl.int64)
    # the last image whose first cell is not after this one
    image = 0
    last = num_images - 1
    for _ in range(num_steps):
        middle = (image + last + 1) // 2
        is_before = tl.load(first_cells + middle) <= cell
        image = tl.where(is_before, middle, image)
        last = tl.where(is_before, last, middle - 1)
    first = tl.load(first_cells + image)
    columns = tl.load(grids + 2 * image).to(tl.int64)
    group = (cell - first) // (merge * merge)
    within = (cell - first) % (merge * merge)
    groups_a_row = tl.maximum(columns // merge, 1)
    row = (group // groups_a_row) * merge + within // merge
    column = (group % groups_a_row) * merge + within % merge
    # images lie without gaps, so the first cell's number says where an image begins
    corner = first * (size * size) + row * size * columns * size + column * size
    x = tl.program_id(1) * block + tl.arange(0, block)
    at = (corner + (x // size) * columns * size + x % size) * 3
    inside = x < size * size
    # wrong grids must not lead out of the pixels
    readable = inside & (at >= 0) & (at < num_bytes - 2)
    for channel in tl.static_range(3):
        values = tl.load(pixels + at + channel, mask=readable, other=0)
        if has_table:
            values = tl.load(table + channel * 256 + values.to(tl.int32), mask=inside)
        for frame in tl.static_range(frames):
            plane = (cell * 3 + channel) * frames + frame
            tl.store(out + plane * (size * size) + x, values, mask=inside)


def normalize_tiles(tiles: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look every pixel up in the table of its channel; see `reference.normalize_tiles`."""
    check_tiles(tiles)
    check_table(table, tiles.device)
    tiles, table = tiles.contiguous(), table.contiguous()
    out = torch.empty(tiles.shape, dtype=table.dtype, device=tiles.device)
    plane = tiles.shape[2] * tiles.shape[3]
    if out.numel():
        block = _block(plane)
        grid = (3 * len(tiles), triton.cdiv(plane, block))
        normalize_kernel[grid](tiles, table, out, plane, block=block, enable_fp_fusion=False)
    return out


def images_to_tiles(
    pixels: torch.Tensor, grids: torch.Tensor, size: int, table: torch.Tensor | None = None
) -> torch.Tensor:
    """Cut images of different sizes into tiles; see `reference.images_to_tiles`.

    Where the grids are not those of the pixels, the result is not defined: it can't be checked
    without waiting for the device.
    """
    out = _cells(pixels, grids, size=size, merge=1, frames=1, table=table)
    return out.view(-1, 3, size, size)


def patchify(
    pixels: torch.Tensor,
    grids: torch.Tensor,
    *,
    patch: int,
    merge: int = 1,
    frames: int = 1,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cut images of different sizes into patches; see `reference.patchify`.

    Where the grids are not those of the pixels, the result is not defined: it can't be checked
    without waiting for the device.
    """
    return _cells(pixels, grids, size=patch, merge=merge, frames=frames, table=table)


def _cells(
    pixels: torch.Tensor,
    grids: torch.Tensor,
    *,
    size: int,
    merge: int,
    frames: int,
    table: torch.Tensor | None,
) -> torch.Tensor:
    count = check_cells(pixels, grids, size=size, merge=merge, table=table)
    if frames < 1:
        raise ConfigError(f"frames must be at least 1, got {frames}.")
    pixels, grids = pixels.contiguous(), grids.contiguous()
    dtype = pixels.dtype if table is None else table.dtype
    out = torch.empty((count, 3 * frames * size * size), dtype=dtype, device=pixels.device)
    if count == 0:
        return out
    cells = grids[:, 0].long() * grids[:, 1]
    first_cells = torch.cumsum(cells, 0) - cells
    block = _block(size * size)
    cells_kernel[(count, triton.cdiv(size * size, block))](
        pixels,
        grids,
        first_cells,
        pixels if table is None else table.contiguous(),
        out,
        len(grids),
        pixels.numel(),
        max(len(grids) - 1, 1).bit_length(),
        size=size,
        merge=merge,
        frames=frames,
        has_table=table is not None,
        block=block,
        enable_fp_fusion=False,
    )
    return out


def _block(plane: int) -> int:
    return min(int(triton.next_power_of_2(plane)), _MAX_BLOCK)
