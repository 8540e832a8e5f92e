"""Completing a folder of shards: the length index and the manifest over finished shards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omniload.errors import ConfigError
from omniload.shards.arrow import FinishedShard, ShardWriter, index_schema, seal
from omniload.shards.manifest import (
    INDEX_NAME,
    Manifest,
    ShardInfo,
    partial_name,
    settings_fingerprint,
    write_manifest,
)
from omniload.types import Record

__all__ = ["finish_shards", "write_index", "write_shards"]


def write_index(
    folder: str | Path,
    *,
    num_tokens: npt.NDArray[np.int32],
    num_tiles: npt.NDArray[np.int32],
    num_loss_tokens: npt.NDArray[np.int32],
) -> ShardInfo:
    """Write `folder/index.arrow`: the length columns of all rows, in row order.

    Args:
        folder: where to write.
        num_tokens: int32 (num_rows,).
        num_tiles: int32 (num_rows,).
        num_loss_tokens: int32 (num_rows,).

    Returns:
        Its line in the manifest.
    """
    path = Path(folder) / INDEX_NAME
    partial = partial_name(path)
    columns = [pa.array(column, pa.int32()) for column in (num_tokens, num_tiles, num_loss_tokens)]
    with (
        pa.OSFile(os.fspath(partial), "wb") as file,
        pa.ipc.new_file(file, index_schema()) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=index_schema()))
    return seal(partial, path, num_rows=len(num_tokens))


def finish_shards(
    folder: str | Path,
    shards: Sequence[FinishedShard],
    *,
    settings: Mapping[str, Any],
    counts: Mapping[str, int] | None = None,
) -> Manifest:
    """Write index and manifest over shards that are complete; the folder can be opened then.

    Args:
        folder: where the shards lie.
        shards: in row order.
        settings: how the rows were made; plain JSON.
        counts: totals for the manifest.

    Returns:
        The manifest as written.

    Raises:
        ConfigError: no row at all.
    """
    if not shards:
        raise ConfigError(f"a set of shards must have at least one row, got none ({folder}).")
    columns = {
        name: np.concatenate([getattr(shard, name) for shard in shards])
        for name in ("num_tokens", "num_tiles", "num_loss_tokens")
    }
    index = write_index(folder, **columns)
    sources: Counter[str] = Counter()
    for shard in shards:
        sources.update(shard.sources)
    manifest = Manifest(
        num_rows=index.num_rows,
        shards=tuple(shard.info for shard in shards),
        index=index,
        settings=dict(settings),
        fingerprint=settings_fingerprint(settings),
        sources=dict(sorted(sources.items())),
        counts=dict(counts or {}),
    )
    write_manifest(folder, manifest)
    return manifest


def write_shards(
    folder: str | Path,
    records: Iterable[Record],
    *,
    settings: Mapping[str, Any],
    max_bytes: int = 256 << 20,
    with_messages: bool = True,
) -> Manifest:
    """Write records, in the order given, to a new folder of shards.

    Args:
        folder: made if it does not exist.
        records: their `row` and `shard` are not stored.
        settings: how the rows were made; plain JSON.
        max_bytes: size at which a shard is closed.
        with_messages: store the conversations.

    Returns:
        The manifest.

    Raises:
        ConfigError: no record, or `max_bytes` below 1.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(
        folder, prefix="shard-00000", max_bytes=max_bytes, with_messages=with_messages
    ) as writer:
        for record in records:
            writer.add(record)
    return finish_shards(folder, writer.finished, settings=settings)
