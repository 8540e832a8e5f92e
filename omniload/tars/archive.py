"""An open tar: its members one after the other, and the content of any of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import xxhash

from omniload.errors import ConfigError, ShardError
from omniload.tars.members import FILE, Damage, Member, Window, members
from omniload.tars.samples import is_image

__all__ = ["Archive", "digest", "has_image", "read_exactly", "refuse_no_tar"]

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Archive:
    """A tar open for reading; use it as a context manager.

    Args:
        path: a regular file.

    Attributes:
        path: as given.
        descriptor: of the open file.
        size: bytes of the file when it was opened.

    Raises:
        ShardError: it can't be read.
        ConfigError: not a regular file, or compressed as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # not blocking: a named pipe would wait for a writer for ever
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ShardError(f"{path} can't be read: {error.strerror}.") from None
        try:
            facts = os.fstat(self.descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"a tar must be a regular file, got {path}.")
            self.size = facts.st_size
            self.changed_ns = facts.st_mtime_ns
            _refuse_packed(path, os.pread(self.descriptor, 8, 0))
        except BaseException:
            os.close(self.descriptor)
            raise
        self._window = Window(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)

    def members(self, start: int = 0, stop: int | None = None) -> Iterator[Member | Damage]:
        """Walk the members between two bytes; without them, all."""
        whole = start == 0 and stop is None
        return members(self._window, start, self.size if stop is None else stop, whole=whole)

    def content(self, member: Member) -> bytes:
        """Read a member.

        Raises:
            ShardError: the archive was cut since its headers were read.
        """
        return read_exactly(self.descriptor, member.start, member.num_bytes, self.path)

    def digest(self, member: Member) -> int:
        """Take the checksum of a member's content, xxh3 of 64 bits."""
        window = self._window
        if member.num_bytes <= window.capacity:
            return xxhash.xxh3_64_intdigest(window.view(member.start, member.num_bytes))
        running = xxhash.xxh3_64()
        for start in range(member.start, member.start + member.num_bytes, window.capacity):
            left = member.start + member.num_bytes - start
            running.update(window.view(start, min(left, window.capacity)))
        return running.intdigest()

    def whole_digest(self) -> str:
        """Take the checksum of all bytes, xxh3 of 128 bits, 32 hexadecimal digits."""
        running = xxhash.xxh3_128()
        for start in range(0, self.size, self._window.capacity):
            running.update(self._window.view(start, self._window.capacity))
        return running.hexdigest()


def digest(content: bytes) -> int:
    """Take the checksum of a content in memory, as `Archive.digest` does."""
    return xxhash.xxh3_64_intdigest(content)


def read_exactly(descriptor: int, start: int, count: int, path: Path) -> bytes:
    """Read so many bytes of a file.

    Raises:
        ShardError: it has fewer, or can't be read.
    """
    try:
        data = os.pread(descriptor, count, start)
        while len(data) < count:  # one call gives 2 GiB at most
            more = os.pread(descriptor, count - len(data), start + len(data))
            if not more:
                raise ShardError(
                    f"{path} must have the bytes {start} to {start + count}, got {len(data)} of "
                    "them: it was cut short after it was indexed. Copy it again, or run `omniload "
                    "index` again."
                )
            data += more
    except OSError as error:
        raise ShardError(f"{path} can't be read: {error.strerror}.") from None
    return data


def refuse_no_tar(archive: Archive) -> None:
    """Refuse a file without a member that does not even begin like a tar.

    Raises:
        ConfigError: it is none.
    """
    head = os.pread(archive.descriptor, 512, 0)
    if head.strip(b"\0") and head[257:262] != b"ustar":
        raise ConfigError(f"{archive.path} is not a tar: it has no whole member.")


def _refuse_packed(path: Path, head: bytes) -> None:
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise ConfigError(
                f"{path} is compressed with {name}, so its samples can't be reached one by one. "
                "Unpack it to a plain .tar first; image files don't get smaller anyway."
            )


def has_image(path: Path) -> bool:
    """Tell whether any member of a tar is an image; found at once where there are some."""
    with Archive(path) as archive:
        return any(
            isinstance(member, Member) and member.kind == FILE and is_image(member)
            for member in archive.members()
        )
