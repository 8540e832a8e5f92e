"""One mapped shard: its batches, checked once, then read through NumPy views."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omniload.errors import ShardError
from omniload.shards.arrow import shard_schema
from omniload.shards.manifest import ShardInfo
from omniload.types import Message, Record

__all__ = ["OpenedShard", "RowBatch", "damaged", "map_file", "open_arrow"]

Int32Array = npt.NDArray[np.int32]

_INT_LISTS = ("image_sizes", "image_num_tiles", "image_spans", "input_ids", "labels")
_EMPTY = np.zeros(0, np.int32)
_NO_WEIGHT = -1


def damaged(path: Path, what: str) -> ShardError:
    """Make the error for a file that is not what it should be."""
    return ShardError(
        f"{path} is damaged: {what}. Copy it again from where it was made (its xxh3_128 is in the "
        "manifest), or preprocess again."
    )


def map_file(path: Path, info: ShardInfo) -> Any:
    """Map a file of the set into memory, as a pyarrow buffer.

    Raises:
        ShardError: it can't be read, or is not of the size that the manifest says.
    """
    try:
        with path.open("rb") as file:
            # not pyarrow's own map: that one advises the kernel to load whole batches
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path} can't be read: {error}. Copy the shards again.") from None
    if len(mapped) != info.num_bytes:
        raise damaged(path, f"it must have {info.num_bytes} bytes, got {len(mapped)}")
    return pa.py_buffer(mapped)


def open_arrow(path: Path, buffer: Any) -> Any:
    """Open mapped bytes as an Arrow file.

    Raises:
        ShardError: its footer or schema is damaged.
    """
    try:
        return pa.ipc.open_file(pa.BufferReader(buffer))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(path, f"its Arrow footer can't be read ({error})") from None


class OpenedShard:
    """One mapped shard; parses its batches.

    Args:
        folder: where it lies.
        info: its line in the manifest.

    Raises:
        ShardError: it is missing or damaged.
    """

    def __init__(self, folder: Path, info: ShardInfo) -> None:
        self._path = folder / info.name
        self._info = info
        self._file = open_arrow(self._path, map_file(self._path, info))
        schema = self._file.schema
        self._has_messages = "messages" in schema.names
        if schema != shard_schema(with_messages=self._has_messages):
            raise damaged(self._path, "its columns are not those of a shard")
        try:
            self.rows_per_batch = int((schema.metadata or {})[b"omniload.rows_per_batch"])
        except (KeyError, ValueError):
            raise damaged(self._path, "omniload.rows_per_batch is not in its schema") from None
        batches = -(-info.num_rows // max(self.rows_per_batch, 1))
        if self.rows_per_batch < 1 or batches != self._file.num_record_batches:
            raise damaged(
                self._path, f"it must have {batches} batches, got {self._file.num_record_batches}"
            )

    def batch(self, number: int) -> RowBatch:
        """Parse a batch, and check every offset in it.

        Raises:
            ShardError: it is damaged.
        """
        try:
            batch = self._file.get_batch(number)
            # offsets that point outside would be read blindly: this looks at all of them
            batch.validate(full=True)
            expected = min(self.rows_per_batch, self._info.num_rows - number * self.rows_per_batch)
            if batch.num_rows != expected:
                raise ValueError(f"it must have {expected} rows, got {batch.num_rows}")
            return RowBatch(batch, has_messages=self._has_messages)
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            raise damaged(self._path, f"batch {number}: {error}") from None


class _Texts:
    """A validated string column, cut without pyarrow's per-value objects."""

    def __init__(self, column: Any) -> None:
        _, offsets, data = column.buffers()
        self._offsets = np.frombuffer(offsets, np.int32, count=len(column) + 1)
        self._data = memoryview(b"" if data is None else data)

    def __getitem__(self, row: int) -> str:
        return str(self._data[self._offsets[row] : self._offsets[row + 1]], "utf-8")


class RowBatch:
    """NumPy views of one record batch that has been validated."""

    def __init__(self, batch: Any, *, has_messages: bool) -> None:
        self._keys = _Texts(batch.column("key"))
        self._sources = _Texts(batch.column("source"))
        self._lists: dict[str, tuple[Int32Array, Int32Array]] = {}
        for name in _INT_LISTS:
            column = batch.column(name)
            values = column.values
            data = values.buffers()[1]
            flat = np.frombuffer(data, np.int32, count=len(values)) if len(values) else _EMPTY
            self._lists[name] = (_list_offsets(column), flat)
        self._images = batch.column("images")
        self._image_offsets = _list_offsets(self._images)
        _, offsets, data = self._images.values.buffers()
        count = len(self._images.values)
        self._image_ends = np.frombuffer(offsets, np.int64, count=count + 1)
        self._image_data = memoryview(b"" if data is None else data)
        self._messages: tuple[Int32Array, _Texts, _Texts, Int32Array] | None = None
        if has_messages:
            column = batch.column("messages")
            role, content, weight = (column.values.field(i) for i in range(3))
            weights = weight.fill_null(_NO_WEIGHT).to_numpy(zero_copy_only=False)
            self._messages = (_list_offsets(column), _Texts(role), _Texts(content), weights)

    def record(self, row: int, *, row_number: int, shard: str) -> Record:
        """Cut one row out.

        Args:
            row: its number in the batch.
            row_number: its number in the set.
            shard: name of the file.

        Raises:
            ValueError: text that is not UTF-8, or pairs that are not pairs.
        """
        return Record(
            row=row_number,
            key=self._keys[row],
            source=self._sources[row],
            shard=shard,
            images=self._row_images(row),
            image_sizes=self._ints("image_sizes", row).reshape(-1, 2),
            image_num_tiles=self._ints("image_num_tiles", row),
            image_spans=self._ints("image_spans", row).reshape(-1, 2),
            input_ids=self._ints("input_ids", row),
            labels=self._ints("labels", row),
            messages=self._row_messages(row),
        )

    def _ints(self, name: str, row: int) -> Int32Array:
        offsets, values = self._lists[name]
        return values[offsets[row] : offsets[row + 1]]

    def _row_images(self, row: int) -> tuple[bytes, ...]:
        first, last = self._image_offsets[row], self._image_offsets[row + 1]
        ends = self._image_ends
        return tuple(bytes(self._image_data[ends[i] : ends[i + 1]]) for i in range(first, last))

    def _row_messages(self, row: int) -> tuple[Message, ...] | None:
        if self._messages is None:
            return None
        offsets, roles, contents, weights = self._messages
        return tuple(
            Message(
                role=roles[i],
                content=contents[i],
                weight=None if weights[i] == _NO_WEIGHT else int(weights[i]),
            )
            for i in range(offsets[row], offsets[row + 1])
        )


def _list_offsets(column: Any) -> Int32Array:
    return np.frombuffer(column.buffers()[1], np.int32, count=len(column) + 1)
