"""Reading the file of the length index."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import xxhash

from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.shards.arrow import index_schema
from omniload.shards.manifest import ShardInfo
from omniload.shards.views import damaged, open_arrow

__all__ = ["read_index"]


def read_index(path: Path | str, info: ShardInfo, data: mmap.mmap) -> LengthIndex:
    """Read the length columns of all rows; they are views of the map.

    Args:
        path: the file, or its URL, for messages.
        info: its line in the manifest.
        data: its bytes.

    Raises:
        ShardError: they are not those that the manifest names.
    """
    # at 10 GB/s this is cheaper than to find out later that a plan was made from noise
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != info.xxh3_128:
        raise damaged(path, f"its xxh3_128 must be {info.xxh3_128}, got {digest}")
    file = open_arrow(path, data)
    if file.schema != index_schema() or file.num_record_batches != 1:
        raise damaged(path, "its columns are not those of a length index")
    batch = file.get_batch(0)
    columns = {
        name: np.frombuffer(batch.column(name).buffers()[1], np.int32, count=batch.num_rows)
        for name in ("num_tokens", "num_tiles", "num_loss_tokens")
    }
    if batch.num_rows != info.num_rows:
        raise damaged(path, f"it must have {info.num_rows} rows, got {batch.num_rows}")
    try:
        return LengthIndex.from_arrays(**columns)
    except ConfigError as error:
        raise damaged(path, str(error)) from None
