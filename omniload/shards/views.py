"""One mapped shard: its batches, checked once, then read through NumPy views."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Literal

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
_NO_ENDS = memoryview(bytes(8)).cast("q")


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
        except (pa.ArrowException, OSError, ValueError, TypeError, IndexError) as error:
            raise damaged(self._path, f"batch {number}: {error}") from None


class _Texts:
    """A validated string column, cut without pyarrow's per-value objects."""

    def __init__(self, offsets: Any, data: Any, rows: int) -> None:
        self._offsets = _offsets(offsets, rows + 1)
        self._data = _bytes(data)

    def __getitem__(self, row: int) -> str:
        return str(self._data[self._offsets[row] : self._offsets[row + 1]], "utf-8")


class RowBatch:
    """NumPy views of one record batch that has been validated."""

    def __init__(self, batch: Any, *, has_messages: bool) -> None:
        rows = batch.num_rows
        # the buffers of a column and of all in it, in one call; offsets as memoryviews, which are
        # made and indexed several times faster than arrays
        buffers = {name: batch.column(name).buffers() for name in batch.schema.names}
        _, offsets, data = buffers["key"]
        self._keys = _Texts(offsets, data, rows)
        _, offsets, data = buffers["source"]
        self._sources = _Texts(offsets, data, rows)
        self._lists: dict[str, tuple[memoryview[int], Int32Array]] = {}
        for name in _INT_LISTS:
            _, offsets, _, data = buffers[name]
            starts = _offsets(offsets, rows + 1)
            self._lists[name] = (starts, _ints(data, starts[rows]))
        _, offsets, _, ends, data = buffers["images"]
        self._image_offsets = _offsets(offsets, rows + 1)
        count = self._image_offsets[rows]
        self._image_ends = _offsets(ends, count + 1, "q") if count else _NO_ENDS
        self._image_data = _bytes(data)
        self._messages = _Messages(buffers["messages"], rows) if has_messages else None

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
            image_sizes=self._row_ints("image_sizes", row).reshape(-1, 2),
            image_num_tiles=self._row_ints("image_num_tiles", row),
            image_spans=self._row_ints("image_spans", row).reshape(-1, 2),
            input_ids=self._row_ints("input_ids", row),
            labels=self._row_ints("labels", row),
            messages=self._row_messages(row),
        )

    def _row_ints(self, name: str, row: int) -> Int32Array:
        offsets, values = self._lists[name]
        return values[offsets[row] : offsets[row + 1]]

    def _row_images(self, row: int) -> tuple[bytes, ...]:
        first, last = self._image_offsets[row], self._image_offsets[row + 1]
        ends = self._image_ends
        return tuple(bytes(self._image_data[ends[i] : ends[i + 1]]) for i in range(first, last))

    def _row_messages(self, row: int) -> tuple[Message, ...] | None:
        return None if self._messages is None else self._messages.of_row(row)


class _Messages:
    """The conversations of a batch."""

    def __init__(self, buffers: list[Any], rows: int) -> None:
        _, offsets, _, _, role, role_data, _, content, content_data, has_weight, weight = buffers
        self._offsets = _offsets(offsets, rows + 1)
        count = self._offsets[rows]
        self._roles = _Texts(role, role_data, count) if count else None
        self._contents = _Texts(content, content_data, count) if count else None
        self._weights = _bytes(weight)
        self._has_weight = None if has_weight is None else memoryview(has_weight)

    def of_row(self, row: int) -> tuple[Message, ...]:
        if self._roles is None or self._contents is None:
            return ()
        return tuple(
            Message(role=self._roles[i], content=self._contents[i], weight=self._weight(i))
            for i in range(self._offsets[row], self._offsets[row + 1])
        )

    def _weight(self, i: int) -> int | None:
        known = self._has_weight is None or self._has_weight[i >> 3] >> (i & 7) & 1
        return self._weights[i] if known else None


def _offsets(buffer: Any, count: int, kind: Literal["i", "q"] = "i") -> memoryview[int]:
    view = memoryview(buffer).cast(kind)
    if len(view) < count:
        raise ValueError(f"{count} offsets expected, got {len(view)}")
    return view


def _ints(buffer: Any, count: int) -> Int32Array:
    return np.frombuffer(buffer, np.int32, count=count) if count else _EMPTY


def _bytes(buffer: Any) -> memoryview:
    return memoryview(b"" if buffer is None else buffer)
