"""Reading indexed tars in place: rows in any order, tokenised as they are read."""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from omniload.errors import ConfigError, SampleError, ShardError
from omniload.index import LengthIndex
from omniload.tars.archive import digest, read_exactly
from omniload.tars.manifest import (
    ENCODER_NAME,
    TarEntry,
    TarManifest,
    read_tar_manifest,
)
from omniload.tars.members import Member
from omniload.tars.side_file import SUFFIX, SideFile
from omniload.types import Record

if TYPE_CHECKING:
    from omniload.tars.maker import SampleMaker

__all__ = ["TarSet", "open_tars"]

# one costs a file descriptor and a map; both are made again in a millisecond
_MOST_OPEN = 256
#: Members of a sample are read in one go unless more than this lies between them.
_GAP_BYTES = 1 << 16
_LENGTHS = ("num_tokens", "num_tiles", "num_loss_tokens")


class TarSet:
    """Indexed tars, open for reading; made by `open_tars`. A `omniload.source.RowSource`.

    It can be pickled and forked: what travels is the path, and files are opened on first use in
    each process. Threads may share it.

    Attributes:
        path: the index folder.
        root: folder of the tars.
        manifest: what the folder holds.
        index: lengths of all rows, a memory map.
    """

    def __init__(self, path: Path, root: Path, manifest: TarManifest, index: LengthIndex) -> None:
        self.path = path
        self.root = root
        self.manifest = manifest
        self.index = index
        self._starts = [0]
        for entry in manifest.tars:
            self._starts.append(self._starts[-1] + entry.num_rows)
        self._open = lru_cache(_MOST_OPEN)(partial(_OpenTar, path, root, manifest.tars))
        self._lock = threading.Lock()
        self._made: SampleMaker | None = None

    def __len__(self) -> int:
        return self.manifest.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.root, self.manifest.to_json())

    @property
    def settings(self) -> Mapping[str, Any]:
        """How lengths were measured: encoder, tiling, limits; plain JSON."""
        return self.manifest.settings

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all checksums, lengths and settings."""
        found = hashlib.blake2b(digest_size=16)
        for entry in self.manifest.tars:
            found.update(f"{entry.num_rows} {entry.num_bytes} {entry.digest}\n".encode())
        found.update(self.manifest.fingerprint.encode())
        return found.hexdigest()

    @property
    def sources(self) -> Mapping[str, int]:
        """Name of each data set -> rows."""
        return self.manifest.sources

    @property
    def location(self) -> str:
        """The index folder."""
        return os.fspath(self.path)

    @property
    def shard_names(self) -> Sequence[str]:
        """Names of the tars, in row order."""
        return [entry.name for entry in self.manifest.tars]

    def locate(self, row: int) -> tuple[int, int]:
        """Find a row: number of its tar, and row inside that tar.

        Raises:
            ConfigError: no such row.
        """
        if not 0 <= row < len(self):
            raise ConfigError(
                f"row must be between 0 and {len(self) - 1}, got {row} ({self.path})."
            )
        tar = bisect.bisect_right(self._starts, row) - 1
        return tar, int(row) - self._starts[tar]

    def read(self, row: int) -> Record:
        """Read one row from its tar, check it against its checksums, and tokenise it.

        Args:
            row: row number, 0 to `len(self) - 1`.

        Returns:
            The record; its lengths are those of the index.

        Raises:
            ConfigError: no such row.
            ShardError: tar or side file are missing, cut, or not those that were indexed.
            SampleError: the bytes of the sample are not those that were indexed.
        """
        tar, local = self.locate(row)
        entry = self.manifest.tars[tar]
        opened = self._open(tar)
        line = int(opened.side.rows[local])
        group, checksums = opened.side.group(line)
        key = opened.side.key(line)
        where = f"row={row}, tar={os.fspath(opened.path)}, key={key!r}"
        content = _Contents(opened, group, checksums, where)
        try:
            record = self._record(group, content, row=row, key=key, entry=entry)
        except SampleError as error:
            raise SampleError(_changed(f"its sample can't be read: {error}", where)) from None
        planned = tuple(int(getattr(self.index, name)[row]) for name in _LENGTHS)
        got = (
            len(record.input_ids),
            int(record.image_num_tiles.sum()),
            int(np.count_nonzero(record.labels[1:] != _IGNORE)),
        )
        if planned != got:
            raise SampleError(
                _changed(f"expected (tokens, tiles, loss tokens) {planned}, got {got}", where)
            )
        return record

    def _record(
        self, group: Sequence[Member], content: _Contents, *, row: int, key: str, entry: TarEntry
    ) -> Record:
        # not before a row is read: planning needs no tokenizer
        from omniload.tars.samples import read_group
        from omniload.tars.scan import read_sample

        found = read_group(group, content, has_images=lambda: False)
        messages, images = read_sample(found)
        return self._maker().record(
            messages, images, row=int(row), key=key, source=entry.source, shard=entry.name
        )

    def _maker(self) -> SampleMaker:
        with self._lock:
            if self._made is None:
                from omniload.tars.maker import SampleMaker, encoder_from_json

                path = self.path / ENCODER_NAME
                try:
                    data = json.loads(path.read_bytes())
                except (OSError, ValueError, RecursionError) as error:
                    raise ShardError(
                        f"{path} can't be read: {error}. Run `omniload index` again."
                    ) from None
                try:
                    encoder = encoder_from_json(data)
                    self._made = SampleMaker.from_settings(self.settings, encoder)
                except (ConfigError, ShardError) as error:
                    raise ShardError(f"{path}: {error} Run `omniload index` again.") from None
            return self._made

    def at_epoch(self, epoch: int) -> TarSet:
        """Give the rows of an epoch: the same in each."""
        del epoch
        return self

    def prefetch(self, shards: Sequence[int]) -> None:
        """Do nothing: the tars are local files."""


class _OpenTar:
    """A tar and its side file; closed when nothing refers to it any more."""

    def __init__(self, path: Path, root: Path, tars: Sequence[TarEntry], number: int) -> None:
        entry = tars[number]
        self.path = root / entry.name
        self.descriptor = -1
        self.side = SideFile(path / (entry.name + SUFFIX))
        if self.side.facts.digest != entry.digest:
            raise ShardError(
                f"{path / (entry.name + SUFFIX)} is of another run of `omniload index` than the "
                f"set in {path}. Run it again."
            )
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            size = os.fstat(self.descriptor).st_size
        except OSError as error:
            raise ShardError(f"{self.path} can't be read: {error.strerror}.") from None
        _check_size(self.path, entry, size)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _Contents:
    """The bytes of the members of one sample, checked; most often read at one go."""

    def __init__(
        self, opened: _OpenTar, group: Sequence[Member], checksums: Sequence[int], where: str
    ) -> None:
        self._opened = opened
        self._where = where
        self._checksums = {m.start: s for m, s in zip(group, checksums, strict=True)}
        self._first = min(member.start for member in group)
        stop = max(member.start + member.num_bytes for member in group)
        dense = stop - self._first <= sum(m.num_bytes for m in group) + _GAP_BYTES
        self._data = self._read(self._first, stop - self._first) if dense else b""

    def __call__(self, member: Member) -> bytes:
        if self._data:
            begin = member.start - self._first
            data = self._data[begin : begin + member.num_bytes]
        else:
            data = self._read(member.start, member.num_bytes)
        if digest(data) != self._checksums[member.start]:
            raise SampleError(f"the checksum of {member.name!r} is not that of the index")
        return data

    def _read(self, start: int, count: int) -> bytes:
        return read_exactly(self._opened.descriptor, start, count, self._opened.path)


def open_tars(path: str | Path, *, root: str | Path | None = None) -> TarSet:
    """Open a set of indexed tars.

    Reads the description, checks the size of each tar and the checksum of the lengths. The bytes of
    a sample are checked when it is read.

    Args:
        path: the index folder: that of the tars, or the one that `omniload index --out` named.
        root: folder of the tars, if they are not where they were; None: as the index says.

    Returns:
        The set.

    Raises:
        ShardError: no index, one of another version, or missing, cut or changed files.
    """
    folder = Path(path).absolute()
    manifest = read_tar_manifest(folder)
    base = Path(os.path.normpath(folder / manifest.root if root is None else Path(root).absolute()))
    for entry in manifest.tars:
        tar = base / entry.name
        try:
            size = tar.stat().st_size
        except OSError as error:
            raise ShardError(
                f"{tar} can't be read: {error.strerror}. The index in {folder} names it; copy it "
                "there, give root= if the tars have moved, or run `omniload index` again."
            ) from None
        _check_size(tar, entry, size)
    return TarSet(folder, base, manifest, _read_lengths(folder, manifest))


_IGNORE = -100


def _check_size(path: Path, entry: TarEntry, size: int) -> None:
    if size != entry.num_bytes:
        raise ShardError(
            f"{path} must have {entry.num_bytes} bytes, got {size}: the tar was changed since it "
            "was indexed. Run `omniload index` again."
        )


def _changed(what: str, where: str) -> str:
    return (
        f"the tar was changed since it was indexed, or is damaged: {what} ({where}). Run `omniload "
        "index` again, or copy the tar again."
    )


def _reopen(path: Path, root: Path, manifest: str) -> TarSet:
    opened = open_tars(path, root=root)
    if opened.manifest.to_json() != manifest:
        raise ShardError(f"{path} was indexed again while it was in use. Start the run again.")
    return opened


def _read_lengths(folder: Path, manifest: TarManifest) -> LengthIndex:
    path = folder / manifest.lengths.name
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = xxhash.xxh3_128_hexdigest(mapped)
        if found != manifest.lengths.xxh3_128:
            raise ValueError(f"its xxh3_128 must be {manifest.lengths.xxh3_128}, got {found}")
        batch = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped))).get_batch(0)
        if batch.num_rows != manifest.num_rows:
            raise ValueError(f"it must have {manifest.num_rows} rows, got {batch.num_rows}")
        return LengthIndex.from_arrays(**{name: batch.column(name).to_numpy() for name in _LENGTHS})
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ShardError(f"{path} is damaged: {error}. Run `omniload index` again.") from None
