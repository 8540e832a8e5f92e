"""A folder of shards at a URL: read through a cache of this machine, fetched ahead of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from omniload.cache import CacheClient, Entry, RemoteFolder, Storage, make_client
from omniload.index import LengthIndex
from omniload.shards.index_file import read_index
from omniload.shards.manifest import MANIFEST_NAME, Manifest, ShardInfo, parse_manifest
from omniload.shards.views import OpenedShard
from omniload.source import RowSource

__all__ = ["RemoteFiles", "open_remote", "rows_per_window"]


class RemoteFiles(RemoteFolder):
    """The files of a set at a URL.

    Args:
        url: of the folder.
        client: of that URL.
        text: the manifest, if it was fetched before.

    Raises:
        ConfigError: a limit of the cache below index and largest shard.
        ShardError: no manifest there, or a broken one.
    """

    def __init__(self, url: str, client: CacheClient, text: str | None = None) -> None:
        super().__init__(url, client)
        data = self.text(MANIFEST_NAME) if text is None else text
        self.manifest: Manifest = parse_manifest(data, self.shown(MANIFEST_NAME))
        shards = self.manifest.shards
        self._entries = tuple(self._entry(info) for info in shards)
        self.check_limit(
            lengths=self.manifest.index.num_bytes,
            largest=max((info.num_bytes for info in shards), default=0),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteFiles, (self.url, self.client, self.manifest.to_json()))

    @property
    def data_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(info.num_bytes for info in self.manifest.shards)

    def index(self) -> LengthIndex:
        """Read the lengths of all rows; their file stays in the cache while this process lives."""
        info = self.manifest.index
        return self.client.pin(self._entry(info), partial(read_index, self.shown(info.name), info))

    def open(self, shard: int) -> OpenedShard:
        """Open a shard, by its number.

        Raises:
            ShardError: it can't be had, or is damaged.
        """
        entry = self._entries[shard]
        held: OpenedShard | None = self.client.held(entry.name)
        return held or self.client.get(entry, partial(self._opened, shard))

    def prefetch(self, shards: Sequence[int]) -> None:
        """Say which shards are needed next, nearest first."""
        self.client.prefetch([self._entries[shard] for shard in shards])

    def _opened(self, shard: int, data: Any) -> OpenedShard:
        info = self.manifest.shards[shard]
        # views would keep the room of an evicted file taken for as long as the record lives
        return OpenedShard(self.shown(info.name), info, data, copies=True)

    def _entry(self, info: ShardInfo) -> Entry:
        return self.entry(info.name, info.num_bytes, info.xxh3_128)


def open_remote(url: str, cache: Any, storage: Storage | None) -> RemoteFiles:
    """Open a set at a URL.

    Raises:
        ConfigError: no cache, or one that can't be used; a protocol that is not read.
        ShardError: no manifest there, or a broken one.
    """
    return RemoteFiles(url, make_client(url, cache, storage, what="shards"))


def rows_per_window(source: RowSource, default: int) -> int:
    """Choose how many rows to plan together, so that the files of a window fit the cache.

    Half of the cache is for the window at hand, the other half for what is fetched ahead. The plan
    depends on it, so all ranks must have the same `Cache.max_bytes`.

    Args:
        source: what is read from; anything but shards or tars behind a cache gives `default`.
        default: the planner's choice, and the most that is returned.
    """
    files = getattr(source, "remote", None)
    limit = files.client.cache.max_bytes if isinstance(files, RemoteFolder) else None
    if not isinstance(files, RemoteFolder) or limit is None:
        return default
    row_bytes = max(files.data_bytes / max(len(source), 1), 1.0)
    return min(max(int(limit / 2 / row_bytes), 1), default)
