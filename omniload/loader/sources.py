"""What the loader reads from: opened by what it is, and asked how its rows lie."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.mixture import open_mixture
from omniload.shards import Cache, Storage, is_url
from omniload.source import RowSource, shard_starts
from omniload.tars import open_folder

Int64Array = npt.NDArray[np.int64]

__all__ = ["cache_figures", "open_source", "row_layout", "wants_prefetch"]


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
        cache: for a URL, of a mixture's sets too, and for these only.
        storage: likewise.

    Raises:
        ConfigError: neither a path nor an opened set; a URL without a cache, or a cache without a
            URL.
        ShardError: no shards there, or damaged ones.
    """
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if path.endswith((".yaml", ".yml")) and not is_url(path):
            return _checked(open_mixture(path, cache=cache, storage=storage))
        return open_folder(path, cache=cache, storage=storage)
    if cache is not None or storage is not None:
        raise ConfigError(
            "cache= and storage= are for a URL; this source is open already: expected none of "
            "them. Give them to open_shards(url, cache=, storage=) or open_tars."
        )
    return _checked(source)


def row_layout(source: RowSource) -> tuple[Int64Array, Int64Array | None]:
    """Say how rows lie: where shards begin, and where the sets of a mixture do; None: no mixture.

    Args:
        source: the rows of an epoch.
    """
    sets = getattr(source, "set_starts", None)
    return shard_starts(source), None if sets is None else np.asarray(sets, np.int64)


def wants_prefetch(source: RowSource) -> bool:
    """Say if it is of use to tell the source which shards come next: those far away."""
    return bool(getattr(source, "wants_prefetch", "://" in source.location))


def cache_figures(source: RowSource) -> dict[str, float]:
    """Say what this process did with the caches of a source, those of the sets of a mixture too.

    Returns:
        As `omniload.cache.CacheClient.figures`; empty where nothing is far away.
    """
    sets = getattr(source, "sets", None)
    found: dict[str, float] = {}
    for one in [source] if sets is None else sets.values():
        files = getattr(one, "remote", None) or getattr(one, "files", None)  # of shards, of tars
        client = getattr(files, "client", None)
        for name, value in ({} if client is None else client.figures).items():
            found[name] = found.get(name, 0.0) + value
    return found


def _checked(source: Any) -> RowSource:
    if not isinstance(source, RowSource):
        raise ConfigError(
            "source must be a folder that `omniload preprocess` wrote, or an opened set of rows "
            f"(omniload.source.RowSource), got {type(source).__name__}.{_other_way(source)}"
        )
    return source


def _other_way(source: Any) -> str:
    """Say what takes what is no source."""
    if isinstance(source, (list, tuple)) and all(
        isinstance(one, (str, os.PathLike, RowSource)) for one in source
    ):
        return (
            " Several sets make a mixture: omniload.Mixture([omniload.MixtureSet(source=...), "
            "...])."
        )
    if isinstance(source, Iterable) or callable(source) or hasattr(source, "__getitem__"):
        return (
            " omniload.StreamLoader takes samples as they come; where you know all lengths "
            "beforehand, omniload.PlanBatchSampler plans for a data set of your own."
        )
    return ""
