"""Reading the file of the length index."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from omniload.errors import ConfigError, ShardError
from omniload.index import LengthIndex
from omniload.shards.arrow import index_schema
from omniload.shards.layout import OUTSIDE, LayoutReader, batch_blocks
from omniload.shards.manifest import ShardInfo
from omniload.shards.views import damaged, open_arrow

__all__ = ["read_index"]


def read_index(
    path: Path | str,
    info: ShardInfo,
    data: mmap.mmap,
    *,
    damaged: Callable[[Path | str, str], ShardError] = damaged,
) -> LengthIndex:
    """Read the length columns of all rows; they are views of the map.

    Args:
        path: the file, or its URL, for messages.
        info: its line in the manifest.
        data: its bytes.
        damaged: makes the error, with the remedy.

    Raises:
        ShardError: they are not those that the manifest names.
    """
    # at 10 GB/s this is cheaper than to find out later that a plan was made from noise
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != info.xxh3_128:
        raise damaged(path, f"its xxh3_128 must be {info.xxh3_128}, got {digest}")
    if open_arrow(path, data).schema != index_schema():
        raise damaged(path, "its columns are not those of a length index")
    try:
        tokens, tiles, loss = _columns(data, info.num_rows)
        return LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles, num_loss_tokens=loss)
    except (ConfigError, *OUTSIDE) as error:
        raise damaged(path, str(error)) from None


def _columns(data: mmap.mmap, num_rows: int) -> list[npt.NDArray[np.int32]]:
    blocks = batch_blocks(data)
    if len(blocks) != 1:
        raise ValueError(f"it must have one batch, got {len(blocks)}")
    layout = LayoutReader(data, 6).read(
        blocks[0]
    )  # a column: what is null (nothing is), and values
    if layout.num_rows != num_rows:
        raise ValueError(f"it must have {num_rows} rows, got {layout.num_rows}")
    columns = []
    for start, size in zip(layout.buffers[2::4], layout.buffers[3::4], strict=True):
        if size < 4 * num_rows or layout.base + start + size > layout.end:
            raise ValueError(f"a column must have {num_rows} values, got {size // 4}")
        columns.append(np.frombuffer(data, np.int32, num_rows, layout.base + start))
    return columns
