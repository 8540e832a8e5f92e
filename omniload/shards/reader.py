"""Reading shards: one row at a time, in any order, out of memory maps."""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from omniload.errors import ConfigError, ShardError
from omniload.index import LengthIndex
from omniload.shards.arrow import index_schema, shard_schema
from omniload.shards.manifest import Manifest, ShardInfo, read_manifest
from omniload.types import Message, Record

__all__ = ["ShardSet", "open_shards"]

Int32Array = npt.NDArray[np.int32]

# a map costs a file descriptor, a parsed batch about 10 kB; both are made again in microseconds
_MAX_OPEN_SHARDS = 256
_MAX_PARSED_BATCHES = 256

_INT_LISTS = ("image_sizes", "image_num_tiles", "image_spans", "input_ids", "labels")


class ShardSet:
    """A folder of shards, open for reading; made by `open_shards`.

    It can be pickled and forked: what travels is the path, and files are mapped on first use in
    each process. Threads may share it.

    Attributes:
        path: the folder.
        manifest: what it holds.
        index: lengths of all rows, a memory map.
    """

    def __init__(self, path: Path, manifest: Manifest, index: LengthIndex) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        self._starts = [0]
        for shard in manifest.shards:
            self._starts.append(self._starts[-1] + shard.num_rows)
        # one cache a set, not one for all sets of the process; neither refers to the set, so that
        # its maps go when it goes, and not at some later garbage collection
        self._open = lru_cache(_MAX_OPEN_SHARDS)(partial(_open_shard, path, manifest.shards))
        self._parsed = lru_cache(_MAX_PARSED_BATCHES)(partial(_parse_batch, self._open))

    def __len__(self) -> int:
        return self.manifest.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.path, self.manifest.to_json()))

    def locate(self, row: int) -> tuple[int, int]:
        """Find a row: number of its shard in the manifest, and row inside that shard.

        Raises:
            ConfigError: no such row.
        """
        if not 0 <= row < len(self):
            raise ConfigError(
                f"row must be between 0 and {len(self) - 1}, got {row} ({self.path})."
            )
        shard = bisect.bisect_right(self._starts, row) - 1
        return shard, int(row) - self._starts[shard]

    def read(self, row: int) -> Record:
        """Read one row.

        Token and image arrays are read-only views of the memory map; image files are copied.

        Args:
            row: row number, 0 to `len(self) - 1`.

        Returns:
            The record.

        Raises:
            ConfigError: no such row.
            ShardError: the shard is missing, damaged, or not what manifest and index say.

        Cost: about 60 us when the row's batch was not read lately, else 10 us; plus page faults.
        """
        shard, local = self.locate(row)
        opened = self._open(shard)
        batch = self._parsed(shard, local // opened.rows_per_batch)
        name = self.manifest.shards[shard].name
        try:
            record = batch.record(local % opened.rows_per_batch, row_number=int(row), shard=name)
        except UnicodeDecodeError as error:
            raise _damaged(self.path / name, f"text of row {row} is not UTF-8: {error}") from None
        planned = (int(self.index.num_tokens[row]), int(self.index.num_tiles[row]))
        found = (len(record.input_ids), int(record.image_num_tiles.sum()))
        if planned != found or len(record.labels) != found[0]:
            raise _damaged(
                self.path / name,
                f"row {row} must have (tokens, tiles) {planned} as in the index, got {found}",
            )
        return record


def open_shards(path: str | Path) -> ShardSet:
    """Open a folder of shards.

    Reads the manifest, checks the size of each file and the checksum of the index; the shards
    themselves are checked batch by batch when they are read.

    Args:
        path: the folder that `omniload preprocess` wrote.

    Returns:
        The set.

    Raises:
        ShardError: no manifest, another schema version, missing, cut or damaged files.

    Cost: 10 ms a million rows when the index is in the page cache.
    """
    folder = Path(path).absolute()
    manifest = read_manifest(folder)
    return ShardSet(folder, manifest, _read_index(folder, manifest.index))


def _open_shard(folder: Path, shards: Sequence[ShardInfo], number: int) -> _OpenedShard:
    return _OpenedShard(folder, shards[number])


def _parse_batch(opened: Callable[[int], _OpenedShard], shard: int, batch: int) -> _Batch:
    return opened(shard).batch(batch)


def _reopen(path: Path, manifest: str) -> ShardSet:
    opened = open_shards(path)
    if opened.manifest.to_json() != manifest:
        raise ShardError(
            f"{path} was written again while it was in use: its manifest is not the one that the "
            "main process read. Start the run again."
        )
    return opened


def _damaged(path: Path, what: str) -> ShardError:
    return ShardError(
        f"{path} is damaged: {what}. Copy it again from where it was made (its xxh3_128 is in the "
        "manifest), or preprocess again."
    )


def _map(path: Path, info: ShardInfo) -> Any:
    try:
        with path.open("rb") as file:
            # not pyarrow's own map: that one advises the kernel to load whole batches
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path} can't be read: {error}. Copy the shards again.") from None
    if len(mapped) != info.num_bytes:
        raise _damaged(path, f"it must have {info.num_bytes} bytes, got {len(mapped)}")
    return pa.py_buffer(mapped)


def _open_file(path: Path, buffer: Any) -> Any:
    try:
        return pa.ipc.open_file(pa.BufferReader(buffer))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, f"its Arrow footer can't be read ({error})") from None


def _read_index(folder: Path, info: ShardInfo) -> LengthIndex:
    path = folder / info.name
    buffer = _map(path, info)
    # at 10 GB/s this is cheaper than to find out later that a plan was made from noise
    digest = xxhash.xxh3_128_hexdigest(memoryview(buffer))
    if digest != info.xxh3_128:
        raise _damaged(path, f"its xxh3_128 must be {info.xxh3_128}, got {digest}")
    file = _open_file(path, buffer)
    if file.schema != index_schema() or file.num_record_batches != 1:
        raise _damaged(path, "its columns are not those of a length index")
    batch = file.get_batch(0)
    columns = {
        name: np.frombuffer(batch.column(name).buffers()[1], np.int32, count=batch.num_rows)
        for name in ("num_tokens", "num_tiles", "num_loss_tokens")
    }
    if batch.num_rows != info.num_rows:
        raise _damaged(path, f"it must have {info.num_rows} rows, got {batch.num_rows}")
    try:
        return LengthIndex.from_arrays(**columns)
    except ConfigError as error:
        raise _damaged(path, str(error)) from None


class _OpenedShard:
    """One mapped file; parses its batches."""

    def __init__(self, folder: Path, info: ShardInfo) -> None:
        self._path = folder / info.name
        self._info = info
        self._file = _open_file(self._path, _map(self._path, info))
        schema = self._file.schema
        self._has_messages = "messages" in schema.names
        if schema != shard_schema(with_messages=self._has_messages):
            raise _damaged(self._path, "its columns are not those of a shard")
        try:
            self.rows_per_batch = int((schema.metadata or {})[b"omniload.rows_per_batch"])
        except (KeyError, ValueError):
            raise _damaged(self._path, "omniload.rows_per_batch is not in its schema") from None
        batches = -(-info.num_rows // max(self.rows_per_batch, 1))
        if self.rows_per_batch < 1 or batches != self._file.num_record_batches:
            raise _damaged(
                self._path, f"it must have {batches} batches, got {self._file.num_record_batches}"
            )

    def batch(self, number: int) -> _Batch:
        try:
            batch = self._file.get_batch(number)
            # offsets that point outside would be read blindly: this looks at all of them
            batch.validate(full=True)
            expected = min(self.rows_per_batch, self._info.num_rows - number * self.rows_per_batch)
            if batch.num_rows != expected:
                raise ValueError(f"it must have {expected} rows, got {batch.num_rows}")
            return _Batch(batch, has_messages=self._has_messages)
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            raise _damaged(self._path, f"batch {number}: {error}") from None


class _Texts:
    """A validated string column, cut without pyarrow's per-value objects."""

    def __init__(self, column: Any) -> None:
        _, offsets, data = column.buffers()
        self._offsets = np.frombuffer(offsets, np.int32, count=len(column) + 1)
        self._data = memoryview(b"" if data is None else data)

    def __getitem__(self, row: int) -> str:
        return str(self._data[self._offsets[row] : self._offsets[row + 1]], "utf-8")


class _Batch:
    """NumPy views of one record batch."""

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


_EMPTY = np.zeros(0, np.int32)
_NO_WEIGHT = -1


def _list_offsets(column: Any) -> Int32Array:
    return np.frombuffer(column.buffers()[1], np.int32, count=len(column) + 1)
