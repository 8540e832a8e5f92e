"""What a process does with the cache: get a file now, and have those fetched that come next."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from omniload.cache.ahead import FetchAhead
from omniload.cache.config import Cache, Storage
from omniload.cache.download import download, fetch_bytes
from omniload.cache.entry import Entry
from omniload.cache.folder import CacheFolder
from omniload.cache.orders import PublishedOrder
from omniload.cache.room import reserve
from omniload.cache.transport import Transport, make_transport
from omniload.cache.url import check_url
from omniload.errors import ShardError

__all__ = ["CacheClient"]

_log = logging.getLogger(__name__)

Value = TypeVar("Value")

# a map costs a file descriptor, and is made again in 0.3 ms
_MAX_HELD = 256
_WATCH_S = 0.1
_SETTLED_S = 1.0
_NOTE_S = 1.0


class CacheClient:
    """Files from below one URL, through a cache folder.

    It can be pickled and forked: what travels is the settings. Connections, locks and threads are
    made on first use in each process, and threads may share it.

    Args:
        url: what lies above all files; decides the protocol.
        cache: the folder.
        storage: how to fetch.

    Raises:
        ConfigError: a protocol that is not read, or a folder that can't be used.
    """

    def __init__(self, url: str, *, cache: Cache, storage: Storage) -> None:
        check_url(url)
        self.url = url
        self.cache = cache
        self.storage = storage
        CacheFolder(cache)  # complains at once
        self._processes: dict[int, _Process] = {}
        weakref.finalize(self, _stop, self._processes).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.url, self.cache, self.storage))

    def fetch_bytes(self, url: str, *, most: int) -> bytes:
        """Fetch a small file past the cache, with connections that are made for it alone.

        Raises:
            ShardError: it can't be had, or has more than `most` bytes.
        """
        transport = make_transport(url, self.storage)
        return fetch_bytes(transport, url, most=most, storage=self.storage, sleep=time.sleep)

    def held(self, name: str) -> Any:
        """Return what `get` made of a file, by the name of its entry; None: it must be made."""
        process = self._processes.get(os.getpid())
        held = None if process is None else process.held.get(name)
        if held is None:
            return None
        held.was_used = True
        return held.value

    def get(self, entry: Entry, make: Callable[[mmap.mmap], Value]) -> Value:
        """Return what `make` makes of a file's bytes; the same object until the file is evicted.

        What it made must be let go of soon after use, since it keeps the room of the file taken.

        Args:
            entry: the file; fetched if it is not here.
            make: called with a map of the file.

        Raises:
            ShardError: it can't be had; says why.
        """
        found: Value | None = self.held(entry.name)
        if found is not None:
            return found
        process = self._process()
        data, inode = process.map(entry)
        value = make(data)
        process.hold(entry, value, inode)
        return value

    def pin(self, entry: Entry, make: Callable[[mmap.mmap], Value]) -> Value:
        """As `get`, for a file that this process needs for as long as it lives."""
        process = self._process()
        process.pin(entry)
        # with connections of its own: what follows may be a fork
        return make(process.map(entry, make_transport(self.url, self.storage))[0])

    def prefetch(self, entries: Sequence[Entry]) -> None:
        """Say which files this process needs next, in this order; replaces what it said before.

        A thread fetches them, as far as files go for it that are needed later or by nobody.
        Returns at once.
        """
        self._process().want(entries)

    @property
    def figures(self) -> dict[str, float]:
        """What this process did: files that were here, files and bytes it fetched, seconds waited.

        "hits" and "misses" count files that were opened, "fetched_files" and "fetched_bytes" those
        fetched, ahead or not; "wait_s" is the time for which reading stood still.
        """
        return dict(self._process().figures)

    def _process(self) -> _Process:
        pid = os.getpid()
        process = self._processes.get(pid)
        if process is None:
            # after a fork: locks and threads of the other process are of no use here. Without a
            # lock, which a thread that the fork left behind could hold; setdefault is atomic.
            process = self._processes.setdefault(
                pid, _Process(self.url, cache=self.cache, storage=self.storage)
            )
            for other in [number for number in self._processes if number != pid]:
                left = self._processes.pop(other, None)
                if left is not None:
                    left.leave()
        return process


@dataclass(kw_only=True, slots=True)
class _Held:
    value: Any
    inode: int
    was_used: bool = False


class _Process:
    """What one process has of the cache; refers to nothing that refers to it."""

    def __init__(self, url: str, *, cache: Cache, storage: Storage) -> None:
        self.held: dict[str, _Held] = {}
        self.figures = dict.fromkeys(
            ("hits", "misses", "fetched_files", "fetched_bytes", "wait_s"), 0.0
        )
        self._folder = CacheFolder(cache)
        self._storage = storage
        self._transport = make_transport(url, storage)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._is_watching = False
        self._pinned: list[str] = []
        self._order: PublishedOrder | None = None
        self._named: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._ahead = FetchAhead(
            self._folder,
            self._transport,
            storage=storage,
            is_stopped=lambda: self._is_stopped,
            let_go=self.let_go,
        )
        self._ahead.figures = self.figures

    def map(self, entry: Entry, transport: Transport | None = None) -> tuple[mmap.mmap, int]:
        """Map a file, after fetching it if need be; returns the map and the number of its inode."""
        try:
            descriptor = self._obtain(entry, transport or self._transport)
        except OSError as error:
            raise ShardError(
                f"the cache folder {self._folder.path} can't be used: {error.strerror} "
                f"({error.filename or self._folder.path}). It must stay where it is, and writable, "
                "while it is in use."
            ) from None
        try:
            # the map keeps the mark that the file is in use
            data = mmap.mmap(descriptor, entry.num_bytes, access=mmap.ACCESS_READ)
            return data, os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)

    def _obtain(self, entry: Entry, transport: Transport) -> int:
        descriptor = self._folder.open(entry)
        self.figures["hits" if descriptor is not None else "misses"] += 1
        if descriptor is None:
            begin = time.monotonic()
            descriptor = self._fetch(entry, transport)
            self.figures["wait_s"] += time.monotonic() - begin
        return descriptor

    def _fetch(self, entry: Entry, transport: Transport) -> int:
        storage = self._storage
        patience_s = (storage.retries + 1) * (storage.timeout_s + 30.0)
        with self._folder.fetching(entry, stalled_s=patience_s):
            descriptor = self._folder.open(entry)  # another process may have been quicker
            if descriptor is not None:
                return descriptor
            reserve(self._folder, entry, patience_s=storage.timeout_s, let_go=self.let_go)
            download(transport, self._folder, entry, storage=storage, sleep=time.sleep)
            descriptor = self._folder.publish(entry)
        self.figures["fetched_files"] += 1
        self.figures["fetched_bytes"] += entry.num_bytes
        return descriptor

    def hold(self, entry: Entry, value: Any, inode: int) -> None:
        """Keep what was made of a file, until the file is evicted or 256 newer ones are kept."""
        with self._lock:
            self.held[entry.name] = _Held(value=value, inode=inode)
            while len(self.held) > _MAX_HELD:
                self.held.pop(next(iter(self.held)), None)
            start, self._is_watching = not self._is_watching, True
        if start:
            threading.Thread(target=self._watch, name="omniload-cache-watch", daemon=True).start()

    def pin(self, entry: Entry) -> None:
        """Name a file in every order of this process as one that it needs always."""
        with self._lock:
            self._pinned.append(entry.name)
        self.want(self._ahead.wanted)

    def want(self, entries: Sequence[Entry]) -> None:
        """Set what is needed next."""
        names = tuple(entry.name for entry in entries)
        pinned = tuple(self._pinned)
        if (pinned, names) == self._named:
            return
        try:
            with self._lock:
                self._named = (pinned, names)
                if self._order is None:
                    self._order = PublishedOrder(self._folder.path)
                self._order.write(names, pinned=pinned)
        except OSError as error:  # a hint is no reason to stop: a read that fails says so
            _log.info("what is needed next can't be written to the cache: %s", error)
        self._ahead.want(entries)
        if entries and self._folder.max_bytes is not None:
            # what is not needed soon is closed now, so that its room is free when it has to go
            for name in set(self.held).difference(names):
                self.held.pop(name, None)

    def stop(self) -> None:
        """End the threads, and take the order back."""
        self._is_stopped = True
        self.held.clear()
        order, self._order = self._order, None
        if order is not None:
            order.close()

    def leave(self) -> None:
        """Let go of what a fork brought along from another process, which still has it."""
        self.held.clear()
        if self._order is not None:
            self._order.leave()

    def _watch(self) -> None:
        """Let go of files that were evicted, so that their room comes free; mark those in use."""
        noted_s = time.monotonic()
        while not self._is_stopped:
            time.sleep(_WATCH_S)
            with contextlib.suppress(OSError):  # a file went while we looked, or the folder itself
                # the clock of the file system is coarse: look again for a while after a change
                if time.time() - self._folder.path.stat().st_mtime < _SETTLED_S:
                    self.let_go()
                if time.monotonic() - noted_s > _NOTE_S:
                    noted_s = time.monotonic()
                    self._note_use()

    def let_go(self) -> None:
        """Close what is open of files that were evicted."""
        for name, held in list(self.held.items()):
            try:
                is_there = (self._folder.path / f"{name}.shard").stat().st_ino == held.inode
            except OSError:
                is_there = False
            if not is_there:
                self.held.pop(name, None)

    def _note_use(self) -> None:
        for name, held in list(self.held.items()):
            if held.was_used:
                held.was_used = False
                os.utime(self._folder.path / f"{name}.shard")


def _stop(processes: dict[int, _Process]) -> None:
    process = processes.get(os.getpid())
    if process is not None:
        process.stop()


def _rebuild(url: str, cache: Cache, storage: Storage) -> CacheClient:
    return CacheClient(url, cache=cache, storage=storage)
