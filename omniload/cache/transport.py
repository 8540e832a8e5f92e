"""How bytes come from a URL: a reply that starts at a byte, and the errors that may pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from omniload.cache.config import Storage
from omniload.cache.url import protocol_of
from omniload.errors import ShardError

__all__ = ["Interrupted", "MissingFileError", "Reply", "Transport", "make_transport"]


class MissingFileError(ShardError):
    """The other end has no such file, or doesn't show it to us."""

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url

    def __reduce__(self) -> tuple[Any, ...]:
        return _missing, (str(self), self.url)


def _missing(message: str, url: str) -> MissingFileError:
    return MissingFileError(message, url=url)


class Interrupted(Exception):  # noqa: N818 - no error yet: it is tried again
    """The connection was lost, or the server is busy: trying again may help.

    Args:
        reason: what happened.
        wait_s: seconds after which the server wants to be asked again.
    """

    def __init__(self, reason: str, *, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a server sends.

    Args:
        start: first byte of it; 0 when the server doesn't resume, or the file is another one now.
        size: bytes of the whole file; None: the server doesn't say.
        version: names this version of the file, to resume it later; "": the server doesn't say.
        chunks: the bytes, in pieces. Raises Interrupted.
    """

    start: int
    size: int | None
    version: str
    chunks: Iterator[bytes]


class Transport(Protocol):
    """Gives the bytes of files; of one process, for all its threads."""

    def open(self, url: str, *, start: int, version: str) -> AbstractContextManager[Reply]:
        """Ask for a file from a byte on.

        Args:
            url: the file.
            start: first byte wanted.
            version: the one that the bytes before are of; "": not known.

        Raises:
            Interrupted: trying again may help.
            ShardError: it won't; MissingFileError: no such file, or not allowed.
            ConfigError: the library for this protocol is not installed, or refuses its options.
        """


def make_transport(url: str, storage: Storage) -> Transport:
    """Make what reads a URL; connections are made on first use."""
    if protocol_of(url) in ("http", "https"):
        from omniload.cache.http import HttpTransport

        return HttpTransport(storage)
    if protocol_of(url) == "s3":
        from omniload.cache.s3 import S3Transport

        return S3Transport(storage)
    from omniload.cache.filesystem import FileSystemTransport

    return FileSystemTransport(protocol_of(url), storage)
