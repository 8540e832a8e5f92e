"""The folder of a cache: what lies in it, what of it is whole, and who uses it.

| name | what |
|---|---|
| `omniload-cache.json` | the mark that the folder is ours |
| `HASH-SIZE.shard` | a whole, verified file; locked (shared) by whoever has it open |
| `HASH-SIZE.partial` | one that is being fetched, or was when its process died |
| `HASH-SIZE.origin` | from where, and which version, the bytes of the partial file are |
| `HASH-SIZE.RANDOM.evicted` | a file that had to go while it was in use; goes when it is not |
| `order-RANDOM` | what a process needs next; locked by it, so that its death shows |
| `lock-XX`, `lock-space` | held while a file is fetched; while room is made |
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omniload.cache.config import Cache
from omniload.cache.entry import Entry, Found
from omniload.cache.locks import locked, open_own, share, try_lock
from omniload.errors import ConfigError, ShardError

__all__ = ["CacheFolder"]

_MARKER = "omniload-cache.json"
_FORMAT = {"format": "omniload-cache", "version": 1}
_OURS = re.compile(
    r"omniload-cache\.json|omniload-cache\.[0-9a-f]{16}\.partial|lock-([0-9a-f]{2}|space)"
    r"|order-[0-9a-f]{16}|[0-9a-f]{32}-[0-9]{1,19}\.(shard|partial|origin|[0-9a-f]{16}\.evicted)"
)
_STUCK_S = 120.0


class CacheFolder:
    """The files of a cache folder; any number of processes may have one for the same folder.

    Args:
        cache: folder and limit.

    Raises:
        ConfigError: it can't be made or written to, or holds files that are not ours.
    """

    def __init__(self, cache: Cache) -> None:
        self.path = Path(cache.folder)
        self.max_bytes = cache.max_bytes
        try:
            self._take()
        except OSError as error:
            raise ConfigError(
                f"the cache folder {self.path} can't be used: {error.strerror} "
                f"({error.filename or self.path}). Give another one "
                "in Cache(folder=...)."
            ) from None

    def _take(self) -> None:
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it can't be written to")
        if self._is_marked():
            return
        # another process may be taking it at this moment, so our own names are no strangers
        strangers = sorted(
            item.name for item in self.path.iterdir() if not _OURS.fullmatch(item.name)
        )
        if strangers:
            raise ConfigError(
                f"the cache folder {self.path} must be empty or made by omniload, but it holds "
                f"{', '.join(strangers[:3])}{', ...' if len(strangers) > 3 else ''}. Nothing was "
                "changed. Give a new folder in Cache(folder=...)."
            )
        partial = self.path / f"omniload-cache.{secrets.token_hex(8)}.partial"
        with partial.open("w") as file:
            file.write(json.dumps(_FORMAT) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path / _MARKER)

    def _is_marked(self) -> bool:
        try:
            descriptor = open_own(self.path / _MARKER, os.O_RDONLY)
        except FileNotFoundError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            text = file.read(1000)
        if text.strip() != json.dumps(_FORMAT).encode():
            raise ConfigError(
                f"{self.path / _MARKER} must be the mark of a cache that this omniload reads, got "
                f"{text[:80]!r}. Nothing was changed. Give a new folder in Cache(folder=...)."
            )
        return True

    def file(self, entry: Entry, kind: str) -> Path:
        """Path of a "shard", "partial" or "origin" file."""
        return self.path / f"{entry.name}.{kind}"

    def fetching(self, entry: Entry, *, stalled_s: float) -> _Fetching:
        """Return the right to fetch a file, to be used in `with`; waits while another has it.

        Raises:
            ShardError: the other one makes no progress for `stalled_s` seconds.
        """
        return _Fetching(self, entry, stalled_s)

    @contextmanager
    def space(self) -> Iterator[None]:
        """Hold the right to make room."""

        def is_stuck(waited_s: float) -> str:
            if waited_s < _STUCK_S:
                return ""
            return (
                f"another process has held {self.path}/lock-space for {waited_s:.0f} s. Is it "
                "stopped? End it, then start the run again."
            )

        with locked(self.path / "lock-space", is_stuck=is_stuck):
            yield

    def open(self, entry: Entry) -> int | None:
        """Open a whole file and mark it as in use; None: it is not here.

        Returns:
            A descriptor; the mark stays until it and every map of it are closed.
        """
        path = self.file(entry, "shard")
        while True:
            try:
                descriptor = open_own(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                share(descriptor)
                # it may have been evicted between the two
                if _is_same(descriptor, path):
                    if os.fstat(descriptor).st_size != entry.num_bytes:
                        raise ShardError(
                            f"{path} was changed by somebody: it must have {entry.num_bytes} "
                            "bytes. Delete it; it is fetched again."
                        )
                    os.utime(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def is_here(self, entry: Entry) -> bool:
        """Say whether a whole file is here, at this moment."""
        return os.path.exists(f"{self.path}/{entry.name}.shard")  # noqa: PTH110 - a third of the time

    def publish(self, entry: Entry) -> int:
        """Give a fetched and verified file its name, marked as in use from the start.

        Returns:
            A descriptor, as from `open`.
        """
        partial = self.file(entry, "partial")
        descriptor = open_own(partial, os.O_RDONLY)
        try:
            share(descriptor)
            os.fsync(descriptor)
            with self.space():  # whoever counts sees it under one name, and no more
                partial.replace(self.file(entry, "shard"))
        except BaseException:
            os.close(descriptor)
            raise
        self.file(entry, "origin").unlink(missing_ok=True)
        return descriptor

    def scan(self) -> list[Found]:
        """List all that takes room, after deleting evicted files that nobody uses any more.

        It is exact for a caller that holds `space`.
        """
        found: list[Found] = []
        with os.scandir(self.path) as items:
            for item in items:
                name, _, kind = item.name.partition(".")
                kind = kind.rpartition(".")[2]
                is_ours = _OURS.fullmatch(item.name) is not None
                if not is_ours or kind not in ("shard", "partial", "evicted"):
                    continue
                if len(name) < 32:  # a mark that is being written
                    continue
                try:
                    facts = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                path = Path(item.path)
                if kind == "evicted" and _delete_unused(path):
                    continue
                size = int(name[33:]) if kind == "partial" else facts.st_size
                found.append(
                    Found(
                        path=path, name=name, kind=kind, num_bytes=size, used_ns=facts.st_mtime_ns
                    )
                )
        return found

    def evict(self, found: Found) -> bool:
        """Take a file out; the caller holds `space`.

        Returns:
            Whether its room is free now. A whole file that is in use stays readable, and keeps its
            room until it is not; a partial file that is being fetched stays.
        """
        if found.kind == "partial":
            return self._evict_partial(found)
        if _delete_unused(found.path):
            return True
        ghost = f"{found.name}.{secrets.token_hex(8)}.evicted"
        try:
            found.path.rename(self.path / ghost)
        except FileNotFoundError:
            return True
        return False

    def _evict_partial(self, found: Found) -> bool:
        lock = open_own(self._lock(found.name), os.O_RDWR | os.O_CREAT)
        try:
            if not try_lock(lock):
                return False
            found.path.unlink(missing_ok=True)
            found.path.with_suffix(".origin").unlink(missing_ok=True)
            return True
        finally:
            os.close(lock)

    def is_fetched_now(self, name: str) -> bool:
        """Say whether a process is fetching the file of an entry, or one that shares its lock."""
        lock = open_own(self._lock(name), os.O_RDWR | os.O_CREAT)
        try:
            return not try_lock(lock)
        finally:
            os.close(lock)

    def free_bytes(self) -> int:
        """Bytes that the file system of the folder has left for us."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def _lock(self, name: str) -> Path:
        # of a fixed number, because to delete a lock is never safe; rarely do two files share one
        return self.path / f"lock-{name[:2]}"


class _Fetching:
    """The right to fetch one file."""

    def __init__(self, folder: CacheFolder, entry: Entry, stalled_s: float) -> None:
        self._folder = folder
        self._entry = entry
        self._stalled_s = stalled_s
        self._seen = -1
        self._since_s = 0.0
        self._held = locked(folder._lock(entry.name), is_stuck=self._is_stuck)

    def __enter__(self) -> None:
        self._held.__enter__()

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(*error)  # type: ignore[arg-type]

    def _is_stuck(self, waited_s: float) -> str:
        """Complain when the partial file of the other process doesn't grow."""
        path = self._folder.file(self._entry, "partial")
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        if size != self._seen:
            self._seen, self._since_s = size, waited_s
        if waited_s - self._since_s < self._stalled_s:
            return ""
        return (
            f"another process fetches {path.name} and has made no progress for "
            f"{waited_s - self._since_s:.0f} s, at {size} of {self._entry.num_bytes} bytes. Is it "
            "stopped? End it, then start the run again."
        )


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _delete_unused(path: Path) -> bool:
    """Delete a file unless it is in use; True: it is gone."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(descriptor):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)
