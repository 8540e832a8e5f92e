"""Reading shards: one row at a time, in any order, out of memory maps, wherever they lie."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from omniload.cache import Cache, Storage, is_url
from omniload.errors import ConfigError, ShardError
from omniload.index import LengthIndex
from omniload.shards.index_file import read_index
from omniload.shards.manifest import Manifest, ShardInfo, read_manifest
from omniload.shards.remote import RemoteFiles, open_remote
from omniload.shards.views import OpenedShard, damaged, map_file
from omniload.types import Record

__all__ = ["ShardSet", "open_shards"]

# a map costs a file descriptor, and is made again in 0.3 ms
_MAX_OPEN_SHARDS = 256


class ShardSet:
    """A folder of shards, open for reading; made by `open_shards`. A `RowSource`.

    It can be pickled and forked: what travels is where it lies, and files are mapped on first use
    in each process. Threads may share it.

    Attributes:
        path: the folder; of shards at a URL the folder of their cache.
        manifest: what it holds.
        index: lengths of all rows, a memory map.
        remote: the files, where they come from a URL; else None.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        index: LengthIndex,
        *,
        remote: RemoteFiles | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        self.remote = remote
        self._starts = [0]
        for shard in manifest.shards:
            self._starts.append(self._starts[-1] + shard.num_rows)
        # one cache a set, not one for all sets of the process; it doesn't refer to the set, so that
        # its maps go when it goes, and not at some later garbage collection
        self._open: Callable[[int], OpenedShard] = (
            lru_cache(_MAX_OPEN_SHARDS)(partial(_open_shard, path, manifest.shards))
            if remote is None
            else remote.open
        )

    def __len__(self) -> int:
        return self.manifest.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        if self.remote is not None:
            return (_open_set, (self.remote,))
        return (_reopen, (self.path, self.manifest.to_json()))

    @property
    def settings(self) -> Mapping[str, Any]:
        """How the rows were made: encoder, tiling, limits; plain JSON."""
        return self.manifest.settings

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all bytes and settings; where the data lies is no matter."""
        return self.manifest.data_fingerprint

    @property
    def sources(self) -> Mapping[str, int]:
        """Name of each data set -> rows it has here."""
        return self.manifest.sources

    @property
    def location(self) -> str:
        """Path or URL, for messages."""
        return str(self.path) if self.remote is None else self.remote.location

    @cached_property
    def shard_names(self) -> tuple[str, ...]:
        """File names of the shards, in row order."""
        return tuple(info.name for info in self.manifest.shards)

    def at_epoch(self, epoch: int) -> ShardSet:
        """Give the rows of an epoch: all epochs have the same, so the set itself."""
        return self

    def prefetch(self, shards: Sequence[int]) -> None:
        """Hint that these shards are read next, in this order; returns at once.

        From a URL they are fetched ahead, and what no process needs soon has to go first. Local
        files need no hint.
        """
        if self.remote is not None:
            self.remote.prefetch(shards)

    def locate(self, row: int) -> tuple[int, int]:
        """Find a row: number of its shard in the manifest, and row inside that shard.

        Raises:
            ConfigError: no such row.
        """
        if not 0 <= row < len(self):
            raise ConfigError(
                f"row must be between 0 and {len(self) - 1}, got {row} ({self.location})."
            )
        shard = bisect.bisect_right(self._starts, row) - 1
        return shard, int(row) - self._starts[shard]

    def read(self, row: int) -> Record:
        """Read one row.

        Image files are copied. Arrays are read-only views of the memory map; from a URL copies.

        Args:
            row: row number, 0 to `len(self) - 1`.

        Returns:
            The record.

        Raises:
            ConfigError: no such row.
            ShardError: the shard is missing, damaged, or not what manifest and index say.

        Cost: about 20 us, in any order; plus page faults.
        """
        return self._read(row, tokens_only=False)

    def read_tokens(self, row: int) -> Record:
        """Read one row without its image files and messages, as `read` does otherwise.

        Cost: about 10 us; no page of an image is touched.
        """
        return self._read(row, tokens_only=True)

    def key_of(self, row: int) -> str | None:
        """Say the key of a row; None for a URL, whose shard might have to be fetched.

        Raises:
            ConfigError: no such row.
            ShardError: the shard is missing or damaged.
        """
        shard, local = self.locate(row)
        return None if self.remote is not None else self._open(shard).key(local)

    def _read(self, row: int, *, tokens_only: bool) -> Record:
        shard, local = self.locate(row)
        record = self._open(shard).record(local, row=int(row), tokens_only=tokens_only)
        num_images = len(record.image_num_tiles if tokens_only else record.images)
        fault = self._fault(record, num_images)
        if fault:
            raise damaged(f"{self.location}/{record.shard}", f"row {row} {fault}")
        return record

    def _fault(self, record: Record, images: int) -> str:
        """Say how a record differs from the index, or from itself."""
        planned = (int(self.index.num_tokens[record.row]), int(self.index.num_tiles[record.row]))
        # few numbers: NumPy's own sum takes six times as long
        found = (len(record.input_ids), sum(record.image_num_tiles.tolist()))
        if planned != found:
            return f"must have (tokens, tiles) {planned} as in the index, got {found}"
        if len(record.labels) != found[0]:
            return f"must have a label for each of {found[0]} tokens, got {len(record.labels)}"
        facts = (len(record.image_num_tiles), len(record.image_sizes), len(record.image_spans))
        if facts != (images, images, images):
            return f"must have tiles, size and span for each of {images} images, got {facts}"
        return ""


def open_shards(
    path: str | os.PathLike[str], *, cache: Cache | None = None, storage: Storage | None = None
) -> ShardSet:
    """Open a folder of shards.

    Reads the manifest, checks the size of each file and the checksum of the index. When a row is
    read, only the structure of the shard around it is checked: a byte that changed inside a text or
    an image is not noticed, since hashing all bytes would cost more than reading them.
    `verify_shards` does it. Files from a URL are verified when they come.

    Args:
        path: the folder that `omniload preprocess` wrote, or the URL of a copy: `s3://`, `http://`
            and `https://`; untested, through fsspec: `gs://`, `az://`, `hf://`, `file://`.
        cache: where copies of files from a URL lie; needed for those, refused for a local path.
        storage: how to fetch from a URL; None: `Storage()`.

    Returns:
        The set.

    Raises:
        ConfigError: a URL without a cache, a protocol that is not read, a cache that is too small.
        ShardError: no manifest, another schema version, missing, cut or damaged files.

    Cost: 10 ms a million rows when the index is in the page cache.
    """
    text = os.fspath(path)
    if is_url(text):
        return _open_set(open_remote(text, cache, storage))
    if cache is not None or storage is not None:
        raise ConfigError(
            f"cache and storage are for URLs; shards in a local folder ({text}) are read in place. "
            "Leave them out, or give a file:// URL to copy a network folder through the cache."
        )
    folder = Path(text).absolute()
    manifest = read_manifest(folder)
    info = manifest.index
    location = folder / info.name
    return ShardSet(folder, manifest, read_index(location, info, map_file(location, info)))


def _open_shard(folder: Path, shards: Sequence[ShardInfo], number: int) -> OpenedShard:
    info = shards[number]
    path = folder / info.name
    return OpenedShard(path, info, map_file(path, info))


def _reopen(path: Path, manifest: str) -> ShardSet:
    opened = open_shards(path)
    if opened.manifest.to_json() != manifest:
        raise ShardError(
            f"{path} was written again while it was in use: its manifest is not the one that the "
            "main process read. Start the run again."
        )
    return opened


def _open_set(files: RemoteFiles) -> ShardSet:
    return ShardSet(Path(files.client.cache.folder), files.manifest, files.index(), remote=files)
