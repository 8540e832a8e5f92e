"""Indexed tars at a URL: read through a cache of this machine, fetched ahead of the plan."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any

from omniload.cache import CacheClient, Entry, RemoteFolder, Storage, make_client
from omniload.errors import ShardError
from omniload.index import LengthIndex
from omniload.tars.files import OpenTar, read_lengths
from omniload.tars.manifest import ENCODER_NAME, SET_NAME, TarEntry, parse_tar_manifest
from omniload.tars.side_file import SUFFIX, SideFile

__all__ = ["RemoteTars", "open_remote"]


class RemoteTars(RemoteFolder):
    """Tars at a URL, the index beside them.

    Args:
        url: of the index folder.
        client: of that URL.
        text: the description, if it was fetched before.

    Raises:
        ConfigError: a limit of the cache below the largest file.
        ShardError: no index there, or tars that lie elsewhere.
    """

    def __init__(self, url: str, client: CacheClient, text: str | None = None) -> None:
        super().__init__(url, client)
        data = self.text(SET_NAME) if text is None else text
        self.manifest = parse_tar_manifest(data, self.shown(SET_NAME))
        if self.manifest.root != ".":
            raise ShardError(
                f"{self.location}: at a URL an index must lie beside its tars, and this one was "
                "made with --out. Index without it, or copy both together and index there."
            )
        self.check_limit(
            lengths=self.manifest.lengths.num_bytes,
            largest=max((_both(entry) for entry in self.manifest.tars), default=0),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTars, (self.url, self.client, self.manifest.to_json())

    @property
    def data_bytes(self) -> int:
        """Bytes of all tars and their side files."""
        return sum(map(_both, self.manifest.tars))

    def open(self, tar: int) -> OpenTar:
        """Open a tar, by its number; fetched if it is not here.

        Raises:
            ShardError: it can't be had, or its side file is damaged.
        """
        entry = self.manifest.tars[tar]
        side = self.client.get(self._side(entry), partial(self._opened_side, entry))
        data = self.client.get(self._tar(entry), _same)
        return _RemoteTar(self.shown(entry.name), side, data)

    def encoder(self) -> bytes:
        """Fetch the stored encoder.

        Raises:
            ShardError: it can't be had.
        """
        return self.text(ENCODER_NAME)

    def lengths(self) -> LengthIndex:
        """Read the lengths of all rows; their file stays in the cache while this process lives.

        Raises:
            ShardError: they can't be had, or are damaged.
        """
        info = self.manifest.lengths
        make = partial(read_lengths, self.shown(info.name), self.manifest)
        return self.client.pin(self.entry(info.name, info.num_bytes, info.xxh3_128), make)

    def prefetch(self, tars: Sequence[int]) -> None:
        """Say which tars are needed next, nearest first."""
        entries = [self.manifest.tars[tar] for tar in tars]
        self.client.prefetch(
            [file for entry in entries for file in (self._side(entry), self._tar(entry))]
        )

    def _tar(self, entry: TarEntry) -> Entry:
        return self.entry(entry.name, entry.num_bytes, entry.xxh3_128)

    def _side(self, entry: TarEntry) -> Entry:
        return self.entry(entry.name + SUFFIX, entry.side_bytes, entry.side_xxh3_128)

    def _opened_side(self, entry: TarEntry, data: mmap.mmap) -> SideFile:
        return SideFile(data, self.shown(entry.name + SUFFIX))


class _RemoteTar:
    def __init__(self, where: str, side: SideFile, data: mmap.mmap) -> None:
        self.where = where
        self.side = side
        self._data = data

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]


def open_remote(url: str, cache: Any, storage: Storage | None) -> RemoteTars:
    """Open the files of a set at a URL.

    Raises:
        ConfigError: no cache, or one that can't be used; a protocol that is not read.
        ShardError: no index there, or a broken one.
    """
    return RemoteTars(url, make_client(url, cache, storage, what="tars"))


def _both(entry: TarEntry) -> int:
    return entry.num_bytes + entry.side_bytes


def _same(data: mmap.mmap) -> mmap.mmap:
    return data
