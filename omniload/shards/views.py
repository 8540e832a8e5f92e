"""One mapped shard: its rows are cut out of the memory map, every offset checked before use."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omniload.errors import ShardError
from omniload.shards.arrow import shard_schema
from omniload.shards.layout import OUTSIDE, BatchLayout, LayoutReader, batch_blocks
from omniload.shards.manifest import ShardInfo
from omniload.types import Message, Record

__all__ = ["OpenedShard", "damaged", "map_file", "open_arrow"]

Int32Array = npt.NDArray[np.int32]

#: where a batch lies takes 4 kB, and is read again in 6 us
_MAX_BATCHES = 16

# number of each column's first buffer; every column starts with a bitmap of what is null
_KEY, _SOURCE = 0, 3
_IMAGE_SIZES, _IMAGE_NUM_TILES, _IMAGE_SPANS, _INPUT_IDS, _LABELS = 12, 16, 20, 24, 28
_MESSAGES = 32
_NUM_MESSAGE_BUFFERS = 11
_NUM_IMAGE_BUFFERS = 5

#: made once: to make it takes longer than to copy the numbers of a row
_INT32 = np.dtype(np.int32)

_pair = struct.Struct("<ii").unpack_from
_long_pair = struct.Struct("<qq").unpack_from


def damaged(path: Path | str, what: str) -> ShardError:
    """Make the error for a file, by path or URL, that is not what it should be."""
    return ShardError(
        f"{path} is damaged: {what}. Copy it again from where it was made (its xxh3_128 is in the "
        "manifest), or preprocess again."
    )


def map_file(path: Path, info: ShardInfo) -> mmap.mmap:
    """Map a file of the set into memory.

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
    return mapped


def open_arrow(path: Path | str, data: mmap.mmap) -> Any:
    """Open mapped bytes as an Arrow file.

    Raises:
        ShardError: its footer or schema is damaged.
    """
    try:
        return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(data)))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(path, f"its Arrow footer can't be read ({error})") from None


class OpenedShard:
    """One mapped shard.

    Args:
        path: the file, or its URL.
        info: its line in the manifest.
        data: its bytes.
        copies: give arrays of their own, so that no record keeps the map; False: views of it.

    Raises:
        ShardError: it is damaged.
    """

    def __init__(
        self, path: Path | str, info: ShardInfo, data: mmap.mmap, *, copies: bool = False
    ) -> None:
        self._path = path
        self._info = info
        schema = open_arrow(path, data).schema
        # compared as a whole: names in a damaged one need not be text
        self._has_messages = schema == shard_schema(with_messages=True)
        if not self._has_messages and schema != shard_schema(with_messages=False):
            raise damaged(path, "its columns are not those of a shard")
        try:
            self._rows_per_batch = int((schema.metadata or {})[b"omniload.rows_per_batch"])
        except (KeyError, ValueError):
            raise damaged(path, "omniload.rows_per_batch is not in its schema") from None
        try:
            self._blocks = batch_blocks(data)
        except OUTSIDE as error:
            raise damaged(path, f"{error}") from None
        batches = -(-info.num_rows // max(self._rows_per_batch, 1))
        if self._rows_per_batch < 1 or batches != len(self._blocks):
            raise damaged(path, f"it must have {batches} batches, got {len(self._blocks)}")
        self._images = _MESSAGES + (_NUM_MESSAGE_BUFFERS if self._has_messages else 0)
        # of this shard alone, and without a reference to it, so that its map goes when it goes
        self._batch = lru_cache(_MAX_BATCHES)(
            _Batches(
                data,
                self._blocks,
                rows_per_batch=self._rows_per_batch,
                num_rows=info.num_rows,
                num_buffers=self._images + _NUM_IMAGE_BUFFERS,
                copies=copies,
            )
        )

    def key(self, local: int) -> str:
        """Cut the key of a row out.

        Raises:
            ShardError: what is around it is damaged.
        """
        number, place = divmod(local, self._rows_per_batch)
        try:
            return self._batch(number).text(_KEY, place)
        except OUTSIDE as error:
            raise damaged(self._path, f"batch {number}: {error}") from None

    def record(self, local: int, *, row: int, tokens_only: bool = False) -> Record:
        """Cut one row out; image files are copied.

        Args:
            local: its number in the shard.
            row: its number in the set.
            tokens_only: leave image files and messages out.

        Raises:
            ShardError: what is around it is damaged.
        """
        number, place = divmod(local, self._rows_per_batch)
        try:
            batch = self._batch(number)
        except OUTSIDE as error:
            raise damaged(self._path, f"batch {number}: {error}") from None
        try:
            return Record(
                row=row,
                key=batch.text(_KEY, place),
                source=batch.text(_SOURCE, place),
                shard=self._info.name,
                images=() if tokens_only else batch.images(self._images, place),
                image_sizes=batch.ints(_IMAGE_SIZES, place).reshape(-1, 2),
                image_num_tiles=batch.ints(_IMAGE_NUM_TILES, place),
                image_spans=batch.ints(_IMAGE_SPANS, place).reshape(-1, 2),
                input_ids=batch.ints(_INPUT_IDS, place),
                labels=batch.ints(_LABELS, place),
                messages=(
                    batch.messages(place) if self._has_messages and not tokens_only else None
                ),
            )
        except OUTSIDE as error:
            raise damaged(self._path, f"row {row}: {error}") from None


class _Batches:
    """Reads where a batch lies, by its number."""

    def __init__(
        self,
        data: mmap.mmap,
        blocks: list[tuple[int, int, int]],
        *,
        rows_per_batch: int,
        num_rows: int,
        num_buffers: int,
        copies: bool,
    ) -> None:
        self._data = data
        self._ints = np.frombuffer(data, np.int32, len(data) // 4)
        self._blocks = blocks
        self._rows_per_batch = rows_per_batch
        self._num_rows = num_rows
        self._layouts = LayoutReader(data, num_buffers)
        self._copies = copies

    def __call__(self, number: int) -> _Rows:
        layout = self._layouts.read(self._blocks[number])
        expected = min(self._rows_per_batch, self._num_rows - number * self._rows_per_batch)
        if layout.num_rows != expected:
            raise ValueError(f"it must have {expected} rows, got {layout.num_rows}")
        return _Rows(self._data, self._ints, layout, copies=self._copies)


class _Rows:
    """The columns of a record batch, cut at a row of it.

    A column of lists or texts has a buffer that says what is null (nothing is), then int32 offsets,
    then what lies inside; where each is comes from `layout`. All accesses go through the map, which
    checks them too: no damage leads outside the file.
    """

    __slots__ = ("_base", "_buffers", "_copies", "_data", "_end", "_ints")

    def __init__(
        self, data: mmap.mmap, ints: Int32Array, layout: BatchLayout, *, copies: bool
    ) -> None:
        self._copies = copies
        self._data = data
        self._ints = ints
        _, self._base, self._end, self._buffers = layout

    def text(self, column: int, place: int) -> str:
        first, last = self._bounds(column + 1, place, column + 2, 1)
        return self._data[first:last].decode()

    def ints(self, column: int, place: int) -> Int32Array:
        first, last = self._bounds(column + 1, place, column + 3, 4)
        if first & 3:
            raise ValueError("integers must be aligned")
        if self._copies:
            return np.frombuffer(self._data[first:last], _INT32)
        return self._ints[first >> 2 : last >> 2]

    def images(self, column: int, place: int) -> tuple[bytes, ...]:
        # the items are 64-bit offsets, one more than images, into the bytes of the files
        first, last = self._bounds(column + 1, place, column + 3, 8)
        if first == last:
            return ()
        offsets, size = self._buffer(column + 3)
        if last + 8 > offsets + size:
            raise ValueError("an offset lies outside its buffer")
        base, size = self._buffer(column + 4)
        found = []
        for at in range(first, last, 8):
            start, stop = _long_pair(self._data, at)
            if not 0 <= start <= stop <= size:
                raise ValueError(f"offsets {start} to {stop} point outside their buffer")
            if base + stop > self._end:
                raise ValueError("a buffer lies outside")
            found.append(self._data[base + start : base + stop])
        return tuple(found)

    def messages(self, place: int) -> tuple[Message, ...]:
        # buffers: list (2), struct (1), role (3), content (3), weight: bits of what is known (1),
        # 8-bit values (1)
        weight = _MESSAGES + 10
        first, last = self._bounds(_MESSAGES + 1, place, weight, 1)
        values = self._data[first:last]
        first -= self._buffer(weight)[0]
        return tuple(
            Message(role=role, content=content, weight=value)
            for role, content, value in zip(
                self._texts(_MESSAGES + 3, first, len(values)),
                self._texts(_MESSAGES + 6, first, len(values)),
                self._weights(first, values),
                strict=True,
            )
        )

    def _weights(self, first: int, values: bytes) -> Sequence[int | None]:
        """Say None for each of some values that is not known."""
        bits, size = self._buffer(_MESSAGES + 9)
        if not size:  # all are
            return values
        if first + len(values) > 8 * size:
            raise ValueError("a bit lies outside its buffer")
        data = self._data
        return [
            value if data[bits + (at >> 3)] >> (at & 7) & 1 else None
            for at, value in enumerate(values, first)
        ]

    def _texts(self, column: int, first: int, count: int) -> list[str]:
        """Cut texts that follow each other."""
        data = self._data
        offsets, size = self._buffer(column + 1)
        if 4 * (first + count + 1) > size:
            if not count:  # a column without any text has no offsets
                return []
            raise ValueError("an offset lies outside its buffer")
        ends = struct.unpack_from(f"<{count + 1}i", data, offsets + 4 * first)
        base, size = self._buffer(column + 2)
        found, start = [], ends[0]
        for end in ends[1:]:
            if not 0 <= start <= end <= size or base + end > self._end:
                raise ValueError(f"offsets {start} to {end} point outside their buffer")
            found.append(data[base + start : base + end].decode())
            start = end
        return found

    def _buffer(self, number: int) -> tuple[int, int]:
        """Where a buffer starts in the file, and its size."""
        return self._base + self._buffers[2 * number], self._buffers[2 * number + 1]

    def _bounds(self, number: int, place: int, child: int, width: int) -> tuple[int, int]:
        """Find first and last byte of a row in a child buffer, after checking both offsets."""
        base, buffers = self._base, self._buffers
        if 4 * place + 8 > buffers[2 * number + 1]:
            raise ValueError("an offset lies outside its buffer")
        first, last = _pair(self._data, base + buffers[2 * number] + 4 * place)
        if not 0 <= first <= last or width * last > buffers[2 * child + 1]:
            raise ValueError(f"offsets {first} to {last} point outside their buffer")
        start = base + buffers[2 * child]
        end = start + width * last
        if end > self._end:
            raise ValueError("a buffer lies outside")
        return start + width * first, end
