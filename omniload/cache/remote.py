"""A folder at a URL whose files are known by a description: what shards and tars have in common."""

from __future__ import annotations

from typing import Any

from omniload.cache.client import CacheClient
from omniload.cache.config import Cache, Storage
from omniload.cache.entry import Entry
from omniload.cache.url import check_url, join_url, shown_url
from omniload.errors import ConfigError

__all__ = ["RemoteFolder", "make_client"]

#: bytes a description may have: a million files
_LARGEST_TEXT = 256 << 20


class RemoteFolder:
    """The files of a folder at a URL; pickles and forks as `CacheClient` does.

    Args:
        url: of the folder.
        client: of that URL.
    """

    def __init__(self, url: str, client: CacheClient) -> None:
        self.url = url
        self.client = client

    @property
    def location(self) -> str:
        """The URL, for messages."""
        return shown_url(self.url)

    @property
    def data_bytes(self) -> int:
        """Bytes of all files that rows are read from."""
        raise NotImplementedError

    def text(self, name: str) -> bytes:
        """Fetch a description, past the cache.

        Raises:
            ShardError: it can't be had; a `MissingFileError` if it is not there.
        """
        return self.client.fetch_bytes(join_url(self.url, name), most=_LARGEST_TEXT)

    def shown(self, name: str) -> str:
        """Name a file for messages."""
        return shown_url(join_url(self.url, name))

    def entry(self, name: str, num_bytes: int, xxh3_128: str) -> Entry:
        """Name a file for the cache."""
        return Entry(url=join_url(self.url, name), num_bytes=num_bytes, xxh3_128=xxh3_128)

    def check_limit(self, *, lengths: int, largest: int) -> None:
        """Check that the cache holds what one process has open at the same time.

        Args:
            lengths: bytes of the file of lengths, which stays while any process reads.
            largest: bytes of the largest file, and of what belongs to it.

        Raises:
            ConfigError: it doesn't.
        """
        limit, least = self.client.cache.max_bytes, lengths + largest
        if limit is not None and least > limit:
            raise ConfigError(
                f"Cache.max_bytes must hold at least the lengths and the largest file of "
                f"{self.location}: expected >= {least}, got {limit}. Let it hold several files "
                "for each worker."
            )


def make_client(url: str, cache: Any, storage: Any, *, what: str) -> CacheClient:
    """Make what reads files below a URL, of what the user gave.

    Args:
        url: of a folder.
        cache: as given; must be a Cache.
        storage: as given; a Storage, or None for the default.
        what: what lies there, for the message: "shards".

    Raises:
        ConfigError: no cache, or one that can't be used; a protocol that is not read.
    """
    check_url(url)
    if not isinstance(cache, Cache):
        raise ConfigError(
            f"{what} at a URL ({shown_url(url)}) are read through a folder of this machine: give "
            f"cache=Cache(folder=..., max_bytes=...), got {type(cache).__name__}."
        )
    if storage is not None and not isinstance(storage, Storage):
        raise ConfigError(f"storage must be a Storage, got {type(storage).__name__}.")
    return CacheClient(url, cache=cache, storage=storage or Storage())
