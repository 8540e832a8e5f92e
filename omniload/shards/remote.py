"""A folder of shards at a URL: read through a cache of this machine, fetched ahead of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from omniload.cache import Cache, CacheClient, Entry, Storage, join_url, shown_url
from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.shards.index_file import read_index
from omniload.shards.manifest import MANIFEST_NAME, Manifest, ShardInfo, parse_manifest
from omniload.shards.views import OpenedShard
from omniload.source import RowSource

__all__ = ["RemoteFiles", "open_remote", "rows_per_window"]

#: bytes a manifest may have: a million shards
_LARGEST_MANIFEST = 256 << 20


class RemoteFiles:
    """The files of a set at a URL; pickles and forks as `CacheClient` does.

    Args:
        url: of the folder.
        client: of that URL.
        text: the manifest, if it was fetched before.

    Raises:
        ConfigError: a limit of the cache below index and largest shard.
        ShardError: no manifest there, or a broken one.
    """

    def __init__(self, url: str, client: CacheClient, text: str | None = None) -> None:
        self.url = url
        self.client = client
        where = join_url(url, MANIFEST_NAME)
        data = client.fetch_bytes(where, most=_LARGEST_MANIFEST) if text is None else text
        self.manifest: Manifest = parse_manifest(data, shown_url(where))
        self._entries = tuple(self._entry(info) for info in self.manifest.shards)
        self._check_limit()

    def _check_limit(self) -> None:
        limit = self.client.cache.max_bytes
        # the index stays while any process reads
        least = self.manifest.index.num_bytes + max(
            (info.num_bytes for info in self.manifest.shards), default=0
        )
        if limit is not None and least > limit:
            raise ConfigError(
                f"Cache.max_bytes must hold at least the index and the largest shard of "
                f"{self.location}: expected >= {least}, got {limit}. Let it hold several shards "
                "for each worker."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteFiles, (self.url, self.client, self.manifest.to_json()))

    @property
    def location(self) -> str:
        """The URL, for messages."""
        return shown_url(self.url)

    def index(self) -> LengthIndex:
        """Read the lengths of all rows; their file stays in the cache while this process lives."""
        info = self.manifest.index
        make = partial(read_index, self._shown(info), info)
        return self.client.pin(self._entry(info), make)

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
        return OpenedShard(self._shown(info), info, data, copies=True)

    def _entry(self, info: ShardInfo) -> Entry:
        url = join_url(self.url, info.name)
        return Entry(url=url, num_bytes=info.num_bytes, xxh3_128=info.xxh3_128)

    def _shown(self, info: ShardInfo) -> str:
        return shown_url(join_url(self.url, info.name))


def open_remote(url: str, cache: Any, storage: Storage | None) -> RemoteFiles:
    """Open a set at a URL.

    Raises:
        ConfigError: no cache, or one that can't be used; a protocol that is not read.
        ShardError: no manifest there, or a broken one.
    """
    if not isinstance(cache, Cache):
        raise ConfigError(
            f"shards at a URL ({shown_url(url)}) are read through a folder of this machine: give "
            f"cache=Cache(folder=..., max_bytes=...), got {type(cache).__name__}."
        )
    if storage is not None and not isinstance(storage, Storage):
        raise ConfigError(f"storage must be a Storage, got {type(storage).__name__}.")
    return RemoteFiles(url, CacheClient(url, cache=cache, storage=storage or Storage()))


def rows_per_window(source: RowSource, default: int) -> int:
    """Choose how many rows to plan together, so that the shards of a window fit the cache.

    Half of the cache is for the window at hand, the other half for what is fetched ahead. The plan
    depends on it, so all ranks must have the same `Cache.max_bytes`.

    Args:
        source: what is read from; anything but shards behind a cache gives `default`.
        default: the planner's choice, and the most that is returned.
    """
    files = getattr(source, "remote", None)
    if not isinstance(files, RemoteFiles) or files.client.cache.max_bytes is None:
        return default
    shards = files.manifest.shards
    row_bytes = max(sum(info.num_bytes for info in shards) / max(len(source), 1), 1.0)
    fits = int(files.client.cache.max_bytes / 2 / row_bytes)
    return min(max(fits, 1), default)
