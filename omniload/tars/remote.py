"""Indexed tars at a URL: read through a cache of this machine, fetched ahead of the plan."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any

from omniload.cache import Cache, CacheClient, Entry, Storage, join_url, shown_url
from omniload.errors import ConfigError, ShardError
from omniload.index import LengthIndex
from omniload.tars.files import OpenTar, read_lengths
from omniload.tars.manifest import ENCODER_NAME, SET_NAME, TarEntry, parse_tar_manifest
from omniload.tars.side_file import SUFFIX, SideFile

__all__ = ["RemoteTars", "open_remote"]

#: Bytes a description and a stored encoder may have.
_LARGEST_TEXT = 256 << 20


class RemoteTars:
    """Tars at a URL, the index beside them; pickles and forks as `CacheClient` does.

    Args:
        url: of the index folder.
        client: of that URL.
        text: the description, if it was fetched before.

    Raises:
        ConfigError: a limit of the cache below the largest file.
        ShardError: no index there, or tars that lie elsewhere.
    """

    def __init__(self, url: str, client: CacheClient, text: str | None = None) -> None:
        self.url = url
        self.client = client
        where = join_url(url, SET_NAME)
        data = client.fetch_bytes(where, most=_LARGEST_TEXT) if text is None else text
        self.manifest = parse_tar_manifest(data, shown_url(where))
        if self.manifest.root != ".":
            raise ShardError(
                f"{self.location}: at a URL an index must lie beside its tars, and this one was "
                "made with --out. Index without it, or copy both together and index there."
            )
        tars = self.manifest.tars
        largest = max((entry.num_bytes for entry in tars), default=0)
        limit = client.cache.max_bytes
        if limit is not None and largest > limit:
            raise ConfigError(
                f"Cache.max_bytes must hold at least the largest tar of {self.location}: expected "
                f">= {largest}, got {limit}. Let it hold several for each worker."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTars, (self.url, self.client, self.manifest.to_json())

    @property
    def location(self) -> str:
        """The URL, for messages."""
        return shown_url(self.url)

    def open(self, tar: int) -> OpenTar:
        """Open a tar, by its number; fetched if it is not here.

        Raises:
            ShardError: it can't be had, or its side file is damaged.
        """
        entry = self.manifest.tars[tar]
        side = self.client.get(self._side(entry), partial(self._opened_side, entry))
        data = self.client.get(self._tar(entry), _same)
        return _RemoteTar(shown_url(join_url(self.url, entry.name)), side, data)

    def encoder(self) -> bytes:
        """Fetch the stored encoder.

        Raises:
            ShardError: it can't be had.
        """
        return self.client.fetch_bytes(join_url(self.url, ENCODER_NAME), most=_LARGEST_TEXT)

    def lengths(self) -> LengthIndex:
        """Read the lengths of all rows; their file stays in the cache while this process lives.

        Raises:
            ShardError: they can't be had, or are damaged.
        """
        info = self.manifest.lengths
        url = join_url(self.url, info.name)
        entry = Entry(url=url, num_bytes=info.num_bytes, xxh3_128=info.xxh3_128)
        return self.client.pin(entry, partial(read_lengths, shown_url(url), self.manifest))

    def prefetch(self, tars: Sequence[int]) -> None:
        """Say which tars are needed next, nearest first."""
        entries = [self.manifest.tars[tar] for tar in tars]
        self.client.prefetch(
            [file for entry in entries for file in (self._side(entry), self._tar(entry))]
        )

    def _tar(self, entry: TarEntry) -> Entry:
        url = join_url(self.url, entry.name)
        return Entry(url=url, num_bytes=entry.num_bytes, xxh3_128=entry.xxh3_128)

    def _side(self, entry: TarEntry) -> Entry:
        url = join_url(self.url, entry.name + SUFFIX)
        return Entry(url=url, num_bytes=entry.side_bytes, xxh3_128=entry.side_xxh3_128)

    def _opened_side(self, entry: TarEntry, data: mmap.mmap) -> SideFile:
        return SideFile(data, shown_url(join_url(self.url, entry.name + SUFFIX)))


class _RemoteTar:
    def __init__(self, where: str, side: SideFile, data: mmap.mmap) -> None:
        self.where = where
        self.side = side
        self._data = data

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]


def open_remote(url: str, cache: Any, storage: Any) -> RemoteTars:
    """Open the files of a set at a URL.

    Raises:
        ConfigError: no cache, or one that can't be used; a protocol that is not read.
        ShardError: no index there, or a broken one.
    """
    if not isinstance(cache, Cache):
        raise ConfigError(
            f"tars at a URL ({shown_url(url)}) are read through a folder of this machine: give "
            f"cache=Cache(folder=..., max_bytes=...), got {type(cache).__name__}."
        )
    if storage is not None and not isinstance(storage, Storage):
        raise ConfigError(f"storage must be a Storage, got {type(storage).__name__}.")
    return RemoteTars(url, CacheClient(url, cache=cache, storage=storage or Storage()))


def _same(data: mmap.mmap) -> mmap.mmap:
    return data
