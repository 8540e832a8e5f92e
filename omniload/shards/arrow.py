"""The Arrow file of a shard: its columns, how rows are written and how they are read back.

Rows lie in record batches of `ROWS_PER_BATCH` (the last may be shorter), so row -> batch is a
division. Images come last, so that all else of a batch lies together on disk. Nothing is
compressed: image files are already, and a memory map needs plain bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from omniload.errors import ConfigError
from omniload.shards.manifest import SCHEMA_VERSION, ShardInfo, partial_name, sync_folder
from omniload.types import IGNORE_INDEX, Record

__all__ = [
    "ROWS_PER_BATCH",
    "FinishedShard",
    "ShardWriter",
    "index_schema",
    "seal",
    "shard_schema",
]

#: Reading a row parses its batch (60 us), writing holds one batch in memory: a balance of both.
ROWS_PER_BATCH = 32

_CHUNK = 1 << 22


def shard_schema(*, with_messages: bool) -> Any:
    """Make the Arrow schema of a shard; column order is the order on disk."""
    ints = pa.list_(pa.field("item", pa.int32(), nullable=False))
    message = pa.struct(
        [
            pa.field("role", pa.string(), nullable=False),
            pa.field("content", pa.string(), nullable=False),
            pa.field("weight", pa.int8()),
        ]
    )
    columns = [
        ("key", pa.string()),
        ("source", pa.string()),
        ("num_tokens", pa.int32()),
        ("num_tiles", pa.int32()),
        ("num_loss_tokens", pa.int32()),
        ("image_sizes", ints),  # width, height, width, height, ...
        ("image_num_tiles", ints),
        ("image_spans", ints),  # start, end, start, end, ...
        ("input_ids", ints),
        ("labels", ints),
    ]
    if with_messages:
        columns.append(("messages", pa.list_(pa.field("item", message, nullable=False))))
    # 64-bit offsets: one batch of large scans can pass 2 GiB
    images = pa.list_(pa.field("item", pa.large_binary(), nullable=False))
    columns.append(("images", images))
    metadata: dict[str | bytes, str | bytes] = {
        "omniload.schema_version": str(SCHEMA_VERSION),
        "omniload.rows_per_batch": str(ROWS_PER_BATCH),
    }
    fields = [pa.field(name, kind, nullable=False) for name, kind in columns]
    return pa.schema(fields, metadata=metadata)


def index_schema() -> Any:
    """Make the Arrow schema of the length index."""
    names = ("num_tokens", "num_tiles", "num_loss_tokens")
    return pa.schema([pa.field(name, pa.int32(), nullable=False) for name in names])


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedShard:
    """A shard that is complete on disk.

    Args:
        info: its line in the manifest.
        num_tokens: int32 (num_rows,).
        num_tiles: int32 (num_rows,).
        num_loss_tokens: int32 (num_rows,), first label of each row left out.
        sources: name of each source -> rows.
    """

    info: ShardInfo
    num_tokens: npt.NDArray[np.int32]
    num_tiles: npt.NDArray[np.int32]
    num_loss_tokens: npt.NDArray[np.int32]
    sources: dict[str, int]


class ShardWriter:
    """Writes records to shards of bounded size, each atomically.

    A shard is `<prefix>-000.arrow`, `<prefix>-001.arrow`, ...; it appears under its name only when
    it is complete and on disk. Use it as a context manager: an error leaves no partial file.

    Args:
        folder: where to write.
        prefix: start of the file names.
        max_bytes: close a shard when its images and tokens reach this size.
        with_messages: store the conversations.
        durable: wait until each shard is on disk, and take its checksum; False for files that are
            read back at once.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        prefix: str,
        max_bytes: int,
        with_messages: bool = True,
        durable: bool = True,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(f"max_bytes of a shard must be at least 1, got {max_bytes}.")
        self._folder = Path(folder)
        self._prefix = prefix
        self._max_bytes = max_bytes
        self._with_messages = with_messages
        self._durable = durable
        self._schema = shard_schema(with_messages=with_messages)
        self._finished: list[FinishedShard] = []
        self._rows: list[Record] = []
        self._bytes = 0
        self._open: _OpenShard | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        elif self._open is not None:
            self._open.discard()

    @property
    def finished(self) -> tuple[FinishedShard, ...]:
        """The shards that are complete so far; after `close` all of them."""
        return tuple(self._finished)

    def add(self, record: Record) -> None:
        """Add one row; `record.row` and `record.shard` are not stored."""
        self._rows.append(record)
        self._bytes += _num_bytes(record, with_messages=self._with_messages)
        if self._bytes >= self._max_bytes:
            self.close()
        elif len(self._rows) == ROWS_PER_BATCH:
            self._flush()

    def close(self) -> None:
        """Complete the open shard, if there is one."""
        self._flush()
        if self._open is not None:
            self._finished.append(self._open.finish(durable=self._durable))
        self._open = None
        self._bytes = 0

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._open is None:
            name = f"{self._prefix}-{len(self._finished):03d}.arrow"
            self._open = _OpenShard(self._folder / name, self._schema)
        self._open.write(self._rows, with_messages=self._with_messages)
        self._rows = []


def seal(partial: Path, path: Path, *, num_rows: int, durable: bool = True) -> ShardInfo:
    """Make a written file durable and give it its name.

    Args:
        partial: its present path.
        path: its name to be.
        num_rows: for the returned line.
        durable: wait until it is on disk; False also leaves its checksum out.

    Returns:
        Its line in the manifest.
    """
    digest = xxhash.xxh3_128()
    with partial.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if durable:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            os.fsync(file.fileno())
    partial.replace(path)
    if durable:
        sync_folder(path.parent)
    return ShardInfo(
        name=path.name,
        num_rows=num_rows,
        num_bytes=num_bytes,
        xxh3_128=digest.hexdigest() if durable else "",
    )


class _OpenShard:
    def __init__(self, path: Path, schema: Any) -> None:
        self._path = path
        self._partial = partial_name(path)
        self._schema = schema
        self._file = pa.OSFile(os.fspath(self._partial), "wb")
        self._writer = pa.ipc.new_file(self._file, schema)
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._sources: dict[str, int] = {}

    def write(self, rows: Sequence[Record], *, with_messages: bool) -> None:
        lengths = _lengths(rows)
        self._lengths.append(lengths)
        for record in rows:
            self._sources[record.source] = self._sources.get(record.source, 0) + 1
        columns = _columns(rows, lengths, self._schema, with_messages=with_messages)
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def finish(self, *, durable: bool) -> FinishedShard:
        self._writer.close()
        self._file.close()
        tokens, tiles, loss = np.concatenate(self._lengths, axis=1)
        info = seal(self._partial, self._path, num_rows=len(tokens), durable=durable)
        return FinishedShard(
            info=info,
            num_tokens=tokens,
            num_tiles=tiles,
            num_loss_tokens=loss,
            sources=dict(sorted(self._sources.items())),
        )

    def discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def _num_bytes(record: Record, *, with_messages: bool) -> int:
    size = sum(len(image) for image in record.images) + 8 * len(record.input_ids)
    if with_messages and record.messages is not None:
        size += sum(len(message.content) for message in record.messages)
    return size


def _lengths(rows: Sequence[Record]) -> npt.NDArray[np.int32]:
    values = [
        (
            len(record.input_ids),
            int(record.image_num_tiles.sum()),
            int(np.count_nonzero(record.labels[1:] != IGNORE_INDEX)),
        )
        for record in rows
    ]
    return np.array(values, dtype=np.int32).T


def _columns(
    rows: Sequence[Record], lengths: npt.NDArray[np.int32], schema: Any, *, with_messages: bool
) -> list[Any]:
    columns = [
        pa.array([record.key for record in rows], pa.string()),
        pa.array([record.source for record in rows], pa.string()),
        *(pa.array(column, pa.int32()) for column in lengths),
    ]
    for name in ("image_sizes", "image_num_tiles", "image_spans", "input_ids", "labels"):
        arrays = [np.asarray(getattr(record, name), np.int32).reshape(-1) for record in rows]
        values = pa.array(np.concatenate(arrays), pa.int32())
        columns.append(_list_array(values, [len(a) for a in arrays], schema.field(name).type))
    if with_messages:
        turns = [
            [
                {"role": message.role, "content": message.content, "weight": message.weight}
                for message in record.messages or ()
            ]
            for record in rows
        ]
        columns.append(pa.array(turns, schema.field("messages").type))
    images = pa.array([image for record in rows for image in record.images], pa.large_binary())
    counts = [len(record.images) for record in rows]
    columns.append(_list_array(images, counts, schema.field("images").type))
    return columns


def _list_array(values: Any, counts: Sequence[int], kind: Any) -> Any:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    starts: Any = pa.array(offsets)
    return pa.ListArray.from_arrays(starts, values, type=kind)
