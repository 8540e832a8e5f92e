"""What the user says about the cache and about the storage behind a URL."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniload.errors import ConfigError

__all__ = ["Cache", "Storage"]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A folder of this machine that holds copies of files from elsewhere.

    All ranks and workers of a machine share it, and so may several jobs. It must be on a local
    file system, empty or made by omniload; nothing but our own files is ever deleted in it.

    Args:
        folder: where the copies lie; made if it does not exist.
        max_bytes: most bytes it may hold, files in the middle of a download counted in full; None:
            as many as the disk takes. When it is full, what is needed last goes first.

    Raises:
        ConfigError: a value is wrong.
    """

    folder: str | os.PathLike[str]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)):
            raise ConfigError(f"Cache.folder must be a path, got {type(self.folder).__name__}.")
        folder = os.path.expanduser(os.fspath(self.folder))  # noqa: PTH111 - leaves ~nobody alone
        if not folder or "\0" in folder:
            raise ConfigError(f"Cache.folder must be a path, got {folder!r}.")
        object.__setattr__(self, "folder", str(Path(folder).absolute()))
        most = self.max_bytes
        is_count = isinstance(most, int) and not isinstance(most, bool)
        if most is not None and not (is_count and most > 0):
            raise ConfigError(f"Cache.max_bytes must be a number of bytes or None, got {most!r}.")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How files are fetched from a URL.

    Args:
        timeout_s: seconds without a byte after which a connection counts as lost. So does one that
            brings less than 1 KiB/s on average over this time, or has not sent all its headers by
            then. It is also the longest that a server's Retry-After is obeyed. Except for `gs://`
            and the like, where fsspec's own limits hold.
        retries: how often in a row a file is tried again when a try ends early and brought less
            than 64 KiB more of it.
        backoff_s: seconds before the first such try; doubled each time up to 30 s, and varied by
            half so that machines don't come back all at once.
        options: for `s3://` and the like: storage options of fsspec, for example
            {"anon": True} or {"endpoint_url": ...}; for `http(s)://`: {"headers": {...}}. Not shown
            in messages.

    Raises:
        ConfigError: a value is wrong.
    """

    timeout_s: float = 60.0
    retries: int = 5
    backoff_s: float = 0.5
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, least in (("timeout_s", 1e-3), ("backoff_s", 0.0)):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not least <= value <= 1e6:
                raise ConfigError(f"Storage.{name} must be seconds, got {value!r}.")
        retries = self.retries
        if not isinstance(retries, int) or isinstance(retries, bool) or not 0 <= retries <= 1000:
            raise ConfigError(f"Storage.retries must be a count of at most 1000, got {retries!r}.")
        if not isinstance(self.options, Mapping):
            raise ConfigError(
                f"Storage.options must be a mapping, got {type(self.options).__name__}."
            )
