"""Making room: what is needed last goes first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omniload.cache.entry import Entry, Found
from omniload.cache.folder import CacheFolder
from omniload.cache.locks import open_own
from omniload.cache.orders import PINNED, read_orders
from omniload.errors import ConfigError, ShardError

__all__ = ["free_some", "reserve", "try_reserve"]

#: a place after all others: nobody has named the file
_NEVER = 1 << 62
_PAUSE_S = 0.05
_PENDING_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _Victim:
    found: Found
    place: int


def try_reserve(folder: CacheFolder, entry: Entry, *, place: int) -> bool:
    """Make room for a file that is wanted at some place of this process's order, if that is right.

    Only files that are needed later, or by nobody, have to go for it.

    Returns:
        Whether its room is taken: its partial file is there then.
    """
    with folder.space():
        found = folder.scan()
        need = _needed(folder, entry, found)
        victims = [victim for victim in _victims(folder, entry, found) if victim.place > place]
        if need > sum(victim.found.num_bytes for victim in victims):
            return False
        # what went before while it was in use gives its room back a moment later
        if _evict(folder, victims, need - _pending(found)) < need:
            return False
        _take(folder, entry)
        return True


def reserve(
    folder: CacheFolder,
    entry: Entry,
    *,
    patience_s: float,
    let_go: Callable[[], None] = lambda: None,
) -> None:
    """Make room for a file that is needed now; whatever is not in use may have to go.

    Args:
        folder: the folder.
        entry: the file.
        patience_s: how long to wait for files that are in use, or being fetched by others without
            progress.
        let_go: called to close what this process has open of files that went.

    Raises:
        ConfigError: it is larger than the limit.
        ShardError: there is no room.
    """
    if folder.max_bytes is not None and entry.num_bytes > folder.max_bytes:
        raise ConfigError(
            f"Cache.max_bytes must hold at least the largest file: expected {entry.num_bytes}, "
            f"got {folder.max_bytes}."
        )
    begin = since = time.monotonic()
    pause_s, written_ns = 0.0, 0
    while True:
        with folder.space():
            found = folder.scan()
            need = _needed(folder, entry, found)
            now = time.monotonic()
            # a process that is stopped never gives the room of its files back
            pending = _pending(found) if now - begin < _PENDING_S else 0
            if _evict(folder, _victims(folder, entry, found), need - pending) >= need:
                _take(folder, entry)
                return
        latest_ns = max((item.used_ns for item in found if item.kind == "partial"), default=0)
        if latest_ns != written_ns:
            since, written_ns = now, latest_ns
        if now - since > patience_s:
            raise _no_room(folder, entry, found)
        let_go()
        time.sleep(pause_s)
        pause_s = _PAUSE_S


def free_some(folder: CacheFolder, entry: Entry, num_bytes: int) -> bool:
    """Make room on a disk that is full.

    Args:
        folder: the folder.
        entry: the file that is being written.
        num_bytes: how much is wanted.

    Returns:
        Whether anything went, or will go as soon as it is not in use.
    """
    with folder.space():
        found = folder.scan()
        victims = _victims(folder, entry, found)
        _evict(folder, victims, num_bytes)
        return bool(victims) or any(item.kind == "evicted" for item in found)


def _needed(folder: CacheFolder, entry: Entry, found: Sequence[Found]) -> int:
    """How many bytes must go before a file is within the limit; <= 0: none."""
    if folder.max_bytes is None:
        return 0
    used = sum(item.num_bytes for item in found)
    has_room = any(item.kind == "partial" and item.name == entry.name for item in found)
    return used + (0 if has_room else entry.num_bytes) - folder.max_bytes


def _victims(folder: CacheFolder, entry: Entry, found: Sequence[Found]) -> list[_Victim]:
    """List what may go, in the order in which it should: nobody's first, then what is far off."""
    places = read_orders(folder.path)
    victims = [
        _Victim(found=item, place=places.get(item.name, _NEVER))
        for item in found
        if item.kind != "evicted"
        and item.name != entry.name
        and places.get(item.name) != PINNED  # in use, so that nothing would be free
        and not (item.kind == "partial" and folder.is_fetched_now(item.name))
    ]
    return sorted(victims, key=lambda victim: (-victim.place, victim.found.used_ns))


def _evict(folder: CacheFolder, victims: Sequence[_Victim], need: int) -> int:
    """Evict until so many bytes are free, or will be; returns those that are free now."""
    free = pending = 0
    for victim in victims:
        if free + pending >= need:
            break
        if folder.evict(victim.found):
            free += victim.found.num_bytes
        elif victim.found.kind == "shard":
            pending += victim.found.num_bytes
    return free


def _pending(found: Sequence[Found]) -> int:
    return sum(item.num_bytes for item in found if item.kind == "evicted")


def _take(folder: CacheFolder, entry: Entry) -> None:
    os.close(open_own(folder.file(entry, "partial"), os.O_WRONLY | os.O_CREAT))


def _no_room(folder: CacheFolder, entry: Entry, found: Sequence[Found]) -> ShardError:
    used = dict.fromkeys(("shard", "partial", "evicted"), 0)
    for item in found:
        used[item.kind] += item.num_bytes
    return ShardError(
        f"the cache {folder.path} has no room for {entry.num_bytes} bytes: its limit is "
        f"{folder.max_bytes}, of which whole files take {used['shard']}, files that are being "
        f"fetched {used['partial']}, and files that went but are still in use {used['evicted']}. "
        "Raise Cache.max_bytes, or use fewer workers."
    )
