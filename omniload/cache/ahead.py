"""Fetching ahead: a thread that fills the cache in the order in which files are needed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from omniload.cache.config import Storage
from omniload.cache.download import Stopped, download
from omniload.cache.entry import Entry
from omniload.cache.folder import CacheFolder
from omniload.cache.orders import MOST_NAMED
from omniload.cache.room import try_reserve
from omniload.cache.transport import Transport
from omniload.errors import OmniloadError

__all__ = ["FetchAhead"]

_log = logging.getLogger(__name__)

_IDLE_S = 0.05
_REST_S = 0.5
_LOOK_AGAIN_S = 1.0
#: a file that could not be fetched is left to whoever needs it, who gets the error
_AFTER_FAILURE_S = 60.0


class FetchAhead:
    """Fetches files ahead of their use, in a thread that starts with the first wish.

    Args:
        folder: the cache.
        transport: where bytes come from.
        storage: retries and limits.
        is_stopped: asked several times a second.
        let_go: called to close what this process has open of files that went.
    """

    def __init__(
        self,
        folder: CacheFolder,
        transport: Transport,
        *,
        storage: Storage,
        is_stopped: Callable[[], bool],
        let_go: Callable[[], None],
    ) -> None:
        self.wanted: tuple[Entry, ...] = ()
        self._names: frozenset[str] = frozenset()
        self.figures: dict[str, float] = {}
        self._folder = folder
        self._transport = transport
        self._storage = storage
        self._is_stopped = is_stopped
        self._let_go = let_go
        self._lock = threading.Lock()
        self._is_running = False
        # until when there is nothing to do about a file
        self._settled: dict[str, float] = {}
        self._has_told = False

    def want(self, entries: Sequence[Entry]) -> None:
        """Set what is needed next, nearest first."""
        self.wanted = tuple(entries[:MOST_NAMED])
        self._names = frozenset(entry.name for entry in self.wanted)
        if not self.wanted:
            return
        with self._lock:
            start, self._is_running = not self._is_running, True
        if start:
            threading.Thread(target=self._run, name="omniload-cache-ahead", daemon=True).start()

    def _run(self) -> None:
        while not self._is_stopped():
            wanted = self.wanted
            for place, entry in enumerate(wanted):
                if self._is_stopped() or self.wanted is not wanted or not self._try(entry, place):
                    break
            # all is here, or there is no room for more: until something changes, to look is a waste
            end = time.monotonic() + _REST_S
            while self.wanted is wanted and not self._is_stopped() and time.monotonic() < end:
                time.sleep(_IDLE_S)

    def _try(self, entry: Entry, place: int) -> bool:
        """Fetch a file if it is not here; False: go no further in the order."""
        now = time.monotonic()
        if self._settled.get(entry.name, 0.0) > now:
            return True
        if self._folder.is_here(entry):
            self._settled[entry.name] = now + _LOOK_AGAIN_S
            return True
        try:
            if self._folder.is_fetched_now(entry.name):
                return True
            return self._fetch(entry, place)
        except Stopped:
            return False
        except (OmniloadError, OSError) as error:
            # the first is news: a disk that is full, a server that is away; then all of them are
            level = logging.INFO if self._has_told else logging.WARNING
            self._has_told = True
            _log.log(level, "not fetched ahead: %s", error)
        except Exception:
            _log.exception("%s was not fetched ahead", entry.name)
        self._settled[entry.name] = time.monotonic() + _AFTER_FAILURE_S
        return True

    def _fetch(self, entry: Entry, place: int) -> bool:
        def sleep(seconds: float) -> None:
            end = time.monotonic() + seconds
            while True:
                if self._is_stopped() or entry.name not in self._names:
                    raise Stopped
                left = end - time.monotonic()
                if left <= 0:
                    return
                time.sleep(min(left, _IDLE_S))

        with self._folder.fetching(entry, stalled_s=self._storage.timeout_s):
            if self._folder.is_here(entry):
                return True
            if not try_reserve(self._folder, entry, place=place):
                self._let_go()
                return False
            download(self._transport, self._folder, entry, storage=self._storage, sleep=sleep)
            # nothing is opened here: it is marked as in use no longer than this takes
            os.close(self._folder.publish(entry))
        self.figures["fetched_files"] += 1
        self.figures["fetched_bytes"] += entry.num_bytes
        return True
