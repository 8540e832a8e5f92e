"""Files from buckets, through fsspec: s3:// is tested, others come as fsspec has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omniload.cache.config import Storage
from omniload.cache.transport import Interrupted, MissingFileError, Reply
from omniload.cache.url import shown_url
from omniload.errors import ConfigError

__all__ = ["FileSystemTransport"]

#: one request each: long enough that the way there and back doesn't count, short enough to resume
_BLOCK = 8 << 20

_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
}


class FileSystemTransport:
    """Reads through fsspec; see `Transport`.

    The file system is made on first use, and never shared with another process: some have threads,
    which a fork would leave behind.

    Args:
        protocol: of the URLs.
        storage: for its time limit and options.
    """

    def __init__(self, protocol: str, storage: Storage) -> None:
        self._protocol = protocol
        self._storage = storage
        self._lock = threading.Lock()
        self._made: Any = None

    @contextmanager
    def open(self, url: str, *, start: int, version: str) -> Iterator[Reply]:
        """Ask for a file from a byte on; see `Transport`."""
        system = self._system()
        with _translated(url):
            system.invalidate_cache()
            info = system.info(url)
        size = int(info["size"])
        found = str(info.get("ETag") or info.get("etag") or _modified(info) or "")
        if version != found or start > size:
            start = 0
        yield Reply(start=start, size=size, version=found, chunks=_chunks(system, url, start, size))

    def _system(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = _make(self._protocol, self._storage)
            return self._made


def _make(protocol: str, storage: Storage) -> Any:
    import fsspec

    options = dict(storage.options)
    ours = sorted({"asynchronous", "loop", "skip_instance_cache"} & set(options))
    if ours:
        raise ConfigError(
            f"Storage.options of {protocol}:// must not set {ours[0]}: threads are our matter."
        )
    if protocol == "s3":
        # botocore's own limits; what is given in the options goes first
        limits = {"connect_timeout": storage.timeout_s, "read_timeout": storage.timeout_s}
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
    try:
        # an instance of its own: fsspec would else hand out one that others use and change
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol, protocol)
        raise ConfigError(
            f"{protocol}:// needs the package {package}, which can't be imported: {error}. Install "
            f"it: pip install {package}."
        ) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Storage.options don't go with {protocol}://: {error}. They are the storage options "
            "of fsspec."
        ) from None


def _modified(info: dict[str, Any]) -> Any:
    return info.get("LastModified") or info.get("mtime") or info.get("last_modified")


def _chunks(system: Any, url: str, start: int, size: int) -> Iterator[bytes]:
    for at in range(start, size, _BLOCK):
        with _translated(url):
            block: bytes = system.cat_file(url, start=at, end=min(at + _BLOCK, size))
        yield block
        if len(block) < min(at + _BLOCK, size) - at:
            return  # cut short; asked for again from here


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn errors of a library into ours; those that may pass into Interrupted."""
    try:
        yield
    except FileNotFoundError:
        raise MissingFileError(
            f"{shown_url(url)} is not there. Check the URL; are the files complete there?", url=url
        ) from None
    except TimeoutError:
        raise Interrupted("no byte came in time") from None
    except Exception as error:  # libraries of clouds have trees of errors of their own
        name = type(error).__name__
        if isinstance(error, PermissionError) or "Credential" in name:
            raise MissingFileError(
                f"{shown_url(url)} can't be had: {error}. Give a key in Storage(options=...), or "
                "ask for access.",
                url=url,
            ) from None
        raise Interrupted(f"{name}: {error}") from None
