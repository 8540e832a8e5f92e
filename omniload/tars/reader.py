"""Reading indexed tars in place: rows in any order, tokenised as they are read."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omniload.cache import Cache, Storage, is_url
from omniload.errors import ConfigError, SampleError, ShardError
from omniload.tars.archive import digest
from omniload.tars.files import LENGTHS, LocalTars, OpenTar, TarFiles
from omniload.tars.manifest import ENCODER_NAME, TarEntry
from omniload.tars.members import Member
from omniload.tars.remote import RemoteTars, open_remote
from omniload.types import IGNORE_INDEX, Record

if TYPE_CHECKING:
    from omniload.tars.maker import SampleMaker

__all__ = ["TarSet", "open_tars"]

#: Members of a sample are read in one go unless more than this lies between them.
_GAP_BYTES = 1 << 16


class TarSet:
    """Indexed tars, open for reading; made by `open_tars`. A `omniload.source.RowSource`.

    It can be pickled and forked: what travels is where the files lie, and they are opened on first
    use in each process. Threads may share it.

    Attributes:
        files: where they lie.
        manifest: what the set holds.
        index: lengths of all rows, a memory map.
    """

    def __init__(self, files: TarFiles) -> None:
        self.files = files
        self.manifest = files.manifest
        self.index = files.lengths()
        self._starts = [0]
        for entry in self.manifest.tars:
            self._starts.append(self._starts[-1] + entry.num_rows)
        self._lock = threading.Lock()
        self._made: SampleMaker | None = None

    def __len__(self) -> int:
        return self.manifest.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return TarSet, (self.files,)

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
        """The index folder, or its URL."""
        return self.files.location

    @property
    def remote(self) -> RemoteTars | None:
        """The files, where they come from a URL; else None."""
        return self.files if isinstance(self.files, RemoteTars) else None

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
                f"row must be between 0 and {len(self) - 1}, got {row} ({self.location})."
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
        opened = self.files.open(tar)
        line = int(opened.side.rows[local])
        group, checksums = opened.side.group(line)
        key = opened.side.key(line)
        where = f"row={row}, tar={opened.where}, key={key!r}"
        try:
            content = _Contents(opened, group, checksums)
            record = self._record(
                group, content, row=int(row), key=key, entry=self.manifest.tars[tar]
            )
        except SampleError as error:
            raise SampleError(_changed(f"its sample can't be read: {error}", where)) from None
        planned = tuple(int(getattr(self.index, name)[row]) for name in LENGTHS)
        got = (
            len(record.input_ids),
            int(record.image_num_tiles.sum()),
            int(np.count_nonzero(record.labels[1:] != IGNORE_INDEX)),
        )
        if planned != got:
            raise SampleError(
                _changed(f"expected (tokens, tiles, loss tokens) {planned}, got {got}", where)
            )
        return record

    def key_of(self, row: int) -> str | None:
        """Say the key of a row, as the side file has it; None for a URL, which might be fetched.

        Raises:
            ConfigError: no such row.
            ShardError: tar or side file are missing, or not those that were indexed.
        """
        tar, local = self.locate(row)
        if self.remote is not None:
            return None
        side = self.files.open(tar).side
        return side.key(int(side.rows[local]))

    def _record(
        self, group: Sequence[Member], content: _Contents, *, row: int, key: str, entry: TarEntry
    ) -> Record:
        # not before a row is read: planning needs no tokenizer
        from omniload.tars.samples import read_group
        from omniload.tars.scan import read_sample

        found = read_group(group, content, has_images=lambda: False)
        messages, images = read_sample(found)
        return self._maker().record(
            messages, images, row=row, key=key, source=entry.source, shard=entry.name
        )

    def _maker(self) -> SampleMaker:
        with self._lock:
            if self._made is None:
                from omniload.tars.maker import SampleMaker, encoder_from_json

                try:
                    encoder = encoder_from_json(json.loads(self.files.encoder()))
                    self._made = SampleMaker.from_settings(self.settings, encoder)
                except (ConfigError, ValueError, RecursionError) as error:
                    raise ShardError(
                        f"{ENCODER_NAME} of {self.location} can't be used: {error} Run `omniload "
                        "index` again."
                    ) from None
            return self._made

    def at_epoch(self, epoch: int) -> TarSet:
        """Give the rows of an epoch: the same in each."""
        del epoch
        return self

    def prefetch(self, shards: Sequence[int]) -> None:
        """Hint that these tars are read next, in this order; returns at once."""
        self.files.prefetch(shards)


class _Contents:
    """The bytes of the members of one sample, checked; most often read at one go."""

    def __init__(self, opened: OpenTar, group: Sequence[Member], checksums: Sequence[int]) -> None:
        self._opened = opened
        self._checksums = {m.start: s for m, s in zip(group, checksums, strict=True)}
        self._first = min(member.start for member in group)
        stop = max(member.start + member.num_bytes for member in group)
        dense = stop - self._first <= sum(m.num_bytes for m in group) + _GAP_BYTES
        self._data = opened.read(self._first, stop - self._first) if dense else b""

    def __call__(self, member: Member) -> bytes:
        if self._data:
            begin = member.start - self._first
            data = self._data[begin : begin + member.num_bytes]
        else:
            data = self._opened.read(member.start, member.num_bytes)
        if digest(data) != self._checksums[member.start]:
            raise SampleError(f"the checksum of {member.name!r} is not that of the index")
        return data


def open_tars(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    cache: Cache | None = None,
    storage: Storage | None = None,
) -> TarSet:
    """Open a set of indexed tars.

    Reads the description, checks the size of each tar and the checksum of the lengths. The bytes of
    a sample are checked when it is read.

    Args:
        path: the index folder: that of the tars, or the one that `omniload index --out` named; or
            the URL of a copy of the tars with their index beside them.
        root: folder of the tars, if they are not where they were; None: as the index says.
        cache: where copies of files from a URL lie; needed for those.
        storage: how to fetch from a URL; None: `Storage()`.

    Returns:
        The set.

    Raises:
        ConfigError: a URL without a cache, or a protocol that is not read; a cache for a folder.
        ShardError: no index, one of another version, or missing, cut or changed files.
    """
    text = os.fspath(path)
    if is_url(text):
        if root is not None:
            raise ConfigError(f"root= is for local tars, got {os.fspath(root)!r} with {text!r}.")
        return TarSet(open_remote(text, cache, storage))
    if cache is not None or storage is not None:
        raise ConfigError(
            f"cache and storage are for URLs; tars in a local folder ({text}) are read in place. "
            "Leave them out."
        )
    return TarSet(LocalTars(Path(text).absolute(), None if root is None else Path(root).absolute()))


def _changed(what: str, where: str) -> str:
    return (
        f"the tar was changed since it was indexed, or is damaged: {what} ({where}). Run `omniload "
        "index` again, or copy the tar again."
    )
