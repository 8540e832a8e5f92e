"""What each process needs next: a small file each, from which all can tell what is needed last."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from omniload.cache.locks import open_own, try_lock

__all__ = ["PINNED", "PublishedOrder", "read_orders"]

#: the place of a file that its process needs for as long as it lives
PINNED = -1

#: files named in an order; what is further ahead makes no difference
MOST_NAMED = 1024


class PublishedOrder:
    """The names of the files that this process needs next, where other processes see them.

    It holds while its file is open: when the process dies, the kernel takes the lock away, and
    whoever reads the orders next deletes it.

    Args:
        folder: the cache folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"order-{secrets.token_hex(8)}"
        # locked before it has its name, so that nobody takes it for one of a dead process
        fresh = folder / f"omniload-cache.{secrets.token_hex(8)}.partial"
        self._descriptor = open_own(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try_lock(self._descriptor)
        fresh.rename(self._path)
        self._names: tuple[str, ...] = ()

    def write(self, names: Sequence[str], *, pinned: Sequence[str] = ()) -> None:
        """Say what is needed next, nearest first, and what is needed always."""
        names = (*(f"!{name}" for name in pinned), *names[:MOST_NAMED])
        if names == self._names:
            return
        # a reader in between sees a part of it, which is no more wrong than what was there before
        data = "".join(f"{name}\n" for name in names).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))
        self._names = names

    def leave(self) -> None:
        """Close it in a process that it was forked into; it stays that of the other one."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Take it back."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def read_orders(folder: Path) -> dict[str, int]:
    """Read when each file is needed: its place in the order of the process that needs it first.

    PINNED for one that a process needs always.
    Orders of processes that are dead are deleted.
    """
    places: dict[str, int] = {}
    for path in folder.glob(f"order-{'[0-9a-f]' * 16}"):
        try:
            descriptor = open_own(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            if try_lock(descriptor):
                path.unlink(missing_ok=True)
                continue
            text = os.read(descriptor, 64 * (MOST_NAMED + 16))
        finally:
            os.close(descriptor)
        place = 0
        for name in text.decode("ascii", "replace").splitlines():
            if name.startswith("!"):
                places[name[1:]] = PINNED
                continue
            places[name] = min(place, places.get(name, place))
            place += 1
    return places
