"""Opening what a command is given as data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniload.cache import Cache
    from omniload.source import RowSource

__all__ = ["is_mixture_file", "open_data"]


def is_mixture_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is that of a mixture's YAML file."""
    return os.fspath(path).endswith((".yaml", ".yml")) and "://" not in os.fspath(path)


def open_data(path: str | os.PathLike[str], *, cache: Cache | None = None) -> RowSource:
    """Open shards, indexed tars, or a mixture, as `omniload.DataLoader` does; loads no torch.

    Args:
        path: a folder, the URL of shards, or the YAML file of a mixture.
        cache: for URLs.

    Raises:
        ConfigError: a URL without a cache, or a mixture file that can't be used.
        ShardError: no data there, or damaged data.
    """
    from omniload.mixture import MixtureSet, open_mixture
    from omniload.mixture.sets import open_set

    if is_mixture_file(path):
        return open_mixture(path, cache=cache)
    return open_set(MixtureSet(source=os.fspath(path), cache=cache))
