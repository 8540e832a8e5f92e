"""What the loader reads from: opened by what it is, and asked how its rows lie."""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.shards import Cache, Storage, is_url, open_shards
from omniload.source import RowSource

__all__ = ["open_source", "shard_starts", "wants_prefetch"]


def open_source(
    source: str | os.PathLike[str] | RowSource,
    *,
    cache: Cache | None = None,
    storage: Storage | None = None,
) -> RowSource:
    """Open what the user gave as the data.

    Args:
        source: an opened set; or a path or URL: a folder that `omniload preprocess` wrote, a folder
            of tars with an index, or the `.yaml` file of a mixture.
        cache: for shards at a URL, and for these only.
        storage: likewise.

    Raises:
        ConfigError: neither a path nor an opened set; a URL without a cache, or a cache without a
            URL.
        ShardError: no shards there, or damaged ones.
    """
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if is_url(path) or cache is not None or storage is not None:
            return open_shards(path, cache=cache, storage=storage)
        if path.endswith((".yaml", ".yml")) and (mixture := _module("omniload.mixture")):
            return _checked(mixture.open_mixture(path))
        if (tars := _module("omniload.tars")) and tars.is_tar_set(path):
            return _checked(tars.open_tars(path))
        return open_shards(path)
    if cache is not None or storage is not None:
        raise ConfigError(
            "cache= and storage= are for the URL of shards; this source is open already: expected "
            "none of them. Give them to open_shards(url, cache=, storage=)."
        )
    return _checked(source)


def shard_starts(source: RowSource) -> npt.NDArray[np.int64]:
    """Say where shards begin: int64 (num_shards + 1,), first row of each, then the rows in all.

    Cost: 10 us a shard.
    """
    rows, starts = range(len(source)), [0]
    for shard in range(1, len(source.shard_names)):
        starts.append(
            bisect.bisect_left(rows, shard, lo=starts[-1], key=lambda row: source.locate(row)[0])
        )
    return np.array([*starts, len(rows)], np.int64)


def wants_prefetch(source: RowSource) -> bool:
    """Say if it is of use to tell the source which shards come next: those far away."""
    return bool(getattr(source, "wants_prefetch", "://" in source.location))


def _checked(source: Any) -> RowSource:
    if not isinstance(source, RowSource):
        raise ConfigError(
            "source must be a folder that `omniload preprocess` wrote, or an opened set of rows "
            f"(omniload.source.RowSource), got {type(source).__name__}."
        )
    return source


def _module(name: str) -> Any:
    # parts of omniload that need more than shards do are loaded where they are used
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
