"""Files through fsspec: file:// is tested, gs:// and the like come as fsspec has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omniload.cache.config import Storage
from omniload.cache.transport import Interrupted, MissingFileError, Reply
from omniload.cache.url import protocol_of, shown_text, shown_url
from omniload.errors import ConfigError, OmniloadError

__all__ = ["FileSystemTransport", "make_file_system", "translated"]

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
#: errors that trying again does not mend: the options, or the URL, are wrong
_WRONG = {"TypeError", "ValueError", "ParamValidationError", "ProfileNotFound"}


class FileSystemTransport:
    """Reads through fsspec; see `Transport`.

    The file system is made on first use, and never shared with another process: some have threads,
    which a fork would leave behind. How long a block of 8 MiB takes is the library's matter.

    Args:
        protocol: of the URLs.
        storage: for its options.
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
        with translated(url):
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
                self._made = make_file_system(self._protocol, self._storage)
            return self._made


def make_file_system(
    protocol: str, storage: Storage, *, limits: Mapping[str, Any] | None = None
) -> Any:
    """Make a file system of fsspec, of its own for whoever asks.

    Args:
        protocol: "s3" and the like.
        storage: for its options.
        limits: what `config_kwargs` has unless the options say otherwise.

    Raises:
        ConfigError: its package is not installed, or refuses the options.
    """
    import fsspec

    options = dict(storage.options)
    ours = sorted({"asynchronous", "loop", "skip_instance_cache"} & set(options))
    if ours:
        raise ConfigError(
            f"Storage.options of {protocol}:// must not set {ours[0]}: threads are our matter."
        )
    try:
        if limits is not None:
            options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
        # an instance of its own: fsspec would else hand out one that others use and change
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol, protocol)
        raise ConfigError(
            f"{protocol}:// needs the package {package}, which can't be imported: {error}. Install "
            f"it: pip install {package}."
        ) from None
    except (TypeError, ValueError) as error:
        raise _wrong_options(protocol, error) from None


def _wrong_options(protocol: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"URL or Storage.options don't go with {protocol}://: {type(error).__name__}: "
        f"{shown_text(error)}. They are the storage options of fsspec."
    )


def _modified(info: dict[str, Any]) -> Any:
    return info.get("LastModified") or info.get("mtime") or info.get("last_modified")


def _chunks(system: Any, url: str, start: int, size: int) -> Iterator[bytes]:
    for at in range(start, size, _BLOCK):
        with translated(url):
            block: bytes = system.cat_file(url, start=at, end=min(at + _BLOCK, size))
        yield block
        if len(block) < min(at + _BLOCK, size) - at:
            return  # cut short; asked for again from here


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn errors of a library into ours; those that may pass into Interrupted."""
    try:
        yield
    except OmniloadError:
        raise
    except FileNotFoundError:
        raise MissingFileError(
            f"{shown_url(url)} is not there. Check the URL; are the files complete there?", url=url
        ) from None
    except TimeoutError:
        raise Interrupted("no byte came in time") from None
    except Exception as error:  # libraries of clouds have trees of errors of their own
        # s3fs puts the numbers of the system in place of what the server says
        told = error if error.__cause__ is None else error.__cause__
        name = type(error).__name__
        if isinstance(error, PermissionError) or "Credential" in name:
            raise MissingFileError(
                f"{shown_url(url)} can't be had: {shown_text(told)}. Give a key in "
                "Storage(options=...), or ask for access.",
                url=url,
            ) from None
        if name in _WRONG:
            raise _wrong_options(protocol_of(url), error) from None
        raise Interrupted(f"{type(told).__name__}: {shown_text(told)}") from None
