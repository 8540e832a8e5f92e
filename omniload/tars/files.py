"""The files of a set of indexed tars in a folder; `omniload.tars.remote` has those at a URL."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from omniload.errors import ShardError
from omniload.index import LengthIndex
from omniload.shards.index_file import read_index
from omniload.tars.archive import read_exactly
from omniload.tars.manifest import (
    ENCODER_NAME,
    TarEntry,
    TarManifest,
    read_tar_manifest,
)
from omniload.tars.side_file import SUFFIX, SideFile, open_side

__all__ = ["LENGTHS", "LocalTars", "OpenTar", "TarFiles", "read_lengths", "tar_root"]

LENGTHS = ("num_tokens", "num_tiles", "num_loss_tokens")

# one costs a file descriptor and a map; both are made again in a millisecond
_MOST_OPEN = 256


class OpenTar(Protocol):
    """A tar and its side file, open for reading."""

    where: str
    side: SideFile

    def read(self, start: int, count: int) -> bytes:
        """Read bytes of the tar."""


class TarFiles(Protocol):
    """Where the files of a set lie; picklable, opened on first use in each process."""

    manifest: TarManifest

    @property
    def location(self) -> str:
        """Path or URL, for messages."""

    def open(self, tar: int) -> OpenTar:
        """Open a tar, by its number."""

    def encoder(self) -> bytes:
        """Read the stored encoder."""

    def lengths(self) -> LengthIndex:
        """Read the lengths of all rows."""

    def prefetch(self, tars: Sequence[int]) -> None:
        """Say which tars are needed next."""


class LocalTars:
    """Tars in a folder; checks that they are there, with their sizes.

    Args:
        folder: of the index.
        root: folder of the tars; None: as the index says.

    Raises:
        ShardError: no index, or tars that are missing or of another size.
    """

    def __init__(self, folder: Path, root: Path | None) -> None:
        self.folder = folder
        self.manifest = manifest = read_tar_manifest(folder)
        self.root = tar_root(folder, manifest, root)
        for entry in manifest.tars:
            path = self.root / entry.name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ShardError(
                    f"{path} can't be read: {error.strerror}. The index in {folder} names it; copy "
                    "it there, give root= if the tars have moved, or run `omniload index` again."
                ) from None
            _check_size(path, entry, size)
        self._open = lru_cache(_MOST_OPEN)(partial(_LocalTar, folder, self.root, manifest.tars))

    def __reduce__(self) -> tuple[Any, ...]:
        return _local_again, (self.folder, self.root, self.manifest.to_json())

    @property
    def location(self) -> str:
        """The index folder."""
        return os.fspath(self.folder)

    def open(self, tar: int) -> OpenTar:
        """Open a tar, by its number.

        Raises:
            ShardError: it or its side file is missing, damaged, or not what the index says.
        """
        return self._open(tar)

    def encoder(self) -> bytes:
        """Read the stored encoder.

        Raises:
            ShardError: it can't be read.
        """
        path = self.folder / ENCODER_NAME
        try:
            return path.read_bytes()
        except OSError as error:
            raise ShardError(
                f"{path} can't be read: {error}. Run `omniload index` again."
            ) from None

    def lengths(self) -> LengthIndex:
        """Read the lengths of all rows, as a memory map.

        Raises:
            ShardError: they are missing or damaged.
        """
        path = self.folder / self.manifest.lengths.name
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _damaged(os.fspath(path), error) from None
        return read_lengths(os.fspath(path), self.manifest, data)

    def prefetch(self, tars: Sequence[int]) -> None:
        """Do nothing: local files need no hint."""


class _LocalTar:
    """Closed when nothing refers to it any more."""

    def __init__(self, folder: Path, root: Path, tars: Sequence[TarEntry], number: int) -> None:
        entry = tars[number]
        self._path = root / entry.name
        self.where = os.fspath(self._path)
        self._descriptor = -1
        side = folder / (entry.name + SUFFIX)
        self.side = open_side(side)
        facts = self.side.facts
        if (facts.digest, facts.num_bytes) != (entry.digest, entry.num_bytes):
            raise ShardError(
                f"{side} is of another run of `omniload index` than the set in {folder}. Run it "
                "again."
            )
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise ShardError(f"{self._path} can't be read: {error.strerror}.") from None
        _check_size(self._path, entry, size)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, start: int, count: int) -> bytes:
        return read_exactly(self._descriptor, start, count, self._path)


def _check_size(path: Path, entry: TarEntry, size: int) -> None:
    if size != entry.num_bytes:
        raise ShardError(
            f"{path} must have {entry.num_bytes} bytes, got {size}: the tar was changed since it "
            "was indexed. Run `omniload index` again."
        )


def tar_root(folder: Path, manifest: TarManifest, root: Path | None) -> Path:
    """Say in which folder the tars lie.

    Args:
        folder: of the index, absolute.
        manifest: what it says.
        root: what the user says; None: nothing.
    """
    return Path(os.path.normpath(folder / manifest.root if root is None else root.absolute()))


def _local_again(folder: Path, root: Path, manifest: str) -> LocalTars:
    opened = LocalTars(folder, root)
    if opened.manifest.to_json() != manifest:
        raise ShardError(f"{folder} was indexed again while it was in use. Start the run again.")
    return opened


def read_lengths(where: str, manifest: TarManifest, data: Any) -> LengthIndex:
    """Read the lengths of all rows.

    Args:
        where: path or URL of their file, for messages.
        manifest: of the set.
        data: the bytes of the file; views of them are kept.

    Raises:
        ShardError: they are damaged.
    """
    return read_index(where, manifest.lengths, data, damaged=_damaged)


def _damaged(where: Path | str, what: object) -> ShardError:
    return ShardError(f"{where} is damaged: {what}. Run `omniload index` again.")
