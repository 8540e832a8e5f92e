"""Opening a folder or URL by what lies there: shards, or tars with an index."""

from __future__ import annotations

import os
from pathlib import Path

from omniload.cache import (
    Cache,
    MissingFileError,
    Storage,
    check_path,
    is_url,
    join_url,
    shown_url,
)
from omniload.errors import ShardError
from omniload.shards import MANIFEST_NAME, ShardSet, open_shards
from omniload.tars.manifest import SET_NAME, is_tar_set
from omniload.tars.reader import TarSet, open_tars

__all__ = ["open_folder"]


def open_folder(
    path: str | os.PathLike[str], *, cache: Cache | None = None, storage: Storage | None = None
) -> ShardSet | TarSet:
    """Open shards or indexed tars, whichever lie there.

    Args:
        path: a folder or a URL, as for `open_shards` and `open_tars`.
        cache: for a URL: where copies lie.
        storage: for a URL: how to fetch.

    Raises:
        ConfigError: a URL without a cache, or a cache without a URL; a protocol that is not read.
        ShardError: neither is there, or it is damaged.
    """
    text = os.fspath(path)
    if not is_url(text):
        check_path(text)
        if is_tar_set(text):
            return open_tars(text, cache=cache, storage=storage)
        if not (Path(text) / MANIFEST_NAME).exists() and any(Path(text).glob("*.tar")):
            raise ShardError(
                f"{text} has tars without an index: make one with `omniload index {text}`, or "
                "shards with `omniload preprocess`."
            )
        return open_shards(text, cache=cache, storage=storage)
    try:
        return open_shards(text, cache=cache, storage=storage)
    except MissingFileError as error:
        if error.url != join_url(text, MANIFEST_NAME):
            raise
        no_shards = error
    try:
        return open_tars(text, cache=cache, storage=storage)
    except MissingFileError as error:
        if error.url != join_url(text, SET_NAME):
            raise
    raise ShardError(
        f"{shown_url(text)} must have a {MANIFEST_NAME} (of `omniload preprocess`) or a {SET_NAME} "
        f"(of `omniload index`), but has neither: {no_shards}"
    )
