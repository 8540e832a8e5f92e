"""Where the columns of a record batch lie in its file: the metadata of Arrow, read by hand.

pyarrow needs 60 us to make the objects of a batch, which is too long for one row of it; the numbers
alone take a tenth. Everything is read through Python's own buffers, which check each access, and
nothing is allocated for a size that the file claims: damage can lead to an error, never outside.

Format: https://arrow.apache.org/docs/format/Columnar.html (IPC file format) and its flatbuffers.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

__all__ = ["OUTSIDE", "BatchLayout", "LayoutReader", "batch_blocks", "refuse_compressed"]

#: what Python's own buffers raise where damage leads outside of them
OUTSIDE = (ValueError, IndexError, struct.error)

_MAGIC = b"ARROW1"
_RECORD_BATCH = 3  # of the union MessageHeader

_int32 = struct.Struct("<i").unpack_from
_int64 = struct.Struct("<q").unpack_from
_uint16 = struct.Struct("<H").unpack_from
_uint32 = struct.Struct("<I").unpack_from
_block = struct.Struct("<qiiq").unpack_from


class BatchLayout(NamedTuple):
    """One record batch.

    Args:
        num_rows: its rows.
        base: byte in the file where its body starts.
        end: byte in the file where it ends.
        buffers: (2 * number of buffers,): byte in the body where each buffer starts, and its size,
            in the order of the schema; each at most the size of the body, none below 0.
    """

    num_rows: int
    base: int
    end: int
    buffers: tuple[int, ...]


def batch_blocks(data: mmap.mmap) -> list[tuple[int, int, int]]:
    """Read where the record batches of a file lie: (start, metadata bytes, body bytes).

    Raises:
        OUTSIDE: the footer is damaged.
    """
    size = len(data)
    if size < 20 or data[-6:] != _MAGIC or data[:6] != _MAGIC:
        raise ValueError("it doesn't start and end as an Arrow file")
    (footer_size,) = _int32(data, size - 10)
    footer = size - 10 - footer_size
    if footer_size < 4 or footer < 8:
        raise ValueError(f"its footer can't have {footer_size} bytes")
    table = _follow(data, footer)
    batches = _fields(data, table, 4)[3]
    if not batches:
        return []
    vector = _follow(data, batches)
    (count,) = _uint32(data, vector)
    if vector + 4 + 24 * count > size:
        raise ValueError(f"its footer can't name {count} batches")
    blocks = []
    for at in range(vector + 4, vector + 4 + 24 * count, 24):
        start, metadata, _, body = _block(data, at)
        if min(start, metadata, body) < 0 or start + metadata + body > footer:
            raise ValueError("its footer names a batch outside the file")
        blocks.append((start, metadata, body))
    return blocks


def refuse_compressed(data: mmap.mmap) -> None:
    """Refuse a file with a batch that is compressed: unpacked it could take any amount of memory.

    Raises:
        OUTSIDE: there is one, or the metadata is damaged.
    """
    for start, _, _ in batch_blocks(data):
        header = _fields(data, _follow(data, start + 8), 3)[2]
        if not header or _fields(data, _follow(data, header), 4)[3]:
            raise ValueError("its batches must not be compressed")


class LayoutReader:
    """Reads where the buffers of the record batches of a file lie.

    The metadata of all batches of a file is written alike, so its places are looked up in the first
    one and expected in the others.

    Args:
        data: the file.
        num_buffers: buffers that the schema has.
    """

    def __init__(self, data: mmap.mmap, num_buffers: int) -> None:
        self._data = data
        self._num_buffers = num_buffers
        self._unpack = struct.Struct(f"<{2 * num_buffers}Q").unpack_from
        self._known: tuple[int, int, int, int, int] | None = None

    def read(self, block: tuple[int, int, int]) -> BatchLayout:
        """Read the layout of a batch.

        Args:
            block: of `batch_blocks`.

        Raises:
            OUTSIDE: the metadata is damaged, or of another schema.
        """
        start, metadata, body_size = block
        known = self._known
        if known is None or known[0] != metadata or not self._fits(known, block):
            known = self._known = self._find(block)
        _, _, _, rows, vector = known
        buffers = self._unpack(self._data, start + vector + 4)
        if max(buffers) > body_size:
            raise ValueError("one of its buffers lies outside")
        base = start + metadata
        return BatchLayout(_int64(self._data, start + rows)[0], base, base + body_size, buffers)

    def _fits(self, known: tuple[int, int, int, int, int], block: tuple[int, int, int]) -> bool:
        _, kind, size, _, vector = known
        data, start = self._data, block[0]
        return bool(
            data[start + kind] == _RECORD_BATCH
            and _int64(data, start + size)[0] == block[2]
            and _uint32(data, start + vector)[0] == self._num_buffers
        )

    def _find(self, block: tuple[int, int, int]) -> tuple[int, int, int, int, int]:
        """Find the places of the metadata of a batch, from its start.

        Returns:
            Its size; and where the kind of the message, the size of its body, its number of rows
            and its buffers lie.
        """
        data, (start, metadata, body_size) = self._data, block
        message = _follow(data, start + 8)  # behind the mark of a message and its size
        _, kind, header, size = _fields(data, message, 4)
        if not (kind and header and size) or data[kind] != _RECORD_BATCH:
            raise ValueError("its message is not a record batch")
        if _int64(data, size)[0] != body_size:
            raise ValueError("footer and message disagree about the size of its body")
        rows, _, vector, compression = _fields(data, _follow(data, header), 4)
        if not rows or not vector or compression:
            raise ValueError("it must have rows and buffers that are not compressed")
        vector = _follow(data, vector)
        (count,) = _uint32(data, vector)
        if count != self._num_buffers:
            raise ValueError(f"it must have {self._num_buffers} buffers, got {count}")
        return metadata, kind - start, size - start, rows - start, vector - start


def _follow(data: mmap.mmap, at: int) -> int:
    """Follow an offset of flatbuffers; it is unsigned, so this goes forwards only."""
    return at + int(_uint32(data, at)[0])


def _fields(data: mmap.mmap, table: int, count: int) -> list[int]:
    """Find the first fields of a table: their places; 0: it is not there."""
    vtable = table - _int32(data, table)[0]
    if vtable < 0:  # unpack_from would count it from the end
        raise ValueError("a table lies outside the file")
    known = min(_uint16(data, vtable)[0] // 2 - 2, count)
    offsets = struct.unpack_from(f"<{max(known, 0)}H", data, vtable + 4)
    places = [table + offset if offset else 0 for offset in offsets]
    return places + [0] * (count - len(places))
