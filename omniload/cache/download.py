"""Fetching one file: resumed where it was left, verified, tried again, with an end."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from omniload.cache.config import Storage
from omniload.cache.entry import Entry
from omniload.cache.folder import CacheFolder
from omniload.cache.locks import open_own
from omniload.cache.room import free_some
from omniload.cache.transport import Interrupted, Reply, Transport
from omniload.cache.url import shown_url
from omniload.errors import ShardError

__all__ = ["Stopped", "download", "fetch_bytes"]

_CHUNK = 4 << 20
_LONGEST_BACKOFF_S = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: files that go while they are in use give their room back a moment later
_FULL_PATIENCE_S = 5.0
_FULL_PAUSE_S = 0.05
#: a server that gives a little in each try must not be tried for ever
_LEAST_PROGRESS = 64 << 10
_LEAST_BYTES_PER_S = 1 << 10
#: a file that is wrong twice is wrong at the other end
_MOST_WRONG = 2


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The download isn't wanted any more; what came so far stays."""


def download(
    transport: Transport,
    folder: CacheFolder,
    entry: Entry,
    *,
    storage: Storage,
    sleep: Callable[[float], None],
) -> None:
    """Fetch a file into its partial file, which has its room already; the caller holds its lock.

    Args:
        transport: where bytes come from.
        folder: the cache.
        entry: the file.
        storage: retries and limits.
        sleep: waits so many seconds, and raises Stopped when the file isn't wanted any more; called
            between pieces too, with 0.

    Raises:
        ShardError: it can't be had, it is not what the manifest says, or the disk is full.
        Stopped: `sleep` said so.
    """
    path = folder.file(entry, "partial")
    with os.fdopen(open_own(path, os.O_RDWR), "r+b", buffering=0) as file:
        partial = _Partial(file=file, folder=folder, entry=entry)
        partial.take_up()
        attempts = _Attempts(url=entry.url, storage=storage)
        while True:
            if partial.size < entry.num_bytes:
                end = _receive(transport, partial, attempts, sleep)
            if partial.size == entry.num_bytes:
                found = partial.digest.hexdigest()
                if found == entry.xxh3_128:
                    return
                partial.restart()
                attempts.wrong += 1
                if attempts.wrong >= _MOST_WRONG:
                    raise _changed(entry, f"xxh3_128 {found} there")
                continue
            sleep(attempts.failed(partial.size, end))


def fetch_bytes(
    transport: Transport, url: str, *, most: int, storage: Storage, sleep: Callable[[float], None]
) -> bytes:
    """Fetch a small file of unknown size and checksum.

    Args:
        transport: where bytes come from.
        url: the file.
        most: bytes it may have.
        storage: retries and limits.
        sleep: waits so many seconds.

    Raises:
        ShardError: it can't be had, or is larger.
    """
    attempts = _Attempts(url=url, storage=storage)
    while True:
        data = bytearray()
        try:
            with transport.open(url, start=0, version="") as reply:
                if reply.start:
                    raise Interrupted(f"the server sent bytes from {reply.start}, asked for all")
                for chunk in attempts.paced(reply.chunks):
                    data += chunk
                    if len(data) > most:
                        raise ShardError(f"{shown_url(url)} must have at most {most} bytes.")
                    if len(data) == reply.size:
                        return bytes(data)
                if reply.size is None or len(data) == reply.size:
                    return bytes(data)
                end = Interrupted(f"the connection ended at {len(data)} of {reply.size} bytes")
        except Interrupted as error:
            end = error
        sleep(attempts.failed(len(data), end))


def _receive(
    transport: Transport, partial: _Partial, attempts: _Attempts, sleep: Callable[[float], None]
) -> Interrupted:
    """Go on with a file as far as one connection brings it; returns why it ended."""
    entry = partial.entry
    try:
        with transport.open(entry.url, start=partial.size, version=partial.version) as reply:
            if reply.size not in (None, entry.num_bytes):
                raise _changed(entry, f"{reply.size} bytes there")
            if reply.start not in (0, partial.size):
                return Interrupted(
                    f"the server sent bytes from {reply.start}, asked for {partial.size}"
                )
            partial.begin(reply)
            for chunk in attempts.paced(reply.chunks):
                if partial.size + len(chunk) > entry.num_bytes:
                    raise _changed(entry, "more bytes there")
                partial.write(chunk)
                sleep(0)
    except Interrupted as error:
        return error
    return Interrupted("the connection ended")


@dataclass(kw_only=True)
class _Partial:
    """What came of a file so far."""

    file: Any
    folder: CacheFolder
    entry: Entry
    size: int = 0
    version: str = ""

    def take_up(self) -> None:
        """Go on with what another process left, if it is known what that is."""
        self.digest = xxhash.xxh3_128()
        self.version = self._read_origin()
        if os.fstat(self.file.fileno()).st_size > self.entry.num_bytes:
            return self.restart()
        while chunk := self.file.read(_CHUNK):
            self.digest.update(chunk)
            self.size += len(chunk)
        return None

    def restart(self) -> None:
        """Start from nothing."""
        self.file.seek(0)
        self.file.truncate(0)
        self.digest = xxhash.xxh3_128()
        self.size, self.version = 0, ""

    def begin(self, reply: Reply) -> None:
        """Get ready for what a server sends."""
        if reply.start == 0 and self.size:
            self.restart()
        if reply.version != self.version:
            self.version = reply.version
            origin = {"url": self.entry.url, "version": reply.version}
            self._retry(self._write_origin, json.dumps(origin).encode())

    def _read_origin(self) -> str:
        """Say of which version the bytes are that are here; "": not known."""
        try:
            path = self.folder.file(self.entry, "origin")
            with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
                origin = json.loads(file.read(1 << 16))
            version = str(origin["version"]) if origin["url"] == self.entry.url else ""
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""
        # it becomes a header
        return version if re.fullmatch(r"[ -~\xa0-\xff]*", version) else ""

    def _write_origin(self, data: bytes) -> int:
        path = self.folder.file(self.entry, "origin")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_own(path, flags), "wb", buffering=0) as file:
            return file.write(data) or 0

    def write(self, chunk: bytes) -> None:
        """Add bytes.

        Raises:
            ShardError: the disk is full, and nothing of ours is left to make room.
        """
        view = memoryview(chunk)
        while view:
            written = self._retry(self.file.write, view)
            self.digest.update(view[:written])
            self.size += written
            view = view[written:]

    def _retry(self, write: Callable[[Any], int], data: Any) -> int:
        """Write; on a full disk make room and try again."""
        begin = time.monotonic()
        while True:
            try:
                return write(data)
            except OSError as error:
                missing = self.entry.num_bytes - self.size
                is_full = error.errno in _FULL
                if is_full and time.monotonic() - begin < _FULL_PATIENCE_S:
                    if free_some(self.folder, self.entry, missing):
                        time.sleep(_FULL_PAUSE_S)
                        continue
                raise self._no_space(error) from None

    def _no_space(self, error: OSError) -> ShardError:
        free, have = self.folder.free_bytes(), self.size
        self.restart()  # what came so far would only keep the disk full
        return ShardError(
            f"{shown_url(self.entry.url)} can't be written to the cache {self.folder.path}: "
            f"{error.strerror}. It needs {self.entry.num_bytes} bytes, of which {have} were there; "
            f"{free} bytes of the disk are free, Cache.max_bytes is {self.folder.max_bytes}. Make "
            "room, or give another folder in Cache(folder=...)."
        )


@dataclass(kw_only=True)
class _Attempts:
    """Counts what went wrong, and says when it is enough."""

    url: str
    storage: Storage
    failures: int = 0
    most: int = 0
    wrong: int = 0
    came: int = 0
    begun_s: float = field(default_factory=time.monotonic)

    def paced(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Pass on what a connection brings, unless it comes too slowly over the time limit.

        Only the time for which bytes are waited for counts, not what is done with them.

        Raises:
            Interrupted: too slowly; after the bytes that did come were passed on.
        """
        num_bytes, waited_s = 0, 0.0
        while True:
            begin = time.monotonic()
            chunk = next(chunks, None)
            waited_s += time.monotonic() - begin
            if chunk is None:
                return
            num_bytes += len(chunk)
            self.came += len(chunk)
            yield chunk
            if waited_s >= self.storage.timeout_s:
                if num_bytes < _LEAST_BYTES_PER_S * waited_s:
                    raise Interrupted(
                        f"only {num_bytes} bytes came in {waited_s:.3g} s, of at least "
                        f"{_LEAST_BYTES_PER_S} bytes/s"
                    )
                num_bytes, waited_s = 0, 0.0

    def failed(self, size: int, end: Interrupted) -> float:
        """Count a connection that ended too early; returns how long to wait, seconds.

        Raises:
            ShardError: it were too many that brought less than 64 KiB more than ever before.
        """
        is_progress = size - self.most >= _LEAST_PROGRESS
        self.failures = 0 if is_progress else self.failures + 1
        self.most = max(self.most, size)
        if self.failures > self.storage.retries:
            rate = self.came / max(time.monotonic() - self.begun_s, 1e-3)
            raise ShardError(
                f"{shown_url(self.url)} could not be fetched: {end}. {self.most} bytes of it "
                f"came, at {rate:.1f} bytes/s, and less than {_LEAST_PROGRESS} more in each of "
                f"{self.failures} tries with a time limit of {self.storage.timeout_s:g} s. Check "
                "the connection, or raise timeout_s and retries in Storage(...)."
            )
        wait = min(self.storage.backoff_s * 2.0 ** min(self.failures, 20), _LONGEST_BACKOFF_S)
        # not the generator of the program: its draws must not depend on the network
        wait *= random.SystemRandom().uniform(0.5, 1.5)
        return max(wait, min(end.wait_s, self.storage.timeout_s))


def _changed(entry: Entry, found: str) -> ShardError:
    return ShardError(
        f"{shown_url(entry.url)} is not the file that its manifest names: expected "
        f"{entry.num_bytes} bytes with xxh3_128 {entry.xxh3_128}, got {found}. Upload the shards "
        "again, manifest last."
    )
