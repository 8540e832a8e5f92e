"""Our own shards as input, to encode the same conversations with other settings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from omniload.conversations import RefusedError
from omniload.errors import ConfigError
from omniload.shards import ShardSet, open_shards
from omniload.tools.sources.base import SPAN_RECORDS, InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader
from omniload.tools.sources.records import reject

__all__ = ["read", "scan"]


def scan(file: InputFile) -> Iterator[Span | Rejection]:
    """Cut the rows into spans.

    Raises:
        ConfigError: the shards were written without the conversations.
        ShardError: missing or damaged files.
    """
    shards = open_shards(file.path)
    if len(shards) and shards.read(0).messages is None:
        raise ConfigError(
            f"{file.path} was written with --drop-text, so its conversations can't be encoded "
            "again. Preprocess from the raw data."
        )
    row_bytes = sum(shard.num_bytes for shard in shards.manifest.shards) // max(len(shards), 1)
    for first in range(0, len(shards), SPAN_RECORDS):
        stop = min(first + SPAN_RECORDS, len(shards))
        count = stop - first
        yield Span(start=first, stop=stop, first=first, count=count, num_bytes=count * row_bytes)


def read(file: InputFile, span: Span, loader: ImageLoader) -> Iterator[RawSample | Rejection]:
    """Read rows.

    Raises:
        ShardError: a shard is damaged.
    """
    shards = _opened(file.path)
    for row in range(span.start, span.stop):
        if not span.wants(row):
            continue
        record = shards.read(row)
        where = f"{record.shard} row {row}"
        if not record.messages:
            empty = RefusedError("no turn", "a conversation must have at least one turn, got none")
            yield reject(empty, file=file, number=row, where=where, key=record.key)
            continue
        yield RawSample(
            number=row,
            key=record.key,
            where=where,
            source=record.source,
            messages=record.messages,
            images=record.images,
        )


@lru_cache(maxsize=4)
def _opened(path: str) -> ShardSet:
    return open_shards(path)
